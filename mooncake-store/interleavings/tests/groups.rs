//! Eviction of a group beside look-ups and reads of its objects, in all orders that some hundred
//! schedules have. Either all objects are found and stay, or none is.
#![cfg(feature = "testkit")]

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_interleavings::{Master, MasterOptions, Put};
use mooncake_protocol::api::WriteMode;
use mooncake_protocol::call::Handle;
use mooncake_protocol::message::MountSegment;
use shuttle::rand::Rng as _;
use shuttle::scheduler::RandomScheduler;
use shuttle::{Config, FailurePersistence, Runner, thread};

const LEN: u64 = 64;
/// Upper bound of the steps of a put before it has evicted.
const STEPS: u32 = 300;
const GROUP: [&str; 4] = ["a", "b", "c", "d"];

fn put(master: &Master, group: &str, key: &str) -> bool {
    let (writer, mode, config) =
        (ClientId(Uuid::new(1, 1)).into(), WriteMode::Put, &ReplicateConfig::default());
    let put = Put { writer, mode, key: key.as_bytes(), len: LEN, config, group, session: None };
    master.put_start(&put).is_ok() && master.put_end(writer, key.as_bytes(), None, ReplicaType::All).is_ok()
}

/// Returns a master whose memory is full: a group, and two objects that were used later.
fn full_master(clock: Arc<ManualClock>) -> Master {
    let options = MasterOptions { high_watermark: 1.0, shards: 4, ..MasterOptions::default() };
    let master = Master::with_parts(options, &Default::default(), &PolicyKind::Lru.into(), clock, 1)
        .expect("the options are right");
    let segment = Segment {
        id: SegmentId(Uuid::new(2, 1)),
        name: "node:1".into(),
        base: 1 << 40,
        size: (GROUP.len() as u64 + 2) * LEN,
        endpoint: "10.0.0.1:1".into(),
        protocol: "tcp".into(),
        host_id: "node".into(),
        locality: None,
    };
    let segment = std::borrow::Cow::Owned(segment);
    master.handle(MountSegment { segment, client: ClientId(Uuid::new(1, 1)) }).expect("an empty master");
    GROUP.iter().for_each(|key| assert!(put(&master, "g", key)));
    ["x", "y"].iter().for_each(|key| assert!(put(&master, "", key)));
    master
}

/// Runs a scenario in so many schedules.
fn explore(scenario: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.failure_persistence = FailurePersistence::None;
    config.stack_size = 1 << 20;
    config.silence_warnings = true;
    Runner::new(RandomScheduler::new_from_seed(7, 200), config).run(scenario);
}

/// Finds every object of the group by `find`, beside a put that evicts the oldest object.
fn find_beside_a_put(order: [usize; 4], find: fn(&Master, &str) -> bool) {
    explore(move || {
        let clock = Arc::new(ManualClock::new());
        let master = Arc::new(full_master(clock.clone()));
        clock.advance(Duration::from_secs(60));
        let of_thread = master.clone();
        let writer = thread::spawn(move || put(&of_thread, "", "new"));
        // A put takes many steps before it evicts.
        (0..shuttle::rand::thread_rng().gen_range(0..STEPS)).for_each(|_| thread::yield_now());
        let found = order.map(|at| find(&master, GROUP[at]));
        assert!(writer.join().expect("the put returns"));
        let left = GROUP.map(|key| master.exists(key.as_bytes()));
        assert_eq!((found, left), ([found[0]; 4], [found[0]; 4]), "found, and left");
    });
}

const FORTH: [usize; 4] = [0, 1, 2, 3];
const BACK: [usize; 4] = [3, 2, 1, 0];

#[test]
fn look_ups_find_all_of_a_group_or_nothing() {
    for order in [FORTH, BACK] {
        find_beside_a_put(order, |master, key| master.exists(key.as_bytes()));
    }
}

#[test]
fn reads_find_all_of_a_group_or_nothing() {
    for order in [FORTH, BACK] {
        find_beside_a_put(order, |master, key| master.locate(key.as_bytes()).is_ok());
    }
}

/// Look-ups that follow one another for a while yield to a put. Nothing else can go.
#[test]
fn a_group_that_yields_to_a_put_goes_as_one() {
    explore(|| {
        let clock = Arc::new(ManualClock::new());
        let master = Arc::new(full_master(clock.clone()));
        assert!(["x", "y"].iter().all(|key| master.locate(key.as_bytes()).is_ok()) && master.exists(b"b"));
        clock.advance(Duration::from_secs(1));
        let threads = [("new", "c"), ("other", "a")].map(|(key, read)| {
            let master = master.clone();
            thread::spawn(move || {
                put(&master, "", key);
                (0..shuttle::rand::thread_rng().gen_range(0..STEPS)).for_each(|_| thread::yield_now());
                master.locate(read.as_bytes()).is_ok()
            })
        });
        for thread in threads {
            thread.join().expect("the calls return");
        }
        let left = GROUP.map(|key| master.exists(key.as_bytes()));
        assert_eq!(left, [left[0]; 4]);
    });
}
