"""What operators give: one table of pipelines with the rows that they must give, for every engine.

All cases read the same files, so that an engine runs all of them as one pipeline. The rows move on in time with some disorder;
a few are late, and several share a time or a key. What must come out is computed by DuckDB or by a plain loop.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy import special  # type: ignore[import-untyped]  # it ships no types
from tests.edge import joining, windowing
from tests.edge.aggregating import TEXTS, Longest
from tests.edge.aggregating import check as check_aggregates
from tests.edge.process_functions import OUT_SCHEMA, Visits, by_hand
from tests.edge.runs import LATENESS_S, START, in_disorder, in_sessions, in_time, in_windows, same_rows, with_watermarks

from fordstone import (
    Context,
    KeyedFunction,
    ListState,
    MapState,
    Pattern,
    Pipeline,
    Stream,
    Timer,
    ValueState,
    by_count,
    session,
    sliding,
    tumbling,
)
from fordstone.connectors import MemorySink, files, memory
from fordstone.connectors import rows as rows_in
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.plan.plan import StateKind

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "n": "bigint", "s": "string"}
Row = tuple[str | None, int, float, int | None, str | None]
Out = Callable[[str, Stream], None]
"""Give a stream a sink of this name."""
Found = Callable[[str], pl.DataFrame]
"""The rows of a sink."""
GAP_S, SIZE, EVERY, WITHIN_S, HALF_LIFE_S, ALPHA = 4, 5, 2, 6, 4, 0.3
TIMES: dict[str, Any] = {"k": pl.String, "ts": pl.Datetime("us", "UTC"), "x": pl.Float64}


@dataclass(frozen=True)
class Given:
    """The input of all cases."""

    rows: list[list[Row]]
    """By partition."""
    sides: joining.Input

    @classmethod
    def some(cls) -> Given:
        return cls([_some_rows(seed, 70) for seed in (1, 2)], joining.Input.of(7, 40))

    def write(self, root: Path) -> None:
        (root / "rows").mkdir(parents=True)
        for number, rows in enumerate(self.rows):
            (root / "rows" / f"{number}.jsonl").write_text("".join(self._lines(rows)))
        self.sides.write(root)
        (root / "sites.csv").write_text("id,site\na,north\nb,south\n")

    @staticmethod
    def _lines(rows: list[Row]) -> list[str]:
        records = [dict(zip(SCHEMA, record(row), strict=True)) for row in rows]
        return [json.dumps(one | {"ts": one["ts"].isoformat()}) + "\n" for one in records]

    def of(self, *places: int) -> list[list[tuple[Any, ...]]]:
        """The rows with these columns only."""
        return [[tuple(row[place] for place in places) for row in rows] for rows in self.rows]

    def line(self, partition: str, position: int) -> dict[str, Any]:
        """The row that stands at a position of a file."""
        file = "".join(self._lines(self.rows[int(partition.partition(".")[0])])).encode()
        found: dict[str, Any] = json.loads(file[position:].partition(b"\n")[0])
        return found

    @property
    def in_time(self) -> list[Row]:
        return in_time(self.rows)[0]

    @property
    def late(self) -> int:
        return in_time(self.rows)[1]


def _some_rows(seed: int, count: int) -> list[Row]:
    rng = Random(seed)
    return [
        (
            rng.choice(["a", "b", "é", None]),
            second,
            float(rng.randrange(64)),
            rng.choice((None, *range(10))),
            rng.choice((None, "é", "", "long")),
        )
        for second in in_disorder(rng, count, steps=(0, 0, 1, 1, 2))
    ]


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], at(row[1]), *row[2:])


@dataclass(frozen=True)
class Inputs:
    """The sources of the pipeline."""

    rows: Stream
    untimed: Stream
    """The same rows, without event time: their time is text."""
    left: Stream
    right: Stream
    root: Path


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps with sinks, and a check of what these received."""

    name: str
    build: Callable[[Inputs, Out], None]
    check: Callable[[Found, Given], None]


# Windows.


def _slid(
    size_s: int,
    every_s: int,
    offset_s: int,
    aggregates: dict[str, str],
    *,
    early: str | None = None,
    allowed_s: int = 0,
    late: bool = True,
) -> Case:
    """`late`: late rows are read, so that rows are not combined before the shuffle."""
    more = [word for word, wanted in (("early", early), ("allowed", allowed_s), ("combined", not late)) if wanted]
    name = "_".join(["sliding" if every_s != size_s else "tumbling", f"{size_s}_{every_s}_{len(aggregates)}", *more])
    windows = windowing.Slid(size_s, every_s, offset_s, aggregates)

    def build(inputs: Inputs, out: Out) -> None:
        window = sliding(f"{size_s}s", every=f"{every_s}s", offset=f"{offset_s}s")
        rows = inputs.rows.with_columns("coalesce(n, 0) AS i", name=f"{name}_i")
        grouped = rows.group_by("k").window(
            tumbling(f"{size_s}s", offset=f"{offset_s}s") if every_s == size_s else window,
            early=early,
            allowed_lateness=f"{allowed_s}s" if allowed_s else None,
        )
        found = grouped.agg(name=name, **aggregates)
        out("out", found)
        if late:
            out("late", found.late)
        if early is not None or allowed_s:
            out("final", found.final())

    def check(found: Found, given: Given) -> None:
        moved_s = int((START - windowing.START).total_seconds())
        rows = [[(k, second + moved_s, x, n or 0) for k, second, x, n, _ in part] for part in given.rows]
        wanted = windows.expected(rows, allowed_s)
        if late:
            assert found("late").height == windows.rows_late(rows, allowed_s)
        if early is None and not allowed_s:
            same_rows(found("out"), wanted)
        else:
            same_rows(found("out").unique(windowing.KEY, keep="last", maintain_order=True), wanted)
            same_rows(found("final"), wanted)

    return Case(name=name, build=build, check=check)


