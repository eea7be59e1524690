"""Allocators of GPU memory for PyTorch: memory that peers can open over NVLink and CUDA IPC."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from mooncake import _mooncake

__all__ = ["BarexAllocator", "NVLinkAllocator"]


class NVLinkAllocator:
    """Gives PyTorch allocators whose memory peers can open: to the NVLink fabric where the GPU is in one, to this host by CUDA IPC otherwise."""

    _allocators: dict[int, Any] = {}
    _lock = threading.Lock()

    @classmethod
    def _probe(cls, device_id: int) -> int:
        return int(ctypes.CDLL(_mooncake.__file__).mc_allocator_probe(device_id))

    @classmethod
    def get_allocator(cls, device: Any) -> Any:
        """The allocator of a device (``torch.device``, a number or a text), a ``torch.cuda.memory.CUDAPluggableAllocator``.

        RuntimeError: there is no CUDA driver, or no such device.
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
                    raise RuntimeError("GPU memory needs NVIDIA's driver: libcuda.so.1 is not there, or finds no device")
                if backend < 0:
                    raise RuntimeError(f"there is no device cuda:{number}")
                cls._allocators[number] = CUDAPluggableAllocator(
                    _mooncake.__file__, "mc_nvlink_malloc", "mc_nvlink_free"
                )
            return cls._allocators[number]


class BarexAllocator:
    """The existing system's allocator for another vendor's wire, which is not built in."""

    @classmethod
    def get_allocator(cls, device: Any) -> Any:
        raise RuntimeError("the barex wire is not built in")
