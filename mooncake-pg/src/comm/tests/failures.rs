//! Failures: survivors end with one result.

use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::testkit::effort;

use super::*;
use crate::link::Recipient;
use crate::message::{Message, Payload, Progress, Round, Tag};
use crate::pause::MAX_GAP;
use crate::staging::{Staged, share_guard};
use crate::view::{Evidence, MemberState};

/// Returns the sum of the values that ranks contribute, given the ranks as bits: rank `r` has
/// `1 << r` in each element.
fn values(rank: usize, len: usize) -> Vec<u8> {
    ints(vec![1 << rank; len])
}

/// Checks that all elements are equal, and returns the element.
fn contributors(memory: &Memory) -> i32 {
    let bytes = memory.bytes();
    let first = i32::from_ne_bytes(bytes[..4].try_into().unwrap());
    assert!(bytes.chunks(4).all(|element| element == first.to_ne_bytes()), "elements of several attempts");
    first
}

fn kill(group: &TestGroup, ranks: &mut [Rank], victim: usize) {
    ranks[victim].kill();
    group.set_dead(victim);
}

#[test]
fn survivors_go_on_without_a_dead_rank() {
    let (group, mut ranks) = start(4);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    kill(&group, &mut ranks, 3);
    // The caller expects three ranks already: the output is too short for a fourth one.
    let begun: Vec<_> = ranks[..3]
        .iter()
        .map(|rank| {
            let (input, output) = (Memory::new(values(rank.slot, 1)), Memory::new(vec![0; 12]));
            let call = Collective::AllGather { input: input.buffer(), outputs: flat(&output, 4) };
            (rank.start_collective(call, &[&input, &output]), output)
        })
        .collect();
    for (operation, output) in &begun {
        let outcome = finish(operation);
        assert!(outcome.error.is_none(), "{outcome:?}");
        assert_eq!(outcome.hint()[..4], [0, 0, 0, 1]);
        assert_eq!(group.active(), 0b111, "the view changes before the operation is over");
        assert_eq!(output.bytes(), ints([1, 2, 4]));
    }
    // Ranks that learn of the failure from another one report nothing.
    let failures: Vec<_> =
        group.reports().into_iter().filter(|(.., evidence)| *evidence == Evidence::Failure).collect();
    assert!(!failures.is_empty() && failures.iter().all(|(_, accused, _)| *accused == slot(3)));
    // Later operations have no failure.
    let begun: Vec<_> = ranks[..3].iter().map(|rank| all_reduce(rank, values(rank.slot, 30_000))).collect();
    for (operation, memory) in &begun {
        succeed(operation);
        assert_eq!(contributors(memory), 0b111);
    }
}

#[test]
fn without_a_sync_each_operation_finds_the_failure_again() {
    let group = TestGroup::new(3, 3, false);
    let mut ranks = Rank::founders(&group, 3, false).unwrap();
    wait_for_views(&ranks);
    kill(&group, &mut ranks, 1);
    for len in [1, 100_000] {
        let begun: Vec<_> = [0, 2].map(|at| all_reduce(&ranks[at], values(at, len))).into();
        for (operation, memory) in &begun {
            let outcome = finish(operation);
            assert_eq!((outcome.failed, outcome.error.is_none()), (0b010, true));
            assert_eq!(contributors(memory), 0b101);
        }
    }
    assert_eq!((group.syncs(), group.active()), (0, 0b111));
    group.set(&[1], MemberState::Inactive);
    let begun: Vec<_> = [0, 2].map(|at| all_reduce(&ranks[at], values(at, 1))).into();
    for (operation, memory) in &begun {
        succeed(operation);
        assert_eq!(contributors(memory), 0b101);
    }
}

#[test]
fn a_root_that_dies_leaves_no_result_and_no_hang() {
    let (group, mut ranks) = start(3);
    kill(&group, &mut ranks, 0);
    let memory: Vec<_> = (0..3).map(|_| Memory::new(vec![7; 100_000])).collect();
    let begun: Vec<_> = ranks[1..]
        .iter()
        .map(|rank| {
            let call = Collective::Broadcast { tensor: memory[rank.slot].buffer(), root: slot(0) };
            rank.start_collective(call, &[&memory[rank.slot]])
        })
        .collect();
    for operation in &begun {
        assert_eq!(finish(operation).failed, 1);
    }
}

