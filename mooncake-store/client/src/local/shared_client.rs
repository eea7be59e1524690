//! State of one shared client in the daemon: its memory, connections and located objects.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::socket::sealed;
use mooncake_protocol::message::ShareMemory;
use mooncake_protocol::wire::MemoryRange;
use mooncake_transport::{Region, Transport};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::server_config::LocalStats;
use crate::located::Located;
use crate::state::Client;

/// Maximum number of objects that one shared client has located; beyond it, the oldest are removed.
const MAX_LOCATED: usize = 1 << 16;
/// Interval between two removals of objects whose leases have ended.
const REMOVAL_INTERVAL: Duration = Duration::from_secs(10);
/// Time after its lease for which a located object can be located again, by the call that has
/// located it.
const RELOCATION_TIME: Duration = Duration::from_secs(20);
/// Maximum number of memory blocks of one shared client.
const MAX_MEMORIES: usize = 1 << 14;
/// Maximum time for which a connection waits for a permit. The shared client waits for a response
/// for five seconds, and then tries again.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(4);

/// State of a shared client at its daemon.
pub(super) struct SharedClient<T: Transport> {
    process: Option<i32>,
    pub(super) user: Option<u32>,
    memories: RwLock<SharedMemories<T>>,
    located: Mutex<Locations>,
    connections: AtomicUsize,
    /// Permits for connections, and for connections that wait for a permit.
    permits: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    calls: AtomicUsize,
    departed: watch::Sender<bool>,
}

struct SharedMemories<T: Transport> {
    by_number: HashMap<u32, Region<T>>,
    bytes: u64,
    /// True once the shared client is gone; no more memory is accepted then.
    is_departed: bool,
}

/// Located objects by increasing number.
struct Locations {
    /// Number of the next object.
    next: u64,
    objects: BTreeMap<u64, Located>,
    /// Time of the next removal of objects whose leases have ended.
    next_removal: Moment,
}

impl Locations {
    /// Removes the objects whose leases have ended for so long that they are not read any more.
    fn remove_expired(&mut self, now: Moment) {
        if now < self.next_removal || is_planted("located-objects-stay") {
            return;
        }
        self.next_removal = now.after(REMOVAL_INTERVAL);
        self.objects.retain(|_, object| now < object.location.response().lease.after(RELOCATION_TIME));
    }
}

