//! Configuration of a master and of the servers beside it.

use std::path::PathBuf;
use std::time::Duration;

use mooncake_core::alloc::BuiltinAllocatorConfig;
use mooncake_core::evict::BuiltinPolicyConfig;
use mooncake_transport::directory::FOLDER;

use super::tenants::TenantPolicy;
use mooncake_master::MasterOptions;

/// Everything `mooncake_master` can be told.
#[derive(Clone, Debug, PartialEq)]
pub struct MasterConfig {
    /// Address to answer calls at (`0.0.0.0`).
    pub rpc_address: String,
    /// Its port (50051); 0 takes a free one.
    pub rpc_port: u16,
    /// Threads that answer calls; 0 is one per core, at most [`max_threads`](Self::max_threads).
    pub rpc_threads: usize,
    /// Bound on them where their number is left to the machine (16).
    pub max_threads: usize,
    /// A connection on which nothing moves for this long is closed; never, if absent.
    pub rpc_idle: Option<Duration>,
    /// Address of the admin server, with metrics (`0.0.0.0`).
    pub metrics_host: String,
    /// Its port (9003); 0 takes a free one.
    pub metrics_port: u16,
    /// Whether a line of figures is logged every 10 s.
    pub metric_reporting: bool,
    /// The embedded metadata server, if there is to be one.
    pub metadata: Option<MetadataServerConfig>,
    /// What is done about the metadata of a client that was silent too long; nothing, if absent.
    pub clean_up: Option<CleanUpConfig>,
    /// Where masters elect who leads, if there are several.
    pub masters: Option<MastersConfig>,
    /// Snapshots of what the master knows, if there are to be any.
    pub snapshots: Option<SnapshotConfig>,
    /// Publishing of events, if there is to be any.
    pub events: Option<EventsConfig>,
    /// Where the tenants are said, which are on if there is such a place; changes are written to it. Goes before the options' list.
    pub tenant_policy: Option<TenantPolicy>,
    /// How the master behaves.
    pub options: MasterOptions,
    /// How space inside a segment is found.
    pub allocator: BuiltinAllocatorConfig,
    /// What goes first when memory runs out.
    pub eviction: BuiltinPolicyConfig,
    /// Name of the cluster, in logs.
    pub cluster_id: String,
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`, and everything above it (`info`).
    pub log_level: &'static str,
    /// What is logged by module, as `tracing_subscriber` reads it; by [`log_level`](Self::log_level) if empty.
    pub log_filter: String,
    /// Folder of the log file; standard error, if absent.
    pub log_dir: Option<PathBuf>,
}

/// The embedded HTTP metadata server.
#[derive(Clone, Debug, PartialEq)]
pub struct MetadataServerConfig {
    /// Address to listen at (`0.0.0.0`).
    pub host: String,
    /// Its port (8080); 0 takes a free one.
    pub port: u16,
    /// What is published is kept there for the next process, if anywhere: `rocksdb:///path`.
    pub kept_in: Option<String>,
}

/// Several masters, one of which leads.
#[derive(Clone, Debug, PartialEq)]
pub struct MastersConfig {
    /// The etcd that they elect it in: `host:port`, or several with commas or semicolons between them.
    pub etcd: String,
}

/// Snapshots of what a master knows of objects and tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotConfig {
    /// Whether they are taken.
    pub write: bool,
    /// Whether a master begins with the latest.
    pub restore: bool,
    /// Time between two (600 s).
    pub interval: Duration,
    /// One that takes longer is given up (300 s).
    pub limit: Duration,
    /// How many are kept (2).
    pub keep: usize,
    /// They lie in a folder of the cluster's name in this one, or under the cluster's name in the directory `rocksdb:///path`.
    pub folder: PathBuf,
    /// Folder for those that cannot be written there, and for copies of those that were restored.
    pub backup: Option<PathBuf>,
}

impl SnapshotConfig {
    /// The directory of this host's own that they lie in, if it is one.
    pub(crate) fn own(&self) -> Option<&str> {
        self.folder.to_str().filter(|folder| folder.starts_with(FOLDER))
    }
}

impl Default for SnapshotConfig {
    fn default() -> Self {
        Self {
            write: false,
            restore: false,
            interval: Duration::from_secs(600),
            limit: Duration::from_secs(300),
            keep: 2,
            folder: PathBuf::new(),
            backup: None,
        }
    }
}

/// Removal of what dead clients published about themselves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CleanUpConfig {
    /// URL of the metadata server it is published at; the embedded one, if absent.
    pub server: Option<String>,
    /// The cluster in the keys, empty for none.
    pub cluster_id: String,
}

/// Events about what is stored and what is gone, published over ZeroMQ.
#[derive(Clone, Debug, PartialEq)]
pub struct EventsConfig {
    /// Address to publish at.
    pub host: String,
    /// Its port; 0 takes a free one.
    pub port: u16,
    /// Name of this cache in events.
    pub backend_id: String,
    /// Whether events have the older fields of vLLM and SGLang too (true).
    pub legacy: bool,
    /// Whether events have the key; those whose key is no hash are left out otherwise (true).
    pub object_key: bool,
    /// Events that may wait (65536); 0 for any number. When it is full, the oldest goes.
    pub capacity: usize,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            host: "0.0.0.0".into(),
            port: 5557,
            backend_id: String::new(),
            legacy: true,
            object_key: true,
            capacity: 65536,
        }
    }
}

impl Default for MasterConfig {
    fn default() -> Self {
        Self {
            rpc_address: "0.0.0.0".into(),
            rpc_port: 50051,
            rpc_threads: 0,
            max_threads: 16,
            rpc_idle: None,
            metrics_host: "0.0.0.0".into(),
            metrics_port: 9003,
            metric_reporting: true,
            metadata: None,
            clean_up: None,
            masters: None,
            snapshots: None,
            events: None,
            tenant_policy: None,
            options: MasterOptions::default(),
            allocator: BuiltinAllocatorConfig::default(),
            eviction: BuiltinPolicyConfig::default(),
            cluster_id: "mooncake_cluster".into(),
            log_level: "info",
            log_filter: String::new(),
            log_dir: None,
        }
    }
}

impl Default for MetadataServerConfig {
    fn default() -> Self {
        Self { host: "0.0.0.0".into(), port: 8080, kept_in: None }
    }
}

impl MasterConfig {
    /// Threads to answer calls with.
    pub fn worker_threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.rpc_threads == 0 { cores.min(self.max_threads) } else { self.rpc_threads }
    }

    /// What is logged, for `tracing_subscriber`: [`MasterConfig::log_filter`], or else [`MasterConfig::log_level`].
    pub fn log_filter(&self) -> &str {
        if self.log_filter.is_empty() { self.log_level } else { &self.log_filter }
    }
}
