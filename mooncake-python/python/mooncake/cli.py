"""Console scripts that run in the process of the script."""

from __future__ import annotations

import os
import signal
import sys

from mooncake import _mooncake


def master() -> int:
    """Runs `mooncake_master`, the master of a cluster, until a signal stops it. Some programs end
    every process of this name on their host; `mooncake_store_master` is another name of it.
    """
    # The server installs its own signal handlers.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_master([os.fspath(part) for part in sys.argv])


def client() -> int:
    """Runs `mooncake_client`, a client shared by the processes of this host, until a signal
    stops it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_client([os.fspath(part) for part in sys.argv])


def bench() -> int:
    """Runs `transfer_engine_bench`, which measures transfers between engines."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_bench([os.fspath(part) for part in sys.argv])


def _without(script: str, error: ModuleNotFoundError) -> int:
    """Reports the package that a script lacks, because the wheel does not require it. Returns an
    exit status.
    """
    if error.name != "aiohttp":
        raise error
    print(f"{script}: aiohttp is not installed; pip install aiohttp", file=sys.stderr)
    return 1


def http_metadata_server() -> int:
    """Runs `mooncake_http_metadata_server`."""
    try:
        from mooncake.http_metadata_server import main
    except ModuleNotFoundError as error:
        return _without("mooncake_http_metadata_server", error)
    return main()


def rest_server() -> int:
    """Runs `mc_store_rest_server`."""
    try:
        from mooncake.mooncake_store_service import sync_main
    except ModuleNotFoundError as error:
        return _without("mc_store_rest_server", error)
    return sync_main()


def topology_dump() -> int:
    """Runs `transfer_engine_topology_dump`, which prints the devices near each memory."""
    from mooncake.transfer_engine_topology_dump import main as dump

    return dump()


# Name of the master's script in Mooncake C++.
main = master

if __name__ == "__main__":
    sys.exit(main())
