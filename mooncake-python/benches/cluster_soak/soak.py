"""Soak test of a whole cluster: 200 threads and 3,000 coroutines in several processes, stores and
engines that come and go, shared clients of a daemon, and disks that are smaller than the load.

    python soak.py [--seconds 3600] [--seed 7]

The master and the metadata server are stopped or killed every minute, and started again. Masters
start from a snapshot, and every fourth one without. The script fails in these cases:

- a read returns other bytes than its writer wrote, or a value that was replaced or removed
- a pinned object in the memory of a living owner is not found
- a call takes longer than its timeout and a margin
- a store or an engine cannot be set up or closed while the servers run
- a process that stays for the whole run ends, or its descriptors, maps, threads or memory grow

The script prints these measurements every minute, and compares them with those of minutes 6 to 10.
The last line is a summary. The script exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import IO, Any

from calls import DEADLINE, MARGIN
from cluster import Cluster
from health import MEASUREMENTS, Health
from shadow import TimelineWriter

MIB = 1 << 20
# Seconds between two restarts of a server, and between two samples of the processes.
RESTARTS = 60
SAMPLES = 5
# Last of the minutes whose measurements are compared with later ones.
WARM = 10
# Consecutive minutes in which a measurement must be too large.
GROWING = 3
# Steady processes, by name, each with its role.
STEADY = {
    "engine": "engine",
    "threads-1": "threads",
    "threads-2": "threads",
    "coroutines-1": "coroutines",
    "coroutines-2": "coroutines",
    "visitors": "visitors",
}
TICK = 0.1
HERE = Path(__file__).parent


def free_port() -> int:
    """Returns a free port below those that the system assigns to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def program(name: str) -> str:
    """Returns a command that belongs to this interpreter."""
    return str(Path(sys.executable).parent / name)


