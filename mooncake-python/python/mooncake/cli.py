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
