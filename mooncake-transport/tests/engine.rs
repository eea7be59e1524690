//! Engine on the loopback transport: no sockets, no runtime, and under Miri too.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use mooncake_core::clock::{Clock, ManualClock, Rng};
use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::meta::{MemoryMetadata, MetadataBackend};
use mooncake_core::{ErrorKind, Result};
use mooncake_transport::engine::{LocalCopies, PeerMetrics};
use mooncake_transport::testkit::{Fault, Faults, Faulty};
use mooncake_transport::{
    BorrowedMemory, Directory, Engine, Loopback, LoopbackNet, Region, Request, Transport,
};

struct Cluster {
    net: LoopbackNet,
    clock: Arc<ManualClock>,
    metadata: Arc<MemoryMetadata>,
}

impl Cluster {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::new());
        Self { net: LoopbackNet::with_clock(clock.clone()), clock, metadata: Arc::default() }
    }

    fn engine(&self, name: &str) -> Engine<Loopback> {
        self.on(Arc::new(self.net.node()), name).unwrap()
    }

    fn on<T: Transport>(&self, wire: Arc<T>, name: &str) -> Result<Engine<T>> {
        let builder = Engine::builder(wire).name(name).clock(self.clock.clone());
        let directory = Directory::new(self.metadata.clone());
        now(builder.directory(directory).start())
    }
}

fn now<F: Future>(future: F) -> F::Output {
    future.now_or_never().expect("nothing on the loopback wire waits")
}

fn memory(bytes: &[u8]) -> Arc<HostMemory> {
    let memory = HostMemory::new(bytes.len()).unwrap();
    // SAFETY: newly allocated, as long as `bytes`, and without other users.
    unsafe { memory.span().ptr.copy_from_nonoverlapping(std::ptr::NonNull::from(bytes).cast(), bytes.len()) };
    Arc::new(memory)
}

fn bytes_of<T: Transport>(region: &Region<T>) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.slice(0..region.len()).unwrap().copy_to(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn engines_find_each_other_and_move_bytes() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.engine("a"), cluster.engine("b"));
    let remote = now(a.register(memory(&[1; 4096]))).unwrap();
    let target = now(b.open("/a")).unwrap();
    assert_eq!(target.descriptor().buffers[0].addr, remote.addr());
    let local = b.register_local(memory(&[0; 100])).unwrap().exclusive().unwrap();
    let (result, local) = now(b.read(&target, remote.addr() + 7, local, None));
    result.unwrap();
    let mut got = [0; 100];
    local.copy_to(0, &mut got).unwrap();
    assert_eq!(got, [1; 100]);
    let (result, _) = now(b.write(&target, remote.addr(), Bytes::from_static(b"hello"), None));
    result.unwrap();
    assert_eq!(&bytes_of(&remote)[..6], b"hello\x01");
    let own = now(a.open("a")).unwrap();
    let (result, got) = now(a.read(&own, remote.addr(), vec![0; 5], None));
    result.unwrap();
    assert_eq!(got, b"hello");
    assert_eq!(now(b.open("nobody")).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn registration_is_checked_published_and_undone() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.engine("a"), cluster.engine("b"));
    let source = memory(&[1; 4096]);
    let region = now(a.register(source.clone())).unwrap();
    let overlap = now(a.register(source.clone())).unwrap_err();
    assert!(overlap.kind() == ErrorKind::Invalid && overlap.message().contains("overlap"), "{overlap}");
    a.register_local(source.clone()).expect("local memory may overlap");
    // SAFETY: no byte of it is ever touched.
    let nothing = Arc::new(unsafe { BorrowedMemory::new(MemorySpan { len: 0, ..source.span() }) });
    assert!(now(a.register(nothing)).unwrap_err().message().contains("no bytes"));
    let listed = || now(cluster.metadata.get("mooncake/ram/a")).unwrap().unwrap().value;
    let addr = format!("\"addr\":{}", region.addr());
    assert!(String::from_utf8_lossy(&listed()).contains(&addr));
    let (target, at) = (now(b.open("a")).unwrap(), region.addr());
    let slice = region.slice(0..10).unwrap();
    assert_eq!(now(a.unregister(region)).unwrap_err().kind(), ErrorKind::Busy);
    assert!(now(b.read(&target, at, vec![0; 10], None)).0.is_ok(), "a slice keeps it registered");
    drop(slice);
    assert!(!String::from_utf8_lossy(&listed()).contains(&addr), "the last slice withdraws it");
    assert_eq!(now(b.read(&target, at, vec![0; 10], None)).0.unwrap_err().kind(), ErrorKind::Invalid);
    let again = now(a.register(source)).unwrap();
    now(b.read(&target, at, vec![0; 10], None)).0.unwrap();
    now(a.unregister(again)).unwrap();
    assert!(a.descriptor().buffers.is_empty());
}

