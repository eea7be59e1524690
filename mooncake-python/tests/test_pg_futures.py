"""Futures of operations: callbacks that wait, and the communication hooks of DDP, beside gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World
from test_pg_surface import ALONE, run
from torch import nn

# Seconds for one check in both backends.
LIMIT = 100
NIGHTLY = pytest.mark.nightly


@pytest.fixture
def world() -> Iterator[World]:
    with World(2) as running:
        yield running


def beside_gloo(check: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns the results of a check with this package and with gloo."""
    return [check(group, *arguments) for group in (dist.group.WORLD, dist.new_group(backend="gloo"))]


def wait_in_callbacks(group: Any, levels: int) -> list[float]:
    """Waits for futures in callbacks of futures, `levels` deep."""

    def again(tensor: Any, left: int) -> Any:
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        return future.then(lambda done: again(done.value()[0], left - 1).wait() if left else done.value()[0])

    return [again(torch.ones(length), levels).wait()[0].item() for length in (1, 100_000)]


def test_callbacks_wait_for_other_operations(world: World) -> None:
    assert world.all_within(LIMIT, beside_gloo, wait_in_callbacks, 1) == [[[4.0, 4.0]] * 2] * 2
    # The two threads of gloo are not enough for more levels than two.
    assert world.all_within(LIMIT, wait_in_callbacks, None, 8) == [[512.0, 512.0]] * 2


def callbacks_of_many() -> list[Any]:
    import threading

    last = torch.futures.Future()
    caller, store = threading.get_ident(), dist.distributed_c10d._get_default_store()

    def wait(_: Any) -> bool:
        last.wait()
        return threading.get_ident() != caller

    # All callbacks block, and the operations go on. A callback of a finished operation would run
    # inside of `then`, so the other rank begins each operation after it.
    waiting = []
    for number in range(40):
        is_first = number % 2 == dist.get_rank()
        if not is_first:
            store.wait([f"begun-{number}"])
        future = dist.all_reduce(torch.ones(50_000), async_op=True).get_future()
        if is_first:
            waiting.append(future.then(wait))
            store.set(f"begun-{number}", "1")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    last.set_result(None)
    return [tensor.item(), sum(torch.futures.wait_all(waiting))]


def test_callbacks_that_block_stop_no_operation(world: World) -> None:
    assert world.all_within(LIMIT, callbacks_of_many) == [[2.0, 20]] * 2


@pytest.mark.nightly
def test_a_program_ends_with_a_callback_that_waits_for_ever() -> None:
    code = """
import os, threading
init()
begun = threading.Event()
def wait(_):
    begun.set()
    torch.futures.Future().wait()
for _ in range(100):
    future = dist.all_reduce(torch.ones(100_000), async_op=True).get_future()
    if not future.done():
        future.then(wait)
        begun.wait(30)
        break
print("done")
"""
    assert run(ALONE + code) == "done"


def network(group: Any) -> Any:
    torch.manual_seed(7)
    return nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), process_group=group
    )


def gradients(model: Any, steps: int) -> list[float]:
    """Returns the sum of the gradients of each step."""
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    sums = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 64, generator=random)).square().sum().backward()
        sums.append(sum(one.grad.sum().item() for one in model.parameters()))
    return sums


def train_with_power_sgd(group: Any) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = network(group)
    state = powerSGD_hook.PowerSGDState(process_group=group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return gradients(model, 8)


@pytest.mark.nightly
def test_the_power_sgd_hook_has_the_gradients_of_gloo(world: World) -> None:
    for ours, theirs in world.all_within(LIMIT, beside_gloo, train_with_power_sgd):
        assert ours == theirs and len(set(ours)) == 8


def train_with_builtin_hook(group: Any, name: str) -> list[float]:
    model = network(group)
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return gradients(model, 8)


@pytest.mark.parametrize("name", ["ALLREDUCE", pytest.param("FP16_COMPRESS", marks=NIGHTLY)])
def test_the_builtin_hooks_have_the_gradients_of_gloo(world: World, name: str) -> None:
    for ours, theirs in world.all_within(LIMIT, beside_gloo, train_with_builtin_hook, name):
        assert ours == theirs and len(set(ours)) == 8


def train_with_python_hook(group: Any, name: str) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = network(group)
    hook = getattr(default_hooks, name)
    if name.endswith("_wrapper"):
        hook = hook(default_hooks.allreduce_hook)
    model.register_comm_hook(group, hook)
    return gradients(model, 8)


@pytest.mark.parametrize("name", ["allreduce_hook", *(pytest.param(name, marks=NIGHTLY) for name in ("fp16_compress_hook", "bf16_compress_hook", "fp16_compress_wrapper"))])
def test_the_hooks_in_python_have_the_gradients_of_gloo(world: World, name: str) -> None:
    for ours, theirs in world.all_within(LIMIT, beside_gloo, train_with_python_hook, name):
        assert ours == theirs and len(set(ours)) == 8


def half_future(group: Any) -> list[Any]:
    tensor = torch.ones(3, dtype=torch.float16)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    values = future.then(lambda done: done.value()).wait()
    return [len(values), values[0].tolist(), values[0].data_ptr() == tensor.data_ptr()]


def test_a_future_of_float16(world: World) -> None:
    assert world.all_within(LIMIT, beside_gloo, half_future) == [[[1, [2.0] * 3, True]] * 2] * 2
