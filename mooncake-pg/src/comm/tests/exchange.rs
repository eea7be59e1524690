//! Exchanges for expert parallelism.

use std::time::Duration;

use super::*;
use crate::message::ExchangeTag;

/// Starts an exchange in which each rank sends `len` bytes of its number to each other rank.
fn begin(rank: &Rank, count: usize, round: u64, len: usize, timeout: u64) -> (Operation, Vec<Arc<Memory>>) {
    let tag = ExchangeTag { buffer: 9, round, phase: 0 };
    let output = Memory::new(vec![rank.slot as u8 + 1; len]);
    let inputs: Vec<_> = (0..count).map(|_| Memory::new(vec![0; len])).collect();
    let keep = (output.clone(), inputs.clone());
    let outputs = vec![Some(output.buffer()); count];
    let places = inputs.iter().map(|input| Some(input.buffer())).collect();
    let timeout = Some(Duration::from_millis(timeout));
    // SAFETY: the guard owns the memory.
    let operation = unsafe { rank.comm().exchange(tag, outputs, places, timeout, Box::new(keep)) };
    (operation.unwrap(), inputs)
}

#[test]
fn every_rank_gets_the_data_of_every_rank() {
    let (_group, ranks) = start(4);
    for (round, len) in [(1, 0), (2, 10), (3, 100_000)] {
        let begun: Vec<_> = ranks.iter().map(|rank| begin(rank, 4, round, len, 60_000)).collect();
        for (operation, inputs) in &begun {
            assert_eq!(finish(operation).arrived, 0b1111);
            for (from, input) in inputs.iter().enumerate() {
                assert!(input.bytes() == vec![from as u8 + 1; len]);
            }
        }
    }
    // Acknowledgements may still be on their way.
    for rank in &ranks {
        for _ in 0..200 {
            if rank.plane().staging_bytes().0 == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(rank.plane().staging_bytes().0, 0);
    }
}

#[test]
fn a_late_rank_is_missing_and_its_data_is_dropped() {
    let (group, ranks) = start(3);
    let begun: Vec<_> = ranks[..2].iter().map(|rank| begin(rank, 3, 1, 50_000, 300)).collect();
    for (operation, _) in &begun {
        let outcome = finish(operation);
        assert_eq!((outcome.arrived, outcome.failed), (0b011, 0));
    }
    // The data of the others has been sent; that of the late rank belongs to no round any more.
    let (late, _) = begin(&ranks[2], 3, 1, 50_000, 60_000);
    assert_eq!(finish(&late).arrived, 0b111);
    let begun: Vec<_> = ranks.iter().map(|rank| begin(rank, 3, 2, 20, 60_000)).collect();
    for (operation, inputs) in &begun {
        assert_eq!(finish(operation).arrived, 0b111);
        assert!(inputs.iter().enumerate().all(|(from, input)| input.bytes() == vec![from as u8 + 1; 20]));
    }
    assert!(group.reports().iter().all(|(_, _, evidence)| *evidence == crate::view::Evidence::Success));
    assert_eq!(group.active(), 0b111);
}

#[test]
fn a_dead_rank_is_missing_at_once() {
    let (group, mut ranks) = start(3);
    let begun: Vec<_> = ranks.iter().map(|rank| begin(rank, 3, 1, 10, 60_000)).collect();
    begun.iter().for_each(|(operation, _)| assert_eq!(finish(operation).arrived, 0b111));
    let waiting: Vec<_> = ranks[..2].iter().map(|rank| begin(rank, 3, 2, 10, 600_000)).collect();
    std::thread::sleep(Duration::from_millis(50));
    ranks[2].kill();
    waiting.iter().for_each(|(operation, _)| assert_eq!(finish(operation).arrived, 0b011));
    let begun: Vec<_> = ranks[..2].iter().map(|rank| begin(rank, 3, 3, 10, 600_000)).collect();
    begun.iter().for_each(|(operation, _)| assert_eq!(finish(operation).arrived, 0b011));
    assert_eq!((group.syncs(), group.active()), (0, 0b111), "membership is not touched");
}
