//! The table of flags: every one the existing master takes, and ours.

use super::draft::Draft;
use super::flag::{Flag, Group, flag, idle, off};
use super::values::{
    Parsed, any, cluster_id, endpoint, limit, millis, number, ratio, said, seconds, switch, text,
};

/// Every flag, in the order they are shown.
pub fn flags() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|group| group.flags)
}

/// The flag of a name or an older name.
pub fn flag_named(name: &str) -> Option<&'static Flag> {
    flags().find(|flag| flag.names().any(|known| known == name))
}

/// Assigns a parsed value to a place in the draft.
macro_rules! set {
    ($($place:ident).+ = $parse:expr) => {
        |draft, text| {
            draft.$($place).+ = $parse(text)?;
            Ok(())
        }
    };
}

const NOF: &str = "NVMe-over-Fabrics is not built";
const CXL: &str = "CXL memory is not built yet";
const HA: &str = "a new leader is told by clients what they have";
const SNAPSHOTS: &str = "the list is the folder";
const EVENTS: &str = "the existing master does not put it into events any more either";
const STDERR: &str = "log lines are written as they come, by one writer";
const ARENA: &str = "a master allocates no object memory";

/// All flags by subject.
pub static GROUPS: &[Group] = &[
    Group { name: "Calls", flags: CALLS },
    Group { name: "Admin pages and figures", flags: ADMIN },
    Group { name: "Metadata of the transfer engine", flags: METADATA },
    Group { name: "Leases, pins and time limits", flags: LIFETIMES },
    Group { name: "Eviction and placement", flags: SPACE },
    Group { name: "Log and configuration", flags: LOG },
    Group { name: "Copies, moves and hot keys", flags: COPIES },
    Group { name: "SSD, files, NVMe-over-Fabrics, CXL", flags: TIERS },
    Group { name: "Several masters and snapshots", flags: MASTERS },
    Group { name: "Tenants", flags: QUOTAS },
    Group { name: "Events", flags: KV_EVENTS },
];

const CALLS: &[Flag] = &[
    flag(
        "rpc_port",
        "50051",
        "Port to answer calls at; auto takes a free one, 0 means the default",
        |draft, text| {
            draft.config.rpc_port = match text {
                "auto" => 0,
                "0" => 50051,
                text => number(text)?,
            };
            Ok(())
        },
    )
    .or(&["port"]),
    flag("rpc_address", "0.0.0.0", "Address to answer calls at", set!(config.rpc_address = text)),
    flag("rpc_interface", "", "Answer calls at the IPv4 address of this interface instead", |draft, name| {
        if !name.is_empty() {
            draft.config.rpc_address = mooncake_transport::net::address_of(name).map_err(said)?.to_string();
        }
        Ok(())
    }),
    flag(
        "rpc_thread_num",
        "0",
        "Threads that answer calls; 0 for one per core, at most max_threads",
        set!(config.rpc_threads = number),
    ),
    flag("max_threads", "16", "Bound on rpc_thread_num=0", |draft, text| match number(text)? {
        0 => Err("must not be 0".into()),
        threads => {
            draft.config.max_threads = threads;
            Ok(())
        }
    }),
    flag(
        "rpc_conn_timeout_seconds",
        "0",
        "Close a connection on which nothing moves for this long; 0 for never",
        |draft, text| {
            draft.config.rpc_idle = Some(seconds(text)?).filter(|idle| !idle.is_zero());
            Ok(())
        },
    ),
    off(
        "rpc_enable_tcp_no_delay",
        "true",
        "Send small answers at once",
        "answers that wait for more data cannot be had",
    ),
];

const ADMIN: &[Flag] = &[
    flag("metrics_host", "0.0.0.0", "Address of the admin pages", set!(config.metrics_host = text)),
    flag(
        "metrics_port",
        "9003",
        "Port of the admin pages; 0 takes a free one",
        set!(config.metrics_port = number),
    ),
    flag(
        "enable_metric_reporting",
        "true",
        "Log a line of figures every 10 s",
        set!(config.metric_reporting = switch),
    ),
];

