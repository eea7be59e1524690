//! Batches that are longer than one message: in parts from our clients, refused by name otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::{Caller, EndItem, PutItem, WriteMode};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::client::RpcOptions;
use mooncake_store::protocol::frame::{self, Parsed, Status};
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const TENANT: &str = "default";
const SOON: Duration = Duration::from_secs(60);
const SHORT: usize = 64 << 10;
const CALLER: Caller<'_> = Caller { client: ClientId(Uuid::new(1, 2)), tenant: TENANT, attempt: 77 };

/// Service that counts its calls.
struct Counting(MasterService<Master>, Arc<AtomicUsize>);

impl Service for Counting {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.1.fetch_add(1, Relaxed);
        self.0.call(function, body, out)
    }
}

struct Rig {
    master: Arc<Master>,
    server: RunningServer,
    client: MasterClient,
    calls: Arc<AtomicUsize>,
}

impl Rig {
    /// Starts a master whose requests, and a client whose messages have at most these lengths.
    async fn start(served: usize, sent: usize) -> Self {
        let master = Arc::new(Master::new(MasterOptions::default()).unwrap());
        let options = ServerOptions { max_body: served, ..ServerOptions::default() };
        let server = Server::bind("127.0.0.1:0", options).await.unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let server = server.start(Arc::new(Counting(MasterService(master.clone()), calls.clone())));
        let options = RpcOptions { call_timeout: SOON, max_body: sent, ..RpcOptions::default() };
        let client = MasterClient::remote(server.local_addr().to_string(), options);
        let segment = Segment {
            id: SegmentId(Uuid::new(3, 4)),
            name: "host:1".into(),
            base: 1 << 40,
            size: 16 << 30,
            endpoint: "a-node-with-a-name-of-usual-length.example:12345".into(),
            protocol: "tcp".into(),
            host_id: "host".into(),
            locality: None,
        };
        master.mount(CALLER.client, &segment).unwrap();
        Self { master, server, client, calls }
    }

    /// Stores, finds and removes this many objects, each kind of call as one batch.
    async fn use_every_batch(&self, count: usize) {
        let names: Vec<String> =
            (0..count).map(|number| format!("a key of usual length {number:09}")).collect();
        let keys: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
        let group_ids = Some((0..count).map(|number| format!("group {}", number / 10)).collect());
        let config = ReplicateConfig { group_ids, ..ReplicateConfig::default() };
        let items: Vec<_> = keys.iter().map(|key| PutItem { key, len: 7 }).collect();
        let ends: Vec<_> = keys.iter().map(|key| EndItem { key, checksum: None }).collect();
        for mode in [WriteMode::Put, WriteMode::Upsert] {
            let caller = Caller { attempt: CALLER.attempt + u64::from(mode == WriteMode::Upsert), ..CALLER };
            let started = self.client.put_start(caller, mode, &items, &config).await.unwrap();
            assert_eq!(started.len(), count);
            assert!(started.iter().all(|replicas| replicas.as_ref().is_ok_and(|all| all.len() == 1)));
            let mut addresses: Vec<u64> =
                started.iter().flatten().map(|all| all[0].location.memory().unwrap().address).collect();
            addresses.sort_unstable();
            addresses.dedup();
            assert_eq!(addresses.len(), count, "each object has space of its own");
            let ended = self.client.put_end(caller, mode, &ends, ReplicaType::All).await.unwrap();
            assert!(ended.len() == count && ended.iter().all(Result::is_ok));
        }
        self.master.ping(CALLER.client);
        let mut asked = keys.clone();
        asked.insert(count / 2, b"absent");
        let found = self.client.exist(TENANT, &asked).await.unwrap();
        assert!(
            found.iter().enumerate().all(|(at, found)| matches!(found, Ok(it) if *it == (at != count / 2)))
        );
        let found = self.client.locate(TENANT, &asked).await.unwrap();
        let is_absent = |at: usize| found[at].as_ref().is_err_and(|e| e.code() == ErrorCode::ObjectNotFound);
        assert!(found.len() == count + 1 && is_absent(count / 2));
        assert!(found.iter().enumerate().all(|(at, found)| found.is_ok() != (at == count / 2)));
        let located: Vec<_> = found.iter().flatten().map(|list| list.replicas[0].id).collect();
        let again = self.client.locate_again(TENANT, &keys, &located).await.unwrap();
        assert!(again.iter().zip(&located).all(|(list, id)| list.as_ref().unwrap().replicas[0].id == *id));
        assert_eq!(self.client.prefix_hits(TENANT, &keys).await.unwrap(), count);
        assert_eq!(self.client.prefix_hits(TENANT, &asked).await.unwrap(), count / 2);
        let prefix = self.client.locate_prefix(TENANT, &asked).await.unwrap();
        assert!(prefix.iter().zip(&located).all(|(list, id)| list.replicas[0].id == *id));
        assert_eq!(prefix.len(), count / 2);
        self.master.ping(CALLER.client);
        let removed = self.client.remove(TENANT, &asked, true).await.unwrap();
        assert!(removed.iter().enumerate().all(|(at, removed)| removed.is_ok() != (at == count / 2)));
        assert_eq!(self.master.stats().keys, 0);
        // Writes that are cancelled.
        let caller = Caller { attempt: CALLER.attempt + 2, ..CALLER };
        self.client.put_start(caller, WriteMode::Put, &items, &config).await.unwrap();
        let revoked = self.client.put_revoke(caller, WriteMode::Put, &keys, ReplicaType::All).await.unwrap();
        assert!(revoked.len() == count && revoked.iter().all(Result::is_ok));
    }
}

