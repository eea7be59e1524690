//! `cargo xtask bench`: measurements, alone or beside Mooncake C++ in the same run.

use std::path::Path;

use crate::peer::{in_own_network, install, path};
use crate::run::{Programs, Result, cargo, command, step};

/// Runs `cargo xtask bench` with these arguments.
pub(crate) fn run(words: &[&str]) -> Result {
    if words.contains(&"--master") {
        return bench_master();
    }
    if let ["--master-size", objects @ ..] = words {
        return bench_master_size(objects.first().copied().unwrap_or("10000000"), &[]);
    }
    if let ["--snapshots", objects @ ..] = words {
        return bench_master_size(objects.first().copied().unwrap_or("1000000"), &["--snapshots"]);
    }
    if let ["--restart", objects @ ..] = words {
        return bench_restart(objects.first().copied().unwrap_or("1000000"));
    }
    let peer = words.contains(&"--peer");
    if words.contains(&"--engine") {
        return bench_engines(peer);
    }
    let names: Vec<&str> = words.iter().copied().filter(|w| !w.starts_with("--")).collect();
    if words.contains(&"--python") {
        return bench_python(peer, &names);
    }
    if words.contains(&"--structured") {
        return bench_structured(peer, &names);
    }
    if words.contains(&"--pg") {
        return bench_groups("pg.py", "--rows", &names);
    }
    if words.contains(&"--ep") {
        return bench_groups("ep.py", "--shapes", &names);
    }
    if words.contains(&"--offload") {
        return bench_offload(peer);
    }
    if let Some(unknown) = words.iter().find(|w| w.starts_with("--") && **w != "--peer") {
        return Err(format!("unknown option: {unknown}; bench has --peer"));
    }
    if peer {
        let python = install()?;
        let binary = Programs::fast(&["store_bench"])?.path("store_bench");
        return in_own_network(&[binary, "--peer".into(), path(&python)]);
    }
    let all = ["allocator", "eviction", "hot_cache", "local", "look_ups", "struct_pack", "tcp", "store"];
    if let Some(unknown) = names.iter().find(|n| !all.contains(n)) {
        return Err(format!("unknown bench: `{unknown}`; choose from {}", all.join(", ")));
    }
    for name in all.iter().filter(|n| names.is_empty() || names.contains(n)) {
        step(&format!("bench {name}"));
        match *name {
            "store" => Programs::fast(&["store_bench"])?.run("store_bench", &[]).run()?,
            name => cargo(&["bench", "-p", "mooncake-benches", "--bench", name]).run()?,
        }
    }
    Ok(())
}

/// Measures process groups, or what is built on them, beside gloo. Words are values of `option`.
fn bench_groups(script: &str, option: &str, words: &[&str]) -> Result {
    let Some(python) = crate::python::install_torch()? else { return Ok(()) };
    let script = path(&crate::run::root().join("mooncake-python/benches").join(script));
    step("bench of process groups");
    let chosen: &[&str] = if words.is_empty() { &[] } else { &[option] };
    command(&python, &[&script]).args(chosen).args(words).run()
}

/// Measures objects of the Python package on their way to a disk and back, with `peer` beside the
/// package of Mooncake C++.
fn bench_offload(peer: bool) -> Result {
    let Some(ours) = crate::python::install()? else { return Ok(()) };
    let root = crate::run::root();
    let folder = path(&root.join("target/offload"));
    let script = path(&root.join("mooncake-python/benches/offload.py"));
    let flags = "--enable_offload=true --default_kv_lease_ttl=500";
    step("bench of objects on disks");
    beside_masters(&ours, peer, 21063, flags, vec![script, HOST.into(), folder], &[])
}

/// Measures the Python package, the Rust interface and, with `peer`, the package of Mooncake C++,
/// row by row in turn. Words choose the rows whose names contain one of them.
fn bench_python(peer: bool, rows: &[&str]) -> Result {
    let Some(ours) = crate::python::install()? else { return Ok(()) };
    let rust = Programs::fast(&["binding_bench"])?.path("binding_bench");
    let script = path(&crate::run::root().join("mooncake-python/benches/store.py"));
    let mut last = vec!["--rust".into(), rust, "--rows".into()];
    last.extend(rows.iter().map(|&row| row.to_owned()));
    step("bench of the Python package");
    beside_masters(&ours, peer, 21061, "", vec![script, HOST.into()], &last)
}

