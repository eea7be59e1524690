"""Puts and gets between two processes, by whichever `mooncake` the interpreter has: one line of JSON.

    python store.py MASTER HOST          (the owner of the memory is a second process of the same interpreter)
    python store.py --table OURS [PEER]  (files that hold such lines)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

MIB = 1 << 20
SECONDS = 1.0
# Bytes that one row of puts may take of the owner's memory.
MOST = 1 << 30


class Bench:
    """Measures calls against a cluster whose memory is elsewhere."""

    def __init__(self, master, host):
        import numpy as np
        from mooncake.store import MooncakeDistributedStore

        self.rows = {}
        self.store = MooncakeDistributedStore()
        assert self.store.setup(host, "P2PHANDSHAKE", 0, 512 * MIB, "tcp", "", master) == 0
        self.memory = np.random.default_rng(0).integers(0, 256, 256 * MIB, dtype=np.uint8)
        self.at = self.memory.ctypes.data
        assert self.store.register_buffer(self.at, self.memory.nbytes) == 0

    def row(self, name, call, size, puts=False):
        """Calls for a second, or until the memory is full."""
        call(-1)
        done, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < SECONDS and not (puts and done * size > MOST):
            call(done)
            done += 1
        self.rows[name] = {"MB/s": done * size / spent / 1e6, "us": spent / done * 1e6}
        if puts:
            assert self.store.remove_all(True) >= 0

    def single(self, size):
        store, value = self.store, self.memory[:size].tobytes()
        label = f"{size >> 10} KiB"

        def expect(code, wanted):
            assert code == wanted, (code, wanted)

        self.row(f"put {label}", lambda i: expect(store.put(f"p{i}", value), 0), size, True)
        self.row(f"put_from {label}", lambda i: expect(store.put_from(f"q{i}", self.at, size), 0), size, True)
        expect(store.put("g", value), 0)
        self.row(f"get {label}", lambda i: expect(len(store.get("g")), size), size)
        self.row(f"get_into {label}", lambda i: expect(store.get_into("g", self.at, size), size), size)
        store.remove_all(True)

    def batch(self, size, count=64):
        store, names = self.store, range(count)
        at, sizes = [self.at + i * size for i in names], [size] * count
        label = f"{count} x {size >> 10} KiB"

        def put(i):
            assert store.batch_put_from([f"{i}-{k}" for k in names], at, sizes) == [0] * count

        def get(_):
            assert store.batch_get_into([f"0-{k}" for k in names], at, sizes) == sizes

        self.row(f"batch_put_from {label}", put, count * size, True)
        put(0)
        self.row(f"batch_get_into {label}", get, count * size)
        store.remove_all(True)

    def layers(self, keys=8, layers=61, page=128 << 10):
        store = self.store
        at = [[self.at + (k * layers + n) * page for n in range(layers)] for k in range(keys)]
        sizes, total = [[page] * layers] * keys, keys * layers * page

        def put(i):
            assert store.batch_put_from_multi_buffers([f"m{i}-{k}" for k in range(keys)], at, sizes) == [0] * keys

        def get(_):
            read = store.batch_get_into_multi_buffers([f"m0-{k}" for k in range(keys)], at, sizes)
            assert read == [layers * page] * keys

        def ranges(_):
            to, of = [[[n * 4096 for n in range(64)]]], [[[n * 16384 for n in range(64)]]]
            assert store.get_into_ranges([self.at], [["m0-0"]], to, of, [[[4096] * 64]]) == [[[4096] * 64]]

        label = f"{keys} x {layers} x {page >> 10} KiB"
        self.row(f"multi-buffer put {label}", put, total, True)
        put(0)
        self.row(f"multi-buffer get {label}", get, total)
        self.row("get_into_ranges 64 x 4 KiB", ranges, 64 * 4096)
        store.remove_all(True)


def own(master, host):
    """Offers memory until it is told to stop."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup(host, "P2PHANDSHAKE", 2 << 30, 16 * MIB, "tcp", "", master) == 0
    print("ready", flush=True)
    sys.stdin.readline()
    store.close()


def measure(master, host):
    owner = subprocess.Popen(
        [sys.executable, __file__, "--own", master, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    # The existing package writes its log to the same place.
    while "ready" not in (line := owner.stdout.readline()):
        assert line, "the owner of the memory ended"
    bench = Bench(master, host)
    for size in (4 << 10, 64 << 10, MIB, 4 * MIB, 64 * MIB):
        bench.single(size)
    for size in (4 << 10, 64 << 10, MIB):
        bench.batch(size)
    bench.layers()
    bench.store.close()
    owner.communicate("\n")
    print("=>" + json.dumps(bench.rows), flush=True)


def rows_of(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return json.loads(next(line[2:] for line in file if line.startswith("=>")))


def table(ours, peer=None):
    ours, peer = rows_of(ours), rows_of(peer) if peer else {}
    print(f"{'':36}{'ours':>22}" + (f"{'peer':>22}{'ratio':>8}" if peer else ""))
    for name, row in ours.items():
        line = f"{name:36}{row['MB/s']:10.1f} MB/s{row['us']:8.0f}us"[:62]
        if name in peer:
            other = peer[name]
            line += f"{other['MB/s']:10.1f} MB/s{other['us']:8.0f}us{row['MB/s'] / other['MB/s']:7.2f}"
        print(line)


if __name__ == "__main__":
    words = sys.argv[1:]
    {"--own": own, "--table": table}.get(words[0], measure)(*(words[1:] if words[0].startswith("--") else words))
