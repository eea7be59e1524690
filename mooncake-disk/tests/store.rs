//! Promises of a store while it is open, and after it is reopened.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use common::{dir, engines, fake_faults, get, open, pattern, put};
use futures::executor::block_on;
use mooncake_core::clock::Rng;
use mooncake_core::evict::PolicyKind;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_disk::{DiskConfig, FileStore, IoFault, IoRequest, StoreConfig};

const MIB: u64 = 1 << 20;

#[test]
fn values_are_read_in_whole_and_in_part_now_and_after_reopening() {
    for disk in engines() {
        let dir = dir();
        let (store, found) = open(&disk, dir.path(), 64 * MIB);
        assert_eq!((found.objects, found.index_lost), (0, false));
        let lens = [1, 100, 4095, 4096, 4097, 65_536, 65_537, 300_000, 3 << 20];
        for (seed, len) in lens.into_iter().enumerate() {
            put(&store, format!("key {len}").as_bytes(), &pattern(seed as u64, len)).unwrap();
        }
        put(&store, &[b'k'; 5000], b"a key of two blocks").unwrap();
        let check = |store: &FileStore| {
            for (seed, len) in lens.into_iter().enumerate() {
                let (key, value) = (format!("key {len}"), pattern(seed as u64, len));
                assert!(get(store, key.as_bytes()).unwrap() == Some(value.clone()), "{disk:?} {key}");
                for range in [0..1, len / 3..len / 2 + 1, len - 1..len, 0..len] {
                    let part = store.read_part(key.as_bytes(), range.start as u64..range.end as u64);
                    assert!(block_on(part).unwrap()[..] == value[range.clone()], "{key} {range:?}");
                }
            }
            assert_eq!(get(store, &[b'k'; 5000]).unwrap().unwrap(), b"a key of two blocks");
            assert_eq!(get(store, b"no such key").unwrap(), None);
            let too_far = block_on(store.read_part(b"key 100", 50..101)).unwrap_err();
            assert_eq!(too_far.kind(), ErrorKind::Invalid);
        };
        check(&store);
        let stats = store.stats();
        drop(store);
        let (store, found) = open(&disk, dir.path(), 64 * MIB);
        assert_eq!((found.objects, found.bytes, found.dropped), (10, stats.bytes, 0), "{disk:?}");
        check(&store);
        assert_eq!((store.stats().used, store.stats().objects), (stats.used, 10));
    }
}

#[test]
fn reading_a_part_reads_only_its_chunks() {
    let dir = dir();
    let (store, _) = open(&DiskConfig::default(), dir.path(), 64 * MIB);
    put(&store, b"long", &pattern(1, 8 << 20)).unwrap();
    let before = store.stats().disk.read_bytes;
    block_on(store.read_part(b"long", 3_000_000..3_000_010)).unwrap();
    assert_eq!(store.stats().disk.read_bytes - before, 64 << 10);
}

#[test]
fn parts_carry_the_version_of_their_value() {
    let [one, other] = [dir(), dir()];
    let version = |store: &FileStore, from| {
        let part = block_on(store.read_part(b"k", from..from + 10)).unwrap();
        assert_eq!(part.value_len(), 200_000);
        part.version()
    };
    let (store, _) = open(&DiskConfig::default(), one.path(), 16 * MIB);
    put(&store, b"k", &pattern(1, 200_000)).unwrap();
    let first = version(&store, 0);
    assert_eq!(version(&store, 150_000), first);
    drop(store);
    let (store, _) = open(&DiskConfig::default(), one.path(), 16 * MIB);
    assert_eq!(version(&store, 7), first);
    put(&store, b"k", &pattern(1, 200_000)).unwrap();
    assert_ne!(version(&store, 7), first, "a new put has another version");
    let (store, _) = open(&DiskConfig::default(), other.path(), 16 * MIB);
    put(&store, b"k", &pattern(1, 200_000)).unwrap();
    assert_ne!(version(&store, 7), first);
}

