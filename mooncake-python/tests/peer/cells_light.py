"""IPC clients and full clients: scenarios of the matrix with stores of `setup_dummy`, each attached
to its own `mooncake_client`.

    python cells_light.py OUR_PYTHON PEER_PYTHON [--host 10.213.0.1] [--only SCENARIO ..]

The scenarios run with our master and with that of Mooncake C++. Results of our IPC client are
compared with those of our full client. A difference must be listed in docs/compatibility.md, and
every listed difference must occur.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cells
import cells_cluster
import cells_objects
from cluster import Group

HEADING = "## Differences of a shared client"


def mounting(run):
    """Mounts segments, which only the `mooncake_client` can do."""
    a, b, c = run.members
    for step, call, args in [
        ("file", "mount_segment", ["/dev/shm/there is none", 1 << 20]),
        ("unmount", "unmount_segment", [["1-2"]]),
        ("local disk", "unmount_local_disk_segment", []),
    ]:
        run(step, c, call, *args)
    answer = a("allocate_and_mount_segment", 16 << 20)
    run.saw("allocated", [answer["ret"], len(answer["segment_ids"]), answer["allocated_size"]])
    run("free", a, "unmount_and_free_segment", answer["segment_ids"])
    run("health", b, "health_check")


OBJECTS = next(group.scenarios for group in cells_objects.GROUPS)
CLUSTER = [
    cells_cluster.pins, cells_cluster.groups, cells_cluster.placement, cells_cluster.replicas, cells_cluster.tasks,
    cells_cluster.clearing,
]  # fmt: skip
GROUP = Group([*OBJECTS, *CLUSTER, mounting], ["--default_kv_lease_ttl=2000"])


class LightCluster(cells.Cluster):
    """Master and three IPC clients, each with its own `mooncake_client`, which contributes the
    memory.
    """

    def __init__(self, *args):
        self.owners = []
        self.folder = tempfile.TemporaryDirectory(prefix="mooncake-light-")
        super().__init__(*args)

    def set_up(self, node, host, directory, size, settings, port):
        path = str(Path(self.folder.name) / node.name)
        words = [
            f"--host={host}", f"--metadata_server={directory}", f"--global_segment_size={size}",
            f"--master_server_address=127.0.0.1:{port}", f"--ipc_socket_path={path}",
        ]  # fmt: skip
        program = str(Path(node.process.args[0]).parent / "mooncake_client")
        owner = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.owners.append(owner)
        deadline = time.monotonic() + 30
        while not os.path.exists(path):
            if owner.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the mooncake_client of {node.name} did not come up: {owner.poll()}")
            time.sleep(0.05)
        return node("setup_dummy", 0, 32 << 20, path)

    def stop(self):
        super().stop()
        for owner in self.owners:
            owner.terminate()
        for owner in self.owners:
            try:
                owner.wait(30)
            except subprocess.TimeoutExpired:
                owner.kill()
                owner.wait()
        self.folder.cleanup()


def measured(options, log):
    """Returns the results of every step with full and with IPC clients, for our master and that of
    Mooncake C++.
    """
    seen = {}
    scenarios = [one for one in GROUP.scenarios if one.__name__ in options.only or not options.only]
    numbers = itertools.count(40)
    for master in cells.MASTERS:
        for kind, made in (("real", cells.Cluster), ("light", LightCluster)):
            steps = seen[master, kind] = {}
            cluster = made(options, (master, "ours"), next(numbers), GROUP, log)
            try:
                for scenario in scenarios:
                    for step, value in cluster.run(scenario).items():
                        steps[f"{scenario.__name__}: {step}"] = value
                    if any(node.process.poll() is not None for node in cluster.members):
                        raise RuntimeError(f"a member ended in {scenario.__name__}")
            finally:
                cluster.stop()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--only", nargs="*", default=[], metavar="SCENARIO")
    parser.add_argument("--documents", type=Path, default=cells.DOCUMENT)
    parser.add_argument("--log", default=os.devnull)
    options = parser.parse_args()
    with open(options.log, "ab") as log:
        seen = measured(options, log)
    rows = cells.listed(options.documents, HEADING)
    used, unlisted, steps = set(), 0, 0
    for master in cells.MASTERS:
        real, light = seen[master, "real"], seen[master, "light"]
        differ = 0
        for step in dict.fromkeys([*real, *light]):
            steps += 1
            one, other = (answers.get(step, cells.NO_ANSWER) for answers in (real, light))
            if one == other:
                continue
            differ += 1
            match = [row for row in rows if fnmatch.fnmatchcase(step, row[0])]
            used.update(match)
            if not match:
                unlisted += 1
                print(f"UNLISTED  {step}, {master} master\n    real  {cells.short(one)}\n    light {cells.short(other)}")
        print(f"master of {master}: {len(real)} steps, {differ} answers differ")
    unneeded = [] if options.only else [row for row in rows if row not in used]
    for row in unneeded:
        print(f"LISTED, BUT NO LONGER DIFFERENT  {row[0]}")
    return 1 if unlisted or unneeded or not steps else 0


if __name__ == "__main__":
    sys.exit(main())
