"""Values of structured objects: equal in value and in type once they are read, or refused by name.
"""

from __future__ import annotations

import array
import ctypes
import enum
import io
import json
import math
import mmap
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_columns import identical, objects
from test_structured import Fake

from mooncake.dataproto_catalog import DataProtoCatalog
from mooncake.structured_object_store import FieldSchema, MooncakeBundleTransfer, StructuredObjectPayload, export_ref, import_ref


def transfer() -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(Fake(), "kept", default_chunk_bytes=20)


# Rows of a column whose schema names a type.


@pytest.mark.parametrize("form", ["dataproto", "dict"])
@pytest.mark.parametrize(
    "rows",
    [
        objects([[1, 2], [3, 4], [5, 6]]),
        np.arange(6).reshape(3, 2),
        objects([np.arange(2), np.arange(2, 4), np.arange(4, 6)]),
        np.arange(24).reshape(3, 2, 4),
        np.zeros((3, 0), np.int64),
        objects([7, 8, 9]),
    ],
    ids=["lists", "array", "arrays", "cubes", "no elements", "numbers"],
)
def test_rows_with_dimensions_are_read(form, rows):
    schemas = {"field": FieldSchema("ndarray", metadata={"dtype": "int64", "section": "non_tensor_batch"})}
    given = {"field": rows} if form == "dict" else {"non_tensor_batch": {"field": rows}}
    store = transfer()
    ref = store.put(given, type=form, field_schemas=schemas)
    for picked in (None, [1], [2, 0, 2], slice(1, 3), []):
        got = store.get(ref, type=form, rows=picked)
        got = got["field"] if form == "dict" else got["non_tensor_batch"]["field"]
        expected = rows if picked is None else rows[picked]
        assert [np.asarray(one).tolist() for one in got] == [np.asarray(one).tolist() for one in expected]


@pytest.mark.parametrize("rows", [np.array([0.5, 300.0]), objects([0.5, 300.0]), [0.5, 300.0], np.array([[0.5]])])
def test_flat_dictionaries_are_not_truncated(rows):
    schemas = {"field": FieldSchema("ndarray", metadata={"dtype": "int16", "section": "non_tensor_batch"})}
    with pytest.raises(ValueError, match="field"):
        transfer().put({"field": rows}, type="dict", field_schemas=schemas)


@pytest.mark.parametrize("shape", [[], [2, -1], [2, 1.0], "22", None, [2, 1 << 62], [2, 3]])
def test_an_invalid_shape_of_rows(shape):
    store = transfer()
    schemas = {"field": FieldSchema("ndarray", metadata={"dtype": "int64"})}
    ref = store.put({"non_tensor_batch": {"field": np.arange(4).reshape(2, 2)}}, field_schemas=schemas)
    ref.encoded_non_tensor["field"]["metadata"]["shape"] = shape
    with pytest.raises(ValueError):
        store.get(ref, rows=[1])


# Classes of arrays and tensors.


class Named(np.ndarray):
    """Array with a name."""


MATRIX = np.ones((1, 2)).view(np.matrix)
CLASSES = {
    "own": np.ones((1, 2)).view(Named),
    "matrix": MATRIX,
    "masked": np.ma.masked_array([1.0], [True]),
    "records": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "words": np.char.array([b"a"]),
    "objects": np.array([None], object).view(Named),
}


