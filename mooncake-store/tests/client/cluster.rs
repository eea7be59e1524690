//! Clusters in one process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mooncake_core::Result;
use mooncake_core::clock::Rng;
use mooncake_core::evict::PolicyKind;
use mooncake_store::client::{Client, ClientBuilder, ClientConfig, MasterHandle};
use mooncake_store::config::{MasterConfig, MetadataServerConfig};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::frame::Status;
use mooncake_store::protocol::message::ADDED;
use mooncake_store::protocol::server::Service;
use mooncake_store::protocol::service::MasterService;
use mooncake_store::server::MasterServer;

/// Connections between the master and the clients, and between the clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No sockets at all.
    Embedded,
    /// RPC to the master, and TCP between clients, which find each other by address.
    Tcp,
    /// Like `Tcp`, with copies through shared memory. Without the feature the same as `Tcp`.
    Shm,
    /// Like `Tcp`, but clients find each other in the HTTP metadata server of the master.
    TcpHttp,
    /// RPC to the master, and only RDMA between clients, which alternate between the two ends of a
    /// cable.
    #[cfg(feature = "transport-rdma")]
    Rdma,
    /// Like `Rdma`, with all clients on one device.
    #[cfg(feature = "transport-rdma")]
    RdmaAlone,
}

pub(crate) struct Cluster {
    pub(crate) master: Arc<Master>,
    server: Option<MasterServer>,
    kind: Kind,
    #[cfg(feature = "transport-rdma")]
    members: std::sync::atomic::AtomicUsize,
}

impl Cluster {
    /// Starts a master on TCP with an eviction policy.
    pub(crate) async fn with_policy(policy: PolicyKind, options: MasterOptions) -> Self {
        let config = MasterConfig { eviction: policy.into(), ..master_config(0, options) };
        let server = MasterServer::start(config).await.unwrap();
        Self::of(server.master().clone(), Some(server), Kind::Tcp)
    }

    pub(crate) async fn start(kind: Kind, options: MasterOptions) -> Self {
        if kind == Kind::Embedded {
            return Self::of(Arc::new(Master::new(options).unwrap()), None, kind);
        }
        let mut config = master_config(0, options);
        if kind == Kind::TcpHttp {
            let metadata =
                MetadataServerConfig { host: "127.0.0.1".into(), port: 0, ..MetadataServerConfig::default() };
            config.metadata = Some(metadata);
        }
        let server = MasterServer::start(config).await.unwrap();
        Self::of(server.master().clone(), Some(server), kind)
    }

    fn of(master: Arc<Master>, server: Option<MasterServer>, kind: Kind) -> Self {
        Self {
            master,
            server,
            kind,
            #[cfg(feature = "transport-rdma")]
            members: Default::default(),
        }
    }

    /// Returns the address of the admin endpoints.
    pub(crate) fn admin(&self) -> std::net::SocketAddr {
        self.server.as_ref().and_then(|server| server.addresses().admin).unwrap()
    }

    pub(crate) fn handle(&self) -> MasterHandle {
        match &self.server {
            None => MasterHandle::embedded(self.master.clone()),
            Some(server) => MasterHandle::remote(server.addresses().rpc.to_string()),
        }
    }

    /// Returns whether the transport accepts memory that is not registered.
    pub(crate) fn takes_plain_memory(&self) -> bool {
        #[cfg(feature = "transport-rdma")]
        if matches!(self.kind, Kind::Rdma | Kind::RdmaAlone) {
            return false;
        }
        true
    }

    /// Returns a client that uses the transport even to other clients of this process.
    pub(crate) fn builder(&self) -> ClientBuilder {
        self.builder_with(ClientConfig::default())
    }

    /// Returns a builder like [`Cluster::builder`] with further settings.
    pub(crate) fn builder_with(&self, config: ClientConfig) -> ClientBuilder {
        let metadata = self.server.as_ref().and_then(|server| server.addresses().metadata);
        let metadata = metadata.map_or("P2PHANDSHAKE".into(), |at| format!("http://{at}/metadata"));
        let builder = Client::builder().config(config);
        #[cfg(feature = "transport-rdma")]
        let builder = match self.kind {
            Kind::Rdma => {
                let before = self.members.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                builder.transports(rdma(["rxe0", "rxe1"][before % 2]))
            }
            Kind::RdmaAlone => builder.transports(rdma("rxe0")),
            _ => builder,
        };
        builder
            .master(self.handle())
            .metadata(metadata)
            .copy_in_process(false)
            .share_memory(self.kind == Kind::Shm)
            .segment(8 << 20)
            .local_buffer(2 << 20)
            .timeout(self.timeout())
    }

    /// Returns the bound of an operation. RDMA is tested on an emulated machine, which is slow.
    fn timeout(&self) -> Duration {
        #[cfg(feature = "transport-rdma")]
        if matches!(self.kind, Kind::Rdma | Kind::RdmaAlone) {
            return Duration::from_secs(25);
        }
        Duration::from_secs(5)
    }

    pub(crate) async fn pair(&self) -> (Client, Client) {
        (self.builder().connect().await.unwrap(), self.builder().connect().await.unwrap())
    }

    /// Asserts that there are no objects and no writes, and that all taken space is only waiting
    /// for its time.
    pub(crate) fn assert_empty(&self) {
        let stats = self.master.stats();
        assert_eq!((stats.keys, stats.writing), (0, 0), "{stats:?}");
        assert_eq!(stats.used(), stats.resting(), "{stats:?}");
    }
}

/// Returns options for one RDMA device, with timeouts for an emulated machine.
#[cfg(feature = "transport-rdma")]
fn rdma(device: &str) -> mooncake_store::transport_set::TransportOptions {
    let devices = vec![device.into()];
    let config = mooncake_rdma::RdmaConfig { devices, timeout: 16, ..Default::default() };
    mooncake_store::transport_set::TransportOptions { rdma: Some(config), ..Default::default() }
}

pub(crate) fn master_config(port: u16, options: MasterOptions) -> MasterConfig {
    MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: port,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        options,
        ..MasterConfig::default()
    }
}

/// Returns random bytes, which differ between values and positions.
pub(crate) fn value(seed: u64, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    Rng::seeded(seed).fill(&mut bytes);
    bytes.into()
}

/// Returns the items as slices, which a put copies through the local buffer. A put of [`Bytes`]
/// sends them without a copy if the transport can.
pub(crate) fn slices<K: AsRef<str>>(items: &[(K, Bytes)]) -> Vec<(&str, &[u8])> {
    items.iter().map(|(key, value)| (key.as_ref(), &value[..])).collect()
}

/// Master of this version in which every call that Mooncake C++ lacks has another type signature.
pub(crate) struct OtherShapes(pub(crate) MasterService<Master>);

impl Service for OtherShapes {
    fn call(
        &self,
        function: u32,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> std::result::Result<(), (Status, String)> {
        if ADDED.iter().any(|shape| shape.function == function) {
            return Err((Status::InvalidArguments, "the arguments have another shape".into()));
        }
        self.0.call(function, body, out)
    }
}

/// Starts a server at the port of one that has stopped. A process that another test starts has
/// copies of all sockets up to its `exec`, so the port may stay in use for a moment.
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
pub(crate) async fn start_again<T>(start: impl AsyncFn() -> Result<T>) -> T {
    let begun = Instant::now();
    loop {
        match start().await {
            Ok(server) => return server,
            Err(error)
                if begun.elapsed() < Duration::from_secs(30) && error.to_string().contains("in use") =>
            {
                tokio::task::yield_now().await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Polls a condition for up to ten seconds.
pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    for _ in 0..500 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it never came to this: {what}");
}
