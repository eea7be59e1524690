"""Batches of samples: sections, columns of every kind, partial reads, stages, handles."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_structured import Fake

from mooncake.structured_object_store import (
    FieldSchema,
    MooncakeBundleTransfer,
    StructuredMemberSlice,
    export_ref,
    import_ref,
    is_dataproto_ref_handle,
    raw_destination,
)


class Watched(Fake):
    """Store that records which keys were read."""

    def __init__(self):
        super().__init__()
        self.read = []

    def get(self, key):
        self.read.append(key)
        return super().get(key)


@pytest.fixture(params=["store", "fake"])
def backing(request):
    return Fake() if request.param == "fake" else request.getfixturevalue("store")


@pytest.fixture
def transfer(backing):
    return MooncakeBundleTransfer(backing, "batches", default_chunk_bytes=100)


def same(one, other):
    """Returns whether two values are equal in value, type and element type."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype != object:
            return bool((one == other).all())
        return all(same(a, b) for a, b in zip(one, other))
    if type(one).__module__.startswith("torch"):
        return type(one) is type(other) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    return type(one) is type(other) and one == other


def column(*values):
    made = np.empty(len(values), object)
    for row, value in enumerate(values):
        made[row] = value
    return made


COLUMNS = {
    "numbers": column(1, 2, None, 4, 5),
    "reals": column(0.5, None, 1.5, 2.5, 3.5),
    "switches": column(True, False, None, True, True),
    "words": column("a", "", None, "großes wort", "e"),
    "raw": column(b"1", b"", b"\0" * 50, None, b"5"),
    "lists": column([1, 2], [], [3], None, [4, 5, 6]),
    "rows_of_rows": column([[1, 2], [3, 4]], [[5, 6]], None, [[7, 8]], [[9, 10]]),
    "arrays": column(np.arange(3), np.arange(0), None, np.arange(5), np.arange(1)),
    "grids": column(np.ones((2, 3)), np.zeros((1, 3)), np.ones((2, 3)), np.ones((3, 3)), None),
    "shapes": column(np.ones((2, 3), np.int8), np.array(7, np.int8), np.ones(4, np.int8), None, np.ones((1, 1), np.int8)),
    "mixed": column([1, 2], np.arange(3), None, [3], np.arange(2)),
    "pictures": column([b"p1", b"p22"], [], None, [b"p3"], [b"", b"p4"]),
    "plain": column({"a": 1, "b": [1, "x"]}, {"a": 2}, None, {}, {"c": {"d": 1.5}}),
    "heavy": column(
        {"image": np.arange(4), "tag": "x"}, {"image": None, "tag": None}, None, {"tag": "y"}, {"image": np.arange(2)}
    ),
    "nested": column(
        [{"raw": b"12"}, {"raw": b"3", "n": 1}], [], None, [{"n": 2}], [None, {"raw": b"", "n": None}]
    ),
    "odd.na[me]\\s": column({"a.b": b"1", "c[d": b"2"}, {"a.b": b"3"}, None, {"c[d": b"4"}, {"\\": b"5"}),
    "nothing": column(None, None, None, None, None),
    "words_and_numbers": column("x", 1, None, 2.5, True),
}


def data():
    return {
        "batch": {"tokens": np.arange(20, dtype=np.int32).reshape(5, 4), "mask": np.eye(5, 4, dtype=np.float16)},
        "non_tensor_batch": {**COLUMNS, "ids": np.arange(5, dtype=np.int64)},
        "meta_info": {"step": 7, "name": "rollout"},
    }


@pytest.mark.parametrize("rows", [None, slice(1, 4), slice(None, None, 2), [4, 0, 0], [], StructuredMemberSlice(0, -2, 9)])
def test_columns_of_every_kind(transfer, rows):
    given = data()
    ref = transfer.put(given)
    assert ref.batch_size == 5 and ref.encoded_non_tensor.keys() == COLUMNS.keys()
    got = transfer.get(json.loads(json.dumps(export_ref(ref))), rows=rows)
    picked = slice(-2, 9) if isinstance(rows, StructuredMemberSlice) else rows
    for section in ("batch", "non_tensor_batch"):
        assert got[section].keys() == given[section].keys()
        for name, value in given[section].items():
            expected = value if picked is None else value[picked]
            assert same(got[section][name], expected), (name, got[section][name], expected)
    assert got["meta_info"] == given["meta_info"]
    transfer.cleanup_dataproto(ref)


