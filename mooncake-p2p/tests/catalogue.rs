//! Catalogue of the Go library: its text byte by byte, and writers at once.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use futures::stream::BoxStream;
use mooncake_core::clock::Rng;
use mooncake_core::meta::{Expect, MemoryMetadata, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use mooncake_core::testkit::test_seed;
use mooncake_core::{ErrorKind, Result};
use mooncake_metadata::etcd::EtcdMetadata;
use mooncake_p2p::{Catalogue, Location, Payload, Role};
use proptest::prelude::*;

#[path = "../../mooncake-transport/metadata/tests/servers/mod.rs"]
mod servers;

const WRITERS: usize = 16;

/// Text as the encoder of Go 1.22 writes it: `json.Marshal` of the structures of the Go library.
const OF_GO: &str = concat!(
    r#"{"name":"llama\u003c7b\u003e/rank0","size":5242880,"size_list":[3145728,2097152],"#,
    r#""max_shard_size":2097152,"shards":[{"size":2097152,"gold":[{"segment_name":"10.0.0.1:12345","#,
    r#""offset":140000000000000}],"replica_list":null},{"size":1048576,"gold":null,"replica_list":"#,
    r#"[{"segment_name":"10.0.0.2:12345","offset":1},{"segment_name":"h:1","offset":18446744073709551615}]},"#,
    r#"{"size":2097152,"gold":null,"replica_list":null}]}"#,
);

fn location(segment: &str, offset: u64) -> Location {
    Location { segment_name: segment.into(), offset }
}

#[test]
fn text_of_the_go_library_survives_a_round_trip() {
    let payload = Payload::decode(OF_GO.as_bytes()).unwrap();
    assert_eq!(payload.name, "llama<7b>/rank0");
    assert_eq!(payload.shards[1].replica_list[1].offset, u64::MAX);
    assert_eq!(payload.encode(), OF_GO);
    let mut made = Payload::new("llama<7b>/rank0", &[3 << 20, 2 << 20], 2 << 20).unwrap();
    made.add(Role::Gold, 0, &location("10.0.0.1:12345", 140_000_000_000_000));
    made.add(Role::Replica, 1, &location("10.0.0.2:12345", 1));
    made.add(Role::Replica, 1, &location("h:1", u64::MAX));
    assert_eq!(made.encode(), OF_GO);
}

#[test]
fn entries_that_no_encoder_writes_are_refused() {
    let with = |from: &str, to: &str| Payload::decode(OF_GO.replacen(from, to, 1).as_bytes());
    for (from, to) in [
        ("\"size\":5242880", "\"size\":5242881"),
        ("\"max_shard_size\":2097152", "\"max_shard_size\":0"),
        ("\"max_shard_size\":2097152", "\"max_shard_size\":1"),
        ("[3145728,2097152]", "[18446744073709551615,2097152]"),
        ("\"shards\":[", "\"shards\":[{\"size\":1,\"gold\":null,\"replica_list\":null},"),
        ("\"offset\":1}", "\"offset\":-1}"),
        ("}]}", "}"),
    ] {
        let error = with(from, to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{to}");
    }
    let empty_lists = Payload::decode(OF_GO.replace("null", "[]").as_bytes()).unwrap();
    assert_eq!(empty_lists.encode(), OF_GO, "lists without items are written as null");
    Payload::decode(OF_GO.replacen('{', "{\"later\":{\"x\":[1]},", 1).as_bytes()).unwrap();
}

#[test]
fn objects_that_cannot_be_cut_are_refused() {
    for (name, sizes, max) in [
        ("", &[1u64][..], 1u64),
        ("a", &[], 1),
        ("a", &[1, 0], 1),
        ("a", &[u64::MAX, 1], 4 << 30),
        ("a", &[1], 0),
        ("a", &[1], 3),
        ("a", &[1], 8 << 30),
    ] {
        assert_eq!(
            Payload::new(name, sizes, max).unwrap_err().kind(),
            ErrorKind::Invalid,
            "{name} {sizes:?} {max}"
        );
    }
}

fn any_location() -> impl Strategy<Value = Location> {
    ("\\PC{0,12}", any::<u64>()).prop_map(|(segment, offset)| location(&segment, offset))
}

fn any_payload() -> impl Strategy<Value = Payload> {
    let ranges = prop::collection::vec(1..200_000u64, 1..4);
    let copies = prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), any_location()), 0..12);
    (any::<String>(), ranges, 14..20u32, copies).prop_map(|(name, sizes, shard, copies)| {
        let mut payload = Payload::new(&format!("n{name}"), &sizes, 1 << shard).unwrap();
        let count = payload.shards.len();
        for (shard, is_gold, location) in copies {
            let role = if is_gold { Role::Gold } else { Role::Replica };
            payload.add(role, shard.index(count), &location);
        }
        payload
    })
}

