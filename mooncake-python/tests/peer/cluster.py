"""Processes of a cluster, of one build of the package or the other: a master, and clients that
execute commands.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).parent
MIB = 1 << 20


def of(kind, value):
    """Encodes an argument that JSON has no type for. `node.py` decodes it."""
    return {"as": kind, "of": value}


def raw(data):
    return of("bytes", base64.b64encode(data).decode())


def config(**fields):
    return of("config", fields)


def shown_bytes(data):
    """Returns the form in which a client reports returned bytes."""
    return {"bytes": base64.b64encode(data).decode()}


class Node:
    """Client in a separate process."""

    def __init__(self, name, python, log, variables=None):
        self.name = name
        self.process = subprocess.Popen(
            [python, str(HERE / "node.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(variables or {})},
        )

    def __call__(self, call, *args, **kw):
        return self.send({"call": call, "args": list(args), "kw": kw})

    def send(self, command):
        self.begin(command)
        return self.end()

    def begin(self, command):
        """Starts a command. `end` waits for its result."""
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def end(self):
        for line in self.process.stdout:
            # Mooncake C++ writes its log between the results.
            if line.startswith("=>"):
                answer = json.loads(line[2:])
                return answer.get("returned") if "returned" in answer else {"raised": answer["raised"]}
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_for(port, process):
    """Waits until the process listens on the port."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"who should listen on {port} ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nobody listens on {port}")


class Master:
    """Master process: its RPC port, and its HTTP endpoints at `port + 1`."""

    def __init__(self, python, port, flags, log):
        binary = str(Path(python).parent / "mooncake_master")
        words = [binary, f"--rpc_port={port}", f"--metrics_port={port + 1}", *flags]
        self.port = port
        self.process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            wait_for(port, self.process)
            wait_for(port + 1, self.process)
        except RuntimeError:
            self.stop()
            raise

    def page(self, method, path, body=None, port=None):
        """Returns status, content type and body of a page. A JSON body is decoded."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port + 1, timeout=30)
        try:
            connection.request(method, path, body=body)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        finally:
            connection.close()
        kind = answer.getheader("Content-Type") or ""
        try:
            text = json.loads(text) if text[:1] in "{[" and text else text
        except ValueError:
            pass
        return {"status": answer.status, "type": kind, "body": text}

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# Names of fields whose value differs in every run.
PASSING = re.compile(r"(^|_)(address|address_|client_id|segment_id|job_id|endpoint|endpoint_|epoch)$")
IDS = re.compile(r"\b\d{6,20}-\d{4,20}\b")
PORTS = re.compile(r"\b(\d+\.\d+\.\d+\.\d+):\d+\b")


def plain(value, field=""):
    """Returns the value with IDs, addresses and ports replaced by placeholders, because they differ
    between runs.
    """
    if isinstance(value, dict):
        return {plain(name): plain(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one, field) for one in value]
    if PASSING.search(field) and value:
        return f"<{field.strip('_')}>"
    if isinstance(value, str):
        return PORTS.sub(r"\1:<port>", IDS.sub("<id>", value))
    return value


class Group:
    """Scenarios that share a cluster, and the flags of the cluster."""

    def __init__(self, scenarios, flags=(), settings=None, met=False, variables=None):
        self.scenarios = scenarios
        self.variables = variables or {}
        self.met = met
        self._flags = flags
        self._settings = settings or {}

    def flags(self, port):
        """Returns the master's flags. `{directory}` in a flag is the port of its metadata server.
        """
        flags = self._flags() if callable(self._flags) else self._flags
        return [flag.format(directory=port + 2) for flag in flags]

    def directory(self, host, port):
        """Returns the address of the metadata service."""
        return f"http://{host}:{port + 2}/metadata" if self.met else "P2PHANDSHAKE"

    def settings(self, letter):
        """Returns the arguments of a client's `setup` besides addresses, and `segment`, the size of
        its memory.
        """
        return dict(self._settings.get(letter, {}))
