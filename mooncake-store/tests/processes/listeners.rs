//! Connections that withhold their requests: every listener of a master and of a client serves a
//! proper caller while other connections fill all of its slots, and stops in bounded time.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{Process, free_port, metric, page};
use mooncake_ipc::record::Record;
use mooncake_store::local::{LocalClient, LocalConfig};
use mooncake_store::protocol::frame;
use mooncake_transport::admission::raise_descriptor_limit;
use mooncake_transport::handshake::{Kind, encode};

/// Longest time until a proper caller is served while all slots are taken.
const SERVED: Duration = Duration::from_secs(10);
/// Longest duration of a stop: 2 s for connections, and the time for the last snapshot and for
/// leaving a cluster of this size on a busy machine.
const STOPPED: Duration = Duration::from_secs(10);
/// Longest duration of a start on a busy machine.
const STARTED: Duration = Duration::from_secs(60);

/// Stream of any kind of listener.
trait Stream: Read + Write {}

impl Stream for TcpStream {}

impl Stream for UnixStream {}

/// Address of a listener.
#[derive(Clone, Debug)]
enum At {
    Port(u16),
    Path(PathBuf),
    /// Name in the abstract namespace.
    Name(String),
}

impl At {
    fn connect(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Port(port) => {
                let at = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
                let stream = TcpStream::connect_timeout(&at, SERVED)?;
                stream.set_read_timeout(Some(SERVED))?;
                Box::new(stream)
            }
            Self::Path(path) => local(UnixStream::connect(path)?)?,
            Self::Name(name) => local(UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?)?,
        })
    }
}

fn local(stream: UnixStream) -> std::io::Result<Box<dyn Stream>> {
    stream.set_read_timeout(Some(SERVED))?;
    Ok(Box::new(stream))
}

