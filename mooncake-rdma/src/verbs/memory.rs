//! Protection domains, and memory registered in them.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};

use super::device::Device;
use super::ffi;
use super::{Counted, DOMAINS, REGIONS, last_error};

/// Protection domain, which memory and queue pairs that work together share.
pub struct Domain {
    pub(super) device: Arc<Device>,
    pub(super) raw: NonNull<ffi::Domain>,
    _counted: Counted,
}

// SAFETY: libibverbs does its own locking.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// Creates a domain of a device.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>> {
        // SAFETY: the device is open.
        let raw = unsafe { (device.calls.alloc_pd)(device.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("cannot create protection domain"))?;
        Ok(Arc::new(Self { device: device.clone(), raw, _counted: Counted::one(&DOMAINS) }))
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({})", self.device.name())
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: created by `new`; everything created in the domain keeps it alive.
        unsafe { (self.device.calls.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Registered memory. Dropping it returns when the device no longer touches the bytes, neither for
/// this process nor for a peer.
pub struct MemoryRegion {
    domain: Arc<Domain>,
    raw: NonNull<ffi::MemoryRegion>,
    _counted: Counted,
}

// SAFETY: libibverbs does its own locking, and the keys are only read.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

/// Access rights of a device to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// True if peers get the rights, too.
    pub remote: bool,
    /// True if the device may write. The kernel refuses that for memory that the process can only
    /// read.
    pub write: bool,
    /// True if the device may write in any order, if the library supports it.
    pub relaxed: bool,
}

impl Rights {
    fn flags(self) -> u32 {
        let Self { remote, write, .. } = self;
        let given = [
            (write, ffi::ACCESS_LOCAL_WRITE),
            (remote, ffi::ACCESS_REMOTE_READ),
            (remote && write, ffi::ACCESS_REMOTE_WRITE),
        ];
        given.iter().filter(|(yes, _)| *yes).fold(0, |flags, (_, flag)| flags | flag)
    }
}

impl MemoryRegion {
    /// Registers `len` bytes.
    ///
    /// # Safety
    /// The bytes stay allocated until the region has been dropped, and no code relies on their
    /// content while the device may write.
    pub unsafe fn register(
        domain: &Arc<Domain>,
        start: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Self> {
        let calls = domain.device.calls;
        let (at, flags) = (start.as_ptr().cast(), rights.flags());
        let raw = match calls.reg_mr_iova2.filter(|_| rights.relaxed) {
            // SAFETY: the caller keeps the bytes; the device refuses memory that it cannot map.
            Some(register) => unsafe {
                register(
                    domain.raw.as_ptr(),
                    at,
                    len,
                    start.as_ptr().addr() as u64,
                    flags | ffi::ACCESS_RELAXED_ORDERING,
                )
            },
            // SAFETY: as above.
            None => unsafe { (calls.reg_mr)(domain.raw.as_ptr(), at, len, flags.cast_signed()) },
        };
        Self::from_raw(domain, raw, len)
    }

    /// Registers memory of another device (a GPU), given as a dma-buf: `len` bytes from `offset` in
    /// it. Requests refer to them by addresses from `address`.
    ///
    /// # Errors
    ///
    /// Returns `Unsupported` if the library or the driver does not support it.
    ///
    /// # Safety
    /// As for [`register`](Self::register), of the memory behind the descriptor.
    pub unsafe fn register_dmabuf(
        domain: &Arc<Domain>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        rights: Rights,
    ) -> Result<Self> {
        let cannot =
            |why: &str| Error::new(ErrorCode::NotSupported, format!("cannot register dma-buf: {why}"));
        let register = domain
            .device
            .calls
            .reg_dmabuf_mr
            .ok_or_else(|| cannot("libibverbs is older than version 34 of rdma-core"))?;
        let relaxed = if rights.relaxed { ffi::ACCESS_RELAXED_ORDERING } else { 0 };
        let flags = (rights.flags() | relaxed).cast_signed();
        // SAFETY: the caller keeps the memory; the descriptor is open during the call, and the
        // kernel holds it thereafter.
        let raw = unsafe { register(domain.raw.as_ptr(), offset, len, address, fd.as_raw_fd(), flags) };
        if raw.is_null() && std::io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            return Err(cannot("the driver does not support it"));
        }
        Self::from_raw(domain, raw, len)
    }

    fn from_raw(domain: &Arc<Domain>, raw: *mut ffi::MemoryRegion, len: usize) -> Result<Self> {
        let Some(raw) = NonNull::new(raw) else {
            let error = std::io::Error::last_os_error();
            let hint = match error.raw_os_error() {
                Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
                    "; raise the limit of locked memory (`ulimit -l`)"
                }
                _ => "",
            };
            let what = format!("cannot register {len} bytes with RDMA device {:?}", domain.device.name());
            return Err(super::failed(what + hint, error));
        };
        Ok(Self { domain: domain.clone(), raw, _counted: Counted::one(&REGIONS) })
    }

    /// Returns the key for requests of this side.
    pub fn local_key(&self) -> u32 {
        // SAFETY: registered; the field does not change.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// Returns the key for requests of peers.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion({}, {:#x})", self.domain.device.name(), self.local_key())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered by `register`, and deregistered once.
        let code = unsafe { (self.domain.device.calls.dereg_mr)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(device = self.domain.device.name(), code, "cannot deregister memory");
        }
    }
}
