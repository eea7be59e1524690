//! Events over the ZeroMQ protocol: puts, removals and evictions at a subscriber, and invalid bytes
//! at the publisher.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::common::http::{config, http};
use crate::common::rig::{MIB, client, segment};
use mooncake_core::clock::ManualClock;
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_store::api::WriteMode;
use mooncake_store::config::{EventsConfig, MasterConfig};
use mooncake_store::master::{Put, Writer};
use mooncake_store::server::MasterServer;
use mooncake_transport::admission::ByteBudget;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Subscriber of version 3.0 of the protocol.
struct Reader(TcpStream);

impl Reader {
    async fn connect(at: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let mut greeting = [0; 64];
        greeting[..1].copy_from_slice(b"\xff");
        greeting[9..11].copy_from_slice(b"\x7f\x03");
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await.unwrap();
        let mut theirs = [0; 64];
        stream.read_exact(&mut theirs).await.unwrap();
        assert_eq!((theirs[0], theirs[9], &theirs[12..17]), (0xff, 0x7f, &b"NULL\0"[..]));
        stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB").await.unwrap();
        let mut reader = Self(stream);
        let (flags, ready) = reader.frame().await;
        assert_eq!((flags, &ready[..6]), (4, &b"\x05READY"[..]));
        reader
    }

    async fn subscribed(at: SocketAddr) -> Self {
        let mut reader = Self::connect(at).await;
        reader.0.write_all(b"\x00\x01\x01").await.unwrap();
        reader
    }

    async fn frame(&mut self) -> (u8, Vec<u8>) {
        let flags = self.0.read_u8().await.unwrap();
        let len = if flags & 2 == 0 {
            u64::from(self.0.read_u8().await.unwrap())
        } else {
            self.0.read_u64().await.unwrap()
        };
        let mut body = vec![0; usize::try_from(len).unwrap()];
        self.0.read_exact(&mut body).await.unwrap();
        (flags, body)
    }

    /// Returns the number and the payload of the next message.
    async fn message(&mut self) -> (u64, Value) {
        let next = async {
            let (flags, topic) = self.frame().await;
            assert_eq!((flags & 1, topic.len()), (1, 0));
            let (flags, number) = self.frame().await;
            assert_eq!(flags & 1, 1);
            let (flags, payload) = self.frame().await;
            assert_eq!(flags & 1, 0);
            (u64::from_be_bytes(number.try_into().unwrap()), rmp_serde::from_slice(&payload).unwrap())
        };
        tokio::time::timeout(Duration::from_secs(5), next).await.expect("a message")
    }

    /// Returns the next `count` events, and the numbers of their messages.
    async fn events(&mut self, count: usize) -> (Vec<u64>, Vec<Value>) {
        let (mut numbers, mut events) = (Vec::new(), Vec::new());
        while events.len() < count {
            let (number, payload) = self.message().await;
            assert_eq!(payload[2], 0);
            numbers.push(number);
            events.extend(payload[1].as_array().unwrap().iter().cloned());
        }
        (numbers, events)
    }
}

/// Messages for a subscriber that does not read are counted, and released with its connection.
#[tokio::test]
async fn messages_for_slow_subscribers_are_counted() {
    let server = MasterServer::start(with_events(|events| events.object_key = true)).await.unwrap();
    let at = server.addresses().events.unwrap();
    let slow = Reader::subscribed(at).await;
    let mut other = Reader::subscribed(at).await;
    let reading = tokio::spawn(async move {
        let mut part = vec![0; 64 << 10];
        while other.0.read(&mut part).await.is_ok_and(|count| count > 0) {}
    });
    server.master().mount(client(1), &segment(1, 100 * MIB)).unwrap();
    let held = || ByteBudget::of_process().report().held;
    let (config, mut number) = (ReplicateConfig::default(), 0);
    // More than the kernel buffers.
    while held() < 4 << 20 {
        let key = format!("{number:08}").repeat(1000).into_bytes();
        let (writer, mode) = (client(1).into(), WriteMode::Put);
        let put = Put { writer, mode, key: &key, len: 1, config: &config, group: "", session: None };
        server.master().put_start(&put).unwrap();
        server.master().put_end(writer, &key, None, ReplicaType::All).unwrap();
        server.master().ping(client(1));
        tokio::task::yield_now().await;
        number += 1;
        assert!(number < 20_000, "nothing is counted");
    }
    drop(slow);
    let released = async {
        while held() >= 4 << 20 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), released).await.expect("bytes are released");
    assert!(!reading.is_finished(), "a subscriber that reads stays");
    reading.abort();
    server.stop().await;
}

