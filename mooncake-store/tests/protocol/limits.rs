//! Memory that a hostile body makes the decoder allocate: a small multiple of the length of the
//! body, whatever lengths it claims.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use mooncake_store::protocol::frame;
use mooncake_store::protocol::message::TABLE;
use mooncake_store::protocol::type_signature::TypeSignature;
use proptest::prelude::*;

/// Allocator that counts the held bytes of each thread, and their maximum.
struct Counting;

thread_local! {
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(change: isize) {
    // A thread that is ending has no counter any more.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + change, most.max(now + change)));
    });
}

// SAFETY: every call goes to the allocator of the system unchanged; counting touches a thread-local
// cell only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the largest number of bytes held at a time while `work` ran.
fn most_held<T>(work: impl FnOnce() -> T) -> usize {
    HELD.set((0, 0));
    let outcome = work();
    let (_, most) = HELD.get();
    drop(outcome);
    most as usize
}

/// Returns the permitted memory of a body. A list takes at most 64 bytes of memory for each encoded
/// byte: a replica or a result takes some dozens of bytes in memory and may take two encoded. Texts
/// of errors add a constant.
fn allowed(len: usize) -> usize {
    64 * len + 4096
}

fn check(body: &[u8]) {
    for shape in TABLE {
        let held = most_held(|| shape.rewrite_arguments(body, false));
        assert!(held <= allowed(body.len()), "{held} bytes held for the arguments of {}", shape.name);
        let held = most_held(|| shape.rewrite_reply(body, false));
        assert!(held <= allowed(body.len()), "{held} bytes held for the reply of {}", shape.name);
    }
}

/// Returns a body of this type signature with lengths of eight bytes.
fn body(spelling: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut body = (TypeSignature::new(spelling).hash() | 1).to_le_bytes().to_vec();
    body.push(0b1_1000);
    body.extend_from_slice(payload);
    body
}

#[test]
fn claimed_lengths_allocate_nothing() {
    for shape in TABLE {
        for spelling in [shape.arguments, shape.reply] {
            for claim in [1, 0xff, 1 << 16, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, u64::MAX] {
                for lead in 0..48 {
                    // The claim follows any number of bytes that mean true, so that it reaches
                    // every list of the message.
                    let mut payload = vec![1; lead];
                    payload.extend(claim.to_le_bytes());
                    payload.extend([0; 40]);
                    check_one(shape.name, spelling, &payload);
                }
            }
        }
    }
}

fn check_one(name: &str, spelling: &[u8], payload: &[u8]) {
    let body = body(spelling, payload);
    let shape = TABLE.iter().find(|shape| shape.name == name).expect("a call of the table");
    let held = most_held(|| (shape.rewrite_arguments(&body, false), shape.rewrite_reply(&body, false)));
    assert!(held <= 2 * allowed(body.len()), "{held} bytes held for {name}");
}

#[test]
fn many_empty_items_cost_what_they_take() {
    for (shape, yes) in TABLE.iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        for spelling in [shape.arguments, shape.reply] {
            let mut payload = vec![1];
            payload.extend((1u64 << 16).to_le_bytes());
            let fill = [[0, 0], [1, 0]][usize::from(yes)];
            payload.extend(fill.repeat(9 << 16));
            // Checks with and without a leading byte that means true.
            check_one(shape.name, spelling, &payload);
            check_one(shape.name, spelling, &payload[1..]);
        }
    }
}

#[test]
fn a_frame_is_read_in_place() {
    let mut bytes = vec![21, 0, 0, 0];
    bytes.resize(20, 0xff);
    assert_eq!(most_held(|| frame::parse_request(&bytes, 64 << 20).is_err()), 0);
    assert_eq!(most_held(|| frame::parse_request(&bytes, usize::MAX).is_ok()), 0);
}

proptest! {
    #[test]
    fn any_body_costs_a_small_multiple(payload in prop::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..300)) {
        check(&payload);
        for shape in TABLE {
            check_one(shape.name, shape.arguments, &payload);
            check_one(shape.name, shape.reply, &payload);
        }
    }
}
