//! Collective operations without failures, against plain loops.

use super::*;

/// Number of elements: none, odd, around the limits of messages and parts, and large.
fn size(rng: &mut Rng) -> usize {
    match rng.below(8) {
        0 => 0,
        1 => 1,
        2 => rng.below(100) as usize,
        3 => 8191 + rng.below(4) as usize,
        4 => 16_383 + rng.below(4) as usize,
        5 => rng.below(70_000) as usize,
        6 => 65_535 + rng.below(4) as usize,
        _ => rng.below(700_000) as usize,
    }
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

/// Calls the same operation on every rank and waits for all.
fn on_all(ranks: &[Rank], call: impl Fn(usize) -> (Collective, Vec<Arc<Memory>>)) {
    let operations: Vec<Operation> = ranks
        .iter()
        .map(|rank| {
            let (call, memories) = call(rank.slot);
            rank.start_collective(call, &memories.iter().collect::<Vec<_>>())
        })
        .collect();
    operations.iter().for_each(succeed);
}

fn memories(bytes: &[Vec<u8>]) -> Vec<Arc<Memory>> {
    bytes.iter().map(|bytes| Memory::new(bytes.clone())).collect()
}

fn reduced(reduction: Reduction, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0; inputs[0].len()];
    reduction.apply(&inputs.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut out);
    out
}

fn check_reductions(ranks: &[Rank], rng: &mut Rng) {
    let count = ranks.len();
    let dtypes = [DType::I32, DType::U8, DType::I64, DType::Bf16, DType::F32, DType::Complex128, DType::Bool];
    let dtype = dtypes[rng.below(dtypes.len() as u64) as usize];
    let ops =
        if dtype == DType::Complex128 { &[ReduceOp::Sum][..] } else { &[ReduceOp::Sum, ReduceOp::Product] };
    let reduction = Reduction::new(dtype, ops[rng.below(ops.len() as u64) as usize]).unwrap();
    let len = size(rng) * dtype.bytes();
    let inputs: Vec<Vec<u8>> = (0..count).map(|_| random(rng, len)).collect();
    let expected = reduced(reduction, &inputs);

    let tensors = memories(&inputs);
    on_all(ranks, |at| {
        (Collective::AllReduce { tensor: tensors[at].buffer(), reduction }, vec![tensors[at].clone()])
    });
    for tensor in &tensors {
        assert!(tensor.bytes() == expected, "all_reduce of {len} bytes of {dtype:?}");
    }

    let (tensors, root) = (memories(&inputs), rng.below(count as u64) as usize);
    on_all(ranks, |at| {
        let call = Collective::Reduce { tensor: tensors[at].buffer(), reduction, root: slot(root) };
        (call, vec![tensors[at].clone()])
    });
    for (at, tensor) in tensors.iter().enumerate() {
        let expected = if at == root { &expected } else { &inputs[at] };
        assert!(tensor.bytes() == *expected, "reduce of {len} bytes of {dtype:?} at {at}");
    }

    let pieces: Vec<Vec<u8>> = (0..count).map(|_| random(rng, len * count)).collect();
    let (sources, outputs) = (memories(&pieces), memories(&vec![vec![0; len]; count]));
    on_all(ranks, |at| {
        let (inputs, output) = (flat(&sources[at], len), outputs[at].buffer());
        (
            Collective::ReduceScatter { inputs, output, reduction },
            vec![sources[at].clone(), outputs[at].clone()],
        )
    });
    for (at, output) in outputs.iter().enumerate() {
        let inputs: Vec<Vec<u8>> = pieces.iter().map(|all| all[at * len..(at + 1) * len].to_vec()).collect();
        assert!(output.bytes() == reduced(reduction, &inputs), "reduce_scatter of {len} bytes of {dtype:?}");
        assert!(sources[at].bytes() == pieces[at], "the input has changed");
    }
}

