//! What an owner shows of its memory and a peer opens: allocations of a device, by the handles of the driver's.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};

use mooncake_core::clock::Rng;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::same_host::record::RECORD_LEN;
use mooncake_transport::same_host::{self, Mapping, Shared};
use parking_lot::Mutex;

use crate::cuda::{Allocation, Device, HANDLE_BYTES, Imported, Kind};

pub(crate) type Link = same_host::Link<Remote>;
pub(crate) type Inside = same_host::Inside<Remote, Arc<Link>>;

const _: () = assert!(HANDLE_BYTES == RECORD_LEN);

/// A region that is open to peers.
#[derive(Clone, Debug)]
pub(crate) struct Opened {
    pub(crate) span: MemorySpan,
    pub(crate) allocation: Allocation,
}

impl Shared for Opened {
    const OUTLIVES_SOCKETS: bool = true;

    fn range(&self) -> Range<u64> {
        self.span.addr()..self.span.addr() + self.span.len as u64
    }

    fn offset_of(&self, addr: u64) -> u64 {
        addr - self.allocation.base
    }

    fn more(&self) -> Vec<[u8; RECORD_LEN]> {
        encode(&self.allocation, &this_process()).into()
    }

    unsafe fn cut_off(&self) -> Result<()> {
        Err(Error::new(
            ErrorCode::NotSupported,
            "a device's memory cannot be taken back from those who have opened it",
        ))
    }
}

/// What follows the record of a region: the handle, and what it is the handle of.
pub(crate) fn encode(allocation: &Allocation, process: &[u8; 16]) -> [[u8; RECORD_LEN]; 2] {
    let mut about = [0; RECORD_LEN];
    about[..8].copy_from_slice(&allocation.len.to_le_bytes());
    about[8..12].copy_from_slice(&(allocation.kind as u32).to_le_bytes());
    about[16..32].copy_from_slice(&allocation.uuid);
    about[32..48].copy_from_slice(process);
    about[48..56].copy_from_slice(&allocation.base.to_le_bytes());
    about[56..64].copy_from_slice(&allocation.id.to_le_bytes());
    [allocation.handle, about]
}

/// The allocation those records are of, and the process it is in. The error says what is wrong with them.
pub(crate) fn decode(records: &[[u8; RECORD_LEN]]) -> Result<(Allocation, [u8; 16])> {
    let [handle, about] = records else { return Err(Error::invalid("a region without its handle")) };
    let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| about[at + i]));
    let id = |at: usize| -> [u8; 16] { std::array::from_fn(|i| about[at + i]) };
    let (len, base) = (long(0), long(48));
    let kind = u32::from_le_bytes(std::array::from_fn(|i| about[8 + i]));
    let kind = Kind::from_number(kind).ok_or_else(|| Error::invalid(format!("a handle of kind {kind}")))?;
    if len == 0 || base == 0 || base.checked_add(len).is_none() {
        return Err(Error::invalid(format!("an allocation of {len} bytes at {base:#x}")));
    }
    if about[12..16].iter().any(|byte| *byte != 0) {
        return Err(Error::invalid("a handle with something in its unused bytes"));
    }
    Ok((Allocation { base, len, kind, handle: *handle, uuid: id(16), id: long(56) }, id(32)))
}

/// Reads what follows the record of a region on the socket, and writes it again; for those who give it bytes from nowhere.
///
/// # Errors
/// What is wrong with it.
pub fn again(records: &[[u8; RECORD_LEN]]) -> Result<[[u8; RECORD_LEN]; 2]> {
    decode(records).map(|(allocation, process)| encode(&allocation, &process))
}

