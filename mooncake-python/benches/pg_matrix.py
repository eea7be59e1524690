"""Matrix of the calls of torch.distributed and the contexts in which they are made, beside gloo.

    python pg_matrix.py [--calls NAME ..] [--contexts NAME ..] [--write docs/pg.md]

Two ranks make each call in each context with this package and with gloo, and compare the results.
A cell has a time limit of its own; when it is reached, the stacks of both ranks are printed. With
`--write`, the table of the page is replaced. The script exits with 1 if a call of this package
crashes, hangs, or has another result than gloo.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import torch.distributed as dist
from ranks import World

Call = Callable[[Any, Any, bool], tuple[Any, Any]]
Context = Callable[[Any, Call], Any]

LIMIT = 120
# Elements of an input; the two ranks divide them.
COUNT = 4
BEGIN, END = "<!-- matrix: pg_matrix.py -->\n", "<!-- end of matrix -->\n"


def values() -> torch.Tensor:
    """Returns the input of this rank: 1.0 in each element at rank 0, 2.0 at rank 1."""
    return torch.full((COUNT,), dist.get_rank() + 1.0)


def all_reduce(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    return dist.all_reduce(x, group=group, async_op=not wait), x


def reduce(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    work = dist.reduce(x, 0, group=group, async_op=not wait)
    return work, x if dist.get_rank() == 0 else None


def broadcast(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    return dist.broadcast(x, 1, group=group, async_op=not wait), x


def all_gather(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out = [torch.zeros(COUNT), torch.zeros(COUNT)]
    return dist.all_gather(out, x, group=group, async_op=not wait), out


def all_gather_into_tensor(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out = torch.zeros(2 * COUNT)
    return dist.all_gather_into_tensor(out, x, group=group, async_op=not wait), out


def gather(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out = [torch.zeros(COUNT), torch.zeros(COUNT)] if dist.get_rank() == 0 else None
    return dist.gather(x, out, 0, group=group, async_op=not wait), out


def scatter(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out, parts = torch.zeros(COUNT), [x, x * 2] if dist.get_rank() == 0 else None
    return dist.scatter(out, parts, 0, group=group, async_op=not wait), out


def reduce_scatter(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out = torch.zeros(COUNT)
    return dist.reduce_scatter(out, [x, x * 2], group=group, async_op=not wait), out


def reduce_scatter_tensor(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out = torch.zeros(COUNT // 2)
    return dist.reduce_scatter_tensor(out, x, group=group, async_op=not wait), out


def all_to_all_single(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out = torch.zeros(COUNT)
    return dist.all_to_all_single(out, x, group=group, async_op=not wait), out


def send_and_receive(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out, peer = torch.zeros(COUNT), 1 - dist.get_rank()
    pair = [dist.isend(x, peer, group=group), dist.irecv(out, peer, group=group)]
    for work in pair if wait else pair[:1]:
        work.wait()
    return None if wait else pair[1], out


def coalesced(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    other = x * 3
    with dist._coalescing_manager(group=group, device=torch.device("cpu"), async_ops=not wait) as manager:
        dist.all_reduce(x, group=group)
        dist.all_reduce(other, group=group)
    return None if wait else manager, [x, other]


def functional_all_reduce(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    import torch.distributed._functional_collectives as functional

    out = functional.all_reduce(x, "sum", group)
    return None, functional.wait_tensor(out) if wait else out


def barrier(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    return dist.barrier(group=group, async_op=not wait), None


def all_gather_object(group: Any, x: Any, wait: bool) -> tuple[Any, Any]:
    out: list[Any] = [None, None]
    dist.all_gather_object(out, {"rank": dist.get_rank()}, group=group)
    return None, out


def direct(group: Any, call: Call) -> Any:
    return call(group, values(), True)[1]


def asynchronous(group: Any, call: Call) -> Any:
    work, out = call(group, values(), False)
    if work is not None:
        work.wait()
    return out


def in_callback(group: Any, call: Call) -> Any:
    future = dist.all_reduce(values(), group=group, async_op=True).get_future()
    return future.then(lambda _: shown(call(group, values(), True)[1])).wait()


def in_thread(group: Any, call: Call) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(attempt(direct, group, call)))
    thread.start()
    thread.join()
    return raised(results[0])


def in_backward(group: Any, call: Call) -> Any:
    results: list[Any] = []
    weight = torch.ones(COUNT, requires_grad=True)
    weight.register_hook(lambda _: results.append(attempt(direct, group, call)))
    (weight * 2).sum().backward()
    return raised(results[0])


def in_trace(group: Any, call: Call) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(x: torch.Tensor) -> Any:
        return call(group, x.clone(), True)[1]

    graph = make_fx(traced)(values())
    names = sorted({str(node.target).split(".")[1] for node in graph.graph.nodes if "c10d" in str(node.target)})
    return [names, shown(graph(values()))]


def compiled(group: Any, call: Call) -> Any:
    def step(x: torch.Tensor) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        return call(group, y, True)[1]

    torch._dynamo.reset()
    return torch.compile(step, backend="aot_eager")(values())


def under_profiler(group: Any, call: Call) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        out = shown(direct(group, call))
    # Operators of torch; each backend adds names of its own.
    return [sorted({event.key for event in profiler.key_averages() if event.key.startswith("c10d::")}), out]


def under_debug_mode(group: Any, call: Call) -> Any:
    from torch.distributed.tensor.debug import CommDebugMode

    with (mode := CommDebugMode()):
        out = shown(direct(group, call))
    return [mode.get_total_counts(), out]


def with_fakes(group: Any, call: Call) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        out = call(group, values(), True)[1]
    outs = out if isinstance(out, list) else [out]
    return [list(one.shape) if isinstance(one, torch.Tensor) else one for one in outs]


def unwaited(group: Any, call: Call) -> Any:
    import torch.distributed._functional_collectives as functional

    return call(group, functional.all_reduce(values(), "sum", group), True)[1]


def after_failure(group: Any, call: Call) -> Any:
    try:
        dist.broadcast(values(), 99, group=group)
    except (ValueError, RuntimeError):
        return direct(group, call)
    raise AssertionError("a broadcast from a rank that does not exist was accepted")


CALLS: list[Call] = [
    all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter,
    reduce_scatter_tensor, all_to_all_single, send_and_receive, coalesced, functional_all_reduce, barrier,
    all_gather_object,
]  # fmt: skip
CONTEXTS: list[Context] = [
    direct, asynchronous, in_callback, in_thread, in_backward, in_trace, compiled, under_profiler,
    under_debug_mode, with_fakes, unwaited, after_failure,
]  # fmt: skip


def shown(value: Any) -> Any:
    """Returns a result without tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    return value