fn with_events(change: impl FnOnce(&mut EventsConfig)) -> MasterConfig {
    let mut events =
        EventsConfig { host: "127.0.0.1".into(), port: 0, backend_id: "b".into(), ..EventsConfig::default() };
    change(&mut events);
    MasterConfig { events: Some(events), ..config() }
}

fn put(server: &MasterServer, key: &str, group: &str, mode: WriteMode) {
    put_in(server, key, group, mode, None);
}

fn put_in(server: &MasterServer, key: &str, group: &str, mode: WriteMode, session: Option<&[u8]>) {
    let config = ReplicateConfig::default();
    let put = Put {
        writer: client(1).into(),
        mode,
        key: key.as_bytes(),
        len: 1000,
        config: &config,
        group,
        session,
    };
    server.master().put_start(&put).unwrap();
    server.master().put_end(Writer::from(client(1)), key.as_bytes(), None, ReplicaType::All).unwrap();
}

/// Puts objects until an event arrives: a new subscription misses messages until it takes effect.
async fn warm_up(server: &MasterServer, reader: &mut Reader) {
    for attempt in 0..1000 {
        put(server, &format!("warm-up {attempt}"), "", WriteMode::Put);
        let next = tokio::time::timeout(Duration::from_millis(20), reader.0.peek(&mut [0; 1])).await;
        if next.is_ok() {
            while reader.message().await.1[1].as_array().unwrap().last().unwrap()["object_key"]
                != format!("warm-up {attempt}")
            {}
            return;
        }
    }
    panic!("no message arrives");
}

#[tokio::test]
async fn a_subscriber_sees_what_comes_and_goes() {
    let clock = Arc::new(ManualClock::new());
    let server = MasterServer::start_with_clock(with_events(|_| {}), clock.clone()).await.unwrap();
    let master = server.master();
    master.mount(client(1), &segment(1, MIB)).unwrap();
    let mut reader = Reader::subscribed(server.addresses().events.unwrap()).await;
    warm_up(&server, &mut reader).await;

    put(&server, "0x2a", "g", WriteMode::Put);
    put(&server, "plain", "", WriteMode::Put);
    put(&server, "0x2a", "g", WriteMode::Upsert);
    master.remove(b"plain", true).unwrap();
    let (_, events) = reader.events(5).await;
    let seen: Vec<_> = events.iter().map(|event| (&event["event_type"], &event["object_key"])).collect();
    let (stored, removed) = (json!("stored"), json!("removed"));
    let (hash, plain) = (json!("0x2a"), json!("plain"));
    let wanted =
        [(&stored, &hash), (&stored, &plain), (&removed, &hash), (&stored, &hash), (&removed, &plain)];
    assert_eq!(seen, wanted);
    let ids: Vec<_> = events.iter().map(|event| event["event_id"].as_u64().unwrap()).collect();
    assert!(ids.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{ids:?}");
    let mut first = events[0].clone();
    assert!(first["timestamp"].is_u64() && first["event_id"].is_u64());
    first.as_object_mut().unwrap().retain(|name, _| !matches!(name.as_str(), "timestamp" | "event_id"));
    assert_eq!(
        first,
        json!({
            "event_type": "stored", "type": "BlockStored", "model_name": null, "block_size": 0, "additional_salt": null,
            "lora_name": null, "tenant_id": "default", "backend_id": "b", "medium": "cpu", "dp_rank": null, "group_id": "g",
            "object_key": "0x2a", "seq_hashes": [42], "block_hashes": [42], "session_id": null, "base_block_idx": 0, "parent_hash": null,
            "token_ids": [], "parent_block_hash": null, "lora_id": null,
        })
    );
    assert_eq!(events[4]["seq_hashes"], json!([]));
    assert_eq!(events[4]["group_id"], Value::Null);
    assert_eq!(events[4]["base_block_idx"], 0);

    // Objects of an expired client are removed, too.
    clock.advance(Duration::from_secs(11));
    let (_, events) = reader.events(1).await;
    assert_eq!(events[0]["event_type"], "removed");

    let (_, status) = http(server.addresses().admin.unwrap(), "GET", "/kv_events/status", "").await;
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["enabled"], true);
    assert!(status["published_events"].as_u64().unwrap() >= 6, "{status}");
    assert_eq!(status["dropped_events"], 0);
    server.stop().await;
}

