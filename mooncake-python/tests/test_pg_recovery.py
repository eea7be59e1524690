"""Training that goes on when a rank is killed at a random step, and takes a replacement in."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World
from torch import nn

SIZE = 3
# Seconds from a failure to the next step of the survivors. The window of the tests takes 1 s.
RECOVERY = 5.0


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
