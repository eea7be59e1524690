//! Point-to-point operations.

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::driving::wait_for_rings;
use super::*;

#[test]
fn messages_of_a_pair_arrive_in_order_whatever_their_length() {
    let mut rng = rng();
    let (_group, ranks) = start(2);
    let messages: Vec<Vec<u8>> = (0..300)
        .map(|_| {
            let len = [0, 1, 1000, 40_000, 200_000][rng.below(5) as usize];
            let mut bytes = vec![0; len];
            rng.fill(&mut bytes);
            bytes
        })
        .collect();
    // Half of the receives come before the sends.
    let mut receives: Vec<_> =
        messages[..150].iter().map(|bytes| receive(&ranks[1], 0, bytes.len())).collect();
    let sends: Vec<_> = messages.iter().map(|bytes| send(&ranks[0], 1, bytes.clone())).collect();
    receives.extend(messages[150..].iter().map(|bytes| receive(&ranks[1], 0, bytes.len())));
    sends.iter().for_each(succeed);
    for ((operation, memory), bytes) in receives.iter().zip(&messages) {
        succeed(operation);
        assert!(memory.bytes() == *bytes);
        assert_eq!(operation.outcome().unwrap().source, Some(slot(0)));
    }
    assert!(ranks.iter().all(|rank| rank.plane().staging_bytes().0 == 0));
}

#[test]
fn both_directions_and_many_pairs_run_at_once() {
    let (_group, ranks) = start(4);
    let mut begun = Vec::new();
    for round in 0..20u8 {
        for from in 0..4 {
            for to in (0..4).filter(|to| *to != from) {
                let bytes = vec![round.wrapping_mul(16) + from as u8; 50_000];
                begun.push((receive(&ranks[to], from, 50_000), bytes.clone()));
                begun.push(((send(&ranks[from], to, bytes.clone()), Memory::new(bytes.clone())), bytes));
            }
        }
    }
    for ((operation, memory), bytes) in begun {
        succeed(&operation);
        assert!(memory.bytes() == bytes);
    }
}

#[test]
fn a_message_without_bytes_needs_no_receiver() {
    let (_group, ranks) = start(2);
    succeed(&send(&ranks[0], 1, Vec::new()));
    let waiting = send(&ranks[0], 1, vec![1]);
    assert!(!waiting.wait(Some(Duration::from_millis(50))), "a message is over before it is received");
    let (empty, _) = receive(&ranks[1], 0, 0);
    let (second, memory) = receive(&ranks[1], 0, 1);
    for operation in [&empty, &second, &waiting] {
        succeed(operation);
    }
    assert_eq!(memory.bytes(), [1]);
}

#[test]
fn a_receive_from_any_tells_its_source() {
    let (_group, ranks) = start(3);
    let memory: Vec<_> = (0..2).map(|_| Memory::new(vec![0; 2])).collect();
    let begun: Vec<_> = memory
        .iter()
        .map(|memory| {
            // SAFETY: the guard owns the memory.
            let begun = unsafe { ranks[0].comm().receive_any(memory.buffer(), Box::new(memory.clone())) };
            begun.unwrap()
        })
        .collect();
    let sends = [send(&ranks[1], 0, vec![1, 1]), send(&ranks[2], 0, vec![2, 2])];
    sends.iter().for_each(succeed);
    let mut sources: Vec<u8> = begun
        .iter()
        .zip(&memory)
        .map(|(operation, memory)| {
            let source = finish(operation).source.unwrap().0;
            assert_eq!(memory.bytes(), [source; 2]);
            source
        })
        .collect();
    sources.sort_unstable();
    assert_eq!(sources, [1, 2]);
}

#[test]
fn a_message_that_is_too_long_is_an_error_on_both_sides() {
    let (_group, ranks) = start(2);
    let (received, _) = receive(&ranks[1], 0, 10);
    let sent = send(&ranks[0], 1, vec![1; 11]);
    for operation in [&received, &sent] {
        let outcome = finish(operation);
        assert!(outcome.error.is_some() && outcome.failed == 0);
    }
    let (received, memory) = receive(&ranks[1], 0, 10);
    succeed(&send(&ranks[0], 1, vec![2; 4]));
    succeed(&received);
    assert_eq!(memory.bytes(), [2, 2, 2, 2, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn operations_with_a_dead_rank_fail_and_others_go_on() {
    let (group, mut ranks) = start(3);
    succeed(&{
        let (received, _) = receive(&ranks[0], 1, 1);
        succeed(&send(&ranks[1], 0, vec![1]));
        received
    });
    let (pending, _) = receive(&ranks[0], 1, 10);
    let (other, memory) = receive(&ranks[0], 2, 10);
    let large = send(&ranks[0], 1, vec![1; 1 << 20]);
    std::thread::sleep(Duration::from_millis(20));
    ranks[1].kill();
    group.set_dead(1);
    for operation in [&pending, &large, &send(&ranks[0], 1, vec![1])] {
        let outcome = finish(operation);
        assert!(outcome.error.is_some());
        assert_eq!(outcome.hint()[..3], [0, 1, 0]);
    }
    assert_eq!(group.active(), 0b101);
    succeed(&send(&ranks[2], 0, vec![3; 10]));
    succeed(&other);
    assert_eq!(memory.bytes(), [3; 10]);
}

#[test]
fn a_silent_rank_fails_after_the_timeout_and_a_slow_one_does_not() {
    let (group, ranks) = start(3);
    ranks[0].plane().timeouts().set_p2p(Duration::from_millis(100));
    ranks[1].stop(Duration::from_secs(1));
    ranks[2].stop(Duration::from_secs(60));
    std::thread::sleep(Duration::from_millis(20));
    group.set_dead(2);
    let silent = send(&ranks[0], 2, vec![1; 10]);
    let (slow, memory) = receive(&ranks[0], 1, 3);
    assert_eq!(finish(&silent).failed, 0b100);
    assert!(!slow.is_done());
    succeed(&send(&ranks[1], 0, vec![4; 3]));
    succeed(&slow);
    assert_eq!(memory.bytes(), [4; 3]);
}

/// Sends a message. Its end takes messages, as a caller does that waits, and sends the next one.
fn send_on(ranks: &Arc<Vec<Rank>>, left: u8, ends: &Sender<bool>) {
    let operation = send(&ranks[0], 1, vec![left]);
    let (ranks, ends) = (ranks.clone(), ends.clone());
    operation.on_done(move |outcome| {
        if let Some(driver_guard) = ranks[0].comm().drive() {
            driver_guard.run_ready();
        }
        let _ = ends.send(outcome.is_success());
        if left > 0 {
            send_on(&ranks, left - 1, &ends);
        }
    });
}

#[test]
fn the_end_of_a_send_starts_the_next_one() {
    const COUNT: u8 = 50;
    let (_group, ranks) = start(2);
    wait_for_rings(&ranks);
    let ranks = Arc::new(ranks);
    let receives: Vec<_> = (0..COUNT).map(|_| receive(&ranks[1], 0, 1)).collect();
    let (ends, ended) = channel();
    send_on(&ranks, COUNT - 1, &ends);
    for _ in 0..COUNT {
        assert!(ended.recv_timeout(WITHIN / 6).expect("a send does not end"));
    }
    for (left, (operation, memory)) in (0..COUNT).rev().zip(&receives) {
        succeed(operation);
        assert_eq!(memory.bytes(), [left]);
    }
}
