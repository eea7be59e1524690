"""REST server of a store: `mc_store_rest_server`. Needs aiohttp."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from mooncake import _folders, _openapi
from mooncake._connections import Connections, metrics_page, raise_descriptor_limit
from mooncake._sizes import port
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore

_LOG = logging.getLogger(__name__)
_MAX_BODY = 100 << 20
_MAX_GRACE_S = 3600
# Code of `last_error` if bytes of a file are already offered.
_EXISTS = -102
# Values longer than this are sent in pieces of this size.
_PIECE = 1 << 20
# Seconds that a client has to take such a piece.
_READER_S = 30.0
_NOT_FOUND = -704
_HAS_LEASE = -706

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _error(text: str, status: int, **more: Any) -> web.Response:
    return _json({"error": text, **more}, status)


class BadRequest(Exception):
    """Invalid request. The text is the reason."""


def _with_errors(handler: Callable[[Any, web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """Converts exceptions of a handler to responses."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: web.Request) -> web.StreamResponse:
        try:
            return await handler(self, request)
        except BadRequest as error:
            return _error(str(error), 400)
        except _folders.NotAllowed as error:
            return _error(f"{error}; see --folder", 403)
        except UnicodeEncodeError:
            # JSON can contain halves of surrogate pairs, which are not valid text.
            return _error("Invalid text", 400)
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception as error:
            _LOG.exception("%s %s failed", request.method, request.path)
            return _error(str(error) or type(error).__name__, 500)

    return wrapped


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError):
        raise BadRequest("Invalid JSON") from None
    if not isinstance(body, dict):
        raise BadRequest("body must be a JSON object")
    return body


def _whole(body: dict[str, Any], name: str, default: int | None = None, least: int = 0, most: int = (1 << 64) - 1) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadRequest(f"Invalid {name}")
    return value


def _text(body: dict[str, Any], name: str, default: str) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise BadRequest(f"Invalid {name}")
    return value


def _ids(body: dict[str, Any]) -> list[str]:
    ids = body.get("segment_ids")
    listed = [ids] if isinstance(ids, str) else ids
    if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
        raise BadRequest("Missing or invalid segment_ids")
    return listed


def _shared_path(body: dict[str, Any]) -> str:
    name = _text(body, "name", "").removeprefix("/")
    if not name or "/" in name or name in (".", "..") or "\0" in name:
        raise BadRequest("Invalid shared memory name")
    return f"{_folders.SHARED_MEMORY}/{name}"


class _Mounted(NamedTuple):
    """Mounted segments, or the cause of the failure. `taken` means that bytes of the file are
    already offered.
    """

    ids: list[str]
    cause: str = ""
    taken: bool = False


