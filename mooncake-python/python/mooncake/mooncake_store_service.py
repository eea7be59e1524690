"""REST server of a store: `mc_store_rest_server`. Needs aiohttp."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from mooncake import _folders, _openapi
from mooncake._connections import ALLOWED_HOSTS, Connections, metrics_page, raise_descriptor_limit
from mooncake._json_bodies import refuse_charset
from mooncake._request_limits import BodyRules
from mooncake._rest_handlers import RestHandlers, _json, _with_errors
from mooncake._rest_handlers import _shm_name_to_path as _shm_name_to_path
from mooncake._sizes import parse_size, port
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore

__all__ = ["MooncakeStoreService", "main", "parse_arguments", "sync_main"]

_LOG = logging.getLogger(__name__)
# Maximum bytes of the body of `/api/put`.
_MAX_BODY = 100 << 20
# Paths without values, which programs may read by any name of the server.
_OPEN_PATHS = ("/health", "/metrics", "/openapi.json")
# Seconds between two attempts to set up the store.
_RETRY_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class MooncakeStoreService(RestHandlers):
    """Store with an HTTP interface."""

    def __init__(
        self,
        config_path: str | None = None,
        cli_config: Mapping[str, Any] | None = None,
        *,
        config: MooncakeConfig | None = None,
        store: Any = None,
        folders: Sequence[str] | None = None,
        allowed_hosts: str | None = None,
        max_mount_size: int | None = None,
    ) -> None:
        """Loads settings from a file, or from the environment. `cli_config` has settings that
        replace them, as they are.

        `config` replaces both. With `folders`, requests may only mount files in them. Pages in
        browsers may call the server by the names in `allowed_hosts`. Requests may mount new memory
        of `max_mount_size` bytes in all, that of this host by default.
        """
        if config is None:
            try:
                config = MooncakeConfig.from_file(config_path) if config_path else MooncakeConfig.load_from_env()
            except Exception as error:
                _LOG.error("cannot load settings: %s", error)
                raise
        for name, value in (cli_config or {}).items():
            if hasattr(config, name):
                setattr(config, name, value)
        self.config = config
        self.store = store
        self._folders = folders
        self.current_mode = "prefill"
        self.mounted_segment_ids = []
        self.last_mount_info = {}
        self._state_lock = asyncio.Lock()
        self.app = web.Application(client_max_size=_MAX_BODY, middlewares=[self.check_body])
        self.app.add_routes(
            [
                web.put("/api/put", self.handle_put),
                web.get("/api/get/{key:.+}", self.handle_get),
                web.get("/api/exist/{key:.+}", self.handle_exist),
                web.delete("/api/remove_all", self.handle_remove_all),
                web.delete("/api/remove/{key:.+}", self.handle_remove),
                web.post("/api/mount", self.handle_mount),
                web.post("/api/unmount", self.handle_unmount),
                web.post("/api/mount_shm", self.handle_mount_shm),
                web.post("/api/unmount_shm", self.handle_unmount_shm),
                web.post("/api/unmount_local_disk", self.handle_unmount_local_disk),
                web.post("/api/reconfigure", self.handle_reconfigure),
                web.get("/health", self.health),
                web.get("/openapi.json", self.openapi),
                web.get("/metrics", self.metrics),
            ]
        )
        self._max_mount = max_mount_size
        rules = BodyRules(refuse_charset, self.is_put)
        self.connections = Connections(self.app, name="rest", guards_all_but=_OPEN_PATHS, bodies=rules)
        self._allowed_hosts = allowed_hosts
        self.connections.allow(allowed_hosts, str(self.config.local_hostname))

    async def start_store_service(self, max_wait_time: float = 60, shutdown_event: asyncio.Event | None = None) -> bool:
        """Sets up a store, and retries until it succeeds or that many seconds have passed.

        Returns `False` at once when the event is set.
        """
        loop = asyncio.get_running_loop()
        stop = shutdown_event or asyncio.Event()
        deadline = loop.time() + max_wait_time
        while not stop.is_set():
            store = MooncakeDistributedStore()
            try:
                code = await self._call(store.setup, self.config.as_setup())
            except Exception as error:
                code = error
            if not isinstance(code, Exception) and code == 0:
                self.store = store
                # Signals that arrived meanwhile are handled now.
                await asyncio.sleep(0)
                if not stop.is_set():
                    return True
                await self.stop()
                return False
            _LOG.warning("cannot set up the store: %s", code)
            left = deadline - loop.time()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), min(_RETRY_S, left))
        return False

    async def start_http_service(self, port: int = 8080, host: str = "127.0.0.1") -> bool:
        """Starts to serve requests, at loopback by default. Raises `OSError` if the port cannot be
        used.
        """
        self.connections.allow(self._allowed_hosts, str(self.config.local_hostname), host)
        await self.connections.listen(host, port)
        _LOG.info("REST server on %s port %s", host, port)
        return True

    async def stop(self) -> None:
        """Stops serving, and closes the store."""
        connections = getattr(self, "connections", None)
        if connections is not None:
            await connections.stop()
        store, self.store = self.store, None
        if store is None:
            return
        code = await self._call(store.close)
        if code not in (None, 0):
            _LOG.warning("cannot close the store: code=%s", code)

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


def _settings(path: str | None, changes: Sequence[str]) -> MooncakeConfig:
    in_environment = any(name in os.environ for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"))
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


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="mc_store_rest_server", description=__doc__)
    parser.add_argument("--config", help="JSON file with settings (default: environment)")
    parser.add_argument(
        "-D", "--define", dest="define", action="append", default=[], metavar="key=value", help="setting that overrides the file and the environment"
    )
    parser.add_argument("--port", type=port, default=8080)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, 0.0.0.0 for all (default: 127.0.0.1)")
    parser.add_argument("--allowed_hosts", "--allowed-hosts", help=ALLOWED_HOSTS)
    parser.add_argument("--max_mount_size", "--max-mount-size", type=parse_size, help="memory that /api/mount may mount in all (default: that of this host)")
    parser.add_argument(
        "--folder",
        dest="folders",
        action="append",
        default=list(_folders.USUAL),
        metavar="PATH",
        help="folder whose files /api/reconfigure may mount, besides /dev/shm and /dev/hugepages",
    )
    parser.add_argument("--max-wait-time", type=float, default=60, help="seconds to wait until the store is set up")
    return parser.parse_args()


def _install_shutdown_signal_handlers(loop: asyncio.AbstractEventLoop, shutdown_event: asyncio.Event) -> None:
    """Sets the event when the process is asked to end."""

    def stop(number: int) -> None:
        _LOG.info("stopping: signal=%s", signal.Signals(number).name)
        shutdown_event.set()

    for number in _SIGNALS:
        try:
            loop.add_signal_handler(number, stop, number)
        except (NotImplementedError, RuntimeError):
            signal.signal(number, lambda number, frame: loop.call_soon_threadsafe(stop, number))


def _unblock_shutdown_signals() -> None:
    """Unblocks the signals, which a launcher may have blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


