"""Placement and lifetime of objects: pins, groups, placement, copies, moves, segments, eviction."""

from __future__ import annotations

import os
import tempfile

from cluster import MIB, Group, config, of, raw

VALUE = raw(b"value" * 100)
LARGE = raw(b"\7" * MIB)


def metric(run, step, name):
    """Records one metric of the master."""
    lines = run.cluster.master.page("GET", "/metrics")["body"].splitlines()
    run.saw(step, [line for line in lines if line.split(" ")[0] == name])


def settled(run, step, node, task, code):
    """Waits for the outcome of a task."""
    run.saw(f"{step}: asked", [task != [0, 0], code])
    if code != 0:
        return

    def over(answer):
        return answer[1] != 0 or answer[0]["status"] in ("SUCCESS", "FAILED")

    run.until(f"{step}: done", over, node, "query_task", of("tuple", task))


def pins(run):
    a, b, _ = run.members
    enable = {"soft_pin_action": "SoftPinAction.ENABLE"}
    run("soft", a, "put", "s", VALUE, config(**enable))
    metric(run, "one is soft", "master_soft_pin_key_count")
    run("soft for a while", a, "put", "s ttl", VALUE, config(**enable, soft_pin_ttl_ms=60_000))
    run("soft for no time", a, "put", "s 0", VALUE, config(**enable, soft_pin_ttl_ms=0))
    run("soft for too long", a, "put", "s long", VALUE, config(**enable, soft_pin_ttl_ms=10**9))
    run("a time without a pin", a, "put", "s time", VALUE, config(soft_pin_ttl_ms=1000))
    run("a time, disabled", a, "put", "s off", VALUE, config(soft_pin_action="SoftPinAction.DISABLE"))
    run("what is there", b, "batch_is_exist", ["s", "s ttl", "s 0", "s long", "s time", "s off"])
    metric(run, "two are soft", "master_soft_pin_key_count")
    run("upsert keeps it", a, "upsert", "s", VALUE)
    metric(run, "two are soft still", "master_soft_pin_key_count")
    run("upsert ends it", a, "upsert", "s", VALUE, config(soft_pin_action="SoftPinAction.DISABLE"))
    metric(run, "one is left", "master_soft_pin_key_count")
    run("with_soft_pin", a, "put", "old", VALUE, config(with_soft_pin=True))
    run("hard", a, "put", "h", VALUE, config(with_hard_pin=True))
    run("hard and soft", a, "put", "hs", VALUE, config(with_hard_pin=True, **enable))
    run("hard, in a batch", a, "put_batch", ["h1", "h2"], [VALUE, VALUE], config(with_hard_pin=True))
    run("remove of the hard one", a, "remove", "h")
    run("remove of the others", a, "batch_remove", ["h1", "s ttl"], True)
    run("data type", a, "put", "typed", VALUE, config(data_type="ObjectDataType.KVCACHE"))
    run("get of it", b, "get", "typed")


def groups(run):
    a, b, _ = run.members
    run("one", a, "put", "g1", VALUE, config(group_ids=["g"]))
    run("none by name", a, "put", "g0", VALUE, config(group_ids=[""]))
    run("none", a, "put", "g00", VALUE, config(group_ids=None))
    run("too many", a, "put", "g2", VALUE, config(group_ids=["g", "h"]))
    run("no names", a, "put", "g3", VALUE, config(group_ids=[]))
    run("batch", a, "put_batch", ["g4", "g5"], [VALUE, VALUE], config(group_ids=["g", ""]))
    run("batch, too few", a, "put_batch", ["g6", "g7"], [VALUE, VALUE], config(group_ids=["g"]))
    run("a tuple", a, "put", "g8", VALUE, config(group_ids=of("tuple", ["g"])))
    run("text", a, "put", "g9", VALUE, config(group_ids="g"))
    run("upsert, same group", a, "upsert", "g1", VALUE, config(group_ids=["g"]))
    run("upsert, other group", a, "upsert", "g1", VALUE, config(group_ids=["other"]))
    run("upsert, no group", a, "upsert", "g1", VALUE)
    run("upsert into a group", a, "upsert", "g0", VALUE, config(group_ids=["g"]))
    run("what is there", b, "batch_is_exist", [f"g{i}" for i in range(10)])
    run("remove one", a, "remove", "g4", True)
    run("the others", b, "batch_is_exist", ["g1", "g5", "g8"])