/// Request in the protocol of a listener, complete and in parts, and the first bytes of the
/// response to the complete one.
#[derive(Clone)]
struct Exchange {
    half_header: Vec<u8>,
    half_body: Vec<u8>,
    /// Complete request; empty if only [`Listener::serve_one`] knows the protocol.
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Exchange {
    fn http(method: &str, path: &str, body: &str) -> Self {
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        // The length announces one byte more than the body has.
        let half =
            format!("PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len() + 1);
        Self {
            half_header: b"GET / HT".to_vec(),
            half_body: half.into_bytes(),
            request: [head.as_bytes(), body.as_bytes()].concat(),
            answer: b"HTTP/1.1 2".to_vec(),
        }
    }

    /// Returns a call that no server knows, which the response states.
    fn rpc() -> Self {
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        frame::write_request(&mut request, 1, 0x1234_5678, |out| out.extend([7; 64]));
        frame::write_reply(&mut answer, 1, |_| Ok(()));
        answer.truncate(1);
        let half_body = request[..frame::REQUEST_HEAD + 9].to_vec();
        Self { half_header: request[..5].to_vec(), half_body, request, answer }
    }

    fn handshake() -> Self {
        let request = encode(Kind::Probe, false, b"{}");
        let half = |len| request[..len].to_vec();
        Self {
            half_header: half(3),
            half_body: half(request.len() - 1),
            answer: encode(Kind::Probe, false, br#"{"status":"success"}"#),
            request,
        }
    }

    /// Returns a greeting, READY, and a subscription to everything.
    fn events() -> Self {
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        let ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";
        let request = [&greeting[..], ready, b"\x00\x01\x01"].concat();
        // The response is the other greeting, and READY only after the complete greeting.
        let answer = [&greeting[..], b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"].concat();
        Self { half_header: request[..10].to_vec(), half_body: request[..70].to_vec(), request, answer }
    }

    /// Returns a read of one byte, and a write whose body is nearly all missing.
    fn data(addr: u64) -> Self {
        let header = |opcode: u8, len: u64| {
            [&len.to_le_bytes()[..], &addr.to_le_bytes(), &[opcode, 0, 0, 0, 0, 0, 0, 0]].concat()
        };
        let request = header(READ, 1);
        Self {
            half_header: request[..5].to_vec(),
            half_body: [header(WRITE, 64), vec![7; 3]].concat(),
            request,
            answer: Vec::new(),
        }
    }

    /// Returns a request for the regions of a process. The response begins with a record that has a
    /// descriptor.
    fn same_host() -> Self {
        let (request, answer) = (Record::ListRegions.encode().to_vec(), Record::SlotTable.encode().to_vec());
        Self { half_header: request[..3].to_vec(), half_body: Vec::new(), request, answer }
    }

    fn unknown() -> Self {
        Self { half_header: vec![0; 3], half_body: Vec::new(), request: Vec::new(), answer: Vec::new() }
    }
}

/// Opcodes of the acknowledged framing of the data port.
const READ: u8 = 0x80;
const WRITE: u8 = 0x81;

/// Way in which a connection withholds its request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kept {
    Silent,
    HalfHeader,
    HalfBody,
    IdleAfterOne,
}

const KINDS: [Kept; 4] = [Kept::Silent, Kept::HalfHeader, Kept::HalfBody, Kept::IdleAfterOne];

struct Listener {
    name: &'static str,
    at: At,
    /// Number of slots under the limit of descriptors of the process.
    places: usize,
    exchange: Exchange,
}

impl Listener {
    fn new(name: &'static str, at: At, places: usize, exchange: Exchange) -> Self {
        Self { name, at, places, exchange }
    }

    fn hold(&self, kind: Kept) -> std::io::Result<Box<dyn Stream>> {
        let mut stream = self.at.connect()?;
        match kind {
            Kept::Silent => {}
            Kept::HalfHeader => stream.write_all(&self.exchange.half_header)?,
            Kept::HalfBody => stream.write_all(&self.exchange.half_body)?,
            Kept::IdleAfterOne => self.ask(&mut stream)?,
        }
        Ok(stream)
    }

    fn ask(&self, stream: &mut Box<dyn Stream>) -> std::io::Result<()> {
        let Exchange { request, answer, .. } = &self.exchange;
        stream.write_all(request)?;
        let mut first = vec![0; answer.len().max(1)];
        stream.read_exact(&mut first)?;
        assert!(first.starts_with(answer), "{}: {:?}", self.name, String::from_utf8_lossy(&first));
        Ok(())
    }

    /// Makes one proper call on a connection of its own.
    fn serve_one(&self) -> Result<(), String> {
        if let At::Path(path) = &self.at {
            let path = path.to_str().unwrap();
            let config = LocalConfig { timeout: SERVED, buffer: 1 << 20, ..LocalConfig::at(path) };
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
            let connected = runtime.block_on(async {
                let client = LocalClient::connect(config).await.map_err(|error| error.to_string())?;
                client.exist("key").await.map_err(|error| error.to_string())
            });
            return connected.map(|_| ());
        }
        let asked = self.at.connect().and_then(|mut stream| self.ask(&mut stream));
        asked.map_err(|error| error.to_string())
    }

    fn kinds(&self) -> impl Iterator<Item = Kept> {
        // A connection that has received regions keeps its slot: it may be in the middle of a copy.
        let may_wait = !self.exchange.half_body.is_empty();
        KINDS.into_iter().filter(move |kind| may_wait || matches!(kind, Kept::Silent | Kept::HalfHeader))
    }

    /// Opens one connection of each kind.
    fn hold_each(&self) -> Vec<Box<dyn Stream>> {
        self.kinds().map(|kind| self.hold(kind).unwrap()).collect()
    }

    /// Fills all slots in each way, and makes a proper call each time.
    fn withstand(&self) {
        for kind in self.kinds() {
            let mut connections = Vec::new();
            for number in 0..self.places + 4 {
                match self.hold(kind) {
                    Ok(stream) => connections.push(stream),
                    // The call is proper, so it is served though all slots are taken.
                    Err(error) if kind == Kept::IdleAfterOne => {
                        panic!("{}: call {number} of {}: {error}", self.name, self.places)
                    }
                    Err(_) => {}
                }
            }
            let began = begin();
            if let Err(error) = self.serve_one() {
                panic!("{}: not served beside {} {kind:?} connections: {error}", self.name, self.places);
            }
            println!("{} {kind:?}: served after {:?}", self.name, began.elapsed());
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "bounds of tests")]
fn begin() -> Instant {
    Instant::now()
}

/// Starts a program under a limit of descriptors. Returns its log up to the line that contains
/// `ready`.
pub(crate) fn start(limit: &str, program: &str, arguments: &[String], ready: &str) -> (Process, String) {
    let mut child = Command::new("prlimit")
        .arg(format!("--nofile={limit}"))
        .arg(program)
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("prlimit (util-linux)");
    let log = BufReader::new(child.stderr.take().unwrap());
    let process = Process(child);
    let (tell, told) = std::sync::mpsc::channel();
    // The thread continues to read, so that the log never fills its pipe.
    std::thread::spawn(move || log.lines().map_while(Result::ok).for_each(|line| drop(tell.send(line))));
    let (began, mut text) = (begin(), String::new());
    while let Some(rest) = STARTED.checked_sub(began.elapsed()) {
        match told.recv_timeout(rest) {
            Ok(line) => {
                text.push_str(&line);
                if line.contains(ready) {
                    return (process, text);
                }
                text.push('\n');
            }
            Err(error) => panic!("{program} has not said {ready:?}: {error}"),
        }
    }
    panic!("{program} has not said {ready:?} in time")
}

/// Stops a process with SIGTERM. Returns the duration.
fn stop(process: &mut Process) -> Duration {
    let began = begin();
    process.signal("-TERM");
    while began.elapsed() < STOPPED {
        if let Some(status) = process.0.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return began.elapsed();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("still alive {STOPPED:?} after SIGTERM")
}

pub(crate) struct Ports {
    pub(crate) rpc: u16,
    pub(crate) admin: u16,
    pub(crate) metadata: u16,
    pub(crate) events: u16,
}

pub(crate) fn master(limit: &str, more: &[String]) -> (Process, Ports) {
    let ports = Ports { rpc: free_port(), admin: free_port(), metadata: free_port(), events: free_port() };
    let mut flags: Vec<String> =
        ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"].map(String::from).into();
    flags.extend([
        format!("--rpc_port={}", ports.rpc),
        format!("--metrics_port={}", ports.admin),
        "--enable_http_metadata_server=true".into(),
        "--http_metadata_server_host=127.0.0.1".into(),
        format!("--http_metadata_server_port={}", ports.metadata),
        "--enable_kv_events=true".into(),
        "--kv_events_backend_id=cache".into(),
        format!("--kv_events_bind_endpoint=tcp://127.0.0.1:{}", ports.events),
    ]);
    flags.extend_from_slice(more);
    let (process, _) = start(limit, env!("CARGO_BIN_EXE_mooncake_master"), &flags, "ready");
    (process, ports)
}

/// Returns the number of open connections of a listener in the metrics, and of those closed for
/// others.
fn reported(port: u16, prefix: &str, listener: &str) -> (Option<u64>, Option<u64>) {
    let page = page(port, "/metrics").unwrap_or_default();
    let metric = |name: &str, label: &str| {
        let lines = page.lines().filter(|line| line.starts_with(&format!("{prefix}_{name}{{")));
        let mut lines = lines.filter(|line| line.contains(&format!("listener=\"{listener}\"")));
        lines.find(|line| line.contains(label))?.rsplit(' ').next()?.parse().ok()
    };
    (metric("connections", ""), metric("connections_refused_total", "reason=\"evicted\""))
}

#[test]
fn a_master_withstands_connections_that_hold_back() {
    raise_descriptor_limit();
    let folder = tempfile::tempdir().unwrap();
    let snapshots =
        ["--enable_snapshot=true".to_owned(), format!("--snapshot_local_path={}", folder.path().display())];
    let (mut process, ports) = master("256:256", &snapshots);
    let listeners = [
        Listener::new("rpc", At::Port(ports.rpc), 128, Exchange::rpc()),
        Listener::new("admin", At::Port(ports.admin), 8, Exchange::http("GET", "/health", "")),
        Listener::new(
            "metadata",
            At::Port(ports.metadata),
            32,
            Exchange::http("PUT", "/metadata?key=a", "some value"),
        ),
        Listener::new("events", At::Port(ports.events), 16, Exchange::events()),
    ];
    listeners.iter().for_each(Listener::withstand);
    for listener in &listeners {
        let (open, evicted) = reported(ports.admin, "master", listener.name);
        assert!(open.is_some_and(|open| open <= listener.places as u64), "{}: {open:?}", listener.name);
        assert!(evicted.is_some_and(|evicted| evicted > 0), "{}: {evicted:?}", listener.name);
    }
    let held: Vec<_> = listeners.iter().flat_map(Listener::hold_each).collect();
    let took = stop(&mut process);
    println!("stopped after {took:?}");
    drop(held);
    let written = std::fs::read_dir(folder.path().join("mooncake_cluster")).unwrap().flatten();
    let names: Vec<_> = written.map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|name| name.starts_with("snapshot-")), "no last snapshot: {names:?}");
}

#[test]
fn a_client_withstands_connections_that_hold_back() {
    raise_descriptor_limit();
    let (_master, ports) = master("1024:1024", &["--enable_offload=true".into()]);
    let (http, folder) = (free_port(), tempfile::tempdir().unwrap());
    let socket = folder.path().join("owner.sock");
    let own_port = free_port();
    let (mut process, log) = client(&ports, (own_port, http), folder.path());
    let name = field(log.lines().last().unwrap(), "name");
    let disk: u16 = field(&log, "endpoint").and_then(|at| at.rsplit(':').next()?.parse().ok()).unwrap();
    let found = |kind: &str| -> serde_json::Value {
        let text = page(ports.metadata, &format!("/metadata?key=mooncake/{kind}/{}", name.unwrap())).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    };
    let (meta, memory) = (found("rpc_meta"), found("ram"));
    let port = |value: &serde_json::Value| At::Port(value.as_u64().unwrap() as u16);
    let addr = memory["buffers"][0]["addr"].as_u64().unwrap();
    let listeners = [
        Listener::new("data", port(&memory["tcp_data_port"]), 256, Exchange::data(addr)),
        Listener::new("handshake", port(&meta["rpc_port"]), 128, Exchange::handshake()),
        Listener::new("pages", At::Port(http), 16, Exchange::http("GET", "/health", "")),
        Listener::new("local", At::Path(socket), 32, Exchange::unknown()),
        Listener::new("disk", At::Port(disk), 16, Exchange::rpc()),
        Listener::new("client_port", At::Port(own_port), 16, Exchange::rpc()),
        Listener::new("same_host", At::Name(same_host_name(process.0.id())), 32, Exchange::same_host()),
    ];
    listeners.iter().for_each(Listener::withstand);
    for listener in &listeners {
        let (open, evicted) = reported(http, "mooncake_client", listener.name);
        assert!(open.is_some_and(|open| open <= listener.places as u64), "{}: {open:?}", listener.name);
        assert!(evicted.is_some_and(|evicted| evicted > 0), "{}: {evicted:?}", listener.name);
    }
    let held: Vec<_> = listeners.iter().flat_map(Listener::hold_each).collect();
    println!("stopped after {:?}", stop(&mut process));
    drop(held);
}

/// Starts a client under 512 descriptors, with every kind of listener. Its socket and its disk are
/// in the folder.
pub(crate) fn client(ports: &Ports, (own_port, http): (u16, u16), folder: &Path) -> (Process, String) {
    let disk = folder.join("disk");
    std::fs::create_dir_all(&disk).unwrap();
    let flags = [
        format!("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH={}", disk.display()),
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=16777216".into(),
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES=67108864".into(),
        "MC_ALLOWED_HOSTS=given.example".into(),
        env!("CARGO_BIN_EXE_mooncake_client").to_owned(),
        format!("--metadata_server=http://127.0.0.1:{}/metadata", ports.metadata),
        "--global_segment_size=16 MB".into(),
        "--host=127.0.0.1".into(),
        "--client_ttl=2".into(),
        "--enable_http_server".into(),
        "--enable_offload=true".into(),
        format!("--master_server_address=127.0.0.1:{}", ports.rpc),
        format!("--ipc_socket_path={}", folder.join("owner.sock").display()),
        format!("--http_port={http}"),
        format!("--port={own_port}"),
    ];
    // `env` executes the client, which keeps the process id.
    start("512:512", "env", &flags, "ready")
}

/// Returns the value of a field in a line of a log, without quotation marks and colours.
pub(crate) fn field<'a>(log: &'a str, name: &str) -> Option<&'a str> {
    let rest = log.split_once(&format!("{name}="))?.1;
    rest.split([' ', '"', '\n']).find(|word| !word.is_empty())
}

/// Returns the name of the socket of a process for transfers on the same host.
fn same_host_name(process: u32) -> String {
    let links = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let links =
        links.filter_map(|link| std::fs::read_link(link.path()).ok()?.into_os_string().into_string().ok());
    let own: Vec<String> = links.collect();
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let name = sockets.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (inode, name) = (words.get(6)?, words.get(7)?.strip_prefix("@mooncake-shm-")?);
        own.contains(&format!("socket:[{inode}]")).then(|| format!("mooncake-shm-{name}"))
    });
    name.unwrap()
}

