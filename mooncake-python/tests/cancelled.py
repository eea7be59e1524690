"""Reads that are cancelled during their transfer: no other read gets their bytes, and no process
grows.

    python tests/cancelled.py [--reads 10000] [--delay 0.2] [--ways asyncio,signal,shared]
        [--seed N]

The script starts a master, a client whose bytes pass a relay that delays them, and a client without
a relay. Readers get objects of the first client and cancel every third read at a random moment: by
cancelling a task, by a signal, and in a store of `setup_dummy`. Meanwhile they read objects of the
second client, hold them for longer than the relay delays, and compare them twice. The script prints
its seed and one line for each way, and exits with 1 if a byte was wrong or a process grew.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from conftest import Master, free_port

from mooncake import _mooncake
from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.engine import TransferEngine
from mooncake.http_metadata_server import KVBootstrapServer
from mooncake.store import BufferPool, ReplicateConfig

MIB = 1 << 20
KEYS = 48
# Concurrent reads: of one asyncio program, and of all programs that get signals.
TASKS, PROGRAMS = 32, 8
SLOT = 256 << 10
# Growth that is not counted: memory of allocators, and connections that open and close.
SLACK, DESCRIPTORS = 24 * MIB, 40


def value(key: str) -> bytes:
    """Returns the value of a key. Its length and bytes differ from those of any other value."""
    digest = hashlib.blake2b(key.encode()).digest()
    size = 4096 + int.from_bytes(digest[:4]) % (SLOT - 4096)
    return (digest * (size // len(digest) + 1))[:size]


class Directory(KVBootstrapServer):
    """Metadata server that names the relay in place of a client's data port."""

    relayed: tuple[str, int] | None = None

    async def _handle_metadata(self, request: web.Request) -> web.Response:
        answer = await super()._handle_metadata(request)
        key = request.query.get("key", "")
        if request.method == "GET" and self.relayed and key.endswith(self.relayed[0]) and key in self.store:
            descriptor = json.loads(self.store[key])
            if "tcp_data_port" in descriptor:
                descriptor |= {"tcp_data_host": "127.0.0.1", "tcp_data_port": self.relayed[1]}
                return web.Response(text=json.dumps(descriptor), content_type="application/json")
        return answer

    def data_port(self, name: str) -> int:
        descriptors = (json.loads(value) for key, value in self.store.items() if key.endswith(name))
        return next(int(d["tcp_data_port"]) for d in descriptors if d.get("tcp_data_port"))


# Programs that run in their own processes.


