//! Memory that Python programs hand over by address: what is registered, and for how long it is in use.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::{Region, Slice, SliceMut};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::args::Keep;
use crate::member::Member;

/// The wires of a Python client.
pub(crate) type Wire = TransportSet;

/// How long giving up memory waits for transfers that use it. A wire ends its transfers long before.
const UNUSED_WITHIN: Duration = Duration::from_secs(60);

/// Says when the last user of some memory is gone.
#[derive(Default)]
pub(crate) struct Gone {
    gone: Mutex<bool>,
    changed: Condvar,
}

impl Gone {
    /// Whether it was gone within `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let mut gone = self.gone.lock();
        if !*gone {
            self.changed.wait_while_for(&mut gone, |gone| !*gone, limit);
        }
        *gone
    }

    /// It is gone.
    pub(crate) fn set(&self) {
        *self.gone.lock() = true;
        self.changed.notify_all();
    }
}

/// Memory that belongs to the Python program.
struct Foreign {
    span: MemorySpan,
    _keep: Option<Arc<Keep>>,
    gone: Option<Arc<Gone>>,
}

// SAFETY: memory without an owner of ours is registered by its address, and whoever does that vouches for it until it is
// unregistered, which waits for this value to be dropped; memory of Python objects is kept by them.
#[allow(unsafe_code)]
unsafe impl MemorySource for Foreign {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(gone) = &self.gone {
            gone.set();
        }
    }
}

/// Memory at an address that the program vouches for, and the sign that nobody uses it any more.
pub(crate) fn foreign(address: u64, len: usize) -> Result<(Arc<dyn MemorySource>, Arc<Gone>)> {
    let ptr = usize::try_from(address)
        .ok()
        .and_then(|a| std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(a)));
    let ptr = ptr.ok_or_else(|| Error::invalid("the null pointer cannot be registered"))?;
    if len == 0 || address.checked_add(len as u64).is_none_or(|end| end > MAX_ADDRESS) {
        return Err(Error::invalid(format!("{len} bytes at {address:#x} are no memory of a process")));
    }
    if !is_mapped(address, len) {
        return Err(Error::invalid(format!(
            "{len} bytes at {address:#x} are not all mapped in this process"
        )));
    }
    let gone = Arc::new(Gone::default());
    let memory = Foreign { span: MemorySpan::new(ptr, len), _keep: None, gone: Some(gone.clone()) };
    Ok((Arc::new(memory), gone))
}

/// Past the end of what a process can map on the machines we know.
const MAX_ADDRESS: u64 = 1 << 57;

/// Whether every page of a range is mapped, as far as the kernel can be asked; device memory mapped into the address space is.
#[allow(unsafe_code)]
fn is_mapped(address: u64, len: usize) -> bool {
    // SAFETY: a query without arguments that point anywhere.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let Ok(page) = u64::try_from(page) else { return true };
    let start = address & !(page - 1);
    let Ok(len) = usize::try_from((address - start) + len as u64) else { return false };
    // SAFETY: the kernel looks the range up; flags that ask for nothing change nothing.
    let rc =
        unsafe { libc::msync(std::ptr::with_exposed_provenance_mut(start as usize), len, libc::MS_ASYNC) };
    rc == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM)
}

/// A slice over memory of Python objects, kept for as long as the slice lives.
pub(crate) fn lent(client: &Member, span: MemorySpan, keep: &Arc<Keep>) -> Result<Slice<Wire>> {
    if client.needs_registration() {
        // Such a wire moves registered memory only, and registering costs more than a copy.
        return copied(client, span);
    }
    whole(span, keep)?.slice(0..span.len)
}

/// An exclusive slice over memory of a Python object that nobody else has yet.
#[allow(unsafe_code)]
pub(crate) fn lent_mut(span: MemorySpan, keep: &Arc<Keep>) -> Result<SliceMut<Wire>> {
    whole(span, keep)?.exclusive().map_err(|_| Error::internal("a new region has another user"))
}

fn whole(span: MemorySpan, keep: &Arc<Keep>) -> Result<Region<Wire>> {
    Region::unregistered(Arc::new(Foreign { span, _keep: Some(keep.clone()), gone: None }))
}

