"""Faults of two tiers, as a table: hub, nodes and center are real processes. Whatever happens, nothing is lost, doubled or wrong.

Each entry of `FAULTS` holds what is started, what is hit, and when. A fault that never happened fails its test. The base set goes
through every failpoint once; entries with `full=True` are the rest of the matrix, and run with `--full`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Literal

import pytest
import urllib3
from tests.faults.oracle import EPOCH, expect
from tests.faults.process import Process
from tests.faults.proxy import Trouble, proxied
from tests.faults.small_disk import SmallDisk, small_disk
from tests.faults.spark_process import SparkProcess, born
from tests.faults.two_tier import AWAY, FILE, Fleet, Part, newest_windows
from tests.faults.two_tier_child import Command
from tests.simulation.simulator import SimClock

from fordstone.edge.link.outbox import Outbox
from fordstone.edge.link.owner import next_owner
from fordstone.edge.link.sender import Sender
from fordstone.epochs.store import CheckpointStore
from fordstone.hub.server.auth import TokenFile
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import CONTROL_FAILPOINTS, HUB_FAILPOINTS, OUTBOX_FAILPOINTS

Counted = Callable[..., None]
Kills = tuple[tuple[str, int], ...]
"""Failpoints, and the hit at which each kills. Each process starts on what the one before has left."""
LARGE_ROWS = 6000
"""Enough for blobs that are files; smaller ones are in the hub's log."""
LATER_S = 7200
"""After this time the hub no longer waits for a commit that would name a blob."""
DISK_SIZE = "12m"
"""A log takes several megabytes before it is compacted for the first time."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the table."""

    name: str
    seed: int
    full: bool = False
    nodes: tuple[str, ...] = ("north",)
    rows: int = 120
    """Rows that each node has before anything starts."""

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        """Start the processes, let the fault happen, and end with a judgement."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Killed(Fault):
    """SIGKILL of one process at failpoints, while the others go on."""

    who: Literal["node", "hub", "center"]
    kills: Kills
    center: bool = True
    """Whether a center runs from the beginning."""
    steers: bool = False
    """Whether the nodes must have joined rows with the center's table before the end."""
    later_s: int = 0
    """The clock of each hub that is killed is this much later, and an undisturbed one ran before it: it finds what to remove."""

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        if self.who != "hub":
            fleet.hub()
        match self.who:
            case "node":
                parts = {}
            case "center":
                parts = known_nodes(fleet)
            case "hub":
                parts = {node: fleet.node(node) for node in fleet.feeds}
        center = fleet.center() if self.center and self.who != "center" else None
        for life, (name, hit) in enumerate(self.kills):
            if self.later_s:
                assert center is not None
                await_removable(fleet, center, ahead_s=self.later_s * life)
            file = fleet.folder / f"hits-{life}"
            ended = fleet.feed_until_killed(self.start(fleet, failpoint=f"{name}:{hit}@{file}", life=life + 1))
            assert ended.killed, ended.errors
            assert file.read_text().splitlines() == [name] * hit
            counted(**{f"{self.who}_kills": 1})
        if not self.center:
            fleet.finish()
            return
        part = self.start(fleet, life=len(self.kills))
        nodes = list(parts.values()) or [part]
        center = center or part
        if self.steers:
            fleet.feed_until(
                center, lambda: all(map(fleet.steered, fleet.feeds)), "rows joined with the center's table"
            )
        if self.who == "hub":
            assert AWAY in nodes[0].errors()
            assert list((fleet.folder / "hub" / "data" / "blobs").glob("??/*")), "no blob was large enough for a file"
        fleet.finish_live(center, *nodes)

    def start(self, fleet: Fleet, *, failpoint: str = "", life: int) -> Part:
        match self.who:
            case "node":
                return fleet.node("north", failpoint=failpoint)
            case "center":
                return fleet.center(failpoint=failpoint)
            case "hub":
                return fleet.hub(failpoint=failpoint, ahead_s=self.later_s * life)


