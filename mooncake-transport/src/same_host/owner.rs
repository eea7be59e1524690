//! What a node has opened to peers of its host, and how it is closed again.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use rustix::thread::futex;
use tracing::{debug, warn};

use super::record::{RECORD_LEN, Record, RegionRecord};
use super::socket::RecordSocket;
use super::words::{Board, Page, SLOTS};

/// Longest wait before a peer's count is looked at again: whoever dies inside wakes nobody.
const LOOK_AGAIN: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// What the bytes of a region lie in, as peers are given it.
pub trait Shared: Clone + fmt::Debug + Send + Sync + 'static {
    /// Whether it is a device that copies for a peer. Such copies go on until the peer's process has ended, some time after its socket is closed when it is killed.
    const OUTLIVES_SOCKETS: bool = false;

    /// Addresses that no other open region may have in common with this one.
    fn range(&self) -> Range<u64>;

    /// Where in it an address lies.
    fn offset_of(&self, addr: u64) -> u64;

    /// The file it is, if it is one.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// What follows the record of a region in it: as many as the wire's peers expect ([`Mapping::MORE`](super::Mapping::MORE)).
    fn more(&self) -> Vec<[u8; RECORD_LEN]> {
        Vec::new()
    }

    /// Has the memory go on without what peers have mapped of it.
    ///
    /// # Errors
    /// It cannot be: then peers are waited for.
    ///
    /// # Safety
    /// The memory is still there.
    #[allow(unsafe_code)]
    unsafe fn cut_off(&self) -> Result<()>;
}

/// How an owner deals with peers.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long closing a region waits for copies of a peer that does not get on, before the memory is cut off from it.
    pub drain_timeout: Duration,
    /// Peers served at a time; further ones are refused.
    pub max_served: usize,
}

/// The regions of a node and the peers that map them.
pub struct Owner<S> {
    board: Board,
    slots: Mutex<Vec<Slot<S>>>,
    visitors: Mutex<Vec<Arc<Visitor>>>,
    /// One slot is shut and emptied at a time; not held by those who serve peers.
    closing: Mutex<()>,
    limits: Limits,
    /// For waiting on other processes, which is done in the machine's time whatever clock transfers are measured on.
    clock: SystemClock,
}

struct Slot<S> {
    generation: u32,
    region: Option<Open<S>>,
    /// Somebody is stopped in the middle of a copy and may go on one day: the slot is not used again.
    retired: bool,
}

#[derive(Clone)]
struct Open<S> {
    span: MemorySpan,
    shared: S,
}

/// A peer of ours.
#[derive(Debug)]
pub struct Visitor {
    pub(super) wire: Arc<RecordSocket>,
    pub(super) page: Page,
}

impl Visitor {
    /// Whether it touches nothing any more, whatever it has counted.
    pub(super) fn is_gone<S: Shared>(&self) -> bool {
        if S::OUTLIVES_SOCKETS { self.wire.has_ended() } else { !self.wire.is_alive() }
    }

    /// Whether it says that it is in the middle of a copy.
    pub(super) fn is_inside(&self) -> bool {
        (0..SLOTS)
            .any(|slot| [0, 1].into_iter().any(|row| self.page.inside(slot, row).load(Ordering::SeqCst) != 0))
    }
}

/// An open region's place. Dropping it closes the region, and returns when no peer touches its memory any more.
#[derive(Debug)]
pub struct Seat<S: Shared> {
    owner: Arc<Owner<S>>,
    slot: usize,
    generation: u32,
}

impl<S: Shared> Seat<S> {
    /// Whether it is open still: a region is taken off the wire when a peer is stopped in the middle of a copy.
    pub fn is_open(&self) -> bool {
        self.owner.is_open(self.slot, self.generation)
    }
}

impl<S: Shared> Drop for Seat<S> {
    fn drop(&mut self) {
        self.owner.close(self.slot, self.generation);
    }
}