def placement(run):
    a, b, c = run.members
    for node in run.members:
        key = f"at {node.name}"
        run(f"put {key}", a, "put", key, VALUE, config(preferred_segment=node.host))
        run(f"descriptor {key}", b, "get_replica_desc", key)
    run("list", a, "put", "list", VALUE, config(preferred_segments=[b.host]))
    run("descriptor of list", b, "get_replica_desc", "list")
    run("both", a, "put", "both", VALUE, config(preferred_segment=c.host, preferred_segments=[b.host]))
    run("descriptor of both", b, "get_replica_desc", "both")
    run("two", a, "put", "two", VALUE, config(preferred_segments=[c.host, a.host], replica_num=2))
    run("descriptors of two", b, "get_replica_desc", "two")
    run("more than copies", a, "put", "more", VALUE, config(preferred_segments=[c.host, a.host]))
    run("fewer than copies", a, "put", "fewer", VALUE, config(preferred_segments=[c.host], replica_num=2))
    run.copies("copies of fewer", b, ["fewer"])
    run("unknown", a, "put", "unknown", VALUE, config(preferred_segment="nobody:1"))
    run.copies("copies of unknown", b, ["unknown"])
    same = config(prefer_alloc_in_same_node=True)
    run("same node", a, "put", "same", VALUE, same)
    run("same node, batch", a, "put_batch", ["same1"], [VALUE], same)
    run("same node, upsert", a, "upsert", "same2", VALUE, same)
    run("same node, parts", a, "put_parts", "same3", VALUE, config=same)
    a.send({"call": "buffer", "name": "n", "size": 1000})
    at = of("buffer", {"name": "n"})
    run("same node, memory", a, "put_from", "same4", at, 10, same)
    run("same node, batch of memory", a, "batch_put_from", ["same5"], [at], [10], same)
    run("same node, buffers", a, "batch_put_from_multi_buffers", ["same6"], [[at]], [[10]], same)
    two = config(prefer_alloc_in_same_node=True, replica_num=2)
    run("same node, two copies", a, "batch_put_from_multi_buffers", ["same7"], [[at]], [[10]], two)
    run("what is there", b, "batch_is_exist", [f"same{i}" for i in ("", 1, 2, 3, 4, 5, 6, 7)])


def replicas(run):
    a, b, c = run.members
    for count in (1, 2, 3, 4):
        run(f"put {count}", a, "put", f"r{count}", VALUE, config(replica_num=count))
        run.copies(f"copies {count}", b, [f"r{count}"])
        run(f"get {count}", c, "get", f"r{count}")
    run("none", a, "put", "r0", VALUE, config(replica_num=0))
    run("exist of none", a, "is_exist", "r0")
    run("negative", a, "put", "r-1", VALUE, config(replica_num=-1))
    run("of another kind", a, "put", "nof", VALUE, config(nof_replica_num=1))
    run("of another kind only", a, "put", "nof0", VALUE, config(nof_replica_num=1, replica_num=0))
    run("in files", a, "put", "dfs", VALUE, config(dfs_replica_num=1))
    run("in files, two", a, "put", "dfs2", VALUE, config(dfs_replica_num=2))
    run("what is there", b, "batch_is_exist", ["nof", "nof0", "dfs", "dfs2"])
    run("upsert to more", a, "upsert", "r1", VALUE, config(replica_num=3))
    run("get after upsert", c, "get", "r1")


