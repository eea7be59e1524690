//! Look-ups of prefixes over RPC: bytes of the responses, masters without the call, and masters
//! that respond wrongly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use mooncake_core::clock::Rng;
use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_core::testkit::test_seed;
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Put};
use mooncake_store::protocol::call::Response;
use mooncake_store::protocol::client::RpcOptions;
use mooncake_store::protocol::frame::Status;
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack::{self, Answer};
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service};
use mooncake_store::protocol::service::{MasterService, Tally};
use mooncake_store::protocol::wire::ReadablePrefix;
use parking_lot::Mutex;

const TENANT: &str = "default";

fn master() -> Arc<Master> {
    let master = Arc::new(Master::new(MasterOptions::default()).unwrap());
    let segment = Segment {
        id: SegmentId(Uuid::new(3, 4)),
        name: "host:1".into(),
        base: 1 << 40,
        size: 64 << 20,
        // The longest endpoint that fits where lengths take one byte.
        endpoint: format!("host{}", "x".repeat(250)),
        protocol: "tcp".into(),
        host_id: String::new(),
        locality: None,
    };
    master.mount(client(), &segment).unwrap();
    master
}

fn client() -> ClientId {
    ClientId(Uuid::new(1, 2))
}

fn put(master: &Master, key: &[u8]) {
    let (writer, mode, config) = (client().into(), WriteMode::Put, &ReplicateConfig::default());
    master.put_start(&Put { writer, mode, key, len: 100, config, group: "", session: None }).unwrap();
    master.put_end(writer, key, Some(key.len() as u64), ReplicaType::All).unwrap();
}

/// The response that is encoded object by object equals the response that the table encodes.
#[test]
fn responses_of_all_lengths_are_decoded_as_they_were_meant() {
    let master = master();
    let names: Vec<String> = (0..600).map(|number| format!("block/{number}")).collect();
    names.iter().for_each(|name| put(&master, name.as_bytes()));
    let seed = test_seed();
    let mut rng = Rng::seeded(seed);
    let lengths = [0, 1, 2, 40, 254, 255, 256, 257, 65_536];
    let random: Vec<usize> = (0..40).map(|_| rng.below(601) as usize).collect();
    for asked in lengths.into_iter().chain(random) {
        for hits in [0, asked / 2, asked.saturating_sub(1), asked] {
            let mut keys: Vec<&[u8]> = names.iter().cycle().take(asked).map(|name| name.as_bytes()).collect();
            if hits < asked {
                keys[hits] = b"missing";
            }
            for with_replicas in [false, true] {
                let request = || LocatePrefix { keys: (&keys[..]).into(), with_replicas, tenant: TENANT };
                let (mut body, mut out) = (Vec::new(), Vec::new());
                pack::encode(&request(), &mut body);
                let mut response = Response::new(&mut out);
                (*master).dispatch_added(&body, &mut response);
                let tally = response.tally();
                let failed = (asked - hits) as u64;
                assert_eq!(tally, Tally { items: asked as u64, failed }, "{hits} of {asked}, seed {seed}");
                let found: Answer<ReadablePrefix> = pack::decode(&out).unwrap();
                assert_eq!(found, Ok(master.handle(request()).unwrap()), "{hits} of {asked}, seed {seed}");
                let listed = if with_replicas { hits } else { 0 };
                let found = found.unwrap();
                assert_eq!((found.count, found.replicas.len()), (hits as u64, listed));
            }
        }
    }
}

trait DispatchAdded {
    fn dispatch_added(&self, body: &[u8], response: &mut Response<'_>);
}

impl DispatchAdded for Master {
    fn dispatch_added(&self, body: &[u8], response: &mut Response<'_>) {
        AddedCalls::dispatch(self, LocatePrefix::FUNCTION, body, response).unwrap().unwrap();
    }
}

/// Master that lacks some calls, and notes which functions are called.
struct Older {
    service: MasterService<Master>,
    lacks: fn(u32) -> bool,
    /// True once a later version has replaced this master.
    is_replaced: AtomicBool,
    called: Mutex<Vec<u32>>,
}

impl Older {
    async fn start(lacks: fn(u32) -> bool) -> (Arc<Self>, RunningServer, MasterClient) {
        let (service, is_replaced, called) =
            (MasterService(master()), AtomicBool::default(), Mutex::default());
        let older = Arc::new(Self { service, lacks, is_replaced, called });
        let running =
            Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap().start(older.clone());
        let remote = MasterClient::remote(running.local_addr().to_string(), RpcOptions::default());
        (older, running, remote)
    }