impl<S: Shared> Owner<S> {
    /// One without regions.
    ///
    /// # Errors
    /// No shared memory for the board.
    pub fn new(limits: Limits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            board: Board::new()?,
            slots: Mutex::default(),
            visitors: Mutex::default(),
            closing: Mutex::default(),
            limits,
            clock: SystemClock::new(),
        }))
    }

    pub(super) fn max_served(&self) -> usize {
        self.limits.max_served
    }

    pub(super) fn board(&self) -> &Board {
        &self.board
    }

    /// Opens memory to peers; `None` when it has addresses in common with another region, or there are too many. The caller keeps the bytes until the seat is
    /// dropped.
    pub fn open(self: &Arc<Self>, span: MemorySpan, shared: S) -> Option<Seat<S>> {
        let mut slots = self.slots.lock();
        let range = shared.range();
        let others = slots.iter().filter_map(|slot| slot.region.as_ref()).map(|open| open.shared.range());
        if others.into_iter().any(|other| range.start < other.end && other.start < range.end) {
            debug!(
                addr = span.addr(),
                "a region in what is another's too is not opened to peers of this host"
            );
            return None;
        }
        let free = slots.iter().position(|slot| slot.region.is_none() && !slot.retired);
        let slot = free.unwrap_or(slots.len());
        if slot == SLOTS {
            debug!(
                addr = span.addr(),
                "more than {SLOTS} regions: this one is not opened to peers of this host"
            );
            return None;
        }
        if slot == slots.len() {
            slots.push(Slot { generation: 0, region: None, retired: false });
        }
        let seat = &mut slots[slot];
        seat.generation = seat.generation.wrapping_add(1);
        seat.region = Some(Open { span, shared });
        let generation = seat.generation;
        self.board.state(slot).store(generation, Ordering::SeqCst);
        self.board.version().fetch_add(1, Ordering::SeqCst);
        Some(Seat { owner: self.clone(), slot, generation })
    }

    fn is_open(&self, slot: usize, generation: u32) -> bool {
        self.slots.lock().get(slot).is_some_and(|seat| seat.generation == generation)
    }

    /// Refuses the slot from now on, and returns when no peer touches its memory any more. That is contract: space is not
    /// handed out again while somebody could still write to it. A peer that is inside is waited for; one that is dead is not; one
    /// that does not get on keeps the file's pages to itself, and the memory goes on without the file.
    fn close(&self, slot: usize, generation: u32) {
        let _turn = self.closing.lock();
        let Some(open) = self.refuse(slot, generation) else { return };
        let stuck = self.drain(slot, &[0, 1], Some(self.limits.drain_timeout));
        if stuck {
            warn!(
                addr = open.span.addr(),
                "a peer is stopped in the middle of a copy: the memory is cut off from it"
            );
            self.cut_off(slot, &open);
        }
        self.vacate(slot, stuck);
    }

    /// Shuts the slot, if it is still open in that generation.
    fn refuse(&self, slot: usize, generation: u32) -> Option<Open<S>> {
        let mut slots = self.slots.lock();
        let seat = slots.get_mut(slot).filter(|seat| seat.generation == generation)?;
        seat.generation = generation.wrapping_add(1);
        self.board.state(slot).store(seat.generation, Ordering::SeqCst);
        self.board.version().fetch_add(1, Ordering::SeqCst);
        seat.region.clone()
    }

    fn vacate(&self, slot: usize, retired: bool) {
        if let Some(seat) = self.slots.lock().get_mut(slot) {
            seat.region = None;
            seat.retired = retired;
        }
    }

    /// Waits until no peer is inside, as far as those rows say, and tells whether one that lives still was at the end.
    fn drain(&self, slot: usize, rows: &[u32], limit: Option<Duration>) -> bool {
        let start = self.clock.now();
        for visitor in self.visitors() {
            for row in rows {
                let inside = visitor.page.inside(slot, *row);
                loop {
                    let count = inside.load(Ordering::SeqCst);
                    if count == 0 || visitor.is_gone::<S>() {
                        break;
                    }
                    if limit.is_some_and(|limit| self.clock.now().since(start) >= limit) {
                        return true;
                    }
                    // Woken by the last one to leave; time-out and interruption are seen at the next look.
                    let _ = futex::wait(inside, futex::Flags::empty(), count, Some(&LOOK_AGAIN));
                }
            }
        }
        false
    }

    fn cut_off(&self, slot: usize, open: &Open<S>) {
        // SAFETY: the registration is being dropped or alive; until it has been dropped, the memory stays mapped.
        #[allow(unsafe_code)]
        let cut = unsafe { open.shared.cut_off() };
        if let Err(error) = cut {
            warn!(%error, "it cannot be, so the peer is waited for");
            self.drain(slot, &[0, 1], None);
        }
    }

    /// To be called at regular intervals, where memory can be cut off: cuts regions off from peers that have been in one copy since the call before. Blocks while
    /// the others leave.
    pub fn turn(&self) {
        let row = self.board.row().load(Ordering::SeqCst);
        // Nobody has been counted in this row since the last turn.
        let old = row.wrapping_add(1);
        let open: Vec<(usize, u32)> = {
            let slots = self.slots.lock();
            let open = slots.iter().enumerate().filter(|(_, seat)| seat.region.is_some());
            open.map(|(slot, seat)| (slot, seat.generation)).collect()
        };
        for (slot, generation) in open {
            // Who looked at the row just before it was changed is there rightly, and soon gone.
            if self.drain(slot, &[old], Some(self.limits.drain_timeout)) {
                self.withdraw(slot, generation);
            }
        }
        self.board.row().store(old, Ordering::SeqCst);
    }

    /// Takes a region off this wire for good, while it goes on to be used otherwise.
    fn withdraw(&self, slot: usize, generation: u32) {
        // Held to the end: the registration is not dropped, and its memory with it, before we are through.
        let _turn = self.closing.lock();
        let Some(open) = self.refuse(slot, generation) else { return };
        warn!(
            addr = open.span.addr(),
            "a peer is stopped in the middle of a copy: the region leaves shared memory"
        );
        self.drain(slot, &[0, 1], Some(self.limits.drain_timeout));
        self.cut_off(slot, &open);
        self.vacate(slot, true);
    }

    /// Lists a new peer; refused when there are too many.
    pub(super) fn admit(&self, wire: Arc<RecordSocket>) -> Result<Arc<Visitor>> {
        let visitor = Arc::new(Visitor { wire, page: Page::new()? });
        let mut visitors = self.visitors.lock();
        if visitors.len() >= self.limits.max_served {
            return Err(Error::invalid(format!("{} peers are served already", visitors.len())));
        }
        visitors.push(visitor.clone());
        Ok(visitor)
    }

    /// Forgets a peer that is gone.
    pub(super) fn dismiss(&self, visitor: &Arc<Visitor>) {
        self.visitors.lock().retain(|other| !Arc::ptr_eq(other, visitor));
    }

    fn visitors(&self) -> Vec<Arc<Visitor>> {
        self.visitors.lock().clone()
    }

    /// Answers a peer that asked.
    pub(super) async fn answer(&self, wire: &RecordSocket) -> Result<()> {
        let (version, open) = {
            let slots = self.slots.lock();
            let open: Vec<(usize, u32, Open<S>)> = slots
                .iter()
                .enumerate()
                .filter(|(_, seat)| seat.generation % 2 == 1)
                .filter_map(|(slot, seat)| Some((slot, seat.generation, seat.region.clone()?)))
                .collect();
            (self.board.version().load(Ordering::SeqCst), open)
        };
        let regions = u32::try_from(open.len()).map_err(|_| Error::invalid("too many regions"))?;
        Record::Head { regions, version }.send(wire, None).await?;
        for (slot, generation, Open { span, shared }) in open {
            let record = RegionRecord {
                slot: u32::try_from(slot).map_err(|_| Error::invalid("too many slots"))?,
                generation,
                addr: span.addr(),
                len: span.len as u64,
                offset: shared.offset_of(span.addr()),
            };
            Record::Region(record).send(wire, shared.file()).await?;
            for more in shared.more() {
                wire.send(&more, None).await?;
            }
        }
        Ok(())
    }
}

