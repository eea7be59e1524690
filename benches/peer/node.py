"""Node of Mooncake C++ that executes commands.

Reads one JSON command per line on standard input and writes one JSON response per line, so that a
test or a bench in another language can drive real clients of Mooncake C++: ["put", key, "hex"],
["get", key], ...
"""

import ctypes
import json
import mmap
import statistics
import sys
import time

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store = MooncakeDistributedStore()
buffers = {}


def buffer(size):
    """Returns a registered buffer of at least `size` bytes, kept for later calls."""
    for have, (address, memory) in buffers.items():
        if have >= size:
            return address, memory
    size = max(size, 1 << 16)
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = store.register_buffer(address, size)
    if code != 0:
        raise RuntimeError(f"register_buffer: {code}")
    buffers[size] = (address, memory)
    return address, memory


def config(replicas):
    value = ReplicateConfig()
    value.replica_num = replicas
    return value


def setup(hostname, metadata, segment, local, master):
    return store.setup(hostname, metadata, segment, local, "tcp", "", master)


def put(key, hexed, replicas=1):
    return store.put(key, bytes.fromhex(hexed), config(replicas))


def put_from(key, hexed):
    data = bytes.fromhex(hexed)
    address, memory = buffer(len(data))
    memory[: len(data)] = data
    return store.put_from(key, address, len(data))


def get_into(key, size):
    address, memory = buffer(size)
    count = store.get_into(key, address, size)
    return [count, memory[: max(count, 0)].hex()]


def batch_put_from(keys, hexes):
    values = [bytes.fromhex(h) for h in hexes]
    address, memory = buffer(sum(map(len, values)))
    at, addresses = 0, []
    for data in values:
        memory[at : at + len(data)] = data
        addresses.append(address + at)
        at += len(data)
    return store.batch_put_from(keys, addresses, [len(d) for d in values])


def batch_get_into(keys, size):
    address, memory = buffer(size * len(keys))
    counts = store.batch_get_into(keys, [address + i * size for i in range(len(keys))], [size] * len(keys))
    return [[n, memory[i * size : i * size + max(n, 0)].hex()] for i, n in enumerate(counts)]


def median_us(call, count):
    """Returns the median time of `call(i)` in microseconds, and whether every call succeeded."""
    times, good = [], True
    for i in range(count):
        before = time.perf_counter_ns()
        result = call(i)
        times.append((time.perf_counter_ns() - before) / 1000)
        good = good and result >= 0
    return [statistics.median(times), good]


def bench_put(prefix, size, count):
    address, _ = buffer(size)
    return median_us(lambda i: store.put_from(f"{prefix}{i}", address, size), count)


def bench_get(prefix, size, count):
    address, _ = buffer(size)
    return median_us(lambda i: store.get_into(f"{prefix}{i}", address, size), count)


def bench_exist(prefix, count):
    return median_us(lambda i: store.is_exist(f"{prefix}{i}"), count)


def bench_batch_exist(prefix, keys, count):
    names = [f"{prefix}{i}" for i in range(keys)]
    return median_us(lambda i: sum(store.batch_is_exist(names)), count)


def peak_rss():
    """Returns the largest resident size so far, in bytes."""
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


COMMANDS = {
    "setup": setup,
    "put": put,
    "put_from": put_from,
    "get": lambda key: store.get(key).hex(),
    "get_into": get_into,
    "exist": lambda key: store.is_exist(key),
    "batch_exist": lambda keys: list(store.batch_is_exist(keys)),
    "batch_put_from": lambda keys, hexes: list(batch_put_from(keys, hexes)),
    "batch_get_into": batch_get_into,
    "put_batch": lambda keys, hexes: store.put_batch(keys, [bytes.fromhex(h) for h in hexes]),
    "get_batch": lambda keys: [b.hex() for b in store.get_batch(keys)],
    "upsert": lambda key, hexed: store.upsert(key, bytes.fromhex(hexed)),
    "size": lambda key: store.get_size(key),
    "remove": lambda key, force=False: store.remove(key, force),
    "batch_remove": lambda keys, force=False: list(store.batch_remove(keys, force)),
    "remove_by_regex": lambda pattern, force=False: store.remove_by_regex(pattern, force),
    "remove_all": lambda force=False: store.remove_all(force),
    "replicas": lambda key: len(store.get_replica_desc(key)),
    "hostname": lambda: store.get_hostname(),
    "health": lambda: store.health_check(),
    "bench_put": bench_put,
    "bench_get": bench_get,
    "bench_exist": bench_exist,
    "bench_batch_exist": bench_batch_exist,
    "peak_rss": peak_rss,
    "close": lambda: store.close(),
}


def main():
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"ok": COMMANDS[name](*arguments)}
        except Exception as error:  # the driver decides what an exception means
            answer = {"error": f"{type(error).__name__}: {error}"}
        # The library logs to standard output, too; the mark distinguishes a response from a log.
        print("\x01" + json.dumps(answer), flush=True)


main()
