"""Connections of an aiohttp server: maximum number, timeouts, bytes, eviction of the connection
that has waited longest, and refusal of requests of websites. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from mooncake import _mooncake
from mooncake._byte_budget import GRACE_S, ByteBudget, default_limit, time_for
from mooncake._request_limits import (
    BROKEN_BODY,
    MAX_ADDRESS,
    MAX_FIELD,
    BodyRules,
    RequestHandler,
    encoded_body,
    long_body,
    too_many_bodies,
)

_LOG = logging.getLogger(__name__)
# Maximum number of connections, and the divisor of the descriptor limit that gives their share of
# it.
_MAX_CONNECTIONS = 1024
_SHARE = 4
# Seconds from the first byte of a request to the end of its header, and for its body beyond those
# for its length.
_HEADER_S = 10.0
_BODY_S = GRACE_S
# Seconds between two requests.
_IDLE_S = 75.0
# Seconds that running requests have to complete when the server stops.
_STOP_S = 2.0
# Reasons for which a connection is refused or closed, as labels of metrics.
_REASONS = ("evicted", "full", "timeout", "descriptors")


# Help of the flag for names of a server.
ALLOWED_HOSTS = "names by which pages in browsers may call the server, with commas between them; *.name for all below a name (default: MC_ALLOWED_HOSTS)"


def raise_descriptor_limit() -> None:
    """Raises the soft limit of descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _LOG.debug("cannot raise the descriptor limit: %s. limit=%s", error, soft)


def metrics_page(*families: tuple[str, str, str, dict[str, int]]) -> web.Response:
    """Returns metrics in Prometheus text format.

    Each family has a name, a kind, a help text, and its values by their labels.
    """
    lines: list[str] = []
    for name, kind, about, values in families:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value}" for labels, value in values.items()]
    return web.Response(text="\n".join([*lines, ""]), headers={"Content-Type": "text/plain; version=0.0.4"})


class _NoPermit(Exception):
    """Failure to get a permit to receive a body in time."""


