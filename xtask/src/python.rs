//! The Python package: installed into a virtual environment as users install it, and tested from
//! there.

use std::path::{Path, PathBuf};

use crate::run::{Programs, Result, Run, command, root, step, target_dir};

/// Program that succeeds on an interpreter that is new enough and can make environments.
const USABLE: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";
/// Attempts to install a package.
const TRIES: usize = 3;
/// Program that prints the folder of an interpreter's packages.
const PACKAGES: &str = "import sysconfig; print(sysconfig.get_path('purelib'))";

/// Tag of wheels for C library 2.28, that of RHEL 8 and of the wheels of Mooncake C++.
const WHEEL_TAG: &str = "manylinux_2_28";

/// Installs the package and runs its tests; `rest` goes to pytest. Without a Python, prints so and
/// does nothing.
pub(crate) fn test(rest: &[&str]) -> Result {
    let Some(python) = install()? else { return Ok(()) };
    if let ["--soak", rest @ ..] = rest {
        step("a million calls, and ten thousand stores");
        return command(&python, &["mooncake-python/benches/soak.py"]).args(rest).run();
    }
    step("python");
    tests(&python).args(rest).run()
}

/// Runs the soak of a whole cluster with these options.
pub(crate) fn soak(options: &[&str]) -> Result {
    let Some(python) = install()? else { return Ok(()) };
    step("soak of a cluster");
    command(&python, &["mooncake-python/benches/cluster_soak/soak.py"]).args(options).run()
}

/// Tests of the installed package, with the interpreter that [`install`] returned.
fn tests(python: &str) -> Run {
    // Tests mostly wait, for leases and for processes; tests of one file share masters.
    command(python, &["-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--durations", "20"])
        .dir("mooncake-python")
}

/// Returns the tests with these names of the installed package, or all tests without a name.
/// Without a Python, there are none.
pub(crate) fn tests_of_installed(names: &[String]) -> Option<Run> {
    let python = interpreter();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    python.exists().then(|| tests(&python.to_string_lossy()).args(&names))
}

/// Interpreter of the environment of [`install`].
fn interpreter() -> PathBuf {
    target_dir().join("python-venv/bin/python")
}

/// `cargo xtask memcheck`: a few arguments for every call of the package, under valgrind.
pub(crate) fn memcheck() -> Result {
    let Some(python) = install()? else { return Ok(()) };
    step("memcheck");
    if command("valgrind", &["--version"]).output().is_err() {
        println!("installing valgrind");
        command("apt-get", &["update", "-qq"]).run()?;
        command("apt-get", &["install", "-y", "-qq", "--no-install-recommends", "valgrind"])
            .env("DEBIAN_FRONTEND", "noninteractive")
            .run()?;
    }
    // The interpreter reads what it has not written; what matters here is whose memory is touched.
    let options = ["--quiet", "--error-exitcode=9", "--undef-value-errors=no", "--leak-check=no"];
    command("valgrind", &options)
        .args(&["--suppressions=tests/memcheck.supp", &python, "tests/test_stubs.py", "few"])
        .env("PYTHONMALLOC", "malloc")
        .dir("mooncake-python")
        .run()
}

/// `cargo xtask wheel`: builds the wheel for distribution, linked by zig against the C library of
/// old systems, then installs and tests it in an empty environment.
pub(crate) fn wheel() -> Result {
    step("wheel");
    let (tools, fresh) = (target_dir().join("wheel-tools"), target_dir().join("wheel-venv"));
    let wheels = target_dir().join("wheels-out");
    let program = |folder: &Path, name: &str| folder.join("bin").join(name).to_string_lossy().into_owned();
    let environment =
        |folder: &Path| command("python3", &["-m", "venv", "--clear", &folder.to_string_lossy()]);
    if !PathBuf::from(program(&tools, "maturin")).exists() {
        environment(&tools).run()?;
        command(&program(&tools, "pip"), &["install", "--quiet", "maturin[zig]>=1.8,<2"]).run()?;
    }
    // A wheel of an earlier build would be installed, too.
    let _ = std::fs::remove_dir_all(&wheels);
    let out = wheels.to_string_lossy().into_owned();
    // maturin looks for the Python that has zig, and refuses symbols that the tag does not
    // promise.
    command(&program(&tools, "maturin"), &["build", "--release", "--zig", "--compatibility", WHEEL_TAG])
        .args(&["--manifest-path", "mooncake-python/Cargo.toml", "--out", &out])
        .found_first_in(&tools.join("bin"))
        .run()?;
    let made = std::fs::read_dir(&wheels).map_err(|e| format!("{out}: {e}"))?.flatten().next();
    let made = made.ok_or_else(|| format!("{out} has no wheel"))?.path().to_string_lossy().into_owned();
    environment(&fresh).run()?;
    let pip = ["install", "--quiet", "--disable-pip-version-check", &format!("{made}[test]")];
    command(&program(&fresh, "pip"), &pip).run()?;
    tests(&program(&fresh, "python")).run()?;
    println!("{made}");
    Ok(())
}

/// Installs the package, and torch beside it, so that the tests of tensors and process groups run:
/// 5 GB, once. Returns the interpreter. Without a Python, prints so.
pub(crate) fn install_torch() -> Result<Option<String>> {
    let Some(python) = install()? else { return Ok(None) };
    step("torch");
    pip(&python, &["torch"])?;
    Ok(Some(python))
}

