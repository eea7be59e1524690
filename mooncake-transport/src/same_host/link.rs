//! A peer's side: the connection to an owner, and what of its memory is mapped here.

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

use super::record::{Listing, RECORD_LEN, Record, RegionRecord};
use super::socket::{RecordSocket, Trust, sealed};
use super::words::{Board, Page};

/// What an owner's region lies in, as a peer has it in its own process.
pub trait Mapping: Sized + fmt::Debug + Send + Sync + 'static {
    /// Records that follow that of a region.
    const MORE: usize;
    /// What came with a region, checked as far as that can be.
    type Shown: Send;

    /// Looks at what came with a region; how many bytes there are in it.
    ///
    /// # Errors
    /// It is not what it should be.
    fn look(file: Option<OwnedFd>, more: &[[u8; RECORD_LEN]]) -> Result<(Self::Shown, u64)>;

    /// Maps it, or gets ready to.
    ///
    /// # Errors
    /// It cannot be.
    fn open(shown: Self::Shown, bytes: u64) -> Result<Self>;
}

/// A connection to one owner.
#[derive(Debug)]
pub struct Link<M> {
    wire: RecordSocket,
    board: Board,
    page: Page,
    mapped: RwLock<Arc<Mapped<M>>>,
    /// One question at a time.
    asking: tokio::sync::Mutex<()>,
    /// A question that nobody waits for is under way.
    curious: AtomicBool,
    /// Given up: the owner is dead, or what came from it made no sense.
    over: AtomicBool,
    answer_timeout: Duration,
}

/// What is mapped, by address.
#[derive(Debug)]
pub struct Mapped<M> {
    version: u32,
    regions: Vec<Arc<MappedRegion<M>>>,
}

/// One region of an owner in this process.
#[derive(Debug)]
pub struct MappedRegion<M> {
    record: RegionRecord,
    /// All of what it is in.
    mapping: M,
}

impl<M> Default for Mapped<M> {
    fn default() -> Self {
        Self { version: 0, regions: Vec::new() }
    }
}

impl<M> Mapped<M> {
    /// The region that holds all of a range which is not empty.
    pub fn find(&self, addr: u64, len: u64) -> Option<&Arc<MappedRegion<M>>> {
        let end = addr.checked_add(len).filter(|_| len != 0)?;
        let after = self.regions.partition_point(|region| region.record.addr <= addr);
        let region = self.regions.get(after.checked_sub(1)?)?;
        (end <= region.record.end()).then_some(region)
    }
}

impl<M> Mapped<M> {
    /// Bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.record.len).sum()
    }
}

impl<M> MappedRegion<M> {
    /// Where in the mapping an address of the owner lies.
    pub fn offset_of(&self, addr: u64) -> usize {
        // The region lies in what is mapped, so this fits.
        (self.record.offset + (addr - self.record.addr)) as usize
    }

    /// What it is in.
    pub fn mapping(&self) -> &M {
        &self.mapping
    }
}

impl<M: Mapping> Link<M> {
    /// Connects to the owner that listens under that name.
    ///
    /// # Errors
    /// Nobody does, or what comes from there makes no sense, or nothing does in time.
    pub async fn open(name: &str, answer_timeout: Duration) -> Result<Self> {
        let open = async {
            let stream = UnixStream::connect(format!("\0{name}")).await?;
            let wire = RecordSocket::new(stream, Trust::SameUser)?;
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
            Ok(Self {
                wire,
                board,
                page,
                mapped: RwLock::new(Arc::new(mapped)),
                asking: tokio::sync::Mutex::default(),
                curious: AtomicBool::new(false),
                over: AtomicBool::new(false),
                answer_timeout,
            })
        };
        tokio::time::timeout(answer_timeout, open).await.unwrap_or_else(|_| Err(silent()))
    }

    /// Whether the owner is there, this very moment.
    pub fn is_alive(&self) -> bool {
        !self.over.load(Ordering::Acquire) && self.wire.is_alive()
    }

    /// What the owner had open when it was last asked.
    pub fn mapped(&self) -> Arc<Mapped<M>> {
        self.mapped.read().clone()
    }

    /// Whether the owner has opened or closed something since it was last asked.
    pub fn is_stale(&self) -> bool {
        self.board.version().load(Ordering::SeqCst) != self.mapped.read().version
    }

