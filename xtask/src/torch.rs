//! `cargo xtask torch`: tests of process groups, expert parallelism and tensors with several
//! versions of torch.

use std::path::Path;

use crate::python;
use crate::run::{Result, command, step, target_dir};

/// Versions that are tested without words. The first becomes the oldest one that has a wheel for
/// this Python.
const VERSIONS: [&str; 4] = ["oldest", "2.11", "2.14", "newest"];
/// Second numbers of the versions that `oldest` may become.
const MINORS: std::ops::Range<u32> = 4..15;

/// Tests of a column of the table: the start of the names of their programs.
const COLUMNS: [&str; 3] = ["test_pg_", "test_ep", "test_tensor"];

/// Program that prints the version of torch.
const NAME: &str = "import torch; print(torch.__version__)";

/// Outcomes of the tests of one column.
#[derive(Default)]
struct Counts {
    passed: usize,
    skipped: usize,
    failed: usize,
}

/// Tests the package with each version, in an environment that is removed afterwards, and prints a
/// table. Without a Python, prints so.
pub(crate) fn test(words: &[&str]) -> Result {
    let (wheel, words) = match words {
        ["--wheel", wheel, rest @ ..] => (Some((*wheel).to_owned()), rest),
        words => (python::build_wheel()?, words),
    };
    let Some(wheel) = wheel else { return Ok(()) };
    let versions = if words.is_empty() { &VERSIONS } else { words };
    let mut rows = Vec::new();
    let folder = target_dir().join("torch-venv");
    for version in versions {
        step(&format!("torch {version}"));
        let row = in_environment(&folder, version, &wheel);
        // 6 GB.
        let _ = std::fs::remove_dir_all(&folder);
        rows.push(row?);
    }
    println!("\n| torch | `test_pg_*` | `test_ep*` | `test_tensor*` |\n|---|---|---|---|");
    for (version, counts) in &rows {
        let cells: Vec<String> = counts.iter().map(Counts::cell).collect();
        println!("| {version} | {} |", cells.join(" | "));
    }
    let failed: usize = rows.iter().flat_map(|(_, counts)| counts).map(|one| one.failed).sum();
    if failed == 0 { Ok(()) } else { Err(format!("{failed} tests failed")) }
}

/// Makes an environment with a version of torch and runs the tests there. Returns the installed
/// version and the counts of each column.
fn in_environment(folder: &Path, version: &str, wheel: &str) -> Result<(String, Vec<Counts>)> {
    command("python3", &["-m", "venv", "--clear", &folder.to_string_lossy()]).run()?;
    let python = folder.join("bin/python").to_string_lossy().into_owned();
    let requirement = match version {
        "newest" => "torch".to_owned(),
        "oldest" => oldest(&python)?,
        version => format!("torch=={}", exact(version)),
    };
    let wheel = format!("{wheel}[test]");
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"];
    command(&python, &pip).args(&[&requirement, &wheel]).run()?;
    let version = command(&python, &["-c", NAME]).output()?.trim().to_owned();
    let results = folder.join("results.xml");
    let tests = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"];
    let run = command(&python, &tests)
        .args(&["--junit-xml", &results.to_string_lossy()])
        .args(&programs()?.iter().map(String::as_str).collect::<Vec<_>>())
        .dir("mooncake-python");
    // The counts say which tests failed, and pytest names them.
    let outcome = run.run();
    let Ok(text) = std::fs::read_to_string(&results) else {
        return Err(outcome.err().unwrap_or_else(|| "pytest wrote no results".into()));
    };
    Ok((version, COLUMNS.iter().map(|column| Counts::of(column, &text)).collect()))
}

/// Returns the requirement of the oldest version that has a wheel for an interpreter.
fn oldest(python: &str) -> Result<String> {
    let is_there = |requirement: &String| {
        let pip =
            ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--no-deps"];
        command(python, &pip).args(&[requirement]).output().is_ok()
    };
    MINORS
        .map(|minor| format!("torch==2.{minor}.*"))
        .find(is_there)
        .ok_or_else(|| "no version of torch below 2.15 has a wheel for this Python".into())
}

/// Returns a version for pip: two numbers stand for all versions that begin with them.
fn exact(version: &str) -> String {
    if version.matches('.').count() == 1 { format!("{version}.*") } else { version.to_owned() }
}

/// Returns the paths of all test programs of the columns.
fn programs() -> Result<Vec<String>> {
    let folder = crate::run::root().join("mooncake-python/tests");
    let entries = std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut programs: Vec<String> = names
        .filter(|name| name.ends_with(".py") && COLUMNS.iter().any(|column| name.starts_with(column)))
        .map(|name| format!("tests/{name}"))
        .collect();
    programs.sort();
    Ok(programs)
}

impl Counts {
    /// Counts the tests of a column in the results of pytest, in the format of JUnit.
    fn of(column: &str, results: &str) -> Self {
        let start = format!("classname=\"tests.{column}");
        let mut counts = Self::default();
        for case in results.split("<testcase ").skip(1).filter(|case| case.starts_with(&start)) {
            let case = case.split("</testcase>").next().unwrap_or_default();
            if case.contains("<failure ") || case.contains("<error ") {
                counts.failed += 1;
            } else if case.contains("<skipped ") {
                counts.skipped += 1;
            } else {
                counts.passed += 1;
            }
        }
        counts
    }

    fn cell(&self) -> String {
        let mut cell = format!("{} passed", self.passed);
        for (count, word) in [(self.skipped, "skipped"), (self.failed, "failed")] {
            if count > 0 {
                cell += &format!(", {count} {word}");
            }
        }
        cell
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, exact};

    #[test]
    fn outcomes_are_counted_by_column() {
        let results = r#"<testsuite tests="4"><testcase classname="tests.test_pg_calls" name="a" time="1" />
            <testcase classname="tests.test_pg_calls" name="b"><failure message="&lt;x">y</failure></testcase>
            <testcase classname="tests.test_pg_cuda" name="c"><skipped type="pytest.skip" /></testcase>
            <testcase classname="tests.test_ep" name="d" time="1" /></testsuite>"#;
        assert_eq!(Counts::of("test_pg_", results).cell(), "1 passed, 1 skipped, 1 failed");
        assert_eq!(Counts::of("test_ep", results).cell(), "1 passed");
        assert_eq!(Counts::of("test_tensor", results).cell(), "0 passed");
    }

    #[test]
    fn two_numbers_stand_for_all_versions_that_begin_with_them() {
        assert_eq!([exact("2.11"), exact("2.12.1")], ["2.11.*", "2.12.1"]);
    }
}