/// Shared clients keep their control connections, which show their owner that they live. The
/// clients that have joined find slots for their calls, however many others try to join. The others
/// get the reason of the refusal.
#[test]
fn control_connections_leave_slots_for_calls() {
    const MOST: usize = 16;
    raise_descriptor_limit();
    let (_master, ports) = master("1024:1024", &["--enable_offload=true".into()]);
    let folder = tempfile::tempdir().unwrap();
    let (_client, _) = client(&ports, (free_port(), free_port()), folder.path());
    let path = folder.path().join("owner.sock");
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let config =
            || LocalConfig { timeout: SERVED, buffer: 1 << 20, ..LocalConfig::at(path.to_str().unwrap()) };
        let mut clients = Vec::new();
        for number in 0..MOST {
            let client = LocalClient::connect(config()).await;
            clients.push(client.unwrap_or_else(|error| panic!("light client {number}: {error}")));
        }
        for _ in 0..MOST {
            let refused = LocalClient::connect(config()).await.unwrap_err().to_string();
            assert!(refused.contains("16 processes already (--max_clients)"), "{refused}");
        }
        for client in &clients {
            client.exist("key").await.unwrap();
        }
        let calls = clients.iter().map(|client| client.exist("key"));
        for outcome in futures::future::join_all(calls).await {
            outcome.unwrap();
        }
    });
}

