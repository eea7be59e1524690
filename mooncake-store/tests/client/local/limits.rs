//! Limits of shared clients: buffers, connections, and owners that change.

use std::time::Duration;

use futures::FutureExt;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::local::{LocalClient, LocalConfig};
use mooncake_store::protocol::message::Attach;

use super::{Host, bytes, key, stranger};

#[tokio::test]
async fn memory_is_limited_and_comes_back() {
    let host = Host::with(|config| config.max_memory = 8 << 20).await;
    let shared = host.connect().await;
    let refused = shared.put(key(), bytes(5 << 20, 0)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    assert!(refused.message().contains("--max_client_memory"), "{refused}");
    let name = key();
    shared.put(&name, bytes(3 << 20, 0)).await.unwrap();
    let first = shared.get(&name).await.unwrap().unwrap();
    let second = shared.get(&name).await.unwrap().unwrap();
    // Neither the buffer nor the limit has space for a third object: the read waits until another
    // is released.
    let mut third = Box::pin(shared.get(&name));
    let waited = tokio::time::timeout(Duration::from_millis(100), &mut third).await;
    assert!(waited.is_err());
    drop(first);
    assert!(third.await.unwrap().unwrap() == second);
    drop(second);
    let config = LocalConfig { buffer: 9 << 20, ..host.config() };
    assert_eq!(LocalClient::connect(config).await.unwrap_err().kind(), ErrorKind::NoSpace);
}

#[tokio::test]
async fn processes_are_limited() {
    let host = Host::with(|config| config.max_clients = 2).await;
    let (first, _second) = (host.connect().await, host.connect().await);
    let refused = LocalClient::connect(host.config()).await.unwrap_err();
    assert!(refused.message().contains("--max_clients"), "{refused}");
    drop(first);
    host.until(|stats| stats.clients == 1).await;
    host.connect().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_beyond_the_limit_wait_for_their_turn() {
    let host = Host::with(|config| config.max_calls = 2).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(1000, 1)).await.unwrap();
    let gets = (0..50).map(|_| {
        let (shared, name) = (shared.clone(), name.clone());
        tokio::spawn(async move { shared.get(&name).await.unwrap().unwrap() })
    });
    let gets: Vec<_> = gets.collect();
    for get in gets {
        assert!(get.await.unwrap() == bytes(1000, 1));
    }
    assert!(host.server.stats().connections <= 2);
}

#[tokio::test]
async fn clients_without_heartbeats_are_forgotten() {
    let host = Host::with(|config| config.silence = Duration::from_secs(3)).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, b"value").await.unwrap();
    // The connection attaches and sends nothing else.
    let mut silent = stranger(host.server.path(), None).await;
    silent.call(&Attach {}, &"the owner").await.unwrap().outcome().unwrap();
    assert_eq!(host.server.stats().clients, 2);
    silent.ended().await;
    // The other client sent heartbeats meanwhile.
    host.until(|stats| stats.clients == 1).await;
    assert!(shared.is_connected());
    assert_eq!(shared.get(&name).await.unwrap().unwrap(), "value");
}

#[tokio::test]
async fn an_owner_that_stops_is_missed_and_found_again() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, b"value").await.unwrap();
    let mut buffer = shared.alloc(5).await.unwrap();
    buffer.copy_from_slice(b"later");
    let Host { server, client, folder } = host;
    let path = server.path().to_owned();
    server.stop().await;
    let lost = loop {
        match shared.get(&name).await {
            Err(error) => break error,
            Ok(_) => tokio::task::yield_now().await,
        }
    };
    assert_eq!(lost.code(), ErrorCode::RpcFail);
    let config = mooncake_store::local::LocalServerConfig { path, ..Default::default() };
    let server = mooncake_store::local::LocalServer::start(client, config).unwrap();
    let found = loop {
        shared.connected().await;
        match shared.get(&name).await {
            Ok(found) => break found,
            // The client has not noticed yet that the owner is another one.
            Err(error) => assert_eq!(error.code(), ErrorCode::RpcFail, "{error}"),
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(found.unwrap(), "value");
    // Memory from before the change is still valid.
    let later = key();
    shared.put_buf(&later, buffer, &Default::default()).await.unwrap();
    assert_eq!(shared.get(&later).await.unwrap().unwrap(), "later");
    assert_eq!(server.stats().clients, 1);
    drop(folder);
}

#[tokio::test]
async fn calls_that_are_given_up_keep_their_memory_until_they_end() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(1 << 20, 1)).await.unwrap();
    for _ in 0..200 {
        let mut get = Box::pin(shared.get(&name));
        // The read stops at its first await: sometimes before the request is sent, sometimes after.
        let _ = (&mut get).now_or_never();
        drop(get);
    }
    host.until(|stats| stats.calls == 0).await;
    while shared.buffer_used() != 0 {
        tokio::task::yield_now().await;
    }
    assert!(shared.get(&name).await.unwrap().unwrap() == bytes(1 << 20, 1));
}
