"""Limits of requests to an aiohttp server, and refusals in JSON that name them. Needs aiohttp."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

# Maximum bytes of the address of a request, and of the name and the value of a header field.
MAX_ADDRESS = 65_534
MAX_FIELD = 65_535


class Refusal(NamedTuple):
    """Reason for which a request is refused before a route handles it."""

    status: int
    reason: str
    remedy: str
    # Name and value of the limit that the request exceeds.
    limit: tuple[str, int] | None = None

    def response(self) -> web.Response:
        """Returns the response."""
        if self.limit is None:
            return web.json_response({"error": f"cannot read request: {self.reason}; {self.remedy}"}, status=self.status)
        name, value = self.limit
        text = f"cannot read request: {self.reason}. limit={name} value={value}; {self.remedy}"
        return web.json_response({"error": text, "limit": name, "limit_value": value}, status=self.status)


BROKEN_BODY = Refusal(400, "the body is malformed or incomplete", "send as many bytes as Content-Length says, or complete chunks")


def long_body(limit: int) -> Refusal:
    """Returns the refusal of a body of more than `limit` bytes."""
    return Refusal(413, "the body is too long", "send several requests, or a shorter value", ("max_body_bytes", limit))


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
        response.force_close()
        self.close()
        if self.transport is not None:
            self.transport = _HalfClosing(self.transport)  # type: ignore[assignment]
        return response


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
            self._transport.write_eof()
