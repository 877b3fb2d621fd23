"""The middleware before the hub's handlers: authentication, limits, timeouts, rejections and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from fordstone.hub.messages import Refusal, Rejection
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.hub.server.connection import CONNECTION
from fordstone.hub.server.limits import ALL_LINES_AT_ONCE, LINES_AT_ONCE, SHARED_TIMES, Limits
from fordstone.hub.server.metrics import HubMetrics
from fordstone.hub.server.middleware import HubMiddleware
from fordstone.hub.server.routes import Routes

DIGEST = "ab" * 32
BLOB = f"/v1/blobs/{DIGEST}"
SECONDS_MAX = 20.0
LIMITS = Limits(blob_bytes_max=1000, body_bytes_max=100, chunk_seconds_max=5.0)
Pieces = list[bytes | float]


@dataclass
class Answered:
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def refusal(self) -> Refusal:
        return msgspec.json.decode(self.body, type=Refusal)


class _SameHandler:
    """Stands for all handlers of the table."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return lambda request, **_: self._handler(request)


@dataclass
class Front:
    """The middleware over the real routes, whose handlers all read the body, with a clock that only tests move."""

    data: Path
    limits: Limits = LIMITS
    handler: Callable[[Request], Awaitable[Response]] | None = None
    now_s: float = 0.0
    seen: list[Any] = field(default_factory=list)
    metrics: HubMetrics = field(default_factory=HubMetrics)
    aborted: int = 0
    owners: list[tuple[str | None, int]] = field(default_factory=list)
    """Who the connection was said to belong to, and how many it may have."""
    connections_left: bool = True
    unsent_bytes: int = 0
    """What its connection has not sent yet."""

    def __post_init__(self) -> None:
        async def no_lifespan(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

        self.middleware = HubMiddleware(
            Routes(cast("Any", _SameHandler(self.handler or self.reading))),
            lifespan=no_lifespan,
            tokens=Tokens(TokenFile(self.data), clock_s=lambda: self.now_s, clock_us=lambda: 0),
            limits=self.limits,
            metrics=self.metrics,
            clock_s=lambda: self.now_s,
        )

    async def reading(self, request: Request) -> Response:
        try:
            size = len(await request.body())
        except Rejection:
            self.seen.append("rejected")
            raise
        self.seen.append(size)
        return Response(b"%d" % size, 201)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"fordstone_hub_{name}", labels)

    def abort(self) -> None:
        self.aborted += 1

    def belongs_to(self, owner: str | None, most: int) -> bool:
        self.owners.append((owner, most))
        return self.connections_left

    async def ask(
        self,
        method: str = "GET",
        path: str | bytes = "/v1/nodes",
        *,
        token: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        body: Pieces | None = None,
        query: bytes = b"",
        peer: str = "127.0.0.1",
        send: Callable[[Any], Awaitable[None]] | None = None,
    ) -> Answered:
        """Ask once. A number among the pieces of the body is a delay in seconds; infinity: nothing more comes."""
        pieces = list(body or [b""])
        sent: list[Any] = []

        async def receive() -> Any:
            while pieces and isinstance(pieces[0], float):
                wait = pieces.pop(0)
                assert isinstance(wait, float)
                if wait == float("inf"):
                    await asyncio.Event().wait()
                self.now_s += wait
            if not pieces:
                return {"type": "http.disconnect"}
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def keep(message: Any) -> None:
            sent.append(message)

        if token is not None:
            headers = (*headers, (b"authorization", f"Bearer {token}".encode()))
        raw = path if isinstance(path, bytes) else path.encode()
        scope = {
            "type": "http", "method": method, "raw_path": raw, "path": raw.decode("latin-1"), "root_path": "", "query_string": query,
            "headers": list(headers), "client": (peer, 1), "extensions": {CONNECTION: {"connection": self}},
        }  # fmt: skip
        await self.middleware(scope, receive, send or keep)
        if not sent:
            return Answered(0, {}, b"")
        assert [one["type"] for one in sent[:2]] == ["http.response.start", "http.response.body"]
        return Answered(sent[0]["status"], dict(sent[0]["headers"]), b"".join(one.get("body", b"") for one in sent[1:]))


