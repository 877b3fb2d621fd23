"""A hub that was restored from a backup, with a real hub, real nodes and a real center: nothing is lost or doubled in silence (rule 24)."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.edge.crossing_runs import PIPELINE, SCHEMA, ids_at, plan_over, rows, run_plan
from tests.edge.declared import over_hub
from tests.hub.running import running_hub

from fordstone import Pipeline
from fordstone.cli.main import cli
from fordstone.connectors import memory
from fordstone.connectors.memory import MemorySink, MemorySource
from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.errors import FencedError, HubError, SourceError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import NodeInfo
from fordstone.protocol.progress import Progress

ROWS_PER_RUN = 5
RUNS_BEFORE = 3
RUNS_AFTER = 9
"""More than the checkpoints that a node keeps, so that it no longer has all epochs."""
TICKS_MAX = 1000


class Site:
    """A hub, the machines of one node with the same input, and centers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data, self.backup = folder / "hub", folder / "backup"
        self.source = MemorySource([[]])
        self.plan = plan_over(memory(self.source))
        self.fed = self.port = 0
        self.sinks: dict[str, MemorySink] = {}

    @contextlib.contextmanager
    def hub(self) -> Iterator[HubAddress]:
        with running_hub(self.data, port=self.port) as hub:
            self.port = int(hub.url.rpartition(":")[2])
            yield hub

    def send(self, hub: HubAddress, state: str, runs: int = 1, *, take_over: bool = False) -> None:
        """Let a machine read more input, several times, and send it."""
        for number in range(runs):
            self.source.append(0, rows(ROWS_PER_RUN, self.fed))
            self.fed += ROWS_PER_RUN
            self.come_back(hub, state, take_over=take_over and not number)

    def come_back(self, hub: HubAddress, state: str, *, take_over: bool = False) -> None:
        """Let a machine run over the input that is there, and send what the hub lacks."""
        run_plan(self.plan, hub, self.folder / state, bounded=False, available_now=True, take_over=take_over)

    def read(self, hub: HubAddress, name: str, done: Callable[[list[int]], bool]) -> list[int]:
        """Run a center until it has read enough; return the ids of all rows that it has read."""
        sink = self.sinks.setdefault(name, MemorySink())
        pipeline = Pipeline(PIPELINE)
        pipeline.source("s", memory(MemorySource([[]])), schema=SCHEMA, time="ts").sink("rows", memory(sink))
        ticks = 0

        def look(progress: Progress) -> None:
            nonlocal ticks
            ticks += 1
            if not progress.stopping and (done(self.ids(name)) or ticks > TICKS_MAX):
                signal.raise_signal(signal.SIGTERM)

        config = RunConfig(state=self.folder / name, node=name, interval="20ms")
        run(over_hub(pipeline.plan(), hub.at()), {}, config, on_progress=look)
        assert ticks <= TICKS_MAX, f"{name} has read {self.ids(name)}"
        return self.ids(name)

    def read_all(self, hub: HubAddress, name: str) -> list[int]:
        return self.read(hub, name, lambda ids: len(ids) >= self.fed)

    def ids(self, name: str) -> list[int]:
        sink = self.sinks[name]
        return sorted(sink.rows()["id"].to_list()) if sink.released else []

    def set_back(self) -> None:
        """Put the backup in the place of the hub's data."""
        shutil.rmtree(self.data)
        shutil.copytree(self.backup, self.data)

    def mark_restored(self) -> None:
        done = CliRunner().invoke(cli, ["hub", "restore", "--data", str(self.data)])
        assert done.exit_code == 0, done.output


def info(hub: HubAddress) -> NodeInfo:
    with contextlib.closing(HubClient(hub)) as client:
        (found,) = client.nodes().nodes
    return found


