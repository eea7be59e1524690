"""Tensors, lengths and operators that a group refuses on every rank, with the right reason. The
group works afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist
from ranks import World
from torch import nn

# Seconds for one check.
LIMIT = 100


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as running:
        yield running


def reason(call: Callable[[], Any]) -> str:
    """Returns the text of the exception of a call, and checks that the group works afterwards."""
    try:
        call()
        text = "no exception"
    except RuntimeError as error:
        text = str(error)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()
    return text


def refuse_tensor(name: str) -> dict[str, str]:
    """Returns the reason of each call with a tensor of this kind."""
    make: dict[str, Callable[[], Any]] = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "compressed": lambda: torch.eye(3).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "meta": lambda: torch.zeros(4, device="meta"),
    }
    tensor, peer = make[name](), 1 - dist.get_rank()
    outputs = [make[name](), make[name]()]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, async": lambda: dist.all_reduce(tensor, async_op=True),
        "reduce": lambda: dist.reduce(tensor, 0),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "all_gather": lambda: dist.all_gather(outputs, tensor),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, outputs),
        "all_to_all": lambda: dist.all_to_all(outputs, [tensor, tensor]),
        "send": lambda: dist.send(tensor, peer),
        "recv": lambda: dist.recv(tensor, peer),
    }
    return {call: reason(run) for call, run in calls.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sparse", "cannot use tensor: it is sparse. layout=torch.sparse_coo"),
        ("compressed", "cannot use tensor: it is sparse. layout=torch.sparse_csr"),
        ("quantized", "cannot use tensor: it is quantized. dtype=torch.qint8"),
        ("meta", "cannot use tensor: its device has no memory that a group reads. device=meta"),
    ],
)
def test_tensors_without_dense_elements(world: World, name: str, text: str) -> None:
    for reasons in world.all_within(LIMIT, refuse_tensor, name):
        assert {call: one for call, one in reasons.items() if not one.startswith(text)} == {}


def refuse_under_a_mode() -> list[str]:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode():
        return [reason(lambda: dist.all_reduce(torch.eye(3).to_sparse()))]


def test_a_refusal_under_a_mode(world: World) -> None:
    for texts in world.all_within(LIMIT, refuse_under_a_mode):
        assert texts[0].startswith("cannot use tensor: it is sparse.")


def refuse_gradient() -> str:
    model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    return reason(lambda: model(torch.tensor([1, 2])).sum().backward())


def test_sparse_gradients(world: World) -> None:
    for text in world.all_within(LIMIT, refuse_gradient):
        assert text.startswith("cannot use tensor: it is sparse. layout=torch.sparse_coo")


def reduce_in_halves_of_bytes() -> list[str]:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return []
    tensor = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    copy = torch.full((4,), dist.get_rank() + 5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    texts = [
        reason(lambda: dist.all_reduce(tensor)),
        reason(lambda: dist.reduce(tensor, 0)),
        reason(lambda: dist.reduce_scatter_tensor(tensor[:2], tensor)),
    ]
    dist.broadcast(copy, 1)
    assert copy.view(torch.uint8).tolist() == [6] * 4
    return texts


def test_elements_of_less_than_a_byte_are_only_copied(world: World) -> None:
    for texts in world.all_within(LIMIT, reduce_in_halves_of_bytes):
        assert set(texts) <= {"cannot reduce: element type is not supported. dtype=torch.float4_e2m1fn_x2"}


def refuse_operator() -> str:
    return reason(lambda: dist.all_reduce(torch.ones(3), op=dist._make_nccl_premul_sum(2.0)))


def test_an_operator_of_nccl_only(world: World) -> None:
    texts = world.all_within(LIMIT, refuse_operator)
    assert texts == ["cannot reduce: operator is not supported. op=PREMUL_SUM"] * 2


def refuse_one_of_several() -> str:
    tensors = [torch.ones(3), torch.eye(3).to_sparse()]
    text = reason(lambda: dist.group.WORLD.allreduce_coalesced(tensors))
    assert tensors[0].tolist() == [1.0] * 3
    return text


def test_one_refused_tensor_stops_all_of_a_call(world: World) -> None:
    for text in world.all_within(LIMIT, refuse_one_of_several):
        assert text.startswith("cannot use tensor: it is sparse.")


def refuse_overlap() -> dict[str, str]:
    shared = torch.ones(1).expand(4)
    return {
        "all_reduce": reason(lambda: dist.all_reduce(shared)),
        "broadcast": reason(lambda: dist.broadcast(shared, 0)),
        "all_gather": reason(lambda: dist.all_gather([shared, torch.ones(4)], torch.ones(4))),
        "recv": reason(lambda: dist.recv(shared, 1 - dist.get_rank())),
    }


def test_results_whose_elements_share_memory(world: World) -> None:
    for reasons in world.all_within(LIMIT, refuse_overlap):
        text = "cannot use tensor: several elements of a result have the same memory. shape=(4,) stride=(0,)"
        assert {call: one for call, one in reasons.items() if not one.startswith(text)} == {}


def read_overlap() -> list[float]:
    output = torch.zeros(8)
    dist.all_gather_into_tensor(output, torch.full((1,), dist.get_rank() + 1.0).expand(4))
    return output.tolist()


def test_an_input_whose_elements_share_memory(world: World) -> None:
    assert world.all_within(LIMIT, read_overlap) == [[1.0] * 4 + [2.0] * 4] * 2


def refuse_lengths() -> list[str]:
    calls: list[Callable[[], Any]] = []
    for length in (1, 3, 5, 7, 9, 12):
        calls += [
            lambda length=length: dist.all_gather_into_tensor(torch.zeros(length), torch.ones(3)),
            lambda length=length: dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(length)),
        ]
    return [reason(call) for call in calls]


def test_lengths_that_do_not_fit(world: World) -> None:
    for texts in world.all_within(LIMIT, refuse_lengths):
        assert all(text.startswith("cannot ") for text in texts), texts
        # A piece for one rank of two. The other one might have failed, which the operation finds.
        late = texts[2:4]
        assert late[0].startswith("cannot finish collective") and "ranks=[1] pieces=1" in late[1]
        assert all("needs a piece per rank" in text for text in texts[:2] + texts[4:])


def average(dtype: Any) -> list[int]:
    information = torch.iinfo(dtype)
    rank = dist.get_rank()
    pairs = [(information.max, information.max), (information.min, information.min), (information.max, information.max - 2)]
    mine = [pair[rank] for pair in pairs]
    tensor, halves = torch.tensor(mine, dtype=dtype), torch.tensor(mine + mine, dtype=dtype)
    output = torch.zeros(3, dtype=dtype)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(output, halves, op=dist.ReduceOp.AVG)
    assert output.tolist() == tensor.tolist()
    return [number - information.max if number > 0 else number - information.min for number in tensor.tolist()]


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32"])
def test_averages_of_integers_do_not_wrap(world: World, name: str) -> None:
    dtype = getattr(torch, name)
    assert world.all_within(LIMIT, average, dtype) == [[0, 0, -1]] * 2


def split() -> list[str]:
    texts = []
    for call in (
        lambda: dist.split_group(None, [[0], [1]]),
        lambda: dist.group.WORLD.split_group([dist.get_rank()]),
    ):
        try:
            call()
            texts.append("no exception")
        except RecursionError:
            texts.append("RecursionError")
        except (RuntimeError, NotImplementedError) as error:
            texts.append(str(error))
    return texts


@pytest.mark.skipif(not hasattr(dist, "split_group"), reason="this torch does not split groups")
def test_a_group_is_not_split(world: World) -> None:
    for texts in world.all_within(LIMIT, split):
        assert all("split" in text and text != "RecursionError" for text in texts), texts