/// What tells this process from all others: the driver does not open a process's own handles.
fn this_process() -> [u8; 16] {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    let drawn = DRAWN.get_or_init(|| Rng::from_os().next_u64());
    let mut id = [0; 16];
    id[..8].copy_from_slice(&drawn.to_le_bytes());
    // A child has what its parent has drawn.
    id[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    id
}

/// A peer's allocation. Opened when it is first used, for each device that copies.
#[derive(Debug)]
pub(crate) struct Remote {
    allocation: Allocation,
    /// The process it is in, where that is known.
    owner: Option<[u8; 16]>,
    opened: Mutex<Vec<(Arc<Device>, Import)>>,
}

/// What opening came to.
type Import = Result<Arc<Imported>>;

/// What this process has open of others' memory, whichever of its nodes has opened it.
static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

struct Open {
    owner: [u8; 16],
    allocation: Allocation,
    device: u32,
    import: Weak<Imported>,
}

/// Opens an allocation of another process's for copies of a device; once, however many regions lie in it.
fn open(device: &Arc<Device>, allocation: &Allocation, owner: Option<[u8; 16]>) -> Import {
    let owner = owner.filter(|_| allocation.id != 0);
    let Some(owner) = owner else { return Imported::open(device, allocation).map(Arc::new) };
    let mut all = OPEN.lock();
    all.retain(|open| open.import.strong_count() != 0);
    let end = |allocation: &Allocation| allocation.base.saturating_add(allocation.len);
    let same_place = |open: &&Open| {
        open.owner == owner
            && open.device == device.number()
            && open.allocation.base < end(allocation)
            && allocation.base < end(&open.allocation)
    };
    for known in all.iter().filter(same_place) {
        let Some(import) = known.import.upgrade().filter(|import| import.is_of(device)) else { continue };
        if known.allocation.id == allocation.id && known.allocation.handle == allocation.handle {
            return Ok(import);
        }
        if known.allocation.id != allocation.id && allocation.kind == Kind::Ipc {
            // Its owner has freed it, as other memory is there now, and closed it before; so no copy is in it, and none begins. But the driver opens
            // nothing in its place while it is open, and another node of this process may not have heard yet.
            import.close();
        }
    }
    let import = Arc::new(Imported::open(device, allocation)?);
    let (allocation, device) = (*allocation, device.number());
    all.push(Open { owner, allocation, device, import: Arc::downgrade(&import) });
    Ok(import)
}

/// Whether it would be the same another time.
fn is_lasting(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::InvalidParams | ErrorCode::NotSupported)
}

/// An allocation as copies of a device see it.
pub(crate) struct Here {
    pub(crate) at: u64,
    /// Keeps it there.
    pub(crate) import: Option<Arc<Imported>>,
}

impl Remote {
    /// An allocation in a process, if that is known.
    pub(crate) fn new(allocation: Allocation, owner: Option<[u8; 16]>) -> Self {
        Self { allocation, owner, opened: Mutex::default() }
    }

    pub(crate) fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// Where it begins for that device. One whose handle is not valid is not tried again: a peer that registers it anew shows it anew.
    pub(crate) fn at(&self, device: &Arc<Device>) -> Result<Here> {
        if self.owner == Some(this_process()) {
            return Ok(Here { at: self.allocation.base, import: None });
        }
        let mut opened = self.opened.lock();
        let known = opened.iter().position(|(other, _)| Arc::ptr_eq(other, device));
        let known = match known {
            Some(known) => known,
            None => {
                // What a device had open that is lost went with its context.
                opened.retain(|(other, _)| !other.is_lost());
                match open(device, &self.allocation, self.owner) {
                    Err(error) if !is_lasting(&error) => return Err(error),
                    result => opened.push((device.clone(), result)),
                }
                opened.len() - 1
            }
        };
        match &opened[known].1 {
            Ok(import) => Ok(Here { at: import.at(), import: Some(import.clone()) }),
            Err(error) => Err(error.clone()),
        }
    }
}

impl Mapping for Remote {
    const MORE: usize = 2;
    type Shown = Remote;

    fn look(_: Option<OwnedFd>, more: &[[u8; RECORD_LEN]]) -> Result<(Remote, u64)> {
        let (allocation, process) = decode(more)?;
        let bytes = allocation.len;
        Ok((Remote::new(allocation, Some(process)), bytes))
    }

    fn open(shown: Remote, _: u64) -> Result<Self> {
        Ok(shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation() -> Allocation {
        Allocation {
            base: 0x7000,
            len: 4096,
            kind: Kind::Fabric,
            handle: [7; HANDLE_BYTES],
            uuid: [3; 16],
            id: 5,
        }
    }

    #[test]
    fn handles_come_back() {
        let (back, process) = decode(&encode(&allocation(), &[9; 16])).unwrap();
        assert_eq!((back.base, back.len, back.kind, back.id), (0x7000, 4096, Kind::Fabric, 5));
        assert_eq!((back.handle, back.uuid, process), ([7; HANDLE_BYTES], [3; 16], [9; 16]));
    }

    #[test]
    fn what_is_wrong_with_them_is_named() {
        let good = encode(&allocation(), &[9; 16]);
        for (at, word) in [(8, "kind"), (13, "unused")] {
            let mut bad = good;
            bad[1][at] ^= 0x40;
            assert!(decode(&bad).unwrap_err().message().contains(word), "{at}");
        }
        for bad in [
            Allocation { len: 0, ..allocation() },
            Allocation { base: 0, ..allocation() },
            Allocation { base: u64::MAX, ..allocation() },
        ] {
            assert!(decode(&encode(&bad, &[9; 16])).unwrap_err().message().contains("allocation"));
        }
        assert!(decode(&good[..1]).is_err());
    }
}
