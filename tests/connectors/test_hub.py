"""A stream at the hub as a source: whole epochs, declared time, and a hub that is away."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch, FakeHub, wait_until_listed

from fordstone.connectors import hub as hub_module
from fordstone.connectors import registry
from fordstone.connectors.base import (
    ALL_ROWS,
    Chunk,
    ConnectorSpec,
    Delivery,
    Idleness,
    Reader,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.connectors.hub import QUIET, HubOptions, HubSource
from fordstone.epochs import untrusted
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import (
    ConfigError,
    HubRefusedError,
    NodeQuarantinedError,
    NodeStoppedError,
    PipelineError,
    SourceError,
)
from fordstone.hub.client import reader as reader_module
from fordstone.hub.client.client import RETRY_SECONDS_MAX
from fordstone.hub.client.reader import MAX_AHEAD_US, StreamReader
from fordstone.hub.messages import QuarantineRequest
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan.ids import PartitionId, Position
from fordstone.state.base import RunRef
from fordstone.testing.contracts.connector import SourceContract

SCHEMA = Schema.of({"device": "string", "n": "bigint"})
START = datetime(2026, 1, 1, tzinfo=UTC)


def spec(**options: str) -> ConnectorSpec:
    return ConnectorSpec("hub", {"pipeline": PIPELINE, "stream": STREAM, **options})


def frame(*numbers: int, late: Sequence[int | None] | None = None) -> pl.DataFrame:
    made = pl.DataFrame({"device": ["d"] * len(numbers), "n": list(numbers)}, schema=SCHEMA.polars)
    return made if late is None else made.with_columns(pl.Series(ROW_WATERMARK, late, dtype=pl.Int64))


def opened(
    hub: FakeHub,
    *,
    bounded: bool = True,
    schema: Schema = SCHEMA,
    clock_us: Callable[[], int] = lambda: 0,
    pause: Callable[[float], None] | None = None,
    from_earliest: bool = False,
) -> HubSource:
    return HubSource(
        hub,
        HubOptions(pipeline=PIPELINE, stream=STREAM),
        schema,
        bounded=bounded,
        clock_us=clock_us,
        from_earliest=from_earliest,
        pause=pause or (lambda _: pytest.fail("it waited")),
        chance=lambda: 1.0,
    )


def reader(source: Source, node: str = "a", position: int = 0) -> Reader:
    return source.open(PartitionId(node), Position(position), with_positions=True)


def chunk_of(given: Chunk | None) -> Chunk:
    assert given is not None
    return given


def known(source: HubSource, node: str, epoch: int) -> None:
    """Wait until the source has heard of an epoch."""
    source.partitions()
    assert source._facts is not None
    wait_until_listed(source._facts, node, epoch)


# The contract of the seam: here an epoch is a row, so that each row has a position of its own.


class _RowsAsPositions(Reader):
    def __init__(self, inner: Reader) -> None:
        self._inner = inner

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        chunk = self._inner.read(rows_max, until)
        if chunk is None or chunk.row_positions is None:
            return chunk
        return replace(chunk, row_positions=chunk.row_positions // 2**31 - 1)

    def close(self) -> None:
        self._inner.close()


class _EpochsOfOneRow(HubSource):
    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        return _RowsAsPositions(super().open(partition, position, with_positions=with_positions))


class TestHub(SourceContract):
    def fill(self, place: Path) -> ConnectorSpec:
        self.hub = FakeHub(page_nodes=1)
        self.sources: list[HubSource] = []
        for node, rows in zip(("a", "b"), self.expected(), strict=True):
            for row in rows.iter_slices(1):
                self.hub.add(node, Epoch(runs=[row.with_columns(pl.lit(None, dtype=pl.Int64).alias(ROW_WATERMARK))]))
        return spec()

    def expected(self) -> Sequence[pl.DataFrame]:
        return [self._made(0, 40), self._made(1000, 12)]

    def grow(self, place: Path) -> pl.DataFrame | None:
        rows = self._made(5000, 5)
        epoch = max(self.hub.add("a", Epoch(runs=[row])) for row in rows.iter_slices(1))
        for source in self.sources:
            if source._facts is not None and not source.bounded:
                known(source, "a", epoch)
        return rows

    def source(self, spec: ConnectorSpec, *, bounded: bool = True) -> Source:
        options = HubOptions(pipeline=PIPELINE, stream=STREAM)
        made = _EpochsOfOneRow(self.hub, options, self.schema, bounded=bounded, clock_us=lambda: 0)
        self.sources.append(made)
        return made

    def _made(self, first: int, count: int) -> pl.DataFrame:
        numbers = range(first, first + count)
        columns = {
            "device": [None if number % 5 == 0 else f"é{number}" for number in numbers],
            "ts": [START + timedelta(seconds=number) for number in numbers],
            "temp": [number / 7 for number in numbers],
            "n": list(numbers),
        }
        return pl.DataFrame(columns, schema=self.schema.polars)


# What a hub may not do.


def numbers(*values: int) -> list[Epoch]:
    return [Epoch(runs=[frame(value)]) for value in values]


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(
    ("onward", "reason"),
    [
        pytest.param([], "the log ends at epoch 3", id="no other epochs yet"),
        pytest.param([6], "the log ends at epoch 4", id="other epochs, not as many yet"),
        pytest.param([6, 7], "other content", id="as many other epochs"),
        pytest.param([6, 7, 8, 9], "other content", id="more other epochs than were read"),
        pytest.param([3, 4, 5, 6], None, id="the same epochs and more"),
    ],
)
def test_a_hub_that_was_set_back_is_noticed_however_far_it_has_come_since(
    bounded: bool, onward: list[int], reason: str | None
):
    hub = FakeHub()
    hub.add("a", *numbers(0, 1, 2, 3, 4))
    cut = hub.cut("a", 5)
    hub.set_back("a", 3)
    if onward:
        hub.add("a", *numbers(*onward))
    source = opened(hub, bounded=bounded)
    source.restore({"a": cut})
    known(source, "a", 3 + len(onward))
    if reason is None:
        assert chunk_of(reader(source, position=5).read(10)).frame["n"].to_list() == [5, 6]
    else:
        with pytest.raises(NodeStoppedError, match=rf"{reason}.*fordstone hub restore.*fordstone hub skip") as raised:
            reader(source, position=5).read(10)
        assert (raised.value.node, raised.value.epoch) == ("a", 6)
        with pytest.raises(NodeStoppedError, match=reason):
            source.plan_read(PartitionId("a"), Position(5), 1)
        if 3 + len(onward) <= 5:  # else there is more, and reading it is what notices
            with pytest.raises(NodeStoppedError, match=reason):
                source.plan_read(PartitionId("a"), Position(5), ALL_ROWS)
    source.close()


def test_a_hub_that_is_set_back_while_a_center_runs_is_noticed():
    hub = FakeHub()
    hub.add("a", *numbers(0, 1, 2, 3))
    source = opened(hub, bounded=False)
    reading = reader(source)
    assert chunk_of(reading.read(10)).position == 4
    hub.set_back("a", 2)
    hub.add("b", Epoch())
    known(source, "b", 1)
    assert reading.read(10) is None, "the node has not come back yet"
    known(source, "a", hub.add("a", *numbers(7, 8, 9)))
    with pytest.raises(NodeStoppedError, match="other content"):
        reading.read(10)
    source.close()


def test_a_log_with_another_id_is_listed_again_and_every_position_compared_with_it():
    hub = FakeHub(log_id="log-1")
    hub.add("a", *numbers(0, 1))
    hub.add("b", *numbers(5))
    source = opened(hub, bounded=False)
    first, second = reader(source, "a"), reader(source, "b")
    assert chunk_of(first.read(10)).position == 2
    assert chunk_of(second.read(10)).position == 1
    other = FakeHub()
    other.add("a", *numbers(0, 1, 2))
    other.add("b", *numbers(6, 7))
    with hub._grown:
        hub.entries, hub.newest, hub._chains, hub._seq = other.entries, other.newest, other._chains, other._seq
        hub.blobs |= other.blobs
        hub.log_id = "log-2"
        hub._grown.notify_all()
    known(source, "b", 2)
    assert chunk_of(first.read(10)).frame["n"].to_list() == [2], "the same log as far as it was read"
    with pytest.raises(NodeStoppedError, match="other content"):
        second.read(10)
    source.close()


def test_a_commit_of_a_restored_log_is_news_although_the_former_log_had_one_with_its_number():
    """The node joined after the backup, so that its first commit in the restored log has the number that it had before."""
    hub = FakeHub(log_id="log-1")
    hub.add("a", *numbers(0))
    source = opened(hub, bounded=False)
    known(source, "a", 1)
    entries, hub.entries = (
        hub.entries,
        [],
    )  # the hub is restored when the center knows of the commit, and before it asks for it
    reading = reader(source)
    assert reading.read(10) is None
    with hub._grown:
        hub.entries, hub.log_id = entries, "log-2"
    known(source, "b", hub.add("b", Epoch()))
    assert chunk_of(reading.read(10)).frame["n"].to_list() == [0]
    source.close()


def test_a_hub_that_removed_all_that_was_read_was_not_set_back():
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(n)]) for n in range(5)))
    cut = hub.cut("a", 5)
    hub.remove_epochs("a", 5)
    hub.add("b", Epoch())
    source = opened(hub, bounded=False)
    source.restore({"a": cut})
    known(source, "b", 1)
    assert reader(source, position=5).read(10) is None
    assert hub.asked == [], "nothing is new"
    source.close()


# What a chunk is.


def test_small_epochs_are_read_together_and_a_large_one_alone():
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(n)]) for n in range(4)), Epoch(runs=[frame(*range(10, 30))]), Epoch())
    source = opened(hub)
    reading = reader(source)
    sizes = []
    while not (chunk := chunk_of(reading.read(3))).ended:
        sizes.append((int(chunk.position), chunk.frame.height))
    assert sizes == [(3, 3), (4, 1), (5, 20)]
    assert (int(chunk.position), chunk.frame.height) == (6, 0)


def test_an_epoch_without_rows_moves_position_and_time():
    hub = FakeHub(now_us=1000)
    hub.add("a", Epoch(watermark_us=70))
    source = opened(hub, bounded=False)
    chunk = chunk_of(reader(source).read(10))
    assert (int(chunk.position), chunk.watermark_us, chunk.frame.height, chunk.ended) == (1, 70, 0, False)
    assert chunk.frame.schema == SCHEMA.polars
    source.close()


def test_rows_that_were_late_at_the_edge_are_marked_and_their_column_does_not_stay():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[frame(1, 2, late=[None, 7]), frame(3)]), Epoch(runs=[frame(4, late=[8])]))
    chunk = chunk_of(reader(opened(hub)).read(10))
    assert chunk.frame.columns == list(SCHEMA)
    assert chunk.late is not None
    assert chunk.late.to_list() == [None, 7, None, 8]


def test_ids_of_rows_are_unique_and_do_not_depend_on_how_reads_are_cut():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[frame(1, 2), frame(3)]), Epoch(runs=[frame(4, 5)]))
    whole = chunk_of(reader(opened(hub)).read(100)).row_positions
    reading = reader(opened(hub))
    cut = [chunk_of(reading.read(1)).row_positions for _ in range(2)]
    assert whole is not None
    assert whole.n_unique() == 5
    assert [place for part in cut if part is not None for place in part.to_list()] == whole.to_list()


def test_the_columns_come_in_our_order_and_types():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[pl.DataFrame({"more": [1], "n": pl.Series([7], dtype=pl.Int32), "device": ["x"]})]))
    assert_frame_equal(
        chunk_of(reader(opened(hub)).read(1)).frame, pl.DataFrame({"device": ["x"], "n": [7]}, schema=SCHEMA.polars)
    )


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (Epoch(watermark_us=5), 5),
        (Epoch(watermark_us=10_000 + MAX_AHEAD_US), 10_000 + MAX_AHEAD_US),
        (Epoch(watermark_us=10_001 + MAX_AHEAD_US), 10_000 + MAX_AHEAD_US),
        (Epoch(watermark_us=TIME_MIN_US), TIME_MIN_US),
    ],
)
def test_a_nodes_time_is_no_further_ahead_of_the_hubs_clock_than_an_hour(epoch: Epoch, expected: int):
    hub = FakeHub(now_us=10_000)
    hub.add("a", epoch)
    assert chunk_of(reader(opened(hub)).read(1)).watermark_us == expected


def test_time_does_not_go_back_when_the_hubs_clock_does_however_reads_are_cut():
    hub = FakeHub(now_us=10_000)
    hub.add("a", Epoch(watermark_us=2 * MAX_AHEAD_US))
    hub.now_us = 3_000
    hub.add("a", Epoch(watermark_us=2 * MAX_AHEAD_US))
    assert chunk_of(reader(opened(hub)).read(9)).watermark_us == 10_000 + MAX_AHEAD_US


# What is there.


def test_all_nodes_that_the_hub_knows_are_seen_together_although_they_come_in_pages():
    hub = FakeHub(page_nodes=1)
    for node in ("c", "a", "b"):
        hub.add(node, Epoch())
    source = opened(hub, bounded=False)
    assert list(source.partitions()) == ["a", "b", "c"]
    source.close()


def test_a_node_that_comes_later_is_found():
    hub = FakeHub()
    hub.add("a", Epoch())
    source = opened(hub, bounded=False)
    assert list(source.partitions()) == ["a"]
    known(source, "b", hub.add("b", Epoch()))
    assert list(source.partitions()) == ["a", "b"]
    source.close()


def test_bounded_input_ends_with_what_was_there_when_it_was_first_asked():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[frame(1)]))
    source = opened(hub)
    assert list(source.partitions()) == ["a"]
    hub.add("a", Epoch(runs=[frame(2)]))
    hub.add("b", Epoch(runs=[frame(3)]))
    reading = reader(source)
    chunk = chunk_of(reading.read(10))
    assert (chunk.frame["n"].to_list(), chunk.ended) == ([1], True)
    assert list(source.partitions()) == ["a"]


@pytest.mark.parametrize("ended", [True, False])
def test_bounded_input_ends_with_its_last_epoch_and_not_with_the_end_of_a_node_before_it(ended: bool):
    hub = FakeHub()
    hub.add("a", Epoch(watermark_us=7), Epoch(watermark_us=TIME_MAX_US, ended=ended), Epoch(watermark_us=9))
    reading = reader(opened(hub))
    found = [chunk_of(reading.read(rows_max)) for rows_max in (1,)]
    assert [(chunk.watermark_us, chunk.ended) for chunk in found] == [(9, True)]


def test_a_node_that_has_ended_is_finished_and_still_open_where_input_is_not_bounded():
    hub = FakeHub()
    hub.add("a", Epoch(watermark_us=TIME_MAX_US, ended=True))
    source = opened(hub, bounded=False)
    chunk = chunk_of(reader(source).read(1))
    assert (chunk.ended, chunk.watermark_us) == (False, TIME_MIN_US)
    assert not source.plan_read(PartitionId("a"), Position(1), 1).ended
    assert source.idleness(PartitionId("a"), Position(0)) is Idleness.EXPECTED
    assert source.idleness(PartitionId("a"), Position(1)) is Idleness.FINISHED
    source.close()


def test_reach_reads_nothing():
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(n)]) for n in range(5)))
    source = opened(hub)
    assert source.plan_read(PartitionId("a"), Position(1), 2).position == 3
    assert source.plan_read(PartitionId("nobody"), Position(4), 2).position == 4
    assert "blob" not in hub.calls


# Epochs by need.


def test_one_request_lists_epochs_of_all_nodes_that_are_read_and_none_is_made_when_nothing_is_new():
    hub = FakeHub()
    nodes = [f"n{number}" for number in range(20)]
    for node in nodes:
        hub.add(node, *numbers(1, 2, 3))
    source = opened(hub, bounded=False)
    readers = {node: reader(source, node) for node in nodes}
    for _ in range(3):
        assert [chunk_of(one.read(1)).frame["n"].len() for one in readers.values()] == [1] * 20
    # One row of each was asked for, so that each request brings one epoch of each.
    assert [len(request.nodes) for request in hub.asked] == [20, 20, 20]
    assert all(one.read(1) is None for one in readers.values())
    assert len(hub.asked) == 3
    known(source, "n3", hub.add("n3", *numbers(4)))
    known(source, "n7", hub.add("n7", *numbers(4)))
    assert [node for node, one in readers.items() if one.read(1) is not None] == ["n3", "n7"]
    assert [sorted(request.nodes) for request in hub.asked[3:]] == [["n3", "n7"]]
    source.close()


def test_however_far_a_reader_lags_it_holds_a_bounded_number_of_epochs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_module, "EPOCHS_HELD_MAX", 12)
    hub = FakeHub()
    for node in ("a", "b", "c"):
        hub.add(node, *numbers(*range(50)))
    source = opened(hub)
    readers = [reader(source, node) for node in ("a", "b", "c")]
    found = dict.fromkeys(("a", "b", "c"), 0)
    held = []
    while any(count < 50 for count in found.values()):
        for node, one in zip(found, readers, strict=True):
            found[node] += chunk_of(one.read(100)).frame.height
            held.append(source._buffer.count)
    assert found == {"a": 50, "b": 50, "c": 50}
    assert 0 < max(held) <= 12


def test_epochs_that_are_held_for_other_nodes_stay_bounded_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_module, "EPOCHS_HELD_MAX", 12)
    hub = FakeHub()
    for node in "abcde":
        hub.add(node, *numbers(*range(50)))
    source = opened(hub)
    source.partitions()
    readers = {node: reader(source, node) for node in "ab"}
    assert chunk_of(readers["a"].read(100)).frame.height == 6, "half of what may be held"
    readers |= {node: reader(source, node) for node in "c"}
    assert chunk_of(readers["c"].read(100)).frame.height == 6
    assert source._buffer.count == 12
    readers |= {node: reader(source, node) for node in "de"}
    readers["d"].read(100)
    assert [sorted(request.nodes) for request in hub.asked] == [["a", "b"], ["a", "c"], ["d"]]
    assert source._buffer.count == 12


def test_a_task_asks_for_all_its_planned_reads_at_once_and_for_nothing_else():
    hub = FakeHub()
    for node in ("a", "b", "c"):
        hub.add(node, *numbers(1, 2, 3, 4))
    source = opened(hub, bounded=False)
    source.restore({"a": hub.cut("a", 3), "b": hub.cut("b", 2)})
    source.expect_reads({PartitionId("a"): (Position(1), Position(3)), PartitionId("b"): (Position(0), Position(2))})
    assert chunk_of(reader(source, "a", 1).read(9, Position(3))).frame["n"].to_list() == [2, 3]
    assert chunk_of(reader(source, "b", 0).read(9, Position(2))).frame["n"].to_list() == [1, 2]
    (request,) = hub.asked
    assert {node: (one.after, one.until, one.seen.epoch) for node, one in request.nodes.items()} == {
        "a": (1, 3, 3),
        "b": (0, 2, 2),
    }
    assert "nodes" not in hub.calls


def test_a_task_asks_no_more_for_what_it_has_read():
    hub = FakeHub()
    for node in ("a", "b"):
        hub.add(node, *numbers(1, 2))
    source = opened(hub, bounded=False)
    source.expect_reads({PartitionId(node): (Position(0), Position(2)) for node in ("a", "b")})
    for node in ("a", "b"):
        reading = reader(source, node)
        assert [chunk_of(reading.read(1, Position(2))).frame["n"].to_list() for _ in range(2)] == [[1], [2]]
    assert [{node: one.after for node, one in request.nodes.items()} for request in hub.asked] == [
        {"a": 0, "b": 0},
        {"a": 1},
        {"b": 1},
    ]


def test_a_planned_read_is_of_the_log_that_it_was_planned_from():
    hub = FakeHub()
    hub.add("a", *numbers(1, 2, 3))
    planned = hub.cut("a", 3)
    hub.set_back("a", 1)
    hub.add("a", *numbers(7, 8, 9))
    source = opened(hub, bounded=False)
    source.restore({"a": planned})
    with pytest.raises(NodeStoppedError, match="other content"):
        reader(source, position=1).read(9, Position(3))


def test_a_planner_asks_once_per_batch_for_all_nodes_and_not_at_all_when_nothing_is_new():
    hub = FakeHub()
    nodes = [f"n{number}" for number in range(20)]
    for node in nodes:
        hub.add(node, *numbers(*range(10)))
    source = opened(hub, bounded=False)
    source.partitions()
    at = dict.fromkeys(nodes, 0)

    def batch(rows_max: int) -> int:
        """As Spark's planner asks; gives the number of requests."""
        before = len(hub.asked)
        source.restore(
            {node: hub.cut(node, epoch) if epoch else PartitionCut(position=0) for node, epoch in at.items()}
        )
        for _ in range(2):
            for node, position in at.items():
                source.plan_read(PartitionId(node), Position(position), 1)
        for node, position in at.items():
            planned = source.plan_read(PartitionId(node), Position(position), rows_max).position
            at[node] = int(planned)
            assert source.identity(PartitionId(node), planned) == hub.cut(node, at[node]).identity
        return len(hub.asked) - before

    assert batch(4) == 2, "how many rows will be planned is not known before the first batch"
    assert set(at.values()) == {4}
    assert batch(4) == 1
    assert set(at.values()) == {8}
    assert batch(5) == 1
    assert set(at.values()) == {10}
    assert batch(5) == 0
    assert not any(request.listed for request in hub.asked), "the planner needs no epochs, only where they end"
    source.close()


