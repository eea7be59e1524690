//! Client and server of the RPC protocol against each other, and each against misbehaving
//! connections.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::{Caller, EndItem, PingReply, PutItem, WriteMode};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::frame::{self, FIRST_SEQ, Parsed, Status};
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack::{self, Answer};
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service, Waiting};
use mooncake_store::protocol::service::MasterService;
use mooncake_transport::admission::listeners;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

const TENANT: &str = "default";
const SECOND: Duration = Duration::from_secs(1);

fn service() -> MasterService<Master> {
    MasterService(Arc::new(Master::new(MasterOptions::default()).unwrap()))
}

async fn start(address: &str, options: ServerOptions) -> RunningServer {
    let server = Server::bind(address, options).await.unwrap();
    server.start(Arc::new(service()))
}

async fn master() -> (RunningServer, MasterClient) {
    let running = start("127.0.0.1:0", ServerOptions::default()).await;
    let remote = MasterClient::remote(running.local_addr().to_string(), RpcOptions::default());
    (running, remote)
}

fn segment() -> Segment {
    Segment {
        id: SegmentId(Uuid::new(3, 4)),
        name: "host:1".into(),
        base: 0x1000,
        size: 1 << 20,
        endpoint: "host:2".into(),
        protocol: "tcp".into(),
        host_id: "host".into(),
        locality: None,
    }
}

fn exist(seq: u32, key: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    frame::write_request(&mut out, seq, ExistKey::FUNCTION, |out| {
        pack::encode(&ExistKey { key, tenant: TENANT }, out)
    });
    out
}

/// Returns the next response of a raw connection: number, status, body.
async fn next_reply(stream: &mut TcpStream, inbox: &mut Vec<u8>) -> Option<(u32, Status, Vec<u8>)> {
    loop {
        if let Parsed::Whole(reply, used) = frame::parse_reply(inbox, 1 << 20).unwrap() {
            let reply = (reply.seq, reply.status, reply.body.to_vec());
            inbox.drain(..used);
            return Some(reply);
        }
        if timeout(10 * SECOND, stream.read_buf(inbox)).await.unwrap().unwrap_or(0) == 0 {
            return None;
        }
    }
}

#[tokio::test]
async fn a_remote_master_is_a_master() {
    let (running, master) = master().await;
    let client = ClientId(Uuid::new(1, 2));
    let caller = Caller { client, tenant: TENANT, attempt: 0 };
    assert_eq!(master.version().await.unwrap(), MASTER_VERSION);
    assert!(master.ping(client).await.unwrap().need_remount);
    master.mount(client, &segment()).await.unwrap();
    assert!(!master.ping(client).await.unwrap().need_remount);
    master.remount(client, &[segment()]).await.unwrap();

    let config = ReplicateConfig::default();
    for mode in [WriteMode::Put, WriteMode::Upsert] {
        for keys in [vec![b"one".as_slice()], vec![b"\0", b"\n\xff", b"long".repeat(100).as_slice()], vec![]]
        {
            let items: Vec<_> = keys.iter().map(|key| PutItem { key, len: 7 }).collect();
            let ends: Vec<_> = keys.iter().map(|key| EndItem { key, checksum: None }).collect();
            let count = keys.len();
            let started = master.put_start(caller, mode, &items, &config).await.unwrap();
            assert_eq!(
                started.iter().filter(|replicas| replicas.as_ref().unwrap().len() == 1).count(),
                count
            );
            for replicas in [ReplicaType::All, ReplicaType::Memory] {
                let ended = master.put_end(caller, mode, &ends, replicas).await.unwrap();
                assert_eq!(ended.iter().filter(|end| end.is_ok()).count(), count);
            }
            let exist = master.exist(TENANT, &keys).await.unwrap();
            assert_eq!(exist.into_iter().filter(|exist| *exist.as_ref().unwrap()).count(), count);
            let located = master.locate(TENANT, &keys).await.unwrap();
            assert!(located.iter().all(|list| list.as_ref().unwrap().lease == 10 * SECOND));
            // The objects are leased.
            let removed = master.remove(TENANT, &keys, true).await.unwrap();
            assert_eq!(removed.iter().filter(|removed| removed.is_ok()).count(), count);
            for replicas in [ReplicaType::All, ReplicaType::Memory] {
                let revoked = master.put_revoke(caller, mode, &keys, replicas).await.unwrap();
                let gone = |outcome: &&mooncake_core::Result<()>| {
                    outcome.as_ref().is_err_and(|error| error.code() == ErrorCode::ObjectNotFound)
                };
                assert_eq!(revoked.iter().filter(gone).count(), count);
            }
        }
    }
    assert_eq!(master.remove_matching(TENANT, "x", false).await.unwrap(), 0);
    assert_eq!(master.remove_all(TENANT, false).await.unwrap(), 0);
    master.unmount(client, segment().id).await.unwrap();
    let items = [PutItem { key: b"none", len: 1 }];
    let full = master.put_start(caller, WriteMode::Put, &items, &config).await.unwrap();
    assert_eq!(full[0].as_ref().unwrap_err().code(), ErrorCode::NoAvailableHandle);
    running.stop().await;
}

