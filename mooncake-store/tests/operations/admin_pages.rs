//! Admin endpoints: the bodies that Mooncake C++ writes, and every endpoint against its
//! description.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use crate::common::http::described::{bad_input_is_answered, description, responses_are_described};
use crate::common::http::{Answer, ask, config, http};
use crate::common::rig::{MIB, client, segment};
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_core::testkit::effort;
use mooncake_store::api::WriteMode;
use mooncake_store::config::{EventsConfig, MasterConfig, TenantPolicy};
use mooncake_store::master::{DiskOptions, HotOptions, Put, Writer};
use mooncake_store::protocol::message::DISPLAY_VERSION;
use mooncake_store::server::MasterServer;
use mooncake_transport::admission::ByteBudget;
use serde_json::{Value, json};

const JSON: &str = "application/json; charset=utf-8";
const TEXT: &str = "text/plain; version=0.0.4";

/// Starts a master with a few objects.
async fn server() -> (MasterServer, SocketAddr) {
    server_with(config()).await
}

async fn server_with(config: MasterConfig) -> (MasterServer, SocketAddr) {
    let server = MasterServer::start(config).await.unwrap();
    let master = server.master();
    master.mount(client(1), &segment(1, 100 * MIB)).unwrap();
    for key in ["a b", "k/2", "50%25", "x,y"] {
        let config = ReplicateConfig::default();
        let put = Put {
            writer: client(1).into(),
            mode: WriteMode::Put,
            key: key.as_bytes(),
            len: 1000,
            config: &config,
            group: "",
            session: None,
        };
        master.put_start(&put).unwrap();
        master.put_end(Writer::from(client(1)), key.as_bytes(), None, ReplicaType::All).unwrap();
    }
    let admin = server.addresses().admin.unwrap();
    (server, admin)
}

async fn get(at: SocketAddr, path: &str) -> Answer {
    ask(at, "GET", path, "").await
}

