"""Values as Python objects."""

from __future__ import annotations

import array
import ctypes
import gc
import os
import threading
import time
import urllib.request

import numpy as np
import pytest
from conftest import free_port

from mooncake.store import MooncakeDistributedStore, ReplicateConfig


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20, 20 << 20])
def test_put_and_get(make_store, key, size):
    a, b = make_store(), make_store(global_segment_size=0)
    value = os.urandom(size)
    assert a.put(key, value) == 0
    assert b.get(key) == value
    assert b.get_size(key) == size
    assert b.is_exist(key) == 1


def test_misses(store, key):
    assert store.get(key) == b""
    assert store.get_buffer(key) is None
    assert store.get_size(key) == -704
    assert store.is_exist(key) == 0
    assert store.remove(key) == -704
    assert store.get_replica_desc(key) == []
    assert store.get_batch([key, key]) == [b"", b""]
    assert store.get_batch([]) == [b""]
    assert store.batch_get_buffer([key]) == [None]


def test_a_key_is_put_once_and_upserted(store, key):
    assert store.put(key, b"one") == 0
    assert store.put(key, b"other") == 0
    assert store.get(key) == b"one"
    assert store.put_batch([key], [b"other"]) == 0
    assert store.put_parts(key, b"ot", b"her") == 0
    assert store.get(key) == b"one"
    assert store.upsert(key, b"longer than before") == 0
    assert store.get(key) == b"longer than before"
    assert store.upsert_parts(key, b"in ", bytearray(b"parts")) == 0
    assert store.get(key) == b"in parts"
    assert store.upsert_batch([key, key + "2"], [b"x", b"y"]) == 0
    assert store.get_batch([key, key + "2"]) == [b"x", b"y"]


def test_empty_keys_and_values(store, key):
    assert store.put(key, b"") == -600
    assert store.put("", b"x") == -600
    for put in (store.put_parts, store.upsert_parts):
        assert put(key) == put(key, b"", b"") == -600
        assert "must not be empty" in str(store.last_error())
    assert store.put_batch([key, key + "2"], [b"x", b""]) == -600
    assert store.is_exist(key) == 0, "an empty value fails the batch"
    assert store.put_batch([key], []) == -600
    assert store.put_batch([], []) == 0


def test_every_buffer(store, key):
    values = [
        bytearray(b"abc"),
        memoryview(b"xabcx")[1:4],
        array.array("d", [1.5, 2.5]),
        np.arange(10, dtype=np.float32),
        np.arange(100, dtype=np.uint8)[::3],
        np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
        np.zeros(2, [("Owner", np.int32), ("O", np.int8)]),
    ]
    for i, value in enumerate(values):
        assert store.put(f"{key}-{i}", value) == 0
        assert store.get(f"{key}-{i}") == memoryview(value).tobytes()
    for wrong in ("text", 7, None, [1, 2], np.array([object()]), np.zeros(2, [("a", object)])):
        with pytest.raises(TypeError):
            store.put(key, wrong)
    with pytest.raises(RuntimeError, match="parts must be 1-D bytes-like"):
        store.put_parts(key, np.zeros(3))
    with pytest.raises(TypeError):
        store.put_parts(key, b"x", ReplicateConfig())
    assert store.put_parts(key, b"a", np.frombuffer(b"bc", np.uint8), memoryview(b"d")) == 0
    assert store.get(key) == b"abcd"


def test_batches(make_store, key):
    a, b = make_store(), make_store()
    keys = [f"{key}-{i}" for i in range(200)]
    values = [os.urandom(1 + 997 * i) for i in range(200)]
    assert a.put_batch(keys, values) == 0
    assert b.get_batch(keys) == values
    assert b.batch_is_exist([keys[0], "missing", keys[199]]) == [1, 0, 1]
    assert b.batch_is_exist([]) == []
    assert b.prefix_hits(keys) == 200 and b.prefix_hits([]) == 0 and b.prefix_hits(["missing", keys[0]]) == 0
    assert b.prefix_hits([*keys[:50], "missing", *keys[50:]]) == 50
    found = b.get_prefix_replica_desc([*keys[:3], "missing", keys[4]])
    sizes = [replicas[0].get_memory_descriptor().buffer_descriptor.size for replicas in found]
    assert sizes == [len(value) for value in values[:3]]
    handles = b.batch_get_buffer([keys[7], "missing"])
    assert bytes(handles[0]) == values[7] and handles[1] is None
    time.sleep(0.6)
    assert a.batch_remove([keys[0], "missing"]) == [0, -704]
    assert a.batch_remove([]) == []


