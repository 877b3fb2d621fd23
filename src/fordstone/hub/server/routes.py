"""The hub's one table of routes: method, path, roles, limits and handler. Starlette's routes are made from it.

Every part of a path must be a plain name before anything else is looked at, so that `..`, escapes, NUL and look-alike
letters end here. No name needs an escape, so nothing is decoded. Handlers take names and digests from the path as checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from fordstone.epochs.run_file import is_digest
from fordstone.hub.messages import API, Rejection
from fordstone.hub.server.handlers import Handlers
from fordstone.plan.ids import NAME_PATTERN

Role: TypeAlias = Literal["anyone", "node", "center"]
"""An admin may use every route; `node`: that node alone; `anyone`: even without a token."""
METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
PATH_CHARS_MAX: Final = 1_000
SMALL_BYTES_MAX: Final = 64 << 10
"""Maximum size of a body, unless the route says otherwise: a lease, a report, the number of a version."""
LIST_BYTES_MAX: Final = 1 << 20
"""Maximum size of a list of digests, of which clients send 10,000 at a time, and of the nodes whose epochs are asked for."""
POSITIONS_BYTES_MAX: Final = 4 << 20
"""Maximum size of the positions of a consumer: twice what the maximum number of them takes with the longest names."""
_PART: Final = re.compile(NAME_PATTERN.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRoute:
    """One row of the table. Tokens are compared with `{node}` and `{pipeline}` of the path."""

    method: str
    path: str
    roles: frozenset[Role]
    handler: str
    """A method of `Handlers`, which gets the names in the path as arguments."""
    blob: bool = False
    """The body or the response is a blob, with the limit of blobs."""
    body_bytes_max: int | None = SMALL_BYTES_MAX
    """Maximum size of the JSON body; None: the hub's limit (`--body-max`), which bounds the others, too."""
    polls: bool = False
    """The request may ask to wait, and then takes a slot of the long polls."""


def _route(method: str, path: str, roles: str, handler: str, **more: Any) -> HubRoute:
    chosen: frozenset[Any] = frozenset(roles.split())
    return HubRoute(method=method, path=path, roles=chosen, handler=handler, **more)


_BLOB: Final = API + "/blobs/{digest}"
_NODE: Final = API + "/pipelines/{pipeline}/nodes/{node}"
_STREAM: Final = API + "/pipelines/{pipeline}/streams/{stream}"
_CONSUMER: Final = API + "/pipelines/{pipeline}/consumers/{consumer}"
_CONTROL: Final = API + "/pipelines/{pipeline}/control/{control}"
ROUTES: Final = (
    _route("GET", "/healthz", "anyone", "healthz"),
    _route("HEAD", "/healthz", "anyone", "healthz"),
    _route("GET", "/metrics", "center", "render_metrics"),
    _route("POST", API + "/blobs/missing", "node center", "missing_blobs", body_bytes_max=LIST_BYTES_MAX),
    _route("PUT", _BLOB, "node center", "put_blob", blob=True),
    _route("GET", _BLOB, "node center", "get_blob", blob=True),
    _route("HEAD", _BLOB, "node center", "head_blob", blob=True),
    _route("POST", _NODE + "/epochs/{epochs}", "node", "commit", body_bytes_max=None),
    _route("POST", _NODE + "/lease", "node", "lease"),
    _route("GET", _NODE + "/head", "node center", "head"),
    _route("GET", _NODE + "/checkpoint", "node center", "checkpoint"),
    _route("PUT", _NODE + "/quarantine", "center", "quarantine"),
    _route("DELETE", _NODE + "/quarantine", "", "release"),
    _route("POST", _NODE + "/skip", "", "skip"),
    _route("POST", _NODE + "/forget", "", "forget_node"),
    _route("POST", _STREAM + "/forget", "", "forget_stream"),
    _route("GET", _STREAM + "/nodes", "center", "stream_nodes", polls=True),
    _route("POST", _STREAM + "/epochs", "center", "stream_epochs", body_bytes_max=LIST_BYTES_MAX),
    _route("GET", _CONSUMER, "center", "position"),
    _route("PUT", _CONSUMER, "center", "save_position", body_bytes_max=POSITIONS_BYTES_MAX),
    _route("DELETE", _CONSUMER, "center", "remove_consumer"),
    _route("POST", _CONTROL, "center", "publish"),
    _route("GET", _CONTROL, "node center", "control_page", polls=True),
    _route("PUT", API + "/nodes/{node}/health/{pipeline}", "node", "save_health"),
    _route("GET", API + "/nodes", "center", "nodes"),
    _route("GET", API + "/streams", "center", "streams"),
    _route("GET", API + "/epochs", "center", "epochs"),
    _route("POST", API + "/scrub", "", "scrub_piece"),
    _route("GET", API + "/damaged", "center", "damaged_blobs"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """The route of a request, and the names in its path."""

    route: HubRoute
    starlette: Route
    params: Mapping[str, str]


class Routes:
    """The table with its handlers bound, for one hub."""

    def __init__(self, handlers: Handlers) -> None:
        self._routes: Sequence[tuple[HubRoute, Route]] = [
            (route, Route(route.path, _endpoint(handlers, route.handler), methods=[route.method])) for route in ROUTES
        ]

    def match(self, scope: dict[str, Any]) -> Matched | Rejection:
        """Find the route of a request; else a rejection, to be raised once the client is known to have access.

        A path in which a part is no name is rejected (`bad_name`) before it is compared with anything.
        """
        try:
            check_path(scope.get("raw_path") or scope["path"].encode())
        except Rejection as rejection:
            return rejection
        method, allowed, wrong_digest = scope["method"], dict[str, None](), None
        for route, starlette in self._routes:
            match, child = starlette.matches(scope)
            if match is Match.NONE:
                continue
            params: dict[str, str] = child["path_params"]
            if "digest" in params and not is_digest(params["digest"]):
                wrong_digest = params["digest"]
                continue
            if route.method == method:
                return Matched(route=route, starlette=starlette, params=params)
            allowed[route.method] = None
        if allowed:
            listed = ", ".join(allowed)
            return Rejection(
                "bad_request", f"this path has the methods {listed} only.", status=405, headers={"allow": listed}
            )
        if wrong_digest is not None:
            return _bad_name(wrong_digest)
        return Rejection("not_found", "the hub has no such route. Is this the hub's URL, without a path?")


def _endpoint(handlers: Handlers, name: str) -> Any:
    handler = getattr(handlers, name)

    async def endpoint(request: Request) -> Response:
        response: Response = await handler(request, **request.path_params)
        return response

    return endpoint


def check_path(path: bytes) -> None:
    """Reject a path in which a part is no name. `path` is as it was sent, before anything was decoded."""
    if path == b"/":
        return
    for part in path.split(b"/")[1:] if path.startswith(b"/") else [path]:
        if _PART.fullmatch(part) is None:
            raise _bad_name(part[:100].decode("ascii", "backslashreplace"))
    if len(path) > PATH_CHARS_MAX:
        raise _bad_name(path[:100].decode("ascii"))


def _bad_name(part: str) -> Rejection:
    return Rejection(
        "bad_name",
        f"{part!r} in the path is not a name: 1 to 100 letters, digits, '_', '-' or single '.', "
        "beginning with none of '.-', and without escapes; a blob's name is its sha256 in hex.",
    )
