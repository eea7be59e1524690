//! Operations that the waiting threads carry out themselves.

use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::testkit::effort;

use super::*;

/// Carries out an operation on this thread, as a binding does for a caller that waits at once, that
/// waits later, or that only looks.
pub(super) fn carry_out(rank: &Rank, way: u64, begin: impl FnOnce() -> Operation) -> Outcome {
    let driving = if way == 0 { rank.comm().drive() } else { None };
    let operation = begin();
    if let Some(driving) = driving {
        operation.drive_by(&driving, WITHIN);
    } else if way == 1 {
        operation.drive(WITHIN);
    }
    finish(&operation)
}

/// Runs work for each rank on a thread of its own.
pub(super) fn on_threads<R: Send>(ranks: &[Rank], work: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Waits until all messages between the ranks go through shared memory.
pub(super) fn wait_for_rings(ranks: &[Rank]) {
    let clock = SystemClock::new();
    let began = clock.now();
    loop {
        let pending: Vec<_> = ranks.iter().map(barrier).collect();
        pending.iter().for_each(succeed);
        if ranks.iter().all(|rank| rank.comm().drive().is_some()) {
            return;
        }
        assert!(clock.now().since(began) < WITHIN, "no shared memory");
    }
}

/// The oracle is a formula. Ranks choose at random how they wait.
#[test]
fn results_do_not_depend_on_who_carries_them_out() {
    let seed = rng().next_u64();
    for count in [2usize, 4] {
        let (_group, ranks) = start(count);
        wait_for_rings(&ranks);
        on_threads(&ranks, |rank| {
            let mut common = Rng::seeded(seed);
            let mut own = Rng::seeded(seed ^ (rank.slot as u64 + 1));
            for round in 0..effort(12, 60i32) {
                let kind = common.next_u64() % 4;
                let sizes = [1usize, 20, 3000, 20_000, 300_000];
                let len = sizes[(common.next_u64() % 5) as usize];
                let value = |from: usize, to: usize, at: usize| {
                    round.wrapping_mul(7).wrapping_add((from * 1000 + to * 10 + at) as i32)
                };
                let slot_of_rank = rank.slot;
                let values = move |from: usize, to: usize| ints((0..len).map(move |at| value(from, to, at)));
                let way = own.next_u64() % 3;
                let outcome = match kind {
                    0 => {
                        let memory = Memory::new(values(slot_of_rank, 0));
                        let call =
                            Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
                        let outcome = carry_out(rank, way, || rank.start_collective(call, &[&memory]));
                        let sum =
                            |at| (0..count).fold(0i32, |sum, from| sum.wrapping_add(value(from, 0, at)));
                        assert!(memory.bytes() == ints((0..len).map(sum)), "round {round}");
                        outcome
                    }
                    1 => {
                        let input: Vec<u8> = (0..count).flat_map(|to| values(slot_of_rank, to)).collect();
                        let (input, output) = (Memory::new(input), Memory::new(vec![0; len * 4 * count]));
                        let (inputs, outputs) = (flat(&input, len * 4), flat(&output, len * 4));
                        let call = Collective::AllToAll { inputs, outputs };
                        let outcome =
                            carry_out(rank, way, || rank.start_collective(call, &[&input, &output]));
                        let wanted: Vec<u8> =
                            (0..count).flat_map(|from| values(from, slot_of_rank)).collect();
                        assert!(output.bytes() == wanted, "round {round}");
                        outcome
                    }
                    2 => {
                        let input: Vec<u8> = (0..count).flat_map(|to| values(slot_of_rank, to)).collect();
                        let (input, output) = (Memory::new(input), Memory::new(vec![0; len * 4]));
                        let call = Collective::ReduceScatter {
                            inputs: flat(&input, len * 4),
                            output: output.buffer(),
                            reduction: sum(DType::I32),
                        };
                        let outcome =
                            carry_out(rank, way, || rank.start_collective(call, &[&input, &output]));
                        let sum = |at| {
                            (0..count).fold(0i32, |sum, from| sum.wrapping_add(value(from, slot_of_rank, at)))
                        };
                        assert!(output.bytes() == ints((0..len).map(sum)), "round {round}");
                        outcome
                    }
                    _ => {
                        let (next, before) = ((slot_of_rank + 1) % count, (slot_of_rank + count - 1) % count);
                        let sent = send(rank, next, values(slot_of_rank, next));
                        let (received, memory) = receive(rank, before, len * 4);
                        for operation in [sent, received] {
                            assert!(carry_out(rank, way.max(1), || operation).is_success());
                        }
                        assert!(memory.bytes() == values(before, slot_of_rank), "round {round}");
                        Outcome::default()
                    }
                };
                assert!(outcome.is_success(), "round {round}: {outcome:?}");
            }
        });
    }
}

/// A piece for this rank itself is used in the caller's memory, unless a result may overwrite it.
#[test]
fn results_may_lie_in_the_memory_of_the_input() {
    let (_group, ranks) = start(2);
    wait_for_rings(&ranks);
    let len = 100_000usize;
    let values = |from: usize, to: usize| ints((0..len as i32).map(|at| at * 10 + (from * 2 + to) as i32));
    let memories: Vec<_> =
        (0..2).map(|from| Memory::new([values(from, 0), values(from, 1)].concat())).collect();
    // The pieces lie in the reverse order in the same memory: each result overwrites an input.
    let outcomes = on_threads(&ranks, |rank| {
        let memory = &memories[rank.slot];
        let outputs = Buffers::List(vec![part(memory, len * 4, len * 4), part(memory, 0, len * 4)]);
        let call = Collective::AllToAll { inputs: flat(memory, len * 4), outputs };
        carry_out(rank, 0, || rank.start_collective(call, &[memory]))
    });
    assert!(outcomes.iter().all(Outcome::is_success));
    for (to, memory) in memories.iter().enumerate() {
        assert!(memory.bytes() == [values(1, to), values(0, to)].concat());
    }
    // The result of a reduction replaces the own piece.
    let memories: Vec<_> =
        (0..2).map(|from| Memory::new([values(from, 0), values(from, 1)].concat())).collect();
    let outcomes = on_threads(&ranks, |rank| {
        let memory = &memories[rank.slot];
        let call = Collective::ReduceScatter {
            inputs: flat(memory, len * 4),
            output: part(memory, rank.slot * len * 4, len * 4),
            reduction: sum(DType::I32),
        };
        carry_out(rank, 0, || rank.start_collective(call, &[memory]))
    });
    assert!(outcomes.iter().all(Outcome::is_success));
    for (to, memory) in memories.iter().enumerate() {
        let sum = ints((0..len as i32).map(|at| 2 * at * 10 + 2 + 2 * to as i32));
        assert!(memory.bytes()[to * len * 4..][..len * 4] == sum);
    }
}

/// The survivors carry out an operation that repeats after the failure, with an input that is
/// staged only in part at first.
#[test]
fn threads_that_drive_leave_out_a_rank_that_fails() {
    let group = TestGroup::new(4, 4, true);
    let mut ranks = Rank::founders(&group, 4, true).unwrap();
    wait_for_views(&ranks);
    wait_for_rings(&ranks);
    let len = 50_000usize;
    // The rank that fails has begun: the others have its data, but not its readiness.
    let last = ranks.pop().unwrap();
    let memory = Memory::new(ints((0..len as i32).map(|at| at * 8)));
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    let mut last = last;
    let _begun = last.start_collective(call, &[&memory]);
    group.set_dead(3);
    let results = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            on_threads(&ranks, |rank| {
                let memory = Memory::new(ints((0..len as i32).map(|at| at << rank.slot)));
                let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
                let outcome = carry_out(rank, 0, || rank.start_collective(call, &[&memory]));
                (outcome, memory.bytes())
            })
        });
        last.kill();
        others.join().unwrap()
    });
    let without = ints((0..len as i32).map(|at| at * 7));
    let with = ints((0..len as i32).map(|at| at * 15));
    let failed = results.iter().all(|(outcome, bytes)| outcome.failed == 8 && *bytes == without);
    // The rank may have finished before its end.
    let all = results.iter().all(|(outcome, bytes)| outcome.is_success() && *bytes == with);
    assert!(failed || all, "{:?}", results.iter().map(|(outcome, _)| outcome).collect::<Vec<_>>());
}

/// A rank without operations takes a message for a communicator that it does not have, although no
/// thread of it waits.
#[test]
fn a_rank_that_does_nothing_refuses_what_it_does_not_know() {
    let (_group, mut ranks) = start(2);
    wait_for_rings(&ranks);
    on_threads(&ranks, |rank| {
        assert!(carry_out(rank, 0, || barrier(rank)).is_success());
    });
    // The communicator ends without a word.
    let other = ranks.pop().unwrap();
    let shared = &other.comm().shared;
    shared.plane.remove(shared.number);
    let operation = barrier(&ranks[0]);
    assert!(operation.wait(Some(Duration::from_secs(5))), "no refusal");
}
