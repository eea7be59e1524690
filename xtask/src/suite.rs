//! `cargo xtask test`: the Rust test programs, the documentation tests and the tests of the Python
//! package, several at a time. A part that fails runs again, alone; a part that passes then is
//! reported as flaky.
#![allow(clippy::disallowed_methods, reason = "a task runner measures real time")]

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::run::{Result, Run, cargo, command, step, target_dir};
use crate::{debian, python, tree};

/// Test programs that run at once. Most of their time is waiting.
const AT_ONCE: usize = 4;
/// Runs of a part that fails, after the first one.
const REPEATS: usize = 2;
/// Last lines of a failed run that the report of a flaky part shows.
const SHOWN_LINES: usize = 40;
/// Variable that makes a missing program an error, and lets the tests install what they need.
const CI: &str = "MOONCAKE_CI";
/// Variable that counts a flaky part as failed.
pub(crate) const NO_REPEATS: &str = "MOONCAKE_TEST_ONCE";
/// Seed of property tests, unless the environment names one.
const PROPERTY_SEED: (&str, &str) = ("PROPTEST_RNG_SEED", "20261129");
/// Cases of each property test, unless the environment names a number.
const PROPERTY_CASES: (&str, &str) = ("PROPTEST_CASES", "64");
/// Interval between two looks at the programs that run.
const POLL: Duration = Duration::from_millis(50);
/// Interval between two reports of the programs that run.
const REPORT: Duration = Duration::from_secs(60);
/// Longest time without any output of a part. A test takes at most a minute on two idle cores, and
/// its program prints a line when it ends.
const SILENCE: Duration = Duration::from_secs(600);
/// Variable whose value marks the processes of a part.
const PART: &str = "MOONCAKE_TEST_PART";
/// Longest a program took for `--quick` to include it, in its last complete run.
const QUICK: Duration = Duration::from_secs(4);

/// Servers that tests start, with their Debian packages.
const SERVERS: &[(&str, &str)] = &[("etcd", "etcd-server"), ("redis-server", "redis-server")];
/// Library of the tests of directories in RocksDB, with its Debian package.
const ROCKSDB: (&str, &str) = ("librocksdb.so", "librocksdb7.8");
/// Compilers of the tests of the C interface, with their Debian packages.
const COMPILERS: &[(&str, &str)] = &[("cc", "gcc"), ("c++", "g++")];

/// A test program of the workspace.
#[derive(Debug, PartialEq)]
struct Program {
    package: String,
    target: String,
    /// Unit tests, as opposed to a file or folder of `tests`.
    is_unit: bool,
    folder: PathBuf,
    executable: PathBuf,
}

impl Program {
    /// Parses a line of cargo's JSON messages; `None` for everything but a test program.
    fn parse(line: &str) -> Option<Self> {
        // The target has a field `test`, too: whether it has tests.
        let (_, profile) = line.split_once("\"profile\":{")?;
        let (profile, _) = profile.split_once('}')?;
        if !line.starts_with("{\"reason\":\"compiler-artifact\"") || !profile.ends_with("\"test\":true") {
            return None;
        }
        let executable = text_of(line, "executable")?.into();
        let folder: PathBuf = PathBuf::from(text_of(line, "manifest_path")?).parent()?.into();
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).ok()?;
        let package = manifest.lines().find_map(|line| line.strip_prefix("name = "))?;
        Some(Self {
            package: package.trim_matches('"').to_owned(),
            target: text_of(line, "name")?.to_owned(),
            is_unit: !line.contains("\"kind\":[\"test\"]"),
            folder,
            executable,
        })
    }

    fn name(&self) -> String {
        let target = if self.is_unit { "unit tests of " } else { "" };
        format!("{} {target}{}", self.package, self.target)
    }

    /// Returns the command that runs this program alone.
    fn alone(&self) -> String {
        let which = if self.is_unit { "--lib --bins".to_owned() } else { format!("--test {}", self.target) };
        format!("cargo test -p {} --all-features {which}", self.package)
    }

    /// Returns the program as `cargo test` starts it.
    fn job(self) -> Job {
        let size = std::fs::metadata(&self.executable).map_or(0, |file| file.len());
        let (name, alone) = (self.name(), self.alone());
        let start = move |tests: &[String]| {
            let built = target_dir().join("debug");
            let libraries = format!("{}:{}", built.join("deps").display(), built.display());
            let words: Vec<&str> = tests.iter().map(String::as_str).collect();
            let run = command(&self.executable.to_string_lossy(), &words)
                .env("CARGO_MANIFEST_DIR", &self.folder.to_string_lossy())
                .env("CARGO_PKG_NAME", &self.package)
                .env("LD_LIBRARY_PATH", &libraries)
                .dir(&self.folder.to_string_lossy());
            if tests.is_empty() { run } else { run.args(&["--exact"]) }
        };
        Job { name, start: Box::new(start), alone, size }
    }
}

