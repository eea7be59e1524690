//! Traces of requests that are not part of the project.

use std::path::PathBuf;

use mooncake_core::testkit::workloads::Requests;

/// Reads a trace of the folder that `MOONCAKE_TRACES` names.
#[allow(clippy::disallowed_methods, reason = "the traces are named by whoever runs the tests")]
pub(crate) fn trace(name: &str) -> Option<Requests> {
    let Some(text) = std::env::var_os("MOONCAKE_TRACES")
        .and_then(|folder| std::fs::read_to_string(PathBuf::from(folder).join(name)).ok())
    else {
        println!("skipped: MOONCAKE_TRACES names no folder with {name}");
        return None;
    };
    let ids = |line: &str| {
        let list = line.split_once("\"hash_ids\"").unwrap().1.split_once('[').unwrap().1;
        let list = list.split_once(']').unwrap().0;
        list.split(',').map(|id| id.trim().parse().unwrap()).collect()
    };
    Some(text.lines().map(ids).collect())
}
