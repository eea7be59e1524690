//! The cases, one per sentence of the contract of [`Transport`]. Each makes its own nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::ErrorKind;

use super::fixture::Fixture;
use super::world::{Part, World, bytes_of, describe, kind, pattern, patterned};
use crate::region::{Local, Region, Slice, SliceMut, Source};
use crate::transfer::{self, Transfer};
use crate::transport::{Access, Transport};

/// "A completed read has put exactly the remote bytes into the local range, and nothing outside
/// it."
pub fn read_brings_exactly_the_remote_bytes<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(4096, 1);
    let peer = world.connect(&[&remote]);
    for (at, len) in [(0, 1), (1, 1), (4095, 1), (0, 4096), (7, 1000), (2048, 2048)] {
        let (left, rest) = world.local(len + 64, 2).split_at(32).expect("two parts");
        let (middle, right) = rest.split_at(len).expect("two parts");
        let (result, middle) = world.read(&peer, remote.addr() + at as u64, middle);
        result.unwrap_or_else(|e| panic!("read of {len} bytes at {at}: {e}"));
        assert!(shows(&middle, |i| pattern(1, at + i)), "{len} bytes at {at}");
        assert!(shows(&left, |i| pattern(2, i)), "bytes in front are as they were");
        let offset_behind = 32 + len;
        assert!(shows(&right, |i| pattern(2, offset_behind + i)), "bytes behind are as they were");
    }
    assert_eq!(bytes_of(&remote), patterned(1, 4096), "a read changes nothing on the other side");
}

/// "A completed write is applied: a read by any node returns it at once."
pub fn completed_write_is_applied<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(4096, 1);
    let peer = world.connect(&[&remote]);
    let third = world.fixture.node();
    let desc = describe(&*world.owner, &[&remote]);
    let other = world.fixture.block_on(third.connect(&desc)).expect("a third node connects");
    for (round, (at, len)) in [(0, 1), (4095, 1), (7, 1000), (0, 4096)].into_iter().enumerate() {
        let mut expected = bytes_of(&remote);
        let sent: Vec<u8> = patterned(round as u8 + 50, len);
        expected[at..at + len].copy_from_slice(&sent);
        let mut source = world.local(len, 0);
        source.copy_from(0, &sent).expect("in range");
        let (result, source) = world.write(&peer, remote.addr() + at as u64, source.into_shared());
        result.unwrap_or_else(|e| panic!("write of {len} bytes at {at}: {e}"));
        assert_eq!(bytes_of(&remote), expected, "exactly the bytes written, and no others");
        let mut source_bytes = vec![0; len];
        source.copy_to(0, &mut source_bytes).expect("in range");
        assert_eq!(source_bytes, sent, "a write changes nothing on this side");
        let into = world.region(&third, len, Access::Local, 9).exclusive().expect("the one handle");
        let deadline = world.deadline();
        let read = [Transfer::new(remote.addr() + at as u64, into)];
        let read = world.run_on(&third, |third| transfer::read(third, &other, read, deadline));
        let (result, into) = world.finish(read);
        result.expect("a read by a third node");
        assert!(shows(&into, |i| sent[i]), "another node reads what was written");
    }
}

/// "A remote range must be non-empty and lie in one registration with `Access::Remote`. A range
/// that is empty, overflows, lies outside .. fails with kind `Invalid`, and no byte changes on
/// either side."
pub fn refused_ranges_change_nothing<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(4096, 1);
    let (start, end) = (remote.addr(), remote.addr() + 4096);
    for at in [start - 1, start - 64, end - 63, end, end + 4096, 0, 1, u64::MAX, u64::MAX - 63] {
        // Each case uses a new connection, because a transport may close one that misbehaved.
        let peer = world.connect(&[&remote]);
        let (result, into) = world.read(&peer, at, world.local(64, 2));
        assert_eq!(
            kind(result),
            ErrorKind::Invalid,
            "read of 64 bytes at {at:#x}, memory is {start:#x}..{end:#x}"
        );
        assert!(shows(&into, |i| pattern(2, i)), "a refused read leaves local bytes alone");
        let peer = world.connect(&[&remote]);
        let (result, _) = world.write(&peer, at, world.local(64, 3));
        assert_eq!(
            kind(result),
            ErrorKind::Invalid,
            "write of 64 bytes at {at:#x}, memory is {start:#x}..{end:#x}"
        );
    }
    let peer = world.connect(&[&remote]);
    let (result, _) = world.read(&peer, start, Vec::new());
    assert_eq!(kind(result), ErrorKind::Invalid, "a read of nothing");
    let (result, _) = world.write(&peer, start, Vec::new());
    assert_eq!(kind(result), ErrorKind::Invalid, "a write of nothing");
    assert_eq!(bytes_of(&remote), patterned(1, 4096), "refused writes change nothing");
    let (result, _) = world.read(&peer, start, world.local(64, 2));
    result.expect("the peer still serves what is right");
}

