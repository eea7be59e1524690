//! Registered memory and ranges of it. No function returns `&[u8]`, because a transport may write
//! without the compiler's knowledge. Bytes are copied in and out, or accessed through a
//! [`PoolBuf`](crate::pool::PoolBuf).

#![allow(clippy::len_without_is_empty, reason = "regions and their ranges never are")]

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::{Location, MemorySource, MemorySpan, copy_memory};
use mooncake_core::{Error, Result};

use crate::device;
use crate::transport::{Access, Transport};

/// Memory registered with a transport. Clones are handles of the same region. The drop of the last
/// handle deregisters and then frees the memory.
pub struct Region<T: Transport> {
    inner: Arc<Inner<T>>,
}

struct Inner<T: Transport> {
    // Drop order: withdraw from the directory, deregister, give up the range, free.
    _published: Option<Box<dyn Send + Sync>>,
    registration: Option<T::Registration>,
    _claim: Option<Box<dyn Send + Sync>>,
    span: MemorySpan,
    access: Access,
    memory: Arc<dyn MemorySource>,
    /// Region that contains this one. The parent's registration covers this region.
    parent: Option<Arc<Inner<T>>>,
}

impl<T: Transport> Inner<T> {
    fn registration(&self) -> Option<&T::Registration> {
        let own = self.registration.as_ref();
        own.or_else(|| self.parent.as_ref().and_then(|parent| parent.registration()))
    }
}

impl<T: Transport> Region<T> {
    /// Registers memory. Returns `Invalid` for a length of zero.
    pub fn register(transport: &T, memory: Arc<dyn MemorySource>, access: Access) -> Result<Self> {
        let span = usable(memory.span())?;
        // SAFETY: `inner` keeps the memory until the registration is dropped, which is declared
        // before it.
        let registration = unsafe { transport.register(span, access) }?;
        Ok(Self::from_parts(Some(registration), memory, span, access))
    }

    /// Creates a region for a transport that needs no registration. The memory is closed to peers.
    pub fn unregistered(memory: Arc<dyn MemorySource>) -> Result<Self> {
        let span = usable(memory.span())?;
        Ok(Self::from_parts(None, memory, span, Access::Local))
    }

    fn from_parts(
        registration: Option<T::Registration>,
        memory: Arc<dyn MemorySource>,
        span: MemorySpan,
        access: Access,
    ) -> Self {
        let inner =
            Inner { _published: None, registration, _claim: None, span, access, memory, parent: None };
        Self { inner: Arc::new(inner) }
    }

    /// Returns a range as a region of its own. `guard` is dropped with the last handle, slice and
    /// transfer of the result. Returns `Invalid` if the range is empty or not inside.
    ///
    /// # Safety
    /// While the result or a slice of it is used, no other exclusive range and no other slice in
    /// use shares a byte with the range.
    #[allow(unsafe_code)]
    pub unsafe fn sub_region(&self, range: Range<usize>, guard: Box<dyn Send + Sync>) -> Result<Self> {
        let span = self.range(range)?;
        // SAFETY: promised by the caller.
        Ok(unsafe { self.part(span, guard) })
    }

    /// Returns the bytes of a range. Returns `Invalid` if the range is empty or not inside.
    pub(crate) fn range(&self, range: Range<usize>) -> Result<MemorySpan> {
        sub_span(self.inner.span, range)
    }

