"""Structured objects on stores of any class: which methods are called, with which arguments."""

from __future__ import annotations

import copy
import ctypes
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from ducks import BASE, RANGES, TENSORS, Pool, Renamed, duck

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    FieldSchema,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    export_ref,
    import_ref,
    tensor_object_buffer,
)

ARRAY = np.arange(64, dtype=np.int32).reshape(16, 4)
MEMBERS = {"a": ARRAY, "b": b"bytes", "e": b"", "z": np.array(3.5)}
COPY, ZERO = BundleTransferPolicy(copy_mode="copy"), BundleTransferPolicy(copy_mode="zero_copy")


def column(*values):
    made = np.empty(len(values), object)
    for row, value in enumerate(values):
        made[row] = value
    return made


def calls_of(store, *names):
    """Returns the recorded calls of these methods, or all, with random parts of keys replaced."""
    renamed = Renamed()
    made = [eval(renamed(repr(call))) for call in store.calls if not names or call[0] in names]
    store.calls.clear()
    return made


def put(store, members, chunk=100, pool=None, **how):
    transfer = MooncakeBundleTransfer(store, "p", default_chunk_bytes=chunk, buffer_pool=pool)
    return transfer, transfer.put_structured_object(StructuredObjectPayload({"n": 1}, members), **how)


def read(transfer, ref, *names):
    spec = transfer.read_spec(ref)
    return transfer.materialize(spec.select_members(names) if names else spec).objects


# Writing.


def test_a_store_of_three_methods():
    store = duck(BASE)
    transfer, ref = put(store, MEMBERS)
    base, kind = "p/default/id0", "memoryview"
    assert calls_of(store) == [
        ("put", f"{base}/meta/chunk/0", kind, 100),
        ("put", f"{base}/meta/chunk/1", kind, 100),
        ("put", f"{base}/meta/chunk/2", kind, 32),
        ("put", f"{base}/buffer/a/chunk/0", kind, 100),
        ("put", f"{base}/buffer/a/chunk/1", kind, 100),
        ("put", f"{base}/buffer/a/chunk/2", kind, 56),
        ("put", f"{base}/buffer/b", kind, 5),
        ("put", f"{base}/buffer/z", kind, 8),
        ("put", f"{base}/manifest", "bytes", 1159),
    ]
    assert ref.manifest["buffers"]["e"] == {"key": ref.manifest["buffers"]["e"]["key"], "bytes": 0, "chunks": []}
    got = read(transfer, ref)
    assert np.array_equal(got["a"], ARRAY) and got["b"] == b"bytes" and type(got["b"]) is bytes and got["e"] == b""
    assert len(calls_of(store)) == 8
    (some,) = transfer.materialize(transfer.read_spec(ref).select_members(["a"]).slice_member("a", 0, 2, 5)).objects.values()
    assert np.array_equal(some, ARRAY[2:5])
    assert [call[1].rpartition("/")[2] for call in calls_of(store, "get")] == ["0", "1", "2", "0"]
    transfer.remove_bundle(ref)
    assert [call[2] for call in calls_of(store, "remove")] == [True] * 9 and not store.values
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert calls_of(store) == [("get", f"{base}/manifest")]


def test_writes_through_a_pool():
    store = duck((*BASE, "batch_put_from", *RANGES))
    pool = Pool(store.calls)
    put(store, {"a": ARRAY}, pool=pool)
    key = "p/default/id0/buffer/a/chunk"
    assert calls_of(store, "acquire", "batch_put_from", "release") == [
        ("acquire", 100), ("batch_put_from", [f"{key}/0"], [100]), ("release", 100),
        ("acquire", 100), ("batch_put_from", [f"{key}/1"], [100]), ("release", 100),
        ("acquire", 56), ("batch_put_from", [f"{key}/2"], [56]), ("release", 56),
    ]  # fmt: skip
    put(store, {"a": ARRAY}, pool=pool, policy=COPY)
    assert not calls_of(store, "acquire", "batch_put_from")
    without = duck(BASE)
    with pytest.raises(RuntimeError, match="batch_put_from is unavailable"):
        put(without, {"a": ARRAY}, pool=Pool())
    assert not without.values
    # Several pieces are written by `put`.
    transfer = MooncakeBundleTransfer(without, "p", buffer_pool=Pool())
    with pytest.raises(RuntimeError, match="batch_put_from is unavailable"):
        transfer.put({"non_tensor_batch": {"x": ["a", "b"]}})
    assert [one[1].rpartition("x.")[2] for one in without.calls if "x." in one[1] and one[0] == "put"] == ["data"]
    failing = duck((*BASE, "batch_put_from"))
    with pytest.raises(RuntimeError, match="no memory"):
        put(failing, {"a": ARRAY}, pool=Pool(error=RuntimeError("no memory")))
    assert not failing.values


