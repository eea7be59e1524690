"""Dispatch and combine of expert parallelism, beside a plain reference."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="expert parallelism needs torch")

import torch.distributed as dist
from conftest import free_port
from experts import Case, answers, check_combine, check_dispatch, input_of
from ranks import World

from mooncake import ep, pg
from mooncake.mooncake_ep_buffer import Buffer, EventOverlap

RANKS = 4
MODES = ("plain", "event", "hook")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(RANKS) as running:
        running.all(make_groups)
        yield running


# Buffers of this process: over a group of the package by its size, and over gloo as 0.
BUFFERS: dict[int, Buffer] = {}


def make_groups() -> None:
    for size in range(1, RANKS + 1):
        group = dist.group.WORLD if size == RANKS else dist.new_group(list(range(size)), backend="mooncake-cpu")
        if dist.get_rank() < size:
            BUFFERS[size] = Buffer(group, disable_p2p=size == 2)
    BUFFERS[0] = Buffer(dist.new_group(backend="gloo"))


def round_of(buffer: Buffer, case: Case, mode: str = "plain", timeout_us: int = -1, masks: bool = True) -> None:
    """Carries out a round, and compares every result."""
    rank, own = buffer.rank, input_of(case, buffer.rank)
    mask = torch.tensor([int(case.active(one)) for one in range(case.ranks)], dtype=torch.int32) if masks else None
    how = {"async_finish": mode == "event", "return_recv_hook": mode == "hook"}
    got = buffer.dispatch(own.x, own.topk, mask, case.limit, case.experts, timeout_us, use_fp8=case.is_fp8, **how)
    recv_x, recv_count, handle, event, hook = got
    assert (hook is not None) == (mode == "hook")
    if hook is not None:
        hook()
        hook()
    with event:
        pass
    check_dispatch(case, rank, recv_x, recv_count, handle)
    in_place = buffer.get_next_combine_buffer(handle) if case.seed % 2 else None
    out = torch.full(own.x.shape, 7.0, dtype=torch.bfloat16) if case.seed % 3 else None
    y = answers(case, rank, recv_x, recv_count, in_place)
    result, event, hook = buffer.combine(
        y, own.topk, own.weights, mask, timeout_us, handle, zero_copy=in_place is not None, out=out, **how
    )
    if hook is not None:
        hook()
    event.current_stream_wait()
    assert out is None or result is out
    check_combine(case, rank, result)
    if mask is not None:
        # A rank that the others leave out learns that, and leaves them out, too.
        assert mask.tolist() == [int(case.active(one) and case.active(rank)) for one in range(case.ranks)]


def rounds(which: int, seed: int, number: int) -> None:
    """Carries out rounds of random sizes on one buffer."""
    if which not in BUFFERS:
        return
    chance = random.Random(seed)
    for _ in range(number):
        ranks, local = which or RANKS, chance.randrange(1, 5)
        case = Case(
            seed=chance.randrange(1 << 30),
            ranks=ranks,
            local=local,
            choices=chance.randrange(1, min(ranks * local, 8) + 1),
            limit=chance.choice([1, 7, 33]),
            hidden=chance.choice([128, 384, 2048]),
            is_fp8=chance.random() < 0.5,
            inactive=tuple(one for one in range(ranks) if chance.random() < 0.15) if chance.random() < 0.3 else (),
        )
        timeout = chance.choice([-1, 100_000_000])
        round_of(BUFFERS[which], case, chance.choice(MODES), timeout, masks=bool(case.inactive) or chance.random() < 0.7)


@pytest.mark.parametrize("ranks", range(RANKS + 1))
def test_results_are_those_of_the_reference(world: World, ranks: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world.all(rounds, ranks, seed, 25)


def large_rounds(seed: int) -> None:
    for is_fp8 in (False, True):
        case = Case(seed, RANKS, local=8, choices=8, limit=96, hidden=7168, is_fp8=is_fp8)
        round_of(BUFFERS[RANKS], case, "event")


def test_messages_in_staging_memory(world: World) -> None:
    world.all(large_rounds, 5)


def overlapped(seed: int) -> None:
    """Begins a dispatch before the results of the one before are complete."""
    buffer, started = BUFFERS[RANKS], []
    cases = [Case(seed + i, RANKS, local=2, choices=3, limit=9 + i, hidden=256, is_fp8=i == 1) for i in range(4)]
    for case in cases:
        own = input_of(case, buffer.rank)
        got = buffer.dispatch(
            own.x, own.topk, None, case.limit, case.experts, -1, use_fp8=case.is_fp8, return_recv_hook=True
        )
        started.append((case, own, got))
    for case, _, (recv_x, recv_count, handle, _, hook) in reversed(started):
        hook()
        check_dispatch(case, buffer.rank, recv_x, recv_count, handle)
    for case, own, (recv_x, recv_count, handle, _, _) in started:
        y = answers(case, buffer.rank, recv_x, recv_count)
        out, event, _ = buffer.combine(y, own.topk, own.weights, None, -1, handle, async_finish=True)
        with event:
            pass
        check_combine(case, buffer.rank, out)


def test_calls_in_progress_beside_each_other(world: World) -> None:
    world.all(overlapped, 3)


def created_again(seed: int) -> None:
    """Creates the buffer again on one rank, and updates it on the others."""
    for one in range(2):
        if dist.get_rank() == one:
            BUFFERS[RANKS] = Buffer(dist.group.WORLD)
        else:
            BUFFERS[RANKS].update_ep_member()
        round_of(BUFFERS[RANKS], Case(seed + one, RANKS, local=2, choices=3, limit=5, hidden=128, is_fp8=False))


def test_one_rank_makes_its_buffer_again(world: World) -> None:
    world.all(created_again, 11)


def two_buffers(seed: int) -> None:
    other = Buffer(dist.group.WORLD)
    for one in range(3):
        case = Case(seed + one, RANKS, local=1, choices=2, limit=5, hidden=128, is_fp8=False)
        round_of(other if one % 2 else BUFFERS[RANKS], case)


def test_two_buffers_of_one_group(world: World) -> None:
    world.all(two_buffers, 17)


def disagreeing(seed: int, field: str) -> str:
    buffer = Buffer(dist.group.WORLD)
    sizes: dict[str, Any] = {"local": 8, "choices": 3, "limit": 64, "hidden": 256, "is_fp8": False}
    if buffer.rank == 2:
        sizes[field] = {"local": 9, "choices": 8, "limit": 65, "hidden": 384, "is_fp8": True}[field]
    case = Case(seed, RANKS, **sizes)
    x = torch.ones((case.limit, case.hidden), dtype=torch.bfloat16)
    topk = torch.arange(case.choices).repeat(case.limit, 1)
    try:
        buffer.dispatch(x, topk, None, case.limit, case.experts, 60_000_000, use_fp8=case.is_fp8)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("limit", "num_max_dispatch_tokens_per_rank"),
        ("hidden", "hidden"),
        ("local", "num_experts"),
        ("is_fp8", "use_fp8"),
        ("choices", "the number of experts per token"),
    ],
)
def test_ranks_that_disagree_are_refused_by_name(world: World, field: str, name: str) -> None:
    texts = world.all(disagreeing, 23, field)
    if field == "choices":
        # Only the rank that gets more than it has space for notices.
        assert [f"do not agree on {name}" in text for text in texts] == [True, False, False, False]
    else:
        assert all(f"do not agree on {name}" in text for text in texts), texts


def refusals() -> list[str]:
    """Returns the names of wrong arguments that were accepted."""
    buffer = BUFFERS[1] if 1 in BUFFERS else Buffer(dist.new_group([dist.get_rank()]))
    x, topk = torch.ones((3, 256), dtype=torch.bfloat16), torch.tensor([[0, 1], [2, -1], [-1, 3]])
    mask, weights = torch.ones(1, dtype=torch.int32), torch.ones((3, 2))
    right: dict[str, Any] = {
        "x": x, "topk_idx": topk, "active_ranks": mask, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 4,
        "timeout_us": -1, "use_fp8": False,
    }  # fmt: skip
    wrong: list[dict[str, Any]] = [
        {"x": x.float()}, {"x": x[:, :200].contiguous()}, {"x": torch.ones((256, 3), dtype=torch.bfloat16).t()}, {"x": x[0]},
        {"topk_idx": topk.int()}, {"topk_idx": topk[:2]}, {"topk_idx": topk.t().contiguous().t()},
        {"topk_idx": topk + 1}, {"topk_idx": topk - 1}, {"topk_idx": torch.zeros_like(topk)},
        {"active_ranks": mask.long()}, {"active_ranks": mask.view(1, 1)}, {"num_max_dispatch_tokens_per_rank": 2},
        {"num_experts": 0}, {"async_finish": True, "return_recv_hook": True},
    ]  # fmt: skip
    accepted = []
    for change in wrong:
        try:
            buffer.dispatch(**{**right, **change})
            accepted.append(str(change))
        except AssertionError as error:
            assert str(error).startswith("cannot ")
    recv_x, recv_count, handle, _, _ = buffer.dispatch(**{**right, "active_ranks": torch.zeros(7, dtype=torch.int32)})
    assert recv_count.tolist() == [1, 1, 1, 1]
    given: dict[str, Any] = {
        "x": recv_x, "topk_idx": topk, "topk_weights": weights, "active_ranks": mask, "timeout_us": -1, "handle": handle,
    }  # fmt: skip
    wrong = [
        {"x": recv_x.float()}, {"x": recv_x[:, :3].contiguous()}, {"topk_weights": weights.double()},
        {"topk_weights": weights[:2]}, {"topk_idx": topk.int()}, {"out": x[:2]}, {"out": x.float()},
        {"async_finish": True, "return_recv_hook": True},
    ]  # fmt: skip
    for change in wrong:
        try:
            buffer.combine(**{**given, **change})
            accepted.append(str(change))
        except AssertionError as error:
            assert str(error).startswith("cannot ")
    assert torch.equal(buffer.combine(**given)[0], torch.tensor([[2.0], [1.0], [1.0]]).expand(3, 256).bfloat16())
    small = Buffer(buffer.group, num_ep_buffer_bytes=1000)
    try:
        small.dispatch(**right)
        accepted.append("num_ep_buffer_bytes")
    except RuntimeError as error:
        assert "num_ep_buffer_bytes is too small" in str(error)
    return accepted


def test_wrong_arguments(world: World) -> None:
    assert world.ranks[0].call(refusals) == []


def used_again() -> list[bool]:
    """Returns whether memory of results is used again, without and with a view that lives."""
    buffer = BUFFERS[1]
    x, topk = torch.ones((2, 128), dtype=torch.bfloat16), torch.tensor([[0], [1]])
    seen, found, views = set(), [], []
    for kept in (False, True):
        for _ in range(4):
            recv_x = buffer.dispatch(x, topk, None, 1000, 2, -1, use_fp8=False)[0]
            if kept:
                views.append(recv_x[1, 5:9])
            seen.add(recv_x.data_ptr())
            del recv_x
        found.append(len(seen) == 1 if not kept else len({one.data_ptr() for one in views}) == 4)
    return found


def test_memory_of_results_is_used_again_when_nothing_has_it(world: World) -> None:
    assert world.ranks[0].call(used_again) == [True, True]


def warning_of_gloo() -> list[int]:
    case, numbers = Case(1, RANKS, local=1, choices=1, limit=2, hidden=128, is_fp8=False), []
    buffer = Buffer(BUFFERS[0].group)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            round_of(buffer, case, masks=False)
        numbers.append(sum(one.category is RuntimeWarning for one in caught))
    return numbers


def test_other_groups_warn_once(world: World) -> None:
    assert world.all(warning_of_gloo) == [[1, 0]] * RANKS


def test_names() -> None:
    for hint in (Buffer.get_ep_buffer_size_hint, ep.get_ep_buffer_size_hint):
        assert hint(1024, 4096, 8, 64) == 2_155_873_280
        assert hint(num_max_dispatch_tokens_per_rank=128, hidden=7168, num_ranks=2, num_experts=288) == 2_118_652_416
    assert set(pg.__all__) < set(ep.__all__) and all(getattr(ep, name) is getattr(pg, name) for name in pg.__all__)
    assert ep.MAX_QP_COUNT == 256
    with pytest.raises(NotImplementedError, match="ElasticBuffer"):
        ep.ElasticBuffer(None)
    runtime = ep.Buffer(0, 2, 0)
    assert runtime.ibgda_disabled() and not runtime.p2p_enabled() and not runtime.use_fast_path() and not runtime.is_roce()
    # A wait on nothing does nothing.
    EventOverlap().current_stream_wait()
    with EventOverlap(None, (1,)) as event:
        assert event.extra_tensors == (1,)
    ep.EventHandle().current_stream_wait(0)
    ep.EventHandle().synchronize()


def document_program(text: str, port: int) -> None:
    """Leaves the world, and runs a program that creates it."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    exec(compile(text, "ep.md", "exec"), {"rank": rank, "world_size": RANKS})


def test_the_program_of_the_document(world: World) -> None:
    """Runs as the last test, because the world is another one afterwards."""
    text = (Path(__file__).parent.parent.parent / "docs/ep.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    world.all(document_program, program, free_port())