# A hub that is away.


def test_while_the_hub_is_away_there_is_nothing_to_read_and_nothing_fails():
    hub = FakeHub(away=True)
    source = opened(hub, bounded=False)
    assert list(source.partitions()) == []
    assert reader(source).read(1) is None
    assert source.plan_read(PartitionId("a"), Position(3), 10).position == 3
    hub.add("a", Epoch(runs=[frame(1)]))
    hub.goes(away=False)
    known(source, "a", 1)
    assert list(source.partitions()) == ["a"]
    source.close()


def test_what_is_known_while_the_hub_is_away_is_neither_planned_nor_read():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[frame(1)]))
    source = opened(hub, bounded=False)
    known(source, "a", 1)
    hub.goes(away=True)
    follower = source._follower
    assert follower is not None
    while not follower.away:
        assert follower._thread.is_alive()
        follower._thread.join(0.001)
    assert list(source.partitions()) == ["a"]
    assert source.plan_read(PartitionId("a"), Position(0), 10).position == 0
    assert reader(source).read(10) is None
    assert "blob" not in hub.calls
    source.close()


def test_after_a_blob_could_not_be_had_none_is_asked_for_a_while_and_then_the_same_rows_come():
    now_us = 0
    hub = FakeHub(away_for_blobs=True)
    hub.add("a", Epoch(runs=[frame(1)]), Epoch(runs=[frame(2)]))
    source = opened(hub, clock_us=lambda: now_us)
    reading = reader(source)
    assert reading.read(10) is None
    hub.away_for_blobs, asked = False, hub.calls.count("blob")
    assert reading.read(10) is None
    assert hub.calls.count("blob") == asked
    now_us = QUIET.first_us
    assert chunk_of(reading.read(10)).frame["n"].to_list() == [1, 2]


