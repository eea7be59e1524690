"""Ranks that end, join, and come back."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World


def backend() -> Any:
    return dist.group.WORLD


def total(value: float = 1.0) -> tuple[float, list[int], list[int], bool]:
    """Returns the sum of a value of all ranks, the active ranks, the hint, and the success."""
    from mooncake import pg

    tensor = torch.full((3,), value)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    return (
        tensor[0].item(),
        pg.get_active_ranks(backend()).tolist(),
        pg.get_failed_ranks_hint(work).tolist(),
        pg.get_local_success(work),
    )


def rank_value() -> tuple[float, list[int], list[int], bool]:
    return total(float(10 ** dist.get_rank()))


def world_size() -> int:
    return dist.get_world_size()


def gather_for_survivors(count: int) -> list[int]:
    """Gathers into a tensor that has space for the survivors only."""
    whole = torch.full((count,), -1)
    dist.all_gather_into_tensor(whole, torch.tensor([dist.get_rank() + 100]))
    return whole.tolist()


def message_to(rank: int) -> list[Any]:
    from mooncake import pg

    work = dist.isend(torch.ones(10), rank)
    return [work.wait(), work.is_success(), pg.get_failed_ranks_hint(work).tolist()]


def exchange_in_ring(ranks: list[int]) -> list[int]:
    at = ranks.index(dist.get_rank())
    output = torch.zeros(20_000, dtype=torch.int64)
    works = [
        dist.isend(torch.full((20_000,), dist.get_rank()), ranks[(at + 1) % len(ranks)]),
        dist.irecv(output, ranks[at - 1]),
    ]
    assert all(work.wait() and work.is_success() for work in works)
    return [output.min().item(), output.max().item()]


def test_survivors_of_a_killed_rank_go_on() -> None:
    with World(4) as world:
        assert world.all(total) == [(4.0, [1, 1, 1, 1], [0, 0, 0, 0], True)] * 4
        world.kill(3)
        assert world.all(gather_for_survivors, 3) == [[100, 101, 102]] * 3
        assert world.all(message_to, 3) == [[True, False, [0, 0, 0, 1]]] * 3
        assert world.all(total) == [(3.0, [1, 1, 1, 0], [0, 0, 0, 0], True)] * 3
        assert world.all(world_size) == [3] * 3
        assert world.all(exchange_in_ring, [0, 1, 2]) == [[2, 2], [0, 0], [1, 1]]
        # A rank in the middle leaves a hole.
        world.kill(1)
        # The hint shows the failure even if the coordinator was faster than this call.
        time.sleep(random.choice([0, 2.5]))
        assert world.all(rank_value) == [(101.0, [1, 0, 1, 0], [0, 1, 0, 0], False)] * 2
        assert world.all(rank_value) == [(101.0, [1, 0, 1, 0], [0, 0, 0, 0], True)] * 2
        assert world.all(world_size) == [3] * 2


def many_totals(length: int, least: int) -> list[float]:
    """Adds up until a rank has failed, and a few times more."""
    totals: list[float] = []
    while len(totals) < least or totals[-1] == totals[0]:
        tensor = torch.full((length,), float(10 ** dist.get_rank()))
        dist.all_reduce(tensor)
        assert tensor.min() == tensor.max()
        totals.append(tensor[0].item())
        assert len(totals) < 100_000
    for _ in range(20):
        tensor = torch.full((length,), float(10 ** dist.get_rank()))
        dist.all_reduce(tensor)
        totals.append(tensor[0].item())
    return totals


@pytest.mark.parametrize("length", [3, 100_000])
def test_survivors_agree_on_every_result(length: int) -> None:
    with World(4) as world:
        world.all(total)
        killed = random.randrange(1, 4)
        for rank in range(4):
            world.ranks[rank].begin(many_totals, length, 5)
        time.sleep(random.uniform(0.1, 1))
        world.kill(killed)
        results = [world.ranks[rank].result() for rank in sorted(world.ranks)]
        assert results[0] == results[1] == results[2], killed
        with_all = results[0].count(1111.0)
        assert results[0] == [1111.0] * with_all + [1111.0 - 10**killed] * (len(results[0]) - with_all)


def partner_that_is_killed() -> list[Any]:
    from mooncake import pg

    output = torch.zeros(4)
    lost = dist.irecv(output, 2)
    sent = dist.isend(torch.ones(100_000), 2)
    ended = [lost.wait(), sent.wait()]
    outcome = [lost.is_success(), sent.is_success(), pg.get_local_success(lost)]
    return [ended, outcome, pg.get_failed_ranks_hint(lost).tolist(), pg.get_active_ranks(backend()).tolist()]


def test_messages_with_a_killed_rank_fail_without_an_exception() -> None:
    with World(3) as world:
        world.all(total)
        for rank in (0, 1):
            world.ranks[rank].begin(partner_that_is_killed)
        time.sleep(0.5)
        world.kill(2)
        for rank in (0, 1):
            ended, outcome, hint, active = world.ranks[rank].result()
            assert ended == [True, True] and outcome == [False, False, False]
            assert hint == [0, 0, 1] and active == [1, 1, 0]
        assert world.all(exchange_in_ring, [0, 1]) == [[1, 1], [0, 0]]


def change_without_coordinator() -> list[Any]:
    from mooncake import pg

    try:
        pg.deactivate_ranks(backend(), [0])
    except RuntimeError as error:
        return [str(error), pg.sync_after_failure(backend()).status.name, pg.get_peer_state(backend(), [1, 2])]
    return ["no error"]


def test_survivors_of_rank_0_work_with_the_mask_that_they_have() -> None:
    with World(3) as world:
        world.all(total)
        world.kill(0)
        for _ in range(3):
            assert world.all(rank_value) == [(110.0, [1, 1, 1], [1, 0, 0], False)] * 2
        assert world.all(exchange_in_ring, [1, 2]) == [[2, 2], [1, 1]]
        for text, synced, states in world.all(change_without_coordinator):
            assert "rank 0 may have ended" in text and synced == "Rejected" and states == [True, True]


def leave_with_a_pending_message() -> list[Any]:
    work = dist.irecv(torch.zeros(4), 1)
    dist.destroy_process_group()
    return [work.wait(), work.is_completed(), work.is_success()]


def test_a_destroyed_group_ends_its_operations() -> None:
    with World(2) as world:
        world.all(total)
        assert world.ranks[0].call(leave_with_a_pending_message) == [True, True, False]


def settle_by_hand(dead: int) -> list[Any]:
    from mooncake import pg

    synced = pg.sync_after_failure(backend())
    state = pg.get_peer_state(backend(), [0, 1, dead])
    changed = pg.deactivate_ranks(backend(), [dead])
    return [synced.status.name, state, changed.status.name, changed.dropped_ranks, pg.get_active_ranks(backend()).tolist()]


def test_a_group_without_automatic_changes() -> None:
    options = {"auto_deactivate_on_failure": False, "auto_sync_on_failure": False}
    with World(3, options=options) as world:
        world.all(total)
        world.kill(2)
        # The failure shows, and the mask stays.
        assert world.all(total) == [(2.0, [1, 1, 1], [0, 0, 1], False)] * 2
        for synced, state, status, dropped, active in world.all(settle_by_hand, 2):
            assert synced in ("Reconciled", "NoPending") and state == [True, True, False]
            assert status == "Applied" or (status == "AppliedWithDroppedRanks" and dropped == [2])
            assert active == [1, 1, 0]
        assert world.all(total) == [(2.0, [1, 1, 0], [0, 0, 0], True)] * 2


def admit(ranks: list[int], size: int) -> list[Any]:
    """Waits until ranks ask to join, and activates them."""
    from mooncake import pg

    deadline = time.monotonic() + 120
    while not all(pg.get_peer_state(backend(), ranks)):
        assert time.monotonic() < deadline, "no rank asks to join"
        time.sleep(0.02)
    before = pg.get_current_epoch(backend())
    response = pg.recover_ranks(backend(), ranks)
    assert pg.get_current_epoch(backend()) > before
    return [response.status.name, response.new_epoch > before, dist.get_world_size() == size]


def join() -> list[Any]:
    from mooncake import pg

    alone = total(5.0)
    size = dist.get_world_size()
    pg.join_group(backend())
    return [alone[0], size]


def test_a_group_grows() -> None:
    with World(2, options={"max_group_size": 4}) as world:
        assert world.all(world_size) == [2, 2]
        assert world.all(total) == [(2.0, [1, 1, 0, 0], [0, 0, 0, 0], True)] * 2
        world.start([2, 3])
        world.initialize([2, 3], size=4, options={"max_group_size": 4, "is_extension": True})
        # The founders go on meanwhile.
        assert world.some([0, 1], total) == [(2.0, [1, 1, 0, 0], [0, 0, 0, 0], True)] * 2
        for rank in (2, 3):
            world.ranks[rank].begin(join)
        assert world.ranks[0].call(admit, [2, 3], 4) == ["Applied", True, True]
        assert [world.ranks[rank].result() for rank in (2, 3)] == [[5.0, 4], [5.0, 4]]
        assert world.all(world_size) == [4] * 4
        assert world.all(rank_value) == [(1111.0, [1, 1, 1, 1], [0, 0, 0, 0], True)] * 4
        assert world.all(exchange_in_ring, [0, 1, 2, 3]) == [[3, 3], [0, 0], [1, 1], [2, 2]]


SUBGROUPS: list[Any] = []


def make_subgroups(of: list[list[int]], options: dict[str, Any]) -> list[int]:
    from mooncake import pg

    for ranks in of:
        given = pg.MooncakeBackendOptions(**options)
        SUBGROUPS.append(dist.new_group(ranks, backend="mooncake-cpu", pg_options=given))
    return [dist.get_world_size(group) for group in SUBGROUPS]


def join_subgroups() -> None:
    from mooncake import pg

    pg.join_group(backend())
    for group in SUBGROUPS:
        pg.join_group(group)


def admit_to_subgroups(rank: int) -> list[str]:
    from mooncake import pg

    responses = []
    for group in [backend(), *SUBGROUPS]:
        deadline = time.monotonic() + 120
        while not all(pg.get_peer_state(group, [rank])):
            assert time.monotonic() < deadline, "no rank asks to join"
            time.sleep(0.02)
        responses.append(pg.activate_ranks(group, [rank]).status.name)
    return responses


def total_of_subgroups() -> list[float]:
    totals = []
    for group in SUBGROUPS:
        tensor = torch.tensor([float(10 ** dist.get_rank())])
        dist.all_reduce(tensor, group=group)
        totals.append(tensor.item())
    return totals


def test_subgroups_grow() -> None:
    with World(2, options={"max_group_size": 3}) as world:
        assert world.all(make_subgroups, [[0, 1], [1, 0]], {"max_group_size": 3}) == [[2, 2]] * 2
        assert world.all(total_of_subgroups) == [[11.0, 11.0]] * 2
        world.start([2])
        world.initialize([2], size=3, options={"max_group_size": 3, "is_extension": True})
        extension = {"max_group_size": 3, "is_extension": True}
        assert world.ranks[2].call(make_subgroups, [[0, 1, 2], [0, 1, 2]], extension) == [3, 3]
        assert world.ranks[2].call(total_of_subgroups) == [100.0, 100.0]
        world.ranks[2].begin(join_subgroups)
        assert world.ranks[1].call(admit_to_subgroups, 2) == ["Applied"] * 3
        world.ranks[2].result()
        assert world.all(total_of_subgroups) == [[111.0, 111.0]] * 3
        assert world.all(rank_value)[0][0] == 111.0


def replace(world: World, rank: int) -> None:
    others = sorted(world.ranks)
    world.start([rank])
    world.initialize([rank], options={"is_extension": True})
    world.ranks[rank].begin(join)
    assert world.ranks[others[0]].call(admit, [rank], world.size) == ["Applied", True, True]
    assert world.ranks[rank].result() == [5.0, world.size]
    everyone = float(sum(10**number for number in range(world.size)))
    assert world.all(rank_value) == [(everyone, [1] * world.size, [0] * world.size, True)] * world.size
    ring = sorted(world.ranks)
    assert world.all(exchange_in_ring, ring) is not None


def test_a_new_process_replaces_a_killed_one() -> None:
    with World(3) as world:
        world.all(total)
        for _ in range(2):
            world.kill(2)
            assert world.all(total)[0][:2] == (2.0, [1, 1, 0])
            replace(world, 2)


def leave() -> str:
    from mooncake import pg

    status = pg.deactivate_ranks(backend(), [dist.get_rank()]).status.name
    dist.destroy_process_group()
    return status


def test_a_new_process_replaces_one_that_has_left() -> None:
    with World(3) as world:
        world.all(total)
        assert world.ranks[1].call(leave) == "Applied"
        gone = world.ranks.pop(1)
        gone.pipe.close()
        gone.process.join(60)
        assert gone.process.exitcode == 0
        assert world.all(total) == [(2.0, [1, 0, 1], [0, 0, 0], True)] * 2
        replace(world, 1)


def totals(seconds: float) -> int:
    """Returns the number of operations of all ranks, until rank 0 ends them after a time."""
    count, end = 0, time.monotonic() + seconds
    while True:
        tensor = torch.ones([20_000, 2][count % 2])
        tensor[-1] = float(dist.get_rank() == 0 and time.monotonic() > end)
        dist.all_reduce(tensor)
        count += 1
        assert tensor[:-1].eq(3).all(), "a rank is missing"
        if tensor[-1]:
            return count


def late_total() -> tuple[float, bool]:
    """Returns the sum of the ranks, or the own number, and whether it is the sum of all."""
    try:
        value, _, _, success = total()
    except RuntimeError:
        return 1.0, False
    return value, success


@pytest.mark.nightly
def test_ranks_that_are_stopped_for_a_while() -> None:
    with World(3) as world:
        for rank in range(3):
            world.ranks[rank].begin(totals, 6.0)
        for _ in range(3):
            stopped = world.ranks[random.randrange(3)].process.pid
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(stopped, signal.SIGCONT)
            time.sleep(0.3)
        assert len({world.ranks[rank].result() for rank in range(3)}) == 1

        # The others leave a rank out that is stopped for long. It has no result then.
        os.kill(world.ranks[2].process.pid, signal.SIGSTOP)
        world.ranks[2].begin(late_total)
        assert world.some([0, 1], total) == [(2.0, [1, 1, 0], [0, 0, 1], False)] * 2
        os.kill(world.ranks[2].process.pid, signal.SIGCONT)
        assert world.ranks[2].result() == (1.0, False)


def deactivate(rank: int) -> str:
    from mooncake import pg

    return pg.deactivate_ranks(backend(), [rank]).status.name


def refused() -> str:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return ""


def join_again() -> None:
    from mooncake import pg

    pg.join_group(backend())


def test_a_process_joins_its_group_again() -> None:
    with World(3) as world:
        for _ in range(2):
            assert world.all(total) == [(3.0, [1, 1, 1], [0, 0, 0], True)] * 3
            assert world.ranks[0].call(deactivate, 2) == "Applied"
            assert "not active" in world.ranks[2].call(refused)
            assert world.some([0, 1], total) == [(2.0, [1, 1, 0], [0, 0, 0], True)] * 2
            world.ranks[2].begin(join_again)
            assert world.ranks[1].call(admit, [2], 3) == ["Applied", True, True]
            world.ranks[2].result()
        assert world.all(rank_value) == [(111.0, [1, 1, 1], [0, 0, 0], True)] * 3
        assert world.all(exchange_in_ring, [0, 1, 2]) == [[2, 2], [0, 0], [1, 1]]
