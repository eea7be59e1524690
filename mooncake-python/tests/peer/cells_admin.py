"""HTTP endpoints of the master: objects, segments, drain jobs, tenants, metrics, and the metadata
service.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from urllib.parse import quote

from cluster import MIB, Group, config, of, raw

VALUE = raw(b"value" * 100)
PRETTY = re.compile(r"\d+(\.\d+)?")


def lines(answer):
    """Returns the lines of a text whose lines have no order."""
    return {**answer, "body": sorted(answer["body"].splitlines())}


def numbers(answer):
    """Splits a text into words."""
    return {**answer, "body": PRETTY.sub("N", answer["body"])}


def kind(answer):
    return [answer["status"], answer["type"]]


def pages(run):
    a, b, c = run.members
    two = config(preferred_segments=[a.host, b.host], replica_num=2)
    run("put", a, "put", "k1", VALUE, config(preferred_segment=a.host))
    run("put two copies", a, "put", "k2", VALUE, two)
    run("put a key with signs", a, "put", "k 3/ü,%", VALUE, config(preferred_segment=c.host))
    for path in ("/health", "/role", "/ha_status", "/leader", "/kv_events/status"):
        run.page(path, "GET", path)
    for path in ("/get_all_keys", "/get_all_segments"):
        run.page(path, "GET", path, seen=lines)

    def detail(answer):
        body = answer["body"]
        segments = sorted(body["segments"], key=lambda one: run.cluster.names[one["segment_name"]])
        for one in segments:
            for name in ("allocator_used_bytes", "allocator_usage_percent"):
                one[name] = type(one[name]).__name__
        return {**answer, "body": {**body, "segments": segments}}

    run.page("segments in detail", "GET", "/get_segments_detail", seen=detail)
    for step, path in [
        ("segment", f"/query_segment?segment={a.host}"),
        ("segment, escaped", f"/query_segment?segment={quote(a.host, safe='')}"),
        ("segment, unknown", "/query_segment?segment=nobody"),
        ("segment, none", "/query_segment"),
        ("key", "/query_key?key=k1"),
        ("key, two copies", "/query_key?key=k2"),
        ("key, escaped", f"/query_key?key={quote('k 3/ü,%', safe='')}"),
        ("key, unknown", "/query_key?key=none"),
        ("key, empty", "/query_key?key="),
        ("key, none", "/query_key"),
        ("keys", "/batch_query_keys?keys=k1,none,k2"),
        ("keys, twice the same", "/batch_query_keys?keys=k1,k1"),
        ("keys, empty ones", "/batch_query_keys?keys=,k1,"),
        ("keys, empty", "/batch_query_keys?keys="),
        ("keys, none", "/batch_query_keys"),
        ("keys, escaped", f"/batch_query_keys?keys={quote('k 3/ü,%', safe='')}"),
        ("status", f"/api/v1/segments/status?segment={a.host}"),
        ("status, escaped", f"/api/v1/segments/status?segment={quote(a.host, safe='')}"),
        ("status, unknown", "/api/v1/segments/status?segment=nobody"),
        ("status, empty", "/api/v1/segments/status?segment="),
        ("status, none", "/api/v1/segments/status"),
        ("no page", "/nothing/here"),
        ("root", "/"),
        ("quotas while tenants are off", "/api/v1/tenant_quotas"),
        ("quota while tenants are off", "/api/v1/tenant_quotas?tenant_id=t"),
        ("post by get", "/api/v1/remove_all"),
    ]:
        run.page(step, "GET", path)
    quota = "/api/v1/tenant_quotas?tenant_id=t"
    run.page("quota set while tenants are off", "PUT", quota, '{"requested_quota_bytes":1}')
    run.page("quota removed while tenants are off", "DELETE", quota)
    run.page("get by post", "POST", "/get_all_keys", "")
    run.page("head", "HEAD", "/health", seen=kind)
    run.page("metrics", "GET", "/metrics", seen=kind)
    run.page("summary", "GET", "/metrics/summary", seen=kind)
    run("remove what was asked about", b, "remove", "k2")
    a("remove_all", True)
    a("put_batch", ["k1", "k2"], [VALUE, VALUE])
    run.page("remove all", "POST", "/api/v1/remove_all")
    a("put_batch", ["k1", "k2"], [VALUE, VALUE])
    run.page("remove all of a tenant", "POST", "/api/v1/remove_all?tenant_id=other&force=true")
    run.page("remove all by force", "POST", "/api/v1/remove_all?force=true")
    run("nothing is left", b, "batch_is_exist", ["k1", "k2"])
    run.page("remove all of nothing", "POST", "/api/v1/remove_all?force=1")


def query(job):
    return f"/api/v1/drain_jobs/query?job_id={job}"


def drained(run, step, body):
    """Starts a job and waits for its end."""
    answer = run.page(step, "POST", "/api/v1/drain_jobs", json.dumps(body))["body"]

    def over(answer):
        return answer["body"].get("status_name") in ("SUCCEEDED", "FAILED", "CANCELED")

    if isinstance(answer, dict) and answer.get("job_id"):
        run.page(f"{step}: end", "GET", query(answer["job_id"]), until=over)
        return answer["job_id"]
    return None


def drain(run):
    a, b, c = run.members
    keys = [f"d{i}" for i in range(6)]
    for key in keys:
        run(f"put {key}", b, "put", key, VALUE, config(preferred_segment=a.host))
    job = drained(run, "drain", {"segments": [a.host], "target_segments": [b.host]})
    run.page("status of the segment", "GET", f"/api/v1/segments/status?segment={a.host}")
    run("objects are there", c, "get_batch", keys)
    run.copies("one copy each", c, keys)
    run("descriptor", c, "get_replica_desc", "d0")
    run("put afterwards", b, "put", "after", VALUE, config(preferred_segment=a.host))
    where = run.cluster.plain(b("get_replica_desc", "after"))
    run.saw("nothing is put there", [copy for copy in where if copy["at"] == "<a>"])
    run.page("cancel of a finished job", "POST", f"/api/v1/drain_jobs/cancel?job_id={job}")
    run.page("query again", "GET", query(job))
    drained(run, "drain again", {"segments": [a.host]})
    for step, body in [
        ("unknown segment", {"segments": ["nobody"]}),
        ("unknown target", {"segments": [b.host], "target_segments": ["nobody"]}),
        ("target is the source", {"segments": [b.host], "target_segments": [b.host]}),
        ("no segments", {"segments": []}),
        ("segments missing", {}),
        ("no moves at once", {"segments": [b.host], "max_concurrency": 0}),
        ("segments as text", {"segments": b.host}),
        ("a list", []),
    ]:
        answer = run.page(step, "POST", "/api/v1/drain_jobs", json.dumps(body), seen=lambda answer: message(answer))
        if isinstance(answer["body"], dict) and answer["body"].get("job_id"):
            run.cluster.master.page("POST", f"/api/v1/drain_jobs/cancel?job_id={answer['body']['job_id']}")
    run.page("no JSON", "POST", "/api/v1/drain_jobs", "{", seen=message)
    run.page("no body", "POST", "/api/v1/drain_jobs", seen=message)
    for step, path in [
        ("query", "query?job_id=1-2"),
        ("query, no id", "query?job_id=x"),
        ("query, missing", "query"),
    ]:
        run.page(step, "GET", f"/api/v1/drain_jobs/{path}")
    for step, path in [
        ("cancel", "cancel?job_id=1-2"),
        ("cancel, no id", "cancel?job_id=x"),
        ("cancel, missing", "cancel"),
    ]:
        run.page(step, "POST", f"/api/v1/drain_jobs/{path}")
    run.page("status of b", "GET", f"/api/v1/segments/status?segment={b.host}")


def message(answer):
    """Removes the words of the parser, which follow `Invalid JSON body: `."""
    body = answer["body"]
    if isinstance(body, dict) and "error_message" in body:
        text = re.sub(r"(Invalid JSON body: ).*", r"\1..", body["error_message"], flags=re.DOTALL)
        body = {**body, "error_message": text}
    return {**answer, "body": body}


def drain_blocked(run):
    """Drains a segment with objects that cannot be moved, which keep the job from completing."""
    a, b, c = run.members
    run("put", b, "put", "pinned", VALUE, config(preferred_segment=c.host, with_hard_pin=True))
    answer = run.page("drain", "POST", "/api/v1/drain_jobs", json.dumps({"segments": [c.host]}))["body"]
    job = answer.get("job_id")
    blocked = lambda answer: answer["body"].get("blocked_units", 0) > 0  # noqa: E731
    run.page("query", "GET", query(job), until=blocked)
    run.page("status", "GET", f"/api/v1/segments/status?segment={c.host}")
    run.page("cancel", "POST", f"/api/v1/drain_jobs/cancel?job_id={job}", until=lambda answer: answer["status"] != 409)
    run.page("query after cancel", "GET", query(job))
    run.page("status after cancel", "GET", f"/api/v1/segments/status?segment={c.host}")
    run("get", a, "get", "pinned")
    run("put after cancel", b, "put", "again", VALUE, config(preferred_segment=c.host))
    run("descriptor after cancel", b, "get_replica_desc", "again")


def tenants(run):
    """Runs three clients: of one tenant, of another, and of an unregistered one."""
    a, b, c = run.members
    quotas = "/api/v1/tenant_quotas"
    run.page("quotas", "GET", quotas)
    run.page("quota", "GET", f"{quotas}?tenant_id=alpha")
    run.page("quota, unknown", "GET", f"{quotas}?tenant_id=ghost")
    run("put of alpha", a, "put", "k", raw(b"of alpha"))
    run("put of beta", b, "put", "k", raw(b"of beta"))
    run("put of nobody", c, "put", "k", raw(b"of nobody"))
    for node in run.members:
        name = node.name
        run(f"get {name}", node, "get", "k")
        run(f"exist {name}", node, "is_exist", "k")
        run(f"size {name}", node, "get_size", "k")
        run.copies(f"copies {name}", node, ["k"])
        run(f"upsert {name}", node, "upsert", "u", VALUE)
        run(f"batch {name}", node, "put_batch", ["m", "n"], [VALUE, VALUE])
        run(f"batch_is_exist {name}", node, "batch_is_exist", ["m", "n", "o"])
        run(f"remove {name}", node, "remove", "m", True)
        run(f"remove_by_regex {name}", node, "remove_by_regex", "^n$", True)
    hard = config(with_hard_pin=True)
    for index in range(3):
        run(f"fill {index}", a, "put", f"fill{index}", raw(b"x" * (4 * MIB)), hard)
    run("beta has room", b, "put", "room", raw(b"x" * (4 * MIB)))
    run("remove_all of beta", b, "remove_all", True)
    run("alpha keeps its own", a, "batch_is_exist", ["k", "fill0", "fill1"])
    run("get of alpha", a, "get", "k")
    for step, method, path, body in [
        ("set", "PUT", "?tenant_id=gamma", '{"requested_quota_bytes":1048576}'),
        ("set again", "PUT", "?tenant_id=gamma", '{"requested_quota_bytes":2097152}'),
        ("one", "GET", "?tenant_id=gamma", None),
        ("set nothing", "PUT", "?tenant_id=gamma", '{"requested_quota_bytes":0}'),
        ("set below nothing", "PUT", "?tenant_id=gamma", '{"requested_quota_bytes":-1}'),
        ("set words", "PUT", "?tenant_id=gamma", '{"requested_quota_bytes":"1"}'),
        ("set no field", "PUT", "?tenant_id=gamma", "{}"),
        ("set no JSON", "PUT", "?tenant_id=gamma", "{"),
        ("set for nobody", "PUT", "", '{"requested_quota_bytes":1}'),
        ("set for a bad name", "PUT", "?tenant_id=_x", '{"requested_quota_bytes":1}'),
        ("remove", "DELETE", "?tenant_id=gamma", None),
        ("remove again", "DELETE", "?tenant_id=gamma", None),
        ("remove one with objects", "DELETE", "?tenant_id=alpha", None),
        ("remove nobody", "DELETE", "", None),
    ]:
        run.page(step, method, quotas + path, body, seen=message)
    run.page("remove objects", "POST", "/api/v1/remove_all?tenant_id=alpha&force=true")
    run("nothing of alpha", a, "is_exist", "k")
    run.page("remove one without objects", "DELETE", f"{quotas}?tenant_id=alpha")
    run("put of one that is gone", a, "put", "late", VALUE)
    run.page("quotas in the end", "GET", quotas)


SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{([^}]*)\})? ")


def metrics(run):
    """Checks that every metric of Mooncake C++ exists, with its kind and its labels. Additional
    metrics are accepted.
    """
    a, b, _ = run.members
    run("put", a, "put_batch", ["m1", "m2"], [VALUE, VALUE])
    run("get", b, "get_batch", ["m1", "m2", "m3"])
    run("exist", b, "batch_is_exist", ["m1"])
    run("remove", b, "remove", "m1", True)
    text = run.cluster.master.page("GET", "/metrics")["body"]
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, what = line.split(" ", 3)
            run.saw(f"has {name}", what)
    labels = {}
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample:
            names = re.findall(r'(\w+)="', sample[3] or "")
            labels.setdefault(sample[1], set()).update(name for name in names if name != "le")
    for name, found in labels.items():
        run.saw(f"has labels of {name}", sorted(found))
    summary = run.cluster.master.page("GET", "/metrics/summary")["body"]
    run.saw("parts of the summary", [PRETTY.sub("N", part.split(":")[0]) for part in summary.split(" | ")])


def directory(run):
    """Runs clients that use the HTTP metadata server of the master."""
    a, b, _ = run.members
    port = run.cluster.master.port + 2
    run("put", a, "put", "met", VALUE, config(preferred_segment=a.host))
    run("get by another", b, "get", "met")
    run("descriptor", b, "get_replica_desc", "met")

    def page(step, method, path, body=None, seen=lambda answer: [answer["status"], answer["body"]]):
        run.saw(step, seen(run.cluster.master.page(method, path, body, port)))

    page("kind of a text", "GET", "/metadata?key=none", seen=kind)

    for step, method, path, body in [
        ("nothing", "GET", "/metadata?key=none", None),
        ("no key", "GET", "/metadata", None),
        ("empty key", "GET", "/metadata?key=", None),
        ("set", "PUT", "/metadata?key=x", '{"a":1}'),
        ("read", "GET", "/metadata?key=x", None),
        ("set again", "PUT", "/metadata?key=x", "no JSON"),
        ("read again", "GET", "/metadata?key=x", None),
        ("set nothing", "PUT", "/metadata?key=x", ""),
        ("read nothing", "GET", "/metadata?key=x", None),
        ("set no key", "PUT", "/metadata", "1"),
        ("remove", "DELETE", "/metadata?key=x", None),
        ("remove again", "DELETE", "/metadata?key=x", None),
        ("remove no key", "DELETE", "/metadata", None),
        ("rpc_meta", "PUT", "/metadata?key=rpc_meta/z", "1"),
        ("rpc_meta, the same", "PUT", "/metadata?key=rpc_meta/z", "1"),
        ("rpc_meta, another", "PUT", "/metadata?key=rpc_meta/z", "2"),
        ("health", "GET", "/health", None),
        ("post", "POST", "/metadata?key=x", "1"),
        ("elsewhere", "GET", "/nothing", None),
    ]:
        page(step, method, path, body)
    described = lambda answer: [answer["status"], sorted(answer["body"])]  # noqa: E731
    for node in run.members:
        for step, kind_of in (("segment", "ram"), ("port", "rpc_meta")):
            key = quote(f"mooncake/{kind_of}/{node.host}", safe="")
            page(f"{step} of {node.name}", "GET", f"/metadata?key={key}", seen=described)


POLICY = """version: 1
tenants:
  - name: alpha
    quota: 10MB
  - name: beta
    quota: 20MB