/// Master of Mooncake C++, which refuses calls that are not in its table.
struct Existing(MasterService<Master>);

impl Service for Existing {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        if TABLE.iter().any(|shape| shape.function == function) {
            return self.0.call(function, body, out);
        }
        Err((Status::NotRegistered, "rpc function not registered".into()))
    }
}

#[tokio::test]
async fn a_master_without_our_own_calls_is_written_through_all_the_same() {
    let existing = Existing(service());
    let running =
        Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap().start(Arc::new(existing));
    let master = MasterClient::remote(running.local_addr().to_string(), RpcOptions::default());
    let caller = Caller { client: ClientId(Uuid::new(1, 2)), tenant: TENANT, attempt: 77 };
    master.mount(caller.client, &segment()).await.unwrap();
    assert!(master.fences_writes(), "not known before it is asked");
    let item = [PutItem { key: b"k", len: 7 }];
    let end = [EndItem { key: b"k", checksum: None }];
    for mode in [WriteMode::Put, WriteMode::Upsert] {
        let started = master.put_start(caller, mode, &item, &ReplicateConfig::default()).await.unwrap();
        assert_eq!(started[0].as_ref().unwrap().len(), 1);
        assert!(!master.fences_writes());
        assert!(master.put_end(caller, mode, &end, ReplicaType::All).await.unwrap()[0].is_ok());
    }
    let item = [PutItem { key: b"other", len: 7 }];
    master.put_start(caller, WriteMode::Put, &item, &ReplicateConfig::default()).await.unwrap();
    let revoked = master.put_revoke(caller, WriteMode::Put, &[b"other"], ReplicaType::All).await.unwrap();
    assert!(revoked[0].is_ok());
    master.report_unreachable(caller.client, "host:2").await.unwrap();
    // A master of this project may have replaced it.
    master.version().await.unwrap();
    assert!(master.fences_writes());
    // Otherwise the end must be sent again: without a number the call may be too late.
    let late = master.put_end(caller, WriteMode::Put, &end, ReplicaType::All).await.unwrap_err();
    assert_eq!((late.code(), master.fences_writes()), (ErrorCode::NotSupported, false));
    running.stop().await;
}

/// Service whose logical time grows with each call. It records the receipts of the calls.
#[derive(Default)]
struct Receipts(parking_lot::Mutex<Vec<u64>>);

impl Service for Receipts {
    fn call(&self, _: u32, _: &[u8], _: &mut Vec<u8>) -> Result<(), Refusal> {
        Err((Status::NotRegistered, String::new()))
    }

    fn receipt(&self) -> u64 {
        self.0.lock().len() as u64
    }

    fn call_received(&self, _: u32, _: &[u8], receipt: u64, out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.0.lock().push(receipt);
        pack::encode::<Answer<String>>(&Ok(String::new()), out);
        Ok(())
    }
}

