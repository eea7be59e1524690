//! Masters that are restarted with another value of a flag. Of each object that was stored before,
//! the bytes are read, or a line of the log counts it as dropped. Its memory is free once all
//! objects are removed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mooncake_core::settings::Effect;
use mooncake_core::testkit::{effort, free_port};
use mooncake_store::client::{Client, ClientBuilder, ClientConfig, PutOutcome};
use mooncake_store::config::flags;
use tempfile::TempDir;

use crate::cluster::{PATIENCE, builder_with, eventually, tagged, version_of};
use crate::process::{Process, metric};

/// Number of objects of a test.
const OBJECTS: u64 = 30;
const SEGMENT: u64 = 4 << 20;

/// Change of one flag between two masters.
struct Change {
    flag: &'static str,
    /// Value of the flag before and after; `{dir}` is a folder of the test.
    values: [&'static str; 2],
    /// Further flags of both masters.
    with: &'static [&'static str],
    /// Further flags of the second master.
    then: &'static [&'static str],
    tenant: &'static str,
    outcome: Outcome,
    /// Effect of the change, for `docs/ha.md`; empty to leave it out.
    effect: &'static str,
}

/// Expected fate of the objects.
#[derive(Clone, Copy)]
enum Outcome {
    /// Each object is read again.
    Retained,
    /// The log of the master counts the objects that are not read again, in lines with this text.
    Dropped(&'static str),
}

use Outcome::{Dropped, Retained};

/// Policies of tenants in the folder of a test.
const POLICIES: [(&str, &str); 4] = [
    ("most.yaml", "version: 1\ntenants:\n- {name: default, quota: 1GB}\n- {name: blue, quota: 1MB}\n"),
    ("both.yaml", "version: 1\ntenants:\n- {name: default, quota: 1GB}\n- {name: blue, quota: 1GB}\n"),
    ("blue.yaml", "version: 1\ntenants:\n- {name: blue, quota: 1GB}\n"),
    ("small.yaml", "version: 1\ntenants:\n- {name: default, quota: 100KB}\n- {name: blue, quota: 100KB}\n"),
];
const TENANTS: &[&str] = &["--enable_multi_tenants=true"];
const MOST_FOR_DEFAULT: &[&str] = &["--tenant_quota_connector_uri={dir}/most.yaml"];
const POLICY: &[&str] = &["--tenant_quota_connector_uri={dir}/both.yaml"];
const POLICY_OF_BLUE: &[&str] = &["--tenant_quota_connector_uri={dir}/blue.yaml"];
const SNAPSHOTS: &[&str] = &["--enable_snapshot=true", "--enable_snapshot_restore=true"];

const fn retained(
    flag: &'static str,
    before: &'static str,
    after: &'static str,
    effect: &'static str,
) -> Change {
    Change {
        flag,
        values: [before, after],
        with: &[],
        then: &[],
        tenant: "default",
        outcome: Retained,
        effect,
    }
}

const fn dropped(change: Change, line: &'static str) -> Change {
    Change { outcome: Dropped(line), ..change }
}

/// Declares the changes, each with a test.
macro_rules! changes {
    ($($test:ident = $change:expr;)*) => {
        static CHANGES: &[Change] = &[$($change,)*];
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let change = $change;
                let with_snapshot = async {
                    if effort(false, true) {
                        check(&change, true).await;
                    }
                };
                tokio::join!(check(&change, false), with_snapshot);
            }
        )*
    };
}

const SAME: &str = "read again";
const PLACED: &str = "read again; new objects follow the new value";
const NEXT: &str = "read again; the new value holds from now on";