#[test]
fn a_batch_over_several_targets_keeps_its_order() {
    let cluster = Cluster::new();
    let owners: Vec<_> = (0..3u8).map(|i| cluster.engine(&format!("owner{i}"))).collect();
    let regions: Vec<_> =
        owners.iter().zip(1..).map(|(o, i)| now(o.register(memory(&[i; 64]))).unwrap()).collect();
    let user = cluster.engine("user");
    let targets: Vec<_> = (0..3).map(|i| now(user.open(&format!("owner{i}"))).unwrap()).collect();
    let order = [2, 0, 1, 1, 0, 2, 2];
    let requests: Vec<_> = order
        .iter()
        .enumerate()
        .map(|(n, &i)| Request::new(&targets[i], regions[i].addr() + 64 * u64::from(n == 4), vec![0u8; 4]))
        .collect();
    let (results, requests) = now(user.read_batch(requests, None));
    for (n, &i) in order.iter().enumerate() {
        if n == 4 {
            assert_eq!(results[n].as_ref().unwrap_err().kind(), ErrorKind::Invalid, "the bad one says so");
        } else {
            results[n].as_ref().unwrap();
            assert_eq!(requests[n].transfer.buffer, [i as u8 + 1; 4], "request {n}");
        }
    }
    let writes =
        order.iter().map(|&i| Request::new(&targets[i], regions[i].addr(), Bytes::from_static(b"x")));
    let before = user.metrics();
    let (result, _) = user.post_write(writes.collect::<Vec<_>>(), None).wait();
    result.unwrap();
    assert!(regions.iter().all(|r| bytes_of(r)[..2] == [b'x', bytes_of(r)[1]]));
    let counted = |before: &[PeerMetrics], peer: &str| {
        let of = |lines: &[PeerMetrics]| lines.iter().find(|line| line.peer == peer).unwrap().counts.clone();
        of(&user.metrics()).since(&of(before))
    };
    let written =
        |before: &[PeerMetrics]| [0, 1, 2].map(|i| counted(before, &format!("owner{i}")).bytes_written);
    assert_eq!(written(&before), [2, 2, 3], "what was only posted counts too");
    let before = user.metrics();
    let read = |at| Request::new(&targets[1], regions[1].addr() + at, vec![0u8; 4]);
    let (results, _) = user.post_read([read(0), read(64), read(8)], None).results().wait();
    assert!(results[1].is_err());
    let counts = counted(&before, "owner1");
    assert_eq!((counts.reads, counts.bytes_read, counts.failures, counts.postings()), (2, 8, 1, 1));
    let (results, _) = now(user.read_batch(Vec::<Request<Loopback, Vec<u8>>>::new(), None));
    assert!(results.is_empty());
}

#[test]
fn a_restarted_owner_is_found_again() {
    let cluster = Cluster::new();
    let user = cluster.engine("user");
    let first = cluster.engine("owner");
    let old = now(first.register(memory(&[1; 64]))).unwrap();
    let target = now(user.open("owner")).unwrap();
    now(user.read(&target, old.addr(), vec![0; 4], None)).0.unwrap();
    first.transport().kill();
    let error = now(user.read(&target, old.addr(), vec![0; 4], None)).0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    now(first.close()).unwrap();
    let second = cluster.engine("owner");
    let new = now(second.register(memory(&[2; 64]))).unwrap();
    // A look-up in vain keeps the next one away for a while.
    cluster.clock.advance(Duration::from_secs(1));
    let (result, got) = now(user.read(&target, new.addr(), vec![0; 4], None));
    result.unwrap();
    assert_eq!(got, [2; 4], "looked up again, and repeated");
    let requests =
        vec![Request::new(&target, new.addr(), vec![0; 4]), Request::new(&target, old.addr(), vec![0; 4])];
    let (results, _) = now(user.read_batch(requests, None));
    assert!(results[0].is_ok() && results[1].is_err());
}

#[test]
fn memory_of_an_earlier_run_is_not_read_by_a_repeated_transfer() {
    let cluster = Cluster::new();
    let user = cluster.engine("user");
    let source = memory(&[1; 64]);
    let first = cluster.engine("owner");
    let region = now(first.register(source.clone())).unwrap();
    let (target, at) = (now(user.open("owner")).unwrap(), region.addr());
    first.transport().kill();
    drop(region);
    now(first.close()).unwrap();
    // The same address again, with another meaning.
    let second = cluster.engine("owner");
    let _region = now(second.register(source)).unwrap();
    let requests = vec![Request::new(&target, at, vec![0; 4])];
    let (results, requests) = now(user.read_batch(requests, None));
    assert_eq!(results[0].as_ref().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(requests[0].transfer.buffer, [0; 4], "stale addresses bring no bytes");
    now(user.read(&target, at, vec![0; 4], None)).0.expect("who asks anew means the new memory");
}

#[test]
fn after_the_deadline_nothing_is_sent_or_repeated() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.engine("a"), cluster.engine("b"));
    let remote = now(a.register(memory(&[1; 64]))).unwrap();
    let target = now(b.open("a")).unwrap();
    let deadline = Some(cluster.clock.now().after(Duration::from_millis(10)));
    now(b.write(&target, remote.addr(), vec![2], deadline)).0.unwrap();
    cluster.clock.advance(Duration::from_millis(10));
    let (result, _) = now(b.write(&target, remote.addr(), vec![3], deadline));
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(bytes_of(&remote)[0], 2);
}