def test_a_promised_read_waits_for_the_hub_with_longer_and_longer_pauses():
    hub, pauses = FakeHub(away=True), list[float]()
    hub.add("a", Epoch(runs=[frame(1)]), Epoch(runs=[frame(2)]))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        hub.away = len(pauses) < 4

    source = opened(hub, bounded=False, pause=pause)
    chunk = chunk_of(reader(source).read(10, Position(2)))
    assert chunk.frame["n"].to_list() == [1, 2]
    assert pauses == sorted(pauses)
    assert len(pauses) == 4
    assert source._follower is None, "a process that only makes planned reads follows no stream"
    assert "consumer" not in hub.calls


def test_a_promised_read_gives_up_after_a_bounded_time_and_says_what_to_do():
    pauses = list[float]()
    source = opened(FakeHub(away=True), bounded=False, pause=pauses.append)
    with pytest.raises(SourceError, match="start the hub again"):
        reader(source).read(10, Position(2))
    assert RETRY_SECONDS_MAX / 2 < sum(pauses) <= RETRY_SECONDS_MAX


def test_bounded_input_from_a_hub_that_is_away_is_an_error_and_may_be_tried_again():
    hub = FakeHub(away=True)
    source = opened(hub, pause=lambda _: None)
    with pytest.raises(SourceError, match="start the hub again"):
        source.partitions()
    hub.away = False
    hub.add("a", Epoch())
    assert list(source.partitions()) == ["a"]


