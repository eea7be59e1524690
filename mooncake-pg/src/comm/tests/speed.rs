//! Measurements: `cargo test --release -p mooncake-pg measure -- --ignored --nocapture`.

use mooncake_core::clock::{Clock, SystemClock};

use super::*;

const SIZES: [usize; 11] = [
    4,
    1 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    (32 << 10) + 64,
    64 << 10,
    256 << 10,
    1 << 20,
    8 << 20,
    64 << 20,
];

/// Returns microseconds per operation.
fn measure(ranks: &[Rank], rounds: usize, call: impl Fn(usize) -> (Collective, Vec<Arc<Memory>>)) -> f64 {
    let clock = SystemClock::new();
    let calls: Vec<_> = ranks.iter().map(|rank| (rank, call(rank.slot))).collect();
    let run = |rounds: usize| {
        for _ in 0..rounds {
            let begun: Vec<_> = calls
                .iter()
                .map(|(rank, (call, memories))| {
                    rank.start_collective(call.clone(), &memories.iter().collect::<Vec<_>>())
                })
                .collect();
            begun.iter().for_each(succeed);
        }
    };
    run(2);
    let began = clock.now();
    run(rounds);
    clock.now().since(began).as_secs_f64() * 1e6 / rounds as f64
}

#[test]
#[ignore = "measures"]
fn measure_collectives() {
    for count in [2, 4, 8] {
        let (_group, ranks) = start(count);
        eprintln!(
            "{count} ranks: bytes, microseconds of all_reduce (GB/s of the tensor), all_gather, broadcast, all_to_all"
        );
        for size in SIZES {
            let rounds = (200_000_000 / (size * count + 200_000)).clamp(3, 300);
            let tensors: Vec<_> = (0..count).map(|_| Memory::new(vec![1; size])).collect();
            let reduced = measure(&ranks, rounds, |at| {
                let call = Collective::AllReduce { tensor: tensors[at].buffer(), reduction: sum(DType::F32) };
                (call, vec![tensors[at].clone()])
            });
            let outputs: Vec<_> = (0..count).map(|_| Memory::new(vec![1; size * count])).collect();
            let gathered = measure(&ranks, rounds, |at| {
                let call =
                    Collective::AllGather { input: tensors[at].buffer(), outputs: flat(&outputs[at], size) };
                (call, vec![tensors[at].clone(), outputs[at].clone()])
            });
            let broadcast = measure(&ranks, rounds, |at| {
                let call = Collective::Broadcast { tensor: tensors[at].buffer(), root: slot(0) };
                (call, vec![tensors[at].clone()])
            });
            let inputs: Vec<_> = (0..count).map(|_| Memory::new(vec![1; size])).collect();
            let piece = size / count;
            let exchanged = measure(&ranks, rounds, |at| {
                let (inputs_of, outputs) = (flat(&inputs[at], piece), flat(&tensors[at], piece));
                (
                    Collective::AllToAll { inputs: inputs_of, outputs },
                    vec![inputs[at].clone(), tensors[at].clone()],
                )
            });
            let speed = size as f64 / reduced / 1e3;
            eprintln!("{size:9} {reduced:9.1} ({speed:5.2}) {gathered:9.1} {broadcast:9.1} {exchanged:9.1}");
        }
    }
}

#[test]
#[ignore = "measures"]
fn measure_messages_against_staging() {
    use std::sync::atomic::Ordering;
    for count in [2, 4] {
        let (_group, ranks) = start(count);
        eprintln!("{count} ranks: bytes, microseconds of all_gather in messages, and staged");
        for size in [1 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10] {
            let tensors: Vec<_> = (0..count).map(|_| Memory::new(vec![1; size])).collect();
            let outputs: Vec<_> = (0..count).map(|_| Memory::new(vec![1; size * count])).collect();
            let took = [usize::MAX, 1].map(|limit| {
                crate::call::MEASURED_INLINE_BYTES.store(limit, Ordering::Relaxed);
                measure(&ranks, 300, |at| {
                    let (input, outputs_of) = (tensors[at].buffer(), flat(&outputs[at], size));
                    let call = Collective::AllGather { input, outputs: outputs_of };
                    (call, vec![tensors[at].clone(), outputs[at].clone()])
                })
            });
            eprintln!("{size:9} {:9.1} {:9.1}", took[0], took[1]);
        }
    }
    crate::call::MEASURED_INLINE_BYTES.store(32 << 10, Ordering::Relaxed);
}