/// Values other than the default of every flag that has no change of its own, without addresses.
const OTHER_FLAGS: &[&str] = &[
    "--rpc_thread_num=3",
    "--max_threads=7",
    "--rpc_conn_timeout_seconds=600",
    "--connection_bytes=64MB",
    "--allowed_hosts=example.org",
    "--enable_metric_reporting=false",
    "--max_kv_soft_pin_ttl=1h",
    "--client_active_ttl_sec=9",
    "--put_start_discard_timeout_sec=20",
    "--revoked_write_rest=1s",
    "--eviction_ratio=0.1",
    "--look_up_protection=0",
    "--zero_across_tenants=false",
    "--allow_evict_soft_pinned_objects=false",
    "--log_filter=debug",
    "--max_total_pending_tasks=1",
    "--max_total_processing_tasks=1",
    "--max_total_finished_tasks=1",
    "--pending_task_timeout_sec=1",
    "--processing_task_timeout_sec=1",
    "--max_retry_attempts=1",
    "--dynamic_replication_mode=enforce",
    "--dynamic_replication_heat_window_seconds=1",
    "--dynamic_replication_admission_qps_threshold=0.1",
    "--dynamic_replication_max_memory_replicas=3",
    "--offload_on_evict=true",
    "--offload_force_evict=true",
    "--offloading_queue_limit=1",
    "--offload_cap_ratio=0.1",
    "--promotion_on_hit=true",
    "--promotion_admission_threshold=1",
    "--promotion_queue_limit=1",
    "--promotion_max_per_heartbeat=2",
    "--global_file_segment_size=1073741824",
    "--enable_disk_eviction=false",
    "--quota_bytes=1048576",
    "--snapshot_interval_seconds=60",
    "--snapshot_child_timeout_seconds=60",
    "--snapshot_retention_count=1",
    "--snapshot_backup_dir={dir}/backup",
    "--snapshot_object_store_type=local",
    "--snapshot_catalog_store_type=embedded",
    "--weight_import_idle_timeout_ms=1s",
    "--tenant_quota_connector_type=etcd",
    "--enable_kv_events=true",
    "--kv_events_bind_endpoint=tcp://127.0.0.1:0",
    "--kv_events_backend_id=id",
    "--kv_events_queue_capacity=1",
    "--kv_events_emit_legacy_compat=false",
    "--kv_events_emit_object_key=false",
    "--kv_events_emit_look_ups=true",
    "--kv_events_model_name=model",
    "--kv_events_additional_salt=salt",
    "--kv_events_lora_name=lora",
    "--kv_events_block_size=16",
    "--kv_events_dp_rank=1",
    "--enable_metadata_cleanup_on_timeout=true",
    "--metadata_cluster_id=other",
    "--metadata_http_token=secret",
    "--http_metadata_server_host=127.0.0.1",
    "--http_metadata_server_port=0",
    "--enable_http_metadata_server=true",
];

/// Addresses and logs: clients do not find a master that has moved.
const ADDRESSES: &[&str] = &[
    "rpc_port",
    "rpc_address",
    "rpc_interface",
    "metrics_host",
    "metrics_port",
    "metadata_server",
    "http_metadata_server_kept_in",
    "config_path",
    "minloglevel",
    "log_dir",
    "logtostderr",
    "enable_ha",
    "ha_backend_type",
    "ha_backend_connstring",
    "etcd_endpoints",
    "ha_leader_lease_ttl_sec",
];

changes! {
    tenants_on = Change {
        with: MOST_FOR_DEFAULT,
        ..retained("enable_multi_tenants", "false", "true", "become those of the tenant `default`")
    };
    tenants_on_without_default = dropped(Change {
        with: POLICY_OF_BLUE,
        ..retained("enable_multi_tenants", "false", "true", "dropped if the policy has no tenant `default`")
    }, "--tenant_quota_connector_uri");
    tenants_off = Change {
        with: MOST_FOR_DEFAULT,
        ..retained("enable_multi_tenants", "true", "false", "of the tenant `default`: read again")
    };
    tenants_off_for_others = dropped(Change {
        with: POLICY,
        tenant: "blue",
        ..retained("enable_multi_tenants", "true", "false", "of other tenants: dropped")
    }, "--enable_multi_tenants=false");
    tenant_unregistered = dropped(Change {
        with: TENANTS,
        ..retained(
            "tenant_quota_connector_uri",
            "{dir}/both.yaml",
            "{dir}/blue.yaml",
            "of tenants that the policy lacks: dropped",
        )
    }, "--tenant_quota_connector_uri");
    tenant_with_less = dropped(Change {
        with: TENANTS,
        tenant: "blue",
        ..retained(
            "tenant_quota_connector_uri",
            "{dir}/both.yaml",
            "{dir}/small.yaml",
            "above the quota of their tenant: dropped",
        )
    }, "--tenant_quota_connector_uri");
    cluster = retained("cluster_id", "a", "b", "read again; snapshots of the other cluster are not read");
    snapshot_folder = retained("snapshot_local_path", "{dir}/one", "{dir}/two", "read again, as without a snapshot");
    snapshots_unread = retained("enable_snapshot_restore", "true", "false", "read again, as without a snapshot");
    snapshots_read = retained("enable_snapshot_restore", "false", "true", SAME);
    snapshots_written = retained("enable_snapshot", "false", "true", SAME);
    best_fit = retained("memory_allocator", "offset", "best_fit", PLACED);
    offset = retained("memory_allocator", "best_fit", "offset", PLACED);
    cachelib = retained("memory_allocator", "best_fit", "cachelib", PLACED);
    one_shard = retained("directory_shards", "64", "1", SAME);
    many_shards = retained("directory_shards", "1", "256", SAME);
    placement_by_free_space = retained("allocation_strategy", "random", "free_ratio_first", PLACED);
    local_placement = retained("allocation_strategy", "free_ratio_first", "local_first", PLACED);
    eviction_by_lru = retained("eviction_policy", "gittins", "lru", "read again; learned values are lost");
    eviction_by_gittins = retained("eviction_policy", "s3fifo", "gittins", "read again; nothing is learned yet");
    higher_watermark = retained("eviction_high_watermark_ratio", "0.9", "0.99", NEXT);
    longer_lease = retained("default_kv_lease_ttl", "1s", "1m", NEXT);
    shorter_lease = retained("default_kv_lease_ttl", "1m", "1s", "read again; earlier leases hold");
    shorter_life = retained("client_ttl", "10", "5", NEXT);
    suspicion = retained("client_suspicion_ttl_sec", "", "5", NEXT);
    soft_pin = retained("default_kv_soft_pin_ttl", "30m", "1m", "read again; earlier pins keep their time");
    no_rest = retained("remount_rest", "auto", "0", NEXT);
    shorter_writes = retained("put_start_release_timeout_sec", "600", "40", NEXT);
    disks_on = retained("enable_offload", "false", "true", "read again");
    disks_off = retained(
        "enable_offload",
        "true",
        "false",
        "read again; those on disks only wait there for the former value",
    );
    files_on = retained("root_fs_dir", "", "{dir}/files", SAME);
    files_off = retained("root_fs_dir", "{dir}/files", "", "read again; those in files only are dropped");
    other_files = retained("root_fs_dir", "{dir}/files", "{dir}/other", "read again; those in files only are dropped");
    all_others = Change { then: OTHER_FLAGS, ..retained("v", "0", "1", "") };
}

