//! Drain of a client over HTTP while others read, and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use mooncake_store::client::{ClientConfig, PutOptions};
use mooncake_store::master::MasterOptions;

use crate::cluster::{Cluster, Kind, eventually, value};
use crate::common::http::http;

const OBJECTS: u64 = 60;

fn len(at: u64) -> usize {
    1 + (at as usize * 7919) % 90_000
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drained_client_leaves_without_a_miss() {
    let lease_ttl = Duration::from_millis(500);
    let cluster = Cluster::start(Kind::Tcp, MasterOptions { lease_ttl, ..MasterOptions::default() }).await;
    let (a, b) = cluster.pair().await;
    let c = cluster.builder().connect().await.unwrap();
    for at in 0..OBJECTS {
        let preferred_segment = if at % 4 == 3 { b.hostname() } else { a.hostname() }.to_owned();
        let config = PutOptions::new().prefer_segment(preferred_segment);
        c.put_with(format!("k{at}"), &value(at, len(at))[..], &config).await.unwrap();
    }
    let stop = Arc::new(AtomicBool::new(false));
    let reads = Arc::new(AtomicU64::new(0));
    let reader = tokio::spawn({
        let (client, stop, reads) = (c.clone(), stop.clone(), reads.clone());
        async move {
            while !stop.load(SeqCst) {
                for at in 0..OBJECTS {
                    let found = client.get(format!("k{at}")).await.unwrap().expect("a hit");
                    assert!(found == value(at, len(at)), "k{at} is not what was put");
                    reads.fetch_add(1, SeqCst);
                }
            }
        }
    });

    let admin = cluster.admin();
    let body = serde_json::json!({"segments": [a.hostname()], "max_concurrency": 64}).to_string();
    let (status, answer) = http(admin, "POST", "/api/v1/drain_jobs", &body).await;
    assert_eq!(status, 200, "{answer}");
    let job = serde_json::from_str::<serde_json::Value>(&answer).unwrap()["job_id"].clone();
    let query = format!("/api/v1/drain_jobs/query?job_id={}", job.as_str().unwrap());
    eventually("the segment is empty", async || {
        let answer = http(admin, "GET", &query, "").await.1;
        let job: serde_json::Value = serde_json::from_str(&answer).unwrap();
        assert_ne!(job["status_name"], "FAILED", "{answer}");
        job["status_name"] == "SUCCEEDED"
    })
    .await;
    let answer = http(admin, "GET", &query, "").await.1;
    assert!(answer.contains(r#""succeeded_units":45,"failed_units":0,"blocked_units":0"#), "{answer}");
    let path = format!("/api/v1/segments/status?segment={}", a.hostname());
    let state = http(admin, "GET", &path, "").await.1;
    assert!(state.contains(r#""status":3,"status_name":"DRAINED""#), "{state}");

    a.close().await.unwrap();
    let seen = reads.load(SeqCst);
    eventually("everything was read again", async || reads.load(SeqCst) >= seen + 2 * OBJECTS).await;
    stop.store(true, SeqCst);
    reader.await.unwrap();
    assert_eq!(cluster.master.stats().objects, OBJECTS);
}

/// The moves of a drain follow one another without a heartbeat between them: here each heartbeat
/// would fetch 16 of 400, after 5 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moves_of_a_drain_wait_for_no_heartbeat() {
    const MANY: u64 = 400;
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let config = ClientConfig { ping_interval: Duration::from_secs(5), ..ClientConfig::default() };
    let leaving = cluster.builder_with(config).connect().await.unwrap();
    for at in 0..MANY {
        leaving.put(format!("k{at}"), &value(at, 1000)[..]).await.unwrap();
    }
    let _other = cluster.builder().connect().await.unwrap();
    let moved = async {
        loop {
            let now = leaving.segments().drain().await.unwrap();
            if now.done {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let moved = tokio::time::timeout(Duration::from_secs(90), moved).await.expect("125 s with heartbeats");
    assert_eq!((moved.moved, moved.left), (MANY, 0));
}
