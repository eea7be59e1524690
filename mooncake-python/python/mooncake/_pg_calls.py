"""Calls that torch makes on a process group and on its backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from mooncake import _mooncake
from mooncake._pg_work import MooncakeWork, _span, _Staging

# Numbers of the operators and of the element types.
_OPERATORS = [
    (getattr(ReduceOp, name), number)
    for number, name in enumerate(["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
    if hasattr(ReduceOp, name)
]
_TYPES = (
    "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 bool float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex64 complex128"
)
_DTYPES = {getattr(torch, name): number for number, name in enumerate(_TYPES.split()) if hasattr(torch, name)}


def _operator(options: Any) -> int:
    """Returns the number of the operator in the options, or of the operator itself."""
    wanted = ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
    for known, number in _OPERATORS:
        if wanted == known:
            return number
    raise RuntimeError(f"cannot reduce: operator is not supported. op={wanted}")


def _reducing(tensor: Any, options: Any) -> tuple[int, int]:
    number = _DTYPES.get(tensor.dtype)
    if number is None:
        raise RuntimeError(f"cannot reduce: element type is not supported. dtype={tensor.dtype}")
    return number, _operator(options)


def _root(options: Any) -> int:
    if options is None or isinstance(options, int):
        return options or 0
    return int(options.rootRank) + int(getattr(options, "rootTensor", 0))


def _waits(options: Any) -> bool:
    """Returns whether the caller waits for the operation at once."""
    return getattr(options, "asyncOp", True) is False


def _one(tensors: Any, what: str = "tensor") -> Any:
    """Returns the only tensor, or list of tensors, of a call."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise RuntimeError(f"cannot start operation: it takes one {what} per rank. given={len(tensors)}")
    return tensors[0]


def _alike(tensors: Sequence[Any], like: Any, same_length: bool = True) -> None:
    for tensor in tensors:
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise RuntimeError(
                "cannot start operation: its tensors differ in type or device. "
                f"one={tensor.dtype},{tensor.device} other={like.dtype},{like.device}"
            )
        if same_length and tensor.numel() != like.numel():
            raise RuntimeError(
                f"cannot start operation: its tensors differ in length. one={tensor.numel()} other={like.numel()}"
            )


