//! Peers that take memory of a server: requests that are not completed, responses that are not
//! read, and calls whose response would be too long.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::error::ErrorCode;
use mooncake_core::hints::PutHints;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::{Caller, EndItem, PutItem, WriteMode};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::data_message::{MessageKind, MessageReceiver, MessageSender, SenderOptions};
use mooncake_store::protocol::frame::{self, MAX_REPLY, Parsed, Status};
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::type_signature::function_id;
use mooncake_transport::admission::{ByteBudget, TransferRate};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

const TENANT: &str = "default";
const SOON: Duration = Duration::from_secs(20);
const MIB: usize = 1 << 20;

/// Function whose response has as many bytes as the number in its body.
const FILL: u32 = 7;

struct Filler;

impl Service for Filler {
    fn call(&self, _: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let count = body.first_chunk().map_or(0, |len| u32::from_le_bytes(*len));
        out.resize(out.len() + count as usize, 7);
        Ok(())
    }
}

fn fill(len: usize) -> Vec<u8> {
    let mut request = Vec::new();
    let body = u32::try_from(len).unwrap().to_le_bytes();
    frame::write_request(&mut request, 1, FILL, |out| out.extend(body));
    request
}

async fn filler(budget: &ByteBudget, rate: TransferRate) -> RunningServer {
    let options = ServerOptions { budget: budget.clone(), rate, ..ServerOptions::default() };
    Server::bind("127.0.0.1:0", options).await.unwrap().start(Arc::new(Filler))
}

fn budget(limit: usize) -> ByteBudget {
    ByteBudget::new(limit as u64, SystemClock::shared())
}

/// Connects with a small receive buffer.
async fn connect(server: &RunningServer) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    socket.connect(server.local_addr()).await.unwrap()
}

/// Sends the header of a request of 64 MiB, and `len` bytes of its body.
async fn send_part(server: &RunningServer, len: usize) -> TcpStream {
    let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
    let mut request = Vec::new();
    frame::write_request(&mut request, 1, FILL, |_| {});
    request[12..16].copy_from_slice(&(64_u32 << 20).to_le_bytes());
    request.resize(request.len() + len, 7);
    stream.write_all(&request).await.unwrap();
    stream
}

/// Waits until a condition holds.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(SOON, wait).await.unwrap_or_else(|_| panic!("{what}: not in time"));
}

/// Reads until the end of the connection. Returns the number of bytes.
async fn drain(stream: &mut TcpStream) -> usize {
    let mut received = Vec::new();
    let read = async {
        while stream.read_buf(&mut received).await.is_ok_and(|count| count > 0) {}
        received.len()
    };
    timeout(SOON, read).await.expect("the connection is still open")
}

async fn answers(server: &RunningServer) -> bool {
    let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
    stream.write_all(&fill(3)).await.unwrap();
    let mut reply = [0; frame::REPLY_HEAD + 3];
    timeout(SOON, stream.read_exact(&mut reply)).await.unwrap().is_ok()
}

#[tokio::test]
async fn half_requests_stay_within_the_budget() {
    let budget = budget(8 * MIB);
    let server = filler(&budget, TransferRate::DEFAULT).await;
    let mut held = Vec::new();
    for number in 0..40 {
        held.push(send_part(&server, MIB).await);
        let closed = budget.report().closed;
        until("bytes are counted", || {
            let report = budget.report();
            report.held >= (number + 1).min(4) * MIB as u64 || report.closed > closed
        })
        .await;
        assert!(budget.report().held <= 12 * MIB as u64, "{:?}", budget.report());
    }
    until("the oldest go", || budget.report().held <= 8 * MIB as u64).await;
    assert!(budget.report().closed >= 32, "{:?}", budget.report());
    assert_eq!(drain(&mut held[0]).await, 0, "the first one has ended");
    assert!(answers(&server).await);
    drop(held);
    until("everything is released", || budget.report().held == 0).await;
}

#[tokio::test]
async fn unread_responses_stay_within_the_budget() {
    let budget = budget(64 * MIB);
    let server = filler(&budget, TransferRate::DEFAULT).await;
    let mut held = Vec::new();
    for _ in 0..12 {
        let mut stream = connect(&server).await;
        stream.write_all(&fill(16 * MIB)).await.unwrap();
        stream.readable().await.unwrap();
        held.push(stream);
    }
    until("most go", || budget.report().closed >= 8 && budget.report().held <= 64 * MIB as u64).await;
    assert!(answers(&server).await);
    // The last one still gets its response.
    let last = held.last_mut().unwrap();
    let mut reply = vec![0; frame::REPLY_HEAD + 16 * MIB];
    timeout(SOON, last.read_exact(&mut reply)).await.unwrap().unwrap();
    let first = drain(&mut held[0]).await;
    assert!(first < 16 * MIB, "the first one has ended");
    drop(held);
    until("everything is released", || budget.report().held == 0).await;
}