/// Cluster whose master is restarted.
struct Cluster {
    folder: TempDir,
    port: u16,
    pages: u16,
    with_snapshot: bool,
}

impl Cluster {
    fn new(with_snapshot: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, policy) in POLICIES {
            std::fs::write(folder.path().join(name), policy).unwrap();
        }
        for name in ["files", "other"] {
            let root = folder.path().join(name);
            std::fs::create_dir(&root).unwrap();
            std::fs::write(root.join(".mooncake-root"), "").unwrap();
        }
        let [port, pages] = std::array::from_fn(|_| free_port());
        Self { folder, port, pages, with_snapshot }
    }

    fn log(&self, which: usize) -> PathBuf {
        self.folder.path().join(format!("log-{which}"))
    }

    /// Starts the first or the second master.
    fn start(&self, change: &Change, which: usize) -> Process {
        let folder = self.folder.path().display().to_string();
        let common = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--default_kv_lease_ttl=1s"];
        let snapshots: &[&str] = if self.with_snapshot { SNAPSHOTS } else { &[] };
        let place = "--snapshot_local_path={dir}/snapshots";
        let changed = format!("--{}={}", change.flag, change.values[which]);
        let then: &[&str] = if which == 1 { change.then } else { &[] };
        let last = [place, &*changed];
        let flags = common.iter().chain(snapshots).chain(change.with).chain(then).chain(&last);
        let filled = |flag: &&str| flag.replace("{dir}", &folder);
        let log = File::create(self.log(which)).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_mooncake_master"))
            .args(flags.map(filled))
            .args([format!("--rpc_port={}", self.port), format!("--metrics_port={}", self.pages)])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        Process(child.unwrap())
    }

    fn builder(&self, change: &Change, segment: u64) -> ClientBuilder {
        let config = ClientConfig {
            ping_interval: std::time::Duration::from_millis(100),
            copy_in_process: false,
            ..ClientConfig::default()
        };
        builder_with(config, &format!("127.0.0.1:{}", self.port), segment)
            .tenant(change.tenant)
            .fs_roots([self.folder.path()])
    }

    fn metric(&self, name: &str) -> Option<u64> {
        metric(self.pages, name)
    }
}

