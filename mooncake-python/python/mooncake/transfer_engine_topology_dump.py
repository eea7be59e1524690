"""Command `transfer_engine_topology_dump`: prints the devices near each memory."""

from __future__ import annotations

import argparse
import os
import sys

from mooncake.engine import TransferEngine


def main() -> int:
    """Prints the devices near each memory, as the arguments of the process say. Returns an exit
    status.
    """
    parser = argparse.ArgumentParser(prog="transfer_engine_topology_dump", description="Print the devices near each memory.")
    parser.add_argument("--device-name", default="", help="RDMA devices to include, separated by commas")
    parser.add_argument("--backend", choices=("auto", "te", "tent"), default="auto", help="tent is not supported")
    parser.add_argument("--use-custom-topo", action="store_true", help="use the file that MC_CUSTOM_TOPO_JSON names")
    parser.add_argument("--custom-topo-json", default="", help="topology file, in place of discovery")
    arguments = parser.parse_args()
    if arguments.backend == "tent":
        parser.error("backend tent is not supported; use te")
    if arguments.custom_topo_json:
        os.environ["MC_CUSTOM_TOPO_JSON"] = arguments.custom_topo_json
    elif not arguments.use_custom_topo:
        os.environ.pop("MC_CUSTOM_TOPO_JSON", None)
    custom = os.environ.get("MC_CUSTOM_TOPO_JSON")
    origin = f"te/custom ({custom})" if custom else "te/discover"
    print(f"Local topology [{origin}]: {TransferEngine().get_local_topology(arguments.device_name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
