//! Lists of keys in requests to the admin port: in an address, in a body, and beyond the limits.

use crate::common::http::{config, http};
use crate::common::rig::{MIB, client, segment};
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Put, Writer};
use mooncake_store::server::MasterServer;
use serde_json::{Value, json};

/// Number of keys of a large cluster's request.
const MANY: usize = 10_000;

fn key(number: usize) -> String {
    format!("block/{number:06}/{}", "x,".repeat(20))
}

/// Returns a master with an object that has a reader.
async fn server() -> MasterServer {
    let server = MasterServer::start(config()).await.unwrap();
    let (master, key, config) = (server.master(), key(7), ReplicateConfig::default());
    master.mount(client(1), &segment(1, 100 * MIB)).unwrap();
    let (writer, mode) = (Writer::from(client(1)), WriteMode::Put);
    let put = Put { writer, mode, key: key.as_bytes(), len: 1000, config: &config, group: "", session: None };
    master.put_start(&put).unwrap();
    master.put_end(writer, key.as_bytes(), None, ReplicaType::All).unwrap();
    master.locate(key.as_bytes()).unwrap();
    server
}

fn parsed(response: (u16, String)) -> (u16, Value) {
    (response.0, serde_json::from_str(&response.1).unwrap())
}

#[tokio::test]
async fn long_lists_are_bodies() {
    let server = server().await;
    let at = server.addresses().admin.unwrap();
    let keys: Vec<String> = (0..MANY).map(key).collect();
    let body = json!({"keys": keys, "tenant_id": "default"}).to_string();

    let (status, found) = parsed(http(at, "POST", "/batch_query_keys", &body).await);
    let data = found["data"].as_object().unwrap();
    assert_eq!((status, data.len()), (200, MANY));
    let readable: Vec<_> = data.iter().filter(|(_, one)| one["ok"] == true).map(|(key, _)| key).collect();
    assert_eq!(readable, [&key(7)]);
    // The response is the same as for the list in the address.
    let few = json!({"keys": ["none", "block"]}).to_string();
    let by_body = http(at, "POST", "/batch_query_keys", &few).await;
    assert_eq!(by_body, http(at, "GET", "/batch_query_keys?keys=none,block", "").await);

    let (status, leases) = parsed(http(at, "POST", "/api/v1/leases", &body).await);
    let leases = leases["lease_ms"].as_object().unwrap();
    assert_eq!((status, leases.keys().collect::<Vec<_>>()), (200, vec![&key(7)]));
    server.stop().await;
}

#[tokio::test]
async fn lists_beyond_a_limit_are_refused_by_its_name() {
    let server = server().await;
    let at = server.addresses().admin.unwrap();
    let list: Vec<String> = (0..MANY).map(key).collect();
    let address = format!("/batch_query_keys?keys={}", list.join(","));
    let many = json!({"keys": vec!["k"; 65_537]}).to_string();
    let long = json!({"keys": ["k".repeat(16 << 20)]}).to_string();
    let drain = json!({"segments": ["s".repeat(16 << 20)]}).to_string();
    for (method, path, body, status, limit, value, remedy) in [
        ("GET", &*address, "", 414, "max_address_bytes", 65_534, "in the body of a POST request"),
        ("POST", "/batch_query_keys", &many, 413, "max_keys", 65_536, "send several requests"),
        ("POST", "/api/v1/leases", &many, 413, "max_keys", 65_536, "send several requests"),
        ("POST", "/batch_query_keys", &long, 413, "max_body_bytes", 16 << 20, "send several requests"),
        ("POST", "/api/v1/drain_jobs", &drain, 413, "max_body_bytes", 16 << 20, "send several requests"),
    ] {
        let (got, answer) = parsed(http(at, method, path, body).await);
        let text = answer["error_message"].as_str().unwrap();
        assert_eq!((got, &answer["success"], &answer["error_code"]), (status, &json!(false), &json!(-600)));
        assert_eq!((&answer["limit"], &answer["limit_value"]), (&json!(limit), &json!(value)), "{answer}");
        assert!(text.starts_with("cannot read request: ") && text.contains(remedy), "{text}");
    }
    for body in ["", "{}", "[]", r#"{"keys":"k"}"#, r#"{"keys":[1]}"#, r#"{"keys":[],"tenant":"t"}"#] {
        let (status, answer) = parsed(http(at, "POST", "/batch_query_keys", body).await);
        let text = answer["error_message"].as_str().unwrap();
        assert!(status == 400 && text.starts_with("Invalid JSON body: "), "{body}: {text}");
    }
    server.stop().await;
}
