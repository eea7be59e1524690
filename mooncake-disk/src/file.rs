//! Open files and block devices.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::private_files::{self, FileMode, Opening};
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::layout::BLOCK;

/// File that jobs read and write.
#[derive(Debug)]
pub(crate) struct BlockFile {
    file: File,
    path: PathBuf,
    /// Alignment of offsets and lengths: 1 with the page cache.
    align: u64,
}

impl BlockFile {
    /// Opens a file for reading and writing, and creates it if missing. A regular file shorter than
    /// `len` is extended to it, without allocating space. Files are private to this user.
    pub(crate) fn open(path: &Path, len: Option<u64>, direct: bool) -> Result<Self> {
        let cannot = |e: io::Error| cannot_open(path, e);
        let plain = match private_files::open_device(path).map_err(cannot)? {
            Some(device) => device,
            None => private_files::open(path, Opening::Create, FileMode::PRIVATE).map_err(cannot)?,
        };
        let metadata = plain.metadata().map_err(cannot)?;
        let device = metadata.file_type().is_block_device();
        if !device && !metadata.is_file() {
            return Err(Error::invalid(format!(
                "cannot open {}: it is neither a file nor a block device",
                path.display()
            )));
        }
        if let Some(len) = len {
            let size = if device { size_of_device(&plain).map_err(cannot)? } else { metadata.len() };
            if device && size < len {
                return Err(Error::invalid(format!(
                    "cannot open {}: it has {size} bytes, but {len} are needed",
                    path.display()
                )));
            }
            if !device && size < len {
                plain.set_len(len).map_err(cannot)?;
            }
        }
        Self::from_open(plain, path, direct)
    }

    /// Wraps a file that is already open at `path`.
    pub(crate) fn from_open(plain: File, path: &Path, direct: bool) -> Result<Self> {
        let metadata = plain.metadata().map_err(|e| cannot_open(path, e))?;
        let is_block_multiple =
            metadata.file_type().is_block_device() || metadata.len().is_multiple_of(BLOCK);
        let bypass_cache = direct && is_block_multiple && metadata.len() != 0;
        let opened = bypass_cache.then(|| open_direct(&plain)).flatten();
        let (file, align) = opened.map_or((plain, 1), |file| (file, BLOCK));
        Ok(Self { file, path: path.into(), align })
    }

    pub(crate) fn align(&self) -> u64 {
        self.align
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Opens an open file once more, with `O_DIRECT`. Returns `None` where the file system does not
/// support it, or refuses the first block.
fn open_direct(plain: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", plain.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT;
    let file = File::from(openat(CWD, path, flags, Mode::empty()).ok()?);
    let mut first = crate::buffer::Frame::new(BLOCK as usize).ok()?;
    file.read_at(&mut first, 0).ok()?;
    Some(file)
}

fn size_of_device(file: &File) -> io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

pub(crate) fn cannot_open(path: &Path, e: io::Error) -> Error {
    Error::new(ErrorCode::FileOpenFail, format!("cannot open {}: {e}", path.display())).with_source(e)
}