@dataclass(frozen=True, kw_only=True)
class AllKilled(Fault):
    """SIGKILL of hub, nodes and center at once, several times."""

    rounds: int

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        rng = Random(self.seed)
        hub = fleet.hub()
        nodes = known_nodes(fleet)
        center = fleet.center()
        for _ in range(self.rounds):
            goal = fleet.sealed("center") + rng.randrange(1, 4)
            fleet.feed_until(center, lambda goal=goal: fleet.sealed("center") >= goal, "epoch of the center")  # type: ignore[misc]
            parts = [hub, center, *nodes.values()]
            for part in rng.sample(parts, len(parts)):
                assert part.kill().killed
            counted(node_kills=len(nodes), hub_kills=1, center_kills=1)
            # Nodes and center start before the hub is there.
            nodes, center = {node: fleet.node(node) for node in fleet.feeds}, fleet.center()
            hub = fleet.hub()
        fleet.finish_live(center, *nodes.values())


@dataclass(frozen=True, kw_only=True)
class BadLine(Fault):
    """Requests that are cut, delayed and repeated, and responses that are lost, on the way to the hub and back."""

    below: tuple[Trouble, ...]
    """Between node and hub."""
    above: tuple[Trouble, ...]
    """Between hub and center."""

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        with proxied(fleet.port, *self.below) as below, proxied(fleet.port, *self.above) as above:
            # Readers do not learn where blobs are stored, so that every one comes over the line.
            fleet.hub("--no-direct-blobs")
            node, center = fleet.node("north", url=below.url), fleet.center(url=above.url)
            troubles = (*self.below, *self.above)
            fleet.feed_until(
                center, lambda: all(one.happened == one.times for one in troubles), "trouble of every kind"
            )
            assert node.running, node.errors()
            fleet.finish_live(center, node)
            for proxy in (below, above):
                counted(**{f"requests_{what}": count for what, count in proxy.happened().items()})


@dataclass(frozen=True, kw_only=True)
class LostResponse(Fault):
    """A commit whose response never arrives: the node looks for it, and does not send it again."""

    share: float
    """The part of the response that arrives."""

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        lost = Trouble(what="cut_answer", where=COMMIT, share=self.share)
        with proxied(fleet.port, lost) as proxy:
            fleet.hub()
            ended = fleet.node("north", url=proxy.url, live=False).ended()
            assert ended.report["progress"]["outbox_epochs"] == 0
            assert AWAY in ended.errors
            commits = [one.path for one in proxy.commits()]
            assert len(commits) == len(set(commits)), "a commit that the hub had was sent again"
            assert lost.happened == 1
            counted(requests_cut_answer=1)
        fleet.finish()


@dataclass(frozen=True, kw_only=True)
class FullHub(Fault):
    """A hub whose disk is full: it says so, accepts nothing in part, and continues when there is room."""

    killed: bool

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        (fleet.folder / "hub").mkdir()
        with small_disk(fleet.folder / "hub", "data", size=DISK_SIZE) as disk:
            hub = fleet.hub(inside=disk.inside)
            node, center = fleet.node("north"), fleet.center()
            fleet.feed_until(node, lambda: fleet.head("north") >= 2, "commits")
            fleet.feed_until(node, lambda: refused(disk, node), "refusal of a full hub")
            before = fleet.sealed("north")
            fleet.feed_until(node, lambda: fleet.sealed("north") > before + 3, "epochs without the hub")
            assert node.running, node.errors()
            assert center.running, center.errors()
            counted(full_disks=1, hub_kills=int(self.killed))
            if self.killed:
                hub.kill()
            disk.make_room()
            if self.killed:
                fleet.hub(inside=disk.inside)
            fleet.finish_live(center, node)


