"""Structured objects: writes, reads of parts, and removal."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
)


class Fake:
    """Store with the minimum of methods."""

    def __init__(self):
        self.values = {}
        self.refuse = None

    def put(self, key, value, config=None):
        if self.refuse is not None and self.refuse in key:
            return -200
        self.values[key] = bytes(value)
        return 0

    def get(self, key):
        return self.values.get(key, b"")

    def remove(self, key, force=False):
        return 0 if self.values.pop(key, None) is not None else -704


@pytest.fixture(params=["store", "fake"])
def backing(request):
    return Fake() if request.param == "fake" else request.getfixturevalue("store")


def payload():
    return StructuredObjectPayload(
        metadata={"step": 7, "layout": "rollout"},
        buffers={
            "tokens": np.arange(24, dtype=np.int32).reshape(6, 4),
            "mask": np.ones((6, 4), dtype=np.int8)[:, ::2],
            "prompt_ids": b"sample-ids",
            "none": b"",
            "no_rows": np.zeros((0, 3), np.float16),
            "scalar": np.array(3.5),
        },
    )


@pytest.mark.parametrize("chunk", [7, 40, 1 << 20])
def test_write_and_read(backing, chunk):
    transfer = MooncakeBundleTransfer(backing, "/demo/structured/", default_chunk_bytes=chunk)
    ref = transfer.put_structured_object(payload())
    assert ref.manifest_key == f"demo/structured/{ref.manifest['object_id']}/manifest"
    stored = json.loads(backing.get(ref.manifest_key))
    assert stored == ref.manifest and stored["version"] == 1 and stored["layout"] == "bundle"
    for given in (ref, RemoteBundleRef(ref.manifest_key, {}), {"manifest_key": ref.manifest_key}):
        result = transfer.materialize(transfer.read_spec(given))
        assert result.metadata["step"] == 7 and result.metadata["layout"] == "rollout"
        objects = result.objects
        assert (objects["tokens"] == np.arange(24).reshape(6, 4)).all() and objects["tokens"].dtype == np.int32
        assert objects["mask"].shape == (6, 2) and bytes(objects["prompt_ids"]) == b"sample-ids"
        assert bytes(objects["none"]) == b"" and objects["no_rows"].shape == (0, 3)
        assert objects["scalar"].shape == () and objects["scalar"] == 3.5
    transfer.remove_bundle(ref)
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    with pytest.raises(json.JSONDecodeError):
        transfer.materialize(transfer.read_spec({"manifest_key": ref.manifest_key}))


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_parts_are_read(backing, chunk):
    transfer = MooncakeBundleTransfer(backing, "demo", default_chunk_bytes=chunk)
    ref = transfer.put_structured_object(payload())
    tokens = np.arange(24, dtype=np.int32).reshape(6, 4)
    whole = transfer.read_spec(ref).select_members(["tokens"])
    for start, end, step in [(2, 5, 1), (-2, 100, 1), (0, 6, 2), (1, 6, 3), (4, 2, 1), (5, -5, 1)]:
        spec = whole.slice_member("tokens", axis=0, start=start, end=end, step=step)
        (got,) = transfer.materialize(spec).objects.values()
        assert np.array_equal(got, tokens[start:end:step]) and got.dtype == np.int32
    destination = np.empty((3, 4), np.int32)
    spec = whole.slice_member("tokens", axis=0, start=2, end=5)
    assert spec.member_slice("tokens").start == 2 and whole.member_slice("tokens") is None
    result = transfer.materialize_into(spec, {"tokens": destination, "other": None})
    assert result.objects["tokens"] is destination and (destination == tokens[2:5]).all()
    for wrong in (np.empty((2, 4), np.int32), np.empty((3, 4), np.int64), np.empty((3, 8), np.int32)[:, ::2]):
        with pytest.raises(ValueError):
            transfer.materialize_into(spec, {"tokens": wrong})
    with pytest.raises(TypeError):
        transfer.materialize_into(spec, {"tokens": bytearray(48)})
    with pytest.raises(ValueError, match="axis=0 only"):
        transfer.materialize(whole.slice_member("tokens", axis=1, start=0, end=1))
    with pytest.raises(ValueError):
        transfer.materialize(transfer.read_spec(ref).slice_member("prompt_ids", axis=0, start=0, end=1))
    with pytest.raises(KeyError, match="unknown bundle buffers"):
        transfer.materialize(transfer.read_spec(ref).select_members(["what"]))
    # A specification is checked when it is used.
    with pytest.raises(ValueError, match="selected no members"):
        transfer.materialize(transfer.read_spec(ref).select_members([]))
    with pytest.raises(ValueError, match="step must be positive"):
        transfer.materialize(whole.slice_member("tokens", axis=0, start=0, end=1, step=0))


def test_bundles_and_objects(backing):
    transfer = MooncakeBundleTransfer(backing)
    ref = transfer.put_bundle(b"raw", {"x": b"12345", "y": np.arange(3, dtype=np.float32)}, partition="p")
    assert ref.manifest["object_id"].startswith("p/")
    assert backing.get(ref.manifest["meta"]["key"]) == b"raw"
    assert backing.get(ref.manifest["buffers"]["x"]["key"]) == b"12345"
    transfer.remove_bundle(ref)
    assert backing.get(ref.manifest["buffers"]["x"]["key"]) == b""
    assert (transfer.get_object(transfer.put_object(np.arange(5))) == np.arange(5)).all()
    assert set(transfer.get_object(transfer.put_object({"a": b"1", "b": np.zeros(2)}))) == {"a", "b"}


def test_unsupported_members():
    transfer = MooncakeBundleTransfer(Fake())
    with pytest.raises(TypeError, match="requires buffers"):
        StructuredObjectPayload({})
    for name in ("", "a/b", "\n"):
        with pytest.raises(ValueError):
            transfer.put_structured_object(StructuredObjectPayload(buffers={name: b"x"}))
    for value in ("text", [1], np.array([None])):
        with pytest.raises(TypeError):
            transfer.put_structured_object(StructuredObjectPayload(buffers={"m": value}))
    with pytest.raises(ValueError):
        transfer.put_structured_object(StructuredObjectPayload({"__mooncake_structured_fields__": 1}, {"m": b"x"}))
    for metadata in ({"a": {1: "x"}}, {"a": [{None: 1}]}, {True: 1}, {0.5: 1}):
        with pytest.raises(TypeError, match="is not a text"):
            transfer.put_structured_object(StructuredObjectPayload(metadata, {"m": b"x"}))
    for prefix in ("", "//", "a\nb"):
        with pytest.raises(ValueError):
            MooncakeBundleTransfer(Fake(), prefix)
    for wrong in ({"put_mode": "x"}, {"copy_mode": "x"}, {"max_inflight_put": 0}):
        # A policy is checked when it is used.
        policy = BundleTransferPolicy(**wrong)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            transfer.put_bundle(b"", {"m": b"x"}, policy=policy)
    with pytest.raises(ValueError, match="max_inflight_put"):
        transfer.put_bundle(b"", {"m": b"x"}, max_inflight_put=0)
    # The first use of a store that is not set up fails.
    with pytest.raises(RuntimeError, match="put failed"):
        MooncakeBundleTransfer(MooncakeDistributedStore()).put_bundle(b"m", {"x": b"1"})


def arrays():
    """Returns arrays of every type that numpy and ml_dtypes have."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = [np.arange(12).astype(char).reshape(3, 4) for char in "?bBhHiIlLqQefdgFDG"]
    made += [np.arange(12).astype(kind).reshape(3, 4) for kind in (">i4", ">f8", "M8[ns]", "m8[D]", "S3", "U2", "V5")]
    made += [np.full((2, 3), math.nan), np.array([-0.0, 0.0], "f2"), np.array([[]], "i1"), np.array(["", ""]), np.array([b""])]
    made += [np.ones((2, 3), [("a", "i4"), ("b", ">f2")]), np.ones((2, 3), np.dtype([("a", "i1"), ("b", "f8")], align=True))]
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint2", "float4_e2m1fn", "float8_e8m0fnu"):
        made.append(np.arange(12, dtype=np.uint8).astype(getattr(ml_dtypes, name)).reshape(3, 4))
    return made


