//! Reads and writes over `mooncake-tcp` between two processes, beside raw loopback TCP and memcpy
//! in the same run.
//!
//! Raw TCP is a blocking socket on each side: a write is the chunk and an 8-byte acknowledgement, a
//! read is an 8-byte request and the chunk. Sizes and subjects take turns, and the median counts.
//! Options: `--quick`, and for tuning `--key=value` with a key of `Tuning` below.

#![allow(clippy::print_stdout)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_tcp::{TcpConfig, TcpPeer, TcpTransport};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Region, SegmentDesc, SliceMut, Transport};
use tokio::runtime::{Builder, Runtime};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const SIZES: [usize; 6] = [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB];
const LARGEST: usize = 16 * MIB;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let tuning = Tuning::parse(&args);
    if args.iter().any(|arg| arg == "--serve") {
        return serve(&tuning);
    }
    let server = Server::start(&args);
    println!(
        "median microseconds per transfer (GB/s); ratio is the time of raw TCP over that of mooncake-tcp, higher is better"
    );
    println!(
        "{:<7} {:>8} {:>18} {:>18} {:>18} {:>18} {:>7} {:>7}",
        "", "chunk", "raw TCP", "async caller", "blocking caller", "memcpy", "async", "block"
    );
    let mut raw = Raw::connect(server.raw_port);
    let mut asynchronous = Ours::connect(&server, &tuning, Caller::Async);
    let mut blocking = Ours::connect(&server, &tuning, Caller::Blocking);
    for write in [true, false] {
        for size in SIZES.into_iter().filter(|size| tuning.only == 0 || tuning.only == *size) {
            let turns = if args.iter().any(|arg| arg == "--quick") { 3 } else { 15 };
            let per_turn = (64 * MIB / size).clamp(4, 200);
            let mut times: [Vec<f64>; 4] = Default::default();
            let (from, mut to) = (vec![1u8; size], vec![2u8; size]);
            for _ in 0..turns {
                measure(per_turn, &mut times[0], || raw.transfer(size, write));
                measure(per_turn, &mut times[1], || asynchronous.transfer(size, write));
                measure(per_turn, &mut times[2], || blocking.transfer(size, write));
                measure(per_turn, &mut times[3], || {
                    to.copy_from_slice(std::hint::black_box(&from));
                    std::hint::black_box(&mut to);
                });
            }
            let medians = times.map(|mut times| median(&mut times));
            let cell = |us: f64| format!("{us:.1} ({:.2})", size as f64 / us / 1000.0);
            println!(
                "{:<7} {:>8} {:>18} {:>18} {:>18} {:>18} {:>7.2} {:>7.2}",
                if write { "write" } else { "read" },
                human(size),
                cell(medians[0]),
                cell(medians[1]),
                cell(medians[2]),
                cell(medians[3]),
                medians[0] / medians[1],
                medians[0] / medians[2],
            );
        }
    }
}

/// Settings from the command line, to find good defaults.
#[derive(Clone, Default)]
struct Tuning {
    stripes: usize,
    connections: usize,
    threshold: usize,
    send_buffer: usize,
    receive_buffer: usize,
    /// Worker threads of the server's runtime; 0 stands for a runtime on one thread.
    server_threads: usize,
    /// The only chunk size to measure.
    only: usize,
}

impl Tuning {
    fn parse(args: &[String]) -> Self {
        let mut tuning = Self::default();
        for (key, value) in args.iter().filter_map(|arg| arg.strip_prefix("--")?.split_once('=')) {
            let value = value.parse().unwrap_or_else(|_| panic!("invalid --{key}: expected a number"));
            *match key {
                "stripes" => &mut tuning.stripes,
                "connections" => &mut tuning.connections,
                "threshold" => &mut tuning.threshold,
                "send-buffer" => &mut tuning.send_buffer,
                "receive-buffer" => &mut tuning.receive_buffer,
                "server-threads" => &mut tuning.server_threads,
                "only" => &mut tuning.only,
                _ => panic!("unknown option --{key}"),
            } = value;
        }
        tuning
    }

    fn config(&self) -> TcpConfig {
        let base = TcpConfig::default();
        let or = |value, default| if value == 0 { default } else { value };
        TcpConfig {
            bind: Some([127, 0, 0, 1].into()),
            data_host: "127.0.0.1".into(),
            stripes: or(self.stripes, base.stripes),
            connections: or(self.connections, base.connections),
            stripe_threshold: or(self.threshold, base.stripe_threshold),
            send_buffer: self.send_buffer,
            receive_buffer: self.receive_buffer,
            ..base
        }
    }
}

/// Other process: a node with registered memory, and a raw TCP server.
struct Server {
    process: Child,
    desc: SegmentDesc,
    raw_port: u16,
}

