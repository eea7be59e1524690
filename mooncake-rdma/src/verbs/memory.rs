//! Protection domains, and memory registered in them.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};

use super::device::Device;
use super::ffi;
use super::{Counted, DOMAINS, REGIONS, last_error};

/// What memory and queue pairs must have in common to work together.
pub struct Domain {
    pub(super) device: Arc<Device>,
    pub(super) raw: NonNull<ffi::Domain>,
    _counted: Counted,
}

// SAFETY: libibverbs locks what it must.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// A domain of that device.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>> {
        // SAFETY: the device is open.
        let raw = unsafe { (device.calls.alloc_pd)(device.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("making a protection domain"))?;
        Ok(Arc::new(Self { device: device.clone(), raw, _counted: Counted::one(&DOMAINS) }))
    }

    /// Its device.
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
        // SAFETY: made by us; what was made in it keeps it alive.
        unsafe { (self.device.calls.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Registered memory. Dropping it returns when the device touches the bytes no more, neither for us nor for a peer.
pub struct MemoryRegion {
    domain: Arc<Domain>,
    raw: NonNull<ffi::MemoryRegion>,
    _counted: Counted,
}

// SAFETY: libibverbs locks what it must, and the keys are read only.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

/// What a device may do with memory, for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Peers may do it too.
    pub remote: bool,
    /// It may write. The kernel refuses that for memory that the process can only read.
    pub write: bool,
    /// It may write in any order, where the library knows how to ask for that.
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
    /// The bytes stay allocated until the region has been dropped, and nobody counts on what is in them while the device may write.
    pub unsafe fn register(
        domain: &Arc<Domain>,
        start: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Self> {
        let calls = domain.device.calls;
        let (at, flags) = (start.as_ptr().cast(), rights.flags());
        let raw = match calls.reg_mr_iova2.filter(|_| rights.relaxed) {
            // SAFETY: the caller keeps the bytes; the device refuses what it cannot map.
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

    /// Registers memory of another device (a GPU's), given as a dma-buf: `len` bytes from `offset` in it, which requests name by
    /// addresses from `address`. `Unsupported` when the library or the driver cannot.
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
        let cannot = |why: &str| Error::new(ErrorCode::NotSupported, format!("memory of a dma-buf: {why}"));
        let register = domain
            .device
            .calls
            .reg_dmabuf_mr
            .ok_or_else(|| cannot("this libibverbs is older than version 34 of rdma-core"))?;
        let relaxed = if rights.relaxed { ffi::ACCESS_RELAXED_ORDERING } else { 0 };
        let flags = (rights.flags() | relaxed).cast_signed();
        // SAFETY: the caller keeps the memory; the descriptor is open during the call, and the kernel holds it thereafter.
        let raw = unsafe { register(domain.raw.as_ptr(), offset, len, address, fd.as_raw_fd(), flags) };
        if raw.is_null() && std::io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            return Err(cannot("the device's driver cannot"));
        }
        Self::from_raw(domain, raw, len)
    }

    fn from_raw(domain: &Arc<Domain>, raw: *mut ffi::MemoryRegion, len: usize) -> Result<Self> {
        let Some(raw) = NonNull::new(raw) else {
            let error = std::io::Error::last_os_error();
            let hint = match error.raw_os_error() {
                Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
                    " (raise the limit of locked memory, `ulimit -l`)"
                }
                _ => "",
            };
            let what = format!("registering {len} bytes with RDMA device {:?}", domain.device.name());
            return Err(super::failed(what + hint, error));
        };
        Ok(Self { domain: domain.clone(), raw, _counted: Counted::one(&REGIONS) })
    }

    /// What requests of this side name it by.
    pub fn local_key(&self) -> u32 {
        // SAFETY: registered; the field does not change.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// What requests of peers name it by.
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
        // SAFETY: registered by us, and given back once.
        let code = unsafe { (self.domain.device.calls.dereg_mr)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(device = self.domain.device.name(), code, "memory could not be deregistered");
        }
    }
}
