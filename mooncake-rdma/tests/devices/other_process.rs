//! Nodes in another process that own memory of this one: shared pages, mapped there at the same
//! addresses and registered with that process's device. So the conformance suite, which checks the
//! owner's bytes, runs between processes unchanged.
//!
//! The other process is this test program, started again. It reads commands from its standard
//! input, a line of JSON each, and responds to each with a line that begins with [`RESPONSE_MARK`].

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_core::clock::SystemClock;
use mooncake_core::memory::{MemorySource, MemorySpan, shared_pages};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_rdma::{RdmaPeer, RdmaTransport, Registration};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{
    Access, BufferDesc, Capabilities, Completion, Op, Opcode, Protocol, Region, SegmentDesc, Transport,
};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::support::{node, patient, runtime};

const RESPONSE_MARK: &str = "answer ";
/// Number of attempts to start a process that has the required addresses free.
const STARTS: usize = 8;

/// Node of this process, or of another one.
#[derive(Debug)]
pub(crate) enum Split {
    Local(Arc<RdmaTransport>),
    Remote(Arc<OtherProcess>),
}

#[derive(Debug)]
pub(crate) enum SplitRegistration {
    Local(Registration),
    Remote(RemoteRegistration),
}

/// Registration in the other process, until dropped.
#[derive(Debug)]
pub(crate) struct RemoteRegistration {
    at: Arc<OtherProcess>,
    id: u64,
    exported: Vec<u8>,
}

#[derive(Clone, Debug)]
pub(crate) enum SplitPeer {
    Local(RdmaPeer),
    Remote(u64),
}

/// Other process.
#[derive(Debug)]
pub(crate) struct OtherProcess {
    device: &'static str,
    process: Mutex<Process>,
    /// Last descriptor of the process; a dead process has no newer one.
    described: Mutex<Option<SegmentDesc>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Process {
    child: Child,
    commands: ChildStdin,
    responses: BufReader<ChildStdout>,
}

impl Process {
    fn start(device: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "other_process::the_other_process",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (commands, responses) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut process = Self { child, commands, responses: BufReader::new(responses) };
        process.request(&json!({"device": device})).expect("the other process starts");
        process
    }

