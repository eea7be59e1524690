"""Stores of selected methods for the tests of structured objects. They record every call."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from typing import Any

BASE = ("put", "get", "remove")
RANGES = ("register_buffer", "unregister_buffer", "get_into", "get_into_ranges", "batch_get_into")
TENSORS = ("put_tensor", "pub_tensor", "get_tensor", "get_tensor_into")


class Lease:
    """Memory of a `Pool`."""

    def __init__(self, pool: Pool, size: int) -> None:
        self._pool, self.size, self._memory = pool, size, bytearray(max(size, 1))
        self._view = (ctypes.c_ubyte * max(size, 1)).from_buffer(self._memory)
        self.ptr = ctypes.addressof(self._view)
        self.released = 0

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._memory)[: self.size]

    def release(self) -> None:
        self.released += 1
        self._pool.calls.append(("release", self.size))
        if self in self._pool.live:
            self._pool.live.remove(self)


class Pool:
    """Buffer pool that records its calls."""

    def __init__(self, calls: list[Any] | None = None, error: Exception | None = None) -> None:
        self.calls: list[Any] = [] if calls is None else calls
        self.live: list[Lease] = []
        self.error = error

    def acquire(self, size: int) -> Lease:
        self.calls.append(("acquire", size))
        if self.error is not None:
            raise self.error
        self.live.append(Lease(self, size))
        return self.live[-1]


def _bytes_at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


class Calls:
    """Methods of a store over a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[Any] = []
        self.tensors: dict[str, Any] = {}
        self.registered: dict[int, int] = {}
        # Results in place of the usual ones, by method or by method and a part of the key.
        self.codes: dict[Any, Any] = {}

    def _code(self, name: str, key: str) -> Any:
        if name in self.codes:
            return self.codes[name]
        for at, code in self.codes.items():
            if isinstance(at, tuple) and at[0] == name and at[1] in key:
                return code
        return 0

    def _store(self, name: str, key: str, data: bytes) -> Any:
        code = self._code(name, key)
        if isinstance(code, Exception):
            raise code
        if code in (0, None):
            self.values[key] = data
        return code

    def put(self, key: str, value: Any, **config: Any) -> Any:
        self.calls.append(("put", key, type(value).__name__, len(bytes(value)), *_groups(config)))
        return self._store("put", key, bytes(value))

    def get(self, key: str) -> bytes:
        self.calls.append(("get", key))
        return self.values.get(key, b"")

    def remove(self, key: str, force: bool = False) -> int:
        self.calls.append(("remove", key, force))
        code = self._code("remove", key)
        if isinstance(code, Exception):
            raise code
        if code:
            return int(code)
        self.tensors.pop(key, None)
        return 0 if self.values.pop(key, None) is not None else -704

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        self.calls.append(("batch_remove", sorted(keys), force))
        code = self.codes.get("batch_remove")
        if isinstance(code, Exception):
            raise code
        if code is not None:
            return list(code)
        return [0 if self.values.pop(key, None) is not None else -704 for key in keys]

    def is_exist(self, key: str) -> int:
        self.calls.append(("is_exist", key))
        if "is_exist" in self.codes:
            return int(self.codes["is_exist"])
        return int(key in self.values)

    def put_from(self, key: str, ptr: int, size: int, **config: Any) -> Any:
        self.calls.append(("put_from", key, size, *_groups(config)))
        return self._store("put_from", key, _bytes_at(ptr, size))

    def put_tensor_from(self, key: str, ptr: int, size: int) -> Any:
        self.calls.append(("put_tensor_from", key, size))
        return self._store("put_tensor_from", key, _bytes_at(ptr, size))

    def batch_put_from(self, keys: list[str], ptrs: list[int], sizes: list[int], **config: Any) -> list[Any]:
        self.calls.append(("batch_put_from", list(keys), list(sizes), *_groups(config)))
        return [self._store("batch_put_from", k, _bytes_at(p, n)) for k, p, n in zip(keys, ptrs, sizes)]

    def register_buffer(self, ptr: int, size: int) -> int:
        self.calls.append(("register_buffer", size))
        code = self.codes.get("register_buffer", 0)
        if code == 0:
            self.registered[ptr] = size
        return int(code)

    def unregister_buffer(self, ptr: int) -> int:
        self.calls.append(("unregister_buffer",))
        self.registered.pop(ptr, None)
        return int(self.codes.get("unregister_buffer", 0))

    def get_into(self, key: str, ptr: int, size: int) -> int:
        self.calls.append(("get_into", key, size))
        data = self.values.get(key)
        if data is None:
            return -704
        if len(data) > size:
            return -600
        ctypes.memmove(ptr, data, len(data))
        return len(data)

    def batch_get_into(self, keys: list[str], ptrs: list[int], sizes: list[int]) -> list[int]:
        self.calls.append(("batch_get_into", list(keys), list(sizes)))
        calls, self.calls = self.calls, []
        found = [self.get_into(*one) for one in zip(keys, ptrs, sizes)]
        self.calls = calls
        return found

    def get_into_ranges(self, ptrs: Any, keys: Any, to: Any, of: Any, sizes: Any) -> Any:
        self.calls.append(("get_into_ranges", len(ptrs), keys, to, of, sizes))
        made = []
        for ptr, some, targets, sources, lengths in zip(ptrs, keys, to, of, sizes):
            row = []
            for key, target, source, length in zip(some, targets, sources, lengths):
                codes = []
                for t, s, n in zip(target, source, length):
                    data = self.values.get(key)
                    if data is None or s + n > len(data):
                        codes.append(-704 if data is None else -600)
                        continue
                    ctypes.memmove(ptr + t, data[s : s + n], n)
                    codes.append(n)
                row.append(codes)
            made.append(row)
        return made

    def put_tensor(self, key: str, tensor: Any) -> Any:
        self.calls.append(("put_tensor", key, list(tensor.shape)))
        self.tensors[key] = tensor
        return self._store("put_tensor", key, _tensor_bytes(tensor))

    def pub_tensor(self, key: str, tensor: Any, config: Any) -> Any:
        self.calls.append(("pub_tensor", key, list(tensor.shape), *_groups({"config": config})))
        self.tensors[key] = tensor
        return self._store("pub_tensor", key, _tensor_bytes(tensor))

    def get_tensor(self, key: str) -> Any:
        self.calls.append(("get_tensor", key))
        return self.tensors.get(key)

    def get_tensor_into(self, key: str, ptr: int, size: int) -> Any:
        self.calls.append(("get_tensor_into", key, size))
        return self.tensors.get(key)


def _tensor_bytes(tensor: Any) -> bytes:
    from mooncake.store import _serialize_tensor

    header, address, size, owner = _serialize_tensor(tensor)
    data = bytes(header) + _bytes_at(address, size)
    del owner
    return data


def _groups(config: dict[str, Any]) -> list[Any]:
    if "config" not in config:
        return []
    groups = getattr(config["config"], "group_ids", "no attribute")
    return [("config", list(groups) if isinstance(groups, list | tuple) else groups)]


def duck(methods: Iterable[str]) -> Any:
    """Returns a store with only these methods."""
    kept = {name: vars(Calls)[name] for name in ("__init__", "_code", "_store", *methods)}
    if "batch_get_into" in kept and "get_into" not in kept:
        kept["get_into"] = vars(Calls)["get_into"]
    return type("Duck", (), kept)()


class Renamed:
    """Replacement of random identifiers by their order of appearance."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        return re.sub(r"[0-9a-f]{32}", lambda m: self._seen.setdefault(m[0], f"id{len(self._seen)}"), text)
