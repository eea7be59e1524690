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


def _nearest(name: str) -> logging.Logger:
    """Returns the logger `name` if the program has made it, and its nearest parent otherwise.

    Making it here would change the table of loggers while another thread walks through it without
    the lock, as pytest does before each test.
    """
    while name != _LOGGER.name:
        if isinstance(logger := _LOGGER.manager.loggerDict.get(name), logging.Logger):
            return logger
        name = name.rpartition(".")[0]
    return _LOGGER


def _relay() -> None:
    while (event := _mooncake._next_record()) is not None:
        level, origin, text = event
        try:
            name = f"{_LOGGER.name}.{origin.removeprefix('mooncake_').replace('::', '.')}"
            logger = _nearest(name)
            if logger.isEnabledFor(level):
                logger.handle(logger.makeRecord(name, level, "(native)", 0, "%s", (text,), None))
        except Exception:  # a handler that fails must not end the log
            sys.excepthook(*sys.exc_info())


def start() -> None:
    """Starts to relay log events, once per process. `MC_LOG_LEVEL` selects the lowest level."""
    if not _started.acquire(blocking=False):
        return
    level = os.environ.get("MC_LOG_LEVEL") or "WARNING"
    if not _mooncake._start_log(level):
        return
    known = logging.getLevelNamesMapping()
    if level.upper() in known:
        if _LOGGER.level == logging.NOTSET:
            _LOGGER.setLevel(level.upper())
    elif level.upper() != "TRACE":
        _LOGGER.warning(
            "MC_LOG_LEVEL=%s is ignored: must be one of %s; using WARNING", level, ", ".join([*known, "TRACE"])
        )
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
