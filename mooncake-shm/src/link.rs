//! A peer's side: the connection to an owner, and what of its memory is mapped here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::RwLock;
use rustix::thread::futex;
use tokio::net::UnixStream;
use tracing::debug;

use crate::record::{Listing, Record, RegionRecord};
use crate::socket::{RecordSocket, Trust, sealed};
use crate::words::{Board, Page};

/// A connection to one owner.
#[derive(Debug)]
pub(crate) struct Link {
    wire: Arc<RecordSocket>,
    board: Board,
    page: Page,
    mapped: RwLock<Arc<Mapped>>,
    /// One question at a time.
    asking: tokio::sync::Mutex<()>,
    /// A question that nobody waits for is under way.
    curious: AtomicBool,
    /// Given up: the owner is dead, or what came from it made no sense.
    over: AtomicBool,
    answer_timeout: Duration,
}

/// What is mapped, by address.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    version: u32,
    regions: Vec<Arc<MappedRegion>>,
}

/// One region of an owner in this process.
#[derive(Debug)]
pub(crate) struct MappedRegion {
    record: RegionRecord,
    /// The whole file it is in.
    memory: HostMemory,
}

impl Mapped {
    /// The region that holds all of a range which is not empty.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<&Arc<MappedRegion>> {
        let end = addr.checked_add(len).filter(|_| len != 0)?;
        let after = self.regions.partition_point(|region| region.record.addr <= addr);
        let region = self.regions.get(after.checked_sub(1)?)?;
        (end <= region.record.end()).then_some(region)
    }
}

impl Mapped {
    pub(crate) fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.record.len).sum()
    }
}

impl MappedRegion {
    /// Where in the mapping of the file an address of the owner lies.
    pub(crate) fn offset_of(&self, addr: u64) -> usize {
        // The region lies in the file, which is mapped, so this fits.
        (self.record.offset + (addr - self.record.addr)) as usize
    }

    pub(crate) fn memory(&self) -> &HostMemory {
        &self.memory
    }
}

impl Link {
    /// Connects to the owner that listens under that name.
    pub(crate) async fn open(name: &str, answer_timeout: Duration) -> Result<Arc<Self>> {
        let open = async {
            let wire = Arc::new(RecordSocket::new(
                UnixStream::connect(format!("\0{name}")).await?,
                Trust::SameUser,
            )?);
            Record::Ask.send(&wire, None).await?;
            let board = match Record::receive(&wire).await? {
                (Record::Board, fd) => Board::open(&sealed(fd)?)?,
                (other, _) => return Err(Error::invalid(format!("{other:?} instead of a board"))),
            };
            let page = match Record::receive(&wire).await? {
                (Record::Page, fd) => Page::open(&sealed(fd)?)?,
                (other, _) => return Err(Error::invalid(format!("{other:?} instead of a page"))),
            };
            let mapped = receive(&wire, &Mapped::default()).await?;
            Ok(Arc::new(Self {
                wire,
                board,
                page,
                mapped: RwLock::new(Arc::new(mapped)),
                asking: tokio::sync::Mutex::default(),
                curious: AtomicBool::new(false),
                over: AtomicBool::new(false),
                answer_timeout,
            }))
        };
        tokio::time::timeout(answer_timeout, open).await.unwrap_or_else(|_| Err(silent()))
    }

    /// Whether the owner is there, this very moment.
    pub(crate) fn is_alive(&self) -> bool {
        !self.over.load(Ordering::Acquire) && self.wire.is_alive()
    }

    pub(crate) fn mapped(&self) -> Arc<Mapped> {
        self.mapped.read().clone()
    }

    /// Whether the owner has opened or closed something since it was last asked.
    pub(crate) fn is_stale(&self) -> bool {
        self.board.version().load(Ordering::SeqCst) != self.mapped.read().version
    }

