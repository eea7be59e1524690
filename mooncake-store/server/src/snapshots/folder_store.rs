//! Snapshots in a folder.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use mooncake_core::{Error, ErrorCode, Result};

use super::format::{LATEST, NAME, Sink, UNFINISHED, name};

pub(super) fn put_in(
    folder: &Path,
    number: u64,
    fill: &impl Fn(&mut Sink<'_>) -> Result<()>,
    may: &impl Fn() -> Result<()>,
) -> Result<PathBuf> {
    let failed = |what: &str, error: std::io::Error| {
        Error::new(ErrorCode::PersistentFail, format!("{what} in {}: {error}", folder.display()))
    };
    let unfinished = folder.join(format!("{UNFINISHED}{number:020}-{}", std::process::id()));
    let written = (|| {
        // Snapshots contain keys, which other users must not read.
        let own = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished);
        let mut file = own.map_err(|error| failed("a file", error))?;
        fill(&mut |bytes| append(&mut file, bytes))?;
        file.sync_all().map_err(|error| failed("syncing", error))?;
        may()?;
        let path = folder.join(name(number));
        // Another master that holds this number leads, or led later.
        let claim = OpenOptions::new().write(true).create_new(true).open(&path);
        claim.map_err(|error| {
            Error::new(ErrorCode::ObjectAlreadyExists, format!("{}: {error}", path.display()))
        })?;
        fs::rename(&unfinished, &path).map_err(|error| {
            let _ = fs::remove_file(&path);
            failed("renaming", error)
        })?;
        sync(folder).map_err(|error| failed("syncing the folder", error))?;
        Ok(path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
        return written;
    }
    // Only people read this file, so a failure is harmless.
    let pointer = folder.join(format!("{UNFINISHED}{LATEST}"));
    let pointed = fs::write(&pointer, format!("{}\n", name(number)))
        .and_then(|()| fs::rename(&pointer, folder.join(LATEST)));
    if let Err(error) = pointed {
        tracing::debug!(%error, "cannot update the file that names the latest snapshot");
    }
    written
}

/// Appends bytes to a file.
fn append(file: &mut File, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).map_err(|error| Error::new(ErrorCode::PersistentFail, format!("writing: {error}")))
}

fn sync(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

pub(super) fn listed(folder: &Path) -> Vec<(u64, PathBuf)> {
    let number = |found: &String| {
        let number = found.strip_prefix(NAME)?.parse().ok()?;
        // Other files do not belong to snapshots.
        (*found == name(number)).then(|| (number, folder.join(found)))
    };
    names(folder).iter().filter_map(number).collect()
}

/// Removes all but the latest `keep` snapshots.
pub(super) fn prune(folder: &Path, keep: usize) {
    let mut all = listed(folder);
    all.sort_by(|a, b| b.cmp(a));
    for (_, path) in all.into_iter().skip(keep) {
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove old snapshot");
        }
    }
}
