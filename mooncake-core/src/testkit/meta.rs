//! Conformance suite of [`MetadataBackend`]: one case per sentence of its contract.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;

use crate::error::ErrorKind;
use crate::meta::{Expect, MetadataBackend};

/// Runs every case against an empty backend. Panics with the broken sentence of the contract.
pub async fn check(backend: Arc<dyn MetadataBackend>) {
    get_put_delete(&*backend).await;
    odd_keys(&*backend).await;
    expectations(&*backend).await;
    if backend.capabilities().list {
        listing(&*backend).await;
    }
    if backend.capabilities().watch {
        watching(&*backend).await;
    }
}

async fn get_put_delete(backend: &dyn MetadataBackend) {
    let key = "mooncake/ram/conformance";
    assert!(backend.get(key).await.expect("get").is_none(), "a key never put is None");
    assert!(!backend.delete(key).await.expect("delete"), "deleting a missing key returns false");
    for value in ["one", "two", ""] {
        backend.put(key, Bytes::from(value), Expect::Any).await.expect("put");
        let got = backend.get(key).await.expect("get").expect("a get after a put finds it");
        assert_eq!(got.value, value, "a get returns the last put");
    }
    assert!(backend.delete(key).await.expect("delete"), "deleting a key returns true");
    assert!(backend.get(key).await.expect("get").is_none(), "a deleted key is None");
}

async fn odd_keys(backend: &dyn MetadataBackend) {
    for key in ["mooncake/ram/host:1234", "mooncake/a b", "mooncake/é&=?#%2F+", "mooncake/x/y/z"] {
        backend.put(key, Bytes::from(key.to_owned()), Expect::Any).await.expect("put of an odd key");
    }
    for key in ["mooncake/ram/host:1234", "mooncake/a b", "mooncake/é&=?#%2F+", "mooncake/x/y/z"] {
        let got = backend.get(key).await.expect("get").unwrap_or_else(|| panic!("{key:?} was put"));
        assert_eq!(got.value, key, "each odd key has its own value");
        assert!(backend.delete(key).await.expect("delete"), "{key:?} was there");
    }
}

async fn expectations(backend: &dyn MetadataBackend) {
    let key = "mooncake/expect";
    let first = backend.put(key, "a".into(), Expect::Absent).await.expect("absent holds");
    let refused = backend.put(key, "b".into(), Expect::Absent).await.expect_err("the key is there");
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "a failed expectation is AlreadyExists");
    let now = backend.get(key).await.expect("get").expect("there");
    assert_eq!((now.value.as_ref(), now.revision), (&b"a"[..], first), "a refused put changes nothing");
    let second = backend.put(key, "c".into(), Expect::At(now.revision)).await.expect("the revision holds");
    assert_ne!(first, second, "a put changes the revision");
    let stale = backend.put(key, "d".into(), Expect::At(first)).await.expect_err("the revision is old");
    assert_eq!(stale.kind(), ErrorKind::AlreadyExists, "a stale revision is AlreadyExists");
    let stale = backend.delete_at(key, first).await.expect_err("the revision is old");
    assert_eq!(stale.kind(), ErrorKind::AlreadyExists, "a delete at a stale revision is AlreadyExists");
    let now = backend.get(key).await.expect("get").expect("there");
    assert_eq!((now.value.as_ref(), now.revision), (&b"c"[..], second), "a refused delete changes nothing");
    backend.delete_at(key, second).await.expect("the revision holds");
    assert!(backend.get(key).await.expect("get").is_none(), "a key deleted at its revision is None");
    let absent = backend.delete_at(key, second).await.expect_err("the key is deleted");
    assert_eq!(absent.kind(), ErrorKind::AlreadyExists, "a missing key does not have the revision");
}

async fn listing(backend: &dyn MetadataBackend) {
    for key in ["list/b", "list/a", "list/c/d", "lisp/x", "listing"] {
        backend.put(key, Bytes::from_static(b"v"), Expect::Any).await.expect("put");
    }
    let keys: Vec<String> = backend.list("list/").await.expect("list").into_iter().map(|(k, _)| k).collect();
    assert_eq!(keys, ["list/a", "list/b", "list/c/d"], "exactly the keys with the prefix, in order");
    for key in ["list/b", "list/a", "list/c/d", "lisp/x", "listing"] {
        backend.delete(key).await.expect("delete");
    }
}

async fn watching(backend: &dyn MetadataBackend) {
    let mut events = backend.watch("watch/").await.expect("watch");
    backend.put("watch/k", "1".into(), Expect::Any).await.expect("put");
    backend.put("elsewhere", "x".into(), Expect::Any).await.expect("put");
    backend.put("watch/k", "2".into(), Expect::Any).await.expect("put");
    backend.delete("watch/k").await.expect("delete");
    let mut seen = Vec::new();
    for _ in 0..3 {
        let event = events.next().await.expect("a watch delivers every change");
        assert_eq!(event.key, "watch/k", "only changes under the prefix");
        seen.push(event.value.map(|v| v.value));
    }
    assert_eq!(seen, [Some("1".into()), Some("2".into()), None], "in order");
    backend.delete("elsewhere").await.expect("delete");
}
