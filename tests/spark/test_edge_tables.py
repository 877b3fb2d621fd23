"""Tables (Parquet, Arrow) on the edge as input without end: found beside the tests of moves, where their state goes to Spark.

A table has ended when its last row is read, though input has not. What that means for time is tested here.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
from tests.spark import oracle as o
from tests.spark.micro import MicroSpark
from tests.spark.pipelines import Case, File, Rows, Twin, read_all
from tests.spark.runs import EdgeSide, compare, out_of

from fordstone import Pipeline
from fordstone.connectors import ConnectorSpec, MemorySink, memory
from fordstone.edge.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("quick_disk")


class Tables:
    """Some tables, and a pipeline over them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.rng, self.sinks = root, Random(seed), dict[str, MemorySink]()
        self.files: list[File] = []
        self._ids = itertools.count()
        self.case = Case(Pipeline("p"), self._sink)
        self.rows: Twin = self.case.source("source0", f"{root}/in/*", lateness_s=3, idle_after=None, time="ts")

    def _sink(self, name: str) -> ConnectorSpec:
        return memory(self.sinks.setdefault(name, MemorySink()))

    def add(self, second: int) -> None:
        file = File(self.root / "in" / f"{len(self.files)}.arrow")
        file.write(Rows(self.rng, 3, second, self._ids, timeless=False).take(30, "arrow"))
        self.files.append(file)


def test_no_row_is_late_for_a_second_step_because_several_tasks_read_tables(tmp_path: Path) -> None:
    for seed in range(6):
        tables = Tables(tmp_path / str(seed), seed)
        for _ in range(3):
            tables.add(1000 + tables.rng.randint(0, 20))
        windows = tables.rows.window(("k",), 4, 0, {"c": ("count(*)", o.count())})
        windows.smooth(("k",), 0.5, "c", "s").sink("smooth")
        edge = EdgeSide(tables.case.pipeline.plan(), {})
        edge.run(bounded=False, parallelism=3, batch_rows=3, stop_after=150, rng=tables.rng)
        edge.run(bounded=True, parallelism=3, rng=tables.rng)
        tables.case.oracle.batch(read_all({"source0": tables.files}), ended=["source0"])
        compare(out_of(tables.case, tables.sinks), tables.case.oracle, what=f"seed {seed}")


class Dropping(EdgeSide):
    """Adds a table now and then while the engine runs."""

    tables: Tables

    def _step(self, engine: Engine, stop_after: int | None, rng: Random) -> None:
        parts = engine.steppables()
        for step in range(1200):
            if step % 300 == 150:
                self.tables.add(1000 + step)
            self.clock.now_us += 20_000
            for part in parts:
                part.step()
        super()._step(engine, 0, rng)


def test_time_moves_on_the_edge_where_tables_are_dropped_one_by_one(tmp_path: Path) -> None:
    tables = Tables(tmp_path, 1)
    tables.rows.window((), 4, 0, {"c": ("count(*)", o.count())}).sink("windows")
    edge = Dropping(tables.case.pipeline.plan(), {})
    edge.tables = tables
    edge.run(bounded=False, batch_rows=1000)
    assert len(tables.files) == 4
    # The windows of the third table are out as well: those that have ended do not hold the others back.
    third = min(o.us_of(row["ts"]) for row in tables.files[2].rows)
    assert max(map(o.us_of, tables.sinks["windows"].rows()["window_end"])) > third


def test_time_moves_on_spark_where_tables_are_dropped_one_by_one(tmp_path: Path) -> None:
    tables = Tables(tmp_path, 1)
    tables.rows.window((), 4, 0, {"c": ("count(*)", o.count())}).sink("windows")
    query = MicroSpark().start(tables.case.pipeline.plan(), state=tmp_path / "state")
    found = []
    for number in range(4):
        tables.add(1000 + 300 * number)
        assert query.run() == 1
        found.append(tables.sinks["windows"].rows().height)
    assert found == sorted(set(found))
    assert found[0] > 0
