//! `cargo xtask test`: the Rust test programs, the documentation tests and the tests of the Python
//! package, several at a time.
#![allow(clippy::disallowed_methods, reason = "a task runner measures real time")]

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::aside::Aside;
use crate::run::{Result, Run, cargo, command, step, target_dir};
use crate::{debian, python};

/// Test programs that run at once. Most of their time is waiting.
const AT_ONCE: usize = 4;
/// Interval between two looks at the programs that run.
const POLL: Duration = Duration::from_millis(50);
/// Interval between two reports of the programs that run.
const REPORT: Duration = Duration::from_secs(60);
/// Longest a program took for `--quick` to include it, in its last complete run.
const QUICK: Duration = Duration::from_secs(4);

/// Servers that tests start, with their Debian packages.
pub(crate) const SERVERS: &[(&str, &str)] = &[("etcd", "etcd-server"), ("redis-server", "redis-server")];
/// Library of the tests of directories in RocksDB, with its Debian package.
pub(crate) const ROCKSDB: (&str, &str) = ("librocksdb.so", "librocksdb7.8");
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
    fn job(&self, in_ci: bool) -> Job {
        let built = target_dir().join("debug");
        let libraries = format!("{}:{}", built.join("deps").display(), built.display());
        let run = command(&self.executable.to_string_lossy(), &[])
            .env("CARGO_MANIFEST_DIR", &self.folder.to_string_lossy())
            .env("CARGO_PKG_NAME", &self.package)
            .env("LD_LIBRARY_PATH", &libraries)
            .dir(&self.folder.to_string_lossy());
        // Clients come and go for a minute then.
        let run = if in_ci { run.env("MOONCAKE_CI", "1").env("TEST_SECONDS", "60") } else { run };
        let size = std::fs::metadata(&self.executable).map_or(0, |file| file.len());
        Job { name: self.name(), run, alone: self.alone(), size }
    }
}

/// Returns the first text of that name in a line of JSON without escapes.
fn text_of<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
    rest.split_once('"').map(|(text, _)| text)
}

/// Runs the tests. Words that are not options go to `cargo test`, which runs alone then.
pub(crate) fn test(words: &[&str], in_ci: bool) -> Result {
    let (quick, words): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| **word == "--quick");
    if !words.is_empty() {
        return cargo(&["test", "--workspace", "--all-features"]).args(&words).run();
    }
    let quick = !quick.is_empty();
    step("programs that tests need");
    name_missing(in_ci, quick);
    step("build");
    let mut programs = build()?;
    let times = Times::read();
    if quick {
        programs
            .retain(|program| program.is_unit || times.of(&program.name()).is_some_and(|time| time < QUICK));
        return run(programs.iter().map(|program| program.job(in_ci)).collect(), None, times);
    }
    let mut jobs: Vec<Job> = programs.iter().map(|program| program.job(in_ci)).collect();
    // `--doc` runs the examples of `mooncake-interleavings` although its manifest excludes them.
    let documentation = ["--workspace", "--all-features", "--exclude", "mooncake-interleavings", "--doc"];
    jobs.push(Job {
        name: "documentation tests".into(),
        run: cargo(&["test", "--quiet"]).args(&documentation),
        alone: format!("cargo test {}", documentation.join(" ")),
        size: 0,
    });
    if in_ci {
        // An earlier step has installed the package.
        jobs.extend(python_job());
        return run(jobs, None, times);
    }
    // The release build of the package takes the processors that waiting tests leave idle.
    run(jobs, Some(Aside::start(&["python-package"])?), times)
}

/// Names missing programs and libraries before anything is built.
fn name_missing(in_ci: bool, quick: bool) {
    let outcome = if in_ci { "fail" } else { "are skipped" };
    let name = |missing: &str, package: &str| {
        println!("{missing} is not installed (Debian: {package}): the tests that need it {outcome}");
    };
    for (program, package) in SERVERS.iter().chain(COMPILERS) {
        if !debian::has_program(program) {
            name(program, package);
        }
    }
    if !debian::has_library(ROCKSDB.0) {
        name(ROCKSDB.0, ROCKSDB.1);
    }
    if !quick && !python::is_usable() {
        name("python3 3.11 or newer with venv", "python3-venv");
    }
}

