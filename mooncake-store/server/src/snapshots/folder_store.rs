//! Snapshots in a folder.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::private_files::{self, FileMode, Folder, Opening};

use super::format::{LATEST, NAME, ORDER, Sink, UNFINISHED, add_to_order, name};

pub(super) fn put_in(
    folder: &Path,
    number: u64,
    fill: &impl Fn(&mut Sink<'_>) -> Result<()>,
    may: &impl Fn() -> Result<()>,
) -> Result<PathBuf> {
    let failed = |what: &str, error: std::io::Error| {
        Error::new(ErrorCode::PersistentFail, format!("{what} in {}: {error}", folder.display()))
    };
    let unfinished = format!("{UNFINISHED}{number:020}-{}", std::process::id());
    let own = Folder::own(folder).map_err(|error| failed("opening", error))?;
    let written = (|| {
        // Snapshots contain keys, which other users must not read.
        let file = own.remove_if_present(&unfinished);
        let file = file.and_then(|()| own.file(&unfinished, Opening::New, FileMode::PRIVATE));
        let mut file = file.map_err(|error| failed("a file", error))?;
        fill(&mut |bytes| append(&mut file, bytes))?;
        file.sync_all().map_err(|error| failed("syncing", error))?;
        may()?;
        let path = folder.join(name(number));
        // Another master that holds this number leads, or led later.
        own.file(name(number), Opening::New, FileMode::PRIVATE).map_err(|error| {
            Error::new(ErrorCode::ObjectAlreadyExists, format!("{}: {error}", path.display()))
        })?;
        own.rename(&unfinished, name(number)).map_err(|error| {
            let _ = own.remove(name(number));
            failed("renaming", error)
        })?;
        own.sync().map_err(|error| failed("syncing the folder", error))?;
        Ok(path)
    })();
    if written.is_err() {
        let _ = own.remove(&unfinished);
        return written;
    }
    // Only people read this file, so a failure is harmless.
    let pointed = own.replace(LATEST, format!("{}\n", name(number)).as_bytes(), FileMode::PRIVATE);
    if let Err(error) = pointed {
        tracing::debug!(%error, "cannot update the file that names the latest snapshot");
    }
    written
}

/// Appends bytes to a file.
fn append(file: &mut File, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).map_err(|error| Error::new(ErrorCode::PersistentFail, format!("writing: {error}")))
}

/// Returns the names of the regular files in a folder.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = Folder::own(folder).and_then(|folder| folder.entries()).unwrap_or_default();
    let files = entries.into_iter().filter(|entry| entry.kind.is_file());
    files.filter_map(|entry| entry.name.into_string().ok()).collect()
}

/// Returns whether a name is that of an unfinished snapshot or of an unfinished pointer to one.
fn is_unfinished(found: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    let rest = found.strip_prefix(UNFINISHED);
    let numbers = rest.and_then(|rest| rest.split_once('-'));
    // Earlier versions wrote the pointer under the second name.
    numbers.is_some_and(|(number, process)| number.len() == 20 && digits(number) && digits(process))
        || rest == Some(LATEST)
        || found.strip_suffix(".new") == Some(LATEST)
}

/// Adds a master to the order of the masters. Returns those before it, the latest first.
pub(super) fn add_master(folder: &Path, own: u64) -> Result<Vec<u64>> {
    let before = match private_files::read(&folder.join(ORDER)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        read => read?,
    };
    let (order, earlier) = add_to_order(&before, own);
    Folder::own(folder)?.replace_synced(ORDER, order.as_bytes(), FileMode::PRIVATE)?;
    Ok(earlier)
}

/// Returns whether a name belongs to snapshots.
pub(super) fn is_own_name(found: &str) -> bool {
    let number = |found: &str| found.strip_prefix(NAME)?.parse().ok();
    found == LATEST
        || found == ORDER
        || is_unfinished(found)
        || number(found).is_some_and(|number| name(number) == found)
}

/// Removes unfinished snapshots.
pub(super) fn clear(folder: &Path) {
    let Ok(own) = Folder::own(folder) else { return };
    for unfinished in names(folder).into_iter().filter(|found| is_unfinished(found)) {
        let _ = own.remove(unfinished);
    }
}

/// Creates a folder for snapshots. Other users have no access, unless it has other contents, too.
pub(super) fn create(folder: &Path) -> std::io::Result<()> {
    let own = Folder::own(folder)?;
    own.narrow_if(|name| name.to_str().is_some_and(is_own_name))
}

/// Writes a copy of a snapshot.
pub(super) fn copy(folder: &Path, number: u64, bytes: &[u8]) -> std::io::Result<()> {
    Folder::own(folder)?.replace(name(number), bytes, FileMode::PRIVATE).map(drop)
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
        let removed = Folder::around(&path).and_then(|(folder, name)| folder.remove(name));
        if let Err(error) = removed {
            tracing::warn!(path = %path.display(), %error, "cannot remove old snapshot");
        }
    }
}
