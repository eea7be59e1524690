//! Processes that do not keep to the protocol.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use super::driving::{carry_out, on_threads, wait_for_rings};
use super::*;
use crate::comm::shared::{MAX_EARLY, MAX_EARLY_BYTES};
use crate::link::tests::FakePeer;
use crate::message::{Envelope, Message, Payload};

/// Operations that the ranks carry out meanwhile.
const OPERATIONS: u64 = 30;

#[test]
fn a_process_that_writes_into_its_ring_without_end_keeps_nobody() {
    let (_group, ranks) = start(2);
    wait_for_rings(&ranks);
    let mut visit = ranks[0].runtime().block_on(FakePeer::begin(ranks[0].plane(), 99));
    let communicator = ranks[0].comm().shared.number;
    let frame = |len: usize| {
        let payload = Payload::Inline(vec![0; len].into());
        Envelope { communicator, slot: 1, message: Message::Send { id: 0, payload } }.encode()
    };
    let frames = [frame(0), frame(1), frame(100_000)];
    let (written, ends) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let writer = std::thread::spawn({
        let (written, ends) = (written.clone(), ends.clone());
        move || {
            for frame in frames.iter().cycle() {
                while !visit.push(frame) {
                    if ends.load(Ordering::SeqCst) {
                        return;
                    }
                    std::thread::yield_now();
                }
                written.fetch_add(frame.len(), Ordering::SeqCst);
                if ends.load(Ordering::SeqCst) {
                    return;
                }
            }
        }
    });
    let ranks = Arc::new(ranks);
    let (finishes, finished) = channel();
    let others = ranks.clone();
    // A thread that is kept would not end this test.
    std::thread::spawn(move || {
        let mut round = 0;
        while round < OPERATIONS || written.load(Ordering::SeqCst) < 2 * MAX_EARLY_BYTES {
            let outcomes = on_threads(&others, |rank| carry_out(rank, round % 3, || barrier(rank)));
            assert!(outcomes.iter().all(Outcome::is_success), "{outcomes:?}");
            round += 1;
        }
        let _ = finishes.send(());
    });
    let end = finished.recv_timeout(WITHIN / 2);
    ends.store(true, Ordering::SeqCst);
    end.expect("the ranks do not go on");
    writer.join().unwrap();
    let inbox = ranks[0].comm().shared.inbox.lock();
    let early_bytes: usize = inbox.early.iter().map(|(.., message)| message.inline_len()).sum();
    assert!(inbox.early.len() <= MAX_EARLY && early_bytes <= MAX_EARLY_BYTES, "{early_bytes} bytes are kept");
}