/// ".. or crosses two registrations fails with kind `Invalid`", even if they are adjacent.
pub fn ranges_across_registrations_are_refused<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let memory = world.fixture.memory(8192);
    let part = |from| -> Region<F::T> {
        let half = Part::new(memory.clone(), from, 4096);
        Region::register(&*world.owner, Arc::new(half), Access::Remote).expect("neighbours do not overlap")
    };
    let (left, right) = (part(0), part(4096));
    assert_eq!(left.addr() + 4096, right.addr());
    let peer = world.connect(&[&left, &right]);
    let (result, _) = world.write(&peer, right.addr() - 32, world.local(64, 3));
    assert_eq!(kind(result), ErrorKind::Invalid, "a write across two registrations");
    assert!(bytes_of(&left).iter().chain(&bytes_of(&right)).all(|b| *b == 0), "and neither is touched");
    let peer = world.connect(&[&left, &right]);
    for at in [right.addr() - 64, right.addr()] {
        let (result, _) = world.write(&peer, at, world.local(64, 3));
        result.expect("each half alone");
    }
}

/// "A remote range must .. lie in one registration with `Access::Remote`." Memory registered for
/// local use is refused.
pub fn local_memory_is_closed_to_peers<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let open = world.open(64, 1);
    let closed = world.region(&world.owner, 4096, Access::Local, 5);
    let peer = world.connect(&[&open, &closed]);
    let (result, into) = world.read(&peer, closed.addr(), world.local(64, 2));
    assert_eq!(kind(result), ErrorKind::Invalid, "a read of memory that is not open to peers");
    assert!(shows(&into, |i| pattern(2, i)));
    let peer = world.connect(&[&open, &closed]);
    let (result, _) = world.write(&peer, closed.addr(), world.local(64, 2));
    assert_eq!(kind(result), ErrorKind::Invalid, "a write to memory that is not open to peers");
    assert_eq!(bytes_of(&closed), patterned(5, 4096));
}

/// "A write to read-only memory fails in the same way": at a peer, and in a local range. A
/// transport may refuse reads by peers too.
pub fn read_only_memory_is_not_written<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let (open_region, filled) = (world.open(64, 9), world.open(4096, 1));
    let memory = Arc::new(Part::read_only(filled.memory().clone()));
    drop(filled);
    let Ok(closed) = Region::register(&*world.owner, memory, Access::Remote) else { return };
    let closed = closed.exclusive().expect_err("read-only memory is never exclusive");
    #[allow(unsafe_code)]
    // SAFETY: no other range of it is in use.
    let range = unsafe { closed.slice_mut_unchecked(0..64) };
    assert_eq!(kind(range.map(|_| ())), ErrorKind::Invalid, "nor a part of it");
    let peer = world.connect(&[&open_region, &closed]);
    let (result, _) = world.write(&peer, closed.addr() + 64, world.local(64, 2));
    assert_eq!(kind(result), ErrorKind::Invalid, "a write to memory that can only be read");
    assert_eq!(bytes_of(&closed), patterned(1, 4096));
    let peer = world.connect(&[&open_region, &closed]);
    let (result, into) = world.read(&peer, closed.addr() + 64, world.local(64, 2));
    match result {
        Ok(()) => assert!(shows(&into, |i| pattern(1, 64 + i)), "it can be read"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{error}"),
    }
    let filled = world.region(&world.user, 64, Access::Local, 3);
    let memory = Arc::new(Part::read_only(filled.memory().clone()));
    drop(filled);
    let from = Region::register(&*world.user, memory, Access::Local).expect("to write from").slice(0..64);
    let (result, _) = world.write(&peer, open_region.addr(), from.expect("in range"));
    result.expect("it can be written from");
    assert_eq!(bytes_of(&open_region), patterned(3, 64));
}

