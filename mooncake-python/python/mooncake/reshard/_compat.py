"""Iteration over sequences of equal lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def _strict_zip(*iterables: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yields the elements of several iterables together. Raises `ValueError` if one ends early."""
    end = object()
    iterators = [iter(one) for one in iterables]
    while iterators:
        row = tuple(next(one, end) for one in iterators)
        ended = [one is end for one in row]
        if all(ended):
            return
        if any(ended):
            raise ValueError("cannot combine iterables: they have different lengths")
        yield row
