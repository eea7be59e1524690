"""Reinforcement learning: rollout processes send batches of samples to a trainer, which sends its
weights back.

In the middle the master restarts. Samples that were written before are read after it. The calls and
their arguments are those of frameworks that import `structured_object_store` and poll asynchronous
writes of an engine.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np
import pytest

from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.structured_object_store import FieldSchema, MooncakeBundleTransfer, export_ref, import_ref

MIB = 1 << 20
# Number of batches of each rollout process that are read before the restart, and again after it.
EACH = 8
WEIGHTS = 256 << 10
# Timeout of expected events, in seconds.
PATIENCE = 100
# Seconds after which objects in memory survive the master (docs/ha.md: two or three), on a busy
# machine. No event announces this.
LASTING = 20
# Exceptions of calls while there is no master, or for objects that the new master does not know
# yet.
OUT_OF_REACH = (RuntimeError, ValueError)


def samples(rank: int, step: int) -> dict:
    """Returns a batch that writer and reader can both compute."""
    chance, rows = np.random.default_rng(rank * 10_000 + step), 4 + step % 3
    replies = [{"text": f"{rank}/{step}/{row}", "ids": chance.integers(0, 9, row + 1)} for row in range(rows)]
    return {
        "tokens": chance.integers(0, 1000, (rows, 700), dtype=np.int32),
        "rewards": chance.random(rows, dtype=np.float32),
        "prompts": [f"prompt {row}" for row in range(rows)],
        "replies": [*replies[:1], None, *replies[2:]],
        "step": step,
    }


def same(one, other) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def joined(master: str) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    settings = {
        "local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "48MB",
        "local_buffer_size": 16 * MIB, "protocol": "tcp", "rdma_devices": "", "master_server_addr": master,
    }  # fmt: skip
    assert store.setup(settings) == 0, store.last_error()
    return store


def started(memory: np.ndarray) -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return engine


def roll_out(master: str, rank: int, trainer: Connection) -> None:
    """Writes a batch, sends its handle to the trainer, and waits for the weights of the next step.
    """
    store, weights = joined(master), np.zeros(WEIGHTS, np.uint8)
    engine = started(weights)
    trainer.send((f"127.0.0.1:{engine.get_rpc_port()}", weights.ctypes.data))
    transfer = MooncakeBundleTransfer(store, key_prefix="rollout")
    schemas, config = {"prompts": FieldSchema("utf8_ragged")}, ReplicateConfig()
    while (step := trainer.recv()) is not None:
        assert (weights == step % 256).all(), "weights that were announced"
        ref, end = None, time.monotonic() + PATIENCE
        while ref is None:
            assert time.monotonic() < end, store.last_error()
            try:
                ref = transfer.put(
                    samples(rank, step), type="dict", namespace=f"run-{rank}", chunk_bytes=1000, config=config,
                    field_schemas=schemas,
                )  # fmt: skip
            except OUT_OF_REACH:
                continue
        trainer.send(json.dumps(export_ref(ref)))
    assert engine.unregister_memory(weights.ctypes.data) == 0
    engine._close()
    assert store.close() == 0


class Trainer:
    """Reader of one process's rollouts, in parts and whole, and sender of its weights."""

    def __init__(self, store: MooncakeDistributedStore, rank: int, process: Connection) -> None:
        self.transfer, self.rank, self.process = MooncakeBundleTransfer(store, key_prefix="rollout"), rank, process
        self.weights = np.zeros(WEIGHTS, np.uint8)
        self.engine = started(self.weights)
        self.session, self.target = process.recv()
        self.steps, self.lost = 0, 0

    def step(self) -> str:
        """Sends the weights, and requests the next rollout."""
        self.steps += 1
        self.weights[:] = self.steps % 256
        sources = [self.weights.ctypes.data, self.weights.ctypes.data + WEIGHTS // 2]
        targets, lengths = [self.target, self.target + WEIGHTS // 2], [WEIGHTS // 2] * 2
        batch = self.engine.batch_transfer_async_write(self.session, sources, targets, lengths)
        assert batch > 0 and self.engine.get_batch_transfer_status([batch]) == 0
        assert self.engine.get_batch_transfer_status([batch]) == 0, "a batch that has ended"
        self.process.send(self.steps)
        return self.process.recv()

    def read(self, handle: str, step: int) -> None:
        """Reads a batch. Raises the exceptions of the calls, and fails on wrong bytes."""
        ref, expected = import_ref(json.loads(handle)), samples(self.rank, step)
        rows = [len(expected["prompts"]) - 1, 0]
        some = self.transfer.get(ref, type="dict", fields=["tokens", "replies"], rows=rows)
        assert np.array_equal(some["tokens"], expected["tokens"][rows])
        assert same(list(some["replies"]), [expected["replies"][row] for row in rows])
        MooncakeBundleTransfer.release_result(some)
        whole = self.transfer.get(ref, type="dict")
        assert whole.keys() == expected.keys()
        assert all(same(expected[name], value) for name, value in whole.items()), whole
        self.transfer.release_result(whole)

    def train(self, meanwhile: threading.Event) -> None:
        """Trains batch after batch until `meanwhile` is set, and then `EACH` more."""
        good, end = 0, time.monotonic() + PATIENCE
        while good < EACH:
            over = meanwhile.is_set()
            good += self.turn() and over
            assert time.monotonic() < end, (good, self.lost)

    def turn(self) -> bool:
        """Requests a rollout, reads it, and removes it. Returns whether all of that succeeded.
        The master may be down.
        """
        handle = self.step()
        try:
            self.read(handle, self.steps)
            self.transfer.cleanup_dataproto(json.loads(handle))
        except OUT_OF_REACH:
            self.lost += 1
            return False
        return True

    def end(self) -> None:
        self.process.send(None)
        assert self.engine.unregister_memory(self.weights.ctypes.data) == 0
        self.engine._close()


@pytest.mark.nightly
def test_batches_and_weights_while_the_master_restarts(own_master):
    master = own_master("--default_kv_lease_ttl=5000")
    spawn = multiprocessing.get_context("spawn")
    store, pairs = joined(master.address), [spawn.Pipe() for _ in range(2)]
    # The processes end with the test, whatever its outcome.
    processes = [
        spawn.Process(target=roll_out, args=(master.address, rank, far), daemon=True)
        for rank, (_, far) in enumerate(pairs)
    ]
    for one, (_, far) in zip(processes, pairs):
        one.start()
        far.close()
    trainers = [Trainer(store, rank, near) for rank, (near, _) in enumerate(pairs)]
    # These batches stay in the store until after the restart.
    kept = [(one, one.step(), one.steps) for one in trainers]
    train_while(trainers, lambda: time.sleep(LASTING))
    assert [one.lost for one in trainers] == [0] * len(trainers), "nothing is lost while the master runs"

    def restart() -> None:
        master.kill()
        master.start()

    train_while(trainers, restart)
    for one, handle, step in kept:
        until_read(one, handle, step)
        one.transfer.cleanup_dataproto(json.loads(handle))
    for one in trainers:
        one.end()
    for one in processes:
        one.join(60)
        assert one.exitcode == 0
    assert store.close() == 0


def train_while(trainers: list[Trainer], something: Callable[[], None]) -> None:
    """Runs all trainers while `something` happens, and for some batches after it."""
    over = threading.Event()
    with ThreadPoolExecutor(len(trainers)) as pool:
        trainings = [pool.submit(one.train, over) for one in trainers]
        try:
            something()
        finally:
            over.set()
    for training in trainings:
        training.result()


def until_read(trainer: Trainer, handle: str, step: int) -> None:
    """Waits until a batch from before a restart is readable, once its clients have announced it to
    the new master.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return trainer.read(handle, step)
        except OUT_OF_REACH:
            assert time.monotonic() < end, "lost with the master"
