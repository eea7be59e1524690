"""Two builds of the package in one cluster: each reads the objects of the other, and both write the
same bytes.

    python matrix.py OUR_PYTHON PEER_PYTHON [--host 10.213.0.1]

The script runs with a master of each build. It prints differences and exits with 1 if there are
any.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import os
import re
import subprocess
import sys

from cluster import MIB, Master, Node, of, raw

DTYPES = [
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip

# A busy machine can stop a client for seconds. If a lease expires during a read, Mooncake C++ fails
# (-707, or an empty value). A client that is silent for `client_ttl` is taken for dead, and its
# objects are removed.
PATIENT = ["--default_kv_lease_ttl=600000", "--client_ttl=600"]


def tp(rank, size, dim):
    return {"kind": "tp", "rank": rank, "size": size, "split_dim": dim}


class Checks:
    """Counter of comparisons, and list of those that failed."""

    def __init__(self):
        self.done = 0
        self.failed = []

    def same(self, what, one, other):
        self.done += 1
        if one != other:
            self.failed.append(f"{what}: {str(one)[:160]} / {str(other)[:160]}")


def stored(node, key):
    return node("get", key)


def both(checks, what, nodes, call, *args, keys=("",), **kw):
    """Makes the same call on both nodes with their own keys. Results and stored values must be
    equal.
    """
    answers = []
    for node in nodes:
        named = [f"{node.name}/{arg[1:]}" if isinstance(arg, str) and arg.startswith("@") else arg for arg in args]
        named = [
            [f"{node.name}/{one[1:]}" if isinstance(one, str) and one.startswith("@") else one for one in arg]
            if isinstance(arg, list)
            else arg
            for arg in named
        ]
        answers.append(node(call, *named, **kw))
    checks.same(f"{what}: {call} returns", *answers)
    names = [arg for arg in args if isinstance(arg, str) and arg.startswith("@")]
    names += [
        one for arg in args if isinstance(arg, list) for one in arg if isinstance(one, str) and one.startswith("@")
    ]
    for name, suffix in itertools.product(names, keys):
        for reader in nodes:
            values = [stored(reader, f"{node.name}/{name[1:]}{suffix}") for node in nodes]
            checks.same(f"{what}: bytes of {name}{suffix} as {reader.name} reads them", *values)


def nothing_to_store(checks, what, nodes, call, *args):
    """Makes a call that has nothing to store. This project refuses it; Mooncake C++ returns 0. No
    node finds an object afterwards.
    """
    codes = {"ours": -600, "peer": 0}
    for node in nodes:
        key = f"{node.name}/{what}"
        checks.same(f"{what}: {call} of {node.name} returns", node(call, key, *args), codes[node.name])
        for reader in nodes:
            checks.same(f"{what}: {reader.name} finds the object", reader("is_exist", key), 0)


def bytes_and_codes(checks, nodes):
    for size in (1, 100, 4096, 100_000, 3 * MIB):
        both(checks, f"{size} bytes", nodes, "put", f"@b{size}", raw(bytes(i * 7 % 256 for i in range(size))))
    both(checks, "again", nodes, "put", "@b100", raw(b"other"))
    both(checks, "empty", nodes, "put", "@empty", raw(b""))
    both(checks, "upsert", nodes, "upsert", "@b100", raw(b"longer or shorter"))
    both(checks, "parts", nodes, "put_parts", "@parts", raw(b"ab"), raw(b"c"), raw(b"def"))
    nothing_to_store(checks, "no parts", nodes, "put_parts")
    both(checks, "batch", nodes, "put_batch", ["@k1", "@k2"], [raw(b"1"), raw(b"22")])
    both(checks, "batch with one empty", nodes, "put_batch", ["@k3", "@k4"], [raw(b"1"), raw(b"")])
    both(checks, "batch of two lengths", nodes, "put_batch", ["@k5"], [])
    for call, args in [
        ("get", ["missing"]),
        ("get_size", ["missing"]),
        ("is_exist", ["missing"]),
        ("remove", ["missing"]),
        ("get_batch", [["missing", "missing"]]),
        ("get_batch", [[]]),
        ("batch_is_exist", [[]]),
        ("batch_remove", [[]]),
        ("batch_get_buffer", [["missing"]]),
        ("get_replica_desc", ["missing"]),
        ("remove_by_regex", ["("]),
        ("batch_put_from", [["a", "b"], [1], [2]]),
        ("batch_get_into", [["missing"], [1, 2], [3]]),
        ("put", ["k", 7]),
        ("put", [7, raw(b"x")]),
        ("batch_get_into_multi_buffers", [[], [], []]),
        ("get_into_ranges", [[], [], [], [], []]),
        ("unregister_buffer", [12345]),
        ("register_buffer", [0, 10]),
        ("health_check", []),
        ("unmount_segment", [["no id"]]),
        ("unmount_segment", ["no list"]),
        ("mount_segment", ["/nonexistent", 1 << 20]),
        ("batch_put_session_end", [["none"]]),
        ("batch_get_session_end", [["none"]]),
    ]:
        both(checks, "answers", nodes, call, *args)
    for writer, reader in itertools.permutations(nodes):
        writer("put", f"{writer.name}/shared", raw(b"x" * 5000))
        checks.same("size", reader("get_size", f"{writer.name}/shared"), 5000)
        checks.same("handle", reader("get_buffer", f"{writer.name}/shared"), stored(writer, f"{writer.name}/shared"))


def memory(checks, nodes):
    pattern = bytes(i * 31 % 256 for i in range(10_000))
    for node in nodes:
        checks.same("register", node.send({"call": "buffer", "name": "m", "size": 20_000}), 0)
        node.send({"call": "fill", "name": "m", "bytes": base64.b64encode(pattern).decode()})
    at = lambda offset: of("buffer", {"name": "m", "at": offset})  # noqa: E731
    both(checks, "zero copy", nodes, "put_from", "@z", at(0), 5000)
    nothing_to_store(checks, "zero bytes", nodes, "put_from", at(0), 0)
    both(checks, "metadata", nodes, "put_from_with_metadata", "@zm", at(100), at(0), 1000, 28)
    both(checks, "batch", nodes, "batch_put_from", ["@z1", "@z2"], [at(0), at(100)], [10, 20])
    both(checks, "several", nodes, "batch_put_from_multi_buffers", ["@z3"], [[at(0), at(500)]], [[100, 50]])
    both(checks, "upsert", nodes, "upsert_from", "@z", at(1), 3)
    both(checks, "too small", nodes, "get_into", "@z3", at(10_000), 100)
    both(checks, "fits", nodes, "get_into", "@z3", at(10_000), 200)
    both(checks, "sum", nodes, "batch_get_into_multi_buffers", ["@z3"], [[at(10_000), at(11_000)]], [[100, 49]])
    both(checks, "parts", nodes, "batch_get_into_multi_buffers", ["@z3"], [[at(10_000), at(11_000)]], [[100, 50]])
    read = [[at(12_000)], [["@z3"]], [[[0, 10, 0]]], [[[5, 140, 149]]], [[[10, 10, 2]]]]
    for node in nodes:
        read[1] = [[f"{node.name}/z3", "missing"]]
        answer = node(
            "get_into_ranges", read[0], read[1], [[[0, 10, 0], [0]]], [[[5, 140, 149], [0]]], [[[10, 10, 2], [1]]]
        )
        checks.same("ranges", answer, [[[10, 10, -600], [-704]]])
    dumps = [node.send({"call": "dump", "name": "m", "size": 20_000}) for node in nodes]
    checks.same("memory afterwards", *dumps)


def tensors(checks, nodes):
    for dtype in DTYPES:
        for shape in ([], [3], [0, 4], [2, 3], [2, 1, 3, 1, 2, 1, 1, 2]):
            spec = {"dtype": dtype, "shape": shape}
            both(checks, f"{dtype} {shape}", nodes, "put_tensor", f"@t-{dtype}-{shape}", of("tensor", spec))
            for writer, reader in itertools.permutations(nodes):
                got = reader("get_tensor", f"{writer.name}/t-{dtype}-{shape}")
                own = writer("get_tensor", f"{writer.name}/t-{dtype}-{shape}")
                if shape:
                    checks.same(f"{dtype} {shape} read by the other", got, own)
                else:
                    checks.same(
                        f"{dtype} {shape} read by the other", (got or {}).get("bytes"), (own or {}).get("bytes")
                    )
    spec = of("tensor", {"dtype": "bfloat16", "shape": [8, 12, 4]})
    for dim in range(3):
        both(
            checks, f"tp along {dim}", nodes, "put_tensor_with_tp", f"@tp{dim}", spec, 0, 4, dim,
            keys=[f"_tp_{rank}" for rank in range(4)],
        )  # fmt: skip
    both(checks, "uneven", nodes, "put_tensor_with_tp", "@uneven", spec, 0, 5, 0)
    full = {"dtype": "int32", "shape": [12, 8]}
    for rank in range(3):
        writer = of("writer", {"rank": rank, "size": 3, "split_dim": 0})
        both(
            checks, "writer", nodes, "put_tensor_with_parallelism", "@w", of("tensor", full), writer_partition=writer,
            keys=["__writer_manifest", f"__writer_{rank}of3_sd0"],
        )  # fmt: skip
    layouts = {
        "a": [tp(1, 4, 1)],
        "b": [{"kind": "dp", "rank": 1, "size": 2}, tp(0, 2, 0)],
        "c": [{"kind": "dp", "rank": 0, "size": 4}],
        "d": [tp(1, 2, 1), {"kind": "ep", "rank": 0, "size": 4, "expert_id": 3}],
        "e": [
            {"kind": "pp", "rank": 0, "size": 2, "stage_id": 1}, {"kind": "dp", "rank": 0, "size": 2},
            tp(1, 2, 0), {"kind": "ep", "rank": 1, "size": 2, "expert_id": 7},
        ],
    }  # fmt: skip
    suffixes = {
        "a": ["_tp_1", "__parallelism_manifest"],
        "b": ["__dp_1of2__tp_0of2_sd0", "__parallelism_manifest"],
        "c": ["__dp_0of4"],
        "d": ["__tp_1of2_sd1__ep_0of4_eid3", "__parallelism_manifest"],
        "e": ["__dp_0of2__tp_1of2_sd0__ep_1of2_eid7__pp_0of2_sid1", "__parallelism_manifest"],
    }
    for name, axes in layouts.items():
        both(
            checks, f"layout {name}", nodes, "put_tensor_with_parallelism", f"@l{name}", of("tensor", full),
            of("layout", axes), keys=suffixes[name],
        )  # fmt: skip
        target = of("target", {"mode": "shard", "axes": axes})
        for writer in nodes:
            got = [node("get_tensor_with_parallelism", f"{writer.name}/l{name}", target) for node in nodes]
            checks.same(f"layout {name} of {writer.name}", *got)
    for rank in range(4):
        part = of("tensor", {"dtype": "float16", "shape": [6, 9], "seed": rank})
        both(checks, "part", nodes, "put_tensor_with_parallelism", "@r", part, of("layout", [tp(rank, 4, 0)]))
    for writer in nodes:
        for size in (1, 2, 3, 4, 6, 8):
            for mode in ("shard", "full"):
                target = of("target", {"mode": mode, "axes": [tp(size - 1, size, 0)]})
                got = [node("get_tensor_with_parallelism", f"{writer.name}/r", target) for node in nodes]
                checks.same(f"{mode} of {size}, written by {writer.name}", *got)
        for name in ("w", "tp0"):
            target = of("target", {"mode": "full"} if name == "w" else {"mode": "full", "axes": [tp(0, 2, 0)]})
            got = [node("get_tensor_with_parallelism", f"{writer.name}/{name}", target) for node in nodes]
            checks.same(f"full {name} of {writer.name}", *got)


def objects(checks, nodes):
    for writer in nodes:
        manifest = writer("structured_put")
        checks.same("an object is written", isinstance(manifest, str), True)
        for call in ("structured_get", "structured_slice"):
            checks.same(f"{call} of {writer.name}", *[node(call, manifest) for node in nodes])


def batches(checks, nodes):
    """Writes, extends and partially reads batches of samples, with both builds."""
    extra = ["torch"] if all(node.torch for node in nodes) else []
    for writer, other in itertools.permutations(nodes):
        handle = writer("samples_put", *extra)
        checks.same(f"{writer.name} writes a batch", isinstance(handle, str), True)
        for adder, name, stage in ((other, "added", "default"), (writer, "third", "another"), (writer, "last", "default")):
            handle = adder("samples_append", handle, name, stage)
            checks.same(f"{adder.name} adds to it: {str(handle)[:200]}", isinstance(handle, str), True)
        # Slices are left out: Mooncake C++ returns tensors over memory that it has freed.
        for rows in (None, [1, 2], [3, 0], [2]):
            got = [node("samples_get", handle, rows, "dataproto") for node in nodes]
            checks.same(f"rows {rows} of a batch of {writer.name}", *got)
            checks.same(f"rows {rows} are read, not {str(got[0])[:200]}", isinstance(got[0], str), True)
        checks.same("as a dictionary", *[node("samples_get", handle, None, "dict") for node in nodes])
        checks.same("removed", other("samples_remove", handle), 0)
        checks.same("nothing is left", *[node("remove_by_regex", "^matrix/batches/.*") for node in nodes])


def has_torch(python):
    return subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log", default=os.devnull)
    options = parser.parse_args()
    pythons = {"ours": options.ours, "peer": options.peer}
    checks = Checks()
    with open(options.log, "ab") as log:
        for index, (owner, python) in enumerate(pythons.items()):
            port = 21051 + 2 * index
            master = Master(python, port, PATIENT, log)
            try:
                nodes = [Node(name, python, log) for name, python in pythons.items()]
                for node in nodes:
                    # One client cannot hold everything, so that the memory of the other one is
                    # used, too.
                    arguments = [options.host, "P2PHANDSHAKE", 64 * MIB, 32 * MIB, "tcp", "", f"127.0.0.1:{port}"]
                    assert node("setup", *arguments) == 0, node.name
                before = len(checks.failed)
                parts = [bytes_and_codes, memory, objects, batches]
                for node in nodes:
                    node.torch = has_torch(pythons[node.name])
                if all(node.torch for node in nodes):
                    parts.append(tensors)
                else:
                    print("tensors are left out: torch is not installed for both")
                for part in parts:
                    part(checks, nodes)
                print(f"master of {owner}: {checks.done} comparisons so far, {len(checks.failed) - before} differ")
                for node in nodes:
                    node("close")
                    node.stop()
            finally:
                master.stop()
    for failure in checks.failed:
        print("  " + re.sub(r"\s+", " ", failure))
    return 1 if checks.failed or not checks.done else 0


if __name__ == "__main__":
    sys.exit(main())