def tensors() -> dict[str, Any]:
    torch = pytest.importorskip("torch", reason="fields of tensors need torch")

    class Own(torch.Tensor):  # type: ignore[misc,name-defined]
        """Tensor of a program."""

    masked = torch.masked.masked_tensor(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    own = torch.ones(1, 2).as_subclass(Own)
    # A parameter of another class of tensors is one of that class.
    return {"own": own, "parameter": torch.nn.Parameter(own), "masked": masked}


def refused(given: Any, put: str = "put", **how: Any) -> str:
    """Returns the error of a put, which writes nothing."""
    store = Fake()
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        getattr(MooncakeBundleTransfer(store), put)(given, **how)
    assert not store.values
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*MaskedTensor")
@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_a_lost_class_is_refused(kind):
    for value in (CLASSES if kind == "arrays" else tensors()).values():
        assert "would be lost. name='batch.field'" in refused({"batch": {"field": value}}) or value.dtype == object
        assert "'field'" in refused({"field": value}, "put_object") and "'value'" in refused(value, "put_object")
        for section in ("batch", "non_tensor_batch"):
            assert "field" in refused({section: {"field": value}})
        assert "field" in refused({"non_tensor_batch": {"field": objects([value])}})
        assert "field" in refused({"non_tensor_batch": {"field": objects([{"a": [value]}])}})


def parameters() -> list[Any]:
    torch = pytest.importorskip("torch", reason="parameters need torch")

    class Weight(torch.nn.Parameter):  # type: ignore[misc,name-defined]
        """Parameter with a loader of its own."""

        def __new__(cls, data: Any, loader: Any) -> Any:
            return super().__new__(cls, data, requires_grad=False)

        def __init__(self, data: Any, loader: Any) -> None:
            self.loader = loader

    class Column(Weight):
        """Parameter with a dimension."""

    numbers = torch.arange(6.0).reshape(3, 2)
    made = [torch.nn.Parameter(numbers), torch.nn.Parameter(numbers, requires_grad=False), Weight(numbers, print), Column(numbers, print)]
    return [*made, torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)]


@pytest.mark.parametrize("at", range(5))
def test_parameters_are_stored_as_tensors(backing, at):
    torch = pytest.importorskip("torch", reason="parameters need torch")
    store, value = MooncakeBundleTransfer(backing, "kept"), parameters()[at]

    def is_same(got: Any) -> bool:
        return type(got) is torch.Tensor and not got.requires_grad and torch.equal(got, value.detach())

    assert is_same(store.get_object(store.put_object(value)))
    assert is_same(store.get_object(store.put_object({"a": value, "b": b"x"}))["a"])
    plain, rows = torch.zeros(2, dtype=value.dtype), objects([value, None, value])
    given = {"batch": {"x": value}, "non_tensor_batch": {"y": value, "rows": rows, "deep": objects([{"a": value, "n": 1}] * 3)}}
    got = store.get(store.put(given))
    assert is_same(got["batch"]["x"]) and is_same(got["non_tensor_batch"]["y"])
    assert is_same(got["non_tensor_batch"]["rows"][2]) and is_same(got["non_tensor_batch"]["deep"][1]["a"])
    assert is_same(store.get(store.put({"x": value}, type="dict"), type="dict")["x"])
    for codec in (None, "auto", "ragged_tensor", "ragged_tensor_dict"):
        wrapped = [{"k": one} if str(codec).endswith("dict") else one for one in (value, plain)]
        schemas = {} if codec is None else {"y": FieldSchema(codec, metadata={"dtype": "int8"})}
        got = store.get(store.put({"non_tensor_batch": {"y": objects(wrapped)}}, field_schemas=schemas))["non_tensor_batch"]["y"]
        assert is_same(got[0]["k"] if str(codec).endswith("dict") else got[0]), codec


def test_parameters_without_numbers_are_refused():
    torch = pytest.importorskip("torch", reason="parameters need torch")
    value = torch.nn.UninitializedParameter()
    assert "'field'" in refused({"field": value}, "put_object")
    assert "'field'" in refused({"non_tensor_batch": {"field": objects([value])}})


def test_masks_are_refused_with_schemas():
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    for codec in ("typed_ragged", "ragged_tensor", "msgpack_ragged", "json_ragged", "auto", "ndarray"):
        for given in (objects([masked]), masked, np.ma.masked_array(objects([1, 2]), [True, False])):
            how = {"field_schemas": {"field": FieldSchema(codec)}}
            assert "field" in refused({"non_tensor_batch": {"field": given}}, **how)


def test_mapped_arrays_are_arrays(tmp_path):
    mapped = np.memmap(tmp_path / "array", np.int32, "w+", shape=(2, 3))
    mapped[:] = np.arange(6).reshape(2, 3)
    store = transfer()
    got = store.get_object(store.put_object(mapped))
    assert type(got) is np.ndarray and identical(got, np.arange(6, dtype=np.int32).reshape(2, 3))


# Columns of tensors whose rows are numbers.


