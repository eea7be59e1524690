"""Columns of random values against a row-by-row computation of their stored form."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mooncake._columns import LEAVES, FieldSchema
from mooncake._dataproto import column
from mooncake._decisions import choose
from mooncake._members import ArrayRows, Pieces
from mooncake._trees import encode
from mooncake._writes import _runs_of_rows

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
    made = column("x", rows, None)
    assert made.shape == (2,) and all(one is other for one, other in zip(made, rows, strict=True))