def tasks(run):
    a, b, c = run.members
    run("put", a, "put", "t", VALUE, config(preferred_segment=a.host))
    settled(run, "copy", a, *a("create_copy_task", "t", [b.host]))
    run.copies("after copy", c, ["t"])
    settled(run, "copy to where one is", a, *a("create_copy_task", "t", [b.host]))
    run.copies("after copy to where one is", c, ["t"])
    settled(run, "move", c, *c("create_move_task", "t", a.host, c.host))
    run("after move", b, "get_replica_desc", "t", sort="at")
    run("get after move", a, "get", "t")
    settled(run, "move to where one is", c, *c("create_move_task", "t", b.host, c.host))
    run("after move to where one is", b, "get_replica_desc", "t")
    settled(run, "copy to two", b, *b("create_copy_task", "t", [a.host, b.host]))
    run.copies("after copy to two", c, ["t"])
    for step, call, args in [
        ("copy of nothing", "create_copy_task", ["none", [b.host]]),
        ("copy to nobody", "create_copy_task", ["t", ["nobody:1"]]),
        ("copy to one and nobody", "create_copy_task", ["t", [b.host, "nobody:1"]]),
        ("copy nowhere", "create_copy_task", ["t", []]),
        ("move of nothing", "create_move_task", ["none", a.host, b.host]),
        ("move to itself", "create_move_task", ["t", a.host, a.host]),
        ("move from nobody", "create_move_task", ["t", "nobody:1", a.host]),
        ("move to nobody", "create_move_task", ["t", a.host, "nobody:1"]),
    ]:
        run(step, a, call, *args)
    run("put at c", a, "put", "t2", VALUE, config(preferred_segment=c.host))
    run("move from where none is", a, "create_move_task", "t2", a.host, b.host)
    run("unknown task", a, "query_task", of("tuple", [1, 2]))
    run("task by a list", a, "query_task", [1, 2])


def clearing(run):
    a, b, c = run.members
    keys = ["c1", "c2", "c3", "c4"]
    run("put", a, "put_batch", keys, [VALUE] * 4)
    run("by another", b, "batch_replica_clear", ["c1"])
    run("by its writer", a, "batch_replica_clear", ["c1", "none"])
    run("read", b, "get", "c2")
    run("of what is read", a, "batch_replica_clear", ["c2", "c3"])
    run("what is there", b, "batch_is_exist", keys)
    run("of nothing", a, "batch_replica_clear", [])
    run("two copies", a, "put", "c5", VALUE, config(preferred_segments=[b.host, c.host], replica_num=2))
    run("in an unknown segment", a, "batch_replica_clear", ["c5"], "nobody:1")
    run("in a segment without", a, "batch_replica_clear", ["c5"], a.host)
    run("in one segment", a, "batch_replica_clear", ["c5"], b.host)
    run("what is left", c, "get_replica_desc", "c5")


def health(run):
    for node in run.members:
        run(f"health of {node.name}", node, "health_check")
        run(f"name of {node.name}", node, "get_hostname")
        run(f"pool of {node.name}", node, "alloc_from_mem_pool", 100)


def segments(run):
    """Mounts segments on the third client, which has none at first."""
    a, b, c = run.members
    run("nothing offered", c, "put", "first", VALUE)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="mooncake-cells-") as file:
        os.ftruncate(file.fileno(), 48 * MIB)
        for step, args in [
            ("file", [file.name, 32 * MIB]),
            ("no file", ["/dev/shm/there is none", MIB]),
            ("more than the file", [file.name, 64 * MIB]),
            ("no bytes", [file.name, 0]),
            ("odd offset", [file.name, MIB, 7]),
            ("offset past the end", [file.name, 32 * MIB, 32 * MIB]),
            ("offset", [file.name, 16 * MIB, 32 * MIB]),
        ]:
            answer = c("mount_segment", *args)
            run.saw(step, [answer["ret"], len(answer["segment_ids"])])
            if answer["segment_ids"]:
                run.cluster.learn(c, c.host)
                run(f"put into {step}", a, "put", f"into {step}", VALUE, config(preferred_segment=c.host))
                run(f"descriptor of {step}", b, "get_replica_desc", f"into {step}")
                run(f"get from {step}", b, "get", f"into {step}")
                run(f"unmount {step}", c, "unmount_segment", answer["segment_ids"])
                run(f"exist after {step}", a, "is_exist", f"into {step}")
                run(f"unmount {step} again", c, "unmount_segment", answer["segment_ids"])
    for step, size in [("allocated", 20 * MIB), ("allocated nothing", 0), ("allocated a byte", 1)]:
        answer = c("allocate_and_mount_segment", size)
        run.saw(step, [answer["ret"], len(answer["segment_ids"]), answer["allocated_size"]])
        if answer["ret"] == 0:
            run.cluster.learn(c, c.host)
            run(f"put into {step}", a, "put", f"in {step}", VALUE, config(preferred_segment=c.host))
            run(f"descriptor of {step}", b, "get_replica_desc", f"in {step}")
            run(f"free {step}", c, "unmount_and_free_segment", answer["segment_ids"])
            run(f"free {step} again", c, "unmount_and_free_segment", answer["segment_ids"])
            run(f"get after {step}", b, "get", f"in {step}")
    run("unmount no id", c, "unmount_segment", ["no id"])
    run("unmount unknown", c, "unmount_segment", ["1-2"])
    run("unmount nothing", c, "unmount_segment", [])
    run("free unknown", c, "unmount_and_free_segment", ["1-2"])
    run("local disk", c, "unmount_local_disk_segment")


