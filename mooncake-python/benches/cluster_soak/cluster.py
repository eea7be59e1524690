"""Addresses and settings of the cluster, as every process knows them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mooncake.store import MooncakeDistributedStore


@dataclass
class Cluster:
    """Addresses and settings of the cluster."""

    seed: int
    folder: str
    # Address of the master, URL of the metadata server, socket of the daemon.
    master: str
    metadata: str
    daemon: str
    # Name of the steady engine, and address of its memory.
    engine: str = ""
    engine_address: int = 0
    # Names and numbers of keys of the steady writers.
    writers: tuple[tuple[str, int], ...] = ()
    # Names of steady segments.
    segments: tuple[str, ...] = ()
    # Calls of one task in a second.
    thread_rate: float = 3.0
    coroutine_rate: float = 0.2

    @property
    def timeline(self) -> Path:
        """File with the starts and ends of the servers."""
        return Path(self.folder) / "timeline"

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Cluster:
        values = json.loads(text)
        writers = tuple((name, keys) for name, keys in values.pop("writers"))
        return cls(writers=writers, **values)

    def set_up(self, store: MooncakeDistributedStore, segment: int, buffer: int, disk: str = "") -> int:
        """Joins the cluster. With `disk`, keeps objects in that folder. Returns the code of
        `setup`.
        """
        return store.setup(
            "127.0.0.1",
            self.metadata,
            segment,
            buffer,
            "tcp",
            "",
            self.master,
            enable_ssd_offload=bool(disk),
            ssd_offload_path=disk,
        )
