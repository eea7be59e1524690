//! Opened device of a node: its queue, its connections, and the state of its port.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::config::RdmaConfig;

use crate::gid;
use crate::send_credits::{Alarm, Credits, Starved};
use crate::sieve::Sieve;
use crate::sync::{Mutex, RwLock};
use crate::throughput::Throughput;
use crate::verbs::{CompletionQueue, Device, DeviceLimits, Domain, Gid, Path, Port, QueueSizes, Timing};

/// Opened device, with the table of its connections of type `C`.
pub(crate) struct Nic<C> {
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) device: Arc<Device>,
    pub(crate) domain: Arc<Domain>,
    pub(crate) queue: Arc<CompletionQueue>,
    pub(crate) credits: Credits,
    pub(crate) throughput: Throughput,
    pub(crate) limits: DeviceLimits,
    pub(crate) node: Option<u32>,
    port: Mutex<PortState>,
    up: AtomicBool,
    lost: AtomicBool,
    pub(crate) endpoints: RwLock<HashMap<u32, Arc<C>>>,
    /// Connections in the order of their creation, for choosing the one to close.
    pub(crate) order: Mutex<Sieve<C>>,
    /// Connections that wait for credit of the completion queue.
    pub(crate) starved: Starved<Arc<C>>,
    /// Time of the poller's next look at the clock. Earlier deadlines wake the poller.
    alarm: Alarm,
    wake_event: OwnedFd,
}

struct PortState {
    port: Port,
    /// Usable addresses, best first.
    gids: Vec<Gid>,
    chosen: usize,
}