@dataclass(frozen=True, kw_only=True)
class BadToken(Fault):
    """A node whose token is missing, wrong or revoked: it continues, says why it sends nothing, and sends it all with a good one."""

    token: Literal["missing", "wrong", "revoked"]

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        folder = fleet.folder
        file = TokenFile(folder / "hub" / "data")
        fleet.token = file.add("admin", role="admin", node=None, pipelines=(), now_us=1)
        good = file.add("north", role="node", node="north", pipelines=(), now_us=1)
        secrets = {
            "admin": fleet.token,
            "good": good,
            "revoked": file.add("old", role="node", node="north", pipelines=(), now_us=1),
            "wrong": good[:-2] + ("bb" if good.endswith("aa") else "aa"),
        }
        for name, secret in secrets.items():
            (folder / f"{name}.token").write_text(secret)
        fleet.hub()
        node = fleet.node("north", *(() if self.token == "missing" else given(folder, self.token)))
        reason = "`fordstone hub token add` makes one"
        if self.token == "revoked":
            fleet.feed_until(node, lambda: fleet.head("north") > 0, "commit with a good token")
            file.revoke("old", now_us=2)
            reason = "the token old has been revoked"
        fleet.feed_until(node, lambda: reason in node.errors(), reason)
        assert "--token-file or FORDSTONE_HUB_TOKEN" in node.until_said(reason)
        assert not any(secret in node.errors() for secret in secrets.values())
        before = fleet.head("north")
        fleet.feed_until(node, lambda: fleet.sealed("north") > before + 3, "epochs that wait")
        assert fleet.head("north") == before
        assert node.stop().report["progress"]["outbox_epochs"] > 0
        counted(bad_tokens=1)
        ended = fleet.node("north", *given(folder, "good"), live=False).ended()
        assert ended.report["progress"]["outbox_epochs"] == 0
        ended = fleet.center(*given(folder, "admin"), live=False).ended()
        assert ended.report["outcome"] == "ended", ended.errors
        fleet.judge()


@dataclass(frozen=True, kw_only=True)
class ManyWindowsAtOnce(Fault):
    """No fault at all: the control table ends with the newest window, however many close together."""

    def happen(self, fleet: Fleet, counted: Counted) -> None:
        fleet.hub()
        fleet.finish()
        assert fleet.limits() == newest_windows(expect(fleet.written))


def known_nodes(fleet: Fleet) -> dict[str, Part]:
    """Start the nodes, and wait until the hub knows them: one that came after the center would find windows closed."""
    nodes = {node: fleet.node(node) for node in fleet.feeds}
    for node, part in nodes.items():
        part.until(lambda node=node: fleet.head(node) > 0, "epoch at the hub")  # type: ignore[misc]
    return nodes


def await_removable(fleet: Fleet, center: Part, *, ahead_s: int) -> None:
    """Let an undisturbed hub run until the center has read more, and kill it."""
    hub = fleet.hub(ahead_s=ahead_s)
    before = passed(fleet)
    fleet.feed_until(center, lambda: passed(fleet) > before, "epoch that is not needed any more")
    hub.kill()


def passed(fleet: Fleet) -> int:
    """The newest epoch up to which the center needs nothing more of the node."""
    response = urllib3.request("GET", f"{fleet.url}/v1/pipelines/{fleet.pipeline}/consumers/center")
    streams = response.json().get("streams", {}) if response.status == 200 else {}
    return min((positions.get("north", [0])[0] for positions in streams.values()), default=0)


def refused(disk: SmallDisk, node: Part) -> bool:
    """Fill the hub's disk again, and look whether the node has logged that the hub is full."""
    disk.fill()
    return any(AWAY in line and "full" in line for line in node.errors().splitlines())


def given(folder: Path, token: str) -> tuple[str, str]:
    return ("--token-file", str(folder / f"{token}.token"))


BLOB, COMMIT, LEASE, HEAD = r"^PUT /v1/blobs/", r"^POST .*/epochs/", r"^POST .*/lease", r"^GET .*/head"
PAGE, PUBLISH, READ = r"^GET .*/streams/", r"^POST .*/control/", r"^GET /v1/blobs/"
TWO = ("north", "south")