def torch_rows(codec: str, rows: list[Any], metadata: dict[str, Any] | None = None) -> list[Any]:
    torch = pytest.importorskip("torch", reason="columns of tensors need torch")
    store, wrapped = transfer(), [{"k": row} for row in rows] if codec.endswith("dict") else rows
    ref = store.put({"non_tensor_batch": {"field": objects(wrapped)}}, field_schemas={"field": FieldSchema(codec, metadata=metadata or {})})
    got = [one["k"] if codec.endswith("dict") else one for one in store.get(ref)["non_tensor_batch"]["field"]]
    assert all(type(one) is torch.Tensor for one in got)
    return got


@pytest.mark.parametrize("codec", ["ragged_tensor", "ragged_tensor_dict"])
def test_numbers_become_exact_tensors(codec):
    torch = pytest.importorskip("torch", reason="columns of tensors need torch")
    floats = torch_rows(codec, [[0.1, 16777217.0], [], (0.5,)])
    assert [one.tolist() for one in floats] == [[0.1, 16777217.0], [], [0.5]] and floats[1].dtype == torch.float64
    assert torch_rows(codec, [[(1 << 53) + 1], [1]])[0].tolist() == [(1 << 53) + 1]
    assert torch_rows(codec, [0.1, 2.5])[0].item() == 0.1
    beside = torch_rows(codec, [torch.ones(2), [0.5, 2], torch.nn.Parameter(torch.ones(1)), range(2)])
    assert [one.tolist() for one in beside] == [[1, 1], [0.5, 2], [1], [0, 1]] and beside[1].dtype == torch.float32
    order = torch_rows(codec, [np.arange(3, dtype=">i4")])
    assert order[0].tolist() == [0, 1, 2] and order[0].dtype == torch.int32


@pytest.mark.parametrize("codec", ["ragged_tensor", "ragged_tensor_dict"])
def test_named_types_of_tensors(codec):
    torch = pytest.importorskip("torch", reason="columns of tensors need torch")
    for name, kind in (("float32", torch.float32), ("torch.float32", torch.float32), ("torch.int16", torch.int16), ("uint8", torch.uint8)):
        for rows in ([[1, 2]], [(1, 2), [], deque([3])], [range(1, 3)], [[1.0, 2.0]]):
            got = torch_rows(codec, rows, {"dtype": name})
            assert got[0].tolist() == [1, 2] and got[0].dtype == kind
    assert torch_rows(codec, [[0.1]], {"dtype": "float32"})[0].item() == torch.tensor(0.1).item()
    for name, row in [
        ("float32", [0.5, (1 << 24) + 1]), ("int8", [300]), ("uint8", [-1]), ("float64", [1j]), ("torch.float32", [1e300]), ("uint64", [-1]),
        ("torch.nothing", [1]), ("U3", [1]), ("torch.bits8", [1]), ("int8", deque([300])),
    ]:  # fmt: skip
        wrapped = {"k": row} if codec.endswith("dict") else row
        how = {"field_schemas": {"field": FieldSchema(codec, metadata={"dtype": name})}}
        assert "'field'" in refused({"non_tensor_batch": {"field": objects([wrapped])}}, **how)


@pytest.mark.parametrize("codec", ["ragged_tensor", "ragged_tensor_dict"])
@pytest.mark.parametrize("name", ["float16", "torch.int8", "bfloat16", "torch.bfloat16", "torch.nothing", "U3", np.int64, None])
def test_tensors_and_arrays_keep_their_type_under_a_named_one(codec, name):
    torch = pytest.importorskip("torch", reason="columns of tensors need torch")
    for row in (
        torch.tensor([0.1, 300.0]), torch.tensor([-1]), torch.tensor([True]), np.array([(1 << 64) - 1], np.uint64), np.array([1j]), np.array([0.1]),
    ):  # fmt: skip
        got = torch_rows(codec, [row, []], {"dtype": name})
        expected = torch.as_tensor(row)
        assert torch.equal(got[0], expected) and got[0].dtype == got[1].dtype == expected.dtype


@pytest.mark.parametrize("codec", ["ragged_tensor", "ragged_tensor_dict"])
def test_numbers_beside_tensors_take_their_type(codec):
    torch = pytest.importorskip("torch", reason="columns of tensors need torch")
    for named in ({}, {"dtype": "float64"}, {"dtype": "torch.bfloat16"}):
        got = torch_rows(codec, [torch.tensor([0.1]), [0.3], deque([0.5, 0.7]), 0.9, [deque([0.1]), (0.2,)]], named)
        assert [one.dtype for one in got] == [torch.float32] * 5
        assert torch.equal(got[1], torch.tensor([0.3])) and torch.equal(got[2], torch.tensor([0.5, 0.7])) and got[4].shape == (2, 1)
    for row in ([1e300], [(1 << 24) + 1], deque([1e300])):
        rows = [{"k": one} if codec.endswith("dict") else one for one in (torch.tensor([0.1]), row)]
        assert "'field'" in refused({"non_tensor_batch": {"field": objects(rows)}}, field_schemas={"field": FieldSchema(codec)})


