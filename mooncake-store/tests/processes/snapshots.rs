//! Masters that write snapshots, are killed, and start from them.

use std::path::{Path, PathBuf};

use mooncake_core::ids::Uuid;
use mooncake_core::replica::{ReplicateConfig, SoftPin};
use mooncake_store::client::{Client, PutOptions, PutOutcome};
use mooncake_store::protocol::wire::TaskInfo;
use tempfile::TempDir;

use crate::cluster::{
    PATIENCE, SEGMENT, builder, eventually, in_segment_of, master_shown, start_client, tagged, version_of,
};
use crate::process::{Process, free_port, metric};

/// Metric of the uses that the eviction policy has learned from.
const LEARNED: &str = "master_eviction_learned_uses";

/// Number of objects of each of two tenants.
const OBJECTS: u64 = 60;

/// Master that takes a snapshot every second.
struct Master {
    process: Option<Process>,
    port: u16,
    pages: u16,
    folder: TempDir,
    /// Flags for the folders of snapshots and tenants.
    places: Vec<String>,
}

impl Master {
    fn start() -> Self {
        let (port, pages, folder) = (free_port(), free_port(), tempfile::tempdir().unwrap());
        let policy = "version: 1\ntenants:\n- {name: default, quota: 16MB}\n- {name: blue, quota: 8MB}\n";
        std::fs::write(folder.path().join("tenants.yaml"), policy).unwrap();
        let path = folder.path().display();
        let places = vec![
            format!("--snapshot_local_path={path}"),
            format!("--tenant_quota_connector_uri={path}/tenants.yaml"),
        ];
        let mut master = Self { process: None, port, pages, folder, places };
        master.run(&[]);
        master
    }

    fn run(&mut self, more: &[&str]) {
        let flags = [
            "--enable_snapshot=true",
            "--enable_snapshot_restore=true",
            "--snapshot_interval_seconds=1",
            "--enable_multi_tenants=true",
            // A task must not expire while its client is slow to fetch it.
            "--pending_task_timeout_sec=600",
        ];
        let places: Vec<_> = self.places.iter().map(|place| &**place).collect();
        self.process = Some(master_shown(self.port, self.pages, &[&flags, &places[..], more].concat()));
    }

    fn kill(&mut self) {
        self.process.take().unwrap().kill();
    }

    fn snapshots(&self) -> Vec<PathBuf> {
        snapshots_in(self.folder.path())
    }

    /// Waits for a snapshot that begins after this call.
    async fn snapshot(&self) {
        let count = || metric(self.pages, "master_snapshot_success").unwrap_or(0);
        // The next snapshot may be in progress.
        let before = count();
        eventually("two snapshots", PATIENCE, async || count() >= before + 2).await;
    }

    async fn client(&self, tenant: &str) -> Client {
        builder(&format!("127.0.0.1:{}", self.port), 0).tenant(tenant).connect().await.unwrap()
    }
}

fn snapshots_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.join("mooncake_cluster")).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("snapshot-"));
    paths.sort();
    paths
}

fn key(number: u64) -> String {
    format!("key {number}")
}

/// Returns the configuration of an object: every third has a hard pin, every third a soft pin, and
/// each is in one of three groups.
fn configuration(number: u64, member: &str) -> PutOptions {
    PutOptions::from(ReplicateConfig {
        hard_pin: number.is_multiple_of(3),
        soft_pin: if number % 3 == 1 { SoftPin::Enable } else { SoftPin::Preserve },
        group_ids: Some(vec![format!("group {}", number % 3)]),
        ..ReplicateConfig::default()
    })
    .prefer_segment(member)
}

async fn put(client: &Client, numbers: std::ops::Range<u64>, version: u64, member: &str) {
    for number in numbers {
        let value = tagged(number, version, 5000);
        let stored = client.put_with(key(number), &value[..], &configuration(number, member)).await;
        assert_eq!(stored.unwrap(), PutOutcome::Stored, "key {number}");
    }
}

/// Returns the number of hits among these objects, and checks their bytes.
async fn hits(client: &Client, numbers: std::ops::Range<u64>, version: u64) -> u64 {
    let mut hits = 0;
    for number in numbers {
        if let Ok(Some(bytes)) = client.get(key(number)).await {
            assert_eq!(version_of(number, &bytes), Some(version), "key {number}");
            hits += 1;
        }
    }
    hits
}

/// Returns a task without its times, which depend on clocks.
fn without_times(task: TaskInfo) -> (Uuid, String, String) {
    (task.id, format!("{:?} {:?} {:?}", task.kind, task.status, task.client), task.message)
}

