//! Table of flags: every flag of Mooncake C++, and those of this project. Rows with `Read` are read
//! in `parts.rs`.

use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::set;
use mooncake_core::settings;
use mooncake_core::settings::Effect::{Idle, Off, Read};
use mooncake_core::settings::Setting;
use mooncake_core::settings::values::{
    Parsed, any, bytes, check, count, millis, number, optional, ratio, seconds, switch, text, within,
};

use mooncake_master::MasterOptions;

use super::MasterConfig;
use super::values::{cluster_id, limit};

/// A flag of `mooncake_master`. The name is also the key in a configuration file.
pub type Flag = Setting<MasterConfig>;

/// Flags of one subject, as `--help` shows them.
#[derive(Debug)]
pub struct Group {
    /// Subject of the group.
    pub name: &'static str,
    /// Flags of the group.
    pub flags: &'static [Flag],
}

/// Returns every flag in the order of `--help`.
pub fn flags() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|group| group.flags)
}

/// Returns the flag of a name or an older name.
pub fn flag_by_name(name: &str) -> Option<&'static Flag> {
    flags().find(|flag| flag.names().any(|known| known == name))
}

/// Returns the environment variable of a flag: `MC_MASTER_` and the name in capitals.
pub fn variable_of(flag: &Flag) -> String {
    format!("{PREFIX}{}", flag.name.to_ascii_uppercase())
}

/// Prefix of the variables of flags.
pub(super) const PREFIX: &str = "MC_MASTER_";

const NOF: &str = "NVMe-over-Fabrics is not built";
const CXL: &str = "CXL memory is not built";
const HA: &str = "standbys need no oplog, because clients re-announce their objects after failover";
const SNAPSHOTS: &str = "the folder is the list";
const EVENTS: &str = "events have the tenant of each object";
const WEIGHTS: &str = "a snapshot keeps the records of managed weights";
const STDERR: &str = "one writer writes log lines at once";
/// Maximum number of threads of a master.
const MAX_THREADS: usize = 4096;
const ARENA: &str = "a master allocates no object memory";

/// All flags by subject.
pub static GROUPS: &[Group] = &[
    Group { name: "RPC", flags: CALLS },
    Group { name: "Admin endpoints and metrics", flags: ADMIN },
    Group { name: "Metadata service of the transfer engine", flags: METADATA },
    Group { name: "Leases, pins and timeouts", flags: LIFETIMES },
    Group { name: "Eviction and placement", flags: SPACE },
    Group { name: "Log and configuration", flags: LOG },
    Group { name: "Copies, moves and hot objects", flags: COPIES },
    Group { name: "Disks, files, NVMe-over-Fabrics, CXL", flags: TIERS },
    Group { name: "Several masters and snapshots", flags: MASTERS },
    Group { name: "Managed weights", flags: MANAGED_WEIGHTS },
    Group { name: "Tenants", flags: QUOTAS },
    Group { name: "Events", flags: KV_EVENTS },
];

const CALLS: &[Flag] = settings! {
    /// RPC port; auto selects a free one, 0 means the default
    rpc_port | port: "50051" => set!(rpc_port = rpc_port),
    /// RPC address
    rpc_address: "0.0.0.0" => set!(rpc_address = text),
    /// Network interface whose IPv4 address is the RPC address
    rpc_interface: "" => set!(|config, name| if !name.is_empty() { config.rpc_address = address_of(name)? }),
    /// RPC threads; 0 for one per core, at most max_threads
    rpc_thread_num: "0" => set!(|config, text| config.rpc_threads = within(text, 0, MAX_THREADS)?),
    /// Limit for rpc_thread_num=0
    max_threads: "16" => set!(|config, text| config.max_threads = within(text, 1, MAX_THREADS)?),
    /// Threads for handlers; 0 for rpc_thread_num
    handler_worker_thread_num: "0" => Idle("RPC threads run handlers, and hand on the work of long calls", check::<u32>),
    /// Seconds until an idle connection is closed; 0 for never
    rpc_conn_timeout_seconds: "0"
        => set!(|config, text| config.rpc_idle = Some(seconds(text)?).filter(|idle| !idle.is_zero())),
    /// Limit of the bytes of incomplete requests and unread responses of all ports (bytes, or with
    /// a unit: KB MB GB); empty for 256 MiB, or a 16th of the memory if that is less
    connection_bytes: "" => set!(connection_bytes = connection_bytes),
    /// Send small responses at once
    rpc_enable_tcp_no_delay: "true" => Off("small responses are always sent at once"),
};

