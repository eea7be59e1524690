//! Folders, and the files in them.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, XattrFlags, fchmod, fsetxattr, fstat, fstatfs,
    openat, openat2, renameat, unlinkat,
};
use rustix::io::Errno;

use super::mode::FileMode;
use super::walk::{LastLink, PATH_FLAGS, change_mode, denied, make_folder, walk};

/// Maximum number of attempts against processes that create and remove the file.
const MAX_ATTEMPTS: usize = 16;
/// Type of NFS in `statfs`.
const NFS: i64 = 0x6969;

/// Way to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// For reading; the file exists.
    Read,
    /// For reading and writing; the file exists.
    Write,
    /// For reading and writing; created if missing.
    Create,
    /// For reading and writing; the file does not exist.
    New,
}

/// Entry of a folder.
#[derive(Debug)]
pub struct FolderEntry {
    /// Name in the folder.
    pub name: OsString,
    /// Type of the entry itself: a symbolic link is not followed.
    pub kind: FileType,
}

/// Open folder. Files in it are named by one component.
#[derive(Debug)]
pub struct Folder {
    handle: OwnedFd,
    path: PathBuf,
    /// Owner of the files that this process creates here.
    user: u32,
}

impl Folder {
    /// Opens a folder of any user.
    ///
    /// # Errors
    /// `PermissionDenied` for a link on the way that belongs neither to root nor to this user;
    /// others of the operating system.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::at(walk(path, None, LastLink::Follow)?, path)
    }

    /// Opens the folder of a file. Also returns the name of the file.
    ///
    /// # Errors
    /// `InvalidInput` if the path has no name, and those of [`open`](Self::open).
    pub fn around(path: &Path) -> io::Result<(Self, &OsStr)> {
        let name = path.file_name().ok_or_else(|| invalid("the path names no file"))?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        Ok((Self::open(folder.unwrap_or(Path::new(".")))?, name))
    }

    /// Opens a folder that belongs to this user alone. A missing folder is created with 0700, with
    /// its missing parents.
    ///
    /// # Errors
    /// `PermissionDenied` if the path is a symbolic link, or the folder belongs to another user;
    /// those of [`open`](Self::open).
    pub fn own(path: &Path) -> io::Result<Self> {
        let bits = FileMode::PRIVATE.folder_bits();
        let mut folder = Self::at(walk(path, Some(bits), LastLink::Refuse)?, path)?;
        let owner = fstat(&folder.handle)?.st_uid;
        if owner != folder.user && owner == folder.user_on_nfs() {
            folder.user = owner;
        }
        if owner != folder.user {
            return Err(denied(format!(
                "it belongs to user {owner}, and this process runs as user {}; change the owner, \
                 or use another folder",
                folder.user
            )));
        }
        Ok(folder)
    }

    fn at(handle: OwnedFd, path: &Path) -> io::Result<Self> {
        if FileType::from_raw_mode(fstat(&handle)?.st_mode) != FileType::Directory {
            return Err(Errno::NOTDIR.into());
        }
        Ok(Self { handle, path: path.to_owned(), user: rustix::process::geteuid().as_raw() })
    }

    /// Returns the owner of files that this process creates on NFS, where the server may replace
    /// root by another user. Returns this user on other file systems.
    fn user_on_nfs(&self) -> u32 {
        let owner = || -> io::Result<u32> {
            let folder = self.readable()?;
            if fstatfs(&folder)?.f_type as i64 != NFS {
                return Ok(self.user);
            }
            let name = format!(".mooncake-owner-{:016x}", Rng::from_os().next_u64());
            let file = openat(&self.handle, &name, OFlags::CREATE | OFlags::EXCL | FILE_FLAGS, mode(0o600))?;
            let owner = fstat(&file)?.st_uid;
            unlinkat(&self.handle, &name, AtFlags::empty())?;
            Ok(owner)
        };
        owner().unwrap_or(self.user)
    }

    /// Returns the path by which the folder was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file in this folder.
    ///
    /// # Errors
    /// `PermissionDenied` if it is a symbolic link or belongs to another user, `InvalidInput` if it
    /// is not a regular file or `name` is not a name; others of the operating system.
    pub fn file(&self, name: impl AsRef<OsStr>, opening: Opening, mode: FileMode) -> io::Result<File> {
        let name = plain(name.as_ref())?;
        let access = if opening == Opening::Read { OFlags::RDONLY } else { OFlags::RDWR };
        let bits = if is_planted("permissions-follow-umask") { 0o666 } else { mode.bits() };
        let flags = if is_planted("links-are-followed") { FILE_FLAGS - OFlags::NOFOLLOW } else { FILE_FLAGS };
        let open = |more| openat(&self.handle, name, access | more | flags, self::mode(bits));
        for _ in 0..MAX_ATTEMPTS {
            let existing = match opening {
                Opening::New => Err(Errno::NOENT),
                _ => open(OFlags::empty()),
            };
            match existing {
                Err(Errno::NOENT) if matches!(opening, Opening::Create | Opening::New) => {}
                Err(Errno::LOOP) => {
                    return Err(denied("it is a symbolic link; remove it, or choose another path".into()));
                }
                // A socket, or a device without a driver.
                Err(Errno::NXIO) => return Err(invalid("it is not a regular file")),
                opened => {
                    let file = File::from(opened?);
                    let path = self.path.join(name);
                    return accept(&file, &path, opening, mode, &[self.user]).map(|()| file);
                }
            }
            match open(OFlags::CREATE | OFlags::EXCL) {
                Err(Errno::EXIST) if opening == Opening::Create => {}
                created => {
                    let file = File::from(created?);
                    if fstat(&file)?.st_mode & 0o7777 != mode.bits() && bits == mode.bits() {
                        fchmod(&file, self::mode(mode.bits()))?;
                    }
                    return Ok(file);
                }
            }
        }
        Err(io::Error::other("other processes create and remove it all the time"))
    }

    /// Writes a file under the name with the suffix `.new`, and renames it: it is complete or
    /// absent. Returns the open file.
    ///
    /// # Errors
    /// Those of [`file`](Self::file), and of the operating system.
    pub fn replace(&self, name: impl AsRef<OsStr>, bytes: &[u8], mode: FileMode) -> io::Result<File> {
        self.replace_after(name.as_ref(), bytes, mode, |_| Ok(()))
    }

    /// Does the same as [`replace`](Self::replace), and flushes the bytes to the disk before the
    /// file gets its name.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace).
    pub fn replace_synced(&self, name: impl AsRef<OsStr>, bytes: &[u8], mode: FileMode) -> io::Result<()> {
        self.replace_after(name.as_ref(), bytes, mode, File::sync_all).map(drop)
    }

    fn replace_after(
        &self,
        name: &OsStr,
        bytes: &[u8],
        mode: FileMode,
        flush: fn(&File) -> io::Result<()>,
    ) -> io::Result<File> {
        let mut new_name = plain(name)?.to_owned();
        new_name.push(".new");
        self.remove_if_present(&new_name)?;
        let mut file = self.file(&new_name, Opening::New, mode)?;
        let written = file.write_all(bytes).and_then(|()| flush(&file));
        let written = written.and_then(|()| self.rename(&new_name, name));
        written.inspect_err(|_| drop(self.remove(&new_name)))?;
        Ok(file)
    }

    /// Renames a file inside the folder, over another one if there is one.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(renameat(&self.handle, plain(from.as_ref())?, &self.handle, plain(to.as_ref())?)?)
    }

    /// Removes a file, or a link itself.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn remove(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(unlinkat(&self.handle, plain(name.as_ref())?, AtFlags::empty())?)
    }

    /// Removes a file. A missing file counts as removed.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn remove_if_present(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        match self.remove(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Returns the entries of the folder.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn entries(&self) -> io::Result<Vec<FolderEntry>> {
        let mut entries = Vec::new();
        for entry in Dir::new(self.readable()?)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    let metadata =
                        rustix::fs::statat(&self.handle, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW);
                    metadata.map_or(FileType::Unknown, |metadata| FileType::from_raw_mode(metadata.st_mode))
                }
                kind => kind,
            };
            entries.push(FolderEntry { name: OsString::from_vec(name.to_vec()), kind });
        }
        Ok(entries)
    }

    /// Flushes the names in the folder to the disk.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn sync(&self) -> io::Result<()> {
        File::from(self.readable()?).sync_all()
    }

    /// Removes the permissions of other users if the folder belongs to this user and has only
    /// entries of this program.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn narrow_if(&self, is_own: impl Fn(&OsStr) -> bool) -> io::Result<()> {
        let metadata = fstat(&self.handle)?;
        let bits = metadata.st_mode & 0o7777;
        if metadata.st_uid != self.user || bits & 0o077 == 0 || bits & 0o1000 != 0 {
            return Ok(());
        }
        if self.entries()?.iter().all(|entry| is_own(&entry.name)) {
            change_mode(&self.handle, 0o700)?;
            log_narrowed(&self.path, bits, 0o700);
        }
        Ok(())
    }

    /// Gives new files of other libraries in this folder no permissions for other users, whatever
    /// the umask, and narrows the present ones. Some file systems do not support the former.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn keep_files_private(&self) -> io::Result<()> {
        // Version 2; then tag, permissions and user of each entry: owner, group, others.
        const LIST: [u8; 28] =
            *b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x04\0\0\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";
        let set = fsetxattr(self.readable()?, "system.posix_acl_default", &LIST, XattrFlags::empty());
        if let Err(error) = set {
            tracing::debug!(folder = %self.path.display(), "default permissions are not supported: {error}");
        }
        for entry in self.entries()? {
            if entry.kind == FileType::RegularFile {
                self.file(&entry.name, Opening::Read, FileMode::PRIVATE)?;
            }
        }
        Ok(())
    }

    /// Opens a folder below this one, without any link.
    ///
    /// # Errors
    /// Those of the operating system: `FilesystemLoop` or `NotADirectory` for a link.
    pub fn below(&self, path: &Path) -> io::Result<Self> {
        let handle = self.open_below(path, OFlags::PATH | OFlags::DIRECTORY)?;
        Ok(Self { handle, path: self.path.join(path), user: self.user })
    }

    /// Opens a folder below this one, without any link. Missing folders are created with these
    /// permissions.
    ///
    /// # Errors
    /// Those of [`below`](Self::below).
    pub fn create_below(&self, path: &Path, mode: FileMode) -> io::Result<Self> {
        match self.below(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => return found,
        }
        let mut at = self.handle.try_clone()?;
        for part in normal_parts(path)? {
            at = match openat(&at, part, PATH_FLAGS | OFlags::DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) => make_folder(&at, part, mode.folder_bits())?,
                opened => opened?,
            };
        }
        Ok(Self { handle: at, path: self.path.join(path), user: self.user })
    }

    /// Opens a file of any user below this folder for reading, without any link. A pipe does not
    /// block; the caller checks the type.
    ///
    /// # Errors
    /// Those of [`below`](Self::below).
    pub fn read_below(&self, path: &Path) -> io::Result<File> {
        Ok(self.open_below(path, OFlags::RDONLY | OFlags::NONBLOCK)?.into())
    }

    fn open_below(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let parts = normal_parts(path)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if is_planted("links-are-followed") {
            return Ok(openat(&self.handle, path, flags - OFlags::NOFOLLOW, Mode::empty())?);
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        match openat2(&self.handle, path, flags, Mode::empty(), resolve) {
            // Kernels before 5.6, sandboxes that do not know the call, and a rename meanwhile.
            Err(Errno::NOSYS | Errno::PERM | Errno::AGAIN) => open_by_parts(&self.handle, &parts, flags),
            opened => Ok(opened?),
        }
    }

    fn readable(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(openat(&self.handle, ".", flags, Mode::empty())?)
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// Flags of every file: a link is not followed, a pipe does not block.
const FILE_FLAGS: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

fn mode(bits: u32) -> Mode {
    Mode::from_raw_mode(bits)
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.into())
}

/// Checks that a name is one component.
fn plain(name: &OsStr) -> io::Result<&OsStr> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || matches!(bytes, b"." | b"..") || bytes.iter().any(|byte| matches!(byte, 0 | b'/'))
    {
        return Err(invalid(format!("{name:?} is not the name of a file")));
    }
    Ok(name)
}

