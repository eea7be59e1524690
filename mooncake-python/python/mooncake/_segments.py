"""Memory that one process of a host owns and others map: `mooncake.engine.SharedSegment`.

The memory is a file without a name (memfd), which other processes open through the owner's process.
The kernel frees the memory when the last of the processes ends, however it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap as pages
import os
import re
from collections.abc import Sequence

from ._mooncake import check_memory

# Length of a blob in bytes. Collectives need the same length on all ranks.
BLOB = 512
# Name of the files, which other descriptors do not have.
_NAME = "mooncake-segment"
# Path of a descriptor of a process.
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


class SharedSegment:
    """Part of a segment that belongs to one rank.

    The segment is ready once every rank has the blobs of all. Its memory lives as long as this
    object, or an object that was made from its bytes.
    """

    def __init__(self, declared: dict[str, object], fd: int | None) -> None:
        self._declared, self._fd = declared, fd
        self._pages: pages.mmap | None = None

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Returns whether segments with these settings are supported: host pages that are not
        registered with a device.
        """
        return bool(mmap) and not host_register and hasattr(os, "memfd_create")

    @staticmethod
    def create(
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,
        mmap: bool = True,
        host_register: bool = False,
    ) -> tuple[SharedSegment, bytes]:
        """Creates a rank's part, for which the owner allocates `size` bytes. Returns the segment
        and a blob for the other ranks.

        Raises `RuntimeError` for invalid arguments, a lack of memory, or settings that are not
        :meth:`supported`.
        """
        if not SharedSegment.supported(mmap, host_register):
            raise RuntimeError("unsupported segment settings: use mmap=True and host_register=False")
        if not name or size <= 0:
            raise RuntimeError(f"invalid segment: name={name!r} size={size}")
        if not (0 <= rank_id < world_size and 0 <= owner_rank < world_size):
            raise RuntimeError(f"invalid segment: rank_id={rank_id} owner_rank={owner_rank} world_size={world_size}")
        declared = {"name": name, "size": size, "world_size": world_size, "rank": rank_id, "owner": owner_rank}
        fd = _new_file(size) if rank_id == owner_rank else None
        segment = SharedSegment(declared, fd)
        return segment, segment._blob()

    def _blob(self) -> bytes:
        same = {key: value for key, value in self._declared.items() if key != "rank"}
        sum = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
        content: dict[str, object] = {"sum": sum}
        if self._fd is not None:
            about = os.fstat(self._fd)
            content.update(path=f"/proc/{os.getpid()}/fd/{self._fd}", dev=about.st_dev, ino=about.st_ino)
        return json.dumps(content).encode().ljust(BLOB)

    def complete(self, blobs: Sequence[bytes | str]) -> None:
        """Maps the memory. `blobs` are those of all ranks, by rank.

        Raises `RuntimeError` if a rank has other arguments, or the owner's memory cannot be opened.
        """
        declared = self._declared
        if len(blobs) != declared["world_size"]:
            raise RuntimeError(f"cannot complete segment: blobs={len(blobs)} world_size={declared['world_size']}")
        try:
            contents = [json.loads(blob) for blob in blobs]
            sums = [one["sum"] for one in contents]
            ours, owner = sums[int(str(declared["rank"]))], contents[int(str(declared["owner"]))]
            path, file_id = str(owner["path"]), (owner["dev"], owner["ino"])
        except (ValueError, TypeError, KeyError) as error:
            raise RuntimeError(f"cannot complete segment: invalid blob: {error}") from error
        others = [rank for rank, sum in enumerate(sums) if sum != ours]
        if others:
            raise RuntimeError(f"cannot complete segment: ranks {others} and {declared['rank']} declare {declared['name']!r} differently")
        if self._pages is None:
            self._pages = self._map(path, file_id)

    def _map(self, path: str, file_id: tuple[object, object]) -> pages.mmap:
        try:
            fd = _open(path) if self._fd is None else os.dup(self._fd)
        except OSError as error:
            raise RuntimeError(f"cannot open the owner's memory: {error}") from error
        try:
            about = os.fstat(fd)
            # The number may belong to another file by now. Access to a file that can shrink could
            # end the process.
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if (about.st_dev, about.st_ino) != file_id or about.st_size != self.size() or not sealed:
                raise RuntimeError("cannot map segment: its owner has ended")
            return pages.mmap(fd, self.size())
        except OSError as error:
            raise RuntimeError(f"cannot map the owner's memory: {error}") from error
        finally:
            os.close(fd)

    def ready(self) -> bool:
        """Returns whether the memory is mapped."""
        return self._pages is not None

    def size(self) -> int:
        """Returns the size in bytes."""
        return int(str(self._declared["size"]))

    def buffer(self) -> pages.mmap:
        """Returns the memory. Raises `RuntimeError` before it is mapped."""
        if self._pages is None:
            raise RuntimeError("segment is not complete; call complete() first")
        return self._pages

    def base_addr(self) -> int:
        """Returns the address of the first byte in this process. It differs between processes.

        Raises `RuntimeError` before the memory is mapped.
        """
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer()))

    def device_addr(self) -> int:
        """Returns 0, because the memory has no address for a device."""
        return 0

    def __del__(self) -> None:
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)


def _open(path: str) -> int:
    """Opens the file that another process has named. Any other kind of file is not even opened."""
    if not _PATH.fullmatch(path):
        raise OSError(f"not a file of a process: {path!r}")
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{place}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise OSError("the descriptor is not shared memory")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(place)


def _new_file(size: int) -> int:
    """Creates a file of fixed size whose pages are all allocated.

    Without the allocation, a later access for which there is no memory would end the process.
    """
    # The kernel would end processes to allocate more than the host and the control groups have.
    check_memory(size)
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise RuntimeError(f"cannot create shared memory: {error}") from error
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise RuntimeError(f"cannot allocate {size} bytes of shared memory: {error}") from error
    return fd