class MooncakeStoreService:
    """HTTP routes of one store. Calls of the store run on threads beside the event loop."""

    def __init__(
        self, config: MooncakeConfig, store: MooncakeDistributedStore | None = None, folders: Sequence[str] = _folders.USUAL
    ) -> None:
        self.config = config
        # Folders whose files `reconfigure` may mount.
        self._folders = folders
        self.store = store or MooncakeDistributedStore()
        # Segments that `reconfigure` mounted, its request body, and a lock for changes of both.
        self._mode_ids: list[str] = []
        self._mode_body: dict[str, Any] = {}
        self._mode = asyncio.Lock()
        self.app = web.Application(client_max_size=_MAX_BODY)
        self.app.add_routes(
            [
                web.put("/api/put", self.put),
                web.get("/api/get/{key:.+}", self.get),
                web.get("/api/exist/{key:.+}", self.exist),
                web.delete("/api/remove_all", self.remove_all),
                web.delete("/api/remove/{key:.+}", self.remove),
                web.post("/api/mount", self.mount),
                web.post("/api/unmount", self.unmount),
                web.post("/api/mount_shm", self.mount_shm),
                web.post("/api/unmount_shm", self.unmount),
                web.post("/api/unmount_local_disk", self.unmount_local_disk),
                web.post("/api/reconfigure", self.reconfigure),
                web.get("/health", self.health),
                web.get("/openapi.json", self.openapi),
                web.get("/metrics", self.metrics),
            ]
        )
        self.connections = Connections(self.app, name="rest")

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)

    async def start_store(self, patience: float) -> bool:
        """Sets up the store, and retries until it succeeds or `patience` seconds have passed."""
        deadline = time.monotonic() + patience
        while True:
            if await self._call(lambda: self.store.setup(**self.config.as_setup())) == 0:
                return True
            if time.monotonic() >= deadline:
                _LOG.error("cannot set up store: %s", self.store.last_error())
                return False
            await asyncio.sleep(1)

    @_with_errors
    async def put(self, request: web.Request) -> web.Response:
        """Stores a text value under a key."""
        body = await _body(request)
        key, value = body.get("key"), body.get("value")
        if not isinstance(key, str) or not isinstance(value, str) or not key:
            raise BadRequest("Missing key or value")
        if await self._call(self.store.put, key, value.encode()) != 0:
            return _error("PUT operation failed", 500, cause=str(self.store.last_error()))
        return _json({"status": "success"})

    @_with_errors
    async def get(self, request: web.Request) -> web.StreamResponse:
        """Returns the value of a key."""
        handle = await self._call(self.store.get_buffer, request.match_info["key"])
        if handle is None:
            exists = await self._call(self.store.is_exist, request.match_info["key"])
            if exists == 0:
                return _error("Key not found", 404)
            return _error("Exist check failed" if exists < 0 else "GET operation failed", 500)
        view = memoryview(handle).cast("B")
        if len(view) <= _PIECE:
            return web.Response(body=bytes(view), content_type="application/octet-stream")
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(view)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        try:
            for at in range(0, len(view), _PIECE):
                await asyncio.wait_for(response.write(bytes(view[at : at + _PIECE])), _READER_S)
            await asyncio.wait_for(response.write_eof(), _READER_S)
        except TimeoutError:
            _LOG.info("%s %s: client stopped reading", request.method, request.path)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            # The client can no longer receive a response.
            _LOG.debug("%s %s: client disconnected", request.method, request.path)
        return response

    @_with_errors
    async def exist(self, request: web.Request) -> web.Response:
        """Returns whether a key exists."""
        exists = await self._call(self.store.is_exist, request.match_info["key"])
        if exists < 0:
            return _error("Exist check failed", 500)
        return _json({"exists": exists == 1})

    @_with_errors
    async def remove(self, request: web.Request) -> web.Response:
        """Removes a key."""
        code = await self._call(self.store.remove, request.match_info["key"])
        if code == 0:
            return _json({"status": "success"})
        status = {_NOT_FOUND: 404, _HAS_LEASE: 409}.get(code, 500)
        return _error("Remove operation failed", status, cause=str(self.store.last_error()))

    @_with_errors
    async def remove_all(self, request: web.Request) -> web.Response:
        """Removes every key that has no lease."""
        del request
        removed = await self._call(self.store.remove_all)
        if removed < 0:
            return _error("Remove all operation failed", 500)
        return _json({"status": f"success removed {removed} keys"})

    @_with_errors
    async def mount(self, request: web.Request) -> web.Response:
        """Mounts a segment in new memory."""
        body = await _body(request)
        size = _whole(body, "size", least=1)
        protocol, location = _text(body, "protocol", self.config.protocol), _text(body, "location", "")
        result = await self._call(self.store.allocate_and_mount_segment, size, protocol, location)
        if result["ret"] != 0:
            return _error("Mount operation failed", 500, cause=str(self.store.last_error()))
        return _json(
            {
                "status": "success",
                "segment_ids": result["segment_ids"],
                "allocated_size": result["allocated_size"],
            }
        )

    async def _mount_file(self, path: str, body: dict[str, Any], folders: Sequence[str]) -> _Mounted:
        """Mounts a file in one of `folders`. Raises `NotAllowed` for any other file."""
        where = (
            _whole(body, "size", least=1),
            _whole(body, "offset", 0),
            _text(body, "protocol", self.config.protocol),
            _text(body, "location", ""),
        )

        def mount(file: str) -> _Mounted:
            result = self.store.mount_segment(file, *where)
            if result["ret"] == 0:
                return _Mounted(result["segment_ids"])
            # The error is read at once, before another failure of this store replaces it.
            error = self.store.last_error()
            return _Mounted([], str(error), error is not None and error.code == _EXISTS)

        try:
            with _folders.opened(path, folders) as file:
                mounted: _Mounted = await self._call(mount, file)
        except OSError as error:
            return _Mounted([], str(error))
        return mounted

    @_with_errors
    async def mount_shm(self, request: web.Request) -> web.Response:
        """Mounts a segment in shared memory."""
        body = await _body(request)
        mounted = await self._mount_file(_shared_path(body), body, [_folders.SHARED_MEMORY])
        if mounted.cause:
            return _error("Mount operation failed", 500, cause=mounted.cause)
        return _json({"status": "success", "segment_ids": mounted.ids})

    async def _unmount_each(self, ids: list[str], grace: int) -> list[str]:
        """Unmounts segments and returns those that cannot be unmounted."""
        return [one for one in ids if await self._call(self.store.unmount_segment, [one], grace) != 0]

    @_with_errors
    async def unmount(self, request: web.Request) -> web.Response:
        """Unmounts segments."""
        body = await _body(request)
        grace = _whole(body, "grace_period_seconds", 0, most=_MAX_GRACE_S)
        ids = _ids(body)
        async with self._mode:
            failed = await self._unmount_each(ids, grace)
            gone = set(ids) - set(failed)
            self._mode_ids = [one for one in self._mode_ids if one not in gone]
        if failed:
            return _error("Unmount operation failed", 500, failed_segment_ids=failed)
        return _json({"status": "success"})

    @_with_errors
    async def unmount_local_disk(self, request: web.Request) -> web.Response:
        """Unmounts this client's disk segment."""
        body = await _body(request)
        grace = _whole(body, "grace_period_seconds", 0, most=_MAX_GRACE_S)
        if await self._call(self.store.unmount_local_disk_segment, grace) != 0:
            return _error("Unmount operation failed", 500, cause=str(self.store.last_error()))
        return _json({"status": "success"})

    @_with_errors
    async def reconfigure(self, request: web.Request) -> web.Response:
        """Replaces the mounted file by another one (`decode`), or unmounts it (`prefill`)."""
        body = await _body(request)
        mode = _text(body, "mode", "").lower()
        if mode not in ("decode", "prefill"):
            raise BadRequest("Invalid mode. Use 'decode' or 'prefill'")
        async with self._mode:
            if mode == "prefill":
                self._mode_ids = await self._unmount_each(self._mode_ids, 0)
                if self._mode_ids:
                    return _error("Unmount operation failed", 500, mode="decode")
                return _json({"status": "success", "mode": "prefill"})
            if not _text(body, "path", ""):
                raise BadRequest("Missing path")
            if self._mode_ids and _location(body) == _location(self._mode_body):
                return _json({"status": "success", "mode": "decode", "segment_ids": self._mode_ids})
            mounted = await self._replace(body)
            if mounted.cause:
                now = "decode" if self._mode_ids else "prefill"
                return _error("Mount operation failed", 500, mode=now, cause=mounted.cause, segment_ids=self._mode_ids)
            return _json({"status": "success", "mode": "decode", "segment_ids": mounted.ids})

    async def _replace(self, body: dict[str, Any]) -> _Mounted:
        """Replaces the mounted file by another one. On failure, the previous file stays mounted."""
        # The new segment is mounted first, so that there is always one.
        mounted = await self._mount_file(body["path"], body, self._folders)
        if mounted.taken and self._mode_ids:
            # The previous segment of the same file may overlap the new one.
            self._mode_ids = await self._unmount_each(self._mode_ids, 0)
            mounted = await self._mount_again(body)
            if mounted.cause:
                before = await self._mount_again(self._mode_body)
                self._mode_ids = before.ids + self._mode_ids
                if not self._mode_ids:
                    return _Mounted([], f"{mounted.cause}; cannot mount the previous file again: {before.cause}")
        if not mounted.cause:
            self._mode_ids, self._mode_body = mounted.ids + await self._unmount_each(self._mode_ids, 0), body
        return mounted

    async def _mount_again(self, body: dict[str, Any]) -> _Mounted:
        """Mounts a file like `_mount_file`. A file that was moved out of the folders is an ordinary
        failure.
        """
        try:
            return await self._mount_file(body["path"], body, self._folders)
        except _folders.NotAllowed as error:
            return _Mounted([], str(error))

    @_with_errors
    async def health(self, request: web.Request) -> web.Response:
        """Returns whether the store's master responds."""
        del request
        code = await self._call(self.store.health_check)
        return _json({"status": "healthy" if code == 0 else "unhealthy", "code": code}, 200 if code == 0 else 503)

    async def openapi(self, request: web.Request) -> web.Response:
        """Returns the OpenAPI document of this server."""
        del request
        return _json(_openapi.DOCUMENT)

    async def metrics(self, request: web.Request) -> web.Response:
        """Returns connection metrics of this server in Prometheus text format."""
        del request
        return metrics_page(*self.connections.metrics("mooncake_client"))

    async def run(self, port: int, patience: float, host: str = "0.0.0.0") -> int:
        """Serves requests until a signal stops the server. Returns an exit status."""
        raise_descriptor_limit()
        if not await self.start_store(patience):
            return 1
        connections = self.connections
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        try:
            await connections.listen(host, port)
            _LOG.info("REST server on %s port %s", host, port)
            await stop.wait()
        except OSError as error:
            _LOG.error("%s", error)
            return 1
        finally:
            await connections.stop()
            await self._call(self.store.close)
        return 0