def test_leases_keep_objects(own_master, make_store, store, key):
    leased = make_store(own_master("--default_kv_lease_ttl=600000"))
    assert leased.put(key, b"x") == 0
    assert leased.get(key) == b"x"
    assert leased.remove(key) == -706
    assert leased.batch_remove([key]) == [-706]
    assert leased.remove(key, force=True) == 0
    assert store.put(key, b"x") == 0
    assert store.get(key) == b"x"
    deadline = time.monotonic() + 30
    while (code := store.remove(key)) == -706 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert code == 0, "leases of the shared master end after half a second"
    assert store.put(key, b"x") == 0
    assert store.is_exist(key) == 1
    assert store.remove(key, force=True) == 0


def test_removing_by_pattern(store, key):
    for i in range(5):
        assert store.put(f"{key}/a/{i}", b"x") == 0
    assert store.remove_by_regex(f"{key}/a/[01]") == 2
    assert store.remove_by_regex("(") == -600 and "rejects the pattern '('" in store.last_error().message
    assert store.remove_by_regex(regex=f"{key}/a/2") == 1, "argument name of the documentation"
    assert store.remove_by_regex(regex_pattern=key, force=True) == 2
    with pytest.raises(TypeError, match="one argument"):
        store.remove_by_regex(regex="a", regex_pattern="b")


def test_remove_all(own_master, make_store):
    alone = make_store(own_master())
    assert alone.put_batch(["a", "b", "c"], [b"1", b"2", b"3"]) == 0
    assert alone.remove_all() == 3
    assert alone.remove_all(force=True) == 0


def test_handles(store, key):
    value = os.urandom(100_000)
    assert store.put(key, value) == 0
    handle = store.get_buffer(key)
    assert (len(handle), handle.size()) == (100_000, 100_000)
    assert handle.ptr() != 0
    view = memoryview(handle)
    assert (view.format, view.itemsize, view.ndim, view.readonly) == ("b", 1, 1, False)
    assert view.tobytes() == value
    array_view = np.array(handle, copy=False)
    assert array_view.dtype == np.int8 and array_view.tobytes() == value
    # The memory of the value is registered, so it can be the source of a put.
    assert store.put_from(key + "2", handle.ptr(), handle.size()) == 0
    assert store.get(key + "2") == value
    del handle, view
    gc.collect()
    assert array_view.tobytes() == value, "the view keeps the memory"


def test_the_local_buffer_does_not_limit_handles(make_store, key):
    small = make_store(local_buffer_size=1 << 20)
    value = os.urandom(4 << 20)
    assert small.put(key, value) == 0
    handles = [small.get_buffer(key) for _ in range(3)]
    assert all(bytes(handle) == value for handle in handles)
    none = make_store(local_buffer_size=0)
    assert none.put(key + "2", value) == 0 and bytes(none.get_buffer(key + "2")) == value


def test_a_full_pool_is_an_error(own_master, make_store):
    alone = make_store(own_master("--default_kv_lease_ttl=60000"), global_segment_size=16 << 20)
    held = []
    code = 0
    for i in range(40):
        code = alone.put(f"k{i}", bytes(1 << 20))
        if code != 0:
            break
        held.append(alone.is_exist(f"k{i}"))
    assert code == -200, alone.last_error()
    assert alone.last_error().code == -200 and alone.last_error().name == "NO_AVAILABLE_HANDLE"
    with pytest.raises(RuntimeError, match="NO_AVAILABLE_HANDLE") as raised:
        alone.raise_last_error()
    assert str(raised.value) == alone.last_error().message and raised.value.code == -200


