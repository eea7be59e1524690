//! Every call of a shared client, with every form of memory.

use std::sync::Arc;

use mooncake_core::ErrorCode;
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::testkit::device::TestDevice;
use mooncake_store::client::{PutOptions, PutOutcome};
use mooncake_store::local::{LocalRange, LocalRead, LocalStats};
use mooncake_store::protocol::parts::MAX_ITEMS;
use mooncake_transport::{Loopback, Region};

use super::{Host, bytes, key};

type Memory = Region<Loopback>;

#[tokio::test]
async fn put_and_get_of_every_size() {
    let host = Host::new().await;
    let shared = host.connect().await;
    // The lengths are below, at and above the guess, the buffer, and the limit of a request.
    for len in [1, 100, 4096, 4097, 1 << 20, 3 << 20, 5 << 20, 20 << 20] {
        let (key, value) = (key(), bytes(len, 3));
        assert_eq!(shared.put(&key, &value).await.unwrap(), PutOutcome::Stored);
        assert_eq!(shared.put(&key, b"another").await.unwrap(), PutOutcome::Existed);
        for _ in 0..2 {
            assert!(shared.get(&key).await.unwrap().unwrap() == value, "{len} bytes");
        }
        assert_eq!(shared.size(&key).await.unwrap(), Some(len as u64));
        assert!(host.client.get(&key).await.unwrap().unwrap() == value, "the owner sees the same");
        shared.remove(&key, true).await.unwrap();
    }
    assert!(shared.get("not there").await.unwrap().is_none());
    assert_eq!(shared.buffer_used(), 0);
    host.until(|stats| stats.memories == 1 && stats.calls == 0).await;
}

#[tokio::test]
async fn values_in_shared_memory_are_not_copied() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let (one, two) = (key(), key());
    let mut value = shared.alloc(10_000).await.unwrap();
    value.copy_from_slice(&bytes(10_000, 1));
    shared.put_buf(&one, value, &PutOptions::default()).await.unwrap();
    let options = HostMemoryOptions { shared: Some("test".into()), ..Default::default() };
    let memory = Arc::new(HostMemory::with(1 << 20, &options).unwrap());
    let region: Memory = shared.register(memory.clone()).await.unwrap();
    let mut whole = region.exclusive().unwrap();
    whole.copy_from(5000, &bytes(3000, 2)).unwrap();
    let region = whole.into_region().unwrap();
    let before = shared.buffer_used();
    let items = [(&two, vec![region.slice(5000..7000).unwrap(), region.slice(7000..8000).unwrap()])];
    let outcomes = shared.batch_put_pieces(&items, &PutOptions::default()).await.unwrap();
    assert_eq!(*outcomes[0].as_ref().unwrap(), PutOutcome::Stored);
    drop(items);
    assert!(host.client.get(&two).await.unwrap().unwrap() == bytes(3000, 2));
    let LocalRead { result: read, into } = shared.get_into(&one, region.exclusive().unwrap()).await;
    assert_eq!(read.unwrap(), Some(10_000));
    let mut got = vec![0; 10_000];
    let into = into.unwrap();
    into.copy_to(0, &mut got).unwrap();
    assert!(got == bytes(10_000, 1));
    assert_eq!((shared.buffer_used(), before), (0, 0), "nothing went through the buffer");
    assert_eq!(into.addr(), memory.span().addr());
    assert_eq!(host.server.stats().memories, 2);
    drop(into);
    host.until(|stats| stats.memories == 1).await;
}

