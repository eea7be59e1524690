//! Folder of the files that clients share. A master names it; this client decides whether it is
//! used.
//!
//! Nothing outside the folder is read, written or removed: every path below it is resolved without
//! symbolic links, and has the layout of Mooncake C++ (`<a-p>/<a-p>/<name>`).

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, Result};
use mooncake_transport::private_files::{FileMode, Folder, Opening};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Stat, fstat, statat};

/// File by which an operator allows a folder to all clients.
pub(crate) const MARK: &str = ".mooncake-root";
/// Maximum length of a file name in bytes.
const MAX_NAME: usize = 255;
/// Digits of the number at the end of a name.
const DIGITS: usize = 16;

/// A folder of shared files.
#[derive(Debug)]
pub(super) struct SharedFolder {
    path: PathBuf,
    /// Configured root that contains the folder.
    root: Option<PathBuf>,
    /// True if roots are configured and none contains the folder.
    outside: bool,
    mode: FileMode,
    /// Device and inode of the folder, once it was allowed.
    allowed: Mutex<Option<(u64, u64)>>,
    /// True if the refusal was logged.
    refusal_logged: AtomicBool,
}

/// A file that was there before the first write.
pub(super) struct FoundFile {
    pub(super) modified: SystemTime,
    pub(super) path: PathBuf,
    pub(super) len: u64,
}

impl SharedFolder {
    pub(super) fn new(path: PathBuf, roots: &[PathBuf], mode: FileMode) -> Self {
        let root = roots.iter().find(|root| path.starts_with(root)).cloned();
        let outside = root.is_none() && !roots.is_empty();
        Self { path, root, outside, mode, allowed: Mutex::new(None), refusal_logged: AtomicBool::new(false) }
    }

    /// Checks the path of a file that a master named, and returns it.
    pub(super) fn inside(&self, path: &str) -> Result<PathBuf> {
        let refuse = |why: &str| {
            Err(Error::invalid(format!(
                "cannot use the path of a file: {why}. path={path:?} folder={}",
                self.path.display()
            )))
        };
        let Ok(rest) = Path::new(path).strip_prefix(&self.path) else {
            return refuse("it is not below the folder of the master");
        };
        let parts: Vec<_> = rest.components().collect();
        let [Component::Normal(outer), Component::Normal(inner), Component::Normal(name)] = parts[..] else {
            return refuse("it has not the form <a-p>/<a-p>/<name>");
        };
        if !is_letter(outer) || !is_letter(inner) {
            return refuse("it has not the form <a-p>/<a-p>/<name>");
        }
        if name.len() > MAX_NAME || name.as_bytes().contains(&0) {
            return refuse("its name has more than 255 bytes, or a NUL");
        }
        Ok(self.path.join(rest))
    }

