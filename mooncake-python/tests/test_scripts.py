"""Messages of console scripts about wrong flags and missing packages."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys

import pytest

from conftest import command
from mooncake import cli


@pytest.fixture
def topology(tmp_path, monkeypatch, capsys):
    """Runs `transfer_engine_topology_dump` with a file that the environment names. Returns its
    output and that file.
    """
    file = tmp_path / "topology.json"
    file.write_text('{"cpu:0": [["of_the_file"], []]}')

    def dump(*flags):
        monkeypatch.setenv("MC_CUSTOM_TOPO_JSON", str(file))
        monkeypatch.setattr(sys, "argv", ["transfer_engine_topology_dump", *flags])
        assert cli.topology_dump() == 0
        return capsys.readouterr().out

    return dump, file


def test_discovery_unless_a_file_is_selected(topology):
    dump, file = topology
    assert "of_the_file" not in dump() and "[te/discover]" in dump()
    assert "of_the_file" not in dump("--backend", "te")
    assert "of_the_file" in dump("--use-custom-topo") and f"[te/custom ({file})]" in dump("--use-custom-topo")
    assert "of_the_file" in dump("--custom-topo-json", str(file))


def test_backends_of_the_topology(topology, capsys):
    dump, _ = topology
    for backend in ("tent", "nonsense"):
        with pytest.raises(SystemExit) as ended:
            dump("--backend", backend)
        assert ended.value.code == 2 and "--backend" in capsys.readouterr().err


def test_wrong_flags_are_named():
    pytest.importorskip("aiohttp", reason="the servers need aiohttp")
    for script, *flags in [
        ("mooncake_http_metadata_server", "--log-level", "nonsense"),
        ("mooncake_http_metadata_server", "--port", "65536"),
        ("mc_store_rest_server", "--port", "65536"),
        ("mc_store_rest_server", "--port", "-1"),
    ]:
        ended = subprocess.run([command(script), *flags], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and flags[0] in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


def test_define_is_the_long_name(capsys, monkeypatch):
    pytest.importorskip("aiohttp", reason="the servers need aiohttp")
    from mooncake.mooncake_store_service import _settings, sync_main

    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["mc_store_rest_server", "--define", "local_hostname=a", "-Dmetadata_server=b"])
    assert sync_main() == 2
    assert "Missing required config field: master_server_address" in capsys.readouterr().err
    monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
    assert _settings(None, []).protocol == "tcp"
    changed = _settings(None, ["protocol=rdma", "local_hostname=x"])
    assert (changed.master_server_address, changed.local_hostname, changed.protocol) == ("h:1", "x", "rdma")


@pytest.mark.parametrize("script", ["http_metadata_server", "rest_server"])
def test_a_missing_aiohttp_is_named(script, monkeypatch, capsys):
    for name in ("mooncake.http_metadata_server", "mooncake.mooncake_store_service"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importing = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "aiohttp":
            raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert getattr(cli, script)() == 1
    assert "pip install aiohttp" in capsys.readouterr().err


def test_flags_of_gflags_bring_others(tmp_path):
    flags = tmp_path / "flags"
    for script, flag in [
        ("mooncake_master", "--metrics_port=70000"),
        ("mooncake_client", "--port=70000"),
        ("transfer_engine_bench", "--threads=0"),
    ]:
        flags.write_text(f"# comment\n{flag}\n--no_such_flag=1\n")
        name = flag.partition("=")[0]
        given = ["--undefok=gone,lost", "--gone=1", "--nolost", f"--flagfile={flags}"]
        ended = subprocess.run([command(script), *given], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and name in ended.stderr, ended.stderr
        assert "--gone" not in ended.stderr and "--flagfile" not in ended.stderr, ended.stderr
        given = [f"--flagfile={tmp_path / 'absent'}"]
        ended = subprocess.run([command(script), *given], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and "absent" in ended.stderr, ended.stderr


def test_numbers_that_make_no_sense_are_refused_by_name():
    for script, flag in [
        ("mooncake_master", "default_kv_lease_ttl"),
        ("mooncake_master", "rpc_thread_num"),
        ("mooncake_master", "client_ttl"),
        ("mooncake_client", "port"),
        ("mooncake_client", "global_segment_size"),
        ("mooncake_client", "max_clients"),
        ("mooncake_client", "client_ttl"),
        ("transfer_engine_bench", "threads"),
        ("transfer_engine_bench", "duration"),
    ]:
        for value in "-1", "18446744073709551615", "99999999999999999999999":
            for given in [f"--{flag}={value}"], [f"--{flag}", value]:
                ended = subprocess.run([command(script), *given], capture_output=True, text=True, timeout=60)
                assert ended.returncode == 2 and flag in ended.stderr, (script, given, ended.stderr)
                assert "panicked" not in ended.stderr, ended.stderr


def test_flags_that_would_refuse_everything_are_refused():
    for script, flag in [
        ("mooncake_master", "eviction_high_watermark_ratio"),
        ("mooncake_client", "max_clients"),
        ("mooncake_client", "max_client_memory"),
        ("mooncake_client", "max_client_requests"),
    ]:
        ended = subprocess.run([command(script), f"--{flag}=0"], capture_output=True, text=True, timeout=60)
        assert ended.returncode in (1, 2) and flag in ended.stderr, (script, flag, ended.stderr)


def test_the_module_is_the_tool():
    def run(*start):
        return subprocess.run([*start, "status", "--timeout", "1"], capture_output=True, text=True, timeout=60, check=False)

    script, module = run(command("mooncake")), run(sys.executable, "-m", "mooncake")
    assert script.returncode == module.returncode == 1
    assert script.stderr == module.stderr != ""
    version = subprocess.run([sys.executable, "-m", "mooncake", "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert version.stdout.startswith("mooncake ")
