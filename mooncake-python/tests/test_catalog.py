"""Catalogue of stored batches, and the transfer that publishes in it."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from ducks import BASE, duck

from mooncake.dataproto_catalog import DataProtoCatalog, DataProtoCatalogTransfer
from mooncake.structured_object_store import MooncakeBundleTransfer


def handle(key, rows, fields, **more):
    made = {
        "type": "mooncake_dataproto_ref", "version": 1, "kind": "bundle_stages", "batch_size": rows,
        "namespace": "default", "partition": "p", "global_indexes": None,
        "stage_refs": {"s": {"manifest_key": key}},
        "field_index": {name: {"stage": "s", "member": f"batch.{name}", "section": "batch"} for name in fields},
        "meta_info": {}, "encoded_non_tensor": {},
    }  # fmt: skip
    return {**made, **more}


def extended(previous, key, field, stage="t"):
    made = json.loads(json.dumps(previous))
    made["stage_refs"][stage] = {"manifest_key": key}
    made["field_index"][field] = {"stage": stage, "member": f"batch.{field}", "section": "batch"}
    return made


def ids(result):
    return sorted(next(iter(one["stage_refs"].values()))["manifest_key"] for one in result["retired_handles"])


def test_locations_of_fields():
    catalog = DataProtoCatalog()
    catalog.update("p", ["a", "b"], handle=handle("k1", 2, "fg"), tags=[{"x": 1}, {}])
    result = catalog.update("p", ["b"], handle=handle("k2", 1, "g"), tags=[{"y": 2}])
    assert result == {"keys": ["b"], "tags": [{"y": 2}], "fields": ["f", "g"], "retired_handles": []}
    found = catalog.resolve("p", ["b", "a"])
    assert found["field_groups"] == [
        {"fields": ["f"], "locations": [("k1", 1), ("k1", 0)]},
        {"fields": ["g"], "locations": [("k2", 0), ("k1", 0)]},
    ]
    assert found["handles"] == {"k1": handle("k1", 2, "fg"), "k2": handle("k2", 1, "g")}
    assert catalog.list() == {"p": {"a": {"x": 1}, "b": {"y": 2}}} and catalog.list("q") == {}
    assert catalog.resolve("p", ["a"], ["g"])["fields"] == ["g"] and "read_token" not in found
    # Results are copies.
    found["handles"]["k1"]["batch_size"] = 7
    assert catalog.resolve("p", ["a"])["handles"]["k1"]["batch_size"] == 2
    assert catalog.remove("p", ["a", "b", "what"]) == {"retired_handles": []} and catalog.list() == {}


def test_lifetime_of_published_batches():
    catalog = DataProtoCatalog()
    first = catalog.publish("op", "p", ["a", "b"], handle=handle("k1", 2, "f"))
    assert catalog.publish("op", "other", ["z"], tags=[{}]) == first and catalog.list().keys() == {"p"}
    catalog.ack_publication("op")
    catalog.ack_publication("op")
    token = catalog.resolve("p", ["a"], pin=True)["read_token"]
    assert token == 1 and ids(catalog.remove("p", ["a", "b"])) == []
    with pytest.raises(RuntimeError, match="pin"):
        catalog.drain()
    assert ids(catalog.release_read(token)) == ids(catalog.release_read(token)) == ["k1"]
    with pytest.raises(ValueError, match="retired"):
        catalog.update("p", ["a", "b"], handle=handle("k1", 2, "f"))
    with pytest.raises(ValueError, match="mismatch"):
        catalog.ack_retired([handle("k1", 2, "g")])
    assert ids(catalog.ack_retired([handle("k1", 2, "f"), handle("unknown", 1, "f")])) == []
    catalog.update("p", ["a", "b"], handle=handle("k1", 2, "f"))
    with pytest.raises(ValueError, match="managed"):
        catalog.publish("op", "p", ["a", "b"], handle=handle("k1", 2, "f"))
    catalog.publish("op", "p", ["a"], handle=handle("k2", 1, "f"))
    assert ids(catalog.drain()) == ["k2"] and catalog.list() == {}
    for work in (lambda: catalog.update("p", ["a"], tags=[{}]), lambda: catalog.publish("x", "p", ["a"], tags=[{}])):
        with pytest.raises(RuntimeError, match="drained"):
            work()


def test_appends():
    catalog = DataProtoCatalog()
    one = handle("k1", 2, "f")
    catalog.publish("op", "p", ["a", "b"], handle=one)
    two = extended(one, "k2", "g")
    result = catalog.publish_append("op2", "k1", "p", ["b", "a"], previous_handle=one, handle=two)
    assert result["fields"] == ["f", "g"]
    assert catalog.publish_append("op2", "k1", "p", ["z"], previous_handle=one, handle=one) == result
    found = catalog.resolve("p", ["a", "b"])
    # The fragment keeps its ID.
    assert found["handles"] == {"k1": two}
    assert found["field_groups"][1] == {"fields": ["g"], "locations": [("k1", 1), ("k1", 0)]}
    changed = extended(two, "k3", "h")
    moved = json.loads(json.dumps(changed))
    moved["field_index"]["f"]["member"] = "batch.other"
    for number, (of, previous, new, keys, words) in enumerate((
        ("k1", one, changed, ["a", "b"], "stale"),
        ("k9", two, changed, ["a", "b"], "stale"),
        ("k1", two, {**changed, "batch_size": 3}, ["a", "b"], "batch size"),
        ("k1", two, changed, ["a"], "batch size"),
        ("k1", two, {**changed, "partition": "q"}, ["a", "b"], "partition"),
        ("k1", two, {**changed, "storage_group_id": "g"}, ["a", "b"], "group"),
        ("k1", two, moved, ["a", "b"], "locations"),
        ("k1", two, changed, ["a", "c"], "not found"),
    )):  # fmt: skip
        result = catalog.publish_append(f"bad{number}", of, "p", keys, previous_handle=previous, handle=new)
        assert words in result["append_rejected"].replace("were ", ""), result


def test_wrong_arguments():
    good = handle("k", 1, "f")
    two_stages = extended(good, "q", "z")
    for work, error, words in (
        (lambda c: c.publish("", "p", ["a"], tags=[{}]), ValueError, "must be a non-empty string"),
        (lambda c: c.update("", ["a"], tags=[{}]), ValueError, "must be a non-empty string"),
        (lambda c: c.update("p", "a", tags=[{}]), ValueError, "sequence"),
        (lambda c: c.update("p", [""], tags=[{}]), ValueError, "non-empty strings"),
        (lambda c: c.update("p", [1], tags=[{}]), ValueError, "non-empty strings"),
        (lambda c: c.update("p", [], tags=[]), ValueError, "non-empty strings"),
        (lambda c: c.update("p", ["a", "a"], tags=[{}, {}]), ValueError, "unique"),
        (lambda c: c.update("p", ["a"], tags=[{}, {}]), ValueError, "same length"),
        (lambda c: c.update("p", ["a"], tags=[1]), TypeError, "mapping"),
        (lambda c: c.update("p", ["a"]), ValueError, "needs tags"),
        (lambda c: c.update("p", ["a"], handle=two_stages), ValueError, "exactly one stage"),
        (lambda c: c.update("p", ["a", "b"], handle=good), ValueError, "batch size"),
        (lambda c: c.update("p", ["a"], handle=handle("k", 1, "")), ValueError, "fields"),
        (lambda c: c.update("p", ["a"], handle={}), ValueError, "handle"),
        (lambda c: c.resolve("p", ["a"]), ValueError, "were not found"),
    ):
        catalog = DataProtoCatalog()
        with pytest.raises(error, match=words):
            work(catalog)
        assert catalog.list() == {}
    catalog = DataProtoCatalog()
    catalog.update("p", ["a", "b"], tags=[{}, {}])
    with pytest.raises(ValueError, match="do not contain any fields"):
        catalog.resolve("p", ["a"])
    catalog.update("p", ["a"], handle={**good, "meta_info": {"m": 1}})
    with pytest.raises(ValueError, match="not ready"):
        catalog.resolve("p", ["a", "b"])
    with pytest.raises(ValueError, match="collision"):
        catalog.update("p", ["b"], handle=handle("k", 1, "g"))
    catalog.update("p", ["b"], handle={**handle("l", 1, "f"), "meta_info": {"m": 2}})
    with pytest.raises(ValueError, match="meta_info"):
        catalog.resolve("p", ["a", "b"])


def test_random_changes_against_a_model():
    """Compares locations, and retired batches, with a model of plain loops."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    catalog, where, published, retired, pins = DataProtoCatalog(), {}, set(), set(), {}
    for step in range(1500):
        keys = chance.sample("abcdef", chance.randint(1, 4))
        kind = chance.choice(["publish", "publish", "remove", "pin", "release", "ack"])
        if kind == "publish":
            fields, key = chance.sample("fgh", chance.randint(1, 3)), f"k{step}"
            catalog.publish(f"op{step}", "p", keys, handle=handle(key, len(keys), fields))
            published.add(key)
            where |= {(name, of): (key, row) for row, name in enumerate(keys) for of in fields}
        elif kind == "remove":
            catalog.remove("p", keys)
            where = {at: value for at, value in where.items() if at[0] not in keys}
        elif kind == "pin" and (known := sorted({name for name, _ in where})):
            name = chance.choice(known)
            token = catalog.resolve("p", [name], pin=True)["read_token"]
            pins[token] = {of for (at, _), (of, _) in where.items() if at == name}
        elif kind == "release" and pins:
            token = chance.choice(sorted(pins))
            catalog.release_read(token)
            del pins[token]
        elif kind == "ack":
            gone = catalog.release_read(0)["retired_handles"][:2]
            catalog.ack_retired(gone)
            retired -= set(ids({"retired_handles": gone}))
        used = {of for of, _ in where.values()} | {of for some in pins.values() for of in some}
        retired |= published - used
        published &= used
        assert ids(catalog.release_read(0)) == sorted(retired)
        for name in "abcdef":
            expected = {of: at for (key, of), at in where.items() if key == name}
            if expected:
                groups = catalog.resolve("p", [name])["field_groups"]
                assert {of: group["locations"][0] for group in groups for of in group["fields"]} == expected


