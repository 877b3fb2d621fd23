"""A stream at the hub as a source: whole epochs, declared time, and a hub that is away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch, FakeHub, wait_until_listed

from fordstone.connectors import registry
from fordstone.connectors.base import (
    Chunk,
    ConnectorSpec,
    Delivery,
    Idleness,
    Reader,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.connectors.hub import QUIET_US, HubOptions, HubSource
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, HubRefusedError, PipelineError, SourceError
from fordstone.hub.client.client import RETRY_SECONDS_MAX
from fordstone.hub.client.reader import MAX_AHEAD_US
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan.ids import PartitionId, Position
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
) -> HubSource:
    options = HubOptions(pipeline=PIPELINE, stream=STREAM)
    return HubSource(
        hub, options, schema, bounded=bounded, clock_us=clock_us, pause=pause or (lambda _: pytest.fail("it waited"))
    )


def reader(source: Source, node: str = "a", position: int = 0) -> Reader:
    return source.open(PartitionId(node), Position(position), with_positions=True)


def chunk_of(given: Chunk | None) -> Chunk:
    assert given is not None
    return given


def known(source: HubSource, node: str, epoch: int) -> None:
    """Wait until the source has heard of an epoch."""
    source.partitions()
    assert source._own is not None
    wait_until_listed(source._own, node, epoch)


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
        self.hub = FakeHub(page_commits=7)
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
            if source._own is not None and not source.bounded:
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


@pytest.mark.parametrize("bounded", [True, False])
def test_a_hub_that_was_set_back_is_not_waited_for_until_other_epochs_have_the_numbers_that_were_read(bounded: bool):
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(n)]) for n in range(3)))
    source = opened(hub, bounded=bounded)
    known(source, "a", 3)
    with pytest.raises(SourceError, match="up to 3, but 5 has been read"):
        reader(source, position=5).read(10)
    source.close()


def test_a_hub_that_removed_all_that_was_read_was_not_set_back():
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(n)]) for n in range(5)))
    hub.remove_epochs("a", 5)
    hub.add("b", Epoch())
    source = opened(hub, bounded=False)
    known(source, "b", 1)
    assert reader(source, position=5).read(10) is None
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
    hub = FakeHub(page_commits=1)
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
    now_us = QUIET_US
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
    monkeypatch.setattr(hub, "stream_page", lambda *_, **__: 1 / 0)
    source = opened(hub, bounded=False)
    with pytest.raises(ZeroDivisionError):
        source.partitions()


# What is gone.


def test_rows_that_the_hub_lists_but_does_not_have_are_an_error():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[frame(1)]))
    hub.blobs.clear()
    with pytest.raises(SourceError, match=r"epoch 1 of node a.*are gone"):
        reader(opened(hub)).read(1)


def test_rows_with_other_bytes_are_an_error():
    hub = FakeHub()
    hub.add("a", Epoch(runs=[frame(1)]))
    hub.blobs = {digest: data[:-1] + b"x" for digest, data in hub.blobs.items()}
    with pytest.raises(SourceError, match=r"epoch 1 of node a.*damaged"):
        reader(opened(hub)).read(1)


@pytest.mark.parametrize("rows", [pl.DataFrame({"n": [1]}), pl.DataFrame({"device": ["d"], "n": ["many"]})])
def test_rows_of_another_plan_are_an_error(rows: pl.DataFrame):
    hub = FakeHub()
    hub.add("a", Epoch(runs=[rows]))
    with pytest.raises(SourceError, match="same version of the pipeline"):
        reader(opened(hub)).read(1)


def test_an_epoch_that_the_hub_has_removed_is_an_error_for_a_reader_that_needs_it():
    hub = FakeHub()
    hub.add("a", *(Epoch(runs=[frame(n)]) for n in range(5)))
    hub.remove_epochs("a", 3)
    with pytest.raises(SourceError, match=r"epoch 2 is to be read.*its next one is 4"):
        reader(opened(hub), position=1).read(1)
    with pytest.raises(SourceError, match=r"epoch 2 is to be read"):
        reader(opened(hub), position=1).read(1, Position(3))
    assert chunk_of(reader(opened(hub), position=3).read(1)).position == 4
    assert chunk_of(reader(opened(hub)).read(1)).position == 4


def test_a_planned_epoch_that_the_hub_never_had_is_an_error():
    hub = FakeHub()
    hub.add("a", Epoch())
    with pytest.raises(SourceError, match="up to 1, but 2 was there"):
        reader(opened(hub)).read(1, Position(2))


# What the hub may remove.


@pytest.mark.parametrize("bounded", [True, False])
def test_the_consumer_is_registered_before_anything_is_listed(bounded: bool):
    hub = FakeHub()
    hub.add("a", Epoch())
    source = opened(hub, bounded=bounded)
    source.partitions()
    assert hub.calls[:2] == ["consumer", "page"]
    assert hub.passed == {"center": {}}
    source.close()


@pytest.mark.parametrize("bounded", [True, False])
def test_the_hub_hears_how_far_we_have_come(bounded: bool):
    hub = FakeHub()
    hub.add("a", Epoch(), Epoch(), Epoch())
    hub.add("b", Epoch())
    source = opened(hub, bounded=bounded)
    source.partitions()
    source.ack({"a": PartitionCut(position=2), "b": PartitionCut(position=0)})
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
    source.ack({"a": PartitionCut(position=1)})
    source.ack({"a": PartitionCut(position=2)})
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