@pytest.mark.parametrize("codec", ["ragged_tensor", "ragged_tensor_dict"])
@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "torch.float8_e4m3fn"])
def test_floating_point_types_that_numpy_lacks(codec, name):
    torch = pytest.importorskip("torch", reason="columns of tensors need torch")
    got = torch_rows(codec, [[0.1], deque([2]), []], {"dtype": name})
    assert [one.dtype for one in got] == [torch.float32] * 3 and torch.equal(got[0], torch.tensor([0.1]))


@pytest.mark.parametrize("codec", ["ragged_tensor", "ragged_tensor_dict"])
def test_rows_of_sequences(codec):
    assert [one.tolist() for one in torch_rows(codec, [deque([0.1, 2.0]), deque(), [0.5], array.array("d", [4.0])])] == [[0.1, 2], [], [0.5], [4]]
    assert torch_rows(codec, [deque([range(2), (2, 3)])])[0].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("row", ["ab", b"ab", bytearray(b"ab"), ["a"], {"a": 1}, np.datetime64("2026-01-01"), [1, 1 << 70], [0.5, (1 << 53) + 1]])
def test_rows_that_become_no_tensor(row):
    pytest.importorskip("torch", reason="columns of tensors need torch")
    how = {"field_schemas": {"field": FieldSchema("ragged_tensor")}}
    assert "'field'" in refused({"non_tensor_batch": {"field": objects([row])}}, **how)


@pytest.mark.parametrize(("dtype", "row"), [("int64", np.array([(1 << 64) - 1], np.uint64)), ("uint64", np.array([-1])), ("uint8", np.array([-1], np.int8))])
def test_no_integer_changes_its_sign(dtype, row):
    for codec, values in (("typed_ragged", objects([row])), ("ndarray", row), ("ndarray", row.reshape(1, 1))):
        how = {"field_schemas": {"field": FieldSchema(codec, metadata={"dtype": dtype})}}
        assert "'field'" in refused({"non_tensor_batch": {"field": values}}, **how)


@pytest.mark.parametrize("time", [np.datetime64("2026-01-01", "ns"), np.timedelta64(5, "ns"), np.array([5], "M8[ns]")])
def test_times_become_no_counts(time):
    for codec in ("msgpack_ragged", "json_ragged", "auto", "ragged_tensor"):
        for values in (objects([time]), objects([{"a": [time]}])):
            assert "'field'" in refused({"non_tensor_batch": {"field": values}}, field_schemas={"field": FieldSchema(codec)})


# Refusals name the field, also one whose name occurs in the reason.


@pytest.mark.parametrize("name", ["a", "e", "non_tensor_batch", "value", "x.y"])
@pytest.mark.parametrize("schema", [None, "auto", "utf8_ragged", "ndarray", "bytes_ragged", "typed_ragged", "ragged_tensor_dict", "json_ragged"])
def test_refused_rows_name_their_field(name, schema):
    deep: Any = []
    deep.append(deep)
    how = {} if schema is None else {"field_schemas": {name: FieldSchema(schema)}}
    for row in ({"k": np.arange(2), "z": {1: 2}}, object(), {"k": object()}, deep):
        with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError), match=f"^cannot put batch: .*field '{name}'"):
            transfer().put({"non_tensor_batch": {name: objects([row])}}, **how)


@pytest.mark.parametrize("value", [np.array(3.0), 3.0, None, np.array(None), np.float32(1)])
def test_fields_without_rows_are_named(value):
    for section in ("batch", "non_tensor_batch"):
        assert "a field has no rows" in (text := refused({section: {"fine": [1], "x": value}})) and "field='x'" in text
    ref = transfer().put({"meta_info": {"n": 1}})
    with pytest.raises(TypeError, match="field='x'"):
        transfer().append_dataproto_fields(ref, {"batch": {"x": value}}, stage="other")
    schemas = {"x": FieldSchema("auto", metadata={"section": "batch"})}
    assert "field='x'" in refused({"x": value}, type="dict", field_schemas=schemas)


