//! Two small shared files of 32-bit words, through which an owner and its peers communicate without
//! messages.
//!
//! The owner's *slot table* shows for each slot whether a region is open there (an odd generation).
//! Each peer has *copy counters*, in which it counts its copies in progress per slot. A peer
//! increments the count, reads the slot table, copies, and decrements the count. The owner changes
//! the slot table, then waits for the counts. Both orders are sequentially consistent, so either
//! the peer sees the region closed, or the owner sees the copy.
//!
//! Counts are kept in two rows, and the slot table selects the row for new copies. The owner
//! changes rows from time to time. A count that remains in the old row a whole turn later belongs
//! to a process that is stopped in the middle of a copy.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::{Error, Result};

/// Maximum number of regions of one owner that peers can reach. Other transports carry the rest.
pub(super) const MAX_SLOTS: usize = 480;

const FILE_BYTES: usize = 4096;
const FIRST_SLOT_WORD: usize = 16;

/// Shared file of [`FILE_BYTES`] bytes.
#[derive(Debug)]
struct SharedWords(HostMemory);

impl SharedWords {
    fn new(name: &str) -> Result<Self> {
        let options = HostMemoryOptions { shared: Some(name.into()), ..HostMemoryOptions::default() };
        HostMemory::with(FILE_BYTES, &options).map(Self)
    }

    /// Opens the file of another process, whose size is sealed.
    fn open(file: &File) -> Result<Self> {
        HostMemory::map_file(file, 0, FILE_BYTES).map(Self)
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < FILE_BYTES / 4, "word {index} of {}", FILE_BYTES / 4);
        // SAFETY: inside the mapping, aligned, and accessed only as atomics by all processes that
        // have the file. A file of sealed size cannot lose the page.
        unsafe { AtomicU32::from_ptr(self.0.span().ptr.cast::<u32>().add(index).as_ptr()) }
    }

    fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd().ok_or_else(|| Error::invalid("not a file of ours"))
    }
}

/// Words of an owner for all its peers.
#[derive(Debug)]
pub(super) struct SlotTable(SharedWords);

impl SlotTable {
    pub(super) fn new() -> Result<Self> {
        SharedWords::new("mooncake-board").map(Self)
    }

    pub(super) fn open(file: &File) -> Result<Self> {
        SharedWords::open(file).map(Self)
    }

    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd()
    }

    /// Returns the version, which changes whenever a region is opened or closed.
    pub(super) fn version(&self) -> &AtomicU32 {
        self.0.word(0)
    }

    /// Returns the word whose last bit is the current row of the pages.
    pub(super) fn row(&self) -> &AtomicU32 {
        self.0.word(1)
    }

    /// Returns the generation of a slot, odd while it is open. Slots are smaller than
    /// [`MAX_SLOTS`].
    pub(super) fn state(&self, slot: usize) -> &AtomicU32 {
        self.0.word(FIRST_SLOT_WORD + slot)
    }
}

/// Words of one peer for an owner.
#[derive(Debug)]
pub(super) struct CopyCounters(SharedWords);

impl CopyCounters {
    pub(super) fn new() -> Result<Self> {
        SharedWords::new("mooncake-page").map(Self)
    }

    pub(super) fn open(file: &File) -> Result<Self> {
        SharedWords::open(file).map(Self)
    }

    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd()
    }

    /// Returns the number of copies in progress in a slot that were counted in this row.
    pub(super) fn inside(&self, slot: usize, row: u32) -> &AtomicU32 {
        self.0.word(2 * slot + (row & 1) as usize)
    }
}

const _: () = assert!(FIRST_SLOT_WORD + MAX_SLOTS <= FILE_BYTES / 4 && 2 * MAX_SLOTS <= FILE_BYTES / 4);
