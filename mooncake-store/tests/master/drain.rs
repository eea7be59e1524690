//! Drain jobs, under a manual clock.

use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use crate::drain_support::{Drains, name};
use mooncake_core::error::ErrorCode::*;
use mooncake_core::ids::Uuid;
use mooncake_core::replica::{ReplicateConfig, SegmentStatus, SoftPin};
use mooncake_store::master::{DrainStatus, MasterOptions};
use mooncake_store::protocol::wire::{TaskKind::Move, TaskReport, TaskStatus};

fn three() -> Rig {
    let rig = Rig::new();
    (1..=3).for_each(|number| drop(rig.mount(number, MIB)));
    rig
}

#[test]
fn a_segment_is_emptied_a_few_at_a_time() {
    let rig = three();
    (0..10).for_each(|at| rig.put_in(1, &format!("k{at}"), KIB));
    rig.put_in(2, "other", 100 * KIB);
    let job = rig.drain(&[1], &[], 4).unwrap();
    assert_eq!((rig.job(job).status, rig.state(1)), (DrainStatus::Created, SegmentStatus::Draining));
    assert_eq!(rig.job(job).segments, [name(1)]);
    rig.master.tick();
    let info = rig.job(job);
    assert_eq!((info.status, info.active, info.succeeded, info.blocked), (DrainStatus::Running, 4, 0, 0));
    rig.put_in(1, "late", KIB);
    assert_ne!(rig.lies_in("late"), [1], "nothing new comes in");
    for (moved, then) in [(4, 4), (4, 2), (2, 0)] {
        assert_eq!(rig.work(1).len(), moved);
        // The end of a move is recorded at once.
        rig.master.tick();
        assert_eq!(rig.job(job).active, then);
    }
    let info = rig.job(job);
    assert_eq!((info.status, info.succeeded, info.failed), (DrainStatus::Succeeded, 10, 0));
    assert_eq!((info.migrated_bytes, info.message.as_str()), (10 * KIB, "Drain job finished successfully"));
    assert_eq!(rig.state(1), SegmentStatus::Drained);
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    for at in 0..10 {
        assert_eq!(rig.lies_in(&format!("k{at}")), [3], "the least used of the two");
    }
}

#[test]
fn objects_go_only_where_they_may() {
    let rig = three();
    (0..5).for_each(|at| rig.put_in(1, &format!("k{at}"), KIB));
    rig.put_in(2, "other", 100 * KIB);
    let job = rig.drain(&[1], &[2], 100).unwrap();
    rig.master.tick();
    assert_eq!(rig.work(1).len(), 5);
    rig.master.tick();
    assert_eq!(rig.job(job).status, DrainStatus::Succeeded);
    (0..5).for_each(|at| assert_eq!(rig.lies_in(&format!("k{at}")), [2]));
}

#[test]
fn requests_that_make_no_sense() {
    let rig = three();
    assert_eq!(rig.drain(&[], &[], 4), Err(InvalidParams));
    assert_eq!(rig.drain(&[1], &[], 0), Err(InvalidParams));
    assert_eq!(rig.drain(&[1, 2, 1], &[], 4), Err(InvalidParams));
    assert_eq!(rig.drain(&[1], &[1], 4), Err(InvalidParams));
    assert_eq!(rig.drain(&[7], &[], 4), Err(SegmentNotFound));
    assert_eq!(rig.drain(&[1, 7], &[], 4), Err(SegmentNotFound));
    assert_eq!(rig.drain(&[1], &[7], 4), Err(SegmentNotFound));
    assert_eq!(rig.state(1), SegmentStatus::Ok, "nothing half done");
    rig.drain(&[1], &[], 4).unwrap();
    assert_eq!(rig.drain(&[1], &[], 4), Err(UnavailableInCurrentStatus));
    assert_eq!(rig.drain(&[2], &[1], 4), Err(UnavailableInCurrentStatus));
    let none = Uuid::new(1, 1);
    assert_eq!(rig.master.drain(none).unwrap_err().code(), JobNotFound);
    assert_eq!(rig.master.drain_cancel(none).unwrap_err().code(), JobNotFound);
}

