"""Routes of tokens to the ranks of their experts, and positions of their rows.

Expert `e` is on rank `e // L`, with `L` experts per rank. A *pair* is a token and one of its
experts. Pairs are in the order of their experts, and those of one expert in the order of their
tokens. A token goes once to each rank that has any of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mooncake._ep_links import Message, Received

# Integers at the start of a message of tokens, and the number that is the first of them.
_HEADER = 16
_MAGIC = 0x3150454D
# Names of the numbers that all ranks have to agree on.
_AGREED = ("num_max_dispatch_tokens_per_rank", "hidden", "num_experts", "use_fp8")


@dataclass(frozen=True)
class Sizes:
    """Numbers on which all ranks agree."""

    ranks: int
    experts: int
    # Largest number of tokens of a rank.
    tokens: int
    hidden: int
    is_fp8: bool

    @property
    def local(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.ranks

    @property
    def width(self) -> int:
        """Bytes of a token: elements, and the scales of `fp8`."""
        return self.hidden + self.hidden // 32 if self.is_fp8 else 2 * self.hidden

    def front(self, pairs: int) -> int:
        """Returns the number of rows before the tokens of a message with that many pairs."""
        return -(-4 * (_HEADER + self.local + 2 * pairs) // self.width)

    def space(self, choices: int) -> int:
        """Returns the largest number of rows of a message, with that many experts per token."""
        return self.front(self.tokens * min(choices, self.local)) + self.tokens

    def agreed(self) -> list[int]:
        return [self.tokens, self.hidden, self.experts, int(self.is_fp8)]


class Routes:
    """Pairs of the tokens of this rank."""

    def __init__(self, topk: Any, ranks: int, experts: int) -> None:
        """Reads the experts of each token, on the host; -1 is none."""
        self.tokens, self.choices = topk.shape
        self.ranks, self.experts = ranks, experts
        flat = topk.reshape(-1)
        if flat.numel():
            least, most = flat.aminmax()
            if least < -1 or most >= experts:
                raise AssertionError(
                    "cannot route tokens: an expert is out of range. "
                    f"least={int(least)} greatest={int(most)} num_experts={experts}"
                )
        chosen = (flat >= 0).nonzero().view(-1)
        expert, order = flat[chosen].sort(stable=True)
        # Choice of each pair, as an index into the flat list.
        self.choice = chosen[order]
        self.token = self.choice // max(self.choices, 1)
        again = (expert[1:] == expert[:-1]) & (self.token[1:] == self.token[:-1])
        if again.any():
            raise AssertionError("cannot route tokens: a token names an expert twice")
        # Number of pairs of each rank and local expert.
        self.counts = torch.bincount(expert, minlength=experts).view(ranks, experts // ranks)
        self.pairs = self.counts.sum(1).tolist()
        self._owner = expert // (experts // ranks)

    @cached_property
    def _goes(self) -> Any:
        """Returns for each rank and token whether the rank gets the token."""
        goes = torch.zeros((self.ranks, self.tokens), dtype=torch.bool)
        goes[self._owner, self.token] = True
        return goes

    def messages(self, rows: Any, sizes: Sizes, is_active: Sequence[bool]) -> list[Message]:
        """Returns a message for each rank, with its tokens of `rows`. One for a rank that is not
        active tells so.
        """
        goes = self._goes
        place = (goes.cumsum(1) - 1)[self._owner, self.token]
        side = torch.zeros((self.ranks, 1), dtype=torch.int8)
        edges = torch.diff(goes.to(torch.int8), prepend=side, append=side)
        starts, ends = (edges == 1).nonzero(), (edges == -1).nonzero()[:, 1]
        runs: list[list[tuple[Any, int, int]]] = [[] for _ in range(self.ranks)]
        for (rank, start), end in zip(starts.tolist(), ends.tolist(), strict=True):
            runs[rank].append((rows, start, end - start))
        pairs = torch.stack((place, self.token)).to(torch.int32).split(self.pairs, dim=1)
        given = goes.sum(1).tolist()
        messages = []
        for rank in range(self.ranks):
            number = self.pairs[rank] if is_active[rank] else 0
            count = given[rank] if is_active[rank] else 0
            front = torch.zeros(sizes.front(number) * sizes.width, dtype=torch.uint8)
            numbers = front.view(torch.int32)
            header = [_MAGIC, *sizes.agreed(), int(is_active[rank]), number, count]
            numbers[: len(header)] = torch.tensor(header, dtype=torch.int32)
            if is_active[rank]:
                body = numbers[_HEADER:]
                body[: sizes.local] = self.counts[rank]
                body[sizes.local : sizes.local + 2 * number] = pairs[rank].reshape(-1)
            runs_of = runs[rank] if is_active[rank] else []
            front = front.view(-1, sizes.width)
            messages.append(Message([(front, 0, front.size(0)), *runs_of]))
        return messages

    def row_of(self, is_there: Sequence[bool], firsts: Sequence[int]) -> Any:
        """Returns for each token and choice the row of its pair, if the pairs of each rank that is
        there lie from the row in `firsts` on. -1 stands for no expert, and for an expert whose rank
        is not there.
        """
        rows = torch.full((self.tokens * self.choices,), -1)
        before = 0
        for there, first, count in zip(is_there, firsts, self.pairs, strict=True):
            if there:
                rows[self.choice[before : before + count]] = torch.arange(first, first + count)
            before += count
        return rows.view(self.tokens, self.choices)


@dataclass(frozen=True)
class Layout:
    """Tokens that this rank has got, in the order of local experts, then source ranks, then tokens
    there.
    """

    # Number of tokens of each local expert from each rank.
    counts: Any
    # Row of each token in the messages, and its index at its source.
    rows: Any
    token: Any
    # Ranks whose message is missing.
    missing: list[int]

    def ranges(self) -> Any:
        """Returns first row and number of rows of each rank in the memory of each local expert."""
        begin = self.counts.cumsum(1) - self.counts
        return begin << 32 | self.counts


def layout_of(received: Received, sizes: Sizes, space: Sequence[int | None]) -> Layout:
    """Reads the messages of the ranks. `space` is that of `Link.exchange`.

    Raises `RuntimeError` if a rank has other sizes.
    """
    counts = torch.zeros((sizes.ranks, sizes.local), dtype=torch.int64)
    rows, tokens, missing = [], [], []
    for rank, place in enumerate(received.places):
        most = space[rank]
        if most is None:
            continue
        header = None if place is None else _header(received, place, sizes, rank)
        if place is None or header is None:
            missing.append(rank)
            continue
        pairs, count = header
        front, (first, length) = sizes.front(pairs), place
        if length > most * sizes.width:
            raise RuntimeError(f"cannot dispatch: ranks do not agree on the number of experts per token. rank={rank}")
        whole = received.rows[first : first + front].view(-1).view(torch.int32)
        body = whole[_HEADER : _HEADER + sizes.local + 2 * pairs]
        if length != (front + count) * sizes.width or int(body[: sizes.local].sum()) != pairs:
            raise RuntimeError(f"cannot dispatch: a message is malformed. rank={rank} bytes={length}")
        counts[rank] = body[: sizes.local]
        rows.append(body[sizes.local : sizes.local + pairs].to(torch.int64) + (first + front))
        tokens.append(body[sizes.local + pairs :])
    # Source and local expert of each pair.
    of = torch.arange(sizes.ranks * sizes.local).repeat_interleave(counts.view(-1))
    order = ((of % sizes.local) * sizes.ranks + of // sizes.local).argsort(stable=True)
    no_row, no_token = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    row, token = torch.cat([no_row, *rows])[order], torch.cat([no_token, *tokens])[order]
    return Layout(counts.t().contiguous(), row, token, missing)


def _header(received: Received, place: tuple[int, int], sizes: Sizes, rank: int) -> tuple[int, int] | None:
    """Returns the numbers of pairs and of tokens of a message, or `None` if the rank has left this
    one out.
    """
    start = received.rows[place[0] :].view(-1)[: 4 * _HEADER]
    numbers = start.view(torch.int32).tolist() if start.numel() == 4 * _HEADER and place[1] >= 4 * _HEADER else [0]
    if numbers[0] != _MAGIC:
        raise RuntimeError(f"cannot dispatch: a message is malformed. rank={rank} bytes={place[1]}")
    theirs, ours = numbers[1:5], sizes.agreed()
    if theirs != ours:
        at = next(at for at in range(len(ours)) if theirs[at] != ours[at])
        raise RuntimeError(
            f"cannot dispatch: ranks do not agree on {_AGREED[at]}. here={ours[at]} rank={rank} there={theirs[at]}"
        )
    is_active, pairs, count = numbers[5:8]
    return (pairs, count) if is_active else None