/// Restarts a master with another value of a flag, and checks each object.
async fn check(change: &Change, with_snapshot: bool) {
    let cluster = Cluster::new(with_snapshot);
    let master = cluster.start(change, 0);
    let owner = cluster.builder(change, SEGMENT).connect().await.unwrap();
    let reader = cluster.builder(change, 0).connect().await.unwrap();
    for number in 0..OBJECTS {
        let bytes = tagged(number, 1, 5000 + number as usize * 100);
        assert_eq!(owner.put(key(number), &bytes[..]).await.unwrap(), PutOutcome::Stored);
    }
    eventually("every object would outlive the master", PATIENCE, async || {
        owner.status().lasting_objects().await == OBJECTS as usize
    })
    .await;
    if with_snapshot {
        let mut master = master;
        master.signal("-TERM");
        master.ended();
    } else {
        master.kill();
    }
    let mut master = cluster.start(change, 1);
    let log = || std::fs::read_to_string(cluster.log(1)).unwrap();
    let mut counted = 0;
    eventually("each object is there or counted as dropped", PATIENCE, async || {
        if let Some(status) = master.0.try_wait().unwrap() {
            panic!("{status}: {}", log());
        }
        counted = match change.outcome {
            Retained => hits(&reader).await,
            Dropped(text) => hits(&reader).await + dropped_in(&log(), text),
        };
        counted >= OBJECTS
    })
    .await;
    assert_eq!(counted, OBJECTS, "{}", log());
    eventually("all memory is free", PATIENCE, async || {
        let _ = owner.remove_all(true).await;
        cluster.metric("master_allocated_bytes") == Some(0)
    })
    .await;
    if let Retained = change.outcome {
        let all = vec![7; SEGMENT as usize / 10 * 9];
        assert_eq!(owner.put("all", all).await.unwrap(), PutOutcome::Stored);
    }
    for client in [owner, reader] {
        client.close().await.unwrap();
    }
}

/// A master with the snapshot of an earlier master takes no object of a master between them, and
/// says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_unknown_masters_are_counted() {
    let change = Change { with: SNAPSHOTS, ..retained("snapshot_local_path", "{dir}/one", "{dir}/two", "") };
    let cluster = Cluster::new(false);
    let end = |mut master: Process| {
        master.signal("-TERM");
        master.ended();
    };
    let first = cluster.start(&change, 0);
    eventually("the first master serves", PATIENCE, async || {
        cluster.metric("master_allocated_bytes").is_some()
    })
    .await;
    end(first);
    let second = cluster.start(&change, 1);
    let owner = cluster.builder(&change, SEGMENT).connect().await.unwrap();
    for number in 0..OBJECTS {
        owner.put(key(number), tagged(number, 1, 5000)).await.unwrap();
    }
    eventually("every object would outlive the master", PATIENCE, async || {
        owner.status().lasting_objects().await == OBJECTS as usize
    })
    .await;
    end(second);
    let _third = cluster.start(&change, 0);
    eventually("each object is counted as dropped", PATIENCE, async || {
        let log = std::fs::read_to_string(cluster.log(0)).unwrap();
        dropped_in(&log, "the snapshot does not know dropped") == OBJECTS
    })
    .await;
    assert_eq!(hits(&owner).await, 0);
    owner.close().await.unwrap();
}

fn key(number: u64) -> String {
    format!("key {number}")
}

/// Returns the number of objects that are read, and checks their bytes.
async fn hits(client: &Client) -> u64 {
    let mut hits = 0;
    for number in 0..OBJECTS {
        if let Ok(Some(bytes)) = client.get(key(number)).await {
            assert_eq!(version_of(number, &bytes), Some(1), "key {number}");
            hits += 1;
        }
    }
    hits
}

/// Returns the number of objects that the lines of a log with this text count as dropped.
fn dropped_in(log: &str, text: &str) -> u64 {
    let lines = log.lines().filter(|line| line.contains(text));
    let count = |line: &str| line.split("dropped=").nth(1)?.split_whitespace().next()?.parse::<u64>().ok();
    lines.filter_map(count).sum()
}

/// The table of `docs/ha.md` has the changes of this file, and no others.
#[test]
fn the_table_in_the_documents_is_that_of_the_tests() {
    let head = "| flag | before | after | objects in memory |\n|---|---|---|---|\n";
    let shown = |value: &str| {
        if value.is_empty() { "empty".to_owned() } else { format!("`{}`", value.replace("{dir}", "/srv")) }
    };
    let row = |change: &Change| {
        let [before, after] = change.values.map(shown);
        format!("| `--{}` | {before} | {after} | {} |\n", change.flag, change.effect)
    };
    let table = head.to_owned()
        + &CHANGES.iter().filter(|change| !change.effect.is_empty()).map(row).collect::<String>();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ha.md");
    let document = std::fs::read_to_string(path).unwrap();
    assert!(document.contains(&table), "docs/ha.md has another table than this:\n{table}");
}

/// A new flag needs a change here.
#[test]
fn every_flag_is_changed() {
    let changed = CHANGES.iter().map(|change| change.flag);
    let others = OTHER_FLAGS.iter().filter_map(|flag| flag.strip_prefix("--")?.split('=').next());
    let known: Vec<&str> = changed.chain(others).chain(ADDRESSES.iter().copied()).collect();
    for flag in flags().filter(|flag| !matches!(flag.effect, Effect::Idle(..) | Effect::Off(_))) {
        assert!(known.contains(&flag.name), "--{} has no change", flag.name);
    }
}