def test_many_threads(make_store, key):
    stores = [make_store(global_segment_size=128 << 20) for _ in range(2)]
    failures = []

    def work(n):
        mine = stores[n % 2]
        for i in range(30):
            value = os.urandom(50_000 + n)
            name = f"{key}-{n}-{i}"
            if mine.put(name, value) != 0 or stores[(n + 1) % 2].get(name) != value:
                failures.append((name, mine.last_error()))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_others_run_while_a_call_waits(own_master, make_store):
    mine = own_master()
    waiting = make_store(mine)
    mine.freeze()
    try:
        thread = threading.Thread(target=waiting.get, args=("k",))
        thread.start()
        for _ in range(100):
            time.sleep(0.001)
            assert thread.is_alive()
    finally:
        mine.thaw()
    thread.join(30)
    assert not thread.is_alive()


def test_replicate_config(store, key):
    config = ReplicateConfig()
    assert (config.replica_num, config.with_soft_pin, config.with_hard_pin) == (1, False, False)
    assert config.prefer_alloc_in_same_node is False and config.group_ids is None
    assert hasattr(ReplicateConfig, "group_ids") and hasattr(ReplicateConfig, "with_soft_pin")
    config.prefer_alloc_in_same_node = "True"
    assert config.prefer_alloc_in_same_node is True
    assert store.put(key, b"x", config) == -600, "supported by the multi-buffer puts only"
    config.prefer_alloc_in_same_node = False
    config.with_soft_pin = True
    from mooncake.store import SoftPinAction

    assert config.soft_pin_action == SoftPinAction.ENABLE
    config.replica_num = 2
    config.preferred_segment = store.get_hostname()
    config.group_ids = ("g",)
    assert config.group_ids == ["g"]
    with pytest.raises(TypeError):
        config.group_ids = "g"
    assert store.put(key, b"x", config) == 0
    assert store.put(key + "2", b"x", None) == 0
    assert store.put(key + "3", b"x", config=config) == 0
    assert store.put_batch([key + "4", key + "5"], [b"x", b"y"], config) == -600, "one group id for two keys"
    assert "replica_num: 2" in str(config)
    import copy

    other = copy.copy(config)
    other.replica_num = 3
    assert config.replica_num == 2


def test_an_upsert_into_another_group_names_the_group(store, key):
    config = ReplicateConfig()
    config.group_ids = ["first"]
    assert store.put(key, b"value", config) == 0
    config.group_ids = ["second"]
    assert store.upsert(key, b"other", config) == -600
    assert 'group="second"; an existing object stays in its group' in str(store.last_error())
    config.group_ids = ["first", "third"]
    assert store.upsert_batch([key + "2", key], [b"1", b"2"], config) == -600
    assert 'group="third"' in str(store.last_error())
    assert store.get(key) == b"value"
    assert store.upsert(key, b"other") == 0


def test_members_of_a_configuration(store, key):
    config = ReplicateConfig()
    names = ("session_ids", "preferred_hca_names", "per_key_preferred_hca_names", "residency_affinity_ids")
    assert [getattr(config, name) for name in names] == [None] * 4
    for name in names:
        with pytest.raises(TypeError):
            setattr(config, name, "text")
    config.session_ids, config.preferred_hca_names = ["s"], ["mlx5_0"]
    config.per_key_preferred_hca_names, config.residency_affinity_ids = [["mlx5_0", "mlx5_1"]], ["a"]
    assert config.per_key_preferred_hca_names == [["mlx5_0", "mlx5_1"]]
    assert "residency_affinity_ids: [a]" in str(config) and "session" not in str(config)
    assert store.put(key, b"x", config) == 0 and store.upsert(key, b"y", config) == 0
    assert store.get(key) == b"y"
    keys, values = [key + "1", key + "2"], [b"1", b"2"]
    assert store.put_batch(keys, values, config) == -600, "one session for two keys"
    config.session_ids, config.per_key_preferred_hca_names, config.residency_affinity_ids = ["", "t"], [[], []], ["", "b"]
    assert store.put_batch(keys, values, config) == 0 and store.get_batch(keys) == values
    config = ReplicateConfig()
    config.session_ids = ["s" * 257]
    assert store.put(key + "3", b"x", config) == -600
    config.session_ids = ["s" * 256]
    assert store.put(key + "3", b"x", config) == 0


