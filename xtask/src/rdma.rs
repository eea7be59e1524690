//! `cargo xtask rdma-test`: the tests of the RDMA wire, in a virtual machine with two Soft-RoCE devices.

use crate::run::{Result, cargo, root, step, target_dir, test_program};
use crate::vm::{self, Shape, Vm};

const MODULES: &[&str] = &["rdma_rxe", "rdma_ucm", "veth", "sch_netem", "virtio_net"];
const PACKAGES: &[&str] = &["ibverbs-providers"];
/// Test programs by crate and name, and which of their tests to run; a plain `cargo test` leaves those out.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("mooncake-rdma", "devices", ""),
    ("mooncake-engine", "rdma", ""),
    // Without those that take longest and differ least from one wire to another.
    (
        "mooncake-store",
        "client",
        "scenarios::rdma --include-ignored --skip the_local_buffer --skip many_at_once --skip a_value_larger --skip a_key_is",
    ),
];
/// The replay of a trace by several processes, with nothing but RDMA between them, one of which is killed in the middle.
const REPLAY: &str = "--protocol rdma --limit 60 --lease-ms 20000 --requests 60 --block-bytes 8192 --capacity 48MiB --processes 3 --replicas 2 --kill-one-after 40%";
const FEATURES: &str = "mooncake-engine/transport-rdma,mooncake-store/transport-rdma";
/// Longest a machine may run.
const SECONDS: u32 = 600;

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

/// Runs the tests; words go to the test programs. `--run COMMAND..` runs a command of one's own beside the two devices instead,
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
    let mut script = String::new();
    for (program, own) in &programs {
        // One after the other: what a test does to a cable is felt by all.
        script += &format!("{} --test-threads=1 {own}", quoted(program));
        for word in words {
            script += &format!(" {}", quoted(word));
        }
        script.push('\n');
    }
    if words.is_empty() {
        script += &format!("{} {REPLAY}\n", quoted(&replay(whole)?));
    }
    run(&machine, Shape::Plain, DEVICES, &script)?;
    let (devices, _) = &programs[0];
    if words.is_empty() {
        step("virtual machine with two NUMA nodes");
        run(&machine, Shape::TwoNodes, NODES, &format!("{} near:: --ignored", quoted(devices)))?;
    }
    Ok(())
}

/// The machine, without devices as yet.
pub(crate) fn machine() -> Result<Vm> {
    vm::prepare(MODULES, PACKAGES)
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

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