def test_a_token_that_is_not_for_centers_is_reported():
    hub = FakeHub(refuses=HubRefusedError("this token may not read streams.", status=403, code="forbidden"))
    for bounded in (True, False):
        source = opened(hub, bounded=bounded)
        with pytest.raises(SourceError, match=r"may not read streams.*--center"):
            source.partitions()
        source.close()


def test_a_thread_that_fails_is_not_silently_missed(monkeypatch: pytest.MonkeyPatch):
    hub = FakeHub()
    monkeypatch.setattr(hub, "stream_nodes", lambda *_, **__: 1 / 0)
    source = opened(hub, bounded=False)
    with pytest.raises(ZeroDivisionError):
        source.partitions()


# What is gone.


ROTTEN: dict[str, tuple[Callable[[bytes], bytes | HubRefusedError | None], str]] = {
    "lost": (lambda _: None, "The hub lists blob .*, and does not have it"),
    "other bytes": (lambda data: data[:-1] + b"x", "other bytes than its name says"),
    "found by the hub": (
        lambda _: HubRefusedError("blob 12ab is damaged at the hub.", status=410, code="gone"),
        "12ab is damaged at the hub",
    ),
}


@pytest.mark.parametrize("case", ROTTEN)
def test_rows_that_are_damaged_at_the_hub_put_their_node_into_quarantine(case: str):
    rot, reason = ROTTEN[case]
    hub = FakeHub()
    hub.add("a", *numbers(1))
    (good,) = hub.blobs
    hub.add("a", *numbers(2, 3))
    hub.add("b", *numbers(7))
    bad = next(entry.runs[0].digest for entry in hub.entries if entry.epoch == 2)
    data = hub.blobs.pop(bad)
    assert isinstance(data, bytes)
    rotten = rot(data)
    if rotten is not None:
        hub.blobs[bad] = rotten
    source = opened(hub, bounded=False)
    assert chunk_of(reader(source).read(9)).position == 1, "what was before it is read"
    assert reader(source, position=1).read(9) is None
    assert hub.quarantined["a"].epoch == 2
    assert re.search(reason, hub.quarantined["a"].reason)
    assert chunk_of(reader(source, "b").read(1)).position == 1
    source.close()
    with pytest.raises(NodeQuarantinedError, match=rf"epoch 2 of node a.*{reason}.*Restore.*fordstone hub skip"):
        reader(opened(hub), position=1).read(1, Position(3))  # it was planned before
    assert good in hub.blobs


