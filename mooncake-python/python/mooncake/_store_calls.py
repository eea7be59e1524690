"""Calls of a store of any class. A method that is absent, `None` or not callable is not used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mooncake import _mooncake
from mooncake._groups import of_one_key

OBJECT_NOT_FOUND = -704
# Result of a registration that overlaps an earlier one.
_INVALID_PARAMS = -600
# Methods whose replacement in a subclass or an instance must see its calls.
_OBSERVED = (
    "put",
    "get",
    "remove",
    "batch_remove",
    "is_exist",
    "put_parts",
    "get_batch",
    "put_tensor",
    "pub_tensor",
    "get_tensor",
    "get_tensor_into",
    "put_tensor_from",
    "put_from",
    "batch_put_from",
    "get_into",
    "batch_get_into",
    "get_into_ranges",
    "register_buffer",
    "unregister_buffer",
)


def is_native(store: Any) -> bool:
    """Returns whether a store is ours and none of its methods has been replaced. Its values may
    then be read by location.
    """
    if not isinstance(store, _mooncake.Store):
        return False
    from mooncake.store import MooncakeDistributedStore

    kind, own = type(store), vars(store)
    return all(
        name not in own and getattr(kind, name, None) is getattr(MooncakeDistributedStore, name, None)
        for name in _OBSERVED
    )


def check(operation: str, key: str, code: Any) -> None:
    """Raises `RuntimeError` unless the result of a write reports success."""
    if code is not None and code != 0:
        raise RuntimeError(f"{operation} failed for {key}: {code}")


class StoreCalls:
    """Store with the lookup of its optional methods, and the conversion of codes to exceptions."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def method(self, name: str) -> Callable[..., Any] | None:
        """Returns a method of the store, or `None` if the store lacks it."""
        found = getattr(self.store, name, None)
        return found if callable(found) else None

    @property
    def is_native(self) -> bool:
        """Returns whether values may be read by location."""
        return is_native(self.store)

    # Writing.

    def put(self, key: str, value: Any, config: Any) -> None:
        """Writes a value."""
        check("put", key, self.store.put(key, value, **self.keywords(config)))

    def keywords(self, config: Any) -> dict[str, Any]:
        """Returns the keyword arguments of a write of one key."""
        if config is None:
            return {}
        config = of_one_key(config)
        if getattr(config, "group_ids", None) == [""] and self.is_native:
            # An empty name stands for no group.
            config = of_one_key(config, [])
        return {"config": config}

    # Registering.

    @contextlib.contextmanager
    def registered(self, address: int, size: int) -> Iterator[bool]:
        """Registers memory for the time of a read. Yields whether it is registered.

        Memory that another registration covers is used and left alone.
        """
        register, unregister = self.method("register_buffer"), self.method("unregister_buffer")
        if register is None or unregister is None:
            yield False
            return
        code = register(address, size)
        if code == _INVALID_PARAMS:
            yield True
            return
        if code not in (None, 0):
            raise RuntimeError(f"register_buffer failed: {code}")
        try:
            yield True
        except BaseException:
            with contextlib.suppress(Exception):
                unregister(address)
            raise
        code = unregister(address)
        if code not in (None, 0):
            raise RuntimeError(f"unregister_buffer failed: {code}")

    # Removing.

    def exists(self, key: str) -> bool | None:
        """Returns whether a key exists, or `None` if the store cannot tell."""
        is_exist = self.method("is_exist")
        if is_exist is None:
            return None
        found = is_exist(key)
        if found not in (0, 1):
            raise RuntimeError(f"is_exist failed for {key}: {found}")
        return bool(found)

    def remove(self, keys: Iterable[str]) -> None:
        """Removes values. Missing ones count as removed.

        Raises `RuntimeError` if some cannot be removed.
        """
        listed = list(dict.fromkeys(keys))
        left = self._remove_each(self._remove_batch(listed))
        if left:
            text = ", ".join(f"{key}: {code}" for key, code in left.items())
            raise RuntimeError(f"failed to remove {len(left)} of {len(listed)} values: {text}")

    def discard(self, keys: Iterable[str]) -> None:
        """Removes the values of a write that failed, as far as possible."""
        listed = list(dict.fromkeys(keys))
        try:
            left = self._remove_batch(listed)
        except Exception:
            left = listed
        for key in left:
            with contextlib.suppress(Exception):
                self._remove_each([key])

    def _remove_batch(self, keys: list[str]) -> list[str]:
        """Removes values by one call, if the store has it. Returns the keys that are left."""
        batch_remove = self.method("batch_remove")
        if batch_remove is None or not keys:
            return keys
        try:
            codes = list(batch_remove(keys, True))
        except TypeError:
            codes = list(batch_remove(keys))
        if len(codes) != len(keys):
            raise RuntimeError(f"batch_remove returned {len(codes)} results for {len(keys)} keys")
        return [key for key, code in zip(keys, codes) if code not in (None, 0, OBJECT_NOT_FOUND)]

    def _remove_each(self, keys: list[str]) -> dict[str, Any]:
        """Removes values one by one. Returns the codes of those that are left."""
        left = {}
        for key in keys:
            try:
                code = self._remove_one(key)
            except KeyError:
                continue
            if code not in (None, 0, OBJECT_NOT_FOUND):
                left[key] = code
        return left

    def _remove_one(self, key: str) -> Any:
        try:
            return self.store.remove(key, True)
        except TypeError:
            # A store whose `remove` takes only a key.
            return self.store.remove(key)
