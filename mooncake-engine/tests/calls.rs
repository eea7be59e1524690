//! Memory and batches named by numbers, between two engines over real sockets.
#![cfg(feature = "transport-tcp")]

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::{ErrorKind, Result};
use mooncake_engine::addressed::{Landing, Regions, caller_memory};
use mooncake_engine::{AddressRequest, INVALID_BATCH, TransferEngine, TransportOptions, TransportSet};
use mooncake_tcp::TcpConfig;
use mooncake_transport::engine::{LocalCopies, Status};
use mooncake_transport::{Opcode, Region, RegionPool};

async fn engine() -> TransferEngine {
    let wires = TransportOptions::for_protocol("tcp").unwrap().without_shared_memory();
    let builder =
        TransferEngine::builder().name("127.0.0.1").transports(wires).local_copies(LocalCopies::Never);
    builder.start().await.unwrap()
}

fn number<T: std::fmt::Debug>(result: Result<T>) -> i32 {
    result.unwrap_err().engine_code().number()
}

struct Memory(Arc<HostMemory>);

impl Memory {
    fn new(len: usize, fill: u8) -> Self {
        let memory = HostMemory::new(len).unwrap();
        // SAFETY: just made, and that long.
        unsafe { memory.span().ptr.write_bytes(fill, len) };
        Self(Arc::new(memory))
    }

    fn at(&self) -> u64 {
        self.0.span().addr()
    }

