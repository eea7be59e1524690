"""REST server, metadata server, asyncio, and settings."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from conftest import free_port
from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.mooncake_config import MooncakeConfig

pytest.importorskip("aiohttp", reason="the servers need aiohttp")


def ask(method, url, body=None):
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(url, data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture
def rest(master, tmp_path):
    port = free_port()
    settings = [
        "local_hostname=127.0.0.1",
        "metadata_server=P2PHANDSHAKE",
        f"master_server_address={master.address}",
        "global_segment_size=64MB",
        "local_buffer_size=16MB",
    ]
    script = str(Path(sys.executable).parent / "mc_store_rest_server")
    flags = [part for setting in settings for part in ("-D", setting)]
    more = ["--host", "127.0.0.1", "--folder", str(tmp_path / "opened")]
    process = subprocess.Popen([script, "--port", str(port), *more, *flags])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_rest(rest, store, key):
    assert ask("PUT", f"{rest}/api/put", {"key": key, "value": "text äöü"}) == (200, b'{"status": "success"}')
    assert ask("GET", f"{rest}/api/get/{key}") == (200, "text äöü".encode())
    assert ask("GET", f"{rest}/api/exist/{key}") == (200, b'{"exists": true}')
    assert ask("GET", f"{rest}/api/exist/missing") == (200, b'{"exists": false}')
    assert ask("GET", f"{rest}/api/get/missing")[0] == 404
    assert ask("PUT", f"{rest}/api/put", {"key": key})[0] == 400
    # As in Mooncake C++, a malformed body is an error of the server.
    assert ask("PUT", f"{rest}/api/put", b"no json")[0] == 500
    assert ask("PUT", f"{rest}/api/put", b"[1]")[0] == 500
    assert ask("PUT", f"{rest}/api/put", {"key": key + "e", "value": ""})[0] == 500
    assert ask("PUT", f"{rest}/api/put", b"[" * 100_000)[0] == 500
    for half in ({"key": "\ud800", "value": "x"}, {"key": key, "value": "\ud800"}):
        assert ask("PUT", f"{rest}/api/put", half)[0] == 500
    big = os.urandom(5 << 20)
    assert store.put(key + "/big", big) == 0
    assert ask("GET", f"{rest}/api/get/{key}/big") == (200, big)
    failed = (500, b'{"error": "Remove operation failed"}')
    # On a busy machine, the lease of half a second may expire before the next request.
    for _ in range(50):
        assert ask("PUT", f"{rest}/api/put", {"key": key, "value": "x"})[0] == 200
        assert ask("GET", f"{rest}/api/get/{key}")[0] == 200
        if (answer := ask("DELETE", f"{rest}/api/remove/{key}")) == failed:
            break
    assert answer == failed, "it was just read"
    assert ask("DELETE", f"{rest}/api/remove/missing") == failed
    deadline = time.monotonic() + 30
    while (answer := ask("DELETE", f"{rest}/api/remove/{key}")) == failed and time.monotonic() < deadline:
        time.sleep(0.05)
    assert answer == (200, b'{"status": "success"}')
    assert ask("GET", f"{rest}/health") == (200, b'{"status": "healthy", "code": 0}')
    document = json.loads(ask("GET", f"{rest}/openapi.json")[1])
    assert "/api/get/{key}" in document["paths"] and document["openapi"].startswith("3.")


OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store, config = MooncakeDistributedStore(), ReplicateConfig()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 4 << 20, "tcp", "", sys.argv[1]) == 0
config.preferred_segment = store.get_hostname()
assert store.put(sys.argv[2], b"value" * 1000, config) == 0
print("stored", flush=True)
sys.stdin.read()
"""


def test_rest_names_a_value_that_it_cannot_read(rest, master, key):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWNER, master.address, key], **pipes) as owner:
        assert owner.stdout.readline() == b"stored\n"
        assert ask("GET", f"{rest}/api/get/{key}") == (200, b"value" * 1000)
        owner.kill()
    for _ in range(3):
        status, body = ask("GET", f"{rest}/api/get/{key}")
        assert status in (503, 404), body
        assert status == 404 or json.loads(body)["cause"] != "None"