def operator(hub: HubAddress, *args: str) -> str:
    done = CliRunner().invoke(cli, [*args, "--hub", hub.url])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A hub whose data was copied, and then went on: machine a has sent more, and a center has read all of it."""
    made = Site(tmp_path)
    with made.hub() as hub:
        made.send(hub, "a", RUNS_BEFORE)
    shutil.copytree(made.data, made.backup)
    with made.hub() as hub:
        made.send(hub, "a", RUNS_AFTER)
        assert made.read_all(hub, "center") == list(range(made.fed))
    made.set_back()
    return made


# The node still has its data (e2b).


def test_a_node_that_comes_back_first_sends_what_it_has_and_the_center_goes_on_exactly(site: Site) -> None:
    site.mark_restored()
    with site.hub() as hub:
        site.send(hub, "a", 2)
        assert site.read_all(hub, "center") == list(range(site.fed))


def test_a_center_that_comes_first_waits_says_for_what_and_goes_on_exactly(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.mark_restored()
    with site.hub() as hub:
        head, asked = info(hub).head, site.fed
        with caplog.at_level(logging.WARNING):
            waiting = site.read(hub, "center", lambda ids: "waits for a node" in caplog.text)
        assert waiting == list(range(asked)), "nothing more, and nothing twice"
        (said,) = {getattr(one, "problem", "") for one in caplog.records if "waits for a node" in str(one.msg)}
        assert f"ends at epoch {head}" in said
        assert "fordstone hub quarantine node" in said
        assert "fordstone hub forget node" in said
        site.send(hub, "a", 2)
        assert site.read_all(hub, "center") == list(range(site.fed))


def test_epochs_that_nobody_has_any_more_are_named_and_a_skip_lets_readers_pass(site: Site) -> None:
    site.mark_restored()
    with site.hub() as hub:
        head = info(hub).head
        site.send(hub, "a")
        ((first, last),) = info(hub).lost
        assert first == head + 1
        assert f"epochs {first} to {last} lost" in operator(hub, "nodes")
        with pytest.raises(SourceError, match=rf"epochs {first} to {last} of this node were lost.*fordstone hub skip"):
            site.read_all(hub, "late-center")
        operator(hub, "hub", "skip", "node", "--until", str(last))
        found = site.read(hub, "late-center", lambda ids: bool(ids) and ids[-1] == site.fed - 1)
        there = ids_at(hub)
        assert found == sorted(set(there)) == sorted(there), "what the hub has is read once"


@pytest.mark.parametrize("command", ["quarantine", "forget"])
def test_the_operator_ends_the_waiting_for_a_node_that_never_comes_back(site: Site, command: str) -> None:
    site.mark_restored()
    with site.hub() as hub:
        words = (
            ("hub", "quarantine", "node")
            if command == "quarantine"
            else ("hub", "forget", "node", "node", "--discard-unread")
        )
        operator(hub, *words)
        read, looks = site.fed, 0

        def enough(ids: list[int]) -> bool:
            nonlocal looks
            looks += 1
            return looks > 20

        assert site.read(hub, "center", enough) == list(range(read)), "the center runs, and waits for nobody"


# Another machine takes the node over, from the restored hub's checkpoint (e2).


@pytest.mark.parametrize("order", ["take-over, then restore", "restore, then take-over"])
def test_epochs_of_a_take_over_are_not_taken_for_those_that_were_read(site: Site, order: str) -> None:
    if order == "restore, then take-over":
        site.mark_restored()
    with site.hub() as hub:
        site.send(hub, "b", RUNS_AFTER + 5, take_over=True)
        there = ids_at(hub)
        assert sorted(there) == list(range(site.fed)), "the hub has every row once"
    if order == "take-over, then restore":
        site.mark_restored()
    with site.hub() as hub:
        read = site.ids("center")
        with pytest.raises(SourceError, match=r"node node .*other content up to epoch (\d+)") as raised:
            site.read_all(hub, "center")
        assert "fordstone hub quarantine node --epoch" in str(raised.value)
        assert site.ids("center") == read, "nothing is read twice"
        assert site.read_all(hub, "new-center") == list(range(site.fed)), (
            "a center that had read nothing gets everything"
        )
        seen = int(str(raised.value).partition("other content up to epoch ")[2].split()[0])
        operator(hub, "hub", "quarantine", "node", "--epoch", str(seen + 1))
        operator(hub, "hub", "skip", "node", "--until", str(seen))
        site.send(hub, "b")
        assert info(hub).lost == ()
        found = site.read(hub, "center", lambda ids: bool(ids) and ids[-1] == site.fed - 1)
        assert set(found) > set(read)


def test_a_backup_that_is_restored_twice_is_noticed_twice_and_nodes_go_on(site: Site) -> None:
    generations = []
    for _ in range(2):
        site.mark_restored()
        with site.hub() as hub:
            site.send(hub, "a", 2)
            found = info(hub)
            assert found.generation is not None
            generations.append(found.generation.hub)
            assert site.read_all(hub, "center") == list(range(site.fed))
        site.set_back()
    assert generations[0] < generations[1]


def test_a_hub_that_is_set_back_once_more_and_not_marked_is_noticed(site: Site) -> None:
    """The node knows the log by its newer id. To offer its epochs again would be of no use: the hub does not wait for them."""
    site.mark_restored()
    with site.hub() as hub:
        site.send(hub, "a")
        assert site.read_all(hub, "center") == list(range(site.fed))
    site.set_back()
    with site.hub() as hub:
        head = info(hub).head
        with pytest.raises(HubError, match=rf"(?s)only up to epoch {head}, .* run `fordstone hub restore"):
            site.send(hub, "a")
    site.mark_restored()
    with site.hub() as hub:
        site.send(hub, "a")
        assert site.read_all(hub, "center") == list(range(site.fed))


def test_a_machine_that_comes_back_after_the_restore_does_not_fence_its_successor(site: Site) -> None:
    """The successor has gone on from the restored log, and is not yet as far as the former machine was."""
    site.mark_restored()
    with site.hub() as hub:
        site.send(hub, "b", take_over=True)
        there = info(hub)
        with pytest.raises(FencedError, match="empty state directory and --take-over"):
            site.come_back(hub, "a", take_over=True)
        assert (info(hub).generation, info(hub).head) == (there.generation, there.head)
        site.send(hub, "b")
        assert sorted(ids_at(hub)) == list(range(site.fed))


def test_a_machine_that_was_taken_over_from_before_the_restore_cannot_leave_out_epochs_of_its_successor(
    site: Site,
) -> None:
    with site.hub() as hub:
        site.send(hub, "b", 2, take_over=True)
        head = info(hub).head
    site.mark_restored()
    with site.hub() as hub:
        with pytest.raises((FencedError, HubError), match="empty state directory and --take-over"):
            site.come_back(hub, "a", take_over=True)
        assert (info(hub).head, info(hub).lost) == (head, ())
        site.send(hub, "b")
        assert sorted(ids_at(hub)) == list(range(site.fed))
        assert not info(hub).resync


def test_a_node_whose_input_has_ended_sends_again_what_a_restored_hub_lacks(tmp_path: Path) -> None:
    """Nothing waits for the hub there, so that only a look at it shows that it was restored."""
    site = Site(tmp_path)
    with site.hub():
        pass
    shutil.copytree(site.data, site.backup)
    site.source.append(0, rows(ROWS_PER_RUN, 0))
    site.fed = ROWS_PER_RUN
    with site.hub() as hub:
        run_plan(site.plan, hub, tmp_path / "a", bounded=True)
    site.set_back()
    site.mark_restored()
    with site.hub() as hub:
        run_plan(site.plan, hub, tmp_path / "a", bounded=True)
        assert site.read_all(hub, "center") == list(range(site.fed))