    fn byte(&self, index: usize) -> u8 {
        assert!(index < self.0.len());
        // SAFETY: inside.
        unsafe { self.0.span().ptr.add(index).read_volatile() }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_registered_by_address() {
    let engine = engine().await;
    let (memory, other) = (Memory::new(8192, 1), Memory::new(4096, 1));
    let register = async |pieces: &[(u64, usize)]| {
        // SAFETY: the memory outlives the engine, and expects everything.
        unsafe { engine.register_raw_many(pieces) }.await
    };
    assert_eq!(number(register(&[(memory.at(), 0)]).await), -1, "no bytes");
    assert_eq!(number(register(&[(0, 10)]).await), -1, "no memory");
    assert_eq!(number(register(&[(1 << 45, 4096)]).await), -1, "not mapped");
    register(&[(memory.at(), 8192)]).await.unwrap();
    assert_eq!(number(register(&[(memory.at() + 8191, 1)]).await), -7);
    assert_eq!(number(register(&[(other.at(), 4096), (other.at() + 100, 1)]).await), -7);
    assert_eq!(engine.descriptor().buffers.len(), 1, "all or none");
    register(&[(other.at(), 4096)]).await.unwrap();
    assert_eq!(number(engine.unregister_raw(&[memory.at() + 1]).await), -3);
    assert_eq!(number(engine.unregister_raw(&[memory.at(), 5]).await), -3);
    assert_eq!(number(engine.unregister_raw(&[memory.at(), memory.at()]).await), -3);
    assert_eq!(engine.descriptor().buffers.len(), 2, "all or none");
    engine.unregister_raw(&[memory.at(), other.at()]).await.unwrap();
    assert!(engine.descriptor().buffers.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_by_number() {
    let (a, b) = (engine().await, engine().await);
    let (local, remote) = (Memory::new(4096, 7), Memory::new(4096, 0));
    // SAFETY: both outlive the engines, and expect everything.
    unsafe {
        a.register_raw(local.at(), 4096).await.unwrap();
        b.register_raw(remote.at(), 4096).await.unwrap();
    }
    let target = a.open(b.name()).await.unwrap();
    let request = |opcode, at: u64, len| {
        let (local, remote) = (local.at() + at, remote.at() + at);
        AddressRequest { opcode, local, target: target.clone(), remote, len }
    };
    let id = a.allocate_batch(4);
    assert!(id != 0 && id != INVALID_BATCH);
    assert_eq!(a.batch_progress(id).unwrap().status, Status::Completed, "nothing to do is done");
    let writes =
        [request(Opcode::Write, 0, 100), request(Opcode::Write, 5, 0), request(Opcode::Write, 200, 8)];
    a.submit_batch(id, &writes, None, None).unwrap();
    assert_eq!(number(a.submit_batch(id, &writes[..2], None, None)), -2, "five are too many for four");
    a.finish_batch(id).await.unwrap();
    let progress = a.batch_progress(id).unwrap();
    assert_eq!((progress.status, progress.transferred), (Status::Completed, 108));
    assert_eq!(a.request_progress(id, 1).unwrap().status, Status::Completed, "no bytes are done at once");
    assert_eq!((remote.byte(99), remote.byte(100), remote.byte(207)), (7, 0, 7));
    assert_eq!(number(a.submit_batch(id, &[request(Opcode::Read, 4090, 100)], None, None)), -3);
    let outside = AddressRequest { remote: remote.at() + 4000, ..request(Opcode::Read, 0, 97) };
    a.submit_batch(id, &[outside], None, None).unwrap();
    assert_eq!(a.finish_batch(id).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(a.batch_progress(id).unwrap().status, Status::Failed);
    assert_eq!(a.request_progress(id, 3).unwrap().status, Status::Failed);
    assert!(a.request_progress(id, 4).is_err());
    assert!(b.batch_progress(id).is_err() && b.free_batch(id).is_err(), "another engine's number");
    a.free_batch(id).unwrap();
    for result in [a.free_batch(id), a.free_batch(INVALID_BATCH), a.free_batch(0), a.finish_batch(id).await] {
        assert_eq!(number(result), -1);
    }
    assert!(a.submit_batch(id, &[], None, None).is_err() && a.request_progress(id, 0).is_err());
    assert_ne!(a.allocate_batch(1), id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_that_nobody_frees_are_bounded() {
    let a = engine().await;
    let target = a.open(a.name()).await.unwrap();
    let nothing = [AddressRequest { opcode: Opcode::Write, local: 0, target, remote: 0, len: 0 }];
    let unused = a.allocate_batch(1);
    let mut ids = Vec::new();
    for _ in 0..70_000 {
        let id = a.allocate_batch(1);
        a.submit_batch(id, &nothing, None, None).unwrap();
        ids.push(id);
    }
    let remaining = ids.iter().filter(|id| a.batch_progress(**id).is_ok()).count();
    assert!((60_000..=65_536).contains(&remaining), "{remaining} batches");
    assert!(
        a.batch_progress(ids[0]).is_err() && a.finish_batch(ids[0]).await.is_err(),
        "the oldest is dropped"
    );
    assert_eq!(a.batch_progress(ids[69_999]).unwrap().status, Status::Completed);
    a.batch_progress(unused).expect("a batch without requests has not ended");
    // Freed batches leave nothing, so that no other batch is dropped for them.
    let oldest = *ids.iter().find(|id| a.batch_progress(**id).is_ok()).unwrap();
    for id in ids.iter().filter(|id| **id > oldest) {
        a.free_batch(*id).unwrap();
    }
    for _ in 0..70_000 {
        let id = a.allocate_batch(1);
        a.submit_batch(id, &nothing, None, None).unwrap();
        a.free_batch(id).unwrap();
    }
    a.batch_progress(oldest).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_under_way_is_not_freed() {
    let a = engine().await;
    // A peer that takes requests and never answers.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let directory = mooncake_transport::Directory::new(Arc::<mooncake_core::meta::MemoryMetadata>::default());
    let mut desc = mooncake_transport::SegmentDesc::new("silent");
    desc.protocols.push(mooncake_transport::Protocol::TCP);
    desc.tcp_data_host = "127.0.0.1".into();
    desc.tcp_data_port = silent.local_addr().unwrap().port();
    directory.publish(&desc, true).await.unwrap();
    drop(a);
    let mut wires = TransportOptions::for_protocol("tcp").unwrap().without_shared_memory();
    wires.tcp = Some(TcpConfig { connections: 1, window: 1, ..wires.tcp.unwrap_or_default() });
    let a = TransferEngine::builder().name("a").directory(directory).transports(wires).start().await.unwrap();
    let local = Memory::new(4096, 7);
    // SAFETY: it outlives the engine, and expects everything.
    unsafe { a.register_raw(local.at(), 4096).await.unwrap() };
    let target = a.open("silent").await.unwrap();
    let id = a.allocate_batch(1);
    let request = AddressRequest { opcode: Opcode::Read, local: local.at(), target, remote: 4096, len: 10 };
    // One request is sent to a peer that has sent no response yet. The other one waits, and is not
    // sent when the batch is cancelled.
    let cancelled = a.allocate_batch(2);
    let deadline = a.clock().now().after(Duration::from_millis(300));
    a.submit_batch(cancelled, &[request.clone(), request.clone()], None, Some(deadline)).unwrap();
    let (mut connection, _) = silent.accept().await.unwrap();
    // The request is there, not only its connection.
    tokio::io::AsyncReadExt::read_exact(&mut connection, &mut [0; 24]).await.unwrap();
    a.cancel_batch(cancelled).unwrap();
    assert_eq!(number(a.free_batch(cancelled)), -4, "one of it is on the wire");
    a.finish_batch(cancelled).await.unwrap_err();
    let statuses = [0, 1].map(|index| a.request_progress(cancelled, index).unwrap().status);
    assert_eq!(statuses, [Status::Timeout, Status::Canceled]);
    a.free_batch(cancelled).unwrap();
    let deadline = a.clock().now().after(Duration::from_millis(300));
    a.submit_batch(id, &[request], None, Some(deadline)).unwrap();
    assert_eq!(a.request_progress(id, 0).unwrap().status, Status::Pending);
    assert_eq!(number(a.free_batch(id)), -4);
    assert_eq!(a.finish_batch(id).await.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(a.batch_progress(id).unwrap().status, Status::Timeout);
    a.free_batch(id).unwrap();
    assert_eq!(local.byte(0), 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_registered_closes_memory_afterwards() {
    let (a, b) = (engine().await, engine().await);
    let target = a.open(b.name()).await.unwrap();
    let mut bytes = vec![0u8; 1000];
    let address = b
        .with_registered(&mut bytes, |region| {
            let write = a.post_write(
                [mooncake_transport::Request::new(&target, region.addr() + 10, vec![9; 5])],
                None,
            );
            write.wait().0.unwrap();
            region.addr()
        })
        .unwrap();
    assert_eq!(bytes[8..17], [0, 0, 9, 9, 9, 9, 9, 0, 0]);
    let (result, _) = a.write(&target, address, vec![1], None).await;
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid, "it is closed again");
    // A slice that outlives the call holds it until it is gone.
    let (send, slices) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || {
        let slice = slices.recv().unwrap();
        std::thread::yield_now();
        drop(slice);
    });
    b.with_registered(&mut bytes, |region| send.send(region.slice(0..10).unwrap()).unwrap()).unwrap();
    waiter.join().unwrap();
    let engine = b.clone();
    let panicked = tokio::task::spawn_blocking(move || {
        let mut bytes = vec![0u8; 1000];
        engine.with_registered(&mut bytes, |_| panic!("on purpose")).unwrap()
    });
    assert!(panicked.await.is_err());
    assert!(b.descriptor().buffers.is_empty(), "closed all the same");
}

#[tokio::test]
async fn with_registered_on_only_thread_fails() {
    let engine = engine().await;
    let error = engine.with_registered(&mut [0; 10], |_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn address_resolves_to_allocated_part() {
    let memory = Arc::new(HostMemory::new(4096).unwrap());
    let region = Region::<TransportSet>::unregistered(memory).unwrap();
    // SAFETY: new memory, whose slices all come from the pool.
    let pool = unsafe { RegionPool::new(region) };
    let regions = Regions::default();
    regions.add_pool(pool.clone());
    let part = pool.allocate(100, 64).unwrap();
    let at = part.addr();
    assert_eq!(regions.bytes_to_end(at + 40).unwrap(), 60);
    for (address, len) in [(at, 101), (at + 100, 1), (at + 4095, 1)] {
        assert_eq!(number(regions.slice(address, len)), -3, "not lent");
    }
    for read in [true, false] {
        let part = pool.allocate(4096 - 128, 64).unwrap();
        let (into, from) = (regions.slice_mut(part.addr(), 10), regions.slice(part.addr(), 10));
        let (into, from) = (into.ok().filter(|_| read), from.ok().filter(|_| !read));
        drop(part);
        assert_eq!(pool.used(), 4096 - 28, "a slice keeps the part that it lies in");
        drop((into, from));
        assert_eq!(pool.used(), 100);
    }
    let (landing, landed) = Landing::new();
    let into = regions.slice_mut_until(at + 1, 10, &landing).unwrap();
    assert_eq!((into.addr(), into.len()), (at + 1, 10));
    drop(landing);
    assert!(!landed.is_set(), "a slice is left");
    drop(into);
    assert!(landed.is_set());
    assert!(regions.take(&[at]).is_err(), "the program did not register it");
    drop(part);
    assert_eq!((number(regions.slice(at, 1)), pool.used()), (-3, 0));
}

#[tokio::test]
async fn each_registration_is_ended_by_its_own() {
    let memory = Memory::new(8192, 1);
    let at = memory.at();
    let regions = Regions::default();
    for (from, len) in [(0, 4096), (40, 4096), (0, 4096), (0, 100)] {
        // SAFETY: the memory outlives the region, and expects everything.
        let (source, signal) = unsafe { caller_memory(at + from, len) }.unwrap();
        regions.add(Region::unregistered(source).unwrap(), signal);
    }
    assert_eq!((regions.bytes_to_end(at + 50).unwrap(), regions.bytes_to_end(at).unwrap()), (4086, 4096));
    let into = regions.slice_mut(at + 41, 4000).unwrap();
    // The shortest of three is ended first, and the range of a transfer is not waited for twice.
    let remaining = [(true, true), (true, true), (false, true)];
    for (first, second) in remaining {
        regions.remove(at).await.unwrap();
        let has = |from, len| regions.slice(at + from, len).is_ok();
        assert_eq!((has(0, 4096), has(40, 4096)), (first, second));
        assert_eq!(has(0, 100), first);
    }
    assert_eq!(number(regions.take(&[at])), -3);
    let waiting = regions.take(&[at + 40]).unwrap();
    assert!(!waiting[0].is_set(), "a transfer uses the memory");
    assert_eq!(number(regions.slice(at + 41, 1)), -3);
    drop(into);
    assert!(waiting[0].is_set());
    for _ in 0..2 {
        // SAFETY: as above.
        let (source, signal) = unsafe { caller_memory(at, 10) }.unwrap();
        regions.add(Region::unregistered(source).unwrap(), signal);
    }
    assert_eq!(number(regions.take(&[at, at, at])), -3, "all or none");
    assert_eq!(regions.take(&[at, at]).unwrap().len(), 2);
}

#[tokio::test]
async fn closing_waits_for_transfers_however_often_it_is_given_up() {
    let memory = Memory::new(4096, 1);
    // SAFETY: the memory outlives the region, and expects everything.
    let (source, signal) = unsafe { caller_memory(memory.at(), 4096) }.unwrap();
    let regions = Regions::default();
    regions.add(Region::unregistered(source).unwrap(), signal);
    let into = regions.slice_mut(memory.at(), 10).unwrap();
    for _ in 0..2 {
        tokio::select! {
            biased;
            () = regions.clear() => panic!("a transfer uses the memory"),
            () = std::future::ready(()) => {}
        }
    }
    assert_eq!(number(regions.slice(memory.at(), 10)), -3);
    drop(into);
    regions.clear().await;
}

#[tokio::test]
async fn unregistered_memory_is_looked_up_and_waited_for() {
    let memory = Memory::new(4096, 1);
    let regions = Regions::default();
    let call = regions.unregistered();
    // SAFETY: the memory outlives the call.
    let slices = |address, len| unsafe { (call.slice(address, len), call.slice_mut(address, len)) };
    for (address, len) in [(0, 1), (8, 1), (1 << 45, 4096), (u64::MAX, 1), (memory.at(), 0)] {
        let (from, into) = slices(address, len);
        assert_eq!(
            (from.unwrap_err().kind(), into.unwrap_err().kind()),
            (ErrorKind::Invalid, ErrorKind::Invalid)
        );
    }
    assert!(call.is_empty());
    let (from, into) = slices(memory.at() + 1, 10);
    let into = into.unwrap();
    assert_eq!((into.addr(), into.len()), (memory.at() + 1, 10));
    drop(from);
    let leaving = regions.leaving();
    assert!(!call.is_empty() && !leaving.is_empty());
    assert_eq!(number(regions.take(&[memory.at() + 1])), -3, "it was not registered");
    for _ in 0..2 {
        tokio::select! {
            biased;
            () = call.unused() => panic!("a transfer uses the memory"),
            () = std::future::ready(()) => {}
        }
    }
    drop(into);
    call.unused().await;
    call.wait();
    assert!(leaving.is_empty());
}

#[tokio::test]
async fn memory_of_dropped_regions_is_waited_for() {
    let memory = Memory::new(4096, 1);
    // SAFETY: the memory outlives the region, and expects everything.
    let (source, signal) = unsafe { caller_memory(memory.at(), 4096) }.unwrap();
    let regions = Regions::default();
    let leaving = regions.leaving();
    regions.add(Region::unregistered(source).unwrap(), signal);
    let into = regions.slice_mut(memory.at(), 10).unwrap();
    drop(regions);
    assert!(!leaving.is_empty());
    tokio::select! {
        biased;
        () = leaving.wait() => panic!("a transfer uses the memory"),
        () = std::future::ready(()) => {}
    }
    drop(into);
    leaving.wait().await;
    assert!(leaving.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn managed_memory() {
    let (a, b) = (engine().await, engine().await);
    let first = a.allocate_managed(100).await.unwrap();
    let second = a.allocate_managed(100).await.unwrap();
    assert_eq!(a.descriptor().buffers.len(), 1, "both are cut from one region");
    for (address, len) in [(first, 99), (first + 1, 99), (5, 100), (first + 4096, 100)] {
        assert_eq!(number(a.free_managed(address, len)), -3);
    }
    a.free_managed(first, 100).unwrap();
    assert_eq!(number(a.free_managed(first, 100)), -3);
    assert!(a.allocate_managed(0).await.is_err());
    let remote = Memory::new(8192, 3);
    // SAFETY: it outlives the engine, and expects everything.
    unsafe { b.register_raw(remote.at(), 8192).await.unwrap() };
    let target = a.open(b.name()).await.unwrap();
    let read = |local| AddressRequest {
        opcode: Opcode::Read,
        local,
        target: target.clone(),
        remote: remote.at(),
        len: 100,
    };
    let id = a.allocate_batch(8);
    assert_eq!(number(a.submit_batch(id, &[read(first)], None, None)), -3, "freed memory is not read into");
    a.submit_batch(id, &[read(second)], None, None).unwrap();
    a.finish_batch(id).await.unwrap();
    // Free space merges into one piece. A buffer larger than a region has a region of its own.
    a.free_managed(second, 100).unwrap();
    let merged = a.allocate_managed(64 << 20).await.unwrap();
    assert_eq!(a.descriptor().buffers.len(), 1, "it fits where the small ones were");
    let large = a.allocate_managed(65 << 20).await.unwrap();
    assert_eq!(a.descriptor().buffers.len(), 2);
    a.free_managed(large, 65 << 20).unwrap();
    assert_eq!(a.descriptor().buffers.len(), 1, "given back to the system");
    a.free_managed(merged, 64 << 20).unwrap();
}