/// A request may wait in the server while others are handled.
#[tokio::test]
async fn a_request_has_the_receipt_of_its_arrival() {
    let service = Arc::new(Receipts::default());
    let running = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap().start(service.clone());
    let mut stream = TcpStream::connect(running.local_addr()).await.unwrap();
    let mut requests = Vec::new();
    (1..=3).for_each(|seq| frame::write_request(&mut requests, seq, ServiceReady::FUNCTION, |_| {}));
    let (mut inbox, mut answered) = (Vec::new(), 0);
    for round in 1..=2 {
        stream.write_all(&requests).await.unwrap();
        while answered < 3 * round {
            match frame::parse_reply(&inbox, 1 << 20).unwrap() {
                Parsed::Whole(_, used) => {
                    inbox.drain(..used);
                    answered += 1;
                }
                Parsed::Partial(_) => assert!(stream.read_buf(&mut inbox).await.unwrap() > 0),
            }
        }
    }
    assert_eq!(*service.0.lock(), [0, 0, 0, 3, 3, 3]);
    running.stop().await;
}

/// Service that blocks one call until a signal, and serves the others.
struct Waits(tokio::sync::watch::Receiver<bool>);

impl Service for Waits {
    fn call(&self, _: u32, _: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let version: Answer<String> = Ok("at once".into());
        pack::encode(&version, out);
        Ok(())
    }

    fn begin(&self, function: u32, _: &[u8]) -> Option<Waiting> {
        let mut word = self.0.clone();
        (function == Ping::FUNCTION).then(|| {
            let waiting = async move {
                let _ = word.wait_for(|word| *word).await;
                let mut body = Vec::new();
                let reply: Answer<PingReply> = Ok(PingReply { view: 7, need_remount: false });
                pack::encode(&reply, &mut body);
                Ok(body)
            };
            Box::pin(waiting) as Waiting
        })
    }
}

#[tokio::test]
async fn a_call_that_waits_delays_no_other_call() {
    let (word, waits) = tokio::sync::watch::channel(false);
    let running =
        Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap().start(Arc::new(Waits(waits)));
    let master = MasterClient::remote(running.local_addr().to_string(), RpcOptions::default());
    let mut waiting = std::pin::pin!(master.ping(ClientId(Uuid::new(1, 2))));
    assert!((&mut waiting).now_or_never().is_none());
    // The other call has a connection of its own, and is served while the first one waits.
    for _ in 0..3 {
        assert_eq!(master.version().await.unwrap(), "at once");
        assert!((&mut waiting).now_or_never().is_none());
    }
    word.send_replace(true);
    assert_eq!(waiting.await.unwrap().view, 7);
    assert_eq!(master.version().await.unwrap(), "at once", "the connection goes on");
    // A call that still waits when the server stops gets no response, and does not delay the stop.
    word.send_replace(false);
    let mut waiting = std::pin::pin!(master.ping(ClientId(Uuid::new(1, 2))));
    assert!((&mut waiting).now_or_never().is_none());
    assert_eq!(master.version().await.unwrap(), "at once");
    running.stop().await;
    assert!(waiting.await.is_err());
}

#[tokio::test]
async fn a_call_that_waits_is_dropped_with_its_connection() {
    let (word, waits) = tokio::sync::watch::channel(false);
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let running = server.start(Arc::new(Waits(waits)));
    let mut request = Vec::new();
    let ping = |out: &mut Vec<u8>| pack::encode(&Ping { client: ClientId(Uuid::new(1, 2)) }, out);
    frame::write_request(&mut request, 1, Ping::FUNCTION, ping);
    let under_way = async |calls: usize| {
        while word.receiver_count() != 1 + calls {
            tokio::task::yield_now().await;
        }
    };
    // A request behind the blocked one waits, and is not lost.
    let (mut stream, mut inbox) = (TcpStream::connect(running.local_addr()).await.unwrap(), Vec::new());
    stream.write_all(&request).await.unwrap();
    timeout(10 * SECOND, under_way(1)).await.unwrap();
    stream.write_all(&exist(2, &[b'k'; 10_000])).await.unwrap();
    stream.write_all(&exist(3, b"k")).await.unwrap();
    word.send_replace(true);
    for seq in 1..=3 {
        assert_eq!(next_reply(&mut stream, &mut inbox).await.unwrap().0, seq);
    }
    word.send_replace(false);
    for behind in [vec![], exist(2, b"k")] {
        let mut stream = TcpStream::connect(running.local_addr()).await.unwrap();
        stream.write_all(&request).await.unwrap();
        timeout(10 * SECOND, under_way(1)).await.unwrap();
        stream.write_all(&behind).await.unwrap();
        drop(stream);
        timeout(10 * SECOND, under_way(0)).await.expect("nobody waits for it any more");
    }
}