def asked(front: Front, *args: Any, **kwargs: Any) -> Answered:
    return asyncio.run(front.ask(*args, **kwargs))


def secret(data: Path, name: str = "t", **facts: Any) -> str:
    return TokenFile(data).add(name, now_us=0, **{"role": "admin", **facts})


@pytest.mark.parametrize(
    "path",
    [
        "/v1/pipelines/../nodes/n/head",
        "/v1/pipelines/%2e%2e/nodes/n/head",
        "/v1/pipelines/..%2f..%2fetc/nodes/n/head",
        "/v1/pipelines/p%00/nodes/n/head",
        b"/v1/pipelines/p\x00/nodes/n/head",
        "/v1/pipelines/pä/nodes/n/head",
        "/v1/pipelines/p%C3%A4/nodes/n/head",
        "/v1/pipelines/a..b/nodes/n/head",
        "/v1/pipelines/.a/nodes/n/head",
        "/v1/pipelines//nodes/n/head",
        "/v1/nodes/",
        "//v1/nodes",
        "/v1/pipelines/" + "p" * 101 + "/nodes/n/head",
        "/v1" * 400,
        "/v1/pipelines/p /nodes/n/head",
        "/v1/pipelines/p\\..\\x/nodes/n/head",
        "/v1/blobs/abc",
        "/v1/blobs/" + "AB" * 32,
        "/v1/blobs/" + "ab" * 33,
        "*",
        "v1/nodes",
    ],
)
def test_a_path_with_anything_but_names_is_refused_and_reaches_no_handler(tmp_path, path):
    front = Front(tmp_path)
    answered = asked(front, "GET", path)
    assert (answered.status, answered.refusal.error) == (400, "bad_name")
    token = secret(tmp_path)
    front.now_s += 2
    assert asked(front, "GET", path).status == 401
    assert asked(front, "GET", path, token=token).status == 400
    assert front.seen == []


def test_without_any_token_the_hub_is_open(tmp_path):
    assert asked(Front(tmp_path)).status == 201


@pytest.mark.parametrize(
    "authorization",
    [None, b"", b"Bearer", b"Bearer ", b"Bearer fst_" + b"A" * 43, b"Basic dXNlcjpwdw==", b"Bearer \xff\xfe", b"fst_x"],
)
def test_a_missing_or_wrong_token_is_401_and_says_how_to_mend_it(tmp_path, authorization):
    text = secret(tmp_path)
    front = Front(tmp_path)
    headers = () if authorization is None else ((b"authorization", authorization),)
    answered = asked(front, headers=headers)
    assert (answered.status, answered.refusal.error) == (401, "unauthorised")
    assert answered.headers[b"www-authenticate"].startswith(b"Bearer")
    assert "--token-file" in answered.refusal.message
    assert front.seen == []
    assert asked(front, token=text).status == 201


def test_a_revoked_token_is_401(tmp_path):
    text = secret(tmp_path)
    TokenFile(tmp_path).revoke("t", now_us=1)
    answered = asked(Front(tmp_path), token=text)
    assert answered.status == 401
    assert "has been revoked" in answered.refusal.message


def test_two_tokens_in_one_request_are_none(tmp_path):
    text = secret(tmp_path)
    header = (b"authorization", f"Bearer {text}".encode())
    assert asked(Front(tmp_path), headers=(header, header)).status == 401


def test_the_right_token_in_the_wrong_place_is_403(tmp_path):
    text = secret(tmp_path, role="node", node="n1")
    front = Front(tmp_path)
    answered = asked(front, "POST", "/v1/pipelines/p/nodes/n2/lease", token=text)
    assert (answered.status, answered.refusal.error) == (403, "forbidden")
    assert "for node n1, not for n2" in answered.refusal.message
    assert asked(front, "POST", "/v1/pipelines/p/nodes/n1/lease", token=text).status == 201
    assert front.seen == [0]


