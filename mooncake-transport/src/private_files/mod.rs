//! Files that hold values or keys: their permissions, their owner, and paths without links of
//! other users.
//!
//! [`Folder::file`] opens each of them: segment files and their indexes, the disk tier, shared
//! files, snapshots, and the files beside a RocksDB database. The umask of the process never
//! matters.
//!
//! - A new file gets exactly the permissions of its [`FileMode`].
//! - A symbolic link in place of the file is refused.
//! - A file of another user is refused, also for root.
//! - A file of this user with wider permissions is narrowed, and a line in the log says so.
//! - A symbolic link on the way to the file counts only if it belongs to root or to this user.

mod folder;
mod mode;
mod walk;

pub use self::folder::{Folder, FolderEntry, Opening};
pub use self::mode::FileMode;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Opens a file at a path that the operator chose, as [`Folder::file`] does. A path such as
/// `/proc/self/fd/3` names a descriptor that this process inherited.
///
/// # Errors
/// Those of [`Folder::open`] and [`Folder::file`].
pub fn open(path: &Path, opening: Opening, mode: FileMode) -> io::Result<File> {
    if walk::is_own_descriptor(path) {
        return folder::open_inherited(path, opening, mode);
    }
    let (folder, name) = Folder::around(path)?;
    folder.file(name, opening, mode)
}

/// Reads a whole file of this user, as [`open`] does.
///
/// # Errors
/// Those of [`open`], and of the operating system.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, Opening::Read, FileMode::PRIVATE)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a block device for reading and writing. Returns `None` if the path leads to no block
/// device. Links to it count if they belong to root or to this user, such as those in
/// `/dev/disk`.
///
/// # Errors
/// Those of the operating system, and `PermissionDenied` for a link of another user.
pub fn open_device(path: &Path) -> io::Result<Option<File>> {
    walk::open_device(path)
}