def _pieces(tensor: Any, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts a contiguous tensor into spans of these numbers of rows."""
    address, length = _span(tensor)
    rows = tensor.size(0) if tensor.dim() else 1
    if sum(sizes) != rows or min(sizes, default=0) < 0:
        raise RuntimeError(f"cannot start operation: the split sizes do not add up to the rows. rows={rows} sizes={sizes}")
    row = length // rows if rows else 0
    spans = []
    for size in sizes:
        spans.append((address, size * row))
        address += size * row
    return spans


class GroupCalls:
    """Calls of a process group, which the group and its backend share."""

    _comm: _mooncake.GroupCommunicator
    _capacity: int
    _declared: int
    _mirror: _Mirror

    def getBackendName(self) -> str:
        return "mooncake"

    def _extent(self) -> int:
        """Returns the number of slots of a list of tensors."""
        try:
            return self._comm.size()
        except RuntimeError:
            return self._declared

    def _work(
        self, operations: Sequence[_mooncake.GroupOperation], results: list[Any], staging: _Staging, is_p2p: bool = False
    ) -> MooncakeWork:
        return MooncakeWork(operations, results, staging, self._capacity, self._mirror.copies, is_p2p)

    def _checked(self, tensors: Sequence[Any], like: Any, same_length: bool = True) -> Sequence[Any]:
        """Returns the tensors of a list that has one per slot."""
        if len(tensors) != (extent := self._extent()):
            raise RuntimeError(
                f"cannot start operation: the list needs a tensor per rank. given={len(tensors)} ranks={extent}"
            )
        _alike(tensors, like, same_length)
        return tensors

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        return self._allreduce([_one(tensors)], opts)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> MooncakeWork:
        return self._allreduce(list(tensors), opts)

    def _allreduce(self, tensors: list[Any], opts: Any) -> MooncakeWork:
        staging, operations = _Staging(), []
        for tensor in tensors:
            reducing, plain = _reducing(tensor, opts), staging.output(tensor)
            waits = tensor is tensors[-1] and _waits(opts)
            operations.append(self._comm.all_reduce(_span(plain), reducing, plain, waits))
        return self._work(operations, tensors, staging)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> MooncakeWork:
        tensor, staging = _one(tensors), _Staging()
        plain = staging.output(tensor)
        reducing = _reducing(tensor, op if isinstance(opts, int) else opts)
        operation = self._comm.reduce(_span(plain), reducing, _root(opts), plain, _waits(opts))
        return self._work([operation], [tensor], staging)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        output, staging = _one(outputs), _Staging()
        pieces = self._checked(_one(inputs, "list"), output)
        spans = [_span(staging.input(piece)) for piece in pieces]
        plain = staging.output(output)
        reducing = _reducing(output, opts)
        operation = self._comm.reduce_scatter(spans, _span(plain), reducing, staging.keep, _waits(opts))
        return self._work([operation], [output], staging)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> MooncakeWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MooncakeWork:
        staging, operations = _Staging(), []
        for output, source in zip(outputs, inputs, strict=True):
            _alike([source], output, same_length=False)
            whole, plain = staging.input(source), staging.output(output)
            piece, reducing = _span(plain)[1], _reducing(output, opts)
            waits = output is outputs[-1] and _waits(opts)
            operations.append(
                self._comm.reduce_scatter((*_span(whole), piece), _span(plain), reducing, (whole, plain), waits)
            )
        return self._work(operations, list(outputs), staging)

    # Copies.

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        tensor, staging = _one(tensors), _Staging()
        plain = staging.output(tensor)
        operation = self._comm.broadcast(_span(plain), _root(opts), plain, _waits(opts))
        return self._work([operation], [tensor], staging)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        return self._allgather([_one(outputs, "list")], [_one(inputs)], opts)

    def allgather_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MooncakeWork:
        # `outputs` has a list per rank, with a tensor per input.
        return self._allgather([list(one) for one in zip(*outputs, strict=True)], list(inputs), opts)

    def _allgather(self, outputs: list[Any], inputs: list[Any], opts: Any) -> MooncakeWork:
        staging, operations = _Staging(), []
        for of_one, source in zip(outputs, inputs, strict=True):
            plain = staging.input(source)
            results = [staging.output(one) for one in self._checked(of_one, source)]
            spans = [_span(one) for one in results]
            waits = source is inputs[-1] and _waits(opts)
            operations.append(self._comm.all_gather(_span(plain), spans, (plain, results), waits))
        return self._work(operations, [one for of_one in outputs for one in of_one], staging)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> MooncakeWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MooncakeWork:
        staging, operations = _Staging(), []
        for output, source in zip(outputs, inputs, strict=True):
            # The output may have space for the ranks that are left only.
            _alike([output], source, same_length=False)
            plain, whole = staging.input(source), staging.output(output)
            piece, waits = _span(plain)[1], source is inputs[-1] and _waits(opts)
            operations.append(self._comm.all_gather(_span(plain), (*_span(whole), piece), (plain, whole), waits))
        return self._work(operations, list(outputs), staging)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        source, staging, root = _one(inputs), _Staging(), _root(opts)
        results = list(self._checked(_one(outputs, "list"), source)) if root == self._slot else []
        plain = staging.input(source)
        spans = [_span(staging.output(one)) for one in results] if root == self._slot else None
        operation = self._comm.gather(_span(plain), spans, root, staging.keep, _waits(opts))
        return self._work([operation], results, staging)

    def gather_single(self, output: Any, input: Any, opts: Any = None) -> MooncakeWork:
        staging, root = _Staging(), _root(opts)
        plain, is_root = staging.input(input), root == self._slot
        spans = None
        if is_root:
            _alike([output], input, same_length=False)
            spans = (*_span(staging.output(output)), _span(plain)[1])
        operation = self._comm.gather(_span(plain), spans, root, staging.keep, _waits(opts))
        return self._work([operation], [output] if is_root else [], staging)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        output, staging, root = _one(outputs), _Staging(), _root(opts)
        spans = None
        if root == self._slot:
            spans = [_span(staging.input(one)) for one in self._checked(_one(inputs, "list"), output)]
        plain = staging.output(output)
        operation = self._comm.scatter(spans, _span(plain), root, staging.keep, _waits(opts))
        return self._work([operation], [output], staging)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None, timeout: Any = None) -> MooncakeWork:
        staging = _Staging()
        if not inputs:
            raise RuntimeError("cannot start operation: the list has no tensor")
        for tensors in (inputs, outputs):
            self._checked(tensors, inputs[0], same_length=False)
        sources = [_span(staging.input(one)) for one in inputs]
        spans = [_span(staging.output(one)) for one in outputs]
        operation = self._comm.all_to_all(sources, spans, staging.keep, _waits(opts))
        return self._work([operation], list(outputs), staging)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> MooncakeWork:
        staging, extent = _Staging(), self._extent()
        _alike([output], input, same_length=False)
        source, result = staging.input(input), staging.output(output)
        spans: list[Any] = []
        for plain, sizes in ((source, input_split_sizes), (result, output_split_sizes)):
            if sizes:
                if len(sizes) != extent:
                    raise RuntimeError(
                        f"cannot start operation: it needs a split size per rank. given={len(sizes)} ranks={extent}"
                    )
                spans.append(_pieces(plain, sizes))
                continue
            if plain.numel() % extent:
                raise RuntimeError(
                    f"cannot start operation: the elements do not split evenly. elements={plain.numel()} ranks={extent}"
                )
            spans.append((*_span(plain), _span(plain)[1] // extent))
        operation = self._comm.all_to_all(spans[0], spans[1], staging.keep, _waits(opts))
        return self._work([operation], [output], staging)

    def barrier(self, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        return self._work([self._comm.barrier(_waits(opts))], [], _Staging())

    # Messages. Tags are ignored: messages of a pair match in the order of their calls.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> MooncakeWork:
        tensor, staging = _one(tensors), _Staging()
        plain = staging.input(tensor)
        operation = self._comm.send(_span(plain), dst, plain)
        return self._work([operation], [tensor], staging, is_p2p=True)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> MooncakeWork:
        return self._recv(_one(tensors), src)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MooncakeWork:
        return self._recv(_one(tensors), None)

    def _recv(self, tensor: Any, src: int | None) -> MooncakeWork:
        staging = _Staging()
        plain = staging.output(tensor)
        operation = self._comm.receive(_span(plain), src, plain)
        return self._work([operation], [tensor], staging, is_p2p=True)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    @property
    def _slot(self) -> int:
        raise NotImplementedError


class _Mirror:
    """Tensor that shows which ranks are active. On a GPU, it is copied from a tensor of the host
    that the native half writes.
    """

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        self.host = shown if shown.device.type == "cpu" else torch.zeros(shown.numel(), dtype=torch.int32)
        self.copies: Callable[[], None] | None = None if self.host is shown else self._copy

    def _copy(self) -> None:
        self.shown.view(-1).copy_(self.host)
