"""Slow connections of the HTTP servers: they delay neither complete requests nor the stop of a
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket

import pytest

web = pytest.importorskip("aiohttp.web", reason="the servers need aiohttp")

from mooncake import _connections, _rest_handlers  # noqa: E402
from mooncake._byte_budget import ByteBudget  # noqa: E402
from mooncake._connections import Connections  # noqa: E402
from mooncake.http_metadata_server import KVBootstrapServer  # noqa: E402
from mooncake.mooncake_config import MooncakeConfig  # noqa: E402
from mooncake.mooncake_store_service import MooncakeStoreService  # noqa: E402

SETTINGS = MooncakeConfig("h", "P2PHANDSHAKE", 0, 0, "tcp", "", "h:1")
PLACES = 4
SOON_S = 10.0
KINDS = {
    "silent": b"",
    "half a header": b"PUT /echo HT",
    "half a body": b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf",
}


async def echo(request):
    return web.Response(body=await request.read())


async def started(**limits):
    app = web.Application()
    app.router.add_put("/echo", echo)
    connections = Connections(app, max_connections=PLACES, **limits)
    return connections, await connections.listen("127.0.0.1", 0)


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
    assert head.startswith(b"HTTP/1.1 200"), head
    assert await asyncio.wait_for(reader.readexactly(4), SOON_S) == b"body"
    return reader, writer


async def held(port, kind):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(KINDS[kind])
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("kind", [*KINDS, "idle after one request"])
def test_a_caller_is_served_beside_slow_ones(kind):
    async def main():
        connections, port = await started()
        others = [await (held(port, kind) if kind in KINDS else ask(port)) for _ in range(PLACES)]
        _, writer = await ask(port)
        # The first idle connection was closed for the new one.
        assert await asyncio.wait_for(others[0][0].read(), SOON_S) == b""
        others.append(await held(port, "half a header"))
        others.append(await held(port, "half a body"))
        await asyncio.wait_for(connections.stop(), SOON_S)
        assert not connections.open
        for _, other in [*others, (None, writer)]:
            other.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["half a header", "half a body"])
def test_half_a_request_is_closed_in_time(kind):
    async def main():
        connections, port = await started(header_s=0.1, body_s=0.1)
        reader, writer = await held(port, kind)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), SOON_S)
        writer.close()
        await connections.stop()

    asyncio.run(main())


async def fill(request):
    return web.Response(body=bytes(int(request.query["len"])))


async def filling(budget, **limits):
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/fill", fill)
    app.router.add_put("/echo", echo)
    connections = Connections(app, budget=budget, **limits)
    return connections, await connections.listen("127.0.0.1", 0)


async def soon(holds):
    async def wait():
        while not holds():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), SOON_S)


MIB = 1 << 20


def test_half_bodies_stay_within_the_budget():
    async def main():
        budget = ByteBudget(4 * MIB)
        connections, port = await filling(budget)
        held = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" + bytes(MIB))
            await writer.drain()
            held.append((reader, writer))
            await soon(lambda: budget.held <= 4 * MIB)
        await soon(lambda: budget.closed >= 16)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(held[0][0].readexactly(1), SOON_S)
        # The bytes of a handled request are released.
        _, writer = await ask(port)
        held.append((None, writer))
        for _, writer in held:
            writer.close()
        await soon(lambda: budget.held == 0)
        await connections.stop()

    asyncio.run(main())


def unread(port):
    """Returns a connection whose long response is never read."""
    peer = socket.create_connection(("127.0.0.1", port))
    peer.sendall(b"GET /fill?len=16777216 HTTP/1.1\r\nHost: x\r\n\r\n")
    return peer


def test_unread_responses_stay_within_the_budget():
    async def main():
        budget = ByteBudget(32 * MIB)
        connections, port = await filling(budget)
        held = []
        for _ in range(12):
            held.append(unread(port))
            await soon(lambda: budget.held <= 32 * MIB)
        await soon(lambda: budget.closed >= 8)
        for peer in held:
            peer.close()
        await soon(lambda: budget.held == 0)
        await connections.stop()

    asyncio.run(main())


def test_unread_responses_are_closed_in_time():
    async def main():
        budget = ByteBudget(32 * MIB)
        connections, port = await filling(budget, write_s=0.2)
        held = [unread(port) for _ in range(2)]
        await soon(lambda: connections.refused["timeout"] == 2)
        await soon(lambda: budget.held == 0 and not connections.open)
        assert budget.closed == 0
        for peer in held:
            peer.close()
        await connections.stop()

    asyncio.run(main())


def test_a_long_message_goes_on_beside_small_buffers():
    async def main():
        budget = ByteBudget(2 * MIB)
        connections, port = await filling(budget)
        held = []
        # One connection is idle, one has sent a part of a header, one a part of a body.
        for part in (b"", b"PUT /ech", b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if not part:
                writer.write(b"GET /fill?len=1 HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
            writer.write(part)
            await writer.drain()
            held.append((reader, writer))
        await soon(lambda: budget.held > 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n")
        for _ in range(8):
            writer.write(bytes(MIB))
            await writer.drain()
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), SOON_S)).startswith(b"HTTP/1.1 200")
        assert budget.closed == 0
        assert all(not reader.at_eof() for reader, _ in held)
        for _, writer in [*held, (reader, writer)]:
            writer.close()
        await soon(lambda: budget.held == 0)
        await connections.stop()

    asyncio.run(main())


def test_a_streamed_response_has_one_limit_and_is_closed_for_its_bytes(monkeypatch):
    view = memoryview(bytes(32 * MIB))

    async def long(request):
        return await _rest_handlers._sent(request, view)

    async def main():
        budget = ByteBudget(2 * MIB)
        app = web.Application()
        app.router.add_get("/long", long)
        connections = Connections(app, budget=budget)
        port = await connections.listen("127.0.0.1", 0)

        def ask_slowly():
            peer = socket.socket()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(("127.0.0.1", port))
            peer.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
            return peer

        # The time of the whole response is over, although each piece is taken in time.
        limits = []
        monkeypatch.setattr(_rest_handlers, "time_for", lambda count, grace: limits.append((count, grace)) or 0.3)
        peer = ask_slowly()
        peer.setblocking(False)
        loop = asyncio.get_running_loop()

        async def read():
            while await loop.sock_recv(peer, 65536):
                await asyncio.sleep(0.005)

        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(read(), SOON_S)
        assert limits == [(32 * MIB, 30.0)]
        monkeypatch.undo()
        # Responses that are not read are closed for their bytes while they are written.
        peers = [ask_slowly() for _ in range(12)]
        await soon(lambda: budget.closed >= 3)
        assert budget.held <= 2 * MIB
        for each in [peer, *peers]:
            each.close()
        await soon(lambda: budget.held == 0)
        await connections.stop()

    asyncio.run(main())


def metadata_app():
    return KVBootstrapServer(0, "127.0.0.1").app, "metadata", "PUT /metadata?key=k"


def rest_app():
    # The requested page needs no store.
    return MooncakeStoreService(config=SETTINGS).app, "rest", "GET /openapi.json"


async def request(port, line, body=b""):
    """Returns status and body of a request on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), SOON_S)
    writer.close()
    head, _, text = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), text.decode()


