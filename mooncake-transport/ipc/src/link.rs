//! Peer side: the connection to an owner, and the mapped part of its memory.

use std::fmt;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::RwLock;
use rustix::thread::futex;
use tokio::net::UnixStream;
use tracing::debug;

use crate::record::{RECORD_LEN, Record, RegionListParser, RegionRecord};
use crate::shared_words::{CopyCounters, SlotTable};
use crate::socket::{RecordSocket, Trust, sealed};

/// Object that contains an owner's region, mapped in this process.
pub trait Mapping: Sized + fmt::Debug + Send + Sync + 'static {
    /// Number of records that follow the record of a region.
    const EXTRA_RECORDS: usize;
    /// Checked description of a region, as received.
    type Description: Send;

    /// Checks the description of a region. Returns it with the length of the object in bytes.
    ///
    /// # Errors
    /// Returns an error for a malformed description.
    fn check_description(
        file: Option<OwnedFd>,
        extra_records: &[[u8; RECORD_LEN]],
    ) -> Result<(Self::Description, u64)>;

    /// Maps the object, or prepares the mapping.
    ///
    /// # Errors
    /// Returns the errors of the mapping.
    fn open(description: Self::Description, bytes: u64) -> Result<Self>;
}

/// Connection to one owner.
#[derive(Debug)]
pub struct Link<M> {
    socket: RecordSocket,
    slot_table: SlotTable,
    copy_counters: CopyCounters,
    mapped: RwLock<Arc<Mapped<M>>>,
    /// Lock that permits one request at a time.
    request_lock: tokio::sync::Mutex<()>,
    /// True if a background request is in progress.
    refreshing: AtomicBool,
    /// True if the link is closed, because the owner is dead or sent a malformed response.
    closed: AtomicBool,
    response_timeout: Duration,
}

/// Mapped regions, by address.
#[derive(Debug)]
pub struct Mapped<M> {
    version: u32,
    regions: Vec<Arc<MappedRegion<M>>>,
}

/// Region of an owner in this process.
#[derive(Debug)]
pub struct MappedRegion<M> {
    record: RegionRecord,
    /// Mapping of the whole object that contains the region.
    mapping: M,
}

impl<M> Default for Mapped<M> {
    fn default() -> Self {
        Self { version: 0, regions: Vec::new() }
    }
}

impl<M> Mapped<M> {
    /// Returns the region that contains a whole non-empty range.
    pub fn find(&self, addr: u64, len: u64) -> Option<&Arc<MappedRegion<M>>> {
        let end = addr.checked_add(len).filter(|_| len != 0)?;
        let after = self.regions.partition_point(|region| region.record.addr <= addr);
        let region = self.regions.get(after.checked_sub(1)?)?;
        (end <= region.record.end()).then_some(region)
    }
}

impl<M> Mapped<M> {
    /// Returns the total length of all regions in bytes.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.record.len).sum()
    }
}

impl<M> MappedRegion<M> {
    /// Returns the offset of an owner's address in the mapping.
    pub fn offset_of(&self, addr: u64) -> usize {
        // The region lies in the mapping, so this fits.
        (self.record.offset + (addr - self.record.addr)) as usize
    }

    /// Returns the mapping that contains the region.
    pub fn mapping(&self) -> &M {
        &self.mapping
    }
}

impl<M: Mapping> Link<M> {
    /// Connects to the owner that listens under that name.
    ///
    /// # Errors
    /// Returns an error if no process listens, if the response is malformed, or if none arrives in
    /// time.
    pub async fn open(name: &str, response_timeout: Duration) -> Result<Self> {
        let open = async {
            let stream = UnixStream::connect(format!("\0{name}")).await?;
            let socket = RecordSocket::new(stream, Trust::SameUser)?;
            Record::ListRegions.send(&socket, None).await?;
            let slot_table = match Record::receive(&socket).await? {
                (Record::SlotTable, fd) => SlotTable::open(&sealed(fd)?)?,
                (other, _) => return Err(Error::invalid(format!("{other:?} instead of the slot table"))),
            };
            let copy_counters = match Record::receive(&socket).await? {
                (Record::CopyCounters, fd) => CopyCounters::open(&sealed(fd)?)?,
                (other, _) => return Err(Error::invalid(format!("{other:?} instead of the copy counters"))),
            };
            let mapped = receive(&socket, &Mapped::default()).await?;
            Ok(Self {
                socket,
                slot_table,
                copy_counters,
                mapped: RwLock::new(Arc::new(mapped)),
                request_lock: tokio::sync::Mutex::default(),
                refreshing: AtomicBool::new(false),
                closed: AtomicBool::new(false),
                response_timeout,
            })
        };
        tokio::time::timeout(response_timeout, open).await.unwrap_or_else(|_| Err(timeout_error()))
    }

    /// Returns whether the owner is alive at this moment.
    pub fn is_alive(&self) -> bool {
        !self.closed.load(Ordering::Acquire) && self.socket.is_alive()
    }

    /// Returns the open regions of the owner, as of the last request.
    pub fn mapped(&self) -> Arc<Mapped<M>> {
        self.mapped.read().clone()
    }