const METADATA: &[Flag] = &[
    flag(
        "enable_http_metadata_server",
        "false",
        "Serve the transfer engine's metadata over HTTP",
        set!(metadata_enabled = switch),
    ),
    flag(
        "http_metadata_server_host",
        "0.0.0.0",
        "Address of the metadata server",
        set!(metadata.host = text),
    ),
    flag(
        "http_metadata_server_port",
        "8080",
        "Port of the metadata server; 0 takes a free one",
        set!(metadata.port = number),
    ),
    flag(
        "http_metadata_server_kept_in",
        "",
        "Directory where the metadata server keeps what it is given, rocksdb:///path; its memory otherwise",
        |draft, text| {
            draft.metadata.kept_in = Some(text).filter(|text| !text.is_empty()).map(Into::into);
            Ok(())
        },
    ),
    flag(
        "enable_metadata_cleanup_on_timeout",
        "false",
        "Remove the metadata of a client that was silent too long",
        set!(clean_up = switch),
    ),
    flag(
        "metadata_server",
        "",
        "Where that metadata is, if not in the server of this master: http://host:port/metadata",
        |draft, url| {
            draft.metadata_url = url.into();
            Ok(())
        },
    )
    .from(&["MOONCAKE_TE_META_DATA_SERVER"]),
    flag(
        "metadata_cluster_id",
        "",
        "The cluster in the keys of that metadata; empty for none",
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
        "How long a reader may rely on an answer (ms, or with unit: ms s m h)",
        set!(config.options.lease_ttl = millis),
    ),
    flag(
        "default_kv_soft_pin_ttl",
        "1800000ms",
        "How long a soft pin lasts when the put does not say",
        set!(config.options.soft_pin_ttl = millis),
    ),
    flag(
        "max_kv_soft_pin_ttl",
        "86400000ms",
        "Longest soft pin a put may ask for",
        set!(config.options.max_soft_pin_ttl = millis),
    ),
    flag(
        "client_ttl",
        "10",
        "Seconds of silence after which a client is gone",
        set!(config.options.client_ttl = seconds),
    )
    .or(&["client_live_ttl_sec"]),
    flag(
        "put_start_discard_timeout_sec",
        "30",
        "After this long a write in progress may be taken over",
        set!(config.options.put_discard = seconds),
    ),
    flag(
        "put_start_release_timeout_sec",
        "600",
        "How long a write grant is valid",
        set!(config.options.put_release = seconds),
    ),
    flag(
        "revoked_write_rest",
        "10000ms",
        "How long the space of a revoked write rests",
        set!(config.options.revoke_rest = millis),
    ),
    flag(
        "remount_rest",
        "auto",
        "How long after its start a master places nothing in segments of the one before it; auto: as long as a lease or a write of this master or an earlier one may last, as clients and snapshots tell",
        |draft, text| {
            draft.config.options.remount_rest = if text == "auto" { None } else { Some(millis(text)?) };
            Ok(())
        },
    ),
];

const SPACE: &[Flag] = &[
    flag("eviction_policy", "tenure", "What goes first: tenure, lru, fifo, s3fifo", |draft, text| {
        draft.config.eviction.kind = text.parse().map_err(said)?;
        Ok(())
    }),
    flag(
        "eviction_high_watermark_ratio",
        "0.9",
        "Evict in the background above this part of the capacity",
        set!(config.options.high_watermark = ratio),
    ),
    flag(
        "eviction_ratio",
        "0.05",
        "How far below the watermark the background may evict",
        set!(config.options.eviction_ratio = ratio),
    ),
    flag(
        "allow_evict_soft_pinned_objects",
        "true",
        "Evict soft-pinned objects when nothing else is left",
        set!(config.options.evict_soft_pinned = switch),
    ),
    flag("memory_allocator", "offset", "How space is found: offset, best_fit", |draft, text| {
        // An older allocator of the existing system, with slabs and a largest size; `Settings::notes` says so.
        let known = if text == "cachelib" { "offset" } else { text };
        draft.config.allocator.kind = known.parse().map_err(said)?;
        Ok(())
    }),
    flag(
        "allocation_strategy",
        "random",
        "Where new objects go: random, free_ratio_first, ssd_free_ratio_first, local_first, cxl",
        |draft, text| {
            draft.config.options.placement = text.parse().map_err(said)?;
            Ok(())
        },
    ),
    flag(
        "directory_shards",
        "64",
        "Locks the directory is spread over, a power of two",
        set!(config.options.shards = number),
    ),
];

