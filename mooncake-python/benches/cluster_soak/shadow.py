"""Changes of a key by its only writer, and the values that a read may return after them.

The rules are those of docs/ha.md. A change that a living master has acknowledged counts. A change
that a dead master has acknowledged counts if a snapshot of that master has it. An object in memory
of a living owner outlives its master, unless it was put in the last seconds before.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# Seconds before the end of a master in which a put may be lost with it: the owner has not learned
# of the end of the put yet.
UNKNOWN_TO_OWNER = 10.0
# Seconds after a start of the master until owners have announced their objects.
ANNOUNCED = 30.0
# Seconds after a start of the metadata server until engines have published themselves.
PUBLISHED = 15.0
# Seconds for which changes are kept although a later change counts.
_KEPT = 120.0


class TimelineWriter:
    """Writes the starts and ends of the servers to a file. Each line is written before the event,
    with the time of the monotonic clock, which all processes of a host share.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: str, number: int = 0, at: float | None = None) -> None:
        self._file.write(f"{event} {number} {time.monotonic() if at is None else at:.6f}\n")


@dataclass
class _Life:
    """Life of a master."""

    up: float
    down: float = math.inf
    # Time after which the last snapshot of this life began.
    snapshot: float = -math.inf


class Timeline:
    """Starts and ends of the servers, as far as the file was read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open()
        self._lock = threading.Lock()
        self._rest = ""
        self._lives: list[_Life] = []
        # Times from which the servers may fail, each with the time until which they may.
        self._master_away: list[list[float]] = []
        self._metadata_away: list[list[float]] = []

    def update(self) -> None:
        """Reads the lines that were written since the last call."""
        with self._lock:
            text = self._rest + self._file.read()
            *lines, self._rest = text.split("\n")
            for line in lines:
                event, number, at = line.split(" ")
                self._apply(event, int(number), float(at))

    def _apply(self, event: str, number: int, at: float) -> None:
        if event == "up":
            self._lives.append(_Life(at))
            if not self._master_away:
                self._master_away.append([at, math.inf])
        elif event == "ready":
            self._master_away[-1][1] = at + ANNOUNCED
        elif event == "down":
            self._lives[-1].down = at
            self._master_away.append([at, math.inf])
        elif event == "snapshot":
            self._lives[number].snapshot = max(self._lives[number].snapshot, at)
        elif event == "snapshots-deleted":
            # The owners have learned the changes of earlier masters from this one.
            self._lives[-1].snapshot = -math.inf
        elif event == "metadata-down":
            self._metadata_away.append([at, math.inf])
        elif event == "metadata-ready":
            self._metadata_away[-1][1] = at + PUBLISHED
        else:
            raise ValueError(f"unknown event: {event}")

    def _life(self, start: float, end: float) -> _Life | None:
        """Returns the master that acknowledged a call, if it is certain."""
        for life in reversed(self._lives):
            if life.up <= end:
                before = [
                    other.down
                    for other in self._lives
                    if other is not life and other.down >= start and other.down <= end
                ]
                return life if end < life.down and not before else None
        return None

    def is_final(self, change: Change) -> bool:
        """Returns whether a change is acknowledged, and not undone by the end of its master."""
        if not change.is_certain or (life := self._life(change.start, change.end)) is None:
            return False
        return life.down == math.inf or life.snapshot > change.end

    def is_there(self, change: Change, start: float, end: float) -> bool:
        """Returns whether a read in this time finds the object that the change has put into memory
        of a steady owner.
        """
        if not change.is_certain or self._life(change.start, change.end) is None or self.may_be_lost(change):
            return False
        return not any(start <= until and down <= end for down, until in self._master_away if down > change.end)

    def may_be_lost(self, change: Change) -> bool:
        """Returns whether the master may have ended before the owner knew of the change."""
        return any(change.end < life.down < change.end + UNKNOWN_TO_OWNER for life in self._lives)

    def is_calm(self, start: float, end: float) -> bool:
        """Returns whether both servers answered in all of this time."""
        away = self._master_away + self._metadata_away
        return not any(start <= until and down <= end for down, until in away)

    def is_metadata_calm(self, start: float, end: float) -> bool:
        return not any(start <= until and down <= end for down, until in self._metadata_away)

    def __str__(self) -> str:
        lives = [f"{life.up:.3f} to {life.down:.3f}, snapshot {life.snapshot:.3f}" for life in self._lives[-4:]]
        return f"masters {lives}, metadata away {self._metadata_away[-3:]}"


@dataclass(slots=True)
class Change:
    """Change of one key by its only writer. `version` is None for a removal."""

    version: int | None
    start: float
    end: float
    # False if the call failed or was cancelled, so that its effect is unknown.
    is_certain: bool


@dataclass(slots=True)
class Shadow:
    """Changes of one key, in order."""

    changes: list[Change] = field(default_factory=list)

    def note(self, change: Change) -> None:
        self.changes.append(change)

    def is_removed(self) -> bool:
        """Returns whether the key is absent as far as the writer knows."""
        return not self.changes or (self.changes[-1].version is None and self.changes[-1].is_certain)

    def refusal(self, version: int, timeline: Timeline) -> str | None:
        """Returns why a read must not return this version, or None if it may."""
        for change in reversed(self.changes):
            if change.version == version:
                return None
            if timeline.is_final(change):
                kind = "removed" if change.version is None else f"replaced by version {change.version}"
                return f"version {version} was {kind} at {change.end:.3f}"
        return f"version {version} was never written, or replaced long ago"

    def prune(self, timeline: Timeline, now: float) -> None:
        """Drops changes that were replaced long ago."""
        for at in range(len(self.changes) - 1, 0, -1):
            change = self.changes[at]
            if change.end < now - _KEPT and timeline.is_final(change):
                del self.changes[:at]
                return

    def __str__(self) -> str:
        return "; ".join(
            f"{'removal' if change.version is None else f'version {change.version}'} {change.start:.3f} to {change.end:.3f}"
            f"{'' if change.is_certain else ', outcome unknown'}"
            for change in self.changes[-6:]
        )