"""


def with_policy():
    """Returns flags for tenants, with a separate policy file."""
    folder = tempfile.mkdtemp(prefix="mooncake-cells-")
    path = Path(folder, "policy.yaml")
    path.write_text(POLICY)
    return ["--enable_multi_tenants=true", "--tenant_quota_connector_type=file", f"--tenant_quota_connector_uri={path}"]


TENANTS = {"a": {"tenant_id": "alpha"}, "b": {"tenant_id": "beta"}, "c": {"tenant_id": "ghost"}}
MOVED = re.compile(r'mooncake_transfer_(read|write)_operation_(count|bytes)\{.*op_name="(\w+)"\} (\d+)')


def client_pages(run):
    """Requests the HTTP endpoints of a client: health, and each kind of call counted under the same
    name.
    """
    a, b, _ = run.members
    a.send({"call": "buffer", "name": "m", "size": 10_000})
    at = lambda offset: of("buffer", {"name": "m", "at": offset})  # noqa: E731
    for call, args in [
        ("put", ["c1", VALUE]),
        ("put", ["c1", VALUE]),
        ("put_parts", ["c2", VALUE, VALUE]),
        ("put_batch", [["c3", "c4"], [VALUE, VALUE]]),
        ("put_from", ["c5", at(0), 1000]),
        ("batch_put_from", [["c6", "c7"], [at(0), at(10)], [100, 200]]),
        ("batch_put_from_multi_buffers", [["c8"], [[at(0), at(500)]], [[100, 50]]]),
        ("upsert", ["c1", VALUE]),
        ("upsert_parts", ["c2", VALUE]),
        ("upsert_batch", [["c3"], [VALUE]]),
        ("upsert_from", ["c5", at(0), 900]),
        ("batch_upsert_from", [["c6"], [at(0)], [90]]),
        ("get", ["c1"]),
        ("get", ["none"]),
        ("get_batch", [["c1", "none", "c3"]]),
        ("get_buffer", ["c1"]),
        ("batch_get_buffer", [["c1"]]),
        ("get_into", ["c5", at(2000), 1000]),
        ("batch_get_into", [["c6", "c7"], [at(2000), at(3000)], [90, 200]]),
        ("batch_get_into_multi_buffers", [["c8"], [[at(2000), at(3000)]], [[100, 50]]]),
        ("get_into_ranges", [[at(4000)], [["c5"]], [[[0]]], [[[5]]], [[[10]]]]),
    ]:
        a(call, *args)

    def page(path):
        return run.cluster.master.page("GET", path, port=run.cluster.client_port)

    run.saw("health", page("/health"))
    run.saw("summary", kind(page("/metrics/summary")))
    metrics = page("/metrics")
    run.saw("metrics", kind(metrics))
    for line in metrics["body"].splitlines():
        if line.startswith("# TYPE "):
            run.saw(f"has {line.split()[2]}", line.split()[3])
        if found := MOVED.match(line):
            way, what, name, number = found.groups()
            run.saw(f"has {what} of {way} {name}", int(number))
    moved = re.findall(r"mooncake_transfer_(read|write)_bytes\{.*\} (\d+)", metrics["body"])
    run.saw("bytes", sorted(moved))


GROUPS = [
    Group([pages, metrics], ["--default_kv_lease_ttl=2000"]),
    Group([drain_blocked, drain], ["--default_kv_lease_ttl=500"]),
    Group([tenants], with_policy, TENANTS),
    Group([client_pages], settings={"a": {"enable_client_http_server": True}}),
    Group([directory], ["--enable_http_metadata_server=true", "--http_metadata_server_port={directory}"], met=True),
]
