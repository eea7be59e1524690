"""Limits of requests to an aiohttp server, and refusals in JSON that name them. Needs aiohttp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

# Maximum bytes of the address of a request, and of the name and the value of a header field.
MAX_ADDRESS = 65_534
MAX_FIELD = 65_535
# Maximum bytes of a body, for routes that need no long one.
SMALL_BODY = 1 << 20
# Longest part of a header field that a refusal repeats.
_SHOWN = 64


class Refusal(NamedTuple):
    """Reason for which a request is refused."""

    status: int
    reason: str
    remedy: str
    # Name and value of the limit that the request exceeds.
    limit: tuple[str, int] | None = None
    action: str = "read request"

    def __str__(self) -> str:
        limit = "" if self.limit is None else f". limit={self.limit[0]} value={self.limit[1]}"
        return f"cannot {self.action}: {self.reason}{limit}; {self.remedy}"

    def response(self) -> web.Response:
        """Returns the response."""
        limit = {} if self.limit is None else {"limit": self.limit[0], "limit_value": self.limit[1]}
        return web.json_response({"error": str(self), **limit}, status=self.status)


@dataclass(frozen=True)
class BodyRules:
    """Rules of an application for the bodies of its requests. They apply before a body is read."""

    # Returns the response to a request that its header excludes.
    refuse: Callable[[web.Request], web.Response | None] | None = None
    # Returns whether the body of a request may have the length that the application allows. Other
    # bodies are at most `SMALL_BODY` long. Without it, every body may be long.
    is_long: Callable[[web.Request], bool] | None = None
    # Maximum number of long bodies that are received at once. Without it, there is no limit.
    max_concurrent: int | None = None

    def may_be_long(self, request: web.Request) -> bool:
        """Returns whether a request may have a long body."""
        return self.is_long is None or self.is_long(request)

    def limit(self, request: web.Request) -> int:
        """Returns the maximum bytes of the body of a request."""
        most = request.client_max_size
        return most if self.may_be_long(request) else min(most, SMALL_BODY)


BROKEN_BODY = Refusal(400, "the body is malformed or incomplete", "send as many bytes as Content-Length says, or complete chunks")


def long_body(limit: int) -> Refusal:
    """Returns the refusal of a body of more than `limit` bytes."""
    return Refusal(413, "the body is too long", "send several requests, or a shorter value", ("max_body_bytes", limit))


def too_many_bodies(limit: int) -> Refusal:
    """Returns the refusal of a body that had to wait too long for `limit` others."""
    return Refusal(503, "other bodies are being received", "retry later", ("max_concurrent_bodies", limit))


def encoded_body(request: web.Request) -> Refusal | None:
    """Returns the refusal of a compressed body. Its length would not limit its memory."""
    if not request.body_exists:
        return None
    for field in request.headers.getall("Content-Encoding", ()):
        for coding in field.split(","):
            if coding.strip().lower() not in ("", "identity"):
                reason = f"the content encoding is not supported. content_encoding={coding.strip()[:_SHOWN]!r}"
                return Refusal(415, reason, "send the body without Content-Encoding")
    return None


def _refused_header(error: HttpProcessingError) -> Refusal:
    if isinstance(error, LineTooLong):
        if str(error.args[1]) == str(MAX_ADDRESS):
            return Refusal(414, "the address is too long", "use a shorter key", ("max_address_bytes", MAX_ADDRESS))
        return Refusal(431, "a header field is too long", "send a shorter one", ("max_field_bytes", MAX_FIELD))
    reason = " ".join(error.message.split())
    if reason.startswith("Too many headers"):
        return Refusal(431, "the header has too many fields", "send fewer header fields")
    return Refusal(400, f"the request line or a header field is malformed ({reason})", "send HTTP/1.1 with a percent-encoded address")


class RequestHandler(web.RequestHandler):
    """Handler of the requests of a connection."""

    __slots__ = ()

    def handle_error(self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None) -> Any:
        """Returns the response to a request that cannot be read, or whose route has failed."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = _refused_header(exc).response()
        self.end_after(response)
        return response

    def end_after(self, response: web.StreamResponse) -> None:
        """Ends the connection after a response, and discards bytes that still arrive."""
        response.force_close()
        self.close()
        if self.transport is not None and not self.is_discarding:
            self.transport = _HalfClosing(self.transport)  # type: ignore[assignment]

    @property
    def is_discarding(self) -> bool:
        """True if received bytes are discarded."""
        return isinstance(self.transport, _HalfClosing)


class _HalfClosing:
    """Transport that reads on after its end, until the peer ends too.

    With unread bytes, the kernel would reset the connection, and the peer would not see the
    response.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Ends the response."""
        if not self._transport.is_closing():
            # The body that was not read may have paused the transport.
            self._transport.resume_reading()
            self._transport.write_eof()
