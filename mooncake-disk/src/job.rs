//! Jobs: pieces of an operation, on their way to the kernel.

use std::sync::Arc;

use mooncake_core::memory::MemorySpan;
use mooncake_transport::Opcode;

use crate::file::BlockFile;
use crate::queue::Queue;
use crate::space::Use;

/// Request of at most `piece_bytes`, with everything that it needs until it is complete.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) queue: Arc<Queue>,
    /// Key of the entry in the table of the queue, where the share of the completion is parked.
    pub(crate) key: usize,
    pub(crate) opcode: Opcode,
    /// Use of the file range, which keeps it from being closed.
    pub(crate) used: Use,
    /// Offset of the first byte in the file.
    pub(crate) start: u64,
    /// Memory of the caller.
    pub(crate) local: MemorySpan,
    pub(crate) claim: Option<u64>,
}

impl Job {
    pub(crate) fn file(&self) -> &Arc<BlockFile> {
        self.used.file()
    }

    pub(crate) fn writes(&self) -> bool {
        self.opcode == Opcode::Write
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.local.len as u64
    }

    /// Returns the range of blocks that contains the job.
    pub(crate) fn blocks(&self) -> (u64, u64) {
        let align = self.file().align();
        (self.start - self.start % align, self.end().next_multiple_of(align))
    }

    /// Returns whether the job covers only a part of its blocks.
    pub(crate) fn is_partial(&self) -> bool {
        self.blocks() != (self.start, self.end())
    }
}
