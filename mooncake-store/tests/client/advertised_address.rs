//! Clients whose address leads to another process, to none, or to several.

use std::net::SocketAddr;
use std::time::Duration;

use mooncake_core::testkit::free_port;
use mooncake_core::{ErrorCode, host_port};
use mooncake_store::client::{AddressPolicy, Client, ClientBuilder, ClientConfig};
use mooncake_store::master::MasterOptions;
use mooncake_store::server::MasterServer;
use mooncake_transport::engine::HandshakePort;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::cluster::{eventually, master_config};
use crate::common::http::ask;

/// Returns a client that advertises one address and listens at another one.
fn builder(server: &MasterServer, advertised: &str, listens_at: &str) -> ClientBuilder {
    let port = host_port::split(advertised).1.unwrap_or_else(free_port);
    let config = ClientConfig {
        handshake: HandshakePort { ports: port..=port, ..HandshakePort::default() },
        ping_interval: Duration::from_millis(50),
        bind_address: listens_at.into(),
        local_buffer: 0,
        segment: 1 << 20,
        ..ClientConfig::default()
    };
    Client::builder().config(config).master(server.addresses().rpc.to_string()).local_hostname(advertised)
}

async fn start() -> MasterServer {
    MasterServer::start(master_config(0, MasterOptions::default())).await.unwrap()
}

/// Returns what the master has found about the address of a client.
async fn finding(server: &MasterServer, client: &Client) -> String {
    eventually("the master has checked the address", async || {
        server.master().address_finding(client.id()).is_some()
    })
    .await;
    server.master().address_finding(client.id()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_of_another_process_is_found_and_refused_on_request() {
    let server = start().await;
    let advertised = format!("localhost:{}", free_port());
    let right = builder(&server, &advertised, "127.0.0.1").address_check(AddressPolicy::Refuse);
    let right = right.connect().await.unwrap();
    assert_eq!(server.master().address_finding(right.id()), None);
    let wrong = || builder(&server, &advertised, "127.0.0.2");
    let client = wrong().connect().await.unwrap();
    let found = finding(&server, &client).await;
    let instance = right.engine().instance();
    assert!(found.contains("another process") && found.contains(instance), "{found}");
    assert!(found.contains("127.0.0.1:") && found.contains("for the master"), "{found}");
    let page = ask(server.addresses().admin.unwrap(), "GET", "/get_segments_detail", "").await.body;
    assert!(page.contains("another process") && page.matches("address_finding").count() == 1, "{page}");
    client.close().await.unwrap();
    let error = wrong().address_check(AddressPolicy::Refuse).connect().await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidParams);
    for part in ["cannot join", &advertised, "listens_at=127.0.0.2", "another process"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    assert_eq!(server.master().stats().segments.len(), 1, "the refused client has left");
    let unchecked = wrong().address_check(AddressPolicy::Off).connect().await.unwrap();
    unchecked.close().await.unwrap();
    right.close().await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_where_nothing_listens_is_found() {
    let server = start().await;
    let advertised = format!("localhost:{}", free_port());
    let client = builder(&server, &advertised, "127.0.0.2").connect().await.unwrap();
    let found = finding(&server, &client).await;
    assert!(found.contains("cannot connect") && found.contains(&advertised), "{found}");
    client.close().await.unwrap();
    server.stop().await;
}

/// A service leads to one of its processes at each connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_of_several_processes_is_found() {
    let server = start().await;
    let service = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = service.local_addr().unwrap().port();
    let advertised = format!("localhost:{port}");
    let other = builder(&server, &advertised, "127.0.0.2").address_check(AddressPolicy::Off);
    let other = other.connect().await.unwrap();
    let passing = tokio::spawn(async move {
        for turn in 1u8.. {
            let (mut from, _) = service.accept().await.unwrap();
            tokio::spawn(async move {
                let to = SocketAddr::from(([127, 0, 0, 2 + turn % 2], port));
                let mut to = TcpStream::connect(to).await.unwrap();
                let _ = copy_bidirectional(&mut from, &mut to).await;
            });
            if turn == 250 {
                break;
            }
        }
    });
    let client = builder(&server, &advertised, "127.0.0.3").connect().await.unwrap();
    let found = finding(&server, &client).await;
    assert!(found.contains("another process"), "{found}");
    client.close().await.unwrap();
    other.close().await.unwrap();
    passing.abort();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_of_version_6_leads_to_its_client() {
    let server = start().await;
    let client = builder(&server, "::1", "::1").address_check(AddressPolicy::Refuse).connect().await.unwrap();
    assert_eq!(server.master().address_finding(client.id()), None);
    client.close().await.unwrap();
    server.stop().await;
}
