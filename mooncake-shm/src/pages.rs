//! Pages of shared files, which an owner shares and a peer maps.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use mooncake_core::memory::{HostMemory, SharedPages};
use mooncake_core::{Error, Result};
use mooncake_ipc::record::RECORD_LEN;
use mooncake_ipc::socket::sealed;
use mooncake_ipc::{Mapping, OpenRegion, SharedObject};
use std::fs::File;

/// Memory that a [`ShmTransport`](crate::ShmTransport) knows. Dropping it closes the memory to
/// peers.
#[derive(Debug)]
pub struct Registration {
    region: Option<OpenRegion<Pages>>,
}

impl Registration {
    pub(crate) fn new(region: Option<OpenRegion<Pages>>) -> Self {
        Self { region }
    }

    /// Returns whether peers on this host can access the memory: it is shared memory, registered
    /// for peers, and has a slot.
    pub fn is_reachable(&self) -> bool {
        self.region.as_ref().is_some_and(OpenRegion::is_open)
    }
}

/// Pages of a region. They are detached from their file as a whole, so two regions never share a
/// page.
#[derive(Clone, Debug)]
pub(crate) struct Pages(pub(crate) SharedPages);

impl SharedObject for Pages {
    fn range(&self) -> Range<u64> {
        self.0.range()
    }

    fn offset_of(&self, addr: u64) -> u64 {
        self.0.offset_of(addr)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.file().as_fd())
    }

    unsafe fn detach(&self) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.0.make_private() }
    }
}

/// Mapping of the whole file of a region.
#[derive(Debug)]
pub(crate) struct MappedFile(pub(crate) HostMemory);

impl Mapping for MappedFile {
    const EXTRA_RECORDS: usize = 0;
    type Description = File;

    fn check_description(file: Option<OwnedFd>, _: &[[u8; RECORD_LEN]]) -> Result<(File, u64)> {
        let file = sealed(file)?;
        let bytes = file.metadata().map_err(Error::from)?.len();
        Ok((file, bytes))
    }

    fn open(file: File, bytes: u64) -> Result<Self> {
        let bytes = usize::try_from(bytes)
            .map_err(|_| Error::invalid("cannot map file: it exceeds the address space"))?;
        HostMemory::map_file(&file, 0, bytes).map(Self)
    }
}
