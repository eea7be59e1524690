"""Versions of torch: those that are refused, and what older and newer ones ask of a group."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="process groups need torch")

from test_pg_surface import ALONE, run

NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "version", [pytest.param("1.13.1+cu117", marks=NIGHTLY), "2.3.1", pytest.param("2.0.0a0+git1", marks=NIGHTLY)]
)
def test_an_old_torch_is_refused(version: str) -> None:
    code = f"""
import torch
torch.__version__ = {version!r}
for name in ("pg", "ep", "mooncake_ep_buffer"):
    try:
        __import__("mooncake." + name)
    except ImportError as error:
        print(error)
"""
    text = f"cannot import mooncake.pg: torch is too old. torch={version} oldest=2.4; pip install --upgrade torch"
    assert run(code).splitlines() == [text] * 3


@pytest.mark.parametrize(
    "version",
    ["2.4.0", pytest.param("2.10.0+cu130", marks=NIGHTLY), pytest.param("3.0.0", marks=NIGHTLY), "unknown"],
)
def test_other_versions_are_accepted(version: str) -> None:
    assert run(f"import torch; torch.__version__ = {version!r}; import mooncake.pg; print('done')") == "done"


def test_a_torch_without_distributed_is_refused() -> None:
    code = """
import torch.distributed
torch.distributed.is_available = lambda: False
try:
    import mooncake.pg
except ImportError as error:
    print(error)
"""
    assert run(code).startswith("cannot import mooncake.pg: torch is built without torch.distributed. torch=")


def test_a_torch_that_differs_is_named() -> None:
    code = """
from mooncake import _pg_groups
def refuse(group, devices, backend):
    raise TypeError("No constructor defined!")
kept = _pg_groups.MooncakeProcessGroup._register
_pg_groups.MooncakeProcessGroup._register = refuse
try:
    init()
except RuntimeError as error:
    print(error)
_pg_groups.MooncakeProcessGroup._register = kept
init()
print("done")
"""
    first, last = run(ALONE + code).splitlines()
    assert first.startswith("cannot create group: torch differs from the versions that mooncake.pg knows. torch=")
    assert " newest=" in first and last == "done"


def test_a_group_answers_what_torch_asks() -> None:
    code = """
init()
group = dist.group.WORLD
backend = group._get_backend(torch.device("cpu"))
assert isinstance(backend, pg.MooncakeBackend) and pg.get_active_ranks(backend) is pg.get_active_ranks(group)
for one in (group, backend):
    assert (one.rank(), one.size(), one.name(), one.getBackendName()) == (0, 1, "mooncake", "mooncake")
    # None may call itself without end.
    abilities = [name for name in dir(one) if name.lstrip("_").startswith("supports_")]
    assert not any(value for name in abilities if not callable(value := getattr(one, name))), abilities
assert backend.supports_splitting is False
assert not hasattr(backend, "options") or backend.options.backend == "mooncake"
backend.eager_connect_single_device(torch.device("cpu"))
assert [one.type for one in group._device_types] == ["cpu"]
assert group.group_name == dist.distributed_c10d._get_process_group_name(group)
try:
    group._get_backend(torch.device("meta"))
    raise SystemExit("a device without backend has one")
except RuntimeError:
    pass
part = dist.new_group([0])
assert part.group_name != group.group_name
for name in ("split_group", "monitored_barrier"):
    try:
        getattr(dist, name, lambda *_: 1 / 0)(*([None, [[0]]] if name == "split_group" else []))
        raise SystemExit(name + " raises nothing")
    except (RuntimeError, ValueError, ZeroDivisionError):
        pass
dist.destroy_process_group()
print("done")
"""
    assert run(ALONE + code) == "done"


def test_a_group_with_a_device() -> None:
    code = """
try:
    init(device_id=torch.device("cpu", 0))
except ValueError:
    # Older versions accept devices of accelerators only.
    init()
dist.all_reduce(torch.ones(1))
dist.new_group([0])
dist.destroy_process_group()
print("done")
"""
    assert run(ALONE + code) == "done"


@pytest.mark.nightly
def test_operations_that_torch_starts_from_its_own_code() -> None:
    code = """
import gc
import torch.distributed._functional_collectives as functional
from mooncake import _pg_torch
init()
group, tensor = dist.group.WORLD, torch.arange(4.0)
for call in (
    lambda: functional.all_reduce(tensor, "sum", group),
    lambda: functional.all_gather_tensor(tensor, 0, group),
    lambda: functional.reduce_scatter_tensor(tensor, "sum", 0, group),
    lambda: functional.all_to_all_single(tensor, None, None, group),
    lambda: functional.broadcast(tensor, 0, group),
):
    result = call()
    gc.collect()
    assert result.tolist() == tensor.tolist()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(tensor).sum().backward()
work = dist.all_reduce(tensor, async_op=True)
work.wait()
dist.barrier()
assert not _pg_torch._UNWAITED, _pg_torch._UNWAITED
print("done")
"""
    assert run(ALONE + code) == "done"