/// Settings of a master fill fields of its events.
#[tokio::test]
async fn settings_fill_fields() {
    let config = with_events(|events| {
        events.model_name = "m".into();
        events.additional_salt = "s".into();
        events.lora_name = "l".into();
        events.block_size = 64;
        events.dp_rank = Some(0);
    });
    let server = MasterServer::start(config).await.unwrap();
    server.master().mount(client(1), &segment(1, MIB)).unwrap();
    let mut reader = Reader::subscribed(server.addresses().events.unwrap()).await;
    warm_up(&server, &mut reader).await;
    put(&server, "7", "", WriteMode::Put);
    server.master().remove(b"7", true).unwrap();
    let (_, events) = reader.events(2).await;
    for (event, kind) in events.iter().zip(["stored", "removed"]) {
        assert_eq!(event["event_type"], kind);
        let fields = ["model_name", "additional_salt", "lora_name", "block_size", "dp_rank"];
        let values = fields.map(|field| event[field].clone());
        assert_eq!(values, [json!("m"), json!("s"), json!("l"), json!(64), json!(0)], "{kind}");
    }
    server.stop().await;
}

/// Keys of connectors fill the fields of events. Events have the fields that `BlockStored` and
/// `BlockRemoved` of vLLM 0.33.0 require, in their types.
#[tokio::test]
async fn keys_of_connectors_fill_fields() {
    let server = MasterServer::start(with_events(|_| {})).await.unwrap();
    server.master().mount(client(1), &segment(1, MIB)).unwrap();
    let mut reader = Reader::subscribed(server.addresses().events.unwrap()).await;
    warm_up(&server, &mut reader).await;
    let hash = "00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210";
    let [low, first] = [0xfedc_ba98_7654_3210_u64, 0x0011_2233_4455_6677];
    let (of_vllm, of_sglang) =
        (format!("Qwen/Q@tp_rank:1@pcp0@dcp0@pp_rank:2@group:3@{hash}"), format!("Q_{hash}_1_2_k"));
    let (of_lmcache, of_its_server) = (format!("m@8@5@{hash}@half"), format!("m@08050401@1@{hash}"));
    let rows = [
        (&of_vllm, low, json!(["Qwen/Q", 3, 1, 2, null])),
        (&of_sglang, first, json!([null, null, 1, 2, null])),
        (&of_lmcache, low, json!(["m", null, null, null, 5])),
        (&of_its_server, low, json!(["m", 1, null, null, 5])),
    ];
    for (key, hash, wanted) in rows {
        put(&server, key, "", WriteMode::Put);
        server.master().remove(key.as_bytes(), true).unwrap();
        let (_, events) = reader.events(2).await;
        for event in &events {
            assert_eq!(event["seq_hashes"], json!([hash]), "{key}");
            assert_eq!(event["block_hashes"], json!([hash.cast_signed()]), "{key}");
            let fields = ["model_name", "group_idx", "tp_rank", "pp_rank", "worker_id"];
            assert_eq!(json!(fields.map(|field| &event[field])), wanted, "{key}");
        }
        let [stored, removed] = &events[..] else { panic!("two events") };
        assert_eq!((&stored["type"], &removed["type"]), (&json!("BlockStored"), &json!("BlockRemoved")));
        assert_eq!((&stored["block_size"], &stored["token_ids"]), (&json!(0), &json!([])));
        for field in ["parent_block_hash", "lora_id", "lora_name"] {
            assert_eq!(stored.get(field), Some(&Value::Null), "{field}");
        }
        assert_eq!((&stored["medium"], &removed["medium"]), (&json!("cpu"), &json!("cpu")));
    }
    server.stop().await;
}