/// Value with the types of the Go structures, for another encoder to compare with.
fn as_value(payload: &Payload) -> serde_json::Value {
    let list = |locations: &[Location]| match locations {
        [] => serde_json::Value::Null,
        some => {
            let value =
                |at: &Location| serde_json::json!({"segment_name": at.segment_name, "offset": at.offset});
            some.iter().map(value).collect()
        }
    };
    let shard = |shard: &mooncake_p2p::Shard| serde_json::json!({"size": shard.size, "gold": list(&shard.gold), "replica_list": list(&shard.replica_list)});
    serde_json::json!({
        "name": payload.name, "size": payload.size, "size_list": payload.size_list,
        "max_shard_size": payload.max_shard_size,
        "shards": payload.shards.iter().map(shard).collect::<Vec<_>>(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_object_survives_a_round_trip(payload in any_payload()) {
        let text = payload.encode();
        prop_assert_eq!(&Payload::decode(text.as_bytes()).unwrap(), &payload);
        prop_assert_eq!(Payload::decode(text.as_bytes()).unwrap().encode(), text.clone());
        prop_assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), as_value(&payload));
        let order = ["{\"name\":", ",\"size\":", ",\"size_list\":", ",\"max_shard_size\":", ",\"shards\":[{\"size\":"];
        let mut rest = text.as_str();
        for key in order {
            let at = rest.find(key);
            prop_assert!(at.is_some(), "{} is not in order", key);
            rest = &rest[at.unwrap_or(0)..];
        }
        let is_escaped = |c| matches!(c, '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}');
        prop_assert!(!text.chars().any(is_escaped), "{}", text);
    }

    #[test]
    fn decoding_never_panics(text in any::<Vec<u8>>(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let _ = Payload::decode(&text);
        let mut changed = OF_GO.as_bytes().to_vec();
        let at = at.index(changed.len());
        changed[at] = byte;
        let _ = Payload::decode(&changed);
    }
}

/// Backend that lets other tasks run before each call, so that writers interleave.
#[derive(Debug)]
struct Yielding(MemoryMetadata);

#[async_trait]
impl MetadataBackend for Yielding {
    fn capabilities(&self) -> MetaCapabilities {
        self.0.capabilities()
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        tokio::task::yield_now().await;
        self.0.get(key).await
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        tokio::task::yield_now().await;
        self.0.put(key, value, expect).await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        self.0.delete(key).await
    }

    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        tokio::task::yield_now().await;
        self.0.delete_at(key, revision).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        self.0.list(prefix).await
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        self.0.watch(prefix).await
    }
}

/// Lets 16 writers enter copies at once, and then remove them at once.
async fn writers_race(backend: Arc<dyn MetadataBackend>) {
    let mut rng = Rng::seeded(test_seed());
    let mut catalogues: Vec<_> =
        (0..WRITERS).map(|_| Arc::new(Catalogue::new(backend.clone(), rng.split()).unwrap())).collect();
    let reader = catalogues.pop().unwrap();
    catalogues.push(reader.clone());
    let mut payload = Payload::new("race", &[64], 16).unwrap();
    payload.add(Role::Gold, 0, &location("seeder", 0));
    reader.create(payload.clone(), false).await.unwrap();
    let twice = reader.create(payload, false).await.unwrap_err();
    assert_eq!(twice.kind(), ErrorKind::AlreadyExists);
    let name = |writer: usize| format!("node{writer}:1");
    let enter = |(writer, catalogue): (usize, &Arc<Catalogue>)| {
        let catalogue = catalogue.clone();
        tokio::spawn(async move {
            for shard in 0..4 {
                let own = location(&name(writer), shard);
                let add = |payload: &mut Payload| payload.add(Role::Replica, shard as usize, &own);
                catalogue.edit("race", add).await.unwrap().expect("the object has a copy");
            }
        })
    };
    for ended in join_all(catalogues.iter().enumerate().map(enter)).await {
        ended.unwrap();
    }
    let entry = reader.read("race").await.unwrap().unwrap();
    for (shard, of_shard) in entry.payload.shards.iter().enumerate() {
        let mut writers: Vec<_> = of_shard.replica_list.iter().map(|l| l.segment_name.clone()).collect();
        writers.sort();
        let mut all: Vec<_> = (0..WRITERS).map(name).collect();
        all.sort();
        assert_eq!(writers, all, "shard {shard} has one entry of each writer");
    }
    let leave = |(writer, catalogue): (usize, &Arc<Catalogue>)| {
        let catalogue = catalogue.clone();
        tokio::spawn(async move {
            let remove = |payload: &mut Payload| payload.remove_node(&[Role::Replica], &name(writer));
            catalogue.edit("race", remove).await.unwrap();
        })
    };
    for ended in join_all(catalogues.iter().enumerate().map(leave)).await {
        ended.unwrap();
    }
    let entry = reader.read("race").await.unwrap().unwrap();
    assert!(entry.payload.shards.iter().all(|shard| shard.replica_list.is_empty()));
    assert_eq!(entry.payload.shards[0].gold.len(), 1, "the copy of the seeder remains");
    let last = reader.edit("race", |payload| payload.remove_node(&[Role::Gold], "seeder")).await.unwrap();
    assert_eq!(
        (last, reader.read("race").await.unwrap()),
        (None, None),
        "the last copy takes the object along"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_writers_lose_no_entry() {
    writers_race(Arc::new(Yielding(MemoryMetadata::new()))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_writers_lose_no_entry_in_etcd() {
    let Some(server) = servers::start(servers::etcd) else { return };
    let backend = Arc::new(EtcdMetadata::new(&server.at()).unwrap());
    servers::ready(&*backend).await;
    writers_race(backend).await;
}

#[tokio::test]
async fn a_copy_entered_before_the_deletion_is_kept() {
    let backend = Arc::new(MemoryMetadata::new());
    let catalogue = Catalogue::new(backend, Rng::seeded(1)).unwrap();
    let mut payload = Payload::new("a", &[1], 1).unwrap();
    payload.add(Role::Gold, 0, &location("seeder", 0));
    catalogue.create(payload, false).await.unwrap();
    let mut attempts = 0;
    let removed = catalogue.edit("a", |payload| {
        attempts += 1;
        if attempts == 1 {
            // Another node enters its copy between the read and the deletion.
            let own = location("reader", 0);
            let add = catalogue.edit("a", |payload| payload.add(Role::Replica, 0, &own));
            futures::executor::block_on(add).unwrap();
        }
        payload.remove_node(&[Role::Gold], "seeder")
    });
    let left = removed.await.unwrap().expect("the copy of the reader");
    assert_eq!((attempts, left.payload.shards[0].replica_list.len()), (2, 1));
}

#[tokio::test]
async fn lists_have_a_prefix_and_skip_malformed_entries() {
    let backend = Arc::new(MemoryMetadata::new());
    let catalogue = Catalogue::new(backend.clone(), Rng::seeded(1)).unwrap();
    for name in ["b/2", "a/1", "a/2", "é"] {
        let mut payload = Payload::new(name, &[1], 1).unwrap();
        payload.add(Role::Gold, 0, &location("s", 0));
        catalogue.create(payload, false).await.unwrap();
    }
    backend.put("mooncake/checkpoint/a/3", "{".into(), Expect::Any).await.unwrap();
    let names = async |prefix: &str| {
        let found = catalogue.list(prefix).await.unwrap();
        found.into_iter().map(|entry| entry.payload.name).collect::<Vec<_>>()
    };
    assert_eq!(names("a/").await, ["a/1", "a/2"]);
    assert_eq!(names("").await, ["a/1", "a/2", "b/2", "é"]);
    assert_eq!(catalogue.read("a/3").await.unwrap_err().kind(), ErrorKind::Corrupt);
    let stored = backend.get("mooncake/checkpoint/a/1").await.unwrap().unwrap();
    let text = r#"{"name":"a/1","size":1,"size_list":[1],"max_shard_size":1,"shards":[{"size":1,"gold":[{"segment_name":"s","offset":0}],"replica_list":null}]}"#;
    assert_eq!(stored.value, text);
}
