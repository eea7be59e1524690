//! Parts of files that this process offers to the cluster: each byte once, as two objects would share it else.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

static OFFERED: Mutex<Vec<Part>> = Mutex::new(Vec::new());

/// Which bytes of which file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    device: u64,
    number: u64,
    bytes: Range<u64>,
}

/// A mapped part of a file that no other one of this process overlaps.
pub(super) struct Offered {
    memory: HostMemory,
    part: Part,
}

impl Offered {
    /// Maps so many bytes from `offset` on.
    ///
    /// # Errors
    /// `SEGMENT_ALREADY_EXISTS` when some of them are offered, and what keeps a file from being mapped.
    pub(super) fn new(file: &File, offset: u64, len: usize) -> Result<Self> {
        let about = file.metadata()?;
        let bytes = offset..offset.saturating_add(len as u64);
        let part = Part { device: about.dev(), number: about.ino(), bytes };
        let mut offered = OFFERED.lock();
        let overlaps = |other: &Part| {
            (other.device, other.number) == (part.device, part.number)
                && other.bytes.start < part.bytes.end
                && part.bytes.start < other.bytes.end
        };
        if let Some(other) = offered.iter().find(|other| overlaps(other)) {
            return Err(Error::new(
                ErrorCode::SegmentAlreadyExists,
                format!(
                    "bytes {} to {} of this file are offered already",
                    other.bytes.start, other.bytes.end
                ),
            ));
        }
        let memory = HostMemory::map_file(file, offset, len)?;
        offered.push(part.clone());
        Ok(Self { memory, part })
    }
}

// SAFETY: the memory inside keeps the promise.
#[allow(unsafe_code)]
unsafe impl MemorySource for Offered {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        OFFERED.lock().retain(|other| *other != self.part);
    }
}