/// Connections of the same host that have received regions keep their slots. A further connection
/// is refused at once without harm to others, and is accepted when one has closed.
#[test]
fn peers_beyond_the_slots_of_the_same_host_are_refused() {
    const PLACES: usize = 32;
    raise_descriptor_limit();
    let (_master, ports) = master("1024:1024", &["--enable_offload=true".into()]);
    let (http, folder) = (free_port(), tempfile::tempdir().unwrap());
    let (process, _) = client(&ports, (free_port(), http), folder.path());
    let name = At::Name(same_host_name(process.0.id()));
    let listener = Listener::new("same_host", name, PLACES, Exchange::same_host());
    let mut peers: Vec<_> = (0..PLACES).map(|_| listener.hold(Kept::IdleAfterOne).unwrap()).collect();
    for _ in 0..4 {
        let mut refused = listener.hold(Kept::Silent).unwrap();
        assert_eq!(refused.read(&mut [0]).unwrap_or(0), 0);
    }
    let page = page(http, "/metrics").unwrap();
    let full = page.lines().find(|line| {
        line.contains("_refused_total{") && line.contains("\"same_host\"") && line.contains("\"full\"")
    });
    assert!(full.is_some_and(|line| line.ends_with(" 4")), "{full:?}");
    peers.truncate(PLACES - 1);
    let began = begin();
    while let Err(error) = listener.serve_one() {
        assert!(began.elapsed() < SERVED, "{error}");
    }
}

