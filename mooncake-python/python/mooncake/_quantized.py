"""Quantized tensors: their scales and zero points, which lie between the header of an object and
the data.
"""

from __future__ import annotations

import json
import math
from typing import Any

from mooncake._element_types import PACKED, QUANTIZED, torch_dtype

_PER_TENSOR = "per_tensor_affine"
_PER_CHANNEL = ("per_channel_affine", "per_channel_affine_float_qparams")
# Data begins at a multiple of this number of bytes.
_ALIGNMENT = 16


def data_bytes(code: int, shape: tuple[int, ...]) -> int:
    """Returns the length of the data of a packed tensor. Each row of its last dimension begins with
    a byte of its own.
    """
    last = shape[-1] if shape else 1
    return math.prod(shape[:-1]) * -(-last // PACKED[code])


def parameters_of(tensor: Any) -> bytes:
    """Returns the scales and zero points of a quantized tensor, in stored form."""
    scheme = str(tensor.qscheme()).removeprefix("torch.")
    made: dict[str, Any] = {"scheme": scheme}
    if scheme == _PER_TENSOR:
        made |= {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    elif scheme in _PER_CHANNEL:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        made |= {"axis": tensor.q_per_channel_axis(), "scales": scales.tolist(), "zero_points": zero_points.tolist()}
    else:
        raise ValueError(f"cannot put tensor: its quantization has no stored form. qscheme={scheme}")
    text = json.dumps(made, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)


def is_whole(tensor: Any, code: int) -> bool:
    """Returns whether the bytes of a contiguous tensor begin where its memory does. The position of
    others among packed elements is unknown.
    """
    return code not in PACKED or tensor.storage_offset() == 0


def quantized(torch: Any, flat: Any, code: int, shape: tuple[int, ...], parameters: bytes) -> Any:
    """Returns a quantized tensor over the bytes of a flat one. Raises `ValueError` for invalid
    parameters.
    """
    assert code in QUANTIZED
    dtype = torch_dtype(torch, code)
    try:
        given = json.loads(parameters)
        scheme = given["scheme"]
        if scheme == _PER_TENSOR:
            scale, zero_point = float(given["scale"]), int(given["zero_point"])
            made = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero_point, dtype=dtype, device=flat.device)
        elif scheme in _PER_CHANNEL:
            axis, of_floats = int(given["axis"]), scheme != _PER_CHANNEL[0]
            kinds = (torch.float32, torch.float32) if of_floats else (torch.float64, torch.int64)
            scales = torch.tensor(given["scales"], dtype=kinds[0], device=flat.device)
            zero_points = torch.tensor(given["zero_points"], dtype=kinds[1], device=flat.device)
            # torch does not compare them with the shape.
            if not 0 <= axis < len(shape) or not tuple(scales.shape) == tuple(zero_points.shape) == (shape[axis],):
                raise ValueError(f"scales and zero points do not fit the shape {shape}")
            made = torch._empty_per_channel_affine_quantized(
                shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=flat.device
            )
        else:
            raise ValueError(f"unknown qscheme {scheme!r}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError, RuntimeError) as error:
        raise ValueError(f"cannot create tensor: invalid scales or zero points: {error}") from None
    if not flat.numel():
        return made
    storage = torch.storage.TypedStorage(wrap_storage=flat.untyped_storage(), dtype=dtype, _internal=True)
    return made.set_(storage, flat.storage_offset() // made.element_size(), made.shape, made.stride())