def test_no_answer_and_no_log_line_has_the_token(tmp_path, caplog):
    text = secret(tmp_path, role="node", node="n1")
    wrong = "fst_" + "B" * 43
    front = Front(tmp_path)
    with caplog.at_level(logging.DEBUG):
        for token in (text, wrong):
            for path in ("/v1/nodes", "/v1/pipelines/p/nodes/n1/head", "/v1/nothing", "/v1/.."):
                answered = asked(front, path=path, token=token)
                assert token.encode() not in answered.body
                assert all(token.encode() not in value for value in answered.headers.values())
    assert len(caplog.records) >= 8
    assert not any(token in str(vars(record)) for record in caplog.records for token in (text, wrong))


def test_health_is_open_and_metrics_are_not(tmp_path):
    node, center = secret(tmp_path, "n", role="node", node="n"), secret(tmp_path, "c", role="center")
    front = Front(tmp_path)
    assert asked(front, path="/healthz").status == 201
    assert asked(front, path="/metrics").status == 401
    assert asked(front, path="/metrics", token=node).status == 403
    assert asked(front, path="/metrics", token=center).status == 201


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/v1/nothing"), ("PUT", "/v1/a/b/c/d/e/f/g/h")])
def test_what_is_not_there_is_404(tmp_path, method, path):
    answered = asked(Front(tmp_path), method, path)
    assert (answered.status, answered.refusal.error) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", BLOB, b"PUT, GET, HEAD"),
        ("GET", "/v1/blobs/missing", b"POST"),
        ("BREW", "/v1/pipelines/p/control/c", b"POST, GET"),
        ("OPTIONS", "/v1/nodes", b"GET"),
    ],
)
def test_another_method_is_405_and_says_which_are_allowed(tmp_path, method, path, allow):
    answered = asked(Front(tmp_path), method, path)
    assert (answered.status, answered.refusal.error, answered.headers[b"allow"]) == (405, "bad_request", allow)


@pytest.mark.parametrize(("method", "path", "most"), [("PUT", BLOB, 1000), ("POST", "/v1/blobs/missing", 100)])
def test_bodies_are_bounded_by_kind_before_and_while_they_come(tmp_path, method, path, most):
    front = Front(tmp_path)
    headers = ((b"content-length", b"%d" % (most + 1)),)
    answered = asked(front, method, path, headers=headers, body=[b"x" * (most + 1)])
    assert (answered.status, answered.refusal.error) == (413, "too_large")
    assert front.seen == []
    answered = asked(front, method, path, body=[b"x" * most, b"x", b"y"])
    assert (answered.status, answered.refusal.error) == (413, "too_large")
    assert front.seen == ["rejected"]
    assert asked(front, method, path, body=[b"x" * (most - 1), b"x"]).status == 201
    assert front.seen == ["rejected", most]


@pytest.mark.parametrize("length", [b"-1", b"abc", b"1e3", b"", b"1,1", b"\xb2"])
def test_a_content_length_that_is_no_number_is_refused(tmp_path, length):
    answered = asked(Front(tmp_path), "PUT", BLOB, headers=((b"content-length", length),))
    assert (answered.status, answered.refusal.error) == (400, "bad_request")


def test_a_content_length_with_very_many_digits_is_only_too_large(tmp_path):
    answered = asked(Front(tmp_path), "PUT", BLOB, headers=((b"content-length", b"9" * 10_000),))
    assert answered.status == 413


@pytest.mark.parametrize("encoding", [b"gzip", b"zstd", b"identity, gzip", b"br"])
def test_nothing_is_decompressed(tmp_path, encoding):
    answered = asked(Front(tmp_path), "PUT", BLOB, headers=((b"content-encoding", encoding),))
    assert (answered.status, answered.refusal.error) == (415, "bad_request")
    assert asked(Front(tmp_path), "PUT", BLOB, headers=((b"content-encoding", b"identity"),)).status == 201


def test_a_body_that_stops_coming_is_408(tmp_path):
    front = Front(tmp_path, limits=replace(LIMITS, chunk_seconds_max=0.01))
    answered = asked(front, "PUT", BLOB, body=[b"x", float("inf"), b"y"])
    assert answered.status == 408
    assert "too slowly" in answered.refusal.message
    assert front.seen == ["rejected"]


def test_a_body_that_drips_is_408_although_it_never_stops(tmp_path):
    front = Front(tmp_path)
    drip: Pieces = [piece for _ in range(30) for piece in (b"x", 1.0)]
    answered = asked(front, "PUT", BLOB, body=[*drip, b"y"])
    assert answered.status == 408
    assert front.seen == ["rejected"]
    assert front.now_s < 15