class _Connection(asyncio.Protocol):
    """Connection whose bytes go to aiohttp's handler."""

    def __init__(self, all_of: Connections, handler: Any) -> None:
        self._all = all_of
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Time since which the server waits for the peer. None while it works on a request.
        self.since: float | None = 0.0
        self._in_request = False
        # Time since which a message has been under way, and the counted bytes.
        self.began: float | None = None
        self.held = 0
        self._received = 0
        self._unsent = 0
        self._writing: asyncio.TimerHandle | None = None
        # True while a request in progress waits for the peer to read its response.
        self._is_unread = False
        # Task that waits for a permit to receive a body. It ends with the connection.
        self.queued: asyncio.Task[Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._all.admit(self, self._handler):
            transport.abort()
            return
        self.wait(self._all.idle_s, in_request=False)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._handler not in self._all.open or self._handler.is_discarding:
            return
        if self.since is not None and not self._in_request and not self._is_unread:
            self.wait(self._all.header_s, in_request=True)
            # The time of an earlier response does not count.
            self.began = None
        if self.began is None:
            self.began = asyncio.get_running_loop().time()
        self._received += len(data)
        self._count()
        self._handler.data_received(data)

    def eof_received(self) -> Any:
        return self._handler.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel()
        self._stop_writing()
        if self.queued is not None:
            self.queued.cancel()
        self._received = 0
        self._count()
        if self._all.open.pop(self._handler, None) is not None:
            self._handler.connection_lost(error)

    def pause_writing(self) -> None:
        # The peer does not read as fast as the response is written.
        if self.since is None:
            self.since, self._is_unread = asyncio.get_running_loop().time(), True
        self._unsent = self._buffered()
        self._check_writing(asyncio.get_running_loop().time() + time_for(self._unsent, self._all.write_s), self._unsent + 1)
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._stop_writing()
        if self._is_unread:
            self.since, self._is_unread = None, False
        self._count()
        self._handler.resume_writing()

    def _buffered(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _check_writing(self, deadline: float, before: int) -> None:
        """Closes the connection if its response has made no progress, or is not read in time."""
        loop, self._unsent = asyncio.get_running_loop(), self._buffered()
        left = deadline - loop.time()
        if self._unsent >= before or left <= 0:
            self._expire()
            return
        self._count()
        self._writing = loop.call_later(min(self._all.write_s, left), self._check_writing, deadline, self._unsent)

    def _stop_writing(self) -> None:
        self._unsent = 0
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _count(self) -> None:
        self._all.budget.hold(self, self._received + self._unsent)

    def end_request(self) -> None:
        """Releases the bytes of a request that was handled. Its response begins."""
        self._received = 0
        self.began = asyncio.get_running_loop().time()
        self._count()

    def end_after(self, response: web.StreamResponse) -> None:
        """Ends the connection after a response, and discards the rest of the request."""
        self._handler.end_after(response)
        self.wait(self._all.header_s, in_request=True)

    def wait(self, limit: float, in_request: bool) -> None:
        """Marks the connection as waiting for its peer, at most `limit` seconds."""
        if self._handler not in self._all.open:
            return
        loop = asyncio.get_running_loop()
        self.since, self._in_request, self._is_unread = loop.time(), in_request, False
        self._cancel()
        self._timer = loop.call_later(limit, self._expire)

    def work(self) -> None:
        """Marks the connection as working on a request, which protects it from eviction."""
        self.since, self._is_unread = None, False
        self._cancel()

    def close(self) -> None:
        """Closes the connection and discards unsent data."""
        if self._transport is not None:
            self._transport.abort()

    def fileno(self) -> int:
        """Returns the descriptor, or -1 after it was closed."""
        socket = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if socket is None else int(socket.fileno())

    def _expire(self) -> None:
        self._all.refused["timeout"] += 1
        self.close()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connections:
    """Connections of an application that `runner` serves. `name` labels the listener in metrics."""

    def __init__(
        self,
        app: web.Application,
        max_connections: int = _MAX_CONNECTIONS,
        header_s: float = _HEADER_S,
        body_s: float = _BODY_S,
        idle_s: float = _IDLE_S,
        write_s: float = GRACE_S,
        budget: ByteBudget | None = None,
        name: str = "http",
        guards_all_but: Sequence[str] | None = None,
        bodies: BodyRules | None = None,
    ) -> None:
        self.name = name
        self._bodies = BodyRules() if bodies is None else bodies
        most = self._bodies.max_concurrent
        self._permits = None if most is None else asyncio.Semaphore(most)
        # Paths that programs may read by any name of the server. Without a list, all are.
        self._readable = guards_all_but
        self.guard = _mooncake.WebGuard("", [])
        self.max_connections = max_connections
        self.header_s = header_s
        self._body_s = body_s
        self.idle_s = idle_s
        self.write_s = write_s
        self.budget = _BUDGET if budget is None else budget
        self.open: dict[Any, _Connection] = {}
        self.refused = dict.fromkeys(_REASONS, 0)
        app.middlewares.insert(0, self._middleware())
        self.runner = web.AppRunner(app, shutdown_timeout=_STOP_S)
        self._options: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": idle_s,
            "max_line_size": MAX_ADDRESS,
            "max_field_size": MAX_FIELD,
            # The budget counts bytes as they arrive. `encoded_body` refuses the others.
            "auto_decompress": False,
            # `_Connection` itself discards the rest of a request that was refused.
            "lingering_time": 0,
        }
        self._server: asyncio.Server | None = None

    def allow(self, allowed: str | None, *own: str) -> None:
        """Sets the names by which pages in browsers may call the server, with commas between them,
        `MC_ALLOWED_HOSTS` without them, and names of its own. Raises `InvalidArgumentError` for
        something else.
        """
        if allowed is None:
            allowed = os.environ.get("MC_ALLOWED_HOSTS", "")
        self.guard = _mooncake.WebGuard(allowed, own)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Returns the response to a request whose header excludes it."""
        refused = self._refused_page(request)
        if refused is not None:
            return refused
        encoded = encoded_body(request)
        if encoded is not None:
            return encoded.response()
        return None if self._bodies.refuse is None else self._bodies.refuse(request)

    def _refused_page(self, request: web.Request) -> web.Response | None:
        """Returns the response to a request that a website may not send."""
        target = request.raw_path
        authority = None if target.startswith("/") else urlsplit(target).netloc or None
        headers = [(name.decode("ascii", "replace"), value) for name, value in request.raw_headers]
        everything = self._readable is not None and request.path not in self._readable
        reason = self.guard.refusal(request.method, authority, headers, everything)
        if reason is None:
            return None
        _LOG.debug("request refused: path=%s reason=%s", request.path, reason.strip())
        return web.Response(text=reason, status=403)

    async def listen(self, host: str, port: int) -> int:
        """Starts to listen and returns the port. Raises `OSError` if the port is unavailable."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            self.max_connections = min(self.max_connections, max(soft // _SHARE, 1))
        await self.runner.setup()
        handlers = self.runner.server
        assert handlers is not None
        loop = asyncio.get_running_loop()

        def connected() -> _Connection:
            return _Connection(self, RequestHandler(handlers, loop=loop, **self._options))

        self._server = await loop.create_server(connected, host, port, backlog=128)
        before = loop.get_exception_handler()
        loop.set_exception_handler(functools.partial(self._failed, before))
        _keep_from_children(self)
        return int(self._server.sockets[0].getsockname()[1])

    def metrics(self, prefix: str) -> list[tuple[str, str, str, dict[str, int]]]:
        """Returns the connections of this listener as families of `metrics_page`, with the metric
        names that all processes use.
        """
        refused = {f'{{listener="{self.name}",reason="{reason}"}}': count for reason, count in self.refused.items()}
        return [
            (f"{prefix}_connections", "gauge", "Connections that are open at a listener", {f'{{listener="{self.name}"}}': len(self.open)}),
            (
                f"{prefix}_connections_refused_total",
                "counter",
                "Connections that were refused or closed by a listener, by reason",
                refused,
            ),
            *self.budget.metrics(prefix),
        ]

    def descriptors(self) -> list[int]:
        """Returns the descriptors of the listener and of its connections."""
        listening = [socket.fileno() for socket in self._server.sockets] if self._server is not None else []
        return [number for number in [*listening, *(it.fileno() for it in self.open.values())] if number >= 0]

    def _failed(self, before: Any, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE) and "socket" in context:
            self.refused["descriptors"] += 1
            # asyncio retries by itself and can use the descriptor of the evicted connection.
            self._evict()
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    async def stop(self) -> None:
        """Completes running requests, for at most two seconds, and closes every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.open.values()):
            if connection.since is not None:
                connection.close()
        await self.runner.cleanup()
        for connection in list(self.open.values()):
            connection.close()

    def admit(self, connection: _Connection, handler: Any) -> bool:
        """Admits a connection. At the limit, the connection that has waited longest is closed.
        Returns false if all are busy.
        """
        if len(self.open) >= self.max_connections:
            if not self._evict():
                self.refused["full"] += 1
                _LOG.warning("connection refused: all %s connections are busy", self.max_connections)
                return False
            self.refused["evicted"] += 1
        self.open[handler] = connection
        return True

    def _evict(self) -> bool:
        """Closes the connection that has waited longest. Returns whether there was one."""
        waiting = [(it.since, number) for number, it in enumerate(self.open.values()) if it.since is not None]
        if not waiting:
            return False
        list(self.open.values())[min(waiting)[1]].close()
        return True

    def _middleware(self) -> Any:
        @web.middleware
        async def admitted(request: web.Request, handler: Any) -> web.StreamResponse:
            refused = self._refusal(request)
            connection = self.open.get(request.protocol)
            if connection is None:
                answer: web.StreamResponse = await handler(request) if refused is None else refused
                return answer
            response: web.StreamResponse | None = refused
            try:
                if response is None:
                    response = await self._serve(connection, request, handler)
                return response
            finally:
                connection.end_request()
                connection.wait(self.idle_s, in_request=False)
                if response is not None and not request.content.is_eof():
                    connection.end_after(response)

        return admitted

    async def _serve(self, connection: _Connection, request: web.Request, handler: Any) -> web.StreamResponse:
        """Receives the body of a request, and handles the request."""
        most = self._bodies.limit(request)
        if (request.content_length or 0) > most:
            return long_body(most).response()
        if most != request.client_max_size and request.body_exists:
            request = request.clone(client_max_size=most)
        try:
            async with self._permit(connection, request):
                length = most if request.content_length is None else request.content_length
                connection.wait(time_for(length, self._body_s), in_request=True)
                # The body is read here, so that the body timeout covers it.
                await request.read()
        except web.HTTPRequestEntityTooLarge:
            return long_body(most).response()
        except web.RequestPayloadError:
            return BROKEN_BODY.response()
        except _NoPermit:
            return too_many_bodies(self._bodies.max_concurrent or 0).response()
        connection.work()
        response: web.StreamResponse = await handler(request)
        return response

    @contextlib.asynccontextmanager
    async def _permit(self, connection: _Connection, request: web.Request) -> AsyncIterator[None]:
        """Holds a permit to receive the body of a request, if such permits are limited.

        A connection that waits for a permit can be evicted for another one, and for its bytes.
        Raises `_NoPermit` if other bodies keep the permits for longer than a short body may take.
        """
        if self._permits is None or not request.body_exists or not self._bodies.may_be_long(request):
            yield
            return
        # The refusal below comes before the connection is closed.
        connection.wait(self._body_s + self.header_s, in_request=True)
        connection.queued = asyncio.current_task()
        try:
            async with asyncio.timeout(self._body_s):
                await self._permits.acquire()
        except TimeoutError:
            raise _NoPermit from None
        finally:
            connection.queued = None
        try:
            yield
        finally:
            self._permits.release()


# Budget that the servers of this process share.
_BUDGET = ByteBudget(default_limit())

# Servers whose descriptors forked children close, and a descriptor of /dev/null once it is needed.
_SERVERS: weakref.WeakSet[Connections] = weakref.WeakSet()
_NULL: list[int] = []


def _keep_from_children(server: Connections) -> None:
    """Releases the server's sockets in children of `os.fork`.

    A child that outlives its parent would otherwise keep the parent's port and connections.
    """
    if not _NULL:
        _NULL.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        os.register_at_fork(after_in_child=_give_up_in_child)
    _SERVERS.add(server)


def _give_up_in_child() -> None:
    for server in list(_SERVERS):
        for number in server.descriptors():
            # The descriptor number stays in use, so that no other file takes it.
            os.dup2(_NULL[0], number, inheritable=False)
