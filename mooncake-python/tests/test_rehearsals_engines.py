"""Serving systems that send a KV cache from prefill to decode: engines in several processes, many
concurrent requests.

One process prefills, others decode. They exchange the positions of blocks over a separate
connection, and check every byte that arrives. In the middle the master restarts (the prefilling
process keeps its results in a store that shares the engine), one decoding process is killed, and
another replaces it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener

import numpy as np
import pytest
from conftest import free_port

from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
LAYERS, BLOCKS, BLOCK = 4, 16, 32 << 10
# Concurrent requests of one decoding process.
AT_ONCE = 3


def contents(request: str, layer: int, block: int) -> np.ndarray:
    """Returns the bytes of one block of one layer for that request."""
    seed = sum(request.encode()) * 7919 + len(request) * 31 + layer * 101 + block
    return np.random.default_rng(seed).integers(0, 256, BLOCK, dtype=np.uint8)


def started() -> TransferEngine:
    """Starts an engine, with as many attempts as programs make."""
    engine = TransferEngine()
    for _ in range(8):
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0:
            return engine
    raise AssertionError(engine.last_error())


class Cache:
    """Paged cache: layers of blocks."""

    def __init__(self, engine: TransferEngine, one_by_one: bool) -> None:
        self.engine, self.one_by_one = engine, one_by_one
        self.layers = [np.zeros(AT_ONCE * 4 * BLOCKS * BLOCK, np.uint8) for _ in range(LAYERS)]
        self.pointers = [layer.ctypes.data for layer in self.layers]
        lengths = [layer.nbytes for layer in self.layers]
        if one_by_one:
            codes = [engine.register_memory(at, length) for at, length in zip(self.pointers, lengths)]
            assert codes == [0] * LAYERS
        else:
            assert engine.batch_register_memory(self.pointers, lengths) == 0

    def block(self, layer: int, number: int) -> np.ndarray:
        return self.layers[layer][number * BLOCK : (number + 1) * BLOCK]

    def end(self) -> None:
        if self.one_by_one:
            assert [self.engine.unregister_memory(at) for at in self.pointers] == [0] * LAYERS
        else:
            assert self.engine.batch_unregister_memory(self.pointers) == 0
        self.engine._close()


class Prefill:
    """Process that computes blocks, stores them, and sends them on request."""

    def __init__(self, flavour: str, master: str) -> None:
        self.flavour, self.engine = flavour, started()
        self.cache = Cache(self.engine, flavour == "pd")
        self.store = MooncakeDistributedStore()
        shared = self.engine.get_engine()
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", master, shared)
        assert code == 0, self.store.last_error()
        # Slots for blocks that are being sent. Each request has its own.
        self.places = [list(range(i * BLOCKS, (i + 1) * BLOCKS)) for i in range(AT_ONCE * 4)]
        self.lock, self.sent, self.failed, self.kept = threading.Lock(), 0, 0, 0

    def serve(self, connection: Connection, pool: ThreadPoolExecutor) -> None:
        """Serves one decoding process until it disconnects."""
        turn = threading.Lock()

        def answer(request, session, blocks, pointers) -> None:
            code = self.send(request, session, blocks, pointers)
            with turn, contextlib.suppress(OSError):
                connection.send((request, code))

        with contextlib.suppress(EOFError, OSError):
            while True:
                pool.submit(answer, *connection.recv())

    def send(self, request: str, session: str, blocks: list[int], pointers: list[int]) -> int:
        with self.lock:
            place = self.places.pop()
        try:
            for layer in range(LAYERS):
                for at, block in zip(place, blocks):
                    self.cache.block(layer, at)[:] = contents(request, layer, block)
            sources = [at + place[0] * BLOCK for at in self.cache.pointers]
            keys = [f"{request}-{layer}" for layer in range(LAYERS)]
            length = len(blocks) * BLOCK
            kept = self.store.batch_put_from(keys, sources, [length] * LAYERS).count(0)
            code = self.transfer(session, place, blocks, pointers)
            with self.lock:
                self.kept += kept
                self.sent += code == 0
                self.failed += code != 0
            return code
        finally:
            with self.lock:
                self.places.append(place)

    def transfer(self, session: str, place: list[int], blocks: list[int], pointers: list[int]) -> int:
        """Transfers all blocks of all layers, with the calls of the flavour."""
        pairs = [(layer, at, block) for layer in range(LAYERS) for at, block in zip(place, blocks)]
        sources = [self.cache.pointers[layer] + at * BLOCK for layer, at, _ in pairs]
        targets = [pointers[layer] + block * BLOCK for layer, _, block in pairs]
        if self.flavour == "p2p":
            return self.engine.batch_transfer_sync_write(session, sources, targets, [BLOCK] * len(pairs))
        if self.engine.send_probe(session) != 0:
            return -1
        # Layer by layer, the first one block by block.
        for source, target in zip(sources[: len(blocks)], targets[: len(blocks)]):
            if self.engine.transfer_sync_write(session, source, target, BLOCK) < 0:
                return -1
        rest = len(pairs) - len(blocks)
        return self.engine.batch_transfer_sync_write(session, sources[-rest:], targets[-rest:], [BLOCK] * rest)


def prefill(flavour: str, master: str, port: int, stop, outcome) -> None:
    one = Prefill(flavour, master)
    with Listener(("127.0.0.1", port)) as listener, ThreadPoolExecutor(AT_ONCE * 4) as pool:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=one.serve, args=(listener.accept(), pool), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        outcome.put("listens")
        stop.wait(120)
    assert one.store.close() == 0
    one.cache.end()
    outcome.put((one.sent, one.failed, one.kept))


def decode(flavour: str, name: str, port: int, seconds: float, outcome) -> None:
    """Requests blocks, several requests at a time, and checks the bytes that arrive."""
    engine = started()
    cache = Cache(engine, flavour == "pd")
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    connection = Client(("127.0.0.1", port))
    chance, good, wrong, refused, number = np.random.default_rng(len(name)), 0, 0, 0, 0
    free = [list(range(i * BLOCKS, (i + 1) * BLOCKS)) for i in range(AT_ONCE)]
    wanted: dict[str, tuple[list[int], list[int]]] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end or wanted:
        while free and time.monotonic() < end:
            mine = free.pop()
            blocks = sorted(chance.choice(mine, size=int(chance.integers(1, BLOCKS)), replace=False).tolist())
            number += 1
            wanted[f"{name}-{number}"] = (mine, blocks)
            connection.send((f"{name}-{number}", session, blocks, cache.pointers))
        request, code = connection.recv()
        mine, blocks = wanted.pop(request)
        free.append(mine)
        refused += code != 0
        if code == 0:
            places = [(layer, block) for layer in range(LAYERS) for block in blocks]
            right = [np.array_equal(cache.block(*place), contents(request, *place)) for place in places]
            good, wrong = good + all(right), wrong + (not all(right))
    connection.close()
    cache.end()
    outcome.put((name, good, wrong, refused))


@pytest.mark.nightly
@pytest.mark.parametrize("flavour", ["p2p", "pd"])
def test_blocks_arrive_while_others_come_and_go(own_master, flavour):
    master, port = own_master("--default_kv_lease_ttl=1000", "--client_ttl=3"), free_port()
    spawn = multiprocessing.get_context("spawn")
    stop, outcome, told = spawn.Event(), spawn.Queue(), spawn.Queue()
    source = spawn.Process(target=prefill, args=(flavour, master.address, port, stop, told))
    source.start()
    assert told.get(timeout=60) == "listens"

    def start(name: str, seconds: float, to) -> multiprocessing.process.BaseProcess:
        one = spawn.Process(target=decode, args=(flavour, name, port, seconds, to))
        one.start()
        return one

    # A killed process may hold a lock of its queue, so the queue is not shared.
    victim = start("victim", 60, spawn.Queue())
    stays = start("stays", 9, outcome)
    time.sleep(4)
    victim.kill()
    master.kill()
    master.start()
    comes = start("comes", 4, outcome)
    results = {name: counts for name, *counts in (outcome.get(timeout=120) for _ in range(2))}
    stop.set()
    sent, failed, kept = told.get(timeout=60)
    for one in (stays, comes, source):
        one.join(60)
        assert one.exitcode == 0
    victim.join(60)
    assert results.keys() == {"stays", "comes"}
    assert all(good > 0 and wrong == 0 and refused == 0 for good, wrong, refused in results.values()), results
    assert sent >= sum(good for good, *_ in results.values()) and kept > 0, (sent, failed, kept)
