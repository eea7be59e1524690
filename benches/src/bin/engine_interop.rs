//! Transfer engines of Mooncake C++ and of this project, each reading and writing the memory of the
//! other. Run by `cargo xtask interop`, in a network namespace of its own with one interface
//! besides `lo`.
//!
//! The memory of both sides is files, so that the content is compared without asking either.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use mooncake_benches::peer::{Installation, Node, Process, Result, wait_for_port};
use mooncake_core::clock::Rng;
use mooncake_core::memory::HostMemory;
use mooncake_core::meta::MetadataBackend;
use mooncake_engine::{TransferEngine, TransportOptions, TransportSet};
use mooncake_metadata::http::HttpMetadata;
use mooncake_tcp::TcpConfig;
use mooncake_tcp::frame::Framing;
use mooncake_transport::engine::{HandshakePort, LocalCopies, Request};
use mooncake_transport::handshake::Notification;
use mooncake_transport::{Region, Target};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Address of the namespace's interface.
const HOST: &str = "10.213.0.1";
const P2P: &str = "P2PHANDSHAKE";
/// Lengths around every boundary of the protocol.
const SIZES: &[usize] = &[1, 17, 4096, 65535, 65536, 65537, (1 << 20) + 1, 16 << 20];
const LARGEST: usize = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

struct Programs {
    peer: Installation,
    master: PathBuf,
    metadata_server: PathBuf,
}

/// Metadata service and protocol options of both sides.
#[derive(Clone, Copy)]
struct Setting<'a> {
    metadata: &'a str,
    host: &'a str,
    framing: Framing,
    variables: &'a [(&'a str, &'a str)],
    memory: usize,
}

impl<'a> Setting<'a> {
    fn meeting_at(metadata: &'a str) -> Self {
        // Without this, Mooncake C++ never notices that the engine has moved.
        let variables = &[("MC_DISABLE_METACACHE", "1")];
        Self { metadata, host: HOST, framing: Framing::Acknowledged, variables, memory: 32 << 20 }
    }