    /// Asks what there is now, if anything has changed. A link that does not answer as it should is given up.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn refresh(&self) -> Result<()> {
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
    pub async fn refresh_alone(self: Arc<Self>) {
        if self.curious.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = self.refresh().await {
            debug!(%error, "an owner on this host was asked in vain");
        }
        self.curious.store(false, Ordering::Release);
    }

    /// Gives the link up, and the memory it shows.
    pub fn give_up(&self) {
        self.over.store(true, Ordering::Release);
        *self.mapped.write() = Arc::default();
    }

    /// Counts a copy in, if the region is open. The link is borrowed, or held for copies that go on.
    pub fn enter<L: Deref<Target = Self>>(link: L, region: &MappedRegion<M>) -> Option<Inside<M, L>> {
        let RegionRecord { slot, generation, .. } = region.record;
        let slot = slot as usize;
        let row = link.board.row().load(Ordering::SeqCst);
        let inside = Inside { link, slot, generation, row, out: false };
        inside.link.page.inside(slot, row).fetch_add(1, Ordering::SeqCst);
        // Dropped, it counts itself out again.
        (inside.link.board.state(slot).load(Ordering::SeqCst) == generation).then_some(inside)
    }
}

/// A copy under way; while it lives, the owner keeps the region as it is, or cuts it off.
pub struct Inside<M: Mapping, L: Deref<Target = Link<M>>> {
    link: L,
    slot: usize,
    generation: u32,
    row: u32,
    out: bool,
}

impl<M: Mapping, L: Deref<Target = Link<M>>> Inside<M, L> {
    /// Ends it, and says whether the region was open all the time.
    pub fn leave(mut self) -> bool {
        self.count_out();
        // Read after the count went down, which went down after the bytes were moved: memory that was cut off before the last
        // byte is seen to be closed.
        self.is_open()
    }

    fn is_open(&self) -> bool {
        self.link.board.state(self.slot).load(Ordering::SeqCst) == self.generation
    }

    fn count_out(&mut self) {
        if std::mem::replace(&mut self.out, true) {
            return;
        }
        let count = self.link.page.inside(self.slot, self.row);
        count.fetch_sub(1, Ordering::SeqCst);
        if !self.is_open() {
            // The owner may be waiting for us. It looks again by itself if this fails.
            let _ = futex::wake(count, futex::Flags::empty(), u32::MAX);
        }
    }
}

impl<M: Mapping, L: Deref<Target = Link<M>>> Drop for Inside<M, L> {
    fn drop(&mut self) {
        self.count_out();
    }
}

impl<M: Mapping, L: Deref<Target = Link<M>>> fmt::Debug for Inside<M, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inside({}, {})", self.slot, self.generation)
    }
}

/// A question that is not over; left like that, the answer would be taken for the next one's.
struct Broken<'a, M: Mapping>(&'a Link<M>);

impl<M: Mapping> Drop for Broken<'_, M> {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// Takes an answer from its head on, and maps what is new in it.
async fn receive<M: Mapping>(wire: &RecordSocket, known: &Mapped<M>) -> Result<Mapped<M>> {
    let (head, _) = Record::receive(wire).await?;
    let mut listing = Listing::begin(head)?;
    let mut regions: Vec<Arc<MappedRegion<M>>> = Vec::new();
    let mut more = vec![[0; RECORD_LEN]; M::MORE];
    while listing.wants_more() {
        let (record, file) = Record::receive(wire).await?;
        for bytes in &mut more {
            (*bytes, _) = wire.receive().await?;
        }
        let (shown, bytes) = M::look(file, &more)?;
        let record = listing.push(record, bytes)?;
        regions.push(match known.regions.iter().find(|region| region.record == record) {
            // One of a generation is never another.
            Some(known) => known.clone(),
            None => Arc::new(MappedRegion { record, mapping: M::open(shown, bytes)? }),
        });
    }
    regions.sort_unstable_by_key(|region| region.record.addr);
    Ok(Mapped { version: listing.version(), regions })
}

fn silent() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the owner does not answer on its socket")
}

fn gone() -> Error {
    Error::new(ErrorCode::TransferFail, "the owner of the memory is gone")
}
