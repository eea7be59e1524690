"""Embedding tables in a store: `mooncake.store.EngramStore`. Needs numpy."""

from __future__ import annotations

import operator
from typing import Any

from mooncake import _mooncake
from mooncake._store_calls import OBJECT_NOT_FOUND, StoreCalls

_INVALID_PARAMS = -600


class EngramStoreConfig:
    """Sizes of the tables of a layer: rows of each head, and columns of all."""

    def __init__(self) -> None:
        self._sizes = [1024]
        self._dim = 64

    @property
    def table_vocab_sizes(self) -> list[int]:
        """Rows of the table of each head. The list is a copy."""
        return list(self._sizes)

    @table_vocab_sizes.setter
    def table_vocab_sizes(self, sizes: list[int]) -> None:
        self._sizes = [operator.index(size) for size in sizes]

    @property
    def embedding_dim(self) -> int:
        """Columns of every table."""
        return self._dim

    @embedding_dim.setter
    def embedding_dim(self, dim: int) -> None:
        self._dim = operator.index(dim)


class EngramStore:
    """Embedding tables of one layer, one for each head, as objects of a store.

    Without a store that is set up, only the sizes and keys are available.
    """

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: Any = None) -> None:
        if not isinstance(config, EngramStoreConfig):
            raise TypeError(f"config must be an EngramStoreConfig, not {type(config).__name__}")
        sizes, dim = config.table_vocab_sizes, config.embedding_dim
        if not sizes or min(sizes) <= 0 or dim <= 0:
            raise ValueError(f"table_vocab_sizes and embedding_dim must be positive: {sizes} and {dim}")
        if store is not None and not isinstance(store, _mooncake.Store):
            if not callable(getattr(store, "_get_pyclient_capsule", None)):
                raise RuntimeError(f"store must be a MooncakeDistributedStore, not {type(store).__name__}")
        self._layer, self._sizes, self._dim = operator.index(layer_id), sizes, dim
        self._calls = None if store is None or store._get_pyclient_capsule() is None else StoreCalls(store)

    def get_table_vocab_sizes(self) -> list[int]:
        """Returns the number of rows of each table."""
        return list(self._sizes)

    def get_num_heads(self) -> int:
        """Returns the number of tables."""
        return len(self._sizes)

    def get_embedding_dim(self) -> int:
        """Returns the number of columns of every table."""
        return self._dim

    def get_store_keys(self) -> list[str]:
        """Returns the key of each table."""
        return [f"engram:l{self._layer}:h{head}" for head in range(len(self._sizes))]

    def _with_store(self) -> StoreCalls:
        if self._calls is None:
            raise RuntimeError("cannot access embedding tables: the store is missing or not set up; call setup first")
        return self._calls

    def populate(self, embedding_tables: list[Any]) -> None:
        """Stores all tables, as float32. None of them may exist.

        Raises `RuntimeError` for a wrong table or a failed write. Nothing stays stored then.
        """
        import numpy as np

        calls, keys = self._with_store(), self.get_store_keys()
        if not isinstance(embedding_tables, list) or len(embedding_tables) != len(keys):
            raise RuntimeError(f"embedding tables must be a list of {len(keys)} arrays")
        tables: list[Any] = []
        for head, (table, rows) in enumerate(zip(embedding_tables, self._sizes)):
            if not isinstance(table, np.ndarray) or table.shape != (rows, self._dim):
                shape = getattr(table, "shape", type(table).__name__)
                raise RuntimeError(f"embedding table {head} must be an array of shape {(rows, self._dim)}, not {shape}")
            tables.append(np.ascontiguousarray(table, np.float32))
        for key in keys:
            if calls.exists(key):
                raise RuntimeError(f"cannot store embedding tables: {key!r} exists; call remove_from_store first")
        written: list[str] = []
        try:
            for key, array in zip(keys, tables):
                written.append(key)
                calls.put(key, memoryview(array).cast("B"), None)
        except BaseException:
            calls.discard(written)
            raise

    def lookup(self, row_ids: Any) -> Any:
        """Returns the rows of all tables that `row_ids` selects: an array of [batch, length, heads,
        columns] for numbers of [batch, length, heads].

        Raises `RuntimeError` for wrong numbers, and if a table is missing.
        """
        import numpy as np

        calls, keys = self._with_store(), self.get_store_keys()
        try:
            given = np.asarray(row_ids)
            numbers = given.astype(np.int64) if given.dtype.kind in "biuf" else None
        except (ValueError, OverflowError):
            numbers = None
        if numbers is None or numbers.ndim != 3 or not numbers.size or numbers.shape[2] != len(keys):
            raise RuntimeError(f"row_ids must be numbers of shape [batch, length, {len(keys)}], and not empty")
        if (numbers < 0).any() or (numbers >= np.array(self._sizes)).any():
            raise RuntimeError(f"row_ids must be below the sizes of the tables {self._sizes}")
        made = np.empty((*numbers.shape, self._dim), np.float32)
        width = self._dim * made.itemsize
        sources = numbers.reshape(-1, len(keys)).T * width
        targets = (np.arange(numbers.size).reshape(-1, len(keys)) * width).T
        sizes = np.full_like(sources, width)
        ranges = calls.method("get_into_ranges")
        if ranges is None:
            raise RuntimeError("cannot look up rows: the store has no get_into_ranges")
        with calls.registered(made.ctypes.data, made.nbytes):
            codes = ranges([made.ctypes.data], [keys], [targets.tolist()], [sources.tolist()], [sizes.tolist()])
        if codes != [sizes.tolist()]:
            raise RuntimeError(f"cannot look up rows of {', '.join(keys)}: {str(codes)[:100]}")
        return made

    def remove_from_store(self, force: bool = False) -> int:
        """Removes all tables. Returns their number. Missing tables do not count.

        Raises `RuntimeError` with the code of a removal that fails.
        """
        if self._calls is None:
            raise RuntimeError(f"cannot remove embedding tables: the store is missing or not set up. rc={_INVALID_PARAMS}")
        removed = 0
        for key in self.get_store_keys():
            code = self._calls.store.remove(key, force)
            if code not in (0, OBJECT_NOT_FOUND):
                raise RuntimeError(f"cannot remove {key!r}: rc={code}")
            removed += code == 0
        return removed
