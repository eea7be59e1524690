"""Files that a caller names, restricted to allowed folders."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
"""Directory of POSIX shared memory on this host."""
USUAL = (SHARED_MEMORY, "/dev/hugepages")


class NotAllowed(Exception):
    """The file is outside the allowed folders."""


@contextlib.contextmanager
def opened(path: str, folders: Iterable[str]) -> Iterator[str]:
    """Yields a path that leads to the file that `path` names now, even if that name changes later.

    The yielded path is valid as long as the context. Links are followed as long as they stay in the
    folders.

    Raises `NotAllowed` for a file outside the folders, before anything is opened. Raises `OSError`
    if the path names no regular file, or the file cannot be read and written.
    """
    try:
        real = Path(path).resolve()
    except (ValueError, RuntimeError) as error:
        raise NotAllowed(f"invalid path {path!r}: {error}") from None
    allowed = [Path(folder).resolve() for folder in folders]
    if not any(real.is_relative_to(folder) and real != folder for folder in allowed):
        raise NotAllowed(f"{path!r} is outside the allowed folders {', '.join(map(str, allowed))}")
    # Another process that may write the folder could have put a link here, or a file whose opening
    # blocks.
    file = os.open(real, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path!r} is not a regular file")
        name = f"/proc/self/fd/{file}"
        if Path(os.readlink(name)) != real:
            raise NotAllowed(f"{path!r} was moved while it was opened")
        yield name
    finally:
        os.close(file)
