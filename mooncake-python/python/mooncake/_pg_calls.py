"""Calls that torch makes on a process group and on its backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import ReduceOp

from mooncake import _mooncake
from mooncake._pg_dispatch import check_tensor
from mooncake._pg_work import MooncakeWork, _span, _Staging

# Numbers of the operators, by their hash, which is the fastest way to tell them apart in torch, and
# of the element types.
_OPERATORS = {
    hash(getattr(ReduceOp, name)): number
    for number, name in enumerate(["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
    if hasattr(ReduceOp, name)
}
_AVG = _OPERATORS[hash(ReduceOp.AVG)]
_TYPES = (
    "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 bool float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex64 complex128"
)
_DTYPES = {getattr(torch, name): number for number, name in enumerate(_TYPES.split()) if hasattr(torch, name)}


# Types in which integers are averaged, because a sum may not fit into their own type. The sum of 64
# ranks fits into these.
_WIDER = {
    getattr(torch, name): wide
    for wide, names in ((torch.int32, "int8 uint8 int16 uint16"), (torch.int64, "int32 uint32"))
    for name in names.split()
    if hasattr(torch, name)
}


def _operator(options: Any) -> int:
    """Returns the number of the operator in the options, or of the operator itself."""
    wanted = ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
    number = _OPERATORS.get(hash(wanted))
    if number is None:
        kind = getattr(wanted, "op", wanted)
        raise RuntimeError(f"cannot reduce: operator is not supported. op={getattr(kind, 'name', kind)}")
    return number


def _reducing(tensor: Any, options: Any) -> tuple[tuple[int, int], Any]:
    """Returns the numbers of the element type and of the operator. Also returns the type to which
    the tensors are converted for the reduction, or `None`.
    """
    operator = _operator(options)
    wide = _WIDER.get(tensor.dtype) if operator == _AVG else None
    number = _DTYPES.get(wide or tensor.dtype)
    if number is None:
        # The reason may be another one.
        check_tensor(tensor)
        raise RuntimeError(f"cannot reduce: element type is not supported. dtype={tensor.dtype}")
    return (number, operator), wide


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


def _count_pieces(whole: int, piece: int, capacity: int) -> int:
    """Returns the number of pieces in a tensor that has one per slot, by their lengths in bytes.
    The tensor may lack those of the last slots, for ranks that have failed, and have more, for
    ranks that may join.
    """
    if whole > piece * capacity or (piece and whole % piece):
        raise RuntimeError(
            "cannot start operation: the tensor needs a piece per rank. "
            f"bytes={whole} piece={piece} max_ranks={capacity}"
        )
    return whole // piece if piece else capacity


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
        self,
        operations: Sequence[_mooncake.GroupOperation],
        results: list[Any],
        staging: _Staging,
        is_p2p: bool = False,
        pieces: int | None = None,
    ) -> MooncakeWork:
        """Returns the work of these operations; the input has `pieces` for the first slots only."""
        check = None if pieces is None else partial(self._missing_pieces, operations, pieces, self._extent())
        return MooncakeWork(operations, results, staging, self._capacity, self._mirror.copies, is_p2p, check)

    def _missing_pieces(
        self, operations: Sequence[_mooncake.GroupOperation], pieces: int, extent: int
    ) -> RuntimeError | None:
        """Returns an exception if a rank that takes part has no piece in the input."""
        failed = 0
        for operation in operations:
            failed |= operation.failed()
        active = self._mirror.host.view(-1)
        missing = [slot for slot in range(pieces, extent) if active[slot].item() and not failed >> slot & 1]
        if not missing:
            return None
        return RuntimeError(f"cannot finish operation: the input lacks the pieces of ranks. ranks={missing} pieces={pieces}")

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
        tensor, staging = _one(tensors), _Staging()
        reducing, wide = _reducing(tensor, opts)
        plain = staging.output(tensor, wide)
        operation = self._comm.all_reduce(_span(plain), reducing, plain, _waits(opts))
        return self._work([operation], [tensor], staging)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> MooncakeWork:
        staging, prepared, operations = _Staging(), [], []
        for tensor in tensors:
            reducing, wide = _reducing(tensor, opts)
            prepared.append((reducing, staging.output(tensor, wide)))
        for index, (reducing, plain) in enumerate(prepared, 1):
            waits = index == len(prepared) and _waits(opts)
            operations.append(self._comm.all_reduce(_span(plain), reducing, plain, waits))
        return self._work(operations, list(tensors), staging)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> MooncakeWork:
        tensor, staging = _one(tensors), _Staging()
        reducing, wide = _reducing(tensor, op if isinstance(opts, int) else opts)
        plain = staging.output(tensor, wide)
        operation = self._comm.reduce(_span(plain), reducing, _root(opts), plain, _waits(opts))
        return self._work([operation], [tensor], staging)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MooncakeWork:
        output, staging = _one(outputs), _Staging()
        reducing, wide = _reducing(output, opts)
        pieces = self._checked(_one(inputs, "list"), output)
        spans = [_span(staging.input(piece, wide)) for piece in pieces]
        plain = staging.output(output, wide)
        operation = self._comm.reduce_scatter(spans, _span(plain), reducing, staging.keep, _waits(opts))
        return self._work([operation], [output], staging)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> MooncakeWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MooncakeWork:
        staging, prepared, operations = _Staging(), [], []
        least = self._capacity
        for output, source in zip(outputs, inputs, strict=True):
            _alike([source], output, same_length=False)
            reducing, wide = _reducing(output, opts)
            whole, plain = staging.input(source, wide), staging.output(output, wide)
            inputs_span, span = _span(whole), _span(plain)
            # The input may have pieces for the ranks that are left only.
            least = min(least, _count_pieces(inputs_span[1], span[1], self._capacity))
            prepared.append((reducing, (*inputs_span, span[1]), span, (whole, plain)))
        for index, (reducing, pieces, span, keep) in enumerate(prepared, 1):
            waits = index == len(prepared) and _waits(opts)
            operations.append(self._comm.reduce_scatter(pieces, span, reducing, keep, waits))
        return self._work(operations, list(outputs), staging, pieces=least if least < self._capacity else None)

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
        staging, prepared, operations = _Staging(), [], []
        for of_one, source in zip(outputs, inputs, strict=True):
            plain = staging.input(source)
            prepared.append((plain, [staging.output(one) for one in self._checked(of_one, source)]))
        for index, (plain, results) in enumerate(prepared, 1):
            spans, waits = [_span(one) for one in results], index == len(prepared) and _waits(opts)
            operations.append(self._comm.all_gather(_span(plain), spans, (plain, results), waits))
        return self._work(operations, [one for of_one in outputs for one in of_one], staging)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> MooncakeWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MooncakeWork:
        staging, prepared, operations = _Staging(), [], []
        for output, source in zip(outputs, inputs, strict=True):
            _alike([output], source, same_length=False)
            plain, whole = staging.input(source), staging.output(output)
            span, outputs_span = _span(plain), _span(whole)
            # The output may have space for the ranks that are left only.
            _count_pieces(outputs_span[1], span[1], self._capacity)
            prepared.append((span, (*outputs_span, span[1]), (plain, whole)))
        for index, (span, pieces, keep) in enumerate(prepared, 1):
            waits = index == len(prepared) and _waits(opts)
            operations.append(self._comm.all_gather(span, pieces, keep, waits))
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
