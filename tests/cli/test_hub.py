"""`fordstone nodes`, `streams` and `epochs`: what they show of what a hub knows, and what they say when it cannot be asked."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.place import Invoke

from fordstone.cli.format import Table
from fordstone.cli.hub import epochs_table, nodes_table, streams_table
from fordstone.errors import HubRefusedError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import (
    ENDED_US,
    EpochInfo,
    Epochs,
    Generation,
    Health,
    NodeInfo,
    Nodes,
    StreamInfo,
    Streams,
)
from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.progress import Counters

NOW_US = 1_800_000_000_000_000
SECOND_US = 1_000_000


def node(name: str, *, seen_s: float = 1, state: str = "running", problem: str = "", **facts: Any) -> NodeInfo:
    return NodeInfo(
        node=name,
        pipeline="cold-chain",
        head=41,
        generation=Generation(hub=1, local=2),
        seen_us=NOW_US - int(seen_s * SECOND_US),
        committed_us=NOW_US - 1_500_000,
        health=Health(
            state=state,  # type: ignore[arg-type]
            sent_us=NOW_US,
            problem=problem,
            progress=Counters(rows_in=1_000, **facts),
        ),
    )


def test_nodes_are_shown_with_ages_lag_outbox_and_problem():
    found = [
        node("gateway-2", seen_s=3600, outbox_epochs=3, outbox_bytes=1_200),
        node("gateway-1"),
        node("gateway-3", state="waiting", problem="the disk is full"),
        node("gateway-4", seen_s=3600, state="stopped"),
    ]
    table = nodes_table(found, NOW_US)
    rows = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    assert list(rows) == ["gateway-1", "gateway-2", "gateway-3", "gateway-4"]
    assert rows["gateway-1"] == {
        "node": "gateway-1",
        "pipeline": "cold-chain",
        "state": "running",
        "epoch": "41",
        "seen": "1.00 s ago",
        "lag": "1.50 s",
        "rows in": "1,000",
        "outbox": "empty",
        "problem": "",
    }
    assert (rows["gateway-2"]["state"], rows["gateway-2"]["outbox"]) == ("silent", "3 epochs, 1.20 kB")
    assert (rows["gateway-3"]["state"], rows["gateway-3"]["problem"]) == ("waiting", "the disk is full")
    assert rows["gateway-4"]["state"] == "stopped", "a stopped node is not silent"
    assert list(table.styles) == ["", "yellow", "yellow", ""]


def test_a_node_of_which_only_epochs_are_known_is_shown_too():
    one = NodeInfo(node="a", pipeline="p", head=1, generation=None, seen_us=NOW_US, committed_us=None)
    assert nodes_table([one], NOW_US).rows == [("a", "p", "", "1", "0 us ago", "", "", "", "")]


def stream(**facts: Any) -> StreamInfo:
    usual: dict[str, Any] = {
        "pipeline": "p", "stream": "s", "nodes": 2, "epochs": 10, "rows": 1_000, "size_bytes": 5_000,
        "watermark_us": NOW_US - SECOND_US, "consumers": {},
    }  # fmt: skip
    return StreamInfo(**(usual | facts))


@pytest.mark.parametrize(
    ("facts", "column", "shown"),
    [
        ({"consumers": {"center": 0}}, "unread", "center: 0 epochs"),
        ({"consumers": {"center": 1, "b": 2}}, "unread", "b: 2 epochs, center: 1 epoch"),
        ({}, "unread", "no consumer"),
        ({"watermark_us": ENDED_US}, "watermark", "ended"),
        ({"watermark_us": TIME_MIN_US}, "watermark", ""),
        ({}, "watermark", "2027-01-15 07:59:59, 1.00 s ago"),
    ],
)
def test_streams_are_shown_with_their_time_and_the_lag_of_consumers(facts: dict[str, Any], column: str, shown: str):
    table = streams_table([stream(**facts)], NOW_US)
    assert dict(zip(table.head, table.rows[0], strict=True))[column] == shown


def test_epochs_say_what_they_came_with_and_how_late():
    facts: dict[str, Any] = {
        "seq": 1,
        "pipeline": "p",
        "node": "n",
        "rows": 5,
        "size_bytes": 10,
        "generation": Generation(hub=1, local=2),
    }
    times: dict[str, Any] = {"received_us": NOW_US - SECOND_US, "created_us": NOW_US - 3 * SECOND_US}
    found = [
        EpochInfo(epoch=7, first=5, last=7, **facts, **times),
        EpochInfo(epoch=4, first=4, last=4, **facts, **times),
    ]
    assert epochs_table(found, NOW_US).rows == [
        ("p", "n", "7", "5-7", "5", "10 B", "1.00 s ago", "2.00 s", "1.2"),
        ("p", "n", "4", "4", "5", "10 B", "1.00 s ago", "2.00 s", "1.2"),
    ]


@pytest.mark.parametrize(
    ("command", "method", "answer"),
    [
        ("nodes", "nodes", Nodes(nodes=(node("gateway-1"),))),
        ("streams", "streams", Streams(streams=(stream(),))),
        ("epochs", "epochs", Epochs(epochs=())),
    ],
)
def test_machines_get_what_the_hub_said_and_people_a_table(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: str, method: str, answer: Any
):
    monkeypatch.setattr(HubClient, method, lambda *_, **__: answer)
    printed = invoke(command, "--json")
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert list(json.loads(printed.stdout)) == [command]
    shown = invoke(command).stdout
    assert shown.startswith(("node ", "pipeline ", "This hub has"))


def test_a_hub_that_is_not_there_is_reported_with_what_to_do(invoke: Invoke):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        result = invoke("nodes", "--hub", url)
    assert result.exit_code == 1
    assert f"Is a hub running at {url}?" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("status", "code"), [(401, "unauthorised"), (403, "forbidden")])
def test_a_wrong_token_is_reported_with_what_to_do(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, status: int, code: str
):
    def refuse(*_: object) -> None:
        raise HubRefusedError("the hub does not know this token.", status=status, code=code)

    monkeypatch.setattr(HubClient, "nodes", refuse)
    result = invoke("nodes")
    assert result.exit_code == 1
    assert "the hub does not know this token." in result.stderr
    assert "fordstone hub token add" in result.stderr


def test_the_token_comes_from_a_file_or_a_variable_and_never_from_the_command_line(
    invoke: Invoke, place: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str | None] = []

    def look(self: HubClient) -> Nodes:
        seen.append(self.address.token)
        return Nodes(nodes=())

    monkeypatch.setattr(HubClient, "nodes", look)
    (place / "token").write_text("fst_file\n")
    monkeypatch.setenv("FORDSTONE_HUB_TOKEN", "fst_variable")
    invoke("nodes")
    invoke("nodes", "--token-file", "token")
    assert seen == ["fst_variable", "fst_file"]
    assert "No such option" in invoke("nodes", "--token", "x").stderr


@pytest.mark.parametrize(
    "make", [lambda: nodes_table([], 0), lambda: streams_table([], 0), lambda: epochs_table([], 0)]
)
def test_nothing_is_said_in_words(make: Callable[[], Table]):
    assert make().text().endswith(("URL.", "yet.", "epoch."))
