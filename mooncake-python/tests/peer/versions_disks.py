"""Disks in clusters of several versions: prefetches to memory, and moves of managed weights.

In each cluster a node of one version has memory and a disk. Readers without memory, one of each
version, prefetch objects that only the disk has. In the end the files of the disk are overwritten
while the owner has them open, so only objects in memory have the right bytes.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

from cluster import MIB, Master, Node, config, of, raw, shown_bytes
from versions_common import Absent, Refused, attempt, same, until, value
from versions_weights import Revision, WeightCalls, deleted

# Minimum that Mooncake C++ supports.
MEMORY = 16 * MIB
FLAGS = [
    "--enable_offload=true",
    "--default_kv_lease_ttl=200",
    "--client_ttl=600",
    # Moves of weights need promotions. Reads are too few for one.
    "--promotion_on_hit=true",
    "--promotion_admission_threshold=255",
]
SETTINGS = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(32 * MIB),
    # Mooncake C++ writes objects once there are this many for one file.
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
}
SIZES = (200_001, 300_000, MIB + 1)
PINNED = 256 << 10
# Mooncake C++ 0.3.14 continues a move every 30 s.
PATIENCE_OF_MOVES = 150
MOVES = "weights on disks"


def prefetch_from(owner):
    return f"prefetch from {owner}"


def prefetching(pythons):
    """Returns the names of the steps about prefetches, one for each version of the owner."""
    return [prefetch_from(owner) for owner in pythons]


def setup(node, name, memory, master, version, folder=None):
    settings = {
        "local_hostname": name,
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(memory),
        "local_buffer_size": str(32 * MIB),
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": master,
    }
    if folder:
        settings |= {"enable_ssd_offload": "true", "ssd_offload_path": folder}
    if version != "0.3.13":
        settings |= {"enable_ssd_prefetch": "true", "ssd_prefetch_cooldown_sec": "0", "ssd_prefetch_dedup_ttl_sec": "0"}
    same(f"setup of {node.name}", node("setup", settings), 0)


class Stage:
    """An owner of memory and a disk, and readers of all versions."""

    def __init__(self, owner, readers, folder):
        self.owner = owner
        self.readers = readers
        self.folder = Path(folder)

    @property
    def nodes(self):
        return [self.owner, *self.readers]

    def locations(self, keys):
        """Returns all locations of the objects: `disk`, `memory`, or `disk+memory`."""
        known = self.readers[0]("batch_get_replica_desc", list(keys))
        kinds = [{"memory" if one.get("memory", True) else "disk" for one in known.get(key, [])} for key in keys]
        return {"+".join(sorted(kind)) for kind in kinds}

    def read(self, objects):
        """Reads the objects as every node. A lease may end during a read on a busy machine, which
        is a miss then.
        """
        for node, (key, data) in itertools.product(self.nodes, objects.items()):

            def found():
                got = node("get", key)
                return None if got == shown_bytes(b"") else got

            got = until(f"{node.name} finds {key}", found)
            same(f"{key} as {node.name} reads it", got, shown_bytes(data))

    def put(self, objects):
        for key, data in objects.items():
            same(f"put of {key}", self.owner("put", key, raw(data)), 0)

    def leave_memory(self, keys):
        """Fills the memory with pinned objects until no other one is there, and removes those."""
        until("the objects are on the disk", lambda: self.locations(keys) <= {"disk", "disk+memory"})
        pinned = []

        def is_full():
            name = f"pinned/{len(pinned)}"
            code = self.owner("put", name, raw(bytes(PINNED)), config(with_hard_pin=True))
            if code == 0:
                pinned.append(name)
            assert code in (0, -200), f"put of a pinned object: {code}"
            return code == -200 and self.locations(keys) == {"disk"}

        until("the objects have left the memory", is_full)

        def is_free():
            # Objects that are being written to the disk stay.
            self.owner("remove_by_regex", "^pinned/", True)
            return not any(self.owner("batch_is_exist", pinned))

        until("the pinned objects are removed", is_free)
        same("locations", self.locations(keys), {"disk"})

    def overwrite_files(self):
        """Overwrites the files of the disk with zeros."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        written = sum(map(overwrite, files))
        assert written > MIB, f"the disk has no files: {files}"


def overwrite(path):
    """Overwrites the data of a file, which may have holes, with zeros. Returns the number of bytes.
    """
    written, size = 0, path.stat().st_size
    with open(path, "r+b") as file:
        at = 0
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            for start in range(at, end, MIB):
                written += os.pwrite(file.fileno(), bytes(min(MIB, end - start)), start)
            at = end
        os.fsync(file.fileno())
    return written


