"""Tokens: made once, kept hashed, found in constant time, and noticed by a hub that runs."""

from __future__ import annotations

import logging
import stat
import threading
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest

from fordstone.errors import ConfigError, PipelineError, StorageError
from fordstone.hub.server.auth import LOOK_EVERY_S, WRITE_USED_EVERY_S, Token, TokenFile, Tokens, why_forbidden
from fordstone.hub.server.routes import Matched, Routes

DIGEST = b"a" * 64


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def s(self) -> float:
        return self.now_s

    def us(self) -> int:
        return int(self.now_s * 1e6)


def watched(data: Path) -> tuple[Tokens, Clock]:
    clock = Clock()
    return Tokens(TokenFile(data), clock_s=clock.s, clock_us=clock.us), clock


def test_the_text_of_a_token_is_in_no_file(tmp_path):
    text = TokenFile(tmp_path).add("t1", role="node", node="truck-7", now_us=1)
    assert text.startswith("fst_")
    assert len(text) >= 4 + 43
    for path in tmp_path.iterdir():
        assert text.encode() not in path.read_bytes()
        assert text[4:].encode() not in path.read_bytes()


def test_two_tokens_are_never_the_same(tmp_path):
    file = TokenFile(tmp_path)
    assert len({file.add(f"t{number}", role="admin", now_us=1) for number in range(20)}) == 20


def test_only_the_owner_may_read_the_file(tmp_path):
    file = TokenFile(tmp_path)
    file.add("t1", role="admin", now_us=1)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_token_is_found_by_its_text_and_by_nothing_else(tmp_path):
    file = TokenFile(tmp_path)
    text = file.add("t1", role="node", node="truck-7", pipelines=("cold-chain",), now_us=5)
    file.add("t2", role="center", now_us=6)
    tokens, _ = watched(tmp_path)
    found = tokens.find(text)
    assert found is not None
    assert (found.name, found.role, found.node, found.pipelines) == ("t1", "node", "truck-7", ("cold-chain",))
    for other in (
        "",
        "fst_",
        text[:-1],
        text + "A",
        text.lower() + "x",
        text[4:],
        text.replace("fst_", "FST_"),
        "ä" * 47,
    ):
        assert tokens.find(other) is None
    assert tokens.find(found.sha256) is None


def test_a_revoked_token_is_found_as_revoked_and_its_name_may_be_given_again(tmp_path):
    file = TokenFile(tmp_path)
    old = file.add("t1", role="admin", now_us=1)
    assert file.revoke("t1", now_us=2).revoked_us == 2
    assert file.revoke("t1", now_us=3).revoked_us == 2
    tokens, _ = watched(tmp_path)
    found = tokens.find(old)
    assert found is not None
    assert found.revoked_us == 2
    assert tokens.valid == 0
    new = file.add("t1", role="admin", now_us=4)
    tokens, _ = watched(tmp_path)
    assert tokens.find(old) is None
    assert tokens.find(new) is not None
    assert tokens.valid == 1


def test_a_name_that_holds_cannot_be_given_again(tmp_path):
    file = TokenFile(tmp_path)
    file.add("t1", role="admin", now_us=1)
    with pytest.raises(ConfigError, match="there is a token t1 already"):
        file.add("t1", role="center", now_us=2)
    assert [one.role for one in file.read()] == ["admin"]


def test_revoking_what_is_not_there_names_what_is(tmp_path):
    file = TokenFile(tmp_path)
    file.add("t1", role="admin", now_us=1)
    with pytest.raises(ConfigError, match=r"no token 't2'.*Valid tokens: t1"):
        file.revoke("t2", now_us=2)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-x", "ä", "x" * 101, "a\n"])
def test_names_of_tokens_nodes_and_pipelines_are_checked(tmp_path, name):
    file = TokenFile(tmp_path)
    with pytest.raises(PipelineError):
        file.add(name, role="admin", now_us=1)
    with pytest.raises(PipelineError):
        file.add("t", role="node", node=name, now_us=1)
    with pytest.raises(PipelineError):
        file.add("t", role="center", pipelines=(name,), now_us=1)
    assert file.read() == ()


def test_a_node_token_has_a_node_and_others_have_none(tmp_path):
    with pytest.raises(ConfigError):
        TokenFile(tmp_path).add("t", role="node", now_us=1)
    with pytest.raises(ConfigError):
        TokenFile(tmp_path).add("t", role="center", node="n", now_us=1)


def test_a_running_hub_notices_a_change_after_a_second_and_not_before(tmp_path):
    tokens, clock = watched(tmp_path)
    required = [tokens.required]
    text = TokenFile(tmp_path).add("t1", role="admin", now_us=1)
    clock.now_s += LOOK_EVERY_S / 2
    required.append(tokens.required)
    clock.now_s += LOOK_EVERY_S
    required.append(tokens.required)
    assert required == [False, False, True]
    assert tokens.find(text) is not None
    TokenFile(tmp_path).revoke("t1", now_us=2)
    clock.now_s += LOOK_EVERY_S
    found = tokens.find(text)
    assert found is not None
    assert found.revoked_us == 2


def test_a_hub_whose_tokens_go_away_does_not_open(tmp_path):
    file = TokenFile(tmp_path)
    text = file.add("t1", role="admin", now_us=1)
    tokens, clock = watched(tmp_path)
    file.path.unlink()
    clock.now_s += LOOK_EVERY_S
    assert tokens.required
    assert tokens.find(text) is None


