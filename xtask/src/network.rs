//! `cargo xtask network`: two engines with a bad network between them.

use crate::run::{Result, cargo, command, step, test_program};
use crate::{rdma, vm::Shape};

const TEST: &[&str] = &["test", "--workspace", "--all-features", "--test", "lossy_network"];
/// Longest the machine may run.
const SECONDS: u32 = 300;

/// Needs root, and `ip`, which it installs where that is missing. A relay stands for the network here, and on x86-64 there is one with
/// `sch_netem` in the virtual machine of the RDMA tests.
pub(crate) fn test() -> Result {
    if command("ip", &["-V"]).run().is_err() {
        command("apt-get", &["install", "-y", "--no-install-recommends", "iproute2"]).run()?;
    }
    step("two engines, lo or a relay between them");
    cargo(TEST).args(&["--", "--ignored", "--nocapture", "relay", "only_lo"]).run()?;
    if cfg!(not(target_arch = "x86_64")) {
        return Ok(());
    }
    step("two engines, a cable between them, in a virtual machine");
    let said = cargo(TEST).args(&["--no-run"]).shown_output()?;
    let program = test_program(&said, "lossy_network")?;
    let script =
        format!("export RUST_BACKTRACE=1\n'{program}' --ignored --nocapture --test-threads=1 cable\n");
    match rdma::machine()?.run(Shape::Plain, &script, SECONDS)? {
        0 => Ok(()),
        status => Err(format!("in the virtual machine: exit status {status}")),
    }
}
