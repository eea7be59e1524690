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

use crate::record::{RECORD_LEN, Record, RegionRecord};
use crate::shared_words::{CopyCounters, MAX_SLOTS, SlotTable};
use crate::socket::RecordSocket;

/// Longest wait before a peer's count is checked again, because a process that dies during a copy
/// wakes no waiter.
const RECHECK_INTERVAL: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Object that contains the bytes of a region, as peers receive it.
pub trait SharedObject: Clone + fmt::Debug + Send + Sync + 'static {
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
    /// of the transport ([`Mapping::EXTRA_RECORDS`](crate::Mapping::EXTRA_RECORDS)).
    fn extra_records(&self) -> Vec<[u8; RECORD_LEN]> {
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
    unsafe fn detach(&self) -> Result<()>;
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
    slot_table: SlotTable,
    slots: Mutex<Vec<Slot<S>>>,
    peers: Mutex<Vec<Arc<PeerProcess>>>,
    /// Lock for the closing of slots, one at a time. Tasks that serve peers do not take it.
    closing: Mutex<()>,
    limits: Limits,
    /// Clock for waits on other processes, which use system time whatever the clock of the
    /// transfers.
    clock: SystemClock,
}

struct Slot<S> {
    generation: u32,
    region: Option<PublishedRegion<S>>,
    /// True if a process is stopped in the middle of a copy and may continue one day, so the slot
    /// is not used again.
    retired: bool,
}

#[derive(Clone)]
struct PublishedRegion<S> {
    span: MemorySpan,
    shared: S,
}

/// Connected peer.
#[derive(Debug)]
pub struct PeerProcess {
    pub(super) socket: Arc<RecordSocket>,
    pub(super) copy_counters: CopyCounters,
}

impl PeerProcess {
    /// Returns whether the peer touches no memory any more, whatever it has counted.
    pub(super) fn has_left<S: SharedObject>(&self) -> bool {
        if S::OUTLIVES_SOCKETS { self.socket.has_ended() } else { !self.socket.is_alive() }
    }

    /// Returns whether the peer reports a copy in progress.
    pub(super) fn is_inside(&self) -> bool {
        (0..MAX_SLOTS).any(|slot| {
            [0, 1].into_iter().any(|row| self.copy_counters.inside(slot, row).load(Ordering::SeqCst) != 0)
        })
    }
}

/// Registration of an open region. The drop closes the region, and returns when no peer touches its
/// memory any more.
#[derive(Debug)]
pub struct OpenRegion<S: SharedObject> {
    owner: Arc<Owner<S>>,
    slot: usize,
    generation: u32,
}

impl<S: SharedObject> OpenRegion<S> {
    /// Returns whether the region is still open. A region is withdrawn when a peer is stopped in
    /// the middle of a copy.
    pub fn is_open(&self) -> bool {
        self.owner.is_open(self.slot, self.generation)
    }
}

impl<S: SharedObject> Drop for OpenRegion<S> {
    fn drop(&mut self) {
        self.owner.close(self.slot, self.generation);
    }
}

