"""The native part's log, in Python's `logging` under the logger `mooncake`."""

from __future__ import annotations

import atexit
import logging
import sys
import threading

from mooncake import _environment, _mooncake

_LOGGER = logging.getLogger("mooncake")
_started = threading.Lock()


def _relay() -> None:
    while (record := _mooncake._next_record()) is not None:
        level, origin, text = record
        try:
            _LOGGER.getChild(origin.removeprefix("mooncake_").replace("::", ".")).log(level, "%s", text)
        except Exception:  # a handler's failure is not to end the log
            sys.excepthook(*sys.exc_info())


def start() -> None:
    """Begins to relay, once per process. `MC_LOG_LEVEL` says from which level on."""
    if not _started.acquire(blocking=False):
        return
    level = _environment.log_level()
    if not _mooncake._start_log(level):
        return
    if _LOGGER.level == logging.NOTSET and level.upper() in logging.getLevelNamesMapping():
        _LOGGER.setLevel(level.upper())
    relay = threading.Thread(target=_relay, name="mooncake-log", daemon=True)
    try:
        relay.start()
    except RuntimeError:  # the interpreter is on its way out
        _mooncake._stop_log()
        return

    def stop() -> None:
        # It must not be caught half-way when the interpreter goes.
        _mooncake._stop_log()
        relay.join(5)

    atexit.register(stop)
