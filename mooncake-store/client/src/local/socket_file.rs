//! File of a socket. A daemon that stops must not remove the file of its successor at the same
//! path.

use std::fs::{remove_file, symlink_metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mooncake_core::fork::ParentOnly;
use parking_lot::Mutex;
use tokio::net::UnixListener;

/// File at the path of a listening socket, until the file is removed.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file. `None` once the file was removed.
    identity: Mutex<Option<(u64, u64)>>,
}

/// Device and inode of the file at a path.
fn identity_of(path: &Path) -> Option<(u64, u64)> {
    symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

impl SocketFile {
    /// Returns the file of a socket that was just bound to this path.
    pub(super) fn of_bound(path: &Path) -> Arc<Self> {
        Arc::new(Self { path: path.to_owned(), identity: Mutex::new(identity_of(path)) })
    }

    /// Removes the file, unless another socket has the path by now. Only the first call has an
    /// effect. Must be called while the socket exists: until then, no other file has the inode, and
    /// no successor replaces the file.
    pub(super) fn remove(&self) {
        let mut identity = self.identity.lock();
        if let Some(bound) = identity.take()
            && identity_of(&self.path) == Some(bound)
        {
            let _ = remove_file(&self.path);
        }
    }
}

/// Listening socket. Its file is removed before it is closed.
pub(super) struct BoundListener {
    pub(super) listener: ParentOnly<UnixListener>,
    pub(super) file: Arc<SocketFile>,
}

impl Drop for BoundListener {
    fn drop(&mut self) {
        self.file.remove();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_file_of_another_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("owner.sock");
        let _first = UnixListener::bind(&path).unwrap();
        let file = SocketFile::of_bound(&path);
        std::fs::rename(&path, folder.path().join("moved.sock")).unwrap();
        let _second = UnixListener::bind(&path).unwrap();
        file.remove();
        assert!(path.exists(), "the second socket has the path");
        std::fs::rename(folder.path().join("moved.sock"), &path).unwrap();
        file.remove();
        assert!(path.exists(), "a file is removed once");
        SocketFile::of_bound(&path).remove();
        assert!(!path.exists());
    }
}