class Data(dict):
    """Batch of arrays whose length is its number of samples."""

    def __len__(self):
        return len(self["batch"]["x"])


def data(*values):
    return Data(batch={"x": np.array(values)})


@pytest.fixture
def parts():
    store, catalog = duck(BASE), DataProtoCatalog()
    transfer = MooncakeBundleTransfer(store, "t")
    failures = {}

    def call(method, *args, **kwargs):
        if failures.get(method, 0) > 0:
            failures[method] -= 1
            raise ConnectionError(method)
        return getattr(catalog, method)(*args, **kwargs)

    return SimpleNamespace(
        store=store, catalog=catalog, transfer=transfer, failures=failures, published=DataProtoCatalogTransfer(transfer, call)
    )


def test_a_published_batch(parts):
    published, store = parts.published, parts.store
    published.put(data(1, 2, 3), partition="p", keys=["a", "b", "c"], tags=[{"n": n} for n in range(3)])
    assert published.list() == {"p": {"a": {"n": 0}, "b": {"n": 1}, "c": {"n": 2}}}
    published.put(None, partition="p", keys=["a"], tags=[{"n": 9}])
    found = published.resolve("p", ["c", "a"])
    ((fragment, row), other) = found["field_groups"][0]["locations"]
    handle = found["handles"][fragment]
    assert (row, other) == (2, (fragment, 0))
    assert parts.transfer.get(handle, rows=[2, 0])["batch"]["x"].tolist() == [3, 1]
    appended = {"batch": {"y": np.arange(3)}}
    result = published.append(fragment, handle, appended, partition="p", keys=["a", "b", "c"], stage="more")
    assert result["fields"] == ["x", "y"]
    before = dict(store.values)
    with pytest.raises(ValueError, match="stale"):
        published.append(fragment, handle, appended, partition="p", keys=["a", "b", "c"], stage="more")
    newer = published.resolve("p", ["a"])["handles"][fragment]
    with pytest.raises(ValueError, match="batch size"):
        published.append(fragment, newer, {"batch": {"z": np.arange(3)}}, partition="p", keys=["a"], stage="z")
    assert store.values == before, "a refused append leaves nothing"
    for wrong, words in (({"partition": "q"}, "partition"), ({"overwrite": True}, "overwrite")):
        with pytest.raises(ValueError, match=words):
            published.append(fragment, newer, appended, **{"partition": "p", "keys": ["a"], "stage": "z", **wrong})
    with pytest.raises(ValueError, match="same length"):
        published.put(data(1), partition="p", keys=["a", "b"])
    published.remove("p", ["a", "b", "c"])
    assert store.values, "reads pin the batch"
    published.release_read(found["read_token"])
    published.release_read(found["read_token"])
    published.release_read(2)
    assert not store.values
    published.close()


