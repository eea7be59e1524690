"""Processes of a process group that a test drives: each carries out the functions that the test
sends to it. The store of torch is in the process of the test, so that every rank may be killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

# Seconds for any step of a rank. Importing torch on two busy cores takes most of it.
LIMIT = 240


# Ranks are forks of a process that has imported torch, which takes seconds.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "mooncake.pg"])


def _serve(pipe: Any, rank: int, port: int, environment: dict[str, str]) -> None:
    """Main program of a rank."""
    os.environ.clear()
    os.environ.update(environment)

    import torch
    import torch.distributed as dist

    from mooncake import pg

    torch.set_num_threads(1)
    pg.set_fault_reconciliation_window_us(1_000_000)
    pg.set_collective_timeout_us(3_000_000)
    pg.set_p2p_timeout_us(3_000_000)
    pipe.send(("done", os.getpid()))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(("done", function(*arguments)))
        except BaseException:
            pipe.send(("failed", f"rank {rank}: {traceback.format_exc()}"))
    if dist.is_initialized():
        dist.destroy_process_group()


def join_world(rank: int, size: int, port: int, prefix: str, backend: str, options: dict[str, Any] | None) -> None:
    """Creates the default group."""
    import torch.distributed as dist

    from mooncake import pg

    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    given = {} if options is None else {"pg_options": pg.MooncakeBackendOptions(**options)}
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **given)


def leave_world() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


class Rank:
    """Process of one rank."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.pipe, theirs = _FORKS.Pipe()
        arguments = (theirs, rank, port, dict(os.environ))
        self.process = _FORKS.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.pipe.send((function, arguments))

    def result(self, limit: float = LIMIT) -> Any:
        if not self.pipe.poll(limit):
            raise TimeoutError(f"rank {self.rank} has no result within {limit} s")
        try:
            state, value = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"rank {self.rank} has ended: {self.process.exitcode}") from None
        if state == "failed":
            raise RuntimeError(value)
        return value

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(function, *arguments)
        return self.result()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(30)


class World:
    """Ranks, and the store in which they meet."""

    def __init__(self, size: int, backend: str = "mooncake-cpu", options: dict[str, Any] | None = None) -> None:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.size = size
        self.backend = backend
        self.ranks: dict[int, Rank] = {}
        self.worlds = 0
        try:
            self.start(range(size))
            self.initialize(range(size), options=options)
        except BaseException:
            self.close(force=True)
            raise

    def start(self, ranks: Iterable[int]) -> None:
        """Starts processes, without a group."""
        started = {rank: Rank(rank, self.store.port) for rank in ranks}
        self.ranks.update(started)
        for rank in started.values():
            rank.result()

    def initialize(self, ranks: Iterable[int], size: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Creates the default group in some ranks."""
        self.each(
            ranks, join_world, lambda rank: (rank, size or self.size, self.store.port, f"w{self.worlds}", self.backend, options)
        )

    def each(
        self, ranks: Iterable[int], function: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]]
    ) -> list[Any]:
        """Carries out a function in some ranks at the same time, with arguments by rank."""
        chosen = list(ranks)
        for rank in chosen:
            self.ranks[rank].begin(function, *arguments(rank))
        results, failures = [], []
        for rank in chosen:
            try:
                results.append(self.ranks[rank].result())
            except (RuntimeError, TimeoutError) as error:
                failures.append(str(error))
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    def all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Carries out a function in all ranks at the same time."""
        return self.each(self.ranks, function, lambda _: arguments)

    def all_within(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Carries out a function in all ranks at the same time, in at most `seconds`. Kills the
        ranks if one of them has no result then.
        """
        for rank in self.ranks.values():
            rank.begin(function, *arguments)
        end = time.monotonic() + seconds
        try:
            return [rank.result(max(0.0, end - time.monotonic())) for rank in self.ranks.values()]
        except BaseException:
            self.close(force=True)
            raise

    def some(self, ranks: Iterable[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.each(ranks, function, lambda _: arguments)

    def kill(self, rank: int) -> None:
        self.ranks.pop(rank).kill()

    def close(self, force: bool = False) -> None:
        """Ends all ranks. Without `force`, each has to end by itself, without an error."""
        ranks, self.ranks = self.ranks, {}
        for rank in ranks.values():
            if force:
                rank.process.kill()
            rank.pipe.close()
        codes = {}
        for number, rank in ranks.items():
            rank.process.join(60)
            codes[number] = rank.process.exitcode
            rank.process.kill()
        if not force:
            assert set(codes.values()) <= {0}, f"ranks have ended with {codes}"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close(force=kind is not None)


def largest_world() -> int:
    """Returns the largest size of a world that tests use."""
    return int(os.environ.get("MOONCAKE_PG_TEST_RANKS", "4"))


def has_fsdp2() -> bool:
    """Returns whether FSDP2 works without a GPU: since torch 2.6."""
    from torch.distributed import fsdp

    return hasattr(fsdp, "fully_shard")


def note(text: str) -> None:
    """Prints a line of a rank."""
    print(text, file=sys.stderr, flush=True)
