//! Device memory, allocated, exported to other processes and imported from them, and page-locked
//! host memory.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_core::memory::{Location, MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};

use super::device::Device;
use super::ffi::{HANDLE_BYTES, VirtualMemory, call, sys};

const FABRIC: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
const DMA_BUF: sys::CUmemRangeHandleType = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
const GRANULARITY: sys::CUmemAllocationGranularity_flags =
    sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
const LAZY_PEER_ACCESS: u32 = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

/// Device memory, freed on drop.
pub struct DeviceMemory {
    device: Arc<Device>,
    span: MemorySpan,
    /// Length of the mapping, for memory that is mapped.
    mapped: Option<usize>,
}

impl DeviceMemory {
    /// Allocates `len` bytes (`cuMemAlloc`), which peers on this host can open. The memory is not
    /// cleared.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for no bytes, `BUFFER_OVERFLOW` without enough memory, and other
    /// errors of the driver.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        let mut ptr = 0;
        let _current = device.enter()?;
        // SAFETY: the driver writes the address, which is freed when the value is dropped.
        let status = unsafe { call!(device, cuMemAlloc_v2(&raw mut ptr, nonzero(len)?)) };
        device.check(status, &format!("cannot allocate {len} bytes of {}", device.location()))?;
        Ok(Self { device: device.clone(), span: span(ptr, len, device.location())?, mapped: None })
    }

    /// Allocates `len` bytes (`cuMemCreate`) that peers in the same NVLink fabric can open, on any
    /// host.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), and `NOT_SUPPORTED` if the device is in no fabric.
    pub fn with_fabric(device: &Arc<Device>, len: usize) -> Result<Self> {
        if !device.has_fabric() {
            return Err(Error::new(
                ErrorCode::NotSupported,
                format!("{} is in no fabric", device.location()),
            ));
        }
        let vmm = device.cuda().virtual_memory.as_ref().ok_or_else(no_vmm)?;
        let _current = device.enter()?;
        let (handle, rounded_len) = vmm.create_for_fabric(device, len)?;
        let mapped = vmm.map_for_all(device, handle, rounded_len);
        // The mapping keeps the memory.
        // SAFETY: created above.
        unsafe { call!(vmm, cuMemRelease(handle)) };
        Ok(Self {
            device: device.clone(),
            span: span(mapped?, len, device.location())?,
            mapped: Some(rounded_len),
        })
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        match (self.mapped, &self.device.cuda().virtual_memory) {
            // SAFETY: mapped on creation, and no longer used.
            (Some(rounded_len), Some(vmm)) => unsafe { vmm.unmap(self.span.addr(), rounded_len) },
            // SAFETY: allocated on creation, and no longer used.
            _ => unsafe {
                call!(self.device, cuMemFree_v2(self.span.addr()));
            },
        }
    }
}

// SAFETY: the driver keeps the bytes at that address until they are freed on drop. The processor
// cannot touch them.
unsafe impl MemorySource for DeviceMemory {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({:#x}+{} {})", self.span.addr(), self.span.len, self.span.location)
    }
}

/// Page-locked host memory, which devices copy from and to asynchronously.
pub(crate) struct Pinned {
    device: Arc<Device>,
    span: MemorySpan,
}

impl Pinned {
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        let mut ptr: *mut c_void = null_mut();
        let _current = device.enter()?;
        // SAFETY: the driver writes the address, which is freed when the value is dropped.
        let status = unsafe {
            call!(device, cuMemHostAlloc(&raw mut ptr, nonzero(len)?, sys::CU_MEMHOSTALLOC_PORTABLE))
        };
        device.check(status, &format!("cannot allocate {len} bytes of page-locked memory"))?;
        let ptr = NonNull::new(ptr.cast())
            .ok_or_else(|| Error::internal("internal error: page-locked memory without an address"))?;
        Ok(Self { device: device.clone(), span: MemorySpan::new(ptr, len) })
    }

    pub(crate) fn span(&self) -> MemorySpan {
        self.span
    }

    /// Returns whether the memory is usable: memory of a lost context is not.
    pub(crate) fn is_usable(&self) -> bool {
        !self.device.is_lost()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated on creation, and no longer used.
            unsafe { call!(self.device, cuMemFreeHost(self.span.ptr.as_ptr().cast())) };
        }
    }
}

/// Way in which another process opens an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandleKind {
    /// CUDA IPC, for processes on this host.
    Ipc = 1,
    /// Fabric handle, for processes anywhere in the NVLink fabric.
    Fabric = 2,
}

impl HandleKind {
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        [HandleKind::Ipc, HandleKind::Fabric].into_iter().find(|kind| *kind as u32 == number)
    }
}

