"""Metadata service of transfer engines over HTTP, which keeps small values in memory at
`/metadata?key=..`. Needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import logging
import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

from aiohttp import web

from mooncake._connections import ALLOWED_HOSTS, Connections, metrics_page, raise_descriptor_limit
from mooncake._request_limits import BodyRules, Refusal
from mooncake._sizes import parse_number, parse_size, parse_switch, parsed, port

_LOG = logging.getLogger(__name__)
# Maximum bytes of a value. A descriptor of thousands of buffers is much shorter.
_MAX_VALUE = 16 << 20
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


def _limit(variable: str, default: int, parse: Callable[[str], int]) -> int:
    """Returns the limit in a variable of the environment, at least 1."""
    text = os.environ.get(variable, "")
    if not text:
        return default
    try:
        limit = parse(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text}: {error}") from None
    if limit < 1:
        raise ValueError(f"{variable}={text}: must be above 0")
    return limit


def _count(text: str) -> int:
    return parse_number(text, 1, (1 << 64) - 1)


def _is_loopback(host: str) -> bool:
    """Returns whether only this host reaches an address."""
    if host.lower() in ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class KVBootstrapServer:
    """Metadata server that runs on its own thread.

    With `MC_METADATA_HTTP_TOKEN`, every request for an entry needs this token. Without it, the
    server listens at loopback only, unless `MC_METADATA_HTTP_ALLOW_INSECURE` is set.
    """

    def __init__(self, port: int, host: str = "0.0.0.0", allowed_hosts: str | None = None) -> None:
        self.port = port
        self.host = host
        self._token = os.environ.get("MC_METADATA_HTTP_TOKEN", "")
        self._max_value = _limit("MC_METADATA_MAX_BODY_BYTES", _MAX_VALUE, parse_size)
        max_puts: int | None = None
        if os.environ.get("MC_METADATA_MAX_CONCURRENT_PUTS"):
            max_puts = _limit("MC_METADATA_MAX_CONCURRENT_PUTS", 1, _count)
        self.app = web.Application(client_max_size=self._max_value)
        self.app.router.add_route("*", "/metadata", self._handle_metadata)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        rules = BodyRules(self._refuse, self._is_put, max_puts)
        self._connections = Connections(self.app, name="metadata", bodies=rules)
        self._connections.allow(allowed_hosts, host)
        self.store: dict[str, bytes] = {}
        # Held for each access to the store by a request.
        self.lock = asyncio.Lock()
        self.max_entries = _limit("MC_METADATA_MAX_KEYS", _MAX_ENTRIES, _count)
        self.max_bytes = _limit("MC_METADATA_MAX_TOTAL_BYTES", _MAX_BYTES, parse_size)
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

    def _is_authorized(self, request: Any) -> bool:
        if not self._token:
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # Bytes of a header and of the environment that are not UTF-8 are escaped.
        given, expected = (text.encode(errors="surrogateescape") for text in (token, self._token))
        return scheme.lower() == "bearer" and hmac.compare_digest(given, expected)

    def _refuse(self, request: web.Request) -> web.Response | None:
        """Returns the response to a request for an entry without the token."""
        if request.match_info.handler != self._handle_metadata or self._is_authorized(request):
            return None
        return _unauthorized()

    def _is_put(self, request: web.Request) -> bool:
        """Returns whether the body of a request is a value."""
        return request.method == "PUT" and request.match_info.handler == self._handle_metadata

    async def _handle_metadata(self, request: Any) -> web.Response:
        if not self._is_authorized(request):
            return _unauthorized()
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
            if old == value:
                return _answer("metadata unchanged")
            return _answer("Duplicate rpc_meta key not allowed", 400)
        before = 0 if old is None else _size(key, old)
        after = _size(key, value)
        if self._bytes - before + after > self.max_bytes and after > before:
            return self._refuse_entry("size", "max_bytes", self.max_bytes)
        if old is None and len(self.store) >= self.max_entries:
            return self._refuse_entry("key", "max_entries", self.max_entries)
        self._bytes += after - before
        self.store[key] = value
        return _answer("metadata updated")

    def _refuse_entry(self, budget: str, limit: str, value: int) -> web.Response:
        """Returns the response to an entry beyond a limit."""
        self._refused += 1
        reason = f"metadata {budget} budget exhausted: the metadata server is full"
        remedy = "delete the keys of nodes that are gone"
        refusal = Refusal(507, reason, remedy, (limit, value), "store metadata")
        _LOG.warning("%s", refusal)
        return refusal.response()

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        about = "Entries that the metadata server refused because it was full"
        refused = ("master_metadata_refused_total", "counter", about, {"": self._refused})
        return metrics_page(*self._connections.metrics("master"), refused)

    def run(self) -> threading.Thread:
        """Starts the server on a thread of its own, and returns the thread.

        A failure is logged. `poll` reports it.

        Raises:
            RuntimeError: other hosts reach the address, and there is no token.
        """
        self._check_host()
        self._started.clear()
        self._failure = None
        self.thread = threading.Thread(target=self._serve, name="mooncake-metadata", daemon=True)
        self.thread.start()
        # The port is known when the server listens.
        self._started.wait()
        if self._failure is not None:
            self.thread.join()
        return self.thread

    def _check_host(self) -> None:
        if self._token or _is_loopback(self.host):
            return
        variable = "MC_METADATA_HTTP_ALLOW_INSECURE"
        is_allowed = os.environ.get(variable, "")
        if is_allowed and parsed(parse_switch, {variable: is_allowed}, variable, ""):
            _LOG.warning("metadata server listens without a token. host=%s", self.host)
            return
        raise RuntimeError(
            f"the metadata server refuses to bind {self.host}: other hosts could read and change every entry; "
            "set a token in MC_METADATA_HTTP_TOKEN, listen at --host=127.0.0.1, or set MC_METADATA_HTTP_ALLOW_INSECURE=1"
        )

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


def _unauthorized() -> web.Response:
    answer = _answer("unauthorized", 401)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)


def main(arguments: list[str] | None = None) -> int:
    """Runs `mooncake_http_metadata_server` until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=port, default=8080)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--allowed_hosts", "--allowed-hosts", help=ALLOWED_HOSTS)
    parser.add_argument("--log-level", type=str.upper, choices=_LEVELS, default="INFO")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=options.log_level)
    raise_descriptor_limit()
    try:
        server = KVBootstrapServer(options.port, options.host, options.allowed_hosts)
        server.run()
    except (RuntimeError, ValueError) as error:
        _LOG.error("%s", error)
        return 1
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
