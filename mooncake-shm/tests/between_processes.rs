//! Transfers between two processes. The owner is this test binary, started again for the one test
//! that serves memory until it is stopped.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ErrorKind;
use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_shm::{ShmConfig, ShmPeer, ShmTransport};
use mooncake_transport::fallback::PartialTransport;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Region, SegmentDesc, Transport};
use tokio::runtime::Runtime;

const LEN: usize = 8 << 20;
const NAME: &str = "processes-test";

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Process of the owner. Its memory is full of one byte, and it prints a line for each action.
#[test]
#[ignore = "runs as the other process of the tests in this file"]
fn owner() {
    let mut commands = std::io::stdin().lines();
    let Some(seed) = commands.next().and_then(|line| line.ok()?.parse::<u8>().ok()) else { return };
    let runtime = runtime();
    let node = ShmTransport::start(ShmConfig::default(), runtime.handle()).unwrap();
    let options = HostMemoryOptions { shared: Some(NAME.into()), ..Default::default() };
    let memory = Arc::new(HostMemory::with(LEN, &options).unwrap());
    let mut region = Some(Region::register(&node, memory.clone(), Access::Remote).unwrap());
    let mut all = region.take().unwrap().exclusive().unwrap();
    all.copy_from(0, &vec![seed; LEN]).unwrap();
    let mut region = Some(all.into_region().unwrap());
    let mut desc = SegmentDesc::new("owner");
    desc.buffers.push(BufferDesc {
        name: "owner".into(),
        addr: region.as_ref().unwrap().addr(),
        length: LEN as u64,
        ..BufferDesc::default()
    });
    node.describe(&mut desc);
    print_line(&String::from_utf8(desc.encode()).unwrap());
    for line in commands {
        match line.unwrap().as_str() {
            "close" => {
                drop(region.take());
                // A peer must not see any of the bytes written from now on.
                let all = Region::<ShmTransport>::unregistered(memory.clone()).unwrap();
                all.exclusive().unwrap().copy_from(0, &vec![seed + 1; LEN]).unwrap();
                print_line("closed");
            }
            other => panic!("{other}?"),
        }
    }
}

fn print_line(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "> {line}").unwrap();
    out.flush().unwrap();
}

struct Owner {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    desc: SegmentDesc,
}

impl Owner {
    fn start(seed: u8) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["owner", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut owner = Self { child, lines, desc: SegmentDesc::default() };
        owner.send_command(&seed.to_string());
        owner.desc = SegmentDesc::decode(owner.read_line().as_bytes()).unwrap();
        owner
    }

    fn read_line(&mut self) -> String {
        loop {
            let line = self.lines.next().expect("the owner prints a line").unwrap();
            // The test harness prints lines, too, and begins a line.
            if let Some((_, text)) = line.split_once("> ") {
                return text.to_owned();
            }
        }
    }

    fn send_command(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    fn addr(&self) -> u64 {
        self.desc.buffers[0].addr
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

struct User {
    node: ShmTransport,
    runtime: Runtime,
}

impl User {
    fn new() -> Self {
        let runtime = runtime();
        let config = ShmConfig { upkeep_interval: Duration::from_millis(20), ..ShmConfig::default() };
        Self { node: ShmTransport::start(config, runtime.handle()).unwrap(), runtime }
    }

    fn connect(&self, owner: &Owner) -> mooncake_core::Result<ShmPeer> {
        assert!(self.node.reaches(&owner.desc));
        self.runtime.block_on(self.node.connect(&owner.desc))
    }

    fn read(&self, peer: &ShmPeer, at: u64, len: usize) -> mooncake_core::Result<Vec<u8>> {
        let deadline = Some(self.node.clock().now().after(Duration::from_secs(20)));
        let read = [Transfer::new(at, vec![0u8; len])];
        let (result, [read]) = transfer::read(&self.node, peer, read, deadline).wait();
        result.map(|()| read.buffer)
    }
}

#[test]
fn memory_of_another_process_is_read_and_written() {
    let (owner, user) = (Owner::start(1), User::new());
    let peer = user.connect(&owner).unwrap();
    assert!(user.read(&peer, owner.addr(), LEN).unwrap() == vec![1; LEN]);
    let at = owner.addr() + 12345;
    let write = [Transfer::new(at, vec![9u8; 3 << 20])];
    transfer::write(&user.node, &peer, write, None).wait().0.unwrap();
    let read = user.read(&peer, at - 1, (3 << 20) + 2).unwrap();
    assert!(read[0] == 1 && read[1..read.len() - 1].iter().all(|b| *b == 9) && read[read.len() - 1] == 1);
    owner.kill();
}

#[test]
fn a_killed_owner_is_unavailable_at_once_and_its_memory_is_unmapped() {
    let (owner, user) = (Owner::start(1), User::new());
    let peer = user.connect(&owner).unwrap();
    user.read(&peer, owner.addr(), LEN).unwrap();
    assert_eq!(peer.mapped_bytes(), LEN as u64);
    let (desc, addr) = (owner.desc.clone(), owner.addr());
    owner.kill();
    let error = user.read(&peer, addr, 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(user.runtime.block_on(user.node.connect(&desc)).is_err());
    // Checked at the next turn.
    let start = user.node.clock().now();
    while peer.mapped_bytes() != 0 {
        assert!(user.node.clock().now().since(start) < Duration::from_secs(20), "the memory is still mapped");
        std::thread::yield_now();
    }

    // Under the same name as before.
    let owner = Owner::start(7);
    assert!(user.read(&peer, addr, 64).is_err(), "the old connection does not lead to the new owner");
    let new_peer = user.connect(&owner).unwrap();
    assert_eq!(user.read(&new_peer, owner.addr(), 64).unwrap(), [7; 64]);
    owner.kill();
}

#[test]
fn a_region_closed_under_a_reader_never_shows_later_bytes() {
    let (mut owner, user) = (Owner::start(3), User::new());
    let peer = user.connect(&owner).unwrap();
    let addr = owner.addr();
    let (read_once, has_read) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reads = 0;
            loop {
                match user.read(&peer, addr, LEN) {
                    Ok(bytes) => assert!(bytes.iter().all(|b| *b == 3), "bytes written after the close"),
                    Err(error) => return (reads, error),
                }
                reads += 1;
                let _ = read_once.send(());
            }
        });
        has_read.recv().unwrap();
        owner.send_command("close");
        assert_eq!(owner.read_line(), "closed");
        let (reads, error) = reader.join().unwrap();
        assert!(reads > 0);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    });
    owner.kill();
}