impl<S> fmt::Debug for Owner<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.slots.lock().iter().filter(|slot| slot.region.is_some()).count();
        write!(f, "Owner({open} regions, {} peers)", self.visitors.lock().len())
    }
}

impl<S: Shared> Owner<S> {
    /// Calls [`turn`](Self::turn) at that interval for as long as the owner lives.
    pub async fn keep_turning(owner: Weak<Self>, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            let Some(owner) = owner.upgrade() else { return };
            if owner.visitors.lock().is_empty() {
                continue;
            }
            // It waits for other processes, and a cut-off touches every page.
            if tokio::task::spawn_blocking(move || owner.turn()).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::Trust;
    use super::*;
    use std::ptr::NonNull;
    use tokio::net::UnixStream;

    #[derive(Clone, Debug)]
    struct OnDevice(u64);

    impl Shared for OnDevice {
        const OUTLIVES_SOCKETS: bool = true;

        fn range(&self) -> Range<u64> {
            self.0..self.0 + 64
        }

        fn offset_of(&self, addr: u64) -> u64 {
            addr - self.0
        }

        #[allow(unsafe_code)]
        unsafe fn cut_off(&self) -> Result<()> {
            Err(Error::invalid("a device's memory"))
        }
    }

    /// The kernel closes a killed process's sockets before its devices are stopped: memory is not let go of in between.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    #[cfg_attr(miri, ignore = "no sockets there")]
    async fn a_closed_socket_is_not_the_end_of_a_devices_copies() {
        let limits = Limits { drain_timeout: Duration::from_millis(1), max_served: 1 };
        let owner = Owner::new(limits).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        // The other end is this process, which lives.
        let visitor = owner.admit(Arc::new(RecordSocket::new(ours, Trust::SameUser).unwrap())).unwrap();
        let memory = MemorySpan::new(NonNull::<u64>::dangling().cast(), 64);
        let seat = owner.open(memory, OnDevice(memory.addr())).unwrap();
        visitor.page.inside(0, 0).fetch_add(1, Ordering::SeqCst);
        drop(theirs);
        assert!(!visitor.wire.is_alive() && visitor.is_inside());
        let (tell, told) = std::sync::mpsc::channel();
        let closing = std::thread::spawn(move || {
            drop(seat);
            let _ = tell.send(());
        });
        assert!(told.recv_timeout(Duration::from_millis(100)).is_err(), "let go of in the middle of a copy");
        visitor.page.inside(0, 0).fetch_sub(1, Ordering::SeqCst);
        told.recv().unwrap();
        closing.join().unwrap();
    }
}
