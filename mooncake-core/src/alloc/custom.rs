//! [`CustomAllocator`]: an allocator of the application behind
//! [`BuiltinAllocator`](super::BuiltinAllocator).

use std::fmt;
use std::sync::Arc;

use super::{AllocError, Extent, SegmentAllocator};

/// Object-safe form of an allocator. The built-in allocators are called without it.
trait DynAllocator: Send {
    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError>;
    fn release(&mut self, extent: Extent);
    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError>;
    fn capacity(&self) -> u64;
    fn used(&self) -> u64;
    fn largest_free(&self) -> u64;
}

impl<A: SegmentAllocator> DynAllocator for A {
    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        SegmentAllocator::allocate(self, len, align)
    }

    fn release(&mut self, extent: Extent) {
        SegmentAllocator::release(self, extent);
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        SegmentAllocator::reserve(self, extent)
    }

    fn capacity(&self) -> u64 {
        SegmentAllocator::capacity(self)
    }

    fn used(&self) -> u64 {
        SegmentAllocator::used(self)
    }

    fn largest_free(&self) -> u64 {
        SegmentAllocator::largest_free(self)
    }
}

type Open = dyn Fn(u64) -> Box<dyn DynAllocator> + Send + Sync;

/// Allocator of the application with its options, for
/// [`BuiltinAllocatorConfig`](super::BuiltinAllocatorConfig).
#[derive(Clone)]
pub struct CustomAllocator {
    name: &'static str,
    open: Arc<Open>,
}

impl CustomAllocator {
    /// Selects the allocator `A` with these options.
    pub fn new<A: SegmentAllocator>(config: A::Config) -> Self {
        let open = move |capacity| Box::new(A::new(capacity, &config)) as Box<dyn DynAllocator>;
        Self { name: std::any::type_name::<A>(), open: Arc::new(open) }
    }

    pub(super) fn open(&self, capacity: u64) -> CustomSpace {
        CustomSpace((self.open)(capacity))
    }
}

impl fmt::Debug for CustomAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomAllocator").field(&self.name).finish()
    }
}

impl PartialEq for CustomAllocator {
    /// Returns whether both are clones of one value.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.open, &other.open)
    }
}

impl Eq for CustomAllocator {}

/// Allocator of the application, as a [`CustomAllocator`] opened it.
pub struct CustomSpace(Box<dyn DynAllocator>);

impl CustomSpace {
    pub(super) fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        self.0.allocate(len, align)
    }

    pub(super) fn release(&mut self, extent: Extent) {
        self.0.release(extent)
    }

    pub(super) fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        self.0.reserve(extent)
    }

    pub(super) fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    pub(super) fn used(&self) -> u64 {
        self.0.used()
    }

    pub(super) fn largest_free(&self) -> u64 {
        self.0.largest_free()
    }
}

impl fmt::Debug for CustomSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomSpace").field("used", &self.used()).finish_non_exhaustive()
    }
}
