//! Limits of shared clients: buffers, connections, and owners that change.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use mooncake_core::clock::{ManualClock, SystemClock};
use mooncake_core::memory::HostMemory;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::client::{PutOptions, PutOutcome};
use mooncake_store::local::{LocalClient, LocalConfig, LocalRange, LocatedLocal, StoreClient};
use mooncake_store::master::MasterOptions;
use mooncake_store::protocol::message::{Attach, Join};
use mooncake_transport::{Loopback, Region};

use super::{Host, bytes, key, stranger};

#[tokio::test]
async fn memory_is_limited_and_comes_back() {
    let host = Host::with(|config| config.max_memory = 8 << 20).await;
    let shared = host.connect().await;
    let refused = shared.put(key(), bytes(5 << 20, 0)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    assert!(refused.message().contains("--max_client_memory"), "{refused}");
    let name = key();
    shared.put(&name, bytes(3 << 20, 0)).await.unwrap();
    let first = shared.get(&name).await.unwrap().unwrap();
    let second = shared.get(&name).await.unwrap().unwrap();
    // Neither the buffer nor the limit has space for a third object: the read waits until another
    // is released.
    let mut third = Box::pin(shared.get(&name));
    let waited = tokio::time::timeout(Duration::from_millis(100), &mut third).await;
    assert!(waited.is_err());
    drop(first);
    assert!(third.await.unwrap().unwrap() == second);
    drop(second);
    let config = LocalConfig { buffer: 9 << 20, ..host.config() };
    assert_eq!(LocalClient::connect(config).await.unwrap_err().kind(), ErrorKind::NoSpace);
}

/// A batch for which there is too little memory is written in groups, and never waits for its own
/// buffers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_beyond_the_memory_limit_are_written_in_groups() {
    const MIB: usize = 1 << 20;
    let host = Host::with(|config| config.max_memory = 7 << 20).await;
    let shared = host.connect().await;
    let options = PutOptions::default();
    let values: Vec<_> = (0..14).map(|i| (key(), bytes(MIB, i))).collect();
    let stored = shared.batch_put(&values, &options).await.unwrap();
    assert!(stored.iter().all(|outcome| matches!(outcome, Ok(PutOutcome::Stored))), "{stored:?}");
    for (name, value) in &values {
        assert!(shared.get(name).await.unwrap().unwrap() == value[..]);
    }
    // Pieces in memory of the caller alone, some calls at once.
    let memory = Region::<Loopback>::unregistered(Arc::new(HostMemory::new(MIB).unwrap())).unwrap();
    let calls = (0..3).map(|_| {
        let (shared, memory, options) = (shared.clone(), memory.clone(), options.clone());
        tokio::spawn(async move {
            let pieces = || vec![memory.slice(0..MIB).unwrap(), memory.slice(0..MIB / 2).unwrap()];
            let mut items: Vec<_> = (0..3).map(|_| (key(), pieces())).collect();
            // The pool is too short for this value, and a block is not.
            items.push((key(), vec![memory.slice(0..MIB).unwrap(); 3]));
            let stored = shared.batch_put_pieces(&items, &options).await.unwrap();
            assert!(stored.iter().all(|outcome| matches!(outcome, Ok(PutOutcome::Stored))), "{stored:?}");
            for (name, pieces) in items {
                let len: usize = pieces.iter().map(|piece| piece.len()).sum();
                assert!(shared.get(&name).await.unwrap().unwrap() == vec![0; len]);
            }
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    assert_eq!(shared.buffer_used(), 0);
}

/// A value that never fits is refused at once, and the others of its batch are stored.
#[tokio::test]
async fn values_that_never_fit_are_refused_at_once() {
    let clock = Arc::new(ManualClock::new());
    let host = Host::with(|config| config.max_memory = 7 << 20).await;
    // The deadline never passes.
    let config = LocalConfig { clock, ..host.config() };
    let shared = LocalClient::connect(config).await.unwrap();
    let values = [(key(), bytes(1000, 1)), (key(), bytes(6 << 20, 2)), (key(), bytes(3 << 20, 3))];
    let stored = shared.batch_put(&values, &PutOptions::default()).await.unwrap();
    let refused = stored[1].as_ref().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    assert!(refused.message().contains("--max_client_memory"), "{refused}");
    assert!(stored[0].is_ok() && stored[2].is_ok(), "{stored:?}");
    assert!(shared.get(&values[2].0).await.unwrap().unwrap() == values[2].1[..]);
}

/// A value that fits nowhere now waits for the buffer of another.
#[tokio::test]
async fn a_long_value_waits_for_a_block() {
    let host = Host::with(|config| config.max_memory = 10 << 20).await;
    let shared = host.connect().await;
    let occupied = (shared.alloc(4 << 20).await.unwrap(), shared.alloc(5 << 20).await.unwrap());
    let name = key();
    let value = bytes(5 << 20, 7);
    let mut put = Box::pin(shared.put(&name, &value));
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut put).await.is_err(), "it waits");
    drop(occupied.1);
    put.await.unwrap();
    drop(occupied.0);
    let stored = host.client.get(&name).await.unwrap().unwrap();
    assert!(stored[..] == value[..]);
}

/// Memory that the host does not have is refused when it is promised.
#[tokio::test]
async fn memory_that_the_host_does_not_have_is_refused() {
    const LONG: usize = 1 << 39;
    let host = Host::new().await;
    let config = LocalConfig { allow_overcommit: false, ..host.config() };
    let refused =
        LocalClient::connect(LocalConfig { buffer: LONG as u64, ..config.clone() }).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::BufferOverflow);
    assert!(refused.message().contains("wanted=549755813888"), "{refused}");
    let shared = LocalClient::connect(config).await.unwrap();
    assert_eq!(shared.alloc(LONG).await.unwrap_err().code(), ErrorCode::BufferOverflow);
    let refused = shared.alloc_registered::<Loopback>(LONG).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::BufferOverflow);
    let shared: StoreClient<Loopback> = StoreClient::Ipc(shared);
    assert_eq!(shared.allocate(LONG).unwrap_err().code(), ErrorCode::BufferOverflow);
    shared.allocate(64 << 20).unwrap();
}