def test_rest_segments(rest, tmp_path):
    status, body = ask("POST", f"{rest}/api/mount", {"size": 1 << 20})
    answer = json.loads(body)
    assert status == 200 and answer["allocated_size"] == 16 << 20
    assert ask("POST", f"{rest}/api/unmount", {"segment_ids": answer["segment_ids"]})[0] == 200
    status, body = ask("POST", f"{rest}/api/unmount", {"segment_ids": "1-2"})
    assert status == 500 and "ret=" in json.loads(body)["error"]
    status, body = ask("POST", f"{rest}/api/unmount_shm", {"segment_ids": "1-2"})
    assert status == 500 and json.loads(body)["failed_segment_ids"] == ["1-2"]
    for wrong in ({"size": 0}, {"size": "1"}, {"size": True}, {"size": 1 << 64}, {}):
        assert ask("POST", f"{rest}/api/mount", wrong)[0] == 400
    for name in ("../x", "a/b", "..", "", "/"):
        assert ask("POST", f"{rest}/api/mount_shm", {"name": name, "size": 4096})[0] == 400
    shared = Path("/dev/shm") / f"mooncake-test-{os.getpid()}"
    shared.write_bytes(bytes(1 << 20))
    try:
        status, body = ask("POST", f"{rest}/api/mount_shm", {"name": "/" + shared.name, "size": 1 << 20})
        assert status == 200
        assert ask("POST", f"{rest}/api/unmount_shm", {"segment_ids": json.loads(body)["segment_ids"]})[0] == 200
        decode = {"mode": "decode", "path": str(shared), "size": 1 << 19}
        first = json.loads(ask("POST", f"{rest}/api/reconfigure", decode)[1])
        assert first["mode"] == "decode"
        status, body = ask("POST", f"{rest}/api/reconfigure", {**decode, "path": "/dev/shm/nonexistent"})
        assert status == 500 and json.loads(body)["mode"] == "decode"
        assert ask("POST", f"{rest}/api/reconfigure", {**decode, "offset": 1 << 19})[0] == 200
        assert json.loads(ask("POST", f"{rest}/api/reconfigure", {"mode": "prefill"})[1]) == {
            "status": "success",
            "mode": "prefill",
        }
        assert ask("POST", f"{rest}/api/reconfigure", {"mode": "x"})[0] == 400
    finally:
        shared.unlink()
    assert ask("POST", f"{rest}/api/unmount_local_disk", {"grace_period_seconds": 4000})[0] == 400
    # The store has no disk segment. As in Mooncake C++, this is not an error.
    assert ask("POST", f"{rest}/api/unmount_local_disk", {})[0] == 200


def test_rest_mounts_files_of_its_folders_only(rest, tmp_path):
    opened, closed = tmp_path / "opened", tmp_path / "closed"
    for folder in (opened, closed):
        folder.mkdir()
        (folder / "file").write_bytes(bytes(1 << 20))
    shared = Path("/dev/shm") / f"mooncake-test-link-{os.getpid()}"
    shared.symlink_to(closed / "file")
    (opened / "inside").symlink_to(opened / "file")
    (opened / "outside").symlink_to(closed / "file")
    os.mkfifo(opened / "pipe")

    def offer(path):
        body = {"mode": "decode", "path": str(path), "size": 1 << 20}
        return ask("POST", f"{rest}/api/reconfigure", body)[0]

    try:
        for path in ("/etc/hostname", closed / "file", opened / ".." / "closed" / "file", opened / "outside", shared, opened):
            assert offer(path) == 403, path
        for path in ("x\0y", "\ud800", "/nonexistent/file"):
            assert offer(path) == 403
        for path in (opened / "pipe", opened / "missing"):
            assert offer(path) == 500
        assert ask("POST", f"{rest}/api/mount_shm", {"name": shared.name, "size": 1 << 20})[0] == 403
        assert offer(opened / "file") == 200 and offer(opened / "file") == 200
        assert offer(opened / "inside") == 200, "the same file by another name replaces the first"
        assert ask("POST", f"{rest}/api/reconfigure", {"mode": "prefill"})[0] == 200
    finally:
        shared.unlink()


