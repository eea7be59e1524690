//! Failover of masters: standbys take over when the leader dies, and a leader that was frozen
//! changes nothing when it continues. The tests need a real etcd (Debian: `etcd-server`); without
//! etcd a test prints so and passes, except in CI.
#![cfg(feature = "metadata-etcd")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use mooncake_core::clock::Rng;
use mooncake_store::client::{Client, PutOptions, PutOutcome};

use crate::cluster::{SEGMENT, SLACK, eventually, master_shown};
use crate::process::{Process, free_port};
use crate::servers::{Server, etcd, start};

/// Longest duration of a takeover: the lease of the leader, and a second.
const TAKEOVER: Duration = Duration::from_secs(6);

struct Master {
    process: Process,
    port: u16,
    pages: u16,
}

impl Master {
    fn start(etcd: &str) -> Self {
        let (port, pages) = (free_port(), free_port());
        let flags = ["--enable_ha=true", &format!("--etcd_endpoints={etcd}"), "--cluster_id=lab"];
        Self { process: master_shown(port, pages, &flags), port, pages }
    }

    fn page(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.pages)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text.rsplit_once("\r\n\r\n")?.1.to_owned())
    }

    fn leads(&self) -> bool {
        self.page("/role").as_deref() == Some("leader")
            && self.page("/ha_status").as_deref() == Some("serving")
    }
}

/// Starts three masters, and clients that find the leader in etcd.
async fn cluster() -> Option<(Server, Vec<Master>, [Client; 2])> {
    let server = start(etcd)?;
    let mut masters: Vec<Master> = (0..3).map(|_| Master::start(&server.at())).collect();
    eventually("one leads", TAKEOVER + SLACK, async || masters.iter().any(Master::leads)).await;
    // The leader comes first.
    masters.sort_by_key(|master| !master.leads());
    let members = [connect(&server).await, connect(&server).await];
    Some((server, masters, members))
}

async fn connect(server: &Server) -> Client {
    let builder = crate::cluster::builder(&format!("etcd://{}", server.at()), SEGMENT).cluster_id("lab");
    builder.connect().await.unwrap()
}

fn value(i: u64) -> Vec<u8> {
    let mut bytes = vec![0; 5000];
    Rng::seeded(i).fill(&mut bytes);
    bytes
}

async fn put(client: &Client, i: u64) -> bool {
    let put = client.put_with(format!("key {i}"), value(i), &PutOptions::default()).await;
    matches!(put, Ok(PutOutcome::Stored))
}

/// Returns the number of hits among these keys, and checks their bytes.
async fn hits(client: &Client, keys: std::ops::Range<u64>) -> usize {
    let mut hits = 0;
    for i in keys {
        if let Ok(Some(bytes)) = client.get(format!("key {i}")).await {
            assert_eq!(bytes, value(i), "key {i}");
            hits += 1;
        }
    }
    hits
}

/// Returns the time until the first successful put after `what`.
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
async fn first_put_after(what: &str, client: &Client) -> Duration {
    let begun = Instant::now();
    eventually("a put", TAKEOVER + SLACK, async || put(client, Rng::from_os().next_u64()).await).await;
    println!("{what}: first put after {:?}", begun.elapsed());
    begun.elapsed()
}

async fn lasting(members: &[Client], objects: usize) {
    eventually("every object would outlive the master", Duration::from_secs(60), async || {
        let mut lasting = 0;
        for member in members {
            lasting += member.status().lasting_objects().await;
        }
        lasting >= objects
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_master_takes_over() {
    let Some((_etcd, mut masters, members)) = cluster().await else { return };
    for i in 0..40 {
        assert!(put(&members[0], i).await);
    }
    lasting(&members, 40).await;
    let standby: Vec<_> = masters[1..].iter().map(|master| master.page("/health").unwrap()).collect();
    let leader = format!(r#""leader_address":"127.0.0.1:{}""#, masters[0].port);
    for health in standby {
        assert!(health.contains(r#""role":"standby""#) && health.contains(&leader), "{health}");
    }
    masters.remove(0).process.kill();
    let took = first_put_after("the leader was killed", &members[0]).await;
    assert!(took < TAKEOVER + SLACK, "{took:?}");
    eventually("all is there again", TAKEOVER, async || hits(&members[1], 0..40).await == 40).await;
    assert_eq!(masters.iter().filter(|master| master.leads()).count(), 1);
}

/// A leader that stops while a connection holds half a request hands over the leadership, and ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_stops_beside_half_a_request_hands_over() {
    let Some((_etcd, mut masters, _members)) = cluster().await else { return };
    let mut leader = masters.remove(0);
    let mut half = TcpStream::connect(("127.0.0.1", leader.pages)).unwrap();
    half.write_all(b"GET / HT").unwrap();
    leader.process.signal("-TERM");
    let ends = async || leader.process.0.try_wait().unwrap().is_some_and(|status| status.success());
    eventually("it ends", TAKEOVER + SLACK, ends).await;
    eventually("another leads", TAKEOVER + SLACK, async || masters.iter().any(Master::leads)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_was_frozen_leads_no_more() {
    let Some((etcd, masters, members)) = cluster().await else { return };
    for i in 0..40 {
        assert!(put(&members[0], i).await);
    }
    lasting(&members, 40).await;
    masters[0].process.freeze();
    let took = first_put_after("the leader was frozen", &members[0]).await;
    assert!(took < TAKEOVER + SLACK, "{took:?}");
    eventually("all is there again", TAKEOVER, async || hits(&members[1], 0..40).await == 40).await;
    // A direct request that reaches the frozen leader gets no response from it.
    let direct = tokio::spawn(async move {
        let address = format!("127.0.0.1:{}", masters[0].port);
        let asked = crate::cluster::builder(&address, 0).connect_timeout(Duration::from_secs(2)).connect();
        let (asked, ()) = tokio::join!(asked, async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            masters[0].process.thaw();
        });
        assert!(asked.is_err(), "a deposed leader has answered");
        masters
    });
    let masters = direct.await.unwrap();
    eventually("it stands by", TAKEOVER, async || masters[0].page("/role").as_deref() == Some("standby"))
        .await;
    assert_eq!(masters.iter().filter(|master| master.leads()).count(), 1);
    assert_eq!(hits(&members[1], 0..40).await, 40);
    assert!(put(&members[0], 100).await && hits(&members[1], 100..101).await == 1);
    // Without its metadata service the leader stops, and with it the leader continues.
    drop(members);
    let mut etcd = etcd;
    let leader = masters.iter().find(|master| master.leads()).unwrap();
    etcd.stop();
    eventually("nobody leads", TAKEOVER + SLACK, async || !leader.leads()).await;
    etcd.restart(crate::servers::etcd);
    eventually("somebody leads", 2 * TAKEOVER, async || masters.iter().any(Master::leads)).await;
    let client = connect(&etcd).await;
    assert!(put(&client, 200).await);
}
