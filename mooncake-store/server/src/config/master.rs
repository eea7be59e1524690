//! Configuration of a master and its servers.

use std::path::PathBuf;
use std::time::Duration;

use mooncake_core::alloc::BuiltinAllocatorConfig;
use mooncake_core::evict::BuiltinPolicyConfig;
use mooncake_core::web_origin::AllowedHosts;
use mooncake_metadata::{FOLDER, HttpToken};

use super::tenants::TenantPolicy;
use mooncake_master::MasterOptions;

/// Configuration of `mooncake_master`.
#[derive(Clone, Debug, PartialEq)]
pub struct MasterConfig {
    /// RPC address (`0.0.0.0`).
    pub rpc_address: String,
    /// RPC port (50051); 0 selects a free one.
    pub rpc_port: u16,
    /// RPC threads; 0 for one per core, at most [`max_threads`](Self::max_threads).
    pub rpc_threads: usize,
    /// Limit for `rpc_threads == 0` (16).
    pub max_threads: usize,
    /// Time until an idle connection is closed; `None` for never.
    pub rpc_idle: Option<Duration>,
    /// Limit of the bytes that incomplete requests and unread responses take in this process;
    /// `None` keeps the one of
    /// [`ByteBudget::of_process`](mooncake_transport::admission::ByteBudget).
    pub connection_bytes: Option<u64>,
    /// Address of the admin endpoints and metrics (`0.0.0.0`).
    pub metrics_host: String,
    /// Port of the admin endpoints (9003); 0 selects a free one.
    pub metrics_port: u16,
    /// Names by which pages in browsers may call the admin endpoints and the metadata service.
    pub allowed_hosts: AllowedHosts,
    /// True to log a summary of the metrics every 10 s.
    pub metric_reporting: bool,
    /// Metadata service of the transfer engine, if enabled.
    pub metadata: Option<MetadataServerConfig>,
    /// Removal of the metadata of expired clients, if enabled.
    pub clean_up: Option<CleanUpConfig>,
    /// Election of the leader of several masters, if there are several.
    pub masters: Option<MastersConfig>,
    /// Snapshots of the master's state, if enabled.
    pub snapshots: Option<SnapshotConfig>,
    /// Publishing of events, if enabled.
    pub events: Option<EventsConfig>,
    /// Source of the tenants; changes are written there. Takes precedence over the list in
    /// `options`.
    pub tenant_policy: Option<TenantPolicy>,
    /// Behaviour of the master.
    pub options: MasterOptions,
    /// Allocator of segments.
    pub allocator: BuiltinAllocatorConfig,
    /// Eviction policy.
    pub eviction: BuiltinPolicyConfig,
    /// Name of the cluster, for logs.
    pub cluster_id: String,
    /// Minimum log level: `error`, `warn`, `info`, `debug` or `trace` (`info`).
    pub log_level: &'static str,
    /// Log levels by module in the syntax of `tracing_subscriber`; [`log_level`](Self::log_level)
    /// if empty.
    pub log_filter: String,
    /// Folder of the log file; standard error if absent.
    pub log_dir: Option<PathBuf>,
}

/// Metadata service of the transfer engine over HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct MetadataServerConfig {
    /// Address to listen at (`0.0.0.0`).
    pub host: String,
    /// Port (8080); 0 selects a free one.
    pub port: u16,
    /// Token that requests for entries must have; none if empty.
    pub token: HttpToken,
    /// URL of the directory that stores the entries for the next process: `rocksdb:///path`. Memory
    /// if absent.
    pub storage_url: Option<String>,
}

/// Several masters, one of which leads.
#[derive(Clone, Debug, PartialEq)]
pub struct MastersConfig {
    /// Endpoints of the etcd for the election: `host:port`, or several separated by commas or
    /// semicolons.
    pub etcd: String,
    /// Duration of the lease of the leader in etcd (5 s). The leader renews it five times as often.
    pub lease: Duration,
}

