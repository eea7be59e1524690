"""Messages of rows between the ranks of a group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mooncake import _mooncake
from mooncake._ep_memory import Memory
from mooncake._pg_calls import GroupCalls
from mooncake._pg_groups import _group


@dataclass(frozen=True)
class Message:
    """Rows of one rank for another: whole rows of two-dimensional, contiguous tensors of bytes,
    each named by its first row and the number of rows.
    """

    runs: Sequence[tuple[Any, int, int]]

    def spans(self) -> list[tuple[int, int]]:
        """Returns addresses and lengths of the rows."""
        found, address, width, last = [], 0, 0, None
        for rows, first, count in self.runs:
            if rows is not last:
                address, width, last = rows.data_ptr(), rows.size(1), rows
            found.append((address + first * width, count * width))
        return found

    def parts(self) -> list[Any]:
        return [rows[first : first + count] for rows, first, count in self.runs]


@dataclass(frozen=True)
class Received:
    """Messages that have come in."""

    # Rows of all messages.
    rows: Any
    # First row of each rank's message, and its length in bytes. `None` for a missing message.
    # A length beyond the space for the message tells that only its start is here.
    places: list[tuple[int, int] | None]


class GroupLink:
    """Messages over a group of `mooncake.pg`, by exchanges."""

    # Highest number of a link of each communicator.
    _numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __init__(self, calls: GroupCalls, ranks: int, memory: Memory) -> None:
        """Agrees on a number that no message of an earlier link has. Collective."""
        self._comm, self._ranks, self._memory = calls._comm, ranks, memory
        number = torch.tensor([self._numbers.get(self._comm, 0) + 1])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        calls.allreduce([number], options).wait()
        self._number = self._numbers[self._comm] = int(number)
        self._operations = 0
        # Two operations may be in progress, each on a buffer of its own.
        self._buffers = [2 * self._number, 2 * self._number + 1]
        self.close: Callable[[], None] = weakref.finalize(self, _end, self._comm, self._buffers)

    def exchange(
        self, messages: Sequence[Message], space: Sequence[int | None], width: int, seconds: float | None
    ) -> Callable[[], Received]:
        """Sends a message to each rank, and returns a call that waits for those of others. `space`
        has the largest number of rows of each rank's message, or `None` for a rank that is not
        waited for.
        """
        rows = self._memory.tensor((sum(one or 0 for one in space), width), torch.uint8, torch.device("cpu"))
        address, first, places, spans = rows.data_ptr(), 0, [], []
        for one in space:
            places.append(first)
            spans.append(None if one is None else (address + first * width, one * width))
            first += one or 0
        operation_number, self._operations = self._operations, self._operations + 1
        tag = (self._buffers[operation_number % 2], operation_number // 2, 0)
        outputs = [message.spans() for message in messages]
        operation = self._comm.exchange(tag, outputs, spans, seconds, (rows, messages))

        def receive() -> Received:
            operation.wait()
            error = operation.error()
            if error is not None:
                raise error
            found: list[tuple[int, int] | None] = [None] * self._ranks
            for rank, length in operation.received():
                found[rank] = (places[rank], length)
            return Received(rows, found)

        return receive


def _end(comm: _mooncake.GroupCommunicator, buffers: list[int]) -> None:
    for buffer in buffers:
        try:
            comm.end_exchanges(buffer)
        except RuntimeError:
            # The group has ended.
            return


class CollectiveLink:
    """Messages over a group of another backend, by `all_to_all_single`. Every rank has to answer,
    without a time limit.
    """

    def __init__(self, group: Any, memory: Memory) -> None:
        self._group, self._memory = group, memory
        try:
            group._get_backend(torch.device("cpu"))
            self._device = torch.device("cpu")
        except RuntimeError:
            self._device = torch.device("cuda", torch.cuda.current_device())

    def exchange(
        self, messages: Sequence[Message], space: Sequence[int | None], width: int, seconds: float | None
    ) -> Callable[[], Received]:
        """As `GroupLink.exchange`. All messages are here on return."""
        del seconds
        parts = [message.parts() for message in messages]
        sent = [sum(part.size(0) for part in of_one) for of_one in parts]
        lengths = torch.tensor([[count, width] for count in sent], device=self._device)
        theirs = torch.empty_like(lengths)
        dist.all_to_all_single(theirs, lengths, group=self._group)
        counts, widths = theirs.t().tolist()
        if set(widths) != {width}:
            raise RuntimeError(f"cannot exchange: ranks do not agree on the bytes of a row. here={width} ranks={widths}")
        whole = [part for of_one in parts for part in of_one]
        joined = torch.cat(whole) if whole else torch.empty((0, width), dtype=torch.uint8)
        rows = self._memory.tensor((sum(counts), width), torch.uint8, self._device)
        dist.all_to_all_single(rows, joined.to(self._device), counts, sent, group=self._group)
        places: list[tuple[int, int] | None] = []
        first = 0
        for one, count in zip(space, counts, strict=True):
            places.append(None if one is None else (first, count * width))
            first += count
        received = Received(rows.cpu(), places)
        return lambda: received

    def close(self) -> None:
        """Does nothing: messages do not outlive their call."""


Link = GroupLink | CollectiveLink


def link_of(group: Any, ranks: int, memory: Memory) -> Link:
    """Returns the link of a group. Collective."""
    calls = calls_of(group)
    return CollectiveLink(group, memory) if calls is None else GroupLink(calls, ranks, memory)


def calls_of(group: Any) -> GroupCalls | None:
    """Returns the calls of a group of `mooncake.pg`, or `None` for another group."""
    try:
        return _group(group)
    except RuntimeError:
        return None