const ADMIN: &[Flag] = settings! {
    /// Address of the admin endpoints
    metrics_host: "0.0.0.0" => set!(metrics_host = text),
    /// Port of the admin endpoints; 0 selects a free one
    metrics_port: "9003" => set!(metrics_port = number),
    /// Names, with commas between them, by which pages in browsers may call the admin endpoints and
    /// the metadata service; *.name for all below a name
    allowed_hosts: "" => set!(allowed_hosts = number),
    /// Log a line of metrics every 10 s
    enable_metric_reporting: "true" => set!(metric_reporting = switch),
};

const METADATA: &[Flag] = settings! {
    /// Run the metadata service over HTTP
    enable_http_metadata_server: "false" => Read,
    /// Address of the metadata service
    http_metadata_server_host: "0.0.0.0" => Read,
    /// Port of the metadata service; 0 selects a free one
    http_metadata_server_port: "8080" => Read,
    /// Token that the metadata service of this master demands, and that the one to clean demands;
    /// give it in the environment, because other users of the host see command lines
    metadata_http_token [MC_METADATA_HTTP_TOKEN]: "" => Read,
    /// Folder where the metadata service keeps its entries, rocksdb:///path; empty for memory
    http_metadata_server_kept_in: "" => Read,
    /// Remove the metadata of a client whose heartbeats timed out
    enable_metadata_cleanup_on_timeout: "false" => Read,
    /// Metadata service to clean, http://host:port/metadata; empty for the one of this master
    metadata_server [MOONCAKE_TE_META_DATA_SERVER]: "" => Read,
    /// Cluster id in the keys of the metadata to clean; empty for none
    metadata_cluster_id [MC_METADATA_CLUSTER_ID]: "" => Read,
};

const LIFETIMES: &[Flag] = settings! {
    /// Time of a lease (milliseconds, or with a unit: ms s m h); below 50 ms, also 0, objects may
    /// be removed while they are read, and their space rests for 1 s
    default_kv_lease_ttl: "10000ms" => set!(|config, text| set_lease(&mut config.options, millis(text)?)),
    /// Time of a soft pin without a time in the put
    default_kv_soft_pin_ttl: "1800000ms" => set!(options.soft_pin_ttl = millis),
    /// Longest time of a soft pin
    max_kv_soft_pin_ttl: "604800000ms" => set!(options.max_soft_pin_ttl = millis),
    /// Seconds without a heartbeat after which a client expires, or is suspected
    client_ttl | client_live_ttl_sec: "10" => set!(options.client_ttl = seconds),
    /// Seconds without a heartbeat after which a client is suspected; empty for client_ttl
    client_active_ttl_sec: "" => Read,
    /// Further seconds after which a suspected client expires; empty for as long as
    /// client_active_ttl_sec, if that is given, otherwise clients expire without a suspicion
    client_suspicion_ttl_sec: "" => Read,
    /// Seconds after which another client may take over a write in progress
    put_start_discard_timeout_sec: "30" => set!(options.put_discard = seconds),
    /// Seconds until an unfinished allocation expires; less than 30 counts as 30
    put_start_release_timeout_sec: "600" => set!(options.put_release = seconds),
    /// Time in quarantine for the space of a revoked write
    revoked_write_rest: "10000ms" => set!(options.revoke_rest = millis),
    /// Time after the start in which nothing is placed in segments of the previous master; auto: as
    /// long as a lease or an allocation of this or an earlier master may last
    remount_rest: "auto" => set!(options.remount_rest = auto_or_millis),
};

const SPACE: &[Flag] = settings! {
    /// Eviction policy: gittins, tenure, lru, fifo, s3fifo
    eviction_policy: "gittins" => set!(eviction.kind = number),
    /// Share of the capacity above which the background evicts
    eviction_high_watermark_ratio: "0.9" => set!(options.high_watermark = ratio),
    /// Distance below the watermark that the background may evict to
    eviction_ratio: "0.05" => set!(options.eviction_ratio = ratio),
    /// Share of its quota above which the background evicts objects of a tenant
    tenant_eviction_high_watermark_ratio: "0.9"
        => Idle("a put evicts what the quota of its tenant needs", is_share),
    /// Time for which a look-up protects an object from puts that find no other space:
    /// milliseconds, or auto for a tenth of the lease
    look_up_protection: "auto" => set!(options.look_up_protection = auto_or_millis),
    /// Evict soft-pinned objects if nothing else can be evicted
    allow_evict_soft_pinned_objects: "true" => set!(options.evict_soft_pinned = switch),
    /// Allocator of segments: offset, best_fit
    memory_allocator: "offset"
        => set!(|config, name| config.allocator.kind = number(supported_allocator(name))?),
    /// Placement of new objects: random, free_ratio_first, ssd_free_ratio_first, local_first, cxl
    allocation_strategy: "random" => set!(options.placement = number),
    /// Number of shards of the directory, a power of two
    directory_shards: "64" => set!(|config, text| config.options.shards = within(text, 1, 4096)?),
};

