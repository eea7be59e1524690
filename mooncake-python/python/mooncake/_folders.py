"""Files that others name, from folders that were opened to them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
"""Where shared memory of this host has its files."""
USUAL = (SHARED_MEMORY, "/dev/hugepages")


class NotAllowed(Exception):
    """The file lies in no folder that was opened."""


@contextlib.contextmanager
def opened(path: str, folders: Iterable[str]) -> Iterator[str]:
    """A path that leads to the file that `path` names now, whatever becomes of its name: as long as the context lives.

    Links are followed as long as they stay in the folders. `NotAllowed` for what lies elsewhere, before anything is opened; `OSError` for what
    is no file, or cannot be read and written.
    """
    try:
        real = Path(path).resolve()
    except (ValueError, RuntimeError) as error:
        raise NotAllowed(f"{path!r} is no path: {error}") from None
    allowed = [Path(folder).resolve() for folder in folders]
    if not any(real.is_relative_to(folder) and real != folder for folder in allowed):
        raise NotAllowed(f"{path!r} lies in none of {', '.join(map(str, allowed))}")
    # Who may write the folder could have put a link there by now, or something that keeps whoever opens it waiting.
    file = os.open(real, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path!r} is no file")
        name = f"/proc/self/fd/{file}"
        if Path(os.readlink(name)) != real:
            raise NotAllowed(f"{path!r} was moved meanwhile")
        yield name
    finally:
        os.close(file)
