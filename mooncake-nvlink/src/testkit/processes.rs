//! Cases with two processes, one of which owns memory. The owner is a program that calls [`owner`]
//! and is started by [`Spawn`].

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::MemorySource;
use mooncake_core::{ErrorKind, Result};
use mooncake_transport::config::NvlinkConfig;
use mooncake_transport::fallback::PartialTransport;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Region, SegmentDesc, SliceMut, Transport};
use tokio::runtime::Runtime;

use super::{device, filled};
use crate::cuda::DeviceMemory;
use crate::peer::NvlinkPeer;
use crate::transport::NvlinkTransport;

const LEN: usize = 1 << 20;

/// Function that returns the command of the owner's process.
pub type Spawn<'a> = &'a dyn Fn() -> Command;

/// Counter of driver objects or device bytes, which must not grow.
pub type Count<'a> = &'a dyn Fn() -> i64;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// Runs the process of the owner. Its memory is full of one byte, and it prints a line for each
/// action. Returns at the end of its input.
///
/// # Panics
/// Panics when a call fails.
pub fn owner(count: Count<'_>) {
    let mut commands = std::io::stdin().lines();
    let Some(seed) = commands.next().and_then(|line| line.ok()?.parse::<u8>().ok()) else { return };
    let runtime = runtime();
    let node = NvlinkTransport::start(NvlinkConfig::default(), runtime.handle()).unwrap();
    let device = device(0);
    let memory = filled(&device, LEN, seed);
    let mut region = Some(Region::register(&node, memory.clone(), Access::Remote).unwrap());
    let mut cycles = 0u8;
    print_line(&describe(&node, region.as_ref().unwrap()));
    for line in commands {
        match line.unwrap().as_str() {
            "close" => {
                drop(region.take());
                // A peer must not see any of the bytes written from now on.
                // SAFETY: the memory is allocated, and closed.
                unsafe { device.fill(memory.span(), seed + 1) }.unwrap();
                print_line("closed");
            }
            "cycle" => {
                let memory = Arc::new(DeviceMemory::new(&device, 4096).unwrap());
                cycles = cycles.wrapping_add(1);
                // SAFETY: new, and without another user.
                unsafe { device.fill(memory.span(), cycles) }.unwrap();
                region = Some(Region::register(&node, memory, Access::Remote).unwrap());
                print_line(&region.as_ref().unwrap().addr().to_string());
            }
            "count" => print_line(&format!("{} {} {}", count(), descriptors(), resident())),
            other => panic!("{other}?"),
        }
    }
}

