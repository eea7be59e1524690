"""Embedding tables in the store."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mooncake.store import EngramStore, EngramStoreConfig, MooncakeDistributedStore


def config(sizes=(5, 7), dim=4):
    made = EngramStoreConfig()
    made.table_vocab_sizes, made.embedding_dim = list(sizes), dim
    return made


def tables(sizes=(5, 7), dim=4, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((size, dim)).astype(np.float32) for size in sizes]


@pytest.fixture
def layer(request):
    """Number of a layer that no other test uses."""
    return abs(hash(request.node.nodeid)) % 1_000_000_000


def test_shape():
    plain = EngramStoreConfig()
    assert (plain.table_vocab_sizes, plain.embedding_dim) == ([1024], 64)
    plain.table_vocab_sizes.append(3)
    assert plain.table_vocab_sizes == [1024], "the list is a copy"
    plain.table_vocab_sizes = (3, np.int64(4))
    assert plain.table_vocab_sizes == [3, 4]
    for name, value in (("embedding_dim", 3.5), ("table_vocab_sizes", ["x"]), ("table_vocab_sizes", 3)):
        with pytest.raises(TypeError):
            setattr(plain, name, value)
    engram = EngramStore(layer_id=-2, config=config(), store=None)
    assert engram.get_store_keys() == ["engram:l-2:h0", "engram:l-2:h1"]
    assert (engram.get_num_heads(), engram.get_embedding_dim(), engram.get_table_vocab_sizes()) == (2, 4, [5, 7])
    for sizes, dim, says in (([], 4, "empty"), ([0], 4, "positive"), ([3, -1], 4, "positive"), ([3], 0, "positive")):
        with pytest.raises(ValueError, match=says):
            EngramStore(1, config(sizes, dim))
    for wrong in (object(), "store", 5):
        with pytest.raises(RuntimeError, match="_get_pyclient_capsule"):
            EngramStore(1, config(), wrong)
    with pytest.raises(TypeError):
        EngramStore(1, {"embedding_dim": 3})


@pytest.mark.parametrize("store", [None, MooncakeDistributedStore()])
def test_without_a_store(store):
    engram = EngramStore(1, config(), store)
    with pytest.raises(RuntimeError, match="populate failed"):
        engram.populate(tables())
    with pytest.raises(RuntimeError, match="lookup failed"):
        engram.lookup([[[0, 0]]])
    with pytest.raises(RuntimeError, match="rc=-600"):
        engram.remove_from_store()


def test_tables_are_populated_looked_up_and_removed(store, layer):
    engram, of = EngramStore(layer, config(), store), tables()
    with pytest.raises(RuntimeError, match="absent"):
        engram.lookup([[[0, 1]]])
    engram.populate([np.asfortranarray(of[0]), of[1].astype(np.float64)])
    assert store.get(engram.get_store_keys()[0]) == of[0].tobytes()
    with pytest.raises(RuntimeError, match="exists already"):
        engram.populate(of)
    ids = [[[0, 1], [4, 6]], [[1, 1], [2, 2]], [[0, 6], [3, 0]]]
    found = engram.lookup(ids)
    assert found.dtype == np.float32 and found.shape == (3, 2, 2, 4)
    expected = np.stack([of[head][np.array(ids)[:, :, head]] for head in range(2)], axis=2)
    assert (found == expected).all()
    for same in (np.array(ids, np.int32), np.array(ids) + 0.9, tuple(ids), np.repeat(ids, 2, axis=2)[:, :, ::2]):
        assert (engram.lookup(same) == expected).all()
    assert (engram.lookup([[[True, np.int64(1)]]]) == [[[of[0][1], of[1][1]]]]).all()

    class Wrapper:
        def _get_pyclient_capsule(self):
            return store._get_pyclient_capsule()

    assert (EngramStore(layer, config(), Wrapper()).lookup(ids) == expected).all()
    with pytest.raises(RuntimeError, match="rc=-706"):
        engram.remove_from_store()
    assert engram.remove_from_store(force=True) == 2 and engram.remove_from_store() == 0


def test_a_large_lookup(store, layer):
    sizes, rng = (1000, 3000, 17), np.random.default_rng()
    engram, of = EngramStore(layer, config(sizes, 32), store), tables(sizes, 32, 5)
    engram.populate(of)
    ids = np.stack([rng.integers(0, size, (8, 250)) for size in sizes], axis=2)
    found = engram.lookup(ids)
    assert (found == np.stack([of[head][ids[:, :, head]] for head in range(3)], axis=2)).all()
    assert engram.remove_from_store(True) == 3


def test_wrong_tables_and_rows(store, layer):
    engram, of = EngramStore(layer, config(), store), tables()
    with pytest.raises(TypeError):
        engram.populate(tuple(of))
    for wrong, says in (
        (of[:1], "num_heads"),
        ([of[0], of[0]], "shape"),
        ([of[0].tolist(), of[1]], "NumPy"),
        ([None, of[1]], "NumPy"),
        ([of[0].ravel(), of[1]], "2D"),
        ([np.array([["x"] * 4] * 5), of[1]], "float32"),
    ):
        with pytest.raises(RuntimeError, match=says):
            engram.populate(wrong)
    assert store.batch_is_exist(engram.get_store_keys()) == [0, 0]
    engram.populate(of)
    for wrong in (
        [],
        [[]],
        [[[]]],
        np.zeros((0, 1, 2), np.int64),
        np.zeros((2, 2), np.int64),
        [[[0, 1]], [[0, 1], [1, 1]]],
        [[[0, 1, 2]]],
        [[0, 1]],
        [[[5, 0]]],
        [[[-1, 0]]],
        [[[0.5, 1]]],
        [[[2**70, 0]]],
        "abc",
        None,
    ):
        with pytest.raises(RuntimeError):
            engram.lookup(wrong)
    assert engram.remove_from_store(True) == 2


def test_tables_that_cannot_be_stored_leave_nothing(make_store, own_master, layer):
    # In a cluster of its own, no other client has space for the large table.
    store = make_store(own_master(), global_segment_size=32 << 20)
    first, second = EngramStore(layer, config((4, 3 << 20)), store).get_store_keys()
    large = EngramStore(layer, config((4, 3 << 20)), store)
    here = [np.zeros((4, 4), np.float32), np.zeros((3 << 20, 4), np.float32)]
    occupied = EngramStore(layer, config(), store)
    assert store.put(second, b"x" * 112) == 0
    with pytest.raises(RuntimeError, match="exists already"):
        occupied.populate(tables())
    assert store.batch_is_exist([first, second]) == [0, 1]
    assert store.put(first, b"x" * 8) == 0
    with pytest.raises(RuntimeError, match="has 8 bytes"):
        occupied.lookup([[[0, 1]]])
    assert occupied.remove_from_store(True) == 2
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="populate failed"):
        large.populate(here)
    assert store.batch_is_exist([first, second]) == [0, 0]
    assert time.monotonic() - began < 60


def test_a_shared_client(light, layer):
    engram, of = EngramStore(layer, config(), light), tables()
    engram.populate(of)
    found = engram.lookup([[[1, 2]]])
    assert (found[0, 0, 0] == of[0][1]).all() and (found[0, 0, 1] == of[1][2]).all()
    assert engram.remove_from_store(True) == 2