def _result(rows: list[tuple[Any, ...]], end_s: int) -> tuple[Any, ...]:
    values = [row[2] for row in rows]
    return (rows[0][0], at(rows[0][1]), at(end_s), len(rows), sum(values), max(values))


def _sessions(partitions: list[list[Any]]) -> tuple[list[tuple[Any, ...]], int]:
    sessions, late = in_sessions(partitions, GAP_S)
    return [_result(rows, rows[-1][1] + GAP_S) for rows in sessions], late


def _packs(partitions: list[list[Any]]) -> tuple[list[tuple[Any, ...]], int]:
    kept, late = in_time(partitions)
    found = []
    for key in {row[0] for row in kept}:
        rows = sorted((row for row in kept if row[0] == key), key=lambda row: row[1:])
        packs = (rows[start : start + SIZE] for start in range(0, len(rows) - SIZE + 1, EVERY))
        found += [_result(pack, pack[-1][1]) for pack in packs]
    return found, late


def _unaligned(
    name: str, window: Any, expected: Callable[[list[list[Any]]], tuple[list[tuple[Any, ...]], int]]
) -> Case:
    def build(inputs: Inputs, out: Out) -> None:
        rows = inputs.rows.select("k", "ts", "x", name=f"{name}_x")
        found = rows.group_by("k").window(window).agg(name=name, rows="count(*)", total="sum(x)", top="max(x)")
        out("out", found)
        out("late", found.late)

    def check(found: Found, given: Given) -> None:
        wanted, late = expected(given.of(0, 1, 2))
        time = pl.Datetime("us", "UTC")
        columns: dict[str, Any] = {"k": pl.String, "window_start": time, "window_end": time}
        columns |= {"rows": pl.Int64, "total": pl.Float64, "top": pl.Float64}
        same_rows(found("out"), pl.DataFrame(wanted, schema=columns, orient="row"))
        assert found("late").height == late

    return Case(name=name, build=build, check=check)


def _build_aggregates(inputs: Inputs, out: Out) -> None:
    rows = inputs.rows.select("k", "ts", "x", "s", name="aggregates_x")
    out("windows", rows.group_by("k").window(tumbling("10s")).agg(name="aggregates", own=Longest.of("s"), **TEXTS))
    slid = rows.group_by("k").window(sliding("10s", every="5s"))
    out("sliding", slid.agg(name="sliding_aggregates", own=Longest.of("s"), **TEXTS))
    out("running", rows.group_by("k").agg(name="aggregates_so_far", own=Longest.of("s"), **TEXTS))


