//! Hints of puts, by the client: objects that end by themselves, and masters without hints.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_core::hints::KeepPart;
use mooncake_core::testkit::free_port;
use mooncake_store::client::{Client, PutOptions, PutOutcome, RangeRead};
use mooncake_store::master::{Master, MasterOptions, MissCause};
use mooncake_store::server::MasterServer;

use crate::cluster::{Cluster, Kind, eventually, master_config, start_again, value};

fn once() -> PutOptions {
    PutOptions::new().delete_after_read()
}

/// Reads a value in two ranges.
async fn read_in_parts(client: &Client, key: &str, len: usize) -> Option<Vec<u8>> {
    let object = client.ranges().locate(&[key]).await.unwrap().pop().unwrap().unwrap()?;
    let part = |offset: usize, len: usize| RangeRead {
        object: object.clone(),
        offset: offset as u64,
        into: client.memory().alloc(len).unwrap().exclusive().unwrap(),
    };
    let mut whole = Vec::new();
    for range in [part(0, len / 2), part(len / 2, len - len / 2)] {
        let read = client.ranges().read(vec![range]).await.pop().unwrap();
        read.result.unwrap();
        let at = whole.len();
        whole.resize(at + read.into.len(), 0);
        read.into.copy_to(0, &mut whole[at..]).unwrap();
    }
    Some(whole)
}

/// Reads of objects that end at their first read, by a client that has not met their owner before.
async fn check(kind: Kind) {
    let cluster = Cluster::start(kind, MasterOptions::default()).await;
    let owner = cluster.builder().connect().await.unwrap();
    for (number, len) in [(0, 100), (1, 1 << 20)] {
        let reader = cluster.builder().segment(0).connect().await.unwrap();
        let [whole, parts] = [format!("whole/{number}"), format!("parts/{number}")];
        for key in [&whole, &parts] {
            assert_eq!(
                owner.put_with(key, &value(number, len)[..], &once()).await.unwrap(),
                PutOutcome::Stored
            );
        }
        assert!(reader.exist(&whole).await.unwrap());
        assert_eq!(reader.replicas().prefix_hits(&[&whole]).await.unwrap(), 1);
        assert_eq!(reader.get(&whole).await.unwrap().unwrap(), value(number, len));
        assert_eq!((reader.get(&whole).await.unwrap(), owner.get(&whole).await.unwrap()), (None, None));
        // A client of its own, for which the read in parts is the first contact.
        let other = cluster.builder().segment(0).connect().await.unwrap();
        assert_eq!(read_in_parts(&other, &parts, len).await.unwrap(), value(number, len));
        assert_eq!(read_in_parts(&other, &parts, len).await, None);
        assert_eq!(cluster.master.why_missing(parts.as_bytes()), Some(MissCause::DeletedAfterRead));
        other.close().await.unwrap();
        reader.close().await.unwrap();
    }
    let long = PutOptions::new().time_to_live(Duration::from_secs(3600)).parent_key("p").position(4);
    owner.put_with("k", "v", &long.keep(KeepPart::Whole)).await.unwrap();
    let soon = PutOptions::new().time_to_live(Duration::from_millis(30));
    owner.put_with("l", "v", &soon).await.unwrap();
    eventually("it ends", async || owner.get("l").await.unwrap().is_none()).await;
    assert_eq!(cluster.master.why_missing(b"l"), Some(MissCause::Expired));
    assert_eq!(&owner.get("k").await.unwrap().unwrap()[..], b"v");
    let never = PutOptions::new().time_to_live(Duration::ZERO);
    assert!(owner.put_with("m", "v", &never).await.is_err());
    owner.close().await.unwrap();
}

#[tokio::test]
async fn embedded() {
    check(Kind::Embedded).await;
}

#[cfg(feature = "transport-tcp")]
#[tokio::test]
async fn tcp() {
    check(Kind::Tcp).await;
}

/// Lifetimes go on under the next master, which learns of the objects from their owner.
#[cfg(feature = "transport-tcp")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lifetimes_outlive_the_master() {
    let clock = Arc::new(ManualClock::new());
    clock.advance(Duration::from_secs(1000));
    let start = async |port| {
        let options = MasterOptions { client_ttl: Duration::from_secs(3600), ..MasterOptions::default() };
        MasterServer::start_with_clock(master_config(port, options), clock.clone()).await
    };
    let server = start(free_port()).await.unwrap();
    let address = server.addresses().rpc;
    let client = Client::builder()
        .master(address.to_string())
        .segment(4 << 20)
        .timeout(Duration::from_secs(5))
        .connect();
    let client = client.await.unwrap();
    let living = |seconds| PutOptions::new().time_to_live(Duration::from_secs(seconds));
    let puts = [
        ("plain", PutOptions::new()),
        ("short", living(10)),
        ("long", living(100)),
        ("once", once()),
        ("read", once()),
    ];
    for (key, options) in &puts {
        client.put_with(key, &value(1, 1000)[..], options).await.unwrap();
    }
    assert!(client.get("read").await.unwrap().is_some());
    eventually("the objects are known", async || client.status().lasting_objects().await == 4).await;
    server.stop().await;
    clock.advance(Duration::from_secs(50));
    let server = start_again(async || start(address.port()).await).await;
    let master: &Arc<Master> = server.master();
    let are_there = || ["plain", "long", "once"].iter().all(|key| master.peek(key.as_bytes()).is_ok());
    eventually("the objects are back", async || are_there()).await;
    assert_eq!(client.get("once").await.unwrap().unwrap(), value(1, 1000));
    for key in ["once", "short", "read"] {
        assert_eq!(client.get(key).await.unwrap(), None, "{key}");
    }
    clock.advance(Duration::from_secs(50));
    assert_eq!(client.get("long").await.unwrap(), None);
    assert_eq!(client.get("plain").await.unwrap().unwrap(), value(1, 1000));
    client.close().await.unwrap();
    server.stop().await;
}