/// Whole allocation and its handle.
#[derive(Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) kind: HandleKind,
    pub(crate) handle: [u8; HANDLE_BYTES],
    pub(crate) uuid: [u8; 16],
    /// Id that distinguishes the allocation from others at the same address in its process; 0 if
    /// unknown.
    pub(crate) id: u64,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({:#x}+{} {:?})", self.base, self.len, self.kind)
    }
}

impl Allocation {
    /// Exports the allocation that contains a span, with the first kind of handle that works.
    pub(crate) fn export(device: &Arc<Device>, span: MemorySpan, kinds: &[HandleKind]) -> Result<Self> {
        let (mut base, mut len) = (0, 0usize);
        let _current = device.enter()?;
        // SAFETY: the driver writes the numbers.
        let status =
            unsafe { call!(device, cuMemGetAddressRange_v2(&raw mut base, &raw mut len, span.addr())) };
        device.check(status, "cannot find the allocation")?;
        let len = len as u64;
        if base > span.addr() || base + len < span.addr() + span.len as u64 {
            return Err(Error::invalid(format!(
                "cannot export memory: {} bytes at {:#x} exceed the allocation, which ends at {:#x}",
                span.len,
                span.addr(),
                base + len
            )));
        }
        let mut reason =
            Error::new(ErrorCode::NotSupported, "cannot export memory: no kind of handle is possible");
        for kind in kinds {
            let handle = match kind {
                HandleKind::Ipc => export_ipc(device, base),
                HandleKind::Fabric => export_fabric(device, base),
            };
            match handle {
                Ok(handle) => {
                    let id = device.cuda().buffer_id(base);
                    return Ok(Self { base, len, kind: *kind, handle, uuid: device.uuid(), id });
                }
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }
}

fn export_ipc(device: &Device, base: u64) -> Result<[u8; HANDLE_BYTES]> {
    let mut handle = [0; HANDLE_BYTES];
    // SAFETY: the driver writes the bytes.
    let status = unsafe { call!(device, cuIpcGetMemHandle((&raw mut handle).cast(), base)) };
    device.check(status, "cannot get IPC handle")?;
    Ok(handle)
}

fn export_fabric(device: &Device, base: u64) -> Result<[u8; HANDLE_BYTES]> {
    let vmm = device.cuda().virtual_memory.as_ref().ok_or_else(no_vmm)?;
    let mut memory = 0;
    // SAFETY: the driver writes the handle, which is released below.
    let status = unsafe {
        call!(vmm, cuMemRetainAllocationHandle(&raw mut memory, with_exposed_provenance_mut(base as usize)))
    };
    device.check(status, "cannot get fabric handle: memory is not of cuMemCreate")?;
    let mut bytes = [0u8; HANDLE_BYTES];
    let mut properties = MaybeUninit::<sys::CUmemAllocationProp>::uninit();
    // SAFETY: the driver writes the properties.
    let status =
        unsafe { call!(vmm, cuMemGetAllocationPropertiesFromHandle(properties.as_mut_ptr(), memory)) };
    let exported = device.check(status, "cannot get the properties of memory").and_then(|()| {
        // Only this field is read, because the others are enums, of which the driver may know more.
        // SAFETY: written by the driver.
        let handles = unsafe { (&raw const (*properties.as_ptr()).requestedHandleTypes).read() };
        if handles & FABRIC != FABRIC {
            return Err(Error::new(
                ErrorCode::NotSupported,
                "cannot get fabric handle: memory was not allocated for a fabric",
            ));
        }
        // SAFETY: a fabric handle has as many bytes.
        let status =
            unsafe { call!(vmm, cuMemExportToShareableHandle(bytes.as_mut_ptr().cast(), memory, FABRIC, 0)) };
        device.check(status, "cannot get fabric handle")
    });
    // SAFETY: retained above.
    unsafe { call!(vmm, cuMemRelease(memory)) };
    exported.map(|()| bytes)
}

/// Returns the dma-buf of the allocation that contains a span, and the offset of the span in it.
pub(crate) fn dma_buf(device: &Arc<Device>, span: MemorySpan) -> Result<(OwnedFd, u64)> {
    /// Alignment of the bounds that the driver requires: pages of the host.
    const PAGE: u64 = 4096;
    let unsupported = |reason: &str| {
        Error::new(
            ErrorCode::NotSupported,
            format!("cannot export dma-buf of {}: {reason}", device.location()),
        )
    };
    let supported = device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) != 0;
    let handles = device.cuda().range_handles.as_ref().filter(|_| supported);
    let handles = handles.ok_or_else(|| unsupported("the driver or the device does not support it"))?;
    let (mut base, mut len) = (0, 0usize);
    let _current = device.enter()?;
    // SAFETY: the driver writes the numbers.
    let status = unsafe { call!(device, cuMemGetAddressRange_v2(&raw mut base, &raw mut len, span.addr())) };
    device.check(status, "cannot find the allocation")?;
    if base > span.addr() || base + (len as u64) < span.addr() + span.len as u64 {
        return Err(unsupported("the memory is not in one allocation"));
    }
    let end = (base + len as u64).next_multiple_of(PAGE);
    let first = base - base % PAGE;
    let mut fd: c_int = -1;
    // SAFETY: the driver writes the descriptor, which this process then owns.
    let status = unsafe {
        call!(
            handles,
            cuMemGetHandleForAddressRange((&raw mut fd).cast(), first, (end - first) as usize, DMA_BUF, 0)
        )
    };
    device.check(status, "cannot export dma-buf")?;
    // SAFETY: new, and without another owner.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, span.addr() - first))
}

/// Allocation of another process, mapped here for copies of one device.
pub(crate) struct Imported {
    device: Arc<Device>,
    at: u64,
    len: usize,
    kind: HandleKind,
    closed: AtomicBool,
}

impl Imported {
    pub(crate) fn open(device: &Arc<Device>, allocation: &Allocation) -> Result<Self> {
        let len = usize::try_from(allocation.len)
            .map_err(|_| Error::invalid("cannot open memory of a peer: it exceeds the address space"))?;
        let _current = device.enter()?;
        let at = match allocation.kind {
            HandleKind::Ipc => {
                let mut at = 0;
                let handle = sys::CUipcMemHandle { reserved: allocation.handle.map(|byte| byte as c_char) };
                // SAFETY: the driver checks the bytes; the mapping is closed when the value is
                // dropped.
                let status =
                    unsafe { call!(device, cuIpcOpenMemHandle_v2(&raw mut at, handle, LAZY_PEER_ACCESS)) };
                device.check(status, "memory of a peer cannot be opened")?;
                // The announced length may be wrong.
                let (mut base, mut actual_len) = (0, 0usize);
                // SAFETY: the driver writes the numbers.
                let status =
                    unsafe { call!(device, cuMemGetAddressRange_v2(&raw mut base, &raw mut actual_len, at)) };
                let queried = device.check(status, "cannot query memory of a peer");
                let fits = queried.and_then(|()| match actual_len < len {
                    true => {
                        Err(Error::invalid(format!("memory of a peer has {actual_len} bytes, not {len}")))
                    }
                    false => Ok(at),
                });
                if fits.is_err() {
                    // SAFETY: opened above.
                    unsafe { call!(device, cuIpcCloseMemHandle(at)) };
                }
                fits?
            }
            HandleKind::Fabric => {
                let vmm = device.cuda().virtual_memory.as_ref().ok_or_else(no_vmm)?;
                let (mut memory, mut bytes) = (0, allocation.handle);
                // SAFETY: a fabric handle has as many bytes, which the driver checks.
                let status = unsafe {
                    call!(
                        vmm,
                        cuMemImportFromShareableHandle(&raw mut memory, bytes.as_mut_ptr().cast(), FABRIC)
                    )
                };
                device.check(status, "memory of a peer cannot be opened")?;
                let mapped = vmm.map_for_all(device, memory, len);
                // The mapping keeps the memory.
                // SAFETY: imported above.
                unsafe { call!(vmm, cuMemRelease(memory)) };
                mapped?
            }
        };
        Ok(Self { device: device.clone(), at, len, kind: allocation.kind, closed: AtomicBool::new(false) })
    }

