"""Sources and sinks in memory."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors.base import ConnectorSpec, SinkStream, Source, SourceOptions
from fordstone.connectors.registry import open_sink, open_source
from fordstone.errors import ConfigError, SchemaError, SinkError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import read_all

SCHEMA = Schema.of({"n": "bigint", "ts": "timestamp"})
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def source(spec: ConnectorSpec, *, bounded: bool = False, schema: Schema = SCHEMA) -> Source:
    return open_source(spec, SourceOptions(schema=schema, bounded=bounded))


def test_rows_may_be_records_tuples_or_frames_and_times_text(tmp_path: object) -> None:
    frame = pl.DataFrame({"ts": [NOON], "n": [3], "more": ["x"]})
    live = MemorySource([[{"n": 1, "ts": "2026-01-01T12:00:00Z"}, (2, datetime(2026, 1, 1, 12)), {"n": 4}], frame])
    made = source(memory(live), bounded=True)
    first, second = (read_all(made, partition, SCHEMA) for partition in made.partitions())
    assert first.rows.rows() == [(1, NOON), (2, NOON), (4, None)]
    assert second.rows.rows() == [(3, NOON)]


def test_rows_that_do_not_fit_are_rejected_one_by_one() -> None:
    made = source(memory([[(1, NOON), ("one", NOON), (2, "soon"), (3,), (2**70, NOON), (4, NOON)]]), bounded=True)
    found = read_all(made, made.partitions()[0], SCHEMA)
    assert found.rows["n"].to_list() == [1, 4]
    assert found.row_positions == [0, 5]
    assert [one.position for one in found.rejected] == [1, 2, 3, 4]
    assert "'one'" in found.rejected[0].text


def test_a_frame_of_other_columns_or_types_is_an_error() -> None:
    for frame in (pl.DataFrame({"x": [1]}), pl.DataFrame({"n": ["one"]})):
        made = source(memory([frame]))
        with pytest.raises(SchemaError, match="memory source"):
            read_all(made, made.partitions()[0], SCHEMA)


def test_a_partition_grows_until_it_is_ended() -> None:
    live = MemorySource([[(1, NOON)]])
    made = source(memory(live))
    reader = made.open(made.partitions()[0], Position(0), with_positions=True)
    chunk = reader.read(10)
    assert chunk is not None
    assert not chunk.ended
    assert reader.read(10) is None
    live.append(0, [(2, NOON)])
    chunk = reader.read(10)
    assert chunk is not None
    assert chunk.frame["n"].to_list() == [2]
    live.end(0)
    chunk = reader.read(10)
    assert chunk is not None
    assert (chunk.ended, chunk.frame.height, chunk.position) == (True, 0, 2)
    with pytest.raises(ConfigError, match="has ended"):
        live.append(0, [(3, NOON)])


def test_partitions_may_be_added_while_it_runs() -> None:
    live = MemorySource()
    made = source(memory(live))
    assert list(made.partitions()) == []
    live.append(live.add_partition(), [(1, NOON)])
    assert list(made.partitions()) == ["memory-000000"]
    live.add_partition()
    live.end()
    assert [read_all(made, partition, SCHEMA).ended for partition in made.partitions()] == [True, True]


def test_a_position_or_a_partition_that_is_not_there_is_an_error() -> None:
    made = source(memory([[(1, NOON)]]))
    with pytest.raises(SourceError, match="has 1 rows, but reading should continue at 5"):
        made.open(made.partitions()[0], Position(5), with_positions=False).read(1)
    with pytest.raises(SourceError, match="no partition"):
        made.open(PartitionId("memory-000009"), Position(0), with_positions=False)


def test_a_plan_holds_no_object_and_says_so_when_it_is_read_back() -> None:
    spec = memory([[(1, NOON)]])
    text = msgspec.json.encode(spec)
    assert text == b'{"kind":"memory","options":{}}'
    back = msgspec.json.decode(text, type=ConnectorSpec)
    with pytest.raises(ConfigError, match="read back from JSON"):
        source(back)
    with pytest.raises(ConfigError, match="read back from JSON"):
        open_sink(back, SinkStream(step="s", schema=SCHEMA))


def test_a_sink_in_place_of_a_source_is_an_error() -> None:
    with pytest.raises(ConfigError, match="MemorySink, but a MemorySource is needed"):
        source(memory(MemorySink()))
    with pytest.raises(ConfigError, match="MemorySource, but a MemorySink is needed"):
        open_sink(memory([]), SinkStream(step="s", schema=SCHEMA))


def test_a_sink_keeps_epochs_apart_and_counts_repeats() -> None:
    live = MemorySink()
    assert live.rows().is_empty()
    sink = open_sink(memory(live), SinkStream(step="s", schema=SCHEMA))
    assert live.rows().schema == SCHEMA.polars
    one, two = (pl.DataFrame({"n": [number], "ts": [NOON]}, schema=SCHEMA.polars) for number in (1, 2))
    sink.release(2, two)
    sink.release(1, one)
    sink.release(2, two.clone())
    sink.write(one)
    assert live.repeated == 1
    with pytest.raises(SinkError, match="already has epoch 2, with other rows"):
        sink.release(2, one)
    assert live.released[2].equals(two)
    assert_frame_equal(live.rows(), pl.concat([one, two, one]))


def test_runs_that_begin_with_nothing_have_a_sink_for_themselves(tmp_path: Path) -> None:
    """Their epochs have the numbers of those before: none may be taken for one of them."""
    live, state = MemorySink(), tmp_path / "a"

    def found(given: list[int], state: Path, **options: Any) -> list[int]:
        pipeline = Pipeline("p")
        source = pipeline.source("s", memory([[{"n": n} for n in given]]), schema={"n": "bigint"})
        source.sink("out", memory(live))
        pipeline.run(bounded=True, state=state, interval="1h", **options)
        return list(live.rows()["n"])

    assert found([1, 2], state) == [1, 2]
    assert found([1, 2, 3], state) == [1, 2, 3], "this one goes on"
    assert found([4, 5, 6], state, fresh=True) == [4, 5, 6]
    assert found([7], tmp_path / "b") == [7]
