"""Interpreters on which the import is refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sys.version_info = (3, 10, 13)", "Python is too old. python=3.10.13 oldest=3.11"),
        (
            "sys.version_info, sys.abiflags = (3, 14, 1), 't'",
            "free-threaded builds of Python are not supported. python=3.14.1t; "
            "use the build with the global interpreter lock",
        ),
    ],
    ids=["old", "free-threaded"],
)
def test_the_import_is_refused(setting: str, message: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import sys; {setting}; import mooncake"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: cannot import mooncake: {message}"
