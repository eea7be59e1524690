//! Runs beside the existing C++ system, which installs from PyPI into a virtual environment of its own.

use std::path::{Path, PathBuf};

use crate::run::{Programs, Result, cargo, command, step, target_dir};

/// The release whose message shapes the store speaks.
const WHEEL: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
/// Shared libraries the wheel needs, as Debian packages.
const LIBRARIES: &[(&str, &str)] =
    &[("libibverbs.so.1", "libibverbs1"), ("librdmacm.so.1", "librdmacm1"), ("libnuma.so.1", "libnuma1")];

/// `cargo xtask interop`.
pub(crate) fn interop() -> Result {
    let python = install()?;
    step("build");
    let programs = Programs::checked()?;
    step("mixed clusters");
    let (binary, master) = (programs.path("interop"), programs.path("mooncake_master"));
    let words = [binary, "--python".into(), path(&python), "--master".into(), master];
    in_own_network(&words)?;
    calls(&python)?;
    crate::engines::interop(&path(&python), programs)?;
    for (title, words) in crate::python::matrix(&python, programs)? {
        step(title);
        in_own_network(&words)?;
    }
    Ok(())
}

/// Tests that need a master of the existing system to themselves: in which file, with which flags for the master.
const LIVE: &[(&str, &str, &str)] = &[
    ("protocol_live", "an_existing_master_answers_every_call", ""),
    ("protocol_live", "a_client_waits_for_room_on_an_existing_master", ""),
    (
        "http",
        "the_client_conforms_on_a_real_server",
        "--enable_http_metadata_server=true --http_metadata_server_port=21271",
    ),
    (
        "master_calls",
        "the_existing_master_answers_as_recorded",
        "--put_start_discard_timeout_sec=2 --put_start_release_timeout_sec=5 --default_kv_lease_ttl=1500 \
         --max_kv_soft_pin_ttl=10000 --default_kv_soft_pin_ttl=2000 --client_ttl=600",
    ),
];

/// Calls of ours, one by one, to the existing master.
fn calls(python: &Path) -> Result {
    step("every call to the existing master");
    let test = "test -q --workspace --all-features --test protocol_live --test master_calls --test http";
    cargo(&[test.split(' ').collect::<Vec<_>>(), vec!["--no-run"]].concat()).run()?;
    let (python, master) = (path(python), path(&python.with_file_name("mooncake_master")));
    for (file, name, flags) in LIVE {
        let test = format!("test -q --workspace --all-features --test {file}");
        // A test by a name that is none would pass.
        let run = format!(
            "{master} --rpc_port=21071 --metrics_port=21171 {flags} >/dev/null 2>&1 & \
             until {python} -c 'import socket; socket.create_connection((\"127.0.0.1\", 21071), 1)' 2>/dev/null; \
             do kill -0 $! || exit 1; done; \
             said=$(METADATA_URL=http://127.0.0.1:21271/metadata MOONCAKE_PEER_MASTER=127.0.0.1:21071 \"${{CARGO:-cargo}}\" {test} -- --ignored --exact {name} 2>&1); \
             status=$?; kill $!; wait; echo \"$said\"; \
             test $status = 0 && echo \"$said\" | grep -q '1 passed'"
        );
        in_own_network(&["sh".into(), "-c".into(), run])?;
    }
    Ok(())
}