def test_a_body_that_drips_after_a_quick_start_is_408(tmp_path):
    front = Front(tmp_path, limits=replace(LIMITS, blob_bytes_max=1 << 20, bytes_per_s_min=1_024))
    drip: Pieces = [piece for _ in range(60) for piece in (b"x", 1.0)]
    answered = asked(front, "PUT", BLOB, body=[b"x" * 1_000_000, *drip, b"y"])
    assert (answered.status, front.seen) == (408, ["rejected"])
    assert front.now_s < 25


def test_a_body_on_a_slow_line_is_taken(tmp_path):
    front = Front(tmp_path, limits=replace(LIMITS, bytes_per_s_min=10))
    steady: Pieces = [piece for _ in range(40) for piece in (b"x" * 20, 1.0)]
    assert asked(front, "PUT", BLOB, body=[*steady, b"y"]).status == 201


def test_a_client_that_goes_away_is_counted_and_gets_no_answer(tmp_path, caplog):
    front = Front(tmp_path)

    async def ask() -> list[Any]:
        sent: list[Any] = []
        messages = iter([{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "PUT",
            "raw_path": BLOB.encode(),
            "path": BLOB,
            "headers": [],
            "client": None,
        }
        await front.middleware(scope, receive, send)
        return sent

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(ask()) == []
    assert caplog.records == []
    assert front.value("disconnects_total") == 1


def test_an_answer_that_nobody_takes_cuts_the_connection_off(tmp_path):
    front = Front(tmp_path, limits=replace(LIMITS, chunk_seconds_max=0.01))

    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    asyncio.run(front.ask(send=stuck))
    assert front.aborted == 1


def test_a_token_that_asks_too_often_is_429_and_others_are_not(tmp_path):
    first, second = secret(tmp_path, "a", role="node", node="a"), secret(tmp_path, "b", role="node", node="b")
    front = Front(tmp_path, limits=replace(LIMITS, rate_per_s=2.0, burst_s=1.0))
    path = "/v1/pipelines/p/nodes/{}/head"

    def status(token: str, node: str) -> int:
        return asked(front, path=path.format(node), token=token).status

    assert [status(first, "a") for _ in range(3)] == [201, 201, 429]
    answered = asked(front, path=path.format("a"), token=first)
    assert answered.refusal.error == "too_many_requests"
    assert int(answered.headers[b"retry-after"]) >= 1
    assert status(second, "b") == 201
    front.now_s += 0.5
    assert [status(first, "a") for _ in range(2)] == [201, 429]


def test_guessing_tokens_is_slowed_by_peer_and_does_not_slow_those_who_have_one(tmp_path):
    text = secret(tmp_path)
    front = Front(tmp_path, limits=replace(LIMITS, rate_per_s=1.0, burst_s=2.0))
    guesses = [asked(front, token="fst_" + "C" * 43, peer="10.0.0.1").status for _ in range(4)]
    assert guesses == [401, 401, 429, 429]
    assert asked(front, token=text, peer="10.0.0.1").status == 201


@pytest.mark.parametrize("path", ["/v1/..", "/v1/nothing", BLOB.upper(), "/v1/nodes"])
def test_requests_count_against_the_rate_whatever_else_is_wrong_with_them(tmp_path, path):
    text = secret(tmp_path)
    front = Front(tmp_path, limits=replace(LIMITS, rate_per_s=1.0, burst_s=2.0))
    assert [asked(front, path=path).status for _ in range(4)] == [401, 401, 429, 429]
    statuses = [asked(front, "BREW", path, token=text).status for _ in range(2 * SHARED_TIMES + 1)]
    assert statuses[-1] == 429
    assert 429 not in statuses[:-1]


def test_peers_of_one_ipv6_network_have_one_rate(tmp_path):
    secret(tmp_path)
    front = Front(tmp_path, limits=replace(LIMITS, rate_per_s=1.0, burst_s=2.0))
    assert [asked(front, peer=f"2001:db8::{end}").status for end in (1, 2, 3)] == [401, 401, 429]
    assert asked(front, peer="2001:db8:0:1::1").status == 401


def test_rejections_are_logged_some_per_second_and_all_are_counted(tmp_path, caplog):
    secret(tmp_path)
    front = Front(tmp_path)
    with caplog.at_level(logging.INFO, logger="fordstone.hub.server.middleware"):
        for _ in range(30):
            asked(front, peer="192.0.2.1")
        assert len(caplog.records) == LINES_AT_ONCE
        for peer in range(100):
            asked(front, peer=f"198.51.100.{peer}")
        assert len(caplog.records) == ALL_LINES_AT_ONCE
        front.middleware.log_left_out()
        front.middleware.log_left_out()
        assert len(caplog.records) == ALL_LINES_AT_ONCE + 1
        front.now_s += 10
        asked(front, peer="192.0.2.1")
        assert vars(caplog.records[-1])["error"] == "unauthorised"
    said = vars(caplog.records[-2])
    assert (said["rejections"], said["callers"]["peer 192.0.2.1"]) == (80, 20)
    assert len(said["callers"]) == 10
    assert front.value("rejections_total", error="unauthorised") == 131


def test_callers_without_a_token_do_not_hide_what_is_logged_of_those_with_one(tmp_path, caplog):
    text = secret(tmp_path, role="node", node="n")
    front = Front(tmp_path)
    for peer in range(100):
        asked(front, peer=f"198.51.100.{peer}")
    with caplog.at_level(logging.INFO, logger="fordstone.hub.server.middleware"):
        asked(front, token=text)
    assert [vars(record)["error"] for record in caplog.records] == ["forbidden"]


def test_a_connection_belongs_to_the_token_that_it_shows(tmp_path):
    front = Front(tmp_path)
    asked(front)
    assert front.owners == [("peer 127.0.0.1", LIMITS.node_connections_max * SHARED_TIMES)], (
        "without tokens, to all here"
    )
    asked(front, headers=((b"origin", b"https://evil.example"),))
    node, center = secret(tmp_path, "n", role="node", node="n"), secret(tmp_path, "c", role="center")
    front.now_s += 2
    front.owners.clear()
    for token in (node, center, None, "fst_" + "C" * 43):
        asked(front, path="/healthz", token=token)
    assert [owner for owner, _ in front.owners] == ["token n", "token c", None, None]
    assert [most for _, most in front.owners[:2]] == [
        LIMITS.node_connections_max,
        LIMITS.node_connections_max * SHARED_TIMES,
    ]
    front.connections_left = False
    no = asked(front, path=BLOB, token=node)
    assert (no.status, no.headers[b"connection"], no.refusal.error) == (429, b"close", "too_many_requests")


def test_the_bytes_per_hour_of_a_token_are_bounded_and_it_goes_on_at_that_rate(tmp_path):
    node, other = (secret(tmp_path, name, role="node", node=name) for name in ("n", "other"))
    front = Front(tmp_path, limits=replace(LIMITS, bytes_per_hour=3_600))

    def put(size: int, token: str = node, *, announced: bool = True) -> Answered:
        headers = ((b"content-length", b"%d" % size),) if announced else ()
        return asked(front, "PUT", BLOB, body=[b"x" * size], token=token, headers=headers)

    for announced in (True, False, True):
        assert put(1000, announced=announced).status == 201
    assert put(1000).status == 201, "what is larger than what is left is owed"
    no = put(1)
    assert (no.status, no.refusal.error) == (429, "too_many_requests")
    assert "--bytes-per-hour" in no.refusal.message
    wait_s = int(no.headers[b"retry-after"])
    assert 400 <= wait_s <= 420
    assert put(1000, other).status == 201
    assert asked(front, token=node, path=BLOB).status == 429, "what is read counts too"
    front.now_s += wait_s
    assert put(1000).status == 201, "a node that has much to send goes on"


def test_bytes_that_did_not_come_are_given_back(tmp_path):
    node = secret(tmp_path, "n", role="node", node="n")
    front = Front(tmp_path, limits=replace(LIMITS, bytes_per_hour=3_600, chunk_seconds_max=0.01))
    for _ in range(9):
        headers = ((b"content-length", b"1000"),)
        assert asked(front, "PUT", BLOB, body=[float("inf")], token=node, headers=headers).status == 408


def test_a_center_has_the_bytes_of_many_nodes(tmp_path):
    center = secret(tmp_path, "c", role="center")
    front = Front(tmp_path, limits=replace(LIMITS, bytes_per_hour=1_000))
    statuses = [asked(front, "PUT", BLOB, body=[b"x" * 1000], token=center).status for _ in range(SHARED_TIMES + 1)]
    assert statuses == [201] * SHARED_TIMES + [429]


def test_bodies_in_memory_are_bounded_in_all_and_per_node(tmp_path):
    greedy, other = (secret(tmp_path, name, role="node", node=name) for name in ("greedy", "other"))

    async def go() -> None:
        release, inside = asyncio.Event(), asyncio.Semaphore(0)

        async def handler(request: Request) -> Response:
            await request.body()
            inside.release()
            await release.wait()
            return Response()

        limits = replace(LIMITS, memory_bytes_max=3_000, node_memory_bytes_max=2_000)
        front = Front(tmp_path, limits=limits, handler=handler)

        def put(token: str) -> asyncio.Task[Answered]:
            return asyncio.create_task(front.ask("PUT", BLOB, token=token, body=[b"x" * 500, b"x" * 500]))

        held = [put(greedy), put(greedy)]
        for _ in held:
            await inside.acquire()
        no = await asyncio.wait_for(put(greedy), SECONDS_MAX)
        assert (no.status, no.refusal.error, no.headers[b"retry-after"]) == (503, "too_many_requests", b"1")
        held.append(put(other))
        await inside.acquire()
        assert front.value("body_memory_bytes") == 3_000
        assert (await asyncio.wait_for(put(other), SECONDS_MAX)).status == 503, "there is no more for anybody"
        release.set()
        assert {(await one).status for one in held} == {200}
        assert front.value("body_memory_bytes") == 0
        assert (await put(greedy)).status == 200

    asyncio.run(go())


def test_of_a_large_blob_only_what_is_in_memory_counts(tmp_path):
    limits = replace(LIMITS, blob_bytes_max=10 << 20, memory_bytes_max=7 << 20)
    front = Front(tmp_path, limits=limits)
    assert asked(front, "PUT", BLOB, body=[b"x" * (1 << 20)] * 10).status == 201
    assert front.value("body_memory_bytes") == 0


def test_a_large_response_that_finds_no_memory_is_503_before_anything_is_sent(tmp_path):
    async def handler(request: Request) -> Response:
        return Response(b"x" * 100_000)

    front = Front(tmp_path, limits=replace(LIMITS, memory_bytes_max=150_000), handler=handler)
    assert asked(front).status == 503
    assert asked(front, "HEAD", BLOB).status == 200
    front = Front(tmp_path, limits=replace(LIMITS, memory_bytes_max=200_000), handler=handler)
    assert asked(front).status == 200


SMALL = 64 << 10


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [
        ("POST", "/v1/pipelines/p/nodes/n/lease", SMALL),
        ("PUT", "/v1/nodes/n/health/p", SMALL),
        ("POST", "/v1/pipelines/p/control/c", SMALL),
        ("GET", "/v1/nodes", SMALL),
        ("GET", "/healthz", SMALL),
        ("POST", "/v1/blobs/missing", 1 << 20),
        ("POST", "/v1/pipelines/p/nodes/n/epochs/1-2", 16 << 20),
        ("PUT", BLOB, 256 << 20),
    ],
)
def test_each_route_has_a_bound_for_its_body(tmp_path, method, path, most):
    front = Front(tmp_path, limits=Limits())

    def status(size: int) -> int:
        return asked(front, method, path, headers=((b"content-length", b"%d" % size),)).status

    assert (status(most), status(most + 1)) == (201, 413)


def test_without_tokens_a_peer_has_the_rate_of_many_nodes(tmp_path):
    front = Front(tmp_path, limits=replace(LIMITS, rate_per_s=1.0, burst_s=1.0))
    answers = [asked(front, peer="10.0.0.1").status for _ in range(SHARED_TIMES + 1)]
    assert answers == [201] * SHARED_TIMES + [429]
    assert asked(front, peer="10.0.0.2").status == 201


def test_requests_and_polls_have_room_apart_from_each_other(tmp_path):
    stream = "/v1/pipelines/p/streams/s/nodes"

    async def go() -> None:
        started, release = asyncio.Event(), asyncio.Event()

        async def handler(request: Request) -> Response:
            started.set()
            await release.wait()
            return Response()

        front = Front(tmp_path, limits=replace(LIMITS, polls_max=1, requests_max=1), handler=handler)
        first = asyncio.create_task(front.ask(path=stream, query=b"after=0&wait=5"))
        await started.wait()
        assert front.value("polls_waiting") == 1
        busy = await front.ask(path=stream, query=b"after=0&wait=5")
        assert (busy.status, busy.refusal.error, busy.headers[b"retry-after"]) == (503, "too_many_requests", b"1")
        started.clear()
        second = asyncio.create_task(front.ask(path=stream, query=b"after=0"))
        await started.wait()
        assert (await front.ask()).status == 503
        release.set()
        assert [(await one).status for one in (first, second)] == [200, 200]
        assert [front.value("polls_waiting"), front.value("requests_running")] == [0, 0]
        assert (await front.ask()).status == 200

    asyncio.run(go())


def test_a_poll_takes_the_room_of_polls_however_its_wait_is_written(tmp_path):
    stream = "/v1/pipelines/p/streams/s/nodes"
    front = Front(tmp_path, limits=replace(LIMITS, polls_max=0, requests_max=1))
    assert asked(front, path=stream, query=b"after=0").status == 201
    for query in (b"wait=5", b"after=0&%77ait=5", b"w%61it=", b"a=wait&wait=1"):
        assert asked(front, path=stream, query=query).status == 503, query


def test_one_node_cannot_take_all_the_room(tmp_path):
    greedy, other = (secret(tmp_path, name, role="node", node=name) for name in ("greedy", "other"))
    center = secret(tmp_path, "center", role="center")
    control = "/v1/pipelines/p/control/c"

    async def go() -> None:
        release, inside = asyncio.Event(), asyncio.Semaphore(0)

        async def handler(request: Request) -> Response:
            inside.release()
            await release.wait()
            return Response()

        front = Front(tmp_path, limits=replace(LIMITS, node_requests_max=2, node_polls_max=1), handler=handler)
        asks: list[dict[str, Any]] = [{"path": BLOB}, {"path": BLOB}, {"path": control, "query": b"wait=5"}]
        taken = [asyncio.create_task(front.ask(token=greedy, **one)) for one in asks]
        for _ in taken:
            await inside.acquire()
        for one in asks[1:]:
            no = await front.ask(token=greedy, **one)
            assert (no.status, no.refusal.error, no.headers[b"retry-after"]) == (429, "too_many_requests", b"1")
            assert "token greedy" in no.refusal.message
        # Others have room, and a center, which stands for many nodes, has more of it.
        taken += [asyncio.create_task(front.ask(token=other, **one)) for one in asks]
        taken += [asyncio.create_task(front.ask(token=center, **asks[0])) for _ in range(5)]
        release.set()
        assert {(await one).status for one in taken} == {200}
        assert (await front.ask(token=greedy, **asks[0])).status == 200

    asyncio.run(go())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"origin", b"https://evil.example"),
        (b"origin", b"null"),
        (b"host", b"evil.example:7411"),
        (b"host", b"127.0.0.1.evil.example"),
        (b"host", b"localhost,evil.example"),
        (b"host", b""),
        (b"sec-fetch-site", b"cross-site"),
        (b"sec-fetch-site", b"same-site"),
        (b"Sec-Fetch-Site", b"Same-Origin"),
    ],
)
def test_a_web_page_gets_nothing_from_a_hub_without_tokens(tmp_path, name, value):
    front = Front(tmp_path)
    no = asked(front, "POST", "/v1/pipelines/p/control/c", headers=((name, value),))
    assert (no.status, no.refusal.error, front.seen) == (403, "forbidden", [])
    assert "token" in no.refusal.message
    token = secret(tmp_path)
    front.now_s += 2
    assert asked(front, headers=((name, value),), token=token).status == 201, "a page does not have the token"


