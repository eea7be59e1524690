"""Transfers that arrays, pages and ranges of buffers describe, and their tickets."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from mooncake.engine import ScatterTransferStatus, TransferEngine

SIZE = 1 << 16


@pytest.fixture
def pair():
    engines = []
    for _ in range(2):
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, engine.last_error()
        engines.append(engine)
    yield engines
    for engine in engines:
        engine._close()


@pytest.fixture
def stage(pair):
    mine, theirs = np.arange(SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
    for engine, memory in zip(pair, (mine, theirs)):
        assert engine.register_memory(memory.ctypes.data, SIZE) == 0, engine.last_error()
    return pair[0], f"127.0.0.1:{pair[1].get_rpc_port()}", mine, theirs


def test_arrays(stage):
    engine, to, mine, theirs = stage
    src, dst = mine.ctypes.data, theirs.ctypes.data
    buffers = np.array([src, src + 1000], np.uint64)
    peers = np.array([dst + 5, dst + 3000], np.int64)
    lengths = np.array([100, 200], np.uint64)
    assert engine.batch_transfer_sync_write_arrays(to, buffers, peers, lengths) == 0
    assert (theirs[5:105] == mine[:100]).all() and (theirs[3000:3200] == mine[1000:1200]).all()
    theirs[:] = 9
    assert engine.batch_transfer_sync_read_arrays(to, buffers, peers, lengths, "", "mlx5_0") == 0
    assert (mine[:100] == 9).all() and (mine[1000:1200] == 9).all()
    for submit in (engine.batch_transfer_async_write_arrays, engine.batch_transfer_async_read_arrays):
        batch = submit(to, buffers, peers, lengths)
        assert batch > 0 and engine.get_batch_transfer_status([batch]) == 0
    none = np.array([], np.uint64)
    assert engine.batch_transfer_sync_write_arrays(to, none, none, none) == 0
    assert engine.batch_transfer_sync_write_arrays("127.0.0.1:1", buffers, peers, lengths) == -1
    assert engine.batch_transfer_async_write_arrays("127.0.0.1:1", buffers, peers, lengths) == 0
    for wrong, text in (
        ([src, src], "must be an array"),
        (buffers.astype(np.uint32), r"buffers must hold 8-byte integers \(uint64/int64\)"),
        (buffers.astype(np.float64), "must hold 8-byte integers"),
        (np.array([src, 0, src], np.uint64)[::2], "must be contiguous"),
        (buffers.reshape(2, 1), "must be one-dimensional"),
    ):
        with pytest.raises(TypeError, match=text):
            engine.batch_transfer_sync_write_arrays(to, wrong, peers, lengths)
    with pytest.raises(ValueError, match="must have the same length"):
        engine.batch_transfer_sync_read_arrays(to, buffers, peers, lengths[:1])


def test_pages_are_read(stage):
    """The source pages are those of this process also in reads."""
    engine, to, mine, theirs = stage
    theirs[:] = np.random.default_rng().integers(0, 256, SIZE, dtype=np.uint8)
    pages = np.array([3, 0, 7]), np.array([1, 5, 2])
    src, dst = mine.ctypes.data, theirs.ctypes.data
    fields = np.array([[src, 4096, dst, 8192, 1000], [src + 2000, 4096, dst + 4000, 8192, 500]])
    for batch in (0, 1, 4, 1000):
        mine[:] = 0
        expected = np.zeros_like(mine)
        for begin, stride, there, there_stride, length in fields.tolist():
            for one, other in zip(*pages):
                into, from_ = begin - src + one * stride, there - dst + other * there_stride
                expected[into : into + length] = theirs[from_ : from_ + length]
        assert engine.batch_transfer_sync_read_pages(to, *pages, fields, batch) == 0
        assert (mine == expected).all()
    both = (engine.batch_transfer_sync_read_pages, engine.batch_transfer_sync_write_pages)
    for transfer in both:
        assert transfer(to, [], [], fields) == 0
        assert transfer(to, *pages, np.zeros((0, 5), np.int64)) == 0
        with pytest.raises(ValueError, match="same length"):
            transfer(to, [1], [1, 2], fields)
        with pytest.raises(TypeError, match=r"fields must be a \[rows, 5\] array"):
            transfer(to, [1], [1], fields[:, :4])
        with pytest.raises(TypeError, match="integers"):
            transfer(to, [1.5], [1], fields)
        for column, value in ((4, 0), (1, -1), (3, -1)):
            wrong = fields.copy()
            wrong[0, column] = value
            with pytest.raises(ValueError):
                transfer(to, *pages, wrong)


def test_ranges_are_scattered(stage):
    engine, to, mine, theirs = stage
    src, dst = mine.ctypes.data, theirs.ctypes.data
    bases = ([src, src + 8192], [4096, 4096], [dst + 100, dst + 9000], [4096, 4096])
    ranges = ([[0, 50], [10]], [[1, 200], [0]], [[10, 30], [4086]])
    ticket = engine.submit_scatter_write(to, *bases, *ranges)
    assert ticket.drain(60_000) is ScatterTransferStatus.COMPLETED
    assert ticket.status == 0 and ticket.drained and ticket.drain(0) == 0
    expected = np.zeros_like(theirs)
    expected[101:111], expected[300:330] = mine[:10], mine[50:80]
    expected[9000:13086] = mine[8202:12288]
    assert (theirs == expected).all()
    mine[:] = 0
    assert engine.scatter_transfer_sync_read_with_ticket(to, *bases, *ranges).status.name == "COMPLETED"
    assert (mine[50:80] == expected[300:330]).all() and (mine[8202:12288] == expected[9000:13086]).all()
    assert engine.scatter_transfer_sync_write_with_ticket(to, *bases, *ranges).drained
    nothing = engine.submit_scatter_read(to, [], [], [], [], [], [], [])
    assert nothing.status is ScatterTransferStatus.COMPLETED
    assert engine.submit_scatter_read(to, *bases, [[], [0]], [[], [0]], [[], [0]]).status == 0
    failed = ScatterTransferStatus.FAILED_DRAINED
    for wrong in (
        ([[0, 50], [11]], [[1, 200], [0]], [[10, 30], [4086]]),
        ([[0, 50], [10]], [[1, 200], [11]], [[10, 30], [4086]]),
        ([[0, 50], [-1]], [[1, 200], [0]], [[10, 30], [1]]),
        ([[0], [10]], [[1, 200], [0]], [[10, 30], [4086]]),
        ([[0, 50]], [[1, 200]], [[10, 30]]),
    ):
        refused = engine.submit_scatter_write(to, *bases, *wrong)
        assert refused.status is failed and refused.drained and "cannot transfer" in engine.last_error().message
    nobody = engine.submit_scatter_write("127.0.0.1:1", *bases, *ranges)
    assert nobody.drain(60_000) is failed and repr(nobody) == "<ScatterTransferTicket FAILED_DRAINED>"
    unknown = engine.submit_scatter_write(to, [src], [10], [1], [10], [[0]], [[0]], [[10]])
    assert unknown.drain(60_000) is failed, "the peer has no memory there"
    with pytest.raises(ValueError, match="timeout_ms"):
        ticket.drain(-1)


def test_memory_of_this_process_only(pair):
    """Peers are refused, and transfers of this process use the memory."""
    owner, peer = pair
    closed, open_, other = np.full(4096, 1, np.uint8), np.full(4096, 2, np.uint8), np.zeros(4096, np.uint8)
    assert owner.register_memory(closed.ctypes.data, 4096, "*", False) == 0
    assert owner.register_memory(open_.ctypes.data, 4096, remote_accessible=True) == 0
    assert peer.register_memory(other.ctypes.data, 4096) == 0
    to = f"127.0.0.1:{owner.get_rpc_port()}"
    here = other.ctypes.data
    assert peer.transfer_sync_read(to, here, open_.ctypes.data, 4096) == 0 and (other == 2).all()
    assert peer.transfer_sync_read(to, here, closed.ctypes.data, 4096) == -1
    assert peer.transfer_sync_write(to, here, closed.ctypes.data, 4096) == -1 and (closed == 1).all()
    there = f"127.0.0.1:{peer.get_rpc_port()}"
    assert owner.transfer_sync_write(there, closed.ctypes.data, here, 4096) == 0 and (other == 1).all()
    assert owner.unregister_memory(closed.ctypes.data) == 0
    assert owner.unregister_memory(closed.ctypes.data) == -3
    assert owner.transfer_sync_write(there, closed.ctypes.data, here, 4096) == -1


def test_every_transfer_takes_a_network_device():
    names = [name for name in dir(TransferEngine) if "transfer" in name and ("read" in name or "write" in name)]
    names += ["transfer_sync", "batch_transfer_sync", "batch_transfer_async"]
    for name in names:
        parameters = list(inspect.signature(getattr(TransferEngine, name)).parameters)
        if "ticket" not in name:
            assert parameters[-2:] == ["transport_hint", "nic_hint"], name