def test_rest_changes_its_mode_whatever_was_unmounted(rest):
    shared = Path("/dev/shm") / f"mooncake-test-{os.getpid()}-mode"
    shared.write_bytes(bytes(2 << 20))

    def mode(**body):
        status, answer = ask("POST", f"{rest}/api/reconfigure", body)
        return status, json.loads(answer)

    decode = {"mode": "DECODE", "path": str(shared), "size": 1 << 20}
    try:
        status, first = mode(**decode)
        assert status == 200 and mode(**decode) == (200, first)
        for route in ("unmount_shm", "unmount"):
            assert ask("POST", f"{rest}/api/{route}", {"segment_ids": first["segment_ids"]})[0] == 200
            status, again = mode(**decode)
            assert status == 200 and again["segment_ids"] != first["segment_ids"], "mounted anew"
            first = again
        status, larger = mode(**{**decode, "size": 2 << 20})
        assert status == 200 and larger["segment_ids"] != first["segment_ids"]
        status, refused = mode(**{**decode, "size": 4 << 20})
        assert status == 500 and refused["mode"] == "decode", "longer than the file; the previous segment stays"
        assert mode(**{**decode, "size": 2 << 20}) == (200, larger)
        assert mode(mode="prefill") == (200, {"status": "success", "mode": "prefill"})
    finally:
        shared.unlink()


def test_rest_keeps_its_segment_when_the_new_one_fails(rest, tmp_path):
    shared = [Path("/dev/shm") / f"mooncake-test-{os.getpid()}-{i}" for i in range(2)]
    for file in shared:
        file.write_bytes(bytes(2 << 20))
    link = tmp_path / "opened" / "link"
    link.parent.mkdir()

    def mode(path, size):
        status, answer = ask("POST", f"{rest}/api/reconfigure", {"mode": "decode", "path": str(path), "size": size})
        return status, json.loads(answer)

    def mount(**body):
        return ask("POST", f"{rest}/api/mount_shm", {"name": shared[0].name, **body})[0]

    try:
        link.symlink_to(shared[0])
        status, first = mode(link, 1 << 20)
        assert status == 200
        assert mount(size=4096) == 500, "these bytes are already offered"
        status, refused = mode("/dev/shm/nonexistent", 1 << 20)
        assert status == 500 and mode(link, 1 << 20) == (200, first), "a failure of another call is not a reason to stop"
        assert refused["segment_ids"] == first["segment_ids"]
        assert mount(size=4096, offset=1 << 20) == 200
        status, refused = mode(link, 2 << 20)
        assert status == 500 and refused["mode"] == "decode" and refused["segment_ids"] != first["segment_ids"]
        assert mode(link, 1 << 20) == (200, {**first, "segment_ids": refused["segment_ids"]}), "offered again"
        link.unlink()
        link.symlink_to("/etc/hostname")
        status, refused = mode(shared[0], 2 << 20)
        assert (status, refused["mode"], refused["segment_ids"]) == (500, "prefill", [])
        assert "-102" in refused["cause"] and f"previous file again: '{link}'" in refused["cause"]
        assert mode(shared[1], 1 << 20)[0] == 200
    finally:
        for file in shared:
            file.unlink()


