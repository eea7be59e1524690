"""Python blocks of documents of other projects, extracted and run: `MOONCAKE_DOCUMENTS` names their
folder.

The blocks of a document run in order and share their names, as if a reader typed them. The test
provides modules, a store that is set up, engines with registered memory, and values for names that
a document assumes. Addresses of servers are replaced by those of the test, and transports and
devices that need hardware by TCP. Blocks about process groups and expert parallelism run in a world
of one rank on the host, with tensors in the place of `...`, if torch is there. A block that is a
signature is compared with the call of that name. Known gaps (`...`, `??`) and slips are filled in.
Other blocks with gaps, and blocks about CUDA, are not run: they are counted and listed.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import MIB, Master, Owner, free_port

import mooncake.store
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

FOLDER = os.environ.get("MOONCAKE_DOCUMENTS")
FENCED = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Documents in plain text have their programs below the headings of one section.
PLAIN = re.compile(r"^Usage Examples#\n(.*?)^Error Handling#", re.MULTILINE | re.DOTALL)
GAPS = re.compile(r"\?\?|\(\.\.\.|\[\.\.\.\]|into_cuda|device=.cuda")
GROUPS = re.compile(r"mooncake import pg|mooncake_ep_buffer")
# Substitutions in blocks about process groups and expert parallelism.
OF_GROUPS = [
    (r"device=\"cuda\"", 'device="cpu"'),
    (r"backend=\"mooncake\"", 'backend="mooncake-cpu"'),
    (r"all_gather\(\.\.\.\)", "all_gather([torch.zeros(3)], torch.ones(3))"),
    (r"all_reduce\(\.\.\.\)", "all_reduce(torch.ones(3))"),
    (
        r"buffer\.dispatch\(\.\.\.,",
        "dispatched = buffer.dispatch(torch.ones((2, 4096), dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]]),"
        " num_max_dispatch_tokens_per_rank=2, num_experts=2,",
    ),
    (
        r"buffer\.combine\(\.\.\.,",
        "combined = buffer.combine(buffer.get_next_combine_buffer(dispatched[2]).fill_(3), torch.tensor([[0, 1], [1, -1]]),"
        " torch.ones((2, 2)), handle=dispatched[2],",
    ),
]
# Gaps, which the reader fills, and slips, which the reader corrects.
FILLED = [
    (r"= \?\?", "= remote_buffer_addr"),
    (r"\bdata, # buffer", "buffer_data,"),
    (r"unregister_memory\(data\)", "unregister_memory(buffer_data)"),
    (r"remote_addrs = \[\.\.\.\]", "remote_addrs = [remote_buffer_addr + n * chunk_size for n in range(num_chunks)]"),
    (r"transfer_sync_write\(\.\.\.\)", 'transfer_sync_write("@peer", local_buffer_addr, remote_buffer_addr, 64)'),
    (r"bind_to_numa_node\(node: int\)", "bind_to_numa_node(0)"),
    (r"List\[List\[int\](, all_sizes|\) ->)", r"List[List[int]]\1"),
    (r"->\n", "-> "),
]
# Servers, and settings that need missing hardware.
PLACES = [
    (r"https?://localhost:8080/metadata", "@metadata"),
    (r"localhost:50051", "@master"),
    (r"\"localhost:8080\"", '"@owner"'),
    (r"127\.0\.0\.1:2379", "P2PHANDSHAKE"),
    (r"127\.0\.0\.1:12345", "127.0.0.1"),
    (r"target_host:port|127\.0\.0\.1:12346", "@peer"),
    (r"\"rdma\"", '"tcp"'),
    (r"mlx5_\d(,mlx5_\d)*", ""),
    # Views must be freed before their lease ends.
    (r"view = (lease\.buffer\[:n\])", r"view = bytes(\1)"),
]


def blocks(text: str) -> list[str]:
    fenced = FENCED.findall(text)
    if fenced:
        return fenced
    found = PLAIN.search(text)
    parts = re.split(r"^[A-Z][\w ]+#$", found.group(1), flags=re.MULTILINE) if found else []
    return [part for part in parts if part.strip()]


def is_program(block: str) -> bool:
    with contextlib.suppress(SyntaxError):
        ast.parse(block)
        return True
    return False


def signature(block: str) -> ast.FunctionDef | None:
    """Returns the function that a block only declares."""
    if is_program(block):
        return None
    # In documents, parameters with defaults may come before those without.
    text = re.sub(r"(: *[\w.]+) *= *[^,\n)]+", r"\1", block.strip().rstrip(":")) + ": ..."
    with contextlib.suppress(SyntaxError):
        (one,) = ast.parse(text).body
        return one if isinstance(one, ast.FunctionDef) else None
    return None


class Reader:
    """Environment of a reader who types the blocks of a document."""

    def __init__(self, places: dict[str, str]) -> None:
        self.places, self.ran, self.compared = places, 0, 0
        self.gaps: list[str] = []
        self.failed: list[str] = []
        self.engines = []
        for _ in range(2):
            engine, memory = TransferEngine(), np.zeros(MIB, np.uint8)
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
            assert engine.register_memory(memory.ctypes.data, MIB) == 0
            self.engines.append((engine, memory))
        places["@peer"] = f"127.0.0.1:{self.engines[1][0].get_rpc_port()}"
        self.names = self.stated()

    def stated(self) -> dict[str, object]:
        (engine, mine), (_, theirs) = self.engines
        here, there = mine.ctypes.data, theirs.ctypes.data
        tp_axis = mooncake.store.ParallelAxis()
        tp_axis.kind, tp_axis.size, tp_axis.split_dim = "tp", 8, 1
        names: dict[str, object] = {
            "mooncake": mooncake, "np": np, "rank": 0, "tp_axis": tp_axis, "size": 16, "src_offset": 0, "segment_ids": ["1-2"],
            "local_buffer_addr": here, "remote_buffer_addr": there, "local_addr": here, "remote_addr": there,
            "data_length": 64, "data_len": 64, "length": 64, "engine": engine,
            **{f"addr{i}": here + 64 * i for i in (1, 2, 3)}, **{f"remote{i}": there + 64 * i for i in (1, 2, 3)},
            **{f"len{i}": 64 for i in (1, 2, 3)}, "TransferOpcode": mooncake.engine.TransferOpcode,
            "ReplicateConfig": mooncake.store.ReplicateConfig, "MooncakeDistributedStore": MooncakeDistributedStore,
            "world_size": 1, "num_ranks": 1,
        }  # fmt: skip
        with contextlib.suppress(ImportError):
            import torch

            names["torch"] = torch
        return names

    def store(self) -> MooncakeDistributedStore:
        """Returns a store that is set up, with objects that documents read but do not write."""
        before = self.names.get("store")
        if isinstance(before, MooncakeDistributedStore) and before.health_check() == 0:
            return before
        store = MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 512 * MIB, 64 * MIB, "tcp", "", self.places["@master"])
        assert code == 0, store.last_error()
        self.memory = np.zeros(MIB, np.uint8)
        assert store.register_buffer(self.memory.ctypes.data, MIB) == 0
        for key in ("my_key", "key1", "key2", "large_object"):
            store.put(key, b"0123456789" * 1000)
        self.names |= {"buffer_ptr": self.memory.ctypes.data, "buffer": self.memory}
        return store

    def read(self, where: str, block: str) -> None:
        for pattern, place in FILLED:
            block = re.sub(pattern, place, block)
        if GROUPS.search(block) and "torch" in self.names:
            for pattern, place in OF_GROUPS:
                block = re.sub(pattern, place, block)
        declared = signature(block)
        if declared is not None:
            self.compare(where, declared)
        elif GAPS.search(block) or not is_program(block):
            self.gaps.append(where)
        else:
            self.run(where, block)

    def compare(self, where: str, declared: ast.FunctionDef) -> None:
        store, other = MooncakeDistributedStore(), mooncake.store.MooncakeHostMemAllocator()
        target = next((one for one in (store, other) if hasattr(one, declared.name)), None)
        if target is None:
            self.failed.append(f"{where}: there is no {declared.name}")
            return
        call = getattr(target, declared.name)
        ours = [*inspect.signature(call).parameters, *getattr(call, "also_named", ())]
        arguments = declared.args.posonlyargs + declared.args.args + declared.args.kwonlyargs
        named = [one.arg for one in arguments if one.arg != "self"]
        if set(named) <= set(ours):
            self.compared += 1
        else:
            self.failed.append(f"{where}: {declared.name} has {ours}, not {named}")

    def run(self, where: str, block: str) -> None:
        for pattern, place in PLACES:
            block = re.sub(pattern, place, block)
        for name, address in self.places.items():
            block = block.replace(name, address)
        self.names["store"] = self.names["self"] = self.store()
        if ".setup" not in block:
            # A store that a block only creates is replaced by one that is set up.
            block = block.replace("MooncakeDistributedStore()", "self")
        # The size must not be that of another block's memory, which may be larger than this
        # block's.
        self.names["size"] = 16
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                exec(compile(block, where, "exec"), self.names)
        except Exception as error:
            last = self.names["store"].last_error()
            self.failed.append(f"{where}: {type(error).__name__}: {error} ({last})\n{block}")
            return
        self.ran += 1
        for line in said.getvalue().splitlines():
            print(f"    {where}: {line}")

    def end(self) -> None:
        combined = self.names.get("combined")
        if combined is not None:
            assert combined[0].tolist() == [[6.0] * 4096, [3.0] * 4096]  # type: ignore[index]
        if "dist" in self.names:
            import torch.distributed

            torch.distributed.destroy_process_group()
        for value in list(self.names.values()):
            if isinstance(value, MooncakeDistributedStore):
                value.close()
            elif isinstance(value, TransferEngine):
                value._close()
        self.engines[1][0]._close()


@pytest.mark.skipif(not FOLDER, reason="MOONCAKE_DOCUMENTS names no folder")
def test_every_block_runs(tmp_path, monkeypatch):
    port = free_port()
    # The world of process groups meets here.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    directory = ["--enable_http_metadata_server=true", f"--http_metadata_server_port={port}"]
    master = Master(tmp_path, [*directory, "--default_kv_lease_ttl=200"])
    master.start()
    owner = Owner(tmp_path, master)
    owner.start()
    places = {"@master": master.address, "@metadata": f"http://127.0.0.1:{port}/metadata", "@owner": owner.address}
    found = 0
    for document in sorted(Path(str(FOLDER)).iterdir()):
        parts = blocks(document.read_text(encoding="utf-8")) if document.is_file() else []
        if not parts:
            continue
        reader = Reader(dict(places))
        try:
            for number, block in enumerate(parts):
                reader.read(f"{document.name}[{number}]", block)
        finally:
            reader.end()
        found += len(parts)
        assert not reader.failed, "\n".join(reader.failed)
        done = f"{reader.ran} ran, {reader.compared} are signatures, {len(reader.gaps)} have gaps: {reader.gaps}"
        print(f"{document.name}: {len(parts)} blocks, {done}")
        assert reader.ran + reader.compared + len(reader.gaps) == len(parts)
    owner.stop()
    master.stop()
    assert found
