//! Clients that cannot reach their master for longer than `--client_ttl`, and return: unchanged
//! objects are read again, and removed or replaced ones do not return.
#![allow(clippy::disallowed_methods, reason = "the bounds are of real time")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mooncake_store::client::{Client, PutOutcome};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::cluster::{
    PATIENCE, argument, connect, eventually, in_segment_of, master, master_address, start, start_client,
    tagged, until_end_of_input, version_of,
};
use crate::process::{Process, free_port};

const TTL: Duration = Duration::from_secs(2);
/// Longest time until all objects are readable after the partition has ended.
const HEALED: Duration = Duration::from_secs(5);

/// Process of a relay between clients and their master.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "child process of other tests"]
async fn relay() {
    let Some(master) = master_address() else { return };
    let port: u16 = argument("TEST_RELAY_PORT").unwrap();
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    println!("\nready");
    let end = until_end_of_input();
    let relayed = async {
        while let Ok((mut near, _)) = listener.accept().await {
            let master = master.clone();
            tokio::spawn(async move {
                let Ok(mut far) = TcpStream::connect(&*master).await else { return };
                let _ = copy_bidirectional(&mut near, &mut far).await;
            });
        }
    };
    tokio::select! {
        _ = end => {}
        () = relayed => {}
    }
}

fn start_relay(master: u16) -> (Process, u16) {
    let port = free_port();
    let mut relay = start("partition::relay", master, &[("TEST_RELAY_PORT", port.to_string())]);
    assert!(relay.lines_after("ready").next().is_some());
    (relay, port)
}

/// Objects of the separated clients, and the expected state of each afterwards: a version, or
/// nothing.
struct Objects {
    client: Client,
    expected: BTreeMap<u64, Option<u64>>,
}

const OBJECTS: u64 = 60;

impl Objects {
    /// Stores objects in these clients, the last ones just before the partition.
    async fn put(client: Client, members: &[String]) -> Self {
        let mut expected = BTreeMap::new();
        for key in 0..OBJECTS {
            let member = in_segment_of(&members[key as usize % members.len()]);
            let value = tagged(key, 1, 1000 + 977 * key as usize);
            let outcome = client.put_with(key.to_string(), &value[..], &member).await.unwrap();
            assert_eq!(outcome, PutOutcome::Stored);
            expected.insert(key, Some(1));
        }
        Self { client, expected }
    }

    async fn version(&self, key: u64) -> Option<u64> {
        let bytes = self.client.get(key.to_string()).await.ok().flatten()?;
        Some(version_of(key, &bytes).unwrap_or_else(|| panic!("wrong bytes of key {key}")))
    }

    /// Removes and replaces some objects while their owners are unreachable.
    async fn touch(&mut self) {
        for key in (0..OBJECTS).step_by(10) {
            let _ = self.client.remove(key.to_string(), true).await;
            self.expected.insert(key, None);
        }
        for key in (1..OBJECTS).step_by(10) {
            let put = self.client.put(key.to_string(), &tagged(key, 2, 5000)[..]).await;
            assert_eq!(put.unwrap(), PutOutcome::Stored);
            self.expected.insert(key, Some(2));
        }
        for key in (2..OBJECTS).step_by(10) {
            self.client.put(key.to_string(), &tagged(key, 2, 5000)[..]).await.unwrap();
            assert!(self.client.remove(key.to_string(), true).await.unwrap());
            self.expected.insert(key, None);
        }
    }

    /// Reads all objects until each has its expected state. A changed object must never have
    /// another one.
    async fn healed(&self, since: Instant) {
        loop {
            let mut missing = Vec::new();
            for (&key, &expected) in &self.expected {
                let found = self.version(key).await;
                if expected == Some(1) && found.is_none() {
                    missing.push(key);
                } else {
                    assert_eq!(found, expected, "key {key}");
                }
            }
            let after = since.elapsed();
            if missing.is_empty() {
                println!("{OBJECTS} objects as they must be after {after:?}");
                return;
            }
            assert!(after < HEALED, "{} of {OBJECTS} objects are not served: {missing:?}", missing.len());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Separates these processes for `span`, changes objects meanwhile, and reads all objects
/// afterwards.
async fn cut(objects: &mut Objects, processes: &[&Process], span: Duration) {
    let begun = Instant::now();
    processes.iter().for_each(|process| process.freeze());
    eventually("the members are taken for dead", PATIENCE, async || {
        objects.client.replicas().list("5").await.is_ok_and(|found| found.is_none())
            && objects.client.replicas().list("6").await.is_ok_and(|found| found.is_none())
            && objects.client.replicas().list("7").await.is_ok_and(|found| found.is_none())
    })
    .await;
    objects.touch().await;
    tokio::time::sleep(span.saturating_sub(begun.elapsed())).await;
    processes.iter().for_each(|process| process.thaw());
    objects.healed(Instant::now()).await;
}

/// Starts a master, a client that is never separated, and a client that reads.
async fn cluster() -> (u16, Process, (Process, String), Client) {
    let port = free_port();
    let server = master(port, &[&format!("--client_ttl={}", TTL.as_secs())]);
    let client = connect(&format!("127.0.0.1:{port}"), 0).await;
    (port, server, start_client(port), client)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_was_stopped_serves_its_objects_again() {
    let (port, _server, _other, client) = cluster().await;
    let (owner, name) = start_client(port);
    let mut objects = Objects::put(client, &[name]).await;
    cut(&mut objects, &[&owner], 2 * TTL).await;
    objects.client.close().await.unwrap();
}

async fn partition(span: Duration) {
    let (port, _server, _other, client) = cluster().await;
    let (relay, at) = start_relay(port);
    let members: Vec<_> = (0..3).map(|_| start_client(at)).collect();
    let names: Vec<_> = members.iter().map(|(_, name)| name.clone()).collect();
    let mut objects = Objects::put(client, &names).await;
    cut(&mut objects, &[&relay], span).await;
    objects.client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_clients_behind_a_relay_that_was_stopped_serve_their_objects_again() {
    partition(2 * TTL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half a minute"]
async fn three_clients_behind_a_relay_that_was_stopped_for_30_s_serve_their_objects_again() {
    partition(Duration::from_secs(30)).await;
}
