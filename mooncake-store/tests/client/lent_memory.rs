//! Memory of a read stays taken until no transfer can write to it, however the read ends.

use futures::future::{Either, select};
use mooncake_core::ErrorKind;
use mooncake_store::client::{RangeRead, ReadInto};
use mooncake_store::master::MasterOptions;
use mooncake_transport::testkit::{Fault, Faults};
use mooncake_transport::{RegionPool, SliceMut};

use crate::cluster::{eventually, value};
use crate::faults::{Wire, World, always, locate};

const LEN: usize = 4096;

/// Returns all bytes of the pool as a target of a read. The handle of the part is dropped.
fn lend(pool: &RegionPool<Wire>) -> SliceMut<Wire> {
    let part = pool.allocate(LEN, 64).unwrap();
    // SAFETY: the only slice of the part.
    unsafe { part.slice_mut_unchecked(0..LEN) }.unwrap()
}

/// Drops a read while its transfer is in progress; its memory must stay taken until the transfer
/// ends.
async fn given_up<R>(world: &World, wire: &Wire, pool: &RegionPool<Wire>, read: impl Future<Output = R>) {
    let read = Box::pin(read);
    let held = Box::pin(world.held(wire, 1));
    let Either::Right((_, read)) = select(read, held).await else { panic!("the read ended by itself") };
    drop(read);
    assert_eq!(pool.used(), LEN as u64, "the transfer may still write there");
    assert_eq!(pool.allocate(1, 64).unwrap_err().kind(), ErrorKind::NoSpace);
    wire.release(1);
    eventually("the memory is free again", async || pool.used() == 0).await;
}

#[tokio::test]
async fn a_dropped_read_keeps_the_memory_lent_to_it() {
    let world = World::new(MasterOptions::default());
    let (a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    a.put("slow", &value(1, LEN)[..]).await.unwrap();
    let [slow] = locate(&b, ["slow"]).await;
    // SAFETY: new memory, whose slices all come from the pool.
    let pool = unsafe { RegionPool::new(b.memory().alloc(LEN).unwrap()) };

    wire.set(always(Fault::Delay));
    let into = lend(&pool);
    let parts = vec![RangeRead { object: slow.clone(), offset: 0, into }];
    given_up(&world, &wire, &pool, b.ranges().read(parts)).await;
    given_up(&world, &wire, &pool, b.get_into("slow", lend(&pool))).await;
    given_up(&world, &wire, &pool, b.batch_get_into(vec![("slow", lend(&pool))])).await;

    wire.set(Faults::none());
    let ReadInto { result: read, into, .. } = b.get_into("slow", lend(&pool)).await;
    let mut bytes = vec![0; LEN];
    into.copy_to(0, &mut bytes).unwrap();
    assert_eq!((read.unwrap(), bytes), (Some(LEN), value(1, LEN).to_vec()));
    drop(into);
    assert_eq!(pool.used(), 0);
}
