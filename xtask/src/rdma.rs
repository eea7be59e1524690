//! `cargo xtask rdma-test`: the tests of the RDMA wire, in a virtual machine with two Soft-RoCE devices.

use crate::run::{COUNTED, Result, cargo, listed, quoted, root, step, target_dir, test_program};
use crate::vm::{self, Shape, Vm};

const MODULES: &[&str] = &["rdma_rxe", "rdma_ucm", "veth", "sch_netem", "virtio_net"];
const PACKAGES: &[&str] = &["ibverbs-providers"];
/// Test programs by crate and name, and which of their tests to run; a plain `cargo test` leaves those out. What is not run is named.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("mooncake-rdma", "devices", ""),
    ("mooncake-engine", "rdma", ""),
    ("mooncake-store", "client", "scenarios::rdma --include-ignored"),
    ("mooncake-store", "processes", "rdma:: --include-ignored --skip the_other_process"),
];
/// Tests that are no tests but the other process of some.
const OTHER_PROCESSES: &[&str] =
    &["other_process::the_other_process", "processes::owner", "owner", "rdma::the_other_process"];
/// Which tests need a machine with two NUMA nodes.
const NEAR: &str = "numa::";
/// The replay of a trace by several processes, with nothing but RDMA between them, one of which is killed in the middle.
const REPLAY: &str = "--protocol rdma --limit 60 --lease-ms 20000 --requests 60 --block-bytes 8192 --capacity 48MiB --processes 3 --replicas 2 --kill-one-after 40%";
const FEATURES: &str = "mooncake-engine/transport-rdma,mooncake-store/transport-rdma,mooncake-store/cli";
/// Longest a machine may run.
const SECONDS: u32 = 1200;

/// `rxe0` (10.77.0.1) and `rxe1` (10.77.0.2) at the ends of one cable. Both ends being here, the kernel must be told to answer
/// itself; RDMA crosses the cable all the same, TCP between the two does not.
const DEVICES: &str = r"
set -e
ulimit -l unlimited
ip link set lo up
ip link add rdma0 type veth peer name rdma1
for name in all default rdma0 rdma1; do
    echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local
done
for i in 0 1; do
    ip link set rdma$i mtu 9000 up
    ip addr add 10.77.0.$((i + 1))/24 dev rdma$i
    rdma link add rxe$i type rxe netdev rdma$i
done
export RUST_BACKTRACE=1
";