def test_an_epoch_that_was_removed_since_it_was_listed_is_an_error_and_no_quarantine(monkeypatch: pytest.MonkeyPatch):
    hub = FakeHub()
    hub.add("a", *numbers(1))
    source = opened(hub)
    read_blob = hub.read_blob

    def removed(ref: RunRef, direct_url: str | None = None) -> bytes:
        hub.blobs.clear()
        hub.entries.clear()
        return read_blob(ref, direct_url)

    monkeypatch.setattr(hub, "read_blob", removed)
    with pytest.raises(SourceError, match=r"epoch 1 of node a: the hub has removed it since it was listed"):
        reader(source).read(1)
    assert hub.quarantined == {}


# What is too much.


def test_one_run_that_is_named_often_may_become_no_more_than_an_epoch_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(untrusted, "EPOCH_BYTES_FREE", 100_000)
    monkeypatch.setattr(untrusted, "DECODED_RATIO_MAX", 4)
    rows = frame(*range(500))
    hub = FakeHub()
    hub.add("a", Epoch(runs=[rows] * 3), Epoch(runs=[rows] * 400))
    hub.add("b", *numbers(7))
    source = opened(hub, bounded=False)
    assert chunk_of(reader(source).read(ALL_ROWS)).frame.height == 1500
    hub.calls.clear()
    assert reader(source, position=1).read(ALL_ROWS) is None
    assert hub.calls.count("blob") == 1, "it is read once"
    assert hub.quarantined["a"].epoch == 2
    assert "the rows of its epoch become more than 100000 bytes" in hub.quarantined["a"].reason
    assert chunk_of(reader(source, "b").read(1)).position == 1
    source.close()


