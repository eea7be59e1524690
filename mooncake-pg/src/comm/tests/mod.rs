//! Tests of communicators over real sockets and engines.

#![allow(clippy::print_stderr, reason = "seeds and measurements")]

mod collectives;
mod driving;
mod exchange;
mod failures;
mod hostile;
mod p2p;
mod speed;

use std::sync::Arc;

use mooncake_core::clock::Rng;
use mooncake_core::testkit::test_seed;

use crate::call::{Buffer, Buffers, Collective};
use crate::dtype::DType;
use crate::operation::{Operation, Outcome};
use crate::reduce::{ReduceOp, Reduction};
use crate::testkit::{Memory, Rank, TestGroup, WITHIN};
use crate::view::Slot;

/// Returns a generator of random inputs.
fn rng() -> Rng {
    Rng::seeded(test_seed())
}

fn sum(dtype: DType) -> Reduction {
    Reduction::new(dtype, ReduceOp::Sum).unwrap()
}

/// Returns the numbers as the bytes of `i32` elements.
fn ints(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_ne_bytes).collect()
}

/// Waits for an operation.
fn finish(operation: &Operation) -> Outcome {
    assert!(operation.wait(Some(WITHIN)), "the operation does not end");
    operation.outcome().unwrap()
}

/// Waits for an operation without failures.
fn succeed(operation: &Operation) {
    let outcome = finish(operation);
    assert!(outcome.is_success(), "{outcome:?}");
}

fn start(count: usize) -> (TestGroup, Vec<Rank>) {
    let group = TestGroup::new(count, count, true);
    let ranks = Rank::founders(&group, count, true).unwrap();
    wait_for_views(&ranks);
    (group, ranks)
}

/// Waits until every rank has a view.
fn wait_for_views(ranks: &[Rank]) {
    for rank in ranks {
        let mut views = rank.comm().shared.views.clone();
        rank.runtime().block_on(async { views.wait_for(Option::is_some).await.map(drop) }).unwrap();
    }
}

/// Starts an all-reduce of `i32` sums. The result is in the memory.
fn all_reduce(rank: &Rank, values: Vec<u8>) -> (Operation, Arc<Memory>) {
    let memory = Memory::new(values);
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    (rank.start_collective(call, &[&memory]), memory)
}

fn barrier(rank: &Rank) -> Operation {
    rank.start_collective(Collective::Barrier, &[])
}

fn flat(memory: &Arc<Memory>, piece: usize) -> Buffers {
    Buffers::Flat { whole: memory.buffer(), piece }
}

fn part(memory: &Arc<Memory>, from: usize, len: usize) -> Buffer {
    memory.buffer().part(from..from + len).unwrap()
}

fn slot(number: usize) -> Slot {
    Slot(number as u8)
}

/// Sends bytes.
fn send(rank: &Rank, to: usize, bytes: Vec<u8>) -> Operation {
    let memory = Memory::new(bytes);
    // SAFETY: the guard owns the memory.
    unsafe { rank.comm().send(memory.buffer(), slot(to), Box::new(memory.clone())) }.unwrap()
}

/// Receives bytes. The result is in the memory.
fn receive(rank: &Rank, from: usize, len: usize) -> (Operation, Arc<Memory>) {
    let memory = Memory::new(vec![0; len]);
    // SAFETY: the guard owns the memory.
    let operation = unsafe { rank.comm().receive(memory.buffer(), slot(from), Box::new(memory.clone())) };
    (operation.unwrap(), memory)
}
