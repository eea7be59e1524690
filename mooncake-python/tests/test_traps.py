"""Settings that are rejected at once, and the errors that a store reports."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import mooncake
from conftest import command
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20


def settings(address: str, **changes: object) -> dict[str, object]:
    return {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 4 * MIB,
        "local_buffer_size": 0,
        "master_server_addr": address,
    } | changes


def refused(code: int, config: dict[str, object], *words: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(config) == code
    error = store.last_error()
    assert error is not None
    for word in words:
        assert word in error.message, error.message


def test_unknown_keys_are_refused_with_the_nearest(master):
    refused(-600, settings(master.address, master_server_adress="x:1"), "'master_server_adress'", "did you mean 'master_server_addr'")
    refused(-600, settings(master.address, zzz=1), "'zzz'", "local_hostname")


def test_names_and_addresses_that_cannot_work_are_refused(own_master):
    master = own_master()
    refused(-600, settings(master.address, local_hostname="nohost.invalid"), "does not resolve", "nohost.invalid")
    refused(-600, settings(master.address, metadata_server="p2phandshake"), "did you mean P2PHANDSHAKE")


def test_a_segment_beyond_the_memory_is_rejected(master, monkeypatch):
    refused(-1, settings(master.address, global_segment_size=1 << 50), "cannot offer memory", "allow_overcommit")
    monkeypatch.setenv("MOONCAKE_ALLOW_OVERCOMMIT", "1")
    with MooncakeDistributedStore() as store:
        assert store.setup(settings(master.address)) == 0


def test_a_store_is_closed_by_with_and_names_its_version(master, key):
    with MooncakeDistributedStore() as store:
        assert store.setup(settings(master.address, ipc_socket_path="")) == 0, "a key of Mooncake C++"
        assert store.put(key, b"value") == 0
    assert store.put(key, b"value") == -600, "closed"
    assert mooncake.__version__.count(".") == 2


def test_errors_have_a_time(master):
    before = time.time()
    with MooncakeDistributedStore() as store:
        assert store.put("k", b"v") == -600
        error = store.last_error()
        assert before - 1 <= error.time <= time.time() + 1 and "time=" in repr(error)
        assert store.setup(settings(master.address)) == 0
        assert store.last_error() is None, "setup clears the last error"


def test_the_command_line_is_installed(master):
    done = subprocess.run(
        [command("mooncake"), "--master", master.address, "put", "key of the tool"], input=b"v", capture_output=True, timeout=60
    )
    # The cluster may also report a lack of memory.
    assert done.returncode == 0 or b"no space" in done.stderr, done.stderr
    assert b"Usage: mooncake" in subprocess.run([sys.executable, "-c", TOOL], capture_output=True, timeout=60, env=os.environ).stdout


TOOL = "import sys; sys.argv = ['mooncake', '--help']; from mooncake._tool import main; sys.exit(main())"
