"""Reads of ranges of objects that were located once."""

from __future__ import annotations

import ctypes
import time

import pytest

from mooncake.store import MooncakeDistributedStore, RangedReadSnapshot

LEASE_S = 2.0


@pytest.fixture
def stage(own_master, make_store):
    master = own_master(f"--default_kv_lease_ttl={int(LEASE_S * 1000)}")
    store, other = make_store(master), make_store(master)
    for name in "ab":
        assert other.put(name, name.encode() * 1000 + b"end") == 0
    buffer = ctypes.create_string_buffer(4096)
    at = ctypes.addressof(buffer)
    assert store.register_buffer(at, 4096) == 0
    yield store, other, buffer, at
    assert store.unregister_buffer(at) == 0


def read(store, snapshot, at, keys, to, of, sizes):
    return store.get_into_ranges_from_snapshot(snapshot, [at], [keys], [to], [of], [sizes])


def test_ranges_of_a_snapshot(stage):
    store, other, buffer, at = stage
    snapshot = store.prepare_get_into_ranges_snapshot(["a", "b", "none", "a"])
    assert isinstance(snapshot, RangedReadSnapshot)
    codes = read(store, snapshot, at, ["a", "b"], [[0, 100], [10]], [[999, 0], [1000]], [[4, 2], [3]])
    assert codes == [[[4, 2], [3]]]
    assert (buffer[0:4], buffer[100:102], buffer[10:13]) == (b"aend", b"aa", b"end")
    assert read(store, snapshot, at, ["none", "c"], [[0], [0]], [[0], [0]], [[1], [1]]) == [[[-704], [-600]]]
    assert read(store, snapshot, at, ["a"], [[0]], [[1000]], [[4]]) == [[[-600]]], "behind the end"
    assert read(store, snapshot, 1, ["a"], [[0]], [[0]], [[1]]) == [[[-600]]], "not registered"
    assert store.get_into_ranges_from_snapshot(snapshot, [at], [["a"]], [[[0]]], [], [[[1]]]) == [[[-600]]]
    empty = store.prepare_get_into_ranges_snapshot([])
    assert read(store, empty, at, ["a"], [[0]], [[0]], [[1]]) == [[[-600]]]
    with pytest.raises(ValueError, match="Ranged-read snapshot belongs to another Store"):
        read(other, snapshot, at, ["a"], [[0]], [[0]], [[1]])
    with pytest.raises(TypeError):
        store.get_into_ranges_from_snapshot(None, [at], [["a"]], [[[0]]], [[[0]]], [[[1]]])
    unset = MooncakeDistributedStore()
    with pytest.raises(Exception, match="not set up"):
        unset.prepare_get_into_ranges_snapshot(["a"])
    assert read(unset, snapshot, at, ["a"], [[0]], [[0]], [[1]]) == [[[-600]]]


def test_a_snapshot_is_renewed_after_half_of_a_lease(stage):
    store, other, buffer, at = stage
    begun = time.monotonic()
    snapshot = store.prepare_get_into_ranges_snapshot(["a", "b"])
    # At the first contact with the owner of an object, the master is asked again.
    assert read(store, snapshot, at, ["a", "b"], [[0], [0]], [[0], [0]], [[1], [1]]) == [[[1], [1]]]
    assert other.remove("a", force=True) == 0
    codes = read(store, snapshot, at, ["a"], [[0]], [[0]], [[4]])
    in_time = time.monotonic() < begun + LEASE_S / 2
    assert not in_time or (codes == [[[4]]] and buffer[0:4] == b"aaaa"), "under the lease"
    while time.monotonic() < begun + LEASE_S / 2 + 0.1:
        time.sleep(0.05)
    codes = read(store, snapshot, at, ["a", "b"], [[0], [0]], [[0], [0]], [[4], [4]])
    assert codes == [[[-704], [4]]] and buffer[0:4] == b"bbbb"
    # A later value is found once half of the lease is over.
    assert other.upsert("b", b"other") == 0
    while time.monotonic() < begun + LEASE_S * 2:
        time.sleep(0.05)
    assert read(store, snapshot, at, ["b"], [[0]], [[0]], [[5]]) == [[[5]]] and buffer[0:5] == b"other"
