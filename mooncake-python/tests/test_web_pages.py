"""Requests of websites to the HTTP servers in Python, their addresses, and the limit of mounts."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import free_port

pytest.importorskip("aiohttp", reason="the servers need aiohttp")

from mooncake import InvalidArgumentError  # noqa: E402
from mooncake._rest_handlers import _Mounts  # noqa: E402
from mooncake.http_metadata_server import KVBootstrapServer  # noqa: E402
from mooncake.mooncake_store_service import parse_arguments  # noqa: E402

JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
EVIL = {"Origin": "http://evil.example"}
REBOUND = {"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"}
OWN = {"Origin": "http://127.0.0.1:{port}"}

# Headers, and a word of the refusal, if every listener refuses a change with these headers.
CHANGES = [
    ({}, None),
    (FORM, None),
    (JSON, None),
    ({"Host": "mooncake.default.svc:{port}"}, None),
    ({"Host": "mooncake-rest"}, None),
    ({"Host": "given.example"}, None),
    ({**OWN, **JSON}, None),
    ({**OWN, **JSON, "Sec-Fetch-Site": "same-origin"}, None),
    ({**OWN, **TEXT}, "application/json"),
    ({**OWN, **FORM}, "application/json"),
    ({**EVIL, **JSON}, "http://evil.example"),
    ({**EVIL, **TEXT}, "http://evil.example"),
    ({**EVIL, **FORM}, "http://evil.example"),
    ({"Origin": "null", **JSON}, "null"),
    ({"Sec-Fetch-Site": "cross-site"}, "cross-site"),
    ({"Sec-Fetch-Site": "same-site", **TEXT}, "same-site"),
    ({**REBOUND, **JSON}, "--allowed_hosts"),
    ({**REBOUND, **TEXT}, "--allowed_hosts"),
    ({"Host": "evil.example", "Sec-Fetch-Site": "same-origin"}, "--allowed_hosts"),
]


def send(port, method, path, headers, body=None):
    """Sends a request, and returns the status and the body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {name: value.format(port=port) for name, value in headers.items()}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    names = [name.lower() for name, _ in answer.getheaders()]
    assert not [name for name in names if name.startswith("access-control-")]
    text = answer.read().decode(errors="replace")
    connection.close()
    return answer.status, text


def check(port, method, path, body):
    for headers, word in CHANGES:
        status, text = send(port, method, path, headers, body)
        if word is None or (word == "application/json" and not body):
            assert status != 403, (method, path, headers, text)
        else:
            assert status == 403 and word in text, (method, path, headers, status, text)