def test_a_read_ends_when_its_rows_take_too_much_memory_and_goes_on_with_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "READ_DECODED_BYTES", 100_000)
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(*range(number, number + 1000))]) for number in range(20)))
    position, reads = 0, 0
    source = opened(hub)
    while position < 20:
        chunk = chunk_of(reader(source, position=position).read(ALL_ROWS, Position(20)))
        assert 1_000 <= chunk.frame.height <= 10_000
        position, reads = int(chunk.position), reads + 1
    assert 2 <= reads <= 20


def test_few_runs_are_fetched_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "FETCH_AHEAD_RUNS", 3)
    hub = FakeHub()
    hub.add("a", *numbers(*range(30)))
    epochs = StreamReader(hub, PIPELINE, STREAM).frames(hub.entries, SCHEMA, None)
    for number in range(1, 6):
        next(epochs)
        assert hub.calls.count("blob") <= number + 3
    epochs.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [pl.DataFrame({"n": [1]}), pl.DataFrame({"device": ["d"], "n": ["many"]})])
def test_rows_of_another_plan_put_their_node_into_quarantine(rows: pl.DataFrame):
    hub = FakeHub()
    hub.add("a", Epoch(runs=[rows]))
    hub.add("b", Epoch(runs=[frame(7)]))
    source = opened(hub, bounded=False)
    assert reader(source).read(1) is None
    assert hub.quarantined["a"].epoch == 1
    assert source.idleness(PartitionId("a"), Position(0)) is Idleness.FINISHED, "nothing waits for it"
    assert source.plan_read(PartitionId("a"), Position(0), 10).position == 0
    assert chunk_of(reader(source, "b").read(1)).position == 1
    source.close()
    with pytest.raises(SourceError, match=r"same version of the pipeline.*fordstone hub skip"):
        reader(opened(hub)).read(1, Position(1))  # it was planned before