/// `rxe0` on NUMA node 0 and `rxe1` on node 1, on the card that each has.
const NODES: &str = r"
set -e
ulimit -l unlimited
ip link set lo up
for device in /sys/class/net/*/device; do
    read -r node <$(readlink -f $device)/../numa_node
    ip link set $(basename $(dirname $device)) name rdma$node
done
for i in 0 1; do
    echo 0 >/proc/sys/net/ipv4/conf/rdma$i/rp_filter
    ip link set rdma$i up
    ip addr add 10.77.$i.1/24 dev rdma$i
    rdma link add rxe$i type rxe netdev rdma$i
done
export RUST_BACKTRACE=1
";

/// Runs the tests; with words, those whose names have one of them. `--run COMMAND..` runs a command of one's own beside the two devices instead,
/// `--nodes COMMAND..` on the machine with two NUMA nodes.
/// `whole` builds as all tests of the workspace are built, so that what is built already is used.
pub(crate) fn test(words: &[&str], whole: bool) -> Result {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("the virtual machine is built for x86-64 only".into());
    }
    step("virtual machine with two Soft-RoCE devices");
    let machine = machine()?;
    if let [which @ ("--run" | "--nodes"), own @ ..] = words {
        let own = own.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        return match *which {
            "--run" => run(&machine, Shape::Plain, DEVICES, &own),
            _ => run(&machine, Shape::TwoNodes, NODES, &own),
        };
    }
    let programs = build(whole)?;
    let mut ran = 0;
    for (program, own) in &programs {
        let own: Vec<&str> = own.split_whitespace().collect();
        let all = listed(program, &own)?;
        let named: Vec<&str> = all.iter().map(String::as_str).filter(|test| is_named(test, words)).collect();
        if named.is_empty() && !words.is_empty() {
            continue;
        }
        let flags = own.iter().copied().filter(|word| *word == "--include-ignored");
        let chosen = if words.is_empty() {
            own.clone()
        } else {
            named.into_iter().chain(["--exact"]).chain(flags).collect()
        };
        let wanted = wanted(program, &chosen)?;
        match (wanted, words) {
            (0, []) => return Err(format!("{program} has no test {}", own.join(" "))),
            (0, _) => continue,
            _ => ran += wanted,
        }
        counted(&machine, Shape::Plain, DEVICES, (program, wanted), &chosen)?;
    }
    if words.is_empty() {
        step("replay");
        run(&machine, Shape::Plain, DEVICES, &format!("{} {REPLAY}", quoted(&replay(whole)?)))?;
    }
    let (devices, _) = &programs[0];
    let near = listed(devices, &[NEAR, "--ignored"])?;
    let chosen: Vec<&str> = near.iter().map(String::as_str).filter(|test| is_named(test, words)).collect();
    if !chosen.is_empty() {
        step("virtual machine with two NUMA nodes");
        let said = [&chosen[..], &["--exact", "--ignored"]].concat();
        counted(&machine, Shape::TwoNodes, NODES, (devices, chosen.len()), &said)?;
    }
    match (ran + chosen.len(), chosen.is_empty() && words.is_empty()) {
        (0, _) => Err(format!("no test that runs here has {} in its name", words.join(" or "))),
        (_, true) => Err(format!("{devices} has no test {NEAR}")),
        _ => Ok(()),
    }
}

fn is_other_process(test: &str) -> bool {
    OTHER_PROCESSES.contains(&test)
}

/// Whether one of the words is in a test's name; without words all are meant.
fn is_named(test: &str, words: &[&str]) -> bool {
    words.is_empty() || words.iter().any(|word| test.contains(word))
}

/// Runs so many tests of a program on a machine of their own.
fn counted(
    machine: &Vm,
    shape: Shape,
    devices: &str,
    (program, wanted): (&str, usize),
    words: &[&str],
) -> Result {
    let words = words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    // One after the other: what a test does to a cable is felt by all.
    let script = format!("{COUNTED}counted {wanted} {} --test-threads=1 {words}", quoted(program));
    run(machine, shape, devices, &script)
}

/// The machine, without devices as yet.
pub(crate) fn machine() -> Result<Vm> {
    vm::prepare(MODULES, PACKAGES)
}

/// How many tests a program is to run with these words. Says which others it has with the same names that nobody runs here, and
/// refuses tests that are ignored for no reason that is known.
fn wanted(program: &str, words: &[&str]) -> Result<usize> {
    let chosen = listed(program, words)?;
    if words.contains(&"--include-ignored") {
        let mut all = words.to_vec();
        while let Some(at) = all.iter().position(|word| *word == "--skip") {
            all.drain(at..at + 2);
        }
        for test in
            listed(program, &all)?.iter().filter(|test| !chosen.contains(test) && !is_other_process(test))
        {
            println!("not run: {test}");
        }
        return Ok(chosen.len());
    }
    let ignored = listed(program, &[words, &["--ignored"]].concat())?;
    let known = |test: &&String| test.starts_with(NEAR) || is_other_process(test);
    match ignored.iter().find(|test| !known(test)) {
        Some(test) => Err(format!("{test} is ignored, and run nowhere")),
        None => Ok(chosen.len() - ignored.len()),
    }
}

fn run(machine: &Vm, shape: Shape, devices: &str, script: &str) -> Result {
    let here = quoted(&root().display().to_string());
    match machine.run(shape, &format!("{devices}cd {here}\n{script}"), SECONDS)? {
        0 => Ok(()),
        status => Err(format!("in the virtual machine: exit status {status}")),
    }
}

/// Builds the test programs; their paths, and what each is told.
fn build(whole: bool) -> Result<Vec<(String, &'static str)>> {
    let mut words = vec!["test", "--no-run"];
    match whole {
        true => words.extend(["--workspace", "--all-features"]),
        false => {
            words.extend(["--features", FEATURES]);
            words.extend(PROGRAMS.iter().flat_map(|(package, ..)| ["-p", package]));
        }
    }
    words.extend(PROGRAMS.iter().flat_map(|(_, name, _)| ["--test", name]));
    let said = cargo(&words).shown_output()?;
    PROGRAMS.iter().map(|(_, name, own)| Ok((test_program(&said, name)?, *own))).collect()
}

/// The path of the replay, built unless all tests of the workspace were, which brings it along.
fn replay(whole: bool) -> Result<String> {
    if !whole {
        let words = ["-p", "mooncake-examples", "--features", "transport-rdma"];
        cargo(&["build", "--example", "replay"]).args(&words).run()?;
    }
    Ok(target_dir().join("debug/examples/replay").display().to_string())
}
