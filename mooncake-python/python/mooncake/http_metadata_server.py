"""Metadata service of transfer engines over HTTP, which keeps small values in memory at
`/metadata?key=..`. Needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from enum import Enum
from typing import Any

from aiohttp import web

from mooncake._connections import Connections, metrics_page, raise_descriptor_limit
from mooncake._sizes import port

_LOG = logging.getLogger(__name__)
# Longest value. A segment's descriptor may get that long.
_MAX_VALUE = 64 << 20
# Maximum number of keys, and of bytes of all keys and values.
_MAX_ENTRIES = 1 << 18
_MAX_BYTES = 1 << 30
_METHODS = ("GET", "PUT", "DELETE")
# Seconds that `close` waits for running requests.
_STOP_S = 2.0
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class KVPoll(Enum):
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
        self.app.router.add_route("*", "/metadata", self._handle_metadata)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self._connections = Connections(self.app, name="metadata")
        self.store: dict[str, bytes] = {}
        # Held for each access to the store by a request.
        self.lock = asyncio.Lock()
        self.max_entries, self.max_bytes = _MAX_ENTRIES, _MAX_BYTES
        self._bytes = 0
        self._refused = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text="OK")

    async def _handle_metadata(self, request: Any) -> web.Response:
        key = request.query.get("key", "").strip()
        if not key:
            return _answer("metadata key is missing", 400)
        if request.method not in _METHODS:
            answer = _answer("method not allowed", 405)
            answer.headers["Allow"] = ",".join(_METHODS)
            return answer
        value = bytes(await request.read()) if request.method == "PUT" else b""
        async with self.lock:
            if request.method == "PUT":
                return self._put(key, value)
            if key not in self.store:
                return _answer("metadata not found", 404)
            if request.method == "DELETE":
                self._bytes -= _size(key, self.store.pop(key))
                return _answer("metadata deleted")
            return web.Response(body=self.store[key], content_type="application/json")

    def _put(self, key: str, value: bytes) -> web.Response:
        old = self.store.get(key)
        if old is not None and "rpc_meta" in key:
            return _answer("Duplicate rpc_meta key not allowed", 400)
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
            return _answer(text, 507)
        self._bytes += after - before
        self.store[key] = value
        return _answer("metadata updated")

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        about = "Entries that the metadata server refused because it was full"
        refused = ("master_metadata_refused_total", "counter", about, {"": self._refused})
        return metrics_page(*self._connections.metrics("master"), refused)

    def run(self) -> threading.Thread:
        """Starts the server on a thread of its own, and returns the thread.

        A failure is logged. `poll` reports it.
        """
        self._started.clear()
        self._failure = None
        self.thread = threading.Thread(target=self._serve, name="mooncake-metadata", daemon=True)
        self.thread.start()
        # The port is known when the server listens.
        self._started.wait()
        if self._failure is not None:
            self.thread.join()
        return self.thread

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            _LOG.error("metadata server failed: %s", error)
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
        if self.thread is not None:
            self.thread.join(_STOP_S)

    def poll(self) -> KVPoll:
        """Returns `Success` while the server runs, else `Failed`."""
        running = self.thread is not None and self.thread.is_alive()
        return KVPoll.Success if running else KVPoll.Failed

    def wait(self) -> None:
        """Waits until the server has ended."""
        while self.thread is not None and self.thread.is_alive():
            self.thread.join(1)


def _answer(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="application/json")


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
    server.run()
    if server.poll() is not KVPoll.Success:
        return 1
    _LOG.info("metadata server on %s:%s", server.host, server.port)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
