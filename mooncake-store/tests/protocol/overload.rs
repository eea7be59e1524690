//! Master with ten times the requests that it can serve: heartbeats are served in time, abandoned
//! requests are dropped, and the normal state returns afterwards.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "the bounds are of real time; figures of a run"
)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use mooncake_core::clock::ManualClock;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::Segment;
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::frame::{self, FIRST_SEQ, Parsed, Status};
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::{ExistKey, Ping, Request};
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::{Class, Refusal, Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Duration of a read in the master. One thread serves all reads.
const COST: Duration = Duration::from_millis(4);
/// Number of clients, and the number of concurrent reads of each client.
const CLIENTS: u64 = 10;
const READS: usize = 60;
const TTL: Duration = Duration::from_secs(4);
/// Time for the connections of the clients, beyond the time of the load.
const CONNECTING: Duration = Duration::from_secs(15);

/// Master with slow reads.
struct Slow {
    calls: MasterService<Master>,
    served: AtomicU64,
    shed: AtomicU64,
}

impl Service for Slow {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        if function == ExistKey::FUNCTION {
            self.served.fetch_add(1, Relaxed);
            // The sleep stands for work of the processor, which the clients of the test need
            // themselves.
            std::thread::sleep(COST);
        }
        self.calls.call(function, body, out)
    }

    fn class(&self, function: u32) -> Class {
        self.calls.class(function)
    }

    fn has_heartbeats(&self) -> bool {
        true
    }

    fn note_shed(&self) {
        self.shed.fetch_add(1, Relaxed);
    }
}