/// Ends ranks at random moments of a row of operations.
fn end_at_random(rng: &mut Rng, count: usize, victims: &[usize]) {
    let (group, mut ranks) = start(count);
    let lengths: Vec<usize> =
        (0..24).map(|_| [1, 500, 20_000, 90_000, 400_000][rng.below(5) as usize]).collect();
    let begun: Vec<Vec<(Operation, Arc<Memory>)>> = ranks
        .iter()
        .map(|rank| lengths.iter().map(|len| all_reduce(rank, values(rank.slot, *len))).collect())
        .collect();
    let witness = (0..count).find(|at| !victims.contains(at)).unwrap();
    let mut number = 0;
    for victim in victims {
        number += rng.below(12) as usize;
        finish(&begun[witness][number].0);
        std::thread::sleep(Duration::from_micros(rng.below(3_000)));
        kill(&group, &mut ranks, *victim);
    }
    let dead = victims.iter().fold(0, |dead, victim| dead | 1 << victim);
    let all = (1 << count) - 1;
    let survivors: Vec<usize> = (0..count).filter(|at| !victims.contains(at)).collect();
    let mut before = all;
    for (number, len) in lengths.iter().enumerate() {
        let mut sets = Vec::new();
        for at in &survivors {
            let (operation, memory) = &begun[*at][number];
            let outcome = finish(operation);
            assert!(outcome.error.is_none(), "operation {number} at {at}: {outcome:?}");
            assert_eq!(outcome.failed & !dead, 0, "a living rank is marked");
            let set = contributors(memory);
            assert!(set | outcome.failed as i32 | dead as i32 == all, "operation {number} lacks {set:b}");
            sets.push(set);
        }
        assert!(sets.iter().all(|set| *set == sets[0]), "operation {number} of {len}: {sets:?}");
        assert_eq!(sets[0] & !before, 0, "a dead rank takes part again");
        before = sets[0];
    }
    let last: Vec<_> = survivors.iter().map(|at| all_reduce(&ranks[*at], values(*at, 9))).collect();
    for (operation, memory) in &last {
        assert!(finish(operation).error.is_none());
        assert_eq!(contributors(memory), all & !(dead as i32));
    }
}

#[test]
fn survivors_of_a_random_end_have_one_result() {
    let mut rng = rng();
    for round in 0..effort(3, 10) {
        let count = 3 + round % 3;
        let victim = rng.below(count as u64) as usize;
        end_at_random(&mut rng, count, &[victim]);
    }
}

#[test]
fn survivors_of_two_random_ends_have_one_result() {
    let mut rng = rng();
    for _ in 0..effort(1, 5) {
        let first = rng.below(5) as usize;
        let second = (first + 1 + rng.below(4) as usize) % 5;
        end_at_random(&mut rng, 5, &[first, second]);
    }
}

#[test]
fn a_rank_may_end_as_soon_as_it_has_finished() {
    for round in 0..20 {
        let (_group, mut ranks) = start(3);
        let len = [1, 100_000][round % 2];
        let begun: Vec<_> = ranks.iter().map(|rank| all_reduce(rank, values(rank.slot, len))).collect();
        let first = round % 3;
        succeed(&begun[first].0);
        drop(ranks.remove(first));
        for (operation, memory) in &begun {
            succeed(operation);
            assert_eq!(contributors(memory), 0b111);
        }
    }
}

#[test]
fn a_rank_that_does_not_respond_is_left_out() {
    let (group, ranks) = start(3);
    for rank in &ranks {
        rank.plane().timeouts().set_collective(Duration::from_millis(300));
    }
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    group.set_dead(2);
    let stopped = ranks[2].stop_until_dropped();
    // The call of the stopped rank comes before the others can leave it out.
    let (late, late_memory) = all_reduce(&ranks[2], values(2, 70_000));
    let begun: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 70_000))).collect();
    for (operation, memory) in &begun {
        let outcome = finish(operation);
        assert_eq!((outcome.failed, outcome.error.is_none()), (0b100, true));
        assert_eq!(contributors(memory), 0b011);
    }
    // The stopped rank continues, and learns that it is out.
    drop(stopped);
    let outcome = finish(&late);
    assert!(outcome.error.is_some(), "{outcome:?}");
    assert_eq!(contributors(&late_memory), 0b100, "its tensor is as before");
}

