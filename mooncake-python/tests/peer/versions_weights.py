"""Managed weights in clusters of several versions.

No Python of either project makes the calls about weights, so the client of this project makes them,
in a program of its own. The objects are put, read and removed by nodes of every version.
"""

from __future__ import annotations

import hashlib
import subprocess

from cluster import MIB, Node, config, raw
from versions_common import Refused, same, until, value

CALLS = ("begin", "commit", "abort", "view", "list", "lease", "renew", "release", "delete", "move", "query")
# A master that lacks a call.
NOT_SUPPORTED = {"failed": -1012}
# Objects of managed weights are neither removed nor replaced.
PROTECTED = -1010
RESOURCE = {"namespace": "versions", "resource": "model"}
TTL = 60_000


class WeightCalls(Node):
    """Process that makes calls about weights to a master."""

    def __init__(self, program, master, log):
        self.name = "weight_calls"
        self.process = subprocess.Popen(
            [program, master], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )

    def __call__(self, call, **fields):
        return self.send({"call": call, **fields})


def digest(texts):
    """Returns the digest that names groups and lists of keys."""
    return hashlib.sha256("".join(f"{len(text)}:{text}\n" for text in texts).encode()).hexdigest()


class Revision:
    """Revision of weights with payloads of these bytes."""

    def __init__(self, calls, name, payloads):
        self.calls = calls
        self.name = name
        self.payloads = payloads
        self.id = {**RESOURCE, "revision": name, "generation": 1}
        self.group = "weight:" + digest(["default", *RESOURCE.values(), name, "1"])
        self.manifest_key = f"weights/{RESOURCE['namespace']}/{RESOURCE['resource']}/{name}/1/manifest"
        self.manifest = f"manifest of {name}".encode()
        self.size = {"payloads": len(payloads), "bytes": sum(map(len, payloads.values()))}

    @property
    def objects(self):
        return {**self.payloads, self.manifest_key: self.manifest}

    def __call__(self, call, metadata_generation=0, **fields):
        return self.calls(call, **self.id, metadata_generation=metadata_generation, **fields)

    def begin(self):
        begun = self("begin", **self.size)
        if begun == NOT_SUPPORTED:
            # Such a master lacks all of them.
            fields = {"target": "Hot", "lease": 1, "operation": 1, "limit": 1, "holder": "h", "ttl_ms": 1}
            for call in CALLS:
                same(call, self(call, 1, **fields), NOT_SUPPORTED)
            raise Refused("calls about weights")
        same("begin", (begun["availability"], begun["metadata_generation"]), ("Importing", 1))
        same("name of the group", begun["group"], self.group)

    def options(self, data_type):
        return config(group_ids=[self.group], data_type=f"ObjectDataType.{data_type}")

    def store(self, node):
        for key, data in self.payloads.items():
            same(f"put of {key}", node("put", key, raw(data), self.options("WEIGHT")), 0)
        same("put of the manifest", node("put", self.manifest_key, raw(self.manifest), self.options("METADATA")), 0)

    def commit(self, metadata_generation=1, **changes):
        manifest = {
            "manifest_key": self.manifest_key,
            "sha256": hashlib.sha256(self.manifest).hexdigest(),
            "group": self.group,
            "keys_sha256": digest(sorted(self.payloads)),
            **self.size,
        }
        return self("commit", metadata_generation, **{**manifest, **changes})

    def state(self):
        found = self("view")
        return found["availability"], found["residency"], found["metadata_generation"], found["leases"]


def imported(cluster, of):
    """Imports the revision, with the mistakes that a commit must find."""
    of.begin()
    same("begin again", of("begin", **of.size)["metadata_generation"], 1)
    same("begin with other sizes", of("begin", payloads=9, bytes=9), "Conflict")
    same("commit without objects", of.commit(), "NotFound")
    key, data = next(iter(of.payloads.items()))
    same("put of a payload", cluster("put", key, raw(b"an earlier value"), of.options("WEIGHT")), 0)
    same("removal during an import", cluster("remove", key, True), PROTECTED)
    same("upsert of the payload", cluster("upsert", key, raw(data), of.options("WEIGHT")), 0)
    same("commit of some objects", of.commit(), "Conflict")
    of.store(cluster)
    same("lease during an import", of("lease", 1, holder="h", ttl_ms=TTL), "NotReady")
    same("commit of other keys", of.commit(keys_sha256=digest(["other"])), "Conflict")
    same("commit of an unknown change", of.commit(7), "StaleGeneration")
    done = of.commit()
    same("commit", (done["availability"], done["metadata_generation"]), ("Ready", 2))
    same("commit again", of.commit()["metadata_generation"], 2)
    same("state", of.state(), ("Ready", "Hot", 2, 0))