    fn is_p2p(&self) -> bool {
        self.metadata == P2P
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        arguments.get(at + 1).map(PathBuf::from)
    };
    let (Some(python), Some(master), Some(metadata_server)) =
        (value("--python"), value("--master"), value("--metadata-server"))
    else {
        eprintln!(
            "engine_interop: missing --python, --master or --metadata-server; run `cargo xtask interop`"
        );
        return ExitCode::FAILURE;
    };
    let programs = Programs { peer: Installation::new(python), master, metadata_server };
    let p2p = Setting::meeting_at(P2P);
    let cells: [(&str, &dyn Fn() -> Result<usize>); 8] = [
        ("P2PHANDSHAKE", &|| everything(&programs, Setting { memory: LARGEST, ..p2p })),
        ("HTTP metadata in the master of this project", &|| in_our_master(&programs)),
        ("HTTP metadata in the master of Mooncake C++", &|| in_their_master(&programs)),
        ("HTTP metadata, server of this project", &|| at_our_server(&programs)),
        ("HTTP metadata, server of Mooncake C++", &|| at_their_server(&programs)),
        ("requests of Mooncake C++ without acknowledgements", &|| {
            let variables = &[("MC_TCP_PROTO", "1"), ("MC_DISABLE_METACACHE", "1")];
            everything(&programs, Setting { variables, ..p2p })
        }),
        ("requests of this project without acknowledgements", &|| {
            everything(&programs, Setting { framing: Framing::Plain, ..p2p })
        }),
        ("IPv6", &|| {
            let variables = &[("MC_USE_IPV6", "1"), ("MC_DISABLE_METACACHE", "1")];
            everything(&programs, Setting { host: "::1", variables, ..p2p })
        }),
    ];
    let mut failed = 0;
    for (name, cell) in cells {
        match cell() {
            Ok(checks) => println!("ok      engines, {name}: {checks} checks"),
            Err(error) => {
                println!("FAILED  engines, {name}: {error}");
                failed += 1;
            }
        }
    }
    println!("{} passed, {failed} failed", 8 - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn in_our_master(programs: &Programs) -> Result<usize> {
    let mut command = Command::new(&programs.master);
    command.args(["--rpc_port=51500", "--metrics_port=51501"]);
    command.args(["--enable_http_metadata_server=true", "--http_metadata_server_port=51502"]);
    let _master = Process::start(command, "the master")?;
    wait_for_port(51502)?;
    everything(programs, Setting::meeting_at(&format!("http://{HOST}:51502/metadata")))
}

fn in_their_master(programs: &Programs) -> Result<usize> {
    let _master = programs.peer.master(51510, Some(51512))?;
    everything(programs, Setting::meeting_at(&format!("http://{HOST}:51512/metadata")))
}

fn at_our_server(programs: &Programs) -> Result<usize> {
    let mut command = Command::new(&programs.metadata_server);
    command.arg("--port=51520").env("MC_METADATA_HTTP_ALLOW_INSECURE", "1");
    let _server = Process::start(command, "the metadata server")?;
    wait_for_port(51520)?;
    everything(programs, Setting::meeting_at(&format!("http://{HOST}:51520/metadata")))
}

fn at_their_server(programs: &Programs) -> Result<usize> {
    let _server = programs.peer.module("mooncake.http_metadata_server", &["--port", "51530"])?;
    wait_for_port(51530)?;
    everything(programs, Setting::meeting_at(&format!("http://{HOST}:51530/metadata")))
}

/// Memory backed by a file.
struct Bytes {
    file: File,
    folder: tempfile::TempDir,
    len: usize,
    /// Set when a completed write has arrived.
    acknowledged: bool,
}

impl Bytes {
    fn new(setting: &Setting<'_>) -> Result<Self> {
        let plain = setting.variables.iter().any(|(name, _)| *name == "MC_TCP_PROTO");
        let (len, acknowledged) = (setting.memory, setting.framing == Framing::Acknowledged && !plain);
        let text = |e: std::io::Error| format!("cannot create memory in /dev/shm: {e}");
        let folder = tempfile::tempdir_in("/dev/shm").map_err(text)?;
        let file = File::options().read(true).write(true).create_new(true).open(folder.path().join("memory"));
        let file = file.map_err(text)?;
        file.set_len(len as u64).map_err(text)?;
        Ok(Self { file, folder, len, acknowledged })
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("memory")
    }

    fn put(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, at as u64).map_err(|e| e.to_string())
    }

    fn holds(&self, at: usize, bytes: &[u8]) -> Result<bool> {
        let mut found = vec![0; bytes.len()];
        self.file.read_exact_at(&mut found, at as u64).map_err(|e| e.to_string())?;
        Ok(found == bytes)
    }
}

/// Engine of Mooncake C++ in a process.
struct Theirs {
    node: Node,
    bytes: Bytes,
    base: u64,
    name: String,
}

impl Theirs {
    fn start(peer: &Installation, setting: &Setting<'_>) -> Result<Self> {
        let bytes = Bytes::new(setting)?;
        let (path, len) = (bytes.path(), bytes.len.to_string());
        let mut node = peer.script("engine.py", &[&path.to_string_lossy(), &len], setting.variables)?;
        let name = if setting.is_p2p() { setting.host } else { "theirs:1" };
        let answer = node.call(json!(["init", name, setting.metadata]))?;
        let (Some(0), Some(port), Some(base)) = (answer[0].as_i64(), answer[1].as_u64(), answer[2].as_u64())
        else {
            return Err(format!("the engine of Mooncake C++ did not start: {answer}"));
        };
        let name = if !setting.is_p2p() {
            name.to_owned()
        } else if name.contains(':') {
            format!("[{name}]:{port}")
        } else {
            format!("{name}:{port}")
        };
        Ok(Self { node, bytes, base, name })
    }

