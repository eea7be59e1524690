//! Mounts of memory whose earlier mount was retired, beside other calls.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_core::ids::{ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::Segment;
use mooncake_store::master::{GRANT_USE, Journal, MasterOptions};

use crate::common::rig::{MIB, Rig, client, segment};

/// Stops the search for replicas of a retired segment at its first object until the test lets it go
/// on.
#[derive(Debug)]
struct StopsOnce(Mutex<Option<(Sender<()>, Receiver<()>)>>);

impl Journal for StopsOnce {
    fn stored(&self, _: &str, _: &ObjectKey, _: &str, _: Option<&[u8]>) {}

    fn removed(&self, _: &str, _: &ObjectKey, _: &str) {
        let stop = self.0.lock().unwrap().take();
        if let Some((reached, go_on)) = stop {
            reached.send(()).unwrap();
            let _ = go_on.recv_timeout(Duration::from_secs(60));
        }
    }
}

fn next_of(number: u64, id: u64) -> Segment {
    Segment { id: SegmentId(Uuid::new(2, id)), ..segment(number, MIB) }
}

#[test]
fn a_mount_that_searches_retired_memory_delays_no_other_mount() {
    let rig = Arc::new(Rig::new());
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    for number in 0..40 {
        rig.put(9, &format!("{number}"), 100).unwrap();
    }
    let ((reached, is_reached), (go_on, may_go_on)) = (channel(), channel());
    let journal: Arc<dyn Journal> = Arc::new(StopsOnce(Mutex::new(Some((reached, may_go_on)))));
    rig.master.set_journal(&journal);
    let (searching, others) = (rig.clone(), rig.clone());
    // Another process at the same address takes the place of client 1, twice at once.
    let mounts = |by: u64| {
        let rig = searching.clone();
        std::thread::spawn(move || rig.master.mount(client(by), &next_of(1, 100)))
    };
    let first = mounts(7);
    is_reached.recv_timeout(Duration::from_secs(60)).unwrap();
    let again = mounts(7);
    let (done, is_done) = channel();
    let beside = std::thread::spawn(move || {
        others.master.mount(client(3), &segment(3, MIB)).unwrap();
        others.master.remount(client(2), &[segment(2, MIB)]).unwrap();
        others.master.mount(client(3), &segment(4, MIB)).unwrap();
        others.master.unmount(client(3), segment(3, MIB).id).unwrap();
        done.send(()).unwrap();
    });
    let passed = is_done.recv_timeout(Duration::from_secs(20));
    go_on.send(()).unwrap();
    first.join().unwrap().unwrap();
    again.join().unwrap().unwrap();
    beside.join().unwrap();
    passed.expect("mounts of other memory wait for the search");
    let stats = rig.master.stats();
    assert_eq!(stats.segments.iter().filter(|held| held.client == client(7)).count(), 1);
}

/// Memory of an earlier master stays unused for its time, whatever mounts it meanwhile.
#[test]
fn unmounting_does_not_open_memory_early() {
    let rig = Rig::new();
    let refused = || rig.put(9, "k", 100).map(drop);
    rig.master.remount(client(1), &[segment(1, MIB)]).unwrap();
    assert_eq!(refused(), Err(ErrorCode::NoAvailableHandle));
    for id in [100, 101] {
        let before = rig.master.stats().segments[0].segment.id;
        rig.master.unmount(client(1), before).unwrap();
        rig.master.tick();
        rig.master.mount(client(1), &next_of(1, id)).unwrap();
        assert_eq!(refused(), Err(ErrorCode::NoAvailableHandle), "{id}");
    }
    rig.clock.advance(MasterOptions::default().longest_promise().max(GRANT_USE));
    assert_eq!(refused(), Ok(()));
}

/// A master that has seen all mounts of memory knows what is in use.
#[test]
fn memory_mounted_again_opens_at_once() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    rig.master.remount(client(1), &[next_of(1, 100)]).unwrap();
    rig.put(9, "k", 100).unwrap();
}