impl<C> Nic<C> {
    /// Opens a device.
    ///
    /// # Errors
    ///
    /// The message says why the device cannot be used.
    pub(crate) fn open(index: usize, name: &str, config: &RdmaConfig, now: Moment) -> Result<Arc<Self>> {
        let device = Device::open(name)?;
        let port = PortState::query(&device, config)?;
        if !port.port.active {
            return Err(unusable(name, format!("port {} is down", config.port)));
        }
        let limits = device.limits()?;
        let domain = Domain::new(&device)?;
        let entries = config.completions.min(limits.completions);
        let queue = CompletionQueue::new(&device, entries)?;
        let wake_event = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC,
        )
        .map_err(std::io::Error::from)?;
        Ok(Arc::new(Self {
            index,
            name: name.into(),
            node: config.node_of(name),
            credits: Credits::new(entries as usize),
            throughput: Throughput::new(now),
            limits,
            device,
            domain,
            queue,
            port: Mutex::new(port),
            up: AtomicBool::new(true),
            lost: AtomicBool::new(false),
            endpoints: RwLock::default(),
            order: Mutex::default(),
            starved: Starved::new(),
            alarm: Alarm::new(),
            wake_event,
        }))
    }

    /// Returns whether the device can send.
    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    /// Returns whether the device is lost for good.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Marks the device as lost for good.
    pub(crate) fn mark_lost(&self) {
        self.lost.store(true, Ordering::Release);
        self.up.store(false, Ordering::Release);
    }

    /// Queries the port. Returns true when it is active.
    pub(crate) fn refresh(&self, config: &RdmaConfig) -> bool {
        let up = !self.lost.load(Ordering::Acquire)
            && match PortState::query(&self.device, config) {
                Ok(state) => {
                    let up = state.port.active;
                    *self.port.lock() = state;
                    up
                }
                Err(error) => {
                    tracing::warn!(device = self.name, %error, "cannot use port");
                    false
                }
            };
        self.up.store(up, Ordering::Release);
        up
    }

    /// Chooses another address after a failed route lookup. Returns false when there is no other.
    pub(crate) fn try_another_gid(&self) -> bool {
        let mut state = self.port.lock();
        if state.gids.len() < 2 {
            return false;
        }
        state.chosen = (state.chosen + 1) % state.gids.len();
        true
    }

    /// Returns the chosen address.
    pub(crate) fn gid(&self) -> Gid {
        let state = self.port.lock();
        state.gids[state.chosen]
    }

    /// Returns the local address (LID), on InfiniBand.
    pub(crate) fn lid(&self) -> u16 {
        self.port.lock().port.lid
    }

    /// Returns the length of the longest message in bytes.
    pub(crate) fn max_message_bytes(&self) -> usize {
        (self.port.lock().port.message_bytes as usize).max(1)
    }

    /// Returns the path to the address of a peer.
    pub(crate) fn path(&self, config: &RdmaConfig, gid: std::net::Ipv6Addr, lid: u16) -> Path {
        let state = self.port.lock();
        Path {
            port: config.port,
            pkey_index: config.pkey_index,
            own_gid: state.gids[state.chosen].index,
            gid,
            lid,
            mtu: state.port.mtu.min(config.mtu_number().unwrap_or(u32::MAX)),
            traffic_class: config.traffic_class,
            service_level: config.service_level,
        }
    }

    pub(crate) fn timing(&self, config: &RdmaConfig) -> Timing {
        Timing {
            timeout: config.timeout,
            retries: config.retries,
            reads: self.limits.reads.min(MAX_READS),
            served_reads: self.limits.served_reads.min(MAX_READS),
        }
    }

    pub(crate) fn sizes(&self, config: &RdmaConfig) -> QueueSizes {
        QueueSizes { requests: config.requests.min(self.limits.requests), ranges: 1, inline_bytes: 0 }
    }

    /// Returns the maximum number of connections.
    pub(crate) fn max_endpoints(&self, config: &RdmaConfig) -> usize {
        config.max_endpoints.min((self.limits.pairs as usize / config.pairs).max(1))
    }

    /// Makes the poller look at the clock by then.
    pub(crate) fn wake_by(&self, at: Moment) {
        if self.alarm.set(at.0) {
            self.signal_wake_event();
        }
    }

    /// Makes the poller look now.
    pub(crate) fn wake(&self) {
        self.alarm.set(0);
        self.signal_wake_event();
    }

    fn signal_wake_event(&self) {
        // The write fails if the event is already signalled.
        let _ = rustix::io::write(&self.wake_event, &1u64.to_ne_bytes());
    }

    /// Returns the time of the poller's next look at the clock.
    pub(crate) fn planned(&self) -> Moment {
        Moment(self.alarm.at())
    }

    /// Clears the planned look. The poller calls this before it looks, so that later plans count as
    /// new.
    pub(crate) fn clear_plan(&self) {
        self.alarm.clear();
    }

    pub(crate) fn wake_event(&self) -> &OwnedFd {
        &self.wake_event
    }
}

/// Number of parallel reads that Mooncake C++ requests.
const MAX_READS: u8 = 16;

impl PortState {
    fn query(device: &Device, config: &RdmaConfig) -> Result<Self> {
        let port = device.port(config.port)?;
        let gids = device.gids(config.port)?;
        let gids = match config.gid_index {
            Some(index) => gids.into_iter().filter(|gid| gid.index == index).collect(),
            None => gid::ranked(&gids, interface),
        };
        if gids.is_empty() {
            let which = config.gid_index.map_or_else(String::new, |index| format!(" with index {index}"));
            return Err(unusable(device.name(), format!("port {} has no address{which}", config.port)));
        }
        Ok(Self { port, gids, chosen: 0 })
    }
}

/// Returns the name of a network interface.
fn interface(number: u32) -> Option<String> {
    use rustix::net::{AddressFamily, SocketType, netdevice, socket};
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
    netdevice::index_to_name(&any, number).ok()
}

fn unusable(name: &str, reason: String) -> Error {
    Error::new(ErrorCode::TransferFail, format!("RDMA device {name:?}: {reason}"))
}

impl<C> fmt::Debug for Nic<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nic({}, {} connections)", self.name, self.endpoints.read().len())
    }
}