def faults_of_two_tiers() -> list[Fault]:
    """The table. Each test makes its own: troubles count how often they have happened."""
    return [
        Killed(
            name="node, on the way to the hub",
            seed=6,
            who="node",
            center=False,
            kills=(
                ("cut.synced", 1),
                ("manifest.renamed", 1),
                ("outbox.blob-sent", 2),
                ("outbox.before-commit", 1),
                ("outbox.committed", 1),
                ("outbox.marked", 1),
            ),
        ),
        Killed(
            name="node, later on the way to the hub",
            seed=4,
            full=True,
            who="node",
            center=False,
            kills=(
                ("cut.synced", 4),
                ("manifest.renamed", 5),
                ("outbox.blob-sent", 9),
                ("outbox.before-commit", 4),
                ("outbox.committed", 3),
                ("outbox.marked", 4),
            ),
        ),
        Killed(
            name="node, while a control table arrives",
            seed=9,
            who="node",
            steers=True,
            kills=(("control.fetched", 1), ("control.stored", 1)),
        ),
        Killed(
            name="node, while control tables arrive",
            seed=10,
            full=True,
            who="node",
            steers=True,
            kills=(("control.fetched", 1), ("control.stored", 1), ("control.fetched", 2), ("control.stored", 2)),
        ),
        Killed(
            name="hub, while blobs arrive and while it commits",
            seed=5,
            who="hub",
            rows=LARGE_ROWS,
            kills=(
                ("hub.blob-written", 1),
                ("hub.blob-renamed", 2),
                ("hub.before-commit", 1),
                ("hub.committed", 1),
                ("hub.before-answer", 1),
            ),
        ),
        Killed(
            name="hub, later while blobs arrive",
            seed=4,
            full=True,
            who="hub",
            rows=LARGE_ROWS,
            kills=(("hub.blob-written", 1), ("hub.blob-renamed", 2), ("hub.blob-written", 6), ("hub.blob-renamed", 5)),
        ),
        Killed(
            name="hub, later while it commits",
            seed=7,
            full=True,
            who="hub",
            rows=LARGE_ROWS,
            kills=(("hub.before-commit", 4), ("hub.committed", 3), ("hub.before-answer", 4)),
        ),
        Killed(
            name="hub, while it removes what is not needed",
            seed=4,
            who="hub",
            rows=LARGE_ROWS,
            later_s=LATER_S,
            kills=(("hub.gc-removed", 1), ("hub.gc-forgotten", 1), ("hub.gc-before", 1)),
        ),
        # Three sinks are released per epoch: rows, windows and the control table.
        Killed(
            name="center, on the way to a commit",
            seed=3,
            nodes=TWO,
            rows=60,
            who="center",
            steers=True,
            kills=(("cut.synced", 2), ("sink.before-release", 2), ("sink.released", 3)),
        ),
        Killed(
            name="center, everywhere on the way to a commit",
            seed=3,
            full=True,
            nodes=TWO,
            rows=60,
            who="center",
            steers=True,
            kills=(
                ("run.renamed", 3),
                ("cut.synced", 2),
                ("manifest.renamed", 2),
                ("sink.before-release", 2),
                ("sink.released", 3),
                ("sink.before-release", 6),
                ("retention.before", 2),
                ("retention.removed-manifest", 1),
            ),
        ),
        AllKilled(name="everything at once", seed=5, nodes=TWO, rows=60, rounds=1),
        AllKilled(name="everything at once, again and again", seed=8, full=True, nodes=TWO, rows=60, rounds=5),
        BadLine(
            name="a line that cuts, loses, delays and repeats",
            seed=7,
            below=(
                Trouble(what="lose_answer", where=LEASE),
                Trouble(what="cut_answer", where=HEAD),
                Trouble(what="cut_request", where=BLOB, times=2, between=2),
                Trouble(what="cut_answer", where=BLOB, times=1, between=2),
                Trouble(what="cut_request", where=COMMIT, times=2, between=1),
                Trouble(what="lose_answer", where=COMMIT, times=2, between=1),
                Trouble(what="cut_answer", where=COMMIT, times=1, between=1),
                Trouble(what="twice", where=COMMIT, times=3, between=1),
                Trouble(what="twice", where=BLOB, times=3, between=2),
                Trouble(what="delay", where=COMMIT, times=3, between=1),
            ),
            above=(
                Trouble(what="cut_answer", where=PAGE, times=2, between=1),
                Trouble(what="cut_request", where=PUBLISH, times=1),
                Trouble(what="lose_answer", where=PUBLISH, times=2, between=1),
                Trouble(what="twice", where=PUBLISH, times=2, between=1),
                Trouble(what="cut_request", where=BLOB, times=1),
                Trouble(what="lose_answer", where=BLOB, times=1, between=1),
                Trouble(what="cut_answer", where=READ, times=2, between=2),
                Trouble(what="refuse", where=READ, times=2, between=2),
                Trouble(what="delay", where=PAGE, times=3, between=1),
            ),
        ),
        LostResponse(name="no response to a commit", seed=8, rows=60, share=0.0),
        LostResponse(name="nearly all of a response to a commit", seed=8, rows=60, full=True, share=0.99),
        FullHub(name="a hub with a full disk that is killed", seed=43, killed=True),
        FullHub(name="a hub with a full disk", seed=43, full=True, killed=False),
        BadToken(name="no token", seed=42, rows=60, full=True, token="missing"),
        BadToken(name="a wrong token", seed=42, rows=60, full=True, token="wrong"),
        BadToken(name="a revoked token", seed=42, rows=60, token="revoked"),
        ManyWindowsAtOnce(name="many windows that close together", seed=6, rows=400),
    ]


