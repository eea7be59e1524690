//! Two engines with a bad network between them: 20 ms each way, one packet of a hundred lost, and then nothing at all for five seconds.
//!
//! Each engine has a network namespace of its own, joined by two TUN devices and a relay that delays and drops packets: kernels built
//! without `sch_netem` are common, and this needs nothing but /dev/net/tun, iproute2 and root. `cargo xtask network` runs it.
#![cfg(all(target_os = "linux", feature = "transport-tcp"))]
#![allow(clippy::disallowed_methods, reason = "a relay of packets keeps real time")]
#![allow(clippy::print_stdout, reason = "it is run for its figures, too")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mooncake_core::clock::Rng;
use mooncake_core::memory::HostMemory;
use mooncake_engine::TransferEngine;
use mooncake_transport::engine::{Batch, HandshakePort};

const DELAY: Duration = Duration::from_millis(20);
const LOST_PER_THOUSAND: u64 = 10;
const DOWN: Duration = Duration::from_secs(5);
/// What each transfer is given, and by how much it may be told late.
const DEADLINE: Duration = Duration::from_secs(3);
const SLACK: Duration = Duration::from_secs(1);
const BLOCK: usize = 64 << 10;
const BATCH: usize = 4;

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
    for line in [
        "link set lo up".to_owned(),
        format!("addr add {local} peer {peer} dev mctun"),
        "link set mctun mtu 9000 up".to_owned(),
    ] {
        let status = Command::new("ip").args(line.split(' ')).status().expect("iproute2");
        assert!(status.success(), "ip {line}");
    }
    device
}

