//! State of one shared client in the daemon: its memory, connections and located objects.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::socket::sealed;
use mooncake_protocol::message::ShareMemory;
use mooncake_protocol::wire::MemoryRange;
use mooncake_transport::{Region, Transport};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use super::server_config::LocalStats;
use crate::located::Located;
use crate::state::Client;

/// Maximum number of objects that one shared client has located; beyond it, the oldest are removed.
const MAX_LOCATED: usize = 1 << 16;
/// Maximum number of memory blocks of one shared client.
const MAX_MEMORIES: usize = 1 << 14;

pub(super) struct Guest<T: Transport> {
    process: Option<i32>,
    pub(super) user: Option<u32>,
    memories: RwLock<Memories<T>>,
    located: Mutex<Locations>,
    connections: AtomicUsize,
    calls: AtomicUsize,
    left: watch::Sender<bool>,
}

struct Memories<T: Transport> {
    by_number: HashMap<u32, Region<T>>,
    bytes: u64,
    /// True once the shared client is gone; no more memory is accepted then.
    over: bool,
}

/// Located objects by consecutive, increasing number.
struct Locations {
    first: u64,
    objects: VecDeque<Located>,
}

impl<T: Transport> Guest<T> {
    /// Creates the state of a shared client. `first` is the number of the first object that it
    /// locates. The caller chooses `first` such that the numbers of different shared clients do not
    /// overlap.
    pub(super) fn new(process: Option<i32>, user: Option<u32>, first: u64) -> Self {
        Self {
            process,
            user,
            memories: RwLock::new(Memories { by_number: HashMap::new(), bytes: 0, over: false }),
            located: Mutex::new(Locations { first, objects: VecDeque::new() }),
            connections: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            left: watch::Sender::new(false),
        }
    }

    /// Returns the process identifier, or 0 if the kernel does not report it.
    pub(super) fn process(&self) -> i32 {
        self.process.unwrap_or(0)
    }

    pub(super) fn count(&self, stats: &mut LocalStats) {
        let memories = self.memories.read();
        stats.memories += memories.by_number.len();
        stats.bytes += memories.bytes;
        stats.connections += self.connections.load(Ordering::Relaxed);
        stats.calls += self.calls.load(Ordering::Relaxed);
    }

    /// Maps the file of a memory block and registers the mapping with the transports.
    pub(super) fn share(
        &self,
        client: &Client<T>,
        max: u64,
        &ShareMemory { memory: number, offset, len, .. }: &ShareMemory,
        file: Option<OwnedFd>,
    ) -> Result<()> {
        let mut memories = self.memories.write();
        if memories.bytes.checked_add(len).is_none_or(|sum| sum > max)
            || memories.by_number.len() >= MAX_MEMORIES
        {
            let text = format!(
                "the memory this process shares with mooncake_client would come to more than {max} bytes (--max_client_memory)"
            );
            return Err(Error::new(ErrorCode::NoAvailableHandle, text));
        }
        let map = || {
            if memories.over || memories.by_number.contains_key(&number) {
                return Err(Error::invalid(format!("memory {number} is there already")));
            }
            let len = usize::try_from(len).map_err(|_| Error::invalid("memory that is not addressable"))?;
            let memory = HostMemory::map_file(&sealed(file)?, offset, len)?;
            client.memory().register(Arc::new(memory))
        };
        let region = map().inspect_err(|error| {
            tracing::warn!(process = self.process(), %error, "memory of a local process is refused");
        })?;
        memories.by_number.insert(number, region);
        memories.bytes += len;
        Ok(())
    }

    /// Removes a memory block. The mapping ends when the last transfer that uses it has ended.
    pub(super) fn unshare(&self, number: u32) {
        let mut memories = self.memories.write();
        if let Some(gone) = memories.by_number.remove(&number) {
            memories.bytes -= gone.len() as u64;
        }
    }

    /// Returns the region that contains a memory range, and the range within the region.
    pub(super) fn range(&self, place: MemoryRange) -> Result<(Region<T>, std::ops::Range<usize>)> {
        let nowhere = || {
            Error::invalid(format!(
                "{} bytes from {} of memory {} are not shared",
                place.len, place.offset, place.memory
            ))
        };
        let region = self.memories.read().by_number.get(&place.memory).cloned().ok_or_else(nowhere)?;
        let end =
            place.offset.checked_add(place.len).filter(|end| *end <= region.len() as u64 && place.len > 0);
        match (usize::try_from(place.offset), end.map(usize::try_from)) {
            (Ok(start), Some(Ok(end))) => Ok((region, start..end)),
            _ => Err(nowhere()),
        }
    }

    /// Stores a located object and returns its number.
    pub(super) fn keep(&self, object: Located) -> u64 {
        let mut located = self.located.lock();
        if located.objects.len() >= MAX_LOCATED {
            located.objects.pop_front();
            located.first += 1;
        }
        located.objects.push_back(object);
        located.first + located.objects.len() as u64 - 1
    }

    /// Returns the located object of that number.
    ///
    /// # Errors
    /// Returns `LEASE_EXPIRED` if the object was removed from the list, or was located through
    /// another daemon.
    pub(super) fn located(&self, number: u64) -> Result<Located> {
        let located = self.located.lock();
        let at = number.checked_sub(located.first).and_then(|at| usize::try_from(at).ok());
        let object = at.and_then(|at| located.objects.get(at).cloned());
        object.ok_or_else(|| {
            let text = "the object was located too long ago: another mooncake_client serves now, or too many were since";
            Error::new(ErrorCode::LeaseExpired, text)
        })
    }

    /// Admits one more connection, within the limit `max`.
    pub(super) fn admit_connection(self: Arc<Self>, max: u32) -> Result<Seat<T>> {
        let taken = self.connections.fetch_add(1, Ordering::AcqRel);
        let seat = Seat { guest: self };
        if taken >= max as usize {
            let text = format!("{max} calls of this process are under way already (--max_client_requests)");
            return Err(Error::new(ErrorCode::NoAvailableHandle, text));
        }
        Ok(seat)
    }

    /// Ends the service of the shared client. Its connections close after the calls in progress,
    /// and its memory is unmapped after the last transfer.
    pub(super) fn leave(&self) {
        self.left.send_replace(true);
        let mut memories = self.memories.write();
        memories.over = true;
        memories.bytes = 0;
        let gone = std::mem::take(&mut memories.by_number);
        drop(memories);
        // Unmapping is slow, so it happens outside the lock.
        drop(gone);
        self.located.lock().objects.clear();
    }
}

/// Connection for calls of a shared client.
pub(super) struct Seat<T: Transport> {
    pub(super) guest: Arc<Guest<T>>,
}

impl<T: Transport> Seat<T> {
    /// Returns a flag that becomes true when the shared client is gone.
    pub(super) fn left(&self) -> watch::Receiver<bool> {
        self.guest.left.subscribe()
    }

    /// Counts a call for as long as the returned value lives.
    pub(super) fn call(&self) -> Call<'_, T> {
        self.guest.calls.fetch_add(1, Ordering::AcqRel);
        Call(&self.guest)
    }
}

impl<T: Transport> Drop for Seat<T> {
    fn drop(&mut self) {
        self.guest.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(super) struct Call<'a, T: Transport>(&'a Guest<T>);

impl<T: Transport> Drop for Call<'_, T> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::AcqRel);
    }
}
