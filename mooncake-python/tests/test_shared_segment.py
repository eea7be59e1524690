"""Segments that the processes of one host share. Each rank is a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest

from mooncake.engine import SharedSegment
from mooncake.shared_segment import SharedSegmentError, create_shared_segment, shared_segment_supported

SIZE = 3 * 4096 + 5
spawn = multiprocessing.get_context("spawn")


def part(pipe: Any, size: int) -> None:
    """Rank 1: reads the bytes that rank 0 has written, and writes."""
    segment, blob = SharedSegment.create("s", size, 2, 1)
    pipe.send(blob)
    try:
        segment.complete([pipe.recv(), blob])
        memory = segment.buffer()
        pipe.send((segment.ready(), segment.size(), memory[:3], memory[-1]))
        memory[-3:] = b"yes"
    except RuntimeError as error:
        pipe.send(str(error))
    pipe.send("done")


def started(size: int = SIZE) -> tuple[Any, Any, bytes]:
    pipe, far = spawn.Pipe()
    process = spawn.Process(target=part, args=(far, size), daemon=True)
    process.start()
    far.close()
    return process, pipe, pipe.recv()


def test_what_one_process_writes_another_reads():
    process, pipe, theirs = started()
    segment, blob = SharedSegment.create("s", SIZE, 2, 0)
    assert len(blob) == len(theirs), "collectives need one length"
    assert not segment.ready()
    with pytest.raises(RuntimeError, match="not complete"):
        segment.base_addr()
    segment.complete([blob, theirs])
    assert segment.base_addr() % 4096 == 0 and segment.device_addr() == 0
    segment.buffer()[:3] = b"abc"
    pipe.send(blob)
    assert pipe.recv() == (True, SIZE, b"abc", 0)
    assert pipe.recv() == "done"
    assert segment.buffer()[-3:] == b"yes"
    process.join(60)
    assert process.exitcode == 0


def test_different_declarations_of_ranks_are_an_error():
    process, pipe, theirs = started(SIZE + 1)
    segment, blob = SharedSegment.create("s", SIZE, 2, 0)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] and 0 declare 's' differently"):
        segment.complete([blob, theirs])
    for blobs in ([blob], [blob, b"{}"], [blob, b"\xff"], [blob, b""], [theirs, theirs], [blob, None]):
        with pytest.raises(RuntimeError):
            segment.complete(blobs)  # type: ignore[arg-type]
    assert not segment.ready()
    pipe.send(blob)
    assert "ranks [0] and 1 declare" in pipe.recv()
    process.join(60)


def own(pipe: Any) -> None:
    segment, blob = SharedSegment.create("s", SIZE, 2, 0)
    pipe.send(blob)
    pipe.recv()
    del segment


def shared_files() -> set[str]:
    # Tests in Rust, which run beside these, keep temporary folders there.
    return {name for name in os.listdir("/dev/shm") if not name.startswith(".tmp")}


def test_an_owner_that_has_ended_is_an_error_and_leaves_nothing():
    pipe, far = spawn.Pipe()
    process = spawn.Process(target=own, args=(far,), daemon=True)
    process.start()
    theirs = pipe.recv()
    before = shared_files()
    first, blob = SharedSegment.create("s", SIZE, 2, 1)
    first.complete([theirs, blob])
    first.buffer()[:2] = b"me"
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert first.buffer()[:2] == b"me", "the mapping stays valid"
    late, blob = SharedSegment.create("s", SIZE, 2, 1)
    with pytest.raises(RuntimeError, match="cannot open the owner's memory|its owner has ended"):
        late.complete([theirs, blob])
    assert shared_files() <= before


@pytest.mark.parametrize(
    "arguments",
    [("s", 0, 1, 0), ("", 1, 1, 0), ("s", 1, 1, 1), ("s", 1, 1, -1), ("s", 1, 2, 0, 2), ("s", 1 << 62, 1, 0), ("s", -1, 1, 0)],
)
def test_invalid_arguments_are_rejected(arguments):
    with pytest.raises(RuntimeError):
        SharedSegment.create(*arguments)


def test_unsupported_settings_are_reported():
    assert shared_segment_supported() and not shared_segment_supported(mmap=False)
    assert not shared_segment_supported(host_register=True)
    with pytest.raises(SharedSegmentError, match="mmap=True"):
        pytest.importorskip("torch")
        create_shared_segment("s", {"k": {"count": 1, "shape": (1,), "dtype": __import__("torch").uint8}}, 1, 0, mmap=False)


def blocks(torch: Any) -> dict[str, Any]:
    return {
        "values": {"count": 3, "shape": (2, 5), "dtype": torch.bfloat16},
        "keys": {"count": 2, "shape": (1025, 4), "dtype": torch.int8},
    }


def test_tensors_of_one_rank():
    torch = pytest.importorskip("torch")
    segment = create_shared_segment("kv", blocks(torch), 1, 0)
    keys, values = segment.tensors("keys"), segment.tensors("values")
    assert [len(keys), len(values)] == [2, 3] and keys[0].shape == (1025, 4) and values[2].dtype == torch.bfloat16
    # Keys and values of one number lie next to each other, each on separate pages.
    at = [tensor.data_ptr() - segment.base_addr() for tensor in (keys[0], values[0], keys[1], values[2])]
    assert at == [0, 8192, 12288, 32768] and segment.total_size() == 3 * 12288
    keys[1][1024, 3] = 7
    del segment
    assert keys[1][1024, 3] == 7 and values[0].sum() == 0
    with pytest.raises(SharedSegmentError, match="'x'.*keys"):
        create_shared_segment("kv", blocks(torch), 1, 0).tensors("x")
    for bad in ({}, {"k": {}}, {"k": {"count": 0, "shape": (1,), "dtype": torch.int8}}, {"k": {"count": 1, "shape": (), "dtype": torch.int8}}):
        with pytest.raises(SharedSegmentError):
            create_shared_segment("kv", bad, 1, 0)
    with pytest.raises(SharedSegmentError, match="comm_group"):
        create_shared_segment("kv", blocks(torch), 2, 0)


def rank(number: int, meeting: str, shape: int, pipe: Any) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    try:
        one = {"kv": {"count": 4, "shape": (shape, 8), "dtype": torch.float32}}
        segment = create_shared_segment("kv", one, 2, number, owner_rank=1, comm_group=distributed.group.WORLD)
        tensors = segment.tensors("kv")
        if number == 0:
            tensors[3].fill_(2.5)
        distributed.barrier()
        pipe.send((tensors[3].sum().item(), tensors[2].sum().item()))
        distributed.barrier()
    except SharedSegmentError as error:
        pipe.send(str(error))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("shapes", [(6, 6), (6, 7)])
def test_tensors_of_two_ranks(shapes, tmp_path):
    pytest.importorskip("torch")
    pairs = [spawn.Pipe() for _ in shapes]
    processes = [
        spawn.Process(target=rank, args=(number, str(tmp_path / "meeting"), shape, pairs[number][1]), daemon=True)
        for number, shape in enumerate(shapes)
    ]
    for one in processes:
        one.start()
    said = [near.recv() for near, _ in pairs]
    for one in processes:
        one.join(60)
    if shapes[0] == shapes[1]:
        assert said == [(6 * 8 * 2.5, 0)] * 2
    else:
        assert said[0] == said[1] and "rank 0" in said[0] and "rank 1" in said[0]
