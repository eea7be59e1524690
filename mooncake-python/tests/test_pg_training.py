"""Training with torch's wrappers, beside gloo: DDP, FSDP2, functional collectives and DTensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World, has_fsdp2
from torch import nn

STEPS = 200


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as running:
        yield running


def network() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4))


def train(model: Any) -> list[float]:
    """Returns the losses of a number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(8, 16, generator=random)
        loss = (model(batch) - batch[:, :4].tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_ddp(hook: bool) -> tuple[list[float], list[float]]:
    def losses(group: Any) -> list[float]:
        model = nn.parallel.DistributedDataParallel(network(), process_group=group, broadcast_buffers=True)
        if hook:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            model.register_comm_hook(group, bf16_compress_hook)
        return train(model)

    return losses(dist.group.WORLD), losses(dist.new_group(backend="gloo"))


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "comm hook"])
def test_ddp_has_the_losses_of_gloo(world: World, hook: bool) -> None:
    for ours, theirs in world.all(train_ddp, hook):
        assert len(ours) == STEPS and ours[-1] < ours[0] / 2
        # Two ranks: the order of a sum makes no difference.
        assert ours == theirs


def train_fsdp() -> tuple[list[float], list[float]]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def losses(group: Any) -> list[float]:
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return train(model)

    return losses(dist.group.WORLD), losses(dist.new_group(backend="gloo"))


@pytest.mark.skipif(not has_fsdp2(), reason="FSDP2 of this torch is for GPUs only")
def test_fsdp2_has_the_losses_of_gloo(world: World) -> None:
    for ours, theirs in world.all(train_fsdp):
        assert len(ours) == STEPS and ours[-1] < ours[0] / 2
        assert ours == theirs


def train_fsdp1() -> tuple[list[float], list[float]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def losses(group: Any) -> list[float]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        return train(FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu")))

    return losses(dist.group.WORLD), losses(dist.new_group(backend="gloo"))


@pytest.mark.nightly
def test_fsdp1_has_the_losses_of_gloo(world: World) -> None:
    for ours, theirs in world.all(train_fsdp1):
        assert len(ours) == STEPS and ours[-1] < ours[0] / 2
        assert ours == theirs


def functional() -> dict[str, Any]:
    import torch.distributed._functional_collectives as functional

    rank, group = dist.get_rank(), dist.group.WORLD
    tensor = torch.arange(4.0) + rank
    results = {
        "all_reduce": functional.all_reduce(tensor, "sum", group),
        "all_gather": functional.all_gather_tensor(tensor, 0, group),
        "reduce_scatter": functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        "all_to_all": functional.all_to_all_single(tensor, None, None, group),
        "broadcast": functional.broadcast(tensor, 1, group),
        "coalesced": torch.cat(functional.all_reduce_coalesced([tensor, tensor * 2], "sum", group)),
        "gathered": torch.cat(functional.all_gather_into_tensor_coalesced([tensor, tensor * 2], group)),
        "scattered": torch.cat(functional.reduce_scatter_tensor_coalesced([tensor, tensor * 2], "sum", [0, 0], group)),
    }
    return {name: (value.wait() if hasattr(value, "wait") else value).tolist() for name, value in results.items()}


def test_functional_collectives(world: World) -> None:
    for rank, results in enumerate(world.all(functional)):
        assert results["all_reduce"] == [1.0, 3.0, 5.0, 7.0]
        assert results["all_gather"] == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
        assert results["reduce_scatter"] == [[1.0, 3.0], [5.0, 7.0]][rank]
        assert results["all_to_all"] == [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank]
        assert results["broadcast"] == [1.0, 2.0, 3.0, 4.0]
        assert results["coalesced"] == [1.0, 3.0, 5.0, 7.0, 2.0, 6.0, 10.0, 14.0]
        assert results["gathered"] == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, 0.0, 2.0, 4.0, 6.0, 2.0, 4.0, 6.0, 8.0]
        assert results["scattered"] == [[1.0, 3.0, 2.0, 6.0], [5.0, 7.0, 10.0, 14.0]][rank]


def distributed_tensors() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    left, right = torch.randn(8, 6), torch.randn(6, 4)
    rows = distribute_tensor(left, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(right, mesh, [Shard(0)])
    whole = product.redistribute(mesh, [Replicate()]).to_local()
    return [rows.to_local().shape[0], torch.allclose(whole, left @ right, atol=1e-5), columns.full_tensor().equal(left)]


def test_distributed_tensors(world: World) -> None:
    assert world.all(distributed_tensors) == [[4, True, True]] * 2


def futures() -> list[Any]:
    import threading

    tensor = torch.ones(100_000)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    seen = threading.Event()
    then = future.then(lambda done: (seen.set(), done.value()[0][0].item())[1])
    return [then.wait(), seen.is_set(), future.value()[0].data_ptr() == tensor.data_ptr()]


def test_futures(world: World) -> None:
    assert world.all(futures) == [[2.0, True, True]] * 2