#[tokio::test]
async fn every_call_of_the_table_is_answered_by_a_master() {
    let (running, _) = master().await;
    let mut stream = TcpStream::connect(running.local_addr()).await.unwrap();
    let mut inbox = Vec::new();
    for shape in TABLE {
        let mut request = Vec::new();
        // The arguments are invalid: the response shows that the function exists and checks its
        // arguments.
        frame::write_request(&mut request, 9, shape.function, |out| out.extend_from_slice(&[0; 64]));
        stream.write_all(&request).await.unwrap();
        let (seq, status, body) = next_reply(&mut stream, &mut inbox).await.unwrap();
        assert_eq!((seq, status), (9, Status::InvalidArguments), "{}", shape.name);
        let text = pack::decode::<String>(&body).unwrap();
        assert!(text.starts_with(shape.name) && text.contains(TABLE_VERSION), "{text}");
    }
}

/// Service that refuses every call with this status.
struct Older(Status);

impl Service for Older {
    fn call(&self, _: u32, _: &[u8], _: &mut Vec<u8>) -> Result<(), Refusal> {
        Err((self.0, "of another time".to_owned()))
    }
}

#[tokio::test]
async fn a_peer_of_another_version_is_told_apart() {
    for (status, code) in [
        (Status::NotRegistered, ErrorCode::NotSupported),
        (Status::InvalidArguments, ErrorCode::InvalidVersion),
        (Status::HandlerFailed, ErrorCode::RpcFail),
    ] {
        let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
        let running = server.start(Arc::new(Older(status)));
        let address = running.local_addr().to_string();
        let client = RpcClient::new(&address, RpcOptions::default());
        let error = client.call(&GetFsdir {}).await.unwrap_err();
        assert_eq!(error.code(), code);
        let text = error.to_string();
        assert!(
            text.contains("GetFsdir") && text.contains(&address) && text.contains("of another time"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn an_extension_in_another_shape_counts_as_absent() {
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let running = server.start(Arc::new(Older(Status::InvalidArguments)));
    let client = RpcClient::new(running.local_addr().to_string(), RpcOptions::default());
    let error = client.call(&ReleaseKept { client: Default::default(), segment: Default::default() }).await;
    let error = error.unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotSupported);
    assert!(error.to_string().contains("of another time"), "{error}");
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let (running, _) = master().await;
    let mut stream = TcpStream::connect(running.local_addr()).await.unwrap();
    let requests: Vec<u8> = (0..1000).flat_map(|seq| exist(seq, b"key")).collect();
    // The requests are torn at an arbitrary position.
    let (head, tail) = requests.split_at(requests.len() - 7);
    stream.write_all(head).await.unwrap();
    let mut inbox = Vec::new();
    for seq in 0..999 {
        let (answered, status, body) = next_reply(&mut stream, &mut inbox).await.unwrap();
        assert_eq!((answered, status), (seq, Status::Ok));
        assert_eq!(pack::decode::<pack::Answer<bool>>(&body), Ok(Ok(false)));
    }
    stream.write_all(tail).await.unwrap();
    assert_eq!(next_reply(&mut stream, &mut inbox).await.unwrap().0, 999);
}

#[tokio::test]
async fn garbage_closes_its_connection_and_no_other() {
    let (running, master) = master().await;
    master.version().await.unwrap();
    let mut huge = exist(1, b"key");
    huge[12..20].fill(0xff);
    let garbage: [&[u8]; 5] =
        [b"GET /metrics HTTP/1.1\r\n\r\n", &[0; 64], &[21, 7, 0, 0], &[0xff; 4096], &huge];
    for bytes in garbage {
        let mut stream = TcpStream::connect(running.local_addr()).await.unwrap();
        let mut sent = exist(7, b"key");
        sent.extend_from_slice(bytes);
        stream.write_all(&sent).await.unwrap();
        let mut inbox = Vec::new();
        // Requests before the invalid bytes are served; then the connection ends.
        assert_eq!(next_reply(&mut stream, &mut inbox).await.unwrap().0, 7);
        assert_eq!(next_reply(&mut stream, &mut inbox).await, None);
    }
    master.version().await.unwrap();
}

#[tokio::test]
async fn a_reader_that_does_not_read_stops_being_read_from() {
    let (running, _) = master().await;
    let socket = TcpSocket::new_v4().unwrap();
    // With a few kilobytes only, kernels may wait 200 ms for free space for each segment.
    socket.set_recv_buffer_size(64 << 10).unwrap();
    let stream = socket.connect(running.local_addr()).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let count = 600_000;
    let requests: Vec<u8> = (0..count).flat_map(|seq| exist(seq, b"k")).collect();
    let total = requests.len();
    let mut sent = 0;
    // The requests exceed every buffer on the way. They get stuck, because the server buffers no
    // more.
    while let Ok(wrote) = timeout(SECOND / 2, writer.write(&requests[sent..])).await {
        sent += wrote.unwrap();
        assert!(sent < total, "the server took {total} bytes without being read from");
    }
    let rest = tokio::spawn(async move { writer.write_all(&requests[sent..]).await.map(|()| writer) });
    let (mut inbox, mut next) = (Vec::with_capacity(1 << 20), 0);
    while next < count {
        assert_ne!(timeout(10 * SECOND, reader.read_buf(&mut inbox)).await.unwrap().unwrap(), 0);
        let mut done = 0;
        while let Parsed::Whole(reply, used) = frame::parse_reply(&inbox[done..], 100).unwrap() {
            assert_eq!(reply.seq, next);
            next += 1;
            done += used;
        }
        inbox.drain(..done);
    }
    rest.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_connection_closed_while_idle_costs_one_retry() {
    let running = start("127.0.0.1:0", ServerOptions::default()).await;
    let address = running.local_addr().to_string();
    let master = MasterClient::remote(&address, RpcOptions::default());
    for _ in 0..3 {
        master.version().await.unwrap();
    }
    running.stop().await;
    let error = master.version().await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::RpcFail);
    let text = error.to_string();
    assert!(text.contains(&address) && text.contains("is mooncake_master running there?"), "{text}");
    let running = start(&address, ServerOptions::default()).await;
    master.version().await.unwrap();
    // This connection ends by the limit of the server itself.
    running.stop().await;
    let _running = start(&address, ServerOptions::default()).await;
    master.version().await.unwrap();
}

/// Starts a server that sends one script per connection and closes.
async fn scripted(scripts: Vec<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        for script in scripts {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 20];
            stream.read_exact(&mut request).await.unwrap();
            stream.write_all(&script).await.unwrap();
        }
    });
    address
}