/// Moves packets one way, late and not all of them.
fn relay(mut from: File, mut to: File, down: Arc<AtomicBool>, seed: u64) {
    let (queue, packets) = channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        let mut rng = Rng::seeded(seed);
        let mut packet = vec![0; 16 << 10];
        while let Ok(n) = from.read(&mut packet) {
            if rng.below(1000) >= LOST_PER_THOUSAND && !down.load(Ordering::Relaxed) {
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
    let builder =
        TransferEngine::builder().environment_of(|name| (name == "MC_FORCE_TCP").then(|| "1".into()));
    builder
        .handshake(port)
        .local_copies(mooncake_transport::engine::LocalCopies::Never)
        .start()
        .await
        .unwrap()
}

/// What became of a batch: when it ended, how long it took, and the bytes it moved.
struct Done {
    at: Instant,
    took: Duration,
    bytes: usize,
}

fn rate(done: &[Done], from: Instant, to: Instant) -> f64 {
    let bytes: usize = done.iter().filter(|d| d.at > from && d.at <= to).map(|d| d.bytes).sum();
    bytes as f64 / (to - from).as_secs_f64()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

struct Owner {
    name: String,
    address: u64,
}

/// Serves memory until the sender goes; whether the memory was let go of in the end.
fn owner(tell: &Sender<Owner>, over: &Receiver<()>) -> bool {
    let memory = Arc::new(HostMemory::new(BATCH * BLOCK).unwrap());
    let runtime = runtime();
    runtime.block_on(async {
        let engine = engine("10.77.0.2").await;
        let region = engine.register(memory.clone()).await.unwrap();
        tell.send(Owner { name: engine.name().into(), address: region.addr() }).unwrap();
        while over.try_recv() != Err(std::sync::mpsc::TryRecvError::Disconnected) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        drop(region);
        engine.close().await.unwrap();
    });
    drop(runtime);
    Arc::strong_count(&memory) == 1
}

#[test]
#[ignore = "needs root, iproute2 and /dev/net/tun, and takes half a minute: cargo xtask network"]
fn transfers_end_in_time_and_come_back_with_the_network() {
    let before = descriptors();
    let (tell, told) = channel();
    let (keep, over) = channel::<()>();
    let (give, device) = channel();
    let far = in_namespace(move || {
        give.send(tun("10.77.0.2", "10.77.0.1")).unwrap();
        owner(&tell, &over)
    });
    let near = in_namespace(move || {
        let (ours, theirs) = (tun("10.77.0.1", "10.77.0.2"), device.recv().unwrap());
        let down = Arc::new(AtomicBool::new(false));
        relay(ours.try_clone().unwrap(), theirs.try_clone().unwrap(), down.clone(), 1);
        relay(theirs, ours, down.clone(), 2);
        let owner = told.recv().unwrap();
        let runtime = runtime();
        runtime.block_on(user(owner, down));
        drop(keep);
    });
    near.join().unwrap();
    assert!(far.join().unwrap(), "the owner's memory is let go of");
    // The relay's four files stay with their threads.
    assert!(descriptors() <= before + 6, "{} descriptors, {before} before", descriptors());
}

async fn user(owner: Owner, down: Arc<AtomicBool>) {
    let engine = engine("10.77.0.1").await;
    let target = engine.open(&owner.name).await.unwrap();
    let done = Arc::new(Mutex::new(Vec::new()));
    let stop = Arc::new(AtomicBool::new(false));
    let traffic = {
        let (engine, target, done, stop) = (engine.clone(), target.clone(), done.clone(), stop.clone());
        tokio::spawn(async move {
            let mut fill = 0u8;
            while !stop.load(Ordering::Relaxed) {
                let began = Instant::now();
                let mut batch = Batch::new();
                for i in 0..BATCH {
                    let at = owner.address + (i * BLOCK) as u64;
                    match i % 2 {
                        0 => batch.write(&target, at, vec![fill; BLOCK]),
                        _ => batch.read(&target, at, vec![0; BLOCK]),
                    };
                }
                fill = fill.wrapping_add(1);
                let finished = engine.submit(batch, Some(engine.clock().now().after(DEADLINE))).await;
                let bytes = finished.results.iter().filter(|result| result.is_ok()).count() * BLOCK;
                let at = Instant::now();
                done.lock().unwrap().push(Done { at, took: at - began, bytes });
                if bytes == 0 {
                    // Refused at once while the peer is known to be away.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        })
    };
    tokio::time::sleep(Duration::from_secs(6)).await;
    let cut = Instant::now();
    // One with all the time in the world, which is on its way when the network goes.
    let (result, _) = {
        let (engine, target) = (engine.clone(), target.clone());
        let patient =
            tokio::spawn(
                async move { engine.read(&target, owner.address, vec![0; BATCH * BLOCK], None).await },
            );
        tokio::time::sleep(Duration::from_millis(30)).await;
        down.store(true, Ordering::Relaxed);
        tokio::time::sleep(DOWN).await;
        down.store(false, Ordering::Relaxed);
        tokio::time::timeout(Duration::from_secs(20), patient).await.expect("it goes on by itself").unwrap()
    };
    let patient_took = cut.elapsed();
    result.unwrap();
    let up = cut + DOWN;
    tokio::time::sleep_until((up + Duration::from_secs(8)).into()).await;
    stop.store(true, Ordering::Relaxed);
    traffic.await.unwrap();
    let done = std::mem::take(&mut *done.lock().unwrap());
    let before = rate(&done, cut - Duration::from_secs(4), cut);
    let first = done.iter().find(|d| d.at > up && d.bytes > 0).expect("it comes back").at - up;
    let after = rate(&done, up + Duration::from_secs(2), up + Duration::from_secs(8));
    let longest = done.iter().map(|d| d.took).max().unwrap();
    println!(
        "20 ms, 1 % lost: {:.2} MB/s before, {:.2} MB/s from 2 s after the network was back; first batch {first:?} after it; longest batch {longest:?} of {DEADLINE:?}; \
         the patient read took {patient_took:?} with {DOWN:?} without a network in it; {} batches",
        before / 1e6,
        after / 1e6,
        done.len()
    );
    assert!(longest <= DEADLINE + SLACK, "a batch took {longest:?}");
    assert!(first <= Duration::from_secs(2), "nothing moved for {first:?} after the network was back");
    assert!(after >= before / 2.0, "{after:.0} B/s, {before:.0} before");
    assert!(patient_took <= DOWN + Duration::from_secs(4), "{patient_took:?}");
    engine.close().await.unwrap();
}