fn describe(node: &NvlinkTransport, region: &Region<NvlinkTransport>) -> String {
    let mut desc = SegmentDesc::new("owner");
    desc.buffers.push(BufferDesc {
        name: "owner".into(),
        addr: region.addr(),
        length: region.len() as u64,
        ..BufferDesc::default()
    });
    node.describe(&mut desc);
    String::from_utf8(desc.encode()).unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the resident memory in kilobytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
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
    fn start(spawn: Spawn<'_>, seed: u8) -> Self {
        let mut child = spawn().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
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

    fn run_command(&mut self, command: &str) -> String {
        self.send_command(command);
        self.read_line()
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
    node: NvlinkTransport,
    runtime: Runtime,
}

impl User {
    fn new() -> Self {
        Self::with_upkeep_interval(Duration::from_millis(20))
    }

    fn with_upkeep_interval(upkeep_interval: Duration) -> Self {
        let runtime = runtime();
        let config = NvlinkConfig { upkeep_interval, ..NvlinkConfig::default() };
        Self { node: NvlinkTransport::start(config, runtime.handle()).unwrap(), runtime }
    }

    fn connect(&self, desc: &SegmentDesc) -> Result<NvlinkPeer> {
        assert!(self.node.reaches(desc));
        self.runtime.block_on(self.node.connect(desc))
    }

    /// Allocates local memory on a device.
    fn local(&self, number: u32, byte: u8) -> SliceMut<NvlinkTransport> {
        let memory = filled(&device(number), LEN, byte);
        Region::register(&self.node, memory, Access::Local).unwrap().exclusive().unwrap()
    }

    fn read(&self, peer: &NvlinkPeer, at: u64, len: usize) -> Result<Vec<u8>> {
        let deadline = Some(self.node.clock().now().after(Duration::from_secs(20)));
        let read = [Transfer::new(at, vec![0u8; len])];
        let (result, [read]) = transfer::read(&self.node, peer, read, deadline).wait();
        result.map(|()| read.buffer)
    }
}

fn bytes(slice: &SliceMut<NvlinkTransport>) -> Vec<u8> {
    let mut bytes = vec![0; slice.len()];
    slice.copy_to(0, &mut bytes).unwrap();
    bytes
}

/// Checks that memory of another process is read and written, by that many devices.
///
/// # Panics
/// Panics when it is not.
pub fn read_and_written(spawn: Spawn<'_>, devices: u32) {
    let (owner, user) = (Owner::start(spawn, 1), User::new());
    let peer = user.connect(&owner.desc).unwrap();
    for number in 0..devices {
        let read = [Transfer::new(owner.addr(), user.local(number, 5))];
        let (result, [read]) = transfer::read(&user.node, &peer, read, None).wait();
        result.unwrap();
        assert!(bytes(&read.buffer) == vec![1; LEN], "device {number}");
    }
    let at = owner.addr() + 12345;
    let (local, _) = user.local(0, 9).split_at(LEN / 2).unwrap();
    transfer::write(&user.node, &peer, [Transfer::new(at, local.into_shared())], None).wait().0.unwrap();
    let read = user.read(&peer, at - 1, LEN / 2 + 2).unwrap();
    assert!(read[0] == 1 && read[1..read.len() - 1].iter().all(|b| *b == 9) && read[read.len() - 1] == 1);
    owner.kill();
}

/// Checks that a killed owner is unavailable at once, and that the next one under its name is a
/// different one.
///
/// # Panics
/// Panics when the check fails.
pub fn killed_and_followed(spawn: Spawn<'_>) {
    let (owner, user) = (Owner::start(spawn, 1), User::new());
    let peer = user.connect(&owner.desc).unwrap();
    user.read(&peer, owner.addr(), LEN).unwrap();
    let (desc, addr) = (owner.desc.clone(), owner.addr());
    owner.kill();
    let error = user.read(&peer, addr, 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(user.connect(&desc).is_err());

    // Under the same name as before.
    let owner = Owner::start(spawn, 7);
    assert!(user.read(&peer, addr, 64).is_err(), "the old connection does not lead to the new owner");
    let new_peer = user.connect(&owner.desc).unwrap();
    assert_eq!(user.read(&new_peer, owner.addr(), 64).unwrap(), [7; 64]);
    owner.kill();
}

/// Checks that a region closed under a reader never shows later bytes.
///
/// # Panics
/// Panics when it does.
pub fn closed_under_a_reader(spawn: Spawn<'_>) {
    let (mut owner, user) = (Owner::start(spawn, 3), User::new());
    let peer = user.connect(&owner.desc).unwrap();
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
        assert_eq!(owner.run_command("close"), "closed");
        let (reads, error) = reader.join().unwrap();
        assert!(reads > 0);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    });
    owner.kill();
}

/// Returns the descriptor as nodes of Mooncake C++ publish it: with a handle, and without the
/// endpoint.
fn without_endpoint(mut desc: SegmentDesc) -> SegmentDesc {
    desc.extra.remove("nvlink_endpoint").unwrap();
    desc
}

/// Checks that a descriptor alone leads to memory, as that of a node of Mooncake C++, and never to
/// the memory of another owner. The driver keeps memory that a peer has open, so the bytes of an
/// owner that has ended stay until the last peer has closed them.
///
/// # Panics
/// Panics when the check fails.
pub fn by_descriptor_alone(spawn: Spawn<'_>) {
    let (owner, user) = (Owner::start(spawn, 4), User::new());
    let desc = without_endpoint(owner.desc.clone());
    assert_eq!(desc.buffers[0].extra["shm_name"].as_str().unwrap().len(), 128);
    let peer = user.connect(&desc).unwrap();
    assert_eq!(user.read(&peer, owner.addr() + 5, 64).unwrap(), [4; 64]);
    assert_eq!(user.read(&peer, owner.addr() + LEN as u64 - 1, 2).unwrap_err().kind(), ErrorKind::Invalid);
    owner.kill();
    let at = desc.buffers[0].addr;
    assert_eq!(user.read(&peer, at, 64).unwrap(), [4; 64], "the mapping keeps the memory");
    let owner = Owner::start(spawn, 6);
    let next = user.connect(&without_endpoint(owner.desc.clone())).unwrap();
    assert_eq!(user.read(&next, owner.addr(), 64).unwrap(), [6; 64], "the earlier memory was read");
    assert_eq!(user.read(&peer, at, 64).unwrap(), [4; 64], "the later memory was read");
    owner.kill();
    // While it is open, the driver may open it once more.
    let open = || user.connect(&desc).and_then(|peer| user.read(&peer, at, 64));
    assert!(open().map_or(true, |bytes| bytes == [4; 64]), "other memory was read");
    drop((peer, next));
    let error = open().unwrap_err();
    assert!(error.to_string().contains("cannot be opened"), "{error}");
}

/// Checks two nodes of one process: the open memory of one, which is freed by now, neither blocks
/// the other from new memory at the same address, nor is taken for it. Returns whether memory was
/// allocated at the same address at all, which is up to the driver.
///
/// # Panics
/// Panics when the check fails.
pub fn two_nodes_of_one_process(spawn: Spawn<'_>) -> bool {
    let mut owner = Owner::start(spawn, 1);
    // The long interval keeps both from checking what the owner has closed before they need to.
    let users = [
        User::with_upkeep_interval(Duration::from_secs(3600)),
        User::with_upkeep_interval(Duration::from_secs(3600)),
    ];
    let peers = [users[0].connect(&owner.desc).unwrap(), users[1].connect(&owner.desc).unwrap()];
    let (mut addresses, mut is_reused) = (Vec::new(), false);
    for cycle in 1..=6u8 {
        let at: u64 = owner.run_command("cycle").parse().unwrap();
        is_reused |= addresses.contains(&at);
        addresses.push(at);
        // In turns, so that each has memory open whose end the other does not know yet.
        let first = usize::from(cycle / 3 % 2);
        for user in [first, 1 - first].into_iter().take(if cycle < 3 { 2 } else { 1 }) {
            let read = users[user].read(&peers[user], at, 64);
            let read = read.unwrap_or_else(|error| panic!("cycle {cycle}: {error}"));
            assert_eq!(read, [cycle; 64], "cycle {cycle}: bytes of another allocation");
        }
    }
    owner.kill();
    is_reused
}

/// Registers, exports, opens, reads and closes memory so many times. Objects, descriptors and
/// memory of both processes must not grow. Returns the counts before and after.
///
/// # Panics
/// Panics when they grow.
pub fn cycles(spawn: Spawn<'_>, count: Count<'_>, cycles: usize) -> String {
    let (mut owner, user) = (Owner::start(spawn, 1), User::new());
    let peer = user.connect(&owner.desc).unwrap();
    let local = user.local(0, 0);
    let mut local = Some(local.split_at(64).unwrap().0);
    let mut before = None;
    for cycle in 0..cycles {
        let at: u64 = owner.run_command("cycle").parse().unwrap();
        let read = [Transfer::new(at, local.take().unwrap())];
        let (result, [read]) = transfer::read(&user.node, &peer, read, None).wait();
        result.unwrap_or_else(|error| panic!("cycle {cycle}: {error}"));
        assert!(bytes(&read.buffer) == [(cycle + 1) as u8; 64], "cycle {cycle}: bytes of another allocation");
        local = Some(read.buffer);
        // By then the pools are full.
        if cycle == cycles / 10 {
            before = Some((counted(count), owner.run_command("count")));
        }
    }
    let (user_counts, owner_counts) = (counted(count), owner.run_command("count"));
    let (user_counts_before, owner_counts_before) = before.unwrap();
    let text = format!(
        "objects, descriptors, kilobytes: user {user_counts_before} -> {user_counts}, owner {owner_counts_before} -> {owner_counts}"
    );
    assert_no_growth(&user_counts_before, &user_counts);
    assert_no_growth(&owner_counts_before, &owner_counts);
    owner.kill();
    text
}

/// Reads the memory of that many owners, one after the other, each of which is then killed. Driver
/// objects and descriptors of them must be released within a minute.
///
/// # Panics
/// Panics when they are not.
pub fn departed_owners(spawn: Spawn<'_>, count: Count<'_>, owners: u8) {
    let user = User::new();
    let read_from_owner = |seed: u8| {
        let owner = Owner::start(spawn, seed);
        let peer = user.connect(&owner.desc).unwrap();
        assert_eq!(user.read(&peer, owner.addr(), 64).unwrap(), [seed; 64]);
        owner.kill();
    };
    let used = || {
        user.node.release_departed();
        (count(), descriptors())
    };
    // Pools and contexts are made by the first reads.
    (0..2).for_each(read_from_owner);
    let before = used();
    (2..owners).for_each(read_from_owner);
    let end = user.node.clock().now().after(Duration::from_secs(60));
    loop {
        let after = used();
        if after.0 <= before.0 && after.1 <= before.1 {
            return;
        }
        assert!(user.node.clock().now() < end, "objects, descriptors: {before:?} -> {after:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn counted(count: Count<'_>) -> String {
    format!("{} {} {}", count(), descriptors(), resident())
}

fn assert_no_growth(before: &str, after: &str) {
    let numbers = |text: &str| -> Vec<i64> { text.split(' ').map(|word| word.parse().unwrap()).collect() };
    let (before, after) = (numbers(before), numbers(after));
    // The last region is open in one process and not in the other, and upkeep may keep it open a
    // little longer.
    assert!((after[0] - before[0]).abs() <= 4, "driver objects: {before:?} -> {after:?}");
    assert!((after[1] - before[1]).abs() <= 8, "descriptors: {before:?} -> {after:?}");
    assert!(after[2] - before[2] < 8192, "kilobytes: {before:?} -> {after:?}");
}