/// Only objects without another replica are moved, and the segment accepts no more objects.
#[test]
fn a_leaving_client_moves_only_replicas() {
    let rig = three();
    rig.put_in(1, "only", KIB);
    let two = ReplicateConfig { preferred_segment: name(1), ..ReplicateConfig::replicas(2) };
    rig.put_with(9, "both", KIB, &two).unwrap();
    assert!(rig.lies_in("both").contains(&1));
    let job = rig.master.drain_client(client(1)).unwrap().id;
    rig.master.tick();
    assert_eq!(rig.work(1), ["only"]);
    rig.master.tick();
    assert_ne!(rig.lies_in("only"), [1]);
    rig.put_in(1, "late", KIB);
    assert_ne!(rig.lies_in("late"), [1], "nothing new comes in");
    rig.alive_for(11.0);
    let info = rig.master.drain_client(client(1)).unwrap();
    assert_eq!((info.id, info.status, info.succeeded), (job, DrainStatus::Succeeded, 1));
    assert_eq!(rig.state(1), SegmentStatus::Drained);
    assert_eq!(rig.lies_in("both").len(), 2, "the replica can be read until the client is gone");
    assert_eq!(rig.master.drain_client(client(7)).unwrap_err().code(), SegmentNotFound);
}

/// The master evicts no objects of other clients for a client that leaves.
#[test]
fn a_leaving_client_finds_free_space_or_none() {
    let rig = Rig::new();
    (1..=2).for_each(|number| drop(rig.mount(number, MIB)));
    rig.put_in(1, "only", 512 * KIB);
    rig.put_in(2, "of others", 768 * KIB);
    rig.master.drain_client(client(1)).unwrap();
    rig.alive_for(20.0);
    let info = rig.master.drain_client(client(1)).unwrap();
    assert_eq!((info.status, info.blocked, info.succeeded), (DrainStatus::Running, 1, 0));
    assert_eq!((rig.lies_in("only"), rig.lies_in("of others")), (vec![1], vec![2]));
    rig.remove("of others", true).unwrap();
    rig.alive_for(11.0);
    rig.work(1);
    rig.alive_for(1.0);
    assert_eq!(rig.lies_in("only"), [2], "room has come about");
}

#[test]
fn what_has_to_stay_is_waited_for() {
    let rig = three();
    let only = ReplicateConfig { preferred_segment: name(1), ..ReplicateConfig::default() };
    rig.start_with(9, "unfinished", KIB, mooncake_store::api::WriteMode::Put, &only).unwrap();
    rig.put_in(1, "copied", KIB);
    rig.master.copy_start(client(1), b"copied", &name(1), &[&name(2)]).unwrap();
    rig.put_in(1, "read", KIB);
    rig.locate("read").unwrap();
    let job = rig.drain(&[1], &[], 4).unwrap();
    rig.master.tick();
    assert_eq!(rig.job(job).blocked, 2);
    assert_eq!(rig.work(1), ["read"], "readers are no reason to wait");
    rig.round();
    assert_eq!((rig.job(job).blocked, rig.job(job).active), (2, 0));

    rig.end(9, "unfinished").unwrap();
    rig.master.replication_end(client(1), mooncake_store::protocol::wire::TaskKind::Copy, b"copied").unwrap();
    rig.round();
    assert_eq!((rig.job(job).blocked, rig.job(job).active), (0, 2));
    assert_eq!(rig.work(1).len(), 2);
    assert_eq!(rig.lies_in("copied").len(), 2, "to where there is none yet");
    rig.alive_for(10.5);
    assert_eq!((rig.job(job).status, rig.state(1)), (DrainStatus::Succeeded, SegmentStatus::Drained));
    assert_eq!(rig.job(job).succeeded, 3);
}