/// "Each operation checks its addresses: they are refused once the registration is dropped." That
/// includes connections in use. A new registration opens the memory again.
pub fn dropped_registration_is_refused<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let open_region = world.open(64, 9);
    let remote = world.open(4096, 1);
    let (at, memory) = (remote.addr(), remote.memory().clone());
    let peer = world.connect(&[&open_region, &remote]);
    world.read(&peer, at, world.local(64, 2)).0.expect("while it is registered");
    drop(remote);
    assert_eq!(kind(world.read(&peer, at, world.local(64, 2)).0), ErrorKind::Invalid, "after it was dropped");
    let peer = world.connect(&[&open_region]);
    assert_eq!(
        kind(world.write(&peer, at, world.local(64, 2)).0),
        ErrorKind::Invalid,
        "after it was dropped"
    );
    let second = Region::register(&*world.owner, memory, Access::Remote).expect("registered again");
    assert_eq!(bytes_of(&second), patterned(1, 4096), "nothing was written meanwhile");
    let peer = world.connect(&[&open_region, &second]);
    world.read(&peer, at, world.local(64, 2)).0.expect("registered again");
}

/// "Registrations with `Access::Local` may overlap each other and those for peers. The drop of one
/// leaves the others as they are."
pub fn local_registrations_may_overlap<F: Fixture>(fixture: &mut F) {
    const LEN: usize = if cfg!(miri) { 256 } else { 4096 };
    let world = World::new(fixture);
    let remote = world.open(LEN, 1);
    let peer = world.connect(&[&remote]);
    let local = world.fixture.local_memory(2 * LEN);
    // Not every transport opens its local memory to peers.
    let first = if local.is_some() { Access::Local } else { Access::Remote };
    let memory = local.unwrap_or_else(|| world.fixture.memory(2 * LEN));
    let part = |from, access| {
        let part = Arc::new(Part::new(memory.clone(), from, LEN));
        Region::register(&*world.user, part, access).expect("it may overlap")
    };
    for dropped_first in 0..5 {
        let mut parts = vec![part(0, first)];
        parts.extend([0, 40, 0, LEN - 1].map(|from| part(from, Access::Local)));
        drop(parts.remove(dropped_first));
        while let Some(part) = parts.pop() {
            #[allow(unsafe_code)]
            // SAFETY: no other slice of the memory is in use.
            let into = unsafe { part.slice_mut_unchecked(0..LEN) }.expect("in range");
            let (result, into) = world.read(&peer, remote.addr(), into);
            result.expect("a read into a part that is registered");
            assert!(shows(&into, |i| pattern(1, i)));
            let (result, _) = world.write(&peer, remote.addr(), into.into_shared());
            result.expect("a write from it");
            drop(part);
        }
    }
}

/// A submission of many operations has one ticket.
pub fn one_completion_for_many_operations<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let n = if cfg!(miri) { 10 } else { 300 };
    let remote = world.open(n * 100, 1);
    let peer = world.connect(&[&remote]);
    let deadline = world.deadline();
    let at = |i: usize| remote.addr() + (i * 100) as u64;
    let writes: Vec<_> =
        (0..n).map(|i| Transfer::new(at(i), world.local(1 + i % 100, i as u8).into_shared())).collect();
    let ticket = world.run(|user| transfer::write(user, &peer, writes, deadline));
    world.fixture.block_on(ticket).0.expect("all writes");
    let mut expected = patterned(1, n * 100);
    for i in 0..n {
        let len = 1 + i % 100;
        expected[i * 100..i * 100 + len].copy_from_slice(&patterned(i as u8, len));
    }
    assert_eq!(bytes_of(&remote), expected);
    let reads: Vec<_> = (0..n).map(|i| Transfer::new(at(i), world.blank(100))).collect();
    let ticket = world.run(|user| transfer::read(user, &peer, reads, deadline));
    let (result, reads) = world.fixture.block_on(ticket);
    result.expect("all reads");
    for (i, read) in reads.iter().enumerate() {
        assert_eq!(read.buffer.bytes(), expected[i * 100..(i + 1) * 100], "operation {i}");
    }
}

