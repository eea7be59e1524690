//! Store of three processes, a master and a client at either end of a cable, with only RDMA between
//! the clients. The test needs two Soft-RoCE devices: `cargo xtask rdma-test` runs it.

use std::io::Write;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::{ErrorKind, Result};
use mooncake_rdma::RdmaConfig;
use mooncake_store::client::{Client, PutOptions, PutOutcome};
use mooncake_store::transport_set::TransportOptions;

use crate::cluster::{
    PATIENCE, argument, builder, eventually, in_segment_of, master, master_address, start, tagged, version_of,
};
use crate::process::{Process, free_port};

/// Longest duration of a call, which includes the detection of a dead client.
const LIMIT: Duration = Duration::from_secs(20);
const SEGMENT: u64 = 16 << 20;

/// Process of a client, which executes arguments line by line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn the_other_process() {
    let (Some(master), Some(device)) = (master_address(), argument::<String>("TEST_DEVICE")) else { return };
    let rdma = RdmaConfig { devices: vec![device], timeout: 17, attempts: 1, ..RdmaConfig::default() };
    let wires = TransportOptions { rdma: Some(rdma), ..TransportOptions::default() };
    let builder = builder(&master, SEGMENT).transports(wires).share_memory(false).timeout(LIMIT);
    let client = builder.connect().await.unwrap();
    println!("\n> {}", client.hostname());
    // The loop has the thread of the test; the client has others.
    for line in std::io::stdin().lines().map_while(std::io::Result::ok) {
        println!("> {}", obey(&client, &line).await);
    }
    client.close().await.unwrap();
}

/// Numbers of calls by outcome.
#[derive(Default)]
struct Counts {
    done: usize,
    missed: usize,
    /// Number of calls with an error that says that the other side is absent.
    failed: usize,
}

impl Counts {
    fn add<T>(&mut self, outcome: Result<T>, done: impl FnOnce(T) -> bool) {
        match outcome {
            Ok(value) => *(if done(value) { &mut self.done } else { &mut self.missed }) += 1,
            Err(error) => {
                let kind = error.kind();
                assert!(matches!(kind, ErrorKind::Timeout | ErrorKind::Unavailable), "{error}");
                self.failed += 1;
            }
        }
    }
}

fn key(number: u64) -> String {
    format!("key {number}")
}

fn value(number: u64, version: u64) -> Bytes {
    tagged(number, version, [1, 4096, 65_537, (1 << 20) + 3][number as usize % 4])
}

/// Executes an argument: operation, first key and end of the keys, version of the values, preferred
/// segment.
async fn obey(client: &Client, line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let &[what, from, to, version, place] = words.as_slice() else { panic!("{line:?}") };
    let (from, to, version): (u64, u64, u64) =
        (from.parse().unwrap(), to.parse().unwrap(), version.parse().unwrap());
    let config = if place == "both" { PutOptions::new().replicas(2) } else { in_segment_of(place) };
    let keys: Vec<String> = (from..to).map(key).collect();
    let items = || (from..to).map(|i| (key(i), value(i, version))).collect::<Vec<_>>();
    let mut counts = Counts::default();
    let stored = |outcome| outcome == PutOutcome::Stored;
    let is_it = |number: u64| {
        move |read: Option<Bytes>| match read {
            Some(bytes) => {
                assert_eq!(version_of(number, &bytes), Some(version), "key {number}");
                true
            }
            None => false,
        }
    };
    match what {
        "put" => {
            for (key, value) in items() {
                counts.add(client.put_with(key, &value[..], &config).await, stored);
            }
        }
        "batch_put" => {
            let outcomes = client.batch_put(&items(), &config).await.unwrap();
            outcomes.into_iter().for_each(|outcome| counts.add(outcome, stored));
        }
        "upsert" => {
            for (key, value) in items() {
                counts.add(client.put_with(key, &value[..], &PutOptions::new().upsert()).await, |_| true);
            }
        }
        "batch_upsert" => {
            let outcomes = client.batch_put(&items(), &config.clone().upsert()).await.unwrap();
            outcomes.into_iter().for_each(|outcome| counts.add(outcome, |_| true));
        }
        "get" => {
            for (number, key) in (from..).zip(&keys) {
                counts.add(client.get(key).await, is_it(number));
            }
        }
        "batch_get" => {
            let outcomes = client.batch_get(&keys).await.unwrap();
            (from..).zip(outcomes).for_each(|(number, outcome)| counts.add(outcome, is_it(number)));
        }
        "remove" => {
            for key in &keys {
                counts.add(client.remove(key, true).await, |removed| removed);
            }
        }
        "batch_remove" => {
            let outcomes = client.batch_remove(&keys, true).await.unwrap();
            outcomes.into_iter().for_each(|outcome| counts.add(outcome, |removed| removed));
        }
        other => panic!("{other}"),
    }
    format!("{} {} {}", counts.done, counts.missed, counts.failed)
}

