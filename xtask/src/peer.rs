//! Installation of Mooncake C++ from PyPI, each release in a virtual environment of its own.

use std::path::{Path, PathBuf};

use crate::run::{Result, Run, command, step, target_dir};

/// Release of Mooncake C++ whose message formats the store implements.
const WHEEL: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
/// Shared libraries that the wheel needs, and their Debian packages.
const LIBRARIES: &[(&str, &str)] =
    &[("libibverbs.so.1", "libibverbs1"), ("librdmacm.so.1", "librdmacm1"), ("libnuma.so.1", "libnuma1")];

/// Later release, which exists only for CUDA 13.
const LATER_WHEEL: &str = "mooncake-transfer-engine-cuda13==0.3.14";
/// Package with the runtime library of CUDA.
const CUDA_WHEEL: &str = "nvidia-cuda-runtime==13.0.96";
/// Shared libraries that the later wheel needs besides those of [`LIBRARIES`].
const LATER_LIBRARIES: &[(&str, &str)] =
    &[("libmlx5.so.1", "ibverbs-providers"), ("libcurl.so.4", "libcurl4")];
/// Folder of libraries in the later wheel, where its programs look first.
const LATER_FOLDER: &str = "mooncake_transfer_engine_cuda13.libs";

/// Creates the virtual environment unless it exists, and returns the path of its Python.
pub(crate) fn install() -> Result<PathBuf> {
    step("Mooncake C++");
    libraries(LIBRARIES)?;
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

/// Installs the later release, and returns the path of its Python. Prints the reason if it cannot
/// be installed on this machine.
pub(crate) fn install_later() -> Option<PathBuf> {
    step("Mooncake C++ 0.3.14");
    match try_install_later() {
        Ok(python) => Some(python),
        Err(reason) => {
            println!("left out: {LATER_WHEEL} cannot be installed: {reason}");
            println!("The table of versions in docs/compatibility.md keeps its date.");
            None
        }
    }
}

/// The wheel is for machines with a GPU. The runtime library of CUDA comes from PyPI, and a library
/// in which every function of the driver fails replaces the driver.
fn try_install_later() -> Result<PathBuf> {
    libraries(&[LIBRARIES, LATER_LIBRARIES].concat())?;
    let venv = target_dir().join("peer-0.3.14");
    let python = venv.join("bin/python");
    let probe = ["-c", "from mooncake.store import ExistOptions; import mooncake.engine"];
    if python.exists() && command(&path(&python), &probe).output().is_ok() {
        println!("{LATER_WHEEL} is installed in {}", venv.display());
        return Ok(python);
    }
    command("python3", &["-m", "venv", &path(&venv)]).run()?;
    command(&path(&python), &["-m", "pip", "install", "--quiet", LATER_WHEEL, CUDA_WHEEL]).run()?;
    let find = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"];
    let packages = PathBuf::from(command(&path(&python), &find).output()?.trim());
    let folder = packages.join(LATER_FOLDER);
    let script = "set -e; packages=$1; folder=$2
        find \"$packages/nvidia\" -name 'libcudart.so.13' -exec cp {} \"$folder/\" \\;
        nm -D --undefined-only \"$packages\"/mooncake/*.so \"$packages\"/mooncake/mooncake_master |
            grep -oE ' U cu[A-Z][A-Za-z0-9_]*' | sort -u |
            while read -r _ name; do echo \"int $name(void) { return 100; }\"
            done >\"$folder/driver.c\"
        cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o \"$folder/libcuda.so.1\" \"$folder/driver.c\"";
    command("sh", &["-c", script, "sh", &path(&packages), &path(&folder)]).run()?;
    command(&path(&python), &probe).output()?;
    Ok(python)
}

fn libraries(wanted: &[(&str, &str)]) -> Result {
    let known = command("/sbin/ldconfig", &["-p"]).output()?;
    let missing: Vec<&str> =
        wanted.iter().filter(|(file, _)| !known.contains(file)).map(|(_, package)| *package).collect();
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
    run_in_own_network(words).run()
}

/// Returns the command that [`in_own_network`] runs.
pub(crate) fn run_in_own_network(words: &[String]) -> Run {
    let script = "ip link set lo up && ip link add mc0 type veth peer name mc1 && \
                  ip addr add 10.213.0.1/24 dev mc0 && ip link set mc0 up && \
                  ip link set mc1 up && exec \"$@\"";
    let mut args = vec!["--net", "--map-root-user", "sh", "-c", script, "sh"];
    args.extend(words.iter().map(String::as_str));
    command("unshare", &args)
}

/// Returns the path as an argument of a command.
pub(crate) fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