def test_calls_that_fail(parts):
    published, store, failures = parts.published, parts.store, parts.failures
    failures["publish"] = 1
    published.put(data(1), partition="p", keys=["a"])
    failures["publish"] = 2
    with pytest.raises(ConnectionError):
        published.put(data(2), partition="p", keys=["b"])
    failures["publish"] = 1
    with pytest.raises(RuntimeError, match="pending"):
        published.put(data(3), partition="p", keys=["c"])
    assert parts.catalog.list()["p"].keys() == {"a"}
    failures["ack_publication"] = 3
    published.put(data(3), partition="p", keys=["c"])
    assert parts.catalog.list()["p"].keys() == {"a", "b", "c"}
    # A batch that cannot be removed stays retired.
    store.codes["remove", "manifest"] = -706
    published.remove("p", ["a", "b"])
    assert len(parts.catalog.release_read(0)["retired_handles"]) == 2
    failures["drain"] = 1
    with pytest.raises(RuntimeError, match="remain"):
        published.drain()
    store.codes.clear()
    published.drain()
    assert not store.values
    published.close()


def test_results_of_reads():
    released, failing = [], set()

    def release(result):
        if result in failing:
            raise RuntimeError("busy")
        released.append(result)

    published = DataProtoCatalogTransfer(SimpleNamespace(release_result=release), lambda *args, **kwargs: None)
    output = SimpleNamespace()
    published.attach_results(output, [1])
    published.attach_results(output, [2])
    published.release_result(output)
    published.release_result(output)
    published.release_result(SimpleNamespace())
    assert released == [1, 2]
    failing.add(3)
    published.discard_results([3, 4])
    assert released == [1, 2, 4]
    with pytest.raises(RuntimeError, match="could not be released"):
        published.close()
    failing.clear()
    published.close()
    assert released == [1, 2, 4, 3]
