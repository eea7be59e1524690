"""Dispatch and combine while ranks are late, leave, or die."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="expert parallelism needs torch")

import torch.distributed as dist
from experts import Case, answers, check_combine, check_dispatch, input_of
from ranks import World

from mooncake import pg
from mooncake.mooncake_ep_buffer import Buffer

RANKS = 3
BUFFER: Buffer | None = None
# Results of the last dispatch.
LAST: Any = None


def case_of(seed: int, *inactive: int) -> Case:
    return Case(seed, RANKS, local=2, choices=4, limit=40, hidden=1024, is_fp8=False, inactive=inactive)


def make_buffer() -> None:
    global BUFFER
    BUFFER = Buffer(dist.group.WORLD)


def update() -> None:
    assert BUFFER is not None
    BUFFER.update_ep_member()


def renew(is_new: bool) -> None:
    if is_new:
        make_buffer()
    else:
        update()


def dispatch(seed: int, timeout_us: int, inactive: tuple[int, ...] = ()) -> list[Any]:
    """Dispatches, and compares the results with those of the ranks that are not in `inactive`.
    Returns the active ranks and the seconds.
    """
    global LAST
    assert BUFFER is not None
    case, mask = case_of(seed, *inactive), torch.ones(RANKS, dtype=torch.int32)
    own, begin = input_of(case, BUFFER.rank), time.monotonic()
    recv_x, recv_count, handle, _, _ = BUFFER.dispatch(
        own.x, own.topk, mask, case.limit, case.experts, timeout_us, use_fp8=False
    )
    spent = time.monotonic() - begin
    check_dispatch(case, BUFFER.rank, recv_x, recv_count, handle)
    LAST = (case, mask, recv_x, recv_count, handle)
    return [mask.tolist(), spent]


def combine(timeout_us: int, inactive: tuple[int, ...] = ()) -> list[Any]:
    """Combines the results of the last dispatch, and compares as `dispatch`."""
    assert BUFFER is not None
    case, mask, recv_x, recv_count, handle = LAST
    own, y = input_of(case, BUFFER.rank), answers(case, BUFFER.rank, recv_x, recv_count)
    begin = time.monotonic()
    out, _, _ = BUFFER.combine(y, own.topk, own.weights, mask, timeout_us, handle)
    spent = time.monotonic() - begin
    check_combine(case_of(case.seed, *{*case.inactive, *inactive}), BUFFER.rank, out)
    return [mask.tolist(), spent]


def active() -> list[int]:
    return pg.get_active_ranks(dist.group.WORLD).tolist()


def settle() -> list[int]:
    """Lets the group notice a rank that has died."""
    dist.all_reduce(torch.ones(1))
    return active()


def join() -> None:
    pg.join_group(dist.group.WORLD)


def admit(rank: int) -> str:
    deadline = time.monotonic() + 120
    while not all(pg.get_peer_state(dist.group.WORLD, [rank])):
        assert time.monotonic() < deadline, "no rank asks to join"
        time.sleep(0.02)
    return pg.recover_ranks(dist.group.WORLD, [rank]).status.name


def busy_seed(seed: int) -> int:
    """Returns a seed with which every rank sends tokens to every rank."""

    def is_busy(case: Case) -> bool:
        owners = [set((input_of(case, rank).topk // case.local).view(-1).tolist()) for rank in range(RANKS)]
        return all(one >= set(range(RANKS)) for one in owners)

    while not is_busy(case_of(seed)):
        seed += 1
    return seed


def test_ranks_that_do_not_answer_in_time() -> None:
    whole, busy = [1] * RANKS, busy_seed(100)
    with World(RANKS) as world:
        world.all(make_buffer)
        assert [one[0] for one in world.all(dispatch, 1, 60_000_000)] == [whole] * RANKS
        assert [one[0] for one in world.all(combine, 60_000_000)] == [whole] * RANKS

        # Rank 1 is late: exactly that rank is left out, after the limit.
        for mask, spent in world.some([0, 2], dispatch, busy, 400_000, (1,)):
            assert mask == [1, 0, 1] and 0.35 < spent < 20
        for mask, spent in world.some([0, 2], combine, 60_000_000):
            assert mask == [1, 0, 1] and spent < 20, "a rank that is left out is not waited for"
        # The late rank gets the tokens of the others, but no rows of their experts.
        mask, spent = world.ranks[1].call(dispatch, busy, 60_000_000)
        assert mask == whole and spent < 20
        mask, spent = world.ranks[1].call(combine, 60_000_000, (0, 2))
        assert mask == [0, 1, 0] and spent < 20

        # Rank 1 leaves between dispatch and combine: rows of the first round are not taken for its
        # own.
        world.all(update)
        for seed in (busy, busy + 1):
            assert [one[0] for one in world.all(dispatch, seed, 60_000_000)] == [whole] * RANKS
            if seed == busy:
                assert [one[0] for one in world.all(combine, 60_000_000)] == [whole] * RANKS
        for mask, spent in world.some([0, 2], combine, 2_000_000, (1,)):
            assert mask == [1, 0, 1] and 1.9 < spent < 20
        assert world.all(active) == [whole] * RANKS, "the group does not change"

        # All begin again.
        world.all(update)
        assert [one[0] for one in world.all(dispatch, 5, 60_000_000)] == [whole] * RANKS
        assert [one[0] for one in world.all(combine, 60_000_000)] == [whole] * RANKS

        # A rank that dies is noticed without a limit.
        for rank in (0, 1):
            world.ranks[rank].begin(dispatch, 6, -1, (2,))
        time.sleep(0.2)
        world.kill(2)
        for rank in (0, 1):
            mask, spent = world.ranks[rank].result()
            assert mask == [1, 1, 0] and 0.1 < spent < 20
        assert [one[0] for one in world.all(combine, -1)] == [[1, 1, 0]] * 2
        assert [one[0] for one in world.all(dispatch, 7, -1, (2,))] == [[1, 1, 0]] * 2

        # Another process replaces the killed rank.
        assert world.all(settle) == [[1, 1, 0]] * 2
        world.start([2])
        world.initialize([2], options={"is_extension": True})
        world.ranks[2].begin(join)
        assert world.ranks[0].call(admit, 2) == "Applied"
        world.ranks[2].result()
        world.each(range(RANKS), renew, lambda rank: (rank == 2,))
        assert [one[0] for one in world.all(dispatch, 8, 60_000_000)] == [whole] * RANKS
        assert [one[0] for one in world.all(combine, 60_000_000)] == [whole] * RANKS