const LOG: &[Flag] = &[
    flag("config_path", "", "Configuration file: .yaml, .yml, .json or .toml", |_, _| Ok(())),
    flag("cluster_id", "mooncake_cluster", "Name of the cluster", set!(config.cluster_id = cluster_id))
        .from(&["MC_STORE_CLUSTER_ID"]),
    flag("minloglevel", "0", "Least that is logged: 0 info, 1 warnings, 2 errors", |draft, text| {
        draft.config.log_level = match number(text)? {
            0 => "info",
            1 => "warn",
            2u8.. => "error",
        };
        Ok(())
    }),
    flag("v", "0", "Log more: 1 debug, 2 everything", set!(verbosity = number)),
    flag("log_filter", "", "What is logged, by module: `info,mooncake_master=debug`", |draft, text| {
        draft.config.log_filter = text.into();
        Ok(())
    })
    .from(&["RUST_LOG"]),
    flag("log_dir", "", "Log to mooncake_master.INFO in this folder", |draft, text| {
        draft.log_dir = Some(text).filter(|dir| !dir.is_empty()).map(Into::into);
        Ok(())
    }),
    flag(
        "logtostderr",
        "true",
        "Log to standard error; with log_dir, only if this is given too",
        set!(to_stderr = |text| switch(text).map(Some)),
    ),
    idle("alsologtostderr", "false", "Log to standard error too", STDERR, is_switch),
    idle("colorlogtostderr", "false", "Colours", "a terminal gets colours, everything else none", is_switch),
    idle("logbuflevel", "0", "Buffering", STDERR, is_whole),
    idle("logbufsecs", "30", "Buffering", STDERR, is_count),
    idle("log_prefix", "true", "Time and level on each line", STDERR, is_switch),
    idle("log_link", "", "Links to log files", STDERR, is_anything),
    idle("logfile_mode", "436", "Permissions of log files", STDERR, is_count),
    idle("max_log_size", "1800", "Largest log file, in MB", "log files are not rotated", is_count),
    idle("stderrthreshold", "2", "What goes to standard error too", STDERR, is_count),
    idle("stop_logging_if_full_disk", "false", "Full disks", STDERR, is_switch),
    idle("vmodule", "", "Levels by module", "log_filter does this", is_anything),
    idle("use_mmap_arena_allocator", "false", "Arena for buffers", ARENA, is_switch),
    idle("mmap_arena_pool_size", "8589934592", "Arena for buffers", ARENA, is_count),
];

