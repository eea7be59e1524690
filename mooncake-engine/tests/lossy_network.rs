//! Two engines with a bad network between them: 20 ms each way, one packet of a hundred lost, and
//! then a total outage of five seconds.
//!
//! Each engine has a network namespace of its own. Between them is either a veth cable with `tc
//! netem` at both ends, or two TUN devices and a relay that delays and drops packets. The relay
//! needs only /dev/net/tun, iproute2 and root, because many kernels are built without `sch_netem`.
//! `cargo xtask network` runs both, the cable in a virtual machine.
#![cfg(all(target_os = "linux", feature = "transport-tcp"))]
#![allow(clippy::disallowed_methods, reason = "a relay of packets keeps real time")]
#![allow(clippy::print_stdout, reason = "it is run for its figures, too")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use mooncake_core::ErrorKind;
use mooncake_core::clock::Rng;
use mooncake_core::memory::HostMemory;
use mooncake_engine::{TransferEngine, TransportSet};
use mooncake_transport::engine::{Batch, Buffer, HandshakePort, LocalCopies, Target};
use mooncake_transport::{Region, SliceMut};

const DELAY: Duration = Duration::from_millis(20);
const LOST_PER_THOUSAND: u64 = 10;
const DOWN: Duration = Duration::from_secs(5);
/// Deadline of each transfer, and the permitted delay of its error.
const DEADLINE: Duration = Duration::from_secs(3);
const SLACK: Duration = Duration::from_secs(1);
const BLOCK: usize = 16 << 10;
const BATCH: usize = 4;
const USER_HOST: &str = "10.77.0.1";
const OWNER_HOST: &str = "10.77.0.2";

/// Runs a command in the namespace of the calling thread.
fn run(line: &str) {
    let mut parts = line.split(' ');
    let status = Command::new(parts.next().unwrap()).args(parts).status().expect(line);
    assert!(status.success(), "{line}");
}

/// Configures one end of a cable, in the namespace of the calling thread.
fn cable_end(name: &str, address: &str) {
    let (delay, loss) = (DELAY.as_millis(), LOST_PER_THOUSAND as f64 / 10.0);
    run("ip link set lo up");
    run(&format!("ip addr add {address}/24 dev {name}"));
    // Packets are lost one by one, not in the bundles that a cable between two namespaces would
    // carry.
    run(&format!("ip link set {name} gso_max_segs 1 up"));
    // Otherwise a lost request for the other's hardware address takes a whole second.
    std::fs::write(format!("/proc/sys/net/ipv4/neigh/{name}/retrans_time_ms"), "200").unwrap();
    run(&format!("tc qdisc add dev {name} root netem delay {delay}ms loss {loss}% limit 10000"));
}

/// A TUN device in the namespace of the calling thread, as a file of packets.
fn tun(local: &str, peer: &str) -> File {
    let device = File::options().read(true).write(true).open("/dev/net/tun").expect("/dev/net/tun");
    // SAFETY: all zeroes is a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"mctun") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request is one, and lives through the call.
    let rc = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw const request) };
    assert_eq!(rc, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    run("ip link set lo up");
    run(&format!("ip addr add {local} peer {peer} dev mctun"));
    run("ip link set mctun mtu 9000 up");
    device
}

/// Moves packets one way, late and not all of them.
fn relay(mut from: File, mut to: File, up: Arc<AtomicBool>, seed: u64) {
    let (queue, packets) = channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        let mut rng = Rng::seeded(seed);
        let mut packet = vec![0; 16 << 10];
        while let Ok(n) = from.read(&mut packet) {
            if rng.below(1000) >= LOST_PER_THOUSAND && up.load(Ordering::Relaxed) {
                let _ = queue.send((Instant::now() + DELAY, packet[..n].to_vec()));
            }
        }
    });
    std::thread::spawn(move || {
        for (due, packet) in packets {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let _ = to.write(&packet);
        }
    });
}