const LOG: &[Flag] = settings! {
    /// Configuration file: .yaml, .yml, .json or .toml
    config_path: "" => Read,
    /// Name of the cluster
    cluster_id [MC_STORE_CLUSTER_ID]: "mooncake_cluster" => set!(cluster_id = cluster_id),
    /// Minimum log level: 0 info, 1 warnings, 2 errors
    minloglevel: "0" => Read,
    /// Verbosity: 1 debug, 2 trace
    v: "0" => Read,
    /// Log levels by module: `info,mooncake_master=debug`
    log_filter [RUST_LOG]: "" => set!(log_filter = any),
    /// Folder of the log file mooncake_master.INFO
    log_dir: "" => set!(log_dir = optional),
    /// Log to standard error; with log_dir only if this flag is given, too
    logtostderr: "true" => Read,
    /// Log to standard error, too
    alsologtostderr: "false" => Idle(STDERR, is_switch),
    /// Colours in the log
    colorlogtostderr: "false" => Idle("only a terminal gets colours", is_switch),
    /// Buffering of the log
    logbuflevel: "0" => Idle(STDERR, check::<i64>),
    /// Buffering of the log
    logbufsecs: "30" => Idle(STDERR, check::<u64>),
    /// Time and level on each log line
    log_prefix: "true" => Idle(STDERR, is_switch),
    /// Links to log files
    log_link: "" => Idle(STDERR, check::<String>),
    /// Permissions of log files
    logfile_mode: "436" => Idle(STDERR, check::<u64>),
    /// Largest log file, in MB
    max_log_size: "1800" => Idle("log files are not rotated", check::<u64>),
    /// Level of lines that go to standard error, too
    stderrthreshold: "2" => Idle(STDERR, check::<u64>),
    /// Stop logging on a full disk
    stop_logging_if_full_disk: "false" => Idle(STDERR, is_switch),
    /// Log levels by module
    vmodule: "" => Idle("log_filter does this", check::<String>),
    /// Arena of buffers
    use_mmap_arena_allocator: "false" => Idle(ARENA, is_switch),
    /// Arena of buffers
    mmap_arena_pool_size: "8589934592" => Idle(ARENA, check::<u64>),
};

const COPIES: &[Flag] = settings! {
    /// Maximum number of copies and moves that wait for their client
    max_total_pending_tasks: "10000" => set!(options.tasks.max_pending = count),
    /// Maximum number of copies and moves in progress
    max_total_processing_tasks: "10000" => set!(options.tasks.max_processing = count),
    /// Maximum number of completed copies and moves that can be queried
    max_total_finished_tasks: "10000" => set!(options.tasks.max_finished = count),
    /// Seconds until an unfetched task fails; 0 for never
    pending_task_timeout_sec: "300" => set!(options.tasks.pending_timeout = limit),
    /// Seconds until a fetched task fails; 0 for never
    processing_task_timeout_sec: "300" => set!(options.tasks.processing_timeout = limit),
    /// Retries of a task that finds no space
    max_retry_attempts: "10" => set!(options.tasks.max_retries = number),
    /// Additional replicas of hot objects: off, observe (log only), enforce
    dynamic_replication_mode: "off" => Read,
    /// Seconds over which reads are counted; 0 counts as 1
    dynamic_replication_heat_window_seconds: "10" => Read,
    /// Reads per second that make an object hot
    dynamic_replication_admission_qps_threshold: "0.8" => Read,
    /// Maximum number of memory replicas of a hot object; 0 counts as 1
    dynamic_replication_max_memory_replicas: "2" => Read,
};

