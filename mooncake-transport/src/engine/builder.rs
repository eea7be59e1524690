//! Settings of an engine, and its start.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::clock::{Rng, SharedClock, SystemClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::MemoryMetadata;
use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::look_up::refresh_regularly;
use super::metrics::Meters;
use super::regions::Regions;
use super::targets::Targets;
use super::upkeep::{UNUSED_AFTER, check_entries_regularly, close_unused_regularly};
use super::{Engine, Inner, LocalCopies, Publication};
use crate::bind_address::loopback_address;
use crate::directory::Directory;
use crate::handshake::{
    ConnectionDescriptor, HandshakeConfig, HandshakeServer, HandshakeService, Notification,
};
use crate::net::{self, DEFAULT_PORTS, HostPort};
use crate::protocol::Protocol;
use crate::transport::Transport;

/// Settings of the local handshake port.
#[derive(Clone, Debug)]
pub struct HandshakePort {
    /// Published host. The default is the host in the name of the engine if it is loopback; else
    /// `bind` if that is one address; else the first IPv4 address of an interface that is up, or
    /// 127.0.0.1.
    pub host: Option<String>,
    /// Address to listen on. The default is the published host if it is loopback, else any address
    /// of its family.
    pub bind: Option<IpAddr>,
    /// Use of IPv6 where `host` and `bind` leave the choice.
    pub ipv6: bool,
    /// Ports to choose from. A range of one is a fixed port.
    pub ports: RangeInclusive<u16>,
    /// Limits and timeouts.
    pub limits: HandshakeConfig,
}

impl Default for HandshakePort {
    fn default() -> Self {
        Self { host: None, bind: None, ipv6: false, ports: DEFAULT_PORTS, limits: HandshakeConfig::default() }
    }
}

/// Settings of an [`Engine`].
#[derive(Debug)]
pub struct EngineBuilder<T: Transport> {
    transport: Arc<T>,
    name: String,
    directory: Option<Directory>,
    handshake: Option<HandshakePort>,
    clock: SharedClock,
    rng: Rng,
    local_copies: LocalCopies,
    caches: bool,
    refresh: Option<Duration>,
    unused_after: Duration,
    expects_mount: bool,
}

impl<T: Transport> Engine<T> {
    /// Returns settings of an engine on this transport. [`EngineBuilder::start`] starts the engine.
    pub fn builder(transport: Arc<T>) -> EngineBuilder<T> {
        EngineBuilder::new(transport)
    }
}

impl<T: Transport> EngineBuilder<T> {
    fn new(transport: Arc<T>) -> Self {
        // The loopback transport is a copy already, and tests inject faults into it.
        let local_copies = if transport.protocol() == Protocol::LOOPBACK {
            LocalCopies::Never
        } else {
            LocalCopies::Process
        };
        Self {
            transport,
            name: String::new(),
            directory: None,
            handshake: None,
            clock: SystemClock::shared(),
            rng: Rng::from_os(),
            local_copies,
            caches: true,
            refresh: None,
            unused_after: UNUSED_AFTER,
            expects_mount: false,
        }
    }

    /// Sets the name of the segment. With `P2PHANDSHAKE` only its host counts, and the handshake
    /// port is added.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets the directory of segments. The default is a private directory with this engine only.
    #[must_use]
    pub fn directory(mut self, directory: Directory) -> Self {
        self.directory = Some(directory);
        self
    }

    /// Opens a handshake port. `P2PHANDSHAKE`, notifications and peers with Mooncake C++ need one.
    #[must_use]
    pub fn handshake(mut self, port: HandshakePort) -> Self {
        self.handshake = Some(port);
        self
    }

    /// Sets the clock of deadlines, which must be the clock of the transport.
    #[must_use]
    pub fn clock(mut self, clock: SharedClock) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the random generator for ports and the like, for runs that can be repeated.
    #[must_use]
    pub fn rng(mut self, rng: Rng) -> Self {
        self.rng = rng;
        self
    }