#[tokio::test]
async fn other_memory_is_copied_once_and_cannot_be_registered() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let memory: Arc<dyn MemorySource> = Arc::new(HostMemory::new(1 << 20).unwrap());
    let refused = shared.register::<Loopback>(memory.clone()).await.unwrap_err();
    assert!(refused.message().contains("this process alone"), "{refused}");
    let mut whole = Memory::unregistered(memory).unwrap().exclusive().unwrap();
    whole.copy_from(0, &bytes(6000, 9)).unwrap();
    let region = whole.into_region().unwrap();
    let name = key();
    let items = [(&name, vec![region.slice(0..6000).unwrap()])];
    shared.batch_put_pieces(&items, &PutOptions::new().upsert()).await.unwrap().remove(0).unwrap();
    drop(items);
    let LocalRead { result: read, into } = shared.get_into(&name, region.exclusive().unwrap()).await;
    assert_eq!(read.unwrap(), Some(6000));
    let mut got = vec![0; 6000];
    let region = into.unwrap().into_region().unwrap();
    region.slice(0..6000).unwrap().copy_to(0, &mut got).unwrap();
    assert!(got == bytes(6000, 9));
    // A buffer that is too small is an error and is not touched; an absent object is a miss.
    // SAFETY: no other code has the range.
    let short = unsafe { region.slice_mut_unchecked(0..10) }.unwrap();
    let LocalRead { result: read, into: short } = shared.get_into(&name, short).await;
    assert_eq!(read.unwrap_err().code(), ErrorCode::InvalidParams);
    assert_eq!(shared.get_into("nothing", short.unwrap()).await.result.unwrap(), None);
    assert_eq!(shared.buffer_used(), 0);
}

#[tokio::test]
async fn a_devices_memory_is_copied() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let device = TestDevice::new();
    let value = bytes(3 << 20, 8);
    let (from, to) = (Arc::new(device.memory(3 << 20).unwrap()), Arc::new(device.memory(3 << 20).unwrap()));
    from.fill(&value);
    let source: Memory = shared.register(from).await.unwrap();
    let name = key();
    let items = [(&name, vec![source.slice(0..1000).unwrap(), source.slice(1000..3 << 20).unwrap()])];
    shared.batch_put_pieces(&items, &PutOptions::default()).await.unwrap().remove(0).unwrap();
    assert!(host.client.get(&name).await.unwrap().unwrap() == value);
    let into: Memory = shared.register(to.clone()).await.unwrap();
    let LocalRead { result: read, into } = shared.get_into(&name, into.exclusive().unwrap()).await;
    assert_eq!(read.unwrap(), Some(3 << 20));
    assert!(to.bytes() == value);
    let object = shared.locate(&[&name]).await.unwrap().remove(0).unwrap().unwrap();
    to.fill(&vec![0; 3 << 20]);
    let range = LocalRange { object, offset: 0, into: into.unwrap() };
    shared.read_ranges(vec![range]).await.remove(0).result.unwrap();
    assert!(to.bytes() == value);
    device.fail_copies(u64::MAX);
    assert!(shared.batch_put_pieces(&items, &PutOptions::new().upsert()).await.is_err());
    let into: Memory = shared.register(Arc::new(device.memory(3 << 20).unwrap())).await.unwrap();
    let read = shared.get_into(&name, into.exclusive().unwrap()).await.result;
    assert!(!matches!(read, Ok(Some(_))), "{read:?}");
    device.fail_copies(0);
    assert_eq!(shared.buffer_used(), 0);
}

/// More objects than one message to the owner takes.
#[tokio::test]
async fn long_batches_travel_in_parts() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let count = 2 * MAX_ITEMS + 100;
    let keys: Vec<String> = (0..count).map(|_| key()).collect();
    let items: Vec<(&String, [u8; 4])> =
        keys.iter().enumerate().map(|(at, key)| (key, (at as u32).to_le_bytes())).collect();
    let group_ids = Some(keys.iter().map(|_| "group".to_owned()).collect());
    let options = PutOptions::from(ReplicateConfig { group_ids, ..ReplicateConfig::default() });
    let stored = shared.batch_put(&items, &options).await.unwrap();
    assert!(stored.len() == count && stored.iter().all(|one| matches!(one, Ok(PutOutcome::Stored))));
    let mut asked = keys.clone();
    asked[count / 2] = "absent".into();
    let exist = shared.batch_exist(&asked).await.unwrap();
    assert!(exist.iter().enumerate().all(|(at, found)| *found.as_ref().unwrap() == (at != count / 2)));
    let replicas = shared.batch_replicas(&asked).await.unwrap();
    assert!(replicas.iter().enumerate().all(|(at, it)| it.as_ref().unwrap().is_some() == (at != count / 2)));
    assert_eq!(shared.prefix_hits(&keys).await.unwrap(), count);
    assert_eq!(shared.prefix_hits(&asked).await.unwrap(), count / 2);
    assert_eq!(shared.list_prefix(&asked).await.unwrap().len(), count / 2);
    let memory = HostMemory::with(
        4 * count + 4,
        &HostMemoryOptions { shared: Some("test".into()), ..Default::default() },
    );
    let region: Memory = shared.register(Arc::new(memory.unwrap())).await.unwrap();
    let mut rest = region.exclusive().unwrap();
    let mut reads = Vec::with_capacity(count);
    for key in &keys {
        let (first, later) = rest.split_at(4).unwrap();
        reads.push((key, first));
        rest = later;
    }
    let read = shared.batch_get_into(reads).await;
    for (at, LocalRead { result, into }) in read.into_iter().enumerate() {
        assert_eq!(result.unwrap(), Some(4));
        let mut bytes = [0; 4];
        into.unwrap().copy_to(0, &mut bytes).unwrap();
        assert_eq!(bytes, (at as u32).to_le_bytes());
    }
    let removed = shared.batch_remove(&asked, true).await.unwrap();
    assert!(removed.iter().enumerate().all(|(at, removed)| *removed.as_ref().unwrap() == (at != count / 2)));
}

