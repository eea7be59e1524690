//! One opened device of a node: its queue, its connections, and what is known of its port.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::config::RdmaConfig;

use crate::endpoint::Endpoint;
use crate::gid;
use crate::room::{Alarm, Credits, Starved};
use crate::sync::{Mutex, RwLock};
use crate::verbs::{CompletionQueue, Device, DeviceLimits, Domain, Gid, Path, Port, QueueSizes, Timing};

pub(crate) struct Nic {
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) device: Arc<Device>,
    pub(crate) domain: Arc<Domain>,
    pub(crate) queue: Arc<CompletionQueue>,
    pub(crate) credits: Credits,
    pub(crate) limits: DeviceLimits,
    pub(crate) node: Option<u32>,
    port: Mutex<PortState>,
    up: AtomicBool,
    lost: AtomicBool,
    pub(crate) endpoints: RwLock<HashMap<u32, Arc<Endpoint>>>,
    /// In the order they were made, for choosing who gives way.
    pub(crate) order: Mutex<Sieve>,
    /// Connections that wait for room in the queue.
    pub(crate) starved: Starved<Arc<Endpoint>>,
    /// When the poller looks at the clock next; it is woken for anything earlier.
    alarm: Alarm,
    bell: OwnedFd,
}

struct PortState {
    port: Port,
    /// Best first.
    gids: Vec<Gid>,
    chosen: usize,
}

/// Which connection gives way: the oldest that was not used since it was last looked at.
#[derive(Default)]
pub(crate) struct Sieve {
    entries: Vec<Arc<Endpoint>>,
    hand: usize,
}

impl Nic {
    /// Opens a device, or says why it cannot be used.
    pub(crate) fn open(index: usize, name: &str, config: &RdmaConfig) -> Result<Arc<Self>> {
        let device = Device::open(name)?;
        let port = PortState::query(&device, config)?;
        if !port.port.active {
            return Err(unusable(name, format!("port {} is down", config.port)));
        }
        let limits = device.limits()?;
        let domain = Domain::new(&device)?;
        let entries = config.completions.min(limits.completions);
        let queue = CompletionQueue::new(&device, entries)?;
        let bell = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC,
        )
        .map_err(std::io::Error::from)?;
        Ok(Arc::new(Self {
            index,
            name: name.into(),
            node: config.node_of(name),
            credits: Credits::new(entries as usize),
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
            bell,
        }))
    }

    /// Whether anything can be sent on it.
    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    /// Whether the device is gone for good.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The device is gone for good.
    pub(crate) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.up.store(false, Ordering::Release);
    }

    /// Looks at the port again. True when it works.
    pub(crate) fn refresh(&self, config: &RdmaConfig) -> bool {
        let up = !self.lost.load(Ordering::Acquire)
            && match PortState::query(&self.device, config) {
                Ok(state) => {
                    let up = state.port.active;
                    *self.port.lock() = state;
                    up
                }
                Err(error) => {
                    tracing::warn!(device = self.name, %error, "the port cannot be used");
                    false
                }
            };
        self.up.store(up, Ordering::Release);
        up
    }

    /// Takes another address after there was no way from this one; false when there is no other.
    pub(crate) fn try_another_gid(&self) -> bool {
        let mut state = self.port.lock();
        if state.gids.len() < 2 {
            return false;
        }
        state.chosen = (state.chosen + 1) % state.gids.len();
        true
    }

    /// Our address.
    pub(crate) fn gid(&self) -> Gid {
        let state = self.port.lock();
        state.gids[state.chosen]
    }

    /// Our local address, on InfiniBand.
    pub(crate) fn lid(&self) -> u16 {
        self.port.lock().port.lid
    }

    /// Longest message in bytes.
    pub(crate) fn longest(&self) -> usize {
        (self.port.lock().port.message_bytes as usize).max(1)
    }

    /// The way to a peer's address.
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

    /// Connections it may have.
    pub(crate) fn max_endpoints(&self, config: &RdmaConfig) -> usize {
        config.max_endpoints.min((self.limits.pairs as usize / config.pairs).max(1))
    }

    /// Sees to it that the poller looks at the clock by then.
    pub(crate) fn wake_by(&self, at: Moment) {
        if self.alarm.set(at.0) {
            self.ring();
        }
    }

    /// Sees to it that the poller looks now.
    pub(crate) fn wake(&self) {
        self.alarm.set(0);
        self.ring();
    }

    fn ring(&self) {
        // It fails when the bell rings already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// When the poller is to look at the clock.
    pub(crate) fn planned(&self) -> Moment {
        Moment(self.alarm.at())
    }

    /// Before the poller looks: what comes from now on is new.
    pub(crate) fn plan_nothing(&self) {
        self.alarm.clear();
    }

    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.bell
    }
}

/// What the existing system asks for.
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

impl Sieve {
    pub(crate) fn add(&mut self, endpoint: Arc<Endpoint>) {
        self.entries.push(endpoint);
    }

    pub(crate) fn remove(&mut self, id: u32) {
        if let Some(at) = self.entries.iter().position(|entry| entry.id == id) {
            self.entries.remove(at);
            self.hand -= usize::from(self.hand > at);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The one to give way: idle, and not used since the hand last passed.
    pub(crate) fn victim(&mut self) -> Option<Arc<Endpoint>> {
        for _ in 0..2 * self.entries.len() {
            self.hand = (self.hand + 1) % self.entries.len();
            let entry = &self.entries[self.hand];
            if entry.is_idle() && !entry.used.swap(false, Ordering::Relaxed) {
                return Some(entry.clone());
            }
        }
        None
    }
}

/// The name of a network interface.
fn interface(number: u32) -> Option<String> {
    use rustix::net::{AddressFamily, SocketType, netdevice, socket};
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
    netdevice::index_to_name(&any, number).ok()
}

fn unusable(name: &str, why: String) -> Error {
    Error::new(ErrorCode::TransferFail, format!("RDMA device {name:?}: {why}"))
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nic({}, {} connections)", self.name, self.endpoints.read().len())
    }
}
