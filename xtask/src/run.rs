//! Starting other programs, with words for what went wrong.
#![allow(clippy::disallowed_methods, reason = "cargo talks to its tasks through the environment")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

pub(crate) type Result<T = ()> = std::result::Result<T, String>;

/// A program about to be started.
pub(crate) struct Run {
    command: Command,
    shown: String,
}

/// `cargo` with these arguments, from the workspace root.
pub(crate) fn cargo(args: &[&str]) -> Run {
    // The cargo that started us, which may be another than the first in the path.
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    command(&cargo.to_string_lossy(), args).shown_as("cargo")
}

/// Any program with these arguments, from the workspace root.
pub(crate) fn command(program: &str, args: &[&str]) -> Run {
    let mut command = Command::new(program);
    // `cargo run` tells xtask about itself; a cargo started from here must not inherit that.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"] {
        command.env_remove(name);
    }
    command.current_dir(root()).args(args);
    Run { command, shown: format!("{program} {}", args.join(" ")) }
}

impl Run {
    pub(crate) fn args(mut self, args: &[&str]) -> Self {
        self.command.args(args);
        self.shown = format!("{} {}", self.shown, args.join(" "));
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Programs that it starts by name are looked for there first.
    pub(crate) fn found_first_in(self, folder: &Path) -> Self {
        let others = std::env::var("PATH").unwrap_or_default();
        self.env("PATH", &format!("{}:{others}", folder.display()))
    }

    pub(crate) fn dir(mut self, dir: &str) -> Self {
        self.command.current_dir(root().join(dir));
        self
    }

    fn shown_as(mut self, name: &str) -> Self {
        if let Some((_, rest)) = self.shown.split_once(' ') {
            self.shown = format!("{name} {rest}");
        }
        self
    }

    /// Runs the program with nothing to read, and copies its output, whatever the program does to
    /// its standard output.
    pub(crate) fn run_through_a_pipe(mut self) -> Result {
        self.command.stdin(Stdio::null()).stdout(Stdio::piped());
        let fault = |e| format!("cannot start `{}`: {e}", self.shown);
        let mut child = self.command.spawn().map_err(fault)?;
        if let Some(mut out) = child.stdout.take() {
            // A closed terminal does not stop the program.
            let _ = std::io::copy(&mut out, &mut std::io::stdout());
        }
        let status = child.wait().map_err(fault)?;
        if status.success() { Ok(()) } else { Err(format!("`{}` failed: {status}", self.shown)) }
    }

    /// Runs it to its end; an exit status other than zero is an error.
    pub(crate) fn run(mut self) -> Result {
        let status = self.command.status().map_err(|e| format!("cannot start `{}`: {e}", self.shown))?;
        if status.success() { Ok(()) } else { Err(format!("`{}` failed: {status}", self.shown)) }
    }

    /// Runs it and returns what it said on its second stream, which is shown too.
    pub(crate) fn shown_output(mut self) -> Result<String> {
        self.command.stderr(Stdio::piped());
        let fault = |e| format!("cannot start `{}`: {e}", self.shown);
        let mut child = self.command.spawn().map_err(fault)?;
        let mut said = String::new();
        let lines = child.stderr.take().map(|stream| BufReader::new(stream).lines());
        for line in lines.into_iter().flatten().map_while(std::result::Result::ok) {
            eprintln!("{line}");
            said += &line;
            said.push('\n');
        }
        let status = child.wait().map_err(fault)?;
        if status.success() { Ok(said) } else { Err(format!("`{}` failed: {status}", self.shown)) }
    }

    /// Starts the program with nothing to read.
    pub(crate) fn start(mut self, output: Stdio, errors: Stdio) -> std::io::Result<Child> {
        self.command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn()
    }

    /// Runs the program with nothing to read. Returns its output, followed by its errors, and
    /// whether it succeeded.
    pub(crate) fn captured(mut self) -> (String, Result) {
        match self.command.stdin(Stdio::null()).output() {
            Err(error) => (String::new(), Err(format!("cannot start `{}`: {error}", self.shown))),
            Ok(output) => {
                let said = [&output.stdout[..], &output.stderr].concat();
                let failed = || Err(format!("`{}` failed: {}", self.shown, output.status));
                let ended = if output.status.success() { Ok(()) } else { failed() };
                (String::from_utf8_lossy(&said).into_owned(), ended)
            }
        }
    }

    /// Runs the program and returns its output; its errors are shown.
    pub(crate) fn printed(mut self) -> Result<String> {
        self.command.stderr(Stdio::inherit());
        self.output()
    }

    /// Runs the program and returns its output; its errors become part of the error.
    pub(crate) fn output(mut self) -> Result<String> {
        let output = self.command.output().map_err(|e| format!("cannot start `{}`: {e}", self.shown))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(format!("`{}` failed: {}\n{errors}", self.shown, output.status));
        }
        String::from_utf8(output.stdout)
            .map_err(|_| format!("`{}` printed something that is not text", self.shown))
    }
}