def _check_aggregates(found: Found, given: Given) -> None:
    kept, _ = in_windows(given.of(0, 1), 10)
    assert found("windows").height == len({(row[0], at(row[1]).timestamp() // 10) for row in kept})
    judged = with_watermarks(given.of(0, 1, 2, 4))
    for window in [*found("windows").to_dicts(), *found("sliding").to_dicts()]:
        inside = [
            row
            for row, watermark in judged
            if row[0] == window["k"]
            and window["window_start"] <= at(row[1]) < window["window_end"]
            and window["window_end"] > at(watermark)
        ]
        check_aggregates(window, inside)
    # A running aggregate has no late rows.
    everything = [(k, second, x, s) for part in given.rows for k, second, x, _, s in part]
    latest = {row["k"]: row for row in found("running").to_dicts()}
    assert set(latest) == {row[0] for row in everything}
    for key, row in latest.items():
        check_aggregates(row, [one for one in everything if one[0] == key])  # type: ignore[misc]  # likewise


def _build_rates(inputs: Inputs, out: Out) -> None:
    given: dict[str, Any] = {
        "good": "sum(CASE WHEN x > 20 THEN 1 ELSE 0 END)",
        "n": "count(*)",
        "mean": "beta_mean(x > 20)",
    }
    given |= {"low": "beta_low(x > 20, 0.9)", "high": "beta_high(x > 20, 0.9, 2, 0.5)"}
    rows = inputs.rows.group_by("k")
    out("tumbling", rows.window(tumbling("10s")).agg(name="rates", **given))
    out("sliding", rows.window(sliding("20s", every="10s")).agg(name="sliding_rates", **given))
    out("running", rows.agg(name="rates_so_far", **given))


def _check_rates(found: Found, given: Given) -> None:
    for sink in ("tumbling", "sliding", "running"):
        rows = found(sink).select("good", "n", "mean", "low", "high").rows()
        assert len(rows) > 3
        for good, n, mean, low, high in rows:
            assert mean == pytest.approx((1 + good) / (2 + n), rel=1e-12)
            assert low == pytest.approx(special.betaincinv(1 + good, 1 + n - good, 0.05), rel=1e-9)
            assert high == pytest.approx(special.betainccinv(2 + good, 0.5 + n - good, 0.05), rel=1e-9)
    assert found("tumbling")["n"].sum() == len(in_windows(given.rows, 10)[0])


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _alone(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield row


def _all_of_it(frame: pl.DataFrame) -> pl.DataFrame:
    return frame


def _build_carried(inputs: Inputs, out: Out) -> None:
    """Rows below their watermark keep it through every step that looks at each row alone."""
    rows, table = inputs.rows, files(str(inputs.root / "sites.csv"))
    ways = {
        "select": rows.select("ts", "k", "x + 1 AS x", name="carried_select"),
        "map": rows.map(_as_it_is, name="carried_map"),
        "flat_map": rows.flat_map(_alone, name="carried_flat_map"),
        "map_batches": rows.map_batches(_all_of_it, name="carried_map_batches"),
        "explode": rows.flat_map("split('one', ' ') AS one", name="carried_explode"),
        "union": rows.filter("x > 9", name="carried_more").union(rows.filter("x <= 9"), name="carried_union"),
        "lookup": rows.lookup(table, on={"k": "id"}, schema={"id": "string", "site": "string"}, name="carried_lookup"),
    }
    for way, stream in ways.items():
        out(way, stream.group_by("k").window(tumbling("5s")).agg(name=f"carried_{way}_windows", n="count(*)"))


def _check_carried(found: Found, given: Given) -> None:
    kept, late = in_windows(given.of(0, 1), 5)
    assert late > 0
    wanted = Counter((k, at(second).timestamp() // 5 * 5) for k, second in kept)
    for way in ("select", "map", "flat_map", "map_batches", "explode", "union", "lookup"):
        windows = found(way).select("k", "window_start", "n").iter_rows()
        assert {(k, start.timestamp()): n for k, start, n in windows} == wanted, way


def _build_windows_of_windows(inputs: Inputs, out: Out) -> None:
    visits = inputs.rows.group_by("k").window(session("2s")).agg(name="visits", rows="count(*)")
    packs = visits.group_by("k").window(by_count(2, every=2)).agg(name="packs", rows="sum(rows)")
    out("out", packs.group_by().window(tumbling("1d")).agg(name="days", packs="count(*)", rows="sum(rows)"))


def _check_windows_of_windows(found: Found, given: Given) -> None:
    days: dict[float, list[int]] = {}
    sessions, _ = in_sessions(given.of(0, 1), 2)
    for key in {rows[0][0] for rows in sessions}:
        visits = sorted(((len(rows), rows[-1][1]) for rows in sessions if rows[0][0] == key), key=lambda one: one[1])
        for one, other in zip(visits[::2], visits[1::2], strict=False):
            # The time of a pack is that of its last visit: just before it ends, two seconds after its last row.
            day = (at(other[1] + 2) - timedelta(microseconds=1)).timestamp() // 86_400
            days.setdefault(day, []).append(one[0] + other[0])
    wanted = sorted((len(rows), sum(rows)) for rows in days.values())
    assert sorted(found("out").select("packs", "rows").rows()) == wanted


def _build_forgotten(inputs: Inputs, out: Out) -> None:
    rows = inputs.rows.select("k", "ts", "x", name="forgotten_x")
    found = rows.group_by("k").agg(name="forgotten", ttl=f"{GAP_S}s", rows="count(*)", total="sum(x)", top="max(x)")
    out("out", found)
    out("late", found.late)


def _check_forgotten(found: Found, given: Given) -> None:
    sessions, late = in_sessions(given.of(0, 1, 2), GAP_S)
    newest = {rows[0][0]: rows for rows in sorted(sessions, key=lambda rows: rows[-1][1])}
    wanted = {
        key: (key, len(rows), sum(row[2] for row in rows), max(row[2] for row in rows)) for key, rows in newest.items()
    }
    assert {row[0]: row for row in found("out").drop("__op").rows()} == wanted
    assert found("late").height == late
    assert len(sessions) > len(wanted)


def _build_top(inputs: Inputs, out: Out) -> None:
    counts = inputs.rows.group_by("k").window(tumbling("10s")).agg(name="top_counts", n="count(*)", most="max(x)")
    out("out", counts.top(2, by="n DESC, most", per="window_start", name="top"))
    sliding_counts = inputs.rows.group_by("k").window(sliding("10s", every="5s")).agg(name="top_slid", n="count(*)")
    starts = sliding_counts.select("k", "window_start AS since", "n % 3 AS n", name="top_since")
    out("so_far", inputs.rows.select("k", "s", "x", name="top_x").top(2, by="x DESC", per="k", name="top_so_far"))
    per_key = inputs.rows.group_by("k").agg(name="top_per_key", n="count(*)")
    out("leaders", per_key.top(2, by="n DESC", name="top_leaders"))
    out("ranks", starts.top(2, by="n DESC", per="since", numbering="rank", name="top_ranks"))


def _same_as_duckdb(found: pl.DataFrame, query: str, rows: list[tuple[Any, ...]]) -> None:
    """The rows are those that DuckDB gives over `rows`: k, second, x, and the second w that they are judged by."""
    schema = {"k": pl.String, "s": pl.Int64, "x": pl.Float64, "w": pl.Int64}
    with duckdb.connect(config={"threads": 1}) as base:
        base.register("rows", pl.DataFrame(rows, schema=schema, orient="row").to_arrow())
        wanted = base.execute(query).fetchall()
    times = {
        name: pl.col(name).cast(pl.Int64) // 1_000_000 for name, kind in found.schema.items() if kind == TIMES["ts"]
    }
    start_s = int(START.timestamp())
    plain = found.with_columns(**{name: time - start_s for name, time in times.items()})
    assert Counter(plain.rows()) == Counter(wanted)
    assert wanted


def _check_top(found: Found, given: Given) -> None:
    everything = [(k, s, x) for part in given.rows for k, _, x, _, s in part]
    wanted: dict[Any, Any] = {}
    for key in {row[0] for row in everything}:
        mine = sorted(
            (row for row in everything if row[0] == key), key=lambda row: (-row[2], row[1] is not None, row[1])
        )
        wanted |= {(key, place): (*row, place) for place, row in enumerate(mine[:2], 1)}
    assert {(row[0], row[3]): row for row in found("so_far").drop("__op").rows()} == wanted
    counts = Counter(row[0] for row in everything)
    leaders = sorted(counts.items(), key=lambda item: (-item[1], item[0] is not None, item[0]))[:2]
    newest = {row[2]: row for row in found("leaders").drop("__op").rows()}
    assert newest == {place: (*leader, place) for place, leader in enumerate(leaders, 1)}
    rows = [(*row, watermark) for row, watermark in with_watermarks(given.of(0, 1, 2))]
    offset = int(START.timestamp()) % 10 + 1000  # some seconds are before the start
    starts = f"SELECT *, s - (s + {offset}) % {{every}} - {{before}} AS start FROM rows"
    _same_as_duckdb(
        found("out"),
        f"""SELECT * EXCLUDE r, r FROM (
            SELECT k, start, start + 10 AS window_end, count(*) AS n, max(x) AS most,
                row_number() OVER (PARTITION BY start ORDER BY count(*) DESC, max(x), k NULLS FIRST) AS r
            FROM ({starts.format(every=10, before=0)}) WHERE start + 10 > w GROUP BY k, start) WHERE r <= 2""",
        rows,
    )
    _same_as_duckdb(
        found("ranks"),
        f"""SELECT k, start, n, r FROM (
            SELECT k, start, count(*) % 3 AS n, rank() OVER (PARTITION BY start ORDER BY count(*) % 3 DESC) AS r
            FROM ({starts.format(every=5, before=0)} UNION ALL {starts.format(every=5, before=5)})
            WHERE start + 10 > w GROUP BY k, start)
            WHERE r <= 2""",
        rows,
    )


# Steps that depend on order.


def _build_ewma(inputs: Inputs, out: Out) -> None:
    rows = inputs.rows.select("k", "ts", "CAST(n AS DOUBLE) AS x", name="ewma_n")
    means = rows.group_by("k").ewma(mean="x", alpha=ALPHA, name="ewma")
    out("means", means)
    out("late", means.late)
    out(
        "by_age",
        inputs.rows.select("k", "ts", "x", name="ewma_x")
        .group_by("k")
        .ewma(mean="x", half_life=f"{HALF_LIFE_S}s", name="ewma_by_age"),
    )


def _check_ewma(found: Found, given: Given) -> None:
    means: dict[str | None, float] = {}
    by_alpha, by_age = [], []
    for k, second, n in sorted(
        in_time(given.of(0, 1, 3))[0], key=lambda row: (row[1], row[2] is not None, row[2] or 0)
    ):
        if n is not None:
            means[k] = n if k not in means else ALPHA * n + (1 - ALPHA) * means[k]
        by_alpha.append((k, at(second), n, means.get(k)))
    kept = sorted(in_time(given.of(0, 1, 2))[0], key=lambda row: row[1:])
    for place, (k, second, x) in enumerate(kept):
        mine = [(2 ** ((one[1] - second) / HALF_LIFE_S), one[2]) for one in kept[: place + 1] if one[0] == k]
        by_age.append((k, at(second), x, sum(w * v for w, v in mine) / sum(w for w, _ in mine)))
    columns = TIMES | {"mean": pl.Float64}
    same_rows(found("means"), pl.DataFrame(by_alpha, schema=columns, orient="row"))
    assert found("late").height == given.late
    wanted = pl.DataFrame(by_age, schema=columns, orient="row")
    assert_frame_equal(found("by_age").sort(wanted.columns), wanted.sort(wanted.columns))


def _build_distinct(inputs: Inputs, out: Out) -> None:
    out("so_far", inputs.rows.select("k", "s", name="distinct_ks").distinct(name="distinct"))
    timed = inputs.rows.select("k", "ts", name="distinct_kt").distinct(name="distinct_in_time")
    out("in_time", timed)
    out("late", timed.late)


def _check_distinct(found: Found, given: Given) -> None:
    # Without time no row is late.
    assert Counter(found("so_far").rows()) == Counter({(row[0], row[4]) for part in given.rows for row in part})
    assert Counter(found("in_time").rows()) == Counter({(row[0], at(row[1])) for row in given.in_time})
    assert found("late").height == given.late


def _build_over(inputs: Inputs, out: Out) -> None:
    rows = inputs.rows.select("k", "ts", "x", name="over_x").group_by("k")
    sums: dict[str, Any] = {"n": "count(*)", "s": "sum(x)", "top": "max(x)", "since": "first(x)"}
    three = rows.over(rows=3, name="over_three", before="lag(x)", **sums)
    out("three", three)
    out("late", three.late)
    out("recent", rows.over(range="5s", name="over_recent", **sums))
    out("so_far", rows.over(name="over_so_far", **sums))


def _check_over(found: Found, given: Given) -> None:
    rows = [(k, second, x, second) for k, second, x, *_ in given.in_time]  # none of them is late
    frames = {
        "three": "ROWS BETWEEN 2 PRECEDING AND CURRENT ROW",
        "recent": "RANGE BETWEEN 5 PRECEDING AND CURRENT ROW",
        "so_far": "ROWS UNBOUNDED PRECEDING",
    }
    for sink, frame in frames.items():
        order = "s" if sink == "recent" else "s, x"
        lag = "lag(x) OVER (PARTITION BY k ORDER BY s, x)," if sink == "three" else ""
        # By time, which row of the first time is the first is for the order to say: the one with the least x.
        over = f"OVER (PARTITION BY k ORDER BY {order} {frame})"
        since = f"min_by(x, (s, x)) {over}"
        _same_as_duckdb(
            found(sink), f"SELECT k, s, x, {lag} count(*) {over}, sum(x) {over}, max(x) {over}, {since} FROM rows", rows
        )
    assert found("late").height == given.late


def _build_deduplicate(inputs: Inputs, out: Out) -> None:
    once = inputs.rows.select("k", "ts", "x", name="once_x").deduplicate("k", within=f"{WITHIN_S}s", name="once")
    out("once", once)
    out("late", once.late)
    out("counts", once.group_by().window(tumbling("1d")).agg(name="count_once", n="count(*)"))


def _check_deduplicate(found: Found, given: Given) -> None:
    last: dict[str | None, int] = {}
    wanted = []
    for k, second, x in sorted(((row[0], row[1], row[2]) for row in given.in_time), key=lambda row: row[1:]):
        if k not in last or second - last[k] >= WITHIN_S:
            last[k] = second
            wanted.append((k, at(second), x))
    same_rows(found("once"), pl.DataFrame(wanted, schema=TIMES, orient="row"))
    assert found("late").height == given.late
    assert found("counts")["n"].sum() == len(wanted)


def _build_match(inputs: Inputs, out: Out) -> None:
    fall = Pattern("fall").start("high", "x > 30").next("low", "x < high.x - 10").within("1h")
    rows = inputs.rows.select("k", "ts", "x", name="match_x")
    found = rows.group_by("k").match(fall, {"since": "high.ts", "top": "high.x", "bottom": "low.x"}, name="match")
    out("out", found)
    out("late", found.late)


def _check_match(found: Found, given: Given) -> None:
    wanted: Counter[Any] = Counter()
    for key in {row[0] for row in given.in_time}:
        mine = sorted((row[1], row[2]) for row in given.in_time if row[0] == key)
        place = 0
        while place + 1 < len(mine):
            (second, top), (_, bottom) = mine[place], mine[place + 1]
            if top > 30 and bottom < top - 10:
                wanted[key, at(second), top, bottom] += 1
                place += 2
            else:
                place += 1
    assert Counter(found("out").select("k", "since", "top", "bottom").rows()) == wanted
    assert wanted
    assert found("late").height == given.late


def _build_process(inputs: Inputs, out: Out) -> None:
    rows = inputs.rows.select("k", "ts", "n AS x", name="process_x")
    visited = rows.group_by("k").process(Visits, schema=OUT_SCHEMA, name="process")
    out("out", visited)
    out("late", visited.late)


def _check_process(found: Found, given: Given) -> None:
    wanted, late = by_hand(given.of(0, 1, 3))
    assert Counter(found("out").select(list(OUT_SCHEMA)).rows()) == wanted
    assert found("late").height == late


# Joins.


def _join_name(how: str, from_s: int, to_s: int) -> str:
    return f"join_{how}_{from_s}_{to_s}".replace("-", "m")


def _build_join(how: Any, from_s: int, to_s: int, inputs: Inputs, out: Out) -> None:
    name = _join_name(how, from_s, to_s)
    joined = inputs.left.join(inputs.right, on="k", between=(f"{from_s}s", f"{to_s}s"), how=how, name=name)
    out("out", joined)
    out("late", joined.late)
    if how != "full":
        counts = joined.group_by("k").window(tumbling(f"{joining.WINDOW_S}s"))
        counted = counts.agg(name=f"{name}_counts", n="count(*)", top="max(x_right)")
        out("windows", counted)
        out("late_windows", counted.late)


def _check_join(how: str, from_s: int, to_s: int, found: Found, given: Given) -> None:
    wanted = given.sides.joined(how, from_s, to_s)
    same_rows(found("out"), wanted)
    assert found("late").height == given.sides.late_rows() > 0
    if how != "full":
        same_rows(found("windows"), joining.windows_of(wanted, how, from_s, to_s))
        assert found("late_windows").height == 0, "nothing that a join gives is late for what follows"


def _join(how: str, from_s: int, to_s: int) -> Case:
    return Case(
        name=_join_name(how, from_s, to_s),
        build=partial(_build_join, how, from_s, to_s),
        check=partial(_check_join, how, from_s, to_s),
    )


# Event time that a step assigns.


def _build_with_time(inputs: Inputs, out: Out) -> None:
    table = [{"id": "a", "site": "north"}]
    some = inputs.untimed.filter("x < 40", name="with_time_some")
    out("before", some.select("k", "x", name="with_time_before"))
    looked_up = some.lookup(table, on={"k": "id"}, name="with_time_sites")
    timed = looked_up.with_time("to_timestamp(ts) AS at", lateness=f"{LATENESS_S}s")
    means = timed.select("k", "at AS ts", "x", "site", name="with_time_x").group_by("k").ewma(mean="x", alpha=ALPHA)
    out("means", means)
    out("late", means.late)


def _check_with_time(found: Found, given: Given) -> None:
    # Rows that were dropped before the time was assigned move no time on.
    rows = [[row for row in part if row[2] < 40] for part in given.of(0, 1, 2)]
    kept, late = in_time(rows)
    assert Counter(found("before").rows()) == Counter((k, x) for part in rows for k, _, x in part)
    means: dict[str | None, float] = {}
    wanted = []
    for k, second, x in sorted(kept, key=lambda row: row[1:]):
        means[k] = x if k not in means else ALPHA * x + (1 - ALPHA) * means[k]
        wanted.append((k, at(second), x, "north" if k == "a" else None, means[k]))
    columns = TIMES | {"site": pl.String, "mean": pl.Float64}
    same_rows(found("means"), pl.DataFrame(wanted, schema=columns, orient="row"))
    assert found("late").height == late > 0


def _build_lookup(inputs: Inputs, out: Out) -> None:
    table = files(str(inputs.root / "sites.csv"))
    sites = inputs.rows.lookup(table, on={"k": "id"}, schema={"id": "string", "site": "string"}, name="lookup")
    out("out", sites.select("k", "x", "site", name="lookup_x"))


def _check_lookup(found: Found, given: Given) -> None:
    sites = {"a": "north", "b": "south"}
    wanted = Counter((row[0], row[2], sites.get(str(row[0]))) for rows in given.rows for row in rows)
    assert Counter(found("out").rows()) == wanted


# Functions that raise.


def _doubled(row: dict[str, Any]) -> dict[str, Any]:
    n, row["n"] = row["n"], "gone"
    return {**row, "n": n * 2}


def _repeated(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield row
    yield {**row, "n": row["n"] + 1}


def _tripled(frame: pl.DataFrame) -> pl.DataFrame:
    if frame.get_column("n").null_count():
        raise ValueError("a null")
    return frame.with_columns(pl.col("n") * 3)


class _Added(KeyedFunction):
    """Counts rows, and raises after it has counted, listed and set a timer for one without a number."""

    rows = ValueState("bigint")
    numbers = ListState("bigint")
    texts = MapState("bigint", "bigint")

    def process(self, row: dict[str, Any], ctx: Context) -> dict[str, Any]:
        self.rows.set(self.rows.get(0) + 1)
        self.numbers.append(row["n"] or 0)
        self.texts[len(self.texts)] = row["n"] or 0
        if row["n"] is None:
            ctx.set_timer("never", after="1s")
            raise KeyError("n")
        return {
            "k": row["k"],
            "ts": ctx.time,
            "x": float(sum(self.numbers)),
            "n": self.rows.get(),
            "s": str(len(self.texts)),
        }

    def on_timer(self, timer: Timer, ctx: Context) -> None:
        raise AssertionError("the call that set it left no trace")


class _Alarmed(KeyedFunction):
    """Raises for the only timer of each key."""

    seen = ValueState("boolean")

    def process(self, row: dict[str, Any], ctx: Context) -> dict[str, Any]:
        if not self.seen.get(False):
            ctx.set_timer("alarm", after="1s")
            self.seen.set(True)
        return row

    def on_timer(self, timer: Timer, ctx: Context) -> None:
        raise ValueError("an alarm")


def _build_failing(inputs: Inputs, out: Out) -> None:
    rows = inputs.rows.filter("x >= 0", name="failing_rows")
    out("map", rows.map(_doubled, on_error="dead_letter", name="failing_map"))
    out("flat_map", rows.flat_map(_repeated, on_error="dead_letter", name="failing_flat_map"))
    out("map_batches", rows.map_batches(_tripled, on_error="dead_letter", name="failing_map_batches"))
    by_key = rows.group_by("k")
    out("process", by_key.process(_Added, on_error="dead_letter", name="failing_process"))
    out("unordered", by_key.process(_Added, ordered=False, on_error="dead_letter", name="failing_unordered"))
    out("timer", by_key.process(_Alarmed, on_error="dead_letter", name="failing_timer"))


def _check_failing(found: Found, given: Given) -> None:
    rows = [record(row) for part in given.rows for row in part]
    good, bad = [row for row in rows if row[3] is not None], [row for row in rows if row[3] is None]
    wanted = {
        "map": [(*row[:3], row[3] * 2, row[4]) for row in good],
        "flat_map": [(*row[:3], row[3] + more, row[4]) for row in good for more in (0, 1)],
        "map_batches": [(*row[:3], row[3] * 3, row[4]) for row in good],
    }
    for kind, those in wanted.items():
        assert Counter(found(kind).iter_rows()) == Counter(those), kind
        texts = _failed_rows(found, given, kind)
        assert Counter(one["x"] for one in texts) == Counter(row[2] for row in bad)
    assert found(f"{DEAD_LETTERS}failing_map_batches")["reason"].unique().to_list() == ["ValueError: a null"]
    kept = Counter(row[0] for row in given.in_time if row[3] is not None)
    last = found("process").group_by("k").agg(pl.col("n").max(), pl.col("s").cast(pl.Int64).max())
    assert {k: (n, s) for k, n, s in last.iter_rows()} == {k: (n, n) for k, n in kept.items()}, (
        "a failed call left no trace"
    )
    for kind in ("process", "unordered"):
        texts = _failed_rows(found, given, kind)
        assert Counter(one["x"] for one in texts) == Counter(row[2] for row in given.in_time if row[3] is None)
        assert found(f"{DEAD_LETTERS}failing_{kind}")["reason"].unique().to_list() == ["KeyError: 'n'"]
    alarms = found(f"{DEAD_LETTERS}failing_timer")
    assert alarms.select("partition", "position", "reason").unique().rows() == [(None, None, "ValueError: an alarm")]
    first: dict[Any, int] = {}
    for k, second, *_ in given.in_time:
        first[k] = min(first.get(k, second), second)
    wanted_alarms = [{"key": k, "timer": "alarm", "time": at(second + 1).isoformat()} for k, second in first.items()]
    assert _counted(json.loads(text) for text in alarms["text"]) == _counted(wanted_alarms)


def _failed_rows(found: Found, given: Given, kind: str) -> list[dict[str, Any]]:
    """The rows that a step has set aside; each letter names the place where its row stands."""
    letters = found(f"{DEAD_LETTERS}failing_{kind}")
    assert letters["step"].unique().to_list() == [f"failing_{kind}"]
    places = letters.select("partition", "position").iter_rows()
    texts: list[dict[str, Any]] = [json.loads(text) for text in letters["text"]]
    assert [given.line(partition, position) for partition, position in places] == texts, kind
    return texts


NESTED_COUNT = "CASE WHEN n % 2 = 0 THEN map('n', n, 'one', 1L) END AS counts"


def _build_nested(inputs: Inputs, out: Out) -> None:
    made = inputs.rows.select(
        "k",
        "ts",
        "struct(x, n AS m) AS s",
        NESTED_COUNT,
        "array(struct(x AS v), struct(x + 1 AS v)) AS items",
        name="nested",
    )
    fields = ("s.x", "s.m", "counts['n'] AS n", "from_json(to_json(s), 'x DOUBLE, m BIGINT') AS again", "items.v AS vs")
    out("fields", made.select("k", *fields, name="nested_fields"))
    out("exploded", made.flat_map("items", name="nested_items").select("k", "items.v", name="nested_v"))
    out("entries", made.flat_map("counts AS c", name="nested_counts").select("k", "c.key", "c.value", name="nested_c"))
    sums = {"total": "sum(s.x)", "first": "first(s)", "last": "last(s)", "every": "collect(s)"}
    windows = made.group_by("k").window(tumbling("10s")).agg(name="nested_sums", **sums)
    out("windows", windows)
    out("late", windows.late)
    out(
        "waiting",
        made.deduplicate("k", within="1s", name="nested_waiting").select("k", "s", "counts", name="nested_kept"),
    )


def _check_nested(found: Found, given: Given) -> None:
    rows = [row for part in given.rows for row in part]
    even = [row for row in rows if row[3] is not None and row[3] % 2 == 0]
    fields = [
        {
            "k": k,
            "x": x,
            "m": n,
            "n": n if n is not None and n % 2 == 0 else None,
            "again": {"x": x, "m": n},
            "vs": [x, x + 1],
        }
        for k, _, x, n, _ in rows
    ]
    assert _counted(found("fields").to_dicts()) == _counted(fields)
    assert Counter(found("exploded").rows()) == Counter((row[0], row[2] + more) for row in rows for more in (0, 1))
    entries = [(row[0], name, value) for row in even for name, value in (("n", row[3]), ("one", 1))]
    assert Counter(found("entries").rows()) == Counter(entries)
    late = Counter((row["k"], row["ts"], row["s"]["x"], row["s"]["m"]) for row in found("late").to_dicts())
    counted = Counter((k, at(second), x, n) for k, second, x, n, _ in rows) - late
    windows: dict[Any, list[Any]] = {}
    for k, time, x, n in counted.elements():
        windows.setdefault((k, time.replace(second=time.second // 10 * 10)), []).append((k, time, x, n))
    wanted = []
    for (k, start), inside in windows.items():
        ordered = sorted(inside, key=lambda row: (row[1], row[2], row[3] is not None, row[3] or 0))
        every = [{"x": row[2], "m": row[3]} for row in ordered]
        wanted.append(
            {"k": k, "start": start.isoformat(), "total": sum(one["x"] or 0 for one in every), "every": every}
            | {"first": every[0], "last": every[-1]}
        )
    results = found("windows").drop("window_end").rename({"window_start": "start"}).to_dicts()
    assert _counted([one | {"start": one["start"].isoformat()} for one in results]) == _counted(wanted)
    kinds = {"k": pl.String, "s": pl.Struct({"x": pl.Float64, "m": pl.Int64}), "counts": pl.Map(pl.String, pl.Int64)}
    assert dict(found("waiting").schema) == kinds
    assert 0 < found("waiting").height < len(rows)


def _counted(records: Iterable[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(record.items())) for record in records)


LARGEST = 10**38 - 1


def _build_decimals(inputs: Inputs, out: Out) -> None:
    wide = f"CASE WHEN x > 48 THEN {LARGEST} ELSE CAST(x AS DECIMAL(38,0)) END AS d"
    made = inputs.rows.select("k", "ts", "x", wide, "CAST(x AS DECIMAL(5,2)) AS e", name="decimals")
    sums = (
        made.group_by("k").window(tumbling("10s")).agg(name="decimal_sums", d="sum(d)", e="sum(e)", u="sum(DISTINCT d)")
    )
    out("windows", sums)
    out("late", sums.late)
    # Its late rows are not read, so that rows are combined before the shuffle.
    combined = made.group_by("k").window(tumbling("10s"))
    out("combined", combined.agg(name="decimal_combined", d="sum(d)"))
    out("combined_distinct", combined.agg(name="decimal_distinct", u="sum(DISTINCT d)"))


def _check_decimals(found: Found, given: Given) -> None:
    late = Counter(found("late").select("k", "ts", "x").iter_rows())
    rows = Counter((k, at(second), x) for part in given.rows for k, second, x, _, _ in part) - late
    sums: dict[Any, list[float]] = {}
    for k, time, x in rows.elements():
        sums.setdefault((k, time.replace(second=time.second // 10 * 10)), []).append(x)
    wanted = {}
    for window, values in sums.items():
        wide = [LARGEST if x > 48 else int(x) for x in values]
        total, distinct = sum(wide), sum(set(wide))
        exact = [None if one > LARGEST else one for one in (total, distinct)]
        wanted[window] = (exact[0], int(sum(values)), exact[1])
    for number in (0, 2):
        assert {None} < {totals[number] for totals in wanted.values()}
    results = found("windows").select("k", "window_start", "d", "e", "u").iter_rows()
    assert {(k, start): tuple(totals) for k, start, *totals in results} == wanted
    for sink, name, number in (("combined", "d", 0), ("combined_distinct", "u", 2)):
        results = found(sink).select("k", "window_start", name).iter_rows()
        assert {(k, start): total for k, start, total in results} == {
            window: totals[number] for window, totals in wanted.items()
        }


CASES = (
    Case(name="failing", build=_build_failing, check=_check_failing),
    _slid(6, 6, 0, windowing.AGGREGATES),
    _slid(20, 7, 3, windowing.AGGREGATES),
    _slid(30, 2, 1, windowing.EXACT),
    _slid(4, 9, 2, windowing.AGGREGATES),
    _slid(20, 5, 0, windowing.AGGREGATES, early="1ms", late=False),
    _slid(10, 10, 3, windowing.AGGREGATES, late=False),
    _slid(12, 4, 0, windowing.AGGREGATES, late=False),
    _slid(10, 10, 0, windowing.AGGREGATES, allowed_s=4),
    _slid(6, 6, 0, windowing.EXACT, allowed_s=5, late=False),
    _slid(20, 7, 3, windowing.AGGREGATES, allowed_s=3, late=False),
    _slid(30, 2, 1, windowing.EXACT, allowed_s=4, early="1ms"),
    _unaligned("sessions", session(f"{GAP_S}s"), _sessions),
    _unaligned("packs_of_rows", by_count(SIZE, every=EVERY), _packs),
    Case(name="aggregates", build=_build_aggregates, check=_check_aggregates),
    Case(name="rates", build=_build_rates, check=_check_rates),
    Case(name="carried", build=_build_carried, check=_check_carried),
    Case(name="forgotten", build=_build_forgotten, check=_check_forgotten),
    Case(name="windows_of_windows", build=_build_windows_of_windows, check=_check_windows_of_windows),
    Case(name="top", build=_build_top, check=_check_top),
    Case(name="ewma", build=_build_ewma, check=_check_ewma),
    Case(name="distinct", build=_build_distinct, check=_check_distinct),
    Case(name="over", build=_build_over, check=_check_over),
    Case(name="deduplicate", build=_build_deduplicate, check=_check_deduplicate),
    Case(name="match", build=_build_match, check=_check_match),
    Case(name="process", build=_build_process, check=_check_process),
    _join("inner", -5, 10),
    _join("inner", 0, 4),
    _join("left", -2, 3),
    _join("left", -6, -1),
    _join("right", -4, 2),
    _join("full", -3, 3),
    Case(name="with_time", build=_build_with_time, check=_check_with_time),
    Case(name="lookup", build=_build_lookup, check=_check_lookup),
    Case(name="nested", build=_build_nested, check=_check_nested),
    Case(name="decimals", build=_build_decimals, check=_check_decimals),
)


@dataclass(frozen=True)
class Built:
    """All cases as one pipeline, and what its sinks receive."""

    pipeline: Pipeline
    sinks: dict[tuple[str, str], MemorySink]
    state: Path = Path()
    """Where it ran, with its dead letters."""

    def found(self, case: Case) -> Found:
        return lambda sink: self._letters(sink) if sink.startswith(DEAD_LETTERS) else self.sinks[case.name, sink].rows()

    def _letters(self, sink: str) -> pl.DataFrame:
        (directory,) = self.state.rglob(sink)
        return rows_in(str(directory))


def build(root: Path, *, mode: Any = "aligned", state: StateKind = "memory") -> Built:
    """Build the pipeline over the files below `root`."""
    pipeline = Pipeline("cases", mode=mode, state=state)
    rows = pipeline.source("rows", files(str(root / "rows" / "*")), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    left, right = (joining.source(pipeline, name, root) for name in ("l", "r"))
    untimed = pipeline.source("untimed", files(str(root / "rows" / "*")), schema=SCHEMA | {"ts": "string"})
    inputs = Inputs(rows, untimed, left, right, root)
    sinks: dict[tuple[str, str], MemorySink] = {}

    def out(case: str, sink: str, stream: Stream) -> None:
        sinks[case, sink] = MemorySink()
        stream.sink(f"{case}_to_{sink}", memory(sinks[case, sink]))

    for case in CASES:
        case.build(inputs, partial(out, case.name))
    return Built(pipeline, sinks)