TABLE = {fault.name: fault for fault in faults_of_two_tiers()}


@pytest.mark.parametrize(
    "name", [pytest.param(fault.name, marks=pytest.mark.full if fault.full else ()) for fault in TABLE.values()]
)
def test_nothing_is_lost_doubled_or_wrong_whatever_happens(name: str, tmp_path: Path, faults: Counted) -> None:
    (fault,) = [fault for fault in faults_of_two_tiers() if fault.name == name]
    with Fleet(tmp_path, *fault.nodes, seed=fault.seed) as fleet:
        for feed in fleet.feeds.values():
            feed.write(fault.rows)
        fault.happen(fleet, faults)


def test_the_base_set_goes_through_every_failpoint() -> None:
    base = [fault for fault in TABLE.values() if isinstance(fault, Killed) and not fault.full]
    names = {name for fault in base if fault.who != "center" for name, _ in fault.kills}
    assert names == {"cut.synced", "manifest.renamed", *OUTBOX_FAILPOINTS, *CONTROL_FAILPOINTS, *HUB_FAILPOINTS}


# A center on Spark.


class SparkCenter(SparkProcess):
    """`fordstone center` on Spark."""

    words = (
        "--on",
        "spark",
        "--master",
        "local[2]",
        "--memory",
        "512m",
        "--shards",
        "2",
        "--interval",
        "10ms",
        "--json",
    )

    def __init__(self, fleet: Fleet, *words: str, failpoint: str = "") -> None:
        folder = fleet.folder / "center"
        folder.mkdir(exist_ok=True)
        settings = {
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder}",
            "spark.local.dir": str(folder),
            "spark.python.daemon.module": "tests.faults.spark_daemon",
        }
        conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command = Command(words=("center", FILE, "--hub", fleet.url, *self.words, *conf, *words))
        Process.__init__(self, folder, command, failpoint=failpoint, module="tests.faults.two_tier_child", apart=True)
        self._seen = {(self.pid, born(self.pid))}


