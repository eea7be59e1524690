//! Discovery of clients by names other than that of a metadata service.

use mooncake_core::Result;
use mooncake_metadata::DirectoryOptions;
use mooncake_store::client::{Client, PutOptions};
use mooncake_store::master::MasterOptions;
use mooncake_store::transport_set::TransportOptions;
use mooncake_transport::engine::HandshakePort;

use crate::cluster::{Cluster, Kind, value};

/// Puts an object into the segment of a given client.
async fn put_in(client: &Client, owner: &Client, key: &str, len: usize) -> Result<()> {
    let config = PutOptions::new().prefer_segment(owner.hostname());
    client.put_with(key, &value(7, len)[..], &config).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_one_cluster_in_a_directory_of_several() {
    let cluster = Cluster::start(Kind::TcpHttp, MasterOptions::default()).await;
    let of = |id: &str| {
        let options = DirectoryOptions { cluster_id: id.into(), ..DirectoryOptions::default() };
        cluster.builder().directory_options(options)
    };
    let a = of("north").connect().await.unwrap();
    let b = of("north").connect().await.unwrap();
    let stranger = of("south").segment(0).connect().await.unwrap();
    put_in(&b, &a, "k", 5000).await.unwrap();
    assert_eq!(b.get("k").await.unwrap().unwrap(), value(7, 5000));
    // The client knows the location of the object, and has no route to it.
    assert_eq!(stranger.get("k").await.unwrap(), None);
    for client in [a, b, stranger] {
        client.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_listens_where_it_is_configured_to() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let port = mooncake_core::testkit::free_port();
    let handshake =
        HandshakePort { ports: port..=port, host: Some("127.0.0.1".into()), ..Default::default() };
    let wires = TransportOptions::for_protocol("tcp").unwrap();
    let a = cluster.builder().transports(wires).handshake(handshake).connect().await.unwrap();
    let b = cluster.builder().connect().await.unwrap();
    assert_eq!(a.engine().name(), format!("127.0.0.1:{port}"));
    put_in(&b, &a, "k", 5000).await.unwrap();
    assert_eq!(b.get("k").await.unwrap().unwrap(), value(7, 5000));
    a.close().await.unwrap();
    b.close().await.unwrap();
}
