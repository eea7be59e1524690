//! A piece of an operation, on its way to the kernel.

use std::sync::Arc;

use mooncake_core::memory::MemorySpan;
use mooncake_transport::Opcode;

use crate::file::BlockFile;
use crate::queue::Queue;
use crate::space::Use;

/// One request of at most `piece_bytes`, with everything it needs until it is over.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) queue: Arc<Queue>,
    /// Its entry in the queue's table, where its share of the completion is parked.
    pub(crate) key: usize,
    pub(crate) opcode: Opcode,
    /// Keeps the range of the file from being closed.
    pub(crate) used: Use,
    /// First byte in the file.
    pub(crate) start: u64,
    /// The caller's memory.
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

    /// The blocks it lies in.
    pub(crate) fn blocks(&self) -> (u64, u64) {
        let align = self.file().align();
        (self.start - self.start % align, self.end().next_multiple_of(align))
    }

    /// Whether it is a part of its blocks only.
    pub(crate) fn is_partial(&self) -> bool {
        self.blocks() != (self.start, self.end())
    }
}