fn version_reply(seq: u32) -> Vec<u8> {
    let mut out = Vec::new();
    let answer: pack::Answer<String> = Ok("2.0.0".to_owned());
    frame::write_reply(&mut out, FIRST_SEQ + seq, |out| {
        pack::encode_spelled(&answer, out);
        Ok(())
    });
    out
}

#[tokio::test]
async fn invalid_responses_are_refused_by_name() {
    let mut claims = version_reply(1);
    claims[8..12].fill(0xff);
    let mut wrong_type = Vec::new();
    frame::write_reply(&mut wrong_type, FIRST_SEQ + 1, |out| {
        pack::encode_spelled(&true, out);
        Ok(())
    });
    let twice = [version_reply(1), version_reply(1)].concat();
    for (script, code, says) in [
        (claims, ErrorCode::RpcFail, "len=4294967295 max="),
        (version_reply(5), ErrorCode::RpcFail, "asked 1, answered 5"),
        (version_reply(1)[..20].to_vec(), ErrorCode::RpcFail, "closed by the other side"),
        (Vec::new(), ErrorCode::RpcFail, "closed by the other side"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), ErrorCode::RpcFail, "invalid RPC frame"),
        (wrong_type, ErrorCode::InvalidVersion, "type hash"),
        (twice, ErrorCode::RpcFail, "asked 1, answered 1"),
    ] {
        let address = scripted(vec![script]).await;
        let error = RpcClient::new(&address, RpcOptions::default()).call(&ServiceReady {}).await.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.code(), code, "{text}");
        assert!(text.contains(says) && text.contains(&address) && text.contains("ServiceReady"), "{text}");
    }
}