/// Runs on a thread with a network namespace of its own.
fn in_namespace<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> std::thread::JoinHandle<R> {
    std::thread::spawn(move || {
        // SAFETY: changes what this thread's new sockets belong to, and nothing else.
        let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(rc, 0, "a network namespace needs root: {}", std::io::Error::last_os_error());
        work()
    })
}

fn runtime() -> tokio::runtime::Runtime {
    // One thread, so that every socket is made in its namespace.
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn engine(host: &str) -> TransferEngine {
    let port = HandshakePort { host: Some(host.into()), ..HandshakePort::default() };
    let builder = TransferEngine::builder().environment_of(&[("MC_FORCE_TCP", "1")].into_iter().collect());
    builder.handshake(port).local_copies(LocalCopies::Never).start().await.unwrap()
}

/// Outcome of a batch: its end, its duration, and the bytes that it moved.
struct BatchResult {
    at: Instant,
    duration: Duration,
    bytes: usize,
}

fn rate(done: &[BatchResult], from: Instant, to: Instant) -> f64 {
    let bytes: usize = done.iter().filter(|d| d.at > from && d.at <= to).map(|d| d.bytes).sum();
    bytes as f64 / (to - from).as_secs_f64()
}

/// Returns the files behind the descriptors of this process, sorted.
fn descriptors() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let mut files: Vec<_> = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect();
    files.sort();
    files
}

/// Returns the files of descriptors that stay open after an engine was opened and closed: the
/// process keeps some for its life.
fn lasting_descriptors() -> Vec<PathBuf> {
    let first = in_namespace(|| {
        run("ip link set lo up");
        runtime().block_on(async { engine("127.0.0.1").await.close().await.unwrap() });
    });
    first.join().unwrap();
    descriptors()
}

struct RemoteMemory {
    name: String,
    address: u64,
}

/// Serves memory until the sender ends. Returns whether the memory was released in the end.
fn owner(owner_sender: &Sender<RemoteMemory>, owner_end: &Receiver<()>) -> bool {
    let memory = Arc::new(HostMemory::new(BATCH * BLOCK).unwrap());
    let runtime = runtime();
    runtime.block_on(async {
        let engine = engine(OWNER_HOST).await;
        let region = engine.register(memory.clone()).await.unwrap();
        owner_sender.send(RemoteMemory { name: engine.name().into(), address: region.addr() }).unwrap();
        while owner_end.try_recv() != Err(std::sync::mpsc::TryRecvError::Disconnected) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        drop(region);
        engine.close().await.unwrap();
    });
    drop(runtime);
    Arc::strong_count(&memory) == 1
}

/// Makes the network fail, and work again.
type Switch = Box<dyn Fn(bool) + Send>;

#[test]
#[ignore = "needs root, iproute2 and /dev/net/tun, and takes half a minute: cargo xtask network"]
fn over_a_relay_of_packets() {
    let (device_sender, device) = channel();
    check(
        move |_| device_sender.send(tun(OWNER_HOST, USER_HOST)).unwrap(),
        move |_| {
            let (user_device, owner_device) = (tun(USER_HOST, OWNER_HOST), device.recv().unwrap());
            let up = Arc::new(AtomicBool::new(true));
            relay(user_device.try_clone().unwrap(), owner_device.try_clone().unwrap(), up.clone(), 1);
            relay(owner_device, user_device, up.clone(), 2);
            Box::new(move |on| up.store(on, Ordering::Relaxed))
        },
    );
}

#[test]
#[ignore = "needs root, iproute2 and sch_netem, and takes half a minute: cargo xtask network"]
fn over_a_cable_whose_other_end_goes_down() {
    over_a_cable(|owner_side| {
        let process = std::process::id();
        format!("nsenter --net=/proc/{process}/task/{owner_side}/ns/net ip link set mcfar")
    });
}