fn check_moves(ranks: &[Rank], rng: &mut Rng) {
    let (count, len) = (ranks.len(), size(rng));
    let inputs: Vec<Vec<u8>> = (0..count).map(|_| random(rng, len)).collect();
    let root = rng.below(count as u64) as usize;
    let whole = inputs.concat();

    let tensors = memories(&inputs);
    on_all(ranks, |at| {
        let call = Collective::Broadcast { tensor: tensors[at].buffer(), root: slot(root) };
        (call, vec![tensors[at].clone()])
    });
    assert!(tensors.iter().all(|tensor| tensor.bytes() == inputs[root]), "broadcast of {len} bytes");

    let (sources, outputs) = (memories(&inputs), memories(&vec![vec![0; len * count]; count]));
    on_all(ranks, |at| {
        let call = Collective::AllGather { input: sources[at].buffer(), outputs: flat(&outputs[at], len) };
        (call, vec![sources[at].clone(), outputs[at].clone()])
    });
    assert!(outputs.iter().all(|output| output.bytes() == whole), "all_gather of {len} bytes");

    // In place: the own input is the own part of the output.
    let outputs: Vec<Arc<Memory>> = (0..count)
        .map(|at| {
            let mut bytes = vec![0; len * count];
            bytes[at * len..(at + 1) * len].copy_from_slice(&inputs[at]);
            Memory::new(bytes)
        })
        .collect();
    on_all(ranks, |at| {
        let input = part(&outputs[at], at * len, len);
        (Collective::AllGather { input, outputs: flat(&outputs[at], len) }, vec![outputs[at].clone()])
    });
    assert!(outputs.iter().all(|output| output.bytes() == whole), "all_gather in place of {len} bytes");

    let output = Memory::new(vec![0; len * count]);
    on_all(ranks, |at| {
        let outputs = (at == root).then(|| flat(&output, len));
        let call = Collective::Gather { input: sources[at].buffer(), outputs, root: slot(root) };
        (call, vec![sources[at].clone(), output.clone()])
    });
    assert!(output.bytes() == whole, "gather of {len} bytes");

    let (input, outputs) = (Memory::new(whole.clone()), memories(&vec![vec![0; len]; count]));
    on_all(ranks, |at| {
        let inputs = (at == root).then(|| flat(&input, len));
        let call = Collective::Scatter { inputs, output: outputs[at].buffer(), root: slot(root) };
        (call, vec![input.clone(), outputs[at].clone()])
    });
    for (at, output) in outputs.iter().enumerate() {
        assert!(output.bytes() == inputs[at], "scatter of {len} bytes");
    }
}

fn check_all_to_all(ranks: &[Rank], rng: &mut Rng) {
    let count = ranks.len();
    let lengths: Vec<Vec<usize>> = (0..count).map(|_| (0..count).map(|_| size(rng)).collect()).collect();
    let inputs: Vec<Vec<u8>> = lengths.iter().map(|lengths| random(rng, lengths.iter().sum())).collect();
    let received = |at: usize| lengths.iter().map(|lengths| lengths[at]).collect::<Vec<usize>>();
    let sources = memories(&inputs);
    let outputs: Vec<Arc<Memory>> =
        (0..count).map(|at| Memory::new(vec![0; received(at).iter().sum()])).collect();
    on_all(ranks, |at| {
        let inputs = Buffers::split(sources[at].buffer(), &lengths[at]).unwrap();
        let outputs_of = Buffers::split(outputs[at].buffer(), &received(at)).unwrap();
        (Collective::AllToAll { inputs, outputs: outputs_of }, vec![sources[at].clone(), outputs[at].clone()])
    });
    for (at, output) in outputs.iter().enumerate() {
        let expected: Vec<u8> = (0..count)
            .flat_map(|from| {
                let start: usize = lengths[from][..at].iter().sum();
                inputs[from][start..start + lengths[from][at]].to_vec()
            })
            .collect();
        assert!(output.bytes() == expected, "all_to_all at {at}: {lengths:?}");
    }
}

#[test]
fn collectives_agree_with_plain_loops() {
    let mut rng = rng();
    for count in [1, 2, 3, 5, 8] {
        let (_group, ranks) = start(count);
        for _ in 0..if count < 5 { 6 } else { 2 } {
            check_reductions(&ranks, &mut rng);
            check_moves(&ranks, &mut rng);
            check_all_to_all(&ranks, &mut rng);
        }
        on_all(&ranks, |_| (Collective::Barrier, Vec::new()));
        for rank in &ranks {
            assert_eq!(rank.plane().staging_bytes().0, 0, "staging memory is in use after the operations");
        }
    }
}

#[test]
fn operations_run_in_the_order_of_their_calls() {
    let (_group, ranks) = start(3);
    let all: Vec<Vec<(Operation, Arc<Memory>)>> = ranks
        .iter()
        .map(|rank| (0..64).map(|n| all_reduce(rank, ints([n, rank.slot as i32]))).collect())
        .collect();
    for operations in &all {
        for (n, (operation, memory)) in operations.iter().enumerate() {
            succeed(operation);
            assert_eq!(memory.bytes(), ints([3 * n as i32, 3]));
        }
    }
}

#[test]
fn communicators_run_beside_each_other() {
    let (_group, ranks) = start(2);
    let groups: Vec<TestGroup> = (0..16).map(|_| TestGroup::new(2, 2, true)).collect();
    let communicators: Vec<Vec<_>> = ranks
        .iter()
        .map(|rank| groups.iter().map(|group| rank.communicator(group, rank.slot, true).unwrap()).collect())
        .collect();
    for comm in communicators.iter().flatten() {
        let mut views = comm.shared.views.clone();
        ranks[0].runtime().block_on(async { views.wait_for(Option::is_some).await.map(drop) }).unwrap();
    }
    let begin = |rank: usize, group: usize| {
        let memory = Memory::new(ints(vec![group as i32; 50_000]));
        let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
        // SAFETY: the guard owns the memory.
        let operation = unsafe { communicators[rank][group].start(call, Box::new(memory.clone())) };
        (operation.unwrap(), memory)
    };
    // One rank calls in one order and the other in the opposite one.
    let first: Vec<_> = (0..16).map(|group| (group, begin(0, group))).collect();
    let second: Vec<_> = (0..16).rev().map(|group| (group, begin(1, group))).collect();
    for (group, (operation, memory)) in first.iter().chain(&second) {
        succeed(operation);
        assert!(memory.bytes() == ints(vec![2 * *group as i32; 50_000]));
    }
}

