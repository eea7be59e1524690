"""Embedding tables in a store."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake.store import EngramStore, EngramStoreConfig, MooncakeDistributedStore


def config(sizes=(5, 3), dim=4):
    made = EngramStoreConfig()
    made.table_vocab_sizes, made.embedding_dim = list(sizes), dim
    return made


def test_sizes_without_a_store():
    default = EngramStoreConfig()
    assert (default.table_vocab_sizes, default.embedding_dim) == ([1024], 64)
    default.table_vocab_sizes.append(7)
    assert default.table_vocab_sizes == [1024]
    for store in (None, MooncakeDistributedStore()):
        tables = EngramStore(-1, config(), store)
        assert (tables.get_table_vocab_sizes(), tables.get_num_heads(), tables.get_embedding_dim()) == ([5, 3], 2, 4)
        assert tables.get_store_keys() == ["engram:l-1:h0", "engram:l-1:h1"]
        for work in (lambda: tables.populate([]), lambda: tables.lookup([[[0, 0]]]), tables.remove_from_store):
            with pytest.raises(RuntimeError):
                work()
        with pytest.raises(RuntimeError, match="rc=-600"):
            tables.remove_from_store()
    for sizes, dim in (((), 4), ((0,), 4), ((-1,), 4), ((3,), 0)):
        with pytest.raises(ValueError):
            EngramStore(0, config(sizes, dim))
    with pytest.raises(RuntimeError):
        EngramStore(0, config(), object())


def test_tables(store):
    tables = EngramStore(hash(__file__) % 1000 + 10, config(), store)
    first = np.arange(20, dtype=np.float64).reshape(5, 4)
    second = np.arange(100, 112, dtype=np.int32).reshape(4, 3).T
    for wrong in ([first], [first, second.T], [first, second.tolist()], (first, second), [first, second, second]):
        with pytest.raises(RuntimeError):
            tables.populate(wrong)
    with pytest.raises(RuntimeError):
        tables.lookup([[[0, 0]]])
    tables.populate([first, second])
    assert store.get(tables.get_store_keys()[0]) == first.astype(np.float32).tobytes()
    rows = [[[4, 0], [0, 2]], [[1, 1], [3, 2]]]
    for given in (rows, np.array(rows), np.array(rows, np.float32) + 0.5, np.array(rows, np.uint8)):
        got = tables.lookup(given)
        assert got.dtype == np.float32 and got.shape == (2, 2, 2, 4)
        for batch, length in np.ndindex(2, 2):
            assert (got[batch, length, 0] == first[rows[batch][length][0]]).all()
            assert (got[batch, length, 1] == second[rows[batch][length][1]]).all()
    for wrong in ([], [[]], [[[0]]], [[[0, 0, 0]]], [[[5, 0]]], [[[0, -1]]], [[[0, 0]], [[0, 0], [1, 1]]], [[["x", 0]]], 3):
        with pytest.raises(RuntimeError):
            tables.lookup(wrong)
    with pytest.raises(RuntimeError, match="exists"):
        tables.populate([first, second])
    assert tables.remove_from_store(True) == 2 and tables.remove_from_store() == 0
    with pytest.raises(RuntimeError):
        tables.lookup(rows)


def test_a_failed_write_leaves_nothing(store, monkeypatch):
    tables = EngramStore(hash(__file__) % 1000 + 2000, config(), store)
    put = store.put
    monkeypatch.setattr(store, "put", lambda key, value: -200 if key.endswith("h1") else put(key, value))
    with pytest.raises(RuntimeError, match="-200"):
        tables.populate([np.zeros((5, 4)), np.zeros((3, 4))])
    assert store.batch_is_exist(tables.get_store_keys()) == [0, 0]
