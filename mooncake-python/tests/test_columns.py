"""Columns of random values against a row-by-row computation of their stored form."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import math
import random
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from test_structured import Fake

from mooncake._columns import LEAVES, FieldSchema
from mooncake._dataproto import column
from mooncake._decisions import choose
from mooncake._members import ArrayRows, Pieces
from mooncake._row_types import is_converted
from mooncake._trees import TREE, encode
from mooncake._writes import _runs_of_rows
from mooncake.structured_object_store import MooncakeBundleTransfer, export_ref

DTYPES = ("i1", "u2", "i4", "<i8", ">i8", "u8", "f2", "f4", "f8", "c8", "?")
SEEDS = 300


def random_array(chance: random.Random, dtypes: list[str]) -> np.ndarray[Any, Any]:
    shape = tuple(chance.randrange(4) for _ in range(chance.choice((0, 1, 1, 1, 2, 3))))
    made = np.array([chance.randrange(100) for _ in range(int(np.prod(shape)))], chance.choice(dtypes)).reshape(shape)
    if made.ndim and chance.random() < 0.3:
        made = np.repeat(made, 2, axis=-1)[..., ::2]
    return np.asfortranarray(made) if chance.random() < 0.2 else made


def random_column(chance: random.Random) -> list[Any]:
    dtypes = chance.sample(DTYPES, chance.choice((1, 1, 2, 3)))
    numbers = chance.choice(([1, 2, -3], [0.5, 2.0], [1, 0.5], [True, False], [1, True], [1, 1 << 63]))
    is_flat = chance.random() < 0.5

    def array() -> Any:
        made = random_array(chance, dtypes)
        return made.reshape(-1) if is_flat else made

    def flat() -> Any:
        return chance.choice((list, tuple))(chance.choice(numbers) for _ in range(chance.randrange(5)))

    def nested() -> Any:
        return [[chance.choice(numbers)] * 2 for _ in range(chance.randrange(3))]

    makers = chance.choice(([array], [array], [flat], [flat], [flat, nested], [array, flat]))
    absent = chance.choice((0, 0, 0.3))
    return [None if chance.random() < absent else chance.choice(makers)() for _ in range(chance.randrange(1, 12))]


def stored_rows(values: list[Any], dtype: Any) -> dict[str, Any]:
    """Computes the stored form of rows one by one."""
    arrays = [None if value is None else np.asarray(value) for value in values]
    present = [array for array in arrays if array is not None]
    typed = [a for a, v in zip(arrays, values) if a is not None and (a.size or isinstance(v, np.ndarray))]
    dtype = dtype or (np.result_type(*typed) if typed else np.dtype(np.int64))
    most = max((array.ndim for array in present), default=0)
    are_arrays = all(value is None or isinstance(value, np.ndarray) for value in values)
    alike = {array.shape[1:] for array in present}
    common = alike.pop() if are_arrays and len(alike) == 1 else ()
    absent_ndim = 1 if present and not any(isinstance(value, np.ndarray) for value in values) else 0
    data, offsets, shapes, ndims = b"", [0], [], []
    for array in arrays:
        shape = array.shape if array is not None else (0, *common)
        data += b"" if array is None else np.asarray(array, dtype).tobytes("C")
        offsets.append(offsets[-1] + (0 if array is None else array.size))
        shapes.append([*shape, *[0] * max(most, 1)][: max(most, 1)])
        ndims.append(absent_ndim if array is None else array.ndim)
    nulls = [value is None for value in values]
    return {"data": data, "offsets": offsets, "shapes": shapes, "ndims": ndims, "nulls": nulls, "dtype": str(dtype)}


def in_memory(value: Any) -> Any:
    """Returns a payload as a reader returns it."""
    if isinstance(value, Pieces):
        return np.frombuffer(b"".join(value.body().pieces), np.uint8)
    if isinstance(value, ArrayRows):
        described = value.described()
        return np.frombuffer(b"".join(value.pieces), described["dtype"]).reshape(described["shape"])
    return value


def same(one: Any, other: Any) -> bool:
    """Returns whether values are equal. Rows that were arrays must be arrays."""
    if isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and one.shape == other.shape and bool((one == other).all())
    if isinstance(other, tuple):
        other = list(other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
def test_rows_of_numbers():
    first = random.randrange(1 << 32)
    for seed in range(first, first + SEEDS):
        chance = random.Random(seed)
        values = random_column(chance)
        schema = FieldSchema("typed_ragged", metadata=chance.choice(({}, {}, {"dtype": "float64"})))
        codec = LEAVES["typed_ragged"]
        given = None if not schema.metadata else np.dtype("float64")
        try:
            expected = stored_rows(values, given)
        except (TypeError, ValueError):
            # A list of lists of different lengths cannot become an array.
            with pytest.raises((TypeError, ValueError)):
                codec.encode(values, schema)
            continue
        if expected["dtype"] == "object":
            continue
        with np.errstate(all="ignore"):
            payload, metadata = codec.encode(values, schema)
        payload = {name: in_memory(one) for name, one in payload.items()}
        found = {name: one.tolist() for name, one in payload.items() if name != "data"}
        found |= {"data": payload["data"].tobytes(), "dtype": metadata["dtype"]}
        assert found == expected, f"seed {seed}: {values}"
        decoded = codec.decode(payload, len(values), metadata)
        converted = [value if value is None else np.asarray(value, expected["dtype"]) for value in values]
        wanted = [c if isinstance(v, np.ndarray) or v is None else c.tolist() for v, c in zip(values, converted)]
        assert all(map(same, decoded, wanted)), f"seed {seed}: {values} {decoded}"


def test_packed_values():
    first = random.randrange(1 << 32)
    makers = {
        "bytes_ragged": lambda chance: bytes(chance.randrange(256) for _ in range(chance.choice((0, 3, 9000)))),
        "utf8_ragged": lambda chance: "wörter " * chance.randrange(3),
        "msgpack_ragged": lambda chance: chance.choice(({"a": [1, "x"]}, [], {"b": {"c": 0.5}}, "word", 7, {})),
        "json_ragged": lambda chance: chance.choice(({"a": [1, "x"]}, [], {"b": {"c": 0.5}}, "word", 7, None)),
        "media_list_ragged": lambda chance: [b"x" * chance.randrange(4) for _ in range(chance.randrange(3))],
    }
    for seed in range(first, first + SEEDS):
        chance = random.Random(seed)
        name = chance.choice([*makers])
        absent = chance.choice((0, 0.4))
        values = [None if chance.random() < absent else makers[name](chance) for _ in range(chance.randrange(9))]
        payload, metadata = LEAVES[name].encode(values, FieldSchema(name))
        decoded = LEAVES[name].decode({part: in_memory(one) for part, one in payload.items()}, len(values), metadata)
        assert decoded == values, f"seed {seed}: {name}"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2, "x")), [1, [2, "x"]]),
        ({"a": np.arange(3)}, {"a": [0, 1, 2]}),
        ([np.float32(0.5), np.int8(-1), np.bool_(True), np.str_("w")], [0.5, -1, True, "w"]),
    ],
)
def test_values_that_msgpack_and_json_lack(value, plain):
    for name in ("msgpack_ragged", "json_ragged"):
        payload, metadata = LEAVES[name].encode([value, value], FieldSchema(name))
        decoded = LEAVES[name].decode({part: in_memory(one) for part, one in payload.items()}, 2, metadata)
        assert decoded == [plain, plain]
        with pytest.raises(TypeError):
            LEAVES[name].encode([{"a": object()}], FieldSchema(name))


@pytest.mark.parametrize(
    ("values", "codec", "dtype"),
    [
        ([1, 2, 3], "ndarray", "int64"),
        ([1, None, 0.5], "ndarray", "float64"),
        ([True, False], "ndarray", "bool"),
        ([-1, 5, 1 << 40], "ndarray", "int64"),
        ([np.float32(1), np.float32(2)], "ndarray", "float32"),
        ([np.int8(1), np.int16(2)], "ndarray", "int16"),
        ([[1, 2], [3, 4, 5]], "typed_ragged", "int64"),
        ([[1, 2], [0.5]], "typed_ragged", "float64"),
        ([[1], [1 << 63]], "typed_ragged", "float64"),
        ([np.arange(2, dtype=np.int16), np.arange(3, dtype=np.int32)], "typed_ragged", "int32"),
    ],
)
def test_common_type(values, codec, dtype):
    assert choose(values).codec == codec
    made = encode("column", values, None)
    assert (made.codec, made.metadata["dtype"]) == (codec, dtype)
    present = [value for value in values if value is not None]
    assert str(np.result_type(*[np.asarray(value) for value in present])) == dtype or codec == "ndarray"


def test_rows_are_packed_into_chunks():
    def packed(sizes, chunk):
        """Packs rows one by one."""
        runs, first, size = [], 0, 0
        for at, one in enumerate(sizes):
            if one > chunk:
                return None
            if size + one > chunk:
                runs.append((size, sizes[first:at]))
                first, size = at, 0
            size += one
        return [*runs, (size, sizes[first:])] if size else runs

    first = random.randrange(1 << 32)
    for seed in range(first, first + SEEDS):
        chance = random.Random(seed)
        sizes = [chance.choice((0, 1, 5, 8)) for _ in range(chance.randrange(20))]
        chunk = chance.randrange(1, 20)
        expected, runs = packed(sizes, chunk), _runs_of_rows(np.cumsum(sizes, dtype=np.int64), chunk)
        if expected is None:
            assert runs is None, f"seed {seed}"
            continue
        assert [size for *_, size in runs] == [size for size, _ in expected], f"seed {seed}"
        for at, count, size in runs:
            assert sum(sizes[at : at + count]) == size <= chunk, f"seed {seed}"


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], [(1, 2), (3, 4)], [np.arange(2), np.arange(2)], ["a", "b"]])
def test_rows_of_one_length_stay_rows(rows):
    made = column("x", rows)
    assert made.shape == (2,) and all(one is other for one, other in zip(made, rows, strict=True))


# A get returns the value that was put: values at the edges of every type, alone and mixed.

FLOATS = (0.0, -0.0, 1.5, 0.1, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, float(1 << 53))
INTS = (0, 1, -1, 127, -128, 255, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 80))
SCALARS = "?bBhHiIlLqQefdgFDG"
Pair = namedtuple("Pair", "x y")


class Color(enum.IntEnum):
    RED = 1


def numpy_scalars(char: str) -> list[Any]:
    """Returns the values at the edges of a type of numpy."""
    dtype = np.dtype(char)
    if dtype.kind == "b":
        return [np.bool_(True), np.bool_(False)]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [dtype.type(value) for value in (info.min, info.max, 0, 1)]
    info = np.finfo(dtype)
    made = [dtype.type(value) for value in (0.0, -0.0, 0.1, math.inf, math.nan)]
    made += [info.max, info.tiny, info.smallest_subnormal] if dtype.kind == "f" else []
    return made + ([dtype.type(complex(-0.0, 0.1)), dtype.type(complex(math.nan, -1))] if dtype.kind == "c" else [])


VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [*INTS],
    "small": [0, 1, -1, 7],
    "float": [*FLOATS],
    "complex": [complex(0, -0.0), 1j, complex(math.nan, 1), complex(0.1, math.inf)],
    "str": ["", "a", "großes wort", "\0", "\ud800"],
    "bytes": [b"", b"\0\xff"],
    "buffer": [bytearray(b"ab"), memoryview(b"cd"), memoryview(np.arange(3))],
    "times": [np.datetime64("2026-01-02"), np.datetime64("NaT"), np.timedelta64(5, "ns"), datetime.datetime(2026, 1, 2)],
    "texts of numpy": [np.str_("w"), np.str_(""), np.bytes_(b"\xff")],
    "others": [Color.RED, decimal.Decimal("0.1"), 1 << 70, {1, 2}, Pair(1, 2), OrderedDict(a=1), Ellipsis, int],
    **{f"numpy.{char}": numpy_scalars(char) for char in SCALARS},
}
ARRAYS = [
    np.array([], "f4"), np.array(7, "i1"), np.arange(3, dtype=">i4"), np.array([2**63 - 1, -1]), np.array([2**64 - 1], "u8"),
    np.array([math.nan, -0.0, 0.1], "f2"), np.array([[0.1, -0.0]], "f4"), np.array([1j, complex(0, -0.0)], "c8"),
    np.array([True, False]), np.array(["a"]), np.array([None]), np.zeros(2, "M8[s]"), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3).T,
    np.ma.masked_array([1, 2], [True, False]), np.zeros(2, [("a", "i4")]), np.array([0.1], "g"), np.arange(4)[::2],
]  # fmt: skip
try:
    import ml_dtypes
except ImportError:
    pass
else:
    ARRAYS += [np.ones(2, ml_dtypes.float8_e5m2), np.ones(2, ml_dtypes.int4)]
    VALUES["others"].append(ml_dtypes.bfloat16(1.5))


def random_value(chance: random.Random, kinds: list[str], depth: int) -> Any:
    shape = chance.random()
    if depth and shape < 0.15:
        return [random_value(chance, kinds, depth - 1) for _ in range(chance.randrange(4))]
    if depth and shape < 0.25:
        return tuple(random_value(chance, kinds, depth - 1) for _ in range(chance.randrange(3)))
    if depth and shape < 0.4:
        names = chance.sample(["a", "b", "c.d", "", *((1, None, b"k", 0.5, np.str_("n")) if chance.random() < 0.05 else ())], 2)
        return {name: random_value(chance, kinds, depth - 1) for name in names}
    if shape > 0.93:
        return None
    if shape > 0.8 and "arrays" in kinds:
        return chance.choice(ARRAYS)
    return chance.choice(VALUES[chance.choice([kind for kind in kinds if kind != "arrays"])])


def random_rows(chance: random.Random) -> list[Any]:
    kinds = chance.sample([*VALUES], chance.choice((1, 1, 2, 3)))
    if chance.random() < 0.25:
        kinds += ["arrays"]
    style, count = chance.random(), chance.randrange(1, 6)
    if style < 0.2:
        return [[chance.choice(VALUES[chance.choice(kinds[:1])]) for _ in range(chance.randrange(4))] for _ in range(count)]
    if style < 0.4:
        some = chance.sample(ARRAYS, chance.choice((1, 1, 2, 3)))
        return [chance.choice(some) for _ in range(count)]
    depth = chance.choice((0, 0, 1, 2))
    return [random_value(chance, kinds, depth) for _ in range(count)]


def identical(one: Any, other: Any) -> bool:
    """Returns whether two values are equal in value and in type, with signs of zeros."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return all(map(identical, one.reshape(-1).tolist(), other.reshape(-1).tolist()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, dict):
        return set(map(type, one)) == set(map(type, other)) and one.keys() == other.keys() and all(
            identical(one[key], other[key]) for key in one
        )
    if isinstance(one, complex | np.complexfloating):
        return identical(one.real, other.real) and identical(one.imag, other.imag)
    if isinstance(one, float | np.floating):
        return bool(one != one and other != other) or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return bool(one == other)