/// "Operations of one submission fail independently": operations beside a refused one either
/// succeed or fail, and report it.
pub fn operations_fail_one_by_one<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(4096, 1);
    let peer = world.connect(&[&remote]);
    let at = |i: usize| if i == 2 { remote.addr() + 4096 } else { remote.addr() + (i * 64) as u64 };
    let reads: Vec<_> = (0..5).map(|i| Transfer::new(at(i), world.blank(64))).collect();
    let deadline = world.deadline();
    let ticket = world.run(|user| transfer::read(user, &peer, reads, deadline));
    let (results, reads) = world.fixture.block_on(ticket.results());
    assert_eq!(results.len(), 5);
    assert_eq!(results[2].as_ref().map_err(|e| e.kind()), Err(ErrorKind::Invalid), "the refused one says so");
    for (i, (result, read)) in results.iter().zip(&reads).enumerate() {
        if result.is_ok() {
            let expected: Vec<u8> = (0..64).map(|j| pattern(1, i * 64 + j)).collect();
            assert_eq!(read.buffer.bytes(), expected, "operation {i} is reported done");
        }
    }
    assert!(results[0].is_ok(), "operations before the refused one succeed");
}

/// A submission without operations finishes at once.
pub fn no_operations_finish_at_once<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(64, 1);
    let peer = world.connect(&[&remote]);
    let deadline = world.deadline();
    let ticket = world.run(|user| transfer::read(user, &peer, Vec::<Transfer<Vec<u8>>>::new(), deadline));
    world.fixture.block_on(ticket).0.expect("nothing to fail");
}

/// Long operations arrive completely, in both directions.
pub fn large_transfers_arrive_whole<F: Fixture>(fixture: &mut F) {
    let len = fixture.large();
    let world = World::new(fixture);
    let remote = world.open(len, 1);
    let peer = world.connect(&[&remote]);
    let (result, into) = world.read(&peer, remote.addr(), world.blank(len));
    result.expect("a long read");
    assert!(into.bytes() == patterned(1, len), "a long read arrives whole");
    let (result, _) = world.write(&peer, remote.addr(), world.local(len, 7).into_shared());
    result.expect("a long write");
    assert!(bytes_of(&remote) == patterned(7, len), "a long write arrives whole");
}

/// "The local bytes of an operation are not used after its share of the completion is finished."
/// That includes cancelled operations.
pub fn finished_means_untouched<F: Fixture>(fixture: &mut F) {
    let len = fixture.large();
    let world = World::new(fixture);
    let remote = world.open(len, 1);
    let peer = world.connect(&[&remote]);
    let ticket = world.post_read(&peer, remote.addr(), world.blank(len));
    world.fixture.kill(&world.owner);
    let (result, mut into) = world.finish(ticket);
    if result.is_ok() {
        assert!(into.bytes() == patterned(1, len), "done is done, even if the peer dies after");
    }
    let mark = patterned(3, len);
    into.set(&mark);
    // Operations that the transport still has get every chance to do harm.
    for _ in 0..3 {
        let (result, _) = world.read(&peer, remote.addr(), world.blank(64));
        assert!(result.is_err(), "the peer is dead");
    }
    assert!(into.bytes() == mark, "bytes of a finished operation belong to the caller");
}

