//! Conformance suite of [`Leases`]: one case per sentence of its contract.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;

use crate::clock::{Clock, Moment};
use crate::meta::{Expect, Hold, Leases, MetaEvent};

/// Lease time of the keys.
const TIME: Duration = Duration::from_secs(2);

/// Runs every case against an empty backend, on a clock that goes as fast as that of the backend.
/// `pass` lets time pass, and lets the backend notice it. Panics with the broken sentence of the
/// contract.
pub async fn check(backend: &dyn Leases, clock: &dyn Clock, pass: impl AsyncFn(Duration)) {
    one_holder(backend).await;
    lost_to_others(backend).await;
    runs_out(backend, clock, &pass).await;
    renewed(backend, clock, &pass).await;
    deposed(backend, &pass).await;
}

async fn take(backend: &dyn Leases, key: &str, value: &'static str) -> Option<Hold> {
    backend.take(key, Bytes::from_static(value.as_bytes()), TIME).await.expect("take")
}

async fn await_deletion(events: &mut BoxStream<'static, MetaEvent>, key: &str) {
    loop {
        let event = events.next().await.expect("a watch delivers every change");
        assert_eq!(event.key, key, "only changes under the prefix");
        if event.value.is_none() {
            return;
        }
    }
}

async fn one_holder(backend: &dyn Leases) {
    let key = "hold/one";
    let mut events = backend.watch(key).await.expect("watch");
    let first = take(backend, key, "a").await.expect("a free key can be taken");
    assert_eq!(take(backend, key, "b").await, None, "a key has at most one holder");
    let read = backend.get(key).await.expect("get").expect("a held key can be read");
    assert_eq!(
        (read.value.as_ref(), read.revision),
        (&b"a"[..], first.revision),
        "with the value of its holder"
    );
    let other = take(backend, "hold/other", "c").await.expect("another key is independent");
    assert!(backend.renew(&first).await.expect("keep"), "the holder renews its lease");
    let revision = first.revision;
    backend.release(first).await.expect("let go");
    await_deletion(&mut events, key).await;
    assert!(backend.get(key).await.expect("get").is_none(), "a released key is deleted");
    let second = take(backend, key, "b").await.expect("a released key can be taken");
    assert!(second.revision > revision, "revisions grow with each holder");
    for hold in [second, other] {
        backend.release(hold).await.expect("let go");
    }
}

async fn lost_to_others(backend: &dyn Leases) {
    let key = "hold/lost";
    let deleted = take(backend, key, "a").await.expect("take");
    assert!(backend.delete(key).await.expect("delete"));
    assert!(
        !backend.renew(&deleted).await.expect("keep"),
        "a holder whose key was deleted has lost the lease"
    );
    assert!(backend.get(key).await.expect("get").is_none(), "a renewal does not bring the key back");
    let written = take(backend, key, "b").await.expect("take");
    backend.put(key, "c".into(), Expect::Any).await.expect("put");
    assert!(
        !backend.renew(&written).await.expect("keep"),
        "a holder whose key was written by another has lost the lease"
    );
    for lost in [deleted, written] {
        backend.release(lost).await.expect("releasing a lost lease succeeds");
    }
    let read = backend.get(key).await.expect("get").expect("the value of another writer stays");
    assert_eq!(read.value, "c");
    backend.delete(key).await.expect("delete");
}

/// Returns whether less than the lease time has passed: the machine may have been stopped
/// meanwhile.
fn in_time(clock: &dyn Clock, since: Moment) -> bool {
    clock.now().since(since) < TIME
}

async fn runs_out(backend: &dyn Leases, clock: &dyn Clock, pass: &impl AsyncFn(Duration)) {
    let key = "hold/out";
    let mut events = backend.watch(key).await.expect("watch");
    let requested_at = clock.now();
    let hold = take(backend, key, "a").await.expect("take");
    pass(TIME / 2).await;
    let there = backend.get(key).await.expect("get").is_some();
    assert!(there || !in_time(clock, requested_at), "a key does not expire early");
    pass(TIME - TIME / 2).await;
    await_deletion(&mut events, key).await;
    assert!(
        clock.now().since(requested_at) >= TIME,
        "a key does not expire early, and no watcher sees it expire early"
    );
    assert!(backend.get(key).await.expect("get").is_none(), "a key that is not renewed expires");
    assert!(!backend.renew(&hold).await.expect("keep"), "an expired lease cannot be renewed");
    assert!(backend.get(key).await.expect("get").is_none(), "a renewal does not bring the key back");
}

async fn renewed(backend: &dyn Leases, clock: &dyn Clock, pass: &impl AsyncFn(Duration)) {
    let key = "hold/kept";
    let mut events = backend.watch(key).await.expect("watch");
    let mut requested_at = clock.now();
    let hold = take(backend, key, "a").await.expect("take");
    for _ in 0..3 {
        pass(TIME / 2).await;
        let before = std::mem::replace(&mut requested_at, clock.now());
        let renewed = backend.renew(&hold).await.expect("keep");
        assert!(renewed || !in_time(clock, before), "a key that is renewed in time stays");
        if !renewed {
            return;
        }
        let read = backend.get(key).await.expect("get").map(|read| read.revision);
        assert!(
            read == Some(hold.revision) || !in_time(clock, requested_at),
            "a renewal does not change the revision"
        );
    }
    pass(TIME).await;
    await_deletion(&mut events, key).await;
    assert!(clock.now().since(requested_at) >= TIME, "the time counts from the last renewal");
}

async fn deposed(backend: &dyn Leases, pass: &impl AsyncFn(Duration)) {
    let key = "hold/deposed";
    let mut events = backend.watch(key).await.expect("watch");
    let old = take(backend, key, "old").await.expect("take");
    pass(TIME).await;
    await_deletion(&mut events, key).await;
    let new = take(backend, key, "new").await.expect("an expired key can be taken");
    assert!(!backend.renew(&old).await.expect("keep"), "a deposed holder has lost the lease");
    backend.release(old).await.expect("releasing a lost lease succeeds");
    let read = backend.get(key).await.expect("get").map(|read| (read.value, read.revision));
    assert_eq!(read, Some((Bytes::from_static(b"new"), new.revision)), "a deposed holder changes nothing");
    backend.release(new).await.expect("let go");
}