#[tokio::test]
async fn batches_respond_item_by_item() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let keys: Vec<String> = (0..100).map(|_| key()).collect();
    let items: Vec<(&String, Vec<u8>)> =
        keys.iter().enumerate().map(|(i, key)| (key, bytes(100 * i, i as u8))).collect();
    let outcomes = shared.batch_put(&items, &PutOptions::default()).await.unwrap();
    assert_eq!(outcomes[0].as_ref().unwrap_err().code(), ErrorCode::InvalidParams, "an empty value");
    assert!(outcomes[1..].iter().all(Result::is_ok));
    let values = shared.batch_get(&keys).await.unwrap();
    assert!(values[0].as_ref().unwrap().is_none());
    for (i, value) in values.iter().enumerate().skip(1) {
        assert!(value.as_ref().unwrap().as_ref().unwrap() == &bytes(100 * i, i as u8), "{i}");
    }
    let there: Vec<bool> = shared.batch_exist(&keys).await.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(!there[0] && there[1..].iter().all(|there| *there));
    let replicas = shared.batch_replicas(&keys).await.unwrap();
    assert!(replicas[0].as_ref().unwrap().is_none());
    assert_eq!(replicas[7].as_ref().unwrap().as_ref().unwrap().replicas.len(), 1);
    assert_eq!(shared.prefix_hits(&keys).await.unwrap(), 0);
    assert_eq!(shared.prefix_hits(&keys[1..]).await.unwrap(), 99);
    let mut asked: Vec<&str> = keys[1..50].iter().map(String::as_str).collect();
    asked.extend(["none", &*keys[60]]);
    assert_eq!(shared.prefix_hits(&asked).await.unwrap(), 49);
    let lists = shared.list_prefix(&asked).await.unwrap();
    assert_eq!((lists.len(), lists[48].replicas[0].location.size()), (49, 4900));
    let object = shared.locate_prefix(&asked).await.unwrap().remove(6);
    assert_eq!(object.size(), 700);
    let options = HostMemoryOptions { shared: Some("prefix".into()), ..Default::default() };
    let into: Memory = shared.register(Arc::new(HostMemory::with(700, &options).unwrap())).await.unwrap();
    let read = LocalRange { object, offset: 0, into: into.exclusive().unwrap() };
    let LocalRead { result, into } = shared.read_ranges(vec![read]).await.remove(0);
    result.unwrap();
    let mut got = vec![0; 700];
    into.unwrap().copy_to(0, &mut got).unwrap();
    assert!(got == bytes(700, 7));
    drop(values);
    let gone = shared.batch_remove(&keys[..10], true).await.unwrap();
    assert_eq!(gone.into_iter().filter(|gone| *gone.as_ref().unwrap()).count(), 9);
    assert_eq!(shared.remove_matching("^key-.*[02468]$", true).await.unwrap(), 45);
    assert_eq!(shared.remove_matching("(", true).await.unwrap_err().code(), ErrorCode::InvalidParams);
    assert_eq!(shared.remove_all(true).await.unwrap(), 45);
    assert_eq!(shared.buffer_used(), 0);
    assert!(shared.is_healthy().await);
    assert_eq!(
        shared.task(mooncake_core::ids::Uuid::new(1, 2)).await.unwrap_err().code(),
        ErrorCode::TaskNotFound
    );
    assert_eq!(
        shared.copy_task("nothing", &["nowhere"]).await.unwrap_err().code(),
        ErrorCode::ObjectNotFound
    );
}

