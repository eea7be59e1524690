"""Descriptors, maps, threads and memory of processes, which must not grow."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20

# Names of the measurements, each with what a process may gain: a number, and a share of the first
# value. The least value of a minute counts, because running calls add to it. Shared memory counts
# by the length of its mappings, because its pages become resident only as they are used. Threads
# for blocking work come with a burst, and stay as long as there is a little work.
MEASUREMENTS: dict[str, tuple[float, float]] = {
    "descriptors": (24, 0.05),
    "maps": (48, 0.05),
    "threads": (16, 0),
    "anonymous MiB": (16, 0.10),
    "shared MiB": (64, 0.10),
}
# Number of minutes whose largest measurements later ones are compared with.
BEFORE = 5


def measure(process: int) -> list[float] | None:
    """Returns the measurements of a process, or None if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        anonymous = int(fields["RssAnon"].split()[0]) / 1024
        maps = Path(f"/proc/{process}/maps").read_text().splitlines()
        descriptors = len(os.listdir(f"/proc/{process}/fd"))
    except (OSError, KeyError, ValueError):
        return None
    return [descriptors, len(maps), int(fields["Threads"]), anonymous, sum(map(_shared_bytes, maps)) / MIB]


def _shared_bytes(line: str) -> int:
    """Returns the length of a mapping of `/proc/PID/maps` if it is shared and writable, else 0."""
    addresses, permissions, *_ = line.split(maxsplit=2)
    start, end = (int(address, 16) for address in addresses.split("-"))
    return end - start if permissions[1] == "w" and permissions[3] == "s" else 0


@dataclass
class Health:
    """Measurements of one steady process over time."""

    name: str
    process: int
    minute: list[list[float]] = field(default_factory=list)
    minutes: list[list[float]] = field(default_factory=list)

    def sample(self) -> None:
        with contextlib.suppress(OSError):
            if (measured := measure(self.process)) is not None:
                self.minute.append(measured)

    def end_minute(self) -> None:
        """Ends a minute, of which the least values count."""
        if self.minute:
            self.minutes.append([min(values) for values in zip(*self.minute, strict=True)])
            self.minute = []

    def growth(self, warm: int) -> dict[str, str]:
        """Returns the measurements of the last minute that exceed the largest ones of the `BEFORE`
        minutes up to minute `warm`, each with a text. Until then there are none.
        """
        if len(self.minutes) <= warm:
            return {}
        # When master and metadata server stop at once, the processes release their peers. The
        # largest of several minutes is the measurement of a whole cluster.
        before = [max(values) for values in zip(*self.minutes[warm - BEFORE : warm], strict=True)]
        return {
            f"{self.name}: {name}": f"{first:.0f} until minute {warm}, {last:.0f} in minute {len(self.minutes)}"
            for (name, (number, share)), first, last in zip(
                MEASUREMENTS.items(), before, self.minutes[-1], strict=True
            )
            if last > first + max(number, share * first)
        }

    def __str__(self) -> str:
        last = self.minutes[-1] if self.minutes else []
        return f"{self.name}: " + ", ".join(
            f"{name} {value:.0f}" for name, value in zip(MEASUREMENTS, last, strict=False)
        )