def test_only_selected_fields_are_read():
    store = Watched()
    transfer = MooncakeBundleTransfer(store, default_chunk_bytes=64)
    long = column(*[bytes([row]) * 64 for row in range(16)])
    ref = transfer.put({"batch": {"x": np.zeros((16, 64), np.uint8)}, "non_tensor_batch": {"raw": long}})
    store.read.clear()
    got = transfer.get(ref, fields=["raw"], rows=[3, 9])["non_tensor_batch"]["raw"]
    assert list(got) == [long[3], long[9]]
    data = [key for key in store.read if "raw.data" in key]
    assert sorted(key.rpartition("/")[2] for key in data) == ["3", "9"] and not any("batch.x" in key for key in store.read)


def test_fields_and_destinations(transfer):
    ref = transfer.put(data(), namespace="n", partition="p", stage="actor")
    both = transfer.get_dataproto(ref, batch_fields=["mask"], non_tensor_fields=["words"])
    assert same(both, transfer.get(ref, fields=["words", "mask"]))
    got = transfer.get(ref, fields=["words"], meta_info_keys=["step", "none"])
    assert got["batch"] == {} and list(got["non_tensor_batch"]) == ["words"] and got["meta_info"] == {"step": 7}
    into = np.zeros((5, 4), np.int32)
    assert transfer.get(ref, fields=["tokens"], destinations={"tokens": into})["batch"]["tokens"] is into
    assert (into == np.arange(20).reshape(5, 4)).all()
    some = np.zeros(8, np.int32)
    transfer.get(ref, fields=["tokens"], rows=[4, 1], destinations={"tokens": raw_destination(some.ctypes.data, 32)})
    assert some.tolist() == [16, 17, 18, 19, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="size=31"):
        small = raw_destination(some.ctypes.data, 31)
        transfer.get(ref, fields=["tokens"], rows=[4, 1], destinations={"tokens": small})
    view = transfer.dataproto_manifest_view(ref)
    assert view["batch_size"] == 5 and view["stages"]["actor"]["dataproto"]["partition"] == "p"
    assert view["batch_fields"].keys() == {"tokens", "mask"} and view["namespace"] == "n"
    assert view["non_tensor_fields"]["words"]["spec"]["codec"] == "utf8_ragged"
    for wrong in ({"fields": ["what"]}, {"batch_fields": ["what"]}):
        with pytest.raises(KeyError, match="unknown DataProto fields"):
            transfer.get(ref, **wrong)
    with pytest.raises(ValueError, match="cannot be combined"):
        transfer.get(ref, fields=["words"], batch_fields=["tokens"])
    for rows, error in [([5], IndexError), ([-6], IndexError), (["1"], TypeError), ("12", TypeError), (3, TypeError)]:
        with pytest.raises(error):
            transfer.get(ref, rows=rows)
    with pytest.raises(ValueError, match="positive"):
        transfer.get(ref, rows=slice(None, None, -1))


def test_flat_dictionaries(transfer):
    given = {
        "tokens": np.arange(6).reshape(3, 2),
        "prompts": ["a", "b", "c"],
        "replies": [{"text": "x", "ids": np.arange(2)}, None, {"text": "y", "ids": np.arange(1)}],
        "temperature": 0.7,
        "tags": ["only", "two"],
    }
    ref = transfer.put(given, type="dict", namespace="train")
    assert ref.meta_info == {"temperature": 0.7, "tags": ["only", "two"]}
    got = transfer.get(ref, type="dict")
    assert same(got, given), got
    part = transfer.get(ref, type="dict", fields=["prompts", "replies"], rows=[2, 0], meta_info_keys=[])
    assert same(part, {"prompts": ["c", "a"], "replies": [given["replies"][2], given["replies"][0]]})
    told = {
        "tags": FieldSchema("auto", metadata={"section": "non_tensor_batch"}),
        "tokens": FieldSchema("auto", metadata={"section": "meta_info"}),
        "prompts": FieldSchema("auto", metadata={"section": "meta_info"}),
    }
    ref = transfer.put({"tags": ["x", "y"], "prompts": ["a"], "n": 3}, type="dict", field_schemas=told)
    assert ref.batch_size == 2 and ref.meta_info == {"prompts": ["a"], "n": 3}
    for wrong in (
        {"a": np.zeros(3), "b": np.zeros(4)},
        {"a": [1], "b": [1, 2]},
    ):
        with pytest.raises(ValueError, match="ambiguous batch sizes"):
            transfer.put(wrong, type="dict")
    with pytest.raises(TypeError, match="must be a mapping"):
        transfer.put([1], type="dict")
    with pytest.raises(ValueError, match="unsupported Mooncake payload type"):
        transfer.put({}, type="list")