def protected(cluster, of):
    """Lets each node try to change the objects."""
    keys = list(of.objects)
    for node in [cluster.client, *cluster.nodes]:
        for key in keys:
            same(f"forced removal of {key} by {node.name}", node("remove", key, True), PROTECTED)
            same(f"upsert of {key} by {node.name}", node("upsert", key, raw(b"other")), PROTECTED)
        same(f"batch_remove by {node.name}", node("batch_remove", keys, True), [PROTECTED] * len(keys))
        same(f"remove_by_regex by {node.name}", node("remove_by_regex", "^weights", True), 0)
        put = node("put", "weights/new", raw(b"new"), of.options("WEIGHT"))
        same(f"put into the group by {node.name}", put, PROTECTED)
        same(f"put of another object by {node.name}", node("put", "other", raw(b"other")), 0)
        assert node("remove_all", True) >= 1, f"remove_all by {node.name} leaves other objects"
        same("the other object", node("is_exist", "other"), 0)


def leased(of):
    """Leases the revision, and lets it be neither removed nor moved meanwhile."""
    first = of("lease", 2, holder="engine 1", ttl_ms=TTL)
    same("lease", (first["revision"], first["holder"]), (of.name, "engine 1"))
    same("lease of a holder", of("lease", 2, holder="engine 1", ttl_ms=TTL), first)
    second = of("lease", 2, holder="engine 2", ttl_ms=TTL)
    assert second["lease"] != first["lease"], "each holder has a lease of its own"
    same("lease of an unknown change", of("lease", 1, holder="engine 3", ttl_ms=TTL), "StaleGeneration")
    same("number of leases", of.state(), ("Ready", "Hot", 2, 2))
    longer = of.calls("renew", lease=first["lease"], ttl_ms=10 * TTL)
    assert longer["expires_ms"] > first["expires_ms"], "a renewed lease ends later"
    same("a renewed lease", (longer["lease"], longer["holder"]), (first["lease"], "engine 1"))
    same("deletion under a lease", of("delete", 2), "Busy")
    same("move under a lease", of("move", 2, target="Cold"), "Busy")
    for lease in (first, second, second):
        same("release", of.calls("release", lease=lease["lease"]), None)
    same("renewal of a released lease", of.calls("renew", lease=first["lease"], ttl_ms=TTL), "NotFound")
    same("leases", of.state(), ("Ready", "Hot", 2, 0))


def aborted(cluster, of):
    """Aborts an import with one object."""
    of.begin()
    key, data = next(iter(of.payloads.items()))
    same("put", cluster("put", key, raw(data), of.options("WEIGHT")), 0)
    cluster.read(key, data)
    same("abort of an unknown change", of("abort", 2), "StaleGeneration")
    same("abort", of("abort", 1)["availability"], "Deleting")
    # Mooncake C++ removes them within 30 s.
    until("the objects of an aborted import are removed", lambda: cluster("is_exist", key) == 0, 60)
    same("put into the group", cluster("put", key, raw(data), of.options("WEIGHT")), PROTECTED)


def listed(of, other):
    page = of.calls("list", **RESOURCE, limit=1)
    same("first page", [one["revision"] for one in page["views"]], [of.name])
    page = of.calls("list", **RESOURCE, limit=1, token=page["next"])
    same("second page", ([one["revision"] for one in page["views"]], page["next"]), ([other.name], ""))


def deleted(nodes, of):
    """Deletes the revision, whose objects no node finds afterwards."""
    generation = of.state()[2]
    same("deletion of an unknown change", of("delete", generation + 9), "StaleGeneration")
    same("deletion", of("delete", generation)["availability"], "Deleted")
    for node in nodes:
        same(f"{node.name} finds no object", node("batch_is_exist", list(of.objects)), [0] * len(of.objects))
    same("state after the deletion", of.state()[0], "Deleted")


def weights(cluster):
    """Imports, protection, leases, lists and deletions, with a master that has no disks."""
    sizes = {"weights/a": 70_001, "weights/b": MIB + 1, "weights/c": 1}
    of = Revision(cluster.weights, "r1", {key: value(key, size) for key, size in sizes.items()})
    other = Revision(cluster.weights, "r2", {"weights/d": value("d", 5000)})
    imported(cluster, of)
    for key, data in of.objects.items():
        cluster.read(key, data)
    protected(cluster, of)
    for key, data in of.objects.items():
        cluster.read(key, data)
    leased(of)
    same("move without disks", of("move", 2, target="Cold"), "NotReady")
    same("an unknown move", of.calls("query", operation=1 << 40), "NotFound")
    aborted(cluster, other)
    listed(of, other)
    deleted([cluster.client, *cluster.nodes], of)
    key, data = next(iter(of.payloads.items()))
    same("put of a key of deleted weights", cluster("put", key, raw(data)), 0)
    cluster.read(key, data)