    /// Asks what there is now, if anything has changed. A link that does not answer as it should is given up.
    pub(crate) async fn refresh(&self) -> Result<()> {
        let _turn = self.asking.lock().await;
        if self.over.load(Ordering::Acquire) {
            return Err(gone());
        }
        if !self.is_stale() {
            return Ok(());
        }
        let known = self.mapped();
        let ask = async {
            Record::Ask.send(&self.wire, None).await?;
            receive(&self.wire, &known).await
        };
        let broken = Broken(self);
        let answer =
            tokio::time::timeout(self.answer_timeout, ask).await.unwrap_or_else(|_| Err(silent()))?;
        std::mem::forget(broken);
        *self.mapped.write() = Arc::new(answer);
        Ok(())
    }

    /// The same for when nobody waits.
    pub(crate) async fn refresh_alone(self: Arc<Self>) {
        if self.curious.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = self.refresh().await {
            debug!(%error, "an owner on this host was asked in vain");
        }
        self.curious.store(false, Ordering::Release);
    }

    /// Gives the link up, and the memory it shows.
    pub(crate) fn give_up(&self) {
        self.over.store(true, Ordering::Release);
        *self.mapped.write() = Arc::default();
    }

    /// Counts a copy in, if the region is open.
    pub(crate) fn enter(&self, region: &MappedRegion) -> Option<Inside<'_>> {
        let RegionRecord { slot, generation, .. } = region.record;
        let slot = slot as usize;
        let row = self.board.row().load(Ordering::SeqCst);
        let inside = Inside { link: self, slot, generation, row };
        self.page.inside(slot, row).fetch_add(1, Ordering::SeqCst);
        // Dropped, it counts itself out again.
        (self.board.state(slot).load(Ordering::SeqCst) == generation).then_some(inside)
    }
}

/// A copy under way; while it lives, the owner keeps the region as it is, or cuts it off.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    link: &'a Link,
    slot: usize,
    generation: u32,
    row: u32,
}

impl Inside<'_> {
    /// Ends it, and says whether the region was open all the time.
    pub(crate) fn leave(self) -> bool {
        let (link, slot, generation) = (self.link, self.slot, self.generation);
        drop(self);
        // Read after the count went down, which went down after the bytes were moved: memory that was cut off before the last
        // byte is seen to be closed.
        link.board.state(slot).load(Ordering::SeqCst) == generation
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let count = self.link.page.inside(self.slot, self.row);
        count.fetch_sub(1, Ordering::SeqCst);
        if self.link.board.state(self.slot).load(Ordering::SeqCst) != self.generation {
            // The owner may be waiting for us. It looks again by itself if this fails.
            let _ = futex::wake(count, futex::Flags::empty(), u32::MAX);
        }
    }
}

/// A question that is not over; left like that, the answer would be taken for the next one's.
struct Broken<'a>(&'a Link);

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// Takes an answer from its head on, and maps what is new in it.
async fn receive(wire: &RecordSocket, known: &Mapped) -> Result<Mapped> {
    let (head, _) = Record::receive(wire).await?;
    let mut listing = Listing::begin(head)?;
    let mut regions: Vec<Arc<MappedRegion>> = Vec::new();
    while listing.wants_more() {
        let (record, fd) = Record::receive(wire).await?;
        let file = sealed(fd)?;
        let len = file.metadata().map_err(Error::from)?.len();
        let record = listing.push(record, len)?;
        regions.push(match known.regions.iter().find(|region| region.record == record) {
            // One of a generation is never another.
            Some(known) => known.clone(),
            None => {
                let len = usize::try_from(len).map_err(|_| Error::invalid("a file larger than memory"))?;
                Arc::new(MappedRegion { record, memory: HostMemory::map_file(&file, 0, len)? })
            }
        });
    }
    regions.sort_unstable_by_key(|region| region.record.addr);
    Ok(Mapped { version: listing.version(), regions })
}

fn silent() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the owner does not answer on its socket")
}

fn gone() -> Error {
    Error::new(ErrorCode::TransferFail, "the owner of the shared memory is gone")
}