    /// Returns a part as a region of its own. `guard` is dropped with the last handle, slice and
    /// transfer of the part.
    ///
    /// # Safety
    /// The span is a [`range`](Self::range) of this region. Until `guard` is dropped, no other
    /// exclusive range and no other slice in use shares a byte with the part.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn part(&self, span: MemorySpan, guard: Box<dyn Send + Sync>) -> Self {
        let parent = Some(self.inner.clone());
        let (access, memory) = (self.inner.access, self.inner.memory.clone());
        let inner =
            Inner { _published: None, registration: None, _claim: Some(guard), span, access, memory, parent };
        Self { inner: Arc::new(inner) }
    }

    /// Returns a handle that does not keep the region alive.
    pub(crate) fn downgrade(&self) -> WeakRegion<T> {
        WeakRegion { inner: Arc::downgrade(&self.inner) }
    }

    /// Attaches two values to the region: one is dropped before the deregistration and one after
    /// it. Has an effect only while this is the only handle.
    pub(crate) fn tie(&mut self, before: Option<Box<dyn Send + Sync>>, after: Box<dyn Send + Sync>) {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner._published = before;
            inner._claim = Some(after);
        }
    }

    /// Returns the address range, with the device if the memory is on one.
    pub fn span(&self) -> MemorySpan {
        self.inner.span
    }

    /// Returns the first address, as peers see it.
    pub fn addr(&self) -> u64 {
        self.inner.span.addr()
    }

    /// Returns the length in bytes, never zero.
    pub fn len(&self) -> usize {
        self.inner.span.len
    }

    /// Returns the access that peers have.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// Returns the transport's registration, or `None` for [`Region::unregistered`].
    pub fn registration(&self) -> Option<&T::Registration> {
        self.inner.registration()
    }

    /// Returns the memory of the region.
    pub fn memory(&self) -> &Arc<dyn MemorySource> {
        &self.inner.memory
    }

    /// Returns a range to write from. Returns `Invalid` if the range is empty or not inside.
    pub fn slice(&self, range: Range<usize>) -> Result<Slice<T>> {
        let span = sub_span(self.inner.span, range)?;
        Ok(Slice { inner: self.inner.clone(), span })
    }

    /// Converts the handle into the only exclusive range of the region. Returns the handle if there
    /// are other handles or slices, or if the memory is read-only.
    pub fn exclusive(mut self) -> std::result::Result<SliceMut<T>, Self> {
        match Arc::get_mut(&mut self.inner) {
            Some(inner) if !inner.span.read_only => {
                let span = inner.span;
                Ok(SliceMut { inner: self.inner, span })
            }
            _ => Err(self),
        }
    }

    /// Returns an exclusive range beside other users of the region, for callers that divide the
    /// region themselves (such as an allocator). Returns `Invalid` if the range is empty or not
    /// inside, and for read-only memory.
    ///
    /// # Safety
    /// While the result lives, no other exclusive range and no slice in use shares a byte with it.
    #[allow(unsafe_code)]
    pub unsafe fn slice_mut_unchecked(&self, range: Range<usize>) -> Result<SliceMut<T>> {
        let span = sub_span(self.inner.span, range)?;
        if span.read_only {
            return Err(Error::invalid(format!(
                "cannot write to memory: it is read-only. len={} address={:#x}",
                span.len,
                span.addr()
            )));
        }
        let inner = match &self.inner.parent {
            Some(parent) if is_planted("a-slice-keeps-the-arena-and-not-the-extent") => parent,
            _ => &self.inner,
        };
        Ok(SliceMut { inner: inner.clone(), span })
    }
}

/// Handle that does not keep its region alive.
pub(crate) struct WeakRegion<T: Transport> {
    inner: Weak<Inner<T>>,
}

impl<T: Transport> WeakRegion<T> {
    /// Returns the region if a handle, slice or transfer of it remains.
    pub(crate) fn upgrade(&self) -> Option<Region<T>> {
        self.inner.upgrade().map(|inner| Region { inner })
    }
}

impl<T: Transport> Clone for Region<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<T: Transport> fmt::Debug for Region<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_span(f, "Region", self.inner.span)
    }
}

/// Shared range of a region, the source of writes. Clones are the same range.
pub struct Slice<T: Transport> {
    inner: Arc<Inner<T>>,
    span: MemorySpan,
}

impl<T: Transport> Slice<T> {
    /// Returns the first address.
    pub fn addr(&self) -> u64 {
        self.span.addr()
    }

    /// Returns the length in bytes, never zero.
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// Returns the location of the memory: host or device.
    pub fn location(&self) -> Location {
        self.span.location
    }

    /// Returns a part of this range. Returns `Invalid` if the part is empty or not inside.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        Ok(Self { inner: self.inner.clone(), span: sub_span(self.span, range)? })
    }

    /// Copies bytes out, from `offset`.
    ///
    /// A peer that writes the bytes at the same time, in a region open to peers, may leave a mix of
    /// old and new bytes.
    ///
    /// # Errors
    /// Returns `Invalid` if the bytes are not inside the range, and the errors of the device.
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        copy_out(self.span, offset, bytes)
    }

    /// Converts the slice into an exclusive range. Returns the slice if the region has other
    /// handles or slices, or if its memory is read-only.
    pub fn exclusive(mut self) -> std::result::Result<SliceMut<T>, Self> {
        match Arc::get_mut(&mut self.inner) {
            Some(_) if !self.span.read_only => Ok(SliceMut { inner: self.inner, span: self.span }),
            _ => Err(self),
        }
    }
}