def test_a_planned_read_that_nothing_came_of_ends_before_the_quarantine():
    hub = FakeHub()
    hub.add("a", *numbers(1, 2), Epoch(runs=[pl.DataFrame({"n": [1]})]), *numbers(4))
    source = opened(hub, bounded=False)
    node = PartitionId("a")
    assert source.still_planned(node, Position(0), Position(4)) == 4
    hub.quarantine(PIPELINE, "a", QuarantineRequest(epoch=3, reason="bad", by="center"))
    source.close()
    again = opened(hub, bounded=False)
    assert again.still_planned(node, Position(0), Position(4)) == 2
    assert again.still_planned(node, Position(2), Position(4)) == 2
    assert again.still_planned(node, Position(0), Position(2)) == 2
    again.close()


def test_a_rejected_epoch_is_reported_once_the_hub_is_back():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[pl.DataFrame({"n": [1]})]))
    now_us = 0
    source = opened(hub, bounded=False, clock_us=lambda: now_us)
    hub.away_for_quarantine = True
    assert reader(source).read(1) is None
    assert hub.quarantined == {}
    hub.away_for_quarantine = False
    now_us += 60_000_000
    assert reader(source).read(1) is None
    assert hub.quarantined["a"].epoch == 1


def test_an_epoch_that_the_hub_has_removed_is_an_error_for_a_reader_that_needs_it():
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(n)]) for n in range(5)))
    hub.remove_epochs("a", 3)
    with pytest.raises(NodeStoppedError, match=r"after epoch 1: epochs up to 3 are gone.*same consumer name"):
        reader(opened(hub), position=1).read(1)
    with pytest.raises(NodeStoppedError, match=r"after epoch 1: epochs up to 3 are gone"):
        reader(opened(hub), position=1).read(1, Position(3))
    assert chunk_of(reader(opened(hub), position=3).read(1)).position == 4


