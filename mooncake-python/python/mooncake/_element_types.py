"""Element types of tensors: their numbers in headers, and their names in torch and numpy."""

from __future__ import annotations

from typing import Any

# Types of Mooncake C++ by their number in the header: the name in torch, and the size of an element
# in bytes.
_SHARED: tuple[tuple[str, int], ...] = (
    ("float32", 4),
    ("float64", 8),
    ("int8", 1),
    ("uint8", 1),
    ("int16", 2),
    ("uint16", 2),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("bool", 1),
    ("float16", 2),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)
# First number of the types that Mooncake C++ lacks. It is far from the numbers of Mooncake C++,
# which refuses a header with an unknown one. Numbers never change, because they are stored.
FIRST_OWN_CODE = 1 << 16
_OWN: tuple[tuple[int, str, int], ...] = (
    (0, "float8_e4m3fnuz", 1),
    (1, "float8_e5m2fnuz", 1),
    (2, "float8_e8m0fnu", 1),
    # An element is a byte with two numbers, also in shapes.
    (3, "float4_e2m1fn_x2", 1),
    (4, "complex32", 4),
    (5, "complex64", 8),
    (6, "complex128", 16),
    (7, "bcomplex32", 4),
    # torch keeps each of these integers in its own byte.
    *((16 + bits, f"int{bits}", 1) for bits in range(1, 8)),
    *((24 + bits, f"uint{bits}", 1) for bits in range(1, 8)),
    (32, "bits8", 1),
    (33, "bits16", 2),
    (34, "bits1x8", 1),
    (35, "bits2x4", 1),
    (36, "bits4x2", 1),
    (48, "qint8", 1),
    (49, "quint8", 1),
    (50, "qint32", 4),
    (51, "quint4x2", 1),
    (52, "quint2x4", 1),
)

# Name in torch and size of an element in bytes, by the number in the header.
DTYPES: dict[int, tuple[str, int]] = {
    **dict(enumerate(_SHARED)),
    **{FIRST_OWN_CODE + number: (name, size) for number, name, size in _OWN},
}
DTYPE_CODES = {name: code for code, (name, _) in DTYPES.items()}
# Types whose objects have scales and zero points behind the header.
QUANTIZED = frozenset(FIRST_OWN_CODE + number for number in range(48, 53))
# Elements in a byte.
PACKED = {FIRST_OWN_CODE + 51: 2, FIRST_OWN_CODE + 52: 4}
# Types that numpy has itself. The package ml_dtypes adds others, by the same names.
_OF_NUMPY = frozenset(
    {name for name, _ in _SHARED if not name.startswith(("bfloat", "float8"))} | {"complex64", "complex128"}
)


def code_of(torch_dtype: Any) -> int | None:
    """Returns the number of a type of torch, or `None` if it has none."""
    return DTYPE_CODES.get(str(torch_dtype).removeprefix("torch."))


def torch_dtype(torch: Any, code: int) -> Any:
    """Returns the type of torch with that number. Raises `ValueError` if this torch lacks it."""
    name = DTYPES[code][0]
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise ValueError(f"cannot create tensor: torch {torch.__version__} has no such type. dtype={name}; use a newer torch")
    return dtype


def numpy_code(dtype: Any) -> int | None:
    """Returns the number of an element type of numpy or ml_dtypes in native byte order, or `None`
    if it has none.
    """
    code = DTYPE_CODES.get(dtype.name)
    if code is None or not dtype.isnative or dtype.itemsize != DTYPES[code][1]:
        return None
    return code if is_ml_dtype(dtype) or dtype.name in _OF_NUMPY else None


def is_ml_dtype(dtype: Any) -> bool:
    """Returns whether an element type is one of ml_dtypes."""
    return bool(dtype.type.__module__.split(".")[0] == "ml_dtypes")


def numpy_dtype(code: int) -> Any:
    """Returns the element type of numpy with that number. Raises `ValueError` if there is none."""
    import numpy as np

    name = DTYPES[code][0]
    return np.dtype(name) if name in _OF_NUMPY else ml_dtype(name)


def ml_dtype(name: str) -> Any:
    """Returns the element type of that name in ml_dtypes. Raises `ValueError` if there is none."""
    import numpy as np

    try:
        import ml_dtypes
    except ImportError:
        raise ValueError(f"cannot create array: numpy lacks the type. dtype={name}; pip install ml_dtypes") from None
    scalar = getattr(ml_dtypes, name, None)
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic):
        raise ValueError(f"cannot create array: numpy and ml_dtypes lack the type. dtype={name}; use get_tensor")
    return np.dtype(scalar)
