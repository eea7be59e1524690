"""Console script `mooncake`. It has its own module because Mooncake C++ has a `cli.py`, too."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Runs `mooncake`: inspects a cluster, reads and writes objects, benchmarks, and diagnoses
    problems.
    """
    try:
        from mooncake import _installation

        _installation.check()
    except ImportError as error:
        print(f"mooncake: {error}", file=sys.stderr)
        return 1
    from mooncake import _mooncake

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _mooncake.run_tool([os.fspath(part) for part in sys.argv])
