"""Console scripts: servers that run in the process of the script."""

from __future__ import annotations

import os
import signal
import sys

from mooncake import _mooncake


def master() -> int:
    """`mooncake_master`: runs the master of a cluster until it is told to stop."""
    # The server has handlers of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_master([os.fspath(part) for part in sys.argv])


def client() -> int:
    """`mooncake_client`: a member of a cluster for the processes of this host, until it is told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_client([os.fspath(part) for part in sys.argv])


def bench() -> int:
    """`transfer_engine_bench`: measures transfers between engines."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_bench([os.fspath(part) for part in sys.argv])


def http_metadata_server() -> int:
    """`mooncake_http_metadata_server`."""
    from mooncake.http_metadata_server import main

    return main()


def rest_server() -> int:
    """`mc_store_rest_server`."""
    from mooncake.mooncake_store_service import main

    return main()


def topology_dump() -> int:
    """`transfer_engine_topology_dump`: prints which devices are near which memory."""
    import argparse

    from mooncake.engine import TransferEngine

    parser = argparse.ArgumentParser(prog="transfer_engine_topology_dump", description="Which devices are near which memory.")
    parser.add_argument("--device-name", default="", help="RDMA devices to look at, with commas between them")
    parser.add_argument("--custom-topo-json", default="", help="a file that says everything")
    arguments = parser.parse_args()
    if arguments.custom_topo_json:
        os.environ["MC_CUSTOM_TOPO_JSON"] = arguments.custom_topo_json
    print(f"Local topology [te/discover]: {TransferEngine().get_local_topology(arguments.device_name)}")
    return 0