/// A low limit of descriptors is raised to the permitted one, so that the admin endpoints stay
/// reachable.
#[test]
fn a_master_takes_the_descriptors_it_may_have() {
    let (_process, ports) = master("64:4096", &[]);
    let rpc = Listener::new("rpc", At::Port(ports.rpc), 200, Exchange::rpc());
    let held: Vec<_> = (0..200).map(|_| rpc.hold(Kept::IdleAfterOne).unwrap()).collect();
    let admin = Listener::new("admin", At::Port(ports.admin), 8, Exchange::http("GET", "/health", ""));
    admin.serve_one().unwrap();
    assert_eq!(reported(ports.admin, "master", "rpc"), (Some(200), Some(0)));
    drop(held);
}

/// Half a request is closed after a timeout, before another connection needs its slot.
#[test]
fn half_a_request_over_http_is_closed_in_time() {
    let (_process, ports) = master("1024:1024", &[]);
    let admin = Listener::new("admin", At::Port(ports.admin), 8, Exchange::http("POST", "/health", "body"));
    let mut held = [admin.hold(Kept::HalfHeader).unwrap()];
    for stream in &mut held {
        let began = begin();
        let mut answer = Vec::new();
        // Each read waits 10 s, which is the limit itself.
        while stream.read_to_end(&mut answer).is_err() {
            assert!(began.elapsed() < 3 * SERVED, "it is still open");
        }
    }
    assert!(metric(ports.admin, "master_connections_refused_total").is_some());
}