def test_arrays_of_every_type(backing):
    transfer = MooncakeBundleTransfer(backing, "types", default_chunk_bytes=20)
    for number, array in enumerate(arrays()):
        forms = {"plain": array, "turned": array.T, "strided": array[::2], "empty": array[:0]}
        ref = transfer.put_structured_object(StructuredObjectPayload(buffers=forms))
        got = transfer.materialize(transfer.read_spec({"manifest_key": ref.manifest_key})).objects
        for name, form in forms.items():
            same = (got[name].dtype, got[name].shape) == (form.dtype, form.shape)
            # Records may have bytes between their fields, which copies do not keep.
            same = same and ((got[name] == form).all() if form.dtype.names else got[name].tobytes() == form.tobytes())
            assert same and got[name].dtype.type is form.dtype.type or form.dtype.char in "lLqQ", (number, name, got[name])
        spec = transfer.read_spec(ref).select_members(["plain"]).slice_member("plain", 0, 0, 1)
        (row,) = transfer.materialize(spec).objects.values()
        assert row.dtype == array.dtype and row.tobytes() == array[:1].tobytes()
        into = np.empty_like(array, order="C")
        transfer.materialize_into(transfer.read_spec(ref).select_members(["plain"]), {"plain": into})
        assert into.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [np.array([None]), np.zeros(2, [("a", "i4", 3)]), np.ma.masked_array([1, 2], [True, False]), np.array(["a"], np.dtypes.StringDType())],
    ids=["objects", "records", "masked", "strings"],
)
def test_arrays_that_would_come_back_as_others_are_refused(array):
    store = Fake()
    with pytest.raises((TypeError, ValueError), match="member"):
        MooncakeBundleTransfer(store).put_structured_object(StructuredObjectPayload(buffers={"member": array}))
    assert not store.values


