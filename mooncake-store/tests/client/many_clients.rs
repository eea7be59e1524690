//! Many clients whose master is restarted.
#![allow(clippy::disallowed_methods, clippy::print_stdout, reason = "figures of a run")]

use std::time::{Duration, Instant};

use mooncake_core::testkit::free_port;
use mooncake_engine::TransferEngine;
use mooncake_store::client::{Client, PutOutcome};
use mooncake_store::master::MasterOptions;
use mooncake_store::server::MasterServer;
use mooncake_store::transport_set::TransportOptions;
use mooncake_transport::engine::{HandshakePort, LocalCopies};

use crate::cluster::{master_config, start_again, value};

const CLIENTS: usize = 200;

/// Two hundred clients share one engine. Every object returns, and no client is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_clients_return_to_a_restarted_master() {
    let start = async |port| {
        let options = MasterOptions { client_ttl: Duration::from_secs(30), ..MasterOptions::default() };
        start_again(async || MasterServer::start(master_config(port, options.clone())).await).await
    };
    let server = start(free_port()).await;
    let at = server.addresses().rpc;
    let host = HandshakePort { host: Some("127.0.0.1".into()), ..HandshakePort::default() };
    let wires = TransportOptions::for_protocol("tcp").unwrap().without_shared_memory();
    let engine = TransferEngine::builder()
        .handshake(host)
        .transports(wires)
        .local_copies(LocalCopies::Never)
        .start()
        .await
        .unwrap();
    let mut clients = Vec::with_capacity(CLIENTS);
    for _ in 0..CLIENTS {
        let client = Client::builder().master(at.to_string()).engine(engine.engine().clone());
        clients.push(client.segment(64 << 10).local_buffer(64 << 10).connect().await.unwrap());
    }
    for number in 0..CLIENTS as u64 {
        let put = clients[0].put(number.to_string(), &value(number, 2000)[..]).await;
        assert_eq!(put.unwrap(), PutOutcome::Stored);
    }
    let begun = Instant::now();
    loop {
        let mut lasting = 0;
        for client in &clients {
            lasting += client.status().lasting_objects().await;
        }
        if lasting == CLIENTS {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{lasting} of {CLIENTS} would outlive the master");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    server.stop().await;
    let server = start(at.port()).await;
    let (begun, mut first) = (Instant::now(), None);
    loop {
        let keys = server.master().stats().keys as usize;
        if keys > 0 {
            first.get_or_insert(begun.elapsed());
        }
        if keys == CLIENTS {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{keys} of {CLIENTS} objects are back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("first object back after {:?}, the last after {:?}", first.unwrap(), begun.elapsed());
    for number in 0..CLIENTS as u64 {
        let found = clients[1].get(number.to_string()).await.unwrap();
        assert_eq!(found, Some(value(number, 2000)), "{number}");
    }
    for client in clients {
        client.close().await.unwrap();
    }
    server.stop().await;
}
