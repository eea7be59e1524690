//! What a node has opened to peers of its host, and how it is closed again.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::memory::{MemorySpan, SharedPages, shared_pages};
use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use rustix::thread::futex;
use tracing::{debug, warn};

use crate::config::ShmConfig;
use crate::record::{Record, RegionRecord};
use crate::socket::RecordSocket;
use crate::words::{Board, Page, SLOTS};

/// Longest wait before a peer's count is looked at again: whoever dies inside wakes nobody.
const LOOK_AGAIN: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// The regions of a node and the peers that map them.
pub(crate) struct Owner {
    board: Board,
    slots: Mutex<Vec<Slot>>,
    visitors: Mutex<Vec<Arc<Visitor>>>,
    /// One slot is shut and emptied at a time; not held by those who serve peers.
    closing: Mutex<()>,
    drain_timeout: Duration,
    max_served: usize,
    /// For waiting on other processes, which is done in the machine's time whatever clock transfers are measured on.
    clock: SystemClock,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    region: Option<Open>,
    /// Somebody is stopped in the middle of a copy and may go on one day: the slot is not used again.
    retired: bool,
}

#[derive(Clone, Debug)]
struct Open {
    span: MemorySpan,
    pages: SharedPages,
}

/// A peer of ours.
#[derive(Debug)]
pub(crate) struct Visitor {
    pub(crate) wire: Arc<RecordSocket>,
    pub(crate) page: Page,
}

/// Memory a [`ShmTransport`](crate::ShmTransport) knows of. Closed to peers when it is dropped.
#[derive(Debug)]
pub struct Registration {
    seat: Option<Seat>,
}

#[derive(Debug)]
struct Seat {
    owner: Arc<Owner>,
    slot: usize,
    generation: u32,
}

impl Registration {
    /// Of memory that peers do not reach on this wire.
    pub(crate) fn closed() -> Self {
        Self { seat: None }
    }

    /// Whether peers of this host can reach it: it is open to them, in shared memory, and there was a slot for it.
    pub fn is_reachable(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| seat.owner.is_open(seat.slot, seat.generation))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.owner.close(self.slot, self.generation);
    }
}

impl Owner {
    pub(crate) fn new(config: &ShmConfig) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            board: Board::new()?,
            slots: Mutex::default(),
            visitors: Mutex::default(),
            closing: Mutex::default(),
            drain_timeout: config.drain_timeout,
            max_served: config.max_served,
            clock: SystemClock::new(),
        }))
    }

    pub(crate) fn board(&self) -> &Board {
        &self.board
    }

    /// Opens memory to peers, if it is shared and its pages are not another region's too. The caller keeps the bytes until the
    /// registration is dropped.
    pub(crate) fn open(self: &Arc<Self>, span: MemorySpan) -> Registration {
        let Some(pages) = shared_pages(span) else { return Registration::closed() };
        let mut slots = self.slots.lock();
        let range = pages.range();
        let others = slots.iter().filter_map(|slot| slot.region.as_ref()).map(|open| open.pages.range());
        // Pages are cut off from their file as a whole, so two regions never have one in common.
        if others.into_iter().any(|other| range.start < other.end && other.start < range.end) {
            debug!(addr = span.addr(), "a region in pages of another one is not reached by shared memory");
            return Registration::closed();
        }
        let free = slots.iter().position(|slot| slot.region.is_none() && !slot.retired);
        let slot = free.unwrap_or(slots.len());
        if slot == SLOTS {
            debug!(addr = span.addr(), "more than {SLOTS} regions: this one is not reached by shared memory");
            return Registration::closed();
        }
        if slot == slots.len() {
            slots.push(Slot::default());
        }
        let seat = &mut slots[slot];
        seat.generation = seat.generation.wrapping_add(1);
        seat.region = Some(Open { span, pages });
        let generation = seat.generation;
        self.board.state(slot).store(generation, Ordering::SeqCst);
        self.board.version().fetch_add(1, Ordering::SeqCst);
        Registration { seat: Some(Seat { owner: self.clone(), slot, generation }) }
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
        let stuck = self.drain(slot, &[0, 1], Some(self.drain_timeout));
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
    fn refuse(&self, slot: usize, generation: u32) -> Option<Open> {
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
                    if count == 0 || !visitor.wire.is_alive() {
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

    fn cut_off(&self, slot: usize, open: &Open) {
        // SAFETY: the registration is being dropped or alive; until it has been dropped, the memory stays mapped.
        #[allow(unsafe_code)]
        let cut = unsafe { open.pages.make_private() };
        if let Err(error) = cut {
            warn!(%error, "it cannot be, so the peer is waited for");
            self.drain(slot, &[0, 1], None);
        }
    }

    /// Called at regular intervals: cuts regions off from peers that have been in one copy since the call before. Blocks while
    /// the others leave.
    pub(crate) fn turn(&self) {
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
            if self.drain(slot, &[old], Some(self.drain_timeout)) {
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
        self.drain(slot, &[0, 1], Some(self.drain_timeout));
        self.cut_off(slot, &open);
        self.vacate(slot, true);
    }

    /// Lists a new peer; refused when there are too many.
    pub(crate) fn admit(&self, wire: Arc<RecordSocket>) -> Result<Arc<Visitor>> {
        let visitor = Arc::new(Visitor { wire, page: Page::new()? });
        let mut visitors = self.visitors.lock();
        if visitors.len() >= self.max_served {
            return Err(Error::invalid(format!("{} peers are served already", visitors.len())));
        }
        visitors.push(visitor.clone());
        Ok(visitor)
    }

    /// Forgets a peer that is gone.
    pub(crate) fn dismiss(&self, visitor: &Arc<Visitor>) {
        self.visitors.lock().retain(|other| !Arc::ptr_eq(other, visitor));
    }

    fn visitors(&self) -> Vec<Arc<Visitor>> {
        self.visitors.lock().clone()
    }

    /// Answers a peer that asked.
    pub(crate) async fn answer(&self, wire: &RecordSocket) -> Result<()> {
        let (version, open) = {
            let slots = self.slots.lock();
            let open: Vec<(usize, u32, Open)> = slots
                .iter()
                .enumerate()
                .filter(|(_, seat)| seat.generation % 2 == 1)
                .filter_map(|(slot, seat)| Some((slot, seat.generation, seat.region.clone()?)))
                .collect();
            (self.board.version().load(Ordering::SeqCst), open)
        };
        let regions = u32::try_from(open.len()).map_err(|_| Error::invalid("too many regions"))?;
        Record::Head { regions, version }.send(wire, None).await?;
        for (slot, generation, Open { span, pages }) in open {
            let record = RegionRecord {
                slot: u32::try_from(slot).map_err(|_| Error::invalid("too many slots"))?,
                generation,
                addr: span.addr(),
                len: span.len as u64,
                offset: pages.offset_of(span.addr()),
            };
            Record::Region(record).send(wire, Some(pages.file().as_fd())).await?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let open = self.slots.lock().iter().filter(|slot| slot.region.is_some()).count();
        write!(f, "Owner({open} regions, {} peers)", self.visitors.lock().len())
    }
}

/// Calls [`Owner::turn`] at that interval for as long as the owner lives.
pub(crate) async fn keep_turning(owner: Weak<Owner>, interval: Duration) {
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