/// Every memory block needs descriptors.
#[tokio::test]
async fn short_buffers_share_memory_blocks() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let mut buffers = Vec::new();
    for i in 0..600 {
        let mut buffer = shared.alloc(64 << 10).await.unwrap();
        buffer.fill(i as u8);
        buffers.push(buffer);
    }
    assert!(host.server.stats().memories <= 4, "{:?}", host.server.stats());
    for (i, buffer) in buffers.iter().enumerate() {
        assert!(buffer.iter().all(|byte| *byte == i as u8));
    }
    drop(buffers);
    host.until(|stats| stats.memories == 1).await;
}

#[tokio::test]
async fn processes_are_limited() {
    let host = Host::with(|config| config.max_clients = 2).await;
    let (first, _second) = (host.connect().await, host.connect().await);
    let refused = LocalClient::connect(host.config()).await.unwrap_err();
    assert!(refused.message().contains("--max_clients"), "{refused}");
    drop(first);
    host.until(|stats| stats.clients == 1).await;
    host.connect().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_beyond_the_limit_wait_for_their_turn() {
    let host = Host::with(|config| config.max_calls = 2).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(1000, 1)).await.unwrap();
    let gets = (0..50).map(|_| {
        let (shared, name) = (shared.clone(), name.clone());
        tokio::spawn(async move { shared.get(&name).await.unwrap().unwrap() })
    });
    let gets: Vec<_> = gets.collect();
    for get in gets {
        assert!(get.await.unwrap() == bytes(1000, 1));
    }
    assert!(host.server.stats().connections <= 2);
}

