"""Lookups inside Spark: tables in files, and control rows that are kept from micro-batch to micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.edge.joining import Input, source
from tests.edge.runs import same_rows
from tests.spark.micro import MicroSpark
from tests.spark.runs import EdgeSide

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, memory
from fordstone.plan.plan import Lookup
from fordstone.spark.hosted.query import absolute

pytestmark = pytest.mark.usefixtures("quick_disk")


def looked_up(root: Path) -> tuple[Pipeline, MemorySink]:
    out, pipeline = MemorySink(), Pipeline("lookups")
    left, right = (source(pipeline, name, root) for name in ("l", "r"))
    table = files(str(root / "sites.csv"))
    sites = left.lookup(table, on={"k": "id"}, schema={"id": "string", "site": "string"})
    named = sites.lookup([{"k": "a", "named": True}], on="k")
    named.join_latest(right, on="k", suffix="_now").sink("out", memory(out))
    return pipeline, out


@pytest.mark.parametrize("batch", [False, True])
def test_lookups_in_one_epoch_give_what_the_edge_gives(tmp_path, batch):
    given = Input.of(5, 30)
    given.write(tmp_path)
    (tmp_path / "sites.csv").write_text("id,site\na,north\nb,south\n")
    pipeline, wanted = looked_up(tmp_path)
    EdgeSide(pipeline.plan(), {}).run(batch_rows=1000)
    assert len([frame for frame in wanted.frames() if frame.height]) == 1, "it was one epoch"
    pipeline, out = looked_up(tmp_path)
    spark = MicroSpark(3, cores=2)
    if batch:
        spark.run_batch(pipeline.plan(), {}, state=tmp_path / "state", shards=2, batch_rows=7)
    else:
        spark.start(pipeline.plan(), {}, bounded=True, state=tmp_path / "state", shards=2, batch_rows=7).run()
    same_rows(out.rows(), wanted.rows())
    assert out.rows().height == sum(len(rows) for rows in given.left)
    assert out.rows()["x_now"].null_count() == sum(row[0] is None for rows in given.left for row in rows)


def test_a_table_is_found_from_wherever_workers_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline("lookups")
    rows = pipeline.source("rows", files("rows.jsonl"), schema={"id": "string"})
    rows.lookup(files("sites.csv"), on="id", schema={"id": "string"}).sink("out", memory(MemorySink()))
    step = absolute(pipeline.plan()).step("lookup")
    assert isinstance(step, Lookup)
    assert step.table.options["path"] == str(tmp_path / "sites.csv")


def test_control_rows_are_kept_from_micro_batch_to_micro_batch(tmp_path):
    given = Input.of(6, 30)
    given.write(tmp_path)
    (tmp_path / "sites.csv").write_text("id,site\na,north\n")
    pipeline, out = looked_up(tmp_path)
    batches = MicroSpark(4, cores=2).start(
        pipeline.plan(), {}, bounded=True, state=tmp_path / "state", shards=2, batch_rows=3, rows_max=10
    )
    assert batches.run() > 3
    rows = out.rows()
    assert rows.height == sum(len(rows) for rows in given.left)
    # A row of another epoch than its control row has it from the state; and newer ones take its place.
    assert rows.filter(k="a")["ts_now"].drop_nulls().n_unique() > 1
    assert rows.filter(k="a")["ts_now"].null_count() < rows.filter(k="a").height
