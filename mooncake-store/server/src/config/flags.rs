//! Table of flags: every flag of Mooncake C++, and those of this project.

use super::draft::Draft;
use super::flag::{Flag, Group, flag, idle, off};
use super::values::{
    Parsed, any, cluster_id, endpoint, limit, millis, number, ratio, said, seconds, switch, text,
};

/// Returns every flag in the order of `--help`.
pub fn flags() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|group| group.flags)
}

/// Returns the flag of a name or an older name.
pub fn flag_named(name: &str) -> Option<&'static Flag> {
    flags().find(|flag| flag.names().any(|known| known == name))
}

/// Assigns a parsed value to a field of the draft.
macro_rules! set {
    ($($place:ident).+ = $parse:expr) => {
        |draft, text| {
            draft.$($place).+ = $parse(text)?;
            Ok(())
        }
    };
}

const NOF: &str = "NVMe-over-Fabrics is not built";
const CXL: &str = "CXL memory is not built";
const HA: &str = "standbys need no oplog, because clients re-announce their objects after failover";
const SNAPSHOTS: &str = "the folder is the list";
const EVENTS: &str = "Mooncake C++ does not put it into events either";
const STDERR: &str = "one writer writes log lines at once";
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
    Group { name: "Tenants", flags: QUOTAS },
    Group { name: "Events", flags: KV_EVENTS },
];

const CALLS: &[Flag] = &[
    flag("rpc_port", "50051", "RPC port; auto selects a free one, 0 means the default", |draft, text| {
        draft.config.rpc_port = match text {
            "auto" => 0,
            "0" => 50051,
            text => number(text)?,
        };
        Ok(())
    })
    .or(&["port"]),
    flag("rpc_address", "0.0.0.0", "RPC address", set!(config.rpc_address = text)),
    flag("rpc_interface", "", "Network interface whose IPv4 address is the RPC address", |draft, name| {
        if !name.is_empty() {
            draft.config.rpc_address = mooncake_transport::net::address_of(name).map_err(said)?.to_string();
        }
        Ok(())
    }),
    flag(
        "rpc_thread_num",
        "0",
        "RPC threads; 0 for one per core, at most max_threads",
        set!(config.rpc_threads = number),
    ),
    flag("max_threads", "16", "Limit for rpc_thread_num=0", |draft, text| match number(text)? {
        0 => Err("must not be 0".into()),
        threads => {
            draft.config.max_threads = threads;
            Ok(())
        }
    }),
    flag(
        "rpc_conn_timeout_seconds",
        "0",
        "Seconds until an idle connection is closed; 0 for never",
        |draft, text| {
            draft.config.rpc_idle = Some(seconds(text)?).filter(|idle| !idle.is_zero());
            Ok(())
        },
    ),
    off(
        "rpc_enable_tcp_no_delay",
        "true",
        "Send small responses at once",
        "small responses are always sent at once",
    ),
];

const ADMIN: &[Flag] = &[
    flag("metrics_host", "0.0.0.0", "Address of the admin endpoints", set!(config.metrics_host = text)),
    flag(
        "metrics_port",
        "9003",
        "Port of the admin endpoints; 0 selects a free one",
        set!(config.metrics_port = number),
    ),
    flag(
        "enable_metric_reporting",
        "true",
        "Log a line of metrics every 10 s",
        set!(config.metric_reporting = switch),
    ),
];

const METADATA: &[Flag] = &[
    flag(
        "enable_http_metadata_server",
        "false",
        "Run the metadata service over HTTP",
        set!(metadata_enabled = switch),
    ),
    flag(
        "http_metadata_server_host",
        "0.0.0.0",
        "Address of the metadata service",
        set!(metadata.host = text),
    ),
    flag(
        "http_metadata_server_port",
        "8080",
        "Port of the metadata service; 0 selects a free one",
        set!(metadata.port = number),
    ),
    flag(
        "http_metadata_server_kept_in",
        "",
        "Folder where the metadata service keeps its entries, rocksdb:///path; empty for memory",
        |draft, text| {
            draft.metadata.kept_in = Some(text).filter(|text| !text.is_empty()).map(Into::into);
            Ok(())
        },
    ),
    flag(
        "enable_metadata_cleanup_on_timeout",
        "false",
        "Remove the metadata of a client whose heartbeats timed out",
        set!(clean_up = switch),
    ),
    flag(
        "metadata_server",
        "",
        "Metadata service to clean, http://host:port/metadata; empty for the one of this master",
        |draft, url| {
            draft.metadata_url = url.into();
            Ok(())
        },
    )
    .from(&["MOONCAKE_TE_META_DATA_SERVER"]),
    flag(
        "metadata_cluster_id",
        "",
        "Cluster id in the keys of the metadata to clean; empty for none",
        |draft, id| {
            draft.metadata_cluster = if id.is_empty() { String::new() } else { cluster_id(id)? };
            Ok(())
        },
    )
    .from(&["MC_METADATA_CLUSTER_ID"]),
];