@pytest.mark.parametrize(
    ("codec", "values", "metadata"),
    [
        ("ndarray", [1, None, 3], {"dtype": "int32"}),
        ("typed_ragged", [[1], [2, 3], None], {"dtype": "float32"}),
        ("bytes_ragged", [b"1", None, b"22"], {}),
        ("media_bytes", [b"1", None, b"22"], {}),
        ("media_list_ragged", [[b"1"], None, []], {}),
        ("utf8_ragged", ["1", None, "22"], {}),
        ("msgpack_ragged", [{"a": 1}, None, [1, "x", b"y"]], {}),
        ("json_ragged", [{"a": 1}, None, [1, "x"]], {}),
        ("auto", [{"a": np.arange(2)}, None, {"b": b"1"}], {}),
        ("auto", [np.array([1, "x"], object), None, np.array(["y"], object)], {}),
    ],
)
def test_codecs_by_name(transfer, codec, values, metadata):
    schemas = {"f": FieldSchema(codec, metadata=metadata)}
    ref = transfer.put({"non_tensor_batch": {"f": values}}, field_schemas=schemas)
    assert codec == "auto" or ref.encoded_non_tensor["f"]["codec"] == codec
    got = transfer.get(ref)["non_tensor_batch"]["f"]
    if codec == "typed_ragged":
        assert list(got) == [[1.0], [2.0, 3.0], None]
    elif isinstance(values[0], np.ndarray):
        assert list(got) == [[1, "x"], None, ["y"]]
    else:
        assert same(list(got), values)
    with pytest.raises(ValueError, match="not nullable"):
        transfer.put({"non_tensor_batch": {"f": values}}, field_schemas={"f": FieldSchema(codec, False, metadata)})


def test_unsupported_values(transfer):
    def refused(values, schema=None, section="non_tensor_batch", error=ValueError):
        with pytest.raises(error) as caught:
            transfer.put({section: {"f": values}}, field_schemas={"f": schema} if schema else None)
        return str(caught.value)

    for values in (column(object(), object()), column(np.array(["x"], object))):
        assert "unsupported structured non-tensor field" in refused(values)
    assert "msgpack_ragged" in refused([object()], FieldSchema("auto"))
    assert "unsupported schema codec" in refused([1], FieldSchema("what"))
    # The class is that of the cause.
    assert "'f'" in refused([1], FieldSchema("utf8_ragged"), error=AttributeError)
    assert "'bytes_ragged'" in refused(["x"], FieldSchema("bytes_ragged"), error=TypeError)
    assert "numeric or bool" in refused([1], FieldSchema("ndarray", metadata={"dtype": "U3"}))
    assert "must be one of" in refused([1], FieldSchema("auto", metadata={"section": "what"}))
    assert "declares section" in refused([1], FieldSchema("auto", metadata={"section": "batch"}))
    with pytest.raises(ValueError, match="inconsistent batch sizes"):
        transfer.put({"batch": {"a": np.zeros(2), "b": np.zeros(3)}})
    with pytest.raises(ValueError, match="overlap"):
        transfer.put({"batch": {"a": np.zeros(2)}, "non_tensor_batch": {"a": np.zeros(2)}})


def test_objects_with_sections(transfer):
    class Proto:
        def __init__(self, batch=None, non_tensor_batch=None, meta_info=None):
            self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    class Made(Proto):
        @classmethod
        def from_dict(cls, tensors, non_tensors=None, meta_info=None):
            return cls({**tensors, "made": True}, non_tensors, meta_info)

    ref = transfer.put_dataproto(Proto({"x": np.arange(3)}, {"y": column("a", "b", "c")}, {"z": 1}))
    got = transfer.get(ref, data_cls=Proto)
    assert type(got) is Proto and got.meta_info == {"z": 1} and list(got.non_tensor_batch["y"]) == ["a", "b", "c"]
    assert transfer.get_dataproto(ref, data_cls=Made).batch["made"] is True
    with pytest.raises(TypeError, match="cannot be constructed"):
        transfer.get(ref, data_cls=int)
    nothing = transfer.put({"meta_info": {"a": 1}})
    assert nothing.batch_size == 0 and transfer.get(nothing)["meta_info"] == {"a": 1}
    MooncakeBundleTransfer.release_result(got)


