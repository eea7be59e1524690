//! Responses of the master to every step of a conversation, compared with those of Mooncake C++ in
//! `recorded.txt`. Each step with another response is a row of `docs/compatibility.md`.
#![allow(
    clippy::disallowed_methods,
    reason = "a Mooncake C++ master has its own time; its address comes from the environment"
)]

mod steps;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::server::{Server, ServerOptions};
use mooncake_store::protocol::service::MasterService;

use steps::{Pass, Said, talk};

fn options() -> MasterOptions {
    MasterOptions {
        put_discard: Duration::from_secs(2),
        put_release: Duration::from_secs(5),
        lease_ttl: Duration::from_millis(1500),
        max_soft_pin_ttl: Duration::from_secs(10),
        soft_pin_ttl: Duration::from_secs(2),
        client_ttl: Duration::from_secs(600),
        // The recorded conversation waits at most this long before it uses remounted memory.
        remount_rest: Some(Duration::from_secs(2)),
        ..MasterOptions::default()
    }
}

struct Hand<'m>(&'m ManualClock, &'m Master);

impl Pass for Hand<'_> {
    async fn pass(&mut self, seconds: f64) {
        self.0.advance(Duration::from_secs_f64(seconds));
        self.1.tick();
    }
}

async fn ours() -> Said {
    let clock = Arc::new(ManualClock::new());
    let master =
        Master::with_parts(options(), &Default::default(), &Default::default(), clock.clone(), 7).unwrap();
    let master = Arc::new(master);
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let running = server.start(Arc::new(MasterService(master.clone())));
    let rpc = RpcClient::new(running.local_addr().to_string(), RpcOptions::default());
    let said = talk(&rpc, Hand(&clock, &master)).await;
    running.stop().await;
    said
}

struct Real;

impl Pass for Real {
    async fn pass(&mut self, seconds: f64) {
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    }
}

const RECORDED: &str = include_str!("recorded.txt");

fn recorded() -> Said {
    RECORDED.lines().filter_map(|line| line.split_once('\t')).map(|(a, b)| (a.into(), b.into())).collect()
}

/// Returns the steps that the document lists as different.
fn listed() -> BTreeSet<String> {
    let documented = include_str!("../../../../docs/compatibility.md");
    let (_, section) = documented.split_once("\n## Responses to single calls\n").expect("that section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let steps = rows.filter_map(|row| row.split(" | ").next());
    steps.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

#[tokio::test]
async fn our_master_answers_like_mooncake_cpp_but_for_the_list() {
    let (ours, theirs) = (ours().await, recorded());
    let steps = |said: &Said| said.iter().map(|(step, _)| step.clone()).collect::<Vec<_>>();
    assert_eq!(steps(&ours), steps(&theirs), "recorded from another conversation");
    let mut otherwise = BTreeSet::new();
    let mut unlisted = Vec::new();
    let listed = listed();
    for ((step, here), (_, there)) in ours.iter().zip(&theirs).filter(|(a, b)| a != b) {
        otherwise.insert(step.clone());
        if !listed.contains(step) {
            unlisted.push(format!("{step}: {here}; Mooncake C++: {there}"));
        }
    }
    assert!(unlisted.is_empty(), "not in docs/compatibility.md:\n{}", unlisted.join("\n"));
    let idle: Vec<_> = listed.difference(&otherwise).collect();
    assert!(idle.is_empty(), "listed in docs/compatibility.md, but answered alike: {idle:?}");
}

/// Compares Mooncake C++ with its record. With `MOONCAKE_RECORD=file`, the test writes a new
/// record.
#[tokio::test]
#[ignore = "needs a master of Mooncake C++; cargo xtask interop runs it"]
async fn a_mooncake_cpp_master_answers_as_recorded() {
    let address = std::env::var("MOONCAKE_PEER_MASTER").expect("MOONCAKE_PEER_MASTER=host:port of a master");
    let said = talk(&RpcClient::new(address, RpcOptions::default()), Real).await;
    if let Ok(file) = std::env::var("MOONCAKE_RECORD") {
        let lines: Vec<_> = said.iter().map(|(step, answer)| format!("{step}\t{answer}\n")).collect();
        std::fs::write(file, lines.concat()).unwrap();
        return;
    }
    let recorded = recorded();
    let other: Vec<_> = said.iter().zip(&recorded).filter(|(now, then)| now != then).collect();
    assert!(other.is_empty() && said.len() == recorded.len(), "answered otherwise than recorded: {other:#?}");
}
