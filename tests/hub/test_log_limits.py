"""A token adds a bounded number of rows to the log: names are rejected beyond it, with what to do, and nothing of the request is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hub.sending import blob, commit_of, digest_of, entry, run

from fordstone.errors import ConfigError
from fordstone.hub.messages import (
    ConsumerPosition,
    ControlPublish,
    EpochEntry,
    Health,
    LeaseRequest,
    NodePosition,
    Rejection,
    StreamSegment,
)
from fordstone.hub.store import commits, controls
from fordstone.hub.store.log import HubLog, LogLimits
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.protocol.delivery import Reaction, reaction_to

LIMITS = LogLimits(
    pipelines_per_node=2,
    nodes_per_pipeline=3,
    streams_per_pipeline=10,
    controls_per_pipeline=2,
    controls=3,
    consumers_per_pipeline=2,
    consumers=3,
)


class Hub:
    def __init__(self, log: HubLog) -> None:
        self.log = log
        data = blob("a")
        log.write(lambda tx: tx.log.save_small_blob(digest_of(data), data, ran_us=0)).result(10)

    def lease(self, pipeline: str, node: str) -> None:
        self.log.write(
            lambda tx: commits.lease(tx, pipeline, node, LeaseRequest(holder="h", local=1, start="s"))
        ).result(10)

    def commit(self, node: str, *epochs: EpochEntry) -> None:
        body, digests = commit_of(*epochs), [one.digest() for one in epochs]
        self.log.write(lambda tx: commits.commit(tx, "p", node, body, digests)).result(10)

    def publish(self, pipeline: str, control: str, batch: int = 1) -> None:
        body = ControlPublish(owner="o", batch=batch, blob=run("a"))
        self.log.write(lambda tx: controls.publish(tx, pipeline, control, body)).result(10)

    def register(self, pipeline: str, consumer: str) -> None:
        body = ConsumerPosition(streams={"s": {}})
        self.log.write(lambda tx: commits.save_position(tx, pipeline, consumer, body)).result(10)

    def chain(self, node: str) -> str:
        return self.log.read(lambda log: commits.head(log, "p", node)).chain

    def passed(self, consumer: str, **streams: dict[str, int]) -> dict[str, dict[str, str]]:
        """Report positions as the hub's handler does; return what was refused."""
        chains = {one.node: self.chain(one.node) for one in self.log.read(lambda log: log.nodes())}
        at = {
            stream: {node: NodePosition(epoch, chains.get(node, "")) for node, epoch in nodes.items()}
            for stream, nodes in streams.items()
        }
        kept, refused = self.log.read(lambda log: commits.check_positions(log, "p", ConsumerPosition(streams=at)))
        self.log.write(lambda tx: commits.save_position(tx, "p", consumer, kept)).result(10)
        return refused

    def health(self, pipeline: str, node: str) -> None:
        body = Health(state="running", sent_us=1)
        self.log.write(lambda tx: commits.save_health(tx, pipeline, node, body)).result(10)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    log = HubLog(SqliteStore(tmp_path / "log.sqlite"), clock_us=lambda: 5, limits=LIMITS)
    yield Hub(log)
    log.close()


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(Rejection) as raised:
        work()
    assert (raised.value.refusal.error, raised.value.status) == ("limit_reached", 409)
    return str(raised.value)


def streams(epoch: int, *names: str) -> EpochEntry:
    return EpochEntry(epoch=epoch, streams={name: StreamSegment(runs=()) for name in names}, created_us=0)


def test_a_node_has_a_bounded_number_of_pipelines_and_a_pipeline_of_nodes(hub: Hub) -> None:
    hub.lease("p", "n")
    hub.lease("q", "n")
    assert "at most 2 pipelines of a node" in refused(lambda: hub.lease("r", "n"))
    hub.lease("q", "n")
    hub.lease("p", "m")
    hub.lease("p", "o")
    why = refused(lambda: hub.lease("p", "one too many"))
    assert "at most 3 nodes of a pipeline" in why
    assert "fordstone hub forget node" in why
    assert "--nodes-max" in why
    assert [(one.pipeline, one.node) for one in hub.log.read(lambda log: log.nodes())] == [
        ("p", "m"),
        ("p", "n"),
        ("p", "o"),
        ("q", "n"),
    ]