#[tokio::test]
async fn half_a_response_is_not_requested_again() {
    // The first connection serves one call and is then idle; the second call gets half a response
    // on it.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = RpcClient::new(listener.local_addr().unwrap().to_string(), RpcOptions::default());
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 20];
        stream.read_exact(&mut request).await.unwrap();
        stream.write_all(&version_reply(1)).await.unwrap();
        stream.read_exact(&mut request).await.unwrap();
        stream.write_all(&version_reply(2)[..9]).await.unwrap();
        drop(stream);
        // The client sends no third request.
        timeout(SECOND / 5, listener.accept()).await.is_err()
    });
    client.call(&ServiceReady {}).await.unwrap().unwrap();
    assert_eq!(client.call(&ServiceReady {}).await.unwrap_err().code(), ErrorCode::RpcFail);
    assert!(server.await.unwrap(), "the call was repeated");
}

#[tokio::test]
async fn a_call_that_is_given_up_takes_its_connection_along() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let options = RpcOptions { max_connections: 1, ..RpcOptions::default() };
    let client = RpcClient::new(listener.local_addr().unwrap().to_string(), options);
    let (asked, was_asked) = tokio::sync::oneshot::channel();
    let server = tokio::spawn(async move {
        let (mut first, _) = listener.accept().await.unwrap();
        let mut request = [0; 20];
        first.read_exact(&mut request).await.unwrap();
        // Half a response arrives, and the caller gives up.
        first.write_all(&version_reply(1)[..25]).await.unwrap();
        asked.send(()).unwrap();
        let (mut second, _) = listener.accept().await.unwrap();
        second.read_exact(&mut request).await.unwrap();
        second.write_all(&version_reply(1)).await.unwrap();
        assert!(matches!(first.read(&mut request).await, Ok(0) | Err(_)), "the first connection is closed");
    });
    tokio::select! {
        answer = client.call(&ServiceReady {}) => panic!("{answer:?}"),
        asked = was_asked => asked.unwrap(),
    }
    assert_eq!(client.call(&ServiceReady {}).await.unwrap(), Ok("2.0.0".to_owned()));
    server.await.unwrap();
}

#[tokio::test]
async fn deadlines_hold_and_say_who_was_late() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let options = RpcOptions { call_timeout: SECOND / 10, max_connections: 1, ..RpcOptions::default() };
    let client = RpcClient::new(&address, options);
    // The listener neither accepts nor responds; the second call waits for the connection of the
    // first one as well.
    let (one, two) = tokio::join!(client.call(&ServiceReady {}), client.call(&ServiceReady {}));
    for error in [one.unwrap_err(), two.unwrap_err()] {
        assert_eq!(error.code(), ErrorCode::RpcTimeout);
        assert!(error.to_string().contains(&address), "{error}");
    }
}

#[tokio::test]
async fn calls_share_a_bounded_number_of_connections() {
    let running = start(
        "127.0.0.1:0",
        ServerOptions { listener: "three", max_connections: 3, ..ServerOptions::default() },
    )
    .await;
    let report = || listeners().into_iter().find(|report| report.listener == "three").unwrap();
    let address = running.local_addr().to_string();
    let options = RpcOptions { max_connections: 3, ..RpcOptions::default() };
    let client = Arc::new(RpcClient::new(&address, options));
    let calls: Vec<_> = (0..200)
        .map(|i| {
            let client = Arc::clone(&client);
            tokio::spawn(async move {
                let keys = vec![format!("key {i}").into_bytes(); 50];
                let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
                client.call(&BatchExistKey { keys: Cow::Owned(keys), tenant: TENANT }).await
            })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), vec![Ok(false); 50]);
    }
    // The server accepts three; a fourth connection would have closed one of them.
    assert_eq!((report().open, report().evicted, report().full), (3, 0, 0));
}