/// Programs of the workspace, built.
#[derive(Clone, Copy)]
pub(crate) struct Programs(&'static str);

impl Programs {
    /// Builds all programs for checks, with the features of the tests, which leaves little to build
    /// after the tests.
    pub(crate) fn checked() -> Result<Self> {
        cargo(&["build", "--workspace", "--all-features", "--bins", "--examples"]).run()?;
        Ok(Self("debug"))
    }

    /// Builds these programs for measurements. One choice of features, so that nothing is built
    /// twice.
    pub(crate) fn fast(names: &[&str]) -> Result<Self> {
        let features = "mooncake-engine/cli,mooncake-store/cli";
        let build = cargo(&["build", "--release", "--workspace", "--features", features]);
        names.iter().fold(build, |build, name| build.args(&["--bin", name])).run()?;
        Ok(Self("release"))
    }

    pub(crate) fn path(self, name: &str) -> String {
        target_dir().join(self.0).join(name).to_string_lossy().into_owned()
    }

    pub(crate) fn run(self, name: &str, args: &[&str]) -> Run {
        command(&self.path(name), args)
    }
}

/// Returns the path of the test program of this name, from the output of `cargo test --no-run`.
/// Only one crate may have a program of the name: cargo does not print the crate.
pub(crate) fn test_program(said: &str, name: &str) -> Result<String> {
    let start = format!("Executable tests/{name}");
    let is_named = |line: &str| {
        line.strip_prefix(&start).is_some_and(|rest| rest.starts_with('/') || rest.starts_with('.'))
    };
    let mut lines = said.lines().map(str::trim).filter(|line| is_named(line));
    let path = lines.next().and_then(|line| line.rsplit_once('(')?.1.strip_suffix(')'));
    let path = path.ok_or_else(|| format!("cargo did not say where it put {name}"))?;
    if lines.next().is_some() {
        return Err(format!("two crates have tests named {name}: give one of them another name"));
    }
    Ok(root().join(path).display().to_string())
}

/// The tests that a program has by these names.
pub(crate) fn listed(program: &str, words: &[&str]) -> Result<Vec<String>> {
    let said = command(program, &["--list", "--format", "terse"]).args(words).output()?;
    Ok(said.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Shell function that runs a test program of which so many tests, the first word, must run and
/// pass.
pub(crate) const COUNTED: &str = r#"
counted() {
    wanted=$1
    shift
    folder=$(mktemp -d)
    { "$@" && echo >$folder/passed; } | tee $folder/said
    rm $folder/passed
    grep -q "^test result: ok\. $wanted passed; 0 failed;" $folder/said || {
        echo "$wanted tests were to run: $*"
        exit 3
    }
    rm -r $folder
}
"#;

/// Returns the script that lets [`COUNTED`] run the tests of a program that these words name, of
/// which there must be some.
pub(crate) fn counted(program: &str, words: &[&str]) -> Result<String> {
    let wanted = listed(program, words)?.len();
    if wanted == 0 {
        return Err(format!("{program} has no test {}", words.join(" ")));
    }
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    Ok(format!("{COUNTED}counted {wanted} {} {}\n", quoted(program), words.join(" ")))
}

/// A word as a shell takes it for one.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The folder of the workspace.
pub(crate) fn root() -> PathBuf {
    // From cargo at run time: two checkouts may share a target directory, and so this program.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let here = PathBuf::from(here);
    here.parent().map(PathBuf::from).unwrap_or(here)
}

/// Returns the folder of a crate: of its own name in the root, or, for a crate that another one
/// composes, inside the folder of the other one.
pub(crate) fn crate_folder(package: &str) -> PathBuf {
    let (root, inner) = (root(), package.trim_start_matches("mooncake-"));
    let is_it = |folder: &PathBuf| {
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml"));
        manifest.is_ok_and(|text| text.contains(&format!("\nname = {package:?}\n")))
    };
    let composers = std::fs::read_dir(&root).into_iter().flatten().flatten();
    let mut folders = composers.map(|entry| entry.path().join(inner));
    folders.find(is_it).unwrap_or_else(|| root.join(package))
}

/// Returns the target directory of cargo, which may be outside the workspace.
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// A heading in the output, with the seconds since the first one.
pub(crate) fn step(name: &str) {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let first = FIRST.get_or_init(Instant::now);
    println!("\n== {name} ({} s)", first.elapsed().as_secs());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_program_is_found_by_its_whole_name_and_only_if_there_is_one() {
        let said = "   Compiling x v0.1.0\n  Executable tests/rdma.rs (/t/deps/rdma-1)\n  Executable tests/rdma_more.rs (/t/deps/rdma_more-2)\n  Executable tests/client/main.rs (/t/deps/client-3)\n";
        assert_eq!(test_program(said, "rdma").unwrap(), "/t/deps/rdma-1");
        assert_eq!(test_program(said, "client").unwrap(), "/t/deps/client-3");
        assert!(test_program(said, "more").unwrap_err().contains("did not say"));
        let twice = format!("{said}  Executable tests/client.rs (/t/deps/client-4)\n");
        assert!(test_program(&twice, "client").unwrap_err().contains("two crates"));
    }
}
