//! Open files and block devices, and the blocks of theirs that are being written.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use rustix::fs::OFlags;

use crate::job::Job;
use crate::layout::BLOCK;

/// File that jobs read and write.
#[derive(Debug)]
pub(crate) struct BlockFile {
    file: File,
    path: PathBuf,
    /// Alignment of offsets and lengths: 1 with the page cache.
    align: u64,
    claims: Mutex<Claims>,
}

/// Writes in progress on a file whose partial blocks are read, changed and written back.
#[derive(Debug, Default)]
struct Claims {
    last: u64,
    held: Vec<Claim>,
    waiting: Vec<Job>,
}

#[derive(Debug)]
struct Claim {
    id: u64,
    lo: u64,
    hi: u64,
    partial: bool,
}

impl BlockFile {
    /// Opens a file for reading and writing, and creates it if missing. A regular file shorter than
    /// `len` is extended to it, without allocating space.
    pub(crate) fn open(path: &Path, len: Option<u64>, direct: bool) -> Result<Self> {
        let cannot = |e: io::Error| cannot_open(path, e);
        let plain = options().open(path).map_err(cannot)?;
        let about = plain.metadata().map_err(cannot)?;
        let device = about.file_type().is_block_device();
        if !device && !about.is_file() {
            return Err(Error::invalid(format!(
                "cannot open {}: it is neither a file nor a block device",
                path.display()
            )));
        }
        if let Some(len) = len {
            let size = if device { size_of_device(&plain).map_err(cannot)? } else { about.len() };
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
        let about = plain.metadata().map_err(|e| cannot_open(path, e))?;
        let whole = about.file_type().is_block_device() || about.len().is_multiple_of(BLOCK);
        let past_cache = direct && whole && about.len() != 0;
        let opened = past_cache.then(|| open_direct(path)).flatten();
        let (file, align) = opened.map_or((plain, 1), |file| (file, BLOCK));
        Ok(Self { file, path: path.into(), align, claims: Mutex::default() })
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

    /// Returns a job that may start, or keeps it until the jobs that it collides with are done.
    pub(crate) fn admit(&self, mut job: Job) -> Option<Job> {
        if !job.writes() || self.align == 1 {
            return Some(job);
        }
        let mut claims = self.claims.lock();
        if claims.waiting.iter().any(|other| collide(&claim_of(other), &claim_of(&job)))
            || claims.held.iter().any(|held| collide(held, &claim_of(&job)))
        {
            claims.waiting.push(job);
            return None;
        }
        claims.hold(&mut job);
        Some(job)
    }

    /// Ends the claim of a job. Returns the jobs that may start now.
    pub(crate) fn release(&self, id: u64) -> Vec<Job> {
        let mut claims = self.claims.lock();
        claims.held.retain(|claim| claim.id != id);
        if claims.waiting.is_empty() {
            return Vec::new();
        }
        let mut free = Vec::new();
        let mut still = Vec::new();
        for mut job in std::mem::take(&mut claims.waiting) {
            let claim = claim_of(&job);
            let blocked = claims.held.iter().any(|held| collide(held, &claim))
                || still.iter().any(|other| collide(&claim_of(other), &claim));
            if blocked {
                still.push(job);
            } else {
                claims.hold(&mut job);
                free.push(job);
            }
        }
        claims.waiting = still;
        free
    }
}

impl Claims {
    fn hold(&mut self, job: &mut Job) {
        self.last += 1;
        job.claim = Some(self.last);
        self.held.push(Claim { id: self.last, ..claim_of(job) });
    }
}

fn claim_of(job: &Job) -> Claim {
    let (lo, hi) = job.blocks();
    Claim { id: 0, lo, hi, partial: job.is_partial() }
}

/// Returns whether two claims collide. Two whole writes may run in parallel: callers that post both
/// have no right to an order.
fn collide(a: &Claim, b: &Claim) -> bool {
    (a.partial || b.partial) && a.lo < b.hi && b.lo < a.hi
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.custom_flags(OFlags::CLOEXEC.bits().cast_signed());
    options
}

/// Opens a file with `O_DIRECT`. Returns `None` where the file system does not support it, or
/// refuses the first block.
fn open_direct(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    options.custom_flags((OFlags::CLOEXEC | OFlags::DIRECT).bits().cast_signed());
    let file = options.open(path).ok()?;
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