/// Returns the first text of that name in a line of JSON without escapes.
fn text_of<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
    rest.split_once('"').map(|(text, _)| text)
}

/// Runs the tests. Words that are not options go to `cargo test`, which runs alone then.
pub(crate) fn test(words: &[&str]) -> Result {
    let (quick, words): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| **word == "--quick");
    if !words.is_empty() {
        return cargo(&["test", "--workspace", "--all-features"]).args(&words).run();
    }
    let quick = !quick.is_empty();
    step("programs that tests need");
    let skipped = prepare()?;
    step("build");
    let mut programs = build()?;
    let times = Times::read();
    if quick {
        programs
            .retain(|program| program.is_unit || times.of(&program.name()).is_some_and(|time| time < QUICK));
        return run(programs.into_iter().map(Program::job).collect(), times);
    }
    let mut jobs: Vec<Job> = programs.into_iter().map(Program::job).collect();
    jobs.push(documentation());
    let installed = if is_ci() { python::install_torch() } else { python::install() };
    match installed {
        Ok(_) => jobs.extend(python_job()),
        // Other tests need no package registry.
        Err(error) if !is_ci() => println!("skipped: the tests of the Python package: {error}"),
        Err(error) => return Err(error),
    }
    let outcome = run(jobs, times);
    if !skipped.is_empty() {
        println!("\nSkipped tests need programs that are not installed:");
        skipped.iter().for_each(|(missing, package)| println!("  {missing:<28} Debian: {package}"));
    }
    outcome
}

#[allow(clippy::disallowed_methods, reason = "a setting of the tests")]
fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some()
}

fn is_ci() -> bool {
    is_set(CI)
}

/// Returns the missing programs and libraries, each with its Debian package. CI installs them.
fn prepare() -> Result<Vec<(&'static str, &'static str)>> {
    if is_ci() {
        debian::install_programs(SERVERS, "the test of metadata directories")?;
        debian::install_library(ROCKSDB, "the test of metadata directories in folders")?;
    }
    let programs = SERVERS.iter().chain(COMPILERS).copied();
    let mut missing: Vec<_> = programs.filter(|(program, _)| !debian::has_program(program)).collect();
    missing.extend((!debian::has_library(ROCKSDB.0)).then_some(ROCKSDB));
    missing.extend((!python::is_usable()).then_some(("python3 3.11 or newer, venv", "python3-venv")));
    for (missing, package) in &missing {
        println!("{missing} is not installed (Debian: {package}): the tests that need it are skipped");
    }
    if is_ci() && !missing.is_empty() {
        return Err("CI needs every program of the tests".into());
    }
    Ok(missing)
}

/// Returns the documentation tests of all crates.
fn documentation() -> Job {
    // `--doc` runs the examples of `mooncake-interleavings` although its manifest excludes them.
    let words = ["--workspace", "--all-features", "--exclude", "mooncake-interleavings", "--doc"];
    Job {
        name: "documentation tests".into(),
        start: Box::new(move |_| cargo(&["test", "--quiet"]).args(&words)),
        alone: format!("cargo test {}", words.join(" ")),
        size: 0,
    }
}

fn build() -> Result<Vec<Program>> {
    let build =
        ["test", "--workspace", "--all-features", "--no-run", "--message-format=json-render-diagnostics"];
    let said = cargo(&build).printed()?;
    let programs: Vec<_> = said.lines().filter_map(Program::parse).collect();
    if programs.is_empty() { Err("cargo named no test program".into()) } else { Ok(programs) }
}

/// Returns the command for tests with these names, or for all tests without a name.
type Start = Box<dyn Fn(&[String]) -> Run>;

/// A part of the tests: a program, the documentation tests, or the tests of the Python package.
struct Job {
    name: String,
    start: Start,
    /// Command that runs this part alone.
    alone: String,
    /// Estimate of the duration of a part that has never passed: larger is longer.
    size: u64,
}

impl Job {
    fn log(&self) -> PathBuf {
        state_folder().join(format!("{}.log", self.name.replace(' ', "-")))
    }