/// A connection beyond the limit waits until another one has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_limit_wait_for_others_to_end() {
    let host = Host::with(|config| config.max_calls = 2).await;
    let mut control = stranger(host.server.path(), None).await;
    let guest = control.call(&Attach {}, &"the owner").await.unwrap().outcome().unwrap().guest;
    let join = async || {
        let mut connection = stranger(host.server.path(), None).await;
        let joined = connection.call(&Join { guest }, &"the owner").await.unwrap().outcome();
        joined.map(|()| connection)
    };
    let (first, second) = (join().await.unwrap(), join().await.unwrap());
    let mut third = Box::pin(join());
    let waits = tokio::time::timeout(Duration::from_millis(50), &mut third).await;
    assert!(waits.is_err(), "{waits:?}");
    drop(first);
    let third = third.await.unwrap();
    assert_eq!(host.server.stats().connections, 2);
    // The wait ends with the shared client.
    let fourth = Box::pin(join());
    let ((), fourth) = tokio::join!(async { drop(control) }, fourth);
    assert!(fourth.is_err(), "{fourth:?}");
    drop((second, third));
}

/// The daemon serves one connection, which the next call has to find idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_at_the_limit_use_the_connections_of_others() {
    let host = Host::with(|config| config.max_calls = 1).await;
    let config = LocalConfig { timeout: Duration::from_secs(10), ..host.config() };
    let shared = LocalClient::connect(config).await.unwrap();
    let name = key();
    shared.put(&name, bytes(1000, 1)).await.unwrap();
    let calls = async || {
        for round in 0..2000 {
            assert!(shared.exist(&name).await.unwrap(), "{round}");
        }
    };
    tokio::join!(calls(), calls(), calls());
    assert_eq!(host.server.stats().connections, 1);
}

/// A call that is cancelled closes its connection. The next call does not find the daemon full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_call_gives_its_place_back() {
    let host = Host::with(|config| config.max_calls = 1).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(1000, 1)).await.unwrap();
    for round in 0..400 {
        let mut cancelled = Box::pin(shared.get(&name));
        for _ in 0..round % 16 {
            if cancelled.as_mut().now_or_never().is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(cancelled);
        assert!(shared.exist(&name).await.unwrap(), "{round}");
    }
}

/// A batch of more objects than the daemon remembers as located.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_of_any_length_is_read() {
    let host = Host::new().await;
    let config = LocalConfig { buffer: 64 << 20, ..host.config() };
    let shared = LocalClient::connect(config).await.unwrap();
    let name = key();
    shared.put(&name, bytes(10, 1)).await.unwrap();
    let keys = vec![&name; 70_000];
    let values = shared.batch_get(&keys).await.unwrap();
    let wrong = values.iter().filter(|value| !matches!(value, Ok(Some(value)) if value == &bytes(10, 1)));
    assert_eq!(wrong.count(), 0);
}

/// A shared client that only locates objects would otherwise fill the memory of the daemon.
#[tokio::test]
async fn located_objects_end_with_their_leases() {
    let clock = Arc::new(ManualClock::new());
    let silence = Duration::from_secs(3);
    let host =
        Host::with_clock(clock.clone(), MasterOptions::default(), |config| config.silence = silence).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(10_000, 1)).await.unwrap();
    let locate = async || shared.locate(&[&name]).await.unwrap().remove(0).unwrap().unwrap();
    let region: Region<Loopback> = shared.alloc_registered(1 << 20).await.unwrap();
    let read = async |object: &LocatedLocal| {
        // SAFETY: no other call uses the region.
        let into = unsafe { region.slice_mut_unchecked(0..1000) }.unwrap();
        let read = LocalRange { object: object.clone(), offset: 100, into };
        shared.read_ranges(vec![read]).await.remove(0).result.map_err(|error| error.code())
    };
    let (first, second) = (locate().await, locate().await);
    assert_eq!((read(&first).await, read(&second).await), (Ok(()), Ok(())));
    assert_eq!(host.server.stats().located, 2);
    clock.advance(Duration::from_secs(11));
    let third = locate().await;
    assert_eq!(host.server.stats().located, 3, "they may be located again");
    clock.advance(Duration::from_secs(20));
    let fourth = locate().await;
    assert_eq!(host.server.stats().located, 2);
    let late = Err(ErrorCode::LeaseExpired);
    assert_eq!((read(&first).await, read(&second).await, read(&fourth).await), (late, late, Ok(())));
    assert_eq!(read(&third).await, late);
    // A client that makes no calls only sends heartbeats.
    clock.advance(Duration::from_secs(31));
    host.until(|stats| stats.located == 0).await;
    assert_eq!(read(&third).await, late);
    let values: Vec<_> = shared.batch_get(&[&name]).await.unwrap();
    assert_eq!(values[0].as_ref().unwrap().as_ref().unwrap(), &bytes(10_000, 1));
}