impl<T: Transport> Clone for Slice<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), span: self.span }
    }
}

impl<T: Transport> fmt::Debug for Slice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_span(f, "Slice", self.span)
    }
}

/// Exclusive range of a region, the destination of reads. It has no clone and no overlap, because
/// two
/// reads into one range would be a race.
///
/// ```compile_fail,E0382
/// # use mooncake_transport::{SliceMut, Transport};
/// fn twice<T: Transport>(slice: SliceMut<T>, read: impl Fn(SliceMut<T>)) {
///     read(slice);
///     read(slice); // moved into the first read, and back only when that is over
/// }
/// ```
///
/// ```compile_fail,E0599
/// # use mooncake_transport::{SliceMut, Transport};
/// fn copy<T: Transport>(slice: &SliceMut<T>) -> SliceMut<T> {
///     slice.clone() // `&SliceMut` clones the reference at most
/// }
/// ```
pub struct SliceMut<T: Transport> {
    inner: Arc<Inner<T>>,
    span: MemorySpan,
}

impl<T: Transport> SliceMut<T> {
    /// Returns the first address.
    pub fn addr(&self) -> u64 {
        self.span.addr()
    }

    /// Returns the length in bytes, never zero.
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// Returns the location of the memory: host or device.
    pub fn location(&self) -> Location {
        self.span.location
    }

    /// Returns the access that peers have to the region.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// Splits the range into two that do not overlap. Returns the slice if a part would be empty.
    pub fn split_at(self, mid: usize) -> std::result::Result<(Self, Self), Self> {
        match (sub_span(self.span, 0..mid), sub_span(self.span, mid..self.span.len)) {
            (Ok(left), Ok(right)) => {
                Ok((Self { inner: self.inner.clone(), span: left }, Self { inner: self.inner, span: right }))
            }
            _ => Err(self),
        }
    }

    /// Converts the range into a shared one, which can be written from and cloned.
    pub fn into_shared(self) -> Slice<T> {
        Slice { inner: self.inner, span: self.span }
    }

    /// Converts the range into a handle of the whole region. Returns the range if the region has
    /// other ranges, because the handle could overlap them.
    pub fn into_region(mut self) -> std::result::Result<Region<T>, Self> {
        match Arc::get_mut(&mut self.inner) {
            Some(_) => Ok(Region { inner: self.inner }),
            None => Err(self),
        }
    }

    /// Copies bytes in, at `offset`. Returns `Invalid` if they do not fit, and the errors of the
    /// device.
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        copy_in(self.span, offset, bytes)
    }

    /// Copies bytes out, from `offset`. Returns `Invalid` if they are not inside, and the errors of
    /// the device.
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        copy_out(self.span, offset, bytes)
    }
}

impl<T: Transport> fmt::Debug for SliceMut<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_span(f, "SliceMut", self.span)
    }
}

/// Local memory of an operation.
#[derive(Debug)]
pub struct Local<'a, R> {
    /// Registration that covers `span`, if the memory is registered.
    pub registration: Option<&'a R>,
    /// Bytes of the operation.
    pub span: MemorySpan,
}

/// Buffer that a transport may write from. The caller hands the buffer over for the transfer and
/// gets it back afterwards.
///
/// # Safety
/// `local` returns the same bytes every time. The bytes stay allocated until the value is dropped,
/// even if it is moved. While another owner holds the value, no code writes the bytes. The
/// registration is one of the same `T` and lives as long as the value.
#[allow(unsafe_code)]
pub unsafe trait Source<T: Transport>: Send + 'static {
    /// Returns the local memory.
    fn local(&self) -> Local<'_, T::Registration>;
}

/// [`Source`] that a transport may read into.
///
/// # Safety
/// The holder of the value has the only access to the bytes, and may write them.
#[allow(unsafe_code)]
pub unsafe trait Sink<T: Transport>: Source<T> {}

