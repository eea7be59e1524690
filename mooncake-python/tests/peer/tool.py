"""Command line tool `mooncake`, with a master and a client of either build: its output is the same
for both.

    python tool.py TOOL OUR_PYTHON PEER_PYTHON [--host 10.213.0.1]

The script prints differences and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import MIB, Master, Node, raw

VALUE = bytes(range(256)) * 40


class Tool:
    """Program, and the cluster that it is run against."""

    def __init__(self, binary, host, port):
        self.words = [binary, "--master", f"{host}:{port}", "--admin", f"127.0.0.1:{port + 1}", "--hostname", host]

    def __call__(self, *arguments, given=b""):
        ran = subprocess.run([*self.words, *arguments], input=given, capture_output=True, timeout=60)
        return ran.returncode, ran.stdout, ran.stderr.decode(errors="replace")

    def json(self, *arguments):
        status, out, errors = self("--json", *arguments)
        try:
            return [status, json.loads(out)]
        except ValueError:
            return [status, errors]


def seen(tool, member, host):
    """Returns the results of the tool and the client for each other's objects."""
    found = {}
    member("put", "of/member", raw(VALUE))
    found["get"] = tool("get", "of/member")[:2] == (0, VALUE)
    found["put"] = tool("put", "of/tool", given=VALUE)[:2]
    found["get by the member"] = member("get", "of/tool") == {"bytes": raw(VALUE)["of"]}
    found["put again"] = tool("put", "of/tool", given=b"x")[0]
    found["replace"] = tool("put", "--replace", "of/tool", given=b"other")[:2]
    found["get of what replaced it"] = tool("get", "of/tool")[:2]
    found["get of nothing"] = tool("get", "nothing")[0]
    found["ls"] = tool("ls")[:2]
    found["ls of a part"] = tool("ls", "of/t")[:2]
    status, rows = tool.json("ls", "--long")
    found["ls, long"] = [status, [[row["key"], row["bytes"], len(row["replicas"])] for row in rows]]
    status, figures = tool.json("status")
    found["status"] = [status, {name: figures[name] for name in ("version", "keys", "capacity_bytes", "clients")}]
    found["segments"] = [[one["name"], one["protocol"], one["status"], one["size_bytes"]] for one in figures["segments"]]
    status, health = tool.json("doctor")
    grades = {one["subject"]: one["grade"] for one in health["findings"]}
    # The other checks concern this machine.
    found["doctor"] = [status, {name: grades.get(name) for name in ("master", "admin port", "metadata", "segments")}]
    found["bench"] = [run["failed"] for run in tool.json("bench", "--size", "4K", "--count", "8")[1]["runs"]]
    found["rm of what is read"] = tool("rm", "of/tool")[0]
    found["rm by force"] = tool("rm", "--force", "of/tool")[0]
    found["rm of nothing"] = tool("rm", "nothing")[0]
    found["rm by a pattern"] = tool.json("rm", "--force", "--matching", "^of/")
    found["rm of all"] = tool("rm", "--all", "--force", "--yes")[:2]
    found["nothing is left"] = [tool("ls")[:2], member("is_exist", "of/member")]
    found["top"] = tool("top", "--once")[0]
    return json.loads(re.sub(re.escape(host) + r":\d+", "<member>", json.dumps(found, default=repr)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log", default=os.devnull)
    options = parser.parse_args()
    pythons = {"ours": options.ours, "peer": options.peer}
    every = {}
    with open(options.log, "ab") as log, tempfile.TemporaryDirectory() as folder:
        os.chdir(Path(folder))
        for number, (master, member) in enumerate((m, c) for m in pythons for c in pythons):
            # The range is below the ports that the system assigns to outgoing connections.
            port = 24000 + 4 * number
            running = Master(pythons[master], port, [], log)
            node = Node("member", pythons[member], log)
            try:
                at = f"{options.host}:{18000 + number}"
                code = node("setup", at, "P2PHANDSHAKE", 64 * MIB, 32 * MIB, "tcp", "", f"127.0.0.1:{port}")
                assert code == 0, f"the member of {member} could not join: {code}"
                every[master, member] = seen(Tool(options.tool, options.host, port), node, options.host)
                node("close")
            finally:
                node.stop()
                running.stop()
    expected = every["ours", "ours"]
    failed = 0
    for (master, member), found in every.items():
        for step, value in found.items():
            if value != expected[step]:
                failed += 1
                print(f"{step}, master {master}, member {member}: {value}\n    with ours alone: {expected[step]}")
    wrong = [step for step, value in expected.items() if value is False]
    print(f"{len(expected)} steps in {len(every)} clusters: {failed} answers differ; not as they should be: {wrong}")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
