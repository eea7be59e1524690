"""Memory that one process of a host owns and others map: `mooncake.engine.SharedSegment`.

A file without a name (memfd), which the others open through the owner's process: it is gone with the last of them, however they end.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap as pages
import os
from collections.abc import Sequence

# Length of a blob: one for all ranks, as collectives want it.
BLOB = 512


class SharedSegment:
    """One rank's part in a segment. Ready once every rank has the blobs of all; alive for as long as it, or what was made of its bytes, is."""

    def __init__(self, declared: dict[str, object], fd: int | None) -> None:
        self._declared, self._fd = declared, fd
        self._pages: pages.mmap | None = None

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Whether memory can be shared in this way: as pages of the host's, not registered with a device."""
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
        """Begins one: the owner takes `size` bytes of memory. Returns the segment and a blob for the other ranks.

        RuntimeError: arguments that make no sense, no memory, or a way of sharing that is not :meth:`supported`.
        """
        if not SharedSegment.supported(mmap, host_register):
            raise RuntimeError("segments are shared as pages of the host's here: mmap=True, host_register=False")
        if not name or size <= 0:
            raise RuntimeError(f"a segment named {name!r} of {size} bytes")
        if not (0 <= rank_id < world_size and 0 <= owner_rank < world_size):
            raise RuntimeError(f"rank {rank_id}, owner {owner_rank}, of {world_size} ranks")
        declared = {"name": name, "size": size, "world_size": world_size, "rank": rank_id, "owner": owner_rank}
        fd = _new_file(size) if rank_id == owner_rank else None
        segment = SharedSegment(declared, fd)
        return segment, segment._blob()

    def _blob(self) -> bytes:
        same = {key: value for key, value in self._declared.items() if key != "rank"}
        sum = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
        said: dict[str, object] = {"sum": sum}
        if self._fd is not None:
            about = os.fstat(self._fd)
            said.update(path=f"/proc/{os.getpid()}/fd/{self._fd}", dev=about.st_dev, ino=about.st_ino)
        return json.dumps(said).encode().ljust(BLOB)

    def complete(self, blobs: Sequence[bytes | str]) -> None:
        """Maps the memory. `blobs` are those of all ranks, by rank.

        RuntimeError: a rank has declared something else, or the owner's memory cannot be opened.
        """
        declared = self._declared
        if len(blobs) != declared["world_size"]:
            raise RuntimeError(f"{len(blobs)} blobs of {declared['world_size']} ranks")
        try:
            said = [json.loads(blob) for blob in blobs]
            sums = [one["sum"] for one in said]
            ours, owner = sums[int(str(declared["rank"]))], said[int(str(declared["owner"]))]
            path, place = str(owner["path"]), (owner["dev"], owner["ino"])
        except (ValueError, TypeError, KeyError) as error:
            raise RuntimeError(f"what the ranks have sent are no blobs of this segment: {error}") from error
        others = [rank for rank, sum in enumerate(sums) if sum != ours]
        if others:
            raise RuntimeError(f"ranks {others} declare {declared['name']!r} otherwise than rank {declared['rank']}")
        if self._pages is None:
            self._pages = self._map(path, place)

    def _map(self, path: str, place: tuple[object, object]) -> pages.mmap:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if self._fd is None else os.dup(self._fd)
        except OSError as error:
            raise RuntimeError(f"the owner's memory cannot be opened: {error}") from error
        try:
            about = os.fstat(fd)
            # Another file may have its number by now, and one that could be cut off would end whoever touches it.
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if (about.st_dev, about.st_ino) != place or about.st_size != self.size() or not sealed:
                raise RuntimeError("the owner of the segment is gone")
            return pages.mmap(fd, self.size())
        except OSError as error:
            raise RuntimeError(f"the owner's memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def ready(self) -> bool:
        """Whether its memory is mapped."""
        return self._pages is not None

    def size(self) -> int:
        """Bytes."""
        return int(str(self._declared["size"]))

    def buffer(self) -> pages.mmap:
        """Its bytes. RuntimeError: not mapped yet."""
        if self._pages is None:
            raise RuntimeError("the segment is not complete")
        return self._pages

    def base_addr(self) -> int:
        """Address of its first byte in this process, another one in each. RuntimeError: not mapped yet."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer()))

    def device_addr(self) -> int:
        """Address for a device: 0, there is none."""
        return 0

    def __del__(self) -> None:
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)


def _new_file(size: int) -> int:
    """As large as that for good, and with all its pages: later, one that there is no memory for would end the process."""
    # The kernel would end processes to find that many.
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise RuntimeError(f"no {size} bytes of shared memory: the machine has fewer")
    try:
        fd = os.memfd_create("mooncake-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise RuntimeError(f"no shared memory: {error}") from error
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise RuntimeError(f"no {size} bytes of shared memory: {error}") from error
    return fd
