"""Allocators of GPU memory for PyTorch, whose memory other processes can open over NVLink and CUDA
IPC.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from mooncake import _mooncake

__all__ = ["BarexAllocator", "NVLinkAllocator"]


class NVLinkAllocator:
    """Factory of PyTorch allocators whose memory other processes can open.

    The memory is open to the NVLink fabric if the GPU is in one, otherwise to this host by CUDA
    IPC.
    """

    _allocators: dict[int, Any] = {}
    _lock = threading.Lock()

    @classmethod
    def _probe(cls, device_id: int) -> int:
        return int(ctypes.CDLL(_mooncake.__file__).mc_allocator_probe(device_id))

    @classmethod
    def get_allocator(cls, device: Any) -> Any:
        """Returns the allocator of a device, a ``torch.cuda.memory.CUDAPluggableAllocator``.

        `device` is a ``torch.device``, a number or a text.

        Raises `RuntimeError` if there is no CUDA driver or no such device.
        """
        from torch import device as torch_device
        from torch.cuda.memory import CUDAPluggableAllocator

        if isinstance(device, int):
            device = torch_device("cuda", device)
        device = torch_device(device)
        number = device.index or 0
        with cls._lock:
            if number not in cls._allocators:
                backend = cls._probe(number)
                if backend == -2:
                    raise RuntimeError("cannot allocate GPU memory: libcuda.so.1 is missing or finds no device; install NVIDIA's driver")
                if backend < 0:
                    raise RuntimeError(f"cannot allocate GPU memory: no such device cuda:{number}")
                cls._allocators[number] = CUDAPluggableAllocator(
                    _mooncake.__file__, "mc_nvlink_malloc", "mc_nvlink_free"
                )
            return cls._allocators[number]


class BarexAllocator:
    """Placeholder for an allocator of Mooncake C++ that serves another vendor's transport."""

    @classmethod
    def get_allocator(cls, device: Any) -> Any:
        raise RuntimeError("cannot create allocator: the barex transport is not supported")