def test_a_put_that_fails_leaves_nothing():
    fake = Fake()
    fake.refuse = "buffer/b"
    with pytest.raises(RuntimeError, match="put failed for .*: -200"):
        MooncakeBundleTransfer(fake).put_bundle(b"m", {"a": b"1", "b": b"2"})
    assert fake.values == {}


def test_inconsistent_manifests():
    fake = Fake()
    transfer = MooncakeBundleTransfer(fake)
    ref = transfer.put_bundle(b"m", {"a": b"123"})
    for change in (
        lambda m: m["buffers"]["a"]["chunks"][0].update(key="elsewhere"),
        lambda m: m["buffers"]["a"].update(bytes=4),
        lambda m: m.update(object_id="default/other"),
    ):
        manifest = json.loads(json.dumps(ref.manifest))
        change(manifest)
        with pytest.raises(ValueError):
            transfer.materialize(transfer.read_spec(RemoteBundleRef(ref.manifest_key, manifest)))
    with pytest.raises(ValueError):
        transfer.read_spec({"manifest_key": "x"}) and transfer.materialize(transfer.read_spec({"manifest_key": "x"}))


def test_tensors_of_every_type(backing):
    torch = pytest.importorskip("torch", reason="tensor members need torch")
    from mooncake._element_types import DTYPES, QUANTIZED

    transfer = MooncakeBundleTransfer(backing, default_chunk_bytes=64)
    for code, (name, size) in DTYPES.items():
        if code in QUANTIZED or not hasattr(torch, name):
            continue
        tensor = torch.arange(24 * size, dtype=torch.uint8).remainder(2).view(getattr(torch, name)).reshape(6, 4)
        ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"t": tensor}))
        got = transfer.materialize(transfer.read_spec(ref)).objects["t"]
        assert got.dtype == tensor.dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name
        part = transfer.materialize(transfer.read_spec(ref).slice_member("t", 0, 1, 3)).objects["t"]
        assert part.dtype == tensor.dtype and torch.equal(part.view(torch.uint8), tensor.view(torch.uint8)[1:3]), name


def test_quantized_tensors(backing):
    torch = pytest.importorskip("torch", reason="tensor members need torch")
    from test_tensors import quantized, same_quantized

    transfer = MooncakeBundleTransfer(backing, default_chunk_bytes=64)
    for tensor in quantized():
        ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"t": tensor}))
        spec = transfer.read_spec({"manifest_key": ref.manifest_key})
        assert same_quantized(transfer.materialize(spec).objects["t"], tensor)
        with pytest.raises(ValueError, match="quantized"):
            transfer.materialize(spec.slice_member("t", 0, 0, 1))


def test_tensors(backing):
    torch = pytest.importorskip("torch", reason="tensor members need torch")
    transfer = MooncakeBundleTransfer(backing, default_chunk_bytes=64)
    tensor = torch.arange(60, dtype=torch.bfloat16).reshape(10, 6)
    ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"t": tensor}))
    assert ref.manifest["buffers"]["t"]["metadata_bytes"] == 304
    assert torch.equal(transfer.materialize(transfer.read_spec(ref)).objects["t"], tensor)
    spec = transfer.read_spec(ref).slice_member("t", 0, 3, 7)
    assert torch.equal(transfer.materialize(spec).objects["t"], tensor[3:7])