@pytest.mark.parametrize("code", [-200, 5, "x", RuntimeError("broken")])
def test_writes_that_fail(code):
    for name, methods, pool in (("put", BASE, None), ("batch_put_from", (*BASE, "batch_put_from"), Pool())):
        store = duck(methods)
        store.codes[name, "a/chunk/1"] = code
        expected = "broken" if isinstance(code, Exception) else f"{name} failed for .*a/chunk/1: {code}"
        with pytest.raises(RuntimeError, match=expected):
            put(store, {"a": ARRAY}, pool=pool)
        assert not store.values and (pool is None or not pool.live)
    store = duck(BASE)
    store.codes["put"] = None
    put(store, {"a": ARRAY})
    assert store.values, "None is success"


def test_rows_are_packed_whole():
    rows = column(*[np.full(n, n, np.int64) for n in (5, 7, 9, 3, 4, 8, 2)])

    def sizes(chunk, pool):
        store = duck((*BASE, "batch_put_from"))
        transfer = MooncakeBundleTransfer(store, "p", default_chunk_bytes=chunk, buffer_pool=pool)
        ref = transfer.put({"non_tensor_batch": {"x": rows}})
        payload = ref.stage_refs["default"].manifest["buffers"]["non_tensor_batch.x.data"]
        assert all(np.array_equal(a, b) for a, b in zip(transfer.get(ref)["non_tensor_batch"]["x"], rows))
        return [chunk["bytes"] for chunk in payload["chunks"]]

    assert sizes(100, Pool()) == [96, 96, 96, 16]
    assert sizes(60, Pool()) == [60, 60, 60, 60, 60, 4], "a row is longer than a chunk"
    assert sizes(100, None) == [100, 100, 100, 4]
    assert sizes(304, Pool()) == [304]


def test_parallel_writes():
    class Threads:
        values: dict = {}
        threads: set = set()
        barrier = threading.Barrier(3, timeout=30)

        def put(self, key, value):
            if "x.data" in key:
                self.threads.add(threading.get_ident())
                if key.endswith(("/0", "/3", "/6")):
                    self.barrier.wait()
            self.values[key] = bytes(value)

        def get(self, key):
            return self.values.get(key, b"")

        def remove(self, key, force):
            self.values.pop(key, None)

    store = Threads()
    transfer = MooncakeBundleTransfer(store, "p", default_chunk_bytes=10)
    values = column(*[bytes([n]) * 10 for n in range(9)])
    policy = BundleTransferPolicy(max_inflight_put=3, put_mode="parallel")
    ungrouped = SimpleNamespace(group_ids=[""])
    with pytest.raises(TypeError):
        transfer.put({"non_tensor_batch": {"x": values}}, policy=policy, config=ungrouped)
    assert not store.values
    plain = store.put
    store.put = lambda key, value, config: plain(key, value)
    ref = transfer.put({"non_tensor_batch": {"x": values}}, policy=policy, config=ungrouped)
    assert len(store.threads) == 3 and list(transfer.get(ref)["non_tensor_batch"]["x"]) == list(values)


# Reading.