#[test]
fn a_disk_without_responses_is_reported_as_stalled() {
    for disk in engines() {
        let dir = dir();
        let long = |_, request: IoRequest| match request.len > 64 << 10 && !request.write {
            true => IoFault::Stall,
            false => IoFault::None,
        };
        let config = StoreConfig::new(dir.path(), 16 * MIB);
        let (store, _) = FileStore::open(DiskConfig { faults: fake_faults(long), ..disk }, config).unwrap();
        put(&store, b"short", &pattern(1, 100)).unwrap();
        put(&store, b"long", &pattern(2, 200_000)).unwrap();
        assert_eq!(store.stalled_for(), Duration::ZERO);
        let mut hangs = Box::pin(store.read_part(b"long", 0..200_000));
        assert!(futures::FutureExt::now_or_never(&mut hangs).is_none());
        while store.stalled_for() < Duration::from_millis(20) {
            std::thread::yield_now();
        }
        // Any answer counts.
        while store.stalled_for() >= Duration::from_millis(20) {
            block_on(store.probe());
        }
        assert!(get(&store, b"short").unwrap().is_some());
        drop(hangs);
        // Closing a file waits for its requests in the kernel.
        std::mem::forget(store);
    }
}

#[test]
fn removed_and_replaced_values_do_not_come_back() {
    for disk in engines() {
        let dir = dir();
        let (store, _) = open(&disk, dir.path(), 16 * MIB);
        for i in 0..40u64 {
            put(&store, format!("a{i}").as_bytes(), &pattern(i, 9000)).unwrap();
            put(&store, format!("b{i}").as_bytes(), &pattern(i + 100, 5000)).unwrap();
        }
        for i in 0..40u64 {
            put(&store, format!("a{i}").as_bytes(), &pattern(i + 1000, 4000)).unwrap();
        }
        assert_eq!(block_on(store.remove_where(|key| key.starts_with(b"b"))), 40);
        assert_eq!(block_on(store.remove([b"a0".as_slice(), b"a1", b"none"])), 2);
        assert_eq!(store.stats().objects, 38);
        drop(store);
        let (store, found) = open(&disk, dir.path(), 16 * MIB);
        assert_eq!(found.objects, 38);
        for i in 0..40u64 {
            let a = get(&store, format!("a{i}").as_bytes()).unwrap();
            assert!(a == (i >= 2).then(|| pattern(i + 1000, 4000)), "a{i}");
            assert_eq!(get(&store, format!("b{i}").as_bytes()).unwrap(), None);
        }
        block_on(store.remove_where(|_| true));
        assert_eq!(
            (store.stats().objects, store.stats().used, store.stats().bytes),
            (0, 0, 0),
            "nothing leaks"
        );
    }
}

/// Random puts, reads and removals beside a map, with too little space for all, and the store
/// reopened now and then.
#[test]
fn agrees_with_a_map() {
    let mut rng = Rng::seeded(7);
    for disk in engines() {
        let dir = dir();
        let mut model: HashMap<String, Vec<u8>> = HashMap::new();
        let mut store = open(&disk, dir.path(), 2 * MIB).0;
        let mut evicted = 0;
        for step in 0..600u64 {
            let key = format!("k{}", rng.below(40));
            match rng.below(10) {
                0..5 => {
                    let value = pattern(step, 1 + rng.below(150_000) as usize);
                    put(&store, key.as_bytes(), &value).unwrap();
                    model.insert(key, value);
                }
                5..8 => {
                    let found = get(&store, key.as_bytes()).unwrap();
                    assert!(found.is_none() || found.as_ref() == model.get(&key), "{key} at {step}");
                }
                8 => {
                    block_on(store.remove([key.as_bytes()]));
                    model.remove(&key);
                }
                _ if rng.below(20) == 0 => {
                    block_on(store.trim());
                    drop(store);
                    store = open(&disk, dir.path(), 2 * MIB).0;
                }
                _ => {
                    assert!(block_on(store.trim()) == 0 || store.stats().used <= 8 * (2 * MIB) / 10);
                }
            }
            for key in store.take_departed() {
                evicted += 1;
                model.remove(std::str::from_utf8(&key).unwrap());
            }
            assert!(store.stats().used <= 2 * MIB);
        }
        for (key, value) in &model {
            assert!(get(&store, key.as_bytes()).unwrap().as_ref() == Some(value), "{key} is still present");
        }
        assert_eq!(store.stats().objects, model.len() as u64, "no other object is present");
        assert!(store.stats().corrupt == 0 && evicted > 0);
    }
}

