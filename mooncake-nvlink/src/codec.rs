//! Codec of device allocations, which an owner shares and a peer opens by handles of the driver.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};

use mooncake_core::clock::Rng;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::record::RECORD_LEN;
use mooncake_ipc::{Mapping, SharedObject};
use parking_lot::Mutex;

use crate::cuda::{Allocation, Device, HANDLE_BYTES, HandleKind, Imported};

pub(crate) type Link = mooncake_ipc::Link<Remote>;
pub(crate) type CopyGuard = mooncake_ipc::CopyGuard<Remote, Arc<Link>>;

const _: () = assert!(HANDLE_BYTES == RECORD_LEN);

/// Region that is open to peers.
#[derive(Clone, Debug)]
pub(crate) struct ExportedRegion {
    pub(crate) span: MemorySpan,
    pub(crate) allocation: Allocation,
}

impl SharedObject for ExportedRegion {
    const OUTLIVES_SOCKETS: bool = true;

    fn range(&self) -> Range<u64> {
        self.span.addr()..self.span.addr() + self.span.len as u64
    }

    fn offset_of(&self, addr: u64) -> u64 {
        addr - self.allocation.base
    }

    fn extra_records(&self) -> Vec<[u8; RECORD_LEN]> {
        encode(&self.allocation, &this_process()).into()
    }

    unsafe fn detach(&self) -> Result<()> {
        Err(Error::new(ErrorCode::NotSupported, "cannot detach device memory from peers that have opened it"))
    }
}

/// Encodes the records that follow the record of a region: the handle, and the allocation of the
/// handle.
pub(crate) fn encode(allocation: &Allocation, process: &[u8; 16]) -> [[u8; RECORD_LEN]; 2] {
    let mut metadata = [0; RECORD_LEN];
    metadata[..8].copy_from_slice(&allocation.len.to_le_bytes());
    metadata[8..12].copy_from_slice(&(allocation.kind as u32).to_le_bytes());
    metadata[16..32].copy_from_slice(&allocation.uuid);
    metadata[32..48].copy_from_slice(process);
    metadata[48..56].copy_from_slice(&allocation.base.to_le_bytes());
    metadata[56..64].copy_from_slice(&allocation.id.to_le_bytes());
    [allocation.handle, metadata]
}

/// Decodes the allocation of those records, and its process.
///
/// # Errors
///
/// Returns `Invalid`, with the faulty part.
pub(crate) fn decode(records: &[[u8; RECORD_LEN]]) -> Result<(Allocation, [u8; 16])> {
    let [handle, metadata] = records else {
        return Err(Error::invalid("malformed region descriptor: missing CUDA handle"));
    };
    let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| metadata[at + i]));
    let id = |at: usize| -> [u8; 16] { std::array::from_fn(|i| metadata[at + i]) };
    let (len, base) = (long(0), long(48));
    let kind = u32::from_le_bytes(std::array::from_fn(|i| metadata[8 + i]));
    let kind = HandleKind::from_number(kind)
        .ok_or_else(|| Error::invalid(format!("malformed region descriptor: unknown handle kind {kind}")))?;
    if len == 0 || base == 0 || base.checked_add(len).is_none() {
        return Err(Error::invalid(format!(
            "malformed region descriptor: invalid allocation. base={base:#x} len={len}"
        )));
    }
    if metadata[12..16].iter().any(|byte| *byte != 0) {
        return Err(Error::invalid("malformed region descriptor: unused bytes are not zero"));
    }
    Ok((Allocation { base, len, kind, handle: *handle, uuid: id(16), id: long(56) }, id(32)))
}

/// Decodes and re-encodes the records that follow the record of a region. For fuzzing.
///
/// # Errors
/// Returns `Invalid` for malformed records.
pub fn reencode(records: &[[u8; RECORD_LEN]]) -> Result<[[u8; RECORD_LEN]; 2]> {
    decode(records).map(|(allocation, process)| encode(&allocation, &process))
}