def attempt(context: Context, group: Any, call: Call) -> tuple[str, Any]:
    try:
        return "done", shown(context(group, call))
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"


def raised(outcome: tuple[str, Any]) -> Any:
    if outcome[0] == "raised":
        raise RuntimeError(outcome[1])
    return outcome[1]


# The groups of this rank: that of this package, and that of gloo.
_groups: list[Any] = []


def prepare() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _groups[:] = [dist.group.WORLD, dist.new_group(backend="gloo")]


def cell(which: int, context: int, call: int) -> tuple[str, Any]:
    """Makes a call in one of the groups. Returns how it ended, and its result."""
    outcome = attempt(CONTEXTS[context], _groups[which], CALLS[call])
    # A rank that failed alone must not meet the other one in another call.
    dist.barrier(group=_groups[which])
    return outcome


class Worlds:
    """Two ranks, and others in their place once they hang or have crashed."""

    def __init__(self) -> None:
        self.world: World | None = None

    def results(self, which: int, context: int, call: int) -> list[tuple[str, Any]] | str:
        """Returns the outcomes of both ranks, or `hangs` or `crashes`."""
        if self.world is None:
            self.world = World(2)
            self.world.all(prepare)
        ranks = list(self.world.ranks.values())
        for rank in ranks:
            rank.begin(cell, which, context, call)
        end = time.monotonic() + LIMIT
        try:
            return [rank.result(max(0.0, end - time.monotonic())) for rank in ranks]
        except TimeoutError:
            # Each rank prints its stacks, and goes on to hang.
            for rank in ranks:
                os.kill(rank.process.pid, signal.SIGUSR1)
            time.sleep(1)
            self.close()
            return "hangs"
        except RuntimeError as error:
            print(error, file=sys.stderr)
            self.close()
            return "crashes"

    def close(self) -> None:
        if self.world is not None:
            self.world.close(force=True)
        self.world = None


def verdict(ours: list[tuple[str, Any]] | str, theirs: list[tuple[str, Any]] | str) -> str:
    """Returns the text of a cell."""
    if isinstance(ours, str):
        return f"**{ours}**"
    if isinstance(theirs, str):
        return f"yes; gloo {theirs}"
    fails = [any(state == "raised" for state, _ in one) for one in (ours, theirs)]
    if all(fails):
        return "both refuse"
    if fails[0]:
        return "**refused**"
    if fails[1]:
        return "yes; gloo refuses"
    return "yes" if ours == theirs else "**differs**"


def words(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", " ") if function in CONTEXTS else f"`{function.__name__}`"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", nargs="*", default=[])
    parser.add_argument("--contexts", nargs="*", default=[])
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    chosen = [number for number, one in enumerate(CALLS) if not options.calls or one.__name__ in options.calls]
    columns = [number for number, one in enumerate(CONTEXTS) if not options.contexts or one.__name__ in options.contexts]
    worlds, table, counts = Worlds(), {}, collections.Counter[str]()
    try:
        for call in chosen:
            for context in columns:
                ours, theirs = (worlds.results(which, context, call) for which in (0, 1))
                table[call, context] = text = verdict(ours, theirs)
                counts[text] += 1
                if text != "yes":
                    print(f"{CALLS[call].__name__} {CONTEXTS[context].__name__}: {text}\n  ours {ours}\n  gloo {theirs}", flush=True)
    finally:
        worlds.close()
    lines = [f"| call | {' | '.join(words(CONTEXTS[one]) for one in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {words(CALLS[call])} | {' | '.join(table[call, one] for one in columns)} |" for call in chosen]
    text = "\n".join(lines) + "\n"
    print(f"torch {torch.__version__}\n{text}{dict(counts)}")
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 1 if any(text.startswith("**") for text in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