#[test]
fn a_rank_that_was_left_out_comes_back_if_it_stays_active() {
    let group = TestGroup::new(3, 3, false);
    let ranks = Rank::founders(&group, 3, false).unwrap();
    wait_for_views(&ranks);
    for rank in &ranks {
        rank.plane().timeouts().set_collective(Duration::from_millis(300));
    }
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    group.set_dead(2);
    let stopped = ranks[2].stop_until_dropped();
    // Two operations of every rank. The stopped rank is out of the first, perhaps of the second.
    let begun: Vec<Vec<_>> = ranks
        .iter()
        .map(|rank| (0..2).map(|_| all_reduce(rank, values(rank.slot, 1000))).collect())
        .collect();
    for (operation, memory) in begun[..2].iter().flatten() {
        assert_eq!(finish(operation).failed, 0b100);
        assert_eq!(contributors(memory), 0b011);
    }
    group.set_alive(2);
    drop(stopped);
    for (operation, _) in &begun[2] {
        assert!(finish(operation).error.is_some());
    }
    // The others know of the return when a later message of the rank has arrived.
    for at in 0..2 {
        let (received, _) = receive(&ranks[at], 2, 1);
        succeed(&send(&ranks[2], at, vec![1]));
        succeed(&received);
    }
    for round in 0..3 {
        let begun: Vec<_> = ranks.iter().map(|rank| all_reduce(rank, values(rank.slot, 1000))).collect();
        for (operation, memory) in &begun {
            let outcome = finish(operation);
            assert!(outcome.is_success(), "turn {round}: {outcome:?}");
            assert_eq!(contributors(memory), 0b111);
        }
    }
}

#[test]
fn a_rank_that_closes_its_communicator_is_left_out_and_not_accused() {
    let (group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let (received, _) = receive(&ranks[0], 2, 1);
    let begun: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 10))).collect();
    ranks[2].comm().close();
    let mut ends: Vec<_> = begun.iter().map(|(operation, _)| finish(operation)).collect();
    ends.push(finish(&received));
    // Each later operation names it again, because its slot is still active.
    let later: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 40_000))).collect();
    ends.extend(later.iter().map(|(operation, _)| finish(operation)));
    assert!(ends.iter().all(|outcome| outcome.failed == 0b100), "{ends:?}");
    for (_, memory) in begun.iter().chain(&later) {
        assert_eq!(contributors(memory), 0b011);
    }
    let accused = group.reports().into_iter().filter(|(.., evidence)| *evidence == Evidence::Failure);
    assert_eq!(accused.collect::<Vec<_>>(), []);
}

#[test]
fn a_message_from_a_rank_that_has_closed_its_communicator_is_not_waited_for() {
    let (_group, ranks) = start(2);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    ranks[1].comm().close();
    let shared = ranks[0].comm().shared.clone();
    while shared.inbox.lock().left == 0 {
        std::thread::yield_now();
    }
    let expect_failure = |operation: &Operation| {
        assert!(operation.wait(Some(WITHIN / 6)), "it is waited for");
        let outcome = finish(operation);
        assert_eq!((outcome.failed, outcome.error.is_some()), (0b10, true));
    };
    expect_failure(&receive(&ranks[0], 1, 1).0);
    // The news may also come between the check of a call and its start.
    shared.plane.timeouts.set_p2p(Duration::from_millis(50));
    let memory = Memory::new(vec![0]);
    let guard = share_guard(Box::new(memory.clone()));
    expect_failure(&shared.post_receive(memory.buffer(), Some(slot(1)), guard));
    expect_failure(&send(&ranks[0], 1, vec![1]));
}

#[test]
fn a_slow_rank_is_waited_for() {
    let (_group, ranks) = start(2);
    ranks[0].plane().timeouts().set_collective(Duration::from_millis(100));
    ranks[1].stop(Duration::from_secs(1));
    let begun: Vec<_> = ranks.iter().map(|rank| all_reduce(rank, values(rank.slot, 70_000))).collect();
    for (operation, memory) in &begun {
        succeed(operation);
        assert_eq!(contributors(memory), 0b11);
    }
}

