"""HTTP server of a store: health and metrics."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from conftest import Master, free_port

from mooncake.store import MooncakeDistributedStore


def page(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_calls_of_a_store_are_counted(
    make_store: Callable[..., MooncakeDistributedStore], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_STORE_CLUSTER_ID", "lab")
    port = free_port()
    store = make_store(enable_client_http_server=True, client_http_port=port)
    assert page(port, "/health") == (200, '{"status":"healthy","code":0}')
    # Another store works without the server.
    other = make_store(enable_client_http_server=True, client_http_port=port)
    assert other.put(f"{key}-other", b"12345") == 0
    assert store.put(key, b"x" * 1000) == 0 and store.get(key) == b"x" * 1000 and store.get("none") == b""
    assert store.put_parts(f"{key}-parts", b"ab", b"c") == 0 and store.upsert(key, b"y") == 0
    handle = store.get_buffer(key)
    assert handle is not None and len(handle) == 1
    status, text = page(port, "/metrics")
    assert status == 200 and 'cluster_id="lab"' in text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = 'client_mode="real",cluster_id="lab"'
    for way, name, times, size in [
        ("write", "put", 1, 1000),
        ("write", "put_parts", 1, 3),
        ("write", "upsert", 1, 1),
        ("read", "get_buffer", 3, 1001),
    ]:
        series = f"mooncake_transfer_{way}_operation"
        assert counts[f'{series}_count{{{label},op_name="{name}"}}'] == str(times), text
        assert counts[f'{series}_bytes{{{label},op_name="{name}"}}'] == str(size), text
    assert counts[f'mooncake_client_reads_total{{{label},outcome="missing"}}'] == "1", text
    assert page(port, "/metrics/summary")[1].startswith("Client Metrics Summary\n")
    assert json.loads(page(port, "/openapi.json")[1])["paths"].keys() == {
        "/health",
        "/metrics",
        "/metrics/summary",
        "/version",
    }
    assert json.loads(page(port, "/version")[1])["version"] == "2.0.0"
    store.close()
    with pytest.raises(urllib.error.URLError):
        page(port, "/health")


def test_settings_as_text_without_metrics(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_STORE_CLIENT_METRIC", "0")
    port = free_port()
    store = MooncakeDistributedStore()
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_addr": master.address,
        "enable_client_http_server": "yes",
        "client_http_port": str(port),
    }
    assert store.setup({**settings, "enable_client_http_server": "perhaps"}) == -600
    assert store.setup({**settings, "enable_ssd_offload": "perhaps"}) == -600
    for number in ("70000", "65536", "-1", "0", "none"):
        assert store.setup({**settings, "client_http_port": number}) == -600, number
    unserved = {**settings, "client_http_port": "70000", "enable_client_http_server": "no"}
    assert store.setup(unserved) == 0, "no port is requested"
    assert store.setup(settings) == 0
    assert page(port, "/metrics") == page(port, "/metrics/summary") == (503, "metrics not available")
    # The port is free for the next setup of the same store.
    assert store.setup(settings) == 0
    assert page(port, "/health")[0] == 200
    store.close()
