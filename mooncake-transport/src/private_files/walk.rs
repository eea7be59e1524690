//! The way to a folder or a file, one component at a time.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{CWD, FileType, Mode, OFlags, chmod, fstat, mkdirat, openat, readlinkat};
use rustix::io::Errno;

/// Maximum number of links on the way, as in the kernel.
const MAX_LINKS: usize = 40;
/// Flags of a descriptor that only stands for its file.
pub(super) const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Handling of a last component that is a symbolic link.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LastLink {
    /// Followed as the links before it.
    Follow,
    /// Refused.
    Refuse,
}

/// Opens a file or folder as a mere reference, without access to its content. Missing folders are
/// created with the bits in `missing`.
///
/// # Errors
/// `PermissionDenied` for a link that belongs neither to root nor to this user, and for a refused
/// last link; others of the operating system.
pub(super) fn walk(path: &Path, missing: Option<u32>, last: LastLink) -> io::Result<OwnedFd> {
    let mut links = 0;
    let mut at = begin(path.is_absolute())?;
    let mut remaining = parts(path);
    while let Some(part) = remaining.pop() {
        let next = match openat(&at, &part, PATH_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) if let Some(bits) = missing => make_folder(&at, &part, bits)?,
            opened => opened?,
        };
        let metadata = fstat(&next)?;
        if FileType::from_raw_mode(metadata.st_mode) != FileType::Symlink {
            at = next;
            continue;
        }
        let target = readlinkat(&next, "", Vec::new())?;
        let target = Path::new(OsStr::from_bytes(target.as_bytes()));
        if last == LastLink::Refuse && remaining.is_empty() {
            return Err(denied(format!(
                "it is a symbolic link; give the path that it leads to: {}",
                target.display()
            )));
        }
        let user = metadata.st_uid;
        if user != 0 && user != rustix::process::geteuid().as_raw() {
            return Err(denied(format!(
                "{} on the way is a symbolic link of user {user}; give a path without it",
                Path::new(&part).display()
            )));
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        if target.is_absolute() {
            at = begin(true)?;
        }
        remaining.extend(parts(target));
    }
    Ok(at)
}

fn begin(absolute: bool) -> io::Result<OwnedFd> {
    let path = if absolute { "/" } else { "." };
    Ok(openat(CWD, path, PATH_FLAGS | OFlags::DIRECTORY, Mode::empty())?)
}

/// Returns the components, the first one last.
fn parts(path: &Path) -> Vec<OsString> {
    let part = |component| match component {
        Component::Normal(_) | Component::ParentDir => Some(component.as_os_str().to_owned()),
        _ => None,
    };
    let mut parts: Vec<_> = path.components().filter_map(part).collect();
    parts.reverse();
    parts
}

/// Creates a folder with exactly these bits, or opens the one that another process has created
/// meanwhile.
pub(super) fn make_folder(at: &OwnedFd, name: &OsStr, bits: u32) -> io::Result<OwnedFd> {
    let is_new = match mkdirat(at, name, Mode::from_raw_mode(bits)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(error.into()),
    };
    let folder = openat(at, name, PATH_FLAGS | OFlags::DIRECTORY, Mode::empty())?;
    if is_new {
        let metadata = fstat(&folder)?;
        // A folder inherits the bit that gives its files the group of the folder.
        let required = bits | metadata.st_mode & 0o2000;
        if metadata.st_mode & 0o7777 != required {
            change_mode(&folder, required)?;
        }
    }
    Ok(folder)
}

/// Changes the permissions of the file behind a descriptor of any kind.
pub(super) fn change_mode(handle: &OwnedFd, bits: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    Ok(chmod(format!("/proc/self/fd/{}", handle.as_raw_fd()), Mode::from_raw_mode(bits))?)
}

pub(super) fn denied(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// Returns whether a path names a descriptor of this process.
pub(super) fn is_own_descriptor(path: &Path) -> bool {
    let own = format!("/proc/{}/fd", std::process::id());
    let folders = [Path::new("/proc/self/fd"), Path::new("/dev/fd"), Path::new(&own)];
    let is_number = |name: &OsStr| name.as_bytes().iter().all(u8::is_ascii_digit);
    path.parent().is_some_and(|folder| folders.contains(&folder)) && path.file_name().is_some_and(is_number)
}

pub(super) fn open_device(path: &Path) -> io::Result<Option<File>> {
    use std::os::fd::AsRawFd;
    let handle = match walk(path, None, LastLink::Follow) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        handle => handle?,
    };
    if FileType::from_raw_mode(fstat(&handle)?.st_mode) != FileType::BlockDevice {
        return Ok(None);
    }
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    Ok(Some(File::from(openat(CWD, path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)))
}
