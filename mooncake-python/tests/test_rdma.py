"""RDMA on a machine without devices: a request for it is reported, and nothing falls back silently.
"""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
_DEVICES = pathlib.Path("/sys/class/infiniband")

pytestmark = pytest.mark.skipif(
    _DEVICES.is_dir() and any(_DEVICES.iterdir()), reason="there are RDMA devices here: cargo xtask rdma-test"
)


def why(target) -> str:
    error = target.last_error()
    assert error is not None
    return f"{error} {error.message}"


@pytest.mark.parametrize("device", ["", "mlx5_0", "mlx5_0,mlx5_1"])
def test_an_engine_falls_back_to_tcp_and_reports_it(device):
    engines = []
    for _ in range(2):
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device) == 0, engine.last_error()
        text = why(engine)
        assert "RDMA" in text and ("libibverbs" in text or "mlx5_0" in text or "it does not exist" in text or "none found" in text), text
        engines.append(engine)
    a, b = engines
    there, here = np.zeros(4096, np.uint8), np.full(4096, 7, np.uint8)
    assert b.register_memory(there.ctypes.data, 4096) == 0
    assert a.register_memory(here.ctypes.data, 4096) == 0
    name = f"127.0.0.1:{b.get_rpc_port()}"
    assert a.transfer_sync_write(name, here.ctypes.data, there.ctypes.data, 4096) == 0
    assert (there == 7).all()
    for engine in engines:
        engine._close()


def test_an_engine_that_must_have_rdma_does_not_start(monkeypatch):
    monkeypatch.setenv("MC_FORCE_HCA", "1")
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert "RDMA" in why(engine)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0
    engine._close()


@pytest.mark.parametrize("device", ["", "auto-discovery", "mlx5_0"])
def test_a_store_does_not_join(master, device):
    store = MooncakeDistributedStore()
    result = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "rdma", device, master.address
    )
    assert result == -1
    text = why(store)
    assert "RDMA" in text and ("libibverbs" in text or "mlx5_0" in text or "it does not exist" in text or "none found" in text), text
    # The object can be set up again.
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", master.address) == 0
    assert store.put("rdma-test", os.urandom(64)) == 0
    assert store.remove("rdma-test", True) == 0
    store.close()


def test_transport_variables_apply_to_stores(master, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "rdma", "", master.address) == 0
    store.close()
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setenv("MC_FORCE_HCA", "1")
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", master.address) == -1
    assert "RDMA" in why(store)