#[test]
fn the_least_recently_used_is_evicted_first_and_the_index_stays_small() {
    let dir = dir();
    let (store, _) = open(&DiskConfig::default(), dir.path(), 10 * 12_288);
    for i in 0..10u64 {
        put(&store, format!("{i}").as_bytes(), &pattern(i, 8000)).unwrap();
    }
    get(&store, b"0").unwrap().unwrap();
    put(&store, b"10", &pattern(10, 8000)).unwrap();
    assert_eq!(store.take_departed().iter().map(|k| k.to_vec()).collect::<Vec<_>>(), [b"1".to_vec()]);
    let key = [b'x'; 3000];
    for i in 0..2000u64 {
        put(&store, &key, &pattern(i, 100)).unwrap();
    }
    let index = std::fs::metadata(dir.path().join("index")).unwrap().len();
    assert!(index < 2 * MIB, "{index} bytes of index for {} objects", store.stats().objects);
    assert_eq!(get(&store, &key).unwrap().unwrap(), pattern(1999, 100));
}

#[test]
fn many_at_once() {
    for disk in engines() {
        let dir = dir();
        let store = Arc::new(open(&disk, dir.path(), 32 * MIB).0);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let store = &store;
                scope.spawn(move || {
                    for i in 0..60 {
                        let (key, value) = (format!("{thread} {}", i % 7), pattern(thread * 100 + i, 70_000));
                        put(store, key.as_bytes(), &value).unwrap();
                        put(store, b"everybody's", &pattern(5, 30_000)).unwrap();
                        assert!(get(store, key.as_bytes()).unwrap().unwrap() == value);
                        assert!(get(store, b"everybody's").unwrap().unwrap() == pattern(5, 30_000));
                    }
                });
            }
        });
        assert_eq!(store.stats().objects, 29);
    }
}

#[test]
fn disk_errors_cost_objects_and_never_a_wrong_value() {
    // Reads of values fail at times, and writes too: with EIO, or for want of space.
    for disk in engines() {
        let dir = dir();
        let faults = fake_faults(|n, request| match n % 7 {
            3 if !request.write => IoFault::Errno(5),
            4 if request.write => IoFault::Errno(28),
            5 if request.write => IoFault::Errno(5),
            6 => IoFault::Short(request.len / 2),
            _ => IoFault::None,
        });
        let config = StoreConfig::new(dir.path(), 8 * MIB);
        let (store, _) = FileStore::open(DiskConfig { faults, ..disk.clone() }, config).unwrap();
        let (mut there, mut refused, mut lost) = (0, 0, 0);
        for i in 0..200u64 {
            let (key, value) = (format!("{}", i % 50), pattern(i, 20_000));
            match put(&store, key.as_bytes(), &value) {
                Ok(()) => match get(&store, key.as_bytes()) {
                    Ok(Some(read)) => {
                        assert!(read == value, "{i}");
                        there += 1;
                    }
                    Ok(None) => panic!("the object was put"),
                    Err(error) => {
                        assert_eq!(error.code(), ErrorCode::FileReadFail);
                        assert_eq!(
                            get(&store, key.as_bytes()).unwrap(),
                            None,
                            "an unreadable object is a miss"
                        );
                        lost += 1;
                    }
                },
                Err(error) => {
                    let code = error.code();
                    assert!(
                        matches!(code, ErrorCode::NoAvailableHandle | ErrorCode::FileWriteFail),
                        "{error}"
                    );
                    refused += 1;
                }
            }
        }
        let stats = store.stats();
        assert!(there > 0 && refused > 0 && lost > 0, "{there} {refused} {lost}");
        assert!(stats.disk.no_space > 0 && stats.disk.write_errors > stats.disk.no_space);
        assert_eq!((stats.unreadable, stats.failed_puts), (lost, refused));
        drop(store);
        // On the disk as it is now, nothing is stale or wrong: each object is one that was put
        // under its key.
        let (store, _) = open(&disk, dir.path(), 8 * MIB);
        for key in store.keys() {
            let n: u64 = std::str::from_utf8(&key).unwrap().parse().unwrap();
            let read = get(&store, &key).unwrap().unwrap();
            assert!((0..4).any(|round| read == pattern(n + 50 * round, 20_000)), "{n}");
        }
    }
}