def metric_value(page, name):
    """Returns the value of a metric."""
    lines = [line for line in page.splitlines() if line.startswith(name + " ")]
    assert len(lines) == 1, (name, page)
    return int(lines[0].split()[-1])


@pytest.mark.parametrize("server", [metadata_app, rest_app])
@pytest.mark.parametrize("kind", ["silent", "half a header", "half a body", "idle after one request"])
def test_every_server_serves_and_counts_beside_slow_callers(server, kind):
    async def main():
        app, name, line = server()
        prefix = {"metadata": "master", "rest": "mooncake_client"}[name]
        # The application reports connections of its own servers. Here another server is in front of
        # it.
        connections = Connections(app, max_connections=PLACES, name=name)

        async def here(_):
            return _connections.metrics_page(*connections.metrics(prefix))

        app.router.add_get("/here", here)
        port = await connections.listen("127.0.0.1", 0)
        parts = {
            "silent": b"",
            "half a header": b"PUT / HT",
            "half a body": f"PUT {line.split()[1]} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf".encode(),
            "idle after one request": f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode(),
        }
        others = []
        for _ in range(PLACES):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(parts[kind])
            if kind == "idle after one request":
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), SOON_S)).startswith(b"HTTP/1.1 200")
            others.append(writer)
        status, page = await request(port, "GET /here")
        assert status == 200
        assert metric_value(page, f'{prefix}_connections{{listener="{name}"}}') == PLACES
        refused = f"{prefix}_connections_refused_total"
        assert metric_value(page, f'{refused}{{listener="{name}",reason="evicted"}}') == 1
        for reason in ("full", "timeout", "descriptors"):
            assert metric_value(page, f'{refused}{{listener="{name}",reason="{reason}"}}') == 0
        await asyncio.wait_for(connections.stop(), SOON_S)
        for writer in others:
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(("server", "prefix"), [(metadata_app, "master"), (rest_app, "mooncake_client")])
def test_servers_export_metrics(server, prefix):
    async def main():
        app, name, _ = server()
        connections = Connections(app)
        port = await connections.listen("127.0.0.1", 0)
        status, page = await request(port, "GET /metrics")
        assert status == 200 and f'{prefix}_connections{{listener="{name}"}}' in page
        await connections.stop()

    asyncio.run(main())


def test_an_idle_connection_is_closed_in_time():
    async def main():
        connections, port = await started(idle_s=0.1)
        reader, writer = await ask(port)
        assert await asyncio.wait_for(reader.read(), SOON_S) == b""
        assert connections.refused["timeout"] + len(connections.open) <= 1
        writer.close()
        await connections.stop()

    asyncio.run(main())


def test_a_connection_is_refused_when_all_others_are_busy():
    async def main():
        app, let_go = web.Application(), asyncio.Event()

        async def work(_):
            await let_go.wait()
            return web.Response()

        app.router.add_get("/work", work)
        connections = Connections(app, max_connections=1)
        port = await connections.listen("127.0.0.1", 0)
        working = asyncio.create_task(request(port, "GET /work"))
        while not any(it.since is None for it in connections.open.values()):
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), SOON_S) == b""
        writer.close()
        assert connections.refused["full"] == 1
        let_go.set()
        assert (await working)[0] == 200
        await connections.stop()

    asyncio.run(main())


