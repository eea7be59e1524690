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

/// Installs the package of a library unless the library is known.
pub(crate) fn install_library(library: &str, package: &str, what: &str) -> Result {
    let known = command("/sbin/ldconfig", &["-p"]).output()?;
    if known.contains(library) { Ok(()) } else { install(&[package], what) }
}

/// Installs the packages of the programs that cannot be started, from pairs of both.
pub(crate) fn install_programs(wanted: &[(&str, &str)], what: &str) -> Result {
    let missing: Vec<&str> = wanted
        .iter()
        .filter(|(program, _)| command(program, &["--version"]).output().is_err())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() { Ok(()) } else { install(&missing, what) }
}