/// Server with one thread of its own, which stops on drop.
struct OneThread {
    address: String,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl OneThread {
    fn start(service: Arc<impl Service>, options: ServerOptions) -> Self {
        let (tell, told) = mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let server = Server::bind("127.0.0.1:0", options).await.unwrap();
                let running = server.start(service);
                tell.send(running.local_addr().to_string()).unwrap();
                let _ = stopped.await;
                running.cut_off().await;
            });
        });
        Self { address: told.recv().unwrap(), stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for OneThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn segment(number: u64) -> Segment {
    Segment {
        id: SegmentId(Uuid::new(2, number)),
        name: format!("node{number}:1"),
        base: (number + 1) << 40,
        size: 1 << 20,
        endpoint: format!("node{number}:1"),
        protocol: "tcp".into(),
        host_id: format!("node{number}"),
        locality: None,
    }
}

/// Reads until the test stops it. Returns the number of responses.
async fn read(master: &MasterClient, at_once: usize, stop: &AtomicBool) -> u64 {
    let answered = AtomicU64::new(0);
    let one = async || {
        while !stop.load(Relaxed) {
            match master.exist("default", &[b"key"]).await {
                Ok(_) => drop(answered.fetch_add(1, Relaxed)),
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    futures::future::join_all((0..at_once).map(|_| one())).await;
    answered.load(Relaxed)
}

/// Returns the number of reads per second for four callers.
async fn throughput(master: &MasterClient, span: Duration) -> f64 {
    let stop = AtomicBool::new(false);
    let begun = Instant::now();
    let (answered, ()) = tokio::join!(read(master, 4, &stop), async {
        tokio::time::sleep(span).await;
        stop.store(true, Relaxed);
    });
    answered as f64 / begun.elapsed().as_secs_f64()
}

async fn overload(span: Duration) {
    let master =
        Arc::new(Master::new(MasterOptions { client_ttl: TTL, ..MasterOptions::default() }).unwrap());
    let service = Arc::new(Slow {
        calls: MasterService(master.clone()),
        served: AtomicU64::new(0),
        shed: AtomicU64::new(0),
    });
    let server = OneThread::start(service.clone(), ServerOptions::default());
    let options = RpcOptions::default();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| Arc::new(MasterClient::remote(server.address.clone(), options.clone())))
        .collect();
    for (number, client) in (0..).zip(&clients) {
        client.mount(ClientId(Uuid::new(1, number)), &segment(number)).await.unwrap();
    }
    let before = throughput(&clients[0], Duration::from_millis(500)).await;

    let stop = Arc::new(AtomicBool::new(false));
    let mut load = JoinSet::new();
    let mut hearts = JoinSet::new();
    for (number, client) in (0..).zip(&clients) {
        let (reader, stopped) = (client.clone(), stop.clone());
        load.spawn(async move { read(&reader, READS, &stopped).await });
        let (client, stopped) = (client.clone(), stop.clone());
        hearts.spawn(async move {
            let mut took = Vec::new();
            while !stopped.load(Relaxed) {
                let begun = Instant::now();
                let reply = client.ping(ClientId(Uuid::new(1, number))).await;
                took.push(begun.elapsed());
                assert!(!reply.is_ok_and(|reply| reply.need_remount), "client {number} was taken for dead");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            took
        });
    }
    let begun = Instant::now();
    // A server that accepts connections slowly reaches its limit later.
    let is_overloaded = || service.shed.load(Relaxed) > 0;
    while begun.elapsed() < span || !is_overloaded() && begun.elapsed() < span + CONNECTING {
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(master.tick().expired.is_empty(), "no client expires");
    }
    stop.store(true, Relaxed);
    let mut took: Vec<_> = hearts.join_all().await.concat();
    let answered: u64 = load.join_all().await.iter().sum();
    took.sort_unstable();
    let p99 = took[took.len() * 99 / 100];
    let shed = service.shed.load(Relaxed);
    println!(
        "{} heartbeats, p99 {p99:?}, longest {:?}; {answered} reads answered, {shed} refused",
        took.len(),
        took[took.len() - 1]
    );
    assert!(p99 < Duration::from_secs(1), "p99 of heartbeats is {p99:?}");
    assert!(shed > 0, "reads that wait for longer than {:?} are refused", Duration::from_millis(500));

    let ended = Instant::now();
    loop {
        let after = throughput(&clients[0], Duration::from_millis(500)).await;
        println!("{before:.0} reads/s before, {after:.0} after {:?}", ended.elapsed());
        if after > 0.8 * before {
            break;
        }
        assert!(ended.elapsed() < Duration::from_secs(5), "{before} reads/s before, {after} after");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_client_expires_under_ten_times_the_load() {
    overload(Duration::from_secs(6)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a minute"]
async fn no_client_expires_under_ten_times_the_load_for_60_s() {
    overload(Duration::from_secs(60)).await;
}

/// Service that blocks one call until the test releases it, and serves all others at once.
struct Gated {
    seen: parking_lot::Mutex<BTreeSet<Vec<u8>>>,
    blocked: Vec<u8>,
    begun: parking_lot::Mutex<mpsc::Sender<()>>,
    go: parking_lot::Mutex<mpsc::Receiver<()>>,
}

impl Service for Gated {
    fn call(&self, _: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        if body == self.blocked {
            self.begun.lock().send(()).unwrap();
            self.go.lock().recv().unwrap();
        }
        self.seen.lock().insert(body.to_vec());
        pack::encode::<Result<bool, mooncake_core::ErrorCode>>(&Ok(true), out);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_caller_has_given_up_is_not_served() {
    let listener = "abandoned requests";
    let call = |key: &'static [u8]| ExistKey { key, tenant: "default" };
    let body = |key| {
        let mut body = Vec::new();
        pack::encode(&call(key), &mut body);
        body
    };
    let ((tell, begun), (go_on, go)) = (mpsc::channel(), mpsc::channel());
    let service = Gated {
        seen: parking_lot::Mutex::default(),
        blocked: body(b"first"),
        begun: parking_lot::Mutex::new(tell),
        go: parking_lot::Mutex::new(go),
    };
    let service = Arc::new(service);
    let options = ServerOptions { listener, ..ServerOptions::default() };
    let server = OneThread::start(service.clone(), options);
    let patient = RpcClient::new(server.address.clone(), RpcOptions::default());
    let hasty = RpcOptions { call_timeout: Duration::from_millis(200), ..RpcOptions::default() };
    let hasty = RpcClient::new(server.address.clone(), hasty);
    // Requests on an open connection reach the server without a further accept. A slow machine may
    // need more than one attempt.
    while hasty.call(&call(b"connect")).await.is_err() {}
    let first = tokio::spawn(async move {
        patient.call(&call(b"first")).await.unwrap().unwrap();
        patient
    });
    tokio::task::spawn_blocking(move || begun.recv().unwrap()).await.unwrap();
    hasty.call(&call(b"given up")).await.expect_err("the server is busy");
    go_on.send(()).unwrap();
    let patient = first.await.unwrap();
    patient.call(&call(b"last")).await.unwrap().unwrap();
    // The server closes the connection of the hasty client with the request or after its response.
    let since = Instant::now();
    while open_connections(listener) > 1 {
        assert!(since.elapsed() < Duration::from_secs(10), "the server keeps a reset connection");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let seen = service.seen.lock();
    assert!(seen.contains(&body(b"first")) && seen.contains(&body(b"last")));
    assert!(!seen.contains(&body(b"given up")), "nobody waited for it");
}

fn open_connections(listener: &str) -> u64 {
    let reports = mooncake_transport::admission::listeners();
    reports.iter().find(|report| report.listener == listener).map_or(0, |report| report.open)
}

/// Service that keeps its thread busy, so that the server counts as overloaded.
struct Busy(AtomicU64);

impl Service for Busy {
    fn call(&self, function: u32, _: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        if function == Ping::FUNCTION {
            std::thread::sleep(Duration::from_millis(700));
        }
        pack::encode::<Result<bool, mooncake_core::ErrorCode>>(&Ok(true), out);
        Ok(())
    }

    fn class(&self, function: u32) -> Class {
        // Pings stand for other calls here.
        if function == Ping::FUNCTION { Class::Critical } else { Class::Sheddable }
    }

    fn note_shed(&self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Mooncake C++ has no response that means "retry later": its calls wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_clients_that_understand_it_are_asked_to_come_back_later() {
    let service = Arc::new(Busy(AtomicU64::new(0)));
    let server = OneThread::start(service.clone(), ServerOptions::default());
    let stop = Arc::new(AtomicBool::new(false));
    let (address, stopped) = (server.address.clone(), stop.clone());
    let busy = tokio::spawn(async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        while !stopped.load(Relaxed) {
            asked(&mut stream, 1, Ping::FUNCTION).await;
        }
    });
    let mut ours = TcpStream::connect(&*server.address).await.unwrap();
    let mut other = TcpStream::connect(&*server.address).await.unwrap();
    let mut refused = 0;
    for number in 0..200 {
        assert_eq!(asked(&mut other, number, ExistKey::FUNCTION).await, Status::Ok);
        match asked(&mut ours, FIRST_SEQ + number, ExistKey::FUNCTION).await {
            Status::Ok => {}
            Status::Overloaded => refused += 1,
            status => panic!("{status:?}"),
        }
        if refused > 1 {
            break;
        }
    }
    assert!(refused > 1 && service.0.load(Relaxed) == refused);
    stop.store(true, Relaxed);
    busy.await.unwrap();
}

/// A miss would mean that the object does not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_calls_wait_for_their_turn() {
    const CALLS: u64 = 400;
    let service = Arc::new(Busy(AtomicU64::new(0)));
    let server = OneThread::start(service.clone(), ServerOptions::default());
    let stop = Arc::new(AtomicBool::new(false));
    let (address, stopped) = (server.address.clone(), stop.clone());
    let busy = tokio::spawn(async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        while !stopped.load(Relaxed) {
            asked(&mut stream, 1, Ping::FUNCTION).await;
        }
    });
    let mut probe = TcpStream::connect(&*server.address).await.unwrap();
    while asked(&mut probe, FIRST_SEQ, ExistKey::FUNCTION).await != Status::Overloaded {}
    let options = RpcOptions {
        max_connections: CALLS as usize,
        connect_timeout: Duration::from_secs(100),
        call_timeout: Duration::from_secs(100),
        ..RpcOptions::default()
    };
    let client = RpcClient::new(server.address.clone(), options);
    let call = ExistKey { key: b"key", tenant: "default" };
    let calls = async {
        let answers = futures::future::join_all((0..CALLS).map(|_| client.call(&call))).await;
        stop.store(true, Relaxed);
        answers
    };
    // Every call was refused once, and the budget of retries is spent.
    let relief = async {
        while service.0.load(Relaxed) < CALLS + 100 && !stop.load(Relaxed) {
            tokio::task::yield_now().await;
        }
        stop.store(true, Relaxed);
    };
    let (answers, ()) = tokio::join!(calls, relief);
    let refused = answers.iter().filter_map(|answer| answer.as_ref().err());
    assert_eq!(refused.map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    busy.await.unwrap();
}

/// A server that stays overloaded is named in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_overload_without_end_is_an_error() {
    let service = Arc::new(Busy(AtomicU64::new(0)));
    let server = OneThread::start(service, ServerOptions::default());
    let address = server.address.clone();
    let busy = tokio::spawn(async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        loop {
            asked(&mut stream, 1, Ping::FUNCTION).await;
        }
    });
    let mut probe = TcpStream::connect(&*server.address).await.unwrap();
    while asked(&mut probe, FIRST_SEQ, ExistKey::FUNCTION).await != Status::Overloaded {}
    let options = RpcOptions { call_timeout: Duration::from_secs(6), ..RpcOptions::default() };
    let client = RpcClient::new(server.address.clone(), options);
    let error = client.call(&ExistKey { key: b"key", tenant: "default" }).await.unwrap_err();
    busy.abort();
    assert_eq!(error.code(), mooncake_core::ErrorCode::RpcFail);
    assert!(error.to_string().contains("more requests than it can answer"), "{error}");
}

async fn asked(stream: &mut TcpStream, seq: u32, function: u32) -> Status {
    let mut request = Vec::new();
    frame::write_request(&mut request, seq, function, |_| {});
    stream.write_all(&request).await.unwrap();
    let mut inbox = Vec::new();
    loop {
        if let Parsed::Whole(reply, _) = frame::parse_reply(&inbox, 1 << 20).unwrap() {
            assert_eq!(reply.seq, seq);
            return reply.status;
        }
        assert!(stream.read_buf(&mut inbox).await.unwrap() > 0);
    }
}

/// Two hundred clients of a restarted master call it at the same moment and announce one after
/// another.
#[test]
fn clients_of_a_restarted_master_announce_one_after_another() {
    let clock = Arc::new(ManualClock::new());
    let master: Master = Master::with_parts(
        MasterOptions::default(),
        &Default::default(),
        &Default::default(),
        clock.clone(),
        1,
    )
    .unwrap();
    let ask = |number| {
        let welcome = master.exchange_promise(ClientId(Uuid::new(1, number)), 30_000);
        Duration::from_millis(welcome.announce_after_ms)
    };
    assert_eq!(master.exchange_promise(ClientId::default(), 0).announce_after_ms, 0, "a new client");
    let turns: Vec<_> = (0..200).map(ask).collect();
    for (before, after) in turns.iter().zip(&turns[1..]) {
        assert_eq!(*after, *before + Duration::from_millis(10), "{turns:?}");
    }
    assert_eq!(turns[0], Duration::ZERO);
    let late = (0..1000).map(ask).max();
    assert_eq!(late, Some(Duration::from_secs(5)), "nobody waits for longer");
    clock.advance(Duration::from_secs(6));
    assert_eq!(ask(0), Duration::ZERO, "a client that comes alone need not wait");
}
