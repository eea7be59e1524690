"""Command `transfer_engine_bench`, for programs that run it as a module."""

from __future__ import annotations

import sys

from mooncake.cli import bench


def main() -> int:
    """Runs `transfer_engine_bench` with the arguments of the process. Returns an exit status."""
    return bench()


if __name__ == "__main__":
    sys.exit(main())
