//! `cargo xtask interop`: nodes of this project and of Mooncake C++ in the same clusters.

use std::path::Path;

use crate::peer::{in_own_network, install, path};
use crate::run::{Programs, Result, cargo, step};

/// Runs the mixed clusters, the single calls, the mixed engines, and the Python packages.
pub(crate) fn run() -> Result {
    let python = install()?;
    step("build");
    let programs = Programs::checked()?;
    step("mixed clusters");
    let (binary, master) = (programs.path("interop"), programs.path("mooncake_master"));
    let words = [binary, "--python".into(), path(&python), "--master".into(), master];
    in_own_network(&words)?;
    calls(&python)?;
    engines(&path(&python), programs)?;
    for (title, words) in crate::python::matrix(&python, programs)? {
        step(title);
        in_own_network(&words)?;
    }
    Ok(())
}

/// Tests that each need a new master of Mooncake C++: program, test, and flags of that master.
const LIVE: &[(&str, &str, &str)] = &[
    ("protocol", "live::a_mooncake_cpp_master_answers_every_call", ""),
    ("protocol", "live::a_client_waits_for_free_space_on_a_mooncake_cpp_master", ""),
    ("store_c", "a_mooncake_cpp_master_serves_c_programs", ""),
    (
        "http",
        "the_client_conforms_on_a_real_server",
        "--enable_http_metadata_server=true --http_metadata_server_port=21271",
    ),
    (
        "protocol",
        "conversation::a_mooncake_cpp_master_answers_as_recorded",
        "--put_start_discard_timeout_sec=2 --put_start_release_timeout_sec=5 \
         --default_kv_lease_ttl=1500 --max_kv_soft_pin_ttl=10000 --default_kv_soft_pin_ttl=2000 \
         --client_ttl=600",
    ),
];

/// Sends each call to a master of Mooncake C++.
fn calls(python: &Path) -> Result {
    step("every call to a master of Mooncake C++");
    let test = "test -q --workspace --all-features --test protocol --test http --test store_c";
    cargo(&[test.split(' ').collect::<Vec<_>>(), vec!["--no-run"]].concat()).run()?;
    let (python, master) = (path(python), path(&python.with_file_name("mooncake_master")));
    for (program, name, flags) in LIVE {
        let test = format!("test -q --workspace --all-features --test {program}");
        // A name without a test would pass, so the script looks for the number of passed tests.
        let run = format!(
            "{master} --rpc_port=21071 --metrics_port=21171 {flags} >/dev/null 2>&1 & \
             until {python} -c 'import socket; \
             socket.create_connection((\"127.0.0.1\", 21071), 1)' 2>/dev/null; \
             do kill -0 $! || exit 1; done; \
             said=$(METADATA_URL=http://127.0.0.1:21271/metadata \
             MOONCAKE_PEER_MASTER=127.0.0.1:21071 \
             \"${{CARGO:-cargo}}\" {test} -- --ignored --exact {name} 2>&1); \
             status=$?; kill $!; wait; echo \"$said\"; \
             test $status = 0 && echo \"$said\" | grep -q '1 passed'"
        );
        in_own_network(&["sh".into(), "-c".into(), run])?;
    }
    Ok(())
}

/// Runs transfer engines of both projects in all pairs.
fn engines(python: &str, programs: Programs) -> Result {
    step("two engines");
    let words = [
        ("--python", python.to_owned()),
        ("--master", programs.path("mooncake_master")),
        ("--metadata-server", programs.path("mooncake_http_metadata_server")),
    ];
    let words = words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
    let words: Vec<String> = std::iter::once(programs.path("engine_interop")).chain(words).collect();
    in_own_network(&words)
}