@pytest.mark.parametrize("host", [b"127.0.0.1:7411", b"[::1]:7411", b"LOCALHOST", b"localhost:80", b"192.168.0.7"])
def test_programs_name_an_open_hub_by_its_address(tmp_path, host):
    assert asked(Front(tmp_path), headers=((b"host", host),)).status == 201


def test_a_person_who_types_the_address_of_an_open_hub_gets_an_answer(tmp_path):
    assert asked(Front(tmp_path), headers=((b"sec-fetch-site", b"none"),)).status == 201


def test_asking_for_health_without_a_token_has_the_rate_of_one(tmp_path):
    secret(tmp_path)
    front = Front(tmp_path, limits=replace(LIMITS, rate_per_s=1.0, burst_s=2.0))
    assert [asked(front, path="/healthz").status for _ in range(3)] == [201, 201, 429]


def test_every_answer_says_that_it_may_not_be_cached_nor_guessed_and_has_an_id(tmp_path):
    front = Front(tmp_path)
    ids = set()
    for path in ("/v1/nodes", "/healthz", "/metrics", "/nothing", "/../x"):
        headers = asked(front, path=path).headers
        assert headers[b"cache-control"] == b"no-store"
        assert headers[b"x-content-type-options"] == b"nosniff"
        ids.add(headers[b"x-request-id"])
    assert len(ids) == 5