/// Snapshots of objects and tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotConfig {
    /// True to write snapshots.
    pub write: bool,
    /// True to start from the latest snapshot.
    pub restore: bool,
    /// Interval between two snapshots (600 s).
    pub interval: Duration,
    /// Timeout of writing a snapshot (300 s).
    pub limit: Duration,
    /// Number of snapshots to keep (2).
    pub keep: usize,
    /// Parent of the cluster's folder, or the directory `rocksdb:///path`, where the name of the
    /// cluster is a prefix.
    pub folder: PathBuf,
    /// Folder for snapshots that cannot be written to the main location, and for copies of restored
    /// ones.
    pub backup: Option<PathBuf>,
}

impl SnapshotConfig {
    /// Returns the URL of the local metadata directory, if snapshots are stored in one.
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

/// Removal of the metadata that expired clients published.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CleanUpConfig {
    /// URL of the metadata service; the service of this master if absent.
    pub server: Option<String>,
    /// Token of that service; none if empty.
    pub token: HttpToken,
    /// Cluster id in the keys, empty for none.
    pub cluster_id: String,
}

/// Events about stored and removed objects, published over ZeroMQ.
#[derive(Clone, Debug, PartialEq)]
pub struct EventsConfig {
    /// Address to publish at.
    pub host: String,
    /// Port; 0 selects a free one.
    pub port: u16,
    /// Name of this cache in events.
    pub backend_id: String,
    /// Name of the model in events; if empty, the model that the key names, or nil.
    pub model_name: String,
    /// Salt of hashes in events; nil if empty.
    pub additional_salt: String,
    /// Name of the LoRA adapter in events; nil if empty.
    pub lora_name: String,
    /// Number of tokens of a block in events; 0 if it is not known.
    pub block_size: u64,
    /// Rank of data parallelism in events; nil if absent.
    pub dp_rank: Option<u64>,
    /// True to add the older fields of vLLM and SGLang to events (true).
    pub legacy: bool,
    /// True to add the key to events (true). Otherwise events without a hash are left out.
    pub object_key: bool,
    /// True to publish the look-ups of clients, too (false).
    pub look_ups: bool,
    /// Maximum number of queued events (65536); 0 for no limit. A full queue drops the oldest
    /// event. A look-up counts as one event for each block, and is dropped itself.
    pub capacity: usize,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            host: "0.0.0.0".into(),
            port: 5557,
            backend_id: String::new(),
            model_name: String::new(),
            additional_salt: String::new(),
            lora_name: String::new(),
            block_size: 0,
            dp_rank: None,
            legacy: true,
            object_key: true,
            look_ups: false,
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
            connection_bytes: None,
            metrics_host: "0.0.0.0".into(),
            metrics_port: 9003,
            allowed_hosts: AllowedHosts::default(),
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
        Self { host: "0.0.0.0".into(), port: 8080, token: HttpToken::default(), storage_url: None }
    }
}

impl MasterConfig {
    /// Returns the number of RPC threads.
    pub fn worker_threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.rpc_threads == 0 { cores.min(self.max_threads) } else { self.rpc_threads }
    }

    /// Returns the names by which pages may call the HTTP servers: the given ones, those that the
    /// servers listen at, and that of this machine.
    pub fn own_hosts(&self) -> AllowedHosts {
        let mut hosts = self.allowed_hosts.clone().with(&self.rpc_address).with(&self.metrics_host);
        if let Some(metadata) = &self.metadata {
            hosts = hosts.with(&metadata.host);
        }
        hosts.with_own_name()
    }

    /// Returns the log filter for `tracing_subscriber`: [`MasterConfig::log_filter`] if set, else
    /// [`MasterConfig::log_level`].
    pub fn log_filter(&self) -> &str {
        if self.log_filter.is_empty() { self.log_level } else { &self.log_filter }
    }
}