class Soak:
    """A cluster and its processes."""

    def __init__(self, seconds: int, seed: int, folder: Path) -> None:
        self.seconds, self.random, self.folder = seconds, random.Random(seed), folder
        self.port, self.pages, self.metadata_port = (free_port(), free_port(), free_port())
        self.cluster = Cluster(
            seed,
            str(folder),
            f"127.0.0.1:{self.port}",
            f"http://127.0.0.1:{self.metadata_port}/metadata",
            str(folder / "daemon.sock"),
        )
        self.timeline = TimelineWriter(self.cluster.timeline)
        self.failures: list[str] = []
        # The processes are being killed, so that they fail.
        self.is_over = False
        self.counts: dict[str, Counter[str]] = {}
        self.ready: dict[str, dict[str, Any]] = {}
        self.ended: set[str] = set()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.visitors: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.health: list[Health] = []
        # Measurements of the masters, each in its last seconds.
        self.masters = Health("master", 0)
        self.events: Counter[str] = Counter()
        self.life = -1
        self.snapshots_seen: set[str] = set()
        self.snapshots_begun: dict[str, float] = {}
        self.last_look = 0.0
        # Servers that are away, each with the time of its next start.
        self.away: dict[str, float] = {}
        self.growing: Counter[str] = Counter()

    # Processes.

    def start(self, name: str, command: list[str], *, is_worker: bool = False) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(48 * MIB),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(32 * MIB),
            "PYTHONUNBUFFERED": "1",
        }
        if name == "threads-2":
            environment["MOONCAKE_STORE_CHECKSUM"] = "1"
        if name == "daemon":
            environment["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = str(self.folder / "disk-daemon")
        with (self.folder / f"{name}.log").open("ab") as log:
            out: IO[bytes] | int = subprocess.PIPE if is_worker else log
            stdin = subprocess.PIPE if is_worker else subprocess.DEVNULL
            process = subprocess.Popen(command, stdin=stdin, stdout=out, stderr=log, env=environment)
        if is_worker:
            threading.Thread(target=self.listen, args=(name, process), daemon=True).start()
            self.send(process, self.cluster.dump())
        return process

    def start_worker(self, role: str, name: str) -> subprocess.Popen[bytes]:
        return self.start(name, [sys.executable, str(HERE / "worker.py"), role, name], is_worker=True)

    def send(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

    def listen(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Reads the lines of a worker until its end."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                ((kind, content),) = json.loads(line).items()
            except ValueError:
                # A killed process may leave half a line.
                continue
            if kind == "failure":
                self.fail(f"{name}: {content}")
            elif kind == "note":
                self.say(f"note: {name}: {content}")
            elif kind == "counts":
                self.counts[name] = Counter(content)
            elif kind == "ready":
                self.ready[name] = content
            elif kind == "end":
                self.ended.add(name)

    def say(self, text: str) -> None:
        print(f"{time.monotonic():.3f} {text}", flush=True)

    def fail(self, sentence: str) -> None:
        if self.is_over:
            return
        self.failures.append(sentence)
        self.say(f"FAILURE: {sentence}")

    def start_master(self) -> None:
        flags = [
            f"--rpc_port={self.port}",
            f"--metrics_port={self.pages}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            "--default_kv_lease_ttl=3000",
            "--enable_offload",
            "--enable_snapshot",
            "--enable_snapshot_restore",
            "--snapshot_interval_seconds=10",
            f"--snapshot_local_path={self.folder / 'snapshots'}",
        ]
        self.life += 1
        self.timeline.write("up", self.life)
        self.processes["master"] = self.start("master", [program("mooncake_master"), *flags])
        self.wait_for_port(self.port, "master")
        self.timeline.write("ready", self.life)

    def start_metadata(self) -> None:
        flags = [f"--port={self.metadata_port}", "--host=127.0.0.1", "--log-level=WARNING"]
        command = [program("mooncake_http_metadata_server"), *flags]
        self.processes["metadata"] = self.start("metadata", command)
        self.wait_for_port(self.metadata_port, "metadata")
        self.timeline.write("metadata-ready")

    def wait_for_port(self, port: int, name: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (code := self.processes[name].poll()) is not None:
                raise SystemExit(f"{name} ends with {code}, see {self.folder / f'{name}.log'}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.02)
        raise SystemExit(f"nothing listens on port {port}, see {self.folder / f'{name}.log'}")

    def start_all(self) -> None:
        """Starts the servers and the steady processes, and the work when all are set up."""
        self.timeline.write("metadata-down")
        self.start_metadata()
        self.start_master()
        flags = [
            f"--master_server_address={self.cluster.master}",
            f"--metadata_server={self.cluster.metadata}",
            "--host=127.0.0.1",
            "--global_segment_size=96MB",
            f"--ipc_socket_path={self.cluster.daemon}",
            "--enable_offload",
            "--drain_on_term=0",
        ]
        self.processes["daemon"] = self.start("daemon", [program("mooncake_client"), *flags])
        self.wait_until("the daemon listens", lambda: Path(self.cluster.daemon).exists())
        for name, role in STEADY.items():
            self.processes[name] = self.start_worker(role, name)
        self.wait_until("all processes are ready", lambda: self.ready.keys() >= STEADY.keys())
        with urllib.request.urlopen(f"http://127.0.0.1:{self.pages}/get_all_segments", timeout=20) as page:
            self.cluster.segments = tuple(page.read().decode().split())
        for content in self.ready.values():
            self.cluster.writers += tuple(map(tuple, content.get("writers", ())))
        self.cluster.engine = self.ready["engine"]["engine"]
        self.cluster.engine_address = self.ready["engine"]["engine_address"]
        self.say(f"steady segments {', '.join(self.cluster.segments)}")
        for name in STEADY:
            self.send(self.processes[name], self.cluster.dump())
        self.health = [Health(name, self.processes[name].pid) for name in ("daemon", *STEADY)]

    def wait_until(self, what: str, is_done: Any, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} ends with {process.returncode}, see {self.folder / f'{name}.log'}")
            if time.monotonic() > deadline:
                raise SystemExit(f"timeout: {what}. seconds={seconds}")
            time.sleep(0.05)

    # Faults.

    def look_at_snapshots(self) -> None:
        """Notes complete snapshots. A snapshot creates its unfinished file first. If an earlier
        look did not find that file, the snapshot began after that look.
        """
        now = time.monotonic()
        names = set()
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder / "snapshots" / "mooncake_cluster"):
                with contextlib.suppress(OSError):
                    # The claim of a number is an empty file that the complete one replaces.
                    if entry.is_file() and (entry.stat().st_size or not entry.name.startswith("snapshot-")):
                        names.add(entry.name)
        for name in names - self.snapshots_seen:
            kind, _, rest = name.partition("-")
            number = rest.split("-")[0]
            if kind == "unfinished":
                self.snapshots_begun[number] = self.last_look
            elif kind == "snapshot":
                self.timeline.write("snapshot", self.life, self.snapshots_begun.pop(number, self.last_look))
                self.events["snapshots"] += 1
        self.snapshots_seen, self.last_look = names, now

    def stop_master(self) -> None:
        """Stops or kills the master. Every fourth time the next one has no snapshot."""
        self.look_at_snapshots()
        self.masters.end_minute()
        self.timeline.write("down", self.life)
        master, number = self.processes["master"], self.events["masters restarted"]
        self.events["masters restarted"] += 1
        how = signal.SIGTERM if number % 2 == 1 else signal.SIGKILL
        master.send_signal(how)
        master.wait(60)
        self.look_at_snapshots()
        if number % 4 == 2:
            self.timeline.write("snapshots-deleted")
            shutil.rmtree(self.folder / "snapshots", ignore_errors=True)
            self.snapshots_seen.clear()
        self.say(f"master {self.life} ends with {how.name}{', snapshots deleted' if number % 4 == 2 else ''}")
        self.away["master"] = time.monotonic() + self.random.uniform(0.2, 4)

    def stop_metadata(self) -> None:
        self.timeline.write("metadata-down")
        metadata = self.processes["metadata"]
        metadata.send_signal(self.random.choice([signal.SIGTERM, signal.SIGKILL]))
        metadata.wait(60)
        self.events["metadata servers restarted"] += 1
        self.say("metadata server stopped")
        self.away["metadata"] = time.monotonic() + self.random.uniform(0.2, 4)

    def start_servers(self) -> None:
        """Starts servers again whose time has come."""
        starts = {"master": self.start_master, "metadata": self.start_metadata}
        for name in [name for name, at in self.away.items() if time.monotonic() >= at]:
            del self.away[name]
            starts[name]()

    def change_visitors(self) -> None:
        """Starts processes with one store or engine each, and kills those whose time has come."""
        now = time.monotonic()
        for name, (process, end) in list(self.visitors.items()):
            if name in self.ready and self.ready[name] is not None:
                self.send(process, self.cluster.dump())
                self.ready[name] = None  # type: ignore[assignment]
            if process.poll() is None and now < end:
                continue
            if process.poll() is None:
                process.kill()
                self.events["processes killed"] += 1
            elif process.returncode != 0:
                self.fail(f"{name} ends with {process.returncode}")
            process.wait(30)
            del self.visitors[name]
        if len(self.visitors) < 3 and self.random.random() < 0.02:
            name = f"visitor-{self.events['processes started']}"
            self.events["processes started"] += 1
            self.visitors[name] = (self.start_worker("visitor", name), now + self.random.uniform(3, 25))

    # The run.

    def check_processes(self) -> None:
        for name, process in self.processes.items():
            if name not in self.away and process.poll() is not None:
                raise SystemExit(f"{name} ends with {process.returncode}, see {self.folder / f'{name}.log'}")

    def total(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for counts in list(self.counts.values()):
            longest = max(total["longest call ms"], counts["longest call ms"])
            total += counts
            total["longest call ms"] = longest
        return total

    def end_minute(self, minute: int) -> None:
        """Prints the measurements of a minute, and compares them with those up to minute `WARM`."""
        self.say(f"minute {minute}: {describe(self.total() + self.events)}")
        for health in self.health:
            health.end_minute()
        everything = [*self.health, self.masters]
        for health in everything:
            self.say(f"    {health}")
        grown: dict[str, str] = {}
        for health in everything:
            grown |= health.growth(WARM)
        self.growing = Counter({name: self.growing[name] + 1 for name in grown})
        is_last = minute * 60 + 60 > self.seconds
        for name, growth in grown.items():
            self.say(f"    more than at first: {name} {growth}")
            if self.growing[name] == GROWING or (is_last and self.growing[name] < GROWING):
                self.fail(f"grows: {name} {growth}")

    def run(self) -> None:
        self.start_all()
        begun = time.monotonic()
        next_sample, minutes = begun + SAMPLES, 0
        next_master, next_metadata = begun + 30, begun + 65
        while (now := time.monotonic()) < begun + self.seconds:
            time.sleep(TICK)
            self.check_processes()
            if "master" not in self.away:
                self.look_at_snapshots()
            if now >= next_master:
                next_master += RESTARTS
                self.stop_master()
                if self.events["masters restarted"] % 5 == 0 and "metadata" not in self.away:
                    self.stop_metadata()
            if now >= next_metadata and "metadata" not in self.away:
                next_metadata += RESTARTS
                self.stop_metadata()
            self.start_servers()
            self.change_visitors()
            if now >= next_sample:
                next_sample += SAMPLES
                for health in self.health:
                    health.sample()
                if next_master - now < RESTARTS / 3 and "master" not in self.away:
                    self.masters.process = self.processes["master"].pid
                    self.masters.sample()
            if now >= begun + 60 * (minutes + 1):
                minutes += 1
                self.end_minute(minutes)
        self.end()

    def end(self) -> None:
        """Ends the work, and waits for the ends of the processes."""
        for name in [*self.away]:
            self.away[name] = 0
        self.start_servers()
        for process, _ in self.visitors.values():
            process.kill()
            process.wait(30)
        steady = [self.processes[name] for name in STEADY]
        for process in steady:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + 2 * (DEADLINE + MARGIN)
        for name, process in zip(STEADY, steady, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() != 0:
                self.fail(f"{name} does not end well: {process.returncode}")
        self.processes["daemon"].terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes["daemon"].wait(30)
        if (code := self.processes["daemon"].poll()) != 0:
            self.fail(f"the daemon ends with {code}")
        total = self.total()
        for needed in (
            "hits",
            "pinned hits",
            "stored",
            "transfers",
            "read from disks",
            "a store set up",
            "a shared client set up",
        ):
            if total[needed] == 0:
                self.fail(f"nothing was tried: {needed} is 0")
        refused = sum(count for what, count in total.items() if what.startswith("refused -"))
        if refused > total["stored"] / 20:
            self.fail(f"too many puts are refused: {refused}, and {total['stored']} are stored")

    def stop_everything(self) -> None:
        self.is_over = True
        for process in [*self.processes.values(), *(process for process, _ in self.visitors.values())]:
            if process.poll() is None:
                process.kill()
                process.wait(30)


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {options.seed}, logs in {folder}; tolerances {MEASUREMENTS}", flush=True)
    soak = Soak(options.seconds, options.seed, folder)
    try:
        soak.run()
    except SystemExit as end:
        soak.fail(str(end))
    finally:
        soak.stop_everything()
    kinds = Counter(failure.split(": ")[1] if ": " in failure else failure for failure in soak.failures)
    outcome = (
        f"FAIL ({len(soak.failures)} failures: {dict(kinds)})"
        if soak.failures
        else "PASS (0 wrong, 0 lost, 0 hung, flat)"
    )
    print(
        f"{outcome} --seconds {options.seconds} --seed {options.seed}: {describe(soak.total() + soak.events)}",
        flush=True,
    )
    if not soak.failures:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