    /// Returns whether the mapping is for copies of that device, in its current context.
    pub(crate) fn is_for(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// Returns its address in this process.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }
}

impl Imported {
    /// Closes the mapping. No copy may use it, now or later; other holders then refer to unmapped
    /// memory.
    pub(crate) fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let Ok(_current) = self.device.enter() else { return };
        match (self.kind, &self.device.cuda().virtual_memory) {
            // SAFETY: mapped by `open`, and no longer used.
            (HandleKind::Fabric, Some(vmm)) => unsafe { vmm.unmap(self.at, self.len) },
            // SAFETY: opened by its handle, and no longer used.
            _ => unsafe {
                call!(self.device, cuIpcCloseMemHandle(self.at));
            },
        }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Imported({:#x}+{})", self.at, self.len)
    }
}

/// Returns the location of a device's memory.
fn location(device: u32) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.cast_signed(),
    }
}

impl Device {
    /// Returns whether other hosts of the same NVLink fabric can open memory of the device. The
    /// first call allocates and exports a little memory: the attribute of a device says nothing of
    /// the permission, which takes a channel of the IMEX service.
    pub fn has_fabric(&self) -> bool {
        if let Some(existing) = self.fabric.get() {
            return *existing;
        }
        let outcome = self.export_to_fabric();
        if let Err(error) = &outcome {
            tracing::debug!(%error, "memory of {} is not opened by a fabric", self.location());
            // Full memory says nothing of the fabric.
            if error.code() == ErrorCode::BufferOverflow {
                return false;
            }
        }
        *self.fabric.get_or_init(|| outcome.is_ok())
    }