    fn called(&self) -> Vec<u32> {
        std::mem::take(&mut self.called.lock())
    }
}

impl Service for Older {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.called.lock().push(function);
        if (self.lacks)(function) && !self.is_replaced.load(SeqCst) {
            return Err((Status::NotRegistered, "rpc function not registered".into()));
        }
        self.service.call(function, body, out)
    }
}

#[tokio::test]
async fn a_master_without_the_call_is_asked_about_all_keys() {
    let is_of_cpp = |function| !TABLE.iter().any(|shape| shape.function == function);
    let is_older: fn(u32) -> bool = |function| function == LocatePrefix::FUNCTION;
    for lacks in [is_of_cpp as fn(u32) -> bool, is_older] {
        let (older, running, remote) = Older::start(lacks).await;
        for key in [b"a", b"b", b"d"] {
            put(&older.service.0, key);
        }
        let keys: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];
        assert_eq!(remote.prefix_hits(TENANT, &keys).await.unwrap(), 2);
        assert_eq!(older.called(), [LocatePrefix::FUNCTION, BatchExistKey::FUNCTION]);
        // The client remembers that.
        assert_eq!(remote.clone().prefix_hits(TENANT, &keys[..1]).await.unwrap(), 1);
        let lists = remote.locate_prefix(TENANT, &keys).await.unwrap();
        assert_eq!(older.called(), [ExistKey::FUNCTION, BatchGetReplicaList::FUNCTION]);
        let same: Vec<_> = [b"a", b"b"].map(|key| older.service.0.locate(key).unwrap()).into();
        assert_eq!(lists, same);
        assert_eq!(remote.locate_prefix(TENANT, &keys[2..]).await.unwrap(), []);
        assert!(remote.fences_writes(), "numbered writes are other calls");
        // Another master may respond after the version was asked for.
        older.is_replaced.store(true, SeqCst);
        remote.version().await.unwrap();
        older.called();
        assert_eq!(remote.prefix_hits(TENANT, &keys).await.unwrap(), 2);
        assert_eq!(remote.locate_prefix(TENANT, &keys).await.unwrap(), same);
        assert_eq!(older.called(), [LocatePrefix::FUNCTION; 2]);
        // No keys need no call.
        assert_eq!(remote.prefix_hits(TENANT, &[]).await.unwrap(), 0);
        assert_eq!((remote.locate_prefix(TENANT, &[]).await.unwrap().len(), older.called().len()), (0, 0));
        running.stop().await;
    }
}

/// Master whose responses contradict the request or themselves.
struct Wrong(Mutex<ReadablePrefix>);

impl Service for Wrong {
    fn call(&self, _: u32, _: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let found: Answer<ReadablePrefix> = Ok(self.0.lock().clone());
        pack::encode(&found, out);
        Ok(())
    }
}

#[tokio::test]
async fn responses_that_cannot_be_are_errors() {
    let wrong = Arc::new(Wrong(Mutex::default()));
    let running = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap().start(wrong.clone());
    let remote = MasterClient::remote(running.local_addr().to_string(), RpcOptions::default());
    let real = master();
    put(&real, b"a");
    let list = real.locate(b"a").unwrap();
    let keys: [&[u8]; 2] = [b"a", b"b"];
    for (count, listed, hits, located) in [
        (0, 0, Some(0), Some(0)),
        (2, 0, Some(2), None),
        (2, 2, None, Some(2)),
        (3, 0, None, None),
        (3, 3, None, None),
        (1, 2, None, None),
        (u64::MAX, 1, None, None),
    ] {
        *wrong.0.lock() = ReadablePrefix { replicas: vec![list.clone(); listed], count };
        let code = |error: mooncake_core::Error| error.code();
        let found = remote.prefix_hits(TENANT, &keys).await.map_err(code);
        assert_eq!(found, hits.ok_or(ErrorCode::RpcFail), "{count} and {listed}");
        let found = remote.locate_prefix(TENANT, &keys).await.map(|lists| lists.len()).map_err(code);
        assert_eq!(found, located.ok_or(ErrorCode::RpcFail), "{count} and {listed}");
    }
    running.stop().await;
}