#[test]
#[ignore = "needs root, iproute2 and sch_netem, and takes half a minute: cargo xtask network"]
fn over_a_cable_whose_own_end_goes_down() {
    over_a_cable(|_| "ip link set mcnear".into());
}

/// `cut` makes the command, less its last word, of the other side's thread.
fn over_a_cable(cut: impl FnOnce(i32) -> String + Send + 'static) {
    let (plug, plugged) = channel();
    check(
        move |user_side: &Receiver<i32>| {
            // The cable is there once its end is: the sender's part is done then.
            plug.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            user_side.recv().unwrap();
            cable_end("mcfar", OWNER_HOST);
        },
        move |owner_side: &Sender<i32>| {
            let thread = plugged.recv().unwrap();
            run(&format!("ip link add mcnear type veth peer name mcfar netns {thread}"));
            cable_end("mcnear", USER_HOST);
            owner_side.send(0).unwrap();
            let cut = cut(thread);
            Box::new(move |on| run(&format!("{cut} {}", if on { "up" } else { "down" })))
        },
    );
}

#[test]
#[ignore = "needs root and iproute2: cargo xtask network"]
fn on_a_host_with_only_lo() {
    let bytes_read = in_namespace(|| {
        run("ip link set lo up");
        runtime().block_on(async {
            // Neither engine gets a configured address.
            let start = || TransferEngine::builder().local_copies(LocalCopies::Never).start();
            let (owner, user) = (start().await.unwrap(), start().await.unwrap());
            let region = owner.register(Arc::new(HostMemory::new(4096).unwrap())).await.unwrap();
            let target = user.open(owner.name()).await.unwrap();
            assert!(user.probe(owner.name(), Duration::from_secs(5)).await.unwrap());
            user.write(&target, region.addr(), vec![7; 100], None).await.0.unwrap();
            let (result, bytes) = user.read(&target, region.addr() + 99, vec![0; 2], None).await;
            result.unwrap();
            bytes
        })
    });
    assert_eq!(bytes_read.join().unwrap(), [7, 0]);
}

/// `owner_side` and `user_side` lay the network, each in its namespace.
fn check(
    owner_side: impl FnOnce(&Receiver<i32>) + Send + 'static,
    user_side: impl FnOnce(&Sender<i32>) -> Switch + Send + 'static,
) {
    let before = lasting_descriptors();
    let (owner_sender, owner_receiver) = channel();
    let (owner_guard, owner_end) = channel::<()>();
    let (ready_sender, ready) = channel();
    let owner_side = in_namespace(move || {
        owner_side(&ready);
        owner(&owner_sender, &owner_end)
    });
    let user_side = in_namespace(move || {
        let switch = user_side(&ready_sender);
        let owner = owner_receiver.recv().unwrap();
        let memory = Arc::new(HostMemory::new(BATCH * BLOCK).unwrap());
        let runtime = runtime();
        runtime.block_on(user(owner, memory.clone(), switch));
        drop((owner_guard, runtime));
        Arc::strong_count(&memory) == 1
    });
    assert!(user_side.join().unwrap(), "the user's memory is let go of");
    assert!(owner_side.join().unwrap(), "the owner's memory is let go of");
    // The four files of a relay stay with its threads. Threads of the runtimes may still end.
    let began = Instant::now();
    while descriptors().len() > before.len() + 4 {
        assert!(began.elapsed() < DEADLINE, "{:?}, before {before:?}", descriptors());
        std::thread::yield_now();
    }
}

