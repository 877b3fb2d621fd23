"""What a request is about, read off its method and path, and which tokens may ask for it. Pure.

Nothing that a client sends becomes a path of a file; still, every part of a path must be a plain name before anyone looks
at it, so that `..`, escapes, NUL and look-alike letters end here. No name needs an escape, so there is no decoding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from fordstone.hub.messages import API
from fordstone.hub.server.tokens import Token

PATH_CHARS_MAX: Final = 1_000
_NAME = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_EPOCHS = re.compile(r"(?P<a>[0-9]{1,18})-(?P<b>[0-9]{1,18})")
_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})

Who = Literal["anyone", "node", "center", "admin"]
"""Who may, beside an admin. `node`: that node alone; `center`: the center alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that the hub knows. `{node}` and `{pipeline}` in the template are what tokens are held against."""

    methods: tuple[str, ...]
    template: str
    who: frozenset[Who]
    blob: bool = False
    """The body, or the answer, is a blob."""
    polls: bool = False
    """May wait for news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A call with the names that stand in its path."""

    call: Call
    method: str
    names: Mapping[str, str]

    @property
    def label(self) -> str:
        """For logs and metrics: one of a few."""
        return self.call.template


@dataclass(frozen=True, slots=True, kw_only=True)
class BadName:
    """A part of the path is not a name."""

    part: str
    """Safe to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nowhere:
    """There is no such call. `allowed`: the methods by which the path can be asked for."""

    allowed: tuple[str, ...] = ()


Found: TypeAlias = Place | BadName | Nowhere


def _call(methods: str, path: str, *who: Who, blob: bool = False, polls: bool = False) -> Call:
    return Call(methods=tuple(methods.split()), template=path, who=frozenset(who), blob=blob, polls=polls)


_NODE = API + "/pipelines/{pipeline}/nodes/{node}"
HEALTHZ: Final = "/healthz"
METRICS: Final = "/metrics"
CALLS: Final = (
    _call("GET HEAD", HEALTHZ, "anyone"),
    _call("GET", METRICS, "center"),
    _call("POST", API + "/blobs/missing", "node", "center"),
    _call("PUT GET HEAD", API + "/blobs/{digest}", "node", "center", blob=True),
    _call("POST", _NODE + "/epochs/{epochs}", "node"),
    _call("POST", _NODE + "/lease", "node"),
    _call("GET", _NODE + "/head", "node", "center"),
    _call("GET", _NODE + "/checkpoint", "node", "center"),
    _call("GET", API + "/pipelines/{pipeline}/streams/{stream}/epochs", "center", polls=True),
    _call("GET PUT DELETE", API + "/pipelines/{pipeline}/consumers/{consumer}", "center"),
    _call("POST", API + "/pipelines/{pipeline}/control/{control}", "center"),
    _call("GET", API + "/pipelines/{pipeline}/control/{control}", "node", "center", polls=True),
    _call("PUT", API + "/nodes/{node}/health/{pipeline}", "node"),
    _call("GET", API + "/nodes", "center"),
    _call("GET", API + "/streams", "center"),
    _call("GET", API + "/epochs", "center"),
)
_BY_LENGTH: Final = {
    length: tuple((tuple(call.template.split("/")[1:]), call) for call in CALLS if call.template.count("/") == length)
    for length in {call.template.count("/") for call in CALLS}
}


def find(method: str, path: bytes) -> Found:
    """What is asked for. `path` is as it was sent, before anything was decoded."""
    if path == b"/":
        return Nowhere()
    parts = path.split(b"/")[1:] if path.startswith(b"/") else [path]
    for part in parts:
        if _NAME.fullmatch(part) is None or b".." in part:
            return BadName(part=part[:100].decode("ascii", "backslashreplace"))
    if len(path) > PATH_CHARS_MAX:
        return BadName(part=path[:100].decode("ascii"))
    words = [part.decode("ascii") for part in parts]
    allowed: list[str] = []
    odd: str | None = None
    for template, call in _BY_LENGTH.get(len(words), ()):
        names = _names(template, words)
        if names is None:
            continue
        if "digest" in names and _DIGEST.fullmatch(names["digest"]) is None:
            odd = names["digest"]
            continue
        if method in call.methods:
            return Place(call=call, method=method, names=names)
        allowed += call.methods
    if odd is not None and not allowed:
        return BadName(part=odd)
    return Nowhere(allowed=tuple(dict.fromkeys(allowed)))


def known_method(method: str) -> str:
    """The method as a label: one of a few."""
    return method if method in _METHODS else "other"


def why_not(token: Token, place: Place) -> str | None:
    """Why this token may not ask for this place; None: it may."""
    call, role = place.call, token.role
    if role == "admin" or "anyone" in call.who:
        return None
    if role not in call.who:
        return f"a token of role {role} may not {place.method} {place.label}"
    node, pipeline = place.names.get("node"), place.names.get("pipeline")
    if role == "node" and node is not None and node != token.node:
        return f"the token {token.name} is for node {token.node}, not for {node}"
    if token.pipelines is None:
        return None
    if pipeline is not None and pipeline not in token.pipelines:
        return f"the token {token.name} is for other pipelines than {pipeline}"
    if pipeline is None and not call.blob and "/blobs/" not in call.template:
        return f"the token {token.name} is for some pipelines only, and {place.label} shows all"
    return None


def epochs_in(place: Place) -> int:
    """How many epochs a commit is about, by its path."""
    found = _EPOCHS.fullmatch(place.names.get("epochs", ""))
    return 0 if found is None else max(0, int(found["b"]) - int(found["a"]) + 1)


def _names(template: tuple[str, ...], words: list[str]) -> dict[str, str] | None:
    """The names in a path of this template; None: it is of another."""
    names = {}
    for pattern, word in zip(template, words, strict=True):
        if pattern.startswith("{"):
            names[pattern[1:-1]] = word
        elif pattern != word:
            return None
    return names