def test_probes(store, key):
    keys = [f"{key}-{number}" for number in range(4)]
    assert store.put_batch(keys[:3], [b"x"] * 3) == 0
    assert (store.probe_key(keys[0]), store.probe_key(keys[3]), store.probe_key("")) == (1, 0, 0)
    assert store.batch_probe_key(keys) == [1, 1, 1, 0] and store.batch_probe_key([]) == []
    assert store.remove(keys[0]) == 0, "no lease protects it"
    assert store.batch_probe_key(keys[1:], "LastHitOnly", 1) == [1, 1, 0]
    assert store.remove(keys[1]) == 0 and store.remove(keys[2]) == -706, "the last key that can be read has a lease"
    assert store.batch_probe_key(keys, policy="LastHitOnly", candidate_size=3) == [-600] * 4
    assert store.batch_probe_key(keys, policy="LastHitOnly", candidate_size=0) == [-600] * 4
    with pytest.raises(ValueError, match="Unknown batch_probe_key policy: All"):
        store.batch_probe_key(keys, "All")
    with pytest.raises(TypeError):
        store.batch_probe_key(keys, "none", -1)
    empty = MooncakeDistributedStore()
    assert empty.probe_key("k") == -600 and empty.batch_probe_key(["k", "l"]) == [-600, -600]


