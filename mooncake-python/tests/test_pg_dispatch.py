"""Calls of a group in torch's dispatcher, beside gloo: tensors of derived classes, fake tensors,
traces, profilers and modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World

from mooncake import pg
from mooncake._pg_torch import HAS_BACKENDS

pytestmark = pytest.mark.skipif(not HAS_BACKENDS, reason="this torch has no backends in Python")

# Seconds for one check in both backends.
LIMIT = 100
NIGHTLY = pytest.mark.nightly


@pytest.fixture
def world() -> Iterator[World]:
    with World(2) as running:
        yield running


def beside_gloo(check: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns the results of a check with this package and with gloo. An exception is a result."""
    results = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        try:
            results.append(check(group))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results[0], results[1]


def assert_as_gloo(world: World, check: Callable[[Any], Any], wanted: Any = None) -> None:
    """Asserts that a check has the result of gloo, which is `wanted`, on both ranks."""
    for ours, theirs in world.all_within(LIMIT, beside_gloo, check):
        assert ours == theirs
        if wanted is not None:
            assert ours == wanted


def unwaited(group: Any) -> Any:
    """Returns a functional result without a wait: 2 in each of 3 elements."""
    import torch.distributed._functional_collectives as functional

    return functional.all_reduce(torch.ones(3), "sum", group)


def reduce_unwaited(group: Any) -> list[float]:
    tensor = unwaited(group)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def gather_unwaited(group: Any) -> list[float]:
    output = torch.zeros(6)
    dist.all_gather_into_tensor(output, unwaited(group), group=group)
    return output.tolist()


def list_unwaited(group: Any) -> list[Any]:
    outputs = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(outputs, unwaited(group), group=group)
    return [one.tolist() for one in outputs]


def scatter_unwaited(group: Any) -> list[float]:
    import torch.distributed._functional_collectives as functional

    output = torch.zeros(1)
    dist.reduce_scatter_tensor(output, functional.all_reduce(torch.ones(2), "sum", group), group=group)
    return output.tolist()


def exchange_unwaited(group: Any) -> list[float]:
    import torch.distributed._functional_collectives as functional

    output = torch.zeros(2)
    dist.all_to_all_single(output, functional.all_reduce(torch.ones(2), "sum", group), group=group)
    return output.tolist()


def broadcast_unwaited(group: Any) -> list[float]:
    tensor = unwaited(group)
    dist.broadcast(tensor, 0, group=group)
    return tensor.tolist()


def send_unwaited(group: Any) -> list[float]:
    tensor = unwaited(group)
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
        return [2.0] * 3
    output = torch.zeros(3)
    dist.recv(output, 0, group=group)
    return output.tolist()


@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (reduce_unwaited, [4.0] * 3),
        pytest.param(gather_unwaited, [2.0] * 6, marks=NIGHTLY),
        pytest.param(list_unwaited, [[2.0] * 3] * 2, marks=NIGHTLY),
        pytest.param(scatter_unwaited, [4.0], marks=NIGHTLY),
        pytest.param(exchange_unwaited, [2.0, 2.0], marks=NIGHTLY),
        pytest.param(broadcast_unwaited, [2.0] * 3, marks=NIGHTLY),
        (send_unwaited, [2.0] * 3),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_result_that_was_not_waited_for(world: World, check: Callable[[Any], Any], wanted: Any) -> None:
    assert_as_gloo(world, check, wanted)


def one_rank_has_unwaited(group: Any) -> list[float]:
    tensor = unwaited(group)
    if dist.get_rank() == 1:
        tensor = tensor.wait()
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def test_a_result_that_one_rank_has_not_waited_for(world: World) -> None:
    assert_as_gloo(world, one_rank_has_unwaited, [4.0] * 3)


def use_fake_tensors(group: Any) -> list[Any]:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        tensor, output = torch.ones(3), torch.zeros(6)
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        dist.broadcast(tensor, 0, group=group)
        dist.all_gather_into_tensor(output, tensor, group=group)
        dist.reduce_scatter_tensor(tensor, output, group=group)
        dist.barrier(group=group)
        if dist.get_rank() == 0:
            # No rank receives the tensor.
            dist.send(tensor, 1, group=group)
        return [type(one).__name__ for one in (tensor, output)] + [tuple(tensor.shape), tuple(output.shape)]


def test_fake_tensors_stay_fake(world: World) -> None:
    assert_as_gloo(world, use_fake_tensors, ["FakeTensor", "FakeTensor", (3,), (6,)])


def reduce_distributed_tensor(group: Any) -> list[float]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    tensor = distribute_tensor(torch.ones(4), DeviceMesh.from_group(group, "cpu"), [Replicate()])
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def test_a_distributed_tensor_is_refused_by_torch(world: World) -> None:
    for ours, theirs in world.all_within(LIMIT, beside_gloo, reduce_distributed_tensor):
        assert ours == theirs and ours.startswith("NotImplementedError")