#[allow(unsafe_code)]
fn copied(client: &Member, span: MemorySpan) -> Result<Slice<Wire>> {
    let region = client.register(Arc::new(client.memory(span.len)?))?;
    // SAFETY: both ranges are that long, and new memory overlaps no other.
    unsafe { region.span().ptr.copy_from_nonoverlapping(span.ptr, span.len) };
    region.slice(0..span.len)
}

/// Memory that calls may name by address.
#[derive(Default)]
pub(crate) struct Regions {
    by_start: RwLock<BTreeMap<u64, Registered>>,
}

struct Registered {
    region: Region<Wire>,
    gone: Arc<Gone>,
    /// Lent out by mooncake, not registered by the program.
    ours: bool,
}

impl Regions {
    /// Lists a region whose memory says when it is gone.
    pub(crate) fn add(&self, region: Region<Wire>, gone: Arc<Gone>) {
        self.insert(region, gone, false);
    }

    /// Lists a region of memory that mooncake itself lends out; it cannot be unregistered by its address.
    pub(crate) fn add_ours(&self, region: Region<Wire>, gone: Arc<Gone>) {
        self.insert(region, gone, true);
    }

    fn insert(&self, region: Region<Wire>, gone: Arc<Gone>, ours: bool) {
        self.by_start.write().insert(region.addr(), Registered { region, gone, ours });
    }

    /// Takes the region that begins there off the list; its memory goes with its last user.
    pub(crate) fn forget(&self, start: u64) {
        let taken = self.by_start.write().remove(&start);
        drop(taken);
    }

    /// Takes the region that begins there off the list and waits until no transfer uses its memory any more.
    pub(crate) fn remove(&self, start: u64) -> Result<()> {
        let unknown = || Error::invalid(format!("no buffer is registered at {start:#x}"));
        let taken = {
            let mut regions = self.by_start.write();
            if regions.get(&start).is_none_or(|registered| registered.ours) {
                return Err(unknown());
            }
            regions.remove(&start)
        };
        let Registered { region, gone, .. } = taken.ok_or_else(unknown)?;
        drop(region);
        if gone.wait(UNUSED_WITHIN) {
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::ObjectReplicaBusy,
            "a transfer still uses the buffer; it must stay allocated",
        ))
    }

    /// Everything off the list, and waits for transfers that use it, except for memory that leases still hold.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.by_start.write());
        for (_, Registered { region, gone, ours }) in all {
            drop(region);
            if !ours {
                gone.wait(UNUSED_WITHIN);
            }
        }
    }

    /// A range to write from.
    pub(crate) fn slice(&self, address: u64, len: usize) -> Result<Slice<Wire>> {
        self.with(address, len, |region, range| region.slice(range))
    }

    /// A range to read into.
    #[allow(unsafe_code)]
    pub(crate) fn slice_mut(&self, address: u64, len: usize) -> Result<SliceMut<Wire>> {
        self.with(address, len, |region, range| {
            // SAFETY: the memory is the program's, which has it written by one call at a time, or gets a mixture of both.
            unsafe { region.slice_mut_unchecked(range) }
        })
    }

    /// How many bytes are registered from an address on.
    pub(crate) fn room(&self, address: u64) -> Result<usize> {
        self.with(address, 1, |region, range| Ok(region.len() - range.start))
    }

    fn with<R>(
        &self,
        address: u64,
        len: usize,
        then: impl FnOnce(&Region<Wire>, Range<usize>) -> Result<R>,
    ) -> Result<R> {
        let unknown = || {
            Error::invalid(format!(
                "{len} bytes at {address:#x} do not lie in registered memory; call register_buffer first"
            ))
        };
        let regions = self.by_start.read();
        let (start, registered) = regions.range(..=address).next_back().ok_or_else(unknown)?;
        let region = &registered.region;
        if len == 0 || !region.span().contains(address, len as u64) {
            return Err(unknown());
        }
        let from = usize::try_from(address - start).map_err(|_| unknown())?;
        then(region, from..from + len)
    }
}
