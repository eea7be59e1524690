"""Members of the existing system that keep objects on a disk of theirs, beside either master: nothing is lost, and nothing is wrong.

    python disks.py OUR_PYTHON PEER_PYTHON [--host 10.213.0.1]

Exits with 1 and says what is not as it should be.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

from cluster import MIB, Master, Node, raw, shown_bytes

SIZE = MIB // 4
# Twice as many as memory holds.
KEYS = [f"block/{number}" for number in range(128)]
# A disk is asked often, and writes without waiting for more.
OFTEN = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "4",
}


def value(key):
    return hashlib.sha256(key.encode()).digest() * (SIZE // 32)


def until(wanted, ask):
    """Asks for 30 s until that is the answer."""
    deadline = time.monotonic() + 30
    while (answer := ask()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def files(folder):
    return sum(path.is_file() for path in folder.rglob("*"))


def seen(owner, other, folder):
    """What a member with a disk and one without say, and whether it is as it should be."""
    found = {}
    stored = [until(0, lambda: owner("put", key, raw(value(key)))) for key in KEYS]
    found["put"] = stored == [0] * len(KEYS)
    # What memory had no room for, at least; the owner writes four at a time.
    found["on disk"] = until(True, lambda: 4 * files(folder) >= len(KEYS))
    for name, member in (("its owner", owner), ("another", other)):
        answers = [(member("get", key), shown_bytes(value(key))) for key in KEYS]
        found[f"read by {name}"] = all(answer == expected for answer, expected in answers)
        found[f"never wrong to {name}"] = all(answer in (shown_bytes(b""), expected) for answer, expected in answers)
    memory = ["placed" in copy for copies in other("batch_get_replica_desc", KEYS).values() for copy in copies]
    found["copies of both kinds"] = set(memory) == {True, False}
    # What is being written at that moment, the existing master may leave.
    found["all is removed"] = until(0, lambda: owner("remove_all", True)) == 0
    found["the disk is emptied"] = until(0, lambda: files(folder)) == 0
    found["nothing is there"] = [other("is_exist", key) for key in KEYS] == [0] * len(KEYS)
    return found


def run(master, member, host, port, log):
    running = Master(master, port, ["--enable_offload=true", "--default_kv_lease_ttl=500"], log)
    owner, other = Node("owner", member, log), Node("other", member, log)
    try:
        with tempfile.TemporaryDirectory() as folder:
            at = ("P2PHANDSHAKE", 16 * MIB, 32 * MIB, "tcp", "", f"127.0.0.1:{port}", None)
            code = owner("setup", f"{host}:{port - 6000}", *at, True, folder)
            assert code == 0, f"the owner could not join: {code}"
            code = other("setup", f"{host}:{port - 5999}", "P2PHANDSHAKE", 0, *at[2:])
            assert code == 0, f"the other could not join: {code}"
            found = seen(owner, other, Path(folder))
            other("close")
            owner("close")
            return found
    finally:
        owner.stop()
        other.stop()
        running.stop()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log", default=os.devnull)
    options = parser.parse_args()
    os.environ.update(OFTEN)
    wrong = 0
    with open(options.log, "ab") as log:
        # Below the ports that the system gives to outgoing connections.
        for name, master, port in (("ours", options.ours, 24100), ("peer", options.peer, 24104)):
            found = run(master, options.peer, options.host, port, log)
            for step in (step for step, good in found.items() if not good):
                wrong += 1
                print(f"master {name}: {step}: no")
            print(f"master {name}: {len(found)} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