def test_fields_of_other_lengths_are_named():
    two, three = np.zeros(2), np.zeros(3)
    for given, how in (
        ({"batch": {"a": two, "b": three}}, {}),
        ({"batch": {"a": two}, "non_tensor_batch": {"b": objects([1, 2, 3])}}, {}),
        ({"a": two, "b": three}, {"type": "dict"}),
        ({"a": [1, 2], "b": [1, 2, 3]}, {"type": "dict"}),
    ):
        text = refused(given, **how)
        assert "batch sizes. rows=2 fields=['a'] rows=3 fields=['b'];" in text and text.startswith("cannot put batch: ")
    store = transfer()
    ref = store.put({"batch": {"a": two}})
    with pytest.raises(ValueError, match=r"^cannot append fields: .*fields=\['b'\]"):
        store.append_dataproto_fields(ref, {"batch": {"b": three}}, stage="other")


@pytest.mark.parametrize("name", [1, None, "", b"a", ("a",)])
def test_names_that_no_handle_has(name):
    for section in ("batch", "non_tensor_batch"):
        assert f"field={name!r}" in refused({section: {name: np.zeros(2)}})
    assert f"field={name!r}" in refused({name: np.zeros(2)}, type="dict")
    if name != "":
        assert repr(name) in refused({name: b"x"}, "put_object")


# Buffers, and arrays without dimensions.


@pytest.fixture(params=["store", "fake"])
def backing(request):
    return Fake() if request.param == "fake" else request.getfixturevalue("store")


@pytest.mark.parametrize("char", "?bBhHiIlLqQefdgFDG")
def test_arrays_without_dimensions_stay_so(backing, char):
    store = MooncakeBundleTransfer(backing, "kept")
    value = np.array(1, char)
    assert identical(store.get_object(store.put_object(value)), value)
    assert identical(store.get_object(store.put_object({"a": value, "b": np.array([1])}))["a"], value)
    ref = store.put_object({"a": value})
    described = store.materialize(store.read_spec(ref)).metadata["__mooncake_structured_fields__"]["a"]
    # Mooncake C++ fails to read the shape (), and skips keys that it does not know.
    assert described == {"encoding": "ndarray", "dtype": value.dtype.str, "shape": [1], "ndim": 0}
    into = np.zeros((), char)
    got = store.materialize_into(store.read_spec(ref), {"a": into})
    assert got.objects["a"] is into and into == 1


@pytest.mark.parametrize("value", [b"", b"ab", bytearray(b"ab"), bytearray(), memoryview(b"ab"), memoryview(b"abcd")[::2], memoryview(bytearray(b"a"))])
def test_buffers_of_bytes_are_kept(backing, value):
    store = MooncakeBundleTransfer(backing, "kept", default_chunk_bytes=1)
    got = store.get_object(store.put_object({"a": value}))["a"]
    if type(value) is bytes:
        # As in Mooncake C++, bytes may come back as an array of them.
        got = bytes(got)
    assert type(got) is type(value) and got == value