/// At the limit, idle connections of live clients are closed, and no call is lost: the client of a
/// closed connection opens another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn more_clients_than_slots_lose_no_call() {
    let options = ServerOptions { listener: "crowded", max_connections: 4, ..ServerOptions::default() };
    let running = start("127.0.0.1:0", options).await;
    let address = running.local_addr().to_string();
    let all = Arc::new(tokio::sync::Barrier::new(12));
    let clients = (0..12).map(|i| {
        let client = RpcClient::new(&address, RpcOptions { max_connections: 1, ..RpcOptions::default() });
        let all = all.clone();
        tokio::spawn(async move {
            let key = format!("key {i}").into_bytes();
            let keys: Vec<&[u8]> = vec![&key; 3];
            for _ in 0..10 {
                let request = BatchExistKey { keys: Cow::Borrowed(&keys), tenant: TENANT };
                assert_eq!(client.call(&request).await.unwrap(), vec![Ok(false); 3]);
                // Every client has a connection now.
                all.wait().await;
            }
        })
    });
    // The others of a client that fails would wait for it.
    futures::future::try_join_all(clients).await.unwrap();
    let report = listeners().into_iter().find(|report| report.listener == "crowded").unwrap();
    assert!(report.evicted > 0 && report.open <= 4, "{report:?}");
}

#[tokio::test]
async fn requests_and_responses_of_megabytes() {
    let (running, master) = master().await;
    let keys: Vec<Vec<u8>> = (0..2000u32).map(|i| i.to_string().repeat(2000).into_bytes()).collect();
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let exist = master.exist(TENANT, &keys).await.unwrap();
    assert!(exist.len() == 2000 && exist.iter().all(|exist| !exist.as_ref().unwrap()));

    let options = RpcOptions { max_body: 1 << 20, ..RpcOptions::default() };
    let small = MasterClient::remote(running.local_addr().to_string(), options);
    let exist = small.exist(TENANT, &keys).await.unwrap();
    assert!(exist.len() == 2000 && exist.iter().all(Result::is_ok), "in parts");
    // One key that is too long for a message cannot be split.
    let long = vec![7; 2 << 20];
    let error = small.exist(TENANT, &[&long]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidParams, "{error}");

    let options = ServerOptions { max_body: 1 << 20, ..ServerOptions::default() };
    let strict = start("127.0.0.1:0", options).await;
    let remote = MasterClient::remote(strict.local_addr().to_string(), RpcOptions::default());
    let exist = remote.exist(TENANT, &keys).await.unwrap();
    assert!(exist.len() == 2000 && exist.iter().all(Result::is_ok), "in parts");
    assert!(remote.exist(TENANT, &keys[..10]).await.is_ok());
    let error = remote.exist(TENANT, &[&long]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidParams, "{error}");
    assert!(error.to_string().contains("ask about less"), "{error}");
}

#[tokio::test]
async fn idle_connections_are_closed_when_configured() {
    let options = ServerOptions { idle_timeout: Some(SECOND / 20), ..ServerOptions::default() };
    let running = start("127.0.0.1:0", options).await;
    let mut stream = TcpStream::connect(running.local_addr()).await.unwrap();
    stream.write_all(&exist(1, b"key")[..10]).await.unwrap();
    assert_eq!(timeout(10 * SECOND, stream.read(&mut [0; 10])).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let (running, _) = master().await;
    let address = running.local_addr().to_string();
    let error = Server::bind(&address, ServerOptions::default()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("port {} is in use", running.local_addr().port())), "{text}");
    assert!(text.contains("--rpc_port"), "{text}");
}
