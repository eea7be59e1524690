"""Every call that torch makes on a process group, with every element type, beside gloo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World, largest_world

SIZES = range(1, largest_world() + 1)
# Elements of a tensor: in a message, and in staging memory.
LENGTHS = [1, 24, 40_000]
TYPES = (
    "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 bool float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex64 complex128"
).split()
DTYPES = [getattr(torch, name) for name in TYPES if hasattr(torch, name)]


@pytest.fixture(scope="module", params=SIZES, ids=[f"ranks{size}" for size in SIZES])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param) as running:
        running.all(make_gloo)
        yield running


GLOO: Any = None


def make_gloo() -> None:
    global GLOO
    GLOO = dist.new_group(backend="gloo")


def values(dtype: Any, length: int, rank: int, salt: int = 0) -> Any:
    """Returns small whole numbers, whose sums and products are exact in most types."""
    random = torch.Generator().manual_seed(rank * 7919 + length * 31 + salt)
    return torch.randint(0, 3, (length,), generator=random).to(dtype)


def zeros(*shape: int, dtype: Any) -> Any:
    """Returns zeros of any type. Older versions of torch convert to some types that they cannot
    fill.
    """
    return torch.zeros(*shape).to(dtype)


def same(got: Any, wanted: Any) -> bool:
    return got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(raw(got), raw(wanted))


def raw(tensor: Any) -> Any:
    """Returns the bytes of a tensor."""
    return zeros(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def world_size() -> int:
    return dist.get_world_size()


def each_of(dtype: Any, length: int, salt: int = 0) -> list[Any]:
    return [values(dtype, length, rank, salt) for rank in range(world_size())]


def own(dtype: Any, length: int, salt: int = 0) -> Any:
    return values(dtype, length, dist.get_rank(), salt)


def reduced(inputs: list[Any], name: str) -> Any:
    """Returns the reduction of these tensors, in a wide type."""
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result = inputs[0].to(wide)
    for one in inputs[1:]:
        one = one.to(wide)
        result = {
            "SUM": lambda a, b: a + b,
            "AVG": lambda a, b: a + b,
            "PRODUCT": lambda a, b: a * b,
            "MIN": lambda a, b: torch.minimum(a, b),
            "MAX": lambda a, b: torch.maximum(a, b),
            "BAND": lambda a, b: a & b,
            "BOR": lambda a, b: a | b,
            "BXOR": lambda a, b: a ^ b,
        }[name](result, one)
    if name == "AVG":
        count = len(inputs)
        if dtype.is_complex:
            result = torch.view_as_complex(torch.view_as_real(result) / count)
        elif dtype.is_floating_point:
            result = result / count
        else:
            result = result.div(count, rounding_mode="trunc")
    if dtype == torch.bool:
        return result != 0
    return result.to(dtype)


def operators(dtype: Any) -> list[str]:
    """Returns the operators that have a meaning on an element type."""
    if dtype == torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX"]
    if dtype.is_complex:
        return ["SUM", "AVG"]
    arithmetic = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
    return arithmetic if dtype.is_floating_point else [*arithmetic, "BAND", "BOR", "BXOR"]


# Name of a result that gloo does not promise.
UNCHANGED = "tensor of another rank than the root"

# Each check is carried out in all ranks. It yields a name, the result, and what it should be.
Check = Iterator[tuple[str, Any, Any]]


def check_all_reduce(dtype: Any, length: int) -> Check:
    for name in operators(dtype):
        tensor = own(dtype, length)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        yield name, tensor, reduced(each_of(dtype, length), name)


def check_reduce(dtype: Any, length: int) -> Check:
    for root in {0, world_size() - 1}:
        tensor = own(dtype, length)
        dist.reduce(tensor, root)
        is_root = dist.get_rank() == root
        if is_root:
            yield f"root {root}", tensor, reduced(each_of(dtype, length), "SUM")
        else:
            yield UNCHANGED, tensor, own(dtype, length)


def check_broadcast(dtype: Any, length: int) -> Check:
    for root in range(world_size()):
        tensor = own(dtype, length)
        dist.broadcast(tensor, root)
        yield f"root {root}", tensor, values(dtype, length, root)


def check_all_gather(dtype: Any, length: int) -> Check:
    outputs = [zeros(length, dtype=dtype) for _ in range(world_size())]
    dist.all_gather(outputs, own(dtype, length))
    yield "list", torch.stack(outputs), torch.stack(each_of(dtype, length))


def check_all_gather_into_tensor(dtype: Any, length: int) -> Check:
    whole = zeros(world_size() * length, dtype=dtype)
    dist.all_gather_into_tensor(whole, own(dtype, length))
    yield "flat", whole, torch.cat(each_of(dtype, length))
    stacked = zeros(world_size(), length, dtype=dtype)
    dist.all_gather_into_tensor(stacked, own(dtype, length))
    yield "stacked", stacked, torch.stack(each_of(dtype, length))


def check_all_gather_coalesced(dtype: Any, length: int) -> Check:
    outputs = [zeros(world_size() * length, dtype=dtype) for _ in range(2)]
    with dist._coalescing_manager():
        for salt, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, own(dtype, length, salt))
    for salt, output in enumerate(outputs):
        yield f"{salt}", output, torch.cat(each_of(dtype, length, salt))


def check_reduce_scatter(dtype: Any, length: int) -> Check:
    # The input of rank r for rank p has the salt p.
    for name in operators(dtype):
        output = zeros(length, dtype=dtype)
        inputs = [own(dtype, length, to) for to in range(world_size())]
        dist.reduce_scatter(output, inputs, op=getattr(dist.ReduceOp, name))
        yield name, output, reduced(each_of(dtype, length, dist.get_rank()), name)


def check_reduce_scatter_tensor(dtype: Any, length: int) -> Check:
    output = zeros(length, dtype=dtype)
    dist.reduce_scatter_tensor(output, torch.cat([own(dtype, length, to) for to in range(world_size())]))
    yield "flat", output, reduced(each_of(dtype, length, dist.get_rank()), "SUM")


def check_reduce_scatter_coalesced(dtype: Any, length: int) -> Check:
    outputs = [zeros(length, dtype=dtype) for _ in range(2)]
    with dist._coalescing_manager():
        for salt, output in enumerate(outputs):
            inputs = torch.cat([own(dtype, length, to + 10 * salt) for to in range(world_size())])
            dist.reduce_scatter_tensor(output, inputs)
    for salt, output in enumerate(outputs):
        yield f"{salt}", output, reduced(each_of(dtype, length, dist.get_rank() + 10 * salt), "SUM")


def check_all_reduce_coalesced(dtype: Any, length: int) -> Check:
    tensors = [own(dtype, length, salt) for salt in range(3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for salt, tensor in enumerate(tensors):
        yield f"{salt}", tensor, reduced(each_of(dtype, length, salt), "SUM")


def check_all_to_all(dtype: Any, length: int) -> Check:
    outputs = [zeros(length, dtype=dtype) for _ in range(world_size())]
    dist.all_to_all(outputs, [own(dtype, length, to) for to in range(world_size())])
    yield "list", torch.stack(outputs), torch.stack(each_of(dtype, length, dist.get_rank()))


def check_all_to_all_single(dtype: Any, length: int) -> Check:
    output = zeros(world_size() * length, dtype=dtype)
    dist.all_to_all_single(output, torch.cat([own(dtype, length, to) for to in range(world_size())]))
    yield "even", output, torch.cat(each_of(dtype, length, dist.get_rank()))
    # Rank r sends r + p rows of two to rank p.
    rank, ranks = dist.get_rank(), range(world_size())
    given = torch.cat([own(dtype, 2 * (rank + to), to).reshape(-1, 2) for to in ranks])
    output = zeros(sum(rank + source for source in ranks), 2, dtype=dtype)
    dist.all_to_all_single(output, given, [source + rank for source in ranks], [rank + to for to in ranks])
    wanted = torch.cat([values(dtype, 2 * (source + rank), source, rank).reshape(-1, 2) for source in ranks])
    yield "uneven", output, wanted


def check_gather(dtype: Any, length: int) -> Check:
    for root in {0, world_size() - 1}:
        is_root = dist.get_rank() == root
        outputs = [zeros(length, dtype=dtype) for _ in range(world_size())] if is_root else None
        dist.gather(own(dtype, length), outputs, dst=root)
        if outputs is not None:
            yield f"root {root}", torch.stack(outputs), torch.stack(each_of(dtype, length))


def check_scatter(dtype: Any, length: int) -> Check:
    for root in {0, world_size() - 1}:
        output = zeros(length, dtype=dtype)
        inputs = [values(dtype, length, root, to) for to in range(world_size())]
        dist.scatter(output, inputs if dist.get_rank() == root else None, src=root)
        yield f"root {root}", output, values(dtype, length, root, dist.get_rank())


def check_ring(dtype: Any, length: int) -> Check:
    rank, size = dist.get_rank(), world_size()
    if size == 1:
        return
    before, after = (rank - 1) % size, (rank + 1) % size
    tensor, output = own(dtype, length), zeros(length, dtype=dtype)
    works = [dist.isend(tensor, after), dist.irecv(output, before)]
    for work in works:
        work.wait()
    yield "isend and irecv", output, values(dtype, length, before)
    output = zeros(length, dtype=dtype)
    operations = [dist.P2POp(dist.isend, tensor, before), dist.P2POp(dist.irecv, output, after)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    yield "batch", output, values(dtype, length, after)
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            output = zeros(length, dtype=dtype)
            source = dist.recv(output)
            sources.add(source)
            yield f"from any: {source}", output, values(dtype, length, source)
        yield "all sources", torch.tensor(sorted(sources)), torch.arange(1, size)
    else:
        dist.send(tensor, 0)
    dist.barrier()


def check_scattered_memory(dtype: Any, length: int) -> Check:
    """Tensors with gaps between their elements."""
    room = zeros(length, 2, dtype=dtype)
    tensor = room[:, 0]
    tensor.copy_(own(dtype, length))
    dist.all_reduce(tensor)
    yield "all_reduce", tensor, reduced(each_of(dtype, length), "SUM")
    yield "gap", room[:, 1], zeros(length, dtype=dtype)
    room = zeros(world_size(), length, 2, dtype=dtype)
    dist.all_gather(list(room[:, :, 1].unbind()), own(dtype, 2 * length).reshape(length, 2)[:, 0])
    yield "all_gather", room[:, :, 1], torch.stack([one.reshape(length, 2)[:, 0] for one in each_of(dtype, 2 * length)])
    room = zeros(length, 2, dtype=dtype)
    room[:, 0] = own(dtype, length)
    work = dist.broadcast(room[:, 0], 0, async_op=True)
    future = work.get_future()
    future.wait()
    yield "broadcast", room[:, 0], values(dtype, length, 0)
    if world_size() > 1:
        room = zeros(length, 2, dtype=dtype)
        if dist.get_rank() == 0:
            room[:, 1] = own(dtype, length)
            dist.send(room[:, 1], 1)
        elif dist.get_rank() == 1:
            dist.recv(room[:, 0], 0)
            yield "recv", room[:, 0], values(dtype, length, 0)


def check_gather_single(dtype: Any, length: int) -> Check:
    call = getattr(dist, "gather_single", None)
    if call is None:
        return
    is_root = dist.get_rank() == 0
    whole = zeros(world_size() * length, dtype=dtype) if is_root else None
    call(own(dtype, length), whole, dst=0)
    if whole is not None:
        yield "flat", whole, torch.cat(each_of(dtype, length))


CHECKS = sorted((one for name, one in list(globals().items()) if name.startswith("check_")), key=lambda one: one.__name__)


def carry_out(check: Callable[[Any, int], Check]) -> list[str]:
    faults = []
    for dtype in DTYPES:
        for length in LENGTHS:
            for name, got, wanted in check(dtype, length):
                if not same(got, wanted):
                    faults.append(f"{check.__name__} {name} {dtype} {length}: {got} instead of {wanted}"[:500])
    return faults


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_call(world: World, check: Callable[[Any, int], Check]) -> None:
    faults = [fault for of_rank in world.all(carry_out, check) for fault in of_rank]
    assert not faults, "\n".join(faults[:20])


def gloo_lacks(error: Exception) -> bool:
    """Returns whether an exception says that gloo lacks a call, as in older versions of torch."""
    return "gloo does not support" in str(error).lower()


def carry_out_with_gloo(check: Callable[[Any, int], Check]) -> tuple[int | None, list[str]]:
    """Returns the number of results that gloo has, and those that are others than expected here.
    The number is `None` for a call that gloo lacks.
    """
    count, faults = 0, []
    for dtype in DTYPES:
        try:
            for name, got, wanted in check(dtype, 24):
                if name == UNCHANGED:
                    continue
                count += 1
                is_exact = not (dtype.is_complex or dtype.is_floating_point)
                if not same(got, wanted) and (is_exact or not torch.allclose(got.cdouble(), wanted.cdouble(), rtol=1e-5)):
                    faults.append(f"{check.__name__} {name} {dtype}: {got} instead of {wanted}"[:500])
        except (RuntimeError, ValueError, TypeError) as error:
            if gloo_lacks(error):
                return None, faults
            # All ranks call what gloo does not have.
            continue
    return count, faults


def test_gloo_has_the_results_that_are_expected_here() -> None:
    """The same calls over gloo have the same results, for the element types that gloo supports."""
    with World(3, backend="gloo") as gloo:
        counts = {}
        # Gloo uses scattered elements as if they followed each other, and has no gather_single.
        for check in (one for one in CHECKS if one not in (check_scattered_memory, check_gather_single)):
            results = gloo.all(carry_out_with_gloo, check)
            faults = [fault for _, of_rank in results for fault in of_rank]
            assert not faults, "\n".join(faults[:20])
            if all(count is not None for count, _ in results):
                counts[check.__name__] = max(count for count, _ in results)
    print(counts)
    assert len(counts) >= len(CHECKS) - 4, counts
    assert min(counts.values()) > 0, counts


def beside_gloo(dtype: Any) -> list[str]:
    """Carries out calls on random numbers with both backends."""
    size, faults = world_size(), []
    random = torch.Generator().manual_seed(dist.get_rank())
    tensor = torch.randn(3000, generator=random).mul(20).to(dtype)

    def both(name: str, call: Callable[[Any], Any]) -> None:
        ours = call(None)
        try:
            theirs = call(GLOO)
        except RuntimeError as error:
            if gloo_lacks(error):
                return
            raise
        if not torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5):
            faults.append(f"{name} {dtype}: {ours} instead of {theirs}")

    def reduced_by(op: Any) -> Callable[[Any], Any]:
        def call(group: Any) -> Any:
            copy = tensor.clone()
            dist.all_reduce(copy, op=op, group=group)
            return copy

        return call

    def gathered(group: Any) -> Any:
        outputs = [torch.zeros_like(tensor) for _ in range(size)]
        dist.all_gather(outputs, tensor, group=group)
        return torch.cat(outputs)

    def scattered(group: Any) -> Any:
        output = zeros(3000 // size, dtype=dtype)
        dist.reduce_scatter(output, list(tensor[: 3000 // size * size].chunk(size)), group=group)
        return output

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        both(f"all_reduce {op}", reduced_by(op))
    both("all_gather", gathered)
    both("reduce_scatter", scattered)
    return faults


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "int8"])
def test_the_results_are_those_of_gloo(world: World, dtype: str) -> None:
    faults = [fault for of_rank in world.all(beside_gloo, getattr(torch, dtype)) for fault in of_rank]
    assert not faults, "\n".join(faults)


def objects() -> list[Any]:
    rank, size = dist.get_rank(), world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    sent = [("from", 0), [1, 2]] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0)
    collected: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * rank, collected, 0)
    received: list[Any] = [None]
    dist.scatter_object_list(received, [f"for {to}" for to in range(size)] if rank == 0 else None, 0)
    return [gathered, sent, collected, received]


def test_objects(world: World) -> None:
    for rank, (gathered, sent, collected, received) in enumerate(world.all(objects)):
        assert gathered == [{"rank": other, "text": "x" * other} for other in range(world.size)]
        assert sent == [("from", 0), [1, 2]] and received == [f"for {rank}"]
        assert collected == ([other**2 for other in range(world.size)] if rank == 0 else None)


def many_at_once() -> list[float]:
    """Starts more operations than can run, and waits for them in another order."""
    tensors = [torch.full((1000 * (index % 3) + 1,), float(index)) for index in range(64)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    return [tensor[-1].item() for tensor in tensors]


def test_operations_run_in_the_order_of_the_calls(world: World) -> None:
    assert world.all(many_at_once) == [[float(index * world.size) for index in range(64)]] * world.size


def drop_works() -> float:
    import gc

    for index in range(50):
        room = torch.ones(20_000 if index % 2 else 10, 2)
        dist.all_reduce(room[:, 0], async_op=True)
        dist.all_reduce(torch.ones(30_000), async_op=True)
    gc.collect()
    last = torch.ones(1)
    dist.all_reduce(last)
    return last.item()


def test_the_memory_of_a_dropped_operation_stays(world: World) -> None:
    assert world.all(drop_works) == [float(world.size)] * world.size


def wait_for_message() -> list[Any]:
    if dist.get_rank() > 1:
        return []
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.ones(1), 0)
        return []
    output = torch.zeros(1)
    work = dist.irecv(output, 1)
    early = [work.wait(timedelta(seconds=0.2)), work.is_completed(), work.is_success()]
    dist.send(torch.ones(1), 1)
    return [early, work.wait(timedelta(seconds=100)), work.is_success(), output.item()]


def test_a_wait_for_a_message_has_a_limit(world: World) -> None:
    if world.size == 1:
        pytest.skip("one rank has no partner")
    assert world.all(wait_for_message)[0] == [[False, False, False], True, True, 1.0]


def subgroups() -> list[Any]:
    rank, size = dist.get_rank(), world_size()
    groups = [dist.new_group(list(range(parity, size, 2)), backend="mooncake-cpu") for parity in (0, 1)]
    mine = groups[rank % 2]
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, group=mine)
    outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(mine))]
    dist.all_gather(outputs, torch.tensor([rank]), group=mine)
    root = torch.tensor([rank])
    dist.broadcast(root, rank % 2, group=mine)
    results = [tensor.item(), [one.item() for one in outputs], root.item(), dist.get_backend(mine)]
    dist.destroy_process_group(mine)
    return results


def test_subgroups(world: World) -> None:
    if world.size < 2:
        pytest.skip("one rank has no subgroups")
    for _ in range(2):
        for rank, (total, gathered, root, backend) in enumerate(world.all(subgroups)):
            members = list(range(rank % 2, world.size, 2))
            assert total == sum(member + 1 for member in members) and gathered == members and root == rank % 2
            assert backend == "mooncake-cpu"


def refusals() -> list[str]:
    size = world_size()
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather([torch.zeros(1)] * (size + 1), torch.zeros(1)),
        lambda: dist.group.WORLD.all_gather_single(torch.zeros(size, dtype=torch.int32), torch.zeros(1)),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex64), op=dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.zeros(2), op=dist.ReduceOp.BAND),
        lambda: dist.group.WORLD.alltoall([torch.zeros(1)] * (size + 1), [torch.zeros(1)] * size),
        lambda: dist.group.WORLD.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * (size + 1), [1] * size),
        lambda: dist.group.WORLD.all_to_all_single(torch.zeros(size), torch.zeros(size), [2] * size, [1] * size),
        lambda: dist.group.WORLD.allreduce([torch.zeros(1), torch.zeros(1)]),
        lambda: dist.group.WORLD.send([torch.zeros(1)], 63),
        lambda: dist.group.WORLD.broadcast([torch.zeros(1)], 64),
        lambda: dist.all_reduce(torch.zeros(2, 2).to_sparse()),
    ]
    refused = []
    for number, call in enumerate(calls):
        try:
            call()
        except (RuntimeError, ValueError, TypeError):
            continue
        refused.append(f"call {number} raises nothing")
    try:
        dist.group.WORLD.split_group([0])
        refused.append("split_group raises nothing")
    except NotImplementedError:
        pass
    # The group works afterwards.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return refused if tensor.item() == size else [*refused, "all_reduce"]


def test_calls_that_are_refused(world: World) -> None:
    assert world.all(refusals) == [[]] * world.size


def other_calls_on_each_rank() -> str:
    length = 10 + dist.get_rank()
    try:
        dist.all_reduce(torch.ones(length))
    except RuntimeError as error:
        return str(error)
    return ""


def test_different_calls_raise_on_every_rank(world: World) -> None:
    if world.size == 1:
        pytest.skip("one rank makes one call")
    assert all("same calls" in text for text in world.all(other_calls_on_each_rank))
    assert math.isclose(world.all(drop_works)[0], world.size)


def begin_again(port: int, number: int) -> int:
    from ranks import join_world

    from mooncake import pg

    rank, size = dist.get_rank(), world_size()
    dist.destroy_process_group()
    active = torch.full((size,), 7, dtype=torch.int32)
    join_world(rank, size, port, f"again{number}", "mooncake-cpu", {"active_ranks": active})
    assert pg.get_active_ranks(dist.group.WORLD).data_ptr() == active.data_ptr()
    tensor = torch.ones(1, dtype=torch.int32)
    dist.all_reduce(tensor)
    assert active.all() and active.max() == 1
    make_gloo()
    return tensor.item()


def test_destroy_and_begin_again(world: World) -> None:
    for number in range(3):
        assert world.all(begin_again, world.store.port, number) == [world.size] * world.size
