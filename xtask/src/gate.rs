//! `cargo xtask gate`: the tests pass after runs that were killed, with few descriptors, little
//! locked memory, an empty home, and no terminal.
#![allow(clippy::disallowed_methods, reason = "a task runner measures real time")]

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::run::{Result, command, root, step, target_dir};
use crate::suite::NO_REPEATS;
use crate::tree::kill_marked;

/// Variable whose value marks every process of a run, and so its children.
const MARK: &str = "MOONCAKE_GATE_TREE";
/// Seconds after which runs are killed, counted from the first test program.
const KILLS: [u64; 10] = [1, 3, 7, 12, 20, 30, 42, 55, 70, 90];
/// Longest time until the first test program starts.
const BUILT: Duration = Duration::from_secs(1800);

/// Kills ten runs of the tests in their middle, each with all its processes, and then runs the
/// tests to their end.
pub(crate) fn test() -> Result {
    for seconds in KILLS {
        step(&format!("a run that is killed after {seconds} s of tests"));
        let mark = format!("{}-{seconds}", std::process::id());
        let log = target_dir().join(format!("gate-{seconds}.log"));
        let output =
            std::fs::File::create(&log).map_err(|e| format!("cannot write {}: {e}", log.display()))?;
        let mut child = restricted(&mark)?
            .start(output.into(), Stdio::null())
            .map_err(|e| format!("cannot start the tests: {e}"))?;
        let (begun, mut tested) = (Instant::now(), None);
        while tested.is_none_or(|since: Instant| since.elapsed() < Duration::from_secs(seconds)) {
            if tested.is_none() && std::fs::read_to_string(&log).is_ok_and(|said| said.contains(" at a time"))
            {
                tested = Some(Instant::now());
            }
            if let Ok(Some(status)) = child.try_wait() {
                kill_marked(MARK, &mark);
                return Err(format!(
                    "the run ended before it was killed: {status}, output in {}",
                    log.display()
                ));
            }
            if begun.elapsed() > BUILT {
                kill_marked(MARK, &mark);
                return Err(format!("no test began. seconds={}", BUILT.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        println!("{} processes killed", kill_marked(MARK, &mark));
        let _ = child.wait();
    }
    step("a run to the end");
    let mark = format!("{}-last", std::process::id());
    let outcome = restricted(&mark)?.run();
    match kill_marked(MARK, &mark) {
        0 => outcome,
        left => Err(format!("{left} processes outlived the tests; {outcome:?}")),
    }
}

/// Returns the command that runs the tests once, without terminal and input, with 1,024 descriptors
/// and 64 KiB of locked memory.
fn restricted(mark: &str) -> Result<crate::run::Run> {
    let program = std::env::current_exe().map_err(|e| format!("cannot find xtask: {e}"))?;
    let script = "ulimit -n 1024 && ulimit -l 64 && exec setsid --wait \"$0\" test </dev/null";
    let manifest = root().join("xtask").to_string_lossy().into_owned();
    Ok(command("bash", &["-c", script, &program.to_string_lossy()])
        .env("CARGO_MANIFEST_DIR", &manifest)
        .env(NO_REPEATS, "1")
        .env(MARK, mark))
}
