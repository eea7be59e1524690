"""Modules of this package against those of Mooncake C++, on recorders in place of a cluster.

`MOONCAKE_PEER_PYTHON` names a Python that has the wheel of Mooncake C++. `cargo xtask interop` runs
the same program with clusters of both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "peer" / "modules.py"


def test_either_build_reads_what_the_other_writes():
    peer = os.environ.get("MOONCAKE_PEER_PYTHON")
    if not peer:
        pytest.skip("MOONCAKE_PEER_PYTHON names no Python with the wheel of Mooncake C++")
    ended = subprocess.run([sys.executable, str(PROGRAM), sys.executable, peer], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stdout.split()[0]) > 3000, ended.stdout