@contextmanager
def spark_center(fleet: Fleet, *words: str, failpoint: str = "") -> Iterator[SparkCenter]:
    center = SparkCenter(fleet, *words, failpoint=failpoint)
    try:
        center.until(lambda: center.java() is not None, "Java")
        yield center
    finally:
        center.until_gone(by_force=center.running)


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.parametrize("kills", [(("batch.sealed", 1), ("sink.released", 3))], ids=["twice"])
def test_a_spark_driver_killed_on_its_way_to_a_commit_loses_and_doubles_nothing(
    kills: Kills, tmp_path: Path, faults: Counted
) -> None:
    with Fleet(tmp_path, "north", seed=31) as fleet:
        fleet.hub()
        feed = fleet.feeds["north"]
        feed.write(200)
        node = fleet.node("north", "--interval", "500ms")
        for life, (name, hit) in enumerate(kills):
            file = tmp_path / f"hits-{life}"
            with spark_center(fleet, failpoint=f"{name}:{hit}@{file}") as center:
                feed.write(60)
                ended = center.ended()
                assert ended.killed, ended.errors
            assert file.read_text().splitlines() == [name] * hit
            faults(spark_driver_kills=1)
        feed.close()
        node.stop()
        ended = fleet.node("north", live=False).ended()
        assert ended.report["progress"]["outbox_epochs"] == 0
        with spark_center(fleet, "--available-now") as center:
            ended = center.ended()
        assert ended.code == 0, ended.errors
        fleet.judge()
        assert fleet.limits()


# Faults that need a story of their own.

HOUR_US = 3_600_000_000
TRIES_PER_HOUR_MAX = 260
"""Waits double up to half a minute, and half of each is by chance."""
EPOCHS_AWAY = 12


def test_an_hour_without_the_hub_costs_few_requests_and_no_row(tmp_path: Path, faults: Counted) -> None:
    """The hour is simulated: the real sender over what a real node has left, on a clock that is set forward."""
    with Fleet(tmp_path, "north", seed=41) as fleet, ExitStack() as closing:
        fleet.feeds["north"].write(120)
        node = fleet.node("north")
        fleet.feed_until(node, lambda: fleet.sealed("north") >= EPOCHS_AWAY, "epochs without the hub")
        assert "WARNING" in node.until_said(AWAY, f"127.0.0.1:{fleet.port}")
        assert node.kill().killed
        clock = SimClock()
        disk = OsDisk(tmp_path / "north" / "state")
        closing.callback(disk.close)
        store = CheckpointStore(disk, pipeline=fleet.pipeline, node="north")
        directory = f"{fleet.pipeline}/north"
        outbox = Outbox(store, bytes_max=1 << 30)
        outbox.begin(max(store.epochs()))
        waiting = outbox.epochs
        assert waiting >= EPOCHS_AWAY - 1
        client = closing.enter_context(fleet.client())
        sender = Sender(
            hub=client,
            outbox=outbox,
            store=store,
            owner=next_owner(disk, directory),
            clock=clock,
            chance=Random(41).random,
        )
        tries = 0
        while clock.monotonic_us() < HOUR_US:
            sender.step()
            assert sender.failing
            tries += 1
            clock.now_us += sender.idle_wait_us or 0
        assert tries < TRIES_PER_HOUR_MAX
        assert outbox.epochs == waiting
        fleet.hub()
        clock.now_us += sender.idle_wait_us or 0
        while outbox.epochs:
            assert sender.step() or not outbox.epochs, sender.problem
        assert sender.problem is None
        assert fleet.head("north") == outbox.sent
        faults(hours_away=1)
        closing.close()
        fleet.finish()


YEAR_S = 365 * 86_400
BEGIN_S = 3 * 3600
"""Rows begin this long ago: however slow the machine, they do not come near to now."""
SILENT_EPOCHS = 5


