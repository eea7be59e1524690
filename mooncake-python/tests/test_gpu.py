"""GPU memory in the package, with a fake libcuda as the driver of separate processes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "mooncake-nvlink" / "fake" / "cuda.c"


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake_cuda")
    library = folder / "libcuda.so.1"
    options = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", str(library), str(SOURCE)], check=True)
    return folder


def run(fake_cuda, code):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_cuda)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


PRELUDE = """
import ctypes
from mooncake import _mooncake
library = ctypes.CDLL(_mooncake.__file__)
library.mc_nvlink_malloc.restype = ctypes.c_void_p
library.mc_nvlink_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
library.mc_nvlink_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
"""


def test_a_framework_allocates_memory_that_other_processes_can_open(fake_cuda):
    run(
        fake_cuda,
        PRELUDE
        + """
assert library.mc_allocator_probe(0) == 0 and library.mc_allocator_probe(1) == 0
assert library.mc_allocator_probe(7) == -1 and library.mc_allocator_probe(-1) == -1
for device in (0, 1):
    at = library.mc_nvlink_malloc(5000, device, None)
    assert at and _mooncake.device_of(at + 4999) == device
    library.mc_nvlink_free(at, 5000, device, None)
    assert _mooncake.device_of(at) is None
assert not library.mc_nvlink_malloc(0, 0, None) and not library.mc_nvlink_malloc(1 << 40, 0, None)
assert not library.mc_nvlink_malloc(64, 7, None) and not library.mc_nvlink_malloc(64, -1, None)
library.mc_nvlink_free(None, 0, 0, None)
""",
    )


def test_a_missing_driver_is_reported():
    from mooncake import _mooncake
    from mooncake.allocator import BarexAllocator, NVLinkAllocator

    probe = ctypes.CDLL(_mooncake.__file__).mc_allocator_probe(0)
    if probe != -2:
        pytest.skip("there is a driver here")
    pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="libcuda.so.1"):
        NVLinkAllocator.get_allocator("cuda:0")
    with pytest.raises(RuntimeError, match="barex"):
        BarexAllocator.get_allocator("cuda:0")
