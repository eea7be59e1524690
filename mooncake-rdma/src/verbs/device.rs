//! Devices, their ports, GIDs and events.

use std::ffi::{CStr, c_int, c_uint};
use std::fmt;
use std::net::Ipv6Addr;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};

use super::ffi::{self, Functions};
use super::library::library;
use super::{Counted, DEVICES, check, last_error};

/// Returns the names of the devices, in the order of the library. An empty list is not an error,
/// but a missing library is one.
pub fn device_names() -> Result<Vec<String>> {
    List::fetch().map(|list| list.iter().map(|device| list.name(device)).collect())
}

/// Device list of the library, freed on drop.
struct List {
    calls: &'static Functions,
    first: *mut *mut ffi::Device,
    len: usize,
}

impl List {
    fn fetch() -> Result<Self> {
        let calls = library()?;
        let mut len = 0;
        // SAFETY: `len` is written before the call returns.
        let first = unsafe { (calls.get_device_list)(&raw mut len) };
        // The list is null where the kernel has no RDMA support.
        Ok(Self { calls, first, len: if first.is_null() { 0 } else { usize::try_from(len).unwrap_or(0) } })
    }

    fn iter(&self) -> impl Iterator<Item = *mut ffi::Device> + '_ {
        // SAFETY: the list has `len` entries and lives as long as `self`.
        (0..self.len).map(|i| unsafe { *self.first.add(i) })
    }

    fn name(&self, device: *mut ffi::Device) -> String {
        // SAFETY: an entry of this list; its name is a string that lives as long as the list.
        let name = unsafe { (self.calls.get_device_name)(device) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: as above, and not null.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.first.is_null() {
            // SAFETY: fetched by `fetch` and freed once.
            unsafe { (self.calls.free_device_list)(self.first) };
        }
    }
}

/// Opened device.
pub struct Device {
    pub(super) calls: &'static Functions,
    pub(super) raw: NonNull<ffi::Context>,
    name: String,
    _counted: Counted,
}

// SAFETY: libibverbs does its own locking; a context may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Longest memory region in bytes.
    pub region_bytes: u64,
    /// Number of queue pairs.
    pub pairs: u32,
    /// Number of requests in one queue pair.
    pub requests: u32,
    /// Number of completions in one queue.
    pub completions: u32,
    /// Number of reads in flight that a queue pair may request.
    pub reads: u8,
    /// Number of reads that a queue pair may serve at once.
    pub served_reads: u8,
}

/// State of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// True if the port is active.
    pub active: bool,
    /// Largest packet, as a number of the verbs interface: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    /// Longest message in bytes.
    pub message_bytes: u32,
    /// Local address (LID) on InfiniBand, else 0.
    pub lid: u16,
    /// True if the port is InfiniBand, as opposed to Ethernet.
    pub infiniband: bool,
    /// Number of entries in the GID table.
    pub gids: u32,
}

/// Packet type of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GidKind {
    /// InfiniBand.
    Infiniband,
    /// RoCE version 1, within one Ethernet segment.
    RoceV1,
    /// RoCE version 2, in UDP.
    RoceV2,
}

/// Global address (GID) of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the table.
    pub index: u8,
    /// Address; an IPv4 address is mapped.
    pub addr: Ipv6Addr,
    /// Packet type.
    pub kind: GidKind,
    /// Number of the network interface of the address; 0 if there is none.
    pub interface: u32,
}

/// Event of a device or a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Port active again.
    PortUp,
    /// Port down.
    PortDown,
    /// Changed addresses of a port.
    Addresses,
    /// Lost device; nothing on it works any more.
    Fatal,
    /// Lost completion queue, which is as severe.
    QueueFatal,
    /// Other event, by its number, which needs no action.
    Other(u32),
}

