"""Calls that the stubs declare, with arguments of the right types and senseless values: a result or
an exception, never a crash.

`test_arguments.py` passes arguments of wrong types, which few calls examine further. Here the types
are right, so that values get as far as possible: addresses of unmapped memory, sizes up to 2**64 -
1, lists that do not match each other. The calls run in their own process, which records each call
before it makes it. `cargo xtask memcheck` runs a few of them under valgrind.
"""

from __future__ import annotations

import ast
import ctypes
import faulthandler
import inspect
import mmap
import os
import random
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import pytest
from conftest import Master

import mooncake
from mooncake.engine import TransferEngine
from mooncake.store import ExistOptions, MooncakeDistributedStore, ReplicateConfig

# Calls that join and leave clusters, write files at a given path, or are internal.
LEFT_OUT = {"close", "setup", "setup_dummy", "init_all", "initialize", "initialize_ext", "save_tensor_to_safetensor"}
SIZE = 1 << 16
# A page that nothing may access lies behind the memory, so that a longer range is refused. Behind
# memory of the heap is more of it, and calls accept all memory of the process.
pages = mmap.mmap(-1, SIZE + mmap.PAGESIZE)
memory = (ctypes.c_ubyte * SIZE).from_buffer(pages)
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(ctypes.addressof(memory) + SIZE), mmap.PAGESIZE, 0) == 0