#[test]
fn a_name_in_use_is_refused_and_free_after_close() {
    let cluster = Cluster::new();
    let first = cluster.engine("a");
    let refused = cluster.on(Arc::new(cluster.net.node()), "a").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
    assert!(now(cluster.metadata.get("mooncake/ram/a")).unwrap().is_some(), "the loser withdraws nothing");
    drop(first);
    assert!(now(cluster.metadata.get("mooncake/ram/a")).unwrap().is_none(), "drop withdraws");
    cluster.engine("a");
    assert!(cluster.on(Arc::new(cluster.net.node()), "").unwrap_err().message().contains("name"));
}

#[test]
fn memory_in_the_process_is_copied_without_the_transport() {
    let cluster = Cluster::new();
    // The transport always fails, so a success did not use it.
    let broken = || {
        let wire = Faulty::new(Arc::new(cluster.net.node()), 1, Faults::none().with(Fault::Fail, 1000));
        Engine::builder(Arc::new(wire))
            .clock(cluster.clock.clone())
            .directory(Directory::new(cluster.metadata.clone()))
    };
    let a = now(broken().name("a").local_copies(LocalCopies::Process).start()).unwrap();
    let b = now(broken().name("b").local_copies(LocalCopies::Process).start()).unwrap();
    let remote = now(a.register(memory(&[1; 64]))).unwrap();
    for engine in [&a, &b] {
        let target = now(engine.open("a")).unwrap();
        now(engine.write(&target, remote.addr(), vec![7], None)).0.unwrap();
        let (result, got) = now(engine.read(&target, remote.addr(), vec![0; 2], None));
        result.unwrap();
        assert_eq!(got, [7, 1]);
        let outside = now(engine.read(&target, remote.addr() + 63, vec![0; 2], None)).0.unwrap_err();
        assert!(outside.message().contains("injected"), "what is not inside goes over the wire: {outside}");
    }
    let c = now(broken().name("c").local_copies(LocalCopies::Never).start()).unwrap();
    let target = now(c.open("a")).unwrap();
    assert!(now(c.read(&target, remote.addr(), vec![0; 2], None)).0.is_err());
}

#[test]
fn faults_fail_single_operations_and_lose_no_buffer() {
    let cluster = Cluster::new();
    let owner = cluster.engine("owner");
    let remote = now(owner.register(memory(&[9; 640]))).unwrap();
    let faults = [Fault::Fail, Fault::Drop, Fault::Cut, Fault::LoseResponse].into_iter();
    let faults = faults.fold(Faults::none(), |faults, fault| faults.with(fault, 100));
    let wire = Arc::new(Faulty::new(Arc::new(cluster.net.node()), 42, faults));
    let user = cluster.on(wire.clone(), "user").unwrap();
    let target = now(user.open("owner")).unwrap();
    let mut rng = Rng::seeded(5);
    let (mut good, mut bad) = (0, 0);
    for _ in 0..if cfg!(miri) { 5 } else { 200 } {
        let n = 1 + rng.below(10) as usize;
        let requests: Vec<_> =
            (0..n).map(|i| Request::new(&target, remote.addr() + i as u64 * 64, vec![0u8; 64])).collect();
        let (results, requests) = now(user.read_batch(requests, None));
        assert_eq!((results.len(), requests.len()), (n, n));
        for (result, request) in results.iter().zip(&requests) {
            match result {
                Ok(()) => {
                    good += 1;
                    assert_eq!(request.transfer.buffer, [9; 64]);
                }
                Err(_) => bad += 1,
            }
        }
    }
    assert_eq!(wire.injected(), bad, "each fault is one failed operation");
    assert!(good > 0 && (bad > 0 || cfg!(miri)));
}

#[test]
fn a_delayed_write_holds_its_memory_until_it_runs() {
    let cluster = Cluster::new();
    let owner = cluster.engine("owner");
    let remote = now(owner.register(memory(&[0; 64]))).unwrap();
    let wire =
        Arc::new(Faulty::new(Arc::new(cluster.net.node()), 1, Faults::none().with(Fault::Delay, 1000)));
    let user = cluster.on(wire.clone(), "user").unwrap();
    let target = now(user.open("owner")).unwrap();
    let source = user.register_local(memory(b"late")).unwrap();
    let slice = source.slice(0..4).unwrap();
    drop(source);
    let ticket = user.post_write([Request::new(&target, remote.addr(), slice)], None);
    drop(ticket);
    assert_eq!((wire.held(), &bytes_of(&remote)[..4]), (1, &[0; 4][..]));
    assert_eq!(wire.release(9), 1);
    assert_eq!(&bytes_of(&remote)[..4], b"late");
}