// SAFETY: the handle keeps memory and registration. Exclusive ranges over the same bytes do not
// exist (`exclusive` needs the only handle), or their creator promised that they do not collide
// (`slice_mut_unchecked`).
unsafe impl<T: Transport> Source<T> for Slice<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        Local { registration: self.inner.registration(), span: self.span }
    }
}

// SAFETY: as above, and the range is the only one over its bytes.
unsafe impl<T: Transport> Source<T> for SliceMut<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        Local { registration: self.inner.registration(), span: self.span }
    }
}

// SAFETY: an exclusive range comes from the only handle, from a split of another one, or from a
// caller that promises exclusivity.
unsafe impl<T: Transport> Sink<T> for SliceMut<T> {}

// SAFETY: the bytes are immutable, and on the heap or static, so a move of the handle does not move
// them.
unsafe impl<T: Transport> Source<T> for Bytes {
    fn local(&self) -> Local<'_, T::Registration> {
        unregistered(NonNull::from(&**self))
    }
}

// SAFETY: the bytes are on the heap and owned by the vector, whose holder has the only access.
unsafe impl<T: Transport> Source<T> for Vec<u8> {
    fn local(&self) -> Local<'_, T::Registration> {
        // This uses `as_ptr` and no reference to the bytes, because the pointer may be written
        // through.
        let ptr = NonNull::new(self.as_ptr().cast_mut()).unwrap_or(NonNull::dangling());
        Local { registration: None, span: MemorySpan::new(ptr, self.len()) }
    }
}

// SAFETY: as above.
unsafe impl<T: Transport> Sink<T> for Vec<u8> {}

fn unregistered<'a, R>(bytes: NonNull<[u8]>) -> Local<'a, R> {
    Local { registration: None, span: MemorySpan::new(bytes.cast(), bytes.len()) }
}

/// Memory of another owner, for registration in place.
#[derive(Debug)]
pub struct BorrowedMemory {
    span: MemorySpan,
}

impl BorrowedMemory {
    /// Creates a source of the memory at `span`.
    ///
    /// # Safety
    /// Until the value and every region over it are dropped, the bytes stay allocated, readable and
    /// (unless the span is read-only) writable. The owner obeys the rules for holders of a region's
    /// ranges: it does not touch the bytes while a read into them is in progress, and does not
    /// write them while they are written from.
    #[allow(unsafe_code)]
    pub unsafe fn new(span: MemorySpan) -> Self {
        Self { span }
    }
}

// SAFETY: promised by the caller of `new`.
unsafe impl MemorySource for BorrowedMemory {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

fn usable(span: MemorySpan) -> Result<MemorySpan> {
    if span.len == 0 {
        return Err(Error::invalid("cannot register memory: it has no bytes"));
    }
    Ok(device::record_location(span.located()))
}

fn sub_span(span: MemorySpan, range: Range<usize>) -> Result<MemorySpan> {
    if range.start >= range.end || range.end > span.len {
        return Err(Error::invalid(format!(
            "invalid range: it is empty or outside the memory. start={} end={} len={}",
            range.start, range.end, span.len
        )));
    }
    // SAFETY: `start < end <= len`, so the result is inside the same allocation.
    let ptr = unsafe { span.ptr.add(range.start) };
    Ok(MemorySpan { ptr, len: range.end - range.start, ..span })
}

/// Returns the part of a span that a copy of `len` bytes at `offset` covers, or `None` if `len` is
/// 0.
fn part(span: MemorySpan, offset: usize, len: usize) -> Result<Option<MemorySpan>> {
    if len == 0 {
        return Ok(None);
    }
    let end = offset
        .checked_add(len)
        .ok_or_else(|| Error::invalid(format!("invalid range: it overflows. len={len} offset={offset}")))?;
    sub_span(span, offset..end).map(Some)
}

fn copy_out(span: MemorySpan, offset: usize, bytes: &mut [u8]) -> Result<()> {
    let Some(from) = part(span, offset, bytes.len())? else { return Ok(()) };
    let to = MemorySpan::new(NonNull::from(&mut *bytes).cast(), bytes.len());
    // SAFETY: `from` has that many bytes, kept by the caller's handle. `bytes` is a reference, so
    // it is other memory.
    unsafe { copy_memory(from, to) }
}

fn copy_in(span: MemorySpan, offset: usize, bytes: &[u8]) -> Result<()> {
    let Some(to) = part(span, offset, bytes.len())? else { return Ok(()) };
    let from = MemorySpan::new(NonNull::from(bytes).cast(), bytes.len());
    // SAFETY: `to` has that many bytes and the caller holds the range exclusively. `from` is only
    // read.
    unsafe { copy_memory(from, to) }
}

fn debug_span(f: &mut fmt::Formatter<'_>, name: &str, span: MemorySpan) -> fmt::Result {
    write!(f, "{name}({:#x}+{} {})", span.addr(), span.len, span.location)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Loopback, LoopbackNet};
    use mooncake_core::memory::HostMemory;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn region(len: usize) -> Region<Loopback> {
        let memory = Arc::new(HostMemory::new(len).unwrap());
        Region::register(&LoopbackNet::new().node(), memory, Access::Local).unwrap()
    }