def test_the_connection_that_waited_longest_is_closed_for_its_descriptor():
    async def main():
        connections, port = await started()
        idle_reader, idle_writer = await ask(port)
        caller = socket.socket()
        caller.setblocking(False)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (caller.fileno() + 16, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(caller.fileno()))
            await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", port))
            assert await asyncio.wait_for(idle_reader.read(), SOON_S) == b""
        finally:
            for number in held:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert connections.refused["descriptors"] >= 1
        # The connection is accepted once there are descriptors.
        reader, writer = await asyncio.open_connection(sock=caller)
        writer.write(b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), SOON_S)).startswith(b"HTTP/1.1 200")
        for stream in (idle_writer, writer):
            stream.close()
        await connections.stop()

    asyncio.run(main())


def test_a_child_of_a_fork_closes_ports_and_connections():
    async def main():
        connections, port = await started()
        reader, writer = await ask(port)
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"!")
            signal.alarm(120)
            while True:
                signal.pause()
        try:
            assert os.read(ready, 1) == b"!"
            # The parent process still serves requests.
            (await ask(port))[1].close()
            await connections.stop()
            assert await asyncio.wait_for(reader.read(), SOON_S) == b""
            again = Connections(web.Application())
            assert await again.listen("127.0.0.1", port) == port
            await again.stop()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ready)
            os.close(tell)
            writer.close()

    asyncio.run(main())


def test_a_full_metadata_server_rejects_new_keys():
    async def main():
        server = KVBootstrapServer(0, "127.0.0.1")
        server.max_entries, server.max_bytes = 2, 20
        connections = Connections(server.app)
        port = await connections.listen("127.0.0.1", 0)

        async def put(key, length):
            return await request(port, f"PUT /metadata?key={key}", b"x" * length)

        assert (await put("a", 9))[0] == 200
        status, text = await put("b", 10)
        assert status == 507 and "the metadata server is full" in text
        assert (await put("b", 9))[0] == 200
        assert (await put("c", 0))[0] == 507
        assert (await put("a", 9))[0] == 200
        assert (await request(port, "DELETE /metadata?key=b"))[0] == 200
        assert (await put("c", 9))[0] == 200
        assert metric_value((await request(port, "GET /metrics"))[1], "master_metadata_refused_total") == 2
        await connections.stop()

    asyncio.run(main())


def get(path, fields=""):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}\r\n".encode()


def put(fields, body):
    return f"PUT /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}\r\n".encode() + body


LONG_REQUESTS = {
    "address": (get("/" + "a" * 65_534), 414, "max_address_bytes", 65_534),
    "long address": (get("/" + "a" * (1 << 20)), 414, "max_address_bytes", 65_534),
    "field": (get("/fill?len=1", "A: " + "b" * (1 << 20) + "\r\n"), 431, "max_field_bytes", 65_535),
    "fields": (get("/fill?len=1", "A: b\r\n" * 200), 431, None, None),
    "body": (put(f"Content-Length: {(1 << 20) + 1}\r\n", bytes((1 << 20) + 1)), 413, "max_body_bytes", 1 << 20),
    "long body": (put(f"Content-Length: {8 << 20}\r\n", bytes(8 << 20)), 413, "max_body_bytes", 1 << 20),
    "broken chunk": (put("Transfer-Encoding: chunked\r\n", b"z\r\n"), 400, None, None),
    "method": (b"G@T / HTTP/1.1\r\nHost: x\r\n\r\n", 400, None, None),
}


@pytest.mark.parametrize("name", LONG_REQUESTS)
def test_a_refusal_names_its_limit(name):
    """Callers that send the whole request first see the response, too."""
    request, status, limit, value = LONG_REQUESTS[name]

    async def main():
        app = web.Application(client_max_size=1 << 20)
        app.router.add_get("/fill", fill)
        app.router.add_put("/echo", echo)
        connections = Connections(app)
        port = await connections.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await writer.drain()
        response = await asyncio.wait_for(reader.read(), SOON_S)
        writer.close()
        head, body = response.split(b"\r\n\r\n", 1)
        assert int(head.split(b" ", 2)[1]) == status, response[:200]
        answer = json.loads(body)
        assert (answer.get("limit"), answer.get("limit_value")) == (limit, value), answer
        assert answer["error"].startswith("cannot read request: "), answer
        await connections.stop()

    asyncio.run(main())


def test_a_long_address_is_served():
    async def main():
        connections, port = await filling(ByteBudget(1 << 30))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = "/fill?len=3&q="
        writer.write(get(path + "q" * (65_534 - len(path))))
        response = await asyncio.wait_for(reader.read(), SOON_S)
        assert response.startswith(b"HTTP/1.1 200") and response.endswith(bytes(3)), response[:200]
        writer.close()
        await connections.stop()

    asyncio.run(main())