    /// Calls a function that returns a code.
    fn code(&mut self, command: Value) -> Result<i64> {
        self.node.call(command.clone())?.as_i64().ok_or_else(|| format!("{command} did not return a code"))
    }
}

/// Engine of this project.
struct Ours {
    engine: TransferEngine,
    region: Option<Region<TransportSet>>,
    bytes: Bytes,
    base: u64,
}

impl Ours {
    async fn start(setting: &Setting<'_>) -> Result<Self> {
        let tcp = TcpConfig { framing: setting.framing, ..TcpConfig::default() };
        let wires = TransportOptions { tcp: Some(tcp), ..TransportOptions::default() };
        let name = if setting.is_p2p() { setting.host } else { "ours:1" };
        let handshake = HandshakePort { host: Some(setting.host.into()), ..HandshakePort::default() };
        let engine = TransferEngine::builder()
            .name(name)
            .metadata(setting.metadata)
            .handshake(handshake)
            .transports(wires)
            .local_copies(LocalCopies::Never)
            .start()
            .await
            .map_err(|e| e.to_string())?;
        let mut ours = Self { engine, region: None, bytes: Bytes::new(setting)?, base: 0 };
        ours.register().await?;
        Ok(ours)
    }

    async fn register(&mut self) -> Result<()> {
        let memory = HostMemory::map_file(&self.bytes.file, 0, self.bytes.len).map_err(|e| e.to_string())?;
        let region = self.engine.register(Arc::new(memory)).await.map_err(|e| e.to_string())?;
        self.base = region.addr();
        self.region = Some(region);
        Ok(())
    }

    async fn unregister(&mut self) -> Result<()> {
        match self.region.take() {
            Some(region) => self.engine.unregister(region).await.map_err(|e| e.to_string()),
            None => Err("no memory is registered".into()),
        }
    }

    async fn open(&self, theirs: &Theirs) -> Result<Target<TransportSet>> {
        self.engine.open(&theirs.name).await.map_err(|e| e.to_string())
    }

    async fn write(
        &self,
        target: &Target<TransportSet>,
        remote: u64,
        bytes: &[u8],
    ) -> mooncake_core::Result<()> {
        let deadline = self.engine.clock().now().after(PATIENCE);
        self.engine.write(target, remote, bytes.to_vec(), Some(deadline)).await.0
    }

    async fn read(&self, target: &Target<TransportSet>, remote: u64, len: usize) -> Result<Vec<u8>> {
        let deadline = self.engine.clock().now().after(PATIENCE);
        let (result, bytes) = self.engine.read(target, remote, vec![0; len], Some(deadline)).await;
        result.map(|()| bytes).map_err(|e| e.to_string())
    }
}

#[derive(Default)]
struct Checks(usize);

impl Checks {
    fn that(&mut self, what: &str, holds: bool) -> Result<()> {
        self.0 += 1;
        if holds { Ok(()) } else { Err(format!("check failed: {what}")) }
    }
}

/// Checks every interaction of two engines, in one setting.
fn everything(programs: &Programs, setting: Setting<'_>) -> Result<usize> {
    let runtime = Runtime::new().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let mut checks = Checks::default();
        let mut theirs = Theirs::start(&programs.peer, &setting)?;
        let mut ours = Ours::start(&setting).await?;
        let target = ours.open(&theirs).await?;
        checks.that(
            "Mooncake C++ finds the memory of this project",
            theirs.node.call(json!(["first", ours.engine.name()]))? == ours.base,
        )?;
        checks.that(
            "this project finds the memory of Mooncake C++",
            target.descriptor().buffers[0].addr == theirs.base,
        )?;
        let mut sizes = SIZES.to_vec();
        sizes.extend((setting.memory >= LARGEST).then_some(LARGEST));
        for (seed, size) in sizes.into_iter().enumerate() {
            one(&mut checks, &ours, &mut theirs, &target, seed as u64, size).await?;
        }
        batches(&mut checks, &ours, &mut theirs, &target).await?;
        messages(&mut checks, &ours, &mut theirs).await?;
        closed_in_flight(&mut checks, &mut ours, &mut theirs, &target).await?;
        restarts(&mut checks, programs, &setting, ours, theirs, target).await?;
        Ok(checks.0)
    })
}

fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::seeded(seed).fill(&mut bytes);
    bytes
}