def objects(values: list[Any]) -> Any:
    made = np.empty(len(values), object)
    for row, value in enumerate(values):
        made[row] = value
    return made


@pytest.mark.parametrize("seed", range(40))
def test_what_is_put_is_what_is_got(seed):
    stored = refused = 0
    for number in range(100):
        chance = random.Random(seed * 1000 + number)
        values, transfer = random_rows(chance), MooncakeBundleTransfer(Fake())
        where = f"seed {seed * 1000 + number}: {values!r}"
        try:
            ref = transfer.put({"non_tensor_batch": {"field": objects(values)}})
        except (TypeError, ValueError) as error:
            assert "field" in str(error), where
            refused += 1
            continue
        handle = json.loads(json.dumps(export_ref(ref)))
        rows = chance.sample(range(len(values)), chance.randrange(len(values) + 1))
        for picked in (None, rows, range(len(values))[1:]):
            got = transfer.get(handle, rows=None if picked is None else [*picked])["non_tensor_batch"]["field"]
            expected = values if picked is None else [values[row] for row in picked]
            assert all(map(identical, got, expected)) and len(got) == len(expected), f"{where} {got!r}"
        stored += 1
    assert stored > 10 and refused > 3


# Columns that are stored, and how. These are never refused.
KEPT: dict[str, list[Any]] = {
    "int and float": [1, 2.5, None, (1 << 53) + 1],
    "large integers": [1, (1 << 64) - 1],
    "large of both signs": [-1, (1 << 64) - 1],
    "bool and int": [True, 1, 0, False],
    "signs of zero": [0.0, -0.0, math.nan],
    "unsigned and signed of numpy": [np.uint64((1 << 64) - 1), np.int64(-1)],
    "numpy and plain": [np.int64(3), 5, None],
    "halves and floats": [np.float16(0.1), np.float32(0.1), 0.1],
    "words of numpy": [np.str_("a"), "b"],
    "buffers": [bytearray(b"a"), b"b"],
    "complex": [1j, 2, None],
    "tuples": [(1, 2), (3,), ()],
    "tuples and lists": [(1, 2.5), [3, True], ()],
    "tuples in dictionaries": [{"size": (2, 3), "n": np.float32(0.5)}, {"size": (4, 5)}],
    "tuples beside arrays": [{"size": (2, 3), "image": np.arange(3)}, {"size": (4, 5)}],
    "integers and floats beside arrays": [{"n": 1, "image": np.arange(3)}, {"n": 0.5, "image": np.arange(2)}, {"n": 1 << 60}],
    "arrays of two types": [np.arange(3, dtype=np.int8), np.arange(2, dtype=np.float32)],
    "arrays without a common type": [np.array([(1 << 63) - 1]), np.array([(1 << 64) - 1], np.uint64)],
    "byte order": [np.arange(3, dtype=">i4"), np.arange(2, dtype="<i4")],
    "lists of integers and of floats": [[1, 2], [0.5], [1 << 62, 0.5]],
    "lists of large integers": [[1], [(1 << 63) + 1]],
    "empty lists": [[], [[]], [[], []]],
    "lists of numpy": [[np.float32(0.1)] * 3, [np.float32(0.2)]],
    **{f"numpy.{char}": numpy_scalars(char) for char in SCALARS},
}