def test_hints(store, make_store, key):
    config = ReplicateConfig()
    hints = ("parent_key", "position", "keep", "ttl_ms", "delete_after_read")
    plain = str(config)
    assert [getattr(config, name) for name in hints] == [None, None, None, None, False]
    config.parent_key, config.position, config.keep = "block/1", 2, "front"
    config.ttl_ms, config.delete_after_read = 60_000, True
    assert [getattr(config, name) for name in hints] == ["block/1", 2, "front", 60_000, True]
    shown = "parent_key: block/1, position: 2, keep: front, ttl_ms: 60000, delete_after_read: true }"
    assert str(config).endswith(shown)
    import copy

    assert [getattr(copy.copy(config), name) for name in hints] == ["block/1", 2, "front", 60_000, True]
    for name, bad in [("keep", "back"), ("ttl_ms", -1), ("position", "2"), ("parent_key", 1)]:
        with pytest.raises((TypeError, ValueError)):
            setattr(config, name, bad)
    for name in hints[:4]:
        setattr(config, name, None)
    # A key is read at most once, by any call and any client.
    other = make_store()
    for number, read in enumerate([
        lambda name: store.get(name),
        lambda name: other.get(name),
        lambda name: bytes(other.get_buffer(name)),
        lambda name: other.get_batch([name])[0],
        lambda name: bytes(other.batch_get_buffer([name])[0]),
    ]):
        name, value = f"{key}/{number}", bytes(range(256)) * (1 + 1000 * (number % 2))
        assert store.put(name, value, config) == 0
        assert store.is_exist(name) == 1 and store.batch_is_exist([name]) == [1] and store.prefix_hits([name]) == 1
        assert read(name) == value
        assert store.is_exist(name) == 0 and store.get(name) == b"" and other.get_buffer(name) is None
        assert store.get_size(name) == -704
    target = bytearray(1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    assert store.put_batch([f"{key}/a", f"{key}/b"], [b"a" * 5000, b"b" * 5000], config) == 0
    assert other.register_buffer(address, len(target)) == 0
    assert other.batch_get_into([f"{key}/a", f"{key}/b"], [address, address + 8192], [8192, 8192]) == [5000, 5000]
    assert target[:5000] == b"a" * 5000 and target[8192:13192] == b"b" * 5000
    assert other.batch_get_into([f"{key}/a"], [address], [8192])[0] < 0
    assert other.unregister_buffer(address) == 0
    # A size is part of the location, so the call that returns the size is the last read.
    assert store.put(f"{key}/size", b"12345", config) == 0
    assert store.get_size(f"{key}/size") == 5 and store.get(f"{key}/size") == b""
    config.delete_after_read = False
    assert str(config) == plain
    config.ttl_ms = 50
    assert store.put(f"{key}/soon", b"x", config) == 0
    until = time.monotonic() + 30
    while store.is_exist(f"{key}/soon") == 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert store.get(f"{key}/soon") == b""
    config.ttl_ms = 0
    assert store.put(f"{key}/never", b"x", config) == -600 and "ttl_ms" in store.last_error().message


def test_descriptors(store, key):
    assert store.put(key, b"12345") == 0
    (one,) = store.get_replica_desc(key)
    from mooncake.store import ReplicaStatus

    assert one.status == ReplicaStatus.COMPLETE
    assert one.is_memory_replica() and not one.is_disk_replica() and not one.is_local_disk_replica()
    where = one.get_memory_descriptor().buffer_descriptor
    assert where.size == 5 and where.buffer_address > 0 and ":" in where.transport_endpoint
    assert repr(where).startswith("<Descriptor size=5 buffer_address=")
    with pytest.raises(RuntimeError, match="Expected DiskDescriptor"):
        one.get_disk_descriptor()
    found = store.batch_get_replica_desc([key, "missing"])
    assert list(found) == [key] and found[key][0].is_memory_replica()


def test_before_setup_and_after_close(make_store):
    closed = make_store()
    assert closed.close() == 0 and closed.close() == 0
    for empty in (MooncakeDistributedStore(), closed):
        assert empty.get_hostname() == "" and empty.health_check() == 1
        assert empty.put("k", b"x") == -600 and "not set up" in empty.last_error().message
        assert empty.get("k") == b""
        assert empty.get_batch(["k", "l"]) == [b""]
        assert empty.get_buffer("k") is None
        assert empty.batch_get_buffer(["k", "l"]) == [None, None]
        assert empty.is_exist("k") == -1
        assert empty.get_size("k") == -600
        assert empty.prefix_hits(["k"]) == -600 and empty.get_prefix_replica_desc(["k"]) == []
        assert empty.batch_put_from(["k", "l"], [1, 2], [3, 4]) == [-600, -600]
        assert empty.register_buffer(4096, 4096) == -600
        assert empty.get_hostname() == ""
        assert empty.health_check() == 1
        assert empty.get_replica_desc("k") == [] and empty.batch_get_replica_desc(["k"]) == {}
        assert empty.mount_segment("/dev/shm/x", 1 << 20) == {"ret": -1, "segment_ids": []}


def test_setup_does_not_wait_for_an_invalid_address():
    store = MooncakeDistributedStore()
    begun = time.monotonic()
    for address in ("", "nonsense", "127.0.0.1", ":50051", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:x", "[::1"):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == -600
        assert "expected host:port" in store.last_error().message
    assert time.monotonic() - begun < 20, "waiting for an address would take as long for each of them"


def test_setup_reports_the_invalid_setting(master):
    store = MooncakeDistributedStore()
    for size in ("16MB", -1, 1.5, None, 1 << 64):
        with pytest.raises(TypeError, match="global_segment_size must be a number of bytes"):
            store.setup("127.0.0.1", "P2PHANDSHAKE", size, 0, "tcp", "", master.address)
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1, 0, "tcp", "", master.address) == -600
    assert "segment" in str(store.last_error())
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "smoke signals", "", master.address) == -1
    assert store.setup({"local_hostname": "127.0.0.1"}) == -600
    good = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "16MB",
        "local_buffer_size": 1 << 20,
        "master_server_addr": master.address,
        "enable_ssd_offload": False,
    }
    assert store.setup({**good, "local_buffer_size": "much"}) == -600
    assert store.setup(good) == 0 and store.health_check() == 0
    assert store.setup(good) == 0, "a second setup replaces the first"
    host, port = store.get_hostname().rsplit(":", 1)
    assert host == "127.0.0.1" and 12300 <= int(port) <= 14300
    assert store.close() == 0
    with pytest.raises(TypeError, match="no_such_argument"):
        store.setup("127.0.0.1", "P2PHANDSHAKE", no_such_argument=1)


