"""`MooncakeStoreService` and `KVBootstrapServer` as classes that programs use, and settings."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp", reason="the servers need aiohttp")

from mooncake import mooncake_config, mooncake_store_service  # noqa: E402
from mooncake.http_metadata_server import KVBootstrapServer, KVPoll, main  # noqa: E402
from mooncake.mooncake_config import MooncakeConfig, _parse_segment_size  # noqa: E402
from mooncake.mooncake_store_service import (  # noqa: E402
    MooncakeStoreService,
    _install_shutdown_signal_handlers,
    _shm_name_to_path,
    _unblock_shutdown_signals,
)

CONFIG = ("host", "P2PHANDSHAKE", 16, 32, "tcp", "", "h:1")


class Fake:
    """Store whose methods return what the test says, 0 by default."""

    def __init__(self, **results):
        self.results, self.calls = results, []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            result = self.results.get(name, 0)
            if isinstance(result, list):
                result = result.pop(0) if len(result) > 1 else result[0]
            if isinstance(result, Exception):
                raise result
            return result

        return call


class Request:
    def __init__(self, body=None, key="k"):
        self.body, self.match_info = body, {"key": key}

    async def json(self):
        if isinstance(self.body, Exception):
            raise self.body
        return self.body

    async def read(self):
        return json.dumps(await self.json()).encode()


def service_of(store):
    """Returns a service that was not constructed, with the attributes that handlers need."""
    made = MooncakeStoreService.__new__(MooncakeStoreService)
    made.store, made.config = store, MooncakeConfig(*CONFIG)
    made.current_mode, made.mounted_segment_ids, made.last_mount_info = "prefill", [], {}
    made._state_lock = asyncio.Lock()
    return made


def ask(service, handler, body=None):
    answer = asyncio.run(getattr(service, f"handle_{handler}")(Request(body)))
    return answer.status, json.loads(answer.text) if answer.content_type == "application/json" else answer.body


def answer(handler, body=None, **results):
    store = Fake(**results)
    status, text = ask(service_of(store), handler, body)
    return status, text, store.calls


MALFORMED = json.JSONDecodeError("bad", "x", 0)
MOUNTED = {"ret": 0, "segment_ids": ["1-2"], "allocated_size": 16}


def test_objects():
    assert answer("put", {"key": "a", "value": "ä"}) == (200, {"status": "success"}, [("put", "a", "ä".encode())])
    for body in ({"key": "a"}, {"key": "", "value": "x"}, {"value": "x"}, {"key": "a", "value": None}):
        assert answer("put", body) == (400, {"error": "Missing key or value"}, [])
    for body in ([1], MALFORMED, {"key": "a", "value": 3}):
        assert answer("put", body)[0] == 500
    assert answer("put", {"key": "a", "value": "x"}, put=-200)[:2] == (500, {"error": "PUT operation failed"})
    assert answer("get", is_exist=1, get=b"xyz") == (200, b"xyz", [("is_exist", "k"), ("get", "k")])
    assert answer("get", is_exist=1, get=b"")[:2] == (200, b"")
    assert answer("get", is_exist=[1, 0], get=b"")[0] == 404 and answer("get")[:2] == (404, {"error": "Key not found"})
    assert answer("get", is_exist=-1)[:2] == (500, {"error": "Exist check failed"})
    assert answer("get", is_exist=1, get=None)[:2] == (500, {"error": "GET operation failed"})
    assert [answer("exist", is_exist=code)[1] for code in (0, 1)] == [{"exists": False}, {"exists": True}]
    assert answer("exist", is_exist=-1)[0] == 500
    for code in (-704, -706, 1):
        assert answer("remove", remove=code)[:2] == (500, {"error": "Remove operation failed"})
    assert answer("remove_all", remove_all=3)[1] == {"status": "success removed 3 keys"}
    assert answer("remove_all", remove_all=-1)[:2] == (500, {"error": "RemoveAll operation failed"})
    assert answer("remove", remove=ValueError("boom"))[:2] == (500, {"error": "boom"})


def test_segments():
    assert answer("mount", {"size": 10}, allocate_and_mount_segment=MOUNTED) == (
        200,
        {"status": "success", "segment_ids": ["1-2"], "allocated_size": 16},
        [("allocate_and_mount_segment", 10, "tcp", "")],
    )
    for size in (0, -1, True, "1", None, 1.0, 1 << 64):
        status, text, calls = answer("mount", {"size": size})
        assert status == 400 and "Invalid size" in text["error"] and not calls
    assert "-1" in answer("mount", {"size": 1}, allocate_and_mount_segment={"ret": -1})[1]["error"]
    assert answer("unmount", {"segment_ids": ["a", "b"], "grace_period_seconds": 5})[2] == [
        ("unmount_and_free_segment", ["a", "b"], 5)
    ]
    assert answer("unmount_shm", {"segment_ids": "a"})[2] == [("unmount_segment", ["a"], 0)]
    for handler in ("unmount", "unmount_shm"):
        for body in ({}, {"segment_ids": []}, {"segment_ids": ""}):
            assert answer(handler, body) == (400, {"error": "Missing segment_ids"}, [])
    status, text, _ = answer("unmount_shm", {"segment_ids": ["a", "b"]}, unmount_segment=[-1, 0])
    assert (status, text["failed_segment_ids"]) == (500, ["a"])
    body = {"name": "/n", "size": 10, "offset": 4}
    assert answer("mount_shm", body, mount_segment=MOUNTED)[2] == [("mount_segment", "/dev/shm/n", 10, 4, "tcp", "")]
    for body in ({"name": "a/b", "size": 1}, {"name": "n"}, {"size": 1}, {"name": "..", "size": 1}):
        status, text, calls = answer("mount_shm", body)
        assert status == 400 and "name or size" in text["error"] and not calls
    assert "Mount failed" in answer("mount_shm", {"name": "n", "size": 1}, mount_segment={"ret": -1})[1]["error"]
    for grace in (True, 1.5, "1", -1, 3601, None):
        assert answer("unmount_local_disk", {"grace_period_seconds": grace})[0] == 400
    assert answer("unmount_local_disk", [1])[0] == answer("unmount_local_disk", MALFORMED)[0] == 400
    assert answer("unmount_local_disk", {})[2] == [("unmount_local_disk_segment", 0)]
    assert "-3" in answer("unmount_local_disk", {}, unmount_local_disk_segment=-3)[1]["error"]
    names = {"n": "/dev/shm/n", "/n": "/dev/shm/n", "": None, ".": None, "..": None, "//n": None, "a/b": None}
    assert all(_shm_name_to_path(name) == path for name, path in names.items()) and _shm_name_to_path(3) is None


def test_modes():
    decode = {"mode": "Decode", "path": "/x", "size": 5}
    store = Fake(mount_segment=[{"ret": 0, "segment_ids": [name]} for name in "abc"])
    service = service_of(store)
    assert ask(service, "reconfigure", decode) == (200, {"status": "success", "mode": "decode", "segment_ids": ["a"]})
    about = {"path": "/x", "offset": 0, "size": 5, "protocol": "tcp", "location": ""}
    assert (service.current_mode, service.mounted_segment_ids, service.last_mount_info) == ("decode", ["a"], about)
    store.results["unmount_segment"] = -1
    assert ask(service, "reconfigure", decode)[1]["segment_ids"] == ["b", "a"], "the same file is mounted again"
    assert store.calls[-2:] == [("mount_segment", "/x", 5, 0, "tcp", ""), ("unmount_segment", ["a"])]
    status, text = ask(service, "reconfigure", {"mode": "prefill"})
    assert status == 500 and "Unmount failed" in text["error"] and service.mounted_segment_ids == ["b", "a"]
    store.results = {"mount_segment": {"ret": -1, "segment_ids": []}}
    status, text = ask(service, "reconfigure", {**decode, "path": "/y"})
    assert (status, text["mode"]) == (500, "decode") and "keeping previous decode segments" in text["error"]
    assert ask(service, "reconfigure", {"mode": "prefill"}) == (200, {"status": "success", "mode": "prefill"})
    assert store.calls[-1] == ("unmount_segment", ["b", "a"]) and service.last_mount_info == {}
    status, text = ask(service, "reconfigure", decode)
    assert (status, text["mode"]) == (500, "prefill") and "rolled back to prefill" in text["error"]
    for body, words in (({}, "Invalid mode"), ({"mode": "x"}, "Invalid mode"), ({**decode, "path": ""}, "Missing path or size")):
        assert words in ask(service, "reconfigure", body)[1]["error"]
    service = service_of(Fake(mount_segment=MOUNTED))
    ask(service, "reconfigure", decode)
    ask(service, "unmount_shm", {"segment_ids": ["1-2"]})
    assert (service.current_mode, service.mounted_segment_ids) == ("prefill", [])


@pytest.fixture
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("MOONCAKE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
    return monkeypatch


def test_construction(environment, tmp_path, caplog):
    service = MooncakeStoreService()
    assert service.store is None and service.config.master_server_address == "h:1"
    assert (service.current_mode, service.mounted_segment_ids, service.last_mount_info) == ("prefill", [], {})
    service = MooncakeStoreService(None, {"local_buffer_size": "64MB", "what": 1})
    assert service.config.local_buffer_size == "64MB" and not hasattr(service.config, "what")
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"local_hostname": "a", "metadata_server": "b", "master_server_address": "c"}))
    assert MooncakeStoreService(str(file)).config.local_hostname == "a"
    environment.delenv("MOONCAKE_MASTER")
    with pytest.raises(ValueError):
        MooncakeStoreService()
    assert "cannot load settings" in caplog.text


def test_the_start_of_a_store(environment):
    made = []

    def factory(*codes):
        rest = list(codes)

        def make():
            made.append(Fake(setup=rest.pop(0) if rest else -1))
            return made[-1]

        return make

    async def work():
        service = MooncakeStoreService()
        environment.setattr(mooncake_store_service, "_RETRY_S", 0.01)
        environment.setattr(mooncake_store_service, "MooncakeDistributedStore", factory(-1, RuntimeError("x"), 0))
        assert await service.start_store_service() is True and service.store is made[2]
        ((_, settings),) = made[2].calls
        assert list(settings) == [
            "local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices",
            "master_server_addr", "enable_ssd_offload", "ssd_offload_path", "tenant_id", "enable_client_http_server",
            "client_http_port",
        ]  # fmt: skip
        await service.stop()
        await service.stop()
        assert service.store is None and [call[0] for call in made[2].calls] == ["setup", "close"]
        assert await service.start_store_service(max_wait_time=0.05) is False and service.store is None
        stop = asyncio.Event()
        stop.set()
        made.clear()
        assert await service.start_store_service(60, stop) is False and not made
        stop.clear()
        environment.setattr(mooncake_store_service, "_RETRY_S", 60)
        asyncio.get_running_loop().call_later(0.05, stop.set)
        assert await service.start_store_service(60, stop) is False
        stop.clear()

        class Stopping(Fake):
            def setup(self, settings):
                asyncio.run_coroutine_threadsafe(self.after(), loop).result()
                return 0

            async def after(self):
                stop.set()

        loop = asyncio.get_running_loop()
        environment.setattr(mooncake_store_service, "MooncakeDistributedStore", Stopping)
        assert await service.start_store_service(60, stop) is False and service.store is None

    asyncio.run(work())


def test_main_is_a_coroutine(environment):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment.setattr("sys.argv", ["x", "--port", str(port), "--host", "127.0.0.1", "--max-wait-time", "0.01"])
    environment.setattr(mooncake_store_service, "_RETRY_S", 0.01)
    environment.setattr(mooncake_store_service, "MooncakeDistributedStore", lambda: Fake(setup=-1))
    with pytest.raises(RuntimeError, match="cannot set up the store"):
        asyncio.run(mooncake_store_service.main())
    store = Fake()
    environment.setattr(mooncake_store_service, "MooncakeDistributedStore", lambda: store)

    async def work():
        running = asyncio.create_task(mooncake_store_service.main())
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                assert not running.done()
                await asyncio.sleep(0.01)
        writer.close()
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    asyncio.run(work())
    assert [call[0] for call in store.calls] == ["setup", "close"]


def test_signals():
    async def work():
        event = asyncio.Event()
        calls = []
        _install_shutdown_signal_handlers(SimpleNamespace(add_signal_handler=lambda *call: calls.append(call)), event)
        assert [call[0] for call in calls] == [signal.SIGINT, signal.SIGTERM] and not event.is_set()
        calls[1][1](*calls[1][2:])
        assert event.is_set()

    asyncio.run(work())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _unblock_shutdown_signals()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


# Settings.


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), (True, 1), (1.9, 1), ("1.5gb", 3 << 29), (" 2 KB ", 2048), ("1e9", 10**9), ("1.5", 1), ("3b", 3), ("1T", 1 << 40), ("-4k", -4096),
     ("16MiB", 1 << 24), ("16 mib", 1 << 24), ("16_777_216", 1 << 24), ("1.6777216e7", 1 << 24), ("+33554432", 1 << 25),
     ("9_007_199_254_740_993", 9007199254740993)],
)
def test_sizes(text, size):
    assert _parse_segment_size(text) == size


@pytest.mark.parametrize("text", ["", "kb", " ", "x", "1x", "0x", "0x1000000", "+0X10 KB", "--1", "1.2.3", None, [], "inf", float("nan"), "1 2"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError):
        _parse_segment_size(text)


def test_checks_of_settings(caplog, environment):
    assert mooncake_config.logger.name == "mooncake.mooncake_config"
    known = "tcp rdma efa nvmeof nvlink musa nvlink_intra hip barex cxl ascend ub ubshmem maca sunrise_link rpc_only"
    for protocol in known.split():
        assert MooncakeConfig(*CONFIG[:4], f" {protocol.upper()} ", *CONFIG[5:]).protocol == protocol
    assert not caplog.records
    MooncakeConfig(*CONFIG[:4], "other", *CONFIG[5:])
    assert "Unrecognised protocol" in caplog.text and caplog.records[0].levelno == logging.WARNING
    # The protocol is checked before sizes, and sizes before texts.
    for change, words in (
        ({0: "", 2: -1, 4: " "}, "Invalid protocol"),
        ({0: "", 2: -1}, "global_segment_size"),
        ({0: "", 3: -1}, "local_buffer_size"),
        ({0: " "}, "local_hostname"),
        ({1: None}, "metadata_server"),
        ({6: ""}, "master_server_address"),
        ({4: None}, "Invalid protocol"),
    ):
        with pytest.raises(ValueError, match=words):
            MooncakeConfig(*(change.get(at, value) for at, value in enumerate(CONFIG)))
    environment.setenv("MOONCAKE_MASTER", "")
    with pytest.raises(ValueError, match="MOONCAKE_CONFIG_PATH.*MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()


def test_empty_variables_are_absent(environment):
    environment.setenv("MOONCAKE_MASTER", "127.0.0.1:50051")
    plain = MooncakeConfig.load_from_env()
    names = (
        "CONFIG_PATH", "LOCAL_HOSTNAME", "TE_META_DATA_SERVER", "GLOBAL_SEGMENT_SIZE", "LOCAL_BUFFER_SIZE", "PROTOCOL",
        "DEVICE", "OFFLOAD_ENABLED", "OFFLOAD_FILE_STORAGE_PATH", "TENANT_ID", "ENABLE_CLIENT_HTTP_SERVER",
        "CLIENT_HTTP_PORT",
    )  # fmt: skip
    for name in names:
        environment.setenv(f"MOONCAKE_{name}", "")
        assert MooncakeConfig.load_from_env() == plain, name


# The metadata server.


class MetadataRequest:
    def __init__(self, method, key=None, body=b"", headers=()):
        self.method, self.query, self.body = method, {} if key is None else {"key": key}, body
        self.headers = dict(headers)

    async def read(self):
        return self.body


def test_metadata_requests():
    server = KVBootstrapServer(0)
    assert server.poll() is KVPoll.Failed and server.close() is None

    async def work():
        for method, key, body, status in (
            ("POST", " ", b"", 400), ("GET", None, b"", 400), ("POST", "a", b"", 405), ("GET", "a", b"", 404),
            ("PUT", " a ", b"1", 200), ("GET", "a", b"", 200), ("DELETE", "a", b"", 200), ("DELETE", "a", b"", 404),
            ("PUT", "x/rpc_meta/y", b"1", 200), ("PUT", "x/rpc_meta/y", b"1", 200), ("PUT", "x/rpc_meta/y", b"2", 400),
        ):  # fmt: skip
            found = await server._handle_metadata(MetadataRequest(method, key, body))
            assert (found.status, found.content_type) == (status, "application/json"), (method, key)
        assert server.store == {"x/rpc_meta/y": b"1"}

    asyncio.run(work())


def test_requests_need_the_token(monkeypatch):
    monkeypatch.setenv("MC_METADATA_HTTP_TOKEN", "secret")
    server = KVBootstrapServer(0)

    async def work():
        for scheme, token, status in (
            ("Bearer", "secret", 404), ("bEARER", "secret", 404), ("Bearer", "wrong", 401), ("Basic", "secret", 401), ("", "", 401),
        ):  # fmt: skip
            request = MetadataRequest("GET", "k", headers={"Authorization": f"{scheme} {token}"})
            assert (await server._handle_metadata(request)).status == status, (scheme, token)
        # The token counts before the key and the method.
        for method, key in (("GET", None), ("POST", "k"), ("PUT", "k"), ("DELETE", "k")):
            answer = await server._handle_metadata(MetadataRequest(method, key))
            assert (answer.status, answer.text) == (401, "unauthorized"), (method, key)
        for token in ("\udcff", "s\udcffecret"):
            request = MetadataRequest("GET", "k", headers={"Authorization": f"Bearer {token}"})
            assert (await server._handle_metadata(request)).status == 401, ascii(token)

    asyncio.run(work())


def test_limits_of_entries(monkeypatch):
    monkeypatch.setenv("MC_METADATA_MAX_KEYS", "2")
    monkeypatch.setenv("MC_METADATA_MAX_TOTAL_BYTES", "100")
    server = KVBootstrapServer(0)

    async def put(key, body):
        answer = await server._handle_metadata(MetadataRequest("PUT", key, body))
        return answer.status, answer.text

    def full(answer, limit, value):
        said = json.loads(answer[1])
        assert (answer[0], said["limit"], said["limit_value"]) == (507, limit, value), answer
        return said["error"]

    async def work():
        assert await put("a", b"1") == (200, "metadata updated")
        assert "metadata size budget exhausted" in full(await put("b", b"1" * 100), "max_bytes", 100)
        assert await put("b", b"1") == (200, "metadata updated")
        error = full(await put("c", b"1"), "max_entries", 2)
        assert error == (
            "cannot store metadata: metadata key budget exhausted: the metadata server is full. "
            "limit=max_entries value=2; delete the keys of nodes that are gone"
        )

    asyncio.run(work())
    monkeypatch.setenv("MC_METADATA_MAX_KEYS", "none")
    with pytest.raises(ValueError, match="MC_METADATA_MAX_KEYS=none"):
        KVBootstrapServer(0)


def test_an_open_server_needs_a_token(monkeypatch, caplog):
    monkeypatch.delenv("MC_METADATA_HTTP_TOKEN", raising=False)
    for insecure in ("", "0", "off"):
        monkeypatch.setenv("MC_METADATA_HTTP_ALLOW_INSECURE", insecure)
        with pytest.raises(RuntimeError, match="refuses to bind 0.0.0.0"):
            KVBootstrapServer(0).run()
    assert main(["--port=0"]) == 1 and "refuses to bind" in caplog.text
    monkeypatch.setenv("MC_METADATA_HTTP_ALLOW_INSECURE", "Yes")
    server = KVBootstrapServer(0)
    server.run()
    assert server.poll() is KVPoll.Success and "without a token" in caplog.text
    server.close()


def test_a_port_that_is_taken(caplog):
    first, second = KVBootstrapServer(0, "127.0.0.1"), None
    thread = first.run()
    assert thread is first.thread and thread.daemon and first.poll() is KVPoll.Success
    second = KVBootstrapServer(first.port, "127.0.0.1")
    second.run()
    assert second.poll() is KVPoll.Failed and "metadata server failed" in caplog.text
    first.close()
    assert first.poll() is KVPoll.Failed and KVPoll(4) is KVPoll.Success and KVPoll.Success != 4
