"""Clusters of three versions: this project, and two releases of Mooncake C++.

    python versions.py WEIGHT_CALLS OUR_PYTHON 0.3.13=PYTHON 0.3.14=PYTHON [--host 10.213.0.1]
        [--only NAME:NAME ..] [--steps STEP ..] [--table FILE [--write]] [--date YYYY-MM-DD]

Each version has a master for clients of each version: nine clusters, each with a node of every
version beside the client. A client takes each step, and the nodes read what it stored, byte by
byte. Nine further clusters have a disk (`versions_disks.py`): that of each version, with a master
of each. A step passes, fails, is refused by a master or an owner of a disk that lacks the call, or
is left out because a package lacks a name. Expected refusals are listed in `KNOWN` and `LACKS`; any
other one makes the script exit with 1, as a failure does. So does a difference from the table in
the document; `--write` replaces the table.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import versions_disks
from cluster import MIB, Master, Node, config, of, raw, shown_bytes
from versions_common import Absent, Cluster, Refused, attempt, same, until, value
from versions_weights import WeightCalls, weights

OURS = "this project"
# A busy machine can stop a client for seconds, and a read fails when its lease expires meanwhile.
FLAGS = ["--default_kv_lease_ttl=60000", "--client_ttl=600"]
HEADING = "## Clusters of several versions"
# Steps that are refused without a node of this project: master, client, step.
KNOWN = {("0.3.13", "0.3.14", "clear"), ("0.3.14", "0.3.13", "clear")}
# Steps that a master cannot serve for any client.
LACKS = {("0.3.13", "probes"), ("0.3.13", "weights"), ("0.3.13", versions_disks.MOVES)}
# Results of clients of Mooncake C++ and of this project if a master lacks a call.
LACKING = (-900, -1012)
# Clusters mostly wait: for heartbeats, and up to 30 s for a master of 0.3.14 that manages weights.
CLUSTERS_AT_ONCE = 3


def values(cluster):
    for size in (1, 255, 256, 4096, 65535, 65536, MIB + 1, 3 * MIB):
        key, data = f"values/{size}", value(f"v{size}", size)
        same("put", cluster("put", key, raw(data)), 0)
        cluster.read(key, data)
        same("size", cluster("get_size", key), size)
    same("a missing key", cluster("is_exist", "values/none"), 0)


def batches(cluster):
    keys = [f"batches/{number}" for number in range(300)] + ["batches/" + "k" * 300]
    data = [value(key, 100 + at) for at, key in enumerate(keys)]
    same("put_batch", cluster("put_batch", keys, [raw(one) for one in data]), 0)
    same("batch_is_exist", cluster("batch_is_exist", [*keys, "none"]), [1] * 301 + [0])
    for node in [cluster.client, *cluster.nodes]:
        same(f"get_batch of {node.name}", node("get_batch", keys), [shown_bytes(one) for one in data])


def upserts(cluster):
    for size in (900, 900, 70_000, 3):
        data = value(f"u{size}", size)
        same("upsert", cluster("upsert", "upserts", raw(data)), 0)
        cluster.read("upserts", data)
    same("upsert_batch", cluster("upsert_batch", ["upserts/1", "upserts/2"], [raw(b"a"), raw(b"b" * 300)]), 0)
    cluster.read("upserts/2", b"b" * 300)


def removals(cluster):
    keys = [f"removals/{number}" for number in range(5)]
    same("put_batch", cluster("put_batch", keys, [raw(b"r" * 500)] * 5), 0)
    same("is_exist", cluster("is_exist", keys[0]), 1)
    same("remove under a lease", cluster("remove", keys[0]), -706)
    same("forced remove", cluster("remove", keys[0], True), 0)
    same("remove of a missing key", cluster("remove", keys[0]), -704)
    same("batch_remove", cluster("batch_remove", [keys[1], "removals/none"], True), [0, -704])
    same("remove_by_regex", cluster("remove_by_regex", "^removals/[23]", True), 2)
    same("the rest", cluster("batch_is_exist", keys), [0, 0, 0, 0, 1])


def buffers(cluster):
    def memory(at=0):
        return of("buffer", {"name": "m", "at": at})

    data = value("b", 700_001)
    same("register", cluster.client.send({"call": "buffer", "name": "m", "size": 4 * MIB}), 0)
    cluster.client.send({"call": "fill", "name": "m", "bytes": raw(data)["of"]})
    same("put_from", cluster("put_from", "buffers/1", memory(), len(data)), 0)
    cluster.read("buffers/1", data)
    same("get_into", cluster("get_into", "buffers/1", memory(2 * MIB), MIB), len(data))
    got = cluster.client.send({"call": "dump", "name": "m", "at": 2 * MIB, "size": len(data)})
    same("bytes of get_into", got, shown_bytes(data))
    keys = ["buffers/2", "buffers/3"]
    same("batch_put_from", cluster("batch_put_from", keys, [memory(), memory(5000)], [5000, 6000]), [0, 0])
    cluster.read("buffers/3", data[5000:11_000])
    places, starts, lengths = [[[0, 1000]]], [[[100, 40_000]]], [[[500, 300]]]
    found = cluster("get_into_ranges", [memory(3 * MIB)], [["buffers/1"]], places, starts, lengths)
    same("get_into_ranges", found, [[[500, 300]]])
    got = cluster.client.send({"call": "dump", "name": "m", "at": 3 * MIB + 1000, "size": 300})
    same("bytes of a range", got, shown_bytes(data[40_000:40_300]))


def options(cluster):
    """Every option of 0.3.13."""
    there = cluster.nodes[1]("get_hostname")
    every = [
        {"replica_num": 2},
        {"with_hard_pin": True},
        {"soft_pin_action": "SoftPinAction.ENABLE", "soft_pin_ttl_ms": 60_000},
        {"preferred_segment": there},
        {"preferred_segments": [there, "unknown"]},
        {"group_ids": ["g"]},
        {"data_type": "ObjectDataType.TENSOR"},
    ]
    for number, fields in enumerate(every):
        key, data = f"options/{number}", value(f"o{number}", 2000)
        same(f"put with {fields}", cluster("put", key, raw(data), config(**fields)), 0)
        cluster.read(key, data)
    same("two replicas", len(cluster("get_replica_desc", "options/0")), 2)


def later_options(cluster):
    """Options of 0.3.14. Masters of 0.3.13 ignore them."""
    fields = {
        "session_ids": ["s", ""],
        "preferred_hca_names": ["mlx5_0"],
        "per_key_preferred_hca_names": [["mlx5_0", "mlx5_1"], []],
        "residency_affinity_ids": ["", "a"],
    }
    keys, data = ["later/1", "later/2"], [b"1" * 300, b"2" * 70_000]
    stored = cluster("put_batch", keys, [raw(one) for one in data], config(**fields))
    same("put_batch", stored, 0)
    for key, one in zip(keys, data):
        cluster.read(key, one)
    fields = {"session_ids": ["s"], "preferred_hca_names": ["mlx5_0"]}
    same("upsert", cluster("upsert", "later/1", raw(b"3" * 400), config(**fields)), 0)
    cluster.read("later/1", b"3" * 400)


def tasks(cluster):
    """A copy from the node of each version to that of another one."""
    for source, target in itertools.permutations(cluster.nodes, 2):
        names = source("get_hostname"), target("get_hostname")
        key, data = f"tasks/{source.name}/{target.name}", value(f"{source.name}{target.name}", 40_000)
        same("put", cluster("put", key, raw(data), config(preferred_segment=names[0])), 0)
        task, code = cluster("create_copy_task", key, [names[1]])
        same("create_copy_task", code, 0)
        ended = ("SUCCESS", "FAILED")
        number = of("tuple", task)
        until("task", lambda: cluster("query_task", number)[0]["status"] in ended)
        same(f"copy from {source.name} to {target.name}", cluster("query_task", number)[0]["status"], "SUCCESS")
        same("replicas", len(cluster("get_replica_desc", key)), 2)
        cluster.read(key, data)


def clear(cluster):
    same("put", cluster("put", "clear", raw(b"c" * 100)), 0)
    cleared = cluster("batch_replica_clear", ["clear", "none"], "")
    if not cleared:
        raise Refused("batch_replica_clear")
    same("batch_replica_clear", cleared, ["clear"])
    same("is_exist", cluster("is_exist", "clear"), 0)


def probes(cluster):
    same("put", cluster("put", "probes", raw(b"p" * 100)), 0)
    probed = cluster("probe_key", "probes")
    if probed in LACKING:
        raise Refused("probe_key")
    same("probe_key", probed, 1)
    same("batch_probe_key", cluster("batch_probe_key", ["probes", "none"]), [1, 0])
    same("remove after probes", cluster("remove", "probes"), 0)


def segments(cluster):
    got = cluster("allocate_and_mount_segment", 16 * MIB)
    same("allocate_and_mount_segment", (got["ret"], len(got["segment_ids"])), (0, 1))
    same("unmount", cluster("unmount_and_free_segment", got["segment_ids"]), 0)
    same("health_check", cluster("health_check"), 0)


STEPS = [values, batches, upserts, removals, buffers, options, later_options, tasks, clear, probes, segments, weights]


def measured(pythons, of_master, of_client, number, host, weight_calls, log, steps=STEPS):
    """Returns the outcome of each step: None, an exception if it was refused or left out, or the
    failure.
    """
    port = 23_000 + 4 * number
    place = ["P2PHANDSHAKE"]
    at = ["tcp", "", f"127.0.0.1:{port}"]
    master = Master(pythons[of_master], port, FLAGS, log)
    nodes = [Node(name, python, log) for name, python in pythons.items()]
    client = Node("the client", pythons[of_client], log)
    calls = WeightCalls(weight_calls, f"127.0.0.1:{port}", log)
    outcomes = {}
    try:
        for index, node in enumerate([client, *nodes]):
            name = f"{host}:{17_600 + 5 * number + index}"
            code = node("setup", name, *place, 128 * MIB, 32 * MIB, *at)
            if code != 0:
                return {step.__name__: f"setup of {node.name}: {code}" for step in steps}
        cluster = Cluster(client, nodes, calls)
        for step in steps:
            attempt(outcomes, step.__name__, step, cluster)
    finally:
        for node in [client, *nodes, calls]:
            node.process.kill()
            node.stop()
        master.stop()
    return outcomes


def is_known(master, client, step):
    """Returns whether the refusal of the step is expected."""
    lacking = versions_disks.prefetch_from("0.3.13")
    is_prefetch = step == lacking or master == "0.3.13" and step.startswith(versions_disks.prefetch_from(""))
    return is_prefetch or (master, client, step) in KNOWN or (master, step) in LACKS


def is_failed(pair, step, outcome):
    return isinstance(outcome, str) or isinstance(outcome, Refused) and not is_known(*pair, step)


def cell(pair, step, outcome):
    if is_failed(pair, step, outcome):
        return "FAILED"
    return {type(None): "yes", Absent: "-", Refused: "no"}[type(outcome)]


def table(found, date):
    """Formats a row per step, with the outcomes of all masters and clients."""
    names = list(dict.fromkeys(master for master, _ in found))
    lines = [
        f"Run on {date}. A cell has the outcomes of clients of {', '.join(names)}, in this",
        "order. A dash is a call or an option that the package lacks.",
        "",
        "| step | " + " | ".join(f"master of {name}" for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for step in [*(step.__name__ for step in STEPS), *versions_disks.prefetching(names), versions_disks.MOVES]:
        cells = [
            ", ".join(cell((master, client), step, found[master, client][step]) for client in names)
            for master in names
        ]
        lines.append(f"| {step.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def is_in(document, made):
    """Returns whether the document has this table behind the heading, made on any day."""
    rows = [line for line in made.splitlines() if line.startswith("|")]
    section = document.read_text(encoding="utf-8").split(HEADING, 1)[1].split("\n## ", 1)[0]
    return rows == [line for line in section.splitlines() if line.startswith("|")]


def write(document, made):
    """Replaces the text from the date to the end of the table behind the heading."""
    before, behind = document.read_text(encoding="utf-8").split(HEADING, 1)
    behind = re.sub(r"Run on .*?\n(\|[^\n]*\n)+", lambda _: made + "\n", behind, count=1, flags=re.S)
    document.write_text(before + HEADING + behind, encoding="utf-8")


def report(title, outcomes, seconds):
    """Prints the outcomes of one cluster by pair and step, and returns the number of failures."""
    passed, failures = 0, []
    for pair, by_step in outcomes.items():
        for step, outcome in by_step.items():
            passed += outcome is None
            name = f"{step}, client of {pair[1]}"
            if is_failed(pair, step, outcome):
                failures.append(f"{name}: {outcome}")
            elif outcome is None and is_known(*pair, step):
                failures.append(f"{name}: listed as refused, but passes")
    print(f"{title}: {passed} steps pass, {len(failures)} fail, {seconds:.1f} s", flush=True)
    for failure in failures:
        print(f"  {failure}")
    return len(failures)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("weight_calls")
    parser.add_argument("ours")
    parser.add_argument("others", nargs="+", metavar="VERSION=PYTHON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--only", nargs="*", default=[], metavar="MASTER:VERSION")
    parser.add_argument("--steps", nargs="*", default=[], choices=[*(step.__name__ for step in STEPS), "disks"])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--log", default=os.devnull)
    options = parser.parse_args()
    pythons = {OURS: options.ours, **dict(other.split("=", 1) for other in options.others)}
    pairs = [pair for pair in itertools.product(pythons, pythons) if not options.only or ":".join(pair) in options.only]
    steps = [step for step in STEPS if not options.steps or step.__name__ in options.steps]
    has_disks = not options.steps or "disks" in options.steps
    found, failures = {pair: {} for pair in pairs}, 0
    with open(options.log, "ab") as log, ThreadPoolExecutor(CLUSTERS_AT_ONCE) as pool:

        def on_memory(number, pair):
            begun = time.monotonic()
            more = measured(pythons, *pair, number, options.host, options.weight_calls, log, steps)
            return "client", pair, {pair: more}, time.monotonic() - begun

        def on_disk(number, pair):
            begun, port = time.monotonic(), 23_100 + 4 * number
            more = versions_disks.measured(pythons, *pair, port, options.host, options.weight_calls, log)
            outcomes = {(pair[0], client): by_step for client, by_step in more.items()}
            return "disk", pair, outcomes, time.monotonic() - begun

        runs = [pool.map(on_memory, *zip(*enumerate(pairs)))] if steps else []
        runs += [pool.map(on_disk, *zip(*enumerate(pairs)))] if has_disks else []
        for what, pair, outcomes, seconds in itertools.chain(*runs):
            failures += report(f"master of {pair[0]}, {what} of {pair[1]}", outcomes, seconds)
            for of, by_step in outcomes.items():
                found.setdefault(of, {}).update(by_step)
    if not options.only and not options.steps:
        made = table(found, options.date)
        print(made)
        if options.table and options.write:
            write(options.table, made)
        if options.table and not is_in(options.table, made):
            print(f"the table in {options.table} differs: run `cargo xtask interop`")
            failures += 1
    return 1 if failures or not any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
