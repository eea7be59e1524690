r"""Store connectors of vLLM, SGLang and LMCache, as their wheels have them, in clusters of two
packages.

    python connectors.py FOLDER OUR_PYTHON 0.3.14=PYTHON [--host 10.213.0.1] [--only KIND ..]

FOLDER has the folders `vllm`, `sglang` and `lmcache`, each with the files of a wheel, and `needs`
with packages that the connectors import. torch is in the environment of OUR_PYTHON.

    for NAME in vllm sglang lmcache; do pip install --no-deps --target FOLDER/$NAME $NAME; done
    pip install --target FOLDER/needs transformers pyzmq msgspec regex cloudpickle psutil cachetools \
        fastapi prometheus_client pybase64 cbor2 orjson einops aiofile aiofiles sortedcontainers \
        blake3 opentelemetry-sdk py-cpuinfo uvicorn sentencepiece setproctitle uvloop ipython gguf \
        partial-json-parser jsonschema openai tiktoken pillow

`fakes.py` replaces kernels and parsers, so neither a GPU nor the engine is needed. Each connector
runs with each package, on the master of each, beside a node of each. The node contributes all
memory, or the connector too. A process of the connector stores pages, the node reads and writes
pages in the same form, and a second process reads and removes them. Every byte is compared. The
script exits with 1 if a step fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import MIB, Master, Node, raw, shown_bytes

OURS = "this project"
# Port of the master. LMCache passes another one under a name that Mooncake C++ ignores.
PORT = 50051
# A busy machine can stop a reader for seconds. SGLang, however, removes only what has no lease.
LEASES = {"vllm": 60_000, "sglang": 5_000, "lmcache": 60_000}
OWN, MANY, OF_NODE, NEVER = ("own", 24), ("many", 200), ("node", 12), ("never", 3)


def same(what, got, expected):
    assert got == expected, f"{what}: {str(got)[:300]} instead of {str(expected)[:300]}"


class Engine:
    """Process that has imported a connector, and forks others that use it."""

    def __init__(self, kind, options, packages, log):
        paths = [options.folder / kind, options.folder / "needs", HERE]
        # Keys of LMCache are hashes of Python.
        variables = {"PYTHONPATH": ":".join(map(str, paths)), "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "GLOG_minloglevel": "1"}
        pipe = subprocess.PIPE
        words = [options.ours, str(HERE / "worker.py"), kind]
        self.kind, self.packages = kind, packages
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, text=True, env={**os.environ, **variables})
        self.variants = json.loads(self.process.stdout.readline())

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


class Connector:
    """Process of a connector, forked by an engine."""

    def __init__(self, engine, package, arguments):
        self.lines = None
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen()
            request = {"socket": f"{folder}/socket", "package": engine.packages[package], "arguments": arguments}
            print(json.dumps(request), file=engine.process.stdin, flush=True)
            connection, _ = listener.accept()
        with connection:
            self.lines = connection.makefile("rw", encoding="utf-8")
        self.result()

    def __call__(self, call, *pages):
        print(json.dumps([call, *pages]), file=self.lines, flush=True)
        return self.result()

    def result(self):
        line = self.lines.readline()
        assert line, "the process of the connector has ended"
        answer = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer["returned"]

    def stop(self):
        self.lines.close()


def bytes_of(objects):
    return {key: bytes.fromhex(header) + random.Random(key).randbytes(size) for key, (header, size) in objects.items()}


def is_read(connector, pages):
    """Checks that all pages are found, and have their bytes."""
    same("pages found", connector("found", *pages), pages[1])
    same("missing objects", connector("load", *pages)[1], 0)


def steps(start, node, memory):
    """Takes the steps one by one, and yields the name of each before it begins."""
    yield "setup"
    first = start()
    yield "missing"
    same("pages found", first("found", *NEVER), 0)
    same("objects with bytes", first("load", *NEVER)[0], 0)
    yield "stored"
    for pages in (OWN, MANY):
        first("store", *pages)
        is_read(first, pages)
    first("store", *OWN)
    yield "read by the node"
    for key, value in bytes_of(first("objects", *OWN)).items():
        same(key, node("get", key), shown_bytes(value))
    yield "written by the node"
    values = bytes_of(first("objects", *OF_NODE))
    same("put_batch", node("put_batch", list(values), [raw(value) for value in values.values()]), 0)
    is_read(first, OF_NODE)
    if not memory:
        first("close")
    yield "read by a second process"
    second = start()
    for pages in (OWN, MANY, OF_NODE):
        is_read(second, pages)
    yield "removed"
    keys = list(second("objects", *OWN))
    second("remove", *OWN)
    same("batch_is_exist of the node", node("batch_is_exist", keys), [0] * len(keys))
    same("pages found", second("found", *OWN), 0)
    yield "closed"
    second("close")
    if memory:
        first("close")


def measured(engine, cluster, pythons, memory, variant, options, log):
    """Runs a connector in a cluster. Returns the steps that began, and the failure if one failed.
    """
    of_master, of_connector, of_node = cluster
    flags = ["--rpc_address=0.0.0.0", f"--default_kv_lease_ttl={LEASES[engine.kind]}"]
    running = [Master(pythons[of_master], PORT, flags, log)]
    begun = []
    try:
        running.append(node := Node("node", pythons[of_node], log))
        address = f"{options.host}:{PORT}"
        settings = {
            "local_hostname": options.host, "metadata_server": "P2PHANDSHAKE", "global_segment_size": 128 * MIB,
            "local_buffer_size": 32 * MIB, "protocol": "tcp", "rdma_devices": "", "master_server_addr": address,
        }  # fmt: skip
        same("setup of the node", node("setup", **settings), 0)
        arguments = [options.host, address, memory, node("get_hostname"), variant]

        def start():
            running.append(made := Connector(engine, of_connector, arguments))
            return made

        for name in steps(start, node, memory):
            begun.append(name)
    except (AssertionError, RuntimeError, TypeError, KeyError) as error:
        return begun, f"{begun[-1:]}: {error}"
    finally:
        for process in reversed(running):
            process.stop()
    return begun, None


def package_of(python):
    """Returns the folder in which the interpreter finds `mooncake`, and the version of the package.
    """
    script = (
        "import importlib.metadata, pathlib, mooncake; path = pathlib.Path(mooncake.__file__).parent.parent;"
        "names = [f'{one.name} {one.version}' for one in importlib.metadata.distributions(path=[str(path)])];"
        "print(path); print(*(name for name in names if name.startswith('mooncake')))"
    )
    return subprocess.check_output([python, "-c", script], text=True).splitlines()[:2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("ours")
    parser.add_argument("other", metavar="VERSION=PYTHON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--only", nargs="*", choices=LEASES, metavar="KIND")
    parser.add_argument("--log", default=os.devnull)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    other, python = options.other.split("=", 1)
    pythons, packages = {OURS: options.ours, other: python}, {}
    for name, python in pythons.items():
        packages[name], version = package_of(python)
        print(f"{name}: {version}")
    clusters = [*itertools.product(pythons, pythons, pythons)]
    runs = failures = 0
    with open(options.log, "ab") as log:
        for kind in options.only or LEASES:
            (found,) = importlib.metadata.distributions(name=kind, path=[str(options.folder / kind)])
            engine = Engine(kind, options, packages, log)
            for cluster, variant, memory in itertools.product(clusters, engine.variants, (0, 64 * MIB)):
                begun = time.monotonic()
                names, failure = measured(engine, cluster, pythons, memory, variant, options, log)
                print(
                    f"{kind} {found.version}, {variant}, {'memory of both' if memory else 'memory of the node'}; "
                    f"master {cluster[0]}, connector {cluster[1]}, node {cluster[2]}: "
                    f"{len(names) - bool(failure)} steps pass, {time.monotonic() - begun:.1f} s",
                    flush=True,
                )
                if failure:
                    print(f"  FAILED {failure}", flush=True)
                failures += bool(failure)
                runs += 1
            engine.stop()
    return 1 if failures or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
