"""Bodies of requests to the HTTP servers: what is refused before a body is received or parsed."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import tracemalloc

import pytest

web = pytest.importorskip("aiohttp.web", reason="the servers need aiohttp")

from mooncake import _json_bodies, _rest_handlers  # noqa: E402
from mooncake._byte_budget import ByteBudget  # noqa: E402
from mooncake._connections import Connections  # noqa: E402
from mooncake._json_bodies import UnexpectedBody, put_fields  # noqa: E402
from mooncake.http_metadata_server import KVBootstrapServer  # noqa: E402
from mooncake.mooncake_config import MooncakeConfig  # noqa: E402
from mooncake.mooncake_store_service import MooncakeStoreService  # noqa: E402

SETTINGS = MooncakeConfig("h", "P2PHANDSHAKE", 0, 0, "tcp", "", "h:1")
SOON_S = 10.0
MIB = 1 << 20


def metadata():
    """Returns the connections of a metadata server, and a request that stores a value."""
    return KVBootstrapServer(0, "127.0.0.1")._connections, "PUT /metadata?key=k"


class Store:
    """Store that keeps what is put."""

    def __init__(self):
        self.values, self.calls = {}, []

    def put(self, key, value):
        self.values[key] = value
        return 0

    def __getattr__(self, name):
        return lambda *given: self.calls.append((name, *given)) or 0


def service(store=None):
    return MooncakeStoreService(config=SETTINGS, store=store or Store())


def rest():
    return service().connections, "PUT /api/put"


def head(line, length, *fields):
    lengths = [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join([f"{line} HTTP/1.1", "Host: x", *lengths, *fields, "", ""]).encode("latin-1")


async def response(reader):
    """Returns status and body of the next response."""
    lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)).decode().lower()
    length = int(lines.partition("content-length: ")[2].split()[0])
    return int(lines.split()[1]), await asyncio.wait_for(reader.readexactly(length), SOON_S)


async def ask(port, line, body=b"", *fields, length=None):
    """Returns status and body of the response to a request on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(line, len(body) if length is None else length, *fields) + body)
    try:
        return await response(reader)
    finally:
        writer.close()


def check_refusal(answer, status, limit=None, value=None):
    said = json.loads(answer[1])
    assert (answer[0], said.get("limit"), said.get("limit_value")) == (status, limit, value), answer
    assert said["error"].startswith("cannot read request: "), answer
    return said["error"]


async def soon(holds):
    async def wait():
        while not holds():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), SOON_S)


def run(work):
    asyncio.run(asyncio.wait_for(work(), 60))


# Encoded bodies.


@pytest.mark.parametrize("server", [metadata, rest])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "identity, GZIP", "unknown"])
def test_an_encoded_body_is_refused_before_it_is_read(server, coding):
    async def work():
        connections, line = server()
        port = await connections.listen("127.0.0.1", 0)
        # The body is not sent.
        error = check_refusal(await ask(port, line, b"", f"Content-Encoding: {coding}", length=100), 415)
        assert f"content_encoding={coding.split()[-1]!r}" in error
        body = gzip.compress(json.dumps({"key": "a", "value": "a" * MIB}).encode())
        check_refusal(await ask(port, line, body, f"Content-Encoding: {coding}"), 415)
        assert (await ask(port, line, b'{"key": "a", "value": "b"}', "Content-Encoding: Identity"))[0] == 200
        await connections.stop()

    run(work)


def test_no_listener_decompresses():
    async def work():
        seen = []

        async def take(request):
            seen.append(await request.read())
            return web.Response()

        app = web.Application()
        app.router.add_put("/", take)
        connections = Connections(app)
        assert connections._options["auto_decompress"] is False
        await connections.stop()

    run(work)


def test_the_rest_of_a_refused_request_is_discarded_and_counts_nothing():
    async def work():
        budget = ByteBudget(4 * MIB)
        app = web.Application(client_max_size=MIB)
        connections = Connections(app, budget=budget)
        port = await connections.listen("127.0.0.1", 0)
        for fields in (("Content-Encoding: gzip",), ()):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("PUT /", 64 * MIB, *fields))
            most = 0
            for _ in range(64):
                writer.write(bytes(MIB))
                await writer.drain()
                most = max(most, budget.held)
            assert most <= 2 * MIB
            assert (await response(reader))[0] == (415 if fields else 413)
            assert await asyncio.wait_for(reader.read(), SOON_S) == b""
            assert budget.closed == 0
            writer.close()
            await soon(lambda: not connections.open)
        # A connection whose request has ended goes on.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(head("PUT /", 2, "Content-Encoding: gzip") + b"ab")
            assert (await response(reader))[0] == 415
        writer.write(head("PUT /", 0, "Content-Encoding: gzip"))
        assert (await response(reader))[0] == 404, "a request without a body has no encoding"
        writer.close()
        await connections.stop()

    run(work)


