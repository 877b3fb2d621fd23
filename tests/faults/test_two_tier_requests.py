"""Requests that a hub must refuse or must not count twice, while real nodes commit: bad ones, and commits that are repeated.

The refusal says what to do, nothing stays of the request, and no row is lost.
"""

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
from random import Random

import msgspec
import pytest
from tests.faults.proxy import Proxy, Sent, proxied
from tests.faults.two_tier import Fleet, Part

from fordstone.hub.messages import Commit, Refusal
from fordstone.hub.server.auth import TokenFile

BOMB_BYTES = 32 << 20
GROWTH_BYTES_MAX = 64 << 20
"""A hub may grow by this much while it is sent several bombs; one that read them whole would need more."""
SLOW_S = 3.0
"""The longest pause between two pieces of a body. Not so short that a busy machine makes the test itself a slow client."""
SLOW_CLIENTS = 40
SECONDS_MAX = 300.0
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
    answer = json.loads(body) if body else {}
    status = int(head.split(b" ", 2)[1])
    return Answered(
        status=status, head=head.decode().lower(), error=answer.get("error", ""), message=answer.get("message", "")
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
        assert (answered.status, answered.error) == (400, "bad_request"), answered
        assert "$.epochs[0].streams" in answered.message


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "answers only requests with a token, and this one has none"),
        ("fst_" + "x" * 43, "does not have this token"),
        ("old", "the token old has been revoked"),
    ],
    ids=["missing", "wrong", "revoked"],
)
def test_without_a_valid_token_the_answer_says_only_how_to_get_one(token: str, words: str, place: Place) -> None:
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


# Commits that are repeated: in any order, after a restart of the hub, with other content, and by a node that was fenced.

EPOCHS = 6
FENCED_CODE = 3


def recorded(fleet: Fleet, proxy: Proxy) -> Part:
    """Run a node through the proxy until the hub has some commits; gives it, running."""
    fleet.feeds["north"].write(120)
    node = fleet.node("north", url=proxy.url)
    fleet.feed_until(node, lambda: len(proxy.commits()) >= EPOCHS, f"{EPOCHS} commits")
    assert node.running, node.errors()
    return node


def refusal(answer: tuple[int, bytes]) -> tuple[int, Refusal]:
    return answer[0], msgspec.json.decode(answer[1], type=Refusal)


def test_commits_that_come_again_in_any_order_even_after_a_restart_of_the_hub_change_nothing(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=11) as fleet, proxied(fleet.port) as proxy:
        hub = fleet.hub()
        assert recorded(fleet, proxy).stop().report["outcome"] == "stopped"
        commits, before = proxy.commits(), fleet.crossed()
        assert [proxy.send(one)[0] for one in commits] == [200] * len(commits)
        shuffled = Random(11).sample(commits, len(commits))
        assert [proxy.send(one)[0] for one in shuffled] == [200] * len(commits)
        assert hub.kill().killed
        fleet.hub()
        assert [proxy.send(one)[0] for one in reversed(commits)] == [200] * len(commits)
        # Leases and blobs, too, just as they came.
        others = [one for one in proxy.sent if one.path.startswith("/v1/blobs/") or one.path.endswith("/lease")]
        assert {proxy.send(one)[0] for one in others} == {200}
        assert fleet.crossed() == before
        faults(hub_kills=1, commits_again=3 * len(commits))
        fleet.finish()


def test_a_commit_with_other_content_is_refused_and_says_why(tmp_path: Path, faults: Callable[..., None]) -> None:
    with Fleet(tmp_path, "north", seed=12) as fleet, proxied(fleet.port) as proxy:
        fleet.hub()
        recorded(fleet, proxy).stop()
        before = fleet.crossed()
        commits = proxy.commits()
        for one in commits:
            status, why = refusal(proxy.send(one, body=otherwise(one)))
            assert (status, why.error) == (409, "other_content")
            assert "what was committed never changes" in why.message
            assert "give one another id" in why.message
        # An epoch that is to come leaves a gap, whatever it holds.
        last = msgspec.json.decode(commits[-1].body, type=Commit)
        far = msgspec.structs.replace(
            last, epochs=(msgspec.structs.replace(last.epochs[-1], epoch=10_000),), checkpoint=None
        )
        path = commits[-1].path.rpartition("/")[0] + "/10000-10000"
        status, why = refusal(proxy.send(commits[-1], body=msgspec.json.encode(far), path=path))
        assert (status, why.error) == (409, "gap")
        assert why.next_epoch == fleet.head("north") + 1
        assert f"the hub expects epoch {why.next_epoch}," in why.message
        assert fleet.crossed() == before
        faults(commits_refused=len(commits) + 1)
        fleet.finish()


def otherwise(one: Sent) -> bytes:
    """The same epochs, created at another time."""
    body = json.loads(one.body)
    for entry in body["epochs"]:
        entry["created_us"] += 1
    return json.dumps(body).encode()


def test_a_node_that_was_fenced_commits_nothing_more_and_logs_why(tmp_path: Path, faults: Callable[..., None]) -> None:
    with Fleet(tmp_path, "north", seed=13) as fleet, proxied(fleet.port) as proxy:
        fleet.hub()
        first = recorded(fleet, proxy)
        # Another machine, with the same files to read and nothing else, takes over while the first still runs.
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "in").symlink_to(tmp_path / "north" / "in")
        second = fleet.node("north", "--take-over", at="elsewhere")
        fleet.feed_until(first, lambda: False, "end of the fenced node")
        ended = first.ended()
        assert ended.code == FENCED_CODE, ended.errors
        assert "was taken over by another process. This one stops" in ended.errors
        assert "stays in its state directory" in ended.errors
        again = fleet.node("north", live=False).ended()
        assert "--take-over" in again.errors, again.errors
        assert again.code != 0
        for one in proxy.commits():
            status, why = refusal(proxy.send(one))
            assert (status, why.error) == (412, "stale_generation")
            assert "has taken over from" in why.message
        second.until(lambda: fleet.head("north") > EPOCHS, "commit of the node that took over")
        second.stop()
        faults(takeovers=1, commits_refused=len(proxy.commits()))
        ended = fleet.node("north", live=False, at="elsewhere").ended()
        assert ended.report["outcome"] == "ended"
        assert ended.report["progress"]["outbox_epochs"] == 0
        assert fleet.center(live=False).ended().report["outcome"] == "ended"
        fleet.judge_center()