    fn export_to_fabric(&self) -> Result<()> {
        use sys::CUdevice_attribute as Attribute;
        let required = [
            Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
        ];
        if required.into_iter().any(|attribute| self.attribute(attribute) == 0) {
            let text = format!("cannot export memory to a fabric: {} supports none", self.location());
            return Err(Error::new(ErrorCode::NotSupported, text));
        }
        let vmm = self.cuda().virtual_memory.as_ref().ok_or_else(no_vmm)?;
        let _current = self.enter()?;
        let (memory, _) = vmm.create_for_fabric(self, 1)?;
        let mut bytes = [0u8; HANDLE_BYTES];
        // SAFETY: a fabric handle has as many bytes; the memory is released once.
        let status = unsafe {
            let status =
                call!(vmm, cuMemExportToShareableHandle(bytes.as_mut_ptr().cast(), memory, FABRIC, 0));
            call!(vmm, cuMemRelease(memory));
            status
        };
        self.check(status, "cannot get fabric handle")
    }
}

impl VirtualMemory {
    /// Creates memory that a fabric can open. Returns its handle and its length, a multiple of the
    /// granularity of the device. The context of the device is current.
    fn create_for_fabric(
        &self,
        device: &Device,
        len: usize,
    ) -> Result<(sys::CUmemGenericAllocationHandle, usize)> {
        let rdma = device
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FABRIC,
            location: location(device.number()),
            win32HandleMetaData: null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(rdma != 0),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut grain = 0;
        // SAFETY: the driver reads the properties and writes the number.
        let status = unsafe {
            call!(self, cuMemGetAllocationGranularity(&raw mut grain, &raw const properties, GRANULARITY))
        };
        device.check(status, "cannot get the granularity of memory")?;
        let rounded_len = nonzero(len)?.checked_next_multiple_of(grain.max(1));
        let rounded_len = rounded_len
            .ok_or_else(|| Error::invalid(format!("cannot allocate {len} bytes: length is too large")))?;
        let mut handle = 0;
        // SAFETY: as above.
        let status =
            unsafe { call!(self, cuMemCreate(&raw mut handle, rounded_len, &raw const properties, 0)) };
        device.check(status, &format!("cannot allocate {len} bytes of {}", device.location()))?;
        Ok((handle, rounded_len))
    }

    /// Maps memory at a free address, readable and writable for all devices of this process. The
    /// context of the device is current.
    fn map_for_all(
        &self,
        device: &Device,
        handle: sys::CUmemGenericAllocationHandle,
        len: usize,
    ) -> Result<u64> {
        let mut at = 0;
        // SAFETY: the driver writes the address.
        let status = unsafe { call!(self, cuMemAddressReserve(&raw mut at, len, 0, 0, 0)) };
        device.check(status, "cannot reserve addresses")?;
        // SAFETY: the memory of the handle has that many bytes, or the driver refuses.
        let status = unsafe { call!(self, cuMemMap(at, len, 0, handle, 0)) };
        if let Err(error) = device.check(status, "cannot map memory") {
            // SAFETY: reserved above.
            unsafe { call!(self, cuMemAddressFree(at, len)) };
            return Err(error);
        }
        let access: Vec<sys::CUmemAccessDesc> = (0..device.cuda().device_count()?)
            .map(|number| sys::CUmemAccessDesc {
                location: location(number),
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        // SAFETY: mapped above.
        let status = unsafe { call!(self, cuMemSetAccess(at, len, access.as_ptr(), access.len())) };
        if let Err(error) = device.check(status, "cannot give devices access to memory") {
            // SAFETY: as above.
            unsafe { self.unmap(at, len) };
            return Err(error);
        }
        Ok(at)
    }

    /// Unmaps memory and frees its addresses.
    ///
    /// # Safety
    /// The memory was mapped by [`map_for_all`](Self::map_for_all), and is no longer used.
    unsafe fn unmap(&self, at: u64, len: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            call!(self, cuMemUnmap(at, len));
            call!(self, cuMemAddressFree(at, len));
        }
    }
}

fn no_vmm() -> Error {
    Error::new(ErrorCode::NotSupported, "the driver is too old for fabrics")
}

fn nonzero(len: usize) -> Result<usize> {
    if len == 0 {
        return Err(Error::invalid("cannot allocate memory of zero bytes"));
    }
    Ok(len)
}

fn span(at: u64, len: usize, location: Location) -> Result<MemorySpan> {
    let ptr = usize::try_from(at).ok().and_then(|at| NonNull::new(with_exposed_provenance_mut(at)));
    let ptr = ptr.ok_or_else(|| Error::internal("internal error: device memory without an address"))?;
    Ok(MemorySpan { location, ..MemorySpan::new(ptr, len) })
}