/// Starts two clients with memory and clients of two tenants, and stores durable objects.
async fn filled(master: &Master) -> ([Client; 2], [Client; 2]) {
    let at = format!("127.0.0.1:{}", master.port);
    let members = [0; 2].map(|_| builder(&at, SEGMENT));
    let [one, two] = members;
    let members = [one.connect().await.unwrap(), two.connect().await.unwrap()];
    let clients = [master.client("default").await, master.client("blue").await];
    for (client, member) in clients.iter().zip(&members) {
        put(client, 0..OBJECTS, 1, member.hostname()).await;
    }
    lasting(&members, 2 * OBJECTS).await;
    (members, clients)
}

async fn lasting(members: &[Client], objects: u64) {
    eventually("every object would outlive the master", PATIENCE, async || {
        let mut lasting = 0;
        for member in members {
            lasting += member.status().lasting_objects().await;
        }
        lasting as u64 == objects
    })
    .await;
}

async fn all_back(clients: &[Client; 2], numbers: std::ops::Range<u64>) {
    let count = numbers.end - numbers.start;
    eventually("all is there again", PATIENCE, async || {
        hits(&clients[0], numbers.clone(), 1).await + hits(&clients[1], numbers.clone(), 1).await == 2 * count
    })
    .await;
}

/// Returns the numbers of tenants and of pins in the HTTP endpoints.
fn counts(master: &Master) -> [Option<u64>; 3] {
    ["master_key_count", "master_soft_pin_key_count", "mooncake_tenant_quota_charged_bytes"]
        .map(|name| metric(master.pages, name))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_gives_the_same_responses() {
    let mut master = Master::start();
    let (members, clients) = filled(&master).await;
    // The client of this task is gone, so no client fetches it.
    let (gone, name) = start_client(master.port);
    let there = clients[0].put_with("there", b"there", &in_segment_of(&name)).await;
    assert_eq!(there.unwrap(), PutOutcome::Stored);
    gone.freeze();
    let task = clients[0].replicas().copy("there", &[members[0].hostname()]).await.unwrap();
    let asked = without_times(clients[0].replicas().task(task).await.unwrap());
    clients[0].remove("there", true).await.unwrap();
    master.snapshot().await;
    let before = counts(&master);
    let group = clients[0].remove(key(0), false).await;
    assert!(group.is_ok(), "{group:?}");
    // These objects come after the snapshot; their owners have received them and announce them.
    put(&clients[0], 1000..1010, 1, members[0].hostname()).await;
    lasting(&members, 2 * OBJECTS - 1 + 10).await;
    master.kill();
    gone.kill();

    master.run(&[]);
    all_back(&clients, 1..OBJECTS).await;
    eventually("what came later", PATIENCE, async || hits(&clients[0], 1000..1010, 1).await == 10).await;
    assert_eq!(
        without_times(clients[1].replicas().task(task).await.unwrap()),
        asked,
        "a task goes on waiting"
    );
    assert_eq!(hits(&clients[0], 0..1, 1).await, 0, "removed is removed");
    let now = counts(&master);
    assert_eq!(now[0], before[0].map(|keys| keys - 1 + 10));
    assert!(now[1] >= before[1] && now[1] > Some(0), "soft pins: {before:?} and {now:?}");
    // Hard pins, groups and quotas hold: tenant blue has 8 MB, of which 60 objects take 300 KB.
    let full = clients[1].put("too much", vec![0; 9 << 20]).await;
    assert!(full.is_err(), "{full:?}");
    let moved = ReplicateConfig { group_ids: Some(vec!["another".into()]), ..ReplicateConfig::default() };
    let moved = PutOptions::from(moved).upsert();
    let upserted = clients[0].batch_put(&[(key(4), tagged(4, 2, 5000))], &moved).await.unwrap().remove(0);
    assert!(upserted.is_err(), "the group of an existing object cannot change: {upserted:?}");
    for number in 0..3000 {
        let _ = clients[0].put(format!("filler {number}"), vec![0; 20_000]).await;
    }
    let pinned = (3..OBJECTS).step_by(3);
    for number in pinned {
        assert_eq!(hits(&clients[0], number..number + 1, 1).await, 1, "key {number} is pinned for ever");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_torn_snapshot_is_passed_over_and_none_is_no_harm() {
    let mut master = Master::start();
    let (_members, clients) = filled(&master).await;
    master.snapshot().await;
    master.kill();
    let all = master.snapshots();
    assert_eq!(all.len(), 2, "--snapshot_retention_count");
    let latest = std::fs::read(&all[1]).unwrap();
    std::fs::write(&all[1], &latest[..latest.len() / 2]).unwrap();
    master.run(&[]);
    all_back(&clients, 0..OBJECTS).await;
    // All snapshots are truncated and damaged.
    master.snapshot().await;
    master.kill();
    for path in master.snapshots() {
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    master.run(&[]);
    all_back(&clients, 0..OBJECTS).await;
    // The kill comes at any point of a snapshot.
    for _ in 0..3 {
        master.kill();
        master.run(&[]);
    }
    all_back(&clients, 0..OBJECTS).await;
}

/// The learned values of the policy outlive the master. A snapshot of another policy has none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn learned_values_outlive_a_killed_master() {
    let mut master = Master::start();
    master.kill();
    master.run(&["--eviction_policy=tenure"]);
    let learned = |master: &Master| metric(master.pages, LEARNED).unwrap_or(0);
    let member = builder(&format!("127.0.0.1:{}", master.port), SEGMENT).connect().await.unwrap();
    put(&member, 0..OBJECTS, 1, member.hostname()).await;
    assert_eq!(learned(&master), 0, "the policy learns nothing");
    master.snapshot().await;
    for (uses, stored) in [(0, OBJECTS..2 * OBJECTS), (OBJECTS / 3, 2 * OBJECTS..3 * OBJECTS)] {
        master.kill();
        master.run(&["--eviction_policy=gittins"]);
        eventually("the pages", PATIENCE, async || metric(master.pages, LEARNED).is_some()).await;
        assert!(learned(&master) >= uses, "{} uses after {uses}", learned(&master));
        eventually("the master knows the member", PATIENCE, async || {
            member.put_with("any", b"any", &configuration(1, member.hostname()).upsert()).await.is_ok()
        })
        .await;
        put(&member, stored, 1, member.hostname()).await;
        let now = learned(&master);
        // The policy does not order pinned objects.
        assert!(now >= uses + OBJECTS / 3, "{now} uses");
        master.snapshot().await;
    }
}

/// The next leader starts from a snapshot of the previous one.
#[cfg(feature = "metadata-etcd")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_leader_begins_with_a_snapshot() {
    use crate::servers::{etcd, start};

    let Some(server) = start(etcd) else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = [
        "--enable_ha=true",
        &format!("--etcd_endpoints={}", server.at()),
        "--cluster_id=lab",
        "--enable_snapshot",
        "--enable_snapshot_restore",
        "--snapshot_interval_seconds=1",
        "--eviction_policy=gittins",
        &format!("--snapshot_local_path={}", folder.path().display()),
    ];
    let mut masters: Vec<_> = (0..2)
        .map(|_| {
            let pages = free_port();
            (master_shown(free_port(), pages, &flags), pages)
        })
        .collect();
    let at = format!("etcd://{}", server.at());
    let member = |segment| builder(&at, segment).cluster_id("lab").connect();
    let members = [member(SEGMENT).await.unwrap(), member(SEGMENT).await.unwrap()];
    let count = |pages: u16| metric(pages, "master_snapshot_success").unwrap_or(0);
    eventually("one of them leads", PATIENCE, async || masters.iter().any(|(_, pages)| count(*pages) > 0))
        .await;
    masters.sort_by_key(|(_, pages)| count(*pages) == 0);
    assert_eq!(count(masters[1].1), 0, "a standby takes none");
    put(&members[0], 0..OBJECTS, 1, members[1].hostname()).await;
    lasting(&members, OBJECTS).await;
    // The task of a live client takes no time; its end is recorded for a while.
    let task = members[0].replicas().copy(key(1), &[members[0].hostname()]).await.unwrap();
    let over = async || format!("{:?}", members[0].replicas().task(task).await.unwrap().status) == "Success";
    eventually("the task is over", PATIENCE, over).await;
    let before = count(masters[0].1);
    let learned = |pages: u16| metric(pages, LEARNED).unwrap_or(0);
    let uses = learned(masters[0].1);
    assert!(uses >= OBJECTS / 3 && learned(masters[1].1) == 0, "{uses} uses");
    eventually("two snapshots", PATIENCE, async || count(masters[0].1) >= before + 2).await;
    masters.remove(0).0.kill();
    let known = async || {
        members[0].replicas().task(task).await.is_ok_and(|task| format!("{:?}", task.status) == "Success")
    };
    eventually("the task is known to the next leader", PATIENCE, known).await;
    eventually("all is there again", PATIENCE, async || hits(&members[0], 0..OBJECTS, 1).await == OBJECTS)
        .await;
    assert!(learned(masters[0].1) >= uses, "the next leader goes on from {uses} uses");
    let taken = || count(masters[0].1);
    eventually("the next leader takes snapshots", PATIENCE, async || taken() > 0).await;
}

/// Masters with one directory for snapshots, tenants, and the records of engines.
#[cfg(feature = "metadata-rocksdb")]
mod own {
    use super::*;
    use crate::common::http::http;
    use mooncake_core::ErrorCode;

    impl Master {
        /// Starts a master with a directory. Returns it with the port of its metadata server, or
        /// nothing without the library, except in CI.
        #[allow(clippy::disallowed_methods, reason = "CI says who it is in the environment")]
        fn start_with_a_directory() -> Option<(Self, u16)> {
            let folder = tempfile::tempdir().unwrap();
            let url = format!("rocksdb://{}/own", folder.path().display());
            if let Err(error) = mooncake_metadata::open_folder(&url) {
                assert_eq!(error.code(), ErrorCode::NotSupported, "{error}");
                assert!(std::env::var_os("MOONCAKE_CI").is_none(), "{error}");
                println!("skipped: {error}");
                return None;
            }
            let (port, pages, metadata) = (free_port(), free_port(), free_port());
            let places = vec![
                format!("--snapshot_local_path={url}"),
                "--tenant_quota_connector_type=rocksdb".into(),
                format!("--tenant_quota_connector_uri={url}"),
                "--enable_http_metadata_server".into(),
                "--http_metadata_server_host=127.0.0.1".into(),
                format!("--http_metadata_server_port={metadata}"),
                format!("--http_metadata_server_kept_in={url}"),
            ];
            let mut master = Self { process: None, port, pages, folder, places };
            master.run(&[]);
            Some((master, metadata))
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_killed_master_finds_all_in_its_directory() {
        let Some((mut master, metadata)) = Master::start_with_a_directory() else { return };
        let (pages, metadata) = (([127, 0, 0, 1], master.pages).into(), ([127, 0, 0, 1], metadata).into());
        let up = async || metric(master.pages, "master_key_count").is_some();
        eventually("the master's pages", PATIENCE, up).await;
        let quotas = "/api/v1/tenant_quotas";
        for (tenant, bytes) in [("default", 16 << 20), ("blue", 8 << 20)] {
            let body = format!(r#"{{"requested_quota_bytes":{bytes}}}"#);
            let (status, said) = http(pages, "PUT", &format!("{quotas}?tenant_id={tenant}"), &body).await;
            assert_eq!(status, 200, "{said}");
        }
        let entry = "/metadata?key=mooncake/ram/somebody";
        assert_eq!(http(metadata, "PUT", entry, r#"{"name":"somebody"}"#).await.0, 200);
        let (members, clients) = filled(&master).await;
        let (gone, name) = start_client(master.port);
        let there = clients[0].put_with("there", b"there", &in_segment_of(&name)).await;
        assert_eq!(there.unwrap(), PutOutcome::Stored);
        gone.freeze();
        let task = clients[0].replicas().copy("there", &[members[0].hostname()]).await.unwrap();
        let asked = without_times(clients[0].replicas().task(task).await.unwrap());
        clients[0].remove("there", true).await.unwrap();
        master.snapshot().await;
        let before = counts(&master);
        master.kill();
        gone.kill();

        master.run(&[]);
        all_back(&clients, 0..OBJECTS).await;
        assert_eq!(
            without_times(clients[1].replicas().task(task).await.unwrap()),
            asked,
            "a task goes on waiting"
        );
        let now = counts(&master);
        assert!(now[0] == before[0] && now[1] >= before[1] && now[1] > Some(0), "{before:?} and {now:?}");
        let (_, said) = http(pages, "GET", quotas, "").await;
        assert!(said.contains("\"blue\"") && said.contains("8388608") && said.contains("16777216"), "{said}");
        let full = clients[1].put("too much", vec![0; 9 << 20]).await;
        assert!(full.is_err(), "{full:?}");
        let (status, said) = http(metadata, "GET", entry, "").await;
        assert_eq!((status, said.as_str()), (200, r#"{"name":"somebody"}"#));
        // The kill comes at any point of a snapshot.
        for _ in 0..3 {
            master.kill();
            master.run(&[]);
        }
        all_back(&clients, 0..OBJECTS).await;
        assert_eq!(without_times(clients[1].replicas().task(task).await.unwrap()), asked);
    }
}
