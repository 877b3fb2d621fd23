"""How much of bounded input has been read: what each source says of it, and how several are weighed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import polars as pl
import pytest

from fordstone import Pipeline
from fordstone.connectors import files, generator
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.edge.engine.engine import LOOK_EVERY_US, ReadSoFar
from fordstone.edge.run import run
from fordstone.epochs.manifest import PartitionCut
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.progress import Progress

SCHEMA = Schema.of({"k": "string"})


def opened(spec: Any) -> Any:
    return open_source(spec, SourceOptions(schema=SCHEMA, bounded=True))


def test_text_files_are_weighed_by_bytes(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * 300)
    (tmp_path / "b.jsonl").write_bytes(b"x" * 100)
    source = opened(files(str(tmp_path / "*.jsonl")))
    cuts = {"a.jsonl": PartitionCut(position=150), "b.jsonl": PartitionCut(position=7, done=True)}
    assert source.share_read(cuts) == pytest.approx((150 + 100) / 400)
    assert source.share_read({}) == 0.0


def test_a_file_that_grows_does_not_count_for_more_than_it_did(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * 100)
    source = opened(files(str(tmp_path / "*.jsonl")))
    assert source.size_bytes() == 100
    (tmp_path / "a.jsonl").write_bytes(b"x" * 500)
    assert source.size_bytes() == 100
    assert source.share_read({"a.jsonl": PartitionCut(position=500)}) == 1.0


def test_parquet_files_are_weighed_by_the_share_of_their_rows(tmp_path: Path):
    pl.DataFrame({"k": ["a", "b", "c", "d"]}).write_parquet(tmp_path / "a.parquet")
    source = opened(files(str(tmp_path / "*.parquet")))
    reader = source.open(PartitionId("a.parquet"), Position(0), with_positions=False)
    assert source.share_read({"a.parquet": PartitionCut(position=0)}) == 0.0
    reader.read(1)
    assert source.share_read({"a.parquet": PartitionCut(position=1)}) == pytest.approx(0.25)


def test_compressed_files_do_not_tell(tmp_path: Path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"x" * 100)
    assert opened(files(str(tmp_path / "*"))).share_read({"a.jsonl.gz": PartitionCut(position=10)}) is None


def test_generated_rows_are_counted_and_without_end_there_is_no_share():
    source = opened(generator(rows=10, partitions=2))
    assert (
        source.share_read({"lane-000000": PartitionCut(position=10), "lane-000001": PartitionCut(position=5)}) == 0.75
    )
    endless = open_source(generator(), SourceOptions(schema=SCHEMA, bounded=False))
    assert endless.share_read({"lane-000000": PartitionCut(position=10)}) is None


class Fixed:
    def __init__(self, share: float | None, size_bytes: int | None) -> None:
        self.share, self.bytes = share, size_bytes
        self.asked = 0

    def share_read(self, cuts: object) -> float | None:
        del cuts
        self.asked += 1
        return self.share

    def size_bytes(self) -> int | None:
        return self.bytes


def weighed(*sources: Fixed) -> tuple[float | None, int | None]:
    named = cast("Any", {str(number): source for number, source in enumerate(sources)})
    return ReadSoFar(named, [], cast("Any", SimpleNamespace(monotonic_us=lambda: 0))).look()


def test_sources_are_weighed_by_size_where_it_is_known_and_equally_where_not():
    assert weighed(Fixed(1.0, 300), Fixed(0.0, 100)) == (0.75, 400)
    assert weighed(Fixed(1.0, 300), Fixed(0.0, None)) == (0.5, None)
    assert weighed(Fixed(1.0, 300), Fixed(None, 100)) == (None, 400)
    assert weighed() == (None, 0)


def test_sources_are_asked_twice_a_second_at_most():
    source, now = Fixed(0.5, 10), [0]
    reading = ReadSoFar(cast("Any", {"s": source}), [], cast("Any", SimpleNamespace(monotonic_us=lambda: now[0])))
    for now[0] in range(0, 2 * LOOK_EVERY_US, 50_000):
        reading.look()
    assert source.asked == 2
    reading.look(refresh=True)
    assert source.asked == 3


def test_a_run_reports_how_far_it_is_and_ends_at_all(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"k": "x"}\n' * 5000)
    p = Pipeline("share")
    rows = p.source("rows", files(str(tmp_path / "*.jsonl")), schema={"k": "string"})
    rows.sink("out", files(str(tmp_path / "out"), format="jsonl"))
    seen: list[Progress] = []
    report = run(p.plan(), p.functions, state=tmp_path / "state", bounded=True, on_progress=seen.append)
    assert all(progress.share is not None and 0 <= progress.share <= 1 for progress in seen)
    last = report.progress
    assert (last.share, last.read_bytes, last.total_bytes) == (1.0, 55_000, 55_000)
    assert last.rows_out == 5000
