"""Throughput and latency of the store's calls: this package, Mooncake C++ and the Rust interface,
row by row, alternating in one run.

    python store.py HOST --ours PYTHON MASTER [--rust PROGRAM]
        [--peer PYTHON MASTER] [--rows WORD..] [--rounds N]

Each of them is a process that contributes no memory. A second process of the same kind contributes
it, as on another machine. `--serve` and `--own` are the arguments of those processes. This package
is measured with its defaults, where both processes share memory, and again over TCP.

With `--peer`, the script exits with 1 if a row has less than 1.5 times the throughput of Mooncake
C++, or less than twice for values of 1 to 4 MiB. With `--rust`, it exits with 1 if the package adds
more than 5 us to a call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

KIB, MIB = 1 << 10, 1 << 20
# Seconds of one row in one round, and number of rounds after the first one, which touches all
# memory.
SECONDS = 0.25
ROUNDS = 3
# Bytes of the owner's memory that one row of puts may take. The owner has twice that.
MOST = 1 << 30
LAYERS, PAGE = 61, 128 * KIB
# Requirements for each row: throughput as a multiple of that of Mooncake C++, and microseconds in
# addition to Rust.
TIMES, TIMES_AT_1_TO_4_MIB, MORE_US = 1.5, 2.0, 5.0

SIZES = [4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB]
SINGLE = ["put", "put_from", "get", "get_into", "put_tensor", "get_tensor"]


def rows():
    """Yields kinds of calls, bytes of a value, and values of a call."""
    for kind in SINGLE:
        yield from ((kind, size, 1) for size in SIZES)
    for kind in ("batch_put_from", "batch_get_into"):
        yield from ((kind, size, 64) for size in SIZES[:3])
    yield from ((kind, LAYERS * PAGE, 8) for kind in ("multi_put", "multi_get"))
    yield from (("ranges", size, 64) for size in (4 * KIB, 64 * KIB))


def label(kind, size, count):
    long = f"{size // MIB} MiB" if size >= MIB and size % MIB == 0 else f"{size // KIB} KiB"
    if kind.startswith("multi"):
        long = f"{LAYERS} x {PAGE // KIB} KiB"
    return f"{kind} {long}" if count == 1 else f"{kind} {count} x {long}"


class Bench:
    """Calls of one package against memory of another process."""

    def __init__(self, master, host):
        import numpy as np
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        assert self.store.setup(host, "P2PHANDSHAKE", 0, 512 * MIB, "tcp", "", master) == 0
        self.memory = np.random.default_rng(0).integers(0, 256, 128 * MIB, dtype=np.uint8)
        self.at = self.memory.ctypes.data
        assert self.store.register_buffer(self.at, self.memory.nbytes) == 0

    def measure(self, kind, size, count, seconds, tag):
        """Returns megabytes per second and the median of a call in microseconds."""
        prepare = getattr(self, kind)
        call, expected = prepare(size, count, tag)
        moved = size * count
        times, began, puts = [], time.perf_counter(), "put" in kind
        while not times or (time.perf_counter() - began < seconds and not (puts and (len(times) + 1) * moved > MOST)):
            before = time.perf_counter()
            answer = call(len(times))
            times.append(time.perf_counter() - before)
            if expected is not None and answer != expected:
                raise SystemExit(f"{label(kind, size, count)}: {str(answer)[:200]}")
        assert self.store.remove_all(True) >= 0
        return {"MB/s": moved * len(times) / sum(times) / 1e6, "us": statistics.median(times) * 1e6}

    def put(self, size, _, tag):
        value = self.memory[:size].tobytes()
        return lambda i: self.store.put(f"{tag}p{i}", value), 0

    def put_from(self, size, _, tag):
        return lambda i: self.store.put_from(f"{tag}q{i}", self.at, size), 0

    def get(self, size, _, tag):
        value = self.memory[:size].tobytes()
        assert self.store.put("g", value) == 0 and self.store.get("g") == value
        return lambda i: len(self.store.get("g")), size

    def get_into(self, size, _, tag):
        assert self.store.put("g", self.memory[:size].tobytes()) == 0
        return lambda i: self.store.get_into("g", self.at, size), size

    def put_tensor(self, size, _, tag):
        import torch

        tensor = torch.from_numpy(self.memory[:size].copy()).view(torch.float32)
        return lambda i: self.store.put_tensor(f"{tag}t{i}", tensor), 0

    def get_tensor(self, size, _, tag):
        import torch

        tensor = torch.from_numpy(self.memory[:size].copy())
        assert self.store.put_tensor("t", tensor) == 0 and torch.equal(self.store.get_tensor("t"), tensor)
        return lambda i: self.store.get_tensor("t").numel(), size

    def places(self, size, count):
        return [self.at + i * size for i in range(count)], [size] * count

    def batch_put_from(self, size, count, tag):
        at, sizes = self.places(size, count)
        return lambda i: self.store.batch_put_from([f"{tag}b{i}-{k}" for k in range(count)], at, sizes), [0] * count

    def batch_get_into(self, size, count, tag):
        at, sizes = self.places(size, count)
        keys = [f"r{k}" for k in range(count)]
        assert self.store.batch_put_from(keys, at, sizes) == [0] * count
        return lambda i: self.store.batch_get_into(keys, at, sizes), sizes

    def layers(self, count):
        at = [[self.at + (k * LAYERS + n) * PAGE for n in range(LAYERS)] for k in range(count)]
        return at, [[PAGE] * LAYERS] * count

    def multi_put(self, _, count, tag):
        at, sizes = self.layers(count)
        names = range(count)
        put = self.store.batch_put_from_multi_buffers
        return lambda i: put([f"{tag}m{i}-{k}" for k in names], at, sizes), [0] * count

    def multi_get(self, size, count, tag):
        at, sizes = self.layers(count)
        keys = [f"r{k}" for k in range(count)]
        assert self.store.batch_put_from_multi_buffers(keys, at, sizes) == [0] * count
        return lambda i: self.store.batch_get_into_multi_buffers(keys, at, sizes), [size] * count

    def ranges(self, size, count, tag):
        assert self.store.put("r0", self.memory[: 4 * size * count].tobytes()) == 0
        to, of = [[[n * size for n in range(count)]]], [[[4 * n * size for n in range(count)]]]
        sizes = [[[size] * count]]
        return lambda i: self.store.get_into_ranges([self.at], [["r0"]], to, of, sizes), sizes


def serve(master, host):
    """Measures rows on request."""
    bench = Bench(master, host)
    print('=>"ready"', flush=True)
    for line in sys.stdin:
        row = json.loads(line)
        answer = bench.measure(row["kind"], row["size"], row["count"], row["seconds"], row["tag"])
        print("=>" + json.dumps(answer), flush=True)
    bench.store.close()


def own(master, host):
    """Contributes memory until its input ends."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup(host, "P2PHANDSHAKE", 2 * MOST, 16 * MIB, "tcp", "", master) == 0
    print('=>"ready"', flush=True)
    sys.stdin.readline()
    store.close()


