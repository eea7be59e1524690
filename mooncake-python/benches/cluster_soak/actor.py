"""Task that changes and reads keys of its own, and compares each result with its shadow of them."""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from calls import SLOW, Calls, Report
from shadow import Change, Shadow, Timeline
from values import HEAD, LONGEST, WrongBytes, value_of, version_of

_ABSENT = -704
# Seconds between two moments at which all tasks read their pinned objects at once.
_BURST = 20.0
# Share of the awaited calls that are cancelled.
_CANCELLED = 0.02
# Length of the longest pinned value.
_LONGEST_PINNED = 8 << 10


@dataclass
class World:
    """State that all tasks of a process share."""

    report: Report
    calls: Calls
    timeline: Timeline
    stop: threading.Event
    # Names and numbers of keys of the writers in all steady processes.
    writers: list[tuple[str, int]]
    # Names of the segments of steady processes.
    segments: set[str] = field(default_factory=set)


class DirectStore:
    """Calls of a store on the thread of the task."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(self._store, name)

        async def run(*arguments: Any) -> Any:
            return call(*arguments)

        setattr(self, name, run)
        return run


class AwaitedStore:
    """Calls of a store for asyncio."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call: Callable[..., Awaitable[Any]] = getattr(self._store, f"async_{name}")
        setattr(self, name, call)
        return call


class Buffer:
    """Registered memory for the reads of one task."""

    def __init__(self, store: MooncakeDistributedStore, is_shared: bool) -> None:
        if is_shared:
            self.address = store.alloc_from_mem_pool(LONGEST)
        else:
            self._memory = (ctypes.c_ubyte * LONGEST)()
            self.address = ctypes.addressof(self._memory)
        code = store.register_buffer(self.address, LONGEST) if self.address else -1
        if code != 0:
            raise RuntimeError(f"register_buffer: {code}: {store.last_error()}")

    def read(self, length: int) -> bytes:
        return ctypes.string_at(self.address, length)