    /// Starts the tests with these names, or all of them.
    fn start(self, tests: &[String]) -> Result<Running> {
        let fault = |error| format!("cannot start {}: {error}", self.name);
        std::fs::create_dir_all(state_folder()).map_err(fault)?;
        let output = File::create(self.log()).map_err(fault)?;
        let errors = output.try_clone().map_err(fault)?;
        let run = [PROPERTY_SEED, PROPERTY_CASES]
            .into_iter()
            .filter(|(variable, _)| !is_set(variable))
            .fold((self.start)(tests), |run, (variable, value)| run.env(variable, value));
        let mark = format!("{}-{}", std::process::id(), self.name.replace(' ', "-"));
        let child = run.env(PART, &mark).start(Stdio::from(output), Stdio::from(errors)).map_err(fault)?;
        let now = Instant::now();
        Ok(Running { job: self, child, started: now, mark, heard: (0, now) })
    }

    /// Returns the output of the last run.
    fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.log()).unwrap_or_default()).into_owned()
    }
}

/// A part that runs.
struct Running {
    job: Job,
    child: Child,
    started: Instant,
    mark: String,
    /// Length of the output, and the time of its last change.
    heard: (u64, Instant),
}

impl Running {
    /// Returns the outcome of the part once it has ended: the reason if it has not passed. A part
    /// without output for too long is killed; the description of its processes and its unfinished
    /// tests become part of its output.
    fn poll(&mut self, silence: Duration) -> Result<Option<Result>> {
        let fault = |error| format!("cannot wait for {}: {error}", self.job.name);
        if let Some(status) = self.child.try_wait().map_err(fault)? {
            return Ok(Some(if status.success() { Ok(()) } else { Err(status.to_string()) }));
        }
        let length = std::fs::metadata(self.job.log()).map_or(0, |file| file.len());
        if length != self.heard.0 {
            self.heard = (length, Instant::now());
        }
        if self.heard.1.elapsed() < silence {
            return Ok(None);
        }
        let mut report = format!("\nno output for {} s. Its processes:\n", silence.as_secs());
        report += &tree::describe(PART, &self.mark);
        tree::kill_marked(PART, &self.mark);
        let _ = self.child.kill();
        let _ = self.child.wait();
        report += "\nfailures:\n";
        unfinished_tests(&self.job.output()).iter().for_each(|test| report += &format!("    {test}\n"));
        let mut log = File::options().append(true).open(self.job.log()).map_err(fault)?;
        log.write_all(report.as_bytes()).map_err(fault)?;
        Ok(Some(Err(format!("no output for {} s", silence.as_secs()))))
    }

