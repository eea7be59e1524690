//! Exchanges for expert parallelism.

use std::time::Duration;

use super::*;
use crate::message::ExchangeTag;

/// Starts an exchange in which each rank sends `len` bytes of its number to each other rank.
fn begin(rank: &Rank, count: usize, round: u64, len: usize, timeout: u64) -> (Operation, Vec<Arc<Memory>>) {
    let tag = ExchangeTag { buffer: 9, round, phase: 0 };
    let output = Memory::new(vec![rank.slot as u8 + 1; len]);
    let inputs: Vec<_> = (0..count).map(|_| Memory::new(vec![0; len])).collect();
    let memories = (output.clone(), inputs.clone());
    let outputs = vec![Some(vec![output.buffer()]); count];
    let places = inputs.iter().map(|input| Some(input.buffer())).collect();
    let timeout = Some(Duration::from_millis(timeout));
    // SAFETY: the guard owns the memory.
    let operation = unsafe { rank.comm().exchange(tag, outputs, places, timeout, Box::new(memories)) };
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

/// Sends the joined `parts` from rank 0 to rank 1, which has a buffer of `space` bytes.
fn send(ranks: &[Rank], tag: ExchangeTag, parts: &[&[u8]], space: usize) -> (Outcome, Vec<u8>) {
    let parts: Vec<_> = parts.iter().map(|part| Memory::new(part.to_vec())).collect();
    let outputs = vec![None, Some(parts.iter().map(|part| part.buffer()).collect())];
    // SAFETY: the guard owns the memory.
    let sent = unsafe { ranks[0].comm().exchange(tag, outputs, vec![], None, Box::new(parts)) };
    assert_eq!(finish(&sent.unwrap()).arrived, 0);
    let input = Memory::new(vec![0; space]);
    let (inputs, timeout) = (vec![Some(input.buffer()), None], Some(Duration::from_secs(60)));
    // SAFETY: as above.
    let received = unsafe { ranks[1].comm().exchange(tag, vec![], inputs, timeout, Box::new(input.clone())) };
    (finish(&received.unwrap()), input.bytes())
}

#[test]
fn a_message_of_many_parts_tells_its_length() {
    let (_group, ranks) = start(2);
    for (round, len) in [(1, 100), (2, 60_000)] {
        let tag = ExchangeTag { buffer: 1, round, phase: 3 };
        let (one, two) = (vec![7; len], vec![8; len]);
        let wanted = [&one[..], &[], &two[..]];
        let (outcome, bytes) = send(&ranks, tag, &wanted, 2 * len + 50);
        assert_eq!((outcome.arrived, outcome.lengths), (0b01, vec![(slot(0), 2 * len as u64)]));
        assert!(bytes[..2 * len] == wanted.concat() && bytes[2 * len..] == [0; 50]);
        // The start arrives of a message that does not fit.
        let (outcome, bytes) = send(&ranks, ExchangeTag { phase: 4, ..tag }, &wanted, len + 10);
        assert_eq!((outcome.arrived, outcome.lengths), (0, vec![(slot(0), 2 * len as u64)]));
        assert!(bytes == wanted.concat()[..len + 10]);
    }
}

#[test]
fn a_message_for_an_ended_buffer_is_refused() {
    let (_group, ranks) = start(2);
    let (tag, parts) = (ExchangeTag { buffer: 1, round: 5, phase: 0 }, [&[1u8; 40_000][..]]);
    let early = begin(&ranks[0], 2, 3, 40_000, 100);
    ranks[1].comm().end_exchanges(9);
    assert_eq!(send(&ranks, tag, &parts, 40_000).0.arrived, 0b01);
    assert_eq!(finish(&early.0).arrived, 0b01);
    // The sender gets its memory back without a receiver.
    let late = begin(&ranks[0], 2, 4, 40_000, 100);
    assert_eq!(finish(&late.0).arrived, 0b01);
    for _ in 0..200 {
        if ranks[0].plane().staging_bytes().0 == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("messages for an ended buffer are kept");
}
