"""Values that follow from their key and version, so that each byte of a read can be checked."""

from __future__ import annotations

import hashlib
import random
import struct

# Hash of the key, version, length, and a hash of these three.
_HEAD = struct.Struct("<QQQQ")
HEAD = _HEAD.size
LONGEST = 256 << 10
_STARTS = 1 << 20
# Bytes that are equal in all processes. A value is a part of them behind its head.
_BLOCK = random.Random(0x6D6F6F6E).randbytes(_STARTS + LONGEST)


class WrongBytes(ValueError):
    """Bytes that differ from every value of the key."""


def _hash(*words: object) -> int:
    text = "|".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def value_of(key: str, version: int, length: int) -> bytes:
    """Returns the value of this version, with a length between `HEAD` and `LONGEST`."""
    digest = _hash(key, version, length)
    start = digest % _STARTS
    return _HEAD.pack(_hash(key), version, length, digest) + _BLOCK[start : start + length - HEAD]


def version_of(key: str, value: bytes) -> int:
    """Returns the version of a value that was read under this key.

    Raises `WrongBytes` with the first difference.
    """
    if len(value) < HEAD:
        raise WrongBytes(f"{len(value)} bytes are no value")
    key_hash, version, length, digest = _HEAD.unpack_from(value)
    if digest != _hash(key, version, length) or key_hash != _hash(key):
        raise WrongBytes(f"the head is of another key or damaged: {value[:HEAD].hex()}")
    if length != len(value):
        raise WrongBytes(f"version {version} has {length} bytes, and {len(value)} were read")
    start = digest % _STARTS
    expected = _BLOCK[start : start + length - HEAD]
    if value[HEAD:] != expected:
        differing = [
            at for at, (found, wanted) in enumerate(zip(value[HEAD:], expected, strict=True)) if found != wanted
        ]
        raise WrongBytes(
            f"version {version} of {length} bytes: {len(differing)} bytes differ, the first at {HEAD + differing[0]}"
        )
    return int(version)