fn build() -> Result<Vec<Program>> {
    let build =
        ["test", "--workspace", "--all-features", "--no-run", "--message-format=json-render-diagnostics"];
    let said = cargo(&build).printed()?;
    let programs: Vec<_> = said.lines().filter_map(Program::parse).collect();
    if programs.is_empty() { Err("cargo named no test program".into()) } else { Ok(programs) }
}

/// A part of the tests: a program, the documentation tests, or the tests of the Python package.
struct Job {
    name: String,
    run: Run,
    /// Command that runs this part alone.
    alone: String,
    /// Estimate of the duration of a part that has never passed: larger is longer.
    size: u64,
}

/// A part that runs.
struct Running {
    name: String,
    alone: String,
    child: Child,
    log: PathBuf,
    started: Instant,
}

/// Runs parts, the longest first, to the end of all of them. The tests of the Python package join
/// once `package` has installed it.
fn run(jobs: Vec<Job>, mut package: Option<Aside>, mut times: Times) -> Result {
    let parts = jobs.len() + usize::from(package.is_some());
    step(&format!("{parts} parts of the tests, {AT_ONCE} at a time"));
    let mut waiting = jobs;
    // The last one starts first. Unknown ones are the longest; large ones have more tests.
    waiting.sort_by_key(|job| (times.of(&job.name).unwrap_or(Duration::MAX), job.size));
    let (mut running, mut failed): (Vec<Running>, Vec<String>) = (Vec::new(), Vec::new());
    let (mut done, mut reported) = (0, Instant::now());
    while !(waiting.is_empty() && running.is_empty() && package.is_none()) {
        let is_idle = waiting.is_empty() && running.is_empty();
        if let Some(installed) = package.take_if(|package| is_idle || package.has_ended()) {
            match installed.finish() {
                Ok(()) => waiting.extend(python_job()),
                Err(error) => {
                    println!("{error}");
                    failed.push("  cargo xtask python".into());
                }
            }
        }
        while running.len() < AT_ONCE
            && let Some(job) = waiting.pop()
        {
            running.push(start(job)?);
        }
        std::thread::sleep(POLL);
        let mut still = Vec::new();
        for mut one in running {
            let status = one.child.try_wait().map_err(|e| format!("cannot wait for {}: {e}", one.name))?;
            let Some(status) = status else {
                still.push(one);
                continue;
            };
            done += 1;
            let took = one.started.elapsed();
            let verdict = report(&one, status);
            println!("{done:3}/{parts} {verdict} {:6.1} s  {}", took.as_secs_f32(), one.name);
            if status.success() {
                times.set(one.name, took);
            } else {
                failed.push(format!("  {}", one.alone));
            }
        }
        running = still;
        if reported.elapsed() > REPORT {
            reported = Instant::now();
            let names: Vec<_> = running.iter().map(|one| one.name.as_str()).collect();
            println!("        still running: {}", names.join(", "));
        }
    }
    times.write();
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("{} parts of the tests failed. Each alone:\n{}", failed.len(), failed.join("\n")))
}

/// Returns the tests of the installed Python package; `None` without a Python.
fn python_job() -> Option<Job> {
    let run = python::tests_of_installed()?;
    Some(Job { name: "Python package".into(), run, alone: "cargo xtask python".into(), size: 0 })
}

fn start(job: Job) -> Result<Running> {
    let Job { name, run, alone, .. } = job;
    let fault = |error| format!("cannot start {name}: {error}");
    let folder = state_folder();
    std::fs::create_dir_all(&folder).map_err(fault)?;
    let log = folder.join(format!("{}.log", name.replace(' ', "-")));
    let output = File::create(&log).map_err(fault)?;
    let errors = output.try_clone().map_err(fault)?;
    let child = run.start(Stdio::from(output), Stdio::from(errors)).map_err(fault)?;
    Ok(Running { name, alone, child, log, started: Instant::now() })
}

/// Prints the output of a part that failed; the word for its outcome.
fn report(one: &Running, status: ExitStatus) -> &'static str {
    if status.success() {
        return "ok    ";
    }
    let said = std::fs::read(&one.log).unwrap_or_default();
    println!("\n{}\n{}: {status}", String::from_utf8_lossy(&said), one.name);
    "FAILED"
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
    fn times_of_programs_are_read_line_by_line() {
        let times = Times::parse("1500 a b\nbroken\n20 c\n");
        assert_eq!(times.0.len(), 2);
        assert_eq!(times.0["a b"], Duration::from_millis(1500));
    }
}