const LIFETIMES: &[Flag] = &[
    flag(
        "default_kv_lease_ttl",
        "10000ms",
        "Time of a lease (milliseconds, or with a unit: ms s m h)",
        set!(config.options.lease_ttl = millis),
    ),
    flag(
        "default_kv_soft_pin_ttl",
        "1800000ms",
        "Time of a soft pin without a time in the put",
        set!(config.options.soft_pin_ttl = millis),
    ),
    flag(
        "max_kv_soft_pin_ttl",
        "86400000ms",
        "Longest time of a soft pin",
        set!(config.options.max_soft_pin_ttl = millis),
    ),
    flag(
        "client_ttl",
        "10",
        "Seconds without a heartbeat after which a client expires",
        set!(config.options.client_ttl = seconds),
    )
    .or(&["client_live_ttl_sec"]),
    flag(
        "put_start_discard_timeout_sec",
        "30",
        "Seconds after which another client may take over a write in progress",
        set!(config.options.put_discard = seconds),
    ),
    flag(
        "put_start_release_timeout_sec",
        "600",
        "Seconds until an unfinished allocation expires; less than 30 counts as 30",
        set!(config.options.put_release = seconds),
    ),
    flag(
        "revoked_write_rest",
        "10000ms",
        "Time in quarantine for the space of a revoked write",
        set!(config.options.revoke_rest = millis),
    ),
    flag(
        "remount_rest",
        "auto",
        "Time after the start in which nothing is placed in segments of the previous master; auto: as long as a lease or an allocation of this or an earlier master may last",
        |draft, text| {
            draft.config.options.remount_rest = if text == "auto" { None } else { Some(millis(text)?) };
            Ok(())
        },
    ),
];

const SPACE: &[Flag] = &[
    flag("eviction_policy", "tenure", "Eviction policy: tenure, lru, fifo, s3fifo", |draft, text| {
        draft.config.eviction.kind = text.parse().map_err(said)?;
        Ok(())
    }),
    flag(
        "eviction_high_watermark_ratio",
        "0.9",
        "Share of the capacity above which the background evicts",
        set!(config.options.high_watermark = ratio),
    ),
    flag(
        "eviction_ratio",
        "0.05",
        "Distance below the watermark that the background may evict to",
        set!(config.options.eviction_ratio = ratio),
    ),
    flag(
        "allow_evict_soft_pinned_objects",
        "true",
        "Evict soft-pinned objects if nothing else can be evicted",
        set!(config.options.evict_soft_pinned = switch),
    ),
    flag("memory_allocator", "offset", "Allocator of segments: offset, best_fit", |draft, text| {
        // Older allocator of Mooncake C++ with slabs and a maximum size; `Settings::notes` reports
        // the replacement.
        let known = if text == "cachelib" { "offset" } else { text };
        draft.config.allocator.kind = known.parse().map_err(said)?;
        Ok(())
    }),
    flag(
        "allocation_strategy",
        "random",
        "Placement of new objects: random, free_ratio_first, ssd_free_ratio_first, local_first, cxl",
        |draft, text| {
            draft.config.options.placement = text.parse().map_err(said)?;
            Ok(())
        },
    ),
    flag(
        "directory_shards",
        "64",
        "Number of shards of the directory, a power of two",
        set!(config.options.shards = number),
    ),
];

