"""Values of settings: the parsers in Python take the same texts as those of the native half."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from mooncake import _byte_budget
from mooncake._sizes import parse_millis, parse_number, parse_size, parse_switch
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore

LARGEST = (1 << 63) - 1
REFUSED = None
# Texts and their sizes.
TEXTS = {
    "0": 0,
    "1048576": 1 << 20,
    " 7 b ": 7,
    "16k": 16 << 10,
    "512MB": 512 << 20,
    "4 GB": 4 << 30,
    "4\tgib": 4 << 30,
    "1.5g": 3 << 29,
    "1.5GiB": 3 << 29,
    ".5k": 512,
    "5.kb": 5120,
    "2tb": 2 << 40,
    "5 ib": 5,
    "+2MB": 2 << 20,
    "+33554432": 1 << 25,
    "1.6777216e7": 1 << 24,
    "1E+3k": 1_024_000,
    "1e-1k": 102,
    "1e400000b": REFUSED,
    "16_777_216": 1 << 24,
    "1_6.5_0": 16,
    "0x10 KB": 16 << 10,
    "+0X2000000": 1 << 25,
    "0x1_0": 16,
    "0xb": 11,
    "0x1e3": 0x1E3,
    "9_007_199_254_740_993": 9007199254740993,
    "0x20_0000_0000_0001": 9007199254740993,
    "9007199254740993": 9007199254740993,
    # A fraction makes the number a float.
    "9007199254740993.0": 9007199254740992,
    "9223372036854775807": LARGEST,
    "8388607 TB": 8388607 << 40,
    "9223372036854775808": REFUSED,
    "18446744073709551616": REFUSED,
    "8388608 TB": REFUSED,
    "8388608.5 TB": REFUSED,
    "1e30": REFUSED,
    "1e400": REFUSED,
    "1e": REFUSED,
    "e3": REFUSED,
    "1e+": REFUSED,
    "1e_5": REFUSED,
    "1e5.5": REFUSED,
    "1_": REFUSED,
    "_1": REFUSED,
    "1__0": REFUSED,
    "5bib": REFUSED,
    "5 k b": REFUSED,
    "": REFUSED,
    " ": REFUSED,
    ".": REFUSED,
    "GB": REFUSED,
    "-1": REFUSED,
    "--1": REFUSED,
    "++1": REFUSED,
    "+-1": REFUSED,
    "4 XB": REFUSED,
    "4 GB more": REFUSED,
    "1.2.3": REFUSED,
    "1+2": REFUSED,
    "0x": REFUSED,
    "0x-1": REFUSED,
    "0xg": REFUSED,
    "0x1.5": REFUSED,
    "x10": REFUSED,
    "inf": REFUSED,
    "nan": REFUSED,
    "\u0663": REFUSED,
}


def result(parse, *arguments):
    try:
        return parse(*arguments)
    except ValueError:
        return REFUSED


@pytest.mark.parametrize("text", TEXTS)
def test_sizes(text):
    assert result(parse_size, text) == TEXTS[text]


# Each client runs in a process of its own, because it sets up a log. A client without an address
# to serve at fails after it has read its flags.
NATIVE = """
import json, os, re, sys
from mooncake import _mooncake

def accepted(text):
    return _mooncake.run_master(["mooncake_master", "--print_config", "--connection_bytes=" + text])

def shown(text):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.dup2(theirs, 1), os.dup2(theirs, 2)
        flags = ["--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--global_segment_size=0", "--ipc_socket_path=/none"]
        os._exit(_mooncake.run_client(["mooncake_client", *flags, "--local_buffer_size=" + text]))
    os.close(theirs)
    with os.fdopen(ours) as file:
        output = file.read()
    os.wait()
    found = re.search(r"local_buffer of (\\d+) bytes", output)
    return None if found is None else int(found[1])