#[test]
fn a_dropped_handle_ends_nothing() {
    struct Flag(Arc<Memory>, std::sync::mpsc::Sender<Vec<u8>>);
    impl Drop for Flag {
        fn drop(&mut self) {
            let _ = self.1.send(self.0.bytes());
        }
    }
    let (_group, ranks) = start(2);
    let (sender, receiver) = std::sync::mpsc::channel();
    let memory = Memory::new(ints(vec![1; 100_000]));
    let call = Collective::AllReduce { tensor: memory.buffer(), reduction: sum(DType::I32) };
    // SAFETY: the guard owns the memory.
    let operation = unsafe { ranks[0].comm().start(call, Box::new(Flag(memory, sender))) }.unwrap();
    drop(operation);
    assert!(receiver.try_recv().is_err(), "the memory is free before the other rank has called");
    let (operation, result) = all_reduce(&ranks[1], ints(vec![2; 100_000]));
    succeed(&operation);
    assert!(result.bytes() == ints(vec![3; 100_000]));
    assert!(receiver.recv_timeout(WITHIN).unwrap() == ints(vec![3; 100_000]), "the result of the first rank");
}

#[test]
fn different_calls_end_with_an_error_on_every_rank() {
    let (_group, ranks) = start(3);
    let (first, _memory) = all_reduce(&ranks[0], ints([1, 2]));
    let (second, _memory) = all_reduce(&ranks[1], ints([1, 2, 3]));
    let third = barrier(&ranks[2]);
    for operation in [first, second, third] {
        let outcome = finish(&operation);
        assert!(outcome.error.unwrap().to_string().contains("another operation"));
        assert_eq!(outcome.failed, 0);
    }
    // The next operation is not affected.
    let next: Vec<_> = ranks.iter().map(|rank| all_reduce(rank, ints([1]))).collect();
    for (operation, memory) in &next {
        succeed(operation);
        assert_eq!(memory.bytes(), ints([3]));
    }
}

#[test]
fn without_a_view_a_rank_is_alone() {
    let group = TestGroup::new(2, 2, true);
    let mut rank = Rank::start(0).unwrap();
    rank.join(&group, true).unwrap();
    let (operation, memory) = all_reduce(&rank, ints([7]));
    succeed(&operation);
    assert_eq!(memory.bytes(), ints([7]));
    let memory = Memory::new(vec![0]);
    // SAFETY: the guard owns the memory.
    let refused = unsafe { rank.comm().send(memory.buffer(), slot(1), Box::new(memory.clone())) };
    assert!(refused.unwrap_err().to_string().contains("join_group"));
}

#[test]
fn a_closed_communicator_ends_its_operations_and_frees_the_others() {
    let (group, ranks) = start(2);
    let (operation, memory) = all_reduce(&ranks[0], ints([5]));
    assert!(!operation.wait(Some(std::time::Duration::from_millis(50))));
    group.set_dead(0);
    ranks[0].comm().close();
    assert!(finish(&operation).error.unwrap().to_string().contains("closed"));
    assert_eq!(memory.bytes(), ints([5]), "the tensor is as before");
    let (alone, memory) = all_reduce(&ranks[1], ints([7]));
    let outcome = finish(&alone);
    assert_eq!((outcome.failed, outcome.error.is_none()), (1, true));
    assert_eq!(memory.bytes(), ints([7]));
}

#[test]
fn a_quiescing_communicator_drains_and_refuses_calls() {
    let (_group, ranks) = start(2);
    let drain = |rank: &Rank, millis| {
        rank.runtime().block_on(rank.comm().drain(std::time::Duration::from_millis(millis)))
    };
    let (first, _memory) = all_reduce(&ranks[0], ints([1]));
    ranks[0].comm().set_quiescing(true);
    assert!(!drain(&ranks[0], 50), "an operation is in progress");
    // SAFETY: a barrier has no memory.
    assert!(unsafe { ranks[0].comm().start(Collective::Barrier, Box::new(())) }.is_err());
    let (second, _memory) = all_reduce(&ranks[1], ints([1]));
    assert!(drain(&ranks[0], 60_000));
    succeed(&first);
    succeed(&second);
    ranks[0].comm().set_quiescing(false);
    ranks.iter().map(barrier).collect::<Vec<_>>().iter().for_each(succeed);
}
