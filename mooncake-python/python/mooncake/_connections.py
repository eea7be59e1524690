"""Bounded connections of an aiohttp server: places, time limits, and the longest wait makes room. Needs aiohttp."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from aiohttp import web

_LOG = logging.getLogger(__name__)
# Largest number of connections, and the part of the descriptors of the process that they may take.
_PLACES = 1024
_SHARE = 4
# Seconds between the first byte of a request and the end of its header, and for its body.
_HEADER_S = 10.0
_BODY_S = 60.0
# Seconds between two requests.
_IDLE_S = 75.0
# Seconds that requests have to be answered in once the server stops.
_STOP_S = 2.0


def raise_descriptor_limit() -> None:
    """Raises the soft limit of descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _LOG.debug("the limit of descriptors stays at %s: %s", soft, error)


class _Connection(asyncio.Protocol):
    """One connection, whose bytes go to aiohttp's handler."""

    def __init__(self, all_of: Connections, handler: Any) -> None:
        self._all = all_of
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Moment since which it waits for its peer; None while it works on a request.
        self.since: float | None = 0.0
        self._in_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._all.admit(self, self._handler):
            transport.abort()
            return
        self.wait(_IDLE_S, in_request=False)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._handler not in self._all.open:
            return
        if self.since is not None and not self._in_request:
            self.wait(self._all.header_s, in_request=True)
        self._handler.data_received(data)

    def eof_received(self) -> Any:
        return self._handler.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel()
        if self._all.open.pop(self._handler, None) is not None:
            self._handler.connection_lost(error)

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def wait(self, limit: float, in_request: bool) -> None:
        """Marks the connection as waiting for its peer, at most `limit` seconds."""
        loop = asyncio.get_running_loop()
        self.since, self._in_request = loop.time(), in_request
        self._cancel()
        self._timer = loop.call_later(limit, self.close)

    def work(self) -> None:
        """Marks the connection as working on a request: it keeps its place."""
        self.since = None
        self._cancel()

    def close(self) -> None:
        """Closes the connection, whatever is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connections:
    """The connections of one application, which `runner` serves."""

    def __init__(self, app: web.Application, places: int = _PLACES, header_s: float = _HEADER_S, body_s: float = _BODY_S) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        within = places if soft == resource.RLIM_INFINITY else max(soft // _SHARE, 1)
        self.places = min(places, within)
        self.header_s = header_s
        self._body_s = body_s
        self.open: dict[Any, _Connection] = {}
        app.middlewares.insert(0, self._middleware())
        self.runner = web.AppRunner(app, access_log=None, keepalive_timeout=_IDLE_S, shutdown_timeout=_STOP_S)
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Listens, and returns the port. `OSError` when the port cannot be had."""
        await self.runner.setup()
        handlers = self.runner.server
        assert handlers is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self, handlers()), host, port, backlog=128)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Answers the requests at work, for two seconds at most, and closes every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.open.values()):
            if connection.since is not None:
                connection.close()
        await self.runner.cleanup()
        for connection in list(self.open.values()):
            connection.close()

    def admit(self, connection: _Connection, handler: Any) -> bool:
        """Takes a place: that of the connection that has waited longest if there is none left."""
        if len(self.open) >= self.places:
            waiting = [(it.since, number) for number, it in enumerate(self.open.values()) if it.since is not None]
            if not waiting:
                _LOG.warning("a connection is refused: each of %s works on a request", self.places)
                return False
            number = min(waiting)[1]
            list(self.open.values())[number].close()
        self.open[handler] = connection
        return True

    def _middleware(self) -> Any:
        @web.middleware
        async def admitted(request: web.Request, handler: Any) -> web.StreamResponse:
            connection = self.open.get(request.protocol)
            if connection is None:
                response: web.StreamResponse = await handler(request)
                return response
            connection.wait(self._body_s, in_request=True)
            # Read here, so that a body that does not come keeps no place.
            await request.read()
            connection.work()
            try:
                response = await handler(request)
            finally:
                connection.wait(_IDLE_S, in_request=False)
            return response

        return admitted