def _location(body: dict[str, Any]) -> tuple[Any, Any, Any]:
    return body.get("path"), body.get("size"), body.get("offset", 0)


def _settings(path: str | None, changes: list[str]) -> MooncakeConfig:
    in_environment = any(os.environ.get(name) for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"))
    fields: dict[str, Any] = {}
    if path or in_environment:
        fields = dict(vars(MooncakeConfig.from_file(path) if path else MooncakeConfig.load_from_env()))
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"invalid argument -D {change}: expected key=value")
        fields[name.strip()] = value.strip()
    if not fields:
        return MooncakeConfig.load_from_env()
    return MooncakeConfig._of(fields)


def main(arguments: list[str] | None = None) -> int:
    """Runs `mc_store_rest_server` until a signal stops it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="JSON file with settings (default: environment)")
    parser.add_argument(
        "-D", "--define", dest="changes", action="append", default=[], metavar="key=value", help="setting that overrides the file and the environment"
    )
    parser.add_argument("--port", type=port, default=8080)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument(
        "--folder",
        dest="folders",
        action="append",
        default=list(_folders.USUAL),
        metavar="PATH",
        help="folder whose files /api/reconfigure may mount, besides /dev/shm and /dev/hugepages",
    )
    parser.add_argument("--max-wait-time", type=float, default=60, help="seconds to wait until the store is set up")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    try:
        config = _settings(options.config, options.changes)
    except (OSError, ValueError) as error:
        print(f"mc_store_rest_server: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_serve(config, options))


async def _serve(config: MooncakeConfig, options: argparse.Namespace) -> int:
    service = MooncakeStoreService(config, folders=options.folders)
    return await service.run(options.port, options.max_wait_time, options.host)


if __name__ == "__main__":
    raise SystemExit(main())
