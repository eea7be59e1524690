//! Installation of programs and libraries from Debian packages.

use crate::run::{Result, command};

/// Installs packages, which `what` needs.
pub(crate) fn install(packages: &[&str], what: &str) -> Result {
    println!("installing {}", packages.join(" "));
    command("apt-get", &["update", "-qq"]).run()?;
    command("apt-get", &["install", "-y", "-qq", "--no-install-recommends"])
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .run()
        .map_err(|e| format!("{e}\n{what} needs {}; install them manually", packages.join(" ")))
}

/// Returns whether a program can be started.
pub(crate) fn has_program(program: &str) -> bool {
    command(program, &["--version"]).output().is_ok()
}

/// Returns whether a shared library is known.
pub(crate) fn has_library(library: &str) -> bool {
    command("/sbin/ldconfig", &["-p"]).output().is_ok_and(|known| known.contains(library))
}

/// Installs the package of a library unless the library is known.
pub(crate) fn install_library((library, package): (&str, &str), what: &str) -> Result {
    if has_library(library) { Ok(()) } else { install(&[package], what) }
}

/// Installs the packages of the programs that cannot be started, from pairs of both.
pub(crate) fn install_programs(wanted: &[(&str, &str)], what: &str) -> Result {
    let missing: Vec<&str> =
        wanted.iter().filter(|(program, _)| !has_program(program)).map(|(_, package)| *package).collect();
    if missing.is_empty() { Ok(()) } else { install(&missing, what) }
}
