"""Objects on disks, between several builds of the package: every build reads the objects that a
disk's owner has written, with a master of each.

    python disks.py OUR_PYTHON NAME=PEER_PYTHON .. [--host 10.213.0.1]

In each cluster one client has memory and a disk, and puts twice as much as the memory holds.
Clients without memory, one of each build, read the objects once no memory has them any more, and
again after the owner has replaced and removed some. docs/disk.md lists operations that Mooncake C++
does not support; they are left out. The script prints differences and exits with 1 if there are
any.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time

from cluster import MIB, Master, Node, of, raw, shown_bytes
from matrix import Checks

# Minimum that Mooncake C++ supports.
MEMORY = 16 * MIB
# Lease time in seconds.
LEASE = 0.2
FLAGS = ["--enable_offload=true", f"--default_kv_lease_ttl={1000 * LEASE:.0f}", "--client_ttl=60"]
SETTINGS = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(32 * MIB),
    # Mooncake C++ writes objects once there are this many for one file.
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
}
PATIENCE = 30


def until(what, done):
    """Polls until a condition holds, because no event announces it."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not in {PATIENCE} s: {what}")
        time.sleep(0.05)


def values():
    """Yields lengths around the block sizes of disks and files, with twice the size of the memory
    in total.
    """
    lengths = [1, 100, 4095, 4096, 4097, 70_001, MIB, 3 * MIB + 1, *[2 * MIB] * (2 * MEMORY // (2 * MIB))]
    return {f"disk/{number}": random.Random(number).randbytes(length) for number, length in enumerate(lengths)}


def store(checks, owner, call, wanted):
    for key, value in wanted.items():
        said = []
        # A put fails for lack of space until objects have been written to the disk and evicted.
        until(f"{call} of {key}", lambda: said.append(owner(call, key, raw(value))) or said[-1] != -200)
        checks.same(f"{call} of {key}", said[-1], 0)


def copies(node, keys):
    """Returns the locations of the replicas of the keys."""
    known = node("batch_get_replica_desc", list(keys))
    kinds = {key: {"memory" if one.get("memory", True) else "disk" for one in known.get(key, [])} for key in keys}
    return {key: "+".join(sorted(all)) for key, all in kinds.items()}


def leave_memory(owner, reader, keys):
    """Waits until all objects are on the disk only."""
    until("written to the disk", lambda: all("disk" in all for all in copies(reader, keys).values()))
    segment = owner("get_hostname")

    def cleared():
        kept = [key for key, all in copies(reader, keys).items() if "memory" in all]
        # The leases that this query granted must expire.
        time.sleep(2 * LEASE)
        owner("batch_replica_clear", kept, segment)
        return not kept

    until("dropped from memory", cleared)


def missed(said, wanted):
    """Returns whether misses are the only differences, as when a lease expires during a read on a
    busy machine.
    """
    if isinstance(wanted, list) and isinstance(said, list):
        return len(said) == len(wanted) and all(one == two or missed(one, two) for one, two in zip(said, wanted))
    return said < 0 if isinstance(said, int) else said == shown_bytes(b"")


def read(checks, what, wanted, ask):
    """Repeats reads that miss until the objects are found."""
    deadline = time.monotonic() + PATIENCE
    while (said := ask()) != wanted and missed(said, wanted) and time.monotonic() < deadline:
        pass
    checks.same(what, said, wanted)


def read_all(checks, what, readers, wanted):
    # Other kinds of reads use one object of each length.
    some = dict(list(wanted.items())[:8])
    keys, largest = list(some), max(len(value) for value in some.values())
    for reader in readers:
        for key, value in wanted.items():
            label = f"{what}: {key}, {len(value)} bytes, as {reader.name} reads it"
            read(checks, label, shown_bytes(value), lambda: reader("get", key))
        for first in range(0, len(keys), 4):
            batch = keys[first : first + 4]
            all_of_them = [shown_bytes(wanted[key]) for key in batch]
            read(checks, f"{what}: {batch} as {reader.name} reads them", all_of_them, lambda: reader("get_batch", batch))
        checks.same("memory", reader.send({"call": "buffer", "name": "m", "size": largest}), 0)
        for key, value in some.items():
            label, place = f"{what}: {key} as {reader.name} reads it into memory", of("buffer", {"name": "m"})
            read(checks, label, len(value), lambda: reader("get_into", key, place, largest))
            got = reader.send({"call": "dump", "name": "m", "size": len(value)})
            checks.same(label, got, shown_bytes(value))


def replace(checks, owner, of_master, changed):
    """Replaces values whose old versions are in no memory."""
    if of_master == "ours":
        store(checks, owner, "upsert", changed)
        return
    # The master of Mooncake C++ rejects some upserts of objects that are only on disks, and loses
    # the value.
    for key in changed:
        checks.same(f"remove {key}", owner("remove", key, True), 0)
    store(checks, owner, "put", changed)


def cluster(checks, host, port, of_master, of_owner, nodes, folder):
    owner, *readers = nodes
    wanted = values()
    place = [host, "P2PHANDSHAKE"]
    at = ["tcp", "", f"127.0.0.1:{port}"]
    checks.same("setup of the owner", owner("setup", *place, MEMORY, 16 * MIB, *at, None, True, folder), 0)
    for reader in readers:
        checks.same("setup of a reader", reader("setup", *place, 0, 32 * MIB, *at), 0)
    store(checks, owner, "put", wanted)
    leave_memory(owner, readers[0], list(wanted))
    read_all(checks, "first", readers, wanted)
    checks.same("where it was read from", set(copies(readers[0], wanted).values()), {"disk"})
    changed = {"disk/4": b"another", "disk/6": random.Random(100).randbytes(MIB)}
    replace(checks, owner, of_master, changed)
    checks.same("remove", owner("remove", "disk/5", True), 0)
    for reader in readers:
        checks.same(f"{reader.name} finds what was removed", reader("get", "disk/5"), shown_bytes(b""))
    # Mooncake C++ never writes a key to its disk again, so its value stays in memory.
    if of_owner == "ours":
        leave_memory(owner, readers[0], list(changed))
    del wanted["disk/5"]
    read_all(checks, "changed", readers, {key: changed.get(key, value) for key, value in wanted.items() if len(value) <= MIB})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("peers", nargs="+", metavar="NAME=PYTHON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log", default=os.devnull)
    options = parser.parse_args()
    pythons = {"ours": options.ours, **dict(peer.split("=", 1) for peer in options.peers)}
    checks = Checks()
    # A client of one release of Mooncake C++ cannot clear replicas at a master of another one.
    pairs = [
        (master, owner) for master in pythons for owner in pythons if master == owner or "ours" in (master, owner)
    ]
    with open(options.log, "ab") as log:
        for index, (of_master, of_owner) in enumerate(pairs):
            begun, before = time.monotonic(), (checks.done, len(checks.failed))
            with tempfile.TemporaryDirectory() as folder:
                port = 21081 + 2 * index
                master = Master(pythons[of_master], port, FLAGS, log)
                nodes = [Node("the owner", pythons[of_owner], log, SETTINGS)]
                nodes += [Node(name, python, log) for name, python in pythons.items()]
                try:
                    cluster(checks, options.host, port, of_master, of_owner, nodes, folder)
                except RuntimeError as error:
                    checks.failed.append(str(error)[:500])
                finally:
                    for node in nodes:
                        # Mooncake C++ takes seconds to close its disk.
                        node.process.kill()
                        node.stop()
                    master.stop()
            failed = checks.failed[before[1] :]
            print(
                f"master of {of_master}, disk of {of_owner}: {checks.done - before[0]} comparisons, {len(failed)} differ, "
                f"{time.monotonic() - begun:.1f} s"
            )
            for failure in failed:
                print(f"  {failure}")
    return 1 if checks.failed or not checks.done else 0


if __name__ == "__main__":
    sys.exit(main())
