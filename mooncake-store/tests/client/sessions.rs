//! Write sessions whose calls are dropped, or time out and land later.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::api::WriteMode;
use mooncake_store::client::{Client, PutOutcome, RangeWrite, Reservation};
use mooncake_store::master::{MasterOptions, Put};
use mooncake_store::protocol::wire::TaskStatus;
use mooncake_transport::testkit::{Fault, Faults};

use crate::cluster::{eventually, value};
use crate::faults::{Wire, World, always, at};

/// Length of each object, and of the whole segment of the owner.
const LEN: usize = 4096;

async fn reserve(client: &Client<Wire>, key: &str) -> Reservation {
    client
        .ranges()
        .reserve(&[(key, LEN as u64)], &ReplicateConfig::default())
        .await
        .unwrap()
        .remove(0)
        .unwrap()
}

/// Returns a write of the whole object.
fn all<'a>(client: &Client<Wire>, object: &'a Reservation, seed: u64) -> Vec<RangeWrite<'a, Wire>> {
    let mut from = client.memory().alloc(LEN).unwrap().exclusive().unwrap();
    from.copy_from(0, &value(seed, LEN)).unwrap();
    vec![RangeWrite { object, offset: 0, from: from.into_shared() }]
}

async fn commit(client: &Client<Wire>, object: &Reservation) -> Result<(), ErrorCode> {
    client.ranges().commit(&[object]).await.unwrap().remove(0).map_err(|error| error.code())
}

/// Begins a write and drops it while its bytes are in progress.
async fn drop_a_write(world: &World, client: &Client<Wire>, wire: &Wire, object: &Reservation, seed: u64) {
    wire.set(always(Fault::Delay));
    {
        let mut write = pin!(client.ranges().write(all(client, object, seed)));
        for _ in 0..100 {
            assert!(poll_fn(|cx| Poll::Ready(write.as_mut().poll(cx).is_pending())).await);
            if wire.held() == 1 {
                break;
            }
            tokio::task::yield_now().await;
        }
        world.held(wire, 1).await;
    }
    wire.set(Faults::none());
}

#[tokio::test]
async fn a_dropped_write_is_not_committed() {
    let world = World::new(MasterOptions::default());
    let (_owner, _) = world.connect(1 << 20).await;
    let (writer, wire) = world.connect(0).await;
    let object = reserve(&writer, "k").await;
    drop_a_write(&world, &writer, &wire, &object, 1).await;
    let refused = Err(ErrorCode::UnavailableInCurrentStatus);
    assert_eq!(commit(&writer, &object).await, refused, "nothing has landed");
    // A second write of the range succeeds before the bytes of the first one land.
    writer.ranges().write(all(&writer, &object, 2)).await.remove(0).unwrap();
    assert_eq!(commit(&writer, &object).await, refused, "the first write may still overwrite the second one");
    assert_eq!(writer.get("k").await.unwrap(), None);
    assert_eq!(wire.release(1), 1);
    eventually("the dropped write has ended", async || {
        writer.ranges().write(all(&writer, &object, 3)).await.remove(0).unwrap();
        !object.is_incomplete()
    })
    .await;
    assert_eq!(commit(&writer, &object).await, Ok(()));
    assert_eq!(writer.get("k").await.unwrap().unwrap(), value(3, LEN));
    // A readable object can no longer be written.
    let late = writer.ranges().write(all(&writer, &object, 4)).await.remove(0);
    assert_eq!(late.unwrap_err().code(), ErrorCode::UnavailableInCurrentStatus);
    assert_eq!(writer.get("k").await.unwrap().unwrap(), value(3, LEN));
}

/// Memory without a write has bytes of earlier objects.
#[tokio::test]
async fn an_object_with_holes_is_not_committed() {
    let world =
        World::new(MasterOptions { lease_ttl: Duration::from_millis(10), ..MasterOptions::default() });
    let (owner, _) = world.connect(4 * LEN as u64).await;
    let (writer, _) = world.connect(0).await;
    let half = LEN / 2;
    let cases: [(&[(usize, usize)], &str); 6] = [
        (&[], "bytes 0..4096 of 4096"),
        (&[(0, 100)], "bytes 100..4096 of 4096"),
        (&[(0, LEN - 1)], "bytes 4095..4096 of 4096"),
        (&[(1, LEN)], "bytes 0..1 of 4096"),
        (&[(0, half), (half + 500, LEN)], "bytes 2048..2548 of 4096"),
        (&[(0, half), (10, half), (LEN - 5, LEN)], "bytes 2048..4091 of 4096"),
    ];
    for (number, (ranges, missing)) in cases.into_iter().enumerate() {
        let key = format!("{number}");
        let object = reserve(&writer, &key).await;
        let write = async |(start, end): (usize, usize)| {
            let mut from = writer.memory().alloc(LEN).unwrap().exclusive().unwrap();
            from.copy_from(0, &value(9, LEN)).unwrap();
            let from = from.into_shared().slice(start..end).unwrap();
            let write = RangeWrite { object: &object, offset: start as u64, from };
            writer.ranges().write(vec![write]).await.remove(0).unwrap();
        };
        for range in ranges {
            write(*range).await;
        }
        assert!(object.is_incomplete());
        let refused = writer.ranges().commit(&[&object]).await.unwrap().remove(0).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::UnavailableInCurrentStatus);
        assert!(refused.to_string().contains(missing), "{refused}");
        assert_eq!(writer.get(&key).await.unwrap(), None);
        // The rest may still follow.
        write((0, LEN)).await;
        assert_eq!(commit(&writer, &object).await, Ok(()));
        assert_eq!(writer.get(&key).await.unwrap().unwrap(), value(9, LEN));
        writer.remove(&key, true).await.unwrap();
    }
    drop(owner);
}

