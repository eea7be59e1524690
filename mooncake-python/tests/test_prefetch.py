"""Prefetches from disks to memory, and masters inside the process of a store."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from mooncake.store import ExistOptions, MooncakeDistributedStore, ReplicateConfig

MIB = 1 << 20
SIZE = 10 * MIB


def until(holds: Callable[[], bool]) -> None:
    """Waits until a condition holds. Fails after 30 s."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never holds"
        time.sleep(0.02)


def embedded(**changes: Any) -> MooncakeDistributedStore:
    """Returns a store with a master of its own."""
    store = MooncakeDistributedStore()
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "16MB",
        "local_buffer_size": "16MB",
        "master_server_addr": "127.0.0.1:1",
        "enable_embedded_master": "true",
    }
    assert store.setup(settings | changes) == 0, store.last_error()
    return store


def replicas(store: MooncakeDistributedStore, key: str) -> list[bool]:
    """Returns for each replica whether it is in memory."""
    return sorted(replica.is_memory_replica() for replica in store.get_replica_desc(key))


def test_options_of_existence_checks(make_store, key):
    options = ExistOptions()
    assert options.prefetch_to_memory is False
    options.prefetch_to_memory = True
    assert options.prefetch_to_memory is True
    with pytest.raises(AttributeError):
        options.prefetch = True
    store = make_store()
    assert store.put(key, b"value") == 0
    for given in (ExistOptions(), options):
        assert store.is_exist(key, given) == 1 and store.is_exist(key, options=given) == 1
        assert store.batch_is_exist([key, "none"], options=given) == [1, 0]
    for wrong in (None, True, {}):
        with pytest.raises(TypeError):
            store.is_exist(key, wrong)
        with pytest.raises(TypeError):
            store.batch_is_exist([key], options=wrong)


def test_an_existence_check_prefetches(tmp_path):
    settings = {"enable_ssd_offload": True, "ssd_offload_path": tmp_path, "enable_ssd_prefetch": True}
    store = embedded(**settings, ssd_prefetch_cooldown_sec=0, ssd_prefetch_dedup_ttl_sec="0")
    pinned, options = ReplicateConfig(), ExistOptions()
    pinned.with_hard_pin, options.prefetch_to_memory = True, True
    cold = b"c" * SIZE
    # Memory has space for one of the values.
    assert store.put("cold", cold) == 0
    until(lambda: replicas(store, "cold") == [False, True])
    until(lambda: store.put("warm", b"w" * SIZE, pinned) == 0)
    # Space that a disk reads is not free at once.
    until(lambda: replicas(store, "warm") == [False, True])
    assert replicas(store, "cold") == [False]
    assert store.remove("warm", True) == 0
    assert store.is_exist("cold") == 1 and replicas(store, "cold") == [False]
    # The space of the removed value is free when its lease has ended.
    until(lambda: store.is_exist("cold", options) == 1 and replicas(store, "cold") == [False, True])
    assert store.get("cold") == cold
    store.close()


@pytest.mark.parametrize("name", ["ssd_prefetch_cooldown_sec", "ssd_prefetch_dedup_ttl_sec"])
def test_settings_of_prefetches_are_checked(name):
    settings = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"}
    store = MooncakeDistributedStore()
    for wrong in ("-1", "soon", 1.5, 1 << 32):
        assert store.setup({**settings, name: wrong}) == -600, wrong
        assert name in store.last_error().message
    assert store.setup({**settings, "enable_ssd_prefetch": "perhaps"}) == -600
    assert store.setup({**settings, "enable_ssd_prefetch_": True}) == -600
    assert "did you mean 'enable_ssd_prefetch'" in store.last_error().message


def test_a_master_inside_the_process_ends_with_its_store(caplog, monkeypatch):
    one, other = embedded(enable_egm_store_pool=True, egm_numa_nodes="auto"), embedded()
    assert "enable_egm_store_pool has no effect" in caplog.text
    assert one.put("key", b"one") == 0 and other.is_exist("key") == 0
    assert other.put("key", b"other") == 0 and one.get("key") == b"one"
    assert one.close() == 0 and one.is_exist("key") == -1
    assert other.get("key") == b"other" and other.close() == 0
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", "127.0.0.1:1")
    assert store.setup(*arguments, enable_embedded_master=True) == 0
    assert store.put("key", b"value") == 0 and store.health_check() == 0
    # Another setup replaces the master, too.
    assert store.setup(*arguments, enable_embedded_master=True) == 0 and store.is_exist("key") == 0
    assert store.close() == 0
    monkeypatch.setenv("MOONCAKE_ENABLE_EMBEDDED_MASTER", "1")
    assert store.setup(*arguments) == 0 and store.close() == 0
    with pytest.raises(TypeError, match="enable_embedded_master"):
        store.setup(*arguments, enable_embedded_master="false")


def test_a_master_inside_the_process_ends_with_the_interpreter():
    code = """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, enable_embedded_master=True) == 0
assert store.put("key", b"value") == 0
print("stored")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "stored\n" and not done.stderr