def test_copies_and_moves(own_master, make_store):
    from mooncake.store import TaskStatus, TaskType

    mine = own_master("--default_kv_lease_ttl=100")
    a, b, c = (make_store(mine) for _ in range(3))
    config = ReplicateConfig()
    config.preferred_segment = a.get_hostname()
    value = os.urandom(300_000)
    assert a.put("k", value, config) == 0

    def done(task, code):
        assert code == 0, a.last_error()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            answer, code = b.query_task(task)
            assert code == 0 and answer.id == task
            if answer.status in (TaskStatus.SUCCESS, TaskStatus.FAILED):
                return answer
            time.sleep(0.05)
        raise AssertionError("the task does not end")

    answer = done(*a.create_copy_task("k", [b.get_hostname()]))
    assert answer.status == TaskStatus.SUCCESS and answer.type == TaskType.REPLICA_COPY, answer
    assert len(a.get_replica_desc("k")) == 2
    answer = done(*a.create_move_task("k", b.get_hostname(), c.get_hostname()))
    assert answer.status == TaskStatus.SUCCESS and answer.type == TaskType.REPLICA_MOVE, answer
    assert answer.created_at_ms_epoch <= answer.last_updated_at_ms_epoch
    assert c.get("k") == value
    assert a.create_copy_task("missing", [b.get_hostname()]) == ((0, 0), -704)
    assert a.create_copy_task("k", ["nowhere:1"])[0] == (0, 0)
    assert a.query_task((1, 2)) == (None, -1400)
    assert a.query_task([1, 2]) == (None, -1400)
    assert TaskStatus.SUCCESS != 3 and int(TaskStatus.SUCCESS) == 3
    assert b.batch_replica_clear(["k"]) == [], "another store wrote it"
    time.sleep(0.3)
    assert a.batch_replica_clear(["k", "missing"]) == ["k"]
    assert a.get("k") == b""


def test_checksums(own_master, make_store, monkeypatch):
    mine = own_master()
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", "1")
    a = make_store(mine)
    value = os.urandom(100_000)
    assert a.put("k", value) == 0 and a.put_parts("p", value[:10], value[10:]) == 0
    assert a.get("k") == value and bytes(a.get_buffer("p")) == value and a.get_batch(["p", "x"]) == [value, b""]


def test_the_hot_cache_never_returns_an_older_value(own_master, make_store, monkeypatch):
    mine = own_master()
    writer = make_store(mine)
    monkeypatch.setenv("MC_STORE_LOCAL_HOT_CACHE_SIZE", "4MB")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    port = free_port()
    reader = make_store(mine, global_segment_size=0, enable_client_http_server=True, client_http_port=port)
    for number in range(5):
        value = os.urandom(100_000)
        assert writer.upsert("k", value) == 0
        for _ in range(20):
            assert reader.get("k") == value and bytes(reader.get_buffer("k")) == value
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    hits = [line for line in lines if line.startswith("mooncake_client_hot_cache_hits_total")]
    assert int(hits[0].split()[-1]) > 20, hits


CHILD = """
import os, sys
from mooncake.store import MooncakeDistributedStore
import mooncake
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", sys.argv[1]) == 0
store.put(sys.argv[2], b"of the parent")
child = os.fork()
if child == 0:
    try:
        store.get(sys.argv[2])
    except mooncake.ForkedError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert store.get(sys.argv[2]) == b"of the parent"
# The interpreter ends with the store open.
"""


def test_forks_are_refused_and_exits_are_tidy(master, store, key):
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", CHILD, master.address, key], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    # The first store freed its memory, so its objects are lost at once.
    assert store.get(key) == b"" or store.remove(key, True) == 0


LOUD = """
import logging, sys
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.name, record.levelname, record.getMessage()))
        if len(records) == 1:
            raise RuntimeError("a handler that fails")
logging.getLogger("mooncake").addHandler(Keep())
logging.getLogger("mooncake._mooncake").addFilter(lambda record: filtered.append(record.name) or True)
filtered = []
from mooncake.store import MooncakeDistributedStore
loggers = set(logging.root.manager.loggerDict)
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", sys.argv[1]) == 0
store.put("empty", b"")
store.get_into("x", 8, 8)
store.close()
from mooncake import _mooncake
def check():
    assert any("must not be empty" in text for _, _, text in records), records
    assert all(name.startswith("mooncake.") for name, _, _ in records), records
    # Walking through the table of loggers while it grows is an error. pytest walks through it.
    assert not [name for name, _, _ in records if name in set(logging.root.manager.loggerDict) - loggers]
    # A logger that the program has made takes the events below it.
    assert filtered == [name for name, _, _ in records if name.startswith("mooncake._mooncake")] != []
    print("checked")
_mooncake._stop_log()
import threading
[one.join(5) for one in threading.enumerate() if one.name == "mooncake-log"]
check()
"""


def test_log_events_reach_python_logging(master):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", LOUD, master.address],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "MC_LOG_LEVEL": "DEBUG"},
    )
    assert done.returncode == 0 and "checked" in done.stdout, done.stdout + done.stderr