def test_an_app_that_fails_is_500_with_the_id_under_which_the_log_says_why(tmp_path, caplog):
    async def handler(request: Request) -> Response:
        raise ZeroDivisionError("a bug")

    front = Front(tmp_path, handler=handler)
    with caplog.at_level(logging.ERROR):
        answered = asked(front)
    assert (answered.status, answered.refusal.error) == (500, "failed")
    assert "a bug" not in answered.refusal.message
    request_id = answered.headers[b"x-request-id"].decode()
    assert request_id in answered.refusal.message
    failed = next(record for record in caplog.records if record.getMessage().startswith("request failed"))
    assert vars(failed)["request"] == request_id
    assert "a bug" in caplog.text


def test_who_waits_for_leave_to_send_and_is_refused_is_cut_off(tmp_path):
    headers = ((b"expect", b"100-continue"), (b"content-length", b"5000"))
    answered = asked(Front(tmp_path), "PUT", BLOB, headers=headers)
    assert (answered.status, answered.headers[b"connection"]) == (413, b"close")


def test_web_sockets_are_closed(tmp_path):
    sent = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def receive() -> Any:
        return {}

    asyncio.run(Front(tmp_path).middleware({"type": "websocket"}, receive, send))
    assert sent == ["websocket.close"]


def test_requests_are_logged_with_names_but_refusals_only_as_loud_as_they_matter(tmp_path, caplog):
    front = Front(tmp_path)
    with caplog.at_level(logging.DEBUG, logger="fordstone.hub.server.middleware"):
        asked(front, path="/v1/pipelines/p/nodes/n1/head")
        asked(front, path="/v1/pipelines/%0a/nodes/n1/head")
    done, refused = caplog.records
    assert (done.levelno, vars(done)["route"], vars(done)["node"]) == (
        logging.DEBUG,
        "/v1/pipelines/{pipeline}/nodes/{node}/head",
        "n1",
    )
    assert (refused.levelno, vars(refused)["error"]) == (logging.INFO, "bad_name")


def test_metrics_count_what_passed(tmp_path):
    front = Front(tmp_path)
    asked(front, "PUT", BLOB, body=[b"x" * 40])
    asked(front, "POST", "/v1/pipelines/p/nodes/n/epochs/3-7", body=[b"{}"])
    asked(front, "BREW", "/nothing")
    blobs = {"method": "PUT", "route": "/v1/blobs/{digest}"}
    assert front.value("requests_total", **blobs, status="201") == 1
    assert front.value("requests_total", method="other", route="none", status="404") == 1
    assert front.value("rejections_total", error="not_found") == 1
    assert front.value("blob_bytes_in_total") == 40
    assert front.value("blob_bytes_out_total") == 2
    assert front.value("commits_total") == 1
    assert front.value("committed_epochs_total") == 5
    assert front.value("request_seconds_bucket", **blobs, le="+Inf") == 1
