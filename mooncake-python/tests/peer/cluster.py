"""Processes of a cluster, of one build of the package or the other: a master, and members that do as they are told."""

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
    """An argument that JSON has no word for; `node.py` makes it."""
    return {"as": kind, "of": value}


def raw(data):
    return of("bytes", base64.b64encode(data).decode())


def config(**fields):
    return of("config", fields)


def shown_bytes(data):
    """How a member tells of bytes it returned."""
    return {"bytes": base64.b64encode(data).decode()}


class Node:
    """A member in a process of its own."""

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
        """Has a command begun; `end` waits for its answer."""
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def end(self):
        for line in self.process.stdout:
            # The existing package writes its log between the answers.
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
    """Returns when somebody listens there; the process is who should."""
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
    """A master process: its RPC port, and the admin pages at `port + 1`."""

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
        """Status, content type and body of a page; a body that is JSON as what it says."""
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


# What is another one in every run, by the name of its field.
PASSING = re.compile(r"(^|_)(address|address_|client_id|segment_id|job_id|endpoint|endpoint_|epoch)$")
IDS = re.compile(r"\b\d{6,20}-\d{4,20}\b")
PORTS = re.compile(r"\b(\d+\.\d+\.\d+\.\d+):\d+\b")


def plain(value, field=""):
    """The same value with ids, addresses and ports that differ from run to run replaced by what they are."""
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
    """Scenarios that share a cluster, and how it is started."""

    def __init__(self, scenarios, flags=(), settings=None, met=False, variables=None):
        self.scenarios = scenarios
        self.variables = variables or {}
        self.met = met
        self._flags = flags
        self._settings = settings or {}

    def flags(self, port):
        """The master's flags; `{directory}` in one is the port of its metadata server."""
        flags = self._flags() if callable(self._flags) else self._flags
        return [flag.format(directory=port + 2) for flag in flags]

    def directory(self, host, port):
        """Where members meet."""
        return f"http://{host}:{port + 2}/metadata" if self.met else "P2PHANDSHAKE"

    def settings(self, letter):
        """What a member's `setup` is given beside addresses, and `segment`, the bytes it offers."""
        return dict(self._settings.get(letter, {}))
