//! Rows of equal length in two memories.

use mooncake_core::{Error, Result};

/// Rows that have come in, and then rows of this rank, numbered through.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    width: usize,
    received: &'a [u8],
    own: &'a [u8],
    /// Number of rows that have come in.
    split: usize,
}

impl<'a> Rows<'a> {
    /// Describes rows of `width` bytes.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if a memory does not have whole rows.
    pub fn new(width: usize, received: &'a [u8], own: &'a [u8]) -> Result<Self> {
        if width == 0 || !received.len().is_multiple_of(width) || !own.len().is_multiple_of(width) {
            return Err(Error::invalid(format!("cannot use rows: wrong lengths. bytes={width}")));
        }
        Ok(Self { width, received, own, split: received.len() / width })
    }

    /// Returns the bytes of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.split + self.own.len() / self.width
    }

    /// Returns the number of rows that have come in, which is that of the first own row.
    pub fn split(&self) -> usize {
        self.split
    }

    /// Returns the bytes of the rows that have come in.
    pub(super) fn received(&self) -> &'a [u8] {
        self.received
    }

    /// Returns a row.
    ///
    /// # Panics
    /// If there is no such row.
    pub(super) fn row(&self, row: usize) -> &'a [u8] {
        let (memory, row) = match row.checked_sub(self.split) {
            None => (self.received, row),
            Some(row) => (self.own, row),
        };
        &memory[row * self.width..(row + 1) * self.width]
    }
}
