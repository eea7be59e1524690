//! `cargo xtask rdma-test`: the tests of the RDMA transport, in a virtual machine with two
//! Soft-RoCE devices.

use crate::run::{COUNTED, Result, cargo, listed, quoted, root, step, target_dir, test_program};
use crate::vm::{self, Shape, Vm};

/// Kernel modules of the tests.
const MODULES: &[&str] = &["rdma_rxe", "rdma_ucm", "veth", "sch_netem", "virtio_net"];
/// Debian packages of the tests.
const PACKAGES: &[&str] = &["ibverbs-providers"];
/// Crates, test programs, and the arguments that choose tests which a plain `cargo test` leaves
/// out. The task prints the names of tests that are not run.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("mooncake-rdma", "devices", ""),
    ("mooncake-engine", "rdma", ""),
    ("mooncake-store", "client", "scenarios::rdma --include-ignored"),
    ("mooncake-store", "processes", "rdma:: --include-ignored --skip the_other_process"),
];
/// Tests that other tests start as child processes.
const OTHER_PROCESSES: &[&str] =
    &["other_process::the_other_process", "processes::owner", "owner", "rdma::the_other_process"];
/// Module of the tests that need a machine with two NUMA nodes.
const NEAR: &str = "numa::";
/// Arguments of the example `replay`: several processes with only RDMA between them, one of which
/// is killed in the middle.
const REPLAY: &str = "--protocol rdma --limit 60 --lease-ms 20000 --requests 60 \
                      --block-bytes 8192 --capacity 48MiB --processes 3 --replicas 2 \
                      --kill-one-after 40%";
/// Maximum run time of a virtual machine in seconds.
const SECONDS: u32 = 1200;

/// Script that creates `rxe0` (10.77.0.1) and `rxe1` (10.77.0.2) at the ends of one cable. Both
/// ends are on one machine, so the kernel is configured to accept its own packets. RDMA crosses the
/// cable, TCP between the two does not.
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

/// Script that creates `rxe0` on the network card of NUMA node 0, and `rxe1` on that of node 1.
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

/// Runs the tests, or those whose names contain one of the words. `--run COMMAND..` runs a command
/// on the machine with two devices instead, `--nodes COMMAND..` on the machine with two NUMA nodes.
pub(crate) fn test(words: &[&str]) -> Result {
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
    let programs = build()?;
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
        run(&machine, Shape::Plain, DEVICES, &format!("{} {REPLAY}", quoted(&replay()?)))?;
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
        (0, _) => Err(format!("no test of this task has {} in its name", words.join(" or "))),
        (_, true) => Err(format!("{devices} has no test {NEAR}")),
        _ => Ok(()),
    }
}

fn is_other_process(test: &str) -> bool {
    OTHER_PROCESSES.contains(&test)
}

/// Returns whether the name of a test contains one of the words, or there are no words.
fn is_named(test: &str, words: &[&str]) -> bool {
    words.is_empty() || words.iter().any(|word| test.contains(word))
}

/// Runs the tests of a program on a machine of their own, and checks their number.
fn counted(
    machine: &Vm,
    shape: Shape,
    devices: &str,
    (program, wanted): (&str, usize),
    words: &[&str],
) -> Result {
    let words = words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    // The tests run one after the other, because each may disturb the cable.
    let script = format!("{COUNTED}counted {wanted} {} --test-threads=1 {words}", quoted(program));
    run(machine, shape, devices, &script)
}

/// Returns the machine, without devices.
pub(crate) fn machine() -> Result<Vm> {
    vm::prepare(MODULES, PACKAGES)
}

/// Returns the number of tests that a program must run with these words. Prints the names of other
/// matching tests that do not run, and refuses ignored tests without a known reason.
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
        Some(test) => Err(format!("{test} is ignored, and no task runs it")),
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

/// Builds the test programs, with the features of all tests of the workspace, which leaves little
/// to build after those. Returns their paths and arguments.
fn build() -> Result<Vec<(String, &'static str)>> {
    let mut words = vec!["test", "--no-run", "--workspace", "--all-features"];
    words.extend(PROGRAMS.iter().flat_map(|(_, name, _)| ["--test", name]));
    let said = cargo(&words).shown_output()?;
    PROGRAMS.iter().map(|(_, name, own)| Ok((test_program(&said, name)?, *own))).collect()
}

/// Returns the path of the example `replay`.
fn replay() -> Result<String> {
    cargo(&["build", "--workspace", "--all-features", "--example", "replay"]).run()?;
    Ok(target_dir().join("debug/examples/replay").display().to_string())
}