class Actor:
    """The only writer of its keys."""

    def __init__(
        self,
        world: World,
        name: str,
        store: MooncakeDistributedStore,
        keys: int,
        *,
        seed: str,
        pins_in: str = "",
        buffer: Buffer | None = None,
        is_awaited: bool = False,
    ) -> None:
        """`pins_in` is the segment for a pinned object; without one there is none."""
        self._world, self._name, self._native = world, name, store
        self._store: Any = AwaitedStore(store) if is_awaited else DirectStore(store)
        self._is_awaited, self._buffer = is_awaited, buffer
        self._random = random.Random(seed)
        self._shadows = [Shadow() for _ in range(keys)]
        self._pins = Shadow()
        self._pin: Change | None = None
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin, self._pinned.preferred_segment = True, pins_in
        self._version, self._steps = 0, 0

    async def run(self, rate: float) -> None:
        """Makes so many calls in a second until the process stops."""
        stop = self._world.stop
        pause: Callable[[float], Any] = asyncio.sleep if self._is_awaited else self._pause
        await self._read_pinned()
        while not stop.is_set():
            now = time.monotonic()
            burst, wait = _BURST - now % _BURST, self._random.expovariate(rate)
            await pause(min(burst, wait))
            if stop.is_set():
                return
            if wait < burst:
                await self.step()
            else:
                await self._read_pinned()

    async def _pause(self, seconds: float) -> None:
        self._world.stop.wait(seconds)

    async def step(self) -> None:
        """Makes one random call."""
        self._steps += 1
        number = self._random.randrange(len(self._shadows))
        dice = self._random.random()
        if self._steps % 16 == 0:
            now = time.monotonic()
            for shadow in (*self._shadows, self._pins):
                shadow.prune(self._world.timeline, now)
        if dice < 0.30:
            await self._put(number)
        elif dice < 0.55:
            await self._get(number)
        elif dice < 0.65:
            await self._get_batch()
        elif dice < 0.71:
            await self._remove(number)
        elif dice < 0.76:
            keys = [self._key(at) for at in range(len(self._shadows))]
            await self._call("batch_is_exist", keys)
        elif dice < 0.88 or not self._pinned.preferred_segment:
            await self._get_foreign()
        elif dice < 0.99:
            await self._read_pinned()
        else:
            await self._put_pinned()

    def _key(self, number: int) -> str:
        return f"{self._name}.{number}"

    async def _call(self, name: str, *arguments: Any) -> Any:
        """Runs a call of the store."""
        with self._world.calls.timed(f"{name} of {self._name}"):
            start = time.monotonic()
            result = await getattr(self._store, name)(*arguments)
            if time.monotonic() - start > SLOW:
                self._world.report.note(f"{name} of {arguments[0]} was slow: {self._native.last_error()}")
            return result

    async def _call_or_cancel(self, name: str, *arguments: Any) -> Any:
        """Runs a call of the store, and cancels a few. Raises `TimeoutError` for those."""
        call = self._call(name, *arguments)
        if self._is_awaited and self._random.random() < _CANCELLED:
            return await asyncio.wait_for(call, self._random.random() * 0.01)
        return await call

    def _length(self) -> int:
        kind = self._random.randrange(8)
        if kind == 0:
            return HEAD + self._random.randrange(200)
        if kind <= 3:
            return 4000 + self._random.randrange(200)
        return self._random.randrange(30_000, 40_000) if kind <= 6 else self._random.randrange(60_000, 200_000)

    async def _put(self, number: int) -> None:
        shadow = self._shadows[number]
        start, name = time.monotonic(), "upsert"
        if shadow.is_removed() and self._random.random() < 0.7:
            name = "put"
            if shadow.changes:
                # A put replaces nothing, so it counts only with the removal before it.
                start = shadow.changes[-1].start
        await self._write(name, self._key(number), self._length(), shadow, start)

    async def _write(
        self, name: str, key: str, length: int, shadow: Shadow, start: float, config: ReplicateConfig | None = None
    ) -> Change | None:
        """Writes a new version. Returns the change if it is certain."""
        self._version += 1
        began, code = time.monotonic(), None
        try:
            code = await self._call_or_cancel(name, key, value_of(key, self._version, length), config)
        except TimeoutError:
            self._world.calls.count("cancelled")
        change = Change(self._version, start, time.monotonic(), code == 0)
        shadow.note(change)
        if code == 0:
            self._world.calls.count("stored")
        elif code is not None:
            self._refused(name, key, code, began)
        return change if code == 0 else None

    def _refused(self, name: str, key: str, code: int, began: float) -> None:
        self._world.timeline.update()
        is_calm = self._world.timeline.is_calm(began, time.monotonic())
        self._world.calls.count(f"refused {code}" if is_calm else "refused while a server was away")
        if is_calm:
            self._world.report.note(f"{name} of {key} returns {code}: {self._native.last_error()}")

    async def _remove(self, number: int) -> None:
        start = time.monotonic()
        code = await self._call("remove", self._key(number), self._random.random() < 0.5)
        self._shadows[number].note(Change(None, start, time.monotonic(), code in (0, _ABSENT)))

    async def _get(self, number: int) -> None:
        key, dice = self._key(number), self._random.random()
        value: bytes | None
        try:
            if self._buffer is not None and dice < 0.4:
                length = await self._call("get_into", key, self._buffer.address, LONGEST)
                value = self._buffer.read(length) if length > 0 else b""
            elif not self._is_awaited and dice < 0.6:
                with self._world.calls.timed(f"get_buffer of {self._name}"):
                    handle = self._native.get_buffer(key)
                value = b"" if handle is None else bytes(memoryview(handle))
            else:
                value = await self._call_or_cancel("get", key)
        except TimeoutError:
            return self._world.calls.count("cancelled")
        self._check(key, value, self._shadows[number])

    async def _get_batch(self) -> None:
        numbers = self._random.sample(range(len(self._shadows)), min(8, len(self._shadows)))
        keys = [self._key(number) for number in numbers]
        start = time.monotonic()
        values = await self._call("get_batch", keys)
        if len(values) != len(keys):
            return self._refused("get_batch", keys[0], -1, start)
        for number, key, value in zip(numbers, keys, values, strict=True):
            self._check(key, value, self._shadows[number])

    async def _get_foreign(self) -> None:
        """Reads a key of another writer, of which any version counts."""
        if not self._world.writers:
            return
        name, keys = self._random.choice(self._world.writers)
        is_pinned = self._random.random() < 0.3
        key = f"{name}.pinned" if is_pinned else f"{name}.{self._random.randrange(keys)}"
        start = time.monotonic()
        try:
            is_hit = self._check(key, await self._call_or_cancel("get", key), None)
        except TimeoutError:
            return self._world.calls.count("cancelled")
        if is_pinned and not is_hit:
            # The writer may not have put it again yet, so a miss is not a failure.
            self._world.timeline.update()
            if self._world.timeline.is_calm(start, time.monotonic()):
                self._world.calls.count("misses of pinned objects of others")

    def _check(self, key: str, value: bytes | None, shadow: Shadow | None) -> bool:
        """Checks the bytes of a read. Returns whether it was a hit."""
        calls, timeline = self._world.calls, self._world.timeline
        if not value:
            calls.count("misses")
            return False
        calls.count("hits")
        try:
            version = version_of(key, value)
        except WrongBytes as error:
            self._world.report.fail(f"wrong bytes of {key} through {self._native.get_hostname()}: {error}; {shadow}")
            return True
        if shadow is not None and shadow.refusal(version, timeline) is not None:
            timeline.update()
            if (reason := shadow.refusal(version, timeline)) is not None:
                self._world.report.fail(f"stale value of {key}: {reason}; {shadow}; {timeline}")
        return True

    async def _put_pinned(self) -> None:
        key = f"{self._name}.pinned"
        self._pin = None
        length = self._random.randrange(HEAD, _LONGEST_PINNED)
        change = await self._write("upsert", key, length, self._pins, time.monotonic(), self._pinned)
        if change is not None:
            replicas = await self._call("get_replica_desc", key)
            places = [
                replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
                for replica in replicas
                if replica.is_memory_replica()
            ]
            if self._world.segments.intersection(places):
                self._pin = change

    async def _read_pinned(self) -> None:
        """Reads the pinned object, which must be there. Puts it if there is none yet."""
        if (pin := self._pin) is None:
            return await self._put_pinned()
        key, start = f"{self._name}.pinned", time.monotonic()
        try:
            value = await self._call_or_cancel("get", key)
        except TimeoutError:
            return self._world.calls.count("cancelled")
        end = time.monotonic()
        if self._check(key, value, self._pins):
            return self._world.calls.count("pinned hits")
        timeline = self._world.timeline
        timeline.update()
        if not timeline.is_there(pin, start, end):
            if timeline.may_be_lost(pin):
                self._pin = None
            return self._world.calls.count("pinned misses while the master was away")
        error = self._native.last_error()
        exists = await self._call("is_exist", key)
        replicas = await self._call("get_replica_desc", key)
        again = await self._call("get", key)
        self._world.report.fail(
            f"lost: {key} of {self._native.get_hostname()} is not found from {start:.3f} to {end:.3f}; is_exist is"
            f" {exists}, replicas {replicas}, a second read has {len(again or b'')} bytes, error {error};"
            f" {self._pins}; {timeline}"
        )
        self._pin = None


def run_on_thread(task: Any) -> None:
    """Runs a task whose calls never wait for a loop."""
    try:
        task.send(None)
    except StopIteration:
        return
    raise RuntimeError("a call on a thread waits for a loop")