/// Checks a write and a read in each direction.
async fn one(
    checks: &mut Checks,
    ours: &Ours,
    theirs: &mut Theirs,
    target: &Target<TransportSet>,
    seed: u64,
    size: usize,
) -> Result<()> {
    let bytes = |part: u64| random(seed * 4 + part, size);
    let data = bytes(0);
    ours.write(target, theirs.base, &data)
        .await
        .map_err(|e| format!("cannot write {size} bytes to Mooncake C++: {e}"))?;
    settled(&theirs.bytes, &data).await;
    checks
        .that(&format!("{size} bytes written to Mooncake C++ have arrived"), theirs.bytes.holds(0, &data)?)?;
    let data = bytes(1);
    theirs.bytes.put(0, &data)?;
    checks.that(
        &format!("{size} bytes are read from Mooncake C++"),
        ours.read(target, theirs.base, size).await? == data,
    )?;
    let (data, name) = (bytes(2), ours.engine.name());
    theirs.bytes.put(0, &data)?;
    let code = theirs.code(json!(["write", name, 0, ours.base, size]))?;
    settled(&ours.bytes, &data).await;
    checks.that(&format!("Mooncake C++ writes {size} bytes"), code == 0 && ours.bytes.holds(0, &data)?)?;
    let data = bytes(3);
    ours.bytes.put(0, &data)?;
    let code = theirs.code(json!(["read", name, 0, ours.base, size]))?;
    checks.that(&format!("Mooncake C++ reads {size} bytes"), code == 0 && theirs.bytes.holds(0, &data)?)
}

