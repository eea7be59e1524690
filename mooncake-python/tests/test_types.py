"""Type annotations: mypy on the package, stubtest on the native half."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="types are checked with mypy")

HERE = Path(__file__).parent
PROJECT = HERE.parent


def run(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_is_typed():
    run("mypy", "python/mooncake")


def test_the_stubs_match_the_module():
    allowed = str(HERE / "stubtest-allowed.txt")
    run("mypy.stubtest", "mooncake._mooncake", "--allowlist", allowed, "--ignore-unused-allowlist")


def test_importing_needs_nothing_else():
    code = """
import sys
sys.modules.update(dict.fromkeys(["torch", "numpy", "msgpack", "aiohttp"]))
import mooncake, mooncake.store, mooncake.engine, mooncake.buffer_pool, mooncake.async_store, mooncake.mooncake_config
import mooncake.shared_segment
"""
    subprocess.run([sys.executable, "-c", code], check=True)