/// The master chooses the length of leases.
#[tokio::test]
async fn located_objects_stay_until_their_leases_end() {
    let clock = Arc::new(ManualClock::new());
    let options = MasterOptions { lease_ttl: Duration::from_secs(600), ..MasterOptions::default() };
    let host = Host::with_clock(clock.clone(), options, |_| {}).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(10_000, 1)).await.unwrap();
    let locate = async || shared.locate(&[&name]).await.unwrap().remove(0).unwrap().unwrap();
    let _first = locate().await;
    clock.advance(Duration::from_secs(599));
    let second = locate().await;
    assert_eq!(host.server.stats().located, 2);
    clock.advance(Duration::from_secs(30));
    let _third = locate().await;
    assert_eq!(host.server.stats().located, 2, "the lease of the first has ended");
    drop(second);
    host.until(|stats| stats.located == 1).await;
}

/// The space of an object that a shared client has read is there for the next put, although the
/// lease lasts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_of_read_objects_is_free_once_removed() {
    // Two values fit into the segment.
    const LEN: usize = 24 << 20;
    let lease_ttl = Duration::from_secs(3600);
    let options = MasterOptions { lease_ttl, high_watermark: 1.0, ..MasterOptions::default() };
    let host = Host::with_clock(SystemClock::shared(), options, |_| {}).await;
    let shared = host.connect().await;
    let region: Region<Loopback> = shared.alloc_registered(LEN).await.unwrap();
    for round in 0..9_u8 {
        let (name, value) = (key(), vec![round; LEN]);
        assert_eq!(shared.put(&name, value.clone()).await.unwrap(), PutOutcome::Stored, "{round}");
        match round % 3 {
            0 => assert!(shared.get(&name).await.unwrap().unwrap() == value),
            1 => assert!(
                *shared.batch_get(&[&name]).await.unwrap()[0].as_ref().unwrap().as_ref().unwrap() == value
            ),
            _ => {
                let object = shared.locate(&[&name]).await.unwrap().remove(0).unwrap().unwrap();
                // SAFETY: no other call uses the region.
                let into = unsafe { region.slice_mut_unchecked(0..LEN) }.unwrap();
                let read = LocalRange { object, offset: 0, into };
                shared.read_ranges(vec![read]).await.remove(0).result.unwrap();
            }
        }
        assert!(shared.remove(&name, true).await.unwrap());
    }
}