#[tokio::test]
async fn ranges_of_located_objects() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let name = key();
    let value = bytes(100_000, 5);
    shared.put(&name, &value).await.unwrap();
    let object = shared.locate(&[&name]).await.unwrap().remove(0).unwrap().unwrap();
    assert_eq!(object.size(), 100_000);
    let region: Memory = shared.alloc_registered(1 << 20).await.unwrap();
    let private = Memory::unregistered(Arc::new(HostMemory::new(4096).unwrap())).unwrap();
    // SAFETY: the ranges do not overlap.
    let part = |region: &Memory, range| unsafe { region.slice_mut_unchecked(range) }.unwrap();
    let read = |offset, into| LocalRange { object: object.clone(), offset, into };
    let reads = vec![
        read(10, part(&region, 0..1000)),
        read(99_000, part(&region, 5000..6000)),
        read(50_000, part(&private, 7..507)),
        read(99_500, part(&region, 9000..9501)),
    ];
    let ended = shared.read_ranges(reads).await;
    for (i, (from, len)) in [(10, 1000), (99_000, 1000), (50_000, 500)].into_iter().enumerate() {
        ended[i].result.as_ref().unwrap();
        let mut got = vec![0; len];
        ended[i].into.as_ref().unwrap().copy_to(0, &mut got).unwrap();
        assert!(got == value[from..from + len], "range {i}");
    }
    assert_eq!(ended[3].result.as_ref().unwrap_err().code(), ErrorCode::InvalidParams, "it ends outside");
}

#[tokio::test]
async fn odd_keys() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let long = vec![b'k'; 128 << 10];
    for odd in [&b"\0"[..], b"\xff\xfe", "schl\u{fc}ssel \u{1f511}".as_bytes(), b"a\nb", &long] {
        shared.put(odd, b"value").await.unwrap();
        assert_eq!(shared.get(odd).await.unwrap().unwrap(), "value");
        assert!(shared.remove(odd, true).await.unwrap());
    }
    for bad in [&b""[..], &[b'k'; (128 << 10) + 1]] {
        assert_eq!(shared.put(bad, b"v").await.unwrap_err().code(), ErrorCode::InvalidParams);
    }
}

#[tokio::test]
async fn nothing_is_left_when_it_goes() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let name = key();
    shared.put(&name, bytes(8 << 20, 1)).await.unwrap();
    let held = shared.get(&name).await.unwrap().unwrap();
    assert!(host.server.stats().bytes > 8 << 20);
    drop(shared);
    assert!(held == bytes(8 << 20, 1), "a value outlives its client");
    drop(held);
    host.until(|stats| *stats == LocalStats::default()).await;
    assert!(host.folder.path().join("owner.sock").exists());
    let Host { server, folder, client } = host;
    server.stop().await;
    assert!(!folder.path().join("owner.sock").exists());
    client.close().await.unwrap();
}

#[tokio::test]
async fn hints_reach_the_master_and_a_last_read_is_whole() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let once = PutOptions::new().delete_after_read();
    for len in [1, 4096, 4097, 1 << 20, 20 << 20] {
        let (key, value) = (key(), bytes(len, 3));
        assert_eq!(shared.put_with(&key, &value, &once).await.unwrap(), PutOutcome::Stored);
        assert!(shared.exist(&key).await.unwrap());
        assert!(shared.get(&key).await.unwrap().unwrap() == value, "{len} bytes");
        assert!(shared.get(&key).await.unwrap().is_none(), "{len} bytes");
        assert!(host.client.get(&key).await.unwrap().is_none(), "{len} bytes");
    }
    let soon = PutOptions::new().time_to_live(std::time::Duration::from_millis(1));
    shared.put_with("soon", b"v", &soon).await.unwrap();
    while shared.exist("soon").await.unwrap() {
        tokio::task::yield_now().await;
    }
}
