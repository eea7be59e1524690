"""Training that goes on when a rank is killed at a random step, and takes a replacement in."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World, has_fsdp2, note
from torch import nn

SIZE = 3
# Seconds from a failure to the next step of the survivors. The window of the tests takes 1 s.
RECOVERY = 5.0
# Steps after a rank has joined.
FURTHER = 40
# Failed steps of one rank.
MOST_FAILURES = 5


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def backward(model: Any, step: int) -> float:
    """Computes the gradients of a step from the data of this rank, and returns the loss."""
    numbers = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    batch = torch.randn(8, 16, generator=numbers)
    loss = (model(batch) - batch[:, :4].tanh()).square().mean()
    loss.backward()
    return loss.item()


def die_soon(seconds: float) -> None:
    """Ends this process in the middle of what it does then."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def admit(rank: int) -> None:
    """Takes a replacement in. Every active rank calls this. The first one activates the rank."""
    from mooncake import pg

    group = dist.group.WORLD
    if dist.get_rank() == 0:
        wait_until(lambda: all(pg.get_peer_state(group, [rank])), "no rank asks to join")
        assert pg.recover_ranks(group, [rank]).status == pg.ProposalStatus.Applied
    wait_until(lambda: pg.get_active_ranks(group)[rank].item() == 1, "the rank is not active")


def agreed(number: int) -> int:
    """Returns the number of rank 0."""
    tensor = torch.tensor([number])
    dist.broadcast(tensor, 0)
    return int(tensor.item())


class Ddp:
    """Training with DDP. The log of a step has its number, mean loss, ranks and parameters."""

    def __init__(self, seed: int) -> None:
        self.inner = network(seed)
        self.log: list[tuple[int, float, int, float]] = []
        self.slowest = 0.0
        self.wrap()

    def wrap(self) -> None:
        # The parameters of rank 0 go to all ranks.
        self.model = nn.parallel.DistributedDataParallel(self.inner)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.05)

    def step(self, number: int, joiner: int | None) -> bool:
        """Makes a step. Returns whether rank 0 sees that the joiner waits."""
        from mooncake import pg

        begin = time.monotonic()
        self.optimizer.zero_grad()
        loss = backward(self.model, number)
        self.optimizer.step()
        group = dist.group.WORLD
        waits = dist.get_rank() == 0 and joiner is not None and not pg.get_active_ranks(group)[joiner]
        waits = waits and all(pg.get_peer_state(group, [joiner]))
        sums = torch.tensor([loss, 1.0, float(waits)])
        dist.all_reduce(sums)
        members = int(sums[1].item())
        state = sum(parameter.sum().item() for parameter in self.inner.parameters())
        self.log.append((number, sums[0].item() / members, members, state))
        self.slowest = max(self.slowest, time.monotonic() - begin)
        return bool(sums[2].item())


def train_ddp(victim: int, death: int, delay: float, further: int) -> tuple[list[Any], float]:
    """Trains until a replacement of the victim has joined, and some steps further."""
    training = Ddp(seed=7)
    number = 0
    while not training.step(number, victim):
        number += 1
        if number == death and dist.get_rank() == victim:
            die_soon(delay)
    admit(victim)
    number = agreed(number + 1)
    training.wrap()
    for at in range(number, number + further):
        training.step(at, None)
    return training.log, training.slowest


def replace_in_ddp(further: int) -> tuple[list[Any], float]:
    from mooncake import pg

    pg.join_group(dist.group.WORLD)
    number = agreed(-1)
    training = Ddp(seed=1)
    for at in range(number, number + further):
        training.step(at, None)
    return training.log, training.slowest


@pytest.mark.nightly
def test_ddp_goes_on_without_a_killed_rank_and_with_its_replacement() -> None:
    victim, death, delay = random.randrange(1, SIZE), random.randrange(2, 60), random.uniform(0, 0.02)
    print(f"victim={victim} death={death} delay={delay}")
    further = 40
    with World(SIZE) as world:
        for rank in range(SIZE):
            world.ranks[rank].begin(train_ddp, victim, death, delay, further)
        world.ranks.pop(victim).process.join(120)
        world.start([victim])
        world.initialize([victim], options={"is_extension": True})
        world.ranks[victim].begin(replace_in_ddp, further)
        results = [world.ranks[rank].result() for rank in range(SIZE)]
    logs = {rank: log for rank, (log, _) in enumerate(results)}
    survivors = [rank for rank in range(SIZE) if rank != victim]
    log = logs[survivors[0]]
    # Losses and parameters agree in every step.
    assert log == logs[survivors[1]]
    assert log[-further:] == logs[victim]
    assert [number for number, *_ in log] == list(range(len(log)))
    members = [count for _, _, count, _ in log]
    alone = members.count(SIZE - 1)
    assert members == [SIZE] * (len(log) - alone - further) + [SIZE - 1] * alone + [SIZE] * further
    assert death <= len(log) - alone - further and alone > 0
    losses = [loss for _, loss, _, _ in log]
    assert sum(losses[-10:]) < sum(losses[:10]) / 2
    slowest = max(results[rank][1] for rank in survivors)
    print(f"slowest step {slowest:.2f} s")
    assert slowest < RECOVERY