@pytest.mark.parametrize("name", KEPT)
def test_these_values_are_kept(name):
    transfer = MooncakeBundleTransfer(Fake())
    ref = transfer.put({"non_tensor_batch": {"field": objects(KEPT[name])}})
    got = transfer.get(json.loads(json.dumps(export_ref(ref))))["non_tensor_batch"]["field"]
    assert all(map(identical, got, KEPT[name])), got
    (last,) = transfer.get(ref, rows=[len(KEPT[name]) - 1])["non_tensor_batch"]["field"]
    assert identical(last, KEPT[name][-1])


@pytest.mark.parametrize(
    "values",
    [
        [{1: "a"}],
        [Color.RED],
        [OrderedDict(a=1)],
        [np.ma.masked_array([1, 2], [True, False])],
        [np.zeros(2, [("a", "i4")])],
        [1 << 64],
        [memoryview(np.arange(3))],
        [datetime.date(2026, 1, 2)],
    ],
    ids=["keys", "enum", "ordered", "masked", "record", "integer", "view", "date"],
)
def test_values_without_a_stored_form_are_refused_by_the_name_of_the_field(values):
    store = Fake()
    with pytest.raises((TypeError, ValueError), match="field"):
        MooncakeBundleTransfer(store).put({"non_tensor_batch": {"field": objects(values)}})
    assert not store.values