impl Server {
    fn start(args: &[String]) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(args)
            .arg("--serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let desc = SegmentDesc::decode(lines.next().unwrap().unwrap().as_bytes()).unwrap();
        let raw_port = lines.next().unwrap().unwrap().parse().unwrap();
        Self { process, desc, raw_port }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process reads its standard input to the end.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn serve(tuning: &Tuning) {
    let runtime = runtime(tuning.server_threads);
    let node = TcpTransport::start(tuning.config(), runtime.handle()).unwrap();
    let region =
        Region::register(&node, Arc::new(HostMemory::new(LARGEST).unwrap()), Access::Remote).unwrap();
    let mut desc = SegmentDesc::new("bench");
    desc.buffers = vec![BufferDesc {
        name: "bench".into(),
        addr: region.addr(),
        length: region.len() as u64,
        ..BufferDesc::default()
    }];
    node.describe(&mut desc);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", String::from_utf8(desc.encode()).unwrap());
    println!("{}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            std::thread::spawn(move || Raw::serve(stream));
        }
    });
    runtime.block_on(async {
        // A thread reads standard input, so that this one serves.
        let (gone, wait) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            let _ = gone.send(());
        });
        let _ = wait.await;
    });
}

/// Plain blocking sockets.
struct Raw {
    stream: TcpStream,
    chunk: Vec<u8>,
}

impl Raw {
    fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, chunk: vec![7; LARGEST + 8] }
    }

    fn transfer(&mut self, size: usize, write: bool) {
        let header = (size as u64) << 1 | u64::from(write);
        if write {
            self.chunk[..8].copy_from_slice(&header.to_le_bytes());
            self.stream.write_all(&self.chunk[..size + 8]).unwrap();
            self.stream.read_exact(&mut [0; 8]).unwrap();
        } else {
            self.stream.write_all(&header.to_le_bytes()).unwrap();
            self.stream.read_exact(&mut self.chunk[..size]).unwrap();
        }
    }

    fn serve(mut stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut chunk = vec![3; LARGEST];
        let mut header = [0; 8];
        while stream.read_exact(&mut header).is_ok() {
            let header = u64::from_le_bytes(header);
            let size = (header >> 1) as usize;
            if header & 1 == 1 {
                stream.read_exact(&mut chunk[..size]).unwrap();
                stream.write_all(&[0; 8]).unwrap();
            } else {
                stream.write_all(&chunk[..size]).unwrap();
            }
        }
    }
}

enum Caller {
    /// Awaits on the only thread of the runtime.
    Async,
    /// Blocks a thread outside the runtime.
    Blocking,
}

struct Ours {
    node: TcpTransport,
    peer: TcpPeer,
    memory: Option<SliceMut<TcpTransport>>,
    remote: u64,
    runtime: Runtime,
    caller: Caller,
}

impl Ours {
    fn connect(server: &Server, tuning: &Tuning, caller: Caller) -> Self {
        let runtime = runtime(if matches!(caller, Caller::Async) { 0 } else { 2 });
        let node = TcpTransport::start(tuning.config(), runtime.handle()).unwrap();
        let peer = runtime.block_on(node.connect(&server.desc)).unwrap();
        let memory = HostMemory::new(LARGEST).unwrap();
        memory.span();
        let memory = Region::register(&node, Arc::new(memory), Access::Local).unwrap().exclusive().unwrap();
        Self { node, peer, memory: Some(memory), remote: server.desc.buffers[0].addr, runtime, caller }
    }

    fn transfer(&mut self, size: usize, write: bool) {
        let all = self.memory.take().unwrap();
        let (part, rest) = if size == LARGEST {
            (all, None)
        } else {
            let (part, rest) = all.split_at(size).unwrap();
            (part, Some(rest))
        };
        let transfers = [Transfer::new(self.remote, part)];
        let post = || {
            if write {
                transfer::write(&self.node, &self.peer, transfers, None)
            } else {
                transfer::read(&self.node, &self.peer, transfers, None)
            }
        };
        let (result, [back]) = match self.caller {
            Caller::Async => self.runtime.block_on(async { post().await }),
            Caller::Blocking => post().wait(),
        };
        result.unwrap();
        self.memory = Some(match rest {
            None => back.buffer,
            Some(rest) => {
                drop(rest);
                back.buffer.into_region().unwrap().exclusive().unwrap()
            }
        });
    }
}

fn runtime(threads: usize) -> Runtime {
    match threads {
        0 => Builder::new_current_thread().enable_all().build().unwrap(),
        n => Builder::new_multi_thread().worker_threads(n).enable_all().build().unwrap(),
    }
}

fn measure(times: usize, out: &mut Vec<f64>, mut transfer: impl FnMut()) {
    let clock = SystemClock::new();
    transfer();
    for _ in 0..times {
        let start = clock.now();
        transfer();
        out.push(clock.now().since(start).as_secs_f64() * 1e6);
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn human(size: usize) -> String {
    if size < MIB { format!("{} KiB", size / KIB) } else { format!("{} MiB", size / MIB) }
}