    /// Selects the transfers that are plain copies. The default is those inside the process, except
    /// on the loopback transport.
    #[must_use]
    pub fn local_copies(mut self, which: LocalCopies) -> Self {
        self.local_copies = which;
        self
    }

    /// Selects when an opened segment is looked up again: only after a failed transfer (the
    /// default), or at each [`open`](Engine::open).
    #[must_use]
    pub fn cache_descriptors(mut self, yes: bool) -> Self {
        self.caches = yes;
        self
    }

    /// Looks up all opened segments at this interval, at least a millisecond. Needs a tokio
    /// runtime. The default is never.
    #[must_use]
    pub fn refresh_every(mut self, interval: Duration) -> Self {
        self.refresh = Some(interval.max(Duration::from_millis(1)));
        self
    }

    /// Sets the time after which an opened segment is closed that no request uses and to whose
    /// process there is no connection. It is at least a millisecond and looked up again at its next
    /// use. Needs a tokio runtime. The default is 10 s.
    #[must_use]
    pub fn close_unused_after(mut self, time: Duration) -> Self {
        self.unused_after = time.max(Duration::from_millis(1));
        self
    }

    /// Calls [`Engine::expect_mount`] before the first descriptor is published.
    #[must_use]
    pub fn expect_mount(mut self) -> Self {
        self.expects_mount = true;
        self
    }

    /// Opens the handshake port, takes the name and publishes an empty segment. With a handshake
    /// port the engine runs on the current tokio runtime. Without one it needs no runtime, except
    /// for an HTTP directory.
    pub async fn start(mut self) -> Result<Engine<T>> {
        let directory =
            self.directory.take().unwrap_or_else(|| Directory::new(Arc::new(MemoryMetadata::new())));
        let (at, listener) = match &self.handshake {
            None => (None, None),
            Some(port) => {
                let host = self.advertised(port, directory.is_p2p());
                let listener = net::listen(bind_ip(port, &host), port.ports.clone(), &mut self.rng)
                    .map_err(|e| e.context("handshake port"))?;
                let at = HostPort::new(host, listener.local_addr()?.port());
                (Some(at), Some(listener))
            }
        };
        let name = match (&directory, &at) {
            (Directory::P2p, Some(at)) => at.to_string(),
            (Directory::P2p, None) => {
                return Err(Error::invalid(
                    "cannot start engine: P2PHANDSHAKE needs a handshake port; call `handshake` on the builder",
                ));
            }
            (Directory::Metadata { .. }, _) if self.name.is_empty() => {
                return Err(Error::invalid(
                    "cannot start engine: a metadata service needs a name; call `name` on the builder",
                ));
            }
            (Directory::Metadata { .. }, _) => self.name,
        };
        let limits = self.handshake.map(|port| port.limits).unwrap_or_default();
        let inner = Arc::new(Inner {
            regions: Regions::new(&mut self.rng),
            retired_spans: Default::default(),
            transport: self.transport,
            name,
            directory,
            at,
            limits,
            clock: self.clock,
            rng: Mutex::new(self.rng),
            local_copies: self.local_copies,
            caches: self.caches,
            meters: Meters::default(),
            targets: Mutex::new(Targets::default()),
            found: Default::default(),
            mount: std::sync::atomic::AtomicU8::new(if self.expects_mount {
                super::MOUNT_EXPECTED
            } else {
                super::NO_MOUNT
            }),
            inbox: Arc::default(),
            server: Mutex::new(None),
            changes: AtomicU64::new(0),
            publishing: tokio::sync::Mutex::new(Publication::default()),
            is_replaced: AtomicBool::new(false),
            runtime: tokio::runtime::Handle::try_current().ok(),
            tasks: Mutex::default(),
            // Nothing is published until the engine owns the name.
            closed: AtomicBool::new(true),
        });
        if let Some(listener) = listener {
            let service = Arc::new(Service(Arc::downgrade(&inner)));
            let server = HandshakeServer::serve(listener, service, inner.limits.clone())?;
            // The server starts before the name is taken, because other engines probe it to see
            // whether the owner is alive.
            *inner.server.lock() = Some(server);
        }
        inner.begin().await?;
        if let Some(runtime) = &inner.runtime {
            let mut tasks =
                vec![runtime.spawn(close_unused_regularly(Arc::downgrade(&inner), self.unused_after))];
            if !inner.directory.is_p2p() {
                tasks.push(runtime.spawn(check_entries_regularly(Arc::downgrade(&inner))));
            }
            if let Some(interval) = self.refresh {
                tasks.push(runtime.spawn(refresh_regularly(Arc::downgrade(&inner), interval)));
            }
            inner.tasks.lock().extend(tasks.iter().map(JoinHandle::abort_handle));
        }
        Ok(Engine { inner })
    }