/// Returns the components of a relative path without `..`.
fn normal_parts(path: &Path) -> io::Result<Vec<&OsStr>> {
    let part = |component| match component {
        Component::Normal(part) => plain(part),
        _ => Err(invalid(format!("{path:?} is not a path below the folder"))),
    };
    let parts: Vec<_> = path.components().map(part).collect::<io::Result<_>>()?;
    if parts.is_empty() { Err(invalid("the path is empty")) } else { Ok(parts) }
}

/// Opens a path below a folder, one component at a time.
pub(super) fn open_by_parts(folder: &OwnedFd, parts: &[&OsStr], flags: OFlags) -> io::Result<OwnedFd> {
    let [folders @ .., last] = parts else { return Err(invalid("the path is empty")) };
    let mut at = folder.try_clone()?;
    for part in folders {
        at = openat(&at, *part, PATH_FLAGS | OFlags::DIRECTORY, Mode::empty())?;
    }
    Ok(openat(&at, *last, flags, Mode::empty())?)
}

/// Opens a descriptor that this process inherited, by its path in `/proc`.
pub(super) fn open_inherited(path: &Path, opening: Opening, mode: FileMode) -> io::Result<File> {
    let access = if opening == Opening::Read { OFlags::RDONLY } else { OFlags::RDWR };
    let file = File::from(openat(CWD, path, access | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?);
    // The parent that passed the descriptor may have been root.
    accept(&file, path, opening, mode, &[rustix::process::geteuid().as_raw(), 0])?;
    Ok(file)
}

/// Checks the type and the owner of an existing file, and narrows its permissions.
fn accept(file: &File, path: &Path, opening: Opening, mode: FileMode, users: &[u32]) -> io::Result<()> {
    let metadata = fstat(file)?;
    if FileType::from_raw_mode(metadata.st_mode) != FileType::RegularFile {
        return Err(invalid("it is not a regular file"));
    }
    if !users.contains(&metadata.st_uid) && !is_planted("other-owners-are-accepted") {
        return Err(denied(format!(
            "it belongs to user {}, and this process runs as user {}; remove it, or choose another path",
            metadata.st_uid, users[0]
        )));
    }
    let bits = metadata.st_mode & 0o7777;
    if bits & !mode.bits() == 0 || metadata.st_uid != users[0] || is_planted("permissions-follow-umask") {
        return Ok(());
    }
    match fchmod(file, self::mode(mode.bits())) {
        Ok(()) => log_narrowed(path, bits, mode.bits()),
        // On a file system that is read-only, the file is as it is.
        Err(error) if opening == Opening::Read => {
            tracing::warn!(path = %path.display(), bits = format!("{bits:04o}"), "permissions of a file were not narrowed: {error}");
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

fn log_narrowed(path: &Path, before: u32, after: u32) {
    tracing::warn!(
        path = %path.display(),
        before = format!("{before:04o}"),
        after = format!("{after:04o}"),
        "permissions narrowed: other users could read this; those that have it open still can"
    );
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    /// Kernels without `openat2` take this way.
    #[test]
    fn parts_are_opened_one_by_one_without_links() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        std::fs::create_dir_all(path.join("a/b")).unwrap();
        std::fs::write(path.join("a/b/file"), "value").unwrap();
        std::os::unix::fs::symlink("a", path.join("link")).unwrap();
        std::os::unix::fs::symlink("file", path.join("a/b/link")).unwrap();
        std::os::unix::fs::symlink("b", path.join("a/inner")).unwrap();
        let folder = Folder::open(path).unwrap();
        let open = |path: &str| {
            let parts = normal_parts(Path::new(path))?;
            open_by_parts(&folder.handle, &parts, OFlags::RDONLY | FILE_FLAGS)
        };
        open("a/b/file").unwrap();
        open("a/b").unwrap();
        for bad in
            ["link/b/file", "a/inner/file", "a/b/link", "a/../a/b/file", "/etc/passwd", "", "missing/x"]
        {
            open(bad).unwrap_err();
        }
    }
}
