//! Recovery: a restarted master serves the objects stored before.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "the bounds are of real time; figures of a run"
)]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::replica::ReplicaLocation;
use mooncake_core::testkit::free_port;
use mooncake_store::client::{Client, ClientBuilder, ClientConfig, PutOptions, PutOutcome};
use mooncake_store::master::MasterOptions;
use mooncake_store::server::MasterServer;

use crate::cluster::{eventually, master_config, start_again, value};

async fn master_at(port: u16) -> MasterServer {
    start_again(async || MasterServer::start(master_config(port, MasterOptions::default())).await).await
}

/// Returns a client that uses the transports, with short intervals.
fn builder(master: SocketAddr, shared: bool) -> ClientBuilder {
    let config = ClientConfig {
        ping_interval: Duration::from_millis(100),
        timeout: Duration::from_secs(5),
        copy_in_process: false,
        share_memory: shared,
        segment: 16 << 20,
        local_buffer: 4 << 20,
        ..ClientConfig::default()
    };
    Client::builder().config(config).master(master.to_string())
}

async fn all_last(clients: &[&Client], objects: usize) {
    eventually("everything would outlive the master", async || {
        let mut lasting = 0;
        for client in clients {
            lasting += client.status().lasting_objects().await;
        }
        lasting == objects
    })
    .await;
}

async fn restarted(server: MasterServer) -> MasterServer {
    let port = server.addresses().rpc.port();
    server.stop().await;
    master_at(port).await
}

