"""Bodies and questions as requests bring them, bounded; and answers."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fordstone.hub.messages import BODY_BYTES_MAX, WAIT_SECONDS_MAX
from fordstone.hub.refused import Refused
from fordstone.hub.server.checks import NUMBER_MAX, name_in

_DIGITS_MAX: Final = 19


async def body_of(request: Request) -> bytes:
    """The whole JSON body."""
    refuse_if_larger(request, BODY_BYTES_MAX)
    parts: list[bytes] = []
    size_bytes = 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes > BODY_BYTES_MAX:
            raise too_large(BODY_BYTES_MAX)
        parts.append(part)
    return b"".join(parts)


def refuse_if_larger(request: Request, bytes_max: int) -> None:
    """By what the header says, before anything is read."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > _DIGITS_MAX or int(length) > bytes_max):
        raise too_large(bytes_max)


def too_large(bytes_max: int) -> Refused:
    """The body is beyond its bound."""
    return Refused("too_large", f"the body has more than {bytes_max} bytes. Send less at a time.")


def name_of(request: Request, what: str) -> str:
    """A name from the path, checked."""
    return name_in(request.path_params[what], what)


def number_of(request: Request, what: str, default: int, *, most: int = NUMBER_MAX) -> int:
    """A whole number from the question."""
    text = request.query_params.get(what)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and int(text) <= most):
        raise Refused("bad_request", f"{what} must be a whole number from 0 to {most}, not {text[:40]!r}.")
    return int(text)


def seconds_of(request: Request) -> float:
    """How long to wait; more than the most there is counts as the most."""
    text = request.query_params.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise Refused("bad_request", f"wait must be a number of seconds from 0 on, not {text[:40]!r}.")
    return min(seconds, WAIT_SECONDS_MAX)


def json_answer(message: Any, status: int = 200) -> Response:
    """A message as a body."""
    return Response(msgspec.json.encode(message), status, media_type="application/json")


def no_content() -> Response:
    """Done; nothing to say."""
    return Response(status_code=204)