/// `cargo xtask bench [name] [--peer]`.
pub(crate) fn bench(words: &[&str]) -> Result {
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
        return crate::engines::bench(peer);
    }
    let names: Vec<&str> = words.iter().copied().filter(|w| !w.starts_with("--")).collect();
    if words.contains(&"--python") {
        return bench_python(peer, &names);
    }
    if words.contains(&"--offload") {
        return bench_offload(peer);
    }
    if let Some(unknown) = words.iter().find(|w| w.starts_with("--") && **w != "--peer") {
        return Err(format!("bench knows --peer, not {unknown}"));
    }
    if peer {
        let python = install()?;
        let binary = Programs::fast(&["store_bench"])?.path("store_bench");
        return in_own_network(&[binary, "--peer".into(), path(&python)]);
    }
    let all = ["allocator", "eviction", "local", "struct_pack", "tcp", "store"];
    if let Some(unknown) = names.iter().find(|n| !all.contains(n)) {
        return Err(format!("no bench `{unknown}`; there are {}", all.join(", ")));
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

/// `cargo xtask bench --offload [--peer]`: objects of our Python package on their way to a disk and back, beside the peer's.
fn bench_offload(peer: bool) -> Result {
    let Some(ours) = crate::python::install()? else { return Ok(()) };
    let root = crate::run::root();
    let folder = path(&root.join("target/offload"));
    let script = path(&root.join("mooncake-python/benches/offload.py"));
    let flags = "--enable_offload=true --default_kv_lease_ttl=500";
    step("bench of objects on disks");
    beside_masters(&ours, peer, 21063, flags, vec![script, HOST.into(), folder], &[])
}

/// `cargo xtask bench --python [--peer] [word..]`: our Python package, our Rust interface and the peer's package, row by row in turn; words choose
/// rows that have one of them in their names.
fn bench_python(peer: bool, rows: &[&str]) -> Result {
    let Some(ours) = crate::python::install()? else { return Ok(()) };
    let rust = Programs::fast(&["binding_bench"])?.path("binding_bench");
    let script = path(&crate::run::root().join("mooncake-python/benches/store.py"));
    let mut last = vec!["--rust".into(), rust, "--rows".into()];
    last.extend(rows.iter().map(|&row| row.to_owned()));
    step("bench of the Python package");
    beside_masters(&ours, peer, 21061, "", vec![script, HOST.into()], &last)
}

/// Address in a network of one's own.
const HOST: &str = "10.213.0.1";

/// Runs a script that is told of a master of ours, and of one of the peer's, with the Python that goes with each.
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
            "{master} --rpc_port={port} --metrics_port={} {flags} >/dev/null 2>&1 & pids=\"$pids $!\"; \
             until {ours} -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 1)' 2>/dev/null; \
             do kill -0 $! || exit 1; done; ",
            port + 100
        );
    }
    run += "\"$@\"; status=$?; kill $pids; wait; exit $status";
    let mut all = vec!["sh".into(), "-c".into(), run, "sh".into()];
    all.extend(words);
    in_own_network(&all)
}

/// `cargo xtask bench --master`: calls of a master alone, ours beside the peer's.
fn bench_master() -> Result {
    let python = install()?;
    let [bench, master] = ["master_bench", "mooncake_master"];
    let programs = Programs::fast(&[bench, master])?;
    let (bench, master) = (programs.path(bench), programs.path(master));
    in_own_network(&[bench, "--master".into(), master, "--peer".into(), path(&python)])
}

/// `cargo xtask bench --master-size [objects]`: a master of ours with so many objects; `--snapshots [objects]`: what its snapshots cost.
fn bench_master_size(objects: &str, mode: &[&str]) -> Result {
    let programs = Programs::fast(&["master_size", "mooncake_master"])?;
    let master = programs.path("mooncake_master");
    programs.run("master_size", &[&["--master", &master, "--objects", objects], mode].concat()).run()
}

/// `cargo xtask bench --restart [objects]`: a master of ours that is killed with so many objects over four processes.
fn bench_restart(objects: &str) -> Result {
    let programs = Programs::fast(&["master_restart", "mooncake_master"])?;
    let master = programs.path("mooncake_master");
    programs.run("master_restart", &["--master", &master, "--objects", objects]).run()
}

/// Makes the virtual environment if it is not there; returns its python.
pub(crate) fn install() -> Result<PathBuf> {
    step("reference peer");
    libraries()?;
    let venv = target_dir().join("peer");
    let python = venv.join("bin/python");
    let probe = ["-c", "import mooncake.store, mooncake.engine"];
    if python.exists() && command(&path(&python), &probe).output().is_ok() {
        println!("{WHEEL} is installed in {}", venv.display());
        return Ok(python);
    }
    command("python3", &["-m", "venv", &path(&venv)]).run()?;
    command(&path(&python), &["-m", "pip", "install", "--quiet", WHEEL]).run()?;
    command(&path(&python), &probe).output()?;
    Ok(python)
}

fn libraries() -> Result {
    let known = command("/sbin/ldconfig", &["-p"]).output()?;
    let missing: Vec<&str> =
        LIBRARIES.iter().filter(|(file, _)| !known.contains(file)).map(|(_, package)| *package).collect();
    if missing.is_empty() && command("ip", &["-V"]).output().is_ok() {
        return Ok(());
    }
    let mut packages = missing;
    packages.push("iproute2");
    crate::debian::install(&packages, "the reference peer")
}

/// Runs a program in a network namespace that goes with it. The peer wants an interface besides `lo`.
pub(crate) fn in_own_network(words: &[String]) -> Result {
    let script = "ip link set lo up && ip link add mc0 type veth peer name mc1 && \
                  ip addr add 10.213.0.1/24 dev mc0 && ip link set mc0 up && ip link set mc1 up && exec \"$@\"";
    let mut args = vec!["--net", "--map-root-user", "sh", "-c", script, "sh"];
    args.extend(words.iter().map(String::as_str));
    command("unshare", &args).run()
}

pub(crate) fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