const COPIES: &[Flag] = &[
    flag(
        "max_total_pending_tasks",
        "10000",
        "Copies and moves that may wait for their client",
        set!(config.options.tasks.max_pending = number),
    ),
    flag(
        "max_total_processing_tasks",
        "10000",
        "Copies and moves that may be under way",
        set!(config.options.tasks.max_processing = number),
    ),
    flag(
        "max_total_finished_tasks",
        "10000",
        "Copies and moves that are over and can still be asked about",
        set!(config.options.tasks.max_finished = number),
    ),
    flag(
        "pending_task_timeout_sec",
        "300",
        "A task that nobody fetched for this long has failed; 0 for never",
        set!(config.options.tasks.pending_timeout = limit),
    ),
    flag(
        "processing_task_timeout_sec",
        "300",
        "A task that was fetched this long ago and not ended has failed; 0 for never",
        set!(config.options.tasks.processing_timeout = limit),
    ),
    flag(
        "max_retry_attempts",
        "10",
        "How often a client tries a task again where there is no room",
        set!(config.options.tasks.max_retries = number),
    ),
    flag(
        "dynamic_replication_mode",
        "off",
        "More replicas of hot keys: off, observe (the log says which), enforce",
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
        "Time over which their reads are counted; 0 counts as 1",
        |draft, text| {
            draft.hot.window = seconds(text)?.max(std::time::Duration::from_secs(1));
            Ok(())
        },
    ),
    flag(
        "dynamic_replication_admission_qps_threshold",
        "0.8",
        "Reads per second of a hot key",
        set!(hot.reads_per_second = number),
    ),
    flag(
        "dynamic_replication_max_memory_replicas",
        "2",
        "Replicas of a hot key after which no more are made; 0 counts as 1",
        |draft, text| {
            draft.hot.max_replicas = number::<usize>(text)?.max(1);
            Ok(())
        },
    ),
];

const TIERS: &[Flag] = &[
    flag("enable_offload", "false", "Keep objects on the clients' SSDs, too", set!(offload = switch)),
    flag(
        "offload_on_evict",
        "false",
        "Write to SSD at eviction, not at put end",
        set!(disks.on_evict = switch),
    ),
    flag(
        "offload_force_evict",
        "false",
        "Evict what finds no place in that queue",
        set!(disks.force_evict = switch),
    ),
    flag("offloading_queue_limit", "50000", "Objects waiting for an SSD", set!(disks.queue_limit = number)),
    flag(
        "offload_cap_ratio",
        "0.5",
        "Part of that queue eviction may fill at a time",
        set!(disks.queue_part = ratio),
    ),
    flag(
        "promotion_on_hit",
        "false",
        "Bring objects back to memory when they are read",
        set!(promotion_on_hit = switch),
    ),
    flag(
        "promotion_admission_threshold",
        "2",
        "Reads before that, counted roughly: 1 to 255",
        set!(promotion.threshold = number),
    ),
    flag(
        "promotion_queue_limit",
        "50000",
        "Objects on their way back to memory, per client",
        set!(promotion.queue_limit = number),
    ),
    flag(
        "promotion_max_per_heartbeat",
        "1",
        "Of these, per heartbeat",
        set!(promotion.per_heartbeat = number),
    ),
    flag(
        "root_fs_dir",
        "",
        "Folder on a file system that all clients reach by this path: what is put is written to files there, too, in a folder of the cluster's name",
        set!(files_in = any),
    ),
    flag(
        "global_file_segment_size",
        "9223372036854775807",
        "Bytes that are reported as the capacity for files, unless it is this",
        |draft, text| {
            let bytes: u64 = number(text)?;
            draft.files.capacity = if bytes == i64::MAX as u64 { 0 } else { bytes };
            Ok(())
        },
    ),
    flag(
        "enable_disk_eviction",
        "true",
        "Clients drop their oldest files when there is no room for new ones; otherwise nothing more is written",
        set!(files.evict = switch),
    ),
    flag(
        "quota_bytes",
        "0",
        "Bytes that a client lets the files take that it knows of; 0 for nine tenths of the file system",
        set!(files.quota = number),
    ),
    idle("nof_eviction_ratio", "0.05", "As eviction_ratio", NOF, is_ratio),
    idle("nof_eviction_high_watermark_ratio", "0.9", "As eviction_high_watermark_ratio", NOF, is_ratio),
    idle("nof_heartbeat_interval_sec", "10", "Probes of targets", NOF, is_count),
    idle("nof_heartbeat_probe_timeout_ms", "1000", "Longest probe", NOF, is_count),
    idle("nof_heartbeat_failures_threshold", "3", "Failed probes of a dead target", NOF, is_count),
    off("enable_cxl", "false", "Place objects in CXL memory", CXL),
    idle("cxl_path", "/dev/dax0.0", "Device of it", CXL, is_anything),
    idle("cxl_size", "8589934592", "Bytes of it", CXL, is_count),
];

