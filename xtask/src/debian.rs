//! Programs and libraries that Debian packages.

use crate::run::{Result, command};

/// Installs packages; `what` needs them.
pub(crate) fn install(packages: &[&str], what: &str) -> Result {
    println!("installing {}", packages.join(" "));
    command("apt-get", &["update", "-qq"]).run()?;
    command("apt-get", &["install", "-y", "-qq", "--no-install-recommends"])
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .run()
        .map_err(|e| format!("{e}\n{what} needs {}; install them by hand", packages.join(" ")))
}

/// Installs the package of a library that is not found.
pub(crate) fn install_library(library: &str, package: &str, what: &str) -> Result {
    let known = command("/sbin/ldconfig", &["-p"]).output()?;
    if known.contains(library) { Ok(()) } else { install(&[package], what) }
}

/// Installs those of `(program, package)` whose program cannot be started.
pub(crate) fn install_programs(wanted: &[(&str, &str)], what: &str) -> Result {
    let missing: Vec<&str> = wanted
        .iter()
        .filter(|(program, _)| command(program, &["--version"]).output().is_err())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() { Ok(()) } else { install(&missing, what) }
}
