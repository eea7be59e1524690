//! Steps of one thread that run beside the others. Their output is shown when they are waited for.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::run::{Result, root, step, target_dir};

/// `cargo xtask TASK` under way in a process group of its own, which ends with this.
pub(crate) struct Aside {
    task: String,
    child: Child,
    said: PathBuf,
}

impl Aside {
    /// Starts a task at the lowest priority.
    pub(crate) fn start(task: &[&str]) -> Result<Self> {
        Self::start_with_niceness(task, "19")
    }

    /// Starts a task whose time runs on while it waits for a processor, at the usual priority.
    pub(crate) fn start_in_time(task: &[&str]) -> Result<Self> {
        Self::start_with_niceness(task, "0")
    }

    fn start_with_niceness(task: &[&str], niceness: &str) -> Result<Self> {
        let fault = |error: std::io::Error| format!("cannot start `xtask {}` aside: {error}", task.join(" "));
        let said = target_dir().join(format!("aside-{}.log", task.join("-")));
        let out = File::create(&said).map_err(fault)?;
        let errors = out.try_clone().map_err(fault)?;
        let child = Command::new("nice")
            .args(["-n", niceness])
            .arg(std::env::current_exe().map_err(fault)?)
            .args(task)
            .current_dir(root())
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .map_err(fault)?;
        Ok(Self { task: task.join(" "), child, said })
    }

    /// Returns whether the task has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for it and shows what it said.
    pub(crate) fn finish(mut self) -> Result {
        step(&format!("{}, begun earlier", self.task));
        let status = self.child.wait().map_err(|error| format!("`xtask {}`: {error}", self.task))?;
        let said = std::fs::read(&self.said).unwrap_or_default();
        println!("{}", String::from_utf8_lossy(&said));
        if status.success() { Ok(()) } else { Err(format!("`xtask {}` failed: {status}", self.task)) }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Children of the task are in the same group.
            let _ = Command::new("kill").args(["--", &format!("-{}", self.child.id())]).status();
            let _ = self.child.wait();
        }
    }
}