def reduce_wrapper(group: Any, async_op: bool) -> list[Any]:
    from torch.testing._internal.two_tensor import TwoTensor

    tensor = TwoTensor(torch.ones(50_000), torch.full((50_000,), 2.0))
    work = dist.all_reduce(tensor, group=group, async_op=async_op)
    if async_op:
        assert work.wait() and work.is_completed() and pg.get_local_success(work) and len(work.result()) == 2
    return [tensor.a.unique().tolist(), tensor.b.unique().tolist()]


@pytest.mark.parametrize("async_op", [pytest.param(False, marks=NIGHTLY), True])
def test_a_tensor_that_wraps_others(world: World, async_op: bool) -> None:
    # With gloo, torch waits for the last of the two operations only.
    assert world.all_within(LIMIT, reduce_wrapper, None, async_op) == [[[2.0], [4.0]]] * 2


def call_backend_with_wrapper() -> list[str]:
    import torch.distributed._functional_collectives as functional
    from torch.testing._internal.two_tensor import TwoTensor

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    texts = []
    for tensor in (functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD), TwoTensor(torch.ones(3), torch.ones(3))):
        for call in (
            lambda one=tensor: backend.allreduce([one]),
            lambda one=tensor: backend.all_gather_single(torch.zeros(6), one),
            lambda one=tensor: backend.send([one], 1 - dist.get_rank(), 0),
        ):
            try:
                call()
                texts.append("no exception")
            except RuntimeError as error:
                texts.append(str(error).partition(".")[0])
    return texts


def test_a_backend_refuses_a_tensor_without_memory(world: World) -> None:
    texts = world.all_within(LIMIT, call_backend_with_wrapper)
    assert texts == [["cannot use tensor: it has no memory of its own"] * 6] * 2


def trace(group: Any) -> list[str]:
    return [str(node.target) for node in traced(group).graph.nodes if node.op == "call_function"]


def traced(group: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    def double(tensor: Any) -> Any:
        twice = tensor * 2
        dist.all_reduce(twice, group=group)
        return twice + 1

    return make_fx(double)(torch.ones(50_000))


def run_trace() -> list[float]:
    return traced(dist.group.WORLD)(torch.ones(50_000)).unique().tolist()


@pytest.mark.nightly
def test_a_trace_has_the_operator(world: World) -> None:
    assert_as_gloo(world, trace)
    assert "c10d.allreduce_.default" in world.all_within(LIMIT, beside_gloo, trace)[0][0]
    # With gloo, the graph does not wait for the operator.
    assert world.all_within(LIMIT, run_trace) == [[5.0]] * 2


def count_communication(group: Any) -> list[Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(3), group=group)
        dist.broadcast(torch.ones(3), 0, group=group)
        dist.all_gather_into_tensor(torch.zeros(6), torch.ones(3), group=group)
        dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(6), group=group)
    return sorted((str(name), count) for name, count in mode.get_comm_counts().items())


def test_the_mode_that_counts_communication(world: World) -> None:
    assert_as_gloo(world, count_communication)
    assert len(world.all_within(LIMIT, beside_gloo, count_communication)[0][0]) == 4


