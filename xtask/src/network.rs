//! `cargo xtask network`: two engines with a faulty network between them.

use crate::run::{Result, cargo, command, counted, step, test_program};
use crate::{debian, rdma, vm::Shape};

const TEST: &[&str] = &["test", "--workspace", "--all-features", "--test", "lossy_network", "--no-run"];
/// Tests that run on this machine.
const HERE: &[&str] = &["relay", "only_lo"];
/// Tests that run in a virtual machine.
const IN_MACHINE: &[&str] = &["cable"];
/// Maximum run time of the virtual machine in seconds.
const SECONDS: u32 = 300;

/// Runs the tests with a relay in place of the network and, on x86-64, with `sch_netem` in the
/// virtual machine of the RDMA tests. Needs root, and installs `ip` if it is missing.
pub(crate) fn test() -> Result {
    if command("ip", &["-V"]).run().is_err() {
        debian::install(&["iproute2"], "the test of faulty networks")?;
    }
    step("two engines, lo or a relay between them");
    let said = cargo(TEST).shown_output()?;
    let program = test_program(&said, "lossy_network")?;
    let script_here = script(&program, HERE)?;
    command("sh", &["-ec", &script_here]).run().map_err(|_| "a test of the network failed")?;
    if cfg!(not(target_arch = "x86_64")) {
        return Ok(());
    }
    step("two engines, a cable between them, in a virtual machine");
    match rdma::machine()?.run(Shape::Plain, &script(&program, IN_MACHINE)?, SECONDS)? {
        0 => Ok(()),
        status => Err(format!("in the virtual machine: exit status {status}")),
    }
}

/// Returns the script that runs the tests one by one. Each name must match at least one test.
fn script(program: &str, names: &[&str]) -> Result<String> {
    let each =
        names.iter().map(|name| counted(program, &["--ignored", "--nocapture", "--test-threads=1", name]));
    Ok(format!("export RUST_BACKTRACE=1\n{}", each.collect::<Result<String>>()?))
}