async fn objects_stay(shared: bool) {
    let server = master_at(free_port()).await;
    let at = server.addresses().rpc;
    let (a, b) = (builder(at, shared).connect().await.unwrap(), builder(at, shared).connect().await.unwrap());
    let both = PutOptions::new().replicas(2);
    let mut stored: HashMap<String, Bytes> = HashMap::new();
    for number in 0..60u64 {
        let (key, bytes) = (format!("k{number}"), value(number, 1 + (number as usize * 977) % 70_000));
        let config = if number % 4 == 0 { both.clone() } else { PutOptions::default() };
        let outcome = a.put_with(&key, &bytes[..], &config).await.unwrap();
        assert_eq!(outcome, PutOutcome::Stored);
        stored.insert(key, bytes);
    }
    for number in (0..60).step_by(5) {
        let key = format!("k{number}");
        a.remove(&key, true).await.unwrap();
        stored.remove(&key);
    }
    for number in (1..60).step_by(5) {
        let (key, bytes) = (format!("k{number}"), value(1000 + number, 3000));
        a.put_with(&key, &bytes[..], &PutOptions::new().upsert()).await.unwrap();
        stored.insert(key, bytes);
    }
    let replicas = server.master().stats().segments.len();
    assert_eq!(replicas, 2);
    let mut copies = 0;
    for key in stored.keys() {
        copies += a.replicas().list(key).await.unwrap().unwrap().replicas.len();
    }
    assert!(copies > stored.len());
    all_last(&[&a, &b], copies).await;

    let server = restarted(server).await;
    let begun = Instant::now();
    let keys = async || server.master().stats().keys as usize == stored.len();
    eventually("all objects are served again", keys).await;
    assert_eq!(a.put("new", "value").await.unwrap(), PutOutcome::Stored);
    // Memory that is remounted at its old addresses would stay reserved for 30 s.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    eventually("every replica is there", async || {
        let mut found = 0;
        for key in stored.keys() {
            found += b.replicas().list(key).await.unwrap().map_or(0, |list| list.replicas.len());
        }
        found == copies
    })
    .await;
    for (key, bytes) in &stored {
        assert_eq!(b.get(key).await.unwrap().as_ref(), Some(bytes), "{key}");
    }
    // The master restarts again, without further writes in between.
    all_last(&[&a, &b], copies + 1).await;
    let server = restarted(server).await;
    let keys = async || server.master().stats().keys as usize == stored.len() + 1;
    eventually("all objects are served a third time", keys).await;
    for (key, bytes) in &stored {
        assert_eq!(a.get(key).await.unwrap().as_ref(), Some(bytes), "{key}");
    }
    // Every byte is accounted for.
    eventually("everything can be removed", async || {
        b.remove_all(true).await.unwrap();
        let stats = server.master().stats();
        stats.keys == 0 && stats.used() == stats.resting()
    })
    .await;
    a.close().await.unwrap();
    b.close().await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_outlive_the_master() {
    objects_stay(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_in_shared_memory_outlive_the_master() {
    objects_stay(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_whose_bytes_have_changed_is_not_served() {
    let server = master_at(free_port()).await;
    let at = server.addresses().rpc;
    let owner = builder(at, false).connect().await.unwrap();
    let stranger = builder(at, false).segment(0).connect().await.unwrap();
    for key in ["good", "bad"] {
        owner.put(key, &value(7, 5000)[..]).await.unwrap();
    }
    all_last(&[&owner], 2).await;
    let list = stranger.replicas().list("bad").await.unwrap().unwrap();
    let ReplicaLocation::Memory(place) = &list.replicas[0].location else { panic!("in memory") };
    let target = stranger.engine().open(&place.endpoint).await.unwrap();
    let one = stranger.memory().alloc(1).unwrap();
    let (wrote, _) =
        stranger.engine().write(&target, place.address + 4999, one.slice(0..1).unwrap(), None).await;
    wrote.unwrap();
    let server = restarted(server).await;
    eventually("the good one is served", async || server.master().exists(b"good")).await;
    assert_eq!(stranger.get("good").await.unwrap(), Some(value(7, 5000)));
    eventually("the space of the other is free", async || {
        let used: u64 = server.master().stats().segments.iter().map(|segment| segment.used).sum();
        used == 5000u64.next_multiple_of(64)
    })
    .await;
    assert_eq!(stranger.get("bad").await.unwrap(), None);
    owner.close().await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_writers_of_the_master_before_are_refused() {
    for shared in [false, true] {
        let server = master_at(free_port()).await;
        let at = server.addresses().rpc;
        let owner = builder(at, shared).connect().await.unwrap();
        let late = builder(at, shared).segment(0).connect().await.unwrap();
        owner.put("k", &value(1, 5000)[..]).await.unwrap();
        all_last(&[&owner], 1).await;
        let list = late.replicas().list("k").await.unwrap().unwrap();
        let ReplicaLocation::Memory(place) = &list.replicas[0].location else { panic!("in memory") };
        let target = late.engine().open(&place.endpoint).await.unwrap();
        let server = restarted(server).await;
        eventually("it is served again", async || server.master().exists(b"k")).await;
        let zeros = late.memory().alloc(5000).unwrap();
        let write = late.engine().write(&target, place.address, zeros.slice(0..5000).unwrap(), None);
        assert!(write.await.0.is_err(), "a promise of the master before counts for nothing");
        assert_eq!(late.get("k").await.unwrap(), Some(value(1, 5000)));
        owner.close().await.unwrap();
        server.stop().await;
    }
}

/// Objects are stored, replaced and removed while the master restarts. A read returns a complete
/// value that the key once had, and of two values that both existed long enough, the later one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wrong_byte_over_many_restarts() {
    let mut rng = Rng::seeded(20);
    let mut server = master_at(free_port()).await;
    let at = server.addresses().rpc;
    let clients = [builder(at, false).connect().await.unwrap(), builder(at, true).connect().await.unwrap()];
    let mut versions: HashMap<u64, Vec<u64>> = HashMap::new();
    let (mut hits, mut misses) = (0, 0);
    for round in 0..6u64 {
        for step in 0..150u64 {
            let key = rng.below(40);
            let client = &clients[rng.below(2) as usize];
            let version = 1 + round * 1000 + step;
            match rng.below(4) {
                0 => drop(client.remove(key.to_string(), true).await),
                _ => {
                    // The version is recorded first: a write whose response is lost may have been
                    // made.
                    versions.entry(key).or_default().push(version);
                    let len = 1 + rng.below(60_000) as usize;
                    let _ = client
                        .put_with(
                            key.to_string(),
                            &tagged(key, version, len)[..],
                            &PutOptions::new().upsert(),
                        )
                        .await;
                }
            }
        }
        if rng.below(2) == 0 {
            tokio::time::sleep(Duration::from_millis(rng.below(700))).await;
        }
        server = restarted(server).await;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(1500) {
            let key = rng.below(40);
            match clients[rng.below(2) as usize].get(key.to_string()).await {
                Ok(Some(bytes)) => {
                    hits += 1;
                    assert!(is_value(&bytes, key, &versions[&key]), "key {key} in round {round}");
                }
                Ok(None) => misses += 1,
                Err(_) => {}
            }
        }
    }
    println!("{hits} hits, {misses} misses");
    assert!(hits > 100, "{hits} hits, {misses} misses");
    for client in clients {
        client.close().await.unwrap();
    }
    server.stop().await;
}

fn tagged(key: u64, version: u64, len: usize) -> Bytes {
    let mut bytes = Vec::with_capacity(16 + len);
    bytes.extend(key.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    bytes.extend_from_slice(&value(key << 32 | version, len));
    bytes.into()
}

fn is_value(bytes: &Bytes, key: u64, versions: &[u64]) -> bool {
    let version = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    versions.contains(&version) && *bytes == tagged(key, version, bytes.len() - 16)
}