const MASTERS: &[Flag] = &[
    flag("enable_ha", "false", "Several masters, one of which leads", set!(masters = switch)),
    flag("ha_backend_type", "etcd", "Who elects: etcd", set!(electors = any)),
    flag("ha_backend_connstring", "", "Where that is", set!(electors_at = any)),
    flag("etcd_endpoints", "", "Where etcd is; --ha_backend_connstring goes before it", set!(etcd = any)),
    off("enable_oplog", "false", "Followers that know what the leader knows", HA),
    idle("oplog_poll_interval_ms", "1000", "How often they look", HA, is_count),
    idle("oplog_batch_max_entries", "1024", "Entries per batch", HA, is_count),
    idle("batch_oplog_retry_timeout_sec", "180", "Longest failure of a follower", HA, is_count),
    idle("pod_name", "", "Name of this pod", HA, is_anything).from(&["POD_NAME"]),
    idle("pod_namespace", "", "Its namespace", HA, is_anything).from(&["POD_NAMESPACE"]),
    flag(
        "enable_snapshot",
        "false",
        "Write down what the master knows, now and then",
        set!(snapshots.write = switch),
    ),
    flag(
        "enable_snapshot_restore",
        "false",
        "Start from the latest snapshot that is whole",
        set!(snapshots.restore = switch),
    ),
    flag(
        "snapshot_local_path",
        "",
        "Folder of the snapshots, in which each cluster has one; or rocksdb:///path",
        |draft, text| {
            draft.snapshots.folder = text.into();
            Ok(())
        },
    )
    .from(&["MOONCAKE_SNAPSHOT_LOCAL_PATH"]),
    flag("snapshot_interval_seconds", "600", "Time between them", set!(snapshots.interval = seconds)),
    flag(
        "snapshot_child_timeout_seconds",
        "300",
        "One that takes longer is given up",
        set!(snapshots.limit = seconds),
    ),
    flag("snapshot_retention_count", "2", "How many are kept", set!(snapshots.keep = number)),
    flag(
        "snapshot_backup_dir",
        "",
        "Folder for snapshots that cannot be written where they belong, and copies of those that were restored",
        |draft, text| {
            draft.snapshots.backup = Some(text).filter(|text| !text.is_empty()).map(Into::into);
            Ok(())
        },
    ),
    flag("snapshot_object_store_type", "", "What they lie in: local", set!(snapshots_in = any))
        .or(&["snapshot_payload_store_type", "snapshot_payload_backend_type"]),
    flag("snapshot_catalog_store_type", "", "What lists them: embedded", set!(snapshot_list_in = any))
        .or(&["snapshot_catalog_backend_type"]),
    idle("snapshot_catalog_store_connstring", "", "How a list elsewhere is reached", SNAPSHOTS, is_anything)
        .or(&["snapshot_catalog_backend_connstring"]),
];

const QUOTAS: &[Flag] = &[
    flag(
        "enable_multi_tenants",
        "false",
        "Tenants with names and quotas of their own",
        set!(tenants = switch),
    ),
    flag(
        "tenant_quota_connector_type",
        "file",
        "What their policy lies in: file, etcd, rocksdb",
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
        "Path of the policy (YAML, version 1), host:port of the etcd that has it as mooncake-store/<cluster_id>/tenant_quota_policy, or rocksdb:///path",
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
        "Publish what is stored and removed, over ZeroMQ",
        set!(events_enabled = switch),
    ),
    flag("kv_events_bind_endpoint", "", "Where: tcp://*:5557", |draft, text| {
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
        "Events that may wait, 0 for any number; the oldest goes when it is full",
        set!(events.capacity = number),
    ),
    flag(
        "kv_events_emit_legacy_compat",
        "true",
        "Events have the older fields of vLLM and SGLang too",
        set!(events.legacy = switch),
    ),
    flag(
        "kv_events_emit_object_key",
        "true",
        "Events have the key; those whose key is no hash are left out otherwise",
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