impl<S: SharedObject> Owner<S> {
    /// Creates an owner without regions.
    ///
    /// # Errors
    /// Returns an error if no shared memory is available for the slot table.
    pub fn new(limits: Limits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            slot_table: SlotTable::new()?,
            slots: Mutex::default(),
            peers: Mutex::default(),
            closing: Mutex::default(),
            limits,
            clock: SystemClock::new(),
        }))
    }

    pub(super) fn max_served(&self) -> usize {
        self.limits.max_served
    }

    pub(super) fn slot_table(&self) -> &SlotTable {
        &self.slot_table
    }

    /// Opens memory to peers. Returns `None` if it overlaps another region, or if there are too
    /// many regions. The caller keeps the bytes until the result is dropped.
    pub fn open(self: &Arc<Self>, span: MemorySpan, shared: S) -> Option<OpenRegion<S>> {
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
        if slot == MAX_SLOTS {
            debug!(
                addr = span.addr(),
                "more than {MAX_SLOTS} regions: this one is not opened to peers of this host"
            );
            return None;
        }
        if slot == slots.len() {
            slots.push(Slot { generation: 0, region: None, retired: false });
        }
        let entry = &mut slots[slot];
        entry.generation = entry.generation.wrapping_add(1);
        entry.region = Some(PublishedRegion { span, shared });
        let generation = entry.generation;
        self.slot_table.state(slot).store(generation, Ordering::SeqCst);
        self.slot_table.version().fetch_add(1, Ordering::SeqCst);
        Some(OpenRegion { owner: self.clone(), slot, generation })
    }

    fn is_open(&self, slot: usize, generation: u32) -> bool {
        self.slots.lock().get(slot).is_some_and(|entry| entry.generation == generation)
    }

    /// Closes the slot, and returns when no peer touches its memory any more. The transport
    /// contract requires this, because freed space must not receive late writes. The call waits for
    /// a peer in the middle of a copy, but not for a dead one. A stalled peer keeps the file's
    /// pages, and the memory continues without the file.
    fn close(&self, slot: usize, generation: u32) {
        let _guard = self.closing.lock();
        let Some(open) = self.mark_closed(slot, generation) else { return };
        let is_stalled = self.drain(slot, &[0, 1], Some(self.limits.drain_timeout));
        if is_stalled {
            warn!(
                addr = open.span.addr(),
                "a peer is stopped in the middle of a copy: the memory is cut off from it"
            );
            self.detach(slot, &open);
        }
        self.free_slot(slot, is_stalled);
    }

    /// Closes the slot, if it is still open in that generation.
    fn mark_closed(&self, slot: usize, generation: u32) -> Option<PublishedRegion<S>> {
        let mut slots = self.slots.lock();
        let entry = slots.get_mut(slot).filter(|entry| entry.generation == generation)?;
        entry.generation = generation.wrapping_add(1);
        self.slot_table.state(slot).store(entry.generation, Ordering::SeqCst);
        self.slot_table.version().fetch_add(1, Ordering::SeqCst);
        entry.region.clone()
    }

    fn free_slot(&self, slot: usize, retired: bool) {
        if let Some(entry) = self.slots.lock().get_mut(slot) {
            entry.region = None;
            entry.retired = retired;
        }
    }

    /// Waits until the rows show no peer in a copy. Returns whether a live one remained at the end.
    fn drain(&self, slot: usize, rows: &[u32], limit: Option<Duration>) -> bool {
        let start = self.clock.now();
        for peer in self.peers() {
            for row in rows {
                let inside = peer.copy_counters.inside(slot, *row);
                loop {
                    let count = inside.load(Ordering::SeqCst);
                    if count == 0 || peer.has_left::<S>() {
                        break;
                    }
                    if limit.is_some_and(|limit| self.clock.now().since(start) >= limit) {
                        return true;
                    }
                    // The last peer to leave wakes this thread. The next iteration handles a
                    // timeout or interruption.
                    let _ = futex::wait(inside, futex::Flags::empty(), count, Some(&RECHECK_INTERVAL));
                }
            }
        }
        false
    }

    fn detach(&self, slot: usize, open: &PublishedRegion<S>) {
        // SAFETY: the registration is alive or being dropped. Until its drop ends, the memory stays
        // mapped.
        #[allow(unsafe_code)]
        let detached = unsafe { open.shared.detach() };
        if let Err(error) = detached {
            warn!(%error, "it cannot be, so the peer is waited for");
            self.drain(slot, &[0, 1], None);
        }
    }

    /// Cuts regions off from peers that have been in one copy since the previous call. Called at
    /// regular intervals, if memory can be cut off. Blocks while the other peers leave.
    pub fn detach_stalled(&self) {
        let row = self.slot_table.row().load(Ordering::SeqCst);
        // No copy has been counted in this row since the last turn.
        let old = row.wrapping_add(1);
        let open: Vec<(usize, u32)> = {
            let slots = self.slots.lock();
            let open = slots.iter().enumerate().filter(|(_, entry)| entry.region.is_some());
            open.map(|(slot, entry)| (slot, entry.generation)).collect()
        };
        for (slot, generation) in open {
            // A peer that read the row just before the change is counted correctly, and leaves
            // soon.
            if self.drain(slot, &[old], Some(self.limits.drain_timeout)) {
                self.withdraw(slot, generation);
            }
        }
        self.slot_table.row().store(old, Ordering::SeqCst);
    }

    /// Withdraws a region from this transport for good, while other users keep it.
    fn withdraw(&self, slot: usize, generation: u32) {
        // The lock is held to the end, so that the registration and its memory are not dropped
        // before.
        let _guard = self.closing.lock();
        let Some(open) = self.mark_closed(slot, generation) else { return };
        warn!(
            addr = open.span.addr(),
            "a peer is stopped in the middle of a copy: the region leaves shared memory"
        );
        self.drain(slot, &[0, 1], Some(self.limits.drain_timeout));
        self.detach(slot, &open);
        self.free_slot(slot, true);
    }

    /// Adds a new peer. Refuses it if there are too many.
    pub(super) fn add_peer(&self, socket: Arc<RecordSocket>) -> Result<Arc<PeerProcess>> {
        let peer = Arc::new(PeerProcess { socket, copy_counters: CopyCounters::new()? });
        let mut peers = self.peers.lock();
        if peers.len() >= self.limits.max_served {
            return Err(Error::invalid(format!("{} peers are served already", peers.len())));
        }
        peers.push(peer.clone());
        Ok(peer)
    }

    /// Removes a peer that has ended.
    pub(super) fn remove_peer(&self, peer: &Arc<PeerProcess>) {
        self.peers.lock().retain(|other| !Arc::ptr_eq(other, peer));
    }

    fn peers(&self) -> Vec<Arc<PeerProcess>> {
        self.peers.lock().clone()
    }

    /// Responds to a request of a peer.
    pub(super) async fn send_regions(&self, socket: &RecordSocket) -> Result<()> {
        let (version, open) = {
            let slots = self.slots.lock();
            let open: Vec<(usize, u32, PublishedRegion<S>)> = slots
                .iter()
                .enumerate()
                .filter(|(_, entry)| entry.generation % 2 == 1)
                .filter_map(|(slot, entry)| Some((slot, entry.generation, entry.region.clone()?)))
                .collect();
            (self.slot_table.version().load(Ordering::SeqCst), open)
        };
        let regions = u32::try_from(open.len()).map_err(|_| Error::invalid("too many regions"))?;
        Record::Head { regions, version }.send(socket, None).await?;
        for (slot, generation, PublishedRegion { span, shared }) in open {
            let record = RegionRecord {
                slot: u32::try_from(slot).map_err(|_| Error::invalid("too many slots"))?,
                generation,
                addr: span.addr(),
                len: span.len as u64,
                offset: shared.offset_of(span.addr()),
            };
            Record::Region(record).send(socket, shared.file()).await?;
            for record in shared.extra_records() {
                socket.send(&record, None).await?;
            }
        }
        Ok(())
    }
}