async def main() -> None:
    """Runs `mc_store_rest_server` with the arguments of the process, until a signal stops it.

    Raises `ValueError` for invalid settings, `RuntimeError` if the store cannot be set up, and
    `OSError` if the port cannot be used.
    """
    options = parse_arguments()
    service = MooncakeStoreService(
        config=_settings(options.config, options.define),
        folders=options.folders,
        allowed_hosts=options.allowed_hosts,
        max_mount_size=options.max_mount_size,
    )
    shutdown_event = asyncio.Event()
    _install_shutdown_signal_handlers(asyncio.get_running_loop(), shutdown_event)
    _unblock_shutdown_signals()
    raise_descriptor_limit()
    try:
        if not await service.start_store_service(max_wait_time=options.max_wait_time, shutdown_event=shutdown_event):
            if shutdown_event.is_set():
                return
            raise RuntimeError(f"cannot set up the store within {options.max_wait_time} s; is the master running?")
        await service.start_http_service(options.port, options.host)
        await shutdown_event.wait()
    finally:
        await service.stop()


def sync_main() -> int:
    """Runs `main`. Returns an exit status."""
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(main())
    except (ValueError, RuntimeError, OSError) as error:
        print(f"mc_store_rest_server: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) or error.__class__ is FileNotFoundError else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(sync_main())