given = json.load(sys.stdin)
print(json.dumps({text: shown(text) for text in given}))
"""


def test_sizes_of_the_native_half():
    # Sizes that the client accepts as that of its buffer would set it up. It refuses the others,
    # and names their bytes.
    texts = [text for text, size in TEXTS.items() if size is REFUSED or 0 < size < 1024 or size > 1 << 40]
    ended = subprocess.run(
        [sys.executable, "-c", NATIVE], input=json.dumps(texts), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {text: TEXTS[text] for text in texts}


ACCEPTED = """
import json, os, sys
from mooncake import _mooncake
given, ours = json.load(sys.stdin), os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
codes = {text: _mooncake.run_master(["mooncake_master", "--print_config", *text.split("\\0")]) for text in given}
os.write(ours, json.dumps(codes).encode())
"""


def native(flag, texts):
    """Returns which texts the native half accepts as the value of a flag of a master."""
    flags = {f"--{flag}={text}": text for text in texts}
    ended = subprocess.run(
        [sys.executable, "-c", ACCEPTED], input=json.dumps(list(flags)), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return {flags[flag] for flag, code in json.loads(ended.stdout).items() if code == 0}


def test_texts_that_the_native_half_accepts():
    accepted = {text for text, size in TEXTS.items() if size is not REFUSED}
    assert native("quota_bytes", TEXTS) == accepted


# Milliseconds.
TIMES = {
    "5": 5,
    "5s": 5000,
    "5 S": 5000,
    "5 MS": 5,
    " 2\tm ": 120_000,
    "+0x5 s": 5000,
    "1h": 3_600_000,
    "876600h": 876600 * 3_600_000,
    "876601h": REFUSED,
    "99999999999999999999": REFUSED,
    "": REFUSED,
    "s": REFUSED,
    "1.5s": REFUSED,
    "5 d": REFUSED,
    "5ss": REFUSED,
    "1e3": REFUSED,
    "1_0s": REFUSED,
    "-5s": REFUSED,
}


def test_times():
    assert {text: result(parse_millis, text, "ms") for text in TIMES} == TIMES
    assert parse_millis("5", "s") == 5000
    accepted = {text for text, millis in TIMES.items() if millis is not REFUSED}
    assert native("default_kv_lease_ttl", TIMES) == accepted


NUMBERS = ("0", "80", "0x50", "+80", " 80 ", "65535", "65536", "-1", "1_0", "1e1", "8.0", "", "x", "\u0663")


def test_numbers():
    accepted = {text for text in NUMBERS if result(parse_number, text, 0, 65535) is not REFUSED}
    assert accepted == {"0", "80", "0x50", "+80", " 80 ", "65535"} == native("http_metadata_server_port", NUMBERS)


SWITCHES = {
    True: "true TRUE True t 1 yes y Y on enable Enabled".split() + [" on "],
    False: "false F 0 no n off disable disabled".split(),
    REFUSED: "2 ja oui yess -1 1.0".split() + ["", " "],
}


def test_switches():
    for expected, texts in SWITCHES.items():
        assert {text: result(parse_switch, text) for text in texts} == dict.fromkeys(texts, expected)
    texts = [text for some in SWITCHES.values() for text in some]
    assert native("enable_metric_reporting", texts) == {*SWITCHES[True], *SWITCHES[False]}


def settings(**changes):
    return {"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", **changes}


@pytest.mark.parametrize("name", ["enable_ssd_offload", "enable_client_http_server"])
def test_switches_of_files_and_variables(tmp_path, monkeypatch, name):
    variable = {"enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED"}.get(name, f"MOONCAKE_{name.upper()}")
    monkeypatch.setenv("MOONCAKE_MASTER", "c")
    path = tmp_path / "config.json"
    for expected, texts in SWITCHES.items():
        for text in texts:
            path.write_text(json.dumps(settings(master_server_address="c", **{name: text})))
            monkeypatch.setenv(variable, text)
            calls = (lambda: MooncakeConfig.from_file(str(path)), MooncakeConfig.load_from_env)
            for call in calls:
                if expected is REFUSED and text.strip():
                    with pytest.raises(ValueError, match=name):
                        call()
                else:
                    # An empty text counts as absent.
                    assert getattr(call(), name) is bool(expected), text


def test_times_of_setup():
    store = MooncakeDistributedStore()
    for name, wrong in [
        ("ssd_prefetch_cooldown_sec", "5 d"),
        ("ssd_prefetch_cooldown_sec", "1500ms"),
        ("ssd_prefetch_dedup_ttl_sec", "-1"),
        ("rpc_timeout_ms", "0s"),
        ("client_http_port", "1e1"),
    ]:
        assert store.setup(settings(**{name: wrong})) == -600
        assert name in store.last_error().message


def test_times_with_units_in_setup(master):
    store = MooncakeDistributedStore()
    times = {"ssd_prefetch_cooldown_sec": "5s", "ssd_prefetch_dedup_ttl_sec": "1m", "rpc_timeout_ms": "5 s"}
    sizes = {"global_segment_size": "16777216", "local_buffer_size": "1.6777216e7"}
    address = {"local_hostname": "127.0.0.1", "master_server_addr": master.address, "client_http_port": "0x2454"}
    assert store.setup(settings(**times, **sizes, **address)) == 0, store.last_error()
    store.close()


def test_the_limit_of_connections(monkeypatch, caplog):
    for text, size in TEXTS.items():
        caplog.clear()
        monkeypatch.setenv("MC_CONNECTION_BYTES", text)
        limit = _byte_budget.default_limit()
        if size is not REFUSED and size >= 1 << 20:
            assert limit == size and not caplog.records, text
        else:
            assert 0 < limit <= 256 << 20
            assert ("MC_CONNECTION_BYTES" in caplog.text) == bool(text), text


def test_limits_of_the_metadata_server(monkeypatch):
    pytest.importorskip("aiohttp", reason="the metadata server needs aiohttp")
    from mooncake.http_metadata_server import KVBootstrapServer

    monkeypatch.setenv("MC_METADATA_MAX_TOTAL_BYTES", "1.5g")
    monkeypatch.setenv("MC_METADATA_MAX_BODY_BYTES", "16MiB")
    monkeypatch.setenv("MC_METADATA_MAX_KEYS", "0x10")
    server = KVBootstrapServer(0)
    assert (server.max_bytes, server._max_value, server.max_entries) == (3 << 29, 16 << 20, 16)
    for name, wrong in [("TOTAL_BYTES", "0"), ("BODY_BYTES", "16XB"), ("KEYS", "1_0"), ("KEYS", "1k"), ("CONCURRENT_PUTS", "0")]:
        with monkeypatch.context() as changed:
            changed.setenv(f"MC_METADATA_MAX_{name}", wrong)
            with pytest.raises(ValueError, match=f"MC_METADATA_MAX_{name}={wrong}"):
                KVBootstrapServer(0)


def test_switches_of_process_groups(monkeypatch, caplog):
    pytest.importorskip("torch", reason="process groups need torch")
    from mooncake._pg_options import _from_environment

    names = {
        "MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE": "auto_deactivate_on_failure",
        "MOONCAKE_PG_AUTO_SYNC_ON_FAILURE": "auto_sync_on_failure",
    }
    for variable, name in names.items():
        for expected, texts in SWITCHES.items():
            for text in texts:
                caplog.clear()
                with monkeypatch.context() as changed, caplog.at_level(logging.WARNING):
                    changed.setenv(variable, text)
                    assert getattr(_from_environment(), name) is (expected is not False), text
                assert (f"{variable}={text} is ignored" in caplog.text) == (expected is REFUSED and text != ""), text