/// Sends batch after batch through the same memory, until it is stopped.
async fn traffic(
    engine: TransferEngine,
    target: Target<TransportSet>,
    address: u64,
    memory: Region<TransportSet>,
    stop: Arc<AtomicBool>,
) -> Vec<BatchResult> {
    let mut rest = Some(memory.exclusive().unwrap());
    let mut blocks = Vec::new();
    for _ in 1..BATCH {
        let (block, after) = rest.take().unwrap().split_at(BLOCK).unwrap();
        blocks.push(Buffer::from(block));
        rest = Some(after);
    }
    blocks.extend(rest.map(Buffer::from));
    let mut done = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let mut batch = Batch::new();
        for (i, block) in blocks.drain(..).enumerate() {
            let block = SliceMut::try_from(block).unwrap();
            let at = address + (i * BLOCK) as u64;
            match i % 2 {
                0 => batch.write(&target, at, block),
                _ => batch.read(&target, at, block),
            };
        }
        let finished = engine.submit(batch, Some(engine.clock().now().after(DEADLINE))).await;
        blocks = finished.buffers;
        let bytes = finished.results.iter().filter(|result| result.is_ok()).count() * BLOCK;
        let at = Instant::now();
        done.push(BatchResult { at, duration: at - began, bytes });
        if bytes == 0 {
            // Refused at once while the peer is known to be away.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    done
}

async fn user(owner: RemoteMemory, memory: Arc<HostMemory>, switch: Switch) {
    let engine = engine(USER_HOST).await;
    let target = engine.open(&owner.name).await.unwrap();
    let region = engine.register(memory).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let traffic = tokio::spawn(traffic(engine.clone(), target.clone(), owner.address, region, stop.clone()));
    tokio::time::sleep(Duration::from_secs(6)).await;
    // One with all the time in the world, which is on its way when the network goes.
    let long_read = {
        let (engine, target) = (engine.clone(), target.clone());
        tokio::spawn(async move { engine.read(&target, owner.address, vec![0; BATCH * BLOCK], None).await })
    };
    tokio::time::sleep(Duration::from_millis(30)).await;
    let cut = Instant::now();
    switch(false);
    tokio::time::sleep(DOWN).await;
    switch(true);
    let up = Instant::now();
    let (outcome, _) =
        tokio::time::timeout(Duration::from_secs(20), long_read).await.expect("it hangs").unwrap();
    let long_read_duration = cut.elapsed();
    tokio::time::sleep_until((up + Duration::from_secs(8)).into()).await;
    stop.store(true, Ordering::Relaxed);
    let done = traffic.await.unwrap();
    let before = rate(&done, cut - Duration::from_secs(4), cut);
    let first = done.iter().find(|d| d.at > up && d.bytes > 0).expect("it comes back").at - up;
    let after = rate(&done, up + Duration::from_secs(2), up + Duration::from_secs(8));
    let while_down = done.iter().filter(|d| d.at - d.duration > cut && d.at < up && d.bytes > 0).count();
    let longest = done.iter().map(|d| d.duration).max().unwrap();
    println!(
        "{DELAY:?}, {LOST_PER_THOUSAND} of 1000 lost: {:.2} MB/s before, {:.2} MB/s from 2 s after the network was back; first batch {first:?} after it; longest batch {longest:?} of {DEADLINE:?}; \
         the patient read took {long_read_duration:?} with {DOWN:?} without a network in it: {outcome:?}; {} batches",
        before / 1e6,
        after / 1e6,
        done.len()
    );
    assert_eq!(while_down, 0, "there was no network");
    assert!(longest <= DEADLINE + SLACK, "a batch took {longest:?}");
    assert!(first <= Duration::from_secs(2), "nothing moved for {first:?} after the network was back");
    // A packet lost at the wrong time costs a batch a fifth of a second, so both measurements
    // scatter.
    assert!(after >= before / 3.0, "{after:.0} B/s, {before:.0} before");
    if let Err(error) = outcome {
        // A network may report that there is no route, and the transfer then fails at once. The
        // relay never reports it.
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(
            ["No route to host", "Network is unreachable"].iter().any(|why| error.message().contains(why)),
            "{error}"
        );
    }
    assert!(long_read_duration <= DOWN + Duration::from_secs(10), "{long_read_duration:?}");
    engine.close().await.unwrap();
}