def test_a_hub_keeps_the_tokens_it_had_when_the_file_is_damaged_and_says_so(tmp_path, caplog):
    file = TokenFile(tmp_path)
    text = file.add("t1", role="admin", now_us=1)
    tokens, clock = watched(tmp_path)
    file.path.write_text("{")
    clock.now_s += LOOK_EVERY_S
    with caplog.at_level(logging.ERROR):
        assert tokens.find(text) is not None
    assert "tokens not read again" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version":2,"tokens":[]}', b'{"tokens":[{"name":"x"}]}', b"\xff\xfe"]
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path, content):
    file = TokenFile(tmp_path)
    file.path.write_bytes(content)
    with pytest.raises(ConfigError, match="fordstone hub token add"):
        file.read()


def test_two_commands_at_once_lose_no_token(tmp_path):
    def add(first: int) -> None:
        for number in range(10):
            TokenFile(tmp_path).add(f"t{first}-{number}", role="admin", now_us=1)

    threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(TokenFile(tmp_path).read()) == 40


def test_last_use_is_written_once_a_minute_and_read_back(tmp_path):
    file = TokenFile(tmp_path)
    text = file.add("t1", role="admin", now_us=1)
    tokens, clock = watched(tmp_path)
    token = tokens.find(text)
    assert token is not None
    assert not tokens.due()
    tokens.used(token)
    assert not tokens.due()
    clock.now_s += WRITE_USED_EVERY_S
    assert tokens.due()
    tokens.write_used()
    assert not tokens.due()
    assert file.used_us() == {"t1": 100_000_000}
    assert Tokens(file, clock_s=clock.s, clock_us=clock.us)._used_us == {"t1": 100_000_000}


def test_a_data_directory_that_cannot_be_written_is_an_error_for_people(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StorageError, match="cannot be changed"):
        TokenFile(tmp_path / "data").add("t1", role="admin", now_us=1)


NODE = Token(name="t", role="node", sha256="0", created_us=0, node="n1")
NODE_OF_P = msgspec.structs.replace(NODE, pipelines=("p",))
CENTER = Token(name="t", role="center", sha256="0", created_us=0)
CENTER_OF_P = msgspec.structs.replace(CENTER, pipelines=("p",))
ADMIN = Token(name="t", role="admin", sha256="0", created_us=0)
ROLES = {"node": NODE, "node-p": NODE_OF_P, "center": CENTER, "center-p": CENTER_OF_P, "admin": ADMIN}
ALL_NODE = {"node", "node-p", "admin"}
ALL_CENTER = {"center", "center-p", "admin"}


@pytest.mark.parametrize(
    ("method", "path", "who"),
    [
        ("PUT", b"/v1/blobs/" + DIGEST, ALL_NODE | ALL_CENTER),
        ("GET", b"/v1/blobs/" + DIGEST, ALL_NODE | ALL_CENTER),
        ("HEAD", b"/v1/blobs/" + DIGEST, ALL_NODE | ALL_CENTER),
        ("POST", b"/v1/blobs/missing", ALL_NODE | ALL_CENTER),
        ("POST", b"/v1/pipelines/p/nodes/n1/epochs/1-2", ALL_NODE),
        ("POST", b"/v1/pipelines/q/nodes/n1/epochs/1-2", {"node", "admin"}),
        ("POST", b"/v1/pipelines/p/nodes/n2/epochs/1-2", {"admin"}),
        ("POST", b"/v1/pipelines/p/nodes/n1/lease", ALL_NODE),
        ("POST", b"/v1/pipelines/p/nodes/n2/lease", {"admin"}),
        ("GET", b"/v1/pipelines/p/nodes/n1/head", ALL_NODE | ALL_CENTER),
        ("GET", b"/v1/pipelines/p/nodes/n2/head", ALL_CENTER),
        ("GET", b"/v1/pipelines/q/nodes/n1/checkpoint", {"node", "center", "admin"}),
        ("GET", b"/v1/pipelines/p/streams/s/nodes", ALL_CENTER),
        ("POST", b"/v1/pipelines/p/streams/s/epochs", ALL_CENTER),
        ("POST", b"/v1/pipelines/q/streams/s/epochs", {"center", "admin"}),
        ("PUT", b"/v1/pipelines/p/consumers/c", ALL_CENTER),
        ("POST", b"/v1/pipelines/p/control/c", ALL_CENTER),
        ("GET", b"/v1/pipelines/p/control/c", ALL_NODE | ALL_CENTER),
        ("GET", b"/v1/pipelines/q/control/c", {"node", "center", "admin"}),
        ("PUT", b"/v1/nodes/n1/health/p", ALL_NODE),
        ("PUT", b"/v1/nodes/n2/health/p", {"admin"}),
        ("PUT", b"/v1/nodes/n1/health/q", {"node", "admin"}),
        ("GET", b"/v1/nodes", {"center", "admin"}),
        ("GET", b"/v1/streams", {"center", "admin"}),
        ("GET", b"/v1/epochs", {"center", "admin"}),
        ("GET", b"/metrics", {"center", "admin"}),
        ("GET", b"/healthz", set(ROLES)),
    ],
)
def test_who_may_ask_for_what(method, path, who):
    routes = Routes(cast("Any", MagicMock()))
    matched = routes.match({"type": "http", "method": method, "path": path.decode(), "raw_path": path})
    assert isinstance(matched, Matched)
    assert {role for role, token in ROLES.items() if why_forbidden(token, matched) is None} == who
