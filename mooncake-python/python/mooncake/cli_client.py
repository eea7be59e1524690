"""Command `mooncake_client`, for programs that run it as a module."""

from __future__ import annotations

import sys

from mooncake.cli import client


def main() -> int:
    """Runs `mooncake_client` with the arguments of the process. Returns an exit status."""
    return client()


if __name__ == "__main__":
    sys.exit(main())