def test_reads_into_registered_memory():
    store = duck((*BASE, *RANGES))
    transfer, ref = put(store, MEMBERS)
    store.calls.clear()
    read(transfer, ref, "a", "b", "z")
    keys = [f"p/default/id0/buffer/a/chunk/{n}" for n in range(3)]
    assert calls_of(store)[3:] == [
        ("register_buffer", 256),
        ("get_into_ranges", 1, [keys], [[[0], [100], [200]]], [[[0], [0], [0]]], [[[100], [100], [56]]]),
        ("unregister_buffer",),
        ("register_buffer", 5), ("batch_get_into", ["p/default/id0/buffer/b"], [5]), ("unregister_buffer",),
        ("register_buffer", 8), ("get_into", "p/default/id0/buffer/z", 8), ("unregister_buffer",),
    ]  # fmt: skip
    spec = transfer.read_spec(ref).select_members(["a"])
    into = np.zeros((2, 4), np.int32)
    assert transfer.materialize_into(spec.slice_member("a", 0, 5, 7), {"a": into}).objects["a"] is into
    assert np.array_equal(into, ARRAY[5:7])
    assert calls_of(store, "get_into_ranges") == [
        ("get_into_ranges", 1, [keys[:2]], [[[0], [20]]], [[[80], [0]]], [[[20], [12]]])
    ]
    (got,) = transfer.materialize(spec.slice_member("a", 0, 0, 16, 5)).objects.values()
    assert np.array_equal(got, ARRAY[::5]) and len(calls_of(store, "get_into_ranges")) == 1
    batch = transfer.put({"batch": {"a": ARRAY}})
    store.calls.clear()
    assert np.array_equal(transfer.get(batch, rows=[3, 9, 4])["batch"]["a"], ARRAY[[3, 9, 4]])
    (ranges,) = calls_of(store, "get_into_ranges")
    assert ranges[3:] == ([[[0], [16], [32]]], [[[48], [44], [64]]], [[[16], [16], [16]]])
    for code, fails in ((-600, False), (-1, True)):
        store.codes["register_buffer"] = code
        store.calls.clear()
        if fails:
            with pytest.raises(RuntimeError, match="register_buffer"):
                read(transfer, ref, "a")
        else:
            assert np.array_equal(read(transfer, ref, "a")["a"], ARRAY)
        assert not calls_of(store, "unregister_buffer")
    store.codes = {"unregister_buffer": -1}
    with pytest.raises(RuntimeError, match="unregister_buffer"):
        read(transfer, ref, "a")
    store.values = {key: value for key, value in store.values.items() if "buffer/a/chunk/1" not in key}
    with pytest.raises(RuntimeError, match="get_into_ranges failed for .*a/chunk/1: -704"):
        store.codes = {}
        read(transfer, ref, "a")
    assert not store.registered


def test_results_in_a_pool():
    store = duck((*BASE, "batch_put_from", *RANGES))
    pool = Pool(store.calls)
    transfer, ref = put(store, MEMBERS, pool=pool)
    got = read(transfer, ref)
    assert len(pool.live) == 3 and got["b"].tobytes() == b"bytes" and got["e"] == b""
    view = got["a"][2:4]
    assert view._mooncake_pool_owner is got["a"]._mooncake_pool_owner and np.array_equal(got["a"], ARRAY)
    around = [got, (view,), SimpleNamespace(batch={"x": view}, non_tensor_batch=None)]
    around.append(around)
    MooncakeBundleTransfer.release_result(around)
    assert not pool.live and sum(call[0] == "release" for call in store.calls) == 5 + 3
    MooncakeBundleTransfer.release_result(around)
    assert sum(call[0] == "release" for call in store.calls) == 5 + 3
    foreign = SimpleNamespace(released=0)
    foreign._mooncake_pool_owner = SimpleNamespace(release=lambda: setattr(foreign, "released", foreign.released + 1))
    MooncakeBundleTransfer.release_result({"a": foreign, "b": [foreign]})
    assert foreign.released == 1
    kept = np.asarray(read(transfer, ref, "a")["a"])
    assert len(pool.live) == 1 and np.array_equal(kept, ARRAY)
    del kept
    assert not pool.live, "a result that nobody uses returns its memory"
    batch = transfer.put({"non_tensor_batch": {"x": column(np.arange(3), np.arange(2))}})
    for kind in ("dataproto", "dict"):
        got = transfer.get(batch, type=kind)
        rows = got["non_tensor_batch"]["x"] if kind == "dataproto" else got["x"]
        assert rows._mooncake_pool_owner is rows[0]._mooncake_pool_owner and rows[1].tolist() == [0, 1]
        assert len(pool.live) == 1
        transfer.release_result(got)
        assert not pool.live
    del rows, got
    pool.error = RuntimeError("exhausted")
    plain = read(transfer, ref)
    assert type(plain["b"]) is bytes and not hasattr(plain["a"], "_mooncake_pool_owner")


# Removing.


