"""How the hub says no before its app is asked: each refusal in words, with its status and headers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from fordstone.hub.messages import Refusal
from fordstone.hub.refused import STATUS, Word
from fordstone.hub.server.places import BadName, Nowhere

BUSY_RETRY_S: Final = 1
BROKEN: Final = 500
"""This status and those above: the hub's fault."""
_WORDS: Final[dict[int, Word]] = {
    STATUS[word]: word for word in ("unauthorised", "forbidden", "not_found", "gone", "too_large", "storage")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class No:
    """A refusal with its status and the headers that go with it."""

    status: int
    error: Word
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def body(self) -> bytes:
        """As it is sent."""
        return msgspec.json.encode(Refusal(error=self.error, message=self.message))


def bad_name(found: BadName) -> No:
    """A part of the path cannot be a name."""
    return No(
        status=400,
        error="bad_name",
        message=f"{found.part!r} in the path is not a name: 1 to 100 letters, digits, '_', '-' or single '.', "
        f"beginning with none of '.-', and without escapes; a blob's name is its sha256 in hex.",
    )


def nowhere(found: Nowhere) -> No:
    """There is no such call, or not with this method."""
    if not found.allowed:
        return No(
            status=404, error="not_found", message="the hub has no such call. Is this the hub's URL, without a path?"
        )
    allowed = ", ".join(found.allowed)
    return No(
        status=405,
        error="bad_request",
        message=f"this can be asked for with {allowed} only.",
        headers=((b"allow", allowed.encode()),),
    )


def unauthorised(why: str) -> No:
    """Nobody knows who asks. `why` never has the token in it."""
    return No(
        status=401,
        error="unauthorised",
        message=f"{why}. Give one with --token-file or FORDSTONE_HUB_TOKEN; `fordstone hub token add` makes one.",
        headers=((b"www-authenticate", b'Bearer realm="fordstone hub"'),),
    )


def from_web_page() -> No:
    """A browser asks on behalf of a page, which may be anybody's, and there is no token by which to tell."""
    return No(
        status=403,
        error="forbidden",
        message="a hub without tokens answers only programs of this machine, which name it by an IP address or as localhost; this "
        "came from a web page, or by another name. Make a token with `fordstone hub token add`.",
    )


def busy(greedy: str | None) -> No:
    """There is no room. `greedy`: whoever has as much of it as one may have; None: all of it is taken."""
    headers = ((b"retry-after", str(BUSY_RETRY_S).encode()),)
    if greedy is not None:
        message = f"{greedy} has as many requests under way as one node may have. Ask again when one is answered."
        return No(status=429, error="too_many_requests", message=message, headers=headers)
    message = "the hub answers as many requests as it can at once. Ask again in a moment."
    return No(status=503, error="too_many_requests", message=message, headers=headers)


def of_status(status: int, headers: list[tuple[bytes, bytes]]) -> No:
    """A refusal for an answer of the web framework's own."""
    broken = status >= BROKEN
    error = _WORDS.get(status, "failed" if broken else "bad_request")
    message = (
        "the hub failed; its log says why. Trying again is safe." if broken else f"the hub says HTTP {status} to this."
    )
    kept = tuple((name, value) for name, value in headers if name.lower() in {b"allow", b"retry-after"})
    return No(status=status, error=error, message=message, headers=kept)
