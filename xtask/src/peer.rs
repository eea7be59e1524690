//! Installation of Mooncake C++ from PyPI, in a virtual environment of its own.

use std::path::{Path, PathBuf};

use crate::run::{Result, command, step, target_dir};

/// Release of Mooncake C++ whose message formats the store implements.
const WHEEL: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
/// Shared libraries that the wheel needs, and their Debian packages.
const LIBRARIES: &[(&str, &str)] =
    &[("libibverbs.so.1", "libibverbs1"), ("librdmacm.so.1", "librdmacm1"), ("libnuma.so.1", "libnuma1")];

/// Creates the virtual environment unless it exists, and returns the path of its Python.
pub(crate) fn install() -> Result<PathBuf> {
    step("Mooncake C++");
    libraries()?;
    let venv = target_dir().join("peer");
    let python = venv.join("bin/python");
    let probe = ["-c", "import mooncake.store, mooncake.engine"];
    if python.exists() && command(&path(&python), &probe).output().is_ok() {
        println!("{WHEEL} is installed in {}", venv.display());
        return Ok(python);
    }
    command("python3", &["-m", "venv", &path(&venv)]).run()?;
    command(&path(&python), &["-m", "pip", "install", "--quiet", WHEEL]).run()?;
    command(&path(&python), &probe).output()?;
    Ok(python)
}

fn libraries() -> Result {
    let known = command("/sbin/ldconfig", &["-p"]).output()?;
    let missing: Vec<&str> =
        LIBRARIES.iter().filter(|(file, _)| !known.contains(file)).map(|(_, package)| *package).collect();
    if missing.is_empty() && command("ip", &["-V"]).output().is_ok() {
        return Ok(());
    }
    let mut packages = missing;
    packages.push("iproute2");
    crate::debian::install(&packages, "Mooncake C++")
}

/// Runs a program in a network namespace of its own, which ends with the program. Mooncake C++
/// needs an interface besides `lo`.
pub(crate) fn in_own_network(words: &[String]) -> Result {
    let script = "ip link set lo up && ip link add mc0 type veth peer name mc1 && \
                  ip addr add 10.213.0.1/24 dev mc0 && ip link set mc0 up && \
                  ip link set mc1 up && exec \"$@\"";
    let mut args = vec!["--net", "--map-root-user", "sh", "-c", script, "sh"];
    args.extend(words.iter().map(String::as_str));
    command("unshare", &args).run()
}

/// Returns the path as an argument of a command.
pub(crate) fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
