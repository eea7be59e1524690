"""Connections of the HTTP servers that hold back: a caller that asks properly is served, and a stop ends."""

from __future__ import annotations

import asyncio

import pytest

web = pytest.importorskip("aiohttp.web", reason="the servers need aiohttp")

from mooncake._connections import Connections  # noqa: E402

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
    connections = Connections(app, places=PLACES, **limits)
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
def test_a_caller_is_served_while_others_hold_back(kind):
    async def main():
        connections, port = await started()
        others = [await (held(port, kind) if kind in KINDS else ask(port)) for _ in range(PLACES)]
        _, writer = await ask(port)
        # The first of them made room.
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
