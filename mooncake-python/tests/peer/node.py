"""Client of a cluster, with the interpreter's `mooncake` package. It reads commands as JSON lines
and writes results in the same form.

`matrix.py` uses it to compare two builds of the package, and so do `cells.py` and `cells_light.py`.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import sys
from types import SimpleNamespace

import mooncake.store as module
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store = MooncakeDistributedStore()
buffers = {}
# Whether the store is attached to a `mooncake_client`, which can access only memory from
# `alloc_from_mem_pool`.
light = False


def tensor_of(spec):
    import torch

    dtype, shape, seed = getattr(torch, spec["dtype"]), spec["shape"], spec.get("seed", 0)
    size, count = torch.empty(0, dtype=dtype).element_size(), 1
    for dim in shape:
        count *= dim
    high = 2 if dtype == torch.bool else 128
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, high, (max(count * size, 1),), dtype=torch.uint8, generator=generator)
    return data[: count * size].view(dtype).reshape(shape)


def layout_of(axes):
    if axes is None:
        return None
    # Mooncake C++ 0.3.14 lacks this class and the next two.
    made = module.TensorParallelism()
    listed = []
    for fields in axes:
        axis = module.ParallelAxis()
        for name, value in fields.items():
            setattr(axis, name, value)
        listed.append(axis)
    made.axes = listed
    return made


def target_of(spec):
    if spec is None:
        return None
    made = module.ReadTarget()
    made.mode = spec["mode"]
    made.parallelism = layout_of(spec.get("axes"))
    return made


def config_of(fields):
    """Returns a `ReplicateConfig` with these fields. `Enumeration.MEMBER` names a value of an
    enumeration.
    """
    made = ReplicateConfig()
    for name, value in fields.items():
        if isinstance(value, str) and value.startswith(("SoftPinAction.", "ObjectDataType.")):
            kind, _, member = value.partition(".")
            value = getattr(getattr(module, kind), member)
        setattr(made, name, argument(value))
    return made


def replica(value):
    """Returns the description of a replica. Its address is reduced to whether there is one."""
    if not value.is_memory_replica():
        return {"status": value.status.name, "memory": False}
    at = value.get_memory_descriptor().buffer_descriptor
    return {
        "status": value.status.name, "size": at.size, "placed": at.buffer_address != 0, "at": at.transport_endpoint,
    }  # fmt: skip


def shown(value):
    """Returns a result in a form in which two builds can be compared."""
    kind = type(value).__name__
    if kind == "ReplicaDescriptor":
        return replica(value)
    if kind == "QueryTaskResponse":
        times = [value.created_at_ms_epoch, value.last_updated_at_ms_epoch]
        return {
            "type": value.type.name, "status": value.status.name, "message": value.message,
            "times": all(one > 1_600_000_000_000 for one in times),
        }  # fmt: skip
    if hasattr(type(value), "__members__"):
        return value.name
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    if value is None or isinstance(value, (int, str, bool)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    if type(value).__name__ == "BufferHandle":
        return {"bytes": base64.b64encode(bytes(memoryview(value).cast("B"))).decode()}
    if "Tensor" in type(value).__name__:
        import torch

        raw = bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b""
        return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": base64.b64encode(raw).decode()}
    return repr(type(value))


def prepared(name, value):
    if name == "bytes":
        return base64.b64decode(value)
    if name == "config":
        return config_of(value)
    if name == "exist":
        # Mooncake C++ 0.3.13 lacks this class.
        made = module.ExistOptions()
        for field, setting in value.items():
            setattr(made, field, setting)
        return made
    if name == "tuple":
        return tuple(value)
    if name == "tensor":
        return tensor_of(value)
    if name == "tensors":
        return [tensor_of(one) if one else None for one in value]
    if name == "layout":
        return layout_of(value)
    if name == "target":
        return target_of(value)
    if name == "writer":
        return SimpleNamespace(**value)
    if name == "buffer":
        return ctypes.addressof(buffers[value["name"]]) + value.get("at", 0)
    raise ValueError(name)


def argument(value):
    """Decodes an argument: a plain value, or `{"as": kind, "of": ..}` for a type that JSON lacks.
    """
    if isinstance(value, dict) and "as" in value:
        return prepared(value["as"], value["of"])
    if isinstance(value, list):
        return [argument(one) for one in value]
    return value


def structured(name, argument=None):
    """Writes or reads a structured object."""
    import numpy as np
    from mooncake.structured_object_store import MooncakeBundleTransfer, StructuredObjectPayload

    transfer = MooncakeBundleTransfer(store, "matrix/objects", default_chunk_bytes=50)
    if name == "structured_put":
        members = {
            "a": np.arange(60, dtype=np.int32).reshape(15, 4),
            "b": b"bytes of a member",
            "c": np.linspace(0, 1, 33),
            "d": b"",
        }
        return transfer.put_structured_object(StructuredObjectPayload({"step": 7}, members)).manifest_key
    spec = transfer.read_spec({"manifest_key": argument})
    if name == "structured_slice":
        spec = spec.select_members(["a"]).slice_member("a", 0, 3, 11, 2)
    result = transfer.materialize(spec)
    members = {key: bytes(memoryview(value).tobytes()) for key, value in result.objects.items()}
    return [result.metadata["step"], sorted(members), *[members[key] for key in sorted(members)]]


def columns():
    """Returns rows of every kind that fields of a batch may have."""
    import numpy as np

    def column(*values):
        made = np.empty(len(values), object)
        for row, value in enumerate(values):
            made[row] = value
        return made

    made = {
        "numbers": column(1, None, 3, 4),
        "words": column("a", None, "wörter", ""),
        "raw": column(b"1", b"", None, b"\0\1\2"),
        "lists": column([1, 2], [3], None, [4, 5, 6]),
        "arrays": column(np.arange(3), np.arange(2), None, np.arange(4)),
        "grids": column(np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32), None, np.ones((4, 3), np.float32)),
        "pictures": column([b"p1", b"p22"], [], None, [b"p3"]),
        "plain": column({"a": 1, "b": [1, "x"]}, {"a": 2}, None, {"c": {"d": 1.5}}),
        "heavy": column({"image": np.arange(4), "tag": "x"}, {"image": None}, None, {"tag": "y"}),
        "nested": column([{"raw": b"12"}, {"raw": b"3", "n": 1}], [], None, [None, {"n": None}]),
    }
    return made, {"ids": np.arange(8, dtype=np.int32).reshape(4, 2), "mask": np.eye(4, 2, dtype=np.float16)}


def plain(value):
    """Returns a value of a batch with its type, in a form in which two builds can be compared."""
    import numpy as np

    if isinstance(value, np.ndarray) and value.dtype != object:
        return [str(value.dtype), list(value.shape), np.asarray(value).tobytes().hex()]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in sorted(value.items())}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(one) for one in value]
    if "Tensor" in type(value).__name__:
        return [str(value.dtype), plain(value.numpy())]
    return [type(value).__name__, value]


def batches(name, *arguments):
    """Writes, extends, or reads a batch of samples."""
    from mooncake.structured_object_store import FieldSchema, MooncakeBundleTransfer, export_ref

    transfer = MooncakeBundleTransfer(store, "matrix/batches", default_chunk_bytes=64)
    others, tensors = columns()
    with_torch = arguments and arguments[-1] == "torch"
    if name == "samples_put":
        schemas = None
        if with_torch:
            import torch

            schemas = {"dicts": FieldSchema("ragged_tensor_dict")}
            others["images"] = others["raw"].copy()
            others["dicts"] = others["raw"].copy()
            for row, size in enumerate((2, 3, None, 1)):
                others["images"][row] = None if size is None else torch.arange(size * 2).reshape(size, 2)
                others["dicts"][row] = None if size is None else {"x": torch.ones(size), "y": torch.arange(1)}
            tensors["whole"] = torch.arange(12).reshape(4, 3).to(torch.bfloat16)
        data = {"batch": tensors, "non_tensor_batch": others, "meta_info": {"step": 3}}
        return json.dumps(export_ref(transfer.put(data, field_schemas=schemas)))
    handle = json.loads(arguments[0])
    if name == "samples_append":
        added = {"batch": {arguments[1]: tensors["ids"] + 1}, "non_tensor_batch": {arguments[1] + "s": others["words"]}}
        return json.dumps(export_ref(transfer.append_dataproto_fields(handle, added, stage=arguments[2])))
    if name == "samples_remove":
        transfer.cleanup_dataproto(handle)
        return 0
    got = transfer.get(handle, rows=arguments[1], type=arguments[2])
    for section in ("batch", "non_tensor_batch"):
        for field, value in (got.get(section) or {}).items():
            if "bfloat16" in str(getattr(value, "dtype", "")):
                got[section][field] = value.float()
    return json.dumps(plain(got))


def run(command):
    global light
    name, arguments = command["call"], command.get("args", [])
    keywords = {key: argument(value) for key, value in command.get("kw", {}).items()}
    if name == "buffer":
        size = command["size"]
        if command["name"] in buffers:
            store.unregister_buffer(ctypes.addressof(buffers[command["name"]]))
        kind = ctypes.c_ubyte * size
        buffers[command["name"]] = kind.from_address(store.alloc_from_mem_pool(size)) if light else kind()
        return store.register_buffer(ctypes.addressof(buffers[command["name"]]), size)
    if name == "fill":
        data = base64.b64decode(command["bytes"])
        ctypes.memmove(ctypes.addressof(buffers[command["name"]]) + command.get("at", 0), data, len(data))
        return 0
    if name.startswith("samples_"):
        return batches(name, *arguments)
    if name.startswith("structured_"):
        return structured(name, *arguments)
    if name == "sum":
        return hashlib.sha256(memoryview(buffers[command["name"]])[: command["size"]]).hexdigest()
    if name == "dump":
        start = command.get("at", 0)
        return bytes(memoryview(buffers[command["name"]])[start : start + command["size"]])
    if name == "setup_dummy":
        light = True
    return getattr(store, name)(*[argument(one) for one in arguments], **keywords)


for line in sys.stdin:
    try:
        answer = {"returned": shown(run(json.loads(line)))}
    except Exception as error:  # exceptions are compared as well
        answer = {"raised": type(error).__name__, "text": str(error)[:300]}
    print("=>" + json.dumps(answer), flush=True)
