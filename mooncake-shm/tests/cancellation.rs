//! Cancelled copies that no thread has begun are not performed, also with another transport as a
//! fallback.

use mooncake_core::clock::SystemClock;
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_shm::{ShmConfig, ShmTransport};
use mooncake_transport::fallback::{Retry, is_any_error, with_fallback};
use mooncake_transport::ticket::{OpState, watched};
use mooncake_transport::{Access, Op, Opcode, SegmentDesc, Transport};

const LEN: usize = 4096;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_queued_copies_are_not_performed() {
    let clock = SystemClock::shared();
    // Every copy waits for a thread.
    let config = ShmConfig { inline_bytes: 0, ..ShmConfig::default() };
    let runtime = tokio::runtime::Handle::current();
    let start = || ShmTransport::start_with_clock(config.clone(), &runtime, clock.clone()).unwrap();
    let (owner, user) = (start(), start());
    let options = HostMemoryOptions { shared: Some("given up".into()), ..HostMemoryOptions::default() };
    let remote_memory = HostMemory::with(LEN, &options).unwrap();
    let local_memory = [HostMemory::new(LEN).unwrap(), HostMemory::new(LEN).unwrap()];
    // SAFETY: both are allocated to the end of the test.
    let registration = unsafe { owner.register(remote_memory.span(), Access::Remote).unwrap() };
    let mut desc = SegmentDesc::new("owner");
    owner.describe(&mut desc);
    let peer = user.connect(&desc).await.unwrap();
    // SAFETY: the memory is allocated to the end of the test, and every completion is done by then.
    let op = |opcode, at: usize| unsafe {
        Op::new(opcode, None, local_memory[at].span(), remote_memory.span().addr(), &[])
    };

    for with_slower_transport in [false, true] {
        let (done, ticket, watch) = watched((), 2, None);
        watch.cancel();
        let ops = [op(Opcode::Read, 0), op(Opcode::Write, 1)].into_iter();
        match with_slower_transport {
            false => user.submit(&peer, ops, done),
            true => {
                let guarded = with_fallback(ops, done, &clock, is_any_error, |failed: Vec<Retry<()>>| {
                    panic!("{} operations are tried again", failed.len())
                });
                user.submit(&peer, guarded.ops.into_iter(), guarded.done);
            }
        }
        let (results, ()) = ticket.results().await;
        assert!(results.iter().all(Result::is_err), "{results:?}");
        assert_eq!([watch.state(0), watch.state(1)], [Some(OpState::Cancelled); 2]);
    }
    // Other copies still succeed.
    let (done, ticket, watch) = watched((), 1, None);
    user.submit(&peer, [op(Opcode::Read, 0)].into_iter(), done);
    ticket.await.0.unwrap();
    assert_eq!(watch.state(0), Some(OpState::Done));
    drop(registration);
}