def test_rest_clients_that_disconnect(make_store, key, caplog):
    from aiohttp import web

    from mooncake.mooncake_store_service import MooncakeStoreService

    store = make_store()
    big = os.urandom(5 << 20)
    assert store.put(key, big) == 0
    service = MooncakeStoreService(config=MooncakeConfig("h", "P2PHANDSHAKE", 0, 0, "tcp", "", "h:1"), store=store)
    gone = threading.Event()

    class Reader(asyncio.Protocol):
        def __init__(self, method):
            self.method, self.got, self.end = method, b"", asyncio.get_running_loop().create_future()

        def connection_made(self, transport):
            self.transport = transport
            transport.write(f"{self.method} /api/get/{key} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())

        def data_received(self, data):
            self.got += data
            if self.method == "GET":
                self.transport.abort()
                gone.set()

        def connection_lost(self, error):
            self.end.set_result(self.got)

    async def work():
        runner = web.AppRunner(service.app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        for method in ("HEAD", "GET"):
            _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(method), *runner.addresses[0])
            head, _, body = (await reader.end).partition(b"\r\n\r\n")
            assert f"Content-Length: {len(big)}".encode() in head
            assert method == "GET" or body == b""
        # The cleanup completes when both requests have been answered.
        await runner.cleanup()

    asyncio.run(work())
    assert gone.is_set() and not [record for record in caplog.records if record.levelname == "ERROR"]


def test_metadata_server(make_store, key):
    from mooncake.http_metadata_server import KVBootstrapServer, KVPoll

    server = KVBootstrapServer(0, "127.0.0.1")
    server.run()
    try:
        url = f"http://127.0.0.1:{server.port}/metadata"
        assert server.poll() == KVPoll.Success
        assert ask("GET", f"{url}?key=a") == (404, b"metadata not found")
        assert ask("PUT", f"{url}?key=a", b"1")[0] == 200 and ask("PUT", f"{url}?key=a", b"2")[0] == 200
        assert ask("GET", f"{url}?key=a") == (200, b"2")
        assert ask("PUT", f"{url}?key=x/rpc_meta/y", b"1")[0] == 200
        assert ask("PUT", f"{url}?key=x/rpc_meta/y", b"1") == (200, b"metadata unchanged")
        assert ask("PUT", f"{url}?key=x/rpc_meta/y", b"2")[0] == 400
        assert ask("DELETE", f"{url}?key=a")[0] == 200 and ask("DELETE", f"{url}?key=a")[0] == 404
        assert ask("PUT", f"{url}?key=%20b", b"3")[0] == 200 and ask("GET", f"{url}?key=b%20") == (200, b"3")
        assert ask("GET", f"{url}?key=%20")[0] == 400
        assert ask("GET", url)[0] == 400 and ask("POST", f"{url}?key=a")[0] == 405
        a, b = make_store(metadata_server=url), make_store(metadata_server=url)
        assert a.put(key, b"by directory") == 0 and b.get(key) == b"by directory"
        a.close()
        b.close()
    finally:
        server.close()
    assert server.poll() == KVPoll.Failed


def test_asyncio(master, key):
    async def work():
        store = MooncakeDistributedStoreAsync()
        assert await store.async_setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master.address) == 0
        put = await asyncio.gather(*(store.async_put(f"{key}-{i}", bytes([i]) * 1000) for i in range(50)))
        assert put == [0] * 50
        got = await asyncio.gather(*(store.async_get(f"{key}-{i}") for i in range(50)))
        assert got == [bytes([i]) * 1000 for i in range(50)]
        assert await store.async_batch_is_exist([f"{key}-0", "missing"]) == [1, 0]
        assert await store.async_prefix_hits([f"{key}-0", f"{key}-1", "missing", f"{key}-2"]) == 2
        assert await store.async_upsert(key, b"x") == 0
        assert await store.async_get_batch([key, "missing"]) == [b"x", b""]
        with pytest.raises(AttributeError):
            store.async_no_such_call
        with pytest.raises(AttributeError):
            store.no_such_call
        with pytest.raises(TypeError):
            await store.async_put(key, 7)
        memory = bytearray(b"0123456789")
        view = (ctypes.c_char * 10).from_buffer(memory)
        at = ctypes.addressof(view)
        assert store.register_buffer(at, 10) == 0
        assert await store.async_put_from(key + "f", at, 10) == 0
        assert await store.async_batch_put_from([key + "g", key + "h"], [at, 8], [5, 5]) == [0, -600]
        assert await store.async_get_into(key + "g", at + 5, 5) == 5 and bytes(memory) == b"0123401234"
        assert await store.async_batch_get_into([key + "g", "missing"], [at, at], [5, 5]) == [5, -704]
        assert await store.async_put_from(key + "0", at, 0) == -600
        assert await store.async_get("missing") == b"" and await store.async_is_exist("missing") == 0
        assert await store.async_put(key, b"") == -600
        assert await store.async_remove("missing") == -704
        assert store.unregister_buffer(at) == 0
        assert await store.async_close() == 0
        assert await store.async_put(key, b"x") == -600 and await store.async_get(key) == b""

    asyncio.run(work())


