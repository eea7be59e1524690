"""Time to write objects to a disk and to read them back: this package and Mooncake C++, each with
its own master, alternating in one run.

    python offload.py HOST FOLDER --ours PYTHON MASTER [--peer PYTHON MASTER]
        [--rounds N] [--mib N] [--heartbeat SECONDS]

One process contributes memory and a folder. Another process puts objects of 1 MiB, waits until all
are on the disk, drops the replicas in memory, and reads all objects. Masters must have been started
with `--enable_offload=true --default_kv_lease_ttl=500`. `--own` and `--measure` are the arguments
of those processes. The script exits with 1 if this package takes more than half the time of
Mooncake C++, or a byte is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

MIB = 1 << 20
BATCH = 64
# Required speed, as a multiple of that of Mooncake C++.
TIMES = 2.0
# Mooncake C++ writes objects once there are this many for one file.
SETTINGS = {"MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(BATCH)}
PATIENCE = 180


def own(host, folder, master, mib):
    """Contributes memory for all objects, and the folder."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    memory = (mib + mib // 2) * MIB
    said = store.setup(host, "P2PHANDSHAKE", memory, 64 * MIB, "tcp", "", master, None, True, folder)
    print(f"ready {store.get_hostname()}" if said == 0 else f"setup: {said}", flush=True)
    sys.stdin.readline()
    store.close()


def measure(host, segment, master, mib):
    """Prints seconds to the disk of a segment's owner and back, as JSON."""
    import numpy as np
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup(host, "P2PHANDSHAKE", 0, 256 * MIB, "tcp", "", master) == 0
    memory = np.empty(BATCH * MIB, dtype=np.uint8)
    at = memory.ctypes.data
    assert store.register_buffer(at, memory.nbytes) == 0
    keys = [f"offload/{os.getpid()}/{number}" for number in range(mib)]
    batches = [keys[first : first + BATCH] for first in range(0, mib, BATCH)]
    places = [at + number * MIB for number in range(BATCH)]
    noise = np.random.default_rng(0).integers(0, 256, MIB + mib, dtype=np.uint8)

    begun = time.perf_counter()
    for first, batch in enumerate(batches):
        for number in range(len(batch)):
            start = first * BATCH + number
            memory[number * MIB : (number + 1) * MIB] = noise[start : start + MIB]
        said = store.batch_put_from(batch, places[: len(batch)], [MIB] * len(batch))
        assert all(code == 0 for code in said), said
    put = time.perf_counter() - begun

    waiting = keys
    while waiting:
        assert time.perf_counter() - begun < PATIENCE, f"{len(waiting)} objects are not on the disk"
        known = store.batch_get_replica_desc(waiting[:512])
        there = {key for key, all in known.items() if any(one.is_local_disk_replica() for one in all)}
        waiting = [key for key in waiting if key not in there]
        if not there:
            # No event announces the condition.
            time.sleep(0.02)
    offloaded = time.perf_counter() - begun

    left = keys
    while left:
        assert time.perf_counter() - begun < PATIENCE, f"{len(left)} objects stay in memory"
        # The leases that this query granted must expire.
        time.sleep(0.6)
        cleared = set(store.batch_replica_clear(left, segment))
        left = [key for key in left if key not in cleared]
    forget_pages()

    wrong, reading = 0, 0.0
    for first, batch in enumerate(batches):
        memory[:] = 0
        before = time.perf_counter()
        said = store.batch_get_into(batch, places[: len(batch)], [MIB] * len(batch))
        reading += time.perf_counter() - before
        assert all(code == MIB for code in said), said
        for number in range(len(batch)):
            start = first * BATCH + number
            wrong += not np.array_equal(memory[number * MIB : (number + 1) * MIB], noise[start : start + MIB])
    store.unregister_buffer(at)
    store.remove_all()
    store.close()
    print(json.dumps({"put": put, "offload": offloaded, "read": reading, "wrong": wrong}), flush=True)


def forget_pages():
    """Drops the kernel's page cache, so that reads come from the disk."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as pages:
            pages.write("1")
    except OSError:
        print("the kernel keeps its pages: these are not a disk's times", file=sys.stderr)


def turn(side, host, folder, mib, heartbeat):
    """Runs one owner and one measurement."""
    python, master = side
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    words = [python, __file__, host, folder, "--mib", str(mib), "--master", master]
    environment = os.environ | SETTINGS | {"MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": str(heartbeat)}
    owner = subprocess.Popen([*words, "--own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        for line in owner.stdout:
            if line.startswith("ready "):
                segment = line.split()[1]
                break
        else:
            raise SystemExit("offload.py: the owner ended")
        done = subprocess.run([*words, "--measure", segment], stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        owner.communicate("over\n", timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def compare(arguments):
    sides = {"ours": arguments.ours} | ({"peer": arguments.peer} if arguments.peer else {})
    turns = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            folder = os.path.join(arguments.folder, name)
            turns[name].append(turn(side, arguments.host, folder, arguments.mib, arguments.heartbeat))
    short = []
    print(f"{arguments.mib} objects of 1 MiB, heartbeats every {arguments.heartbeat} s, medians of {arguments.rounds}, in seconds")
    for row in ("put", "offload", "read"):
        middle = {name: statistics.median(one[row] for one in all) for name, all in turns.items()}
        line = f"{row:<8}" + "".join(f"  {name} {seconds:7.2f}" for name, seconds in middle.items())
        if "peer" in middle:
            times = middle["peer"] / middle["ours"]
            line += f"  {times:5.2f} times as fast"
            if row != "put" and times < TIMES:
                short.append(f"{row}: {times:.2f} times as fast, wanted {TIMES}")
        print(line)
    for name, all in turns.items():
        wrong = sum(one["wrong"] for one in all)
        print(f"{name}: {wrong} wrong")
        if wrong:
            short.append(f"{name}: {wrong} objects with other bytes")
    if short:
        raise SystemExit("not what is wanted:\n  " + "\n  ".join(short))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("folder")
    parser.add_argument("--ours", nargs=2)
    parser.add_argument("--peer", nargs=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=2048)
    # Both packages have this default.
    parser.add_argument("--heartbeat", type=int, default=10)
    parser.add_argument("--master")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--measure", metavar="SEGMENT")
    arguments = parser.parse_args()
    if arguments.own:
        own(arguments.host, arguments.folder, arguments.master, arguments.mib)
    elif arguments.measure:
        measure(arguments.host, arguments.measure, arguments.master, arguments.mib)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
