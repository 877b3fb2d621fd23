"""The head of an HTTP/1 request, read strictly, and that of a response. Pure: for the small servers that a pipeline runs.

What two readers could understand differently is rejected and not repaired: a header that is there twice, one that goes on in a second line, a
body with both Content-Length and Transfer-Encoding, control characters. A proxy in front can then not be made to see other requests than we do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

HEAD_END: Final = b"\r\n\r\n"
HEADERS_MAX: Final = 100
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET: Final = re.compile(r"[!-~]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH: Final = re.compile(r"[0-9]{1,12}")
_NAME_CHARS_SHOWN: Final = 50


class HeadError(Exception):
    """The head is not that of a request. Nothing after it can be understood."""


class Head(NamedTuple):
    """The head of a request."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """By their names in lower case."""
    keeps_alive: bool
    """The client may send another request on the connection."""
    body_bytes: int | None
    """None: the body is in chunks. 0: there is none, or its length is not given."""


def parse_head(raw: bytes) -> Head:
    """Read what came up to and with `HEAD_END`."""
    first, *lines = raw.removesuffix(HEAD_END).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in {"HTTP/1.0", "HTTP/1.1"} or len(lines) > HEADERS_MAX:  # noqa: PLR2004 - method, target, version
        raise HeadError("that is no request of HTTP/1.1")
    method, target, version = words
    if _TOKEN.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise HeadError("that is no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or _TOKEN.fullmatch(name) is None or name in headers or _CONTROL.search(value):
            raise HeadError(f"header {name[:_NAME_CHARS_SHOWN]!r} is malformed, or there twice")
        headers[name] = value.strip(" \t")
    keeps_alive = version == "HTTP/1.1" and "close" not in headers.get("connection", "").lower()
    return Head(method, target.partition("?")[0], headers, keeps_alive, _body_bytes(headers))


def _body_bytes(headers: Mapping[str, str]) -> int | None:
    length = headers.get("content-length")
    if "transfer-encoding" in headers:
        if length is not None:
            raise HeadError("a body has Content-Length or Transfer-Encoding, and not both")
        return None
    if length is not None and _LENGTH.fullmatch(length) is None:
        raise HeadError("Content-Length is no number")
    return int(length or 0)


def response_head(status: HTTPStatus, body: bytes, headers: Mapping[str, str], *, keeps_alive: bool = False) -> bytes:
    """Write the head of a response with a JSON body."""
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"connection: {'keep-alive' if keeps_alive else 'close'}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
