"""Structured objects, storage groups, the catalogue and `reshard` in two builds of the package.
Each build reads what the other writes, byte by byte.

    python modules.py OUR_PYTHON PEER_PYTHON [--host 10.213.0.1]

Stores are recorders of calls. With `--host`, a cluster of each build's master is used, too. The
script prints differences and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

WORKER = Path(__file__).parent / "modules_worker.py"
DUCKS = ("plain", "removal", "ranges", "pool", "tensors", "from")
POOLED = ("pool", "tensors", "from")
PEER = "Mooncake C++"
SPOILED = ("dicts", "heavy", "images")
SEEDS = 40
# Reads of single rows of a column, and the check of a merged stage before it is removed, make other
# calls, as docs/compatibility.md explains.
COMPARED_CALLS = ("put", "batch_put_from", "acquire", "put_tensor", "pub_tensor", "put_tensor_from", "put_from", "batch_remove", "remove")


class Worker:
    """Process of one build."""

    def __init__(self, name, python):
        self.name = name
        self.process = subprocess.Popen(
            [python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            # Mooncake C++ writes its log between the results.
            if line.startswith("=>"):
                answer = json.loads(line[2:])
                if "raised" in answer:
                    raise RuntimeError(f"{self.name} {command[0]}: {answer['raised']}")
                return answer["returned"]
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Checks:
    """Counter of comparisons, and list of those that failed."""

    def __init__(self):
        self.done, self.failed = 0, []

    def same(self, what, one, other):
        self.done += 1
        found = difference(one, other)
        if found is not None:
            self.failed.append(f"{what}: {found}")


def difference(one, other, path=""):
    """Returns the first difference of two values, and where it is."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((found for key in one if (found := difference(one[key], other[key], f"{path}/{key}"))), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other))
        return next((found for at, (a, b) in pairs if (found := difference(a, b, f"{path}/{at}"))), None)
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
    return None if one == other else f"{path}: {str(one)[:200]} / {str(other)[:200]}"


def of_interest(calls):
    return [call for call in calls if call[0] in COMPARED_CALLS]


def recorders(checks, workers):
    """Each build writes to a recorder. The other one reads the same values."""
    for kind in DUCKS:
        made = {}
        for worker in workers:
            worker("duck", kind)
            refs = worker("write")
            made[worker.name] = refs, worker("values"), of_interest(worker("calls")), worker("stored", refs)
        ours, theirs = made.values()
        checks.same(f"{kind}: number of calls of writes", len(ours[2]), len(theirs[2]))
        for at, (one, other) in enumerate(zip(ours[2], theirs[2])):
            checks.same(f"{kind}: call {at} of writes", one, other)
        checks.same(f"{kind}: stored bytes", ours[3], theirs[3])
        read = {}
        for writer, (refs, values, *_) in made.items():
            for reader in workers:
                reader("duck", kind)
                reader("load", values)
                read[writer, reader.name] = reader("read", refs)
                reader("calls")
                reader("remove", {name: refs[name] for name in refs if name not in ("batch", "named")})
                # The batches that were appended to are parts of others.
                checks.same(f"{kind}: {reader.name} removes what {writer} wrote", reader("values"), {})
        compare_reads(checks, kind, read, kind in POOLED)


def compare_reads(checks, what, read, is_pooled):
    """Compares everything that was read: one result for each writer and reader."""
    first = next(iter(read.values()))
    for (writer, reader), found in read.items():
        # Mooncake C++ returns arrays in these columns in memory that it has given back to the pool.
        is_spoiled = is_pooled and reader == PEER
        expected, got = (without(first, SPOILED), without(found, SPOILED)) if is_spoiled else (first, found)
        checks.same(f"{what}: {reader} reads what {writer} wrote", expected, got)


def without(value, names):
    if isinstance(value, dict):
        return {key: without(one, names) for key, one in value.items() if key not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


def clusters(checks, workers, host, port):
    """Each build writes to one cluster, with a master of either build. Both read everything."""
    from cluster import Master

    for of, python in [(worker.name, worker.python) for worker in workers]:
        with tempfile.TemporaryFile() as log:
            master = Master(python, port, ["--default_kv_lease_ttl=600000", "--client_ttl=600"], log)
            fresh = [Worker(worker.name, worker.python) for worker in workers]
            try:
                for worker in fresh:
                    checks.same(f"master of {of}: setup of {worker.name}", worker("setup", host, f"{host}:{port}"), 0)
                refs = {worker.name: worker("write") for worker in fresh}
                stored = [reader("stored", some) for some in refs.values() for reader in fresh]
                for other in stored[1:]:
                    checks.same(f"master of {of}: stored bytes", stored[0], other)
                read = {(writer, reader.name): reader("read", some) for writer, some in refs.items() for reader in fresh}
                compare_reads(checks, f"master of {of}", read, True)
                for layer, worker in enumerate(fresh):
                    expected = worker("engram", layer, True)
                    other = next(one for one in fresh if one is not worker)
                    checks.same(f"master of {of}: tables of {worker.name}", expected, other("engram", layer, False))
                for writer, some in refs.items():
                    other = next(worker for worker in fresh if worker.name != writer)
                    other("remove", {name: one for name, one in some.items() if name not in ("batch", "named")})
            finally:
                for worker in fresh:
                    worker.stop()
                master.stop()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("theirs")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=27_400)
    options = parser.parse_args()
    workers = []
    for name, python in (("ours", options.ours), (PEER, options.theirs)):
        workers.append(Worker(name, python))
        workers[-1].python = python
    checks = Checks()
    recorders(checks, workers)
    for seed in range(SEEDS):
        for call in ("catalog", "reshard"):
            checks.same(f"{call} {seed}", *[worker(call, seed) for worker in workers])
    for worker in workers:
        worker.stop()
    if options.host:
        clusters(checks, workers, options.host, options.port)
    print(f"{checks.done} comparisons, {len(checks.failed)} differences")
    print("\n".join(checks.failed))
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