@dataclass(frozen=True)
class Good:
    """State after a step in which no rank failed: the next step, and whole tensors. Every rank has
    it, so that the loss of a rank loses nothing.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class Step:
    """Line of the log."""

    number: int
    members: tuple[int, ...]
    loss: float


# Number of groups that this rank has made.
MADE = 0


def make_group(members: Sequence[int]) -> Any:
    """Makes a group. Only its ranks call this."""
    global MADE
    MADE += 1
    return dist.new_group(list(members), use_local_synchronization=True)


def level() -> None:
    """Makes groups until all ranks have made as many. Torch names a group by the number of those
    before, and a rank that has joined has made none.
    """
    most = torch.tensor([MADE])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    while most.item() > MADE:
        dist.destroy_process_group(make_group([dist.get_rank()]))


class Fsdp:
    """Training with FSDP2 among some ranks, in a group of their own."""

    def __init__(self, members: Sequence[int], good: Good | None) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        self.members = members
        self.group = make_group(members)
        try:
            # Torch keeps meshes, and takes one with the same ranks and names for the same.
            mesh = DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=(f"group{MADE}",))
            self.model = network(7)
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
            self.number = 0 if good is None else good.step
            if good is not None:
                given = {"model_state_dict": good.model, "optim_state_dict": good.optimizer}
                set_state_dict(self.model, self.optimizer, **given, options=whole())
        except BaseException:
            self.close()
            raise

    def step(self) -> tuple[float, Good]:
        """Makes a step, and returns the own loss and the state after it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.optimizer.zero_grad()
        loss = backward(self.model, self.number)
        self.optimizer.step()
        self.number += 1
        return loss, Good(self.number, *get_state_dict(self.model, self.optimizer, options=whole()))

    def close(self) -> None:
        """Leaves the group. Ranks that wait for this one in a step go on without it."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


def whole() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True)


class Faults:
    """Errors of this rank alone in some steps, each once, or the end of its process in one."""

    def __init__(self, steps: set[int], kill_after: float | None = None) -> None:
        self.steps, self.kill_after = steps, kill_after

    def attach(self, training: Fsdp) -> None:
        if training.number not in self.steps:
            return
        self.steps.remove(training.number)
        if self.kill_after is not None:
            return die_soon(self.kill_after)

        def fail(*_: Any) -> None:
            handle.remove()
            raise ValueError("an error of this rank only")

        # The second layer fails after the others have begun to gather its parameters.
        handle = training.model[2].register_forward_hook(fail)


def train_fsdp(
    good: Good | None, members: tuple[int, ...], end: int | None, faults: Faults | None = None
) -> tuple[list[Step], float]:
    """Trains until the step `end`, or `FURTHER` steps after a rank has joined. A step fails if
    anything goes wrong on any rank. Then all ranks that are left go back to the last good state.

    Returns the log, and the longest time from the failure of a step to the next good one.
    """
    from mooncake import pg

    world, log, slowest, failed = dist.group.WORLD, [], 0.0, None
    training, failures = None, 0
    while good is None or end is None or good.step < end:
        loss, state, is_good = 0.0, None, False
        try:
            if training is None:
                training = Fsdp(members, good)
            if faults is not None:
                faults.attach(training)
            loss, state = training.step()
            is_good = True
        except Exception as error:
            note(f"step failed: {error!r}"[:200])
            failed = failed or time.monotonic()
            failures += 1
            if failures > MOST_FAILURES:
                raise
            if training is not None:
                training.close()
        others = [rank for rank in range(SIZE) if rank not in members and all(pg.get_peer_state(world, [rank]))]
        # Ranks that are here, ranks whose step was good, the losses, and a rank that waits, as rank
        # 0 sees it; 0 stands for none.
        told = torch.zeros(2 * SIZE + 2)
        told[dist.get_rank()], told[SIZE + dist.get_rank()], told[-2] = 1.0, float(is_good), loss
        told[-1] = others[0] if others and dist.get_rank() == 0 else 0
        try:
            dist.all_reduce(told)
            # All ranks have the same list, other than that of the active ranks, which may change.
            here, joiner = tuple(told[:SIZE].nonzero().flatten().tolist()), int(told[-1])
        except RuntimeError as error:
            note(f"left out: {error!r}"[:200])
            pg.join_group(world)
            here, joiner = (), dist.get_rank()
        if here and all(told[rank] and told[SIZE + rank] for rank in members):
            assert state is not None
            good = state
            log.append(Step(good.step - 1, members, told[-2].item() / len(members)))
            if failed is not None:
                slowest = max(slowest, time.monotonic() - failed)
                failed = None
        elif training is not None:
            failed = failed or time.monotonic()
            training.close()
            training = None
        if joiner:
            if joiner != dist.get_rank():
                admit(joiner)
            if training is not None:
                training.close()
                training = None
            good, here = received(good, tuple(sorted({*here, joiner})))
            end, failed = good.step + FURTHER, None
        members = here
    if training is not None:
        # No rank waits for data of this one any more.
        dist.barrier()
        training.close()
    return log, slowest


def received(good: Good | None, members: tuple[int, ...]) -> Any:
    """Returns the state and the ranks of rank 0. All ranks call this before they make a group
    again.
    """
    level()
    given = [(good, members)]
    dist.broadcast_object_list(given, 0)
    return given[0]


def replace_in_fsdp() -> tuple[list[Step], float]:
    from mooncake import pg

    pg.join_group(dist.group.WORLD)
    good, members = received(None, ())
    return train_fsdp(good, members, good.step + FURTHER)


def repeat_with_gloo(log: list[Step]) -> list[float]:
    """Makes the same steps with the same ranks over gloo, and returns the losses."""
    good, losses, training, members = None, [], None, ()
    for step in log:
        if step.members != members:
            if training is not None:
                training.close()
            members, training = step.members, None
            good, _ = received(good, members)
            if dist.get_rank() in members:
                training = Fsdp(members, good)
        told = torch.zeros(1)
        if training is not None:
            assert training.number == step.number
            told[0], good = training.step()
        dist.all_reduce(told)
        losses.append(told.item() / len(members))
    return losses


def check_fsdp(results: dict[int, tuple[list[Step], float]], victim: int, death: int) -> None:
    """Compares the logs of the ranks with each other, and with the same steps over gloo."""
    log = results[0][0]
    assert [step.number for step in log] == list(range(len(log)))
    for rank, (own, _) in results.items():
        shared = [step for step in log if rank in step.members]
        # The process of the victim may be another one.
        assert own == shared[-len(own) :] and len(own) >= (FURTHER if rank == victim else len(log))
    sizes = [len(step.members) for step in log]
    alone = sizes.count(SIZE - 1)
    before = len(log) - alone - FURTHER
    assert sizes == [SIZE] * before + [SIZE - 1] * alone + [SIZE] * FURTHER and before >= death
    slowest = max(spent for rank, (_, spent) in results.items() if rank != victim)
    print(f"before={before} alone={alone} slowest step {slowest:.2f} s")
    assert slowest < RECOVERY
    compare_with_gloo(log)


def compare_with_gloo(log: list[Step]) -> None:
    with World(SIZE, backend="gloo") as world:
        for losses in world.all(repeat_with_gloo, log):
            assert losses == pytest.approx([step.loss for step in log], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.skipif(not has_fsdp2(), reason="FSDP2 of this torch is for GPUs only")
def test_fsdp2_goes_on_without_a_killed_rank_and_with_its_replacement() -> None:
    victim, death, delay = random.randrange(1, SIZE), random.randrange(2, 60), random.uniform(0, 0.05)
    print(f"victim={victim} death={death} delay={delay}")
    with World(SIZE) as world:
        for rank in range(SIZE):
            faults = Faults({death}, delay) if rank == victim else None
            world.ranks[rank].begin(train_fsdp, None, tuple(range(SIZE)), None, faults)
        world.ranks.pop(victim).process.join(120)
        world.start([victim])
        world.initialize([victim], options={"is_extension": True})
        world.ranks[victim].begin(replace_in_fsdp)
        results = {rank: world.ranks[rank].result() for rank in range(SIZE)}
    check_fsdp(results, victim, death)


@pytest.mark.nightly
@pytest.mark.skipif(not has_fsdp2(), reason="FSDP2 of this torch is for GPUs only")
def test_fsdp2_repeats_a_step_that_fails_on_one_rank() -> None:
    """The rank leaves the group of the model, and stays in all others."""
    end = 60
    steps = random.sample(range(2, end), SIZE * (MOST_FAILURES - 1))
    print(f"steps={steps}")
    with World(SIZE) as world:
        for rank in range(SIZE):
            faults = Faults(set(steps[rank::SIZE]))
            world.ranks[rank].begin(train_fsdp, None, tuple(range(SIZE)), end, faults)
        results = [world.ranks[rank].result() for rank in range(SIZE)]
    for log, slowest in results:
        assert log == results[0][0] and slowest < RECOVERY
        assert [step.number for step in log] == list(range(end))
        # No rank is ever left out.
        assert {step.members for step in log} == {tuple(range(SIZE))}
    compare_with_gloo(results[0][0])