impl Device {
    /// Opens a device by name.
    ///
    /// # Errors
    ///
    /// Returns `Unsupported` without the library, and `NotFound`, with the available names, for an
    /// unknown device.
    pub fn open(name: &str) -> Result<Arc<Self>> {
        let list = List::fetch()?;
        let Some(device) = list.iter().find(|device| list.name(*device) == name) else {
            let names: Vec<String> = list.iter().map(|device| list.name(device)).collect();
            let there = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(Error::new(
                ErrorCode::FileNotFound,
                format!("no RDMA device {name:?}; there is {there}"),
            ));
        };
        // SAFETY: an entry of a live list.
        let raw = unsafe { (list.calls.open_device)(device) };
        let raw =
            NonNull::new(raw).ok_or_else(|| last_error(format_args!("cannot open RDMA device {name:?}")))?;
        Ok(Arc::new(Self { calls: list.calls, raw, name: name.into(), _counted: Counted::one(&DEVICES) }))
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limits.
    pub fn limits(&self) -> Result<DeviceLimits> {
        // SAFETY: plain numbers; zero is a value of each.
        let mut attr: ffi::DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure has the size the library writes.
        let code = unsafe { (self.calls.query_device)(self.raw.as_ptr(), &raw mut attr) };
        check(code, format_args!("cannot query limits of RDMA device {:?}", self.name))?;
        let n = |value: c_int| u32::try_from(value).unwrap_or(0);
        let few = |value: c_int| u8::try_from(value.clamp(0, 255)).unwrap_or(u8::MAX);
        Ok(DeviceLimits {
            region_bytes: attr.max_mr_size,
            pairs: n(attr.max_qp),
            requests: n(attr.max_qp_wr),
            completions: n(attr.max_cqe),
            reads: few(attr.max_qp_init_rd_atom),
            served_reads: few(attr.max_qp_rd_atom),
        })
    }

    /// Returns the state of a port, by its number from 1.
    pub fn port(&self, number: u8) -> Result<Port> {
        let mut attr = ffi::PortAttr::default();
        // SAFETY: as in `limits`; older drivers fill in less, and the rest stays zero.
        let code = unsafe { (self.calls.query_port)(self.raw.as_ptr(), number, &raw mut attr) };
        check(code, format_args!("cannot query port {number} of RDMA device {:?}", self.name))?;
        Ok(Port {
            active: attr.state == ffi::PORT_ACTIVE,
            mtu: attr.active_mtu,
            message_bytes: attr.max_msg_sz,
            lid: attr.lid,
            infiniband: attr.link_layer == ffi::LINK_INFINIBAND,
            gids: u32::try_from(attr.gids).unwrap_or(0),
        })
    }

    /// Returns the used GIDs of a port.
    pub fn gids(&self, number: u8) -> Result<Vec<Gid>> {
        let port = self.port(number)?;
        let Some(query) = self.calls.query_gid_table else { return Ok(self.plain_gids(number, port)) };
        // The table covers the whole device; each of its ports has this number of entries.
        let capacity = (port.gids as usize).saturating_mul(2).clamp(16, 1 << 16);
        let mut entries = vec![ffi::GidEntry::default(); capacity];
        // SAFETY: the buffer has as many entries of this size as announced.
        let found = unsafe {
            query(self.raw.as_ptr(), entries.as_mut_ptr(), capacity, 0, size_of::<ffi::GidEntry>())
        };
        if found < 0 {
            return Ok(self.plain_gids(number, port));
        }
        entries.truncate(usize::try_from(found).unwrap_or(0));
        Ok(entries
            .iter()
            .filter(|entry| entry.port == u32::from(number))
            .filter_map(|entry| {
                let kind = match entry.kind {
                    0 => GidKind::Infiniband,
                    1 => GidKind::RoceV1,
                    2 => GidKind::RoceV2,
                    _ => return None,
                };
                let index = u8::try_from(entry.index).ok()?;
                Some(Gid { index, addr: Ipv6Addr::from(entry.gid.0), kind, interface: entry.interface })
            })
            .collect())
    }

    /// Returns the GIDs with a library that cannot report their kind: InfiniBand, or the newer of
    /// the two on Ethernet.
    fn plain_gids(&self, number: u8, port: Port) -> Vec<Gid> {
        let kind = if port.infiniband { GidKind::Infiniband } else { GidKind::RoceV2 };
        (0..port.gids.min(256))
            .filter_map(|i| {
                let mut gid = ffi::RawGid::default();
                // SAFETY: sixteen bytes, aligned, as the call fills.
                let code = unsafe {
                    (self.calls.query_gid)(self.raw.as_ptr(), number, i.cast_signed(), &raw mut gid)
                };
                let index = u8::try_from(i).ok()?;
                (code == 0 && gid.0 != [0; 16]).then(|| Gid {
                    index,
                    addr: Ipv6Addr::from(gid.0),
                    kind,
                    interface: 0,
                })
            })
            .collect()
    }

    /// Returns a descriptor that is readable when there is an [`Event`].
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open, and so is its descriptor for as long.
        unsafe { BorrowedFd::borrow_raw(self.async_fd()) }
    }

    fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open; the field does not change.
        unsafe { (*self.raw.as_ptr()).async_fd }
    }

    /// Returns the next event. Blocks unless [`event_fd`](Self::event_fd) is readable.
    pub fn next_event(&self) -> Result<Event> {
        let mut event = ffi::AsyncEvent { element: 0, kind: 0 };
        // SAFETY: the context is open, and the structure has the size the library writes.
        let code = unsafe { (self.calls.get_async_event)(self.raw.as_ptr(), &raw mut event) };
        check(code, format_args!("cannot read events of RDMA device {:?}", self.name))?;
        let kind = event.kind;
        // Unacknowledged events of queue pairs and queues block their destruction, so the
        // acknowledgement comes at once.
        // SAFETY: just received, and acknowledged once.
        unsafe { (self.calls.ack_async_event)(&raw mut event) };
        Ok(Event::from_number(kind))
    }
}

impl Event {
    fn from_number(number: c_uint) -> Self {
        match number {
            0 => Event::QueueFatal,
            8 => Event::Fatal,
            9 => Event::PortUp,
            10 => Event::PortDown,
            11 | 12 | 18 => Event::Addresses,
            other => Event::Other(other),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: opened by `open`; everything created from the device keeps it alive, so nothing
        // is left.
        unsafe { (self.calls.close_device)(self.raw.as_ptr()) };
    }
}