def prefetch(stage, node, objects, are_lacking):
    """Prefetches objects. The bytes are compared later, when the disk has lost them."""
    keys, options = list(objects), of("exist", {"prefetch_to_memory": True})

    def found():
        return node("batch_is_exist", keys, options)

    said = found()
    if isinstance(said, dict) and said.get("raised") == "AttributeError":
        raise Absent("ExistOptions")
    same("batch_is_exist", said, [1] * len(keys))
    if are_lacking:
        stage.read(objects)
        same("existence after the reads", found(), [1] * len(keys))
        same("locations after a prefetch that is refused", stage.locations(keys), {"disk"})
        raise Refused("prefetch")
    until("the objects are in memory", lambda: all(found()) and stage.locations(keys) == {"disk+memory"})


def moved(stage, calls):
    """Moves weights to the disk and back to memory, and returns the revision."""
    revision = Revision(calls, "r1", {f"weights/{size}": value(f"w{size}", size) for size in SIZES})
    revision.begin()
    revision.store(stage.owner)
    same("commit", revision.commit()["availability"], "Ready")
    # Mooncake C++ 0.3.14 refuses to move objects that are not on the disk yet.
    until("the weights are on the disk", lambda: stage.locations(revision.objects) == {"disk+memory"})
    for target, locations in (("Cold", {"disk"}), ("Hot", {"disk+memory"})):

        def begun():
            # The master may have recorded a change since the generation was read.
            said = revision("move", revision.state()[2], target=target)
            return None if said == "StaleGeneration" else said

        operation = until(f"a move to {target} begins", begun)
        assert isinstance(operation, dict), f"move to {target}: {operation}"
        same(f"move to {target}", (operation["target"], operation["total"]), (target, len(revision.objects)))
        query = {"operation": operation["operation"]}
        until(
            f"a move to {target} ends",
            lambda: calls("query", **query)["message"] or revision("view")["operation"] == "None",
            PATIENCE_OF_MOVES,
        )
        ended = calls("query", **query)
        same(f"end of the move to {target}", ended["done"], ended["total"])
        until(f"residency {target}", lambda: revision.state()[1] == target, PATIENCE_OF_MOVES)
        same(f"locations after the move to {target}", stage.locations(revision.objects), locations)
        if target == "Cold":
            stage.read(revision.objects)
    return revision


def steps_on(stage, calls, of_master, of_owner):
    """Runs the steps of a cluster and returns the outcome of each version's prefetch, and that of
    the moves.
    """
    cold = {
        node.name: {f"cold/{node.name}/{size}": value(f"{node.name}{size}", size) for size in SIZES}
        for node in stage.nodes
    }
    unread = {"cold/unread": value("unread", MIB)}
    every = {key: data for objects in [*cold.values(), unread] for key, data in objects.items()}
    stage.put(every)
    stage.leave_memory(every)
    outcomes = {}
    for node in stage.nodes:
        are_lacking = "0.3.13" in (of_master, of_owner)
        attempt(outcomes, node.name, prefetch, stage, node, cold[node.name], are_lacking)
    revision = attempt(outcomes, MOVES, moved, stage, calls)
    stage.overwrite_files()
    for node, (key, data) in itertools.product(stage.nodes, unread.items()):
        assert node("get", key) != shown_bytes(data), f"{node.name} reads {key} from an overwritten disk"
    for node in stage.nodes:
        if outcomes[node.name] is None:
            attempt(outcomes, node.name, stage.read, cold[node.name])
    if revision:
        attempt(outcomes, MOVES, lambda: (stage.read(revision.objects), deleted(stage.nodes, revision)))
    # The owner is a client of its version, too.
    of_the_owner = outcomes.pop(stage.owner.name)
    if isinstance(of_the_owner, str):
        outcomes[of_owner] = f"{stage.owner.name}: {of_the_owner}"
    return outcomes


def measured(pythons, of_master, of_owner, port, host, weight_calls, log):
    """Returns the outcomes of a cluster, by the client's version and the step."""
    at = f"127.0.0.1:{port}"
    found = {version: {} for version in pythons}
    with tempfile.TemporaryDirectory() as folder:
        master = Master(pythons[of_master], port, FLAGS, log)
        owner = Node("the owner", pythons[of_owner], log, SETTINGS)
        readers = [Node(version, python, log) for version, python in pythons.items()]
        calls = WeightCalls(weight_calls, at, log)
        try:
            setup(owner, host, MEMORY, at, of_owner, folder)
            for reader in readers:
                setup(reader, host, 0, at, reader.name)
            outcomes = steps_on(Stage(owner, readers, folder), calls, of_master, of_owner)
        except (AssertionError, RuntimeError) as error:
            outcomes = dict.fromkeys([*pythons, MOVES], f"the cluster: {error}")
        finally:
            for node in [owner, *readers, calls]:
                # Mooncake C++ takes seconds to close its disk.
                node.process.kill()
                node.stop()
            master.stop()
    for version in pythons:
        found[version][prefetch_from(of_owner)] = outcomes[version]
    found[of_owner][MOVES] = outcomes[MOVES]
    return found