def test_removal_in_two_rounds():
    store = duck((*BASE, "batch_remove", "is_exist"))
    transfer, ref = put(store, MEMBERS)
    store.calls.clear()
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    made = calls_of(store)
    assert [call[0] for call in made] == ["is_exist", "get", "batch_remove", "batch_remove"]
    assert made[3] == ("batch_remove", ["p/default/id0/manifest"], True) and len(made[2][1]) == 8
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert calls_of(store) == [("is_exist", "p/default/id0/manifest")]
    transfer, ref = put(store, {"b": b"1"})
    store.codes["is_exist"] = -1
    with pytest.raises(RuntimeError, match="is_exist"):
        transfer.remove_bundle({"manifest_key": ref.manifest_key})
    for codes in ([0], RuntimeError("down")):
        store.codes = {"batch_remove": codes}
        with pytest.raises(RuntimeError):
            transfer.remove_bundle(ref)
    store.codes = {"batch_remove": [-706, 0], ("remove", "buffer/b"): -706, ("remove", "meta"): -706}
    with pytest.raises(RuntimeError, match="failed to remove"):
        transfer.remove_bundle(ref)
    assert ref.manifest_key in store.values
    wrong = RemoteBundleRef(ref.manifest_key.replace("/default/", "/other/"), ref.manifest)
    with pytest.raises(ValueError, match="manifest_key"):
        transfer.remove_bundle(wrong)


def test_a_failed_write_hides_no_error():
    store = duck((*BASE, "batch_remove"))
    store.codes = {("put", "manifest"): -200, "batch_remove": RuntimeError("down"), ("remove", "buffer/b"): KeyError("b")}
    with pytest.raises(RuntimeError, match="put failed for .*manifest: -200"):
        put(store, {"b": b"1", "c": b"2"})
    assert [key.rpartition("/")[2] for key in store.values] == ["b"]


# Tensors.


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="tensor members need torch")


def test_calls_for_tensors(torch):
    tensor = torch.arange(12).reshape(4, 3)
    config = SimpleNamespace(group_ids=["g"])
    store = duck((*BASE, *TENSORS))
    transfer, ref = put(store, {"t": tensor})
    key = ref.manifest["buffers"]["t"]["key"]
    assert json.dumps(ref.manifest["buffers"]["t"]) == json.dumps(
        {"key": key, "kind": "tensor", "bytes": 400, "dtype": "torch.int64", "shape": [4, 3],
         "chunks": [{"key": key, "bytes": 400}], "metadata_bytes": 304}
    )  # fmt: skip
    assert read(transfer, ref)["t"] is tensor and len(calls_of(store, "put_tensor", "get_tensor")) == 2
    (part,) = transfer.materialize(transfer.read_spec(ref).slice_member("t", 0, 1, 3)).objects.values()
    assert part.equal(tensor[1:3])
    _, ref = put(store, {"t": tensor}, config=config)
    assert calls_of(store, "put_tensor", "pub_tensor")[0][0] == "pub_tensor"
    memory = (ctypes.c_ubyte * 400)()
    into = tensor_object_buffer(ctypes.addressof(memory), 400, memory)
    spec = transfer.read_spec(ref)
    assert transfer.materialize_into(spec, {"t": into}).objects["t"] is tensor
    plain = duck((*BASE, *RANGES))
    transfer, ref = put(plain, {"t": tensor, "s": torch.tensor(3.5)}, policy=COPY)
    assert ref.manifest["buffers"]["t"]["metadata_bytes"] == 304 and "kind" not in ref.manifest["buffers"]["t"]
    assert ref.manifest["buffers"]["s"]["format"] == "torch_save"
    got = transfer.materialize_into(transfer.read_spec(ref), {"t": into}).objects
    assert got["t"] is into and got["s"].item() == 3.5 and bytes(memory)[304:] == tensor.numpy().tobytes()
    with pytest.raises(ValueError, match="too small"):
        transfer.materialize_into(transfer.read_spec(ref), {"t": tensor_object_buffer(into.ptr, 399)})
    with pytest.raises(ValueError, match="does not support destinations"):
        transfer.materialize_into(transfer.read_spec(ref), {"s": into})
    with pytest.raises(ValueError, match="BufferPool tensor-object buffer"):
        put(store, {"t": tensor}, policy=ZERO)