# The metadata server.


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("MC_METADATA_HTTP_TOKEN", "secret")
    return "Authorization: Bearer secret"


def test_the_token_is_checked_before_the_body_is_received(token):
    async def work():
        connections, line = metadata()
        port = await connections.listen("127.0.0.1", 0)
        for wrong in ("A: b", "Authorization: Bearer wrong", "Authorization: Bearer secret\xff", "Authorization: \xff"):
            assert await ask(port, line, length=MIB, *(b"", wrong)) == (401, b"unauthorized"), wrong
            assert await ask(port, line, b"value", wrong) == (401, b"unauthorized"), wrong
        assert (await ask(port, line, b"value", token))[0] == 200
        assert await ask(port, "GET /metadata?key=k", b"", token) == (200, b"value")
        assert (await ask(port, "GET /health"))[0] == 200
        await connections.stop()

    run(work)


def test_a_token_need_not_be_utf8(monkeypatch):
    monkeypatch.setenv("MC_METADATA_HTTP_TOKEN", "secret\udcff")

    async def work():
        connections, line = metadata()
        port = await connections.listen("127.0.0.1", 0)
        assert (await ask(port, line, b"value", "Authorization: Bearer secret\xff"))[0] == 200
        assert (await ask(port, line, b"value", "Authorization: Bearer secret"))[0] == 401
        await connections.stop()

    run(work)


def test_a_value_has_the_documented_limit_and_other_bodies_a_lower_one(monkeypatch):
    monkeypatch.delenv("MC_METADATA_MAX_BODY_BYTES", raising=False)

    async def work():
        connections, line = metadata()
        port = await connections.listen("127.0.0.1", 0)
        # aiohttp 3.9 refuses a body of exactly the limit.
        assert (await ask(port, line, bytes(16 * MIB - 1)))[0] == 200
        check_refusal(await ask(port, line, length=16 * MIB + 1), 413, "max_body_bytes", 16 * MIB)
        for other in ("GET /metadata?key=k", "DELETE /metadata?key=k", "PUT /health", "PUT /other", "GET /health"):
            check_refusal(await ask(port, other, length=MIB + 1), 413, "max_body_bytes", MIB)
            chunk = f"{2 * MIB:x}\r\n".encode() + bytes(2 * MIB) + b"\r\n0\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(other, None, "Transfer-Encoding: chunked") + chunk)
            check_refusal(await response(reader), 413, "max_body_bytes", MIB)
            writer.close()
        await connections.stop()

    run(work)


