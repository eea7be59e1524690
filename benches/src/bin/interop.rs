//! Mixed clusters with nodes of Mooncake C++ and of this project, in both roles. Run by `cargo
//! xtask interop`, in a network namespace of its own with one interface besides `lo`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use mooncake_benches::peer::{Installation, Node, Process, Result, hex, unhex, wait_for_port};
use mooncake_core::clock::Rng;
use mooncake_core::replica::ReplicaLocation;
use mooncake_store::client::{Client, PutOptions, PutOutcome, RangeRead};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Address of the namespace's interface.
const HOST: &str = "10.213.0.1";
const SEGMENT: u64 = 64 << 20;
const BUFFER: u64 = 32 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        arguments.get(at + 1).map(PathBuf::from)
    };
    let (Some(python), Some(master)) = (value("--python"), value("--master")) else {
        eprintln!("interop: missing --python or --master; run `cargo xtask interop`");
        return ExitCode::FAILURE;
    };
    let peer = Installation::new(python);
    let mut passed = 0;
    let mut failed = 0;
    for (index, metadata) in [false, true].into_iter().enumerate() {
        let base = 51000 + 100 * index as u16;
        for (name, outcome) in [
            (
                "clients of Mooncake C++, master of this project",
                cpp_clients_on_rust_master(&peer, &master, base, metadata),
            ),
            (
                "clients of this project, master of Mooncake C++",
                rust_clients_on_cpp_master(&peer, base + 50, metadata),
            ),
        ] {
            let mode = if metadata { "HTTP metadata" } else { "P2PHANDSHAKE" };
            match outcome {
                Ok(checks) => {
                    println!("ok      {name}, {mode}: {checks} checks");
                    passed += 1;
                }
                Err(error) => {
                    println!("FAILED  {name}, {mode}: {error}");
                    failed += 1;
                }
            }
        }
    }
    for (name, outcome) in [
        ("master of this project", files_on_ours(&peer, &master, 51200)),
        ("master of Mooncake C++", files_on_theirs(&peer, 51250)),
    ] {
        match outcome {
            Ok(checks) => {
                println!("ok      files shared by clients, {name}: {checks} checks");
                passed += 1;
            }
            Err(error) => {
                println!("FAILED  files shared by clients, {name}: {error}");
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Master and metadata service of one cluster.
struct ClusterAddress {
    master: String,
    metadata: String,
}

impl ClusterAddress {
    fn new(port: u16, metadata: Option<u16>) -> Self {
        let metadata = match metadata {
            Some(port) => format!("http://{HOST}:{port}/metadata"),
            None => "P2PHANDSHAKE".into(),
        };
        Self { master: format!("{HOST}:{port}"), metadata }
    }

    fn theirs(&self, peer: &Installation, name: &str, segment: u64) -> Result<Node> {
        let mut node = peer.node()?;
        node.setup(name, &self.metadata, segment, BUFFER, &self.master)?;
        Ok(node)
    }

    async fn ours(&self, name: &str, segment: u64) -> Result<Client> {
        Client::builder()
            .master(self.master.as_str())
            .metadata(self.metadata.as_str())
            .local_hostname(name)
            .segment(segment)
            .local_buffer(BUFFER)
            .connect()
            .await
            .map_err(|e| e.to_string())
    }
}

fn cpp_clients_on_rust_master(peer: &Installation, master: &PathBuf, base: u16, http: bool) -> Result<usize> {
    let metadata = http.then_some(base + 2);
    let mut command = Command::new(master);
    command.arg(format!("--rpc_port={base}")).arg(format!("-metrics_port={}", base + 1));
    command.arg("--default_kv_lease_ttl=1s");
    if let Some(port) = metadata {
        command.arg("--enable_http_metadata_server=true").arg(format!("--http_metadata_server_port={port}"));
    }
    let _master = Process::start(command, "the master")?;
    wait_for_port(base)?;
    let meeting = ClusterAddress::new(base, metadata);
    let mut alice = meeting.theirs(peer, &format!("{HOST}:{}", 17100 + base % 100), SEGMENT)?;
    let mut bob = meeting.theirs(peer, &format!("{HOST}:{}", 17200 + base % 100), SEGMENT)?;
    let mut checks = Checks::default();
    between_theirs(&mut checks, &mut alice, &mut bob)?;
    let runtime = runtime()?;
    let carol = runtime.block_on(meeting.ours(HOST, SEGMENT))?;
    runtime.block_on(travel(&mut checks, &carol, &mut alice))?;
    runtime.block_on(carol.close()).map_err(|e| e.to_string())?;
    checks.that("the client of Mooncake C++ is healthy", alice.call(json!(["health"]))? == json!(0))?;
    checks.that("everything can be removed", alice.call(json!(["remove_all", true]))?.as_i64() >= Some(0))?;
    alice.call(json!(["close"]))?;
    bob.call(json!(["close"]))?;
    Ok(checks.count)
}

fn rust_clients_on_cpp_master(peer: &Installation, base: u16, http: bool) -> Result<usize> {
    let metadata = http.then_some(base + 2);
    let _master = peer.master(base, metadata)?;
    let meeting = ClusterAddress::new(base, metadata);
    let runtime = runtime()?;
    let mut checks = Checks::default();
    let (carol, dave) = runtime.block_on(async {
        let carol = meeting.ours(HOST, SEGMENT).await?;
        Ok::<_, String>((carol, meeting.ours(HOST, SEGMENT).await?))
    })?;
    runtime.block_on(between_ours(&mut checks, &carol, &dave))?;
    let mut alice = meeting.theirs(peer, &format!("{HOST}:{}", 17300 + base % 100), SEGMENT)?;
    runtime.block_on(travel(&mut checks, &carol, &mut alice))?;
    alice.call(json!(["close"]))?;
    runtime
        .block_on(async {
            dave.remove_all(true).await?;
            carol.close().await?;
            dave.close().await
        })
        .map_err(|e| e.to_string())?;
    Ok(checks.count)
}

/// Creates a folder for shared files that clients of this project allow.
fn folder_for_files() -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    std::fs::write(folder.path().join(".mooncake-root"), "").map_err(|e| e.to_string())?;
    Ok(folder)
}

fn files_on_ours(peer: &Installation, master: &PathBuf, base: u16) -> Result<usize> {
    let folder = folder_for_files()?;
    let mut command = Command::new(master);
    command.arg(format!("--rpc_port={base}")).arg(format!("-metrics_port={}", base + 1));
    command.args(["--default_kv_lease_ttl=1s", &format!("--root_fs_dir={}", folder.path().display())]);
    let _master = Process::start(command, "the master")?;
    wait_for_port(base)?;
    in_files(peer, base)
}

fn files_on_theirs(peer: &Installation, base: u16) -> Result<usize> {
    let folder = folder_for_files()?;
    let flags = ["--default_kv_lease_ttl=1000", &format!("--root_fs_dir={}", folder.path().display())];
    let _master = peer.master_with(base, None, &flags)?;
    in_files(peer, base)
}

/// Checks that each side reads the files (`--root_fs_dir`) that the other has written, when no
/// memory has the objects any more.
fn in_files(peer: &Installation, base: u16) -> Result<usize> {
    let text = |e: mooncake_core::Error| e.to_string();
    let meeting = ClusterAddress::new(base, None);
    let runtime = runtime()?;
    let mut checks = Checks::default();
    let holder = runtime.block_on(meeting.ours(HOST, SEGMENT))?;
    let mut alice = meeting.theirs(peer, &format!("{HOST}:{}", 17400 + base % 100), 0)?;
    let carol = runtime.block_on(meeting.ours(HOST, 0))?;
    let sizes = [1, 5_000, 70_001, 3_000_001];
    let names = |whose: &'static str| {
        sizes.iter().zip(0u64..).map(move |(&len, n)| (format!("{whose}/{n}"), bytes(700 + n, len)))
    };
    for (key, value) in names("theirs").chain([("theirs/odd:*?".to_owned(), bytes(9, 300))]) {
        checks.that("put by Mooncake C++", alice.call(json!(["put", key, hex(&value)]))? == json!(0))?;
    }
    for (key, value) in names("ours").chain([("ours/../odd".to_owned(), bytes(8, 300))]) {
        let put = runtime.block_on(carol.put(&key, &value)).map_err(text)?;
        checks.that("put by this project", put == PutOutcome::Stored)?;
    }
    // A master of Mooncake C++ takes no file of an object that was replaced before its first file.
    let file = "the object has a file";
    runtime.block_on(async {
        for key in ["theirs/1", "ours/1"] {
            let before = in_time(async || has_file(&carol, key).await).await;
            checks.that(&format!("{key}, to be replaced: {file}"), before)?;
        }
        Ok::<_, String>(())
    })?;
    let replaced = upsert_after_leases(&mut alice, "theirs/1", &bytes(10, 5_000))?;
    checks.that(&format!("upsert by Mooncake C++: {replaced}"), replaced == json!(0))?;
    runtime
        .block_on(carol.put_with("ours/1", bytes(11, 5_000), &PutOptions::new().upsert()))
        .map_err(text)?;
    let keys = || names("theirs").chain(names("ours")).map(|(key, _)| key);
    runtime.block_on(async {
        for key in keys().chain(["theirs/odd:*?".to_owned(), "ours/../odd".to_owned()]) {
            checks.that(&format!("{key}: {file}"), in_time(async || has_file(&carol, &key).await).await)?;
        }
        holder.close().await.map_err(text)
    })?;
    let now = |(key, value): (String, Vec<u8>)| match &*key {
        "theirs/1" => (key, bytes(10, 5_000)),
        "ours/1" => (key, bytes(11, 5_000)),
        _ => (key, value),
    };
    for (key, value) in names("theirs").chain([("theirs/odd:*?".to_owned(), bytes(9, 300))]).map(now) {
        let got = runtime.block_on(carol.get(&key)).map_err(text)?;
        checks.that(&format!("this project reads {key}"), got.as_deref() == Some(&value[..]))?;
    }
    for (key, value) in names("ours").chain([("ours/../odd".to_owned(), bytes(8, 300))]).map(now) {
        checks.same(&format!("Mooncake C++ reads {key}"), &alice.call(json!(["get", key]))?, &value)?;
    }
    let report = carol.status().files().ok_or("the client of this project has no folder")?;
    checks.that("all reads come from files", report.read >= 5 && report.unread == 0)?;
    alice.call(json!(["close"]))?;
    runtime.block_on(carol.close()).map_err(text)?;
    Ok(checks.count)
}

/// Replaces a value, and repeats this while the object has a lease: a master of Mooncake C++ 0.3.14
/// refuses it until then.
fn upsert_after_leases(node: &mut Node, key: &str, value: &[u8]) -> Result<Value> {
    let mut replaced = Value::Null;
    for _ in 0..100 {
        replaced = node.call(json!(["upsert", key, hex(value)]))?;
        if replaced != json!(-706) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    Ok(replaced)
}

async fn has_file(client: &Client, key: &str) -> bool {
    let list = client.replicas().list(key).await.ok().flatten();
    let mut replicas = list.into_iter().flat_map(|list| list.replicas);
    replicas.any(|replica| matches!(replica.location, ReplicaLocation::Disk { .. }))
}

/// Polls until a file is written: no event reports it.
async fn in_time(mut holds: impl AsyncFnMut() -> bool) -> bool {
    for _ in 0..600 {
        if holds().await {
            return true;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    false
}

/// Checks two clients of Mooncake C++, through their public API.
fn between_theirs(checks: &mut Checks, alice: &mut Node, bob: &mut Node) -> Result<()> {
    let small = bytes(1, 1000);
    let large = bytes(2, 3_000_001);
    let one = |node: &mut Node, command: Value| node.call(command);
    checks.that("put", one(alice, json!(["put", "small", hex(&small)]))? == json!(0))?;
    checks.that("put of an existing key", one(alice, json!(["put", "small", hex(&large)]))? == json!(0))?;
    checks.same("get", &one(bob, json!(["get", "small"]))?, &small)?;
    checks.that("put_from", one(alice, json!(["put_from", "large", hex(&large)]))? == json!(0))?;
    let got = one(bob, json!(["get_into", "large", large.len()]))?;
    checks.that("get_into returns the length", got[0] == json!(large.len()))?;
    checks.same("get_into", &got[1], &large)?;
    checks
        .that("get_into of a short buffer", one(bob, json!(["get_into", "large", 10]))?[0] == json!(-600))?;
    checks.that("exist", one(bob, json!(["exist", "small"]))? == json!(1))?;
    checks.that("exist of nothing", one(bob, json!(["exist", "none"]))? == json!(0))?;
    checks.that("get of nothing", one(bob, json!(["get", "none"]))? == json!(""))?;
    checks.that("size", one(bob, json!(["size", "large"]))? == json!(large.len()))?;
    checks.that("size of nothing", one(bob, json!(["size", "none"]))? == json!(-704))?;
    checks.that("empty value", one(alice, json!(["put", "empty", ""]))? == json!(-600))?;

    let names: Vec<String> = (0..20).map(|i| format!("batch/{i}")).collect();
    let values: Vec<Vec<u8>> = (0..20).map(|i| bytes(100 + i, 20_000)).collect();
    let hexes: Vec<String> = values.iter().map(|v| hex(v)).collect();
    let all = |code: i64| json!(vec![code; 20]);
    checks.that("batch_put_from", one(alice, json!(["batch_put_from", names, hexes]))? == all(0))?;
    let got = one(bob, json!(["batch_get_into", names, 20_000]))?;
    for (value, got) in values.iter().zip(got.as_array().into_iter().flatten()) {
        checks.same("batch_get_into", &got[1], value)?;
    }
    checks.that("batch_exist", one(bob, json!(["batch_exist", names]))? == all(1))?;
    let others: Vec<String> = (0..20).map(|i| format!("other/{i}")).collect();
    checks.that("put_batch", one(bob, json!(["put_batch", others, hexes]))? == json!(0))?;
    let got = one(alice, json!(["get_batch", others]))?;
    for (value, got) in values.iter().zip(got.as_array().into_iter().flatten()) {
        checks.same("get_batch", got, value)?;
    }
    checks.that("two replicas", one(alice, json!(["put", "twice", hex(&small), 2]))? == json!(0))?;
    checks.that("two descriptors", one(bob, json!(["replicas", "twice"]))? == json!(2))?;
    checks.that(
        "upsert, same size",
        one(alice, json!(["upsert", "small", hex(&bytes(3, 1000))]))? == json!(0),
    )?;
    checks.same("the new value", &one(bob, json!(["get", "small"]))?, &bytes(3, 1000))?;
    checks.that(
        "upsert, other size",
        one(alice, json!(["upsert", "small", hex(&bytes(4, 1777))]))? == json!(0),
    )?;
    checks.same("the newer value", &one(bob, json!(["get", "small"]))?, &bytes(4, 1777))?;
    checks.that("remove under a lease", one(bob, json!(["remove", "small"]))? == json!(-706))?;
    checks.that("remove by force", one(bob, json!(["remove", "small", true]))? == json!(0))?;
    checks.that("remove of nothing", one(bob, json!(["remove", "small"]))? == json!(-704))?;
    checks.that("batch_remove", one(bob, json!(["batch_remove", names, true]))? == all(0))?;
    let removed = one(bob, json!(["remove_by_regex", "^other/1", true]))?;
    checks.that("remove_by_regex counts", removed == json!(11))?;
    checks.that("the rest stays", one(bob, json!(["exist", "other/2"]))? == json!(1))
}

/// Checks two clients of this project on a master of Mooncake C++.
async fn between_ours(checks: &mut Checks, carol: &Client, dave: &Client) -> Result<()> {
    let text = |e: mooncake_core::Error| e.to_string();
    for (index, len) in [1, 1000, 70_000, 3_000_001].into_iter().enumerate() {
        let (key, value) = (format!("ours/{index}"), bytes(200 + index as u64, len));
        checks.that("put", carol.put(&key, &value).await.map_err(text)? == PutOutcome::Stored)?;
        checks.that("put again", carol.put(&key, &value).await.map_err(text)? == PutOutcome::Existed)?;
        checks.that("get", dave.get(&key).await.map_err(text)?.as_deref() == Some(&value[..]))?;
        checks.that("exist", dave.exist(&key).await.map_err(text)?)?;
        checks.that("size", dave.size(&key).await.map_err(text)? == Some(len as u64))?;
    }
    checks.that("a miss", dave.get("ours/none").await.map_err(text)?.is_none())?;
    let items: Vec<_> = (0..50).map(|i| (format!("many/{i}"), bytes(300 + i, 30_000))).collect();
    let puts = carol.batch_put(&items, &PutOptions::default()).await.map_err(text)?;
    checks.that("batch put", puts.iter().all(|p| matches!(p, Ok(PutOutcome::Stored))))?;
    let keys: Vec<_> = items.iter().map(|(key, _)| key).collect();
    for ((_, value), got) in items.iter().zip(dave.batch_get(&keys).await.map_err(text)?) {
        checks.that("batch get", got.map_err(text)?.as_deref() == Some(&value[..]))?;
    }
    let there = dave.batch_exist(&keys).await.map_err(text)?;
    checks.that("batch exist", there.iter().all(|t| matches!(t, Ok(true))))?;
    prefixes(checks, dave).await?;
    carol.put_with("ours/1", bytes(7, 2000), &PutOptions::new().upsert()).await.map_err(text)?;
    checks.that("upsert", dave.get("ours/1").await.map_err(text)?.as_deref() == Some(&bytes(7, 2000)[..]))?;
    checks.that("remove", dave.remove("ours/0", true).await.map_err(text)?)?;
    checks.that("removed", !dave.exist("ours/0").await.map_err(text)?)?;
    checks.that("remove by pattern", dave.remove_matching("^many/4", true).await.map_err(text)? == 11)
}

/// Checks prefixes of `many/0` to `many/49`. A master of Mooncake C++ is asked about all keys.
async fn prefixes(checks: &mut Checks, client: &Client) -> Result<()> {
    let text = |e: mooncake_core::Error| e.to_string();
    for gap in [0, 1, 25, 49, 50] {
        let mut keys: Vec<_> = (0..50).map(|i| format!("many/{i}")).collect();
        if gap < keys.len() {
            keys[gap] = "many/none".into();
        }
        let hits = client.replicas().prefix_hits(&keys).await.map_err(text)?;
        let lists = client.replicas().list_prefix(&keys).await.map_err(text)?;
        let located = client.ranges().locate_prefix(&keys).await.map_err(text)?;
        checks.that("prefix", (hits, lists.len(), located.len()) == (gap, gap, gap))?;
        let first = client.replicas().prefix_hits(&keys[..1]).await.map_err(text)?;
        checks.that("prefix of one key", first == usize::from(gap > 0))?;
        for (number, object) in located.into_iter().enumerate().step_by(7) {
            let region = client.memory().alloc(30_000).map_err(text)?;
            let into = region.exclusive().map_err(|_| "new memory is in use")?;
            let read = client.ranges().read(vec![RangeRead { object, offset: 0, into }]).await;
            let mut got = vec![0; 30_000];
            for range in read {
                range.result.and_then(|()| range.into.copy_to(0, &mut got)).map_err(text)?;
            }
            checks.that("read of a prefix", got == bytes(300 + number as u64, 30_000))?;
        }
    }
    Ok(())
}

/// Moves objects from this project to Mooncake C++ and back, until both segments have served.
async fn travel(checks: &mut Checks, ours: &Client, theirs: &mut Node) -> Result<()> {
    let text = |e: mooncake_core::Error| e.to_string();
    let mut endpoints = std::collections::BTreeSet::new();
    for index in 0..24u64 {
        let value = bytes(500 + index, 10_000 + 3333 * index as usize);
        let (there, back) = (format!("there/{index}"), format!("back/{index}"));
        ours.put(&there, &value).await.map_err(text)?;
        let read = theirs.call(json!(["get", there]))?;
        checks.same("from this project to Mooncake C++", &read, &value)?;
        let again = read.as_str().map(unhex).transpose()?.unwrap_or_default();
        checks.that(
            "from Mooncake C++ to this project, put",
            theirs.call(json!(["put", back, hex(&again)]))? == json!(0),
        )?;
        checks.that(
            "from Mooncake C++ to this project",
            ours.get(&back).await.map_err(text)?.as_deref() == Some(&value[..]),
        )?;
        for key in [&there, &back] {
            let list = ours
                .replicas()
                .list(key)
                .await
                .map_err(text)?
                .ok_or("a key that was just read has no replica")?;
            endpoints
                .extend(list.replicas.iter().filter_map(|r| r.location.memory()).map(|m| m.endpoint.clone()));
        }
    }
    checks.that("several segments have served", endpoints.len() > 1)
}

/// Counter of the checks that pass. A failed check is an error with its name.
#[derive(Default)]
struct Checks {
    count: usize,
}

impl Checks {
    fn that(&mut self, what: &str, holds: bool) -> Result<()> {
        self.count += 1;
        if holds { Ok(()) } else { Err(format!("check failed: {what}")) }
    }

    fn same(&mut self, what: &str, got: &Value, expected: &[u8]) -> Result<()> {
        self.count += 1;
        let got = got.as_str().map(unhex).transpose()?.unwrap_or_default();
        if got == expected {
            return Ok(());
        }
        Err(format!("{what}: {} bytes were read, {} were written, or they differ", got.len(), expected.len()))
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::seeded(seed).fill(&mut bytes);
    bytes
}

fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| e.to_string())
}
