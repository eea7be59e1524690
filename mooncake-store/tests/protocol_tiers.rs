//! Calls about features that are off, asked of our master over its wire.

mod tier_answers;

use std::sync::Arc;

use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Put};
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::server::{Server, ServerOptions};
use mooncake_store::protocol::service::MasterService;

#[tokio::test]
async fn what_is_off_is_answered_as_the_existing_master_answers() {
    let master = Arc::new(Master::new(MasterOptions::default()).unwrap());
    let client = ClientId(Uuid::new(1, 2));
    let segment = Segment {
        id: SegmentId(Uuid::new(3, 4)),
        name: "host:1".into(),
        base: 0x1000,
        size: 1 << 20,
        endpoint: "host:2".into(),
        protocol: "tcp".into(),
        host_id: "host".into(),
    };
    master.mount(client, &segment).unwrap();
    let config = ReplicateConfig::default();
    let (key, mode) = (b"there".as_slice(), WriteMode::Put);
    master
        .put_start(&Put { writer: client.into(), mode, key, len: 100, config: &config, group: "" })
        .unwrap();
    master.put_end(client.into(), key, None, ReplicaType::All).unwrap();
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let running = server.start(Arc::new(MasterService(master)));
    let rpc = RpcClient::new(running.local_addr().to_string(), RpcOptions::default());
    tier_answers::check_off(&rpc, client, key, &segment.name).await;
    running.stop().await;
}
