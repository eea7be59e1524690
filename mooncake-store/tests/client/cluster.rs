//! Clusters of one process.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_store::client::{Client, ClientBuilder, MasterHandle};
use mooncake_store::config::{MasterConfig, MetadataServerConfig};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::server::MasterServer;

/// How members reach master and each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No sockets at all.
    Embedded,
    /// RPC to the master, TCP between members, who find each other by address.
    Tcp,
    /// The same, and what is in shared memory is copied there. Without the feature it is TCP.
    Shm,
    /// TCP again, but they find each other in the master's HTTP metadata server.
    TcpHttp,
    /// RPC to the master, RDMA between members and nothing beside it; they have the two ends of a cable in turn.
    #[cfg(feature = "transport-rdma")]
    Rdma,
    /// The same on one device.
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
    pub(crate) async fn start(kind: Kind, options: MasterOptions) -> Self {
        if kind == Kind::Embedded {
            return Self::of(Arc::new(Master::new(options).unwrap()), None, kind);
        }
        let mut config = master_config(0, options);
        if kind == Kind::TcpHttp {
            let metadata = MetadataServerConfig { host: "127.0.0.1".into(), port: 0, kept_in: None };
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

    /// Where the admin pages are.
    pub(crate) fn admin(&self) -> std::net::SocketAddr {
        self.server.as_ref().and_then(|server| server.addresses().admin).unwrap()
    }

    pub(crate) fn handle(&self) -> MasterHandle {
        match &self.server {
            None => MasterHandle::embedded(self.master.clone()),
            Some(server) => MasterHandle::remote(server.addresses().rpc.to_string()),
        }
    }

    /// Whether the members' wire takes memory that is not registered.
    pub(crate) fn takes_plain_memory(&self) -> bool {
        #[cfg(feature = "transport-rdma")]
        if matches!(self.kind, Kind::Rdma | Kind::RdmaAlone) {
            return false;
        }
        true
    }

    /// A member that really uses the wire, also to others in this process.
    pub(crate) fn member(&self) -> ClientBuilder {
        let metadata = self.server.as_ref().and_then(|server| server.addresses().metadata);
        let metadata = metadata.map_or("P2PHANDSHAKE".into(), |at| format!("http://{at}/metadata"));
        let builder = Client::builder();
        #[cfg(feature = "transport-rdma")]
        let builder = match self.kind {
            Kind::Rdma => {
                let before = self.members.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                builder.wires(rdma(["rxe0", "rxe1"][before % 2]))
            }
            Kind::RdmaAlone => builder.wires(rdma("rxe0")),
            _ => builder,
        };
        builder
            .master(self.handle())
            .metadata(metadata)
            .copy_in_process(false)
            .share_memory(self.kind == Kind::Shm)
            .segment(8 << 20)
            .local_buffer(2 << 20)
            .timeout(Duration::from_secs(5))
    }

    pub(crate) async fn pair(&self) -> (Client, Client) {
        (self.member().connect().await.unwrap(), self.member().connect().await.unwrap())
    }

    /// Nothing is stored, nothing is being written, and no space is taken that does not just wait for its time.
    pub(crate) fn assert_empty(&self) {
        let stats = self.master.stats();
        assert_eq!((stats.keys, stats.writing), (0, 0), "{stats:?}");
        assert_eq!(stats.used(), stats.resting(), "{stats:?}");
    }
}

/// That device, and patience for a machine that is emulated.
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

/// Bytes that tell values and positions apart.
pub(crate) fn value(seed: u64, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    Rng::seeded(seed).fill(&mut bytes);
    bytes.into()
}

/// Asks again until it holds, for up to ten seconds.
pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    for _ in 0..500 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it never came to this: {what}");
}
