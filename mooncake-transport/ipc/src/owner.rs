//! Memory that a node has opened to peers of its host, and its closing.

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

use crate::board::{Board, Page, SLOTS};
use crate::record::{RECORD_LEN, Record, RegionRecord};
use crate::socket::RecordSocket;

/// Longest wait before a peer's count is checked again, because a process that dies during a copy
/// wakes no waiter.
const LOOK_AGAIN: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Object that contains the bytes of a region, as peers receive it.
pub trait Shared: Clone + fmt::Debug + Send + Sync + 'static {
    /// True if a device copies for a peer. Such copies continue until the peer's process has ended,
    /// some time after a kill closes its socket.
    const OUTLIVES_SOCKETS: bool = false;

    /// Returns the addresses that no other open region may share.
    fn range(&self) -> Range<u64>;

    /// Returns the offset of an address in the object.
    fn offset_of(&self, addr: u64) -> u64;

    /// Returns the file, if the object is one.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the records that follow the record of a region in the object. Their number is that
    /// of the transport ([`Mapping::MORE`](crate::Mapping::MORE)).
    fn more(&self) -> Vec<[u8; RECORD_LEN]> {
        Vec::new()
    }

    /// Detaches the memory from the mappings of peers.
    ///
    /// # Errors
    /// Returns an error if that is impossible. The caller then waits for the peers.
    ///
    /// # Safety
    /// The memory is still mapped.
    #[allow(unsafe_code)]
    unsafe fn cut_off(&self) -> Result<()>;
}

/// Limits of an owner.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time that the closing of a region waits for the copies of a stalled peer, before the memory
    /// is cut off from it.
    pub drain_timeout: Duration,
    /// Maximum number of connected peers. Further ones are refused.
    pub max_served: usize,
}

/// Regions of a node, and the peers that map them.
pub struct Owner<S> {
    board: Board,
    slots: Mutex<Vec<Slot<S>>>,
    visitors: Mutex<Vec<Arc<Visitor>>>,
    /// Lock for the closing of slots, one at a time. Tasks that serve peers do not take it.
    closing: Mutex<()>,
    limits: Limits,
    /// Clock for waits on other processes, which use system time whatever the clock of the
    /// transfers.
    clock: SystemClock,
}

struct Slot<S> {
    generation: u32,
    region: Option<Open<S>>,
    /// True if a process is stopped in the middle of a copy and may continue one day, so the slot
    /// is not used again.
    retired: bool,
}

#[derive(Clone)]
struct Open<S> {
    span: MemorySpan,
    shared: S,
}

/// Connected peer.
#[derive(Debug)]
pub struct Visitor {
    pub(super) wire: Arc<RecordSocket>,
    pub(super) page: Page,
}

impl Visitor {
    /// Returns whether the peer touches no memory any more, whatever it has counted.
    pub(super) fn is_gone<S: Shared>(&self) -> bool {
        if S::OUTLIVES_SOCKETS { self.wire.has_ended() } else { !self.wire.is_alive() }
    }

    /// Returns whether the peer reports a copy in progress.
    pub(super) fn is_inside(&self) -> bool {
        (0..SLOTS)
            .any(|slot| [0, 1].into_iter().any(|row| self.page.inside(slot, row).load(Ordering::SeqCst) != 0))
    }
}

/// Registration of an open region. The drop closes the region, and returns when no peer touches its
/// memory any more.
#[derive(Debug)]
pub struct Seat<S: Shared> {
    owner: Arc<Owner<S>>,
    slot: usize,
    generation: u32,
}

impl<S: Shared> Seat<S> {
    /// Returns whether the region is still open. A region is withdrawn when a peer is stopped in
    /// the middle of a copy.
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
    /// Creates an owner without regions.
    ///
    /// # Errors
    /// Returns an error if no shared memory is available for the board.
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

    /// Opens memory to peers. Returns `None` if it overlaps another region, or if there are too
    /// many regions. The caller keeps the bytes until the result is dropped.
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

    /// Closes the slot, and returns when no peer touches its memory any more. The transport
    /// contract requires this, because freed space must not receive late writes. The call waits for
    /// a peer in the middle of a copy, but not for a dead one. A stalled peer keeps the file's
    /// pages, and the memory continues without the file.
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

    /// Closes the slot, if it is still open in that generation.
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

    /// Waits until the rows show no peer in a copy. Returns whether a live one remained at the end.
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
                    // The last peer to leave wakes this thread. The next iteration handles a
                    // timeout or interruption.
                    let _ = futex::wait(inside, futex::Flags::empty(), count, Some(&LOOK_AGAIN));
                }
            }
        }
        false
    }

    fn cut_off(&self, slot: usize, open: &Open<S>) {
        // SAFETY: the registration is alive or being dropped. Until its drop ends, the memory stays
        // mapped.
        #[allow(unsafe_code)]
        let cut = unsafe { open.shared.cut_off() };
        if let Err(error) = cut {
            warn!(%error, "it cannot be, so the peer is waited for");
            self.drain(slot, &[0, 1], None);
        }
    }

    /// Cuts regions off from peers that have been in one copy since the previous call. Called at
    /// regular intervals, if memory can be cut off. Blocks while the other peers leave.
    pub fn turn(&self) {
        let row = self.board.row().load(Ordering::SeqCst);
        // No copy has been counted in this row since the last turn.
        let old = row.wrapping_add(1);
        let open: Vec<(usize, u32)> = {
            let slots = self.slots.lock();
            let open = slots.iter().enumerate().filter(|(_, seat)| seat.region.is_some());
            open.map(|(slot, seat)| (slot, seat.generation)).collect()
        };
        for (slot, generation) in open {
            // A peer that read the row just before the change is counted correctly, and leaves
            // soon.
            if self.drain(slot, &[old], Some(self.limits.drain_timeout)) {
                self.withdraw(slot, generation);
            }
        }
        self.board.row().store(old, Ordering::SeqCst);
    }

    /// Withdraws a region from this transport for good, while other users keep it.
    fn withdraw(&self, slot: usize, generation: u32) {
        // The lock is held to the end, so that the registration and its memory are not dropped
        // before.
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

    /// Adds a new peer. Refuses it if there are too many.
    pub(super) fn admit(&self, wire: Arc<RecordSocket>) -> Result<Arc<Visitor>> {
        let visitor = Arc::new(Visitor { wire, page: Page::new()? });
        let mut visitors = self.visitors.lock();
        if visitors.len() >= self.limits.max_served {
            return Err(Error::invalid(format!("{} peers are served already", visitors.len())));
        }
        visitors.push(visitor.clone());
        Ok(visitor)
    }

    /// Removes a peer that has ended.
    pub(super) fn dismiss(&self, visitor: &Arc<Visitor>) {
        self.visitors.lock().retain(|other| !Arc::ptr_eq(other, visitor));
    }

    fn visitors(&self) -> Vec<Arc<Visitor>> {
        self.visitors.lock().clone()
    }

    /// Responds to a request of a peer.
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
            // The call waits for other processes, and a cut-off touches every page.
            if tokio::task::spawn_blocking(move || owner.turn()).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::Trust;
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

    /// The kernel closes a killed process's sockets before its devices stop. The memory is not
    /// released in between.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    #[cfg_attr(miri, ignore = "no sockets there")]
    async fn a_closed_socket_is_not_the_end_of_a_devices_copies() {
        let limits = Limits { drain_timeout: Duration::from_millis(1), max_served: 1 };
        let owner = Owner::new(limits).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        // The other end is this process, which is alive.
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