    /// Opens the folder, if it is allowed. The folder itself is created on request. Its parent must
    /// exist: if the file system is not mounted, nothing is written.
    fn open(&self, create: bool) -> io::Result<Folder> {
        let (above, name) = match &self.root {
            Some(root) => {
                let folder = Folder::open(root)?;
                let rest = self.path.strip_prefix(root).unwrap_or(&self.path);
                let Some(name) = rest.file_name() else { return Ok(folder) };
                match rest.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                    Some(parent) => (folder.below(parent)?, name),
                    None => (folder, name),
                }
            }
            None if self.outside || self.path.file_name().is_none() => return Err(self.refusal()),
            None => Folder::around(&self.path)?,
        };
        let marked = self.root.is_some() || is_marked(&above) || is_planted("any-folder-is-used");
        let name = Path::new(name);
        match above.below(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => match (marked, create) {
                (true, true) => above.create_below(name, self.mode),
                (true, false) => Err(error),
                (false, _) => Err(self.refusal()),
            },
            found => {
                let found = found?;
                if marked || self.is_allowed(&found)? { Ok(found) } else { Err(self.refusal()) }
            }
        }
    }

    /// Returns whether a folder without a root may be used: it has a mark, or it is one that
    /// clients of this user have used before.
    fn is_allowed(&self, folder: &Folder) -> io::Result<bool> {
        let metadata = fstat(folder)?;
        let number = (metadata.st_dev, metadata.st_ino);
        if *self.allowed.lock() == Some(number) {
            return Ok(true);
        }
        let own = metadata.st_uid == rustix::process::geteuid().as_raw();
        let is_allowed = is_marked(folder) || (own && has_layout(folder)?);
        if is_allowed {
            *self.allowed.lock() = Some(number);
        }
        Ok(is_allowed)
    }

    fn refusal(&self) -> io::Error {
        let root = self.path.parent().unwrap_or(&self.path).display();
        let text = format!(
            "cannot use the folder for files that the master names: this client does not allow \
             it. folder={}; set MOONCAKE_FS_ROOTS={root} at the client, or create the file \
             {root}/{MARK} once",
            self.path.display()
        );
        if !self.refusal_logged.swap(true, Relaxed) {
            tracing::warn!("{text}");
        }
        io::Error::new(io::ErrorKind::PermissionDenied, text)
    }

    /// Logs a refusal of the folder, if there is one.
    pub(super) fn check(&self) {
        drop(self.open(false));
    }

    /// Returns the bytes of the file system.
    pub(super) fn capacity(&self) -> io::Result<u64> {
        let metadata = rustix::fs::fstatvfs(self.open(true)?)?;
        Ok(metadata.f_frsize.saturating_mul(metadata.f_blocks))
    }

    /// Returns the files whose names are those of this program, the oldest first. Links are not
    /// followed, and other names are not counted.
    pub(super) fn files(&self) -> io::Result<Vec<FoundFile>> {
        let folder = self.open(false)?;
        let mut found = Vec::new();
        for outer in letters(&folder)? {
            let Ok(outer_folder) = folder.below(&outer) else { continue };
            for inner in letters(&outer_folder).unwrap_or_default() {
                let Ok(inner_folder) = outer_folder.below(&inner) else { continue };
                let entries = inner_folder.entries().unwrap_or_default();
                let files = entries.iter().filter(|entry| entry.kind.is_file() && is_own_name(&entry.name));
                for file in files {
                    let Ok(metadata) = statat(&inner_folder, &file.name, AtFlags::SYMLINK_NOFOLLOW) else {
                        continue;
                    };
                    let path = self.path.join(&outer).join(&inner).join(&file.name);
                    let len = u64::try_from(metadata.st_size).unwrap_or(0);
                    found.push(FoundFile { modified: modified(&metadata), path, len });
                }
            }
        }
        found.sort_by(|a, b| (a.modified, &a.path).cmp(&(b.modified, &b.path)));
        Ok(found)
    }

    /// Opens a file of any client for reading.
    pub(super) fn read(&self, path: &Path) -> io::Result<File> {
        self.open(false)?.read_below(self.relative(path)?)
    }

    /// Writes a file. Readers accept a file by its length. The bytes are therefore synced before
    /// the file gets its name, so that a crash of this machine leaves no partial file under that
    /// name.
    pub(super) fn write(&self, path: &Path, bytes: &[u8], mark: u64) -> io::Result<()> {
        let (folder, name) = self.around(path, |folder, parent| folder.create_below(parent, self.mode))?;
        let temporary_name = format!(".{mark:0DIGITS$x}");
        let mut file = folder.file(&temporary_name, Opening::New, self.mode)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_data());
        let written = written.and_then(|()| folder.rename(&temporary_name, name));
        if written.is_err() {
            let _ = folder.remove(&temporary_name);
        }
        written
    }

    /// Removes a file, or a link with its name.
    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        let (folder, name) = self.around(path, |folder, parent| folder.below(parent))?;
        folder.remove(name)
    }

    fn around<'p>(
        &self,
        path: &'p Path,
        open: impl FnOnce(&Folder, &Path) -> io::Result<Folder>,
    ) -> io::Result<(Folder, &'p OsStr)> {
        let rest = self.relative(path)?;
        let (Some(parent), Some(name)) = (rest.parent(), rest.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        Ok((open(&self.open(true)?, parent)?, name))
    }

    fn relative<'p>(&self, path: &'p Path) -> io::Result<&'p Path> {
        path.strip_prefix(&self.path).map_err(|_| io::ErrorKind::InvalidInput.into())
    }
}