def test_tensors_through_a_pool(torch):
    tensor = torch.arange(6, dtype=torch.int16).reshape(3, 2)
    for config, method in ((None, "put_tensor_from"), (SimpleNamespace(group_ids=["g"]), "put_from")):
        store = duck((*BASE, "put_from", "put_tensor_from", "batch_put_from"))
        transfer, ref = put(store, {"t": tensor}, pool=Pool(store.calls), config=config)
        assert len(calls_of(store, method)) == 1 and set(ref.manifest["buffers"]["t"]) == {"key", "bytes", "chunks"}
        assert read(transfer, ref)["t"].equal(tensor)
        (part,) = transfer.materialize(transfer.read_spec(ref).slice_member("t", 0, 1, 3)).objects.values()
        assert part.equal(tensor[1:3]), "Mooncake C++ cannot slice such a tensor"
        store.codes[method] = -200
        _, ref = put(store, {"t": tensor}, pool=Pool(), config=config)
        assert ref.manifest["buffers"]["t"]["metadata_bytes"] == 304


def test_stored_forms_of_tensors():
    memory = (ctypes.c_ubyte * 400)(*range(200))
    member = tensor_object_buffer(ctypes.addressof(memory), 400, memory, 3)
    for methods, config, expected in (
        (("put_from",), None, "put_from"),
        (("put_from", "put_tensor_from"), None, "put_tensor_from"),
        (("put_from", "put_tensor_from"), SimpleNamespace(group_ids=None), "put_from"),
    ):
        store = duck((*BASE, *methods))
        for policy in (ZERO, COPY, None):
            _, ref = put(store, {"t": member}, policy=policy, config=config)
            assert len(calls_of(store, expected)) == 1
            payload = ref.manifest["buffers"]["t"]
            assert set(payload) == {"key", "bytes", "chunks"} and store.values[payload["key"]] == bytes(memory)
            meta = b"".join(store.values[chunk["key"]] for chunk in ref.manifest["meta"]["chunks"])
            assert json.loads(meta)["__mooncake_structured_fields__"]["t"] == {"encoding": "torch_tensor"}
    with pytest.raises(RuntimeError, match="put_from is unavailable"):
        put(duck(BASE), {"t": member})


# Groups.


class Uncopyable:
    def __init__(self):
        self.group_ids = None
        self.replica_num = 1
        self.preferred_segments = []

    def __copy__(self):
        raise TypeError("no copy")


@pytest.mark.parametrize("make", [SimpleNamespace, Uncopyable, ReplicateConfig])
def test_groups_of_batches(make):
    store = duck(BASE)
    transfer = MooncakeBundleTransfer(store, "p")
    data = {"batch": {"x": np.arange(3)}}

    def groups(ref_or_work):
        result = ref_or_work()
        named = {json.dumps(call[-1][1]) if isinstance(call[-1], tuple) else None for call in store.calls if call[0] == "put"}
        store.calls.clear()
        return result, named

    def config(names, **more):
        made = make(**more) if make is SimpleNamespace else make()
        if make is not ReplicateConfig or names is None or isinstance(names, list):
            made.group_ids = names
        return made

    for given in (None, config(None), config([])):
        ref, named = groups(lambda: transfer.put(data, config=given))
        assert ref._storage_group_id.startswith("structured-") and len(ref._storage_group_id) == 43
        assert named == {json.dumps([ref._storage_group_id])}
        assert given is None or given.group_ids in (None, [])
    names = [["mine"]] if make is ReplicateConfig else [["mine"], "mine", ("mine",)]
    for name in names:
        ref, named = groups(lambda: transfer.put_dataproto(data, config=config(name)))
        assert ref._storage_group_id == "mine" and named == {'["mine"]'}
        for given in (None, config(None), config(["mine"])):
            appended, named = groups(
                lambda: transfer.append_dataproto_fields(ref, {"batch": {"y": np.arange(3)}}, stage="s", config=given)
            )
            assert appended._storage_group_id == "mine" and named == {'["mine"]'}
    for wrong, words in ((["a", "b"], "config.group_ids"), ([1], "must contain strings"), (7, "must contain strings")):
        if make is ReplicateConfig and wrong != ["a", "b"]:
            continue
        for work in (
            lambda: transfer.put(data, config=config(wrong)),
            lambda: transfer.append_dataproto_fields(ref, {"batch": {"y": np.arange(3)}}, stage="s", config=config(wrong)),
        ):
            with pytest.raises(ValueError, match=words):
                work()
    with pytest.raises(ValueError, match="conflicts"):
        transfer.append_dataproto_fields(ref, {"batch": {"y": np.arange(3)}}, stage="s", config=config(["other"]))
    assert not store.calls
    ref, named = groups(lambda: transfer.put(data, config=config([""])))
    assert ref._storage_group_id is None and named == {'[""]'}
    appended, named = groups(lambda: transfer.append_dataproto_fields(ref, {"batch": {"y": np.arange(3)}}, stage="s"))
    assert appended._storage_group_id is None and named == {None}