/// A pin forbids eviction, not moves.
#[test]
fn pinned_and_grouped_objects_are_moved() {
    let rig = three();
    let put = |key: &str, config: ReplicateConfig| {
        rig.put_with(9, key, KIB, &ReplicateConfig { preferred_segment: name(1), ..config }).unwrap();
    };
    put("hard", ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() });
    put("soft", ReplicateConfig { soft_pin: SoftPin::Enable, ..ReplicateConfig::default() });
    put("grouped", ReplicateConfig { group_ids: Some(vec!["g".into()]), ..ReplicateConfig::default() });
    put("both", ReplicateConfig { hard_pin: true, ..ReplicateConfig::replicas(2) });
    put("leased", ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() });
    rig.locate("leased").unwrap();
    let job = rig.drain(&[1], &[], 10).unwrap();
    rig.master.tick();
    assert_eq!(rig.work(1).len(), 5);
    rig.alive_for(10.5);
    assert_eq!((rig.job(job).status, rig.job(job).succeeded), (DrainStatus::Succeeded, 5));
    for key in ["hard", "soft", "grouped", "both", "leased"] {
        assert!(!rig.lies_in(key).contains(&1) && !rig.lies_in(key).is_empty(), "{key}");
    }
    assert_eq!(rig.lies_in("both").len(), 2);
    // The object is still pinned.
    for at in 0..300 {
        let _ = rig.put(9, &format!("filler{at}"), 16 * KIB);
    }
    assert!(!rig.has("filler0"), "the segments are full");
    assert!(rig.has("hard") && rig.has("both"));
}

/// A job always ends, and its message names what is left.
#[test]
fn a_job_that_moves_nothing_ends() {
    let rig = Rig::new();
    rig.mount(1, 4 * MIB);
    rig.mount(2, MIB);
    rig.put_in(1, "too large", 2 * MIB);
    let only = ReplicateConfig { preferred_segment: name(1), ..ReplicateConfig::default() };
    rig.start_with(9, "unfinished", KIB, mooncake_store::api::WriteMode::Put, &only).unwrap();
    let job = rig.drain(&[1], &[], 4).unwrap();
    rig.alive_for(59.0);
    assert_eq!((rig.job(job).status, rig.job(job).blocked), (DrainStatus::Running, 2));
    rig.alive_for(3.0);
    let info = rig.job(job);
    assert_eq!((info.status, info.blocked), (DrainStatus::Failed, 2));
    for text in ["2 replicas", "key=\"too large\" has 2097152 bytes", "key=\"unfinished\" is being written"] {
        assert!(info.message.contains(text), "{}", info.message);
    }
    assert_eq!((rig.lies_in("too large"), rig.state(1)), (vec![1], SegmentStatus::Ok));
}

#[test]
fn a_client_that_leaves_joins_its_drain() {
    let rig = three();
    (0..8).for_each(|at| rig.put_in(1, &format!("k{at}"), KIB));
    let job = rig.drain(&[1], &[], 2).unwrap();
    rig.master.tick();
    let own = rig.master.drain_client(client(1)).unwrap();
    assert_eq!((own.id, own.active, own.waiting), (job, 2, 6));
    while !rig.work(1).is_empty() {
        rig.master.tick();
    }
    let own = rig.master.drain_client(client(1)).unwrap();
    assert_eq!((own.id, own.status, own.succeeded), (job, DrainStatus::Succeeded, 8));
}

#[test]
fn a_target_that_fails_is_chosen_last() {
    let rig = three();
    (0..4).for_each(|at| rig.put_in(1, &format!("k{at}"), KIB));
    rig.put_in(2, "other", 500 * KIB);
    let job = rig.drain(&[1], &[], 4).unwrap();
    rig.master.tick();
    for task in rig.master.fetch_tasks(client(1), 10) {
        assert!(task.payload.contains(&name(3)), "the least used");
        let report = TaskReport { id: task.id, status: TaskStatus::Failed, message: "gone".into() };
        rig.master.complete_task(client(1), &report).unwrap();
    }
    rig.round();
    rig.round();
    assert_eq!(rig.work(1).len(), 4);
    rig.round();
    assert_eq!((rig.job(job).status, rig.job(job).failed), (DrainStatus::Succeeded, 0));
    (0..4).for_each(|at| assert_eq!(rig.lies_in(&format!("k{at}")), [2]));
}

