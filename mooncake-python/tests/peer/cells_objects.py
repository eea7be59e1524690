"""Operations on objects, in all their forms: put, get, upsert, remove."""

from __future__ import annotations

import re
import time
import urllib.request

from cluster import Group, config, of, raw

PATTERN = bytes(i * 31 % 251 for i in range(60_000))
SIZES = (1, 100, 4096, 100_000, 3 << 20)


def pattern(size, seed=0):
    return bytes((i * 7 + seed) % 256 for i in range(256)) * (size // 256) + bytes(range(size % 256))


def at(offset, name="m"):
    return of("buffer", {"name": name, "at": offset})


def buffers(run, size=60_000):
    """Registers memory of every client, with the same bytes."""
    for node in run.members:
        run.saw(f"register {node.name}", node.send({"call": "buffer", "name": "m", "size": size}))
        node.send({"call": "fill", "name": "m", "bytes": raw(PATTERN[:size])["of"]})


def memory(run, step, node, size=60_000):
    run.saw(step, node.send({"call": "sum", "name": "m", "size": size}))


def single(run):
    a, b, c = run.members
    for size in SIZES:
        key = f"b{size}"
        run(f"put {size}", a, "put", key, raw(pattern(size)))
        run(f"get {size}", b, "get", key)
        run(f"size {size}", c, "get_size", key)
        run(f"exist {size}", c, "is_exist", key)
        run(f"get {size} into a handle", c, "get_buffer", key)
    run("put again", b, "put", "b100", raw(b"other"))
    run("get of what was put again", c, "get", "b100")
    run("empty value", a, "put", "empty", raw(b""))
    run("empty key", a, "put", "", raw(b"x"))
    run("get of the empty key", a, "get", "")
    run("exist of the empty key", a, "is_exist", "")
    run("long key", a, "put", "k" * 3000, raw(b"x"))
    run("get of the long key", b, "get", "k" * 3000)
    run("key that is no ASCII", a, "put", "ключ/鍵 %20\n", raw(b"y"))
    run("get of the key that is no ASCII", b, "get", "ключ/鍵 %20\n")
    run("key with a NUL", a, "put", "nul\0key", raw(b"z"))
    run("get of the key with a NUL", b, "get", "nul\0key")
    run("get of its first part", b, "get", "nul")
    for call in ("get", "get_buffer", "get_size", "is_exist", "remove", "get_replica_desc"):
        run(f"{call} of nothing", b, call, "nothing")
    run("parts", a, "put_parts", "parts", raw(b"ab"), raw(b""), raw(b"c"), raw(b"def"))
    run("get of parts", b, "get", "parts")
    run("no parts", a, "put_parts", "no parts")
    run("an empty part", a, "put_parts", "no parts", raw(b""))
    run("exist of no parts", b, "is_exist", "no parts")
    run("parts with a config", a, "put_parts", "parts2", raw(b"1"), raw(b"2"), config=config(replica_num=2))
    run.copies("copies of parts", b, ["parts2"])
    run("parts again", b, "put_parts", "parts", raw(b"z"))
    run("a number as a key", a, "put", 7, raw(b"x"))
    run("a number as a value", a, "put", "number", 7)
    run("text as a value", a, "put", "text", "words")


def batch(run):
    a, b, c = run.members
    keys = [f"k{i}" for i in range(20)]
    values = [raw(pattern(1000 + 97 * i, i)) for i in range(20)]
    run("put_batch", a, "put_batch", keys, values)
    run("get_batch", b, "get_batch", keys)
    run("get_batch with gaps", c, "get_batch", ["k3", "none", "k4"])
    run("get_batch of nothing there", c, "get_batch", ["none", "neither"])
    run("get_batch of no keys", c, "get_batch", [])
    # The client of Mooncake C++ fills only the last buffer.
    run.saw("get_batch of one key twice", c("get_batch", ["k1", "k1"])[1])
    run("batch_get_buffer", b, "batch_get_buffer", ["k1", "none", "k2"])
    run("batch_get_buffer of no keys", b, "batch_get_buffer", [])
    run("batch_is_exist", b, "batch_is_exist", ["k1", "none", "k2", ""])
    run("batch_is_exist of no keys", b, "batch_is_exist", [])
    run("put_batch, some there", b, "put_batch", ["k1", "new"], [raw(b"1"), raw(b"2")])
    run("get of what was there", a, "get_batch", ["k1", "new"])
    run("put_batch with an empty value", a, "put_batch", ["e1", "e2", "e3"], [raw(b"1"), raw(b""), raw(b"3")])
    run("what was put beside it", b, "batch_is_exist", ["e1", "e2", "e3"])
    run("put_batch of two lengths", a, "put_batch", ["l1", "l2"], [raw(b"1")])
    run("put_batch of nothing", a, "put_batch", [], [])
    run("put_batch, two copies", a, "put_batch", ["r1", "r2"], [raw(b"1"), raw(b"2")], config(replica_num=2))
    run.copies("its copies", b, ["r1", "r2", "none"])
    run("descriptors of nothing", b, "batch_get_replica_desc", ["none"])
    run("descriptors of no keys", b, "batch_get_replica_desc", [])
    run("large values", a, "put_batch", ["big1", "big2"], [raw(pattern(2 << 20)), raw(pattern(3 << 20))])
    run("get of large values", b, "get_batch", ["big2", "big1"])


def zero_copy(run):
    a, b, c = run.members
    buffers(run)
    run("put_from", a, "put_from", "z", at(0), 5000)
    run("get_into", b, "get_into", "z", at(30_000), 5000)
    run("get_into, more room", b, "get_into", "z", at(30_000), 5001)
    run("get_into, too small", b, "get_into", "z", at(30_000), 4999)
    run("get_into of nothing", b, "get_into", "none", at(30_000), 100)
    run("put_from again", b, "put_from", "z", at(1), 10)
    run("put_from of no bytes", a, "put_from", "z0", at(0), 0)
    run("exist of no bytes", a, "is_exist", "z0")
    run("put_from, three copies", a, "put_from", "z3", at(7), 3000, config(replica_num=3))
    run.copies("its copies", b, ["z3"])
    run("get_into of copies", c, "get_into", "z3", at(40_000), 3000)
    run("metadata", a, "put_from_with_metadata", "meta", at(100), at(0), 1000, 28)
    run("get of metadata", b, "get", "meta")
    run("no metadata", a, "put_from_with_metadata", "meta0", at(100), at(0), 1000, 0)
    run("batch_put_from", a, "batch_put_from", ["f1", "f2", "f3"], [at(0), at(100), at(200)], [10, 20, 30])
    run("get of batch_put_from", b, "get_batch", ["f1", "f2", "f3"])
    run("batch_put_from, some there", b, "batch_put_from", ["f1", "f4"], [at(5), at(6)], [1, 2])
    run("batch_put_from of two lengths", a, "batch_put_from", ["x1", "x2"], [at(0)], [1, 2])
    run("batch_put_from, one of no bytes", a, "batch_put_from", ["y1", "y2"], [at(0), at(1)], [0, 2])
    run("what was put beside it", b, "batch_is_exist", ["y1", "y2"])
    run("batch_put_from of nothing", a, "batch_put_from", [], [], [])
    run("batch_get_into", b, "batch_get_into", ["f1", "none", "f3"], [at(50_000), at(50_100), at(50_200)], [10, 9, 29])
    run("batch_get_into of two lengths", b, "batch_get_into", ["f1"], [at(0), at(1)], [5])
    run("batch_get_into of nothing", b, "batch_get_into", [], [], [])
    memory(run, "memory of a", a)
    memory(run, "memory of b", b)
    memory(run, "memory of c", c)
    run("register no address", a, "register_buffer", 0, 100)
    run("register no bytes", a, "register_buffer", at(0), 0)
    run("register twice", a, "register_buffer", at(0), 60_000)
    run("register a part", a, "register_buffer", at(100), 10)
    run("unregister a part", a, "unregister_buffer", at(100))
    run("unregister what is not", a, "unregister_buffer", 4096)
    run("unregister", a, "unregister_buffer", at(0))
    run("unregister twice", a, "unregister_buffer", at(0))
    run("put_from afterwards", a, "put_from", "after", at(0), 10)
    run("register again", a, "register_buffer", at(0), 60_000)


def several_buffers(run):
    a, b, c = run.members
    buffers(run)
    lists = [[at(0), at(500), at(900)], [at(7_000)]]
    run("put", a, "batch_put_from_multi_buffers", ["p1", "p2"], lists, [[100, 50, 1], [4000]])
    run("get of it", b, "get_batch", ["p1", "p2"])
    run("put again", b, "batch_put_from_multi_buffers", ["p1", "p3"], lists, [[1, 1, 1], [1]])
    run("two lengths", a, "batch_put_from_multi_buffers", ["p4", "p5"], [[at(0)]], [[1]])
    run("two lengths inside", a, "batch_put_from_multi_buffers", ["p4"], [[at(0), at(9)]], [[1]])
    run("no buffers", a, "batch_put_from_multi_buffers", ["p6"], [[]], [[]])
    run("nothing", a, "batch_put_from_multi_buffers", [], [], [])
    into = [[at(20_000), at(21_000), at(22_000)], [at(30_000)]]
    run("read", b, "batch_get_into_multi_buffers", ["p1", "p2"], into, [[100, 50, 1], [4000]])
    run("read, cut elsewhere", c, "batch_get_into_multi_buffers", ["p1"], [[at(20_000), at(21_000)]], [[1, 150]])
    run("too little room", c, "batch_get_into_multi_buffers", ["p1", "p2"], into, [[100, 49, 1], [4000]])
    run("too much room", c, "batch_get_into_multi_buffers", ["p1", "p2"], into, [[100, 51, 1], [4000]])
    run("read nothing there", c, "batch_get_into_multi_buffers", ["none", "p2"], into, [[1, 1, 1], [4000]])
    run("read of two lengths", c, "batch_get_into_multi_buffers", ["p1"], into, [[1, 1, 1], [1]])
    run("read of nothing", c, "batch_get_into_multi_buffers", [], [], [])
    run("read on the same node", c, "batch_get_into_multi_buffers", ["p1"], into[:1], [[100, 50, 1]], True)
    same = config(prefer_alloc_in_same_node=True)
    run("put on the same node", a, "batch_put_from_multi_buffers", ["s1"], [[at(0), at(500)]], [[10, 20]], same)
    layers = [at(100 * i) for i in range(61)]
    run("61 layers", a, "batch_put_from_multi_buffers", ["l1", "l2"], [layers, layers[::-1]], [[64] * 61] * 2)
    run("61 layers read", b, "batch_get_into_multi_buffers", ["l2", "l1"], [layers, layers[::-1]], [[64] * 61] * 2)
    for node in run.members:
        memory(run, f"memory of {node.name}", node)


def ranges(run):
    a, b, _ = run.members
    buffers(run)
    run("put", a, "put", "r1", raw(PATTERN[:1000]))
    run("put another", a, "put", "r2", raw(PATTERN[1000:3000]))

    def read(step, *args):
        run(step, b, "get_into_ranges", *args)

    read("one", [at(0)], [["r1"]], [[[0]]], [[[100]]], [[[50]]])
    read("several", [at(1000)], [["r1", "r2"]], [[[0, 100], [200]]], [[[5, 990], [1999]]], [[[10, 10], [1]]])
    read("two buffers", [at(3000), at(5000)], [["r1"], ["r2"]], [[[0]], [[10]]], [[[0]], [[20]]], [[[30]], [[40]]])
    read("nothing there", [at(0)], [["r1", "none"]], [[[0], [0]]], [[[0], [0]]], [[[1], [1]]])
    read("past the end", [at(0)], [["r1"]], [[[0, 0, 0]]], [[[990, 1000, 1001]]], [[[11, 1, 1]]])
    read("up to the end", [at(7000)], [["r1"]], [[[0, 20]]], [[[990, 1000]]], [[[10, 0]]])
    read("past the memory", [at(59_000)], [["r1"]], [[[0, 999]]], [[[0, 0]]], [[[1000, 2]]])
    read("no bytes", [at(0)], [["r1"]], [[[0]]], [[[0]]], [[[0]]])
    read("no fragments", [at(0)], [["r1"]], [[[]]], [[[]]], [[[]]])
    read("no keys", [at(0)], [[]], [[]], [[]], [[]])
    read("no buffers", [], [], [], [], [])
    read("fewer offsets", [at(0)], [["r1"]], [[[0]]], [[[0, 1]]], [[[1, 1]]])
    read("fewer keys", [at(0)], [["r1"]], [[[0], [0]]], [[[0], [0]]], [[[1], [1]]])
    read("fewer buffers", [at(0)], [["r1"], ["r2"]], [[[0]], [[0]]], [[[0]], [[0]]], [[[1]], [[1]]])
    memory(run, "memory", b)


def get_sessions(run):
    a, b, _ = run.members
    buffers(run)
    run("put", a, "put_batch", ["g1", "g2"], [raw(PATTERN[:1000]), raw(PATTERN[1000:3000])])
    run("start", b, "batch_get_session_start", ["g1", "g2", "none"])
    run("start again", b, "batch_get_session_start", ["g1"])

    def read(step, keys, *args):
        run(step, b, "batch_get_into_multi_buffer_ranges", keys, *args)

    read("read", ["g1"], [[at(0), at(100)]], [[10, 20]], [[5, 980]])
    read("read two", ["g1", "g2"], [[at(200)], [at(300)]], [[1], [2000]], [[999], [0]])
    read("past the end", ["g1", "g2"], [[at(200)], [at(300)]], [[2], [10]], [[999], [0]])
    read("without a session", ["none", "g2"], [[at(200)], [at(300)]], [[2], [10]], [[0], [0]])
    read("two lengths", ["g1", "g2"], [[at(200)]], [[2]], [[0]])
    read("two lengths inside", ["g1"], [[at(200), at(300)]], [[2]], [[0]])
    read("no buffers", ["g1"], [[]], [[]], [[]])
    read("nothing", [], [], [], [])
    run("remove under a session", a, "remove", "g1")
    run("end", b, "batch_get_session_end", ["g1", "g2"])
    run("end again", b, "batch_get_session_end", ["g1"])
    run("end of nothing", b, "batch_get_session_end", [])
    read("after the end", ["g1"], [[at(0)]], [[10]], [[5]])
    run("start of nothing", b, "batch_get_session_start", [])
    memory(run, "memory", b)


def put_sessions(run):
    a, b, _ = run.members
    buffers(run)

    def write(step, keys, *args):
        run(step, a, "batch_put_from_multi_buffer_ranges", keys, *args)

    run("start", a, "batch_put_session_start", ["s1", "s2"], [1000, 2000])
    run("start again", a, "batch_put_session_start", ["s1"], [1000])
    run("exist before the end", b, "is_exist", "s1")
    run("get before the end", b, "get", "s1")
    write("write", ["s1"], [[at(0), at(500)]], [[500, 500]], [[500, 0]])
    write("write two", ["s1", "s2"], [[at(0)], [at(0)]], [[10], [2000]], [[0], [0]])
    write("past the end", ["s1"], [[at(0)]], [[11]], [[990]])
    write("without a session", ["none"], [[at(0)]], [[11]], [[0]])
    write("two lengths", ["s1", "s2"], [[at(0)]], [[11]], [[0]])
    write("nothing", [], [], [], [])
    run("end", a, "batch_put_session_end", ["s1", "s2", "none"])
    run("end again", a, "batch_put_session_end", ["s1"])
    run("get", b, "get_batch", ["s1", "s2"])
    run("start of what is there", a, "batch_put_session_start", ["s1", "s3"], [10, 10])
    run("revoke", a, "batch_put_session_revoke", ["s3", "none"])
    run("revoke again", a, "batch_put_session_revoke", ["s3"])
    write("after revoke", ["s3"], [[at(0)]], [[1]], [[0]])
    run("exist after revoke", b, "is_exist", "s3")
    run("start after revoke", a, "batch_put_session_start", ["s3"], [100])
    write("one part only", ["s3"], [[at(3)]], [[100]], [[0]])
    run("end after revoke", a, "batch_put_session_end", ["s3"])
    run("get after revoke", b, "get", "s3")
    run("start of no bytes", a, "batch_put_session_start", ["s4"], [0])
    run("start of two lengths", a, "batch_put_session_start", ["s4", "s5"], [1])
    run("start of nothing", a, "batch_put_session_start", [], [])
    run("end of nothing", a, "batch_put_session_end", [])
    run("three copies", a, "batch_put_session_start", ["s6"], [100], config(replica_num=3))
    write("to all copies", ["s6"], [[at(9)]], [[100]], [[0]])
    run("end of copies", a, "batch_put_session_end", ["s6"])
    run.copies("copies", b, ["s6"])
    run("get of copies", b, "get", "s6")
    same = config(prefer_alloc_in_same_node=True)
    run("start on the same node", a, "batch_put_session_start", ["s7"], [100], same)
    run("revoke on the same node", a, "batch_put_session_revoke", ["s7"])


def upserts(run):
    a, b, c = run.members
    buffers(run)
    run("of what is not there", a, "upsert", "u", raw(pattern(1000)))
    run("value", b, "get", "u")
    run("same size", b, "upsert", "u", raw(pattern(1000, 1)))
    run("value, same size", c, "get", "u")
    run("longer", c, "upsert", "u", raw(pattern(5000, 2)))
    run("value, longer", a, "get", "u")
    run("shorter", a, "upsert", "u", raw(b"s"))
    run("value, shorter", b, "get", "u")
    run("empty value", a, "upsert", "u", raw(b""))
    run("value, empty", b, "get", "u")
    run("empty key", a, "upsert", "", raw(b"x"))
    run("parts", a, "upsert_parts", "u", raw(b"ab"), raw(b"cd"))
    run("value, parts", b, "get", "u")
    run("no parts", a, "upsert_parts", "u")
    run("batch", a, "upsert_batch", ["u", "v", "w"], [raw(b"1"), raw(b"22"), raw(b"333")])
    run("values of the batch", b, "get_batch", ["u", "v", "w"])
    run("batch of two lengths", a, "upsert_batch", ["u", "v"], [raw(b"1")])
    run("batch of nothing", a, "upsert_batch", [], [])
    run("batch with an empty value", a, "upsert_batch", ["u", "x"], [raw(b""), raw(b"9")])
    run("values beside the empty one", b, "get_batch", ["u", "x"])
    run("from memory", a, "upsert_from", "u", at(0), 700)
    run("value from memory", b, "get", "u")
    run("from memory, no bytes", a, "upsert_from", "u", at(0), 0)
    run("value, no bytes", b, "get_size", "u")
    run("batch from memory", a, "batch_upsert_from", ["u", "y"], [at(1), at(2)], [9, 10])
    run("values of the batch from memory", b, "get_batch", ["u", "y"])
    run("batch from memory, two lengths", a, "batch_upsert_from", ["u", "y"], [at(1)], [9, 10])
    run("batch from memory of nothing", a, "batch_upsert_from", [], [], [])
    run("two copies", a, "upsert", "r", raw(b"12345"), config(replica_num=2))
    run.copies("copies", b, ["r"])
    run("two copies, same size", a, "upsert", "r", raw(b"54321"), config(replica_num=2))
    run.copies("copies, same size", b, ["r"])
    run("value of copies", b, "get", "r")
    run("two copies, other size", a, "upsert", "r", raw(b"1"), config(replica_num=2))
    run.copies("copies, other size", b, ["r"])
    run("put does not replace", c, "put", "r", raw(b"2"))
    run("value after put", b, "get", "r")


def removals(run):
    a, b, _ = run.members
    names = [f"x/{i}" for i in range(12)]
    run("put", a, "put_batch", names, [raw(b"v")] * 12)
    run("remove of the unread", b, "remove", "x/0")
    run("remove again", b, "remove", "x/0")
    run("exist", a, "is_exist", "x/0")
    run("read", b, "get", "x/1")
    run("remove under a lease", a, "remove", "x/1")
    run("remove by force", a, "remove", "x/1", True)
    run("seen", b, "batch_is_exist", ["x/2", "x/3"])
    run("batch_remove", a, "batch_remove", ["x/2", "x/4", "none"])
    run("batch_remove by force", a, "batch_remove", ["x/2", "x/3", "none"], True)
    run("batch_remove of nothing", a, "batch_remove", [])
    run("by pattern", a, "remove_by_regex", "^x/1[01]$")
    run("by pattern, nothing found", a, "remove_by_regex", "^y")
    run("read one of the pattern", b, "get", "x/5")
    run("by pattern under a lease", a, "remove_by_regex", "x/[56]")
    run("by pattern by force", a, "remove_by_regex", "x/[56]", True)
    run("bad pattern", a, "remove_by_regex", "(")
    run("what is left", b, "batch_is_exist", names)
    run("all under leases", a, "remove_all")
    run("all by force", a, "remove_all", True)
    run("nothing is left", b, "batch_is_exist", names)
    run("all of nothing", a, "remove_all", True)
    run("put once more", a, "put", "x/1", raw(b"new"))
    run("get once more", b, "get", "x/1")
    run("lease is over", a, "remove", "x/1", until=0)
    run("gone", b, "is_exist", "x/1")


def hot_hits(run):
    """Returns the number of reads that the last client served from its hot cache, or `None` if it
    has no counter.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{run.cluster.client_port}/metrics", timeout=10) as page:
        found = re.search(r"^mooncake_client_hot_cache_hits_total(?:{.*})? (\d+)", page.read().decode(), re.MULTILINE)
    return found and int(found[1])


def hot_cache(run):
    """Overwrites a value that a client has in its hot cache: it never reads the old bytes."""
    a, b, c = run.members
    place = config(preferred_segment=a.host)

    def reads(step):
        before, deadline = hot_hits(run), time.monotonic() + 30
        run(f"{step}: read", c, "get", "hot")
        while before is not None and hot_hits(run) == before and time.monotonic() < deadline:
            c("get", "hot")
        run(f"{step}: read when it is kept", c, "get", "hot")
        run(f"{step}: in a batch", c, "get_batch", ["hot", "cold"])
        run.saw(f"{step}: it was kept, where that is counted", before is None or hot_hits(run) > before)

    run("put", a, "put", "hot", raw(b"1" * 5000), place)
    reads("put")
    for turn, writer in enumerate([b, a, b]):
        run(f"{turn}: upsert", writer, "upsert", "hot", raw(bytes([65 + turn]) * 5000), place)
        reads(f"upsert {turn}")
        run(f"{turn}: remove", writer, "remove", "hot", True)
        run(f"{turn}: read of nothing", c, "get", "hot")
        run(f"{turn}: put again", writer, "put", "hot", raw(bytes([97 + turn]) * 5000), place)
        reads(f"put again {turn}")


GROUPS = [
    Group(
        [single, batch, zero_copy, several_buffers, ranges, get_sessions, put_sessions, upserts, removals],
        ["--default_kv_lease_ttl=2000"],
    ),
    # Checksums detect a value that was overwritten in place. For reads without them, see
    # docs/hot-cache.md.
    Group(
        [hot_cache],
        settings={"c": {"enable_client_http_server": True}},
        variables={
            "MC_STORE_LOCAL_HOT_CACHE_SIZE": "67108864",
            "MOONCAKE_STORE_CHECKSUM": "1",
            "MC_FORCE_TCP": "1",
        },
    ),
]