/// A dropped ticket neither cancels nor frees early: the write is applied, and then the buffer is
/// freed.
pub fn dropped_ticket_goes_on_and_frees_later<F: Fixture>(fixture: &mut F) {
    struct Counted<T: Transport>(Slice<T>, Arc<AtomicUsize>);
    impl<T: Transport> Drop for Counted<T> {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }
    // SAFETY: as for the inner slice.
    #[allow(unsafe_code)]
    unsafe impl<T: Transport> Source<T> for Counted<T> {
        fn local(&self) -> Local<'_, T::Registration> {
            self.0.local()
        }
    }
    let world = World::new(fixture);
    let remote = world.open(4096, 1);
    let peer = world.connect(&[&remote]);
    let drops = Arc::new(AtomicUsize::new(0));
    let source = Counted(world.local(4096, 7).into_shared(), drops.clone());
    let deadline = world.deadline();
    drop(world.run(|user| transfer::write(user, &peer, [Transfer::new(remote.addr(), source)], deadline)));
    let clock = world.fixture.clock();
    let (start, mut turns) = (clock.now(), 0);
    while drops.load(Ordering::SeqCst) == 0 {
        // A read drives the transport's tasks, so no sleep is needed.
        let _ = world.read(&peer, remote.addr(), world.blank(64));
        turns += 1;
        assert!(
            turns < 10 || clock.now().since(start) < Duration::from_secs(20),
            "the buffer was never freed"
        );
    }
    assert!(bytes_of(&remote) == patterned(7, 4096), "the write went on without its ticket");
}

/// Many submissions run in parallel, from several threads, to several peers.
pub fn concurrent_submissions<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let second = world.fixture.node();
    let (threads, rounds) = if cfg!(miri) { (2, 2) } else { (4, 40) };
    let remotes: Vec<_> = (0..threads)
        .map(|i| world.region(if i % 2 == 0 { &world.owner } else { &second }, 4096, Access::Remote, 1))
        .collect();
    let mut tickets = Vec::new();
    let peers: Vec<_> = (0..threads)
        .map(|i| {
            let owner = if i % 2 == 0 { &world.owner } else { &second };
            let desc = describe(&**owner, &[&remotes[i]]);
            world.fixture.block_on(world.user.connect(&desc)).expect("a live node can be reached")
        })
        .collect();
    let deadline = world.deadline();
    for round in 0..rounds {
        for i in 0..threads {
            let at = remotes[i].addr() + (round * 64 % 4096) as u64;
            let source = world.local_bytes(&patterned((round + i) as u8, 64));
            let write =
                world.run(|user| transfer::write(user, &peers[i], [Transfer::new(at, source)], deadline));
            tickets.push(write);
        }
    }
    for ticket in tickets {
        world.finish(ticket).0.expect("a write among many");
    }
    std::thread::scope(|scope| {
        for (i, peer) in peers.iter().enumerate() {
            let (user, remote, peer) = (&world.user, &remotes[i], peer.clone());
            let mut into = world.blank(64);
            scope.spawn(move || {
                for round in 0..rounds.min(64) {
                    let at = remote.addr() + (round * 64) as u64;
                    let read = transfer::read(&**user, &peer, [Transfer::new(at, into)], deadline);
                    let (result, [read]) = read.wait();
                    result.expect("a read from a thread of its own");
                    into = read.buffer;
                    assert_eq!(into.bytes(), patterned((round + i) as u8, 64), "round {round} to peer {i}");
                }
            });
        }
    });
}

/// "Every share finishes: a dead, silent or slow peer causes an error of kind `Unavailable` or
/// `Timeout` at the completion's deadline."
pub fn dead_peer_is_an_error_by_the_deadline<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(4096, 1);
    let peer = world.connect(&[&remote]);
    world.read(&peer, remote.addr(), world.blank(64)).0.expect("alive");
    world.fixture.kill(&world.owner);
    let clock = world.fixture.clock();
    for _ in 0..3 {
        let start = clock.now();
        let deadline = Some(start.after(Duration::from_millis(1500)));
        let read = [Transfer::new(remote.addr(), world.blank(64))];
        let ticket = world.run(|user| transfer::read(user, &peer, read, deadline));
        let kind = kind(world.finish(ticket).0);
        assert!(matches!(kind, ErrorKind::Unavailable | ErrorKind::Timeout), "{kind:?}");
        assert!(clock.now().since(start) < Duration::from_secs(4), "long after the deadline");
    }
    let desc = describe(&*world.owner, &[]);
    if let Ok(peer) = world.fixture.block_on(world.user.connect(&desc)) {
        let deadline = Some(clock.now().after(Duration::from_millis(1500)));
        let read = [Transfer::new(remote.addr(), world.blank(64))];
        let ticket = world.run(|user| transfer::read(user, &peer, read, deadline));
        assert!(world.finish(ticket).0.is_err(), "a new way to a dead peer leads nowhere either");
    }
}