    /// Sends a command and returns the response, or `None` if the process is dead.
    fn request(&mut self, command: &Value) -> Option<Value> {
        writeln!(self.commands, "{command}").ok()?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.responses.read_line(&mut line).ok()? == 0 {
                return None;
            }
            // The test harness prints to the same output, and may have begun the line.
            if let Some(at) = line.find(RESPONSE_MARK) {
                return serde_json::from_str(&line[at + RESPONSE_MARK.len()..]).ok();
            }
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl OtherProcess {
    pub(crate) fn start(device: &'static str) -> Arc<Self> {
        Arc::new(Self {
            device,
            process: Mutex::new(Process::start(device)),
            described: Mutex::default(),
            next: AtomicU64::new(1),
        })
    }

    /// Kills the process with `SIGKILL`.
    pub(crate) fn kill(&self) {
        self.process.lock().kill();
    }

    fn request(&self, command: &Value) -> Option<Value> {
        self.process.lock().request(command)
    }

    fn register(self: &Arc<Self>, span: MemorySpan, access: Access) -> Result<RemoteRegistration> {
        let pages =
            shared_pages(span).ok_or_else(|| Error::invalid("the memory of the suite is not shared"))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let command = json!({
            "register": id,
            "file": format!("/proc/{}/fd/{}", std::process::id(), pages.file().as_raw_fd()),
            "offset": pages.offset_of(span.addr()),
            "addr": span.addr(),
            "len": span.len,
            "remote": access == Access::Remote,
            "read_only": span.read_only,
        });
        let mut process = self.process.lock();
        for _ in 0..STARTS {
            let response = process.request(&command).ok_or_else(process_dead_error)?;
            if let Some(exported) = response["exported"].as_array() {
                let exported = exported.iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
                return Ok(RemoteRegistration { at: self.clone(), id, exported });
            }
            // A process has its own address space. As long as it holds nothing, another one serves
            // as well.
            assert!(response["held"] == 0 && self.described.lock().is_none(), "{response}");
            *process = Process::start(self.device);
        }
        Err(Error::internal("no process has the required addresses free"))
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        let buffer = |buffer: &BufferDesc| json!({"name": buffer.name, "addr": buffer.addr, "length": buffer.length, "key": buffer.key});
        let buffers: Vec<Value> = desc.buffers.iter().map(buffer).collect();
        let mut last_descriptor = self.described.lock();
        if let Some(response) = self.request(&json!({"describe": desc.name, "buffers": buffers})) {
            *last_descriptor = Some(SegmentDesc::decode(response.to_string().as_bytes()).unwrap());
        }
        *desc = last_descriptor.clone().expect("the process was alive before");
    }
}

impl Drop for RemoteRegistration {
    fn drop(&mut self) {
        self.at.request(&json!({"forget": self.id}));
    }
}

fn process_dead_error() -> Error {
    Error::new(ErrorCode::TransferFail, "the other process is dead")
}

// SAFETY: for the node of this process, the promise of its transport. The other process works with
// pages that both have mapped: it ends a registration before the drop of its handle returns, and
// completes a transfer before it responds.
unsafe impl Transport for Split {
    type Registration = SplitRegistration;
    type Peer = SplitPeer;

    fn protocol(&self) -> Protocol {
        Protocol::RDMA
    }

    fn capabilities(&self) -> Capabilities {
        match self {
            Split::Local(node) => node.capabilities(),
            Split::Remote(_) => Capabilities::default().needs_registration(true),
        }
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<SplitRegistration> {
        match self {
            // SAFETY: promised by the caller.
            Split::Local(node) => unsafe { node.register(span, access) }.map(SplitRegistration::Local),
            Split::Remote(at) => at.register(span, access).map(SplitRegistration::Remote),
        }
    }

    fn export(&self, registration: &SplitRegistration) -> Vec<u8> {
        match (self, registration) {
            (Split::Local(node), SplitRegistration::Local(registration)) => node.export(registration),
            (_, SplitRegistration::Remote(registration)) => registration.exported.clone(),
            _ => unreachable!("the registration belongs to another node"),
        }
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        match self {
            Split::Local(node) => node.describe(desc),
            Split::Remote(at) => at.describe(desc),
        }
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<SplitPeer> {
        match self {
            Split::Local(node) => node.connect(desc).await.map(SplitPeer::Local),
            Split::Remote(at) => {
                let desc: Value = serde_json::from_slice(&desc.encode()).unwrap();
                let response = at.request(&json!({"connect": desc})).ok_or_else(process_dead_error)?;
                response["peer"]
                    .as_u64()
                    .map(SplitPeer::Remote)
                    .ok_or_else(|| Error::invalid(response.to_string()))
            }
        }
    }

    fn submit<'a, I>(&self, peer: &SplitPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SplitRegistration>>,
    {
        match (self, peer) {
            (Split::Local(node), SplitPeer::Local(peer)) => {
                let local_registration = |registration: &'a SplitRegistration| match registration {
                    SplitRegistration::Local(registration) => Some(registration),
                    SplitRegistration::Remote(_) => None,
                };
                // SAFETY: the inner registration covers the same bytes, and lives as long as the
                // outer one.
                let ops = ops.map(|op| unsafe {
                    op.with_registration(op.registration().and_then(local_registration))
                });
                node.submit(peer, ops, done);
            }
            (Split::Remote(at), SplitPeer::Remote(peer)) => {
                for (op, share) in ops.zip(done.each()) {
                    let Some(SplitRegistration::Remote(registration)) = op.registration() else {
                        share.finish(Err(Error::invalid("invalid transfer: memory of another node")));
                        continue;
                    };
                    let read = op.opcode() == Opcode::Read;
                    let command = json!({"move": registration.id, "len": op.len(), "peer": peer, "at": op.remote(), "read": read});
                    share.finish(match at.request(&command) {
                        Some(response) if response["done"] == true => Ok(()),
                        Some(response) => Err(Error::new(ErrorCode::TransferFail, response.to_string())),
                        None => Err(process_dead_error()),
                    });
                }
            }
            _ => done.finish(Err(Error::invalid("invalid peer: it was connected by another node"))),
        }
    }
}

/// Main function of the other process.
#[test]
#[ignore = "runs as the other process of the conformance suite"]
fn the_other_process() {
    let mut commands = std::io::stdin().lines().map_while(Result::ok);
    // Without input, all tests of the program are being run.
    let Some(first) = commands.next() else { return };
    let first: Value = serde_json::from_str(&first).unwrap();
    let runtime = runtime();
    let (node, _port) = node(&runtime, SystemClock::shared(), patient(first["device"].as_str().unwrap()));
    let mut regions: HashMap<u64, Region<RdmaTransport>> = HashMap::new();
    let mut peers = Vec::new();
    let respond = |value: Value| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{RESPONSE_MARK}{value}").and_then(|()| out.flush()).unwrap();
    };
    respond(Value::Null);
    for command in commands {
        let command: Value = serde_json::from_str(&command).unwrap();
        let n = |name: &str| command[name].as_u64();
        respond(if let Some(id) = n("register") {
            let access = if command["remote"] == true { Access::Remote } else { Access::Local };
            match MappedPages::map(&command) {
                Some(memory) => {
                    let region = Region::register(&*node, Arc::new(memory), access).unwrap();
                    let exported = node.export(region.registration().unwrap());
                    regions.insert(id, region);
                    json!({"exported": exported})
                }
                None => json!({"held": regions.len()}),
            }
        } else if let Some(id) = n("forget") {
            regions.remove(&id);
            Value::Null
        } else if let Some(name) = command["describe"].as_str() {
            described(&node, name, &command["buffers"])
        } else if command["connect"].is_object() {
            let desc = SegmentDesc::decode(command["connect"].to_string().as_bytes()).unwrap();
            peers.push(runtime.block_on(node.connect(&desc)).unwrap());
            json!({"peer": peers.len() - 1})
        } else if let (Some(id), Some(peer)) = (n("move"), n("peer")) {
            let (region, at, peer) = (regions.remove(&id).unwrap(), n("at").unwrap(), &peers[peer as usize]);
            assert_eq!(Some(region.len() as u64), n("len"), "transfers cover whole registrations");
            let (result, region) = if command["read"] == true {
                let transfer = [Transfer::new(at, region.exclusive().unwrap())];
                let (result, [Transfer { buffer, .. }]) = transfer::read(&*node, peer, transfer, None).wait();
                (result, buffer.into_region().unwrap())
            } else {
                let transfer = [Transfer::new(at, region.slice(0..region.len()).unwrap())];
                (transfer::write(&*node, peer, transfer, None).wait().0, region)
            };
            regions.insert(id, region);
            json!({"done": result.is_ok(), "why": result.err().map(|error| error.to_string())})
        } else {
            panic!("{command}")
        });
    }
}

fn described(node: &RdmaTransport, name: &str, buffers: &Value) -> Value {
    let mut desc = SegmentDesc::new(name);
    let bytes =
        |key: &Value| key.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
    desc.buffers = buffers
        .as_array()
        .unwrap()
        .iter()
        .map(|buffer| BufferDesc {
            name: buffer["name"].as_str().unwrap().into(),
            addr: buffer["addr"].as_u64().unwrap(),
            length: buffer["length"].as_u64().unwrap(),
            key: bytes(&buffer["key"]),
            ..BufferDesc::default()
        })
        .collect();
    node.describe(&mut desc);
    serde_json::from_slice(&desc.encode()).unwrap()
}

/// Pages of another process, mapped at the addresses that they have there.
struct MappedPages {
    span: MemorySpan,
    start: NonNull<u8>,
    len: usize,
}

impl MappedPages {
    /// Maps the pages of a command. Returns `None` if the addresses are in use.
    fn map(command: &Value) -> Option<Self> {
        let n = |name: &str| usize::try_from(command[name].as_u64().unwrap()).unwrap();
        let file = File::options().read(true).write(true).open(command["file"].as_str().unwrap()).unwrap();
        let (addr, offset) = (n("addr"), n("offset"));
        let before = offset % 4096;
        let len = (before + n("len")).next_multiple_of(4096);
        // SAFETY: a new mapping, which replaces none.
        let found = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(addr - before),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
                file.as_raw_fd(),
                libc::off_t::try_from(offset - before).unwrap(),
            )
        };
        let start = NonNull::new(found.cast::<u8>()).filter(|_| found != libc::MAP_FAILED)?;
        // SAFETY: inside the mapping.
        let first = unsafe { start.add(before) };
        let read_only = command["read_only"] == true;
        Some(Self { span: MemorySpan { read_only, ..MemorySpan::new(first, n("len")) }, start, len })
    }
}

// SAFETY: an address and a length.
unsafe impl Send for MappedPages {}
// SAFETY: as above.
unsafe impl Sync for MappedPages {}

// SAFETY: mapped until dropped, and no reference to the bytes exists.
unsafe impl MemorySource for MappedPages {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no longer registered.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
