"""Calls of a process: their durations, their outcomes, and what the process reports of them."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

# Longest call in seconds: the timeout of a call, and a margin for a busy machine.
DEADLINE = 20.0
MARGIN = 25.0
# Interval between two looks at the calls in progress, in seconds.
_TICK = 1.0
# Interval between two reports of the counts, in seconds.
_REPORT = 5.0
# Most failures and notes that a process reports.
_MOST = 20
# Duration of a call that is worth a note, in seconds.
SLOW = 10.0


class Report:
    """Lines of JSON to the process that runs the soak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()

    def send(self, kind: str, content: Any) -> None:
        with self._lock:
            self._sent[kind] += 1
            if kind in ("failure", "note") and self._sent[kind] > _MOST:
                return
            sys.stdout.write(json.dumps({kind: content}) + "\n")
            sys.stdout.flush()

    def fail(self, sentence: str) -> None:
        self.send("failure", f"{sentence} (at {time.monotonic():.3f})")

    def note(self, sentence: str) -> None:
        self.send("note", f"{sentence} (at {time.monotonic():.3f})")


class Calls:
    """Calls in progress, and counts of those that have ended."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._numbers = itertools.count()
        self._active: dict[int, tuple[float, str]] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.longest = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Runs one call, which must end in time."""
        number, start = next(self._numbers), time.monotonic()
        self._active[number] = (start, what)
        try:
            yield
        finally:
            was_reported = self._active.pop(number, None) is None
            took = time.monotonic() - start
            self.longest = max(self.longest, took)
            self.count("calls")
            if took > DEADLINE + MARGIN and not was_reported:
                self._hung(what, took)
            elif took > SLOW:
                self.count("slow calls")
                self._report.note(f"slow: {what} takes {took:.1f} s")

    def _hung(self, what: str, took: float) -> None:
        self._report.fail(f"hang: {what} takes {took:.1f} s")

    def _watch(self) -> None:
        reported = time.monotonic()
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            late = [number for number, (start, _) in list(self._active.items()) if now - start > DEADLINE + MARGIN]
            for number in late:
                if (call := self._active.pop(number, None)) is not None:
                    self._hung(call[1], now - call[0])
            if late:
                faulthandler.dump_traceback(all_threads=True)
            if now > reported + _REPORT:
                reported = now
                self.report()

    def report(self) -> None:
        with self._lock:
            counts = dict(self._counts)
        self._report.send("counts", counts | {"longest call ms": int(self.longest * 1000)})