/// "An operation that has not begun by then is not sent."
pub fn passed_deadline_sends_nothing<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(4096, 1);
    let peer = world.connect(&[&remote]);
    let now = world.fixture.clock().now();
    let write = [Transfer::new(remote.addr(), world.local(64, 7).into_shared())];
    let ticket = world.run(|user| transfer::write(user, &peer, write, Some(now)));
    assert_eq!(kind(world.finish(ticket).0), ErrorKind::Timeout);
    let (result, _) = world.read(&peer, remote.addr() + 64, world.blank(64));
    result.expect("the way is still good");
    assert_eq!(bytes_of(&remote), patterned(1, 4096), "a write after its deadline");
}

/// Unregistered local memory works or is refused, according to the capabilities.
pub fn unregistered_local_memory_as_capabilities_say<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(64, 1);
    let peer = world.connect(&[&remote]);
    let needs = world.user.capabilities().needs_registration;
    let (read, into) = world.read(&peer, remote.addr(), vec![0u8; 64]);
    let (write, _) = world.write(&peer, remote.addr(), Bytes::from(patterned(7, 64)));
    if needs {
        assert_eq!((kind(read), kind(write)), (ErrorKind::Invalid, ErrorKind::Invalid));
        assert_eq!(bytes_of(&remote), patterned(1, 64));
    } else {
        read.expect("a read into a plain vector");
        assert_eq!(into, patterned(1, 64));
        write.expect("a write from plain bytes");
        assert_eq!(bytes_of(&remote), patterned(7, 64));
    }
}

/// `describe` adds the transport, and its fields survive a round trip through JSON.
pub fn descriptor_survives_its_json<F: Fixture>(fixture: &mut F) {
    let world = World::new(fixture);
    let remote = world.open(64, 1);
    let desc = describe(&*world.owner, &[&remote]);
    assert!(desc.supports(&world.owner.protocol()), "{desc:?} names {}", world.owner.protocol());
    assert_eq!(desc.buffers.len(), 1);
    let second = crate::segment::SegmentDesc::decode(&desc.encode()).expect("it can be read");
    assert_eq!(second, desc);
    let unreachable = crate::segment::SegmentDesc::new("elsewhere");
    assert!(!world.user.reaches(&unreachable), "a descriptor without a transport is unreachable");
}

/// A node reaches its own memory.
pub fn own_node_is_a_peer_too<F: Fixture>(fixture: &mut F) {
    let mut world = World::new(fixture);
    world.user = world.owner.clone();
    let remote = world.open(4096, 1);
    let peer = world.connect(&[&remote]);
    let (result, _) = world.write(&peer, remote.addr(), world.local(64, 7).into_shared());
    result.expect("a write to one's own memory");
    let (result, into) = world.read(&peer, remote.addr() + 64, world.local(64, 2));
    result.expect("a read of one's own memory");
    assert!(shows(&into, |i| pattern(1, 64 + i)));
    assert_eq!(bytes_of(&remote)[..64], patterned(7, 64));
}

/// Returns whether a range has exactly these bytes.
fn shows<T: Transport>(slice: &SliceMut<T>, expected: impl Fn(usize) -> u8) -> bool {
    let mut bytes = vec![0; slice.len()];
    slice.copy_to(0, &mut bytes).expect("in range");
    bytes.iter().enumerate().all(|(i, byte)| *byte == expected(i))
}