    #[test]
    fn exclusive_ranges_never_meet_others() {
        let whole = region(100);
        let other = whole.clone();
        let whole = whole.exclusive().unwrap_err();
        let slice = whole.slice(0..1).unwrap();
        drop(other);
        let whole = whole.exclusive().unwrap_err();
        drop(slice);
        let whole = whole.exclusive().unwrap();
        let (left, right) = whole.split_at(40).unwrap();
        let left = left.into_region().unwrap_err();
        let left = left.into_shared();
        assert_eq!(left.len(), 40);
        let left = left.exclusive().unwrap_err();
        drop(left);
        assert_eq!(right.into_region().unwrap().len(), 100);
    }

    #[test]
    fn ranges_are_checked() {
        let whole = region(100);
        #[allow(clippy::reversed_empty_ranges)]
        for range in [0..0, 0..101, 100..101, 5..4, usize::MAX..0, 0..usize::MAX] {
            assert!(whole.slice(range.clone()).is_err(), "{range:?}");
        }
        let slice = whole.slice(10..20).unwrap();
        assert_eq!(slice.addr(), whole.addr() + 10);
        assert!(slice.slice(0..11).is_err());
        assert_eq!(slice.slice(9..10).unwrap().addr(), whole.addr() + 19);
        let mut bytes = [0; 4];
        slice.copy_to(10, &mut []).unwrap();
        assert!(slice.copy_to(7, &mut bytes).is_err() && slice.copy_to(usize::MAX, &mut bytes).is_err());
        drop((slice, whole));
        let whole = region(100).exclusive().unwrap().split_at(0).unwrap_err();
        let mut whole = whole.split_at(100).unwrap_err();
        whole.copy_from(96, b"last").unwrap();
        assert!(whole.copy_from(97, b"last").is_err());
        whole.copy_to(96, &mut bytes).unwrap();
        assert_eq!(&bytes, b"last");
    }

    #[test]
    fn memory_goes_after_its_last_slice() {
        struct Counted(HostMemory, Arc<AtomicUsize>);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.1.fetch_add(1, Ordering::SeqCst);
            }
        }
        // SAFETY: as for the inner memory.
        unsafe impl MemorySource for Counted {
            fn span(&self) -> MemorySpan {
                self.0.span()
            }
        }
        let freed = Arc::new(AtomicUsize::new(0));
        let memory = Arc::new(Counted(HostMemory::new(100).unwrap(), freed.clone()));
        let region =
            Region::<Loopback>::register(&LoopbackNet::new().node(), memory, Access::Remote).unwrap();
        let slice = region.slice(0..10).unwrap();
        drop(region);
        assert_eq!(freed.load(Ordering::SeqCst), 0);
        drop(slice);
        assert_eq!(freed.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn borrowed_memory_is_used_where_it_is() {
        let owner = HostMemory::new(64).unwrap();
        // SAFETY: `owner` outlives the region, and does not touch the memory before the region is
        // dropped.
        let borrowed = unsafe { BorrowedMemory::new(owner.span()) };
        let region = Region::<Loopback>::unregistered(Arc::new(borrowed)).unwrap();
        assert_eq!((region.addr(), region.access()), (owner.span().addr(), Access::Local));
        let mut all = region.exclusive().unwrap();
        all.copy_from(0, b"x").unwrap();
        drop(all);
        // SAFETY: the address is in range and has no other user.
        assert_eq!(unsafe { owner.span().ptr.read() }, b'x');
    }
}