#[test]
fn objects_of_an_unmounted_segment_are_counted() {
    let rig = three();
    (0..8).for_each(|at| rig.put_in(1, &format!("k{at}"), KIB));
    let job = rig.drain(&[1], &[], 2).unwrap();
    rig.master.tick();
    assert_eq!(rig.work(1).len(), 2);
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    rig.master.tick();
    let info = rig.job(job);
    assert_eq!((info.status, info.succeeded, info.blocked), (DrainStatus::Failed, 2, 6));
}

#[test]
fn a_segment_is_drained_when_its_last_reader_is_done() {
    let rig = three();
    rig.put_in(1, "k", KIB);
    let job = rig.drain(&[1], &[], 4).unwrap();
    rig.master.tick();
    rig.locate("k").unwrap();
    assert_eq!(rig.work(1), ["k"]);
    rig.alive_for(9.5);
    assert_eq!((rig.job(job).status, rig.state(1)), (DrainStatus::Running, SegmentStatus::Draining));
    rig.alive_for(1.0);
    assert_eq!((rig.job(job).status, rig.state(1)), (DrainStatus::Succeeded, SegmentStatus::Drained));
}

#[test]
fn a_cancel_waits_for_no_one_who_has_not_begun() {
    let rig = three();
    (0..8).for_each(|at| rig.put_in(1, &format!("k{at}"), KIB));
    let job = rig.drain(&[1], &[], 2).unwrap();
    let cancel = || rig.master.drain_cancel(job).map_err(|error| error.code());
    rig.master.tick();
    let begun = rig.master.fetch_tasks(client(1), 1);
    assert_eq!(begun.len(), 1);
    assert_eq!(cancel(), Err(UnavailableInCurrentStatus));
    assert_eq!(rig.master.fetch_tasks(client(1), 10).len(), 0, "what was not begun is withdrawn");
    rig.round();
    assert_eq!(rig.job(job).active, 1, "and nothing new is begun for a while");
    let report = TaskReport { id: begun[0].id, status: TaskStatus::Failed, message: "no".into() };
    rig.master.complete_task(client(1), &report).unwrap();
    assert_eq!(cancel(), Ok(()));
    assert_eq!(cancel(), Err(UnavailableInCurrentStatus), "once");
    assert_eq!((rig.job(job).status, rig.state(1)), (DrainStatus::Canceled, SegmentStatus::Ok));
    rig.put_in(1, "again", KIB);
    assert_eq!(rig.lies_in("again"), [1]);
    rig.alive_for(2.0);
    assert_eq!(rig.master.fetch_tasks(client(1), 10).len(), 0);

    // A move that no client repeats still continues.
    let job = rig.drain(&[1], &[], 2).unwrap();
    rig.master.tick();
    let begun = rig.master.fetch_tasks(client(1), 1);
    assert!(rig.master.drain_cancel(job).is_err());
    let report = TaskReport { id: begun[0].id, status: TaskStatus::Failed, message: "no".into() };
    rig.master.complete_task(client(1), &report).unwrap();
    rig.alive_for(11.0);
    assert_eq!(rig.job(job).active, 2);
}

#[test]
fn what_cannot_be_moved_is_given_up_after_three_tries() {
    let rig = three();
    rig.put_in(1, "k", KIB);
    rig.put_in(1, "l", KIB);
    let job = rig.drain(&[1], &[], 4).unwrap();
    for _ in 0..3 {
        rig.round();
        for task in rig.master.fetch_tasks(client(1), 10) {
            let status =
                if task.payload.contains("\"k\"") { TaskStatus::Failed } else { TaskStatus::Success };
            if status == TaskStatus::Success {
                let (from, to) = (name(1), name(2));
                rig.master.move_start(client(1), b"l", &from, &to).unwrap();
                rig.master.replication_end(client(1), Move, b"l").unwrap();
            }
            let report = TaskReport { id: task.id, status, message: "broken cable".into() };
            rig.master.complete_task(client(1), &report).unwrap();
        }
    }
    rig.round();
    let info = rig.job(job);
    assert_eq!((info.status, info.succeeded, info.failed), (DrainStatus::Failed, 1, 1));
    assert!(info.message.contains("k: broken cable"), "{}", info.message);
    assert_eq!(rig.state(1), SegmentStatus::Ok);
    assert_eq!(rig.lies_in("k"), [1]);
}