async def half_put(port, line):
    """Returns a connection with a permit, which has sent a half of a value."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(line, 4) + b"ha")
    await writer.drain()
    return reader, writer


@pytest.fixture
def one_put(monkeypatch):
    monkeypatch.setenv("MC_METADATA_MAX_CONCURRENT_PUTS", "1")


def test_values_beyond_the_limit_wait(one_put):
    async def work():
        connections, line = metadata()
        port = await connections.listen("127.0.0.1", 0)
        reader, writer = await half_put(port, line)
        await soon(lambda: connections._permits.locked())
        others = [asyncio.create_task(ask(port, line, b"value")) for _ in range(3)]
        await soon(lambda: sum(it.queued is not None for it in connections.open.values()) == 3)
        # Only bodies of values need a permit.
        assert (await ask(port, "GET /metadata?key=other", b"x"))[0] == 404
        assert (await ask(port, "GET /health", b"x"))[0] == 200
        assert not any(it.done() for it in others)
        writer.write(b"lf")
        assert (await response(reader))[0] == 200
        assert [status for status, _ in await asyncio.gather(*others)] == [200] * 3
        writer.close()
        assert not connections._permits.locked()
        await connections.stop()

    run(work)


def test_a_connection_that_closes_gives_up_its_wait(one_put):
    async def work():
        connections, line = metadata()
        port = await connections.listen("127.0.0.1", 0)
        reader, writer = await half_put(port, line)
        await soon(lambda: connections._permits.locked())
        before = len(asyncio.all_tasks())
        for _ in range(5):
            _, other = await half_put(port, line)
            await soon(lambda: any(it.queued is not None for it in connections.open.values()))
            other.transport.abort()
            await soon(lambda: len(connections.open) == 1)
        # One task is that of the check.
        await soon(lambda: len(asyncio.all_tasks()) <= before + 1)
        assert connections.refused["timeout"] == 0
        # A connection that is closed during its value releases the permit.
        writer.transport.abort()
        assert (await ask(port, line, b"value"))[0] == 200
        assert not connections._permits.locked()
        await connections.stop()

    run(work)


def test_a_value_waits_for_a_bounded_time(one_put):
    async def work():
        connections, line = metadata()
        port = await connections.listen("127.0.0.1", 0)
        _, writer = await half_put(port, line)
        await soon(lambda: connections._permits.locked())
        connections._body_s = 0.05
        error = check_refusal(await ask(port, line, b"value"), 503, "max_concurrent_bodies", 1)
        assert "retry later" in error
        # Another connection takes the place of the one that has waited longest.
        connections._body_s = SOON_S
        _, other = await half_put(port, line)
        await soon(lambda: any(it.queued is not None for it in connections.open.values()))
        connections.max_connections = 2
        assert (await ask(port, "GET /health"))[0] == 200
        assert connections.refused["evicted"] == 1
        for each in (writer, other):
            each.close()
        await connections.stop()

    run(work)


# The REST server.


async def listening(made):
    return await made.connections.listen("127.0.0.1", 0)


def test_only_puts_have_long_bodies():
    async def work():
        made = service()
        port = await listening(made)
        check_refusal(await ask(port, "PUT /api/put", length=100 * MIB + 1), 413, "max_body_bytes", 100 * MIB)
        routes = ("mount", "unmount", "mount_shm", "unmount_shm", "unmount_local_disk", "reconfigure")
        for line in [*(f"POST /api/{name}" for name in routes), "GET /api/get/k", "PUT /other"]:
            check_refusal(await ask(port, line, length=MIB + 1), 413, "max_body_bytes", MIB)
        await made.connections.stop()

    run(work)


def test_a_long_list_of_segments_is_taken():
    async def work():
        store = Store()
        made = service(store)
        port = await listening(made)
        ids = [f"{number:08}-0000-0000-0000-000000000000" for number in range(16_000)]
        assert (await ask(port, "POST /api/unmount", json.dumps({"segment_ids": ids}).encode()))[0] == 200
        assert store.calls == [("unmount_and_free_segment", ids, 0)]
        await made.connections.stop()

    run(work)


EXPENSIVE = {
    "lists": (b'{"mode": "prefill", "x": [' + b"[]," * 100 + b"[]]}", "max_brackets", 64),
    "objects": (b'{"mode": "prefill", "x": [' + b"{}," * 100 + b"{}]}", "max_brackets", 64),
    "items": (b'{"mode": "prefill", "x": [' + b"0," * 20_000 + b"0]}", "max_commas", 16_384),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_small_bodies_of_many_objects_are_refused(name):
    body, limit, value = EXPENSIVE[name]

    async def work():
        made = service()
        port = await listening(made)
        for route in ("mount", "unmount", "mount_shm", "unmount_shm", "unmount_local_disk", "reconfigure"):
            check_refusal(await ask(port, f"POST /api/{route}", body), 400, limit, value)
        await made.connections.stop()

    run(work)


def test_bodies_are_utf8():
    async def work():
        store = Store()
        made = service(store)
        port = await listening(made)
        body = json.dumps({"key": "k", "value": "ä"}, ensure_ascii=False).encode()
        for line in ("PUT /api/put", "POST /api/mount"):
            # The body is not sent.
            answer = await ask(port, line, b"", "Content-Type: application/json; charset=punycode", length=100)
            assert "charset='punycode'" in check_refusal(answer, 415)
        assert (await ask(port, "PUT /api/put", body, "Content-Type: application/json; charset=UTF-8"))[0] == 200
        assert store.values == {"k": "ä".encode()}
        assert (await ask(port, "PUT /api/put", body.decode().encode("latin-1")))[0] == 500
        await made.connections.stop()

    run(work)


def test_a_put_is_a_flat_object():
    async def work():
        store = Store()
        made = service(store)
        port = await listening(made)
        fields = {"key": "k", "value": "{[,]}" * 100, "x": None, "y": 1.5, "z": "other"}
        assert (await ask(port, "PUT /api/put", json.dumps(fields).encode()))[0] == 200
        assert store.values == {"k": b"{[,]}" * 100}
        for nested in (b"[]", b"{}", b'["a"]', b"[" * 200_000):
            for body in (b'{"key":"n","value":"v","x":' + nested + b"}", b'{"value":' + nested + b',"key":"n"}'):
                check_refusal(await ask(port, "PUT /api/put", body), 400)
        many = json.dumps({"key": "n", "value": "v", **{str(number): 0 for number in range(63)}}).encode()
        check_refusal(await ask(port, "PUT /api/put", many), 400, "max_fields", 64)
        # As in Mooncake C++, a malformed body is an error of the server.
        for malformed in (b"", b"[1]", b"1", b'{"key":"n","value":"v"', b'{"key":"n","value":"v"}}', b'{"key":"n",}'):
            assert (await ask(port, "PUT /api/put", malformed))[0] == 500, malformed
        assert set(store.values) == {"k"}
        await made.connections.stop()

    run(work)


def test_fields_of_a_put():
    def same(body):
        """Compares with the parser of the standard library."""
        fields = json.loads(body)
        key, value = fields.get("key"), fields.get("value")
        assert put_fields(body) == (None if not key or value is None else (key, value.encode())), body

    for body in (
        b"{}", b" { } ", b'{"key":"a","value":"b"}', b'\n{\t"value" : "b" ,\r\n"key" : "a" }\n',
        b'{"key":"a","key":"b","value":""}', b'{"key":"\\u00e9\\n\\"","value":"\\ud83d\\ude00"}', b'{"key":"","value":"x"}',
        b'{"key":"x","value":null}', b'{"x":-1.5e3,"key":"a","value":"b"}', '{"key":"ä","value":"😀"}'.encode(),
        b'{"key":null,"value":"x"}', b'{"x":true,"y":false,"z":NaN}',
    ):  # fmt: skip
        same(body)
    for body in (
        b"", b"{", b'{"a"}', b'{"a":}', b'{"a":1,}', b'{"a":1 "b":2}', b'{"a":1}x', b'{"a:1}', b"{'a':1}", b'{"a":"\n"}',
        b"\xff", b'{,"a":1}', b"{1:2}",
    ):  # fmt: skip
        with pytest.raises(ValueError) as malformed:
            put_fields(body)
        assert not isinstance(malformed.value, UnexpectedBody), body


def test_large_bodies_are_parsed_one_after_another_beside_the_loop(monkeypatch):
    state = {"now": 0, "most": 0, "threads": set()}

    def parse(body):
        state["now"] += 1
        state["most"] = max(state["most"], state["now"])
        state["threads"].add(threading.current_thread() is threading.main_thread())
        try:
            threading.Event().wait(0.02)
            return put_fields(body)
        finally:
            state["now"] -= 1

    monkeypatch.setattr(_rest_handlers, "put_fields", parse)

    async def work():
        store = Store()
        made = service(store)
        port = await listening(made)
        bodies = [json.dumps({"key": str(number), "value": "v" * (100 << 10)}).encode() for number in range(8)]
        answers = await asyncio.gather(*(ask(port, "PUT /api/put", body) for body in bodies))
        assert [status for status, _ in answers] == [200] * 8 and len(store.values) == 8
        assert state == {"now": 0, "most": 1, "threads": {False}}
        await made.connections.stop()

    run(work)


def test_a_body_and_its_text_are_released_before_the_store_is_called():
    traced = []

    class Measured(Store):
        def put(self, key, value):
            # The thread that has parsed the body drops it once it runs again.
            deadline = time.monotonic() + SOON_S
            while tracemalloc.get_traced_memory()[0] > 8 * MIB and time.monotonic() < deadline:
                time.sleep(0.01)
            traced.append(tracemalloc.get_traced_memory()[0])
            return super().put(key, value)

    async def work():
        made = service(Measured())
        port = await listening(made)
        body = json.dumps({"key": "k", "value": "v", "x": "y" * (32 * MIB)}).encode()
        tracemalloc.start()
        try:
            # The copies of this request are not measured.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("PUT /api/put", len(body)))
            for at in range(0, len(body), MIB):
                writer.write(body[at : at + MIB])
                await writer.drain()
            assert (await response(reader))[0] == 200
            writer.close()
        finally:
            tracemalloc.stop()
        assert traced[0] <= 8 * MIB
        await made.connections.stop()

    run(work)


def test_an_expensive_body_is_refused_without_its_tree():
    body = b'{"key":"k","value":"v","x":[' + b"[]," * (8 * MIB // 3) + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(UnexpectedBody):
            put_fields(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * len(body)
    assert _json_bodies.check_small(body) is not None
