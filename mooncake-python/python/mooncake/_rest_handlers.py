"""Handlers of the REST server: one call of the store each. Needs aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from mooncake import _folders, _mooncake
from mooncake._byte_budget import time_for
from mooncake._json_bodies import UnexpectedBody, check_small, put_fields, take_body

_LOG = logging.getLogger("mooncake.mooncake_store_service")
_MAX_GRACE_S = 3600
_MAX_SIZE = 1 << 64
# Maximum number of segments in new memory that requests may mount.
_MAX_MOUNTS = 1024
# Code of `last_error` if bytes of a file are already offered.
_EXISTS = -102
# Values longer than this are sent in pieces of this size.
_PIECE = 1 << 20
# Seconds that a client has to take such a piece.
_READER_S = 30.0
# Bodies longer than this are parsed on a thread, one after another.
_LARGE_BODY = 64 << 10


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _error(text: str, status: int = 500, /, **more: Any) -> web.Response:
    return _json({"error": text, **more}, status)


def _with_errors(handler: Callable[[Any, Any], Awaitable[web.StreamResponse]]) -> Any:
    """Converts exceptions of a handler to responses."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any) -> web.StreamResponse:
        try:
            return await handler(self, request)
        except _folders.NotAllowed as error:
            return _error(f"{error}; see --folder", 403)
        except UnexpectedBody as error:
            return error.refusal.response()
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception as error:
            _LOG.exception("%s failed", handler.__name__)
            return _error(str(error) or type(error).__name__)

    return wrapped


def _shm_name_to_path(name: Any) -> str | None:
    """Returns the path of a shared memory object, or `None` for an invalid name."""
    if not isinstance(name, str):
        return None
    name = name.removeprefix("/")
    if not name or "/" in name or name in (".", "..") or "\0" in name:
        return None
    return f"{_folders.SHARED_MEMORY}/{name}"


def _ids(body: dict[str, Any]) -> Any:
    """Returns the segments that a request names. One may be given without a list."""
    ids = body.get("segment_ids")
    return [ids] if isinstance(ids, str) and ids else ids


class _Mounted(NamedTuple):
    """Result of a mount: its code, the segments, the cause of a failure. `taken` means that bytes
    of the file are already offered.
    """

    code: int
    ids: list[str]
    cause: str = ""
    taken: bool = False


class _Mounts:
    """New memory that requests have mounted, at most `most` bytes and `_MAX_MOUNTS` segments."""

    def __init__(self, most: int | None) -> None:
        self._most = _memory_size() if most is None else most
        self._segments: dict[str, int] = {}
        self._bytes = 0
        self._pending = 0

    def reserve(self, size: int) -> str | None:
        """Reserves the size of a segment, or returns why it is refused."""
        if self._bytes + size > self._most or len(self._segments) + self._pending >= _MAX_MOUNTS:
            return (
                "cannot mount segment: the limit of this server is reached. "
                f"size={size} mounted={self._bytes} max_mount_size={self._most} segments={len(self._segments)} of {_MAX_MOUNTS}; "
                "unmount segments, or raise --max_mount_size"
            )
        self._bytes += size
        self._pending += 1
        return None

    def settle(self, size: int, ids: Sequence[str]) -> None:
        """Records the segments of a reservation. Without any, it ends."""
        self._pending -= 1
        if not ids:
            self._bytes -= size
        for number, one in enumerate(ids):
            self._segments[one] = 0 if number else size

    def release(self, ids: Iterable[str]) -> None:
        """Removes segments that were unmounted."""
        self._bytes -= sum(self._segments.pop(one, 0) for one in ids)