/// The time between the location of objects and their read can be longer than a lease.
#[tokio::test]
async fn objects_whose_lease_ended_before_the_read_are_located_again() {
    let clock = Arc::new(ManualClock::new());
    let host = Host::with_clock(clock.clone(), MasterOptions::default(), |_| {}).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(10_000, 1)).await.unwrap();
    let region: Region<Loopback> = shared.alloc_registered(1 << 20).await.unwrap();
    let pass = || clock.advance(Duration::from_secs(11));
    let part = |object: &LocatedLocal, offset: u64| {
        // SAFETY: no other call uses the region.
        let into = unsafe { region.slice_mut_unchecked(0..1000) }.unwrap();
        LocalRange { object: object.clone(), offset, into }
    };
    let read = async |object: &LocatedLocal, offset: u64| {
        let read = shared.read_current_ranges(vec![part(object, offset)]).await.remove(0);
        let mut got = vec![0; 1000];
        read.into.unwrap().copy_to(0, &mut got).unwrap();
        read.result.map(|()| got).map_err(|error| error.code())
    };
    let object = shared.locate(&[&name]).await.unwrap().remove(0).unwrap().unwrap();
    let whole = bytes(10_000, 1);
    for offset in [0, 1000] {
        pass();
        let refused = shared.read_ranges(vec![part(&object, 0)]).await.remove(0).result;
        assert_eq!(refused.unwrap_err().code(), ErrorCode::LeaseExpired);
        let expected = whole[offset..offset + 1000].to_vec();
        assert_eq!(read(&object, offset as u64).await, Ok(expected));
    }
    // Bytes of another value do not follow.
    pass();
    shared.remove(&name, true).await.unwrap();
    shared.put(&name, bytes(10_000, 2)).await.unwrap();
    assert_eq!(read(&object, 2000).await, Err(ErrorCode::LeaseExpired));
}

#[tokio::test]
async fn clients_without_heartbeats_are_forgotten() {
    let host = Host::with(|config| config.silence = Duration::from_secs(3)).await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, b"value").await.unwrap();
    // The connection attaches and sends nothing else.
    let mut silent = stranger(host.server.path(), None).await;
    silent.call(&Attach {}, &"the owner").await.unwrap().outcome().unwrap();
    assert_eq!(host.server.stats().clients, 2);
    silent.ended().await;
    // The other client sent heartbeats meanwhile.
    host.until(|stats| stats.clients == 1).await;
    assert!(shared.is_connected());
    assert_eq!(shared.get(&name).await.unwrap().unwrap(), "value");
}

#[tokio::test]
async fn an_owner_that_stops_is_missed_and_found_again() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, b"value").await.unwrap();
    let mut buffer = shared.alloc(5).await.unwrap();
    buffer.copy_from_slice(b"later");
    let Host { server, client, folder } = host;
    let path = server.path().to_owned();
    server.stop().await;
    let lost = loop {
        match shared.get(&name).await {
            Err(error) => break error,
            Ok(_) => tokio::task::yield_now().await,
        }
    };
    assert_eq!(lost.code(), ErrorCode::RpcFail);
    let config = mooncake_store::local::LocalServerConfig { path, ..Default::default() };
    let server = mooncake_store::local::LocalServer::start(client, config).unwrap();
    let found = loop {
        shared.connected().await;
        match shared.get(&name).await {
            Ok(found) => break found,
            // The client has not noticed yet that the owner is another one.
            Err(error) => assert_eq!(error.code(), ErrorCode::RpcFail, "{error}"),
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(found.unwrap(), "value");
    // Memory from before the change is still valid.
    let later = key();
    shared.put_buf(&later, buffer, &Default::default()).await.unwrap();
    assert_eq!(shared.get(&later).await.unwrap().unwrap(), "later");
    assert_eq!(server.stats().clients, 1);
    drop(folder);
}

#[tokio::test]
async fn calls_that_are_given_up_keep_their_memory_until_they_end() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(1 << 20, 1)).await.unwrap();
    for _ in 0..200 {
        let mut get = Box::pin(shared.get(&name));
        // The read stops at its first await: sometimes before the request is sent, sometimes after.
        let _ = (&mut get).now_or_never();
        drop(get);
    }
    host.until(|stats| stats.calls == 0).await;
    while shared.buffer_used() != 0 {
        tokio::task::yield_now().await;
    }
    assert!(shared.get(&name).await.unwrap().unwrap() == bytes(1 << 20, 1));
}