def test_a_pipeline_has_a_bounded_number_of_streams_and_no_node_takes_them_all(hub: Hub) -> None:
    for node in "nmo":
        hub.lease("p", node)
    assert "at most 2 streams of a node" in refused(lambda: hub.commit("n", streams(1, "a", "b", "c")))
    hub.commit("n", streams(1, "a"), streams(2, "b"))
    hub.commit("n", streams(3, "a", "b"))
    assert "streams of a node" in refused(lambda: hub.commit("n", streams(4, "c")))
    hub.commit("m", streams(1, "a", "c"))
    names = [one.stream for one in hub.log.read(lambda log: log.streams())]
    assert names == ["a", "b", "c"]
    assert hub.log.read(lambda log: commits.head(log, "p", "n")).epoch == 3, "what was rejected is not there"


def test_streams_of_all_nodes_count_together(tmp_path: Path) -> None:
    limits = LogLimits(streams_per_pipeline=5)
    log = HubLog(SqliteStore(tmp_path / "log.sqlite"), clock_us=lambda: 5, limits=limits)
    hub = Hub(log)
    for number in range(6):
        hub.lease("p", f"n{number}")
    for number in range(5):
        hub.commit(f"n{number}", streams(1, f"s{number}"))
    why = refused(lambda: hub.commit("n5", streams(1, "s5")))
    assert "at most 5 streams of a pipeline" in why
    assert "fordstone hub forget stream" in why
    assert "--streams-max" in why
    hub.commit("n5", streams(1, "s0"))
    log.close()


def test_control_tables_are_bounded_per_pipeline_and_in_all(hub: Hub) -> None:
    hub.publish("p", "a")
    hub.publish("p", "b")
    assert "at most 2 control tables of a pipeline" in refused(lambda: hub.publish("p", "c"))
    hub.publish("q", "a")
    assert "at most 3 control tables" in refused(lambda: hub.publish("r", "a"))
    hub.publish("p", "a", batch=2)


def test_consumers_are_bounded_per_pipeline_and_in_all(hub: Hub) -> None:
    hub.register("p", "a")
    hub.register("p", "b")
    why = refused(lambda: hub.register("p", "c"))
    assert "at most 2 consumers of a pipeline" in why
    assert "fordstone hub forget consumer" in why
    hub.register("q", "a")
    assert "at most 3 consumers" in refused(lambda: hub.register("r", "a"))
    hub.register("p", "a")


def test_positions_of_nodes_without_rows_in_the_stream_are_not_kept(hub: Hub) -> None:
    hub.lease("p", "n")
    hub.commit("n", entry(1, "a"))
    assert hub.passed("a", s={"n": 1, "m": 0}, t={"n": 1, "m": 0}) == {}
    kept = hub.log.read(lambda log: commits.position(log, "p", "a"))
    assert {stream: set(nodes) for stream, nodes in kept.streams.items()} == {"s": {"n"}, "t": set()}
    assert list(hub.passed("a", s={"m": 1})["s"]) == ["m"], "the hub was set back: the reader has to know"


def test_a_position_that_was_checked_before_its_node_was_forgotten_leaves_no_row(hub: Hub) -> None:
    hub.lease("p", "n")
    position = ConsumerPosition(streams={"s": {"n": NodePosition(0, "")}})
    hub.log.write(lambda tx: commits.save_position(tx, "p", "a", position)).result(10)
    assert hub.log.read(lambda log: commits.position(log, "p", "a")).streams == {"s": {}}


def test_a_consumer_reads_a_bounded_number_of_streams(hub: Hub) -> None:
    most = LIMITS.streams_per_pipeline
    hub.passed("a", **{f"s{number}": {} for number in range(most)})
    hub.passed("a", s3={})
    assert f"at most {most} streams of a consumer" in refused(lambda: hub.passed("a", another={}))


def test_only_a_node_with_a_lease_has_health(hub: Hub) -> None:
    with pytest.raises(Rejection, match="no lease") as raised:
        hub.health("p", "junk")
    assert raised.value.status == 404
    assert hub.log.read(lambda log: log.nodes()) == ()
    hub.lease("p", "n")
    hub.health("p", "n")
    (info,) = hub.log.read(lambda log: log.nodes())
    assert info.health is not None


def test_a_node_that_meets_a_limit_keeps_everything_and_tries_again() -> None:
    assert reaction_to("limit_reached") is Reaction.RETRY


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="nodes_per_pipeline"):
        LogLimits(nodes_per_pipeline=0)


def test_a_usual_commit_asks_for_no_counts(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.lease("p", "n")
    hub.commit("n", entry(1))

    def count(*_: object) -> int:
        raise AssertionError("it counts")

    monkeypatch.setattr("fordstone.hub.store.log_reader.LogReader._count", count)
    hub.commit("n", entry(2))
