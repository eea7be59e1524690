"""Shared parts of the steps of `versions.py`: outcomes, comparisons, and clusters."""

from __future__ import annotations

import random
import time

from cluster import shown_bytes

PATIENCE = 30


class Absent(Exception):
    """A package lacks a name."""


class Refused(Exception):
    """A master or the owner of a disk refuses a call that it lacks, and nothing else fails."""


def same(what, got, expected):
    assert got == expected, f"{what}: {str(got)[:120]} instead of {str(expected)[:120]}"


def value(name, size):
    return random.Random(name).randbytes(size)


def until(what, done, patience=PATIENCE):
    """Polls until a condition holds, because no event announces it. Returns the last result."""
    deadline = time.monotonic() + patience
    while not (found := done()):
        assert time.monotonic() < deadline, f"not in {patience} s: {what}"
        time.sleep(0.05)
    return found


def attempt(outcomes, name, step, *arguments):
    """Runs a step, records its outcome under the name, and returns its result."""
    try:
        result = step(*arguments)
        outcomes[name] = None
        return result
    except (Absent, Refused) as outcome:
        outcomes[name] = outcome
    except (AssertionError, RuntimeError, KeyError, TypeError) as error:
        outcomes[name] = f"{type(error).__name__}: {str(error)[:250]}"
    return None


class Cluster:
    """A client of one version, nodes of all versions, and calls about managed weights."""

    def __init__(self, client, nodes, weights):
        self.client = client
        self.nodes = nodes
        self.weights = weights

    def __call__(self, call, *args, **kw):
        answer = self.client(call, *args, **kw)
        if isinstance(answer, dict) and answer.get("raised") == "AttributeError":
            raise Absent(call)
        return answer

    def read(self, key, data):
        for node in [self.client, *self.nodes]:
            same(f"{key} as {node.name} reads it", node("get", key), shown_bytes(data))
