//! Processes of a run, which a variable of their environment marks: children inherit it, whatever
//! groups and sessions they make.
#![allow(clippy::disallowed_methods, reason = "a task runner waits in real time")]

use std::collections::BTreeSet;
use std::time::Duration;

use crate::run::command;

/// Number of lines of a stack that are shown for each thread.
const FRAMES: &str = "25";
/// Longest time for the stacks of one process.
const STACK_SECONDS: &str = "60";

/// Returns the numbers of all processes whose environment has this variable and value.
pub(crate) fn marked(variable: &str, mark: &str) -> Vec<String> {
    let wanted = format!("{variable}={mark}");
    let carries = |pid: &str| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.parse::<u32>().is_ok() && carries(name)).collect()
}

/// Kills every marked process, until none is left. Returns their number.
pub(crate) fn kill_marked(variable: &str, mark: &str) -> usize {
    let mut killed = BTreeSet::new();
    loop {
        let found = marked(variable, mark);
        if found.is_empty() {
            return killed.len();
        }
        let pids: Vec<&str> = found.iter().map(String::as_str).collect();
        // A process that has ended meanwhile is not an error.
        let _ = command("kill", &["-9"]).args(&pids).captured();
        killed.extend(found);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Describes what every marked process does: its command, its state, and the stacks of its threads
/// if `gdb` is installed.
pub(crate) fn describe(variable: &str, mark: &str) -> String {
    let mut text = String::new();
    for pid in marked(variable, mark) {
        let read = |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let words = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
        let stat = String::from_utf8_lossy(&read("stat")).into_owned();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?');
        text += &format!("\nprocess {pid}, state {state}: {}\n", words.trim());
        let trace = format!("thread apply all backtrace {FRAMES}");
        let words = [STACK_SECONDS, "gdb", "-nx", "-batch", "-p", &pid, "-ex", &trace];
        if let (stacks, Ok(())) = command("timeout", &words).captured() {
            let lines = stacks.lines().filter(|line| line.starts_with('#') || line.starts_with("Thread"));
            lines.for_each(|line| text += &format!("  {line}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn children_of_other_sessions_are_found_and_killed() {
        let mark = std::process::id().to_string();
        let start = || {
            let run = command("sh", &["-c", "setsid sleep 600 & setsid sleep 600 & wait"]);
            run.env("MOONCAKE_TREE_TEST", &mark).start(Stdio::null(), Stdio::null()).unwrap()
        };
        let mut child = start();
        let began = std::time::Instant::now();
        while marked("MOONCAKE_TREE_TEST", &mark).len() < 3 {
            assert!(began.elapsed() < Duration::from_secs(60), "three processes start");
        }
        let said = describe("MOONCAKE_TREE_TEST", &mark);
        assert_eq!(said.matches(": sleep 600").count(), 2, "{said}");
        assert!(kill_marked("MOONCAKE_TREE_TEST", &mark) >= 3);
        assert!(!child.wait().unwrap().success());
        assert_eq!(describe("MOONCAKE_TREE_TEST", &mark), "");
    }
}