class Process:
    """Process that measures on request. Mooncake C++ writes its log between the responses."""

    def __init__(self, name, words, **environment):
        self.name, self.best, self.skips = name, {}, ()
        environment = {**os.environ, **environment}
        pipe = subprocess.PIPE
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=quiet, text=True, env=environment)
        self.answer()

    def answer(self):
        while not (line := self.process.stdout.readline()).startswith("=>"):
            if not line:
                raise SystemExit(f"{self.name} ended; run it alone to see why")
        return json.loads(line[2:])

    def ask(self, kind, size, count, tag):
        return self.send({"kind": kind, "size": size, "count": count, "tag": tag, "seconds": SECONDS})

    def send(self, request):
        """Sends a request, and returns its result."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def has_torch(python):
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def compare(options):
    """Measures all rows of all processes, alternating, and keeps the best of the rounds."""
    pythons = {"ours": options.ours, "peer": options.peer}
    owners, measured = [], []
    for name, given in pythons.items():
        if given:
            python, master = given
            owners.append(Process(f"the owner of {name}", [python, __file__, "--own", master, options.host]))
            words = [python, __file__, "--serve", master, options.host]
            measured.append(Process(name, words))
            if name == "ours":
                measured.append(Process("tcp", words, MC_FORCE_TCP="1"))
    if options.rust:
        measured.append(Process("rust", [options.rust, options.ours[1], options.host]))
        measured[-1].skips = ("put_tensor", "get_tensor")
    wanted = [row for row in rows() if not options.rows or any(word in label(*row) for word in options.rows)]
    if not all(has_torch(given[0]) for given in pythons.values() if given):
        print("without torch there are no rows of tensors")
        wanted = [row for row in wanted if "tensor" not in row[0]]
    for turn in range(options.rounds + 1):
        for row in wanted:
            for one in measured:
                if row[0] in one.skips:
                    continue
                got = one.ask(*row, f"{one.name}{turn}")
                # The first round touches memory and opens connections.
                before = one.best.get(row, got)
                if turn > 1:
                    got = {"MB/s": max(got["MB/s"], before["MB/s"]), "us": min(got["us"], before["us"])}
                one.best[row] = got
    for one in [*measured, *owners]:
        one.end()
    return wanted, {one.name: one.best for one in measured}


def table(wanted, best):
    """Prints the results, and returns the rows that miss their requirements."""
    missed = []
    print(f"{'':26}{'ours':>18}{'over tcp':>18}{'rust':>12}{'adds':>8}{'peer':>18}{'ratio':>7}{'tcp':>6}  (MB/s, us a call)")
    for row in wanted:
        name, ours, tcp = label(*row), best["ours"][row], best["tcp"][row]
        line = f"{name:26}" + "".join(f"{one['MB/s']:10.0f}{one['us']:8.0f}" for one in (ours, tcp))
        rust = best.get("rust", {}).get(row)
        adds = ours["us"] - rust["us"] if rust else None
        line += f"{rust['us']:12.0f}{adds:8.1f}" if rust else " " * 20
        # A batch is one call, but with as many values.
        if adds is not None and row[1] == SIZES[0] and row[2] == 1 and adds > MORE_US:
            missed.append(f"{name}: {adds:.1f} us more than in Rust, at most {MORE_US:.0f}")
        peer = best.get("peer", {}).get(row)
        if peer:
            ratio, over_tcp = (one["MB/s"] / peer["MB/s"] for one in (ours, tcp))
            line += f"{peer['MB/s']:10.0f}{peer['us']:8.0f}{ratio:7.2f}{over_tcp:6.2f}"
            least = TIMES_AT_1_TO_4_MIB if MIB <= row[1] <= 4 * MIB else TIMES
            if ratio < least:
                missed.append(f"{name}: {ratio:.2f} times the peer's throughput, at least {least}")
        print(line)
    return missed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("--ours", nargs=2, required=True)
    parser.add_argument("--peer", nargs=2)
    parser.add_argument("--rust")
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    began = time.perf_counter()
    missed = table(*compare(parser.parse_args()))
    print(f"{time.perf_counter() - began:.0f} s; the best of each row's rounds")
    for one in missed:
        print(f"SHORT  {one}")
    return 1 if missed else 0


if __name__ == "__main__":
    roles = {"--own": own, "--serve": serve}
    if sys.argv[1] in roles:
        roles[sys.argv[1]](*sys.argv[2:])
    else:
        sys.exit(main())
