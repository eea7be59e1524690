"""Clusters for the tests: masters of the installed package, and stores that are closed in the end.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20


def effort(usual: int, full: int) -> int:
    """Returns `full` with `MOONCAKE_TEST_EFFORT=full`, otherwise `usual`: a number of rounds."""
    return full if os.environ.get("MOONCAKE_TEST_EFFORT") == "full" else usual


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests with the mark `nightly`, unless all effort is asked for."""
    if not effort(0, 1):
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="cargo xtask nightly runs it"))


# Reservations of the ports that this process has got.
_reserved: list[socket.socket] = []


def free_port() -> int:
    """Returns a free port below those that the system assigns to outgoing connections. No other
    test gets it as long as this process lives: the reservation is a socket, whose name the Rust
    tests use, too.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe, contextlib.suppress(OSError):
            reservation.bind(f"\0mooncake-test-port-{port}")
            probe.bind(("0.0.0.0", port))
            _reserved.append(reservation)
            return port
        reservation.close()


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the process listens on the port. Fails if the process ends first."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the master ended with {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    pytest.fail(f"nobody listens on port {port}:\n{log.read_text()}")


def command(name: str) -> str:
    """Returns the path of a command that belongs to the interpreter of the tests."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed"
    return found


def mooncake_master() -> str:
    """Returns the path of the `mooncake_master` command that belongs to the interpreter of the
    tests.
    """
    return command("mooncake_master")


@dataclass
class Master:
    """Master process."""

    folder: Path
    flags: list[str] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.starts += 1
        log = self.folder / f"master-{self.port}-{self.starts}.log"
        for _ in range(5):
            flags = [f"--rpc_port={self.port}", "--metrics_port=0", *self.flags]
            with log.open("wb") as out:
                self.process = subprocess.Popen([mooncake_master(), *flags], stdout=out, stderr=out)
            if self.starts > 1 or not self.lost_its_port(log):
                break
            # Tests of other workers choose ports, too. No client knows the address before the first
            # start.
            self.port = free_port()
        wait_for_port(self.port, self.process, log)

    def lost_its_port(self, log: Path) -> bool:
        """Returns whether the master ended because another process took its port first. Waits until
        the outcome is certain.
        """
        assert self.process is not None
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.listens():
                return False
            time.sleep(0.02)
        return "in use" in log.read_text()

    def listens(self) -> bool:
        """Returns whether the process of this master listens on its port."""
        assert self.process is not None
        inodes = set()
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == self.port:
                    return f"socket:[{fields[9]}]" in inodes
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def freeze(self) -> None:
        """Stops the process with a signal, and returns when it is stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@dataclass
class Owner:
    """Process of `mooncake_client`."""

    folder: Path
    master: Master
    flags: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Path of the socket."""
        return str(self.folder / "owner.sock")

    def start(self) -> None:
        flags = [
            f"--master_server_address={self.master.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--host=127.0.0.1",
            "--global_segment_size=64MB",
            f"--ipc_socket_path={self.address}",
            "--drain_on_term=0",
            *self.flags,
        ]
        log = self.folder / "owner.log"
        with log.open("ab") as out:
            self.process = subprocess.Popen([command("mooncake_client"), *flags], stdout=out, stderr=out)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self.process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(self.address)
                return
            time.sleep(0.02)
        pytest.fail(f"nobody listens at {self.address}:\n{log.read_text()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@pytest.fixture(scope="session")
def owner(master: Master, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """Shared `mooncake_client`, for tests that do not harm it."""
    running = Owner(tmp_path_factory.mktemp("owner"), master)
    running.start()
    yield running
    assert running.process is not None and running.process.poll() is None, "mooncake_client died"
    running.stop()


@pytest.fixture
def make_light(owner: Owner) -> Iterator[Callable[..., MooncakeDistributedStore]]:
    """Factory of stores that are attached to the shared `mooncake_client`, or to another one."""
    made: list[MooncakeDistributedStore] = []

    def make(at: Owner | None = None, buffer: int = 4 * MIB) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        assert store.setup_dummy(16 * MIB, buffer, (at or owner).address) == 0, store.last_error()
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture
def light(make_light: Callable[..., MooncakeDistributedStore]) -> MooncakeDistributedStore:
    return make_light()


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """Shared master, for tests that do not harm it."""
    running = Master(tmp_path_factory.mktemp("master"), ["--default_kv_lease_ttl=500"])
    running.start()
    yield running
    assert running.process is not None and running.process.poll() is None, "the master died"
    running.stop()


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[Callable[..., Master]]:
    """Factory of masters that a test may kill."""
    running: list[Master] = []

    def make(*flags: str) -> Master:
        running.append(Master(tmp_path, list(flags)))
        running[-1].start()
        return running[-1]

    yield make
    for one in running:
        one.stop()


@pytest.fixture
def make_store(master: Master) -> Iterator[Callable[..., MooncakeDistributedStore]]:
    """Factory of stores of the shared master, or of another one."""
    made: list[MooncakeDistributedStore] = []

    def make(at: Master | None = None, **changes: Any) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        settings: dict[str, Any] = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 64 * MIB,
            "local_buffer_size": 16 * MIB,
            "protocol": "tcp",
            "rdma_devices": "",
            "master_server_addr": (at or master).address,
        }
        settings.update(changes)
        assert store.setup(**settings) == 0, store.last_error()
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: Callable[..., MooncakeDistributedStore]) -> MooncakeDistributedStore:
    return make_store()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Key that belongs to the test."""
    return f"{request.node.name}-{os.getpid()}-{time.monotonic_ns()}"