const TIERS: &[Flag] = settings! {
    /// Keep objects on disks of clients, too
    enable_offload: "false" => Read,
    /// Write objects to disk at eviction, not at put end
    offload_on_evict: "false" => Read,
    /// Evict objects that do not fit into the offload queue
    offload_force_evict: "false" => Read,
    /// Maximum number of objects in the offload queue
    offloading_queue_limit: "50000" => Read,
    /// Share of the offload queue that one eviction may fill
    offload_cap_ratio: "0.5" => Read,
    /// Bring objects on disk back to memory when they are read
    promotion_on_hit: "false" => Read,
    /// Approximate number of reads before a promotion: 1 to 255
    promotion_admission_threshold: "2" => Read,
    /// Maximum number of promotions in progress per client
    promotion_queue_limit: "50000" => Read,
    /// Maximum number of promotions per heartbeat
    promotion_max_per_heartbeat: "1" => Read,
    /// Folder on a file system that all clients mount at this path; puts are written to files
    /// there, too, in a folder named by the cluster id
    root_fs_dir: "" => Read,
    /// Reported capacity for files in bytes; the default reports none
    global_file_segment_size: "9223372036854775807" => Read,
    /// Remove the oldest files above the quota; otherwise no file is written
    enable_disk_eviction: "true" => Read,
    /// Quota of the files that a client knows, in bytes; 0 for nine tenths of the file system
    quota_bytes: "0" => Read,
    /// eviction_ratio for NVMe-over-Fabrics
    nof_eviction_ratio: "0.05" => Idle(NOF, is_share),
    /// eviction_high_watermark_ratio for NVMe-over-Fabrics
    nof_eviction_high_watermark_ratio: "0.9" => Idle(NOF, is_share),
    /// Interval of probes of targets
    nof_heartbeat_interval_sec: "10" => Idle(NOF, check::<u64>),
    /// Timeout of a probe
    nof_heartbeat_probe_timeout_ms: "1000" => Idle(NOF, check::<u64>),
    /// Failed probes after which a target is dead
    nof_heartbeat_failures_threshold: "3" => Idle(NOF, check::<u64>),
    /// Place objects in CXL memory
    enable_cxl: "false" => Off(CXL),
    /// Device of the CXL memory
    cxl_path: "/dev/dax0.0" => Idle(CXL, check::<String>),
    /// Size of the CXL memory in bytes
    cxl_size: "8589934592" => Idle(CXL, check::<u64>),
};

const MASTERS: &[Flag] = settings! {
    /// Run as one of several masters, of which one leads
    enable_ha: "false" => Read,
    /// Service for elections: etcd
    ha_backend_type: "etcd" => Read,
    /// Address of the election service
    ha_backend_connstring: "" => Read,
    /// Addresses of etcd; --ha_backend_connstring takes precedence
    etcd_endpoints: "" => Read,
    /// Seconds of the leader's lease in etcd, 2 to 60; a standby takes over after it
    ha_leader_lease_ttl_sec: "5" => Read,
    /// Replicate the state of the leader to standbys
    enable_oplog: "false" => Off(HA),
    /// Polling interval of the oplog
    oplog_poll_interval_ms: "1000" => Idle(HA, check::<u64>),
    /// Entries of the oplog per batch
    oplog_batch_max_entries: "1024" => Idle(HA, check::<u64>),
    /// Retry time of the oplog
    batch_oplog_retry_timeout_sec: "180" => Idle(HA, check::<u64>),
    /// Let standbys write snapshots
    enable_oplog_snapshot: "false" => Off(HA),
    /// Objects per part of a snapshot of a standby
    snapshot_chunk_object_count: "1000000" => Idle(HA, check::<u64>),
    /// Name of this pod
    pod_name [POD_NAME]: "" => Idle(HA, check::<String>),
    /// Namespace of this pod
    pod_namespace [POD_NAMESPACE]: "" => Idle(HA, check::<String>),
    /// Write snapshots of the master's state
    enable_snapshot: "false" => Read,
    /// Start from the latest complete snapshot
    enable_snapshot_restore: "false" => Read,
    /// Folder of the snapshots, with one folder per cluster id; or rocksdb:///path
    snapshot_local_path [MOONCAKE_SNAPSHOT_LOCAL_PATH]: "" => Read,
    /// Seconds between two snapshots
    snapshot_interval_seconds: "600" => Read,
    /// Seconds until a snapshot is abandoned
    snapshot_child_timeout_seconds: "300" => Read,
    /// Number of snapshots that are kept
    snapshot_retention_count: "2" => Read,
    /// Folder for snapshots that cannot be written to their own folder, and for copies of restored
    /// ones
    snapshot_backup_dir: "" => Read,
    /// Storage of snapshots: local
    snapshot_object_store_type | snapshot_payload_store_type | snapshot_payload_backend_type: "" => Read,
    /// Catalogue of snapshots: embedded
    snapshot_catalog_store_type | snapshot_catalog_backend_type: "" => Read,
    /// Address of another catalogue
    snapshot_catalog_store_connstring | snapshot_catalog_backend_connstring: ""
        => Idle(SNAPSHOTS, check::<String>),
};

