//! Two small shared files of 32-bit words, by which an owner and its peers know of each other without a message.
//!
//! The owner's *board* says for each slot whether a region is open there (an odd generation) or not. Each peer has a *page* of its own
//! in which it counts, per slot, the copies it is in the middle of. A peer counts itself in, looks at the board, copies, counts
//! itself out; the owner changes the board, then waits for the counts. Both orders are sequentially consistent, so either the
//! peer sees the region closed, or the owner sees the peer inside.
//!
//! Counts are kept in two rows; the board says which one is counted in now. The owner changes rows from time to time: a count that
//! is left in the old row a whole turn later belongs to somebody who is stopped in the middle of a copy.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::{Error, Result};

/// Regions of one owner that peers can reach. Further ones are left to other wires.
pub(super) const SLOTS: usize = 480;

const BYTES: usize = 4096;
const STATES: usize = 16;

/// A shared file of [`BYTES`] bytes.
#[derive(Debug)]
struct Words(HostMemory);

impl Words {
    fn new(name: &str) -> Result<Self> {
        let options = HostMemoryOptions { shared: Some(name.into()), ..HostMemoryOptions::default() };
        HostMemory::with(BYTES, &options).map(Self)
    }

    /// Somebody else's, whose size is sealed.
    fn open(file: &File) -> Result<Self> {
        HostMemory::map_file(file, 0, BYTES).map(Self)
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < BYTES / 4, "word {index} of {}", BYTES / 4);
        // SAFETY: inside the mapping, aligned, and touched only as atomics by all who have the file; a file whose size is sealed cannot
        // lose the page.
        unsafe { AtomicU32::from_ptr(self.0.span().ptr.cast::<u32>().add(index).as_ptr()) }
    }

    fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd().ok_or_else(|| Error::invalid("not a file of ours"))
    }
}

/// What an owner says to all its peers.
#[derive(Debug)]
pub(super) struct Board(Words);

impl Board {
    pub(super) fn new() -> Result<Self> {
        Words::new("mooncake-board").map(Self)
    }

    pub(super) fn open(file: &File) -> Result<Self> {
        Words::open(file).map(Self)
    }

    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd()
    }

    /// Changes whenever a region comes or goes.
    pub(super) fn version(&self) -> &AtomicU32 {
        self.0.word(0)
    }

    /// Its last bit is the row of a page that is counted in now.
    pub(super) fn row(&self) -> &AtomicU32 {
        self.0.word(1)
    }

    /// Generation of a slot: odd while it is open. Slots are smaller than [`SLOTS`].
    pub(super) fn state(&self, slot: usize) -> &AtomicU32 {
        self.0.word(STATES + slot)
    }
}

/// What one peer says to an owner.
#[derive(Debug)]
pub(super) struct Page(Words);

impl Page {
    pub(super) fn new() -> Result<Self> {
        Words::new("mooncake-page").map(Self)
    }

    pub(super) fn open(file: &File) -> Result<Self> {
        Words::open(file).map(Self)
    }

    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd()
    }

    /// Copies under way in a slot, of those that were counted in this row.
    pub(super) fn inside(&self, slot: usize, row: u32) -> &AtomicU32 {
        self.0.word(2 * slot + (row & 1) as usize)
    }
}

const _: () = assert!(STATES + SLOTS <= BYTES / 4 && 2 * SLOTS <= BYTES / 4);
