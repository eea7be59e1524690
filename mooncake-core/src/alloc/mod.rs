//! Allocation of space inside a segment: the [`SegmentAllocator`] interface and its
//! implementations.

mod best_fit;
mod builtin;
mod tlsf;

pub use self::best_fit::BestFit;
pub use self::builtin::{AllocatorKind, BuiltinAllocator, BuiltinAllocatorConfig, ParseAllocatorError};
pub use self::tlsf::{Tlsf, TlsfConfig};

use std::fmt::Debug;

/// A range of bytes inside a segment, as offsets from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// First byte, counted from the start of the segment.
    pub offset: u64,
    /// Length in bytes, exactly as requested.
    pub len: u64,
}

impl Extent {
    /// Returns the offset behind the last byte, or `None` if it does not fit in 64 bits.
    pub fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// Returns whether the two ranges share a byte.
    pub fn overlaps(&self, other: &Extent) -> bool {
        self.len != 0
            && other.len != 0
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

/// Reason for which an allocator refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocError {
    /// A length of zero, or an alignment that is not a power of two.
    Invalid,
    /// No free range is long enough now. A later release may help.
    Full,
    /// The length exceeds the whole segment, so that the request can never succeed.
    TooLarge,
    /// The range of a [`SegmentAllocator::reserve`] is not wholly free, or lies outside.
    Occupied,
}

impl std::fmt::Display for AllocError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            AllocError::Invalid => "length is zero or alignment is not a power of two",
            AllocError::Full => "no free range is long enough",
            AllocError::TooLarge => "longer than the whole segment",
            AllocError::Occupied => "the range is taken or outside the segment",
        })
    }
}

impl std::error::Error for AllocError {}

/// Allocator of the ranges of one segment. It holds plain data; the caller holds the lock.
///
/// Contract (the conformance suite has one case per sentence): live extents never overlap and lie
/// inside `0..capacity`; an extent has exactly the requested length and an offset that is a
/// multiple of `align`; `release` of every extent makes the whole capacity one free range again;
/// `used` is the sum of the live lengths; the same calls give the same offsets.
pub trait SegmentAllocator: Sized + Send + 'static {
    /// Options of the implementation.
    type Config: Clone + Default + Debug + Send + Sync;

    /// Creates an allocator over `capacity` bytes, all free.
    fn new(capacity: u64, config: &Self::Config) -> Self;

    /// Allocates `len` bytes at a multiple of `align` (a power of two; 1 for none).
    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError>;

    /// Frees an extent that `allocate` or `reserve` returned.
    ///
    /// # Panics
    /// May panic when the extent is not live. That is a bug of the caller: to ignore it would
    /// allocate bytes twice.
    fn release(&mut self, extent: Extent);

    /// Allocates exactly this range, to rebuild state after a restart.
    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError>;

    /// Returns the number of managed bytes.
    fn capacity(&self) -> u64;

    /// Returns the sum of the lengths of live extents.
    fn used(&self) -> u64;

    /// Returns the largest `len` for which `allocate(len, 1)` succeeds now. The result may be
    /// lower, but never higher.
    fn largest_free(&self) -> u64;
}

/// Checks what every implementation refuses whatever its state is.
fn check_request(len: u64, align: u64, capacity: u64) -> Result<(), AllocError> {
    if len == 0 || !align.is_power_of_two() {
        return Err(AllocError::Invalid);
    }
    if len > capacity { Err(AllocError::TooLarge) } else { Ok(()) }
}

/// Returns the number of bytes from `start` to the next multiple of `align`, a power of two.
fn padding(start: u64, align: u64) -> u64 {
    start.wrapping_neg() & (align - 1)
}

#[cold]
#[track_caller]
fn not_live(extent: Extent) -> ! {
    panic!("cannot release extent: it is not live. offset={} len={}", extent.offset, extent.len)
}