/// Returns the id of this process: the driver does not open handles of its own process.
fn this_process() -> [u8; 16] {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    let drawn = DRAWN.get_or_init(|| Rng::from_os().next_u64());
    let mut id = [0; 16];
    id[..8].copy_from_slice(&drawn.to_le_bytes());
    // A forked child has the random number of its parent, so the id contains the process id.
    id[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    id
}

/// Allocation of a peer. Opened on first use, for each device that copies.
#[derive(Debug)]
pub(crate) struct Remote {
    allocation: Allocation,
    /// Process of the allocation, if known.
    owner: Option<[u8; 16]>,
    opened: Mutex<Vec<(Arc<Device>, Import)>>,
}

/// Outcome of opening an allocation.
type Import = Result<Arc<Imported>>;

/// Memory of other processes that this process has open, by any of its nodes.
static OPEN: Mutex<Vec<OpenImport>> = Mutex::new(Vec::new());

struct OpenImport {
    owner: [u8; 16],
    allocation: Allocation,
    device: u32,
    import: Weak<Imported>,
}

/// Opens an allocation of another process for copies of a device, once for all regions in it.
fn open(device: &Arc<Device>, allocation: &Allocation, owner: Option<[u8; 16]>) -> Import {
    let owner = owner.filter(|_| allocation.id != 0);
    let Some(owner) = owner else { return Imported::open(device, allocation).map(Arc::new) };
    let mut all = OPEN.lock();
    all.retain(|open| open.import.strong_count() != 0);
    let end = |allocation: &Allocation| allocation.base.saturating_add(allocation.len);
    let overlaps = |open: &&OpenImport| {
        open.owner == owner
            && open.device == device.number()
            && open.allocation.base < end(allocation)
            && allocation.base < end(&open.allocation)
    };
    for existing in all.iter().filter(overlaps) {
        let Some(import) = existing.import.upgrade().filter(|import| import.is_for(device)) else { continue };
        if existing.allocation.id == allocation.id && existing.allocation.handle == allocation.handle {
            return Ok(import);
        }
        if existing.allocation.id != allocation.id && allocation.kind == HandleKind::Ipc {
            // The owner has freed the allocation, because other memory is there now, and had closed
            // it before. So no copy uses it, and none begins. But the driver opens nothing at its
            // address while it is open, and another node of this process may not know yet.
            import.close();
        }
    }
    let import = Arc::new(Imported::open(device, allocation)?);
    let (allocation, device) = (*allocation, device.number());
    all.push(OpenImport { owner, allocation, device, import: Arc::downgrade(&import) });
    Ok(import)
}

/// Removes the entries of memory that this process has closed.
pub(crate) fn release_closed() {
    OPEN.lock().retain(|open| open.import.strong_count() != 0);
}

/// Returns whether a retry would return the same error.
fn is_permanent(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::InvalidParams | ErrorCode::NotSupported)
}

/// Address of an allocation for the copies of a device.
pub(crate) struct LocalAddress {
    pub(crate) at: u64,
    /// Mapping that keeps the address valid.
    pub(crate) import: Option<Arc<Imported>>,
}

impl Remote {
    /// Creates the remote memory of an allocation, and of its process, if known.
    pub(crate) fn new(allocation: Allocation, owner: Option<[u8; 16]>) -> Self {
        Self { allocation, owner, opened: Mutex::default() }
    }

    pub(crate) fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// Returns its address for that device. An invalid handle is not tried again: a peer that
    /// registers the memory again sends a new handle.
    pub(crate) fn at(&self, device: &Arc<Device>) -> Result<LocalAddress> {
        if self.owner == Some(this_process()) {
            return Ok(LocalAddress { at: self.allocation.base, import: None });
        }
        let mut opened = self.opened.lock();
        let existing = opened.iter().position(|(other, _)| Arc::ptr_eq(other, device));
        let existing = match existing {
            Some(existing) => existing,
            None => {
                // Mappings of a lost device are gone with its context.
                opened.retain(|(other, _)| !other.is_lost());
                match open(device, &self.allocation, self.owner) {
                    Err(error) if !is_permanent(&error) => return Err(error),
                    result => opened.push((device.clone(), result)),
                }
                opened.len() - 1
            }
        };
        match &opened[existing].1 {
            Ok(import) => Ok(LocalAddress { at: import.at(), import: Some(import.clone()) }),
            Err(error) => Err(error.clone()),
        }
    }
}

impl Mapping for Remote {
    const EXTRA_RECORDS: usize = 2;
    type Description = Remote;

    fn check_description(_: Option<OwnedFd>, extra_records: &[[u8; RECORD_LEN]]) -> Result<(Remote, u64)> {
        let (allocation, process) = decode(extra_records)?;
        let bytes = allocation.len;
        Ok((Remote::new(allocation, Some(process)), bytes))
    }

    fn open(description: Remote, _: u64) -> Result<Self> {
        Ok(description)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation() -> Allocation {
        Allocation {
            base: 0x7000,
            len: 4096,
            kind: HandleKind::Fabric,
            handle: [7; HANDLE_BYTES],
            uuid: [3; 16],
            id: 5,
        }
    }

    #[test]
    fn handles_round_trip() {
        let (back, process) = decode(&encode(&allocation(), &[9; 16])).unwrap();
        assert_eq!((back.base, back.len, back.kind, back.id), (0x7000, 4096, HandleKind::Fabric, 5));
        assert_eq!((back.handle, back.uuid, process), ([7; HANDLE_BYTES], [3; 16], [9; 16]));
    }

    #[test]
    fn malformed_records_are_named() {
        let valid = encode(&allocation(), &[9; 16]);
        for (at, word) in [(8, "kind"), (13, "unused")] {
            let mut invalid = valid;
            invalid[1][at] ^= 0x40;
            assert!(decode(&invalid).unwrap_err().message().contains(word), "{at}");
        }
        for invalid in [
            Allocation { len: 0, ..allocation() },
            Allocation { base: 0, ..allocation() },
            Allocation { base: u64::MAX, ..allocation() },
        ] {
            assert!(decode(&encode(&invalid, &[9; 16])).unwrap_err().message().contains("allocation"));
        }
        assert!(decode(&valid[..1]).is_err());
    }
}