const LOG: &[Flag] = &[
    flag("config_path", "", "Configuration file: .yaml, .yml, .json or .toml", |_, _| Ok(())),
    flag("cluster_id", "mooncake_cluster", "Name of the cluster", set!(config.cluster_id = cluster_id))
        .from(&["MC_STORE_CLUSTER_ID"]),
    flag("minloglevel", "0", "Minimum log level: 0 info, 1 warnings, 2 errors", |draft, text| {
        draft.config.log_level = match number(text)? {
            0 => "info",
            1 => "warn",
            2u8.. => "error",
        };
        Ok(())
    }),
    flag("v", "0", "Verbosity: 1 debug, 2 trace", set!(verbosity = number)),
    flag("log_filter", "", "Log levels by module: `info,mooncake_master=debug`", |draft, text| {
        draft.config.log_filter = text.into();
        Ok(())
    })
    .from(&["RUST_LOG"]),
    flag("log_dir", "", "Folder of the log file mooncake_master.INFO", |draft, text| {
        draft.log_dir = Some(text).filter(|dir| !dir.is_empty()).map(Into::into);
        Ok(())
    }),
    flag(
        "logtostderr",
        "true",
        "Log to standard error; with log_dir only if this flag is given, too",
        set!(to_stderr = |text| switch(text).map(Some)),
    ),
    idle("alsologtostderr", "false", "Log to standard error, too", STDERR, is_switch),
    idle("colorlogtostderr", "false", "Colours in the log", "only a terminal gets colours", is_switch),
    idle("logbuflevel", "0", "Buffering of the log", STDERR, is_whole),
    idle("logbufsecs", "30", "Buffering of the log", STDERR, is_count),
    idle("log_prefix", "true", "Time and level on each log line", STDERR, is_switch),
    idle("log_link", "", "Links to log files", STDERR, is_anything),
    idle("logfile_mode", "436", "Permissions of log files", STDERR, is_count),
    idle("max_log_size", "1800", "Largest log file, in MB", "log files are not rotated", is_count),
    idle("stderrthreshold", "2", "Level of lines that go to standard error, too", STDERR, is_count),
    idle("stop_logging_if_full_disk", "false", "Stop logging on a full disk", STDERR, is_switch),
    idle("vmodule", "", "Log levels by module", "log_filter does this", is_anything),
    idle("use_mmap_arena_allocator", "false", "Arena of buffers", ARENA, is_switch),
    idle("mmap_arena_pool_size", "8589934592", "Arena of buffers", ARENA, is_count),
];

const COPIES: &[Flag] = &[
    flag(
        "max_total_pending_tasks",
        "10000",
        "Maximum number of copies and moves that wait for their client",
        set!(config.options.tasks.max_pending = number),
    ),
    flag(
        "max_total_processing_tasks",
        "10000",
        "Maximum number of copies and moves in progress",
        set!(config.options.tasks.max_processing = number),
    ),
    flag(
        "max_total_finished_tasks",
        "10000",
        "Maximum number of completed copies and moves that can be queried",
        set!(config.options.tasks.max_finished = number),
    ),
    flag(
        "pending_task_timeout_sec",
        "300",
        "Seconds until an unfetched task fails; 0 for never",
        set!(config.options.tasks.pending_timeout = limit),
    ),
    flag(
        "processing_task_timeout_sec",
        "300",
        "Seconds until a fetched task fails; 0 for never",
        set!(config.options.tasks.processing_timeout = limit),
    ),
    flag(
        "max_retry_attempts",
        "10",
        "Retries of a task that finds no space",
        set!(config.options.tasks.max_retries = number),
    ),
    flag(
        "dynamic_replication_mode",
        "off",
        "Additional replicas of hot objects: off, observe (log only), enforce",
        |draft, text| {
            draft.hot_mode = match text {
                "off" => None,
                "observe" => Some(false),
                "enforce" => Some(true),
                _ => return Err("must be off, observe or enforce".into()),
            };
            Ok(())
        },
    ),
    flag(
        "dynamic_replication_heat_window_seconds",
        "10",
        "Seconds over which reads are counted; 0 counts as 1",
        |draft, text| {
            draft.hot.window = seconds(text)?.max(std::time::Duration::from_secs(1));
            Ok(())
        },
    ),
    flag(
        "dynamic_replication_admission_qps_threshold",
        "0.8",
        "Reads per second that make an object hot",
        set!(hot.reads_per_second = number),
    ),
    flag(
        "dynamic_replication_max_memory_replicas",
        "2",
        "Maximum number of memory replicas of a hot object; 0 counts as 1",
        |draft, text| {
            draft.hot.max_replicas = number::<usize>(text)?.max(1);
            Ok(())
        },
    ),
];

