"""P2P Store: nodes that read an object from each other. The catalogue is in a real etcd (Debian:
`etcd-server`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import free_port

import mooncake
from mooncake.p2p import ObjectInfo, P2PStore

SHARD = 1 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("etcd is not installed")
    folder, port = tmp_path_factory.mktemp("etcd"), free_port()
    url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    words = [program, "--data-dir", str(folder / "data"), "--unsafe-no-fsync"]
    words += ["--listen-client-urls", url, "--advertise-client-urls", url]
    words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    words += ["--initial-cluster", f"default={peer}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        else:
            pytest.fail((folder / "log").read_text())
        yield f"etcd://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture
def node(service: str) -> Iterator[Callable[..., P2PStore]]:
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(P2PStore("127.0.0.1", service, **settings))


def bytes_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def entries_of(service: str, segment: str) -> list[str]:
    """Returns the keys of the service that name a segment."""

    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    everything = {"key": encoded("mooncake"), "range_end": encoded("mooncakf"), "keys_only": True}
    url = service.replace("etcd:", "http:") + "/v3/kv/range"
    request = urllib.request.Request(url, json.dumps(everything).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        found = json.load(response).get("kvs", [])
    keys = [base64.b64decode(one["key"]).decode() for one in found]
    return [key for key in keys if segment in key]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_reader_serves_an_object_after_its_seeder_has_left(node: Callable[..., P2PStore]) -> None:
    seeder, first, second = node(), node(), node()
    assert len({seeder.segment_name, first.segment_name, second.segment_name}) == 3
    parts = [bytes_of(1, 3 * SHARD + 5), bytes_of(2, 7)]
    seeder.register("model/a", parts, SHARD)
    seen: list[tuple[int, int]] = []
    memory = [bytearray(len(part)) for part in parts]
    first.get_replica("model/a", memory, on_progress=lambda *progress: seen.append(progress))
    assert [bytes(one) for one in memory] == parts
    total = sum(map(len, parts))
    wait_until(lambda: len(seen) == 6)
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    seeder.unregister("model/a")
    again = [bytearray(len(part)) for part in parts]
    second.get_replica("model/a", again)
    assert [bytes(one) for one in again] == parts
    first.delete_replica("model/a")
    second.delete_replica("model/a")
    assert second.find("model/a") is None


def test_objects_are_listed_with_their_sizes(node: Callable[..., P2PStore]) -> None:
    seeder = node()
    seeder.register("list/b", [bytes(10), bytearray(20)], SHARD)
    seeder.register("list/a", [memoryview(bytes(30))], 2 * SHARD)
    found = seeder.list("list/")
    assert [(one.name, one.size, one.max_shard_size, one.sizes) for one in found] == [
        ("list/a", 30, 2 * SHARD, [30]),
        ("list/b", 30, SHARD, [10, 20]),
    ]
    assert isinstance(found[0], ObjectInfo) and "name=\"list/a\"" in repr(found[0])
    assert seeder.find("list/c") is None and seeder.list("list/c") == []


def test_arrays_and_tensors_are_read_in_place(node: Callable[..., P2PStore]) -> None:
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    seeder, reader = node(), node()
    array = np.arange(300, dtype=np.float32).reshape(3, 100)
    tensor = torch.arange(500, dtype=torch.float32).to(torch.bfloat16)
    small = np.arange(64).astype(ml_dtypes.float8_e4m3fn)
    seeder.register("typed", [array, tensor, small, array.T], SHARD)
    to = [np.zeros_like(array), torch.zeros_like(tensor), np.zeros_like(small), np.zeros((100, 3), np.float32)]
    reader.get_replica("typed", to)
    assert np.array_equal(to[0], array) and torch.equal(to[1], tensor)
    assert bytes(to[2].tobytes()) == small.tobytes() and np.array_equal(to[3], array.T)


@pytest.mark.parametrize(
    "memory",
    [bytes(64), memoryview(bytearray(128))[::2], np.zeros((8, 16), np.uint8)[:, :8], np.broadcast_to(np.uint8(0), 64)],
    ids=["bytes", "strided", "columns", "broadcast"],
)
def test_memory_that_cannot_be_written_in_place_is_refused(node: Callable[..., P2PStore], memory: Any) -> None:
    reader = node()
    with pytest.raises(TypeError, match="read-only|not contiguous"):
        reader.get_replica("absent", [memory])


def test_tensors_that_cannot_be_written_in_place_are_refused(node: Callable[..., P2PStore]) -> None:
    torch = pytest.importorskip("torch")
    reader = node()
    for tensor in [torch.zeros(8, 8).T, torch.zeros(4, dtype=torch.complex64).conj(), torch.zeros(2, device="meta")]:
        with pytest.raises(TypeError, match="cannot read into tensor"):
            reader.get_replica("absent", [tensor])


def test_errors_are_exceptions_with_their_codes(node: Callable[..., P2PStore]) -> None:
    seeder, reader = node(), node()
    seeder.register("errors", [bytes(100)], SHARD)
    for code, kind, call in [
        (-704, mooncake.NotFoundError, lambda: reader.get_replica("absent", [bytearray(1)])),
        (-705, mooncake.BusyError, lambda: reader.register("errors", [bytes(100)], SHARD)),
        (-710, mooncake.NotFoundError, lambda: reader.unregister("errors")),
        (-710, mooncake.NotFoundError, lambda: reader.delete_replica("errors")),
        (-600, mooncake.InvalidArgumentError, lambda: reader.get_replica("errors", [bytearray(99)])),
        (-600, mooncake.InvalidArgumentError, lambda: reader.get_replica("errors", [])),
        (-600, mooncake.InvalidArgumentError, lambda: seeder.register("empty", [b""], SHARD)),
        (-600, mooncake.InvalidArgumentError, lambda: seeder.register("odd", [bytes(9)], 3)),
    ]:
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.code == code
    reader.close()
    with pytest.raises(mooncake.MooncakeError) as raised:
        reader.register("late", [bytes(9)], SHARD)
    assert raised.value.code == -1010


def test_an_absent_service_and_wrong_settings_are_named(service: str) -> None:
    with pytest.raises(mooncake.InvalidArgumentError, match="metadata service"):
        P2PStore("127.0.0.1", "P2PHANDSHAKE")
    with pytest.raises(mooncake.MooncakeError, match=str(port := free_port())):
        P2PStore("127.0.0.1", f"etcd://127.0.0.1:{port}")
    with pytest.raises(mooncake.InvalidArgumentError, match="setting=streams"):
        P2PStore("127.0.0.1", service, streams=0)
    with pytest.raises(ValueError, match="lease=-1"):
        P2PStore("127.0.0.1", service, lease=-1)


def test_coroutines_do_the_same(node: Callable[..., P2PStore]) -> None:
    seeder, reader = node(), node()
    value = bytes_of(3, 2 * SHARD)

    async def run() -> None:
        await seeder.async_register("async", [value], SHARD)
        assert [one.name for one in await reader.async_list("async")] == ["async"]
        memory = bytearray(len(value))
        seen: list[int] = []
        await reader.async_get_replica("async", [memory], on_progress=lambda arrived, total: seen.append(arrived))
        assert memory == value
        await seeder.async_unregister("async")
        assert await seeder.async_find("async") is not None
        await reader.async_delete_replica("async")
        assert await seeder.async_find("async") is None
        with pytest.raises(mooncake.NotFoundError):
            await reader.async_get_replica("async", [memory])
        await reader.async_close()

    asyncio.run(run())


def test_a_cancelled_read_frees_its_memory_and_its_entries(service: str, node: Callable[..., P2PStore]) -> None:
    program = (
        "import sys; from mooncake.p2p import P2PStore\n"
        "store = P2PStore('127.0.0.1', sys.argv[1]); store.register('frozen', [bytes(8 << 20)], 1 << 20)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, service]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as seeder:
        assert seeder.stdout is not None and seeder.stdin is not None
        assert seeder.stdout.readline() == b"ready\n"
        reader = node()
        seeder.send_signal(signal.SIGSTOP)
        memory = np.zeros(8 << 20, np.uint8)

        async def run() -> None:
            begun = asyncio.Event()
            loop = asyncio.get_running_loop()
            read = asyncio.ensure_future(
                reader.async_get_replica(
                    "frozen", [memory], on_progress=lambda *_: loop.call_soon_threadsafe(begun.set)
                )
            )
            await begun.wait()
            read.cancel()
            with pytest.raises(asyncio.CancelledError):
                await read

        asyncio.run(run())
        seeder.send_signal(signal.SIGCONT)

        def is_released() -> bool:
            try:
                reader.get_replica("frozen", [memory])
            except mooncake.MooncakeError:
                return False
            return True

        wait_until(is_released)
        assert not memory.any()
        reader.delete_replica("frozen")
        seeder.stdin.close()
        assert seeder.wait(60) == 0
    # The end of its process ended the copies of the seeder.
    assert reader.find("frozen") is None


def test_a_dropped_store_leaves_the_catalogue(node: Callable[..., P2PStore], service: str) -> None:
    other = node()
    store = P2PStore("127.0.0.1", service)
    store.register("dropped", [bytes(64)], SHARD)
    segment = store.segment_name
    assert other.find("dropped") is not None and entries_of(service, segment)
    del store
    gc.collect()
    wait_until(lambda: other.find("dropped") is None and not entries_of(service, segment))


def test_a_closed_store_leaves_no_entry(service: str) -> None:
    store = P2PStore("127.0.0.1", service)
    store.register("closed", [bytes(64)], SHARD)
    segment = store.segment_name
    assert entries_of(service, segment)
    store.close()
    assert entries_of(service, segment) == []


def test_the_end_of_a_program_leaves_no_entry(service: str) -> None:
    program = (
        "import sys; from mooncake.p2p import P2PStore\n"
        "store = P2PStore('127.0.0.1', sys.argv[1]); store.register('ended', [bytes(64)])\n"
        "print(store.segment_name)"
    )
    done = subprocess.run([sys.executable, "-c", program, service], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("127.0.0.1:") and entries_of(service, done.stdout.strip()) == []


def test_waiting_releases_the_interpreter(node: Callable[..., P2PStore]) -> None:
    seeder = node()
    stores = [node() for _ in range(4)]
    value = bytes_of(4, 4 * SHARD)
    seeder.register("threads", [value], SHARD)
    memory = [bytearray(len(value)) for _ in stores]
    threads = [
        threading.Thread(target=store.get_replica, args=("threads", [to])) for store, to in zip(stores, memory, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(to == value for to in memory)


def test_the_tool_and_the_package_share_a_catalogue(
    node: Callable[..., P2PStore], service: str, tmp_path: Path
) -> None:
    seeder = node()
    value = bytes_of(5, 3 * SHARD)
    seeder.register("file", [value], SHARD)
    hostname = "127.0.0.1:65000"
    words = [sys.executable, "-m", "mooncake", "--hostname", hostname, "--metadata", service]
    subprocess.run([*words, "p2p", "get", "file", str(tmp_path / "file")], check=True, timeout=120)
    assert (tmp_path / "file").read_bytes() == value
    assert entries_of(service, hostname) == [], "the program leaves no entry"