def test_groups_of_single_objects():
    store = duck(BASE)
    seen = []
    store.put = lambda key, value, config: seen.append(config)
    transfer = MooncakeBundleTransfer(store, "p")
    for names, same, expected in ((None, True, None), (["g"], True, ["g"]), ("g", False, ["g"]), ([], False, None)):
        config = SimpleNamespace(group_ids=names, replica_num=2)
        seen.clear()
        transfer.put_bundle(b"m", {"x": b"1"}, config=config)
        assert len(seen) == 3 and all((one is config) == same for one in seen)
        assert all(one.group_ids == expected and one.replica_num == 2 for one in seen) and config.group_ids == names
    seen.clear()
    with pytest.raises(ValueError, match="config.group_ids"):
        transfer.put_bundle(b"m", {"x": b"1"}, config=SimpleNamespace(group_ids=["a", "b"]))
    assert not seen


def test_only_metadata_needs_no_store():
    class NoCopy:
        group_ids = ["g"]

        def __copy__(self):
            raise RuntimeError("it must not be copied")

    transfer = MooncakeBundleTransfer(object(), "p")
    ref = transfer.put({"meta_info": {"a": 1}}, config=NoCopy())
    assert ref._storage_group_id == "g" and not ref.stage_refs
    assert transfer.append_dataproto_fields(ref, {"meta_info": {"b": 2}}, stage="s").meta_info == {"a": 1, "b": 2}


# Handles and appends.


def test_versions_of_handles():
    transfer = MooncakeBundleTransfer(duck(BASE), "p")
    handle = export_ref(transfer.put({"batch": {"x": np.arange(3)}}))
    assert handle["version"] == 1 and import_ref({**handle, "version": 2})._storage_group_id == handle["storage_group_id"]
    legacy = {name: value for name, value in handle.items() if name != "storage_group_id"}
    assert import_ref(legacy)._storage_group_id is None and import_ref(handle).stage_refs["default"].manifest == {}
    assert export_ref(import_ref({**handle, "version": 2})) == handle
    for change, words in (
        ({"version": 3}, "unsupported.*version"),
        ({"version": True}, "unsupported.*version"),
        ({"storage_group_id": ""}, "storage_group_id"),
        ({"storage_group_id": 7}, "storage_group_id"),
        ({"stage_refs": {"other": {"manifest_key": "p/x/manifest"}}}, "unknown stage"),
        ({"stage_refs": {"": {"manifest_key": "p/x/manifest"}}}, "non-empty"),
        ({"global_indexes": [True]}, "global_indexes"),
    ):
        with pytest.raises(ValueError, match=words):
            import_ref({**handle, **change})
    with pytest.raises(ValueError, match="storage_group_id"):
        import_ref({**legacy, "version": 2})
    store = duck(BASE)
    transfer._calls.store = store
    transfer.append_dataproto_fields(handle, {"batch": {"y": np.arange(3)}}, stage="new")
    assert not calls_of(store, "get"), "a new stage needs nothing of the others"


