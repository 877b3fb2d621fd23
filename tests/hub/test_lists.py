"""Lists of what a hub has come in pages: they work however many nodes, streams and epochs there are."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.hub.running import running_hub
from tests.hub.sending import Node, entry

from fordstone.cli.main import cli
from fordstone.errors import HubAwayError, HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import LIST_ROWS_MAX, LIST_STREAMS_MAX, Epochs, Health, Nodes, Streams
from fordstone.hub.store.sqlite import SqliteStore

MANY = 100_000
PIPELINES = 10


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubAddress]:
    """A hub with many nodes, streams and epochs, written past its limits."""
    data = tmp_path_factory.mktemp("crowded")
    SqliteStore(data / "log.sqlite").close()
    each = MANY // PIPELINES
    with contextlib.closing(sqlite3.connect(data / "log.sqlite")) as db, db:
        db.executemany(
            "INSERT INTO nodes (id, pipeline, node, seen_us, health, head) VALUES (?, ?, ?, 0, ?, 1)",
            (
                (number + 1, f"p{number // each}", f"n{number % each:05}", b'{"state":"running","sent_us":1}')
                for number in range(MANY)
            ),
        )
        db.executemany(
            "INSERT INTO streams VALUES (?, ?, ?)",
            ((number + 1, f"p{number // each}", f"s{number % each:05}") for number in range(MANY)),
        )
        db.execute("INSERT INTO stream_nodes SELECT id, id, 1, 1, 1, 5, 50, 600, 0, 0, id, 'c', 0, 0, 0 FROM streams")
        db.execute("INSERT INTO entries SELECT id, 1, id, 1, 1, 'd', 'c', 1, 1, 0, 0, 5, 50, 1 FROM nodes")
        db.execute("UPDATE counter SET seq = ?", (MANY,))
        db.execute("INSERT INTO consumers VALUES (1, 'p0', 'center', 0)")
    with running_hub(data) as hub:
        yield hub


@pytest.mark.slow
def test_all_nodes_come_once_in_order_and_so_do_those_of_one_pipeline(crowded: HubAddress) -> None:
    client = HubClient(crowded)
    found = client.nodes().nodes
    assert [(one.pipeline, one.node) for one in found] == sorted({(one.pipeline, one.node) for one in found})
    assert len(found) == MANY
    of_one = client.nodes(pipeline="p7").nodes
    assert {one.pipeline for one in of_one} == {"p7"}
    assert len(of_one) == MANY // PIPELINES


@pytest.mark.slow
def test_all_streams_come_once_in_order(crowded: HubAddress) -> None:
    found = HubClient(crowded).streams().streams
    assert [(one.pipeline, one.stream) for one in found] == sorted({(one.pipeline, one.stream) for one in found})
    assert len(found) == MANY
    assert found[0].consumers == {"center": 1}
    assert found[-1].consumers == {}


@pytest.mark.slow
def test_all_epochs_come_once_newest_first(crowded: HubAddress) -> None:
    client = HubClient(crowded)
    assert [one.seq for one in client.epochs(limit=MANY).epochs] == [*range(MANY, 0, -1)]
    assert len(client.epochs(limit=LIST_ROWS_MAX + 1).epochs) == LIST_ROWS_MAX + 1
    assert len(client.epochs(pipeline="p3", limit=MANY).epochs) == MANY // PIPELINES


@pytest.mark.slow
@pytest.mark.parametrize("command", ["nodes", "streams", "epochs"])
def test_the_commands_list_them_all(crowded: HubAddress, command: str) -> None:
    limit = ["--limit", str(MANY)] if command == "epochs" else []
    result = CliRunner().invoke(cli, [command, "--hub", crowded.url, *limit])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") >= MANY


@pytest.mark.slow
def test_metrics_name_a_bounded_number_of_streams(crowded: HubAddress) -> None:
    text = HubClient(crowded)._call("GET", "/metrics").decode()
    assert text.count("\nfordstone_hub_stream_rows{") == 2_000
    assert f"\nfordstone_hub_nodes {MANY}.0\n" in text
    assert f"\nfordstone_hub_streams {MANY}.0\n" in text


def test_the_epochs_of_one_node_come_in_pages(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        node = Node(HubClient(hub))
        node.lease()
        node.commit(*(entry(epoch) for epoch in range(1, 6)))
        page = node.client._ask("GET", "/v1/epochs", Epochs, query={"pipeline": "p", "node": "n", "limit": 2})
        assert ([one.epoch for one in page.epochs], page.next) == ([5, 4], "1/4")
        rest = node.client._ask("GET", "/v1/epochs", Epochs, query={"pipeline": "p", "node": "n", "after": page.next})
        assert ([one.epoch for one in rest.epochs], rest.next) == ([3, 2, 1], None)


@pytest.mark.parametrize(
    "path", ["nodes?after=p", "nodes?after=../n", "streams?after=p/s/t", "epochs?after=p/n", "nodes?pipeline=.."]
)
def test_what_is_no_place_in_a_list_is_rejected(hub: HubAddress, path: str) -> None:
    with pytest.raises(HubRefusedError) as raised:
        HubClient(hub)._call("GET", f"/v1/{path}")
    assert raised.value.status == 400


@pytest.mark.slow
def test_a_page_has_no_more_rows_than_its_bound_however_many_are_asked_for(crowded: HubAddress) -> None:
    client = HubClient(crowded)
    assert len(client._ask("GET", "/v1/nodes", Nodes, query={"limit": 10**9}).nodes) == LIST_ROWS_MAX
    assert len(client._ask("GET", "/v1/streams", Streams, query={"limit": 10**9}).streams) == LIST_STREAMS_MAX


def test_a_list_that_does_not_end_is_the_hubs_mistake(hub: HubAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    client = HubClient(hub)
    monkeypatch.setattr(client, "_ask", lambda *_, **__: Nodes(nodes=(), next="p/n"))
    with pytest.raises(HubAwayError, match="does not end"):
        client.nodes()


def test_texts_of_nodes_are_bounded_so_that_a_page_of_them_fits(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        node = Node(HubClient(hub))
        node.lease()
        long = "\N{GRINNING FACE}" * 3_000
        node.client.report_health("n", "p", Health(state="running", sent_us=1, problem=long, version=long))
        (info,) = node.client.nodes().nodes
        assert info.health is not None
        assert (len(info.health.problem), len(info.health.version)) == (2_000, 100)