fn is_letter(name: &OsStr) -> bool {
    matches!(name.as_bytes(), [b'a'..=b'p'])
}

/// Returns whether a name ends in the number of a value, as all names of this project. A name of
/// the number alone is that of an unfinished file.
fn is_own_name(name: &OsStr) -> bool {
    if is_planted("any-name-is-counted") {
        return true;
    }
    let bytes = name.as_bytes();
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let Some((rest, number)) = bytes.split_last_chunk::<DIGITS>() else { return false };
    rest.ends_with(b".") && number.iter().all(is_digit)
}

/// Returns the folders with the names of the layout.
fn letters(folder: &Folder) -> io::Result<Vec<PathBuf>> {
    let entries = folder.entries()?.into_iter();
    let entries = entries.filter(|entry| entry.kind.is_dir() && is_letter(&entry.name));
    Ok(entries.map(|entry| entry.name.into()).collect())
}

/// Returns whether a folder has nothing but the two levels of folders of the layout, and at least
/// one of them.
fn has_layout(folder: &Folder) -> io::Result<bool> {
    let names = letters(folder)?;
    if names.is_empty() || names.len() != folder.entries()?.len() {
        return Ok(false);
    }
    for name in names {
        let below = folder.below(&name)?;
        if letters(&below)?.len() != below.entries()?.len() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether a folder has a mark that root or this user has made. The owner of the folder may
/// be another user of the host.
fn is_marked(folder: &Folder) -> bool {
    let mark = statat(folder, MARK, AtFlags::SYMLINK_NOFOLLOW);
    mark.is_ok_and(|mark| {
        FileType::from_raw_mode(mark.st_mode) == FileType::RegularFile
            && [0, rustix::process::geteuid().as_raw()].contains(&mark.st_uid)
    })
}

fn modified(metadata: &Stat) -> SystemTime {
    let (seconds, nanos) = (u64::try_from(metadata.st_mtime), u32::try_from(metadata.st_mtime_nsec));
    SystemTime::UNIX_EPOCH + Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0).min(999_999_999))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_the_layout_are_accepted() {
        let folder = SharedFolder::new("/mnt/x/c".into(), &[], FileMode::GROUP_READ);
        for good in
            ["/mnt/x/c/a/p/key.0000000000000001", "/mnt/x/c/a/b/...0000000000000001", "/mnt/x//c/a/./b/k"]
        {
            assert!(folder.inside(good).unwrap().starts_with("/mnt/x/c"), "{good}");
        }
        let long = format!("/mnt/x/c/a/b/{}", "n".repeat(256));
        for bad in [
            "",
            "/",
            "/mnt/x/c",
            "/mnt/x/c/a",
            "/mnt/x/c/a/b",
            "/mnt/x/c/a/b/c/d",
            "/mnt/x/c/a/q/k",
            "/mnt/x/c/a/../k",
            "/mnt/x/c/a/b/..",
            "/mnt/x/c/../c/a/b/k",
            "/mnt/x/cc/a/b/k",
            "/etc/cron.d/x",
            "/etc/a/b/k",
            "a/b/k",
            "/mnt/x/c/aa/b/k",
            "/mnt/x/c/a/b/k\0",
            &long,
        ] {
            folder.inside(bad).unwrap_err();
        }
    }

    #[test]
    fn names_of_this_program_end_in_a_number() {
        for own in ["k.0123456789abcdef", ".0123456789abcdef", "...0000000000000000", "a b.ffffffffffffffff"]
        {
            assert!(is_own_name(OsStr::new(own)), "{own}");
        }
        for other in [
            "",
            "letter",
            "0123456789abcdef",
            "k.0123456789abcde",
            "k.0123456789ABCDEF",
            "k.0123456789abcdef.txt",
        ] {
            assert!(!is_own_name(OsStr::new(other)), "{other}");
        }
    }
}
