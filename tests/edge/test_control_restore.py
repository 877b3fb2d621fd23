"""Control tables of a hub that was restored from a backup: all nodes have the same table afterwards, and say what changed (rule 24)."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.connectors.control_hub import GONE, KEYS, SCHEMA, Table, as_table, control_rows
from tests.hub.running import running_hub

from fordstone.cli.main import cli
from fordstone.connectors.control import PARTITION, ControlLog, ControlSource
from fordstone.edge.link.control import ControlFetcher
from fordstone.epochs.manifest import PartitionCut
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.publisher import ControlPublisher
from fordstone.plan.ids import Position
from fordstone.testing.memory_disk import MemoryDisk


class Node:
    """A node's copy of the table."""

    def __init__(self) -> None:
        self.log = ControlLog(MemoryDisk(), "control/t", schema=SCHEMA, keys=KEYS)
        self.problem: str | None = None

    def fetch(self, client: HubClient, taken: PartitionCut | None = None) -> Table:
        fetcher = ControlFetcher(client, self.log, pipeline="p", control="t", taken=taken)
        for _ in range(3):
            fetcher.step(wait_s=0.0)
        self.problem = fetcher.problem
        return self.table()

    def table(self) -> Table:
        return as_table(self.log.table())

    def cut(self) -> PartitionCut:
        """As a checkpoint has it that has taken everything here."""
        reader = ControlSource(self.log, bounded=False).open(PARTITION, Position(0), with_positions=False)
        while (chunk := reader.read(1)) is not None:
            position = chunk.position
        return PartitionCut(position=position, identity=reader.identity())


class Site:
    """A hub that can be set back."""

    def __init__(self, folder: Path) -> None:
        self.data, self.backup = folder / "hub", folder / "backup"
        self.batch = 0

    @contextlib.contextmanager
    def hub(self) -> Iterator[tuple[HubClient, Callable[..., None]]]:
        """A hub, and what publishes to it."""
        with running_hub(self.data) as address, contextlib.closing(HubClient(address)) as client:
            publisher = ControlPublisher(client, pipeline="p", control="t", keys=KEYS)

            def publish(**changes: object) -> None:
                self.batch += 1
                publisher.publish(control_rows(changes), owner="center", batch=self.batch)

            yield client, publish

    def copy(self) -> None:
        shutil.copytree(self.data, self.backup)

    def set_back(self) -> None:
        shutil.rmtree(self.data)
        shutil.copytree(self.backup, self.data)

    def restore(self) -> str:
        done = CliRunner().invoke(cli, ["hub", "restore", "--data", str(self.data)])
        assert done.exit_code == 0, done.output
        return done.output


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_every_node_has_the_table_of_the_restored_hub_and_says_what_it_had(site: Site, caplog) -> None:
    old = Node()
    with site.hub() as (_, publish):
        publish(a=1.0)
    site.copy()
    with site.hub() as (client, publish):
        publish(b=2.0)
        publish(a=9.0)
        assert old.fetch(client) == {"a": 9.0, "b": 2.0}
    site.set_back()
    report = site.restore()
    assert "control table t of pipeline p ends with version 1, published at " in report
    with site.hub() as (client, publish):
        with caplog.at_level(logging.WARNING):
            assert old.fetch(client) == {"a": 1.0}
        (record,) = [one for one in caplog.records if one.message.startswith("control table replaced")]
        assert (record.had, record.rows) == (3, 2)
        assert "versions 2 to 3 are not in the hub's log: they were lost" in record.problem
        # Rows see it as one change after the versions that they have seen, so a replay sees the same.
        changes = old.log.read(3, 100)
        assert changes is not None
        assert sorted(changes.frame.rows()) == [("a", 1.0, "upsert"), ("b", 2.0, "delete")]
        for key in "xyz":
            publish(**{key: 4.0})
        expected = {"a": 1.0, "x": 4.0, "y": 4.0, "z": 4.0}
        assert old.fetch(client) == Node().fetch(client) == expected
        assert old.problem is None