def listening(process):
    """Returns the addresses at which a process listens."""
    links = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.add(str(link.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                host, port = words[1].split(":")
                raw = b"".join(int(host[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(host), 8))
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                found.append((socket.inet_ntop(family, raw), int(port, 16)))
    return found


@contextlib.contextmanager
def rest_server(master, *more):
    port = free_port()
    settings = [
        "local_hostname=127.0.0.1",
        "metadata_server=P2PHANDSHAKE",
        f"master_server_address={master.address}",
        "global_segment_size=16MB",
        "local_buffer_size=16MB",
    ]
    flags = [part for setting in settings for part in ("-D", setting)]
    module = [sys.executable, "-m", "mooncake.mooncake_store_service"]
    process = subprocess.Popen([*module, "--port", str(port), *more, *flags])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_pages_of_others_use_no_rest_server(master):
    with rest_server(master, "--allowed_hosts", "given.example", "--max_mount_size", "40MB") as (port, process):
        # Every port is at loopback: that of the server, and those of its client.
        addresses = listening(process.pid)
        assert len(addresses) >= 3
        assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}
        value = json.dumps({"key": "page", "value": "secret"})
        check(port, "PUT", "/api/put", value)
        nothing = json.dumps({"segment_ids": ["none"]})
        for path in ("/api/unmount", "/api/unmount_shm", "/api/mount_shm", "/api/reconfigure", "/api/unmount_local_disk"):
            check(port, "POST", path, nothing)
        check(port, "POST", "/api/mount", json.dumps({"size": 0}))
        check(port, "DELETE", "/api/remove/absent", None)
        # Values are read by names that were given, with or without headers of a browser.
        for headers in ({}, {"Host": "given.example"}, {"Host": "mooncake-rest.ns.svc:8080"}, {**OWN}):
            assert send(port, "GET", "/api/get/page", headers) == (200, "secret"), headers
        for headers in (
            {"Host": "evil.example"},
            {"Host": "evil.example:{port}"},
            REBOUND,
            EVIL,
            {"Sec-Fetch-Site": "cross-site"},
            {"Host": "127.0.0.1.evil.example"},
        ):
            for path in ("/api/get/page", "/api/exist/page", "/%61pi/get/page", "//api/get/page"):
                status, text = send(port, "GET", path, headers)
                assert status == 403 and "secret" not in text, (path, headers)
        # Others go on working by any name.
        for path in ("/health", "/metrics", "/openapi.json"):
            assert send(port, "GET", path, {"Host": "node.corp.example"})[0] == 200
            assert send(port, "GET", path, REBOUND)[0] == 403
        for path in ("/api/put", "/api/get/page", "/metrics"):
            assert send(port, "OPTIONS", path, {**EVIL, "Access-Control-Request-Method": "PUT"})[0] >= 400
        # Mounts are limited in all, and space of an unmounted segment counts no more.
        first = send(port, "POST", "/api/mount", JSON, json.dumps({"size": 32 << 20}))
        assert first[0] == 200
        status, text = send(port, "POST", "/api/mount", JSON, json.dumps({"size": 16 << 20}))
        assert status == 507 and "max_mount_size" in text
        ids = json.loads(first[1])["segment_ids"]
        assert send(port, "POST", "/api/unmount", JSON, json.dumps({"segment_ids": ids}))[0] == 200
        assert send(port, "POST", "/api/mount", FORM, json.dumps({"size": 16 << 20}))[0] == 200
        check(port, "DELETE", "/api/remove_all", None)


def test_pages_of_others_change_no_metadata():
    server = KVBootstrapServer(0, "127.0.0.1", "given.example")
    server.run()
    try:
        check(server.port, "PUT", "/metadata?key=a", '{"a": 1}')
        # Engines call the service by any name.
        for headers in ({"Host": "metadata.corp.example:8080"}, {"Host": "metadata"}, FORM):
            assert send(server.port, "PUT", "/metadata?key=b", headers, "{}")[0] == 200
            assert send(server.port, "GET", "/metadata?key=b", headers) == (200, "{}")
        check(server.port, "DELETE", "/metadata?key=a", None)
        check(server.port, "POST", "/metadata?key=a", "{}")
        assert send(server.port, "GET", "/metadata?key=b", REBOUND)[0] == 403
        assert send(server.port, "OPTIONS", "/metadata?key=b", EVIL)[0] >= 400
    finally:
        server.close()


def test_names_are_checked(monkeypatch):
    for wrong in ("a b", "http://a", "*a"):
        with pytest.raises(InvalidArgumentError, match="allowed_hosts"):
            KVBootstrapServer(0, "127.0.0.1", wrong)
    monkeypatch.setenv("MC_ALLOWED_HOSTS", "given.example")
    server = KVBootstrapServer(0, "127.0.0.1")
    server.run()
    try:
        headers = {"Host": "given.example", "Origin": "http://given.example", **JSON}
        assert send(server.port, "PUT", "/metadata?key=a", headers, "{}")[0] == 200
    finally:
        server.close()


def test_the_rest_server_listens_at_loopback_by_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mc_store_rest_server"])
    assert parse_arguments().host == "127.0.0.1"
    monkeypatch.setattr(sys, "argv", ["mc_store_rest_server", "--host", "0.0.0.0", "--max-mount-size", "1GB"])
    assert (parse_arguments().host, parse_arguments().max_mount_size) == ("0.0.0.0", 1 << 30)


def test_mounts_are_counted():
    mounts = _Mounts(100)
    assert mounts.reserve(60) is None
    # A mount that is still in progress counts.
    assert "max_mount_size=100" in str(mounts.reserve(50))
    mounts.settle(60, [])
    assert mounts.reserve(100) is None
    mounts.settle(100, ["a", "b"])
    assert mounts.reserve(1) is not None
    mounts.release(["b", "c"])
    assert mounts.reserve(1) is not None
    mounts.release(["a"])
    assert mounts.reserve(100) is None
    assert _Mounts(None).reserve(1 << 20) is None
    assert _Mounts(None).reserve(1 << 60) is not None


def test_many_small_mounts_are_limited():
    mounts = _Mounts(1 << 40)
    for number in range(1024):
        assert mounts.reserve(1) is None
        mounts.settle(1, [str(number)])
    assert "1024 of 1024" in str(mounts.reserve(1))
