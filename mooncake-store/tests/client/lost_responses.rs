//! Batches, sessions and shared clients at a master whose responses get lost.

use std::time::Duration;

use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{ErrorCode, Result};
use mooncake_store::client::{Client, PutOptions, PutOutcome, RangeWrite, Reservation};
#[cfg(feature = "local")]
use mooncake_store::local::{LocalClient, LocalConfig, LocalServer, LocalServerConfig};
use parking_lot::Mutex;

use crate::cluster::{eventually, value};
use crate::lossy::Front;

/// Number of objects that one part of a batch takes.
const PART: usize = mooncake_store::protocol::parts::MAX_ITEMS;

/// Returns more items than one part takes.
fn items_of_two_parts() -> Vec<(String, Vec<u8>)> {
    (0..PART + 10).map(|number| (number.to_string(), vec![number as u8])).collect()
}

#[tokio::test]
async fn a_part_of_puts_that_fails_leaves_earlier_outcomes() {
    let front = Front::new(false);
    let client = front.connect(256 << 20).await;
    let mut items = items_of_two_parts();
    // The same key in a later part.
    items[PART + 9].0 = "0".into();
    front.pass.lock().push("start");
    front.lose(&["start", "start"]);
    let outcomes = client.batch_put(&items, &PutOptions::default()).await.unwrap();
    assert_eq!(outcomes.len(), items.len());
    assert!(outcomes[..PART].iter().all(|outcome| matches!(outcome, Ok(PutOutcome::Stored))));
    let code = |outcome: &Result<_>| outcome.as_ref().is_err_and(|error| error.code() == ErrorCode::RpcFail);
    assert!(outcomes[PART..].iter().all(code));
    eventually("nothing is being written", async || front.master().stats().writing == 0).await;
    let outcomes = client.batch_put(&items, &PutOptions::default()).await.unwrap();
    let is_new = |at: usize| (PART..PART + 9).contains(&at);
    for (at, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome.unwrap() == PutOutcome::Stored, is_new(at), "item {at}");
    }
    assert_eq!(client.get("0").await.unwrap().unwrap()[..], [0]);
    let last = PART + 8;
    assert_eq!(client.get(last.to_string()).await.unwrap().unwrap()[..], [last as u8]);
}

#[cfg(feature = "local")]
#[tokio::test]
async fn a_part_of_a_shared_client_that_fails_leaves_earlier_results() {
    let front = Front::new(false);
    let owner = front.connect(256 << 20).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(owner.clone(), config).unwrap();
    let config = LocalConfig {
        buffer: 64 << 20,
        timeout: Duration::from_secs(60),
        ..LocalConfig::at(path.to_str().unwrap())
    };
    let shared = LocalClient::connect(config).await.unwrap();
    let items = items_of_two_parts();
    let code = |error: &mooncake_core::Error| error.code() == ErrorCode::RpcFail;
    front.pass.lock().push("start");
    front.lose(&["start", "start"]);
    let outcomes = shared.batch_put(&items, &PutOptions::default()).await.unwrap();
    assert_eq!(outcomes.len(), items.len());
    assert!(outcomes[..PART].iter().all(|outcome| matches!(outcome, Ok(PutOutcome::Stored))));
    assert!(outcomes[PART..].iter().all(|outcome| outcome.as_ref().is_err_and(code)));
    // Objects of one part of a read, which take several calls because of their long keys.
    let long = |number: usize| format!("{number:01000}");
    let items: Vec<(String, Vec<u8>)> = (0..PART).map(|number| (long(number), vec![number as u8])).collect();
    eventually("nothing is being written", async || front.master().stats().writing == 0).await;
    let put = shared.batch_put(&items, &PutOptions::default()).await.unwrap();
    assert!(put.iter().all(Result::is_ok));
    front.pass.lock().push("locate");
    front.lose(&["locate"; 4]);
    let into = |(key, _): &(String, Vec<u8>)| {
        let slice = owner.memory().alloc(1).unwrap().exclusive().unwrap();
        (key.clone(), slice)
    };
    let reads = shared.batch_get_into(items.iter().map(into).collect()).await;
    assert_eq!(reads.len(), PART);
    let read = reads.iter().take_while(|read| read.result.is_ok()).count();
    assert!((1..PART).contains(&read), "{read} objects were read");
    for (read, (_, value)) in reads.iter().zip(&items).take(read) {
        let mut bytes = [0];
        read.into.as_ref().unwrap().copy_to(0, &mut bytes).unwrap();
        assert_eq!(bytes, value[..]);
    }
    assert!(reads[read..].iter().all(|read| read.result.as_ref().is_err_and(code)));
    drop(server);
}