def log_operators(group: Any) -> list[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if operator.namespace == "c10d":
                names.append(str(operator))
            return operator(*arguments, **(options or {}))

    peer = 1 - dist.get_rank()
    tensor, pair, halves = torch.ones(2), torch.zeros(4), [torch.zeros(2), torch.zeros(2)]
    with Log():
        dist.all_reduce(tensor, group=group)
        dist.reduce(tensor, 0, group=group)
        dist.broadcast(tensor, 0, group=group)
        dist.all_gather(halves, tensor, group=group)
        dist.all_gather_into_tensor(pair, tensor, group=group)
        dist.reduce_scatter(tensor, halves, group=group)
        dist.reduce_scatter_tensor(tensor, pair, group=group)
        dist.all_to_all_single(pair, pair.clone(), group=group)
        dist.scatter(tensor, halves if dist.get_rank() == 0 else None, 0, group=group)
        dist.gather(tensor, halves if dist.get_rank() == 0 else None, 0, group=group)
        dist.barrier(group=group)
        for work in [dist.isend(tensor, peer, group=group), dist.irecv(torch.zeros(2), peer, group=group)]:
            work.wait()
        if dist.get_rank() == 0:
            dist.send(tensor, 1, group=group)
        else:
            dist.recv(torch.zeros(2), group=group)
        with dist._coalescing_manager(group=group):
            dist.all_reduce(tensor, group=group)
            dist.all_reduce(pair, group=group)
    return names


def test_a_mode_sees_every_operator(world: World) -> None:
    assert_as_gloo(world, log_operators)
    names = world.all_within(LIMIT, beside_gloo, log_operators)[0][0]
    assert {"c10d.allreduce_.default", "c10d.send.default", "c10d.barrier.default"} <= set(names)


def works_of_modes() -> list[Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    tensor = torch.ones(3)
    with CommDebugMode():
        work = dist.all_reduce(tensor, async_op=True)
    is_over = work.wait() and work.is_completed()
    return [type(work).__name__, is_over, pg.get_local_success(work), tensor.tolist(), work.result()[0].tolist()]


def test_a_work_under_a_mode_is_one_of_this_package(world: World) -> None:
    assert world.all_within(LIMIT, works_of_modes) == [["MooncakeWork", True, True, [2.0] * 3, [2.0] * 3]] * 2


def profile(group: Any) -> list[str]:
    with torch.autograd.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_gather_into_tensor(torch.zeros(6), torch.ones(3), group=group)
    return sorted(event.name for event in profiler.function_events if event.name.startswith("c10d::"))


def test_a_profile_has_the_operators(world: World) -> None:
    assert_as_gloo(world, profile, ["c10d::_allgather_base_", "c10d::allreduce_"])


def run_hooks(group: Any) -> list[str]:
    seen: list[str] = []
    group.register_pre_hook(1, lambda given: seen.append(f"before {given.name}"))
    group.register_post_hook(2, lambda given: seen.append(f"after {given.name}"))
    dist.all_reduce(torch.ones(3), group=group)
    group.unregister_pre_hook(1)
    dist.all_reduce(torch.ones(3), group=group)
    group.unregister_post_hook(2)
    dist.all_reduce(torch.ones(3), group=group)
    return seen


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="this torch has no hooks")
def test_hooks_of_a_group(world: World) -> None:
    assert_as_gloo(world, run_hooks)
    assert len(world.all_within(LIMIT, beside_gloo, run_hooks)[0][0]) == 3


def map_over_batch(group: Any) -> Any:
    def add(tensor: Any) -> Any:
        dist.all_reduce(tensor, group=group)
        return tensor

    return torch.vmap(add)(torch.ones(2, 3)).tolist()


def compiled_exchange(group: Any) -> list[Any]:
    rank = dist.get_rank()

    def exchange(tensor: torch.Tensor) -> list[torch.Tensor]:
        twice = tensor * 2
        torch._dynamo.graph_break()
        space = torch.zeros(3)
        calls = [dist.P2POp(dist.isend, twice + rank, 1 - rank, group), dist.P2POp(dist.irecv, space, 1 - rank, group)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        total = space + 1
        group.allreduce([total]).wait()
        return [space, total]

    return [tensor.tolist() for tensor in torch.compile(exchange, backend="eager")(torch.ones(3))]


@pytest.mark.nightly
def test_calls_in_a_compiled_function_run_as_they_are(world: World) -> None:
    results = world.all_within(LIMIT, beside_gloo, compiled_exchange)
    assert [ours for ours, _ in results] == [[[3.0] * 3, [7.0] * 3], [[2.0] * 3, [7.0] * 3]]
    assert all(ours == theirs for ours, theirs in results)


def test_a_transform_of_functions_sees_the_operator(world: World) -> None:
    for ours, theirs in world.all_within(LIMIT, beside_gloo, map_over_batch):
        assert ours == theirs and "c10d::allreduce_" in ours


def use_names_of_other_versions() -> list[Any]:
    group, tensor = dist.group.WORLD, torch.full((2,), dist.get_rank() + 1.0)
    results = []
    for name in ("all_gather_single", "_allgather_base"):
        output = torch.zeros(4)
        getattr(group, name)(output, tensor).wait()
        results.append(output.tolist())
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        output = torch.zeros(1)
        getattr(group, name)(output, tensor, dist.ReduceScatterOptions()).wait()
        results.append(output.tolist())
    for name in ("all_to_all_single", "alltoall_base"):
        output = torch.zeros(2)
        getattr(group, name)(output, tensor, [], []).wait()
        results.append(output.tolist())
    return results


@pytest.mark.nightly
def test_names_of_older_and_newer_versions_of_torch(world: World) -> None:
    wanted = [[1.0, 1.0, 2.0, 2.0]] * 2 + [[3.0]] * 2 + [[1.0, 2.0]] * 2
    assert world.all_within(LIMIT, use_names_of_other_versions) == [wanted] * 2
    assert world.all_within(LIMIT, use_names_under_a_mode) == [wanted] * 2


def use_names_under_a_mode() -> list[Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode():
        return use_names_of_other_versions()