#[tokio::test]
async fn who_leads() {
    let (server, at) = server().await;
    for (path, content_type, body) in [
        (
            "/health",
            JSON,
            r#"{"status":"ok","role":"leader","ha_state":"serving","service_ready":true,"leader_address":null,"view_version":null}"#,
        ),
        ("/role", "text/plain; charset=utf-8", "leader"),
        ("/ha_status", "text/plain; charset=utf-8", "serving"),
        ("/leader", JSON, r#"{"present":false,"leader_address":null,"view_version":null}"#),
        (
            "/kv_events/status",
            JSON,
            r#"{"enabled":false,"published_batches":0,"published_events":0,"dropped_events":0,"skipped_unparsed_keys":0}"#,
        ),
    ] {
        let answer = get(at, path).await;
        assert_eq!(
            (answer.status, &*answer.content_type, &*answer.body),
            (200, content_type, body),
            "{path}"
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn where_objects_lie() {
    let (server, at) = server().await;
    let memory = |key: &[u8]| {
        let replica = server.master().peek(key).unwrap().remove(0);
        let at = replica.location.memory().unwrap().address;
        format!(
            r#"[{{"size_":1000,"buffer_address_":{at},"protocol_":"tcp","transport_endpoint_":"10.0.0.1:1"}}]"#
        )
    };
    // Each key is found as it was sent or decoded; the literal bytes take precedence.
    for (query, key) in
        [("a%20b", "a b"), ("k/2", "k/2"), ("k%2F2", "k/2"), ("50%25", "50%25"), ("50%2525", "50%25")]
    {
        let answer = get(at, &format!("/query_key?x=1&key={query}&y=2")).await;
        let body = format!(r#"{{"success":true,"data":{}}}"#, memory(key.as_bytes()));
        assert_eq!((answer.status, &*answer.content_type, answer.body), (200, JSON, body), "{query}");
    }
    let absent = r#"{"success":false,"error_code":-704,"error_message":"OBJECT_NOT_FOUND"}"#;
    for query in ["?key=none", "?key=", "", "?key=a+b"] {
        assert_eq!(http(at, "GET", &format!("/query_key{query}"), "").await, (404, absent.into()), "{query}");
    }

    let rest = r#""disk_values":null,"local_disk_values":null,"nof_values":null"#;
    let found = |key: &str| {
        let values = memory(key.as_bytes());
        format!(r#""{key}":{{"ok":true,"error":null,"values":{values},{rest}}}"#)
    };
    let lost =
        |key: &str| format!(r#""{key}":{{"ok":false,"error":"OBJECT_NOT_FOUND","values":null,{rest}}}"#);
    for (keys, data) in [
        ("k/2,none,a%20b", [found("a b"), found("k/2"), lost("none")].join(",")),
        ("a+b,x%2Cy", [found("a b"), found("x,y")].join(",")),
        (",,k%2F2", [lost(""), found("k/2")].join(",")),
    ] {
        let answer = get(at, &format!("/batch_query_keys?keys={keys}")).await;
        assert_eq!(answer.body, format!(r#"{{"success":true,"data":{{{data}}}}}"#), "{keys}");
        assert_eq!((answer.status, &*answer.content_type), (200, JSON));
    }
    let none = r#"{"success":false,"error":"No keys provided. Use ?keys=key1,key2,..."}"#;
    for path in ["/batch_query_keys", "/batch_query_keys?keys="] {
        assert_eq!(http(at, "GET", path, "").await, (400, none.into()));
    }
    let stats = server.master().stats();
    assert_eq!(stats.reads, 0, "asking is not reading");

    let answer = get(at, "/get_all_keys").await;
    let mut keys: Vec<_> = answer.body.lines().collect();
    keys.sort_unstable();
    assert_eq!((&*answer.content_type, keys), (TEXT, vec!["50%25", "a b", "k/2", "x,y"]));
    server.stop().await;
}

/// Joins the parts of a body that was sent in parts.
fn joined(mut body: &str) -> String {
    let mut text = String::new();
    loop {
        let (len, rest) = body.split_once("\r\n").unwrap();
        let len = usize::from_str_radix(len, 16).unwrap();
        if len == 0 {
            return text;
        }
        text += &rest[..len];
        body = rest[len..].strip_prefix("\r\n").unwrap();
    }
}

/// A long list of keys arrives in parts, each made when the earlier ones have been read.
#[tokio::test]
async fn a_long_list_of_keys_is_streamed() {
    let (server, at) = server().await;
    let key = |number: usize| format!("{number:05}").repeat(100).into_bytes();
    let (count, config) = (20_000, ReplicateConfig::default());
    for number in 0..count {
        let (key, writer, mode) = (key(number), client(1).into(), WriteMode::Put);
        let put = Put { writer, mode, key: &key, len: 1, config: &config, group: "", session: None };
        server.master().put_start(&put).unwrap();
        server.master().put_end(writer, &key, None, ReplicaType::All).unwrap();
        // A client without heartbeats expires, however busy the machine is.
        server.master().ping(client(1));
    }
    let answer = get(at, "/get_all_keys").await;
    let text = joined(&answer.body);
    let listed: HashSet<&str> = text.lines().collect();
    assert!((0..count).all(|number| listed.contains(std::str::from_utf8(&key(number)).unwrap())));
    // A peer that does not read holds one part, and the bytes that the kernel buffers.
    let mut slow = tokio::net::TcpStream::connect(at).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut slow, b"GET /get_all_keys HTTP/1.1\r\nHost: h\r\n\r\n")
        .await
        .unwrap();
    slow.readable().await.unwrap();
    assert_eq!(get(at, "/health").await.status, 200);
    assert!(ByteBudget::of_process().report().held < 4 << 20);
    server.stop().await;
}

/// SGLang 0.5.23 with `check_server` asks until the body is not empty, and only then mounts the
/// first segment of the cluster.
#[tokio::test]
async fn the_list_of_segments_is_never_empty() {
    let server = MasterServer::start(config()).await.unwrap();
    let at = server.addresses().admin.unwrap();
    let answer = get(at, "/get_all_segments").await;
    assert_eq!((answer.status, &*answer.content_type, &*answer.body), (200, TEXT, "\n"));
    server.master().mount(client(1), &segment(1, MIB)).unwrap();
    assert_eq!(get(at, "/get_all_segments").await.body, "node1:1\n");
    server.stop().await;
}

#[tokio::test]
async fn segments_and_their_states() {
    let (server, at) = server().await;
    let answer = get(at, "/get_all_segments").await;
    assert_eq!((answer.status, &*answer.content_type, &*answer.body), (200, TEXT, "node1:1\n"));
    let used = format!("node1:1\nUsed(bytes): 4096\nCapacity(bytes) : {}\n", 100 * MIB);
    for query in ["node1:1", "node1%3A1"] {
        let answer = get(at, &format!("/query_segment?segment={query}")).await;
        assert_eq!((answer.status, &*answer.content_type, &answer.body), (200, TEXT, &used));
    }
    for query in ["?segment=x", "?segment=", ""] {
        let answer = get(at, &format!("/query_segment{query}")).await;
        assert_eq!((answer.status, &*answer.body), (500, "Failed to query segment"));
        assert_eq!(answer.content_type, TEXT);
    }
    let detail = |status: &str| {
        format!(
            concat!(
                r#"{{"total_segments":1,"segments":[{{"segment_name":"node1:1","segment_id":"2-1","client_id":"1-1","#,
                r#""base_address":"0x20000000000","size_bytes":104857600,"size_human":"0.0976562 GiB","te_endpoint":"10.0.0.1:1","#,
                r#""protocol":"tcp","status":"{}","allocator_used_bytes":4096,"allocator_capacity_bytes":104857600,"#,
                r#""allocator_usage_percent":0.00390625}}]}}"#
            ),
            status
        )
    };
    assert_eq!(http(at, "GET", "/get_segments_detail", "").await, (200, detail("OK")));
    let state = |number: i32, name: &str| {
        format!(
            r#"{{"success":true,"segment":"node1:1","status":{number},"status_name":"{name}","error_code":0,"error_message":""}}"#
        )
    };
    let path = "/api/v1/segments/status?segment=";
    assert_eq!(http(at, "GET", &format!("{path}node1%3A1"), "").await, (200, state(1, "OK")));
    server.master().unmount_after(client(1), segment(1, MIB).id, Duration::from_secs(60)).unwrap();
    let leaving = "GRACEFULLY_UNMOUNTING";
    assert_eq!(http(at, "GET", &format!("{path}node1:1"), "").await, (200, state(4, leaving)));
    assert_eq!(http(at, "GET", "/get_segments_detail", "").await, (200, detail(leaving)));
    let unknown = r#"{"success":false,"error_code":-101,"error_message":"SEGMENT_NOT_FOUND"}"#;
    let missing = r#"{"success":false,"error_code":-600,"error_message":"Missing segment query parameter"}"#;
    for (query, status, body) in [("none", 404, unknown), ("%zz", 404, unknown), ("", 400, missing)] {
        assert_eq!(http(at, "GET", &format!("{path}{query}"), "").await, (status, body.into()));
    }
    assert_eq!(http(at, "GET", "/api/v1/segments/status", "").await, (400, missing.into()));
    server.stop().await;
}

#[tokio::test]
async fn a_missing_feature_answers_as_if_switched_off() {
    let (server, at) = server().await;
    let failure =
        |code: i32, text: &str| json!({"success": false, "error_code": code, "error_message": text});
    let invalid = failure(-600, "INVALID_PARAMS");
    let unknown = failure(-101, "SEGMENT_NOT_FOUND");
    let off = failure(-1011, "UNAVAILABLE_IN_CURRENT_MODE");
    let no_id = failure(-600, "Missing or invalid job_id");
    let no_job = failure(-1402, "JOB_NOT_FOUND");
    let no_tenant = failure(-600, "Missing or invalid tenant_id");
    let range = failure(-600, "Tenant quota must be in [1, 2^63 - 1] bytes");
    let quotas = "/api/v1/tenant_quotas";
    for (method, path, body, status, says) in [
        ("POST", "/api/v1/drain_jobs", "{}", 400, &invalid),
        ("POST", "/api/v1/drain_jobs", r#"{"segments":[]}"#, 400, &invalid),
        ("POST", "/api/v1/drain_jobs", r#"{"segments":["a","a"]}"#, 400, &invalid),
        ("POST", "/api/v1/drain_jobs", r#"{"segments":["a"],"max_concurrency":0}"#, 400, &invalid),
        ("POST", "/api/v1/drain_jobs", r#"{"segments":["a"],"x":1}"#, 404, &unknown),
        ("POST", "/api/v1/drain_jobs", r#"{"segments":["node1:1"],"target_segments":["a"]}"#, 404, &unknown),
        (
            "POST",
            "/api/v1/drain_jobs",
            r#"{"segments":["node1:1"],"target_segments":["node1:1"]}"#,
            400,
            &invalid,
        ),
        ("GET", "/api/v1/drain_jobs/query", "", 400, &no_id),
        ("GET", "/api/v1/drain_jobs/query?job_id=x", "", 400, &no_id),
        ("GET", "/api/v1/drain_jobs/query?job_id=1%2D2", "", 404, &no_job),
        ("POST", "/api/v1/drain_jobs/cancel?job_id=", "", 400, &no_id),
        ("POST", "/api/v1/drain_jobs/cancel?job_id=1-2", "", 404, &no_job),
        ("GET", quotas, "", 409, &off),
        ("GET", "/api/v1/tenant_quotas?tenant_id=t", "", 409, &off),
        ("GET", "/api/v1/tenant_quotas?tenant_id=_t", "", 400, &failure(-600, "Invalid tenant_id")),
        ("PUT", quotas, "", 400, &no_tenant),
        ("PUT", "/api/v1/tenant_quotas?tenant_id=t", "{}", 400, &range),
        ("PUT", "/api/v1/tenant_quotas?tenant_id=t", r#"{"requested_quota_bytes":5}"#, 409, &off),
        (
            "PUT",
            "/api/v1/tenant_quotas?tenant_id=t",
            r#"{"requested_quota_bytes":9223372036854775808}"#,
            400,
            &range,
        ),
        ("DELETE", "/api/v1/tenant_quotas?tenant_id=_x", "", 400, &no_tenant),
        ("DELETE", "/api/v1/tenant_quotas?tenant_id=t", "", 409, &off),
    ] {
        let (got, answer) = http(at, method, path, body).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((got, &answer), (status, says), "{method} {path} {body}");
    }
    for body in ["", "{", "[]", r#"{"segments":"x"}"#, r#"{"segments":["a"],"max_concurrency":-1}"#] {
        let (status, answer) = http(at, "POST", "/api/v1/drain_jobs", body).await;
        assert!(
            status == 400 && answer.contains(r#""error_message":"Invalid JSON body: "#),
            "{body}: {answer}"
        );
    }
    for (method, path) in [("GET", "/nothing"), ("POST", "/health"), ("GET", "/api/v1/drain_jobs")] {
        assert_eq!(http(at, method, path, "").await, (404, "404 Not Found".into()));
    }
    server.stop().await;
}

#[tokio::test]
async fn a_drain_job() {
    let (server, at) = server().await;
    let jobs = "/api/v1/drain_jobs";
    let request = r#"{"segments":["node1:1"],"target_segments":[],"max_concurrency":2}"#;
    let (status, answer) = http(at, "POST", jobs, request).await;
    let id = serde_json::from_str::<Value>(&answer).unwrap()["job_id"].as_str().unwrap().to_owned();
    let changed = |to: &str| {
        format!(r#"{{"success":true,"job_id":"{id}","status":"{to}","error_code":0,"error_message":""}}"#)
    };
    assert_eq!((status, answer), (200, changed("CREATED")));
    let wrong = r#"{"success":false,"error_code":-1010,"error_message":"UNAVAILABLE_IN_CURRENT_STATUS"}"#;
    assert_eq!(http(at, "POST", jobs, request).await, (409, wrong.into()), "it is draining already");
    let state = http(at, "GET", "/api/v1/segments/status?segment=node1:1", "").await.1;
    assert!(state.contains(r#""status":2,"status_name":"DRAINING""#), "{state}");

    // No other segment can take the objects.
    let query = format!("{jobs}/query?job_id={id}");
    let job = loop {
        let answer = http(at, "GET", &query, "").await.1;
        let job: Value = serde_json::from_str(&answer).unwrap();
        if job["status"] == 2 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let shown: Value = serde_json::from_str(&job).unwrap();
    let expected = format!(
        concat!(
            r#"{{"success":true,"job_id":"{}","type":0,"type_name":"DRAIN","status":2,"status_name":"RUNNING","#,
            r#""created_at_ms_epoch":{},"last_updated_at_ms_epoch":{},"segments":["node1:1"],"succeeded_units":0,"#,
            r#""failed_units":0,"blocked_units":{},"active_units":0,"migrated_bytes":0,"message":"Drain job running","#,
            r#""error_code":0,"error_message":""}}"#
        ),
        id, shown["created_at_ms_epoch"], shown["last_updated_at_ms_epoch"], shown["blocked_units"],
    );
    assert_eq!(job, expected);
    let cancel = format!("{jobs}/cancel?job_id={id}");
    assert_eq!(http(at, "POST", &cancel, "").await, (200, changed("CANCELED")));
    assert_eq!(http(at, "POST", &cancel, "").await, (409, wrong.into()));
    let job = http(at, "GET", &query, "").await.1;
    assert!(job.contains(r#""status_name":"CANCELED""#) && job.contains("Drain job canceled"), "{job}");
    let state = http(at, "GET", "/api/v1/segments/status?segment=node1:1", "").await.1;
    assert!(state.contains(r#""status_name":"OK""#), "{state}");
    server.stop().await;
}

#[tokio::test]
async fn quotas_of_tenants() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tenants.yaml");
    std::fs::write(&path, "version: 1\ntenants:\n  - {name: b, quota: 1GB}\n  - {name: a, quota: 4MB}\n")
        .unwrap();
    let start = async || {
        let policy = TenantPolicy::File(path.clone());
        let config = MasterConfig { tenant_policy: Some(policy), ..config() };
        let server = MasterServer::start(config).await.unwrap();
        let at = server.addresses().admin.unwrap();
        (server, at)
    };
    let (server, at) = start().await;
    let master = server.master();
    master.mount(client(1), &segment(1, 256 * MIB)).unwrap();
    let put = |tenant: &str, key: &str| {
        let key = master.scoped(tenant, key.as_bytes()).unwrap();
        let config = ReplicateConfig::default();
        let put = Put {
            writer: client(1).into(),
            mode: WriteMode::Put,
            key: &key,
            len: 1000,
            config: &config,
            group: "",
            session: None,
        };
        master.put_start(&put).unwrap();
        master.put_end(Writer::from(client(1)), &key, None, ReplicaType::All).unwrap();
    };
    put("a", "k");
    put("b", "l");
    let quota = |name: &str, requested: u64, effective: u64, charged: u64| {
        let over = charged > effective;
        format!(
            concat!(
                r#"{{"tenant_id":"{}","requested_quota_bytes":{},"effective_quota_bytes":{},"charged_bytes":{},"#,
                r#""admission_closed":false,"over_quota":{},"has_explicit_policy":true}}"#
            ),
            name, requested, effective, charged, over
        )
    };
    let data = |data: &str| (200, format!(r#"{{"success":true,"data":{data}}}"#));
    let failure = |code: i32, name: &str| {
        format!(r#"{{"success":false,"error_code":{code},"error_message":"{name}"}}"#)
    };
    let quotas = "/api/v1/tenant_quotas";
    let of = |name: &str| format!("{quotas}?tenant_id={name}");
    let (a, b) = (4 * MIB, 1024 * MIB);
    let both = [quota("a", a, 1_044_496, 1000), quota("b", b, 267_390_960, 1000)].join(",");
    assert_eq!(http(at, "GET", quotas, "").await, data(&format!("[{both}]")));
    let absent = failure(-704, "OBJECT_NOT_FOUND");
    assert_eq!(http(at, "GET", &of("c"), "").await, (404, absent.clone()));
    let body = |bytes: u64| format!(r#"{{"requested_quota_bytes":{bytes}}}"#);
    let small = quota("c", 1000, 249, 0);
    assert_eq!(http(at, "PUT", &of("c"), &body(1000)).await, data(&small));
    assert_eq!(http(at, "PUT", &of("a"), &body(900)).await, data(&quota("a", 900, 225, 1000)));
    assert_eq!(http(at, "DELETE", &of("a"), "").await, (409, failure(-1702, "TENANT_NOT_EMPTY")));
    assert_eq!(http(at, "DELETE", &of("none"), "").await, (404, absent));

    let scrape = http(at, "GET", "/metrics", "").await.1;
    for line in [
        r#"mooncake_tenant_quota_charged_bytes{tenant_id="a"} 1000"#,
        r#"mooncake_tenant_quota_over_quota{tenant_id="a"} 1"#,
        r#"mooncake_tenant_quota_reject_total{tenant_id="b",reason="quota_exceeded"} 0"#,
        "mooncake_tenant_quota_allocatable_capacity_bytes 268435456",
    ] {
        assert!(scrape.lines().any(|have| have == line), "{line} in {scrape}");
    }
    assert_eq!(http(at, "GET", "/get_all_keys", "").await.1, "", "there is no tenant `default`");
    assert_eq!(http(at, "GET", "/get_all_keys?tenant_id=a", "").await.1, "k\n");
    assert_eq!(http(at, "GET", "/query_key?key=k", "").await.0, 404);
    assert_eq!(http(at, "GET", "/query_key?key=k&tenant_id=a", "").await.0, 200);
    let removed = |count: u64| (200, format!(r#"{{"success":true,"removed_count":{count}}}"#));
    assert_eq!(http(at, "POST", "/api/v1/remove_all?tenant_id=none", "").await, removed(0));
    assert_eq!(http(at, "POST", "/api/v1/remove_all?tenant_id=a", "").await, removed(1));
    assert_eq!(http(at, "DELETE", &of("a"), "").await, data("null"));
    assert_eq!(http(at, "POST", "/api/v1/remove_all", "").await, removed(1), "of all tenants");
    server.stop().await;

    // A restarted master knows the changes.
    let (server, at) = start().await;
    let both = [quota("b", b, 0, 0), quota("c", 1000, 0, 0)].join(",");
    assert_eq!(http(at, "GET", quotas, "").await, data(&format!("[{both}]")));
    // A change that cannot be stored is refused.
    std::fs::remove_dir_all(folder.path()).unwrap();
    assert_eq!(http(at, "PUT", &of("b"), &body(7)).await.0, 500);
    assert_eq!(http(at, "PUT", &of("d"), &body(7)).await.0, 500);
    assert_eq!(http(at, "DELETE", &of("b"), "").await.0, 500);
    assert_eq!(http(at, "GET", quotas, "").await, data(&format!("[{both}]")));
    server.stop().await;
}

/// Bodies and statuses are those of Mooncake C++ 0.3.14.
#[tokio::test]
async fn stored_objects_are_pinned() {
    let (server, at) = server().await;
    let pinned = async || {
        let scrape = http(at, "GET", "/metrics", "").await.1;
        let count = scrape.lines().find_map(|line| line.strip_prefix("master_soft_pin_key_count "));
        count.unwrap().to_owned()
    };
    let (pin, unpin) = ("/api/v1/soft_pin", "/api/v1/soft_unpin");
    let before = pinned().await;
    let body = r#"{"keys":["k/2","none","a b"],"ttl_ms":60000}"#;
    let results = |codes: [(&str, i32); 3]| {
        let each = codes.map(|(key, code)| format!(r#"{{"key":"{key}","error_code":{code}}}"#));
        (200, format!(r#"{{"results":[{}]}}"#, each.join(",")))
    };
    let (found, absent) = (0, -704);
    assert_eq!(
        http(at, "POST", pin, body).await,
        results([("k/2", found), ("none", absent), ("a b", found)])
    );
    assert_eq!((before.as_str(), pinned().await.as_str()), ("0", "2"));
    let body = r#"{"keys":["none","k/2","a b"],"tenant_id":"default"}"#;
    assert_eq!(
        http(at, "POST", unpin, body).await,
        results([("none", absent), ("k/2", found), ("a b", found)])
    );
    assert_eq!(pinned().await, "0");
    let too_long = r#"{"keys":["k/2"],"ttl_ms":604800001}"#;
    assert_eq!(
        http(at, "POST", pin, too_long).await,
        (200, r#"{"results":[{"key":"k/2","error_code":-600}]}"#.into())
    );
    assert_eq!(http(at, "POST", pin, r#"{"keys":["k/2"],"ttl_ms":0}"#).await.0, 200);

    let expected = r#"{"success":false,"error_code":-600,"error_message":"Expected 1..4096 keys, a valid tenant, and ttl_ms only for soft_pin"}"#;
    let many = |count: usize| format!(r#"{{"keys":[{}],"ttl_ms":1}}"#, vec![r#""k""#; count].join(","));
    for (page, body) in [
        (pin, r#"{"keys":["k/2"]}"#),
        (pin, r#"{"keys":[],"ttl_ms":1}"#),
        (pin, &many(4097)),
        (pin, r#"{"keys":["k/2"],"ttl_ms":1,"tenant_id":"_x"}"#),
        (unpin, r#"{"keys":["k/2"],"ttl_ms":1}"#),
    ] {
        assert_eq!(http(at, "POST", page, body).await, (400, expected.into()), "{page} {body:.80}");
    }
    assert_eq!(http(at, "POST", pin, &many(4096)).await.0, 200);
    for body in [
        "",
        "[]",
        r#"{"keys":["k/2"],"ttl_ms":-1}"#,
        r#"{"keys":[1],"ttl_ms":1}"#,
        r#"{"keys":["k"],"ttl":1}"#,
    ] {
        let (status, text) = http(at, "POST", pin, body).await;
        assert!(status == 400 && text.contains("Invalid JSON body: "), "{body}: {text}");
    }
    assert_eq!(http(at, "GET", pin, "").await.0, 404);
    server.stop().await;
}

#[tokio::test]
async fn versions_are_named() {
    let (server, at) = server().await;
    let version = format!(r#"{{"version":"2.0.0","display_version":"{DISPLAY_VERSION}"}}"#);
    assert_eq!(http(at, "GET", "/version", "").await, (200, version));
    assert_eq!(http(at, "POST", "/version", "").await.0, 404);
    let scrape = http(at, "GET", "/metrics", "").await.1;
    let line = format!(r#"mooncake_build_info{{display_version="{DISPLAY_VERSION}",version="2.0.0"}} 1"#);
    assert!(scrape.lines().any(|have| have == line), "{line} in {scrape}");
    server.stop().await;
}

#[tokio::test]
async fn everything_can_be_removed() {
    let (server, at) = server().await;
    server.master().locate(b"k/2").unwrap();
    let removed = |count: u64| (200, format!(r#"{{"success":true,"removed_count":{count}}}"#));
    let path = "/api/v1/remove_all";
    assert_eq!(http(at, "POST", path, "").await, removed(3), "not what somebody reads");
    for no in ["force=no", "force=False", "force="] {
        assert_eq!(http(at, "POST", &format!("{path}?{no}"), "").await, removed(0), "{no}");
    }
    let (status, text) = http(at, "POST", &format!("{path}?force=maybe"), "").await;
    assert!(status == 400 && text.contains("force=maybe"), "{text}");
    assert_eq!(http(at, "POST", &format!("{path}?force=True&tenant_id=t"), "").await, removed(1));
    assert_eq!(http(at, "GET", "/get_all_keys", "").await, (200, String::new()));
    server.stop().await;
}

#[tokio::test]
async fn every_endpoint_is_described() {
    let (server, at) = server().await;
    let (document, operations) = description(at).await;
    let known: Vec<String> =
        operations.iter().map(|operation| format!("{} {}", operation.method, operation.path)).collect();
    for page in [
        "GET /metrics",
        "GET /metrics/summary",
        "GET /health",
        "GET /version",
        "GET /role",
        "GET /ha_status",
        "GET /leader",
        "GET /kv_events/status",
        "GET /query_key",
        "GET /get_all_keys",
        "GET /get_all_segments",
        "GET /get_segments_detail",
        "GET /query_segment",
        "GET /batch_query_keys",
        "POST /batch_query_keys",
        "GET /api/v1/leases",
        "POST /api/v1/leases",
        "GET /api/v1/memory_curve",
        "POST /api/v1/drain_jobs",
        "GET /api/v1/drain_jobs/query",
        "POST /api/v1/drain_jobs/cancel",
        "GET /api/v1/segments/status",
        "GET /api/v1/tenant_quotas",
        "PUT /api/v1/tenant_quotas",
        "DELETE /api/v1/tenant_quotas",
        "POST /api/v1/remove_all",
        "POST /api/v1/soft_pin",
        "POST /api/v1/soft_unpin",
        "GET /api/v1/explain",
    ] {
        assert!(known.iter().any(|have| have == page), "{page} is not described");
    }
    let values = ["", "k/2", "a b", "node1:1", "1-2", "t", "true"];
    responses_are_described(at, &document, &operations, &values).await;
    server.stop().await;
}

/// Returns a configuration with tenants, disks, hot replicas and events, and the folder of the
/// policy of tenants.
fn everything() -> (tempfile::TempDir, MasterConfig) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tenants.yaml");
    std::fs::write(
        &path,
        "version: 1\ntenants:\n  - {name: default, quota: 1GB}\n  - {name: t, quota: 4MB}\n",
    )
    .unwrap();
    let mut config = MasterConfig { tenant_policy: Some(TenantPolicy::File(path)), ..config() };
    config.options.disks =
        Some(DiskOptions { promotion: Some(Default::default()), ..DiskOptions::default() });
    config.options.hot = Some(HotOptions::default());
    if cfg!(feature = "events-zmq") {
        let backend_id = "test".into();
        config.events =
            Some(EventsConfig { host: "127.0.0.1".into(), port: 0, backend_id, ..EventsConfig::default() });
    }
    (folder, config)
}

#[tokio::test]
async fn every_endpoint_is_described_with_everything_on() {
    let (_folder, config) = everything();
    let (server, at) = server_with(config).await;
    let (document, operations) = description(at).await;
    let values = ["", "k/2", "node1:1", "t", "new", "default"];
    responses_are_described(at, &document, &operations, &values).await;
    let quotas = "/api/v1/tenant_quotas";
    let with = |name: &str| format!("{quotas}?tenant_id={name}");
    let body = r#"{"requested_quota_bytes":1000}"#;
    assert_eq!(http(at, "PUT", &with("new"), body).await.0, 200);
    assert_eq!(http(at, "DELETE", &with("new"), "").await.0, 200);
    let events = get(at, "/kv_events/status").await.body;
    assert!(events.contains(&format!(r#""enabled":{}"#, cfg!(feature = "events-zmq"))), "{events}");
    server.stop().await;
}

/// A policy that cannot be written is refused in a described way, and nothing changes.
#[tokio::test]
async fn a_policy_that_cannot_be_kept_is_refused_as_described() {
    let (folder, config) = everything();
    let (server, at) = server_with(config).await;
    let (document, operations) = description(at).await;
    drop(folder);
    let pages: Vec<_> = operations.into_iter().filter(|page| page.path == "/api/v1/tenant_quotas").collect();
    let path = "/api/v1/tenant_quotas?tenant_id=t";
    let before = get(at, "/api/v1/tenant_quotas").await.body;
    assert_eq!(http(at, "PUT", path, r#"{"requested_quota_bytes":1000}"#).await.0, 500);
    assert_eq!(http(at, "DELETE", path, "").await.0, 500);
    assert_eq!(get(at, "/api/v1/tenant_quotas").await.body, before);
    responses_are_described(at, &document, &pages, &["t", "new"]).await;
    server.stop().await;
}

/// Every request gets a described response, and the master stays intact.
#[test]
fn bad_input_gets_a_described_response() {
    let (_folder, everything) = everything();
    for config in [config(), everything] {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (server, at) = runtime.block_on(server_with(config));
        let (document, operations) = runtime.block_on(description(at));
        bad_input_is_answered(&runtime, at, &document, &operations, effort(100, 400));
        runtime.block_on(async {
            assert_eq!(http(at, "GET", "/health", "").await.0, 200);
            server.stop().await;
        });
    }
}