def stub_signatures() -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Returns `{class: {method: [(parameter, annotation)]}}` of the native half, from its stub."""
    stub = Path(mooncake.__file__).with_name("_mooncake.pyi")
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found[node.name] = {
                one.name: [(arg.arg, ast.unparse(arg.annotation)) for arg in one.args.args if arg.annotation]
                for one in methods
            }
    return found


def signatures(target) -> dict[str, list[str]]:
    """Returns annotations of every public call: from the stub for native ones, from the source for
    those in Python.
    """
    found = {}
    native = stub_signatures()
    for kind in reversed(type(target).__mro__):
        stubs = native.get(kind.__name__, {})
        for name in vars(kind):
            if name.startswith("_") or name in LEFT_OUT or not callable(getattr(target, name)):
                continue
            if name in stubs:
                found[name] = [annotation for _, annotation in stubs[name]]
            elif inspect.isfunction(vars(kind)[name]):
                parameters = list(inspect.signature(vars(kind)[name]).parameters.values())[1:]
                found[name] = [str(one.annotation) for one in parameters]
    return found


def configs():
    yield None
    for fields in (
        {"replica_num": 0},
        {"replica_num": 2**31},
        {"group_ids": ["a", "b", "c"]},
        {"session_ids": ["", "b", "c"], "residency_affinity_ids": ["a"]},
        {"per_key_preferred_hca_names": [["mlx5_0"], []], "preferred_hca_names": []},
        {"preferred_segments": ["nobody:1"] * 100},
        {"prefer_alloc_in_same_node": True},
        {"soft_pin_ttl_ms": 2**63},
        {"dfs_replica_num": 1, "nof_replica_num": 1},
    ):
        config = ReplicateConfig()
        for name, value in fields.items():
            setattr(config, name, value)
        yield config


def texts():
    return ["k", "", "\0", "ключ/鍵", "k" * 200_000, "127.0.0.1:1", "(", "1-2", "/dev/null"]


def numbers():
    inside = ctypes.addressof(memory)
    return [inside, 0, 1, -1, 64, inside + SIZE - 1, 4096, 2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64]


def candidates(annotation: str) -> list:
    """Returns values of this type. The first one is valid."""
    if " | " in annotation and not annotation.startswith("list"):
        parts = [part for part in annotation.split(" | ") if part != "None"]
        return [value for part in parts for value in candidates(part)] + [None]
    for opening in ("list[", "Sequence["):
        if annotation.startswith(opening):
            inner = candidates(annotation[len(opening) : -1])
            lists = [[one] for one in inner]
            return [*lists, [], inner[:2], inner[1:3], [inner[0]] * 3, [inner[0]] * 1000]
    if annotation.startswith("tuple["):
        return [(1, 2), (0, 0), (2**64 - 1, 2**64 - 1)]
    if annotation == "str":
        return texts()
    if annotation == "int":
        return numbers()
    if annotation == "bool":
        return [False, True]
    if annotation == "float":
        return [0.1, 0.0, -1.0, float("inf"), float("nan")]
    if annotation == "ReplicateConfig":
        return list(configs())
    if annotation == "ExistOptions":
        prefetching = ExistOptions()
        prefetching.prefetch_to_memory = True
        return [ExistOptions(), prefetching, None]
    released = memoryview(b"released")
    released.release()
    return [b"x" * 100, b"", bytearray(10), memoryview(b"abcd")[::2], array("d", [1, 2]), released, None, object(), 0]


def calls(target, rounds: int, seed: int):
    """Yields names and arguments: each parameter through all its values while the others are valid,
    then all at random.
    """
    chance = random.Random(seed)
    for name, annotations in sorted(signatures(target).items()):
        values = [candidates(annotation) for annotation in annotations]
        usual = [one[0] for one in values]
        if rounds:
            for position, of_one in enumerate(values):
                for value in of_one:
                    yield name, [*usual[:position], value, *usual[position + 1 :]]
        yield name, usual
        yield name, [None] * len(usual)
        yield name, []
        for _ in range(rounds or 2):
            yield name, [chance.choice(of_one) for of_one in values]


def shown(value) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + ".."


def torment(target, rounds: int, seed: int, journal) -> int:
    done = 0
    for name, arguments in calls(target, rounds, seed):
        journal.seek(0)
        journal.truncate()
        journal.write(f"{type(target).__name__}.{name}({', '.join(map(shown, arguments))})".encode())
        journal.flush()
        done += 1
        try:
            getattr(target, name)(*arguments)
        except Exception as error:
            assert "bug in mooncake" not in str(error), (name, arguments, error)
    last = target.last_error() if hasattr(target, "last_error") else None
    assert last is None or "bug in mooncake" not in last.message, last
    return done


def main(kind: str, master: str, rounds: int, journal) -> int:
    faulthandler.enable()
    at = ctypes.addressof(memory)
    if kind.endswith("engine"):
        engine = TransferEngine()
        if not kind.startswith("before"):
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
            assert engine.register_memory(at, SIZE) == 0
        if kind.startswith("after"):
            engine._close()
        return torment(engine, rounds, 1, journal)
    store = MooncakeDistributedStore()
    if not kind.startswith("before"):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 1 << 20, "tcp", "", master) == 0
        assert store.register_buffer(at, SIZE) == 0
    if kind.startswith("after"):
        store.close()
    done = torment(store, rounds, 2, journal)
    store.close()
    return done


KINDS = [f"{when}-{what}" for when in ("before", "during", "after") for what in ("store", "engine")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_returns(own_master, kind):
    # A separate master, because random mounts and removals would disturb other tests.
    master = own_master("--default_kv_lease_ttl=50") if kind in ("during-store", "after-store") else None
    with tempfile.NamedTemporaryFile() as journal:
        command = [sys.executable, __file__, kind, master.address if master else "", journal.name]
        # `k` may be the name of a host that does not respond.
        environment = {**os.environ, "MC_HANDSHAKE_CONNECT_TIMEOUT": "1"}
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=280, check=False, env=environment
        )
        last = journal.read().decode(errors="replace")
    assert run.returncode == 0, f"{run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}\nlast call: {last}"
    assert int(run.stdout.split()[-1]) > 200


def test_the_stubs_name_every_call():
    for target in (MooncakeDistributedStore(), TransferEngine()):
        named = signatures(target)
        there = {name for name in dir(target) if not name.startswith("_") and callable(getattr(target, name))}
        missing = there - named.keys() - LEFT_OUT
        assert all(inspect.isclass(getattr(target, name)) for name in missing), missing


def few() -> int:
    """Makes every call with a few arguments, in one process, for a slow tool: `memcheck`."""
    # The import would take longer than all calls.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "journal"), "w+b") as journal:
        master = Master(Path(folder), ["--default_kv_lease_ttl=50"])
        master.start()
        try:
            return sum(main(kind, master.address, 0, journal) for kind in KINDS)
        finally:
            master.stop()


if __name__ == "__main__":
    if sys.argv[1:] == ["few"]:
        print(few(), flush=True)
    else:
        with open(sys.argv[3], "r+b") as journal:
            print(main(sys.argv[1], sys.argv[2], 25, journal), flush=True)