@pytest.mark.parametrize("again", [False, True])
def test_stages(backing, transfer, again):
    first = transfer.put({"batch": {"x": np.arange(3)}, "meta_info": {"a": 1}}, stage="rollout")
    second = transfer.append_dataproto_fields(
        export_ref(first), {"non_tensor_batch": {"y": column("a", "b", "c")}, "meta_info": {"b": 2}}, stage="reward"
    )
    third = transfer.append_dataproto_fields(second, {"batch": {"z": np.ones(3)}}, stage="rollout")
    assert third.stage_refs.keys() == {"rollout", "reward"} and third.meta_info == {"a": 1, "b": 2}
    for given, fields in ((first, {"x"}), (second, {"x", "y"}), (third, {"x", "y", "z"})):
        got = transfer.get(import_ref(export_ref(given)), type="dict")
        assert got.keys() - {"a", "b"} == fields and got["x"].tolist() == [0, 1, 2]
    if again:
        fourth = transfer.append_dataproto_fields(third, {"batch": {"w": np.zeros(3)}}, stage="rollout")
        assert transfer.get(fourth, type="dict").keys() == {"a", "b", "x", "y", "z", "w"}
        transfer.cleanup_dataproto_append(third, fourth)
        transfer.cleanup_dataproto_append(third, fourth)
        with pytest.raises(ValueError):
            transfer.get(import_ref(export_ref(fourth)), fields=["w"])
        assert transfer.get(third, type="dict").keys() == {"a", "b", "x", "y", "z"}
    with pytest.raises(ValueError, match="already exist"):
        transfer.append_dataproto_fields(third, {"batch": {"x": np.ones(3)}}, stage="rollout")
    with pytest.raises(ValueError, match="does not match"):
        transfer.append_dataproto_fields(third, {"batch": {"q": np.ones(4)}}, stage="rollout")
    with pytest.raises(ValueError, match="must include existing fields"):
        transfer.append_dataproto_fields(third, {"batch": {"x": np.ones(3)}}, stage="rollout", overwrite=True)
    last = transfer.append_dataproto_fields(
        third, {"batch": {"x": np.ones(3), "z": np.ones(3)}}, stage="rollout", overwrite=True
    )
    assert transfer.get(last, type="dict", fields=["x"])["x"].tolist() == [1, 1, 1]
    for stored in (last, first, second):
        transfer.cleanup_dataproto(stored)
        transfer.cleanup_dataproto(export_ref(stored))
    if isinstance(backing, Fake):
        assert backing.values == {}


def test_a_batch_is_stored_in_one_group(store, key):
    from mooncake.store import ReplicateConfig

    transfer = MooncakeBundleTransfer(store, key)
    ref = transfer.put({"batch": {"x": np.arange(3)}})
    assert ref._storage_group_id.startswith("structured-")
    handle = export_ref(ref)
    assert handle["storage_group_id"] == ref._storage_group_id and is_dataproto_ref_handle(handle)
    config = ReplicateConfig()
    config.group_ids, config.with_hard_pin = ["mine"], True
    named = transfer.put({"batch": {"x": np.arange(3)}}, config=config)
    assert named._storage_group_id == "mine" and config.group_ids == ["mine"]
    transfer.append_dataproto_fields(named, {"batch": {"y": np.arange(3)}}, stage="other", config=config)
    config.group_ids = ["another"]
    with pytest.raises(ValueError, match="conflicts"):
        transfer.append_dataproto_fields(named, {"batch": {"z": np.arange(3)}}, stage="other", config=config)
    config.group_ids = ["a", "b"]
    with pytest.raises(ValueError, match="config.group_ids"):
        transfer.put({"batch": {"x": np.arange(3)}}, config=config)


def test_invalid_handles(transfer):
    handle = export_ref(transfer.put(data()))
    for change in (
        {"type": "other"},
        {"version": 3},
        {"version": 2, "storage_group_id": None},
        {"kind": "other"},
        {"batch_size": -1},
        {"batch_size": "5"},
        {"stage_refs": []},
        {"stage_refs": {"default": {"manifest_key": ""}}},
        {"stage_refs": {}},
        {"field_index": {"x": {"stage": "default", "member": "batch.x", "section": "meta_info"}}},
        {"field_index": {"x": {"stage": "other", "member": "batch.x", "section": "batch"}}},
        {"global_indexes": [True]},
        {"global_indexes": "12"},
        {"encoded_non_tensor": {"what": {}}},
        {"meta_info": 3},
    ):
        with pytest.raises(ValueError):
            import_ref({**handle, **change})
    with pytest.raises(TypeError):
        transfer.get({"manifest_key": "x"})
    with pytest.raises(TypeError, match="JSON-safe"):
        export_ref(transfer.put({"batch": {"x": np.arange(2)}, "meta_info": {"a": object()}}))
    for value, name in [({1: "a", "1": "b"}, "meta_info.a"), ([{None: 1}], r"meta_info.a\[0\]"), (np.timedelta64(5, "ns"), "meta_info.a")]:
        with pytest.raises(TypeError, match=name):
            export_ref(transfer.put({"batch": {"x": np.arange(2)}, "meta_info": {"a": value}}))
    wrong = json.loads(json.dumps(handle))
    wrong["encoded_non_tensor"]["words"]["codec"] = "what"
    with pytest.raises(ValueError, match="codec"):
        transfer.get(wrong, fields=["words"])