#[test]
fn a_message_of_a_later_mask_waits_for_the_view() {
    let (group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    group.hold(1, true);
    group.set(&[2], MemberState::Inactive);
    let (operation, memory) = all_reduce(&ranks[0], values(0, 10));
    let (late, late_memory) = all_reduce(&ranks[1], values(1, 10));
    assert!(!late.wait(Some(Duration::from_millis(300))) && !operation.is_done());
    group.hold(1, false);
    for (operation, memory) in [(operation, memory), (late, late_memory)] {
        let outcome = finish(&operation);
        assert!(outcome.error.is_none(), "{outcome:?}");
        assert_eq!(contributors(&memory), 0b011);
    }
}

#[test]
fn messages_of_an_earlier_mask_are_dropped() {
    let (group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let old = Round { mask: group.member(0).mask(), number: 0, absent: 0 };
    group.set(&[2], MemberState::Inactive);
    // The operation with number 1 is next. Its data in an earlier round must not count.
    let memory = Memory::new(values(0, 10));
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    let tag = Tag { operation: 1, round: old, call: call.digest() };
    let payload = Payload::Inline(values(5, 10).into());
    ranks[1].comm().shared.send_to(0, Message::Offer { tag, part: 0, payload });
    ranks[1].comm().shared.send_to(0, Message::Ready { tag, success: true });
    let operation = ranks[0].start_collective(call, &[&memory]);
    assert!(!operation.wait(Some(Duration::from_millis(200))), "a message of an earlier mask counts");
    let (other, _memory) = all_reduce(&ranks[1], values(1, 10));
    succeed(&operation);
    succeed(&other);
    assert_eq!(contributors(&memory), 0b011);
}

/// Offers the data of the third rank for the second operation, an all-reduce, to the first two.
/// Returns the tag of the operation.
fn offer_by_hand(ranks: &[Rank], len: usize) -> Tag {
    let sent =
        Collective::AllReduce { tensor: Memory::new(values(2, len)).buffer(), reduction: sum(DType::I32) };
    let round =
        Round { mask: ranks[2].comm().shared.views.borrow().as_ref().unwrap().mask, number: 0, absent: 0 };
    let tag = Tag { operation: 1, round, call: sent.digest() };
    for to in 0..2 {
        let payload = Payload::Inline(values(2, len).into());
        ranks[2].comm().shared.send_to(to, Message::Offer { tag, part: 0, payload });
    }
    tag
}

fn wait_until(is_true: impl Fn() -> bool) {
    let clock = SystemClock::new();
    let until = clock.now().after(WITHIN);
    while !is_true() {
        assert!(clock.now() < until, "it does not come true");
        std::thread::yield_now();
    }
}

/// Waits until a rank has the offer of another one.
fn wait_until_offered(from: usize, to: &Rank, tag: Tag) {
    wait_until(|| to.comm().shared.inbox.lock().members[from].offers.iter().any(|offer| offer.tag == tag));
}

/// Waits until a rank is ready for another one.
fn wait_until_ready(from: usize, to: &Rank, tag: Tag) {
    wait_until(|| {
        to.comm().shared.inbox.lock().members[from].ready.iter().any(|(of, success)| *of == tag && *success)
    });
}

#[test]
fn a_rank_that_lacks_a_last_message_has_the_result_of_one_that_has_finished() {
    let (group, mut ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let begun: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 10))).collect();
    // The third rank offers its data to both others, and ends after it was ready for one of them.
    let tag = offer_by_hand(&ranks, 10);
    ranks[2].comm().shared.send_to(0, Message::Ready { tag, success: true });
    succeed(&begun[0].0);
    assert_eq!(contributors(&begun[0].1), 0b111);
    assert!(!begun[1].0.is_done());
    kill(&group, &mut ranks, 2);
    let outcome = finish(&begun[1].0);
    assert!(outcome.error.is_none(), "{outcome:?}");
    assert_eq!((contributors(&begun[1].1), outcome.failed), (0b111, 0b100));
    let next: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 1))).collect();
    for (operation, memory) in &next {
        assert!(finish(operation).error.is_none());
        assert_eq!(contributors(memory), 0b011);
    }
}

#[test]
fn a_ready_rank_may_end_while_another_one_is_not_ready() {
    let (_group, mut ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let begun: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 10))).collect();
    // The second rank gets the readiness of the third one only after the end of the first one.
    let tag = offer_by_hand(&ranks, 10);
    ranks[2].comm().shared.send_to(0, Message::Ready { tag, success: true });
    succeed(&begun[0].0);
    assert!(!begun[1].0.is_done());
    wait_until_ready(0, &ranks[1], tag);
    drop(ranks.remove(0));
    ranks[0].comm().shared.lose_slot(0);
    let turns = async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    };
    // The executor is a task of the same thread: it has seen the loss afterwards.
    let seen = ranks[0].runtime().spawn(turns);
    ranks[0].runtime().block_on(seen).unwrap();
    ranks[1].comm().shared.send_to(1, Message::Ready { tag, success: true });
    assert!(begun[1].0.wait(Some(WITHIN / 6)), "the end of the rank interrupts the operation");
    succeed(&begun[1].0);
    assert_eq!(contributors(&begun[1].1), 0b111);
}

