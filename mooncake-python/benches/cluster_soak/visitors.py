"""Stores and engines that come and go."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

from actor import Actor, World, run_on_thread
from cluster import Cluster
from values import value_of, version_of

MIB = 1 << 20
# Key, number and length of the values in the memory of the steady engine.
ENGINE_KEY = "engine"
ENGINE_SLOTS = 32
SLOT = 64 << 10


@dataclass
class Visitor:
    """Settings of the stores and engines that one thread starts and closes."""

    world: World
    cluster: Cluster
    name: str
    seed: str
    # Slot of the steady engine that only this thread writes, or None.
    slot: int | None

    def run(self, seconds: float | None) -> None:
        """Starts and closes stores and engines until the process stops. With `seconds`, starts one
        and uses it for that time.
        """
        chance, number = random.Random(self.seed), 0
        while not self.world.stop.is_set():
            number += 1
            kind = chance.choice([self._use_store, self._use_shared, self._use_engine])
            kind(number, chance, chance.uniform(0.5, 6) if seconds is None else seconds)
            if seconds is not None:
                return
            self.world.stop.wait(chance.random())

    def _is_set_up(self, what: str, code: int, error: object, start: float) -> bool:
        if code == 0:
            self.world.calls.count(f"{what} set up")
            return True
        self.world.timeline.update()
        if self.world.timeline.is_calm(start, time.monotonic()):
            self.world.report.fail(f"setup of {what} by {self.name} returns {code}: {error}; {self.world.timeline}")
        else:
            self.world.calls.count(f"{what} refused while a server was away")
        self.world.stop.wait(0.5)
        return False

    def _use(self, store: MooncakeDistributedStore, number: int, chance: random.Random, seconds: float) -> None:
        actor = Actor(self.world, f"{self.name}-{number}", store, 8, seed=f"{self.seed} {number}")
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.world.stop.is_set():
            run_on_thread(actor.step())
            self.world.stop.wait(chance.random() * 0.1)
        with self.world.calls.timed(f"close of {self.name}"):
            code = store.close()
        if code != 0:
            self.world.report.fail(f"close of {self.name} returns {code}: {store.last_error()}")

    def _use_store(self, number: int, chance: random.Random, seconds: float) -> None:
        store, start = MooncakeDistributedStore(), time.monotonic()
        with self.world.calls.timed(f"setup of {self.name}"):
            code = self.cluster.set_up(store, chance.choice([0, 8, 16]) * MIB, 8 * MIB)
        if self._is_set_up("a store", code, store.last_error(), start):
            self._use(store, number, chance, seconds)

    def _use_shared(self, number: int, chance: random.Random, seconds: float) -> None:
        store, start = MooncakeDistributedStore(), time.monotonic()
        with self.world.calls.timed(f"setup_dummy of {self.name}"):
            code = store.setup_dummy(0, 4 * MIB, self.cluster.daemon)
        if self._is_set_up("a shared client", code, store.last_error(), start):
            self._use(store, number, chance, seconds)

    def _use_engine(self, number: int, chance: random.Random, seconds: float) -> None:
        engine, start = TransferEngine(), time.monotonic()
        with self.world.calls.timed(f"initialize of {self.name}"):
            code = engine.initialize(f"{self.name}-{number}", self.cluster.metadata, "tcp", "")
        if not self._is_set_up("an engine", code, engine.last_error(), start):
            return
        at = engine.allocate_managed_buffer(SLOT)
        end = time.monotonic() + seconds
        version = 0
        while time.monotonic() < end and not self.world.stop.is_set():
            version += 1
            exchange(self.world, self.cluster, engine, at, chance.randrange(ENGINE_SLOTS), None)
            if self.slot is not None:
                exchange(self.world, self.cluster, engine, at, self.slot, value_of(self.name, version, SLOT))
            self.world.stop.wait(chance.random() * 0.1)
        with self.world.calls.timed(f"close of {self.name}"):
            engine.free_managed_buffer(at, SLOT)
            engine._close()


def exchange(world: World, cluster: Cluster, engine: TransferEngine, at: int, slot: int, written: bytes | None) -> None:
    """Reads a slot of the steady engine, after a write if `written` is given, and checks it."""
    target, start = cluster.engine, time.monotonic()
    there = cluster.engine_address + slot * SLOT
    code = 0
    if written is not None:
        engine.write_bytes_to_buffer(at, written, SLOT)
        with world.calls.timed(f"transfer_sync_write to slot {slot}"):
            code = engine.transfer_sync_write(target, at, there, SLOT)
        engine.write_bytes_to_buffer(at, bytes(SLOT), SLOT)
    if code == 0:
        with world.calls.timed(f"transfer_sync_read of slot {slot}"):
            code = engine.transfer_sync_read(target, at, there, SLOT)
    if code != 0:
        world.timeline.update()
        if world.timeline.is_metadata_calm(start, time.monotonic()):
            world.report.fail(f"transfer of slot {slot} returns {code}: {engine.last_error()}")
        else:
            world.calls.count("transfers refused while the metadata server was away")
        return
    found = engine.read_bytes_from_buffer(at, SLOT)
    world.calls.count("transfers")
    if written is not None and found != written:
        world.report.fail(
            f"wrong bytes in slot {slot} of the engine: {found[:64].hex()} instead of {written[:64].hex()}"
        )
    elif written is None:
        try:
            version = version_of(ENGINE_KEY, found)
        except ValueError as error:
            return world.report.fail(f"wrong bytes in slot {slot} of the engine: {error}")
        if version != slot:
            world.report.fail(f"wrong bytes in slot {slot} of the engine: those of slot {version}")