const TIERS: &[Flag] = &[
    flag("enable_offload", "false", "Keep objects on disks of clients, too", set!(offload = switch)),
    flag(
        "offload_on_evict",
        "false",
        "Write objects to disk at eviction, not at put end",
        set!(disks.on_evict = switch),
    ),
    flag(
        "offload_force_evict",
        "false",
        "Evict objects that do not fit into the offload queue",
        set!(disks.force_evict = switch),
    ),
    flag(
        "offloading_queue_limit",
        "50000",
        "Maximum number of objects in the offload queue",
        set!(disks.queue_limit = number),
    ),
    flag(
        "offload_cap_ratio",
        "0.5",
        "Share of the offload queue that one eviction may fill",
        set!(disks.queue_part = ratio),
    ),
    flag(
        "promotion_on_hit",
        "false",
        "Bring objects on disk back to memory when they are read",
        set!(promotion_on_hit = switch),
    ),
    flag(
        "promotion_admission_threshold",
        "2",
        "Approximate number of reads before a promotion: 1 to 255",
        set!(promotion.threshold = number),
    ),
    flag(
        "promotion_queue_limit",
        "50000",
        "Maximum number of promotions in progress per client",
        set!(promotion.queue_limit = number),
    ),
    flag(
        "promotion_max_per_heartbeat",
        "1",
        "Maximum number of promotions per heartbeat",
        set!(promotion.per_heartbeat = number),
    ),
    flag(
        "root_fs_dir",
        "",
        "Folder on a file system that all clients mount at this path; puts are written to files there, too, in a folder named by the cluster id",
        set!(files_in = any),
    ),
    flag(
        "global_file_segment_size",
        "9223372036854775807",
        "Reported capacity for files in bytes; the default reports none",
        |draft, text| {
            let bytes: u64 = number(text)?;
            draft.files.capacity = if bytes == i64::MAX as u64 { 0 } else { bytes };
            Ok(())
        },
    ),
    flag(
        "enable_disk_eviction",
        "true",
        "Remove the oldest files above the quota; otherwise no file is written",
        set!(files.evict = switch),
    ),
    flag(
        "quota_bytes",
        "0",
        "Quota of the files that a client knows, in bytes; 0 for nine tenths of the file system",
        set!(files.quota = number),
    ),
    idle("nof_eviction_ratio", "0.05", "eviction_ratio for NVMe-over-Fabrics", NOF, is_ratio),
    idle(
        "nof_eviction_high_watermark_ratio",
        "0.9",
        "eviction_high_watermark_ratio for NVMe-over-Fabrics",
        NOF,
        is_ratio,
    ),
    idle("nof_heartbeat_interval_sec", "10", "Interval of probes of targets", NOF, is_count),
    idle("nof_heartbeat_probe_timeout_ms", "1000", "Timeout of a probe", NOF, is_count),
    idle(
        "nof_heartbeat_failures_threshold",
        "3",
        "Failed probes after which a target is dead",
        NOF,
        is_count,
    ),
    off("enable_cxl", "false", "Place objects in CXL memory", CXL),
    idle("cxl_path", "/dev/dax0.0", "Device of the CXL memory", CXL, is_anything),
    idle("cxl_size", "8589934592", "Size of the CXL memory in bytes", CXL, is_count),
];

const MASTERS: &[Flag] = &[
    flag("enable_ha", "false", "Run as one of several masters, of which one leads", set!(masters = switch)),
    flag("ha_backend_type", "etcd", "Service for elections: etcd", set!(electors = any)),
    flag("ha_backend_connstring", "", "Address of the election service", set!(electors_at = any)),
    flag(
        "etcd_endpoints",
        "",
        "Addresses of etcd; --ha_backend_connstring takes precedence",
        set!(etcd = any),
    ),
    off("enable_oplog", "false", "Replicate the state of the leader to standbys", HA),
    idle("oplog_poll_interval_ms", "1000", "Polling interval of the oplog", HA, is_count),
    idle("oplog_batch_max_entries", "1024", "Entries of the oplog per batch", HA, is_count),
    idle("batch_oplog_retry_timeout_sec", "180", "Retry time of the oplog", HA, is_count),
    idle("pod_name", "", "Name of this pod", HA, is_anything).from(&["POD_NAME"]),
    idle("pod_namespace", "", "Namespace of this pod", HA, is_anything).from(&["POD_NAMESPACE"]),
    flag("enable_snapshot", "false", "Write snapshots of the master's state", set!(snapshots.write = switch)),
    flag(
        "enable_snapshot_restore",
        "false",
        "Start from the latest complete snapshot",
        set!(snapshots.restore = switch),
    ),
    flag(
        "snapshot_local_path",
        "",
        "Folder of the snapshots, with one folder per cluster id; or rocksdb:///path",
        |draft, text| {
            draft.snapshots.folder = text.into();
            Ok(())
        },
    )
    .from(&["MOONCAKE_SNAPSHOT_LOCAL_PATH"]),
    flag(
        "snapshot_interval_seconds",
        "600",
        "Seconds between two snapshots",
        set!(snapshots.interval = seconds),
    ),
    flag(
        "snapshot_child_timeout_seconds",
        "300",
        "Seconds until a snapshot is abandoned",
        set!(snapshots.limit = seconds),
    ),
    flag("snapshot_retention_count", "2", "Number of snapshots that are kept", set!(snapshots.keep = number)),
    flag(
        "snapshot_backup_dir",
        "",
        "Folder for snapshots that cannot be written to their own folder, and for copies of restored ones",
        |draft, text| {
            draft.snapshots.backup = Some(text).filter(|text| !text.is_empty()).map(Into::into);
            Ok(())
        },
    ),
    flag("snapshot_object_store_type", "", "Storage of snapshots: local", set!(snapshots_in = any))
        .or(&["snapshot_payload_store_type", "snapshot_payload_backend_type"]),
    flag("snapshot_catalog_store_type", "", "Catalogue of snapshots: embedded", set!(snapshot_list_in = any))
        .or(&["snapshot_catalog_backend_type"]),
    idle("snapshot_catalog_store_connstring", "", "Address of another catalogue", SNAPSHOTS, is_anything)
        .or(&["snapshot_catalog_backend_connstring"]),
];