def _memory_size() -> int:
    """Returns the memory of this host, or that of the process's control group if it is less."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            size = min(size, int(file.read()))
    return size


class RestHandlers:
    """Handlers of requests. Calls of the store run on threads beside the event loop."""

    store: Any
    config: Any
    # `decode` if `reconfigure` has mounted a file, else `prefill`.
    current_mode: str
    # Segments that `reconfigure` has mounted, and the last file.
    mounted_segment_ids: list[str]
    last_mount_info: dict[str, Any]
    # Lock for changes of the mode.
    _state_lock: asyncio.Lock
    # Maximum bytes of new memory that requests may mount in all, without a limit that of this host;
    # and the bytes of each segment that they have mounted.
    _max_mount: int | None = None
    _mounts: _Mounts | None = None
    # Folders whose files `reconfigure` may mount. Without them, it mounts any file.
    _folders: Sequence[str] | None = None
    # Permit to parse a large body.
    _parsing: asyncio.Semaphore | None = None

    @web.middleware
    async def check_body(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuses bodies that are short and become many objects. `handle_put` checks its own."""
        refused = None if self.is_put(request) else check_small(await request.read())
        if refused is not None:
            return refused.response()
        response: web.StreamResponse = await handler(request)
        return response

    def is_put(self, request: web.Request) -> bool:
        """Returns whether `handle_put` handles a request."""
        return bool(request.match_info.handler == self.handle_put)

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)

    @property
    def _is_native(self) -> bool:
        """Returns whether the store is one of this package, with its additional methods."""
        return isinstance(self.store, _mooncake.Store)

    def _cause(self) -> dict[str, str]:
        """Returns the last error of the store, for the response."""
        return {"cause": str(self.store.last_error())} if self._is_native else {}

    # Objects.

    @_with_errors
    async def handle_put(self, request: Any) -> web.StreamResponse:
        """Stores a text value under a key."""
        fields = await self._parse_put(await take_body(request))
        if fields is None:
            return _error("Missing key or value", 400)
        if await self._call(self.store.put, *fields) != 0:
            return _error("PUT operation failed", 500, **self._cause())
        return _json({"status": "success"})

    async def _parse_put(self, body: bytes) -> tuple[Any, bytes] | None:
        """Returns the result of `put_fields`. One large body at a time is parsed, because its text
        may have several times its length.
        """
        if len(body) <= _LARGE_BODY:
            return put_fields(body)
        if self._parsing is None:
            self._parsing = asyncio.Semaphore()
        async with self._parsing:
            return await asyncio.to_thread(put_fields, body)

    @_with_errors
    async def handle_get(self, request: Any) -> web.StreamResponse:
        """Returns the value of a key."""
        key = request.match_info["key"]
        if self._is_native:
            handle = await self._call(self.store.get_buffer, key)
            if handle is not None:
                view = memoryview(handle).cast("B")
                return await _sent(request, view) if len(view) > _PIECE else _octets(bytes(view))
        refused = await self._refused(key)
        if refused is not None:
            return refused
        data = await self._call(self.store.get, key)
        if data is None:
            return _error("GET operation failed")
        if data:
            return _octets(bytes(data))
        # An empty result may also stand for a missing key. A store of this package has no empty
        # values, so it stands for one that cannot be read.
        cause = self._cause()
        refused = await self._refused(key)
        if refused is None and self._is_native:
            return _error("GET operation failed", 503, **cause)
        return refused or _octets(b"")

    async def _refused(self, key: str) -> web.StreamResponse | None:
        """Returns the response for a key that does not exist."""
        exists = await self._call(self.store.is_exist, key)
        if exists < 0:
            return _error("Exist check failed")
        return _error("Key not found", 404) if exists == 0 else None

    @_with_errors
    async def handle_exist(self, request: Any) -> web.StreamResponse:
        """Returns whether a key exists."""
        exists = await self._call(self.store.is_exist, request.match_info["key"])
        return _error("Exist check failed") if exists < 0 else _json({"exists": exists > 0})

    @_with_errors
    async def handle_remove(self, request: Any) -> web.StreamResponse:
        """Removes a key."""
        if await self._call(self.store.remove, request.match_info["key"]) != 0:
            return _error("Remove operation failed")
        return _json({"status": "success"})

    @_with_errors
    async def handle_remove_all(self, request: Any) -> web.StreamResponse:
        """Removes every key that has no lease."""
        del request
        removed = await self._call(self.store.remove_all)
        if removed < 0:
            return _error("RemoveAll operation failed")
        return _json({"status": f"success removed {removed} keys"})

    # Segments.

    @_with_errors
    async def handle_mount(self, request: Any) -> web.StreamResponse:
        """Mounts a segment in new memory."""
        body = await request.json()
        size = body.get("size")
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < _MAX_SIZE:
            return _error("Invalid size: it must be a positive integer", 400)
        where = body.get("protocol", self.config.protocol), body.get("location", "")
        mounts = self._mounts = self._mounts or _Mounts(self._max_mount)
        refused = mounts.reserve(size)
        if refused is not None:
            return _error(refused, 507)
        mounted: list[str] = []
        try:
            result = await self._call(self.store.allocate_and_mount_segment, size, *where)
            if result["ret"] != 0:
                return _error(f"Allocation of a segment failed, ret={result['ret']}", 500, **self._cause())
            mounted = result["segment_ids"]
        finally:
            mounts.settle(size, mounted)
        return _json(
            {
                "status": "success",
                "segment_ids": result["segment_ids"],
                "allocated_size": result["allocated_size"],
            }
        )

    @_with_errors
    async def handle_unmount(self, request: Any) -> web.StreamResponse:
        """Unmounts segments in memory that `mount` has allocated."""
        body = await request.json()
        ids = _ids(body)
        if not ids:
            return _error("Missing segment_ids", 400)
        async with self._state_lock:
            code = await self._call(self.store.unmount_and_free_segment, ids, body.get("grace_period_seconds", 0))
            if code != 0:
                return _error(f"Unmount failed, ret={code}", 500, **self._cause())
            self._forget(ids)
        return _json({"status": "success"})

    def _forget(self, ids: Iterable[str]) -> None:
        """Forgets segments that `reconfigure` has mounted and another request has unmounted."""
        freed = set(ids)
        if self._mounts is not None:
            self._mounts.release(freed)
        self.mounted_segment_ids = [one for one in self.mounted_segment_ids if one not in freed]
        if not self.mounted_segment_ids:
            self.current_mode = "prefill"

    @_with_errors
    async def handle_mount_shm(self, request: Any) -> web.StreamResponse:
        """Mounts a segment in shared memory."""
        body = await request.json()
        path = _shm_name_to_path(body.get("name"))
        if path is None or body.get("size") is None:
            return _error("Missing or invalid name or size", 400)
        mounted = await self._mount_file(path, body, self._folders and [_folders.SHARED_MEMORY])
        if mounted.code != 0:
            return _error(f"Mount failed, ret={mounted.code}", 500, **_cause_of(mounted))
        return _json({"status": "success", "segment_ids": mounted.ids})

    @_with_errors
    async def handle_unmount_shm(self, request: Any) -> web.StreamResponse:
        """Unmounts segments in shared memory."""
        body = await request.json()
        ids, grace = _ids(body), body.get("grace_period_seconds", 0)
        if not ids:
            return _error("Missing segment_ids", 400)
        async with self._state_lock:
            failed = [one for one in ids if await self._call(self.store.unmount_segment, [one], grace) != 0]
            self._forget(one for one in ids if one not in failed)
        if failed:
            return _error("Unmount failed for some segments", 500, failed_segment_ids=failed)
        return _json({"status": "success"})

    @_with_errors
    async def handle_unmount_local_disk(self, request: Any) -> web.StreamResponse:
        """Unmounts this client's disk segment."""
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            return _error("Malformed JSON in the body", 400)
        if not isinstance(body, dict):
            return _error("The body must be a JSON object", 400)
        grace = body.get("grace_period_seconds", 0)
        if isinstance(grace, bool) or not isinstance(grace, int) or not 0 <= grace <= _MAX_GRACE_S:
            return _error(f"Invalid grace_period_seconds: it must be an integer from 0 to {_MAX_GRACE_S}", 400)
        code = await self._call(self.store.unmount_local_disk_segment, grace)
        if code != 0:
            return _error(f"Unmount of the local disk failed, ret={code}", 500, **self._cause())
        return _json({"status": "success"})

    async def _mount_file(self, path: str, body: dict[str, Any], folders: Sequence[str] | None) -> _Mounted:
        """Mounts a file. Raises `NotAllowed` for a file outside `folders`, if there are any."""
        where = (
            body["size"],
            body.get("offset", 0),
            body.get("protocol", self.config.protocol),
            body.get("location", ""),
        )

        def mount(file: str) -> _Mounted:
            result = self.store.mount_segment(file, *where)
            if result["ret"] == 0:
                return _Mounted(0, result["segment_ids"])
            # The error is read at once, before another failure of this store replaces it.
            error = self.store.last_error() if self._is_native else None
            return _Mounted(result["ret"], [], "" if error is None else str(error), error is not None and error.code == _EXISTS)

        if folders is None:
            return await self._call(mount, path)  # type: ignore[no-any-return]
        try:
            with _folders.opened(path, folders) as file:
                mounted: _Mounted = await self._call(mount, file)
        except OSError as error:
            return _Mounted(-1, [], str(error))
        return mounted

    # The mode.

    @_with_errors
    async def handle_reconfigure(self, request: Any) -> web.StreamResponse:
        """Replaces the mounted file by another one (`decode`), or unmounts it (`prefill`)."""
        body = await request.json()
        mode = body.get("mode", "").lower()
        if mode not in ("decode", "prefill"):
            return _error("Invalid mode: use 'decode' or 'prefill'", 400)
        if mode == "prefill":
            return await self._to_prefill()
        if not body.get("path") or body.get("size") is None:
            return _error("Missing path or size: decode needs both", 400)
        async with self._state_lock:
            return await self._to_decode(body)

    async def _to_prefill(self) -> web.StreamResponse:
        async with self._state_lock:
            if self.mounted_segment_ids:
                code = await self._call(self.store.unmount_segment, list(self.mounted_segment_ids))
                if code != 0:
                    return _error(f"Unmount failed, ret={code}", 500, **self._cause())
            self.mounted_segment_ids, self.current_mode, self.last_mount_info = [], "prefill", {}
        return _json({"status": "success", "mode": "prefill"})

    async def _to_decode(self, body: dict[str, Any]) -> web.StreamResponse:
        before = self.mounted_segment_ids
        if self._is_native and before and _location(body) == _location(self.last_mount_info):
            return _json({"status": "success", "mode": "decode", "segment_ids": before})
        # The new segment is mounted first, so that there is always one.
        mounted = await self._mount_file(body["path"], body, self._folders)
        if mounted.taken and before:
            mounted = await self._mount_again(body)
            before = self.mounted_segment_ids
        if mounted.code != 0:
            return self._not_mounted(body["path"], mounted)
        left = [one for one in before if await self._call(self.store.unmount_segment, [one]) != 0]
        if left:
            _LOG.warning("segments of the previous file stay mounted: %s", left)
        self.mounted_segment_ids, self.current_mode = [*mounted.ids, *left], "decode"
        self.last_mount_info = {
            "path": body["path"],
            "offset": body.get("offset", 0),
            "size": body["size"],
            "protocol": body.get("protocol", self.config.protocol),
            "location": body.get("location", ""),
        }
        return _json({"status": "success", "mode": "decode", "segment_ids": self.mounted_segment_ids})

    def _not_mounted(self, path: str, mounted: _Mounted) -> web.StreamResponse:
        """Returns the response if a file could not be mounted. The previous one stays, if any."""
        _LOG.warning("mount failed: path=%s ret=%s cause=%s", path, mounted.code, mounted.cause)
        more = {**_cause_of(mounted), **({"segment_ids": self.mounted_segment_ids} if self._is_native else {})}
        if self.mounted_segment_ids:
            return _error(f"Mount failed, ret={mounted.code}; keeping previous decode segments", 500, mode="decode", **more)
        self.current_mode, self.last_mount_info = "prefill", {}
        return _error(f"Mount failed, ret={mounted.code}; rolled back to prefill", 500, mode="prefill", **more)

    async def _mount_again(self, body: dict[str, Any]) -> _Mounted:
        """Mounts a file after the previous one was unmounted, because both overlap. On failure, the
        previous file is mounted again.
        """
        before = self.mounted_segment_ids
        self.mounted_segment_ids = [one for one in before if await self._call(self.store.unmount_segment, [one]) != 0]
        mounted = await self._mount_allowed(body)
        if mounted.code != 0:
            again = await self._mount_allowed(self.last_mount_info)
            self.mounted_segment_ids = again.ids + self.mounted_segment_ids
            if again.code != 0:
                cause = f"{mounted.cause}; cannot mount the previous file again: {again.cause}"
                return mounted._replace(cause=cause)
        return mounted

    async def _mount_allowed(self, body: dict[str, Any]) -> _Mounted:
        """Mounts a file like `_mount_file`. A file that was moved out of the folders is an ordinary
        failure.
        """
        try:
            return await self._mount_file(body["path"], body, self._folders)
        except _folders.NotAllowed as error:
            return _Mounted(-1, [], str(error))


def _cause_of(mounted: _Mounted) -> dict[str, str]:
    return {"cause": mounted.cause} if mounted.cause else {}


def _location(body: dict[str, Any]) -> tuple[Any, Any, Any]:
    return body.get("path"), body.get("size"), body.get("offset", 0)


def _octets(data: bytes) -> web.Response:
    return web.Response(body=data, content_type="application/octet-stream")


async def _sent(request: Any, view: memoryview) -> web.StreamResponse:
    """Sends a long value in pieces, from the memory where it lies."""
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    response.content_length = len(view)
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    try:
        # Each piece has a limit, so that a stop is noticed, and so has the whole response.
        await asyncio.wait_for(_write_pieces(response, view), time_for(len(view), _READER_S))
    except TimeoutError:
        _LOG.info("%s %s: client stopped reading", request.method, request.path)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        # The client can no longer receive a response.
        _LOG.debug("%s %s: client disconnected", request.method, request.path)
    return response


async def _write_pieces(response: web.StreamResponse, view: memoryview) -> None:
    for at in range(0, len(view), _PIECE):
        await asyncio.wait_for(response.write(bytes(view[at : at + _PIECE])), _READER_S)
    await asyncio.wait_for(response.write_eof(), _READER_S)