#[test]
fn a_disk_that_does_not_respond_delays_no_deadline() {
    use mooncake_core::clock::{Clock, SystemClock};
    use mooncake_disk::{DiskTransport, OpenSegment};
    use mooncake_transport::transfer::{self, Transfer};
    for config in engines() {
        let dir = dir();
        let clock = SystemClock::shared();
        // On a busy machine, the request may time out before the disk sees it.
        let faults = fake_faults(|_, request| match request.offset {
            0 => IoFault::Stall,
            _ => IoFault::None,
        });
        let disk = DiskTransport::start_with_clock(DiskConfig { faults, ..config }, clock.clone()).unwrap();
        let path = dir.path().join("segment");
        let segment = disk.open(&OpenSegment { path, len: MIB, grows: false }).unwrap();
        let write = |at: u64, deadline| {
            let write = [Transfer::new(segment.addr() + at, vec![7u8; 5000])];
            transfer::write(&disk, &disk.own_peer(), write, deadline)
        };
        let start = clock.now();
        let (result, _) = write(0, Some(start.after(Duration::from_millis(100)))).wait();
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Timeout);
        assert!(clock.now() >= start.after(Duration::from_millis(100)), "the share does not end early");
        write(8192, None).wait().0.unwrap();
        assert_eq!(disk.stats().timeouts, 1);
        // The kernel may still write there, so the segment stays open until the process ends.
        std::mem::forget(segment);
    }
    let _: &dyn Clock = &SystemClock::new();
}

#[test]
fn an_object_that_cannot_fit_is_refused_and_costs_nothing() {
    let dir = dir();
    let (store, _) = open(&DiskConfig::default(), dir.path(), 64 << 10);
    put(&store, b"small", b"value").unwrap();
    let error = put(&store, b"large", &[1; 128 << 10]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    assert_eq!(get(&store, b"small").unwrap().unwrap(), b"value");
    for (key, len) in [(&b""[..], 10), (b"key", 0), (&[0; (1 << 20) + 1], 10)] {
        assert_eq!(store.value(key, len).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn the_page_cache_is_bypassed_if_the_file_system_supports_it() {
    use mooncake_disk::{DiskTransport, OpenSegment};
    let dir = dir();
    let path = dir.path().join("segment");
    let open = OpenSegment { path: path.clone(), len: MIB, grows: false };
    let direct = DiskTransport::start(DiskConfig::default()).unwrap().open(&open).unwrap();
    let cached = DiskTransport::start(DiskConfig { direct: false, ..DiskConfig::default() }).unwrap();
    assert!(!cached.open(&open).unwrap().is_direct());
    use std::os::unix::fs::OpenOptionsExt;
    let can = std::fs::OpenOptions::new().read(true).custom_flags(0o40000).open(&path).is_ok();
    assert_eq!(direct.is_direct(), can);
}

/// Returns the share of reads that find their object, of keys in a loop of which three fifths fit.
fn hit_rate_in_loop(policy: PolicyKind) -> f64 {
    let dir = dir();
    let config = StoreConfig { eviction: policy.into(), ..StoreConfig::new(dir.path(), 60 * 8192) };
    let (store, _) = FileStore::open(DiskConfig::default(), config).unwrap();
    let (mut found, all) = (0, 5000);
    for number in 0..all {
        let key = (number % 100u64).to_le_bytes();
        match get(&store, &key).unwrap() {
            Some(_) => found += 1,
            None => put(&store, &key, &[1; 4000]).unwrap(),
        }
    }
    found as f64 / all as f64
}

#[test]
fn a_policy_learns_from_the_reads_of_the_disk() {
    let [lru, gittins] = [PolicyKind::Lru, PolicyKind::Gittins].map(hit_rate_in_loop);
    assert!(lru == 0.0 && gittins > 0.3, "{gittins} with gittins, {lru} with lru");
}