const QUOTAS: &[Flag] = &[
    flag(
        "enable_multi_tenants",
        "false",
        "Enable tenants with namespaces and quotas",
        set!(tenants = switch),
    ),
    flag(
        "tenant_quota_connector_type",
        "file",
        "Storage of the tenant policy: file, etcd, rocksdb",
        |draft, text| match text {
            "file" | "etcd" | "rocksdb" => {
                draft.tenants_in = text.into();
                Ok(())
            }
            _ => Err("must be file, etcd or rocksdb".into()),
        },
    ),
    flag(
        "tenant_quota_connector_uri",
        "",
        "Tenant policy: path of a YAML file (version 1), host:port of an etcd with the key mooncake-store/<cluster_id>/tenant_quota_policy, or rocksdb:///path",
        |draft, text| {
            draft.tenant_policy = text.into();
            Ok(())
        },
    ),
];

const KV_EVENTS: &[Flag] = &[
    flag(
        "enable_kv_events",
        "false",
        "Publish events about stored and removed objects over ZeroMQ",
        set!(events_enabled = switch),
    ),
    flag("kv_events_bind_endpoint", "", "Endpoint of the events, such as tcp://*:5557", |draft, text| {
        draft.events_somewhere = !text.is_empty();
        if draft.events_somewhere {
            (draft.events.host, draft.events.port) = endpoint(text)?;
        }
        Ok(())
    }),
    flag("kv_events_backend_id", "", "Name of this cache in events", |draft, text| {
        draft.events.backend_id = text.into();
        Ok(())
    }),
    flag(
        "kv_events_queue_capacity",
        "65536",
        "Maximum number of queued events, 0 for no limit; a full queue drops the oldest",
        set!(events.capacity = number),
    ),
    flag(
        "kv_events_emit_legacy_compat",
        "true",
        "Add the older fields of vLLM and SGLang to events",
        set!(events.legacy = switch),
    ),
    flag(
        "kv_events_emit_object_key",
        "true",
        "Add the key to events; without keys, objects without a hash as key have no events",
        set!(events.object_key = switch),
    ),
    idle("kv_events_model_name", "", "A field of events", EVENTS, is_anything),
    idle("kv_events_tenant_id", "default", "A field of events", EVENTS, is_anything),
    idle("kv_events_additional_salt", "", "A field of events", EVENTS, is_anything),
    idle("kv_events_lora_name", "", "A field of events", EVENTS, is_anything),
    idle("kv_events_block_size", "0", "A field of events", EVENTS, is_count),
    idle("kv_events_dp_rank", "0", "A field of events", EVENTS, is_count),
];

fn is_switch(_: &mut Draft, text: &str) -> Parsed<()> {
    switch(text).map(drop)
}

fn is_ratio(_: &mut Draft, text: &str) -> Parsed<()> {
    match text.parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(()),
        _ => Err("must be a number, not below 0".into()),
    }
}

fn is_count(_: &mut Draft, text: &str) -> Parsed<()> {
    number::<u64>(text).map(drop)
}

fn is_whole(_: &mut Draft, text: &str) -> Parsed<()> {
    number::<i64>(text).map(drop)
}

fn is_anything(_: &mut Draft, _: &str) -> Parsed<()> {
    Ok(())
}
