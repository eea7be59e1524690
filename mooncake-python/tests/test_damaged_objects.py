"""Structured objects that were altered, puts that fail midway, and reads of many small rows."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from conftest import MIB
from test_structured import Fake

from mooncake import structured_object_store as module
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    export_ref,
    raw_destination,
)

FIELDS = "__mooncake_structured_fields__"


@pytest.fixture(params=["store", "fake"])
def backing(request):
    return Fake() if request.param == "fake" else request.getfixturevalue("store")


def stored(backing, change, **members):
    """Stores an object whose metadata and manifest `change` has altered. Returns its reference."""
    transfer = MooncakeBundleTransfer(backing)
    ref = transfer.put_structured_object(StructuredObjectPayload(buffers=members))
    meta = ref.manifest["meta"]
    metadata, manifest = json.loads(bytes(backing.get(meta["key"]))), json.loads(json.dumps(ref.manifest))
    change(metadata[FIELDS], manifest, metadata)
    data = json.dumps(metadata).encode()
    key = meta["key"] + "-changed"
    assert backing.put(key, data) == 0
    if manifest.get("meta") == meta:
        manifest["meta"] = {"key": key, "bytes": len(data), "chunks": [{"key": key, "bytes": len(data)}]}
    return transfer, RemoteBundleRef(ref.manifest_key, manifest)


def read(transfer, ref, **rows):
    spec = transfer.read_spec(ref)
    for name, (start, end, step) in rows.items():
        spec = spec.slice_member(name, 0, start, end, step)
    return transfer.materialize(spec).objects


DTYPES = ["|O", "O", "O,i4", "(2,)O", [["a", "O"]], [["a", "|O"], ["b", "<i4"]], {"names": ["a"]}, "object", "bogus", "i4,,"]


@pytest.mark.parametrize("dtype", [*DTYPES, None, 8, "", "(4,)i4", "|S0", "<U0", "i" * 10_000])
@pytest.mark.parametrize("rows", [{}, {"a": (0, 2, 1)}, {"a": (0, 2, 2)}])
def test_no_stored_bytes_become_objects(backing, dtype, rows):
    transfer, ref = stored(backing, lambda f, m, d: f["a"].update(dtype=dtype, shape=[2]), a=np.full(16, 65, np.uint8))
    with pytest.raises(ValueError, match="dtype"):
        read(transfer, ref, **rows)


RECORDS = [
    [["a", "|O", 0]], [["a", "|O", 4]], [["a", "<i4", 9]], [["a", "<i4", -1]], [["a", "<i4"]], [["a", "(2,)O", 0]], [[1, "<i4", 0]],
    [["a", [["b", "O"]], 0]], [["a", "<i4", 0], ["a", "<i4", 4]], "O", 7, {"a": "O"}, [["a", None, 0]],
]  # fmt: skip


@pytest.mark.parametrize("described", [*({"record": one} for one in RECORDS), *({"ml_dtype": one} for one in ("finfo", "x", 7, "bfloat16", "__doc__"))], ids=str)
def test_no_stored_bytes_become_objects_in_records(backing, described):
    transfer, ref = stored(backing, lambda f, m, d: f["a"].update(described, dtype="|V8", shape=[2]), a=np.full(16, 65, np.uint8))
    with pytest.raises(ValueError):
        read(transfer, ref)


@pytest.mark.parametrize(
    "described",
    [
        {"kinds": []}, {"kinds": ["object"]}, {"kinds": [["array", "O", [1]]]}, {"kinds": [["set", {}]]}, {"kinds": ["int"], "rows": [0]},
        {"kinds": ["int"], "rows": [7, 7]}, {"kinds": [["list", {"5": "int"}]]}, {"kinds": [None]}, 7, {}, {"kinds": [["tuple"]]},
        {"kinds": [["array", "<i4", [99]]]}, {"kinds": ["int"], "rows": "ab"},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_types_of_rows(described):
    from mooncake.structured_object_store import export_ref

    transfer = MooncakeBundleTransfer(Fake())
    handle = export_ref(transfer.put({"non_tensor_batch": {"x": ["a", "b"], "n": [1 << 50, 1]}}))
    for kind in ("bytearray", "memoryview", "bytes", "numpy.bytes"):
        handle["encoded_non_tensor"]["n"]["metadata"]["row_types"] = {"kinds": [kind]}
        with pytest.raises(ValueError):
            transfer.get(handle, fields=["n"])
    handle["encoded_non_tensor"]["x"]["metadata"]["row_types"] = described
    for rows in (None, [1]):
        with pytest.raises(ValueError):
            transfer.get(handle, rows=rows)


SHAPES = [[10**13], [-1], [2, -2], [-2, -2], [1.0], [True], ["4"], None, 4, "4", [[4]], [None], [3], [0]]


@pytest.mark.parametrize("shape", [*SHAPES, [1 << 32, 1 << 32], [10**30, 0], [0, 1 << 62]])
@pytest.mark.parametrize("rows", [{}, {"a": (0, 1, 1)}])
def test_a_shape_is_that_of_the_bytes(backing, shape, rows):
    transfer, ref = stored(backing, lambda f, m, d: f["a"].update(shape=shape), a=np.zeros(4, np.int32))
    with pytest.raises(ValueError):
        read(transfer, ref, **rows)


def test_an_array_without_dimensions_is_read(backing):
    transfer, ref = stored(backing, lambda f, m, d: f["a"].update(shape=[]), a=np.array([7], np.int32))
    assert read(transfer, ref)["a"].shape == () and read(transfer, ref)["a"] == 7
    with pytest.raises(ValueError, match="rows"):
        read(transfer, ref, a=(0, 1, 1))


def buffers(change):
    return lambda f, m, d: change(m["buffers"]["a"])


CHANGES = {
    "no dtype": lambda f, m, d: f["a"].pop("dtype"),
    "no shape": lambda f, m, d: f["a"].pop("shape"),
    "a word about a member": lambda f, m, d: f.update(a="ndarray"),
    "a list about members": lambda f, m, d: d.update({FIELDS: [1]}),
    "unknown encoding": lambda f, m, d: f["a"].update(encoding=["ndarray"]),
    "no encoding": lambda f, m, d: f["a"].pop("encoding"),
    "no tensor": lambda f, m, d: f.update(a={"encoding": "torch_tensor"}),
    "no buffers": lambda f, m, d: m.pop("buffers"),
    "a list of buffers": lambda f, m, d: m.update(buffers=[1]),
    "no meta": lambda f, m, d: m.pop("meta"),
    "a word as meta": lambda f, m, d: m.update(meta="x"),
    "no chunks": buffers(lambda one: one.pop("chunks")),
    "chunks of words": buffers(lambda one: one.update(chunks=["x"])),
    "chunks without keys": buffers(lambda one: one.update(chunks=[{"bytes": 16}])),
    "chunks of no size": buffers(lambda one: one["chunks"][0].pop("bytes")),
    "negative chunks": buffers(lambda one: one["chunks"][0].update(bytes=-16)),
    "chunks of half bytes": buffers(lambda one: one["chunks"][0].update(bytes=16.0)),
    "no bytes": buffers(lambda one: one.pop("bytes")),
    "no key": buffers(lambda one: one.pop("key")),
    "a payload of words": lambda f, m, d: m["buffers"].update(a="x"),
    "cleanup of numbers": lambda f, m, d: m.update(cleanup_keys=[1]),
    "a word to clean up": lambda f, m, d: m.update(cleanup_keys="x"),
    "others that are numbers": lambda f, m, d: m.update(buffer_object_ids=7),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_missing_chunks_are_reported(backing, change):
    transfer, ref = stored(backing, change, a=np.zeros(4, np.int32))
    with pytest.raises(ValueError):
        read(transfer, ref)


@pytest.mark.parametrize("data", [b"", b"[1]", b"7", b"{", b"\xff", b"[" * 100_000])
def test_invalid_manifests_are_rejected(data):
    fake = Fake()
    fake.values["bundle/default/x/manifest"] = data
    transfer = MooncakeBundleTransfer(fake)
    with pytest.raises(ValueError):
        read(transfer, {"manifest_key": "bundle/default/x/manifest"})


@pytest.mark.parametrize("elements", [5, 1 << 40])
def test_chunks_that_are_shorter_than_they_should_be(backing, elements):
    def longer(fields, manifest, metadata):
        fields["a"]["shape"] = [elements]
        manifest["buffers"]["a"]["bytes"] = manifest["buffers"]["a"]["chunks"][0]["bytes"] = elements * 4

    transfer, ref = stored(backing, longer, a=np.zeros(4, np.int32))
    if elements > 5 and isinstance(backing, Fake):
        pytest.skip("whether there are as many bytes is known only when all are there")
    with pytest.raises(RuntimeError, match="get failed"):
        read(transfer, ref)


@pytest.mark.parametrize("change", [{"dtype": "|O"}, {"shape": [10**13]}, {"encoding": "x"}])
@pytest.mark.parametrize("part", ["data", "offsets"])
@pytest.mark.parametrize("rows", [None, [1, 0]])
def test_columns_are_damaged(backing, change, part, rows):
    transfer = MooncakeBundleTransfer(backing)
    given = [np.arange(3.0), np.arange(2.0)]
    handle = export_ref(transfer.put({"x": given, "y": np.arange(2)}, type="dict"))
    assert [list(one) for one in transfer.get(handle, type="dict", rows=[1, 0])["x"]] == [[0, 1], [0, 1, 2]]
    key = handle["stage_refs"]["default"]["manifest_key"]
    manifest = json.loads(bytes(backing.get(key)))
    meta = manifest["meta"]["key"]
    metadata = json.loads(bytes(backing.get(meta)))
    metadata[FIELDS][f"non_tensor_batch.x.{part}"].update(change)
    data = json.dumps(metadata).encode()
    transfer._calls.remove([meta, key])
    manifest["meta"].update(bytes=len(data), chunks=[{"key": meta, "bytes": len(data)}])
    assert backing.put(meta, data) == 0 and backing.put(key, json.dumps(manifest).encode()) == 0
    with pytest.raises(ValueError):
        transfer.get(handle, type="dict", rows=rows)


@pytest.mark.parametrize("offsets", [[0, -3, 5], [0, 3, 1 << 60], [-3, 3, 5], [0, 3], [5, 3, 5], [0.0, 3.0, 5.0]])
def test_rows_outside_the_payload(backing, offsets):
    from mooncake._columns import _picked

    transfer = MooncakeBundleTransfer(backing)
    ref = transfer.put({"x": [b"abc", b"de"], "y": np.arange(2)}, type="dict")
    opened = transfer._open(ref.stage_refs["default"])
    source = module._Payloads(transfer, opened, ref.encoded_non_tensor["x"]["payload_members"])
    with pytest.raises(ValueError):
        source.runs("data", _picked(np.array(offsets), [0, 1])[0])
    with pytest.raises(ValueError):
        source.whole("nothing")


def test_destinations_of_objects(backing):
    transfer = MooncakeBundleTransfer(backing)
    ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"a": np.arange(4), "none": np.zeros((0, 3))}))
    for dtype in (object, [("a", object)], [("a", "i4"), ("b", object)]):
        with pytest.raises(ValueError, match="objects"):
            transfer.materialize_into(transfer.read_spec(ref), {"a": np.empty(4, dtype)})
    memory = np.empty(4, np.int64)
    nothing = raw_destination(memory.ctypes.data, 0, memory)
    assert transfer.materialize_into(transfer.read_spec(ref), {"none": nothing}).objects["none"].shape == (0, 3)
    lent = raw_destination(memory.ctypes.data, memory.nbytes, memory)
    got = transfer.materialize_into(transfer.read_spec(ref), {"a": lent}).objects["a"]
    assert np.array_equal(memory, np.arange(4)) and np.array_equal(got, memory)


class Counting(MooncakeDistributedStore):
    """Store that counts the reads of the native half, and their bytes."""

    reads = 0
    bytes = 0

    def _read_strips(self, jobs, owners=None):
        self.reads += sum(len(job.reads) for job in jobs)
        self.bytes += sum(read.width * read.rows for job in jobs for read in job.reads)
        return super()._read_strips(jobs, owners)


@pytest.fixture
def counting(master):
    store = Counting()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", master.address) == 0
    yield store
    store.close()


def test_small_rows_are_read_together(counting):
    transfer = MooncakeBundleTransfer(counting)
    array = np.arange(400_000, dtype=np.int32).reshape(-1, 2)
    ref = transfer.put({"a": array}, type="dict", chunk_bytes=64 << 10)
    stage = ref.stage_refs["default"]
    chance = np.random.default_rng(1)
    for rows in (range(0, 200_000, 2), range(1, 200_000, 10), chance.permutation(200_000)[:50_000].tolist()):
        counting.reads = counting.bytes = 0
        if isinstance(rows, range):
            got = read(transfer, stage, **{"batch.a": (rows.start, rows.stop, rows.step)})["batch.a"]
            assert np.array_equal(got, array[rows])
        assert np.array_equal(transfer.get(ref, type="dict", rows=list(rows))["a"], array[rows])
        # Two reads of each of the 25 chunks, and those of the metadata.
        assert counting.reads <= 60 and counting.bytes <= 2 * array.nbytes


def test_distant_rows_are_read_one_by_one(counting):
    transfer = MooncakeBundleTransfer(counting)
    array = np.random.default_rng(2).integers(0, 255, (64, 100_000), np.uint8)
    for chunk in (64 << 10, 64 * MIB):
        ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"a": array, "b": array[:, :20_000]}), chunk_bytes=chunk)
        for name, width in (("a", 100_000), ("b", 20_000)):
            counting.bytes = 0
            spec = transfer.read_spec(ref).select_members([name]).slice_member(name, 0, 3, 64, 20)
            into = np.empty((4, width), np.uint8)
            assert transfer.materialize_into(spec, {name: into}).objects[name] is into
            assert np.array_equal(into, array[3::20, :width]) and counting.bytes == 4 * width
        transfer.remove_bundle(ref)


def test_any_rows_of_any_shape(backing):
    chance = random.Random(7)
    shapes = [(0,), (1,), (1000, 3), (700,), (300, 0), (0, 5), (5000, 2), (40, 3000), (9, 40_000), (3, 2, 2)]
    dtypes = ["<i4", ">f8", "|u1", "|V7", "|S3", "M8[ms]", "i1,<f8"]
    for shape in shapes:
        dtype = np.dtype(chance.choice(dtypes))
        array = np.frombuffer(chance.randbytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
        chunk = chance.choice([7, 64, 1000, 5000, 1 << 20]) if array.nbytes < 20_000 else chance.choice([5000, 1 << 20])
        transfer = MooncakeBundleTransfer(backing, default_chunk_bytes=chunk)
        ref = transfer.put({"batch": {"a": array}})
        n = len(array)
        selections = [slice(0, n), slice(0, 0), slice(1, n, 2), slice(0, n, 3), slice(-7, n, 5), slice(0, n, 499)]
        if n:
            selections += [sorted(chance.sample(range(n), min(n, 20))), chance.choices(range(n), k=300), [n - 1] * 3, [-1, 0]]
        for rows in selections:
            got = transfer.get(ref, rows=rows)["batch"]["a"]
            assert got.dtype.str == dtype.str and got.shape == array[rows].shape, (shape, dtype, chunk, rows)
            assert got.tobytes() == array[rows].tobytes(), (shape, dtype, chunk, rows)
            into = np.empty_like(got)
            assert transfer.get(ref, rows=rows, destinations={"a": into})["batch"]["a"] is into
            assert into.tobytes() == array[rows].tobytes()
        transfer.cleanup_dataproto(ref)


def test_pieces_of_long_reads(store, monkeypatch):
    from mooncake import _payloads

    monkeypatch.setattr(_payloads, "_PIECE", 1000)
    monkeypatch.setattr(_payloads, "_ROWS", 77)
    monkeypatch.setattr(_payloads, "_RUNS", 3)
    monkeypatch.setattr(_payloads, "_LONG", 64)
    monkeypatch.setattr(_payloads, "_NEAR", 100)
    test_any_rows_of_any_shape(store)


def test_an_object_that_does_not_fit(make_store, own_master):
    store = make_store(own_master("--default_kv_lease_ttl=500"))
    transfer = MooncakeBundleTransfer(store)
    ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"a": np.ones(20 * MIB, np.uint8)}), chunk_bytes=MIB)
    assert read(transfer, ref)["a"].all()
    assert store.remove_all(True) == 22
    big = StructuredObjectPayload(buffers={"a": np.zeros(200 * MIB, np.uint8)})
    with pytest.raises(RuntimeError, match="put failed for .*: -200"):
        transfer.put_structured_object(big, chunk_bytes=MIB)
    assert store.remove_all(True) == 0


def test_written_objects_are_checked_once(store, monkeypatch):
    transfer = MooncakeBundleTransfer(store)
    big = StructuredObjectPayload(buffers={"a": bytes(5 * MIB), "b": b"1"})
    asked = []

    def exist(keys, gone="/a/chunk/3"):
        asked.append(keys)
        return [0 if len(asked) > 1 and gone in key else 1 for key in keys]

    monkeypatch.setattr(store, "batch_is_exist", exist)
    transfer.remove_bundle(transfer.put_structured_object(big, chunk_bytes=100_000))
    assert len(asked) == 1
    with pytest.raises(RuntimeError, match="put failed for .*/a/chunk/3: -200"):
        transfer.put_structured_object(big, chunk_bytes=100_000)
    assert len(asked) == 2
    monkeypatch.undo()
    assert not any(store.batch_is_exist(keys) != [0] * len(keys) for keys in asked)


def test_invalid_names_are_rejected_first(backing):
    for name in ("\ud800", "a\udfff"):
        transfer = MooncakeBundleTransfer(backing)
        fresh = Fake() if isinstance(backing, Fake) else None
        payload = StructuredObjectPayload(buffers={"good": b"1", name: b"1"})
        with pytest.raises(ValueError, match="path segment of UTF-8"):
            MooncakeBundleTransfer(fresh or backing).put_structured_object(payload)
        assert fresh is None or fresh.values == {}
        with pytest.raises(ValueError, match="path segment"):
            transfer.put_bundle(b"", {"a": b"1"}, partition=name)
        with pytest.raises(ValueError, match="key_prefix"):
            MooncakeBundleTransfer(backing, name)


def test_public_names_of_mooncake_cpp():
    fake = Fake()
    transfer = MooncakeBundleTransfer(fake, "/a/b/", 123)
    assert transfer.store is fake and transfer.key_prefix == "a/b" and transfer.default_chunk_bytes == 123
    for name in ("store", "key_prefix", "default_chunk_bytes"):
        with pytest.raises(AttributeError):
            setattr(transfer, name, None)
    values = {
        "AUTO_PARALLEL_MIN_BYTES": 67108864,
        "AUTO_PARALLEL_MIN_CHUNKS": 8,
        "DATAPROTO_REF_HANDLE_TYPE": "mooncake_dataproto_ref",
        "DATAPROTO_REF_HANDLE_VERSION": 1,
        "DEFAULT_BUNDLE_CHUNK_BYTES": 67108864,
        "MISSING_OBJECT_ERROR": -704,
        "STORAGE_GROUP_ID": "storage_group_id",
        "STRUCTURED_FIELD_SPECS_KEY": FIELDS,
    }
    assert {name: getattr(module, name) for name in values} == values and set(values) <= set(module.__all__)


def test_errors_name_the_mistake():
    transfer = MooncakeBundleTransfer(Fake())
    for ref, error, words in (
        ({}, ValueError, "must include manifest_key"),
        ({"manifest_key": None}, ValueError, "must include manifest_key"),
        ({"manifest_key": 3}, ValueError, "invalid manifest key"),
        ("bundle/x/manifest", TypeError, "must be a RemoteBundleRef or a mapping, got str"),
        (None, TypeError, "got NoneType"),
    ):
        for call in (lambda ref: read(transfer, ref), transfer.remove_bundle, transfer.get_object):
            with pytest.raises(error, match=words):
                call(ref)
    for metadata in ("text", 3, [("a", 1)], [1]):
        with pytest.raises(TypeError, match="metadata must be a mapping, got"):
            transfer.put_structured_object(StructuredObjectPayload(metadata, {"a": b"1"}))
    with pytest.raises(TypeError, match="buffers must be a mapping, got list"):
        transfer.put_structured_object(StructuredObjectPayload({}, [b"1"]))
    for value in (b"1", {1}, np.int64(3)):
        with pytest.raises(TypeError, match="structured metadata must be JSON-serializable"):
            transfer.put_structured_object(StructuredObjectPayload({"x": value}, {"a": b"1"}))
    around: list = []
    around.append(around)
    with pytest.raises(ValueError, match="structured metadata must be JSON-serializable"):
        transfer.put_structured_object(StructuredObjectPayload({"x": around}, {"a": b"1"}))
    with pytest.raises(TypeError, match="meta must be bytes-like, got str"):
        transfer.put_bundle("text", {"a": b"1"})
    with pytest.raises(RuntimeError, match="zero-copy put requires tensor-object buffers"):
        transfer.put_bundle(b"", {"a": b"1"}, policy=BundleTransferPolicy(copy_mode="zero_copy"))
    ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"a": np.arange(3)}))
    with pytest.raises(KeyError, match="nothing"):
        read(transfer, ref, nothing=(0, 1, 1))


def test_unsupported_tensors_are_named():
    torch = pytest.importorskip("torch", reason="tensor members need torch")
    transfer = MooncakeBundleTransfer(Fake())
    for tensor, words in ((torch.eye(3).to_sparse_csr(), "sparse_csr"), (torch.eye(2).to_sparse(), "sparse")):
        with pytest.raises(ValueError, match=f"cannot put member: .*name='member'.*{words}"):
            transfer.put_structured_object(StructuredObjectPayload(buffers={"member": tensor}))


def test_nested_tensors_with_invalid_offsets(backing):
    torch = pytest.importorskip("torch", reason="tensor members need torch")
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(5)], layout=torch.jagged)
    wrong = torch.nested.nested_tensor_from_jagged(torch.ones(7), torch.tensor([0, 2, 7000]), min_seqlen=2, max_seqlen=5)
    changes = ({"ragged_idx": 5}, {"ragged_idx": "1"}, {"part_bytes": [1.0]}, {"part_bytes": ["8", 8]}, {"part_bytes": None})
    for tensor, change in ((wrong, {}), *((rows, change) for change in changes)):
        transfer, ref = stored(backing, lambda f, m, d, change=change: f["t"].update(change), t=tensor)
        with pytest.raises(ValueError):
            read(transfer, ref)
    assert [len(one) for one in read(*stored(backing, lambda f, m, d: None, t=rows))["t"].unbind()] == [2, 5]