/// Delivers a message of a slot to a rank, without its thread.
fn deliver(from: &Rank, to: &Rank, message: Message) {
    let process = from.comm().shared.plane.process;
    to.comm().shared.clone().deliver(process, from.slot as u8, message);
}

#[test]
fn a_rank_that_was_stopped_finishes_only_what_the_others_have_finished() {
    let (first, later) = ((0, 0b000), (1, 0b000));
    let without = (0, 0b100);
    // The progress of the others: their round, next operation, and round of the last one.
    for (round, next, finished, is_finished) in
        [(without, 1, first, false), (without, 2, without, false), (later, 2, first, true)]
    {
        let (_group, ranks) = start(3);
        ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
        let mask = ranks[2].comm().shared.views.borrow().as_ref().unwrap().mask;
        let round_of = |(number, absent): (u32, u64)| Round { mask, number, absent };
        let memory = Memory::new(values(2, 10));
        let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
        let tag = Tag { operation: 1, round: round_of(first), call: call.digest() };
        let operation = ranks[2].start_collective(call, &[&memory]);
        wait_until_offered(2, &ranks[0], tag);
        // All of this arrives before the rank looks again.
        let stopped = ranks[2].stop_until_dropped();
        for other in &ranks[..2] {
            let payload = Payload::Inline(values(other.slot, 10).into());
            deliver(other, &ranks[2], Message::Offer { tag, part: 0, payload });
            deliver(other, &ranks[2], Message::Ready { tag, success: true });
            let (round, finished) = (round_of(round), Some(round_of(finished)));
            let progress = Progress { round, next: Some(next), finished };
            deliver(other, &ranks[2], Message::Progress(progress));
        }
        drop(stopped);
        let outcome = finish(&operation);
        let case = (round, next, outcome.error);
        assert_eq!(case.2.is_none(), is_finished, "{case:?}");
        assert_eq!(contributors(&memory), if is_finished { 0b111 } else { 0b100 }, "{case:?}");
    }
}

#[test]
fn a_rank_that_was_stopped_takes_all_messages_before_it_finishes() {
    let (_group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let (operation, memory) = all_reduce(&ranks[2], values(2, 10));
    let mask = ranks[2].comm().shared.views.borrow().as_ref().unwrap().mask;
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    let tag = Tag { operation: 1, round: Round { mask, number: 0, absent: 0 }, call: call.digest() };
    wait_until_offered(2, &ranks[0], tag);
    let stopped = ranks[2].stop_until_dropped();
    // The rank has all that it needs, but not the news that the others go on without it.
    for other in &ranks[..2] {
        let payload = Payload::Inline(values(other.slot, 10).into());
        deliver(other, &ranks[2], Message::Offer { tag, part: 0, payload });
        deliver(other, &ranks[2], Message::Ready { tag, success: true });
    }
    let round = Round { absent: 0b100, ..tag.round };
    let progress = Progress { round, next: Some(1), finished: Some(tag.round) };
    // More than a ring takes, so that the news needs the connection.
    for part in 2..6 {
        let payload = Payload::Inline(vec![0; 40_000].into());
        ranks[0].comm().shared.send_to(2, Message::Offer { tag, part, payload });
    }
    ranks[0].comm().shared.send_to(2, Message::Progress(progress));
    drop(stopped);
    assert!(finish(&operation).error.is_some());
    assert_eq!(contributors(&memory), 0b100);
}

/// Stops a rank for so long that the others may leave it out.
fn stop_for_long(rank: &Rank) -> std::sync::mpsc::Sender<std::convert::Infallible> {
    let stopped = rank.stop_until_dropped();
    std::thread::sleep(MAX_GAP + Duration::from_millis(100));
    stopped
}

#[test]
fn a_rank_that_was_stopped_asks_the_others_before_it_finishes() {
    let (group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let memory = Memory::new(values(2, 10));
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    let tag = second(&group, &call);
    let operation = ranks[2].start_collective(call, &[&memory]);
    wait_until_offered(2, &ranks[0], tag);
    let stopped = stop_for_long(&ranks[2]);
    // The rank has all that it needs. That the others go on without it is still on its way.
    for other in &ranks[..2] {
        let payload = Payload::Inline(values(other.slot, 10).into());
        deliver(other, &ranks[2], Message::Offer { tag, part: 0, payload });
        deliver(other, &ranks[2], Message::Ready { tag, success: true });
    }
    drop(stopped);
    assert!(!operation.wait(Some(Duration::from_millis(500))), "it asks no other rank");
    for other in &ranks[..2] {
        let round = Round { number: 2, absent: 0b100, ..tag.round };
        let progress = Progress { round, next: Some(1), finished: Some(tag.round) };
        deliver(other, &ranks[2], Message::Progress(progress));
    }
    assert!(finish(&operation).error.is_some());
    assert_eq!(contributors(&memory), 0b100, "its tensor is as before");
}

#[test]
fn a_rank_that_was_stopped_has_the_result_of_those_that_have_finished() {
    let (group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let memory = Memory::new(values(2, 10));
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    let tag = second(&group, &call);
    let operation = ranks[2].start_collective(call, &[&memory]);
    for other in &ranks[..2] {
        let payload = Payload::Inline(values(other.slot, 10).into());
        deliver(other, &ranks[2], Message::Offer { tag, part: 0, payload });
    }
    // The others need nothing more of the rank.
    wait_until_ready(2, &ranks[0], tag);
    wait_until_ready(2, &ranks[1], tag);
    let stopped = stop_for_long(&ranks[2]);
    let begun: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 10))).collect();
    begun.iter().for_each(|(operation, _)| succeed(operation));
    drop(stopped);
    succeed(&operation);
    // One response suffices.
    let asked = |rank: &Rank| {
        let progress = rank.comm().shared.inbox.lock().members[2].progress;
        progress.is_some_and(|progress| progress.round.number == 1)
    };
    assert!(ranks[..2].iter().any(asked), "it asks no other rank");
    for memory in [&memory, &begun[0].1, &begun[1].1] {
        assert_eq!(contributors(memory), 0b111);
    }
}