impl<S> fmt::Debug for Owner<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.slots.lock().iter().filter(|slot| slot.region.is_some()).count();
        write!(f, "Owner({open} regions, {} peers)", self.peers.lock().len())
    }
}

impl<S: SharedObject> Owner<S> {
    /// Calls [`detach_stalled`](Self::detach_stalled) at that interval for as long as the owner
    /// lives.
    pub async fn detach_stalled_regularly(owner: Weak<Self>, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            let Some(owner) = owner.upgrade() else { return };
            if owner.peers.lock().is_empty() {
                continue;
            }
            // The call waits for other processes, and a cut-off touches every page.
            if tokio::task::spawn_blocking(move || owner.detach_stalled()).await.is_err() {
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
    struct DeviceObject(u64);

    impl SharedObject for DeviceObject {
        const OUTLIVES_SOCKETS: bool = true;

        fn range(&self) -> Range<u64> {
            self.0..self.0 + 64
        }

        fn offset_of(&self, addr: u64) -> u64 {
            addr - self.0
        }

        #[allow(unsafe_code)]
        unsafe fn detach(&self) -> Result<()> {
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
        let (own_end, peer_end) = UnixStream::pair().unwrap();
        // The other end is this process, which is alive.
        let peer = owner.add_peer(Arc::new(RecordSocket::new(own_end, Trust::SameUser).unwrap())).unwrap();
        let memory = MemorySpan::new(NonNull::<u64>::dangling().cast(), 64);
        let region = owner.open(memory, DeviceObject(memory.addr())).unwrap();
        peer.copy_counters.inside(0, 0).fetch_add(1, Ordering::SeqCst);
        drop(peer_end);
        assert!(!peer.socket.is_alive() && peer.is_inside());
        let (closed_sender, closed) = std::sync::mpsc::channel();
        let closing = std::thread::spawn(move || {
            drop(region);
            let _ = closed_sender.send(());
        });
        assert!(
            closed.recv_timeout(Duration::from_millis(100)).is_err(),
            "let go of in the middle of a copy"
        );
        peer.copy_counters.inside(0, 0).fetch_sub(1, Ordering::SeqCst);
        closed.recv().unwrap();
        closing.join().unwrap();
    }
}