    /// Waits until the part has ended. Returns whether it has passed.
    fn wait(&mut self) -> Result<bool> {
        loop {
            if let Some(outcome) = self.poll(SILENCE)? {
                return Ok(outcome.is_ok());
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Runs parts, the longest first, to the end of all of them.
fn run(jobs: Vec<Job>, mut times: Times) -> Result {
    let parts = jobs.len();
    step(&format!("{parts} parts of the tests, {AT_ONCE} at a time"));
    let mut waiting = jobs;
    // The last one starts first. Unknown ones are the longest; large ones have more tests.
    waiting.sort_by_key(|job| (times.of(&job.name).unwrap_or(Duration::MAX), job.size));
    let (mut running, mut failed): (Vec<Running>, Vec<(Job, String)>) = (Vec::new(), Vec::new());
    let (mut done, mut reported) = (0, Instant::now());
    while !(waiting.is_empty() && running.is_empty()) {
        while running.len() < AT_ONCE
            && let Some(job) = waiting.pop()
        {
            running.push(job.start(&[])?);
        }
        std::thread::sleep(POLL);
        let mut still = Vec::new();
        for mut one in running {
            let Some(outcome) = one.poll(SILENCE)? else {
                still.push(one);
                continue;
            };
            done += 1;
            let took = one.started.elapsed();
            let verdict = if outcome.is_ok() { "ok    " } else { "FAILED" };
            println!("{done:3}/{parts} {verdict} {:6.1} s  {}", took.as_secs_f32(), one.job.name);
            match outcome {
                Ok(()) => times.set(one.job.name, took),
                Err(reason) => {
                    let said = one.job.output();
                    println!("\n{said}\n{}: {reason}", one.job.name);
                    failed.push((one.job, said));
                }
            }
        }
        running = still;
        if reported.elapsed() > REPORT {
            reported = Instant::now();
            let names: Vec<_> = running.iter().map(|one| one.job.name.as_str()).collect();
            println!("        still running: {}", names.join(", "));
        }
    }
    times.write();
    judge(failed)
}

/// Runs the parts that failed again, each alone, and reports those that pass as flaky.
fn judge(failed: Vec<(Job, String)>) -> Result {
    let (mut flaky, mut red) = (Vec::new(), Vec::new());
    let repeats = if is_set(NO_REPEATS) { 0 } else { REPEATS };
    for (mut job, said) in failed {
        let tests = failed_tests(&said);
        let mut has_passed = false;
        for repeat in 1..=repeats {
            step(&format!("{}, alone, repeat {repeat}: {}", job.name, tests.join(" ")));
            let mut running = job.start(&tests)?;
            has_passed = running.wait()?;
            job = running.job;
            println!("{}", job.output());
            if has_passed {
                break;
            }
        }
        if has_passed { flaky.push((job, said, tests)) } else { red.push((job, said, tests)) }
    }
    for (job, said, tests) in &flaky {
        let seed = std::env::var("MOONCAKE_TEST_SEED").unwrap_or_else(|_| "fixed".into());
        println!("\nFLAKY {}: {}, seed {seed}. The first failure ended with:", job.name, tests.join(" "));
        println!("{}", last_lines(said, SHOWN_LINES));
    }
    if red.is_empty() {
        println!("\n{} flaky parts", flaky.len());
        return Ok(());
    }
    let mut report = format!("{} parts of the tests failed", red.len());
    for (job, said, tests) in &red {
        report += &format!("\n{}: {}", job.name, tests.join(" "));
        let reasons = said.lines().filter(|line| line.contains("panicked at") || line.starts_with("E  "));
        reasons.take(8).for_each(|reason| report += &format!("\n  {reason}"));
        report += &format!("\n  repeat: {}", job.alone);
    }
    Err(report)
}

/// Returns the names of failed tests in the output of a test program or of pytest. Returns none if
/// the program ended without naming them.
fn failed_tests(said: &str) -> Vec<String> {
    if let Some((_, list)) = said.rsplit_once("\nfailures:\n") {
        let names = list.lines().map_while(|line| line.strip_prefix("    "));
        return names.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    }
    let Some((_, summary)) = said.rsplit_once(" short test summary info ") else { return Vec::new() };
    let lines = summary
        .lines()
        .filter_map(|line| line.strip_prefix("FAILED ").or_else(|| line.strip_prefix("ERROR ")));
    let mut tests: Vec<String> =
        lines.map(|line| line.split(" - ").next().unwrap_or(line).to_owned()).collect();
    tests.dedup();
    tests
}

/// Returns the names of the tests that a test program has reported as slow, and not as ended.
fn unfinished_tests(said: &str) -> Vec<String> {
    let test_of = |start: &str| start.strip_prefix("test ").map(str::to_owned);
    let slow = said.lines().filter_map(|line| test_of(line.split_once(" has been running for over ")?.0));
    let ended: Vec<String> = said.lines().filter_map(|line| test_of(line.rsplit_once(" ... ")?.0)).collect();
    slow.filter(|name| !ended.contains(name)).collect()
}

/// Returns the last `count` lines.
fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Returns the tests of the installed Python package; `None` without a Python.
fn python_job() -> Option<Job> {
    python::tests_of_installed(&[])?;
    let start = |tests: &[String]| python::tests_of_installed(tests).unwrap_or_else(|| command("false", &[]));
    Some(Job {
        name: "Python package".into(),
        start: Box::new(start),
        alone: "cargo xtask python".into(),
        size: u64::MAX,
    })
}

/// Folder of the outputs and times of the last run.
fn state_folder() -> PathBuf {
    target_dir().join("xtask-test")
}

/// Time that each part took when it last passed.
struct Times(HashMap<String, Duration>);

impl Times {
    fn path() -> PathBuf {
        state_folder().join("times")
    }

    fn read() -> Self {
        Self::parse(&std::fs::read_to_string(Self::path()).unwrap_or_default())
    }

    fn parse(text: &str) -> Self {
        let time = |line: &str| {
            let (millis, name) = line.split_once(' ')?;
            Some((name.to_owned(), Duration::from_millis(millis.parse().ok()?)))
        };
        Self(text.lines().filter_map(time).collect())
    }

    fn of(&self, part: &str) -> Option<Duration> {
        self.0.get(part).copied()
    }

    fn set(&mut self, part: String, took: Duration) {
        self.0.insert(part, took);
    }

    /// Writes the times. They only choose an order, so a failed write does not fail the tests.
    fn write(&self) {
        let lines: Vec<_> =
            self.0.iter().map(|(name, time)| format!("{} {name}\n", time.as_millis())).collect();
        let _ = std::fs::write(Self::path(), lines.concat());
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn test_programs_are_parsed_and_other_artifacts_are_not() {
        // Tests run in the folder of their package. A path from the time of the build may be that
        // of another checkout with the same target directory.
        let here = Path::new("Cargo.toml").canonicalize().unwrap();
        let line = |kind: &str, test: bool, executable: &str| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"package_id\":\"path+file:///x\",\"manifest_path\":\"{}\",\"target\":{{\"kind\":[\"{kind}\"],\"crate_types\":[\"bin\"],\"name\":\"t\",\"src_path\":\"/x\",\"test\":true}},\"profile\":{{\"opt_level\":\"0\",\"test\":{test}}},\"features\":[],\"executable\":{executable},\"fresh\":true}}",
                here.display()
            )
        };
        let program = Program::parse(&line("test", true, "\"/t/deps/t-1\"")).unwrap();
        assert_eq!((program.name().as_str(), program.is_unit), ("xtask t", false));
        assert_eq!(program.executable, Path::new("/t/deps/t-1"));
        assert_eq!(program.folder, here.parent().unwrap());
        assert!(Program::parse(&line("lib", true, "\"/t/deps/t-1\"")).unwrap().is_unit);
        assert_eq!(Program::parse(&line("lib", true, "null")), None);
        assert_eq!(Program::parse(&line("bin", false, "\"/t/t\"")), None);
        assert_eq!(Program::parse("{\"reason\":\"build-finished\",\"success\":true}"), None);
    }

    #[test]
    fn failed_tests_are_named_by_the_last_list() {
        let said = "\nfailures:\n\n---- a::b stdout ----\nsaid\n\nfailures:\n    a::b\n    c\n\ntest result: FAILED.";
        assert_eq!(failed_tests(said), ["a::b", "c"]);
        assert_eq!(failed_tests("a signal ended it"), [""; 0]);
        let said = "=== short test summary info ===\nFAILED tests/a.py::b[x y] - E: 1 - 2\nERROR tests/a.py::c\n1 failed, 1 error in 2 s";
        assert_eq!(failed_tests(said), ["tests/a.py::b[x y]", "tests/a.py::c"]);
        assert_eq!(last_lines("a\nb\nc\n", 2), "b\nc");
        assert_eq!(last_lines("a", 2), "a");
    }

    #[test]
    fn tests_that_never_end_are_named() {
        let said = "test a ... ok\ntest b has been running for over 60 seconds\ntest c has been running for over 60 seconds\ntest c ... FAILED\ntest d ... ignored, e ... f\n";
        assert_eq!(unfinished_tests(said), ["b"]);
    }

    #[test]
    fn a_part_that_hangs_is_killed_and_described() {
        let start = |_: &[String]| command("sh", &["-c", "echo; sleep 600 & wait"]);
        let name = format!("part {}", std::process::id());
        let job = Job { name, start: Box::new(start), alone: String::new(), size: 0 };
        let mut running = job.start(&[]).unwrap();
        // The shell prints a line, and a moment later its child becomes `sleep`.
        let mark = running.mark.clone();
        let words = |pid: &String| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_there = || tree::marked(PART, &mark).iter().any(|pid| words(pid).starts_with(b"sleep"));
        while std::fs::read(running.job.log()).unwrap().is_empty() || !is_there() {
            assert_eq!(running.poll(SILENCE), Ok(None));
        }
        assert!(matches!(running.poll(Duration::ZERO), Ok(Some(Err(_)))));
        let said = running.job.output();
        std::fs::remove_file(running.job.log()).unwrap();
        assert!(said.contains("no output for") && said.contains(": sleep 600"), "{said}");
        assert_eq!(tree::describe(PART, &running.mark), "");
    }

    #[test]
    fn times_of_programs_are_read_line_by_line() {
        let times = Times::parse("1500 a b\nbroken\n20 c\n");
        assert_eq!(times.0.len(), 2);
        assert_eq!(times.0["a b"], Duration::from_millis(1500));
    }
}