#[test]
fn a_rank_that_was_stopped_has_the_result_of_those_that_have_ended() {
    let (group, mut ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let memory = Memory::new(values(2, 10));
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    let tag = second(&group, &call);
    let operation = ranks[2].start_collective(call, &[&memory]);
    for other in &ranks[..2] {
        let payload = Payload::Inline(values(other.slot, 10).into());
        deliver(other, &ranks[2], Message::Offer { tag, part: 0, payload });
    }
    wait_until_ready(2, &ranks[0], tag);
    wait_until_ready(2, &ranks[1], tag);
    let stopped = stop_for_long(&ranks[2]);
    let begun: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 10))).collect();
    begun.iter().for_each(|(operation, _)| succeed(operation));
    let rank = ranks.pop().unwrap();
    drop(ranks);
    drop(stopped);
    assert!(finish(&operation).error.is_none());
    assert_eq!(contributors(&memory), 0b111, "its result lacks ranks that have finished");
    drop(rank);
}

#[test]
fn a_rank_that_was_stopped_while_it_asks_for_another_one_asks_again() {
    let (group, ranks) = start(2);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    group.set_probe(Duration::from_millis(200));
    ranks[0].plane().timeouts().set_collective(Duration::from_millis(50));
    // The response of the other rank does not come in time because this one is stopped.
    group.set_dead(1);
    let first = all_reduce(&ranks[0], values(0, 10));
    while group.probes() == 0 {
        std::thread::yield_now();
    }
    let stopped = stop_for_long(&ranks[0]);
    group.set_alive(1);
    drop(stopped);
    while group.probes() == 1 {
        assert!(!first.0.is_done(), "it accuses the other rank");
        std::thread::yield_now();
    }
    let second = all_reduce(&ranks[1], values(1, 10));
    for (operation, memory) in [&first, &second] {
        succeed(operation);
        assert_eq!(contributors(memory), 0b11);
    }
}