def test_awaited_calls_can_be_cancelled(own_master, make_store):
    mine = own_master()

    async def work():
        store = MooncakeDistributedStoreAsync()
        assert await store.async_setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", mine.address) == 0
        mine.freeze()
        try:
            # A thousand calls wait without a thread for any of them.
            threads = threading.active_count()
            waiting = [asyncio.ensure_future(store.async_get(f"k{i}")) for i in range(1000)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store.async_put("cancelled", b"x" * 1000), 0.2)
            assert threading.active_count() <= threads + 1
            for one in waiting:
                one.cancel()
            assert all(
                isinstance(one, asyncio.CancelledError)
                for one in await asyncio.gather(*waiting, return_exceptions=True)
            )
        finally:
            mine.thaw()
        assert await store.async_put("after", b"y") == 0 and await store.async_get("after") == b"y"
        assert await store.async_close() == 0

    asyncio.run(work())


def test_settings(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("MOONCAKE_"):
            monkeypatch.delenv(name)
    with pytest.raises(ValueError):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
    config = MooncakeConfig.load_from_env()
    assert (config.local_hostname, config.metadata_server, config.protocol) == ("localhost", "P2PHANDSHAKE", "tcp")
    assert (config.global_segment_size, config.local_buffer_size) == (3355443200, 1073741824)
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "1.5 GB")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_ENABLED", "on")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "RDMA")
    config = MooncakeConfig.load_from_env()
    assert config.global_segment_size == 3 << 29 and config.enable_ssd_offload and config.protocol == "rdma"
    for name, value in [
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "-1"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "much"),
        ("MOONCAKE_OFFLOAD_ENABLED", "perhaps"),
        ("MOONCAKE_PROTOCOL", " "),
    ]:
        with monkeypatch.context() as changed, pytest.raises(ValueError):
            changed.setenv(name, value)
            MooncakeConfig.load_from_env()
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"local_hostname": "a", "metadata_server": "b"}))
    with pytest.raises(ValueError, match="Missing required config field: master_server_address"):
        MooncakeConfig.from_file(str(file))
    file.write_text(
        json.dumps(
            {"local_hostname": "a", "metadata_server": "b", "master_server_address": "c", "local_buffer_size": "64k"}
        )
    )
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    assert MooncakeConfig.load_from_env().local_buffer_size == 65536
    whole = {"local_hostname": "a", "metadata_server": "b", "master_server_address": "c"}

    def read(**fields):
        file.write_text(json.dumps({**whole, **fields}))
        return MooncakeConfig.from_file(str(file))

    optional = ("tenant_id", "ssd_offload_path", "enable_ssd_offload", "client_http_port")
    assert read(**dict.fromkeys(optional)) == read(), "null counts as absent"
    assert read(device_name=None).device_name is None
    assert read(enable_ssd_offload=2).enable_ssd_offload and not read(enable_ssd_offload=0.0).enable_ssd_offload
    for size, expected in ((1e9, 10**9), (1.5, 1), ("1e3", 1000), ("1_000", 1000), ("1.5e3", 1500)):
        assert read(local_buffer_size=size).local_buffer_size == expected, size
    for name in whole:
        for wrong in (None, "", " ", 7):
            with pytest.raises(ValueError, match=name):
                read(**{name: wrong})
    for wrong in ({"local_buffer_size": float("inf")}, {"local_buffer_size": "1__0"}, {"local_buffer_size": -1}, {"protocol": 7}, {"protocol": None}):
        with pytest.raises(ValueError):
            read(**wrong)
    config = MooncakeConfig("a", "b", 1, 1, " RDMA ", None, "c")
    assert config.protocol == "rdma" and config.as_setup()["rdma_devices"] == ""
    with pytest.raises(ValueError, match="local_buffer_size"):
        MooncakeConfig("a", "b", 1, -1, "tcp", "", "c")
