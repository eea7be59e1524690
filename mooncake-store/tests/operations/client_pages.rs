//! HTTP endpoints of a client: its metrics, and every endpoint against its description.

use crate::common::http::described::{bad_input_is_answered, description, responses_are_described};
use crate::common::http::used::{scraped, used_client};
use crate::common::http::{ask, http};
use mooncake_store::client::ClientConfig;
use mooncake_store::protocol::message::DISPLAY_VERSION;
use prometheus::{Registry, TextEncoder};
use std::collections::BTreeSet;
use std::time::Duration;

#[tokio::test]
async fn a_client_counts_what_it_does() {
    let config = ClientConfig { cluster_id: "lab".into(), ..ClientConfig::default() };
    let (server, client, pages) = used_client(config).await;
    let answer = ask(pages.address(), "GET", "/metrics", "").await;
    assert_eq!((answer.status, &*answer.content_type), (200, "text/plain; version=0.0.4"));
    let (_, types) = scraped(&answer.body);
    for (kind, names) in [("counter", CLIENT_COUNTERS), ("histogram", CLIENT_HISTOGRAMS)] {
        for name in names.split_whitespace() {
            assert_eq!(types.get(name).map(String::as_str), Some(kind), "{name}");
        }
    }
    let of = |name: &str, label: &str| {
        let labels = format!(r#"{name}{{client_mode="real",cluster_id="lab"{label}}} "#);
        let line = answer.body.lines().find_map(|line| line.strip_prefix(&labels));
        line.unwrap_or_else(|| panic!("no {labels}in {}", answer.body)).parse::<u64>().unwrap()
    };
    assert_eq!(of("mooncake_transfer_write_bytes", ""), 5000 + 300 + 10);
    assert_eq!(of("mooncake_transfer_read_bytes", ""), 300 + 310 + 100);
    for (name, count) in [("put", 2), ("get", 1), ("batch_put", 1), ("batch_get", 2)] {
        assert_eq!(
            of(&format!("mooncake_transfer_{name}_latency_count"), ""),
            count,
            "{name}: what moved bytes"
        );
    }
    for (way, operation, count, bytes) in [
        ("write", "put", 2, 5000),
        ("write", "upsert", 1, 300),
        ("write", "put_batch", 1, 10),
        ("read", "get_buffer", 2, 300),
        ("read", "batch_get_buffer", 1, 310),
        ("read", "batch_get_into_multi_buffers", 1, 100),
    ] {
        let (prefix, label) =
            (format!("mooncake_transfer_{way}_operation"), format!(r#",op_name="{operation}""#));
        assert_eq!(of(&format!("{prefix}_count"), &label), count, "{operation}");
        assert_eq!(of(&format!("{prefix}_latency_count"), &label), count, "{operation}");
        assert_eq!(of(&format!("{prefix}_bytes"), &label), bytes, "{operation}");
    }
    for (call, count) in [
        ("ServiceReady", 1),
        ("MountSegment", 1),
        ("PutStart", 2),
        ("PutEnd", 1),
        ("UpsertStart", 1),
        ("UpsertEnd", 1),
        ("GetReplicaList", 2),
        ("BatchGetReplicaList", 2),
    ] {
        let label = format!(r#",rpc_name="{call}""#);
        // The first numbered start may also ask for the version of the master.
        assert!(of("mooncake_client_rpc_count", &label) >= count, "{call}");
        assert!(of("mooncake_client_rpc_latency_count", &label) >= count, "{call}");
        assert_eq!(of("mooncake_client_rpc_unanswered", &label), 0, "{call}");
    }
    let outcome = |name: &str, of_what: &str| {
        of(&format!("mooncake_client_{name}_total"), &format!(r#",outcome="{of_what}""#))
    };
    assert_eq!(["stored", "existed", "failed"].map(|of| outcome("writes", of)), [3, 1, 1]);
    assert_eq!(["found", "missing", "failed"].map(|of| outcome("reads", of)), [4, 3, 0]);
    let program = format!(r#",display_version="{DISPLAY_VERSION}",version="2.0.0""#);
    assert_eq!(of("mooncake_build_info", &program), 1);
    let summary = ask(pages.address(), "GET", "/metrics/summary", "").await;
    for line in [
        &format!("Build: version=2.0.0, display_version={DISPLAY_VERSION}"),
        "Total Read: 710 B",
        "put_batch: count=1, bytes=10 B",
        "Write: stored, there already, failed: 3, 1, 1",
    ] {
        assert!(summary.body.contains(line), "{line}: {}", summary.body);
    }
    pages.stop().await;
    client.close().await.unwrap();
    server.stop().await;
}

/// A client tells whether the master knew it at the last heartbeat, and when that was.
#[tokio::test]
async fn a_client_reports_its_last_heartbeat() {
    let (server, client, pages) = used_client(ClientConfig::default()).await;
    let value = async |name: &str| {
        let page = ask(pages.address(), "GET", "/metrics", "").await.body;
        let labels = format!("mooncake_client_master_heartbeat_{name}{{client_mode=\"real\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&labels));
        line.unwrap_or_else(|| panic!("no {labels}in {page}")).parse::<f64>().unwrap()
    };
    // The first heartbeat comes within a second.
    let answered = async {
        while value("status_ok").await == 0.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), answered).await.expect("no heartbeat was answered");
    assert!(value("observation_timestamp_seconds").await > 1.7e9);
    pages.stop().await;
    client.close().await.unwrap();
    server.stop().await;
}

/// A client names the version of its protocol, also when it counts nothing.
#[tokio::test]
async fn a_client_names_its_version() {
    let config = ClientConfig { metrics: false, ..ClientConfig::default() };
    let (server, client, pages) = used_client(config).await;
    let version = format!(r#"{{"version":"2.0.0","display_version":"{DISPLAY_VERSION}"}}"#);
    assert_eq!(http(pages.address(), "GET", "/version", "").await, (200, version));
    pages.stop().await;
    client.close().await.unwrap();
    server.stop().await;
}

/// A program that embeds a client and a master has their metrics in a registry of its own.
#[tokio::test]
async fn a_registry_of_a_program_has_the_metrics_of_the_endpoints() {
    let config = ClientConfig { cluster_id: "lab".into(), ..ClientConfig::default() };
    let (server, client, pages) = used_client(config).await;
    let registry = Registry::new();
    registry.register(Box::new(client.status().metrics_collector())).unwrap();
    registry.register(Box::new(server.metrics_collector())).unwrap();
    let again = registry.register(Box::new(client.status().metrics_collector()));
    assert!(matches!(again, Err(prometheus::Error::AlreadyReg)), "{again:?}");
    let twice = registry.register(Box::new(server.master().metrics_collector()));
    assert!(matches!(twice, Err(prometheus::Error::AlreadyReg)), "the server has them: {twice:?}");

    let gathered = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let of_client = ask(pages.address(), "GET", "/metrics", "").await.body;
    let of_master = ask(server.addresses().admin.unwrap(), "GET", "/metrics", "").await.body;
    let served = format!("{of_client}{of_master}");
    let metadata = |text: &str| {
        text.lines().filter(|line| line.starts_with('#')).map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(metadata(&gathered), metadata(&served));
    // Both have the family of their versions.
    let ((mut names, mut types), (more_names, more_types)) = (scraped(&of_client), scraped(&of_master));
    names.extend(more_names);
    types.extend(more_types);
    assert_eq!(scraped(&gathered), (names, types));
    let put =
        r#"mooncake_transfer_write_operation_count{client_mode="real",cluster_id="lab",op_name="put"} 2"#;
    assert!(gathered.lines().any(|line| line == put), "{gathered}");

    registry.unregister(Box::new(client.status().metrics_collector())).unwrap();
    let gathered = registry.gather();
    assert!(gathered.iter().all(|family| !family.name().starts_with("mooncake_client_")));
    assert!(gathered.iter().any(|family| family.name() == "master_key_count"));
    pages.stop().await;
    client.close().await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_count_says_so() {
    let config = ClientConfig { metrics: false, ..ClientConfig::default() };
    let (server, client, pages) = used_client(config).await;
    assert!(client.status().metrics().is_none());
    for path in ["/metrics", "/metrics/summary"] {
        assert_eq!(http(pages.address(), "GET", path, "").await, (503, "metrics not available".into()));
    }
    let health = |status: &str, code: u8| format!(r#"{{"status":"{status}","code":{code}}}"#);
    assert_eq!(http(pages.address(), "GET", "/health", "").await, (200, health("healthy", 0)));
    server.stop().await;
    assert_eq!(http(pages.address(), "GET", "/health", "").await, (503, health("master_unreachable", 2)));
    let _ = client.close().await;
    assert_eq!(http(pages.address(), "GET", "/health", "").await, (503, health("not_initialized", 1)));
    drop(client);
    assert_eq!(http(pages.address(), "GET", "/health", "").await, (503, health("not_initialized", 1)));
    pages.stop().await;
}

/// Every request gets a described response.
#[test]
fn every_endpoint_is_described_and_stands_bad_input() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (server, client, pages) = runtime.block_on(used_client(ClientConfig::default()));
    let at = pages.address();
    let (document, operations) = runtime.block_on(description(at));
    let known: Vec<_> = operations.iter().map(|one| format!("{} {}", one.method, one.path)).collect();
    assert_eq!(known, ["GET /health", "GET /metrics", "GET /metrics/summary", "GET /version"]);
    runtime.block_on(responses_are_described(at, &document, &operations, &["", "a b"]));
    bad_input_is_answered(&runtime, at, &document, &operations, 100);
    runtime.block_on(async {
        for (method, path) in [("GET", "/nothing"), ("POST", "/health"), ("PUT", "/metrics")] {
            assert_eq!(http(at, method, path, "").await, (404, "404 Not Found".into()));
        }
        assert_eq!(http(at, "GET", "/health", "").await.0, 200);
        pages.stop().await;
        client.close().await.unwrap();
        server.stop().await;
    });
}

const CLIENT_COUNTERS: &str = "
    mooncake_transfer_read_bytes mooncake_transfer_write_bytes mooncake_client_rpc_count mooncake_transfer_read_operation_count
    mooncake_transfer_read_operation_bytes mooncake_transfer_write_operation_count mooncake_transfer_write_operation_bytes";

const CLIENT_HISTOGRAMS: &str = "
    mooncake_transfer_get_latency mooncake_transfer_put_latency mooncake_transfer_batch_get_latency
    mooncake_transfer_batch_put_latency mooncake_client_rpc_latency mooncake_transfer_read_operation_latency
    mooncake_transfer_write_operation_latency";