#[test]
fn a_rank_that_was_stopped_between_operations_takes_part_in_the_next_one() {
    let (_group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    drop(stop_for_long(&ranks[1]));
    for _ in 0..3 {
        let begun: Vec<_> = ranks.iter().map(|rank| all_reduce(rank, values(rank.slot, 20_000))).collect();
        for (operation, memory) in &begun {
            succeed(operation);
            assert_eq!(contributors(memory), 0b111);
        }
    }
    let inbox = ranks[0].comm().shared.inbox.lock();
    assert_eq!(inbox.members[1].progress.unwrap().round.number, 1, "one new round");
}

#[test]
fn a_rank_that_was_stopped_does_not_finish_what_others_repeat_in_a_view_without_it() {
    for has_failed in [false, true] {
        let (group, ranks) = start(3);
        ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
        let (operation, memory) = all_reduce(&ranks[2], values(2, 10));
        let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
        let tag = second(&group, &call);
        wait_until_offered(2, &ranks[0], tag);
        wait_until_offered(2, &ranks[1], tag);
        let stopped = ranks[2].stop_until_dropped();
        let begun: Vec<_> = ranks[..2].iter().map(|rank| all_reduce(rank, values(rank.slot, 10))).collect();
        // Both others wait for the readiness of this rank only.
        wait_until_ready(0, &ranks[1], tag);
        wait_until_ready(1, &ranks[0], tag);
        group.hold(2, true);
        group.change(|view| {
            view.members[2].state = MemberState::Inactive;
            if has_failed {
                view.members[2].endpoint = None;
            }
        });
        for (operation, memory) in &begun {
            assert!(finish(operation).error.is_none());
            assert_eq!(contributors(memory), 0b011);
        }
        drop(stopped);
        assert!(!operation.wait(Some(Duration::from_millis(300))), "it does not wait for the view");
        group.hold(2, false);
        assert!(finish(&operation).error.is_some());
        assert_eq!(contributors(&memory), 0b100, "its tensor is as before");
    }
}

#[test]
fn a_rank_joins_and_a_replacement_takes_over() {
    let group = TestGroup::new(2, 3, true);
    let mut ranks = Rank::founders(&group, 2, true).unwrap();
    wait_for_views(&ranks);
    for _ in 0..5 {
        ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    }
    let mut joiner = Rank::start(2).unwrap();
    joiner.join(&group, true).unwrap();
    let (alone, memory) = all_reduce(&joiner, values(2, 3));
    succeed(&alone);
    assert_eq!(contributors(&memory), 0b100);
    ranks.push(joiner);
    group.set(&[2], MemberState::Active);
    wait_for_views(&ranks);
    let check = |ranks: &[Rank], expected: i32| {
        let begun: Vec<_> = ranks.iter().map(|rank| all_reduce(rank, values(rank.slot, 50_000))).collect();
        for (operation, memory) in &begun {
            let outcome = finish(operation);
            assert!(outcome.error.is_none(), "{outcome:?}");
            assert_eq!(contributors(memory), expected);
        }
    };
    check(&ranks, 0b111);
    kill(&group, &mut ranks, 1);
    ranks.remove(1);
    check(&ranks, 0b101);
    assert_eq!(group.active(), 0b101);

    let group = group.revived(1);
    let mut replacement = Rank::start(1).unwrap();
    replacement.join(&group, true).unwrap();
    ranks.push(replacement);
    group.set(&[1], MemberState::Active);
    wait_for_views(&ranks);
    check(&ranks, 0b111);
    check(&ranks, 0b111);
}

#[test]
fn a_rank_that_was_inactive_rejoins_in_place() {
    let (group, ranks) = start(3);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    // The rank does not see the view without itself.
    group.hold(2, true);
    group.set(&[2], MemberState::Inactive);
    for _ in 0..4 {
        ranks[..2].iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    }
    ranks[2].comm().rejoin();
    group.set(&[2], MemberState::Active);
    group.hold(2, false);
    for _ in 0..3 {
        let begun: Vec<_> = ranks.iter().map(|rank| all_reduce(rank, values(rank.slot, 20_000))).collect();
        for (operation, memory) in &begun {
            succeed(operation);
            assert_eq!(contributors(memory), 0b111);
        }
    }
}

#[test]
fn an_inactive_rank_is_refused() {
    let (group, ranks) = start(2);
    group.set(&[1], MemberState::Inactive);
    let memory = Memory::new(vec![0; 4]);
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    // SAFETY: the guard owns the memory.
    let refused = unsafe { ranks[1].comm().start(call, Box::new(memory)) };
    assert!(refused.unwrap_err().to_string().contains("not active"));
    let (alone, memory) = all_reduce(&ranks[0], values(0, 1));
    succeed(&alone);
    assert_eq!(contributors(&memory), 1);
}

/// Returns the tag of the second operation of a group without failures.
fn second(group: &TestGroup, call: &Collective) -> Tag {
    let round = Round { mask: group.member(0).mask(), number: 0, absent: 0 };
    Tag { operation: 1, round, call: call.digest() }
}

/// Puts bytes into staging memory.
fn stage(rank: &Rank, bytes: &[u8]) -> Staged {
    let pool = &rank.comm().shared.plane.pool;
    let staged = rank.runtime().block_on(pool.allocate(bytes.len())).unwrap();
    // SAFETY: the bytes are readable.
    unsafe { staged.write(0, bytes.as_ptr(), bytes.len()) };
    staged
}

#[test]
fn a_rank_that_dies_half_way_leaves_no_byte() {
    const LEN: usize = 100_000;
    for is_broadcast in [false, true] {
        let (group, mut ranks) = start(3);
        ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
        let begun: Vec<_> = ranks[..2]
            .iter()
            .map(|rank| {
                let input = Memory::new(vec![rank.slot as u8; LEN]);
                let output = Memory::new(vec![9; 3 * LEN]);
                let call = match is_broadcast {
                    true => Collective::Broadcast { tensor: part(&output, 0, LEN), root: slot(2) },
                    false => Collective::AllGather { input: input.buffer(), outputs: flat(&output, LEN) },
                };
                (rank.start_collective(call.clone(), &[&input, &output]), output, call)
            })
            .collect();
        // The third rank sends its data, and dies before it is ready.
        let staged = stage(&ranks[2], &[2; LEN]);
        let tag = second(&group, &begun[0].2);
        for to in 0..2 {
            let payload = Payload::Staged(staged.descriptor(0..LEN));
            ranks[2].comm().shared.send_to(to, Message::Offer { tag, part: 0, payload });
        }
        assert!(!begun[0].0.wait(Some(Duration::from_millis(300))), "it does not wait for the third rank");
        kill(&group, &mut ranks, 2);
        std::mem::forget(staged);
        for (operation, output, _) in &begun {
            let outcome = finish(operation);
            assert_eq!((outcome.failed, outcome.error.is_none()), (0b100, true), "{outcome:?}");
            let slots = if is_broadcast { [9, 9, 9] } else { [0, 1, 9] };
            let expected: Vec<u8> = slots.iter().flat_map(|byte| vec![*byte; LEN]).collect();
            assert!(output.bytes() == expected, "the dead rank has left bytes");
        }
    }
}

#[test]
fn bytes_that_were_given_up_do_not_count() {
    const LEN: usize = 100_000;
    let (group, ranks) = start(2);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let memory = [3, 7].map(|byte| Memory::new(vec![byte; LEN]));
    let call = |at: usize| Collective::Broadcast { tensor: memory[at].buffer(), root: slot(0) };
    let tag = second(&group, &call(1));
    let staged = stage(&ranks[0], &[1; LEN]);
    let payload = Payload::Staged(staged.descriptor(0..LEN));
    drop(staged);
    let other = stage(&ranks[0], &[2; LEN]);
    // As if this rank had been stopped before it could read, and the other one had gone on.
    ranks[0].comm().shared.send_to(1, Message::Offer { tag, part: 0, payload });
    ranks[0].comm().shared.send_to(1, Message::Ready { tag, success: true });
    let operation = ranks[1].start_collective(call(1), &[&memory[1]]);
    assert!(!operation.wait(Some(Duration::from_millis(500))), "bytes of another message count");
    drop(other);
    succeed(&ranks[0].start_collective(call(0), &[&memory[0]]));
    succeed(&operation);
    assert!(memory[1].bytes() == vec![3; LEN]);
}

#[test]
fn a_stopped_receiver_gets_no_bytes_of_a_later_message() {
    const LEN: usize = 1 << 20;
    let (group, ranks) = start(3);
    for rank in &ranks {
        rank.plane().timeouts().set_p2p(Duration::from_millis(100));
    }
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
    let (received, memory) = receive(&ranks[1], 0, LEN);
    ranks[1].stop(Duration::from_secs(2));
    std::thread::sleep(Duration::from_millis(50));
    let sent = send(&ranks[0], 1, vec![1; LEN]);
    std::thread::sleep(Duration::from_millis(50));
    group.set_dead(1);
    assert!(finish(&sent).error.is_some());
    // This message lies where the first one was.
    let later = send(&ranks[0], 2, vec![2; LEN]);
    let outcome = finish(&received);
    assert!(outcome.error.is_some() || memory.bytes() == vec![1; LEN], "bytes of a later message");
    assert!(!group.reports().contains(&(slot(1), slot(0), Evidence::Failure)), "it accuses the sender");
    let (received, memory) = receive(&ranks[2], 0, LEN);
    succeed(&received);
    succeed(&later);
    assert!(memory.bytes() == vec![2; LEN]);
}