@pytest.mark.parametrize("fetches_between", [False, True])
def test_nodes_agree_after_any_number_of_restores_of_one_backup(site: Site, fetches_between: bool) -> None:
    nodes = [Node(), Node()]
    with site.hub() as (_, publish):
        publish(a=1.0)
    site.copy()
    for value in (2.0, 3.0, 4.0):
        with site.hub() as (client, publish):
            publish(**{f"k{value:.0f}": value, "a": GONE})
            nodes[0].fetch(client)
            if fetches_between:
                nodes[1].fetch(client)
        site.set_back()
        site.restore()
    with site.hub() as (client, publish):
        publish(z=9.0)
        expected = {"a": 1.0, "z": 9.0}
        assert [node.fetch(client) for node in [*nodes, Node()]] == [expected] * 3


def test_a_table_that_the_backup_does_not_have_is_empty_at_every_node_until_it_is_published_again(site: Site) -> None:
    old = Node()
    with site.hub():
        pass
    site.copy()
    with site.hub() as (client, publish):
        publish(a=1.0)
        publish(b=2.0)
        assert old.fetch(client) == {"a": 1.0, "b": 2.0}
    site.set_back()
    site.restore()
    with site.hub() as (client, publish):
        assert old.fetch(client) == {}
        assert Node().fetch(client) == {}
        publish(c=3.0)
        assert old.fetch(client) == Node().fetch(client) == {"c": 3.0}


def test_without_the_command_a_node_says_what_to_do_and_never_mixes_two_histories(site: Site) -> None:
    old = Node()
    with site.hub() as (_, publish):
        publish(a=1.0)
    site.copy()
    with site.hub() as (client, publish):
        publish(b=2.0)
        publish(a=9.0)
        old.fetch(client)
    site.set_back()
    with site.hub() as (client, publish):
        for key in ("x", "y"):
            assert old.fetch(client) == {"a": 9.0, "b": 2.0}
            assert "run `fordstone hub restore --data DIR`" in (old.problem or "")
            publish(**{key: 4.0})
        assert old.fetch(client) == {"a": 9.0, "b": 2.0}, "as many versions, and others"
        assert "run `fordstone hub restore --data DIR`" in (old.problem or "")
        publish(z=4.0)
        assert old.fetch(client) == Node().fetch(client) == {"a": 1.0, "x": 4.0, "y": 4.0, "z": 4.0}


def test_a_lost_folder_is_rebuilt_from_versions_that_the_pipeline_has_taken_and_from_no_others(site: Site) -> None:
    before, after = Node(), Node()
    with site.hub() as (_, publish):
        publish(a=1.0)
    site.copy()
    with site.hub() as (client, publish):
        publish(b=2.0)
        before.fetch(client)
    site.set_back()
    site.restore()
    with site.hub() as (client, publish):
        after.fetch(client)
        publish(x=4.0)
        after.fetch(client)
        again = Node()
        assert again.fetch(client, taken=after.cut()) == after.table() == {"a": 1.0, "x": 4.0}
        lost = Node()
        assert lost.fetch(client, taken=before.cut()) == {}
        assert "lost when it was restored" in (lost.problem or "")
    idle = Node()
    site.set_back()
    site.restore()
    with site.hub() as (client, publish):
        after.fetch(client)
        assert idle.fetch(client, taken=after.cut()) == after.table() == {"a": 1.0}


def test_the_publisher_logs_that_its_versions_were_lost(site: Site, caplog) -> None:
    with site.hub() as (_, publish):
        publish(a=1.0)
    site.copy()
    with running_hub(site.data) as address:
        port = int(address.url.rpartition(":")[2])
        publisher = ControlPublisher(HubClient(address), pipeline="p", control="t", keys=KEYS)
        publisher.publish(control_rows({"b": 2.0}), owner="center", batch=2)
    site.set_back()
    site.restore()
    with running_hub(site.data, port=port), caplog.at_level(logging.WARNING):
        publisher.publish(control_rows({"c": 2.0}), owner="center", batch=3)
    (record,) = [one for one in caplog.records if "versions of a control table are lost" in one.message]
    assert record.lost_up_to == 2
