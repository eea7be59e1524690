"""Calls with arguments of every wrong type, before setup, while set up, and after close: a result
or an exception, never a crash.

The calls run in their own process, so that a crash fails only one test. Their list comes from the
signatures.
"""

from __future__ import annotations

import faulthandler
import inspect
import random
import subprocess
import sys

import pytest

from mooncake.engine import TransferEngine
from mooncake.store import BufferPool, MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig

# Calls that close the object, or write files at a given path.
LEFT_OUT = {
    "close",
    "setup",
    "setup_dummy",
    "_setup_dummy",
    "init_all",
    "initialize",
    "initialize_ext",
    "save_tensor_to_safetensor",
    "_close",
}
ODD = [
    None,
    "",
    "k",
    "\0",
    b"bytes",
    0,
    1,
    -1,
    8,
    4096,
    2**31,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    1.5,
    float("nan"),
    True,
    [],
    ["k"],
    [None],
    [0],
    [-1],
    [8, 2**64 - 1],
    [[]],
    [[0]],
    [[[0]]],
    [["k"]],
    (),
    ("k",),
    {},
    {"k": 1},
    object(),
    range(3),
]


def calls_of(target):
    """Yields names of callables, with their numbers of positional parameters."""
    for name in sorted(dir(target)):
        if name.startswith("__") or name in LEFT_OUT:
            continue
        call = getattr(target, name)
        if not callable(call) or inspect.isclass(call):
            continue
        try:
            parameters = inspect.signature(call).parameters.values()
        except (TypeError, ValueError):
            yield name, 3
            continue
        yield name, sum(1 for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY)


def torment(target, seed, rounds):
    chance = random.Random(seed)
    done = 0
    for name, count in calls_of(target):
        call = getattr(target, name)
        tries = [[value] * count for value in ODD]
        tries += [[chance.choice(ODD) for _ in range(chance.randint(0, count + 1))] for _ in range(rounds)]
        for arguments in tries:
            done += 1
            try:
                call(*arguments)
            except Exception as error:
                # A panic is not an `Exception`, and its message names a bug.
                assert "bug in mooncake" not in str(error), (name, arguments, error)
    last = target.last_error() if hasattr(target, "last_error") else None
    assert last is None or "bug in mooncake" not in last.message, last
    return done


def main(kind, master):
    faulthandler.enable()
    if kind == "engine":
        engine = TransferEngine()
        done = torment(engine, 1, 20)
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        done += torment(engine, 2, 20)
    elif kind == "others":
        done = torment(MooncakeHostMemAllocator(), 1, 50) + torment(ReplicateConfig(), 1, 50)
        for value in ODD:
            for arguments in ([value], [value, value], [value] * 9):
                try:
                    BufferPool(*arguments)
                except Exception:
                    done += 1
        config = ReplicateConfig()
        for name in [name for name in dir(ReplicateConfig) if not name.startswith("_")]:
            for value in ODD:
                try:
                    setattr(config, name, value)
                except Exception:
                    done += 1
                str(config)
    else:
        store = MooncakeDistributedStore()
        done = 0
        if kind != "before":
            size = 32 << 20
            assert store.setup("127.0.0.1", "P2PHANDSHAKE", size, 1 << 20, "tcp", "", master) == 0
        if kind == "after":
            store.close()
        done += torment(store, 3, 20)
        store.close()
    print(done, flush=True)


@pytest.mark.parametrize("kind", ["before", "during", "after", "engine", "others"])
def test_nothing_crashes(master, kind):
    run = subprocess.run(
        [sys.executable, __file__, kind, master.address], capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, f"{run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert int(run.stdout.split()[-1]) > 100


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
