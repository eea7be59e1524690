"""Embedding tables of a model in the store: one object per head, looked up by row."""

from __future__ import annotations

import operator
from typing import Any

from mooncake._mooncake import Store
from mooncake._shards import _Job, _Read

_ITEM = 4
_NOT_FOUND, _INVALID_PARAMS = -704, -600


class EngramStoreConfig:
    """Shape of the tables of one layer."""

    def __init__(self) -> None:
        """Takes no arguments: the shape is set afterwards."""
        self._sizes, self._dim = [1024], 64

    @property
    def table_vocab_sizes(self) -> list[int]:
        """Number of rows of the table of each head. The list is a copy."""
        return list(self._sizes)

    @table_vocab_sizes.setter
    def table_vocab_sizes(self, sizes: list[int]) -> None:
        self._sizes = [operator.index(size) for size in sizes]

    @property
    def embedding_dim(self) -> int:
        """Number of columns of every table."""
        return self._dim

    @embedding_dim.setter
    def embedding_dim(self, dim: int) -> None:
        self._dim = operator.index(dim)


class EngramStore:
    """Embedding tables of one layer, under the keys `engram:l<layer>:h<head>`.

    A table is an array of float32 without a header. The object is complete or absent: a lookup
    returns all of its rows or raises.
    """

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: Any = None) -> None:
        """Takes a `MooncakeDistributedStore`, or an object with `_get_pyclient_capsule`. Without a
        store, and while it is not set up, only the shape can be queried.

        Raises `ValueError` for a shape without rows or columns.
        """
        if not isinstance(config, EngramStoreConfig):
            raise TypeError(f"incompatible function arguments: config must be EngramStoreConfig, not {type(config).__name__}")
        self._layer = operator.index(layer_id)
        self._sizes, self._dim = config.table_vocab_sizes, config.embedding_dim
        if not self._sizes:
            raise ValueError("EngramStoreConfig.table_vocab_sizes must not be empty")
        if min(self._sizes) <= 0:
            raise ValueError("EngramStoreConfig.table_vocab_sizes must contain only positive values")
        if self._dim <= 0:
            raise ValueError("EngramStoreConfig.embedding_dim must be positive")
        if store is not None and not callable(getattr(store, "_get_pyclient_capsule", None)):
            raise RuntimeError(
                "EngramStore store parameter must be a PyClient or store wrapper that implements _get_pyclient_capsule()"
            )
        self._store = store

    def get_table_vocab_sizes(self) -> list[int]:
        """Returns the number of rows of the table of each head."""
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

    def populate(self, embedding_buffers: list[Any]) -> None:
        """Stores the tables: one array of shape `[rows, columns]` for each head.

        Numbers of other types are converted to float32. Raises `RuntimeError` if a table is in the
        store already, and if one cannot be written; then none of them stays.
        """
        import numpy as np

        if not isinstance(embedding_buffers, list):
            raise TypeError(
                "populate(): incompatible function arguments: embedding_buffers must be a list, "
                f"not {type(embedding_buffers).__name__}"
            )
        if len(embedding_buffers) != len(self._sizes):
            raise RuntimeError("embedding_buffers size must match num_heads")
        tables = []
        for buffer, rows in zip(embedding_buffers, self._sizes):
            if not isinstance(buffer, np.ndarray):
                raise RuntimeError("embedding_buffers must be NumPy arrays")
            try:
                table = np.ascontiguousarray(buffer, np.float32)
            except (TypeError, ValueError) as error:
                raise RuntimeError("embedding_buffers must be float32 arrays") from error
            if buffer.ndim != 2:
                raise RuntimeError("each embedding buffer must be 2D [N_h, D]")
            if table.shape != (rows, self._dim):
                raise RuntimeError(
                    "embedding buffer shape does not match get_table_vocab_sizes()/get_embedding_dim()"
                )
            tables.append(table)
        client, keys = self._client("populate failed"), self.get_store_keys()
        for key, found in zip(keys, client.batch_is_exist(keys)):
            if found != 0:
                why = "it exists already; call remove_from_store() first" if found > 0 else f"rc={found}"
                raise RuntimeError(f"populate failed: {key}: {why}")
        for written, (key, table) in enumerate(zip(keys, tables)):
            code = client.put(key, table.data.cast("B"))
            if code != 0:
                client.batch_remove(keys[:written], True)
                raise RuntimeError(f"populate failed: {key}: rc={code} {client.last_error()}")

    def lookup(self, row_ids: Any) -> Any:
        """Returns the rows with these numbers, as a float32 array `[B, L, H, D]`.

        `row_ids` are nested lists `[B][L][H]` of integers, or an array of that shape, with one
        column for each head. Raises `RuntimeError` if a number is outside of its table, and if a
        table is absent or cannot be read.
        """
        import numpy as np

        failed = "EngramStore lookup failed"
        ids = _row_ids(row_ids)
        if ids.ndim != 3 or 0 in ids.shape or ids.shape[2] != len(self._sizes):
            raise RuntimeError(f"{failed}: row_ids must have the shape [B, L, {len(self._sizes)}]")
        client, keys = self._client(failed), self.get_store_keys()
        outside = (ids < 0) | (ids >= np.array(self._sizes))
        if outside.any():
            head = int(np.argwhere(outside)[0][2])
            raise RuntimeError(f"{failed}: a row is outside of the table. key={keys[head]} rows={self._sizes[head]}")
        row = self._dim * _ITEM
        jobs, read = [], []
        for head, found in enumerate(client._heads(keys, _ITEM)):
            located = None if found is None else found[0]
            if located is None or located.size != self._sizes[head] * row:
                why = "is absent" if located is None else f"has {located.size} bytes"
                raise RuntimeError(f"{failed}: the table {why}. key={keys[head]}")
            # A row is read once, and neighbours together.
            rows, places = np.unique(ids[:, :, head], return_inverse=True)
            table = np.empty((len(rows), self._dim), np.float32)
            reads = []
            ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
            for begin, end in zip([0, *ends], ends):
                reads.append(_Read(located, int(rows[begin]) * row, 0, begin * row, 0, 1, (end - begin) * row))
            jobs.append(_Job((table.ctypes.data, table.nbytes), reads))
            read.append((table, places.reshape(ids.shape[:2])))
        for key, code in zip(keys, client._read_strips(jobs, [table for table, _ in read])):
            if code != 0:
                raise RuntimeError(f"{failed}: {key}: rc={code} {client.last_error()}")
        return np.stack([table[places] for table, places in read], axis=2)

    def remove_from_store(self, force: bool = False) -> int:
        """Removes the tables, also those that readers use if `force` is set. Returns how many there
        were. Raises `RuntimeError` if one cannot be removed.
        """
        client, removed = self._client(f"remove_from_store failed, rc={_INVALID_PARAMS}"), 0
        for key in self.get_store_keys():
            code = client.remove(key, force)
            if code not in (0, _NOT_FOUND):
                raise RuntimeError(f"remove_from_store failed, rc={code}: {client.last_error()}")
            removed += code == 0
        return removed

    def _client(self, failed: str) -> Store:
        client = None if self._store is None else self._store._get_pyclient_capsule()
        if not isinstance(client, Store):
            raise RuntimeError(f"{failed}: there is no store, or it is not set up")
        return client


def _row_ids(row_ids: Any) -> Any:
    """Returns the numbers of rows as an array of int64. Floats of an array lose their fraction."""
    import numpy as np

    try:
        if isinstance(row_ids, np.ndarray) or hasattr(row_ids, "__array__"):
            ids = np.asarray(row_ids)
            if ids.ndim != 3:
                raise RuntimeError("row_ids array must have shape [B, L, H]")
            return ids.astype(np.int64)
        if isinstance(row_ids, str | bytes):
            raise TypeError("row_ids must be lists of integers")
        rows = [[[operator.index(row) for row in heads] for heads in tokens] for tokens in row_ids]
        if not rows or not rows[0]:
            raise RuntimeError("row_ids must not be empty")
        return np.array(rows, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RuntimeError(f"EngramStore lookup failed: row_ids must be integers [B][L][H]: {error}") from error


__all__ = ["EngramStore", "EngramStoreConfig"]
