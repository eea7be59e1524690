//! `cargo xtask network`: two engines with a bad network between them.

use crate::run::{Result, cargo, command, counted, step, test_program};
use crate::{debian, rdma, vm::Shape};

const TEST: &[&str] = &["test", "--workspace", "--all-features", "--test", "lossy_network", "--no-run"];
/// Which tests need no machine of their own, and which do.
const HERE: &[&str] = &["relay", "only_lo"];
const IN_MACHINE: &[&str] = &["cable"];
/// Longest the machine may run.
const SECONDS: u32 = 300;

/// Needs root, and `ip`, which it installs where that is missing. A relay stands for the network here, and on x86-64 there is one with
/// `sch_netem` in the virtual machine of the RDMA tests.
pub(crate) fn test() -> Result {
    if command("ip", &["-V"]).run().is_err() {
        debian::install(&["iproute2"], "the test of bad networks")?;
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

/// Runs tests one by one; each name must be that of some.
fn script(program: &str, names: &[&str]) -> Result<String> {
    let each =
        names.iter().map(|name| counted(program, &["--ignored", "--nocapture", "--test-threads=1", name]));
    Ok(format!("export RUST_BACKTRACE=1\n{}", each.collect::<Result<String>>()?))
}
