"""Soak test of many calls, and of many setups and closes: resident memory and file descriptors stay
constant.

    python soak.py [--calls 1000000] [--cycles 10000]

The script starts its own master. It samples the resources of both processes ten times. The last
sample may exceed the least of the first half by `--slack-mib` and a few descriptors. The script
prints the samples, and exits with 1 if a process grew.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
# The number of connections varies with the running calls.
DESCRIPTORS = 8


def free_port() -> int:
    """Returns a free port below those that the system assigns to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def master() -> Iterator[tuple[str, int]]:
    """Starts a master. Yields its address and process number."""
    port, log = free_port(), tempfile.TemporaryFile()
    command = [sys.executable, "-c", "from mooncake.cli import master; master()"]
    flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}", "--default_kv_lease_ttl=2000"]
    process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        else:
            log.seek(0)
            raise SystemExit(f"the master ended:\n{log.read().decode()}")
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(30)


def joined(address: str, segment: int = 128 * MIB) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 8 * MIB, "tcp", "", address)
    if code != 0:
        raise SystemExit(f"setup: {code}: {store.last_error()}")
    return store


def held(process: int) -> tuple[int, int]:
    """Returns private resident bytes and open descriptors of a process. Its segment is shared
    memory, of which more becomes resident over time.
    """
    status = Path(f"/proc/{process}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(resident.split()[1]) * 1024, len(os.listdir(f"/proc/{process}/fd"))


def steady(what: str, count: int, step: Callable[[int], None], processes: dict[str, int], slack: int) -> bool:
    """Makes so many steps. Returns whether no process grew."""
    if count < 20:
        return True
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in processes}
    looks = {count * look // 10 for look in range(1, 11)}
    began = time.monotonic()
    for number in range(1, count + 1):
        step(number)
        if number in looks:
            gc.collect()
            for name, process in processes.items():
                seen[name].append(held(process))
            now = ", ".join(f"{name} {seen[name][-1][0] / MIB:.1f} MiB" for name in processes)
            print(f"         {what} {number}: {now}", flush=True)
    per_second = count / (time.monotonic() - began)
    good = True
    for name, samples in seen.items():
        least = [min(values) for values in zip(*samples[: len(samples) // 2], strict=True)]
        grown = [last - before for last, before in zip(samples[-1], least, strict=True)]
        fine = grown[0] <= slack and grown[1] <= DESCRIPTORS
        good = good and fine
        verdict = "flat   " if fine else "GROWING"
        memory = " ".join(f"{resident / MIB:.1f}" for resident, _ in samples)
        print(f"{verdict}  {what}, {name}: MiB {memory}; descriptors {[n for _, n in samples]}")
    print(f"         {what}: {count} at {per_second:.0f} a second", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1_000_000, help="fewer than 20: none")
    parser.add_argument("--cycles", type=int, default=10_000, help="fewer than 20: none")
    parser.add_argument("--slack-mib", type=float, default=8)
    options = parser.parse_args()
    slack = int(options.slack_mib * MIB)
    value = os.urandom(4096)
    with master() as (address, server):
        processes = {"client": os.getpid(), "master": server}
        store = joined(address)

        def calls(number: int) -> None:
            # Upserts and gets over 4096 recurring keys, of which each upsert replaces the oldest.
            key = f"key-{number % 4096}"
            if number % 2:
                code = store.upsert(key, value)
                if code != 0:
                    raise SystemExit(f"upsert: {code}: {store.last_error()}")
            else:
                got = store.get(f"key-{(number - 1) % 4096}")
                if got != value:
                    raise SystemExit(f"get: {len(got)} bytes: {store.last_error()}")

        good = steady("calls", options.calls, calls, processes, slack)
        store.close()

        def cycle(number: int) -> None:
            one = joined(address, MIB)
            if number % 10 == 0:
                one.put(f"cycle-{number}", value)
            if one.close() != 0:
                raise SystemExit("close failed")

        good = steady("cycles", options.cycles, cycle, processes, slack) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
