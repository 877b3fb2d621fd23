"""Every source that a run opens is closed at its end, however the run ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from tests.spark.micro import MicroSpark

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, memory, register
from fordstone.connectors.base import (
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Reader,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.connectors.files.kind import FilesKind
from fordstone.connectors.part_of_source import Distribution, PartOfSource
from fordstone.connectors.registry import open_source
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import FordstoneError, SinkError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.retry import RestartPolicy

ONCE = RestartPolicy(failures_max=1, wait_first_us=1_000, wait_max_us=1_000)
SCHEMA = {"n": "bigint"}
opened: list[Counted] = []


class Counted(Source):
    """A source of files that counts how often it is closed, and that no reader of it is open then."""

    def __init__(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> None:
        self.inner = FilesKind().open_source(
            ConnectorSpec(kind="files", options={"path": spec.options["path"]}), options, context
        )
        self.readers = 0
        self.closed = 0
        opened.append(self)

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        self.inner.restore(cuts)

    def partitions(self) -> list[PartitionId]:
        return list(self.inner.partitions())

    def identity(self, partition: PartitionId, position: Position) -> str:
        return self.inner.identity(partition, position)

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        reader = self.inner.open(partition, position, with_positions=with_positions)
        self.readers += 1
        close = reader.close

        def counted() -> None:
            self.readers -= 1
            close()

        reader.close = counted  # type: ignore[method-assign]
        return reader

    def close(self) -> None:
        assert self.readers == 0
        self.closed += 1


class CountedKind(ConnectorKind):
    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        if spec.options.get("refuses"):
            raise SourceError("no")
        return Counted(spec, options, context)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        raise SinkError("no")


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    register("counted", CountedKind)
    opened.clear()
    yield
    opened.clear()


def spec(place: Path, **options: object) -> ConnectorSpec:
    (place / "in").mkdir(exist_ok=True)
    (place / "in/a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    return ConnectorSpec(kind="counted", options={"path": str(place / "in/*.jsonl"), **options})


def check(count: int) -> None:
    assert len(opened) >= count
    assert [one.closed for one in opened] == [1] * len(opened)


def test_a_run_closes_its_sources_at_the_end(tmp_path: Path) -> None:
    pipeline, out = Pipeline("p"), MemorySink()
    rows = pipeline.source("rows", spec(tmp_path), schema=SCHEMA)
    rows.lookup(spec(tmp_path), on="n", schema={"n": "bigint"}, name="names").sink("out", memory(out))
    pipeline.run(bounded=True)
    assert len(out.rows()) == 10
    check(2)


def test_a_run_that_fails_closes_them_each_time(tmp_path: Path) -> None:
    pipeline = Pipeline("p")
    failed = pipeline.source("rows", spec(tmp_path), schema=SCHEMA).map_batches(_away, schema=SCHEMA)
    failed.sink("out", memory(MemorySink()))
    with pytest.raises(FordstoneError):
        pipeline.run(bounded=True, restart=ONCE)
    assert len(opened) >= 1
    check(len(opened))


def _away(frame: pl.DataFrame) -> pl.DataFrame:
    raise ConnectionError("away")


@pytest.mark.parametrize("what", ["source", "sink"])
def test_what_is_open_is_closed_if_the_rest_cannot_be_opened(tmp_path: Path, what: str) -> None:
    pipeline = Pipeline("p")
    first = pipeline.source("first", spec(tmp_path), schema=SCHEMA)
    second = pipeline.source("second", spec(tmp_path, refuses=what == "source"), schema=SCHEMA)
    first.union(second).sink("out", spec(tmp_path) if what == "sink" else memory(MemorySink()))
    with pytest.raises(FordstoneError, match="no"):
        pipeline.run(bounded=True)
    check(1 if what == "source" else 2)


def test_a_part_of_a_source_closes_the_source(tmp_path: Path) -> None:
    source = open_source(spec(tmp_path), SourceOptions(schema=Schema.of(SCHEMA), bounded=True))
    PartOfSource(source, Distribution(1), 0).close()
    check(1)


@pytest.mark.parametrize("bounded", [True, False])
def test_tasks_and_the_planner_on_spark_close_theirs(tmp_path: Path, bounded: bool) -> None:
    pipeline = Pipeline("p")
    pipeline.source("rows", spec(tmp_path), schema=SCHEMA).sink("out", files(str(tmp_path / "out"), format="jsonl"))
    spark, plan = MicroSpark(), pipeline.plan()
    if bounded:
        with closing(spark.query(plan, batch=True, bounded=True, state=tmp_path / "state")) as query:
            query.run_batch(lambda _: None)
    else:
        started = spark.start(plan, state=tmp_path / "state")
        started.run()
        started.reader.stop()
    assert len(opened) >= 2  # one plans, and others read
    check(len(opened))