/// Requests above the limit of the client are split, and responses above it.
#[tokio::test]
async fn batches_beyond_the_messages_of_a_client_are_split() {
    let rig = Rig::start(frame::DEFAULT_MAX_BODY, SHORT).await;
    rig.use_every_batch(5000).await;
}

/// A server that accepts less refuses by name, and the client asks about less.
#[tokio::test]
async fn batches_beyond_the_messages_of_a_server_are_split() {
    let rig = Rig::start(SHORT, frame::DEFAULT_MAX_BODY).await;
    rig.use_every_batch(5000).await;
}

/// A batch that fits into one message is one call.
#[tokio::test]
async fn usual_batches_are_one_call() {
    let rig = Rig::start(frame::DEFAULT_MAX_BODY, frame::DEFAULT_MAX_BODY).await;
    let keys = vec![&b"a key of usual length"[..]; 4096];
    rig.client.exist(TENANT, &keys).await.unwrap();
    rig.client.locate(TENANT, &keys).await.unwrap();
    assert_eq!(rig.calls.load(Relaxed), 2);
    assert!(rig.client.exist(TENANT, &[]).await.unwrap().is_empty());
}

/// The real limits. Takes a minute without optimization.
#[tokio::test]
#[ignore = "takes a minute"]
async fn batches_of_a_million_keys() {
    let rig = Rig::start(frame::DEFAULT_MAX_BODY, frame::DEFAULT_MAX_BODY).await;
    rig.use_every_batch(1_000_000).await;
}

/// A client that does not split, such as one of Mooncake C++, reads why its request is refused, and
/// its connection goes on.
#[tokio::test]
async fn a_request_that_is_too_long_is_refused_by_name() {
    let rig = Rig::start(SHORT, frame::DEFAULT_MAX_BODY).await;
    let mut stream = TcpStream::connect(rig.server.local_addr()).await.unwrap();
    let keys = vec![&b"a key of usual length"[..]; 100_000];
    for (seq, count) in [(1, 100_000), (2, 1), (3, 50_000), (4, 2)] {
        let mut request = Vec::new();
        let call = BatchExistKey { keys: keys[..count].into(), tenant: TENANT };
        frame::write_request(&mut request, seq, BatchExistKey::FUNCTION, |out| pack::encode(&call, out));
        // Two requests at once: the later one follows directly.
        if count > 2 {
            let call = ExistKey { key: b"one", tenant: TENANT };
            frame::write_request(&mut request, seq + 100, ExistKey::FUNCTION, |out| pack::encode(&call, out));
        }
        stream.write_all(&request).await.unwrap();
        let mut inbox = Vec::new();
        let replies = if count > 2 { vec![seq, seq + 100] } else { vec![seq] };
        for expected in replies {
            let used = loop {
                match frame::parse_reply(&inbox, usize::MAX).unwrap() {
                    Parsed::Whole(reply, used) => {
                        let status = if expected == seq && count > 2 { Status::TooLarge } else { Status::Ok };
                        assert_eq!((reply.seq, reply.status), (expected, status));
                        if status == Status::TooLarge {
                            let text = pack::decode::<&str>(reply.body).unwrap();
                            let says = ["cannot handle call", "len=", "max=65536", "ask about less"];
                            assert!(says.iter().all(|part| text.contains(part)), "{text}");
                        }
                        break used;
                    }
                    Parsed::Partial(_) => {
                        let count = timeout(SOON, stream.read_buf(&mut inbox)).await.unwrap().unwrap();
                        assert_ne!(count, 0, "the connection has ended");
                    }
                }
            };
            inbox.drain(..used);
        }
    }
}