def without_tensors(value: Any, like: Any) -> Any:
    """Returns the numbers of tensors as arrays or lists, as a row has them."""
    if isinstance(value, dict):
        return {key: without_tensors(one, like[key]) for key, one in value.items()}
    if type(value).__name__ != "Tensor":
        return value
    return value.numpy() if isinstance(like, np.ndarray) else value.tolist()


def random_numbers(chance: random.Random) -> list[Any]:
    """Returns rows that columns of tensors may have."""
    kind = chance.choice(["bool", "int", "small", "float", "complex", "numpy.f", "numpy.Q", "arrays"])
    some = ARRAYS if kind == "arrays" else VALUES[kind]

    def row() -> Any:
        if chance.random() < 0.2:
            return None
        if kind == "arrays" or chance.random() < 0.2:
            return chance.choice(some)
        return chance.choice((list, tuple))(chance.choice(some) for _ in range(chance.randrange(3)))

    return [row() for _ in range(chance.randrange(1, 4))]


@pytest.mark.parametrize("dtype", [None, "float32", "int64", "complex128", "torch.uint8"])
@pytest.mark.parametrize("codec", [*LEAVES, "auto", TREE])
def test_a_schema_converts_types_and_never_values(codec, dtype):
    if codec.startswith("ragged_tensor"):
        pytest.importorskip("torch", reason="columns of tensors need torch")
    stored = 0
    schemas = {"field": FieldSchema(codec, metadata={} if dtype is None else {"dtype": dtype})}
    for seed in range(400 if dtype is None else 150):
        chance = random.Random(seed)
        values, transfer = random_rows(chance), MooncakeBundleTransfer(Fake())
        if codec.startswith("ragged_tensor") or (dtype is not None and chance.random() < 0.5):
            values = random_numbers(chance)
        if codec == "ragged_tensor_dict":
            values = [None if value is None else {"a": value, **({"b": value} if row else {})} for row, value in enumerate(values)]
        try:
            ref = transfer.put({"non_tensor_batch": {"field": objects(values)}}, field_schemas=schemas)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            assert "field" in str(error), (seed, values)
            continue
        for picked in (range(len(values)), [*range(len(values))[::-1]], [len(values) - 1]):
            rows = [values[row] for row in picked]
            got = transfer.get(ref, rows=None if isinstance(picked, range) else picked)["non_tensor_batch"]["field"]
            plain = [without_tensors(one, row) for one, row in zip(got, rows, strict=True)]
            may_round = dtype in ("float32", "complex128")
            kept = (is_converted(row, one) or (may_round and rounded(row, one)) for row, one in zip(rows, plain))
            assert all(kept), f"seed {seed}: {values} {got}"
        stored += 1
    assert stored


