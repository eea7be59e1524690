//! `cargo xtask edges`: tests of rare interleavings. Each test runs once as built, and once more
//! with each planted bug that it must detect.
#![allow(clippy::disallowed_methods, reason = "the limit is of real time")]

mod edge;
mod limits;
mod table;

use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use self::edge::Edge;
use self::table::EDGES;
use crate::run::{Result, cargo, listed, step, test_program};

/// Maximum duration of one run of a test.
const LIMIT: Duration = Duration::from_secs(120);
/// Number of tests that run at the same time. Most of them wait.
const AT_A_TIME: usize = 5;

/// Runs every test of the table, and every test with each of its bugs. A bug that its test does not
/// detect is an error.
pub(crate) fn run(words: &[&str]) -> Result {
    step("edges");
    let built = cargo(&["test", "--workspace", "--all-features", "--no-run"]).shown_output()?;
    let mut runs = Vec::new();
    for (subject, edges) in EDGES {
        for edge in *edges {
            if !words.is_empty() && !words.iter().any(|word| subject == word || edge.test.contains(word)) {
                continue;
            }
            let program = edge.executable(&built)?;
            if !listed(&program, &["--exact", edge.test])?.iter().any(|name| name == edge.test) {
                return Err(format!("{} has no test {}", edge.program, edge.test));
            }
            runs.push((*subject, edge, program.clone(), None));
            runs.extend(edge.bugs.iter().map(|bug| (*subject, edge, program.clone(), Some(*bug))));
        }
    }
    let wanted = runs.len();
    let (waiting, faults) = (Mutex::new(runs.into_iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().ok().and_then(|mut runs| runs.next());
                    let Some((subject, edge, program, bug)) = next else { return };
                    let outcome = edge.judge(&program, bug);
                    let with = bug.map(|bug| format!(" with the bug {bug}")).unwrap_or_default();
                    match outcome {
                        Ok(took) => {
                            println!("ok {subject}: {}{with} ({:.1} s)", edge.test, took.as_secs_f32())
                        }
                        Err(why) => {
                            println!("FAILED {subject}: {}{with}: {why}", edge.test);
                            if let Ok(mut faults) = faults.lock() {
                                faults.push(format!("{}{with}", edge.test));
                            }
                        }
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap_or_default();
    if faults.is_empty() {
        println!("{wanted} runs, each as expected");
        Ok(())
    } else {
        Err(format!("{} of {wanted} runs ended otherwise than expected: {}", faults.len(), faults.join(", ")))
    }
}

impl Edge {
    fn executable(&self, built: &str) -> Result<String> {
        let Some(crate_name) = self.program.strip_prefix("lib ") else {
            return test_program(built, self.program);
        };
        let mark = format!("/deps/{crate_name}-");
        built
            .lines()
            .filter(|line| line.contains("unittests src/lib.rs"))
            .find_map(|line| line.rsplit_once('(')?.1.strip_suffix(')').filter(|path| path.contains(&mark)))
            .map(|path| crate::run::root().join(path).display().to_string())
            .ok_or_else(|| format!("cargo did not print the path of the unit tests of {crate_name}"))
    }

    /// Runs the test once. Without a bug, the test must pass; with one, the test must fail.
    fn judge(&self, program: &str, bug: Option<&str>) -> Result<Duration> {
        let mut command = Command::new(program);
        command.args(["--exact", self.test, "--include-ignored"]).current_dir(self.folder());
        // The output matters only for a run that fails. A file cannot fill up as a pipe does.
        let output = std::env::temp_dir().join(format!(
            "mooncake-edge-{}-{}-{}",
            std::process::id(),
            self.test.replace("::", "-"),
            bug.unwrap_or("none")
        ));
        let file = std::fs::File::create(&output).map_err(|e| format!("{}: {e}", output.display()))?;
        let errors = file.try_clone().map_err(|e| e.to_string())?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        // A bug is found within all the rounds of a test.
        command.env("MOONCAKE_TEST_EFFORT", "full");
        if let Some(bug) = bug {
            command.env("MOONCAKE_PLANTED_BUG", bug);
        }
        let begun = Instant::now();
        let mut child = command.spawn().map_err(|e| format!("cannot start {program}: {e}"))?;
        let status = loop {
            match child.try_wait().map_err(|e| e.to_string())? {
                Some(status) => break Some(status),
                None if begun.elapsed() > LIMIT => {
                    let _ = child.kill();
                    let _ = child.wait();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let said = std::fs::read(&output).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let _ = std::fs::remove_file(&output);
        match (status, bug) {
            (None, _) => Err(format!("did not end within {} s", LIMIT.as_secs())),
            (Some(status), None) if status.success() && said.contains("1 passed") => Ok(begun.elapsed()),
            (Some(status), None) => Err(format!("{status}\n{said}")),
            // 101 is the exit status of a test program of which a test failed.
            (Some(status), Some(_)) if status.code() == Some(101) && said.contains("1 failed") => {
                Ok(begun.elapsed())
            }
            (Some(status), Some(_)) => Err(format!("the test did not detect it ({status})")),
        }
    }

    /// Returns the folder in which cargo runs the test, which is that of its crate.
    fn folder(&self) -> std::path::PathBuf {
        let root = crate::run::root();
        let holds = |name: &str| {
            let tests = root.join(name).join("tests");
            tests.join(format!("{}.rs", self.program)).exists() || tests.join(self.program).is_dir()
        };
        let of_crate = self.program.strip_prefix("lib ").map(|name| name.replace('_', "-"));
        let crates = std::fs::read_dir(&root).into_iter().flatten().flatten();
        let mut names = crates.filter_map(|entry| entry.file_name().into_string().ok());
        let name = of_crate.or_else(|| names.find(|name| name.starts_with("mooncake-") && holds(name)));
        name.map_or(root, |name| crate::run::crate_folder(&name))
    }
}