const MANAGED_WEIGHTS: &[Flag] = settings! {
    /// Time without a put after which an unfinished import is aborted
    weight_import_idle_timeout_ms: "300000ms" => set!(options.weight_import_idle = millis),
    /// Manage weights with an oplog
    weight_management_oplog_capability_confirmed: "false" => Off(WEIGHTS),
};

const QUOTAS: &[Flag] = settings! {
    /// Enable tenants with namespaces and quotas
    enable_multi_tenants: "false" => Read,
    /// Storage of the tenant policy: file, etcd, rocksdb
    tenant_quota_connector_type: "file" => Read,
    /// Tenant policy: path of a YAML file (version 1), host:port of an etcd with the key
    /// mooncake-store/<cluster_id>/tenant_quota_policy, or rocksdb:///path
    tenant_quota_connector_uri: "" => Read,
    /// With tenants: grant a client that may end a put with bytes missing, as one of Mooncake C++,
    /// only memory without bytes of other tenants; clients of this project zero their memory
    zero_across_tenants: "true" => set!(options.zero_across_tenants = switch),
};

const KV_EVENTS: &[Flag] = settings! {
    /// Publish events about stored and removed objects over ZeroMQ
    enable_kv_events: "false" => Read,
    /// Endpoint of the events: tcp://HOST:PORT. HOST is an address, a name, an interface, or * for
    /// every address; * as PORT selects a free one
    kv_events_bind_endpoint: "" => Read,
    /// Name of this cache in events
    kv_events_backend_id: "" => Read,
    /// Maximum number of queued events, 0 for no limit; a full queue drops the oldest
    kv_events_queue_capacity: "65536" => Read,
    /// Add the older fields of vLLM and SGLang to events
    kv_events_emit_legacy_compat: "true" => Read,
    /// Add the key to events; without keys, objects without a hash as key have no events
    kv_events_emit_object_key: "true" => Read,
    /// Publish the blocks that clients look up, too, in messages of their own, for `mooncake trace
    /// record`
    kv_events_emit_look_ups: "false" => Read,
    /// Field model_name of events; empty for the model that the key names, or nil
    kv_events_model_name: "" => Read,
    /// Field tenant_id of events
    kv_events_tenant_id: "default" => Idle(EVENTS, check::<String>),
    /// Field additional_salt of events; empty for nil
    kv_events_additional_salt: "" => Read,
    /// Field lora_name of events; empty for nil
    kv_events_lora_name: "" => Read,
    /// Field block_size of events; 0 if it is not known
    kv_events_block_size: "0" => Read,
    /// Field dp_rank of events; nil if the flag is not given
    kv_events_dp_rank: "0" => Read,
};

fn rpc_port(text: &str) -> Parsed<u16> {
    match text {
        "auto" => Ok(0),
        "0" => Ok(50051),
        text => number(text),
    }
}

/// Shortest lease that protects objects from removal until its end.
const SHORTEST_LEASE: Duration = Duration::from_millis(50);
/// Time that a reader has in any case, because every read needs some.
const TIME_TO_READ: Duration = Duration::from_secs(1);

fn set_lease(options: &mut MasterOptions, protects: Duration) {
    let is_short = protects < SHORTEST_LEASE && !is_planted("lease-too-short-to-read");
    options.lease_ttl = if is_short { TIME_TO_READ } else { protects };
    options.unprotected_lease = options.lease_ttl - protects;
}

fn address_of(interface: &str) -> Parsed<String> {
    let address = mooncake_transport::net::address_of(interface).map_err(|error| error.to_string())?;
    Ok(address.to_string())
}

fn connection_bytes(text: &str) -> Parsed<Option<u64>> {
    match text {
        "" => Ok(None),
        text => match bytes(text)? {
            0..0x10_0000 => Err("must be at least 1 MB".into()),
            limit => Ok(Some(limit)),
        },
    }
}

fn auto_or_millis(text: &str) -> Parsed<Option<Duration>> {
    if text == "auto" { Ok(None) } else { millis(text).map(Some) }
}

/// Replaces an older allocator of Mooncake C++ with slabs and a maximum size. `Settings::notes`
/// reports the replacement.
fn supported_allocator(name: &str) -> &str {
    if name == "cachelib" { "offset" } else { name }
}

fn is_switch(text: &str) -> Parsed<()> {
    switch(text).map(drop)
}

fn is_share(text: &str) -> Parsed<()> {
    ratio(text).map(drop)
}