/// Waits until a write has arrived. Without acknowledgements a write completes before, and no event
/// reports its arrival.
async fn settled(bytes: &Bytes, data: &[u8]) {
    if bytes.acknowledged {
        return;
    }
    for _ in 0..500 {
        if bytes.holds(0, data) == Ok(true) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn batches(
    checks: &mut Checks,
    ours: &Ours,
    theirs: &mut Theirs,
    target: &Target<TransportSet>,
) -> Result<()> {
    const COUNT: usize = 16;
    const LEN: usize = 70_001;
    let data = random(100, COUNT * LEN);
    let requests = |bytes: &[u8]| {
        let chunks = bytes.chunks(LEN).enumerate();
        chunks
            .map(|(at, chunk)| Request::new(target, theirs.base + (at * LEN) as u64, chunk.to_vec()))
            .collect()
    };
    let deadline = Some(ours.engine.clock().now().after(PATIENCE));
    let (results, _) = ours.engine.write_batch(requests(&data), deadline).await;
    settled(&theirs.bytes, &data).await;
    checks.that(
        "batch of writes to Mooncake C++",
        results.iter().all(Outcome::is_ok) && theirs.bytes.holds(0, &data)?,
    )?;
    let (results, read) = ours.engine.read_batch(requests(&vec![0; data.len()]), deadline).await;
    let read: Vec<u8> = read.into_iter().flat_map(|request| request.transfer.buffer).collect();
    checks.that("batch of reads from Mooncake C++", results.iter().all(Outcome::is_ok) && read == data)?;
    let (data, name) = (random(101, COUNT * LEN), ours.engine.name());
    theirs.bytes.put(0, &data)?;
    let code = theirs.code(json!(["batch", true, name, 0, ours.base, LEN, COUNT]))?;
    settled(&ours.bytes, &data).await;
    checks.that("batch of writes by Mooncake C++", code == 0 && ours.bytes.holds(0, &data)?)?;
    let data = random(102, COUNT * LEN);
    ours.bytes.put(0, &data)?;
    let code = theirs.code(json!(["batch", false, name, 0, ours.base, LEN, COUNT]))?;
    checks.that("batch of reads by Mooncake C++", code == 0 && theirs.bytes.holds(0, &data)?)
}

type Outcome = mooncake_core::Result<()>;

async fn messages(checks: &mut Checks, ours: &Ours, theirs: &mut Theirs) -> Result<()> {
    let note = Notification { name: "from us".into(), message: "héllo".into() };
    ours.engine.notify(&theirs.name, &note).await.map_err(|e| e.to_string())?;
    checks.that(
        "Mooncake C++ gets the message",
        theirs.node.call(json!(["messages"]))? == json!([["from us", "héllo"]]),
    )?;
    let name = ours.engine.name();
    let code = theirs.code(json!(["write_with_message", name, 0, ours.base, 100, "from them", "done"]))?;
    let got = ours.engine.take_notifications();
    let wanted = Notification { name: "from them".into(), message: "done".into() };
    checks.that("this project gets the message", code == 0 && got == [wanted])?;
    checks.that("Mooncake C++ finds this engine alive", theirs.code(json!(["probe", name]))? == 0)?;
    let seen = ours.engine.probe(&theirs.name, PATIENCE).await.map_err(|e| e.to_string())?;
    checks.that("this engine finds Mooncake C++ alive", seen)
}

/// Checks memory that is closed while the other side writes to it: the write fails at once, and
/// succeeds after the memory is opened again.
async fn closed_in_flight(
    checks: &mut Checks,
    ours: &mut Ours,
    theirs: &mut Theirs,
    target: &Target<TransportSet>,
) -> Result<()> {
    const LEN: usize = 1 << 20;
    let data = random(200, LEN);
    theirs.bytes.put(0, &data)?;
    let name = ours.engine.name().to_owned();
    theirs.code(json!(["start_writing", name, 0, ours.base, LEN]))?;
    settled(&ours.bytes, &data).await;
    ours.unregister().await?;
    let end = theirs.node.call(json!(["end_of_writing", PATIENCE.as_secs()]))?;
    checks.that("a write of Mooncake C++ to closed memory fails", end == json!(-1))?;
    ours.register().await?;
    checks
        .that("and succeeds after reopening", theirs.code(json!(["write", name, 0, ours.base, LEN]))? == 0)?;

    let writing = async {
        loop {
            if let Err(error) = ours.write(target, theirs.base, &data).await {
                return error;
            }
        }
    };
    let node = &mut theirs.node;
    let closing = async { tokio::task::block_in_place(|| node.call(json!(["unregister"]))) };
    let (error, closed) = tokio::join!(writing, closing);
    checks.that("Mooncake C++ closes its memory", closed? == json!(0))?;
    checks.that(
        &format!("a write to closed memory of Mooncake C++ fails at once: {error}"),
        !error.to_string().contains("deadline"),
    )?;
    checks.that("Mooncake C++ reopens its memory", theirs.code(json!(["register"]))? == 0)?;
    let again = ours.write(target, theirs.base, &data).await;
    checks.that(&format!("and a write succeeds after reopening: {again:?}"), again.is_ok())
}

/// Checks the restart of each side.
async fn restarts(
    checks: &mut Checks,
    programs: &Programs,
    setting: &Setting<'_>,
    ours: Ours,
    theirs: Theirs,
    target: Target<TransportSet>,
) -> Result<()> {
    let data = random(300, 100_000);
    // The process is killed, and its entries with it.
    drop(theirs);
    let gone = ours.write(&target, 4096, &data[..10]).await;
    checks.that("a write to the dead process fails", gone.is_err())?;
    if !setting.is_p2p() {
        // An operator does this if the server refuses the name of a dead process.
        let entries = HttpMetadata::new(setting.metadata).map_err(|e| e.to_string())?;
        for key in ["mooncake/rpc_meta/theirs:1", "mooncake/ram/theirs:1"] {
            entries.delete(key).await.map_err(|e| e.to_string())?;
        }
    }
    let mut theirs = Theirs::start(&programs.peer, setting)?;
    let target = if setting.is_p2p() { ours.open(&theirs).await? } else { target };
    let mut written = Err("no attempt was made".into());
    // The old lookup is not repeated at once.
    for _ in 0..20 {
        written = ours.write(&target, theirs.base, &data).await.map_err(|e| e.to_string());
        if written.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    settled(&theirs.bytes, &data).await;
    checks.that(
        &format!("Mooncake C++ is found again: {written:?}"),
        written.is_ok() && theirs.bytes.holds(0, &data)?,
    )?;

    let (name, base) = (ours.engine.name().to_owned(), ours.base);
    ours.engine.close().await.map_err(|e| e.to_string())?;
    drop(ours);
    checks.that(
        "Mooncake C++ notices the end of this engine",
        theirs.code(json!(["write", name, 0, base, 10]))? == -1,
    )?;
    let ours = Ours::start(setting).await?;
    let name = ours.engine.name().to_owned();
    theirs.bytes.put(0, &data)?;
    let code = theirs.code(json!(["write", name, 0, ours.base, data.len()]))?;
    settled(&ours.bytes, &data).await;
    checks.that("Mooncake C++ finds this engine again", code == 0 && ours.bytes.holds(0, &data)?)?;
    ours.engine.close().await.map_err(|e| e.to_string())?;
    Ok(())
}
