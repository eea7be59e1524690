"""JSON bodies of requests, with bounds on what a parsed body occupies. Needs aiohttp."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from aiohttp import web

from mooncake._request_limits import Refusal

# Maximum number of fields of the body of a put. It has two, and more are ignored.
_MAX_FIELDS = 64
# Maximum number of brackets and of commas in a small body. Such a body is an object that has at
# most one list, that of segments.
_MAX_BRACKETS = 64
_MAX_COMMAS = 16_384
# Encodings of text that a body may name. JSON is UTF-8; clients that name one of the last two send
# ASCII. Decoders of other encodings may be slow.
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1")
# Longest part of a charset that a refusal repeats.
_SHOWN = 64
_SPACE = r"[ \t\n\r]*"
_EMPTY = re.compile(rf"{_SPACE}\{{{_SPACE}\}}{_SPACE}")
_BEGIN = re.compile(rf"{_SPACE}\{{{_SPACE}(?=\")")
_COLON = re.compile(rf"{_SPACE}:{_SPACE}")
_NEXT = re.compile(rf"{_SPACE}(?:,{_SPACE}(?=\")|\}}{_SPACE}\Z)")
_DECODER = json.JSONDecoder()


class UnexpectedBody(ValueError):
    """Body of JSON that does not have the form that a route expects."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


async def take_body(request: Any) -> bytes:
    """Returns the body of a request, which no longer holds the body after that."""
    body = bytes(await request.read())
    # The request lives as long as the call of the store, and aiohttp has no call that drops a body.
    request._read_bytes = b""
    return body


def refuse_charset(request: web.Request) -> web.Response | None:
    """Returns the response to a request whose body is not UTF-8."""
    charset = request.charset if request.body_exists else None
    if charset is None or charset.lower() in _CHARSETS:
        return None
    return Refusal(415, f"the charset is not supported. charset={charset[:_SHOWN]!r}", "send UTF-8").response()


def check_small(body: bytes) -> Refusal | None:
    """Returns the refusal of a small body from which the parser would make too many objects."""
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        limit = "max_brackets", _MAX_BRACKETS
        return Refusal(400, "the body has too many lists or objects", "send an object with at most one list", limit)
    if body.count(b",") > _MAX_COMMAS:
        limit = "max_commas", _MAX_COMMAS
        return Refusal(400, "the body has too many fields or items", "send several requests", limit)
    return None


def put_fields(body: bytes) -> tuple[Any, bytes] | None:
    """Returns the key and the value in the body of a put. `None` if one is absent.

    Raises:
        UnexpectedBody: a field is a list or an object, or there are too many fields.
        ValueError: the body is not a JSON object.
    """
    fields = _scalars_of(body.decode(), ("key", "value"))
    key, value = fields.get("key"), fields.get("value")
    return None if not key or value is None else (key, value.encode())


def _scalars_of(text: str, names: Collection[str]) -> dict[str, Any]:
    """Returns the named fields of an object without lists and objects. The others are not kept."""
    found: dict[str, Any] = {}
    if _EMPTY.fullmatch(text):
        return found
    at = _past(_BEGIN, text, 0)
    for _ in range(_MAX_FIELDS):
        name, at = _scalar(text, at)
        value, at = _scalar(text, _past(_COLON, text, at))
        if name in names:
            found[name] = value
        at = _past(_NEXT, text, at)
        if at == len(text):
            return found
    limit = "max_fields", _MAX_FIELDS
    raise UnexpectedBody(Refusal(400, "the body has too many fields", "send a key and a value", limit))


def _scalar(text: str, at: int) -> tuple[Any, int]:
    """Returns the string, number or constant at a position, and the position of its end."""
    if text.startswith(("[", "{"), at):
        reason = "a field of the body is a list or an object"
        raise UnexpectedBody(Refusal(400, reason, "send a key and a value as strings"))
    return _DECODER.raw_decode(text, at)


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Returns the position behind a pattern."""
    found = pattern.match(text, at)
    if found is None:
        remedy = "send an object with a key and a value"
        raise ValueError(f"cannot parse body: it is not a JSON object. position={at}; {remedy}")
    return found.end()