def rounded(value: Any, back: Any) -> bool:
    """Returns whether floats come back as those of float32 that are next to them."""
    if isinstance(value, dict):
        return value.keys() == back.keys() and all(rounded(one, back[key]) for key, one in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(back) and all(is_converted(one, two) or rounded(one, two) for one, two in zip(value, back))
    one, other = np.asarray(value), np.asarray(back)
    assert one.dtype.kind in "fc" and one.shape == other.shape, "only floats round"
    parts = ((one.real, other.real), (one.imag, other.imag))
    return all(np.allclose(a, b, 1e-6, 1e-38, equal_nan=True) for a, b in parts)


@pytest.mark.parametrize(
    ("dtype", "kept", "refused"),
    [
        ("int8", [1, 2.0, True], [[300], [0.5], [math.nan], [1j], [-129]]),
        ("uint64", [(1 << 64) - 1, 1.0], [[-1], [1 << 64], [0.5]]),
        ("float32", [0.5, 1, math.inf, math.nan], [[(1 << 24) + 1], [1e300], [1j]]),
        ("float64", [0.1, 1 << 63], [[(1 << 53) + 1], [1 << 2000]]),
        ("complex64", [0.5, 1j], [[(1 << 24) + 1]]),
        ("bool", [True, 0], [[2], [0.5]]),
    ],
)
def test_a_named_type_refuses_what_it_cannot_hold(dtype, kept, refused):
    for codec, wrap in (("ndarray", lambda value: value), ("typed_ragged", lambda value: [value])):
        schemas = {"field": FieldSchema(codec, metadata={"dtype": dtype})}
        transfer = MooncakeBundleTransfer(Fake())
        given = objects([wrap(value) for value in kept])
        got = transfer.get(transfer.put({"non_tensor_batch": {"field": given}}, field_schemas=schemas))
        assert all(map(is_converted, given, got["non_tensor_batch"]["field"]))
        for one in refused:
            given = objects([wrap(value) for value in one])
            with pytest.raises((TypeError, ValueError, RuntimeError), match="field"):
                transfer.put({"non_tensor_batch": {"field": given}}, field_schemas=schemas)
    rounded = transfer.put({"non_tensor_batch": {"field": [0.1]}}, field_schemas={"field": FieldSchema("ndarray", metadata={"dtype": "float32"})})
    assert transfer.get(rounded)["non_tensor_batch"]["field"][0] == float(np.float32(0.1))


@pytest.mark.parametrize("shape", ["list", "tuple", "dict", "deep", "with arrays", "with numbers", "objects"])
def test_tensors_inside_rows_are_tensors_again_or_refused(shape):
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(2), torch.tensor(3), torch.zeros(0), torch.ones(2, 2, dtype=torch.complex64).T):
        values = {
            "list": [[tensor], [tensor, tensor]],
            "tuple": [(tensor,), (tensor, tensor)],
            "dict": [{"a": [tensor, tensor], "b": b"x"}],
            "deep": [[[tensor]]],
            "with arrays": [np.ones(2), [tensor]],
            "with numbers": [[tensor, 2]],
            "objects": objects([[tensor], [tensor, tensor]]),
        }[shape]
        store = Fake()
        transfer = MooncakeBundleTransfer(store)
        try:
            ref = transfer.put({"non_tensor_batch": {"field": values if shape == "objects" else objects(values)}})
        except (TypeError, ValueError) as error:
            assert "field" in str(error) and not store.values
            continue
        got = transfer.get(json.loads(json.dumps(export_ref(ref))))["non_tensor_batch"]["field"]
        assert all(map(identical_with_tensors, got, values)), (got, values)


def identical_with_tensors(one: Any, other: Any) -> bool:
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical_with_tensors, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical_with_tensors(one[key], other[key]) for key in one)
    return identical(one, other)


class Word(str):
    """Word of a program."""


@pytest.mark.parametrize("key", [np.str_("a"), Word("a")], ids=["numpy", "own"])
def test_keys_of_another_class_than_str_are_refused(key):
    with pytest.raises((TypeError, ValueError), match="field"):
        MooncakeBundleTransfer(Fake()).put({"non_tensor_batch": {"field": objects([{key: np.arange(2)}])}})


@pytest.mark.parametrize(
    "array",
    [
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.ones((1, 2)).view(np.matrix),
        np.char.array([b"a", b"b"]),
    ],
    ids=["recarray", "matrix", "chararray"],
)
@pytest.mark.parametrize("section", ["batch", "non_tensor_batch"])
def test_arrays_whose_class_would_be_lost_are_refused(section, array):
    store = Fake()
    with pytest.raises(TypeError, match="class would be lost.*field"):
        MooncakeBundleTransfer(store).put({section: {"field": array}})
    assert not store.values