@pytest.mark.full
def test_a_clock_a_year_ahead_closes_no_windows_of_other_nodes(tmp_path: Path, faults: Counted) -> None:
    now_s = int((datetime.now(UTC) - EPOCH).total_seconds())
    begins = {"north": now_s - BEGIN_S, "future": now_s - BEGIN_S + YEAR_S}
    with Fleet(tmp_path, "north", "future", seed=51, ahead_s=begins) as fleet:
        fleet.hub()
        north, future = fleet.feeds["north"], fleet.feeds["future"]
        for feed in fleet.feeds.values():
            feed.write(90)
        nodes = {"north": fleet.node("north"), "future": fleet.node("future", ahead_s=YEAR_S)}
        for node, part in nodes.items():
            part.until(lambda node=node: fleet.head(node) > 0, "epoch at the hub")  # type: ignore[misc]
        center = fleet.center()
        fleet.feed_until(center, lambda: bool(fleet.limits()), "window of north that closes")
        # From here only the node that is a year ahead goes on.
        nodes["north"].stop()
        before_us = newest(center, "watermark_us")
        for _ in range(SILENT_EPOCHS):
            before = fleet.head("future")
            future.write(30)
            nodes["future"].until(lambda before=before: fleet.head("future") > before, "another epoch")  # type: ignore[misc]
        read = newest(center, "rows_in")
        future.write(30)
        center.until(lambda: newest(center, "rows_in") > read, "more rows at the center")
        watermark_us = newest(center, "watermark_us")
        assert watermark_us < now_us() - 60_000_000, "the clock of one node has closed windows of the other"
        assert watermark_us >= before_us
        # The rows that the other node had yet to send for open windows count in them.
        missed = fleet.head("north")
        north.write(60)
        nodes["north"] = fleet.node("north")
        nodes["north"].until(lambda: fleet.head("north") > missed, "what was missing")
        for part in nodes.values():
            assert part.stop().report["outcome"] == "stopped"
        faults(clocks_ahead=1)
        # When the other node has finished, time is that of the hub, and not a year ahead.
        ended = fleet.node("north", live=False).ended()
        assert ended.report["progress"]["outbox_epochs"] == 0
        center.until(lambda: newest(center, "watermark_us") > now_us() - HOUR_US // 2, "time that goes on")
        assert newest(center, "watermark_us") <= now_us() + 2 * HOUR_US
        assert center.stop().report["outcome"] == "stopped"
        fleet.finish(ahead_s=YEAR_S)


def newest(center: Part, field: str) -> int:
    """The largest value of a field that the center has reported."""
    return max((line.get(field) or 0 for line in center.lines()), default=0)


def now_us() -> int:
    return time.time_ns() // 1_000


# What judges these tests notices deliberate faults.

NOTICED = r"lost or wrong|too many|only up to epoch|already has epoch|disagree"


def test_a_node_that_forgets_what_the_hub_has_not_taken_is_noticed(tmp_path: Path) -> None:
    with Fleet(tmp_path, "north", seed=61) as fleet:
        fleet.hub()
        fleet.feeds["north"].write(60)
        mutant = "node_drops_entries_before_the_answer"
        node = fleet.node("north", mutant=mutant, failpoint="outbox.before-commit:2")
        assert fleet.feed_until_killed(node).killed
        with pytest.raises(AssertionError, match=NOTICED):
            fleet.finish()


def test_a_node_that_takes_silence_for_success_is_noticed(tmp_path: Path) -> None:
    cut = Trouble(what="cut_request", where=COMMIT)
    with Fleet(tmp_path, "north", seed=62) as fleet, proxied(fleet.port, cut) as proxy:
        fleet.hub()
        fleet.feeds["north"].write(60)
        node = fleet.node("north", mutant="sender_takes_silence_for_yes", url=proxy.url, live=False)
        assert node.ended().report["progress"]["outbox_epochs"] == 0
        assert cut.happened == 1
        with pytest.raises(AssertionError, match=NOTICED):
            fleet.finish()