impl<T: Transport> SharedClient<T> {
    /// Creates the state of a shared client. `first` is the number of the first object that it
    /// locates. The caller chooses `first` such that the numbers of different shared clients do not
    /// overlap.
    pub(super) fn new(process: Option<i32>, user: Option<u32>, first: u64, max_calls: u32) -> Self {
        let permits = (max_calls as usize).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            process,
            user,
            memories: RwLock::new(SharedMemories { by_number: HashMap::new(), bytes: 0, is_departed: false }),
            located: Mutex::new(Locations {
                next: first,
                objects: BTreeMap::new(),
                next_removal: Moment::default(),
            }),
            connections: AtomicUsize::new(0),
            permits: Arc::new(Semaphore::new(permits)),
            waiting: Arc::new(Semaphore::new(permits)),
            calls: AtomicUsize::new(0),
            departed: watch::Sender::new(false),
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
        stats.located += self.located.lock().objects.len();
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
        if memories.by_number.len() >= MAX_MEMORIES {
            let text = format!(
                "cannot share memory: this process shares {MAX_MEMORIES} memory blocks with mooncake_client already; register fewer and longer ranges"
            );
            return Err(Error::new(ErrorCode::NoAvailableHandle, text));
        }
        if memories.bytes.checked_add(len).is_none_or(|sum| sum > max) {
            let text = format!(
                "the memory this process shares with mooncake_client would come to more than {max} bytes (--max_client_memory)"
            );
            return Err(Error::new(ErrorCode::NoAvailableHandle, text));
        }
        let map = || {
            if memories.is_departed || memories.by_number.contains_key(&number) {
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
        if let Some(region) = memories.by_number.remove(&number) {
            memories.bytes -= region.len() as u64;
        }
    }

    /// Returns the region that contains a memory range, and the range within the region.
    pub(super) fn range(&self, range: MemoryRange) -> Result<(Region<T>, std::ops::Range<usize>)> {
        let not_shared = || {
            Error::invalid(format!(
                "{} bytes from {} of memory {} are not shared",
                range.len, range.offset, range.memory
            ))
        };
        let region = self.memories.read().by_number.get(&range.memory).cloned().ok_or_else(not_shared)?;
        let end =
            range.offset.checked_add(range.len).filter(|end| *end <= region.len() as u64 && range.len > 0);
        match (usize::try_from(range.offset), end.map(usize::try_from)) {
            (Ok(start), Some(Ok(end))) => Ok((region, start..end)),
            _ => Err(not_shared()),
        }
    }

    /// Stores a located object and returns its number.
    pub(super) fn store_located(&self, object: Located, now: Moment) -> u64 {
        let mut located = self.located.lock();
        located.remove_expired(now);
        if located.objects.len() >= MAX_LOCATED {
            located.objects.pop_first();
        }
        let number = located.next;
        located.next = number.wrapping_add(1);
        located.objects.insert(number, object);
        number
    }

    /// Removes located objects that the shared client reads no more.
    pub(super) fn release(&self, numbers: &[u64]) {
        let released: Vec<Option<Located>> = {
            let mut located = self.located.lock();
            numbers.iter().map(|number| located.objects.remove(number)).collect()
        };
        // The ends of the reads are recorded outside of the lock.
        drop(released);
    }

    /// Removes the located objects whose leases have ended.
    pub(super) fn remove_expired(&self, now: Moment) {
        self.located.lock().remove_expired(now);
    }

    /// Returns the located object of that number.
    ///
    /// # Errors
    /// Returns `LEASE_EXPIRED` if the object was removed from the list, or was located through
    /// another daemon.
    pub(super) fn located(&self, number: u64) -> Result<Located> {
        self.located.lock().objects.get(&number).cloned().ok_or_else(|| {
            let text = "the object was located too long ago: its lease has ended, another mooncake_client serves now, or too many were located since";
            Error::new(ErrorCode::LeaseExpired, text)
        })
    }

    /// Admits one more connection, within the limit `max`. At the limit, waits in turn for the end
    /// of another connection: those of cancelled calls are still being closed.
    ///
    /// # Errors
    /// Returns `NO_AVAILABLE_HANDLE` if no connection ends within `PERMIT_TIMEOUT`, or if as many
    /// wait already, and `RPC_FAIL` if the shared client leaves meanwhile.
    pub(super) async fn admit_connection(self: Arc<Self>, max: u32) -> Result<CallConnection<T>> {
        let full = || {
            let text = format!("{max} calls of this process are under way already (--max_client_requests)");
            Error::new(ErrorCode::NoAvailableHandle, text)
        };
        let permit = match self.permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) if is_planted("full-daemons-refuse-at-once") => return Err(full()),
            Err(_) => {
                let _waiting = self.waiting.clone().try_acquire_owned().map_err(|_| full())?;
                let mut departed = self.departed.subscribe();
                let permit = self.permits.clone().acquire_owned();
                tokio::select! {
                    biased;
                    () = wait_until_set(&mut departed) => {
                        let text = "cannot join: this process has left mooncake_client";
                        return Err(Error::new(ErrorCode::RpcFail, text));
                    }
                    permit = tokio::time::timeout(PERMIT_TIMEOUT, permit) => {
                        permit.map_err(|_| full())?.map_err(|_| full())?
                    }
                }
            }
        };
        self.connections.fetch_add(1, Ordering::AcqRel);
        Ok(CallConnection { shared_client: self, _permit: permit })
    }

    /// Ends the service of the shared client. Its connections close after the calls in progress,
    /// and its memory is unmapped after the last transfer.
    pub(super) fn depart(&self) {
        self.departed.send_replace(true);
        let mut memories = self.memories.write();
        memories.is_departed = true;
        memories.bytes = 0;
        let regions = std::mem::take(&mut memories.by_number);
        drop(memories);
        // Unmapping is slow, so it happens outside the lock.
        drop(regions);
        self.located.lock().objects.clear();
    }
}

/// Connection for calls of a shared client.
pub(super) struct CallConnection<T: Transport> {
    pub(super) shared_client: Arc<SharedClient<T>>,
    _permit: OwnedSemaphorePermit,
}

impl<T: Transport> CallConnection<T> {
    /// Returns a flag that becomes true when the shared client is gone.
    pub(super) fn departed(&self) -> watch::Receiver<bool> {
        self.shared_client.departed.subscribe()
    }

    /// Counts a call for as long as the returned value lives.
    pub(super) fn call(&self) -> Call<'_, T> {
        self.shared_client.calls.fetch_add(1, Ordering::AcqRel);
        Call(&self.shared_client)
    }
}

impl<T: Transport> Drop for CallConnection<T> {
    fn drop(&mut self) {
        self.shared_client.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(super) struct Call<'a, T: Transport>(&'a SharedClient<T>);

impl<T: Transport> Drop for Call<'_, T> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits until the flag is true or its sender is dropped.
pub(super) async fn wait_until_set(flag: &mut watch::Receiver<bool>) {
    let _ = flag.wait_for(|is_set| *is_set).await;
}
