"""Console script `mooncake`. A module of its own, because Mooncake C++ has a `cli.py`, too."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """`mooncake`: looks at a cluster, reads and writes objects, measures, and finds what is wrong."""
    try:
        from mooncake import _installation

        _installation.check()
    except ImportError as error:
        print(f"mooncake: {error}", file=sys.stderr)
        return 1
    from mooncake import _mooncake

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_tool([os.fspath(part) for part in sys.argv])
