//! Memory of a read of a shared client stays taken while its owner may still write to it.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, select};
use mooncake_core::ErrorKind;
use mooncake_core::clock::ManualClock;
use mooncake_store::client::Client;
use mooncake_store::local::{LocalClient, LocalConfig, LocalRange, LocalServer, LocalServerConfig};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_transport::testkit::{Fault, Faults, Faulty};
use mooncake_transport::{Loopback, LoopbackNet, RegionPool, SliceMut};

use super::bytes;

const LEN: usize = 4096;

/// Returns all bytes of the pool as a target of a read. The handle of the part is dropped.
fn lend(pool: &RegionPool<Loopback>) -> SliceMut<Loopback> {
    let part = pool.allocate(LEN, 64).unwrap();
    // SAFETY: the only slice of the part.
    unsafe { part.slice_mut_unchecked(0..LEN) }.unwrap()
}

async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn memory_stays_taken_while_the_owner_may_write_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let master: Arc<Master> = Arc::new(Master::new(MasterOptions::default()).unwrap());
    // The clock of the owner is stopped, so that only the shared client times out.
    let net = LoopbackNet::with_clock(Arc::new(ManualClock::new()));
    let connect = async |segment| {
        let wire = Arc::new(Faulty::new(Arc::new(net.node()), 1, Faults::none()));
        let builder = Client::builder().master(master.clone()).segment(segment).transport(wire.clone());
        (builder.connect().await.unwrap(), wire)
    };
    let (holder, _) = connect(1 << 20).await;
    let (owner, wire) = connect(0).await;
    holder.put("slow", bytes(LEN, 1)).await.unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(owner, config).unwrap();
    let config = LocalConfig {
        buffer: 0,
        timeout: Duration::from_millis(200),
        ..LocalConfig::at(path.to_str().unwrap())
    };
    let shared = LocalClient::connect(config).await.unwrap();
    let slow = shared.locate(&["slow"]).await.unwrap().remove(0).unwrap().unwrap();
    let region = shared.alloc_registered::<Loopback>(LEN).await.unwrap();
    // SAFETY: new memory, whose slices all come from the pool.
    let pool = unsafe { RegionPool::new(region) };
    wire.set(Faults::none().with(Fault::Delay, 1000));

    // After a timeout the response is an error, and the memory is not returned.
    let reads = vec![LocalRange { object: slow.clone(), offset: 0, into: lend(&pool) }];
    let read = shared.read_ranges(reads).await.remove(0);
    assert_eq!((read.result.unwrap_err().kind(), read.into.is_none()), (ErrorKind::Timeout, true));
    let free = |n| {
        assert_eq!(pool.used(), LEN as u64, "the owner may still write there");
        assert_eq!(wire.release(n), n);
    };
    until(|| wire.held() == 1).await;
    free(1);
    until(|| pool.used() == 0).await;

    // The same holds when the future is dropped.
    let read = Box::pin(shared.batch_get_into(vec![("slow", lend(&pool))]));
    let Either::Right((_, read)) = select(read, Box::pin(until(|| wire.held() == 1))).await else {
        panic!("the read ended by itself")
    };
    drop(read);
    free(1);
    until(|| pool.used() == 0).await;
    drop(server);
}