@pytest.mark.parametrize("bounded", [True, False])
def test_a_center_without_state_reads_a_stream_from_its_middle_only_if_that_is_asked_for(bounded: bool):
    hub = FakeHub()
    hub.add("a", *numbers(*range(5)))
    hub.add("b", *numbers(7))
    hub.remove_epochs("a", 3)
    hub.remove_epochs("b", 1)
    source = opened(hub, bounded=bounded)
    for node in ("a", "b"):
        with pytest.raises(NodeStoppedError, match=r"no position of its own yet.*--from-earliest"):
            reader(source, node).read(1)
        with pytest.raises(NodeStoppedError, match=r"--from-earliest"):
            source.plan_read(PartitionId(node), Position(0), 10)
    source.close()
    earliest = opened(hub, bounded=bounded, from_earliest=True)
    assert earliest.plan_read(PartitionId("a"), Position(0), 1).position == 4
    assert chunk_of(reader(earliest).read(9)).frame["n"].to_list() == [3, 4]
    passed = chunk_of(reader(earliest, "b").read(9))
    assert (passed.position, passed.frame.height) == (1, 0), "it stands where a later start goes on without the option"
    assert earliest.plan_read(PartitionId("b"), Position(0), 9).position == 1
    earliest.close()


def test_a_planned_epoch_that_the_hub_never_had_is_an_error():
    hub = FakeHub()
    hub.add("a", Epoch())
    with pytest.raises(SourceError, match="epochs 2 to 2 are to be read, which were there when"):
        reader(opened(hub), position=1).read(1, Position(2))


# What the hub may remove.


@pytest.mark.parametrize("bounded", [True, False])
def test_the_consumer_is_registered_before_anything_is_listed(bounded: bool):
    hub = FakeHub()
    hub.add("a", Epoch())
    source = opened(hub, bounded=bounded)
    source.partitions()
    assert hub.calls[:2] == ["consumer", "nodes"]
    assert hub.passed == {"center": {}}
    source.close()


@pytest.mark.parametrize("bounded", [True, False])
def test_the_hub_hears_how_far_we_have_come(bounded: bool):
    hub = FakeHub()
    hub.add("a", Epoch(), Epoch(), Epoch())
    hub.add("b", Epoch())
    source = opened(hub, bounded=bounded)
    source.partitions()
    source.ack({"a": hub.cut("a", 2), "b": PartitionCut(position=0)})
    hub.add("b", Epoch())
    assert hub.wait_for_passed("center", {"a": 2})
    assert chunk_of(reader(source, position=2).read(1)).position == 3
    source.close()


def test_a_hub_that_was_away_hears_it_later():
    hub = FakeHub()
    hub.add("a", Epoch(), Epoch())
    source = opened(hub, bounded=False)
    source.partitions()
    hub.goes(away=True)
    source.ack({"a": hub.cut("a", 1)})
    source.ack({"a": hub.cut("a", 2)})
    hub.goes(away=False)
    assert hub.wait_for_passed("center", {"a": 2})
    source.close()


def test_the_thread_goes_with_the_last_reader_and_with_the_source():
    hub = FakeHub()
    hub.add("a", Epoch())
    source = opened(hub, bounded=False)
    first, second = reader(source), reader(source)
    first.read(1)
    follower = source._follower
    assert follower is not None
    first.close()
    assert not follower._stopped.is_set()
    second.close()
    assert follower._stopped.is_set()
    source.partitions()
    again = source._follower
    assert again is not None
    del source, first, second
    assert again._stopped.is_set()


# The kinds.


def test_a_plan_that_was_not_placed_says_that_a_hub_is_needed():
    with pytest.raises(ConfigError, match="--hub"):
        registry.open_source(spec(), hub_options())
    assert registry.source_delivery(spec()) == Delivery.EXACTLY_ONCE


def test_options_are_checked():
    with pytest.raises(ConfigError, match="Options are: pipeline, stream, consumer"):
        registry.source_delivery(ConnectorSpec("hub", {"stream": "s"}))
    with pytest.raises(PipelineError, match="consumer"):
        registry.source_delivery(spec(consumer="../x"))


def test_the_center_as_a_sink_is_known_while_a_pipeline_is_built_and_never_opened():
    center = ConnectorSpec("center", {"stream": "s"})
    assert registry.sink_delivery(center) == Delivery.EXACTLY_ONCE
    with pytest.raises(ConfigError, match="outbox"):
        registry.open_sink(center, SinkStream(step="s", schema=SCHEMA))


def hub_options() -> SourceOptions:
    return SourceOptions(schema=SCHEMA, bounded=True)