struct Member {
    process: Process,
    name: String,
    said: Box<dyn Iterator<Item = String>>,
}

impl Member {
    fn start(port: u16, device: &str) -> Self {
        let mut process = start("rdma::the_other_process", port, &[("TEST_DEVICE", device.to_owned())]);
        let mut said = Box::new(process.lines_after("> "));
        let name = said.next().expect("a client that starts");
        Self { process, name, said }
    }

    /// Sends an order. Returns how many of its calls succeeded, missed and failed.
    fn does(&mut self, what: &str, keys: std::ops::Range<u64>, version: u64, place: &str) -> [usize; 3] {
        let input = self.process.0.stdin.as_mut().unwrap();
        writeln!(input, "{what} {} {} {version} {place}", keys.start, keys.end).unwrap();
        let said = self.said.next().unwrap_or_else(|| panic!("{what} {keys:?}: it finds nothing wrong"));
        let counts: Vec<usize> = said.split(' ').map(|count| count.parse().unwrap()).collect();
        counts.try_into().unwrap()
    }
}

/// Devices of the two clients: both ends of the cable, and one device.
const PLACES: [(&str, &str); 2] = [("rxe0", "rxe1"), ("rxe0", "rxe0")];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: cargo xtask rdma-test"]
async fn clients_in_processes_of_their_own() {
    for (first, second) in PLACES {
        let port = free_port();
        let _master = master(port, &["--client_ttl=15"]);
        let (mut a, mut b) = (Member::start(port, first), Member::start(port, second));
        let (in_a, in_b) = (a.name.clone(), b.name.clone());
        let done = |n| [n, 0, 0];
        // The values are written into the memory of the other client, and both read them.
        assert_eq!(a.does("put", 0..4, 1, &in_b), done(4));
        assert_eq!(a.does("put", 0..4, 9, &in_b), [0, 4, 0], "a key is put once");
        assert_eq!((a.does("get", 0..4, 1, ""), b.does("get", 0..4, 1, "")), (done(4), done(4)));
        assert_eq!(b.does("batch_put", 10..26, 2, &in_a), done(16));
        assert_eq!(
            (a.does("batch_get", 10..26, 2, ""), b.does("batch_get", 10..26, 2, "")),
            (done(16), done(16))
        );
        // The values are replaced.
        assert_eq!((b.does("upsert", 0..4, 3, ""), a.does("get", 0..4, 3, "")), (done(4), done(4)));
        assert_eq!((a.does("batch_upsert", 0..4, 4, &in_b), a.does("get", 0..4, 4, "")), (done(4), done(4)));
        assert_eq!(b.does("batch_get", 0..4, 4, ""), done(4));
        // The values are removed.
        assert_eq!(
            (a.does("remove", 10..12, 0, ""), b.does("batch_remove", 12..18, 0, "")),
            (done(2), done(6))
        );
        assert_eq!(a.does("batch_get", 10..20, 2, ""), [2, 8, 0]);
        assert_eq!(b.does("remove", 10..12, 0, ""), [0, 2, 0]);

        // Some values are in the memory of the other client only, the others in both.
        assert_eq!((a.does("put", 30..34, 5, &in_b), a.does("put", 40..44, 6, "both")), (done(4), done(4)));
        b.process.kill();
        let [hits, ..] = a.does("get", 30..34, 5, "");
        assert_eq!(hits, 0, "what only the killed one had is gone");
        assert_eq!(a.does("get", 40..44, 6, ""), done(4), "the other replica is there");
        eventually("it is a miss and nothing else", PATIENCE, async || {
            a.does("batch_get", 30..34, 5, "") == [0, 4, 0]
        })
        .await;
        assert_eq!((a.does("put", 50..54, 7, ""), a.does("get", 50..54, 7, "")), (done(4), done(4)));
        let mut next = Member::start(port, second);
        assert_eq!((next.does("get", 40..44, 6, ""), next.does("get", 50..54, 7, "")), (done(4), done(4)));
        // Each put has one key: the master may expire the killed client between two puts,
        // and the stored values are there.
        for key in 30..34 {
            eventually("the master has given up what only the killed one had", PATIENCE, async || {
                next.does("put", key..key + 1, 8, &in_a) == done(1)
            })
            .await;
        }
        assert_eq!(a.does("get", 30..34, 8, ""), done(4));
    }
}
