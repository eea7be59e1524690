//! RPC responses of the master: those of features that are off, and the bytes of the most frequent
//! ones.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{DiskOptions, Master, MasterOptions, Put};
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::{Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::{OffloadItem, StoredAt};

#[tokio::test]
async fn a_disabled_feature_answers_like_mooncake_cpp() {
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
        locality: None,
    };
    master.mount(client, &segment).unwrap();
    let config = ReplicateConfig::default();
    let (key, mode) = (b"there".as_slice(), WriteMode::Put);
    master
        .put_start(&Put {
            writer: client.into(),
            mode,
            key,
            len: 100,
            config: &config,
            group: "",
            session: None,
        })
        .unwrap();
    master.put_end(client.into(), key, None, ReplicaType::All).unwrap();
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let running = server.start(Arc::new(MasterService(master)));
    let rpc = RpcClient::new(running.local_addr().to_string(), RpcOptions::default());
    crate::tier_answers::check_off(&rpc, client, key, &segment.name).await;
    running.stop().await;
}

/// Responses that are encoded without the table equal those that the table would encode.
#[test]
fn what_is_never_kept_is_spelled_as_the_rest() {
    let options = MasterOptions { disks: Some(DiskOptions::default()), ..MasterOptions::default() };
    let master = Arc::new(Master::new(options).unwrap());
    let client = ClientId(Uuid::new(1, 2));
    master.mount_disk(client, true).unwrap();
    for number in 1..4u64 {
        let segment = Segment {
            id: SegmentId(Uuid::new(3, number)),
            name: format!("host{number}:1"),
            base: number << 40,
            size: 1 << 20,
            // The longest accepted endpoint must fit where lengths take one byte.
            endpoint: format!("host{number}{}", "x".repeat(250)),
            protocol: "tcp".into(),
            host_id: String::new(),
            locality: None,
        };
        master.mount(client, &segment).unwrap();
    }
    let service = MasterService(master.clone());
    let answer = |function: u32, body: &dyn Fn(&mut Vec<u8>)| {
        let (mut arguments, mut out) = (Vec::new(), Vec::new());
        body(&mut arguments);
        service.call(function, &arguments, &mut out).unwrap();
        let shape = TABLE.iter().find(|shape| shape.function == function).unwrap();
        assert_eq!(shape.rewrite_reply(&out, false).as_ref(), Ok(&out), "{}", shape.name);
        out
    };
    let (tenant, config) = ("default", ReplicateConfig::replicas(2));
    for count in [1, 40, 300] {
        let names: Vec<String> = (0..count).map(|n| format!("{count}/{n}")).collect();
        let keys: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
        // One object is too large.
        let sizes: Vec<u64> = (0..count).map(|n| if n == 20 { 1 << 40 } else { 100 }).collect();
        let (keys, sizes) = (Cow::Borrowed(&keys[..]), Cow::Borrowed(&sizes[..]));
        let config = Cow::Borrowed(&config);
        let start = BatchPutStart { client, keys: keys.clone(), sizes, config: config.clone(), tenant };
        let granted = answer(BatchPutStart::FUNCTION, &|out| pack::encode(&start, out));
        let granted: Vec<pack::Answer<Vec<Replica>>> = pack::decode(&granted).unwrap();
        let refused: Vec<usize> = (0..granted.len()).filter(|at| granted[*at].is_err()).collect();
        assert_eq!(refused, if count > 20 { vec![20] } else { vec![] });
        for (at, key) in keys.iter().enumerate().filter(|(at, _)| at % 3 == 0 && *at != 20) {
            master.put_end(client.into(), key, Some(at as u64), ReplicaType::All).unwrap();
        }
        // Some of these objects are on a disk, too.
        let written: Vec<_> = master.to_offload(client, true).unwrap().into_iter().step_by(2).collect();
        let endpoint = || "disk:1".to_owned();
        let place = |item: &OffloadItem| StoredAt { data_size: item.size, endpoint: endpoint(), ..stored() };
        master.offloaded(client, &written, &written.iter().map(place).collect::<Vec<_>>()).unwrap();
        let locate = BatchGetReplicaList { keys: keys.clone(), tenant };
        let lists = answer(BatchGetReplicaList::FUNCTION, &|out| pack::encode(&locate, out));
        let lists: Vec<pack::Answer<ReplicaList>> = pack::decode(&lists).unwrap();
        for (at, (key, list)) in keys.iter().zip(lists).enumerate() {
            let kept = master.locate(key).map_err(|error| error.code());
            assert_eq!(list, kept, "{at}");
            let one = GetReplicaList { key, tenant };
            let one = answer(GetReplicaList::FUNCTION, &|out| pack::encode(&one, out));
            assert_eq!(pack::decode::<pack::Answer<ReplicaList>>(&one).unwrap(), kept);
        }
        let key = format!("single {count}");
        let start = PutStart { client, key: key.as_bytes(), size: 9, config, tenant };
        answer(PutStart::FUNCTION, &|out| pack::encode(&start, out));
    }
    // These objects are on a disk only.
    for number in 1..4u64 {
        master.unmount(client, SegmentId(Uuid::new(3, number))).unwrap();
    }
    master.tick();
    let left = master.keys();
    assert!(left.len() > 20, "{} are left", left.len());
    for key in &left {
        let one = GetReplicaList { key: key.as_bytes(), tenant };
        let one = answer(GetReplicaList::FUNCTION, &|out| pack::encode(&one, out));
        let kept = master.locate(key.as_bytes()).unwrap();
        assert!(kept.replicas.iter().all(|replica| replica.location.memory().is_none()));
        assert_eq!(pack::decode::<pack::Answer<ReplicaList>>(&one).unwrap(), Ok(kept));
    }
}

fn stored() -> StoredAt {
    StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: 0, endpoint: String::new() }
}
