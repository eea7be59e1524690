"""Process of the soak: `worker.py ROLE NAME`.

The first line of standard input is the cluster. The process then sets up its stores and prints a
line that it is ready. The second line is the cluster again, with what the other processes have
added, and the work begins. It ends with standard input.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable

from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

from actor import Actor, Buffer, World, run_on_thread
from calls import Calls, Report
from cluster import Cluster
from shadow import Timeline
from values import value_of
from visitors import ENGINE_KEY, ENGINE_SLOTS, SLOT, Visitor, exchange

MIB = 1 << 20
THREADS = 100
COROUTINES = 1500
KEYS_OF_THREAD = 30
KEYS_OF_COROUTINE = 6
# Threads that start and close stores and engines.
VISITORS = 5
# Seconds between two looks at the timeline.
_LOOK = 0.5


class Worker:
    """Stores and engines of a process, and its task."""

    def __init__(self, role: str, name: str) -> None:
        self.name = name
        self.report = Report()
        self.calls = Calls(self.report)
        self.stop = threading.Event()
        self.cluster = Cluster.load(sys.stdin.readline())
        self.stores: list[tuple[MooncakeDistributedStore, bool]] = []
        self.engine: TransferEngine | None = None
        roles: dict[str, tuple[Callable[[], dict[str, object]], Callable[[World], None]]] = {
            "threads": (self._set_up_threads, self._run_threads),
            "coroutines": (self._set_up_coroutines, self._run_coroutines),
            "engine": (self._set_up_engine, lambda world: self._wait()),
            "visitors": (dict, self._run_visitors),
            "visitor": (dict, self._run_visitor),
        }
        self._set_up, self._run = roles[role]

    def run(self) -> None:
        self.report.send("ready", self._set_up())
        if not (line := sys.stdin.readline()):
            return
        self.cluster = Cluster.load(line)
        timeline = Timeline(self.cluster.timeline)
        timeline.update()
        writers = [] if self.name.startswith("visitor-") else list(self.cluster.writers)
        world = World(self.report, self.calls, timeline, self.stop, writers, set(self.cluster.segments))
        threading.Thread(target=self._wait_for_end, daemon=True).start()
        threading.Thread(target=self._look, args=(timeline,), daemon=True).start()
        self._run(world)
        for store, _ in self.stores:
            with self.calls.timed("close"):
                code = store.close()
            if code != 0:
                self.report.fail(f"close of {self.name} returns {code}: {store.last_error()}")
        if self.engine is not None:
            self.engine._close()
        self.calls.report()
        self.report.send("end", self.name)

    def _wait_for_end(self) -> None:
        sys.stdin.read()
        self.stop.set()

    def _look(self, timeline: Timeline) -> None:
        """Keeps the timeline up to date, and counts what was read from disks."""
        counted = 0
        while not self.stop.wait(_LOOK):
            timeline.update()
            from_disks = sum(store.get_offload_rpc_read_count() for store, _ in self.stores)
            self.calls.count("read from disks", from_disks - counted)
            counted = from_disks

    def _wait(self) -> None:
        self.stop.wait()

    def _join(self, store: MooncakeDistributedStore, segment: int, disk: str = "") -> None:
        code = self.cluster.set_up(store, segment, 32 * MIB, disk)
        if code != 0:
            raise SystemExit(f"setup: {code}: {store.last_error()}")
        self.stores.append((store, False))

    def _attach(self, store: MooncakeDistributedStore) -> None:
        code = store.setup_dummy(0, 32 * MIB, self.cluster.daemon)
        if code != 0:
            raise SystemExit(f"setup_dummy: {code}: {store.last_error()}")
        self.stores.append((store, True))

    def _writers(self, tasks: int, keys: int) -> dict[str, object]:
        return {"writers": [(f"{self.name}-{number}", keys) for number in range(tasks)]}

    def _set_up_threads(self) -> dict[str, object]:
        """Sets up a store with a disk, one without, and a shared client."""
        self._join(MooncakeDistributedStore(), 48 * MIB, f"{self.cluster.folder}/disk-{self.name}")
        self._join(MooncakeDistributedStore(), 32 * MIB)
        self._attach(MooncakeDistributedStore())
        return self._writers(THREADS, KEYS_OF_THREAD)

    def _actors(self, world: World, tasks: int, keys: int, is_awaited: bool) -> list[Actor]:
        actors = []
        for number in range(tasks):
            store, is_shared = self.stores[number % len(self.stores)]
            name = f"{self.name}-{number}"
            # Tasks with a shared client pin in any steady segment.
            segment = self.cluster.segments[number % len(self.cluster.segments)] if is_shared else store.get_hostname()
            actors.append(
                Actor(
                    world,
                    name,
                    store,
                    keys,
                    seed=f"{self.cluster.seed} {name}",
                    pins_in=segment,
                    buffer=None if is_awaited else Buffer(store, is_shared),
                    is_awaited=is_awaited,
                )
            )
        return actors

    def _run_threads(self, world: World) -> None:
        def run(actor: Actor) -> None:
            try:
                run_on_thread(actor.run(self.cluster.thread_rate))
            except BaseException as error:
                self.report.fail(f"a thread of {self.name} ends with {type(error).__name__}: {error}")
                raise

        actors = self._actors(world, THREADS, KEYS_OF_THREAD, False)
        threads = [threading.Thread(target=run, args=(actor,)) for actor in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _set_up_coroutines(self) -> dict[str, object]:
        """Sets up a store and a shared client."""
        self._join(MooncakeDistributedStoreAsync(), 48 * MIB)
        self._attach(MooncakeDistributedStoreAsync())
        return self._writers(COROUTINES, KEYS_OF_COROUTINE)

    def _run_coroutines(self, world: World) -> None:
        async def run() -> None:
            actors = self._actors(world, COROUTINES, KEYS_OF_COROUTINE, True)
            async with asyncio.TaskGroup() as group:
                for actor in actors:
                    group.create_task(actor.run(self.cluster.coroutine_rate))

        try:
            asyncio.run(run())
        except BaseExceptionGroup as error:
            self.report.fail(f"a coroutine of {self.name} ends with {error.exceptions[0]!r}")
            raise

    def _set_up_engine(self) -> dict[str, object]:
        """Sets up an engine whose memory has slots for readers, and one slot for each writer."""
        engine = self.engine = TransferEngine()
        code = engine.initialize(self.name, self.cluster.metadata, "tcp", "")
        if code != 0:
            raise SystemExit(f"initialize: {code}: {engine.last_error()}")
        size = (ENGINE_SLOTS + VISITORS + 1) * SLOT
        self.memory = (ctypes.c_ubyte * size)()
        at = ctypes.addressof(self.memory)
        for slot in range(ENGINE_SLOTS):
            ctypes.memmove(at + slot * SLOT, value_of(ENGINE_KEY, slot, SLOT), SLOT)
        code = engine.register_memory(at, size)
        if code != 0:
            raise SystemExit(f"register_memory: {code}: {engine.last_error()}")
        return {"engine": self.name, "engine_address": at}

    def _run_visitors(self, world: World) -> None:
        """Starts and closes stores and engines on several threads, beside an engine that stays."""

        def visitor(number: int) -> None:
            name = f"{self.name}-{number}"
            Visitor(world, self.cluster, name, f"{self.cluster.seed} {name}", ENGINE_SLOTS + number).run(None)

        threads = [threading.Thread(target=visitor, args=(number,)) for number in range(VISITORS)]
        for thread in threads:
            thread.start()
        engine = TransferEngine()
        code = engine.initialize(self.name, self.cluster.metadata, "tcp", "")
        if code != 0:
            self.report.fail(f"initialize of {self.name} returns {code}: {engine.last_error()}")
        at, version = engine.allocate_managed_buffer(SLOT), 0
        while not self.stop.wait(0.05):
            version += 1
            exchange(world, self.cluster, engine, at, version % ENGINE_SLOTS, None)
            exchange(world, self.cluster, engine, at, ENGINE_SLOTS + VISITORS, value_of(self.name, version, SLOT))
        for thread in threads:
            thread.join()
        engine._close()

    def _run_visitor(self, world: World) -> None:
        """Uses one store or engine until the process is killed, or for a while."""
        Visitor(world, self.cluster, self.name, f"{self.cluster.seed} {self.name}", None).run(20)


def main() -> None:
    role, name = sys.argv[1:]
    worker = Worker(role, name)
    try:
        worker.run()
    except BaseException as error:
        worker.report.fail(f"{name} ends with {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