@pytest.mark.parametrize(
    "value",
    [
        np.float64(2.5), np.bool_(True), np.int32(7), np.complex64(1j), np.datetime64("2026-01-01"), np.timedelta64(5, "ns"), np.str_("ab"),
        np.bytes_(b"ab"), array.array("d", [1.0]), array.array("B", [1]), (ctypes.c_ubyte * 2)(1, 2), ctypes.c_int(5), mmap.mmap(-1, 8),
        memoryview(np.ones(2)), memoryview(np.ones((2, 2), np.uint8)), memoryview(b"ab").cast("b"), "text", 2.5, None, [1],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_buffers_are_refused(value):
    assert "member: " in refused(value, "put_object") and "value" in refused(value, "put_object")
    assert "mine" in (text := refused({"mine": value}, "put_object")) and text.startswith("cannot put member: ")
    assert "mine" in refused(StructuredObjectPayload({}, {"mine": value}), "put_structured_object")
    assert "mine" in refused({"batch": {"mine": value}})


def test_bundles_take_any_buffer():
    fake = Fake()
    ref = MooncakeBundleTransfer(fake).put_bundle(bytearray(b"meta"), {"a": np.float64(2.5), "b": array.array("d", [1.0])})
    assert fake.values[ref.manifest["buffers"]["a"]["key"]] == np.float64(2.5).tobytes()


# Metadata of a batch, in a reference that was sent as JSON.


def sent(ref: Any) -> Any:
    handle = json.loads(json.dumps(export_ref(ref)))
    assert json.dumps(export_ref(import_ref(handle))) == json.dumps(handle)
    return handle


METADATA = {
    "array": np.arange(3, dtype=np.int16), "no rows": np.zeros((0, 3), "f4"), "no dimensions": np.array(2.5, "f4"), "order": np.arange(2, dtype=">i4"),
    "long": np.longdouble(0.1), "half": np.float16(0.1), "double": np.float64(0.1), "int": np.int32(-1), "switch": np.bool_(True),
    "word": np.str_("w"), "words": np.array([["ab", "c"]]), "tuple": (1, (2, "x"), [()]), "deep": {"a": [{"b": (np.arange(2), 0.5)}]},
    "special": np.array([math.nan, -0.0, math.inf]), "unsigned": np.array([(1 << 64) - 1], np.uint64), "large": 1 << 70, "none": None,
    "objects": np.array(["a", None, 1, 0.5], object), "more objects": np.array([[1, "a"], [None, True]], object), "no objects": np.zeros((2, 0, 3), object),
    "lists of objects": objects([[1, 2], [3, 4]]), "one object": objects([{"a": (1,)}]).reshape(()), "typed objects": objects([np.int8(1), (2,), np.arange(2)]),
    "deep objects": {"a": [objects([objects([1, "b"]), None]), np.array([1, "a"], object)]}, "order of objects": objects([*range(6)]).reshape(2, 3).T,
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_kept_in_handles(name):
    store, value = transfer(), METADATA[name]
    handle = sent(store.put({"batch": {"x": np.zeros(2)}, "meta_info": {"m": value, "n": 1}}))
    got = store.get(handle)["meta_info"]
    assert got["n"] == 1 and list(got) == ["m", "n"] and identical(got["m"], value), got
    catalog = DataProtoCatalog()
    catalog.update("p", ["a", "b"], handle=handle)
    assert identical(catalog.resolve("p", ["a"])["meta_info"]["m"], value)
    # An older reader takes the value that JSON has.
    assert import_ref({**handle, "meta_types": {}}).meta_info["m"] == handle["meta_info"]["m"] or name == "special"


@pytest.mark.parametrize(
    "value",
    [
        np.datetime64("2026-01-01", "ns"), np.timedelta64(5, "ns"), np.array([5], "M8[ns]"), np.longdouble(1) / 3, np.array([1j]), 1j, b"x",
        np.clongdouble(1j), np.array([b"x"], object), np.array([object()]), np.array([None], object).view(Named), np.void(b"x"), np.zeros(2, [("a", "i4")]), np.ma.masked_array([1], [True]), MATRIX, {1: 2}, object(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_metadata_is_refused_by_name(value):
    for given, name in ((value, r"'meta_info\.m[\['.]"), ([{"k": (value,)}], r"'meta_info\.m\[0\]|'meta_info\.m'")):
        ref = transfer().put({"meta_info": {"m": given}})
        with pytest.raises(TypeError, match=f"^cannot export DataProto ref: .*{name}"):
            export_ref(ref)


PAIRS = {
    "number": (1, np.int64(1)), "list": ([1, 2], (1, 2)), "array": ([1, 2], np.arange(1, 3)), "objects": (["a", None], np.array(["a", None], object)),
    "deep": ({"a": [(1,)]}, {"a": ([np.int8(1)],)}), "arrays": (np.arange(2, dtype="i4"), np.arange(2)), "word": ("w", np.str_("w")),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_equal_metadata_of_other_types_does_not_conflict(name):
    for first, second in (PAIRS[name], PAIRS[name][::-1]):
        catalog, store = DataProtoCatalog(), transfer()
        for key, value in (("a", first), ("b", second)):
            catalog.update("p", [key], handle=sent(store.put({"batch": {"x": np.zeros(1)}, "meta_info": {"m": value}})))
        # The first batch has the types.
        assert identical(catalog.resolve("p", ["a", "b"])["meta_info"]["m"], first)
        assert identical(catalog.resolve("p", ["b", "a"])["meta_info"]["m"], second)
        catalog.update("p", ["c"], handle=sent(store.put({"batch": {"x": np.zeros(1)}, "meta_info": {"m": [7]}})))
        with pytest.raises(ValueError, match="different values of meta_info 'm'"):
            catalog.resolve("p", ["a", "c"])


def test_metadata_of_subclasses_becomes_plain():
    class Step(enum.IntEnum):
        FIRST = 1

    class Pair(NamedTuple):
        x: int

    got = transfer().get(sent(transfer().put({"meta_info": {"e": Step.FIRST, "o": OrderedDict(a=(1,)), "p": Pair(1)}})))["meta_info"]
    assert identical(got, {"e": 1, "o": {"a": (1,)}, "p": (1,)})


def test_metadata_nested_too_deeply():
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match=r"meta_info\.m"):
        export_ref(transfer().put({"meta_info": {"m": deep}}))


@pytest.mark.parametrize("described", [["array", "O", [1]], ["array", "<i4", [9]], "what", ["dict", {"z": "int"}], None, 7, [], ["list", {"5": "int"}], ["objects", [3], None], ["objects", [2, 1], None], ["objects", [2.0], None], ["objects", 2, None], ["objects", [2]], ["objects", {}, None], ["objects", [2], "int"]])
def test_invalid_types_of_metadata(described):
    handle = sent(transfer().put({"meta_info": {"m": [1, 2]}}))
    for types in ({"m": described}, {"other": "int"}, [described], described):
        if types is None:
            continue
        with pytest.raises(ValueError):
            import_ref({**handle, "meta_types": types})


@pytest.mark.parametrize("array", [np.zeros((0, 3), "f4"), np.array(2.5, "f4"), np.zeros((2, 0), "i1"), np.zeros((0,), "<U2")])
def test_arrays_of_flat_dictionaries_are_kept(array):
    store = transfer()
    for others in ({}, {"x": np.zeros((array.shape or (3,))[0])}, {"empty": [], "n": 1}):
        given = {"a": array, **others}
        got = store.get(sent(store.put(given, type="dict")), type="dict")
        assert identical(got, given), got


# Images.


def pictures() -> dict[str, Any]:
    image = pytest.importorskip("PIL.Image", reason="columns of images need Pillow")
    pixels = image.frombytes("RGB", (4, 3), bytes(range(36)))
    made = {mode: image.new(mode, (4, 3)) for mode in ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")}
    made |= {"colors": pixels.quantize(8), "no pixels": image.new("P", (0, 0))}
    made["alpha"] = image.frombytes("PA", (4, 3), bytes(24))
    made["alpha"].putpalette(bytes(range(40)), "RGBA")
    made["four"] = image.frombytes("P", (4, 3), bytes(12))
    made["four"].putpalette(bytes(range(40)), "RGBA")
    for name, base, transparency in (("one", pixels.quantize(8), 3), ("some", pixels.quantize(8), b"\0\x80"), ("color", pixels.copy(), (0, 1, 2)), ("gray", made["L"].copy(), 0)):
        base.info["transparency"] = transparency
        made[name] = base
    for name in ("one", "some", "color", "colors"):
        file = io.BytesIO()
        made[name].save(file, "PNG")
        made[f"file of {name}"] = image.open(io.BytesIO(file.getvalue()))
    return made


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("form", ["rows", "lists", "dictionaries"])
def test_images_keep_their_colors(form):
    made = pictures()
    wrap = {"rows": lambda one: one, "lists": lambda one: [one, one], "dictionaries": lambda one: {"image": one, "n": 1}}[form]
    unwrap = {"rows": lambda one: one, "lists": lambda one: one[1], "dictionaries": lambda one: one["image"]}[form]
    store = transfer()
    handle = sent(store.put({"non_tensor_batch": {"field": objects([*map(wrap, made.values()), None])}}))
    for rows in (None, [*range(len(made))][::-1]):
        got = store.get(handle, rows=rows)["non_tensor_batch"]["field"]
        names = [*made] if rows is None else [*made][::-1]
        for name, one in zip(names, map(unwrap, got[: len(names)]), strict=True):
            expected = made[name]
            assert (one.mode, one.size, one.format) == (expected.mode, expected.size, expected.format), name
            assert one.tobytes() == expected.tobytes() and one.getpalette(None) == expected.getpalette(None), name
            assert one.info.get("transparency") == expected.info.get("transparency"), name
            for mode in ("RGB", "RGBA") if expected.mode in ("P", "PA", "L", "RGB") else ():
                # A conversion changes the palette of its image.
                assert one.copy().convert(mode).tobytes() == expected.copy().convert(mode).tobytes(), name


@pytest.mark.parametrize("wrong", [{"palette": "?"}, {"palette": 7}, {"palette": "AAAA", "palette_mode": "what"}, {"transparency": {}}, {"transparency": 0.5}])
def test_invalid_colors_of_images(wrong):
    store = transfer()
    ref = store.put({"non_tensor_batch": {"field": objects([pictures()["one"]])}})
    ref.encoded_non_tensor["field"]["metadata"]["media_encodings"][0] |= wrong
    with pytest.raises(ValueError):
        store.get(ref)


def test_images_of_several_frames_are_refused():
    first, second, file = pictures()["colors"], pictures()["one"], io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=[second.transpose(0)])
    image = pytest.importorskip("PIL.Image").open(file)
    assert image.n_frames == 2
    for value in (image, [image], {"a": image}):
        assert "field 'field'" in (text := refused({"non_tensor_batch": {"field": objects([value])}})) and "frames=2" in text
    first.info["transparency"] = "red"
    assert "field 'field'" in refused({"non_tensor_batch": {"field": objects([first])}})


def frames(form: str, count: int) -> bytes:
    """Returns the file of an image of several frames."""
    image, file = pytest.importorskip("PIL.Image", reason="columns of images need Pillow"), io.BytesIO()
    first, *others = [image.new("RGB", (4, 3), (50 * i, 10, 20)) for i in range(count)]
    try:
        first.save(file, form, save_all=True, append_images=others)
    except (KeyError, OSError) as error:
        pytest.skip(f"Pillow lacks a format: {error!r}")
    return file.getvalue()


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_each_format_of_several_frames_is_refused(form):
    data = frames(form, 2)
    for is_loaded in (False, True):
        value = pytest.importorskip("PIL.Image").open(io.BytesIO(data))
        if is_loaded:
            value.load()
        for given in (value, [value], {"a": value}):
            assert "field 'field'" in (text := refused({"non_tensor_batch": {"field": objects([given])}})) and "frames=2" in text


def test_photos_with_previews_are_images():
    value = pytest.importorskip("PIL.Image").open(io.BytesIO(frames("MPO", 2)))
    assert type(value).__name__ == "MpoImageFile" and value.n_frames == 2
    store = transfer()
    for given in (value, [value], {"a": value}):
        got = store.get(store.put({"non_tensor_batch": {"field": objects([given])}}))["non_tensor_batch"]["field"][0]
        got = got[0] if type(got) is list else got["a"] if type(got) is dict else got
        assert (got.format, got.mode, got.size, got.tobytes()) == ("MPO", "RGB", (4, 3), value.tobytes())


@pytest.mark.parametrize(("form", "count"), [("GIF", 1), ("GIF", 2), ("PNG", 1), ("PNG", 2), ("WEBP", 1), ("TIFF", 1), ("TIFF", 2), ("MPO", 2), ("JPEG", 1)])
def test_loaded_images_of_closed_files_are_stored(tmp_path, form, count):
    path = tmp_path / "image"
    path.write_bytes(frames(form, count))
    with pytest.importorskip("PIL.Image").open(path) as value:
        value.load()
    pixels, store = value.tobytes(), transfer()
    for given in (value, [value]):
        got = store.get(store.put({"non_tensor_batch": {"field": objects([given])}}))["non_tensor_batch"]["field"][0]
        got = got[0] if type(got) is list else got
        assert (got.format, got.mode, got.tobytes()) == (form, value.mode, pixels) and value.tobytes() == pixels


def test_closed_images_without_pixels_are_refused(tmp_path):
    path = tmp_path / "image"
    path.write_bytes(frames("GIF", 1))
    with pytest.importorskip("PIL.Image").open(path) as value:
        pass
    assert "field 'field'" in refused({"non_tensor_batch": {"field": objects([value])}})
