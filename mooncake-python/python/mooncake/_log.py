"""Log of the native half in Python's `logging`, under the logger `mooncake`."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from mooncake import _mooncake

_LOGGER = logging.getLogger("mooncake")
_started = threading.Lock()


def _relay() -> None:
    while (record := _mooncake._next_record()) is not None:
        level, origin, text = record
        try:
            _LOGGER.getChild(origin.removeprefix("mooncake_").replace("::", ".")).log(level, "%s", text)
        except Exception:  # a handler that fails must not end the log
            sys.excepthook(*sys.exc_info())


def start() -> None:
    """Starts to relay log events, once per process. `MC_LOG_LEVEL` selects the lowest level."""
    if not _started.acquire(blocking=False):
        return
    level = os.environ.get("MC_LOG_LEVEL") or "WARNING"
    if not _mooncake._start_log(level):
        return
    if _LOGGER.level == logging.NOTSET and level.upper() in logging.getLevelNamesMapping():
        _LOGGER.setLevel(level.upper())
    relay = threading.Thread(target=_relay, name="mooncake-log", daemon=True)
    try:
        relay.start()
    except RuntimeError:  # the interpreter is ending
        _mooncake._stop_log()
        return

    def stop() -> None:
        # The thread must not be inside the interpreter when it ends.
        _mooncake._stop_log()
        relay.join(5)

    atexit.register(stop)
