"""Whatever is sent to a hub by mistake or on purpose, while a node commits: refused in words that help, nothing stays of it, no row is lost."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.two_tier import Fleet, Part

from fordstone.hub.server.auth import TokenFile

BOMB_BYTES = 32 << 20
GROWTH_BYTES_MAX = 64 << 20
"""By so much a hub may grow while it is sent several bombs; one that took them in as they come would need more."""
SLOW_S = 0.5
SLOW_CLIENTS = 40
SECONDS_MAX = 30.0
DIGEST = hashlib.sha256(b"rows").hexdigest()


@dataclass(kw_only=True)
class Place:
    """A hub with tokens, a node that has committed and still runs, and who asks."""

    fleet: Fleet
    hub: Part
    node: Part
    tokens: dict[str, str]

    def ask(self, method: str, path: str, body: bytes = b"", *headers: str, token: str = "north") -> Answered:
        head = self.head(method, path, f"Content-Length: {len(body)}", *headers, token=token)
        with self.connected() as sock:
            # A hub that has said no need not read the rest, and may close the connection before it was sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(head + body)
            return answer_of(sock)

    def head(self, method: str, path: str, *headers: str, token: str = "north") -> bytes:
        secret = self.tokens.get(token, token)
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
        if secret:
            lines.append(f"Authorization: Bearer {secret}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.fleet.port), SECONDS_MAX)

    def incoming(self) -> list[Path]:
        """What is left of uploads that did not come to their end."""
        return list((self.fleet.folder / "hub" / "data" / "blobs" / "incoming").iterdir())

    def memory_bytes(self) -> int:
        """The most that the hub ever had."""
        status = Path(f"/proc/{self.hub.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10

    def commits_on(self) -> None:
        """The node still gets its epochs to the hub."""
        before = self.fleet.head("north")
        self.fleet.feed_until(self.node, lambda: self.fleet.head("north") > before + 1, "commits")
        assert self.node.running, self.node.errors()


@dataclass(frozen=True, kw_only=True)
class Answered:
    status: int
    head: str
    error: str = ""
    message: str = ""


def answer_of(sock: socket.socket) -> Answered:
    data = b""
    try:
        while more := sock.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    assert head, "no answer"
    told = json.loads(body) if body else {}
    status = int(head.split(b" ", 2)[1])
    return Answered(
        status=status, head=head.decode().lower(), error=told.get("error", ""), message=told.get("message", "")
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("bad")
    with Fleet(folder, "north", seed=17) as fleet:
        file = TokenFile(folder / "hub" / "data")
        tokens = {
            "north": file.add("north", role="node", node="north", pipelines=("fleet",), now_us=1),
            "south": file.add("south", role="node", node="south", pipelines=("fleet",), now_us=1),
            "center": file.add("center", role="center", node=None, pipelines=(), now_us=1),
            "admin": file.add("admin", role="admin", node=None, pipelines=(), now_us=1),
            "old": file.add("old", role="node", node="north", pipelines=("fleet",), now_us=1),
        }
        file.revoke("old", now_us=2)
        fleet.token = tokens["admin"]
        for name, secret in tokens.items():
            (folder / f"{name}.token").write_text(secret)
        hub = fleet.hub(limits={"chunk_seconds_max": SLOW_S})
        fleet.feeds["north"].write(120)
        node = fleet.node("north", "--token-file", str(folder / "north.token"))
        node.until(lambda: fleet.head("north") > 1, "commits")
        yield Place(fleet=fleet, hub=hub, node=node, tokens=tokens)


HEAD = "/v1/pipelines/fleet/nodes/north/head"
NAMES = {
    "dots": "..",
    "escaped dots": "%2e%2e",
    "a path": "..%2f..%2fetc%2fpasswd",
    "NUL": "a%00b",
    "unicode": "caf%C3%A9",
    "right to left": "%E2%80%AEnorth",
    "a space": "a%20b",
    "too long": "a" * 101,
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize(
    "pattern", ["/v1/pipelines/{}/nodes/north/head", "/v1/pipelines/fleet/nodes/{}/head", "/v1/blobs/{}"]
)
def test_a_name_that_is_none_is_refused(pattern: str, name: str, place: Place) -> None:
    answered = place.ask("GET", pattern.format(name), token="admin")
    assert (answered.status, answered.error) == (400, "bad_name")
    assert "is not a name: 1 to 100 letters, digits" in answered.message


@pytest.mark.parametrize("path", ["/v1/blobs/caf\u00e9", "/v1/nodes\0", "/v1/no des"], ids=["unicode", "NUL", "space"])
def test_a_path_that_is_not_even_http_is_refused(path: str, place: Place) -> None:
    answered = place.ask("GET", path, token="admin")
    assert (answered.status, answered.error) == (400, "bad_request")
    assert answered.message


def test_names_inside_of_a_commit_are_checked_too(place: Place) -> None:
    for name in ("..", "a/b", "a\0b", "caf\u00e9"):
        body = {
            "generation": {"hub": 1, "local": 1},
            "epochs": [{"epoch": 1, "streams": {name: {"runs": []}}, "created_us": 1}],
        }
        answered = place.ask("POST", "/v1/pipelines/fleet/nodes/north/epochs/1-1", json.dumps(body).encode())
        assert (answered.status, answered.error) == (400, "bad_name"), answered
        assert "name" in answered.message


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "answers only requests with a token, and this one has none"),
        ("fst_" + "x" * 43, "does not have this token"),
        ("old", "the token old has been revoked"),
    ],
    ids=["missing", "wrong", "revoked"],
)
def test_without_a_token_that_holds_nothing_is_told_but_how_to_get_one(token: str, words: str, place: Place) -> None:
    for method, path, body in (
        ("GET", HEAD, b""),
        ("PUT", f"/v1/blobs/{DIGEST}", b"rows"),
        ("POST", "/v1/pipelines/fleet/nodes/north/epochs/1-1", b"{}"),
        ("GET", "/v1/nodes", b""),
    ):
        answered = place.ask(method, path, body, token=token)
        assert (answered.status, answered.error) == (401, "unauthorised")
        assert words in answered.message
        assert "--token-file or FORDSTONE_HUB_TOKEN; `fordstone hub token add` makes one" in answered.message
        assert not token or place.tokens.get(token, token) not in answered.message
        assert "www-authenticate: bearer" in answered.head


def test_the_token_of_another_node_does_not_open_this_one(place: Place) -> None:
    answered = place.ask("POST", "/v1/pipelines/fleet/nodes/north/lease", b"{}", token="south")
    assert (answered.status, answered.error) == (403, "forbidden")
    assert "the token south is for node south, not for north" in answered.message
    assert "fordstone hub token add" in answered.message


def test_bytes_with_another_digest_are_refused_and_leave_nothing(place: Place) -> None:
    for body in (b"other", b"rows" * 100_000):
        answered = place.ask("PUT", f"/v1/blobs/{DIGEST}", body)
        assert (answered.status, answered.error) == (400, "wrong_digest")
        assert "they were changed on the way. Send again" in answered.message
    assert place.ask("HEAD", f"/v1/blobs/{DIGEST}").status == 404
    assert not place.incoming()


@pytest.mark.parametrize("size", [1000, 4 << 20])
def test_a_body_that_ends_early_leaves_nothing(size: int, place: Place, faults: Callable[..., None]) -> None:
    data = b"x" * size
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    with place.connected() as sock:
        sock.sendall(place.head("PUT", path, f"Content-Length: {size}") + data[: size - 1])
    faults(bodies_cut=1)
    place.hub.until(lambda: not place.incoming(), "clearing up")
    assert place.ask("HEAD", path).status == 404


def test_a_bomb_is_neither_unpacked_nor_taken_in(place: Place, faults: Callable[..., None]) -> None:
    before = place.memory_bytes()
    bomb = gzip.compress(b"\0" * BOMB_BYTES)
    for method, path in (("PUT", f"/v1/blobs/{DIGEST}"), ("POST", "/v1/pipelines/fleet/nodes/north/epochs/1-1")):
        packed = place.ask(method, path, bomb, "Content-Encoding: gzip")
        assert packed.status == 415
        assert "decompresses nothing. Send it without Content-Encoding" in packed.message
    whole = place.ask("POST", "/v1/pipelines/fleet/nodes/north/epochs/1-1", b" " * BOMB_BYTES)
    assert (whole.status, whole.error) == (413, "too_large")
    assert "bytes at most. Send less at a time" in whole.message
    with place.connected() as sock:
        head = place.head("POST", "/v1/pipelines/fleet/nodes/north/epochs/1-1", "Transfer-Encoding: chunked")
        try:
            sock.sendall(head)
            for _ in range(BOMB_BYTES >> 20):
                sock.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        piecewise = answer_of(sock)
    assert (piecewise.status, piecewise.error) == (413, "too_large")
    assert "Send less at a time" in piecewise.message
    faults(bombs=4)
    assert place.memory_bytes() - before < GROWTH_BYTES_MAX
    assert not place.incoming()
    place.commits_on()


def test_slow_clients_are_sent_away_and_hold_nobody_up(place: Place, faults: Callable[..., None]) -> None:
    head = place.head("PUT", f"/v1/blobs/{DIGEST}", "Content-Length: 4")
    slow = [place.connected() for _ in range(SLOW_CLIENTS)]
    try:
        for sock in slow:
            sock.sendall(head + b"ro")
        place.commits_on()
        for sock in slow:
            answered = answer_of(sock)
            assert answered.status == 408
            assert "the body came too slowly" in answered.message
            assert "Check the network, then send it again" in answered.message
    finally:
        for sock in slow:
            sock.close()
    faults(slow_clients=SLOW_CLIENTS)
    assert not place.incoming()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"generation":1}', b"\xff\xfe", b'{"epochs":' + b"[" * 50_000],
    ids=["empty", "cut", "a list", "null", "wrong types", "no text", "deep"],
)
def test_a_commit_that_makes_no_sense_is_refused(body: bytes, place: Place) -> None:
    answered = place.ask("POST", "/v1/pipelines/fleet/nodes/north/epochs/1-1", body)
    assert (answered.status, answered.error) == (400, "bad_request")
    assert answered.message


def test_after_all_that_every_row_is_at_the_center_once(place: Place) -> None:
    place.commits_on()
    assert not place.incoming()
    fleet = place.fleet
    assert place.node.stop().report["outcome"] == "stopped"
    for node in fleet.feeds:
        ended = fleet.node(node, "--token-file", str(fleet.folder / f"{node}.token"), live=False).ended()
        assert ended.report["outcome"] == "ended"
    ended = fleet.center("--token-file", str(fleet.folder / "center.token"), live=False).ended()
    assert ended.report["outcome"] == "ended", ended.errors
    fleet.judge()
    assert place.hub.stop().code == 0