#[test]
fn a_full_cluster_gives_up_what_it_used_least() {
    let rig = Rig::without_watermark();
    (1..=2).for_each(|number| drop(rig.mount(number, 64 * KIB)));
    (0..8).for_each(|at| rig.put_in(2, &format!("cold{at}"), 8 * KIB));
    (0..4).for_each(|at| rig.put_in(1, &format!("warm{at}"), 8 * KIB));
    let job = rig.drain(&[1], &[], 1).unwrap();
    for _ in 0..8 {
        rig.round();
        rig.work(1);
    }
    rig.round();
    assert_eq!((rig.job(job).status, rig.job(job).succeeded), (DrainStatus::Succeeded, 4));
    (0..4).for_each(|at| assert_eq!(rig.lies_in(&format!("warm{at}")), [2]));
    let cold = (0..8).filter(|at| rig.has(&format!("cold{at}"))).count();
    assert_eq!(cold, 4, "no more than needed");
}

#[test]
fn with_nowhere_to_go_nothing_is_lost() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put_in(1, "k", KIB);
    let job = rig.drain(&[1], &[], 1).unwrap();
    rig.alive_for(5.0);
    assert_eq!((rig.job(job).status, rig.job(job).blocked), (DrainStatus::Running, 1));
    assert_eq!(rig.lies_in("k"), [1]);
    rig.mount(2, MIB);
    rig.round();
    assert_eq!(rig.work(1), ["k"]);
    rig.master.tick();
    assert_eq!(rig.job(job).status, DrainStatus::Succeeded);
}

#[test]
fn segments_that_go_meanwhile() {
    let rig = three();
    rig.put_in(1, "k", KIB);
    rig.put_in(2, "l", KIB);
    let job = rig.drain(&[1, 2], &[], 4).unwrap();
    rig.master.tick();
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    rig.work(2);
    rig.round();
    let info = rig.job(job);
    assert_eq!(info.status, DrainStatus::Failed, "no move goes on without its client");
    assert!(rig.master.fetch_tasks(client(1), 10).is_empty());
    assert!(info.message.contains("node1:1 was unmounted"), "{}", info.message);
    assert_eq!(rig.state(2), SegmentStatus::Ok);
    assert_eq!(rig.lies_in("l"), [3]);
    // A segment in a drain job may also be unmounted gracefully.
    let job = rig.drain(&[2], &[], 4).unwrap();
    rig.round();
    assert_eq!(rig.job(job).status, DrainStatus::Succeeded);
    rig.master.unmount_after(client(2), segment(2, MIB).id, Duration::from_secs(5)).unwrap();
    assert_eq!(rig.state(2), SegmentStatus::GracefullyUnmounting);
    // After another mount, the segment is like a new one.
    rig.alive_for(6.0);
    rig.mount(2, MIB);
    assert_eq!(rig.state(2), SegmentStatus::Ok);
}

#[test]
fn two_sources_with_copies_of_the_same_object() {
    let rig = Rig::with(MasterOptions::default());
    (1..=4).for_each(|number| drop(rig.mount(number, MIB)));
    rig.put_in(1, "k", KIB);
    rig.master.copy_start(client(1), b"k", &name(1), &[&name(2)]).unwrap();
    rig.master.replication_end(client(1), mooncake_store::protocol::wire::TaskKind::Copy, b"k").unwrap();
    let job = rig.drain(&[1, 2], &[], 4).unwrap();
    for _ in 0..4 {
        rig.round();
        rig.work(1);
        rig.work(2);
    }
    rig.round();
    assert_eq!((rig.job(job).status, rig.job(job).failed), (DrainStatus::Succeeded, 0));
    assert_eq!(rig.lies_in("k"), [3, 4]);
}