#[tokio::test]
async fn a_write_that_was_never_sent_is_not_committed() {
    let world = World::new(MasterOptions::default());
    let (_owner, _) = world.connect(1 << 20).await;
    let (writer, _) = world.connect(0).await;
    let object = reserve(&writer, "k").await;
    // A future that is never polled has written nothing, and does not affect its ranges.
    drop(writer.ranges().write(all(&writer, &object, 1)));
    writer.ranges().write(all(&writer, &object, 2)).await.remove(0).unwrap();
    assert_eq!(commit(&writer, &object).await, Ok(()));
    assert_eq!(writer.get("k").await.unwrap().unwrap(), value(2, LEN));
}

/// Returns whether the master allocates space for another object. The clock moves before that, by
/// longer than revoked space stays reserved, and by less than an allocation lasts.
async fn grants_another(world: &World, clients: &[&Client<Wire>]) -> bool {
    for _ in 0..2 {
        world.clock.advance(Duration::from_secs(6));
        for client in clients {
            client.status().is_healthy().await;
        }
    }
    world.master.tick();
    let (config, writer) = (ReplicateConfig::default(), ClientId(Uuid::new(9, 9)).into());
    let put = Put {
        writer,
        mode: WriteMode::Put,
        key: b"other",
        len: LEN as u64,
        config: &config,
        group: "",
        session: None,
    };
    world.master.put_start(&put).is_ok()
}

#[tokio::test]
async fn space_of_a_write_that_timed_out_is_not_revoked() {
    let world = World::new(MasterOptions::default());
    let (owner, _) = world.connect(LEN as u64).await;
    let (writer, wire) = world.connect(0).await;
    let object = reserve(&writer, "k").await;
    wire.set(always(Fault::LandLate));
    let outcome = writer.ranges().write(all(&writer, &object, 1)).await.remove(0);
    assert_eq!(outcome.unwrap_err().code(), ErrorCode::RpcTimeout);
    wire.set(Faults::none());
    // The client avoids an owner that timed out for a moment.
    world.clock.advance(Duration::from_secs(2));
    // The late bytes would change the value, even if the range is written again.
    writer.ranges().write(all(&writer, &object, 2)).await.remove(0).unwrap();
    assert_eq!(commit(&writer, &object).await, Err(ErrorCode::UnavailableInCurrentStatus));
    assert!(!writer.ranges().give_back(&[&object]).await);
    assert!(!grants_another(&world, &[&owner]).await, "late bytes may land in another object");
    assert_eq!(wire.release(1), 1);
    // The master reclaims the space in its own time.
    for _ in 0..70 {
        world.clock.advance(Duration::from_secs(9));
        owner.status().is_healthy().await;
        world.master.tick();
    }
    assert_eq!(world.master.stats().writing, 0);
    assert_eq!(owner.put("k", &value(3, LEN)[..]).await.unwrap(), PutOutcome::Stored);
}

#[tokio::test]
async fn space_of_a_dropped_write_is_revoked_once_it_has_landed() {
    let world = World::new(MasterOptions::default());
    let (_owner, _) = world.connect(LEN as u64).await;
    let (writer, wire) = world.connect(0).await;
    let object = reserve(&writer, "k").await;
    drop_a_write(&world, &writer, &wire, &object, 1).await;
    assert!(!writer.ranges().give_back(&[&object]).await, "its bytes are under way");
    assert_eq!(world.master.stats().writing, 1);
    assert_eq!(wire.release(1), 1);
    eventually("the space is given back", async || world.master.stats().writing == 0).await;
    let late = writer.ranges().write(all(&writer, &object, 2)).await.remove(0);
    assert_eq!(late.unwrap_err().code(), ErrorCode::UnavailableInCurrentStatus);
}

/// The first target fails at once, the second one is late: the space of both may still be written.
#[tokio::test]
async fn space_of_a_copy_is_not_revoked_while_one_of_its_writes_may_land() {
    let world = World::new(MasterOptions::default());
    let (source, wire) = world.connect(LEN as u64).await;
    let (one, _) = world.connect(LEN as u64).await;
    let (two, _) = world.connect(LEN as u64).await;
    source.put_with("k", &value(1, LEN)[..], &at(&source)).await.unwrap();
    // Without earlier contact, the space would be requested twice, and there is space for one copy.
    for target in [&one, &two] {
        source.engine().open(target.engine().name()).await.unwrap();
    }
    // The probes of the targets are late, too, until all transfers are released.
    wire.set(always(Fault::LandLate).next(Fault::Fail).next(Fault::LandLate));
    let task = source.replicas().copy("k", &[one.hostname(), two.hostname()]).await.unwrap();
    eventually("the copy fails", async || {
        source.replicas().task(task).await.unwrap().status == TaskStatus::Failed
    })
    .await;
    assert_eq!(wire.held(), 1);
    assert!(!grants_another(&world, &[&source, &one, &two]).await, "late bytes may land in another object");
}
