"""Metadata service of transfer engines over HTTP, which keeps small values in memory at
`/metadata?key=..`. Needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from enum import IntEnum

from aiohttp import web

from mooncake._connections import Connections, metrics_page, raise_descriptor_limit
from mooncake._sizes import port

_LOG = logging.getLogger(__name__)
# Longest value. A segment's descriptor may get that long.
_MAX_VALUE = 64 << 20
# Maximum number of keys, and of bytes of all keys and values.
_MAX_ENTRIES = 1 << 18
_MAX_BYTES = 1 << 30
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class KVPoll(IntEnum):
    """Progress of a setup in steps."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVBootstrapServer:
    """Metadata server that runs on its own thread."""

    def __init__(self, port: int, host: str = "0.0.0.0") -> None:
        self.port = port
        self.host = host
        self.app = web.Application(client_max_size=_MAX_VALUE)
        self.app.router.add_route("*", "/metadata", self._handle)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self._connections = Connections(self.app, name="metadata")
        self.store: dict[str, bytes] = {}
        self.max_entries, self.max_bytes = _MAX_ENTRIES, _MAX_BYTES
        self._bytes = 0
        self._refused = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text="OK")

    async def _handle(self, request: web.Request) -> web.Response:
        key = request.query.get("key", "").strip()
        if request.method not in ("GET", "PUT", "DELETE"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "PUT", "DELETE"])
        if not key:
            return web.Response(status=400, text="missing key")
        if request.method == "PUT":
            if key in self.store and "rpc_meta" in key:
                return web.Response(status=400, text="Duplicate rpc_meta key not allowed")
            return self._put(key, await request.read())
        if key not in self.store:
            return web.Response(status=404, text="metadata not found")
        if request.method == "DELETE":
            self._bytes -= _size(key, self.store.pop(key))
            return web.Response(text="metadata deleted")
        return web.Response(body=self.store[key], content_type="application/json")

    def _put(self, key: str, value: bytes) -> web.Response:
        old = self.store.get(key)
        before = 0 if old is None else _size(key, old)
        after = _size(key, value)
        is_full = self._bytes - before + after > self.max_bytes and after > before
        if is_full or (old is None and len(self.store) >= self.max_entries):
            self._refused += 1
            text = (
                f"cannot set metadata key: the metadata server is full. entries={len(self.store)} of {self.max_entries} "
                f"bytes={self._bytes} of {self.max_bytes}; delete the keys of nodes that are gone"
            )
            _LOG.warning("%s", text)
            return web.Response(status=507, text=text)
        self._bytes += after - before
        self.store[key] = value
        return web.Response(text="metadata updated")

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        about = "Entries that the metadata server refused because it was full"
        refused = ("master_metadata_refused_total", "counter", about, {"": self._refused})
        return metrics_page(*self._connections.metrics("master"), refused)

    def run(self) -> None:
        """Starts the server and returns when it listens. Raises `OSError` on failure."""
        self._thread = threading.Thread(target=self._serve, name="mooncake-metadata", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            self._started.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections = self._connections
        try:
            self.port = await connections.listen(self.host, self.port)
            self._started.set()
            await self._stop.wait()
        finally:
            await connections.stop()

    def close(self) -> None:
        """Stops the server."""
        if self._loop is not None and self._stop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(10)

    def poll(self) -> KVPoll:
        """Returns whether the server runs."""
        running = self._thread is not None and self._thread.is_alive()
        return KVPoll.Success if running else KVPoll.Failed

    def wait(self) -> None:
        """Waits until the server has ended."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1)


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)


def main(arguments: list[str] | None = None) -> int:
    """Runs `mooncake_http_metadata_server` until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=port, default=8080)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--log-level", type=str.upper, choices=_LEVELS, default="INFO")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=options.log_level)
    raise_descriptor_limit()
    server = KVBootstrapServer(options.port, options.host)
    try:
        server.run()
    except OSError as error:
        _LOG.error("%s", error)
        return 1
    _LOG.info("metadata server on %s:%s", server.host, server.port)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