async def relay(to: int, delay: float) -> None:
    """Forwards connections, and delays returned bytes by so many seconds."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, held: float) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    break
                sink.write(data)
                await sink.drain()
            sink.close()

        delivery = asyncio.create_task(deliver())
        with contextlib.suppress(OSError):
            while data := await source.read(64 << 10):
                await queue.put((time.monotonic() + held, data))
        await queue.put((time.monotonic() + held, b""))
        with contextlib.suppress(OSError):
            await delivery

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(pump(reader, forth, 0), pump(back, writer, delay), return_exceptions=True)

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()
    os._exit(0)


def joined(directory: str, master: str, segment: int, buffer: int) -> MooncakeDistributedStoreAsync:
    store = MooncakeDistributedStoreAsync()
    code = store.setup("127.0.0.1", directory, segment, buffer, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup: {code}: {store.last_error()}")
    return store


def member(directory: str, master: str, name: str) -> None:
    """Runs a client that holds the objects of that name, until its input ends."""
    store = joined(directory, master, 64 * MIB, MIB)
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    for i in range(KEYS):
        if store.put(f"{name}-{i}", value(f"{name}-{i}"), config) != 0:
            raise SystemExit(f"put: {store.last_error()}")
    print(store.get_hostname(), flush=True)
    sys.stdin.read()
    os._exit(0)


class Tally:
    """Number of reads so far, and resources of the process meanwhile."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.reads = self.cancelled = self.others = self.wrong = 0
        self.wanted: int = options.reads
        self.processes = [os.getpid(), *options.watch]
        self.samples: list[list[tuple[int, int]]] = [[] for _ in self.processes]
        self.lock = threading.Lock()

    def begin(self) -> int | None:
        """Returns the number of the next read, or `None` after the last one."""
        if self.reads == self.wanted:
            return None
        self.reads += 1
        if self.reads * 10 // self.wanted > len(self.samples[0]):
            gc.collect()
            for process, samples in zip(self.processes, self.samples, strict=True):
                status = Path(f"/proc/{process}/status").read_text()
                anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
                samples.append((int(anonymous.split()[1]) * 1024, len(os.listdir(f"/proc/{process}/fd"))))
        return self.reads

    def compare(self, key: str, got: Any) -> None:
        if bytes(got) != value(key):
            with self.lock:
                self.wrong += 1
            print(f"wrong bytes of {key}: {len(got)} of {len(value(key))}", file=sys.stderr, flush=True)

    def report(self) -> None:
        flat = True
        for samples in self.samples:
            early = [max(kind) for kind in zip(*samples[: len(samples) // 2], strict=True)]
            late = samples[-1]
            flat = flat and late[0] <= early[0] + SLACK and late[1] <= early[1] + DESCRIPTORS
        names = ("reads", "cancelled", "others", "wrong", "samples")
        print(json.dumps({name: getattr(self, name) for name in names} | {"flat": flat}), flush=True)


def arrived(store: Any, key: str, got: int) -> int:
    """Returns the length of a value that was read into memory."""
    if got != len(value(key)):
        raise SystemExit(f"{key}: {got}: {store.last_error()}")
    return got


def hold(store: Any, tally: Tally, key: str, hold_for: float, pool: BufferPool | None) -> None:
    """Reads an object and compares it twice: at once, and after late bytes of another read would
    have arrived.
    """
    if pool is None:
        kept = store.get_buffer(key)
        if kept is None:
            raise SystemExit(f"{key}: {store.last_error()}")
        view = memoryview(kept)
    else:
        kept = pool.acquire(SLOT)
        view = kept.buffer[: arrived(store, key, store.get_into(key, kept.ptr, SLOT))]
    tally.compare(key, view)
    time.sleep(hold_for)
    tally.compare(key, view)
    with tally.lock:
        tally.others += 1


async def asyncio_reader(store: MooncakeDistributedStoreAsync, options: argparse.Namespace) -> None:
    rng, tally, delay = random.Random(options.seed), Tally(options), options.delay
    pool = BufferPool(store, max_bytes=1 << 30)
    if options.light:
        memory = store.alloc_from_mem_pool(TASKS * SLOT)
    else:
        kept = (ctypes.c_ubyte * (TASKS * SLOT))()
        memory = ctypes.addressof(kept)
    assert store.register_buffer(memory, TASKS * SLOT) == 0

    async def into_lease(key: str, slot: int) -> None:
        lease = pool.acquire(SLOT)
        try:
            got = await store.async_get_into(key, lease.ptr, SLOT)
            tally.compare(key, lease.buffer[: arrived(store, key, got)])
        finally:
            lease.release()

    async def into_own(key: str, slot: int) -> None:
        try:
            got = await store.async_get_into(key, slot, SLOT, wait_on_cancel=True)
            tally.compare(key, ctypes.string_at(slot, arrived(store, key, got)))
        except asyncio.CancelledError:
            ctypes.memset(slot, 0xAA, SLOT)
            await asyncio.sleep(1.5 * delay)
            if ctypes.string_at(slot, SLOT) != b"\xaa" * SLOT:
                tally.wrong += 1
            raise

    async def bare(key: str, slot: int) -> None:
        """Reads into memory that is not registered. It is free when the call has ended."""
        memory = ctypes.create_string_buffer(SLOT)
        try:
            got = await store.async_get_into(key, ctypes.addressof(memory), SLOT)
            tally.compare(key, memory.raw[: arrived(store, key, got)])
        except asyncio.CancelledError:
            ctypes.memset(memory, 0xAA, SLOT)
            await asyncio.sleep(1.5 * delay)
            if memory.raw != b"\xaa" * SLOT:
                tally.wrong += 1
            raise

    async def plain(key: str, slot: int) -> None:
        tally.compare(key, await store.async_get(key))

    async def batch(key: str, slot: int) -> None:
        for got in await store.async_get_batch([key, key]):
            tally.compare(key, got)

    calls: dict[str, Callable[[str, int], Any]] = {"get": plain, "batch": batch, "lease": into_lease}
    calls |= {"own": into_own, "bare": bare}
    names = (name for name in options.calls.split(",") if name != "bare" or not options.light)
    kinds = [calls[name] for name in names]

    async def reads(slot: int) -> None:
        while (number := tally.begin()) is not None:
            key = f"slow-{rng.randrange(KEYS)}"
            task = asyncio.create_task(rng.choice(kinds)(key, memory + slot * SLOT))
            if number % 3:
                await task
                continue
            await asyncio.wait([task], timeout=rng.uniform(0, 1.2 * delay))
            tally.cancelled += task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def others(threads: concurrent.futures.Executor) -> None:
        while True:
            key = f"fast-{rng.randrange(KEYS)}"
            held = rng.choice([None, pool])
            await asyncio.get_running_loop().run_in_executor(threads, hold, store, tally, key, 1.6 * delay, held)

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        beside = [asyncio.create_task(others(threads)) for _ in range(16)]
        await asyncio.gather(*(reads(slot) for slot in range(TASKS)))
        for task in beside:
            task.cancel()
        for ended in await asyncio.gather(*beside, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise SystemExit(f"a read of another key ended: {ended!r}")
    assert store.unregister_buffer(memory) == 0
    tally.report()


class Interrupted(Exception):
    """Exception of the signal handler."""


def signal_reader(store: MooncakeDistributedStoreAsync, options: argparse.Namespace) -> None:
    rng, tally, delay = random.Random(options.seed), Tally(options), options.delay
    pool = BufferPool(store, max_bytes=1 << 30)

    def interrupt(*_: Any) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)

    def handle(key: str) -> None:
        tally.compare(key, store.get_buffer(key))

    def plain(key: str) -> None:
        tally.compare(key, store.get(key))

    def batch(key: str) -> None:
        for got in store.batch_get_buffer([key, key]):
            tally.compare(key, got)

    def into_lease(key: str) -> None:
        lease = pool.acquire(SLOT)
        try:
            got = store.get_into(key, lease.ptr, SLOT)
            tally.compare(key, ctypes.string_at(lease.ptr, arrived(store, key, got)))
        finally:
            lease.release()

    def into_bare(key: str) -> None:
        memory = ctypes.create_string_buffer(SLOT)
        try:
            got = store.get_into(key, ctypes.addressof(memory), SLOT)
            tally.compare(key, memory.raw[: arrived(store, key, got)])
        except Interrupted:
            signal.setitimer(signal.ITIMER_REAL, 0)
            ctypes.memset(memory, 0xAA, SLOT)
            time.sleep(1.5 * delay)
            if memory.raw != b"\xaa" * SLOT:
                tally.wrong += 1
            raise

    stop = threading.Event()

    def others(seed: int) -> None:
        of_thread = random.Random(seed)
        while not stop.is_set():
            held = of_thread.choice([None, pool])
            hold(store, tally, f"fast-{of_thread.randrange(KEYS)}", 1.6 * delay, held)

    threads = [threading.Thread(target=others, args=(options.seed + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while (number := tally.begin()) is not None:
        call = rng.choice([handle, plain, batch, into_lease, into_bare])
        key = f"slow-{rng.randrange(KEYS)}"
        if number % 3:
            call(key)
            continue
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 1.2 * delay))
                call(key)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            tally.cancelled += 1
    stop.set()
    for thread in threads:
        thread.join()
    tally.report()


LEFT: list[MooncakeDistributedStoreAsync] = []


def watch_memory_at_exit(kept: ctypes.Array[ctypes.c_ubyte], delay: float) -> None:
    """Makes the process exit with 1 if bytes arrive in this memory after the package lets the
    interpreter end.
    """
    memory = ctypes.addressof(kept)

    def freed() -> None:
        ctypes.memset(memory, 0xAA, len(kept))
        time.sleep(1.2 * delay)
        if bytes(kept) != b"\xaa" * len(kept):
            print("bytes have landed in memory that the interpreter frees", file=sys.stderr, flush=True)
            os._exit(1)

    # Functions run in reverse order: this one runs after the package's.
    atexit.unregister(_mooncake._close_all)
    atexit.register(freed)
    atexit.register(_mooncake._close_all)


def engine_at(directory: str, name: str) -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(name, directory, "tcp", "") == 0, engine.last_error()
    return engine


def engine_owner(directory: str) -> None:
    """Runs an engine whose memory other engines read, until its input ends."""
    name = f"127.0.0.1:{free_port()}"
    engine = engine_at(directory, name)
    memory = (ctypes.c_ubyte * (8 * SLOT))(*([7] * (8 * SLOT)))
    assert engine.register_memory(ctypes.addressof(memory), len(memory)) == 0, engine.last_error()
    print(name, flush=True)
    sys.stdin.read()
    os._exit(0)


ENGINES: list[TransferEngine] = []


def engine_reader(directory: str, target: str, ending: str, delay: str) -> None:
    """Ends during a batch of reads into its memory. With "dropped", the engine is freed before."""
    engine = engine_at(directory, f"127.0.0.1:{free_port()}")
    kept = (ctypes.c_ubyte * (8 * SLOT))()
    # A reference cycle without a collector keeps the memory until the process ends.
    gc.disable()
    cycle: list[Any] = [kept]
    cycle.append(cycle)
    memory = ctypes.addressof(kept)
    assert engine.register_memory(memory, len(kept)) == 0, engine.last_error()
    # The first request on a connection waits for a handshake.
    watch_memory_at_exit(kept, 2 * float(delay))
    remote = engine.get_first_buffer_address(target)
    offsets = [i * SLOT for i in range(8)]
    batch = engine.batch_transfer_async_read(
        target, [memory + at for at in offsets], [remote + at for at in offsets], [SLOT] * 8
    )
    assert batch > 0, engine.last_error()
    assert engine.transfer_check_status(batch) == 0, "the batch is under way"
    if ending != "dropped":
        ENGINES.append(engine)
    if ending == "exit":
        sys.exit(0)
    if ending == "exception":
        sys.excepthook = lambda *_: None
        raise RuntimeError("an error of the program")


async def ending_reader(store: MooncakeDistributedStoreAsync, options: argparse.Namespace) -> None:
    """Cancels reads into its own memory, and leaves the store to the end of the interpreter."""
    kept = (ctypes.c_ubyte * (8 * SLOT))()
    memory = ctypes.addressof(kept)
    assert store.register_buffer(memory, len(kept)) == 0
    LEFT.append(store)

    watch_memory_at_exit(kept, options.delay)
    tasks = [asyncio.create_task(store.async_get_into(f"slow-{i}", memory + i * SLOT, SLOT)) for i in range(8)]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


# Start of the programs.


@contextlib.contextmanager
def program(*words: str, says: bool = True) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a process of this script or another program, and reads the first line of its output.
    """
    environment = os.environ | {"MC_FORCE_TCP": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin and process.stdout
    try:
        yield process, process.stdout.readline().strip() if says else ""
    finally:
        process.terminate()
        process.stdin.close()
        process.stdout.close()
        process.wait(60)


def listening(path: str, process: subprocess.Popen[str]) -> None:
    """Waits until the process listens at the path."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            return
        time.sleep(0.02)
    raise SystemExit(f"nobody listens at {path}")


def mooncake(name: str) -> list[str]:
    return ["-c", f"import sys; from mooncake.cli import {name}; sys.exit({name}())"]


def judge(way: str, outputs: list[str], seconds: float) -> bool:
    """Prints the results of the readers of one way. Returns whether all were correct."""
    seen = [json.loads(output.splitlines()[-1]) for output in outputs]
    total = {name: sum(one[name] for one in seen) for name in ("reads", "cancelled", "others", "wrong")}
    samples = [samples for one in seen for samples in one["samples"]]
    flat = all(one["flat"] for one in seen)
    for memory in samples[:2]:
        mib = " ".join(f"{resident / MIB:.0f}" for resident, _ in memory)
        print(f"         {way}: MiB {mib}; descriptors {' '.join(str(n) for _, n in memory)}")
    verdict = "ok    " if flat and total["wrong"] == 0 and total["others"] else "FAILED"
    print(
        f"{verdict}   {way}: {total['reads']} reads, {total['cancelled']} cancelled, {total['others']} of other keys, "
        f"{total['wrong']} wrong, {'flat' if flat else 'GROWING'}, {seconds:.0f} s",
        flush=True,
    )
    return verdict.startswith("ok")


def trial(options: argparse.Namespace) -> bool:
    rng = random.Random(options.seed)
    here = str(Path(__file__).resolve())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        directory = Directory(0, "127.0.0.1")
        directory.run()
        stack.callback(directory.close)
        metadata = f"http://127.0.0.1:{directory.port}/metadata"
        master = Master(Path(folder), [f"--default_kv_lease_ttl={2000 + int(5000 * options.delay)}"])
        stack.callback(master.stop)
        master.start()
        cluster = [metadata, master.address]
        _, slow = stack.enter_context(program(here, "member", *cluster, "slow"))
        stack.enter_context(program(here, "member", *cluster, "fast"))
        _, port = stack.enter_context(program(here, "relay", str(directory.data_port(slow)), str(options.delay)))
        directory.relayed = (slow, int(port))
        path = f"{folder}/owner.sock"
        watch: list[str] = []
        if "shared" in options.ways:
            flags = [f"--metadata_server={metadata}", f"--master_server_address={cluster[1]}", "--host=127.0.0.1"]
            flags += ["--global_segment_size=16MB", f"--ipc_socket_path={path}"]
            owner, _ = stack.enter_context(program(*mooncake("client"), *flags, says=False))
            listening(path, owner)
            watch = [str(owner.pid)]
        good = True
        ways = options.ways.split(",")
        for number, way in enumerate(ways):
            reads = max(options.reads // len(ways) + (number < options.reads % len(ways)), 10)
            count = min(PROGRAMS, max(reads // 20, 1)) if way == "signal" else 1
            readers = []
            begun = time.monotonic()
            for reader in range(count):
                words = ["--reads", str(reads // count + (reader < reads % count)), "--delay", str(options.delay), "--calls", options.calls]
                words += ["--seed", str(rng.randrange(1 << 32))]
                if way == "shared":
                    words += ["--light", path, "--watch", *watch]
                readers.append(stack.enter_context(program(here, "reader", way, *cluster, *words, says=False))[0])
            outputs = []
            for process in readers:
                assert process.stdout
                outputs.append(process.stdout.read())
                if process.wait() != 0:
                    print(f"FAILED   {way}: a reader ended with {process.returncode}", flush=True)
                    return False
            if way == "end":
                print("ok       a program ended while bytes travelled", flush=True)
                continue
            good = judge(way, outputs, time.monotonic() - begun) and good
    return good


def read(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way")
    parser.add_argument("directory")
    parser.add_argument("master")
    parser.add_argument("--light", default="")
    parser.add_argument("--reads", type=int)
    parser.add_argument("--delay", type=float)
    parser.add_argument("--calls")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--watch", type=int, nargs="*", default=[])
    options = parser.parse_args(words)
    if options.light:
        store = MooncakeDistributedStoreAsync()
        if store.setup_dummy(16 * MIB, 8 * MIB, options.light) != 0:
            raise SystemExit(f"setup_dummy: {store.last_error()}")
    else:
        store = joined(options.directory, options.master, 0, 8 * MIB)
    if options.way == "end":
        return asyncio.run(ending_reader(store, options))
    if options.way == "signal":
        signal_reader(store, options)
    else:
        asyncio.run(asyncio_reader(store, options))
    store.close()


def main() -> int:
    roles: dict[str, Callable[..., Any]] = {
        "relay": lambda to, delay: asyncio.run(relay(int(to), float(delay))),
        "member": member,
        "reader": lambda *words: read(list(words)),
        "engine-owner": engine_owner,
        "engine-reader": engine_reader,
    }
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        roles[sys.argv[1]](*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=10_000, help="in all ways together")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds")
    parser.add_argument("--ways", default="asyncio,signal,shared", help="also: end")
    parser.add_argument("--calls", default="get,batch,lease,own,bare", help="what asyncio programs call")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"         seed {options.seed}", flush=True)
    return 0 if trial(options) else 1


if __name__ == "__main__":
    sys.exit(main())