    fn advertised(&self, port: &HandshakePort, p2p: bool) -> String {
        if let Some(host) = port.configured_host(&self.name, p2p) {
            return host;
        }
        match port.bind.filter(|bind| !bind.is_unspecified()) {
            Some(bind) => bind.to_string(),
            None if port.ipv6 => net::default_host_v6().to_string(),
            None => net::default_host().to_string(),
        }
    }
}

impl HandshakePort {
    /// Returns the published host, if the settings or the name of the engine determine it. Only
    /// with `P2PHANDSHAKE` the name is an address of the engine. A loopback name is one always.
    pub fn configured_host(&self, name: &str, p2p: bool) -> Option<String> {
        if let Some(host) = &self.host {
            return Some(host.clone());
        }
        let host = HostPort::parse(name, self.limits.default_port).host;
        (!host.is_empty() && (p2p || loopback_address(&host).is_some())).then_some(host)
    }
}

fn bind_ip(port: &HandshakePort, host: &str) -> IpAddr {
    // The interface follows a link-local address.
    let address = host.split_once('%').map_or(host, |(address, _)| address);
    let loopback = loopback_address(address).filter(|_| !is_planted("loopback-name-binds-all"));
    port.bind.or(loopback).unwrap_or(match address.parse() {
        Ok(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        // This address accepts both families.
        _ if port.ipv6 => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    })
}

impl<T: Transport> Inner<T> {
    async fn begin(&self) -> Result<()> {
        use std::sync::atomic::Ordering;
        if let Some(at) = &self.at {
            self.directory.announce(&self.name, at, &self.limits).await?;
        }
        self.closed.store(false, Ordering::SeqCst);
        // With a handshake port the engine owns the name for certain. Without one, it owns the name
        // only if no other engine published under it.
        let published = self.publish(self.at.is_none()).await;
        if published.is_err() && self.at.is_none() {
            self.closed.store(true, Ordering::SeqCst);
        }
        published
    }
}

struct Service<T: Transport>(Weak<Inner<T>>);

#[async_trait]
impl<T: Transport> HandshakeService for Service<T> {
    async fn descriptor(&self) -> Vec<u8> {
        match self.0.upgrade() {
            Some(engine) if engine.directory.is_p2p() => engine.descriptor().encode(),
            _ => b"null".to_vec(),
        }
    }

    fn instance(&self) -> Option<String> {
        self.0.upgrade().map(|engine| engine.regions.instance().to_owned())
    }

    async fn connection(&self, request: ConnectionDescriptor) -> ConnectionDescriptor {
        let Some(engine) = self.0.upgrade() else { return ConnectionDescriptor::default() };
        match engine.transport.connection_handler() {
            Some(handler) => handler.accept(request).await,
            None => ConnectionDescriptor::default(),
        }
    }

    async fn notified(&self, notification: Notification) -> bool {
        let Some(engine) = self.0.upgrade() else { return false };
        engine.inbox.push(notification, &engine.limits)
    }
}