def grace(run):
    """Unmounts a segment with a grace period: its objects are readable until then, and no new ones
    are placed there.
    """
    a, b, c = run.members
    answer = c("allocate_and_mount_segment", 16 * MIB)
    run.cluster.learn(c, c.host)
    run("put", a, "put", "kept", VALUE, config(preferred_segment=c.host))
    run("descriptor", b, "get_replica_desc", "kept")
    c.begin({"call": "unmount_and_free_segment", "args": [answer["segment_ids"], 4]})
    path = f"/api/v1/segments/status?segment={c.host}"
    leaving = lambda answer: answer["body"].get("status_name") != "OK"  # noqa: E731
    run.page("status", "GET", path, until=leaving)
    run("get while it goes", b, "get", "kept")
    run("put while it goes", a, "put", "new", VALUE, config(preferred_segment=c.host))
    at = a("get_replica_desc", "new")
    run.saw("where it went", [one["at"] for one in at if run.cluster.names.get(one["at"]) == "<c>"])
    run.saw("answer", c.end())
    run("gone", b, "is_exist", "kept", until=0)
    run.page("status afterwards", "GET", path, until=lambda answer: answer["status"] != 200)
    run("get afterwards", b, "get", "kept")


def eviction(run):
    """Writes three times the size of the only segment, which has 48 MiB."""
    a, b, _ = run.members

    def fill(step, names, **fields):
        codes = set()
        for name in names:
            # The master of Mooncake C++ returns -200 at once and evicts afterwards.
            for _ in range(300):
                code = a("put", name, LARGE, config(**fields))
                if code != -200:
                    break
                run.pause(0.02)
            codes.add(code)
        run.saw(step, sorted(codes))

    def there(step, names):
        run(step, b, "batch_is_exist", names)

    hard, soft, first = ([f"{kind}{i}" for i in range(3)] for kind in ("hard", "soft", "plain"))
    fill("hard", hard, with_hard_pin=True)
    fill("soft", soft, soft_pin_action="SoftPinAction.ENABLE")
    fill("plain", first)
    fill("group", ["g0"], group_ids=["g"])
    fill("group, second", ["g1"], group_ids=["g"])
    fill("many", [f"many{i}" for i in range(150)])
    there("hard stay", hard)
    there("soft stay", soft)
    there("plain go", first)
    there("the group goes as one", ["g0", "g1"])
    there("the last one is there", ["many149"])
    run("get of what stayed", b, "get_size", "hard1")
    fill("hard until it is full", [f"h{i}" for i in range(36)], with_hard_pin=True)
    run("nothing goes any more", a, "put", "too much", raw(b"\1" * (10 * MIB)), config(with_hard_pin=True))


ONE_SMALL = {"a": {"segment": 48 * MIB}, "b": {"segment": 0}, "c": {"segment": 0}}
GROUPS = [
    Group([pins, groups, placement, replicas, tasks, clearing, health], ["--default_kv_lease_ttl=2000"]),
    Group([segments, grace], ["--default_kv_lease_ttl=500"], {"c": {"segment": 0}}),
    Group([eviction], ["--default_kv_lease_ttl=200"], ONE_SMALL),
]