/// Requests and responses that move without a wait are not counted, whatever their length.
#[tokio::test]
async fn proper_peers_are_never_closed() {
    let budget = budget(MIB);
    let server = filler(&budget, TransferRate::DEFAULT).await;
    let mut peers = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
        peers.push(tokio::spawn(async move {
            for _ in 0..200 {
                stream.write_all(&fill(1000)).await.unwrap();
                let mut reply = vec![0; frame::REPLY_HEAD + 1000];
                stream.read_exact(&mut reply).await.unwrap();
            }
        }));
    }
    for peer in peers {
        timeout(SOON, peer).await.unwrap().unwrap();
    }
    assert_eq!((budget.report().held, budget.report().closed), (0, 0));
    // One message is served even if it is longer than the limit.
    let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
    stream.write_all(&fill(8 * MIB)).await.unwrap();
    let mut reply = vec![0; frame::REPLY_HEAD + 8 * MIB];
    timeout(SOON, stream.read_exact(&mut reply)).await.unwrap().unwrap();
}

/// A byte now and then keeps neither a request nor a response alive.
#[tokio::test]
async fn slow_peers_are_closed() {
    let budget = budget(64 * MIB);
    // 64 MiB have 64 ms beyond the grace.
    let rate = TransferRate { grace: Duration::from_millis(300), bytes_per_second: 1 << 30 };
    let server = filler(&budget, rate).await;
    let mut sender = send_part(&server, MIB).await;
    let mut reader = connect(&server).await;
    reader.write_all(&fill(16 * MIB)).await.unwrap();
    until("both are counted", || budget.report().held >= 16 * MIB as u64).await;
    let sends = tokio::spawn(async move {
        while sender.write_all(&[7]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let reads = tokio::spawn(async move {
        while let Ok(1..) = reader.read(&mut [0; 1000]).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    until("both have a minimum rate", || budget.report().held == 0).await;
    assert_eq!(budget.report().closed, 0, "for their rate, not for their bytes");
    assert!(answers(&server).await);
    timeout(SOON, sends).await.expect("the sender sees the end").unwrap();
    reads.abort();
}

/// Service whose calls wait for permits.
struct Queue(Arc<Semaphore>);

impl Service for Queue {
    fn call(&self, _: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        out.extend_from_slice(&body[..3]);
        Ok(())
    }

    fn permits(&self, _: u32, body: usize) -> Option<&Semaphore> {
        (body > 4).then_some(&*self.0)
    }
}

/// Requests that are complete and wait for a permit count, and the oldest of them go.
#[tokio::test]
async fn requests_that_wait_for_a_permit_stay_within_the_budget() {
    let (budget, permits) = (budget(8 * MIB), Arc::new(Semaphore::new(0)));
    let options = ServerOptions { budget: budget.clone(), ..ServerOptions::default() };
    let server = Server::bind("127.0.0.1:0", options).await.unwrap();
    let server = server.start(Arc::new(Queue(permits.clone())));
    let mut held = Vec::new();
    for number in 0..30 {
        let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
        let mut request = Vec::new();
        frame::write_request(&mut request, 1, FILL, |out| out.resize(out.len() + MIB, 7));
        stream.write_all(&request).await.unwrap();
        held.push(stream);
        let closed = budget.report().closed;
        until("bytes are counted", || {
            let report = budget.report();
            report.held >= (number + 1).min(4) * MIB as u64 || report.closed > closed
        })
        .await;
        assert!(budget.report().held <= 12 * MIB as u64, "{:?}", budget.report());
    }
    until("the oldest go", || budget.report().held <= 8 * MIB as u64).await;
    assert!(budget.report().closed >= 20, "{:?}", budget.report());
    assert_eq!(drain(&mut held[0]).await, 0, "the first one has ended");
    // The call of the last one is made.
    permits.add_permits(8);
    let mut reply = [0; frame::REPLY_HEAD + 3];
    timeout(SOON, held[29].read_exact(&mut reply)).await.unwrap().unwrap();
    drop(held);
    until("everything is released", || budget.report().held == 0).await;
}

/// Messages that the receiver does not take count, too.
#[tokio::test]
async fn messages_that_wait_are_counted() {
    let (receiver, mut messages) = MessageReceiver::listen("127.0.0.1:0", 1).await.unwrap();
    let at = receiver.local_addr().to_string();
    let options = SenderOptions { max_connections: 8, timeout: SOON };
    let sender = Arc::new(MessageSender::new(options));
    let sends: Vec<_> = (0..6)
        .map(|_| {
            let (sender, at) = (sender.clone(), at.clone());
            tokio::spawn(async move { sender.send(&at, MessageKind::Data, &vec![7; 4 * MIB]).await })
        })
        .collect();
    until("four messages of 4 MiB wait", || receiver.bytes().held >= 16 * MIB as u64).await;
    for _ in 0..6 {
        assert_eq!(messages.next().await.unwrap().bytes.len(), 4 * MIB);
    }
    for send in sends {
        send.await.unwrap().unwrap();
    }
    drop(sender);
    until("everything is released", || receiver.bytes().held == 0).await;
}

/// A message that others wait for arrives at its rate from the first byte on.
#[tokio::test]
async fn a_slow_message_holds_its_space_for_a_short_time() {
    const LONGEST: u32 = 512 << 20;
    let (receiver, mut messages) = MessageReceiver::listen_within("127.0.0.1:0", 1, 1 << 20).await.unwrap();
    let at = receiver.local_addr();
    let mut slow = TcpStream::connect(at).await.unwrap();
    let mut head = Vec::new();
    let function = function_id("mooncake::RpcCommunicator::handleDataTransfer");
    frame::begin_attached(&mut head, 1, function, |_| {}, LONGEST);
    slow.write_all(&head).await.unwrap();
    until("the space is taken", || receiver.bytes().held >= 1 << 20).await;
    let options = SenderOptions { max_connections: 1, timeout: Duration::from_secs(120) };
    let sender = MessageSender::new(options);
    let value = vec![7; MIB];
    let address = at.to_string();
    let sent = sender.send(&address, MessageKind::Data, &value);
    // A byte now and then is progress, and not enough. The whole message would have 74 s.
    let trickle = async {
        while slow.write_all(&[1]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        std::future::pending::<()>().await;
    };
    let take = async {
        assert_eq!(messages.next().await.unwrap().bytes.len(), MIB);
    };
    let both = async { tokio::join!(sent, take).0.unwrap() };
    tokio::select! {
        () = trickle => {}
        outcome = timeout(Duration::from_secs(60), both) => outcome.expect("the message waits"),
    }
}

/// Master with one client, and an RPC server.
struct Rig {
    master: Arc<Master>,
    server: RunningServer,
    client: MasterClient,
}

const CALLER: Caller<'_> = Caller { client: ClientId(Uuid::new(1, 2)), tenant: TENANT, attempt: 0 };

impl Rig {
    async fn start() -> Self {
        let master = Arc::new(Master::new(MasterOptions::default()).unwrap());
        let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
        let server = server.start(Arc::new(MasterService(master.clone())));
        let options = RpcOptions { call_timeout: SOON * 3, ..RpcOptions::default() };
        let client = MasterClient::remote(server.local_addr().to_string(), options);
        let segment = Segment {
            id: SegmentId(Uuid::new(3, 4)),
            name: "host:1".into(),
            base: 0x1000,
            size: 1 << 30,
            endpoint: "a-node-with-a-name-of-usual-length.example:12345".into(),
            protocol: "tcp".into(),
            host_id: "host".into(),
            locality: None,
        };
        client.mount(CALLER.client, &segment).await.unwrap();
        Self { master, server, client }
    }

    async fn put(&self, key: &[u8], read_once: bool) {
        let hints = PutHints { delete_after_read: read_once, ..PutHints::default() };
        let config = ReplicateConfig { hints: Some(Box::new(hints)), ..ReplicateConfig::default() };
        let items = [PutItem { key, len: 7 }];
        let started = self.client.put_start(CALLER, WriteMode::Put, &items, &config).await.unwrap();
        assert!(started[0].is_ok());
        let ends = [EndItem { key, checksum: None }];
        let ended = self.client.put_end(CALLER, WriteMode::Put, &ends, ReplicaType::All).await.unwrap();
        assert!(ended[0].is_ok());
    }

    /// Sends a call on a connection of its own. Returns the status and the body.
    async fn call<R: Request>(&self, request: &R) -> (Status, Vec<u8>) {
        let mut stream = TcpStream::connect(self.server.local_addr()).await.unwrap();
        let mut out = Vec::new();
        // A server never refuses calls with small numbers for its load.
        frame::write_request(&mut out, 1, R::FUNCTION, |out| pack::encode(request, out));
        stream.write_all(&out).await.unwrap();
        let mut inbox = Vec::new();
        loop {
            if let Parsed::Whole(reply, _) = frame::parse_reply(&inbox, usize::MAX).unwrap() {
                return (reply.status, reply.body.to_vec());
            }
            let count = timeout(3 * SOON, stream.read_buf(&mut inbox)).await.unwrap().unwrap();
            assert_ne!(count, 0, "the connection has ended");
        }
    }

    /// Asserts that a call is refused for the length of its response.
    async fn refuses<R: Request>(&self, request: &R) {
        let (status, body) = self.call(request).await;
        assert_eq!(status, Status::TooLarge, "{}", R::NAME);
        let text = pack::decode::<&str>(&body).unwrap();
        assert!(text.starts_with("cannot answer ") && text.contains("; "), "{text}");
    }
}

/// A response that no client can read grants no lease and ends no object.
#[tokio::test]
async fn a_response_that_is_too_long_is_refused_before_a_lease() {
    let rig = Rig::start().await;
    rig.put(b"kept", false).await;
    rig.put(b"once", true).await;
    let keys: Vec<&[u8]> =
        [&b"once"[..]].into_iter().chain(std::iter::repeat_n(&b"kept"[..], 800_000)).collect();
    let list = || Cow::Borrowed(&keys[..]);
    rig.refuses(&BatchGetReplicaList { keys: list(), tenant: TENANT }).await;
    rig.refuses(&LocatePrefix { keys: list(), with_replicas: true, tenant: TENANT }).await;
    rig.refuses(&LocateAgain { keys: list(), located: Cow::Borrowed(&[]), tenant: TENANT }).await;
    assert_eq!(rig.master.leased_for(b"kept"), None);
    assert!(rig.master.exists(b"once"), "it has not been read");
    // Fewer keys are answered.
    let (status, _) = rig.call(&BatchGetReplicaList { keys: keys[1..5000].into(), tenant: TENANT }).await;
    assert_eq!(status, Status::Ok);
    assert!(rig.master.leased_for(b"kept").is_some());
    // Our own client asks about fewer keys at a time.
    let found = rig.client.locate(TENANT, &keys).await.unwrap();
    assert!(found.len() == keys.len() && found.iter().all(Result::is_ok));
}

#[tokio::test]
async fn writes_whose_response_is_too_long_are_not_started() {
    let rig = Rig::start().await;
    let names: Vec<String> = (0..5000).map(|number| number.to_string()).collect();
    let keys: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
    let config = ReplicateConfig::replicas(60);
    let start = BatchPutStart {
        client: CALLER.client,
        keys: keys.clone().into(),
        sizes: vec![1; 5000].into(),
        config: Cow::Borrowed(&config),
        tenant: TENANT,
    };
    rig.refuses(&start).await;
    assert_eq!(rig.master.stats().keys, 0);
    let config = ReplicateConfig::default();
    let (status, _) = rig.call(&BatchPutStart { config: Cow::Borrowed(&config), ..start }).await;
    assert_eq!(status, Status::Ok);
}

/// A pattern that matches too much is refused without a lease; pages return all of it.
#[tokio::test]
async fn patterns_are_answered_by_pages() {
    let rig = Rig::start().await;
    let key = |number: usize| format!("{number:05}").repeat(25_000).into_bytes();
    let count = MAX_REPLY / 125_000 + 2;
    for number in 0..count {
        rig.put(&key(number), number == 3).await;
    }
    rig.refuses(&GetReplicaListByRegex { pattern: ".", tenant: TENANT }).await;
    assert_eq!(rig.master.leased_for(&key(0)), None);
    assert!(rig.master.exists(&key(3)), "it has not been read");

    let mut found = rig.client.locate_matching(TENANT, ".").await.unwrap();
    found.sort_unstable_by(|one, other| one.0.cmp(&other.0));
    assert!(found.iter().map(|(key, _)| key).eq((0..count).map(key).collect::<Vec<_>>().iter()));
    assert!(found.iter().all(|(_, replicas)| replicas.len() == 1));
    assert!(rig.master.leased_for(&key(0)).is_some());
    assert!(!rig.master.exists(&key(3)), "it has been read");
    // Fewer objects fit into one response.
    let pattern = "^0000[0-2]";
    let (status, body) = rig.call(&GetReplicaListByRegex { pattern, tenant: TENANT }).await;
    assert_eq!(status, Status::Ok);
    let answer: <GetReplicaListByRegex<'_> as Request>::Reply = pack::decode(&body).unwrap();
    assert_eq!(answer.unwrap().0.len(), 3);
}

/// Master without pages, as earlier versions of this project and Mooncake C++.
struct WithoutPages(MasterService<Master>);

impl Service for WithoutPages {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        match function {
            LocateMatching::FUNCTION => Err((Status::NotRegistered, "unknown function".to_owned())),
            function => self.0.call(function, body, out),
        }
    }
}

#[tokio::test]
async fn a_master_without_pages_answers_at_once() {
    let rig = Rig::start().await;
    rig.put(b"a", false).await;
    rig.put(b"b", false).await;
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let older = server.start(Arc::new(WithoutPages(MasterService(rig.master.clone()))));
    let client = MasterClient::over(RpcClient::new(older.local_addr().to_string(), RpcOptions::default()));
    for _ in 0..2 {
        assert_eq!(client.locate_matching(TENANT, "^a$").await.unwrap().len(), 1);
    }
    let error = client.locate_matching(TENANT, "(").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidParams);
}
