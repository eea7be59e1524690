"""Worker of `modules.py`: runs in either build and answers commands, one JSON object a line.

    python modules_worker.py
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from ducks import BASE, RANGES, TENSORS, Pool, Renamed, duck
from mooncake.dataproto_catalog import DataProtoCatalog
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    FieldSchema,
    MooncakeBundleTransfer,
    StructuredObjectPayload,
    export_ref,
)

try:
    import torch
except ImportError:
    torch = None

# The two builds give different words for the choice of a codec.
IGNORED = ("decision_reason",)
DUCKS = {
    "plain": (BASE, False),
    "removal": ((*BASE, "batch_remove", "is_exist"), False),
    "ranges": ((*BASE, *RANGES), False),
    "pool": ((*BASE, *RANGES, "batch_put_from"), True),
    "tensors": ((*BASE, *RANGES, *TENSORS, "batch_put_from"), True),
    "from": ((*BASE, *RANGES, "batch_put_from", "put_from", "put_tensor_from"), True),
}


def column(*values):
    made = np.empty(len(values), object)
    for row, value in enumerate(values):
        made[row] = value
    return made


def objects():
    """Returns structured objects: name, content, arguments of the write."""
    members = {
        "a": np.arange(60, dtype=np.int32).reshape(15, 4),
        "b": b"bytes of a member",
        "empty": b"",
        "none": np.zeros((0, 3), np.float16),
        # The description of an array without dimensions has a key more than with Mooncake C++.
        "scalar": np.array([3.5]),
        "strided": np.arange(40, dtype=np.int16)[::2],
    }
    made = [("small chunks", members, {"chunk_bytes": 50}), ("one chunk", members, {}), ("copy", members, {"policy": BundleTransferPolicy(copy_mode="copy")})]
    if torch is not None:
        rows = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
        tensors = {"t": torch.arange(12).reshape(4, 3), "half": torch.ones(5, dtype=torch.bfloat16), "rows": rows}
        made += [("tensors", tensors, {"chunk_bytes": 100}), ("copied tensors", tensors, {"policy": BundleTransferPolicy(copy_mode="copy")})]
    return made


def columns():
    made = {
        "numbers": column(1, None, 3, 4),
        "switches": column(True, False, None, True),
        "words": column("a", None, "wörter", ""),
        "raw": column(b"1", b"", None, b"\0\1\2"),
        "lists": column([1, 2], [3], [7], [4, 5, 6]),
        "arrays": column(*[np.full(n, n, np.int64) for n in (5, 7, 9, 3)]),
        "grids": column(np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32), None, np.ones((4, 3), np.float32)),
        "pictures": column([b"p1", b"p22"], [], None, [b"p3"]),
        "plain": column({"a": 1, "b": [1, "x"]}, {"a": 2}, None, {"c": {"d": 1.5}}),
        "heavy": column({"image": np.arange(4), "tag": "x"}, {"image": None}, None, {"tag": "y"}),
        "nested": column([{"raw": b"12"}, {"raw": b"3", "n": 1}], [], None, [{"n": 2}]),
        "text": column({"a": 1}, None, [1, "x"], {"b": None}),
    }
    if torch is not None:
        made["images"] = column(torch.ones(2, 3), None, torch.zeros(1, 3), torch.ones(4, 3))
        made["dicts"] = column({"x": torch.ones(2), "y": torch.arange(1)}, None, {"x": torch.ones(1)}, {})
    return made


class Config:
    def __init__(self, group_ids):
        self.group_ids = group_ids


class Scenario:
    """Objects and batches on one store."""

    def __init__(self, store, pool, config):
        self.transfer = MooncakeBundleTransfer(store, "modules", default_chunk_bytes=64, buffer_pool=pool)
        self.config = config

    def write(self):
        """Writes everything. Returns references by name."""
        refs = {}
        for name, members, how in objects():
            ref = self.transfer.put_structured_object(StructuredObjectPayload({"step": 7}, members), **how)
            refs[name] = {"manifest_key": ref.manifest_key}
        schemas = {"text": FieldSchema("json_ragged"), "dicts": FieldSchema("ragged_tensor_dict", metadata={"keys": ["x", "y"]})}
        batch = {"ids": np.arange(8, dtype=np.int32).reshape(4, 2), "mask": np.eye(4, 2, dtype=np.float16)}
        data = {"batch": batch, "non_tensor_batch": columns(), "meta_info": {"step": 3}}
        whole = self.transfer.put(data, field_schemas=schemas)
        named = self.transfer.put({"batch": batch}, config=self.config(["mine"]), namespace="n", partition="part", stage="s")
        loose = self.transfer.put_dataproto({"batch": batch}, config=self.config([""]))
        flat = self.transfer.put({"ids": batch["ids"], "words": ["a", "b", "c", "d"], "step": 1}, type="dict")
        same = self.transfer.append_dataproto_fields(whole, {"batch": {"more": batch["ids"]}}, stage="default")
        other = self.transfer.append_dataproto_fields(export_ref(named), {"non_tensor_batch": {"w": column("a", "b", None, "d")}}, stage="t")
        made = {"batch": whole, "named": named, "loose": loose, "flat": flat, "appended": same, "staged": other}
        return {**refs, **{name: export_ref(ref) for name, ref in made.items()}}

    def read(self, refs):
        """Reads everything, whole and in parts."""
        made = {}
        for name, ref in refs.items():
            if "type" not in ref:
                spec = self.transfer.read_spec(ref)
                made[name] = plain(self.transfer.materialize(spec).objects)
                first = next(iter(made[name]))
                if first == "a":
                    for step in (1, 3):
                        part = self.transfer.materialize(spec.select_members(["a"]).slice_member("a", 0, 2, 11, step))
                        made[f"{name} {step}"] = plain(part.objects)
                continue
            for version in (1, 2):
                if version == 2 and not ref.get("storage_group_id"):
                    continue
                handle = {**ref, "version": version}
                made[f"{name} {version}"] = plain(self.transfer.get(handle))
                made[f"{name} {version} slice"] = plain(self.transfer.get(handle, rows=slice(1, 3), type="dict"))
                if hasattr(self.transfer.store, "get_into_ranges"):
                    # Mooncake C++ fails to read single rows from other stores.
                    made[f"{name} {version} rows"] = plain(self.transfer.get(handle, rows=[2, 0], type="dict"))
        return made


def plain(value):
    """Returns a value with its type, in a form in which two builds can be compared."""
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_nested:
            return ["nested", [plain(one) for one in value.unbind()]]
        return [str(value.dtype), list(value.shape), plain(value.contiguous().view(torch.uint8).numpy()) if value.numel() else None]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [str(value.dtype), list(value.shape), np.asarray(value).tobytes().hex()]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in sorted(value.items())}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(one) for one in value]
    return [type(value).__name__, str(value)]


def without(value):
    """Removes what may differ from JSON."""
    if isinstance(value, dict):
        return {key: sorted(one) if key == "buffer_object_ids" else without(one) for key, one in value.items() if key not in IGNORED}
    return [without(one) for one in value] if isinstance(value, list) else value


def stored(get, refs):
    """Returns all values that references lead to, under their keys, with random parts replaced."""
    renamed, made = Renamed(), {}
    for name, ref in refs.items():
        keys = [ref["manifest_key"]] if "type" not in ref else [one["manifest_key"] for one in ref["stage_refs"].values()]
        made[f"reference {name}"] = json.loads(renamed(json.dumps(without(ref))))
        for key in keys:
            manifest = json.loads(get(key))
            made[renamed(key)] = without(json.loads(renamed(json.dumps(manifest))))
            for payload in (manifest["meta"], *manifest["buffers"].values()):
                for chunk in payload["chunks"]:
                    made[renamed(chunk["key"])] = bytes(get(chunk["key"])).hex()
    return made


def in_order(value):
    return json.dumps(value, sort_keys=True)


def catalog(seed):
    """Returns the results of random calls of a catalogue."""
    chance, made, of, tokens = random.Random(seed), DataProtoCatalog(), [], []

    def handle(key, rows, fields):
        return {
            "type": "mooncake_dataproto_ref", "version": 1, "kind": "bundle_stages", "batch_size": rows, "namespace": "default",
            "partition": "p", "global_indexes": None, "stage_refs": {"s": {"manifest_key": key}},
            "field_index": {one: {"stage": "s", "member": f"batch.{one}", "section": "batch"} for one in fields},
            "meta_info": {}, "encoded_non_tensor": {}, "storage_group_id": "g",
        }  # fmt: skip

    results = []
    for step in range(300):
        keys = chance.sample("abcd", chance.randint(1, 3))
        kind = chance.choice(["update", "publish", "publish", "append", "remove", "resolve", "pin", "release", "ack", "again"])
        work = None
        if kind in ("update", "publish"):
            given = chance.choice(of) if of and chance.random() < 0.2 else handle(f"k{chance.randint(0, 40)}", len(keys), chance.sample("fgh", 2))
            of.append(given)
            call = made.update if kind == "update" else partial(made.publish, f"op{step}")
            work = partial(call, "p", keys, handle=given)
        elif kind == "append" and (known := made.list().get("p")):
            try:
                found = made.resolve("p", [chance.choice(sorted(known))])["handles"]
            except ValueError:
                continue
            fragment = chance.choice(sorted(found))
            previous = chance.choice(of) if chance.random() < 0.2 else found[fragment]
            new = json.loads(json.dumps(found[fragment]))
            new["stage_refs"][f"t{step}"] = {"manifest_key": f"m{step}"}
            new["field_index"][f"x{step}"] = {"stage": f"t{step}", "member": "batch.x", "section": "batch"}
            names = chance.sample("abcd", found[fragment]["batch_size"])
            work = partial(made.publish_append, f"op{step}", fragment, "p", names, previous_handle=previous, handle=new)
            of.append(new)
        elif kind == "remove":
            work = partial(made.remove, "p", keys)
        elif kind in ("resolve", "pin"):
            work = partial(made.resolve, "p", keys[:1], pin=kind == "pin")
        elif kind == "release" and tokens:
            token = chance.choice(tokens)
            work = partial(made.release_read, token)
        elif kind == "ack":
            gone = sorted(made.release_read(-1)["retired_handles"], key=in_order)[:2]
            work = partial(made.ack_retired, gone)
        elif kind == "again":
            work = partial(made.publish, f"op{max(step - 3, 0)}", "p", keys, tags=[{"n": step} for _ in keys])
        if work is None:
            continue
        try:
            result = work()
        except Exception as error:
            result = type(error).__name__
        if isinstance(result, dict):
            result = {"append_rejected": True} if "append_rejected" in result else dict(result)
            if "retired_handles" in result:
                result["retired_handles"] = sorted(result["retired_handles"], key=in_order)
            tokens += [result["read_token"]] if "read_token" in result else []
        results.append([kind, result])
    return [results, made.list()]


def reshard(seed):
    """Returns plans between random layouts."""
    from mooncake.reshard.weight import (
        plan_placement_transfer,
        plan_placement_transfer_to_local_target,
        plan_stored_transfer_to_target_placement,
        weight_placement_to_json,
    )
    from reshard_layouts import placement, shapes, stored, summary

    chance = random.Random(seed)
    of = shapes(chance)
    source, target, weights = placement(chance, "s", of), placement(chance, "t", of), stored(chance, of)
    part = next(part for part in target.parts if part.fragments)
    return [
        weight_placement_to_json(source),
        source.digest,
        weights.to_json(),
        summary(plan_placement_transfer(source, target)),
        summary(plan_stored_transfer_to_target_placement(weights, target)),
        summary(plan_placement_transfer_to_local_target(source, target, part.participant_id)),
    ]


class Worker:
    """State between commands: a store of the cluster, or a recorder."""

    def __init__(self):
        self.store = self.pool = None
        self.config = Config

    def setup(self, host, master):
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self.store = MooncakeDistributedStore()

        def config(group_ids):
            made = ReplicateConfig()
            made.group_ids = group_ids
            return made

        self.config = config
        return self.store.setup(host, "P2PHANDSHAKE", 256 << 20, 64 << 20, "tcp", "", master)

    def duck(self, name):
        methods, has_pool = DUCKS[name]
        self.store = duck(methods)
        self.pool = Pool(self.store.calls) if has_pool else None

    def load(self, values):
        self.store.values = {key: base64.b64decode(value) for key, value in values.items()}
        if torch is not None:
            from mooncake.store import _deserialize_tensor

            for key, value in self.store.values.items():
                # Parts of a nested tensor begin like a tensor.
                with contextlib.suppress(ValueError):
                    self.store.tensors[key] = _deserialize_tensor(value)

    def values(self):
        return {key: base64.b64encode(value).decode() for key, value in self.store.values.items()}

    def scenario(self):
        return Scenario(self.store, self.pool, self.config)

    def write(self):
        return self.scenario().write()

    def read(self, refs):
        return self.scenario().read(refs)

    def remove(self, refs):
        for ref in refs.values():
            if "type" in ref:
                self.scenario().transfer.cleanup_dataproto(ref)
            else:
                self.scenario().transfer.remove_bundle(ref)

    def stored(self, refs):
        return stored(self.store.get, refs)

    def calls(self):
        renamed = Renamed()
        made = [json.loads(renamed(json.dumps(call))) for call in self.store.calls]
        self.store.calls.clear()
        return made

    def engram(self, layer, writes):
        """Writes embedding tables if asked. Returns some rows."""
        from mooncake.store import EngramStore, EngramStoreConfig

        config = EngramStoreConfig()
        config.table_vocab_sizes, config.embedding_dim = [5, 3], 4
        tables = EngramStore(layer, config, self.store)
        if writes:
            tables.populate([np.arange(20.0).reshape(5, 4), np.arange(12).reshape(3, 4)])
        return [tables.get_store_keys(), plain(tables.lookup([[[4, 0], [0, 2]]])), self.store.get(tables.get_store_keys()[0]).hex()]

    catalog = staticmethod(catalog)
    reshard = staticmethod(reshard)


def main():
    worker = Worker()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"returned": getattr(worker, name)(*arguments)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print("=>" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