/// Measures structured objects of the Python package, with `peer` beside the package of Mooncake
/// C++. Words choose the rows whose names contain one of them.
fn bench_structured(peer: bool, rows: &[&str]) -> Result {
    let Some(ours) = crate::python::install()? else { return Ok(()) };
    let script = path(&crate::run::root().join("mooncake-python/benches/structured.py"));
    let mut last = vec![String::from("--rows")];
    last.extend(rows.iter().map(|&row| row.to_owned()));
    step("bench of structured objects");
    beside_masters(&ours, peer, 21065, "", vec![script, HOST.into()], &last)
}

/// Address of the masters in the network namespace.
const HOST: &str = "10.213.0.1";

/// Runs a script with the address and the Python of a master of this project and, with `peer`, of
/// Mooncake C++.
fn beside_masters(
    ours: &str,
    peer: bool,
    port: u16,
    flags: &str,
    script: Vec<String>,
    last: &[String],
) -> Result {
    let mut masters = vec![(ours.to_owned(), port)];
    let mut words = vec![ours.to_owned()];
    words.extend(script);
    words.extend(["--ours".into(), ours.to_owned(), format!("{HOST}:{port}")]);
    if peer {
        let theirs = path(&install()?);
        crate::python::share_packages(ours, &theirs)?;
        words.extend(["--peer".into(), theirs.clone(), format!("{HOST}:{}", port + 1)]);
        masters.push((theirs, port + 1));
    }
    words.extend_from_slice(last);
    let mut run = String::from("pids=; ");
    for (python, port) in &masters {
        let master = path(&Path::new(python).with_file_name("mooncake_master"));
        run += &format!(
            "{master} --rpc_port={port} --metrics_port={} {flags} >/dev/null 2>&1 & \
             pids=\"$pids $!\"; \
             until {ours} -c 'import socket; \
             socket.create_connection((\"127.0.0.1\", {port}), 1)' 2>/dev/null; \
             do kill -0 $! || exit 1; done; ",
            port + 100
        );
    }
    run += "\"$@\"; status=$?; kill $pids; wait; exit $status";
    let mut all = vec!["sh".into(), "-c".into(), run, "sh".into()];
    all.extend(words);
    in_own_network(&all)
}

/// Measures the calls of a master of this project beside one of Mooncake C++.
fn bench_master() -> Result {
    let python = install()?;
    let [bench, master] = ["master_bench", "mooncake_master"];
    let programs = Programs::fast(&[bench, master])?;
    let (bench, master) = (programs.path(bench), programs.path(master));
    in_own_network(&[bench, "--master".into(), master, "--peer".into(), path(&python)])
}

/// Measures a master with this number of objects, or with the mode `--snapshots` the costs of its
/// snapshots.
fn bench_master_size(objects: &str, mode: &[&str]) -> Result {
    let programs = Programs::fast(&["master_size", "mooncake_master"])?;
    let master = programs.path("mooncake_master");
    programs.run("master_size", &[&["--master", &master, "--objects", objects], mode].concat()).run()
}

/// Measures the restart of a master that is killed with this number of objects in four processes.
fn bench_restart(objects: &str) -> Result {
    let programs = Programs::fast(&["master_restart", "mooncake_master"])?;
    let master = programs.path("mooncake_master");
    programs.run("master_restart", &["--master", &master, "--objects", objects]).run()
}

/// Measures transfer engines, with `peer` in all pairs with those of Mooncake C++.
fn bench_engines(peer: bool) -> Result {
    let python = if peer { Some(install()?) } else { None };
    let [bench, engine, metadata] =
        ["engine_bench", "transfer_engine_bench", "mooncake_http_metadata_server"];
    let programs = Programs::fast(&[bench, engine, metadata])?;
    let mut words = vec![programs.path(bench)];
    words.extend(["--bench".into(), programs.path(engine)]);
    words.extend(["--metadata-server".into(), programs.path(metadata)]);
    if let Some(python) = python {
        words.extend(["--peer".into(), path(&python)]);
    }
    in_own_network(&words)
}