def test_tensors(transfer):
    torch = pytest.importorskip("torch", reason="fields of tensors need torch")
    images = column(torch.ones(2, 3), torch.zeros(1, 3), None, torch.ones(4, 3))
    dicts = column({"pixels": torch.arange(3), "grid": torch.ones(1, 2)}, None, {"pixels": torch.arange(1)}, {})
    inside = column({"t": torch.arange(2)}, {"t": None}, None, {"u": torch.ones(1)})
    rows = torch.nested.nested_tensor([torch.arange(3), torch.arange(1), torch.arange(0), torch.arange(5)], layout=torch.jagged)
    batch = {"ids": torch.arange(8).reshape(4, 2), "half": torch.ones(4, dtype=torch.bfloat16), "rows": rows}
    schemas = {"dicts": FieldSchema("ragged_tensor_dict", metadata={"keys": ["pixels", "grid"]})}
    given = {"batch": batch, "non_tensor_batch": {"images": images, "dicts": dicts, "inside": inside}}
    ref = transfer.put(given, field_schemas=schemas)
    handle = json.loads(json.dumps(export_ref(ref)))
    for picked in (None, [3, 0], slice(1, 3), []):
        got = transfer.get(handle, rows=picked)
        chosen = range(4) if picked is None else range(4)[picked] if isinstance(picked, slice) else picked
        for name in ("images", "dicts", "inside"):
            expected = [given["non_tensor_batch"][name][row] for row in chosen]
            assert same(list(got["non_tensor_batch"][name]), expected), (name, picked)
        assert got["batch"]["ids"].equal(batch["ids"][list(chosen)])
        assert got["batch"]["half"].equal(batch["half"][list(chosen)])
        unbound = got["batch"]["rows"].unbind() if len(chosen) else []
        assert len(unbound) == len(chosen) and all(a.equal(rows[row]) for a, row in zip(unbound, chosen))
    for wrong in (
        column({"other": torch.ones(1)}),
        column({"a.b": torch.ones(1)}),
        column({"": torch.ones(1)}),
        column({"pixels": None}),
        column({"pixels": torch.ones(1, dtype=torch.bfloat16)}),
        column(3),
    ):
        with pytest.raises((ValueError, TypeError)):
            transfer.put({"non_tensor_batch": {"dicts": wrong}}, field_schemas=schemas)


def test_columns_of_tensors_of_every_type():
    torch = pytest.importorskip("torch", reason="fields of tensors need torch")
    from mooncake._element_types import DTYPES, QUANTIZED

    columns = {}
    for code, (name, size) in DTYPES.items():
        if code not in QUANTIZED and hasattr(torch, name):
            tensor = torch.arange(8 * size, dtype=torch.uint8).remainder(2).view(getattr(torch, name))
            columns[name] = [tensor, tensor[:0], None, tensor.reshape(2, 4)]
    numbers = torch.tensor([1 + 2j, complex(0, -0.0)])
    columns |= {
        "conjugate": [numbers.conj()],
        "negative": [numbers.conj().imag],
        "gradient": [torch.ones(2, requires_grad=True)],
        "two types": [torch.ones(1), torch.ones(1).int()],
        "sparse": [torch.eye(2).to_sparse()],
        "meta": [torch.ones(2, device="meta")],
        "quantized": [torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)],
        "in dictionaries": [{"t": torch.ones(2), "n": 1}, {"n": 2.5, "t": None}],
        "beside arrays": [torch.ones(2), np.ones(2, np.float32)],
    }
    stored = set()
    for name, values in columns.items():
        transfer = MooncakeBundleTransfer(Fake())
        try:
            ref = transfer.put({"non_tensor_batch": {"field": column(*values)}})
        except (TypeError, ValueError) as error:
            assert "field" in str(error), name
            continue
        stored.add(name)
        for value, got in zip(values, transfer.get(ref)["non_tensor_batch"]["field"], strict=True):
            if isinstance(value, torch.Tensor):
                value = value.detach().resolve_conj().resolve_neg()
            assert same(got, value), (name, got, value)
    names = "float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool float16 complex64 complex128".split()
    assert {*names, "negative", "gradient", "in dictionaries"} <= stored
    assert not {"two types", "sparse", "meta", "quantized", "beside arrays"} & stored