def test_appends_to_a_stage():
    store = duck(BASE)
    transfer = MooncakeBundleTransfer(store, "p")
    first = transfer.put({"batch": {"x": np.arange(3)}})
    second = transfer.append_dataproto_fields(first, {"batch": {"y": np.arange(3)}}, stage="default")
    manifest = second.stage_refs["default"].manifest
    old, new = (manifest["buffers"][f"batch.{name}"]["key"].rpartition("/buffer/")[0] for name in "xy")
    assert manifest["cleanup_keys"] == [f"{old}/manifest", f"{old}/meta", f"{new}/manifest", f"{new}/meta"]
    assert manifest["buffer_object_ids"] == sorted(one.removeprefix("p/") for one in (old, new))
    assert f"{new}/manifest" not in store.values and f"{old}/manifest" in store.values
    assert transfer.get(first)["batch"].keys() == {"x"} and transfer.get(second)["batch"].keys() == {"x", "y"}
    before = copy.copy(store.values)
    third = transfer.append_dataproto_fields(second, {"batch": {"z": np.arange(3)}}, stage="default")
    transfer.cleanup_dataproto_append(second, third)
    assert store.values == before
    transfer.cleanup_dataproto_append(second, third)
    assert store.values == before
    gets = store.get
    store.get = lambda key: b"" if key == manifest["meta"]["key"] else gets(key)
    with pytest.raises(RuntimeError, match="get failed"):
        transfer.append_dataproto_fields(second, {"batch": {"z": np.arange(3)}}, stage="default", chunk_bytes=7)
    assert store.values == before
    store.get = gets
    transfer.cleanup_dataproto(second)
    assert not store.values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=2), "version 1"),
        (lambda m: m["meta"].update(key="p/other/meta"), "namespace"),
        (lambda m: m["buffers"]["a"].update(key="p/other/a"), "namespace"),
        (lambda m: m["buffers"]["a"]["chunks"][0].update(key=m["meta"]["key"]), "namespace"),
        (lambda m: m["buffers"]["a"]["chunks"].append(m["buffers"]["a"]["chunks"][0]), "unique"),
        (lambda m: m["buffers"].update({"x/y": m["buffers"]["a"]}), "buffer name"),
        (lambda m: m.update(cleanup_keys=["p/default/other/x"]), "cleanup_keys"),
        (lambda m: m.update(object_id=7), "object_id"),
    ],
)
def test_rules_of_manifests(change, words):
    transfer, ref = put(duck(BASE), {"a": b"1"})
    change(ref.manifest)
    for work in (lambda: read(transfer, ref), lambda: transfer.remove_bundle(ref)):
        with pytest.raises(ValueError, match=words):
            work()


# Stores of this package.


class Counted(MooncakeDistributedStore):
    """Store that overrides one method."""

    gets = 0

    def get(self, key):
        self.gets += 1
        return super().get(key)


def test_overridden_methods_see_their_calls(master, key):
    store = Counted()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master.address) == 0
    transfer = MooncakeBundleTransfer(store, key)
    values = {"x": ARRAY, "words": ["a", "b"] * 8, "rows": [np.arange(n) for n in range(16)]}
    ref = transfer.put(values, type="dict")
    got = transfer.get(export_ref(ref), type="dict")
    assert store.gets > 0 and np.array_equal(got["x"], ARRAY) and got["words"] == ["a", "b"] * 8
    assert all(np.array_equal(a, b) for a, b in zip(got["rows"], values["rows"]))
    transfer.release_result(got)
    transfer.cleanup_dataproto(ref)
    store.close()


def test_a_wrapper_of_a_store(store, key):
    class Wrapper:
        def __init__(self):
            self.names = []

        def __getattr__(self, name):
            self.names.append(name)
            return getattr(store, name)

    wrapper = Wrapper()
    transfer, plain = MooncakeBundleTransfer(wrapper, key), MooncakeBundleTransfer(store, key)
    members = {"a": ARRAY, "b": b"bytes" * 100}
    ref = transfer.put_structured_object(StructuredObjectPayload({}, members), chunk_bytes=100)
    for reader in (transfer, plain):
        got = reader.materialize(reader.read_spec({"manifest_key": ref.manifest_key})).objects
        assert np.array_equal(got["a"], ARRAY) and got["b"].tobytes() == members["b"]
    assert {"batch_put_from", "get_into_ranges", "_get_pyclient_capsule"} <= set(wrapper.names)
    assert not {"put_parts", "batch_is_exist", "get_batch", "get_buffer"} & set(wrapper.names)
    transfer.remove_bundle(ref)


def test_lengths_of_columns():
    store = duck(BASE)
    transfer = MooncakeBundleTransfer(store, "p")
    ref = transfer.put({"non_tensor_batch": {"x": [{"a": 1}, None]}})
    with pytest.raises(ValueError, match="offsets length"):
        transfer.get({**export_ref(ref), "batch_size": 3})


def test_codecs_give_way():
    transfer = MooncakeBundleTransfer(duck(BASE), "p")
    ref = transfer.put({"non_tensor_batch": {"x": ["a", None]}}, field_schemas={"x": FieldSchema("ndarray")})
    assert ref.encoded_non_tensor["x"]["codec"] == "utf8_ragged"
    assert list(transfer.get(ref)["non_tensor_batch"]["x"]) == ["a", None]