    /// Returns whether the owner has opened or closed a region since the last request.
    pub fn is_stale(&self) -> bool {
        self.slot_table.version().load(Ordering::SeqCst) != self.mapped.read().version
    }

    /// Requests the open regions, if they have changed. A malformed response closes the link.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub async fn refresh(&self) -> Result<()> {
        let _guard = self.request_lock.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(owner_ended_error());
        }
        if !self.is_stale() {
            return Ok(());
        }
        let known = self.mapped();
        let request = async {
            Record::ListRegions.send(&self.socket, None).await?;
            receive(&self.socket, &known).await
        };
        let close_on_failure = CloseOnDrop(self);
        let mapped = tokio::time::timeout(self.response_timeout, request)
            .await
            .unwrap_or_else(|_| Err(timeout_error()))?;
        std::mem::forget(close_on_failure);
        *self.mapped.write() = Arc::new(mapped);
        Ok(())
    }

    /// Refreshes in the background, like [`refresh`](Self::refresh).
    pub async fn refresh_in_background(self: Arc<Self>) {
        if self.refreshing.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = self.refresh().await {
            debug!(%error, "cannot refresh the regions of an owner on this host");
        }
        self.refreshing.store(false, Ordering::Release);
    }

    /// Closes the link, and drops its mappings.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        *self.mapped.write() = Arc::default();
    }

    /// Registers a copy, if the region is open. The link is borrowed, or owned by copies that
    /// outlive the call.
    pub fn enter<L: Deref<Target = Self>>(link: L, region: &MappedRegion<M>) -> Option<CopyGuard<M, L>> {
        let RegionRecord { slot, generation, .. } = region.record;
        let slot = slot as usize;
        let row = link.slot_table.row().load(Ordering::SeqCst);
        let guard = CopyGuard { link, slot, generation, row, is_decremented: false };
        guard.link.copy_counters.inside(slot, row).fetch_add(1, Ordering::SeqCst);
        // The drop of the guard decrements the count.
        (guard.link.slot_table.state(slot).load(Ordering::SeqCst) == generation).then_some(guard)
    }
}

/// Copy in progress. While it lives, the owner keeps the region as it is, or cuts it off.
pub struct CopyGuard<M: Mapping, L: Deref<Target = Link<M>>> {
    link: L,
    slot: usize,
    generation: u32,
    row: u32,
    is_decremented: bool,
}

impl<M: Mapping, L: Deref<Target = Link<M>>> CopyGuard<M, L> {
    /// Ends the copy. Returns whether the region was open all the time.
    pub fn leave(mut self) -> bool {
        self.decrement();
        // The state is read after the decrement, which happens after the bytes were moved. So
        // memory that was cut off before the last byte is seen as closed.
        self.is_open()
    }

    fn is_open(&self) -> bool {
        self.link.slot_table.state(self.slot).load(Ordering::SeqCst) == self.generation
    }

    fn decrement(&mut self) {
        if std::mem::replace(&mut self.is_decremented, true) {
            return;
        }
        let count = self.link.copy_counters.inside(self.slot, self.row);
        count.fetch_sub(1, Ordering::SeqCst);
        if !self.is_open() {
            // The owner may be waiting for this process. If the wake-up fails, it checks again by
            // itself.
            let _ = futex::wake(count, futex::Flags::empty(), u32::MAX);
        }
    }
}

impl<M: Mapping, L: Deref<Target = Link<M>>> Drop for CopyGuard<M, L> {
    fn drop(&mut self) {
        self.decrement();
    }
}

impl<M: Mapping, L: Deref<Target = Link<M>>> fmt::Debug for CopyGuard<M, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyGuard({}, {})", self.slot, self.generation)
    }
}

/// Guard of a request in progress. It closes an abandoned link, because the response would be taken
/// for the response to the next request.
struct CloseOnDrop<'a, M: Mapping>(&'a Link<M>);

impl<M: Mapping> Drop for CloseOnDrop<'_, M> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Receives a response from its head on, and maps the new regions.
async fn receive<M: Mapping>(socket: &RecordSocket, known: &Mapped<M>) -> Result<Mapped<M>> {
    let (head, _) = Record::receive(socket).await?;
    let mut parser = RegionListParser::begin(head)?;
    let mut regions: Vec<Arc<MappedRegion<M>>> = Vec::new();
    let mut extra_records = vec![[0; RECORD_LEN]; M::EXTRA_RECORDS];
    while parser.is_incomplete() {
        let (record, file) = Record::receive(socket).await?;
        for bytes in &mut extra_records {
            (*bytes, _) = socket.receive().await?;
        }
        let (description, bytes) = M::check_description(file, &extra_records)?;
        let record = parser.push(record, bytes)?;
        regions.push(match known.regions.iter().find(|region| region.record == record) {
            // A generation is never reused.
            Some(known) => known.clone(),
            None => Arc::new(MappedRegion { record, mapping: M::open(description, bytes)? }),
        });
    }
    regions.sort_unstable_by_key(|region| region.record.addr);
    Ok(Mapped { version: parser.version(), regions })
}

fn timeout_error() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the owner does not answer on its socket")
}

fn owner_ended_error() -> Error {
    Error::new(ErrorCode::TransferFail, "the owner of the memory is gone")
}