/// Builds the wheel for this machine and returns its path. Without a Python, prints so.
pub(crate) fn build_wheel() -> Result<Option<String>> {
    let Some(python) = install()? else { return Ok(None) };
    step("wheel");
    let folder = target_dir().join("wheels-of-tests");
    // A wheel of an earlier build would be found, too.
    let _ = std::fs::remove_dir_all(&folder);
    let out = folder.to_string_lossy().into_owned();
    let pip = ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"];
    command(&python, &pip)
        .args(&["--wheel-dir", &out, "./mooncake-python"])
        .env("CARGO_TARGET_DIR", &target_dir().to_string_lossy())
        .run()?;
    let made = std::fs::read_dir(&folder).map_err(|e| format!("{out}: {e}"))?.flatten().next();
    Ok(Some(made.ok_or_else(|| format!("{out} has no wheel"))?.path().to_string_lossy().into_owned()))
}

/// Returns the programs that run this package and that of Mooncake C++ in one cluster, with their
/// titles. Returns none without a Python. `later` is the interpreter of Mooncake C++ 0.3.14. The
/// second word of each is the path of its script.
pub(crate) fn matrix(
    peer: &Path,
    later: Option<&Path>,
    programs: Programs,
    write_table: bool,
) -> Result<Vec<(&'static str, Vec<String>)>> {
    let Some(python) = install()? else { return Ok(Vec::new()) };
    let peer = peer.to_string_lossy().into_owned();
    let later = later.map(|later| later.to_string_lossy().into_owned());
    for package in later.iter().chain([&peer]) {
        share_packages(&python, package)?;
    }
    let script_of = |script: &str, peers: &[String]| {
        let script = root().join("mooncake-python/tests/peer").join(script).to_string_lossy().into_owned();
        let mut words = vec![python.clone(), script, python.clone()];
        words.extend_from_slice(peers);
        words.extend(["--host", "10.213.0.1"].map(str::to_owned));
        words
    };
    let words = |script: &str| script_of(script, std::slice::from_ref(&peer));
    let mut releases = vec![format!("0.3.13={peer}")];
    releases.extend(later.iter().map(|later| format!("0.3.14={later}")));
    let mut tool = words("tool.py");
    tool.insert(2, programs.path("mooncake"));
    let mut scripts = vec![
        ("two Python packages: what one writes the other reads", words("matrix.py")),
        ("messages: each package receives what the other sends", words("messages.py")),
        ("modules: structured objects, catalogue, layouts of weights", words("modules.py")),
        ("objects on disks: any reads what the others have written there", script_of("disks.py", &releases)),
        ("masters and clients: every response", words("cells.py")),
        ("shared clients beside full ones: every response", words("cells_light.py")),
        ("the command line beside either", tool),
    ];
    if let Some(later) = later {
        let table = root().join("docs/compatibility.md").to_string_lossy().into_owned();
        let mut versions = script_of("versions.py", &releases);
        versions.insert(2, programs.path("weight_calls"));
        versions.extend(["--table".into(), table]);
        versions.extend(write_table.then(|| "--write".to_owned()));
        let mut cells = script_of("cells.py", std::slice::from_ref(&later));
        cells.push("--later".into());
        scripts.extend([
            ("messages beside 0.3.14", script_of("messages.py", &[later])),
            ("masters and clients beside 0.3.14: every response", cells),
            ("three versions: masters and clients", versions),
        ]);
    }
    Ok(scripts)
}

/// Lets Mooncake C++ use the numpy of this environment, and the torch if there is one; the
/// `mooncake` of Mooncake C++ comes first.
pub(crate) fn share_packages(ours: &str, peer: &str) -> Result {
    let packages =
        |python: &str| command(python, &["-c", PACKAGES]).output().map(|out| out.trim().to_owned());
    let link = Path::new(&packages(peer)?).join("packages-of-others.pth");
    let path = packages(ours)?;
    std::fs::write(&link, format!("{path}\n")).map_err(|e| format!("cannot write {}: {e}", link.display()))
}

/// Returns whether there is a Python that can run the package and its tests.
pub(crate) fn is_usable() -> bool {
    command("python3", &["-c", USABLE]).output().is_ok()
}

/// Installs the package as a user does. Returns the interpreter of its environment. Without a
/// Python, prints so.
pub(crate) fn install() -> Result<Option<String>> {
    step("python package");
    if !is_usable() {
        println!(
            "skipped: the Python package needs `python3` 3.11 or newer with venv (Debian: python3-venv)"
        );
        return Ok(None);
    }
    let python = interpreter();
    if !python.exists() {
        let environment = target_dir().join("python-venv").to_string_lossy().into_owned();
        command("python3", &["-m", "venv", &environment]).run()?;
    }
    let python = python.to_string_lossy().into_owned();
    pip(&python, &["./mooncake-python[test]"])?;
    Ok(Some(python))
}

/// Installs packages in their pinned versions. A registry that does not respond gets further tries.
fn pip(python: &str, packages: &[&str]) -> Result {
    let pins = root().join("mooncake-python/tests/constraints.txt").to_string_lossy().into_owned();
    // Builds where everything else is built, so that dependencies are compiled once.
    let target = target_dir().to_string_lossy().into_owned();
    let words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    let install = || {
        // The variable reaches the environment in which pip builds the package, too.
        command(python, &words)
            .args(packages)
            .env("PIP_CONSTRAINT", &pins)
            .env("CARGO_TARGET_DIR", &target)
            .run()
    };
    let mut outcome = install();
    for _ in 1..TRIES {
        outcome = outcome.or_else(|_| install());
    }
    outcome
}