/// A daemon closes its socket and waits for the calls in progress. Another daemon starts meanwhile.
#[cfg(feature = "local")]
#[tokio::test]
async fn a_daemon_that_stops_leaves_the_socket_of_its_successor() {
    let front = Front::new(false);
    let owner = front.connect(1 << 20).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(owner.clone(), config.clone()).unwrap();
    let local = LocalConfig::at(path.to_str().unwrap());
    let shared = LocalClient::connect(local.clone()).await.unwrap();
    front.stall.lock().push("start");
    let put = tokio::spawn({
        let shared = shared.clone();
        async move { shared.put("k", "value").await }
    });
    eventually("the call is in progress", async || front.stall.lock().is_empty()).await;
    let stopping = tokio::spawn(server.stop());
    let successor = Mutex::new(None);
    eventually("the successor listens", async || {
        let started = LocalServer::start(owner.clone(), config.clone()).ok();
        let is_started = started.is_some();
        *successor.lock() = started;
        is_started
    })
    .await;
    assert!(!stopping.is_finished(), "a call is in progress");
    front.stalled.add_permits(1);
    stopping.await.unwrap();
    put.await.unwrap().unwrap();
    assert!(path.exists(), "the successor listens there");
    let later = LocalClient::connect(local).await.unwrap();
    assert_eq!(later.get("k").await.unwrap().unwrap(), "value");
    drop(successor);
    assert!(!path.exists());
}

async fn reserve(client: &Client, keys: &[&str]) -> Result<Vec<Reservation>> {
    let items: Vec<(&str, u64)> = keys.iter().map(|key| (*key, 1000)).collect();
    client.ranges().reserve(&items, &ReplicateConfig::default()).await?.into_iter().collect()
}

/// Writes all bytes of a reserved object.
async fn fill(client: &Client, object: &Reservation, seed: u64) -> Result<()> {
    let mut from = client.memory().alloc(1000).unwrap().exclusive().unwrap();
    from.copy_from(0, &value(seed, 1000)).unwrap();
    let write = RangeWrite { object, offset: 0, from: from.into_shared() };
    client.ranges().write(vec![write]).await.remove(0)
}

#[tokio::test]
async fn a_session_survives_the_loss_of_responses() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    front.lose(&["start", "end"]);
    let objects = reserve(&client, &["k", "l"]).await.unwrap();
    for (object, seed) in objects.iter().zip([1, 2]) {
        fill(&client, object, seed).await.unwrap();
    }
    let ended = client.ranges().commit(&objects.iter().collect::<Vec<_>>()).await.unwrap();
    assert!(ended.iter().all(Result::is_ok) && !objects.iter().any(Reservation::is_open));
    assert!(front.lose.lock().is_empty());
    assert_eq!(client.get("l").await.unwrap().unwrap(), value(2, 1000));
}

#[tokio::test]
async fn a_session_whose_end_is_unknown_is_ended_again() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    // Each object has a request of its own.
    let k = reserve(&client, &["k"]).await.unwrap().remove(0);
    let l = reserve(&client, &["l"]).await.unwrap().remove(0);
    for object in [&k, &l] {
        fill(&client, object, 1).await.unwrap();
    }
    front.lose(&["end", "end"]);
    let [lost, ended] = client.ranges().commit(&[&k, &l]).await.unwrap().try_into().unwrap();
    assert_eq!(lost.unwrap_err().code(), ErrorCode::RpcFail);
    ended.unwrap();
    assert!(k.is_open() && !l.is_open());
    assert!(fill(&client, &k, 2).await.is_err(), "the object may be readable");
    front.lose(&["end", "end"]);
    assert_eq!(client.ranges().commit(&[&k]).await.unwrap_err().code(), ErrorCode::RpcFail);
    client.ranges().commit(&[&k]).await.unwrap().remove(0).unwrap();
    assert!(!k.is_open());
    assert_eq!(client.get("k").await.unwrap().unwrap(), value(1, 1000));
    assert!(client.ranges().give_back(&[&k]).await, "nothing is left to return");
    assert_eq!(client.get("k").await.unwrap().unwrap(), value(1, 1000));
}

#[tokio::test]
async fn space_of_sessions_is_given_back() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    let nothing = async || eventually("no space", async || front.master().stats().writing == 0).await;
    front.lose(&["start", "start"]);
    assert_eq!(reserve(&client, &["k", "l"]).await.unwrap_err().code(), ErrorCode::RpcFail);
    nothing().await;
    // The future is dropped while the master has granted the space.
    front.stall.lock().push("start");
    {
        let mut start = std::pin::pin!(reserve(&client, &["k", "l"]));
        tokio::select! {
            biased;
            _ = &mut start => panic!("the response is held"),
            () = eventually("space is granted", async || front.master().stats().writing == 2) => {}
        }
    }
    nothing().await;
    // The revoke is lost, and sent again.
    let object = reserve(&client, &["k"]).await.unwrap().remove(0);
    front.lose(&["revoke", "revoke"]);
    assert!(!client.ranges().give_back(&[&object]).await);
    assert_eq!(front.master().stats().writing, 1);
    nothing().await;
    // The end of the client returns what is open.
    let objects = reserve(&client, &["k", "l", "m"]).await.unwrap();
    fill(&client, &objects[0], 1).await.unwrap();
    fill(&client, &objects[1], 1).await.unwrap();
    client.ranges().commit(&[&objects[0]]).await.unwrap().remove(0).unwrap();
    assert_eq!(front.master().stats().writing, 2);
    client.close().await.unwrap();
    assert_eq!(front.master().stats().writing, 0);
}
