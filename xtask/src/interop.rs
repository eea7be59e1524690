//! `cargo xtask interop`: nodes of this project and of two releases of Mooncake C++ in the same
//! clusters.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Mutex;

use crate::peer::{in_own_network, install, install_later, path, run_in_own_network};
use crate::run::{Programs, Result, cargo, step};

/// Parts of the run besides the scripts of [`crate::python::matrix`].
const PARTS: [&str; 3] = ["clusters", "calls", "engines"];
/// Scripts that run at once.
const SCRIPTS_AT_ONCE: usize = 3;

/// Runs the mixed clusters, the single calls, the mixed engines, and the scripts for the Python
/// packages. Words choose some of them: those of [`PARTS`], and names of scripts. With
/// `write_table`, replaces the table of versions in docs/compatibility.md.
pub(crate) fn run(chosen: &[&str], write_table: bool) -> Result {
    let is_chosen = |part: &str| chosen.is_empty() || chosen.contains(&part);
    let python = install()?;
    let later = install_later();
    step("build");
    let programs = Programs::checked()?;
    let scripts = crate::python::matrix(&python, later.as_deref(), programs, write_table)?;
    let name = |words: &[String]| Path::new(&words[1]).file_stem()?.to_str().map(str::to_owned);
    let mut parts: BTreeSet<String> = scripts.iter().filter_map(|(_, words)| name(words)).collect();
    parts.extend(PARTS.map(str::to_owned));
    if let Some(unknown) = chosen.iter().find(|word| !parts.contains(**word)) {
        let parts = parts.into_iter().collect::<Vec<_>>().join(", ");
        return Err(format!("no such part of interop: {unknown}; choose from {parts}"));
    }
    for (python, version) in [(Some(&python), "0.3.13"), (later.as_ref(), "0.3.14")] {
        let Some(python) = python else { continue };
        if is_chosen(PARTS[0]) {
            step(&format!("mixed clusters, Mooncake C++ {version}"));
            let (binary, master) = (programs.path("interop"), programs.path("mooncake_master"));
            let words = [binary, "--python".into(), path(python), "--master".into(), master];
            in_own_network(&words)?;
        }
        if is_chosen(PARTS[1]) {
            calls(python, if version == "0.3.13" { LIVE } else { &LIVE[..LIVE_OF_EVERY_RELEASE] })?;
        }
        if is_chosen(PARTS[2]) {
            engines(&path(python), programs)?;
        }
    }
    let is_chosen_script = |words: &[String]| name(words).is_some_and(|name| is_chosen(&name));
    // The last ones take longest.
    run_scripts(scripts.into_iter().rev().filter(|(_, words)| is_chosen_script(words)).collect())
}

/// Runs scripts, several at a time, each in a network of its own. Most of their time is waiting for
/// leases and masters. The output of each is shown at its end.
fn run_scripts(scripts: VecDeque<(&'static str, Vec<String>)>) -> Result {
    let (waiting, failed) = (Mutex::new(scripts), Mutex::new(Vec::new()));
    let next = || waiting.lock().ok()?.pop_front();
    let run_all = || {
        while let Some((title, words)) = next() {
            let (output, ended) = run_in_own_network(&words).captured();
            // The lock keeps the outputs of scripts apart.
            let Ok(mut failed) = failed.lock() else { return };
            step(&format!("{title}, ended"));
            println!("{output}");
            failed.extend(ended.err());
        }
    };
    std::thread::scope(|scope| (0..SCRIPTS_AT_ONCE).for_each(|_| drop(scope.spawn(run_all))));
    let failed = failed.into_inner().map_err(|_| "a script has no outcome".to_owned())?;
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Number of tests in [`LIVE`], from the front, that a master of every release passes. The others
/// compare with results of 0.3.13.
const LIVE_OF_EVERY_RELEASE: usize = 2;

/// Tests that each need a new master of Mooncake C++: program, test, and flags of that master.
const LIVE: &[(&str, &str, &str)] = &[
    ("protocol", "live::a_client_waits_for_free_space_on_a_mooncake_cpp_master", ""),
    ("store_c", "a_mooncake_cpp_master_serves_c_programs", ""),
    ("protocol", "live::a_mooncake_cpp_master_answers_every_call", ""),
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
fn calls(python: &Path, tests: &[(&str, &str, &str)]) -> Result {
    step("every call to a master of Mooncake C++");
    let test = "test -q --workspace --all-features --test protocol --test http --test store_c";
    cargo(&[test.split(' ').collect::<Vec<_>>(), vec!["--no-run"]].concat()).run()?;
    let (python, master) = (path(python), path(&python.with_file_name("mooncake_master")));
    for (program, name, flags) in tests {
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
