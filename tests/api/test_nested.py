"""Structs and maps on their way: in the state of functions, after a restart, in sinks, and across the cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.waiting import until

from fordstone import KeyedFunction, ListState, MapState, Pipeline, Stream, ValueState, tumbling
from fordstone.connectors import MemorySink, MemorySource, delta, files, memory
from fordstone.connectors.files.rows import rows as rows_of
from fordstone.errors import PipelineError, SchemaError

SCHEMA = {
    "k": "string",
    "ts": "timestamp",
    "s": "struct<name: string, x: double>",
    "m": "map<string, int>",
    "l": "array<struct<at: timestamp>>",
}
ROWS: list[dict[str, Any]] = [
    {
        "k": "a",
        "ts": f"2026-01-01T00:00:0{at}Z",
        "s": {"name": f"n{at % 2}", "x": float(at)} if at != 4 else None,
        "m": {"p": at, "q": None},
        "l": [{"at": "2026-01-01T00:00:00Z"}, None][:at],
    }
    for at in range(6)
]


class Names(KeyedFunction):
    """Counts rows by a field, and keeps what it saw in every kind of state."""

    last = ValueState("struct<n: bigint, names: map<string, int>>")
    seen = ListState("struct<x: double>")
    by_name = MapState("string", "array<struct<x: double>>")

    def process(self, row: dict[str, Any], ctx: Any) -> Iterator[dict[str, Any]]:
        sensor = row["s"] or {"name": "none", "x": None}
        before = self.last.get({"n": 0, "names": {}})
        before["names"][sensor["name"]] = before["names"].get(sensor["name"], 0) + 1
        assert self.last.get() != before, "what a read gave is a copy"
        self.last.set(before | {"n": before["n"] + 1})
        self.seen.append({"x": sensor["x"]})
        self.by_name[sensor["name"]] = [*(self.by_name.get(sensor["name"]) or []), {"x": sensor["x"]}]
        yield {"n": before["n"] + 1, "names": before["names"], "seen": list(self.seen), "own": self.by_name["n0"]}


def source(pipeline: Pipeline, rows: list[dict[str, Any]] = ROWS) -> Stream:
    return pipeline.source("r", memory([rows]), schema=SCHEMA, time="ts")


def test_states_of_structs_and_maps_go_on_after_a_restart(tmp_path: Path) -> None:
    found = []
    for count in (3, 6):
        pipeline, sink = Pipeline("states"), MemorySink()
        out = {
            "n": "int",
            "names": "map<string, int>",
            "seen": "array<struct<x: double>>",
            "own": "array<struct<x: double>>",
        }
        named = source(pipeline, ROWS[:count]).group_by("k").process(Names, schema=out, ordered=False)
        named.sink("out", memory(sink))
        pipeline.run(state=tmp_path, available_now=True)
        found += sink.rows().to_dicts()
    assert [one["n"] for one in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1]["names"] == {"n0": 2, "n1": 3, "none": 1}
    assert [one["x"] for one in found[-1]["seen"]] == [0.0, 1.0, 2.0, 3.0, None, 5.0]
    assert found[-1]["own"] == [{"x": 0.0}, {"x": 2.0}]


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "arrow"])
def test_what_a_file_sink_writes_is_read_back(tmp_path: Path, file_format: str) -> None:
    pipeline, sink = Pipeline("written"), MemorySink()
    rows = source(pipeline)
    rows.sink("file", files(str(tmp_path / "out"), format=file_format))
    rows.sink("memory", memory(sink))
    pipeline.run(bounded=True)
    assert rows_of(tmp_path / "out").equals(sink.rows())
    assert sink.rows().height == len(ROWS)
    again, back = Pipeline("again"), MemorySink()
    again.source("r", files(str(tmp_path / "out" / f"*.{file_format}")), schema=SCHEMA).sink("memory", memory(back))
    again.run(bounded=True)
    assert back.rows().equals(sink.rows())


def test_csv_refuses_them_and_says_what_to_write(tmp_path: Path) -> None:
    pipeline = Pipeline("csv")
    source(pipeline).sink("file", files(str(tmp_path / "out"), format="csv"))
    with pytest.raises(SchemaError, match="a cell of CSV is one value") as caught:
        pipeline.run(bounded=True)
    assert "to_json(...)" in str(caught.value)


def test_a_delta_table_has_structs_and_maps(tmp_path: Path) -> None:
    pipeline = Pipeline("table")
    source(pipeline).select("s", "m").sink("table", delta(str(tmp_path / "table")))
    pipeline.run(bounded=True)
    found = pl.read_delta(str(tmp_path / "table"))
    assert dict(found.schema) == {
        "s": pl.Struct({"name": pl.String, "x": pl.Float64}),
        "m": pl.Map(pl.String, pl.Int32),
    }
    assert found.sort(pl.col("m").map.get("p")).to_dicts() == [{"s": row["s"], "m": row["m"]} for row in ROWS]


def test_they_are_in_windows_after_the_cut() -> None:
    pipeline, sink = Pipeline("crossing"), MemorySink()
    rows = source(pipeline)
    windows = rows.to_center().group_by("k").window(tumbling("1m")).agg(last="last(s)", n="count(*)")
    windows.sink("windows", memory(sink))
    with pipeline.start(bounded=True, nodes=1) as run:
        run.wait()
    last = sink.rows().to_dicts()[-1]
    assert (last["last"], last["n"]) == ({"name": "n1", "x": 5.0}, 6)


LIMITS = {
    "k": "string",
    "newest": "struct<name: string, x: double>",
    "counts": "map<string, struct<n: bigint>>",
    "seen": "array<struct<name: string, x: double>>",
}


def test_they_come_back_from_the_center_in_a_control_table_that_rows_are_joined_with() -> None:
    given, joined = MemorySource([[]]), MemorySink()
    pipeline = Pipeline("crossing")
    rows = pipeline.source("r", memory(given), schema=SCHEMA, time="ts")
    limits = pipeline.control("limits", schema=LIMITS, key="k")
    crossed = rows.filter("s IS NULL OR s.x < 9").to_center().group_by("k")
    totals = crossed.agg(n="count(*)", newest="last(s)", seen="collect(s)").filter("n <> 3")
    totals.select("k", "newest", "map('all', struct(n AS n)) AS counts", "seen").to_edges(limits)
    found = rows.join_control(limits, on="k").select(*LIMITS, "newest.x AS hi", "counts['all'].n AS n", "seen[1].name")
    found.sink("joined", memory(joined))
    asked = 0

    def see(n: int | None) -> dict[str, Any]:
        """What rows that do not cross are joined with, once the table has come so far."""

        def come() -> bool:
            nonlocal asked
            asked += 1
            given.append(0, [ROWS[5] | {"ts": f"2026-01-01T00:00:06.{asked:06}Z", "s": {"name": "ask", "x": 9.0}}])
            return bool(joined.rows().height) and joined.rows()["n"].to_list()[-1] == n

        until(come, f"the table after {n} rows")
        return joined.rows().row(-1, named=True)

    with pipeline.start(nodes=1, interval="10ms"):
        given.append(0, ROWS[:2])
        sensors = [row["s"] for row in ROWS]
        assert see(2) == {
            "k": "a", "newest": sensors[1], "counts": {"all": {"n": 2}}, "seen": sensors[:2], "hi": 1.0, "n": 2, "name": "n1",
        }  # fmt: skip
        given.append(0, ROWS[2:3])
        nothing = dict.fromkeys([*LIMITS, "hi", "n", "name"]) | {"k": "a"}
        assert see(None) == nothing, "the filter took the row out of the table"
        given.append(0, ROWS[3:5])
        last = see(5)
        assert (last["newest"], last["hi"], last["counts"]) == (None, None, {"all": {"n": 5}})
        assert last["seen"][:4] == sensors[:4]


def test_they_are_no_keys() -> None:
    rows = source(Pipeline("keys"))
    with pytest.raises(SchemaError, match=r"column 's' is struct<.*>, which cannot be a key. Use its fields: s.name"):
        rows.group_by("s").agg(n="count(*)")
    with pytest.raises(SchemaError, match=r"column 'm' is map<.*>, which cannot be a key. Use a value of it"):
        rows.group_by("m").agg(n="count(*)")


def test_sql_reads_fields_and_explodes_arrays_and_maps() -> None:
    pipeline = Pipeline("sql")
    source(pipeline)
    queries = {
        "fields": "SELECT r.s.x, s.name, m['p'] AS p FROM r WHERE s.x > 2",
        "entries": "SELECT k, explode(m) AS (name, value) FROM r WHERE s.x = 1",
        "elements": "SELECT explode(l) AS item, k FROM r WHERE m.p = 5",
        "groups": "SELECT s.name, max(s.x) AS top FROM r GROUP BY s.name, TUMBLE(ts, INTERVAL '1' MINUTE)",
    }
    sinks = {name: MemorySink() for name in queries}
    for name, query in queries.items():
        pipeline.sql(query).sink(f"to_{name}", memory(sinks[name]))
    pipeline.run(bounded=True)
    found = {name: sink.rows() for name, sink in sinks.items()}
    assert found["fields"].rows() == [(3.0, "n1", 3), (5.0, "n1", 5)]
    assert found["entries"].rows() == [("a", "p", 1), ("a", "q", None)]
    assert found["elements"].columns == ["item", "k"]
    assert [row[0] is None for row in found["elements"].rows()] == [False, True]
    assert sorted(found["groups"].rows(), key=str) == [("n0", 2.0), ("n1", 5.0), (None, None)]


def test_a_pattern_reads_fields_in_parentheses() -> None:
    pipeline, sink = Pipeline("pattern"), MemorySink()
    query = (
        "SELECT * FROM r MATCH_RECOGNIZE (PARTITION BY k ORDER BY ts MEASURES (B.s).x AS x PATTERN (A B) "
        "WITHIN INTERVAL '10' SECOND DEFINE A AS {a} > 1, B AS (B.s).x > (A.s).x)"
    )
    source(pipeline)
    with pytest.raises(PipelineError, match=r"A field of column s is written \(s\)\.x"):
        pipeline.sql(query.format(a="s.x"))
    pipeline.sql(query.format(a="(s).x")).sink("out", memory(sink))
    pipeline.run(bounded=True)
    assert sink.rows()["x"].to_list() == [3.0]