/// The event about an object names the session that wrote its value.
#[tokio::test]
async fn stored_objects_have_a_session() {
    let server = MasterServer::start(with_events(|_| {})).await.unwrap();
    let master = server.master();
    master.mount(client(1), &segment(1, MIB)).unwrap();
    let mut reader = Reader::subscribed(server.addresses().events.unwrap()).await;
    warm_up(&server, &mut reader).await;
    put_in(&server, "a", "", WriteMode::Put, Some(b"first"));
    put_in(&server, "a", "", WriteMode::Upsert, Some("zweite Sitzung".as_bytes()));
    put_in(&server, "a", "", WriteMode::Upsert, None);
    put_in(&server, "b", "g", WriteMode::Put, Some(b""));
    // A write that is cancelled leaves its name to no other.
    let config = ReplicateConfig::default();
    let revoked = Put {
        writer: client(1).into(),
        mode: WriteMode::Put,
        key: b"c",
        len: 1000,
        config: &config,
        group: "",
        session: Some(b"cancelled"),
    };
    master.put_start(&revoked).unwrap();
    put_in(&server, "d", "", WriteMode::Put, None);
    master.put_revoke(client(1).into(), b"c", ReplicaType::All).unwrap();
    put_in(&server, "c", "", WriteMode::Put, None);
    let (_, events) = reader.events(8).await;
    let seen: Vec<_> = events
        .iter()
        .map(|event| (event["object_key"].as_str().unwrap(), event.get("session_id").cloned()))
        .collect();
    let named = |name: &str| Some(json!(name));
    let wanted = [
        ("a", named("first")),
        ("a", None),
        ("a", named("zweite Sitzung")),
        ("a", None),
        ("a", Some(Value::Null)),
        ("b", named("")),
        ("d", Some(Value::Null)),
        ("c", Some(Value::Null)),
    ];
    assert_eq!(seen, wanted, "only a stored value has a session");
    server.stop().await;
}

#[tokio::test]
async fn what_is_lost_leaves_a_gap() {
    let config = with_events(|events| {
        events.capacity = 10;
        events.legacy = false;
        events.object_key = false;
    });
    let server = MasterServer::start(config).await.unwrap();
    server.master().mount(client(1), &segment(1, MIB)).unwrap();
    let mut reader = Reader::subscribed(server.addresses().events.unwrap()).await;
    let mut key = 0;
    // Removes one key after the other until the subscription takes effect.
    while tokio::time::timeout(Duration::from_millis(20), reader.0.peek(&mut [0; 1])).await.is_err() {
        key += 1;
        put(&server, &key.to_string(), "", WriteMode::Put);
    }
    while reader.events(1).await.1.last().unwrap()["seq_hashes"] != json!([key]) {}
    let before = server.event_stats().unwrap();
    // The runtime of this test has one thread: nothing is published while the test does not wait.
    for more in 1..=30 {
        put(&server, &(key + more).to_string(), "", WriteMode::Put);
        put(&server, &format!("no hash {more}"), "", WriteMode::Put);
    }
    let (numbers, events) = reader.events(5).await;
    let hashes: Vec<_> = events.iter().map(|event| event["seq_hashes"][0].as_u64().unwrap()).collect();
    assert_eq!(hashes, (26..=30).map(|more| key + more).collect::<Vec<_>>(), "the newest stay");
    assert!(events.iter().all(|event| event.get("object_key").is_none() && event.get("type").is_none()));
    assert_eq!(numbers[0], before.batches + 1 + 50, "each lost event is a gap");
    let after = server.event_stats().unwrap();
    assert_eq!((after.dropped, after.without_hash), (50, 5));
    server.stop().await;
}

#[tokio::test]
async fn a_stalled_or_malformed_peer_harms_no_other() {
    let server = MasterServer::start(with_events(|_| {})).await.unwrap();
    server.master().mount(client(1), &segment(1, 16 * MIB)).unwrap();
    let at = server.addresses().events.unwrap();
    let _silent = TcpStream::connect(at).await.unwrap();
    let _stalled = Reader::subscribed(at).await;
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 200], &[0; 200]] {
        crate::common::http::raw(at, garbage).await;
    }
    let mut huge = Reader::connect(at).await;
    huge.0.write_all(&[2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).await.unwrap();
    assert_eq!(huge.0.read(&mut [0; 1]).await.unwrap_or(0), 0, "a length nobody believes");
    let mut reader = Reader::subscribed(at).await;
    warm_up(&server, &mut reader).await;
    // The stalled subscriber reads none of these messages.
    for round in 0..2000 {
        put(&server, &format!("{round} {}", "x".repeat(2000)), "", WriteMode::Put);
        if round % 50 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let (_, events) = reader.events(2000).await;
    assert_eq!(events.last().unwrap()["event_type"], "stored");
    // This subscriber cancels its subscription.
    reader.0.write_all(b"\x00\x01\x00").await.unwrap();
    server.stop().await;
}
