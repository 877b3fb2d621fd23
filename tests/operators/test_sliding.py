"""Sliding windows against a plain loop and against DuckDB, whatever the batches, watermarks, restores and subtasks.

Early results of tumbling and sliding windows, too.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from random import Random
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import Row, below, bits, restored
from tests.operators.window_rows import (
    ANY,
    EXACT,
    Windows,
    by_window,
    frame,
    happens,
    planned,
    shown,
    windows,
    windows_of,
)

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.aggregate.partial import END
from fordstone.operators.base import FINAL, LATE, MAIN, OP, UPSERT, Moment, Operator
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.operators.window.panes import PaneGrid
from fordstone.operators.window.sliding import PaneStore, SlidingAggregate
from fordstone.plan.plan import Sliding, Tumbling
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START

FEW_PANES, MANY_PANES = Sliding(20, 10), Sliding(20, 2)
"""Windows of few panes are merged at once, those of many one after the other."""


@examples(50)
@given(
    window=windows,
    aggregates=st.sampled_from([EXACT, ANY]),
    happens=happens,
    combined=st.booleans(),
)
def test_every_window_has_what_a_plain_loop_finds_in_it(window, aggregates, happens, combined):
    both = Windows(window, aggregates, combined=combined)
    both.live_through(happens)
    until_us = both.subtasks.watermark_us
    assert shown(both.subtasks.out, both.names) == both.expected(until_us)
    both.watermark(TIME_MAX_US)
    assert shown(both.subtasks.out, both.names) == both.expected(TIME_MAX_US)
    assert both.rows_late() == both.late


@examples(36)
@given(
    window=st.one_of(windows, st.builds(Tumbling, st.integers(1, 9))),
    aggregates=st.sampled_from([EXACT, ANY]),
    happens=happens,
    combined=st.booleans(),
    early_us=st.sampled_from([1, 2, 3]),
    allowed_us=st.sampled_from([0, 0, 1, 5, 30]),
)
def test_early_results_are_the_windows_that_changed_and_the_final_ones_come_once(
    window, aggregates, happens, combined, early_us, allowed_us
):
    both = Windows(window, aggregates, combined=combined, early_us=early_us, allowed_us=allowed_us)
    both.live_through(happens)
    both.watermark(TIME_MAX_US)
    final = shown(both.subtasks.ports.get(FINAL, []), both.names)
    assert final == both.expected(TIME_MAX_US)
    assert both.rows_late() == both.late
    last = {row[:3]: row[3:] for one in both.subtasks.out for row in shown([one], both.names)}
    assert Counter((*key, *values) for key, values in last.items()) == final
    for one in both.subtasks.out:
        assert set(one.get_column(OP)) == {UPSERT}
    for one in both.subtasks.ports.get(FINAL, []):
        assert OP not in one.columns


@examples(60)
@given(
    window=st.one_of(windows, st.builds(Tumbling, st.integers(1, 9))),
    aggregates=st.sampled_from([EXACT, ANY]),
    happens=happens,
    combined=st.booleans(),
    allowed_us=st.sampled_from([1, 4, 12, 40]),
)
def test_a_window_is_corrected_at_barriers_until_the_allowed_lateness_is_over(
    window, aggregates, happens, combined, allowed_us
):
    both = Windows(window, aggregates, combined=combined, allowed_us=allowed_us)
    both.live_through(happens)
    both.watermark(TIME_MAX_US)
    final = shown(both.subtasks.ports.get(FINAL, []), both.names)
    assert final == both.expected(TIME_MAX_US)
    assert both.rows_late() == both.late
    last = {row[:3]: row[3:] for one in both.subtasks.out for row in shown([one], both.names)}
    assert Counter((*key, *values) for key, values in last.items()) == final


@examples(30)
@given(
    window=windows,
    rows=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-60, 60), st.integers(-9, 9).map(float), st.integers(-9, 9)),
        max_size=40,
    ),
    steps=st.lists(st.integers(-70, 90), max_size=5),
)
def test_windows_are_those_of_duckdb(window, rows, steps):
    given_rows = rows = [(*row, None) for row in sorted(rows, key=lambda row: row[1])]
    both = Windows(window, ANY)
    for us in [*sorted(set(steps)), TIME_MAX_US]:
        due = [row for row in rows if row[1] < us]
        rows = [row for row in rows if row[1] >= us]
        if due:
            both.batch(due, late=False)
        both.watermark(us)
    assert both.late == 0
    rows_by_time = frame(given_rows).select("k", pl.col("ts").cast(pl.Int64).alias("t"), "x", "i")  # noqa: F841 - DuckDB reads it by name
    size, slide, offset = window.size_us, window.slide_us, window.offset_us
    wanted = duckdb.execute(
        f"""
        WITH starts AS (SELECT {offset} + {slide} * n AS s FROM range(-100, 101) AS r(n))
        SELECT k, s, s + {size}, count(*), count(i), sum(i)::BIGINT, sum(x), min(x), max(x), avg(x)
        FROM rows_by_time JOIN starts ON t >= s AND t < s + {size} GROUP BY ALL
        """
    ).fetchall()
    names = ["n", "known", "s", "sx", "lo", "hi", "mean"]
    assert shown(both.subtasks.out, names) == Counter((*row[:3], *map(bits, row[3:])) for row in wanted)


MERGED_IN_ANY_SHAPE = {
    "first": "first(i)",
    "last": "last(i)",
    "spread": "variance(x)",
    "distinct": "count_distinct(i)",
    "middle": "quantile(x, 0.5)",
    "all": "collect(i)",
    "exact": "sum(DISTINCT i)",
    "at_top": "max_by(i, x)",
    "at_bottom": "min_by(i, x)",
}


def in_any_shape(rows: list[Row]) -> tuple[Any, ...]:
    """The same by a plain loop; `rows` by time, no two of one time."""
    xs, numbers = sorted(row[2] for row in rows), [row[3] for row in rows]
    spread = round(statistics.variance(xs), 9) if len(xs) > 1 else 0.0
    by_x = sorted((row[2], row[3]) for row in rows)
    middle = xs[(len(xs) - 1) // 2]
    return (
        numbers[0],
        numbers[-1],
        spread,
        len(set(numbers)),
        middle,
        numbers,
        sum(set(numbers)),
        by_x[-1][1],
        by_x[0][1],
    )


@pytest.mark.parametrize("window", [FEW_PANES, MANY_PANES])
@pytest.mark.parametrize("restarts", [False, True])
def test_all_aggregates_are_those_of_the_rows_however_windows_are_put_together_and_whenever_it_restarts(
    window, restarts
):
    rng = Random(3)
    rows = [("ab"[rng.randrange(2)], time, float(rng.randrange(9)), rng.randrange(5), None) for time in range(120)]
    both = Windows(window, MERGED_IN_ANY_SHAPE)
    for start in range(0, 120, 7):
        both.batch(rows[start : start + 7], late=False)
        both.watermark(rows[start][1])
        if restarts and start % 3 == 0:
            both.subtasks.restore(1 + start % 2)
    both.watermark(TIME_MAX_US)
    out = pl.concat(both.subtasks.out).select("k", pl.col(WINDOW_END).cast(pl.Int64), *MERGED_IN_ANY_SHAPE)
    found = {row[:2]: (*row[2:4], round(row[4] or 0.0, 9), *row[5:]) for row in out.rows()}
    assert found == {key: in_any_shape(mine) for key, mine in by_window(rows, window).items()}


# One thing at a time.


def operator_of(window: Sliding, aggregates: dict[str, str] = ANY, **more: Any) -> SlidingAggregate:
    step, setting = planned(window, aggregates, late=True, **more)
    operator = make_operator(step, setting)
    assert isinstance(operator, SlidingAggregate)
    return operator


def one(k: Any, time: int | None, x: float | None = 1.0) -> Row:
    return (k, time, x, 1, Decimal(1))


def results(operator: Operator, watermark_us: int) -> list[tuple[Any, ...]]:
    """Key, start, end, rows and sum of what closes."""
    frames = [emit.frame for emit in operator.on_watermark(watermark_us) if emit.port == MAIN]
    found = [
        row
        for out in frames
        for row in out.select("k", pl.col(WINDOW_START, WINDOW_END).cast(pl.Int64), "n", "sx").iter_rows()
    ]
    assert [row[2] for row in found] == sorted(row[2] for row in found)
    return sorted(found, key=str)


@pytest.mark.parametrize("window", [Sliding(4, 2), Sliding(18, 2)])
def test_nan_and_infinity_leave_with_their_pane(window):
    operator = operator_of(window)
    rows = [one("a", time, x) for time, x in ((0, math.nan), (3, 1.0), (4, math.inf), (6, 0.1), (8, 0.2))]
    for row in rows:
        operator.on_batch(frame([row]), late=False)
    found = {end: str(sx) for _, _, end, _, sx in results(operator, TIME_MAX_US)}
    held = by_window(rows, window)
    assert found == {end: str(sum(row[2] for row in mine)) for (_, end), mine in held.items()}
    assert set(found.values()) == {"nan", "inf", str(0.1 + 0.2), "0.2"}


def test_windows_come_in_order_and_only_for_keys_that_have_rows_in_them():
    operator = operator_of(Sliding(20, 10))
    operator.on_batch(frame([one("a", 5), one("b", 15), one("a", 45)]), late=False)
    assert results(operator, 40) == [
        ("a", -10, 10, 1, 1.0),
        ("a", 0, 20, 1, 1.0),
        ("b", 0, 20, 1, 1.0),
        ("b", 10, 30, 1, 1.0),
    ]
    assert results(operator, TIME_MAX_US) == [("a", 30, 50, 1, 1.0), ("a", 40, 60, 1, 1.0)]


def test_rows_between_windows_count_for_none_and_are_not_late():
    operator = operator_of(Sliding(4, 10, 3))
    assert operator.on_batch(frame([one("a", time) for time in (2, 7, 12)]), late=False) == []
    assert operator.on_batch(frame([one("a", time) for time in (3, 6, 13, -7, -4, -3)]), late=False) == []
    assert results(operator, TIME_MAX_US) == [("a", -7, -3, 2, 2.0), ("a", 13, 17, 1, 1.0), ("a", 3, 7, 2, 2.0)]


def test_a_row_counts_in_each_of_its_windows_that_is_open_for_it_and_is_late_if_none_is():
    operator = operator_of(Sliding(20, 10))
    operator.on_watermark(15)
    rows = [one("late", -1), one("partly", 9), one("whole", 10), one("timeless", None)]
    timeless, late = operator.on_batch(frame(rows), late=False)
    assert (timeless.port, timeless.frame.get_column("k").to_list()) == (LATE, ["timeless"])
    assert (late.port, late.frame.get_column("k").to_list(), late.late_by_us) == (LATE, ["late"], 15 - 10 + 1)
    assert results(operator, TIME_MAX_US) == [
        ("partly", 0, 20, 1, 1.0),
        ("whole", 0, 20, 1, 1.0),
        ("whole", 10, 30, 1, 1.0),
    ]


@pytest.mark.parametrize("window", [FEW_PANES, MANY_PANES])
def test_a_window_that_is_closed_for_a_row_does_not_count_it_although_a_slower_partition_keeps_it_open(window):
    operator = operator_of(window)
    operator.on_batch(frame([one("a", 5)]), late=False)
    assert operator.on_batch(below(frame([one("a", 5)]), 16), late=True) == []
    held = {end: 2 if end > 16 else 1 for end in windows_of(5, window)}
    assert sorted((end, n) for _, _, end, n, _ in results(operator, TIME_MAX_US)) == sorted(held.items())


@pytest.mark.parametrize("window", [FEW_PANES, MANY_PANES])
def test_nothing_is_emitted_again_after_a_restore(window):
    operator = operator_of(window)
    operator.on_batch(frame([one("a", 5)]), late=False)
    ends = windows_of(5, window)
    assert len(results(operator, 12)) == sum(end <= 12 for end in ends)
    operator = restored(operator, operator_of(window), 12)
    assert results(operator, 12) == []
    due, *rest = [end for end in ends if end > 12]
    assert results(operator, due - 1) == []
    assert results(operator, due) == [("a", due - 20, due, 1, 1.0)]
    assert len(results(operator, TIME_MAX_US)) == len(rest)


def test_a_checkpoint_holds_one_row_per_key_and_pane_and_none_that_no_window_needs():
    operator = operator_of(Sliding(60, 10))
    for time in range(0, 100, 2):
        operator.on_batch(frame([one("ab"[time % 4 // 2], time)] * 3), late=False)
    operator.on_watermark(100)
    rows = {name: sum(piece.frame().height for piece in state.freeze()) for name, state in operator.states().items()}
    assert rows == {"windows": 0, "panes": 2 * 5, "partly": 0}
    operator.on_watermark(TIME_MAX_US)
    assert [state.freeze() for state in operator.states().values()] == [(), (), ()]


def test_panes_that_are_in_the_same_windows_are_kept_as_one():
    operator = operator_of(Sliding(1000, 7))
    operator.on_batch(frame([one("a", time) for time in range(1000)]), late=False)
    (piece,) = operator.states()["windows"].freeze()
    assert piece.frame().height <= 2 * (1000 // 7 + 2)


def count_merged(operator: SlidingAggregate, merged: list[int]) -> None:
    """From now on, note how many partial rows are merged each time."""
    slider = operator._slider
    real = slider._merge_rows

    def counting(rows: pl.DataFrame) -> pl.DataFrame:
        merged.append(rows.height)
        return real(rows)

    slider._merge_rows = counting


def steps_of(slider: str, window: Sliding, rounds: int) -> Iterator[int]:
    """How many partial rows are merged for each window, one closing after the other."""
    merged: list[int] = []
    operator = operator_of(window, EXACT if slider == "Subtracting" else ANY)
    assert type(operator._slider).__name__ == slider
    count_merged(operator, merged)
    for time in range(rounds):
        operator.on_batch(frame([one("a", time)]), late=False)
        merged.clear()
        operator.on_watermark(time + 1)
        yield sum(merged)


def test_subtracting_merges_what_comes_and_goes_and_nothing_else():
    assert max(steps_of("Subtracting", Sliding(50, 1), 120)) == 3


@pytest.mark.slow
def test_two_stacks_merge_each_pane_a_few_times_whatever_the_size():
    assert sum(steps_of("TwoStacks", Sliding(50, 1), 250)) <= 6 * 250


def test_after_a_restore_no_more_is_merged_than_the_panes_of_the_windows_that_close():
    merged: list[int] = []
    operator = operator_of(Sliding(50, 1))
    operator.on_batch(frame([one("a", time) for time in range(100)]), late=False)
    operator.on_watermark(80)
    operator = restored(operator, operator_of(Sliding(50, 1)), 80)
    count_merged(operator, merged)
    assert results(operator, 81) == [("a", 31, 81, 50, 50.0)]
    assert sum(merged) == 50


def test_without_keys_all_rows_are_in_one_row_per_window():
    step, setting = planned(Sliding(4, 2), EXACT, keys=())
    operator, feeder = make_operator(step, setting), make_feeder(step, 0, setting)
    assert feeder is not None
    (emit,) = feeder.on_batch(frame([one("a", 1), one("b", 3)]), late=False)
    operator.on_batch(emit.frame, late=False)
    (emit,) = operator.on_watermark(TIME_MAX_US)
    assert emit.frame.get_column("n").to_list() == [1, 2, 1]


@pytest.mark.parametrize("window", [FEW_PANES, MANY_PANES])
def test_windows_that_changed_by_a_pane_that_is_final_by_now_have_early_results_too(window):
    operator = operator_of(window, early_us=1)
    operator.on_batch(frame([one("a", 5)]), late=False)
    operator.on_watermark(10)
    operator = restored(operator, operator_of(window, early_us=1), 10)
    operator.on_watermark(10)
    (emit,) = operator.on_barrier(Moment(now_us=1, before_us=0))
    found = emit.frame.select("k", "n", pl.col(WINDOW_END).cast(pl.Int64)).rows()
    assert sorted(found) == [("a", 1, end) for end in windows_of(5, window) if end > 10]
    assert operator.on_barrier(Moment(now_us=2, before_us=1)) == []
    operator.on_watermark(20)
    assert operator.on_barrier(Moment(now_us=3, before_us=2)) == []


def test_very_many_results_at_once_are_made_in_parts_with_every_window_whole():
    window, keys = Sliding(80, 10), 150_000
    step, setting = planned(window, {"n": "count(*)"}, late=True)
    operator = make_operator(step, setting)
    rows = pl.concat([frame([one("a", 5)])] * keys)
    operator.on_batch(rows.with_columns(pl.int_range(keys).cast(pl.String).alias("k")), late=False)
    emits = operator.on_watermark(TIME_MAX_US)
    assert len(emits) > 1
    out = pl.concat([emit.frame for emit in emits])
    counts = out.group_by(pl.col(WINDOW_END).cast(pl.Int64)).agg(pl.col("n").sum())
    assert dict(counts.rows()) == dict.fromkeys(windows_of(5, window), keys)


@given(window=windows, time=st.integers(-(10**6), 10**6))
def test_a_pane_knows_its_windows(window, time):
    grid = PaneGrid(window)
    ends = windows_of(time, window)
    counted = grid.in_window(pl.lit(time, dtype=pl.Int64))
    assert (counted is None) or pl.select(counted).item() == bool(ends)
    if not ends:
        return
    size = grid.pane_us
    end = (time - window.offset_us) // size * size + window.offset_us + size
    assert (grid.first(end), grid.last(end)) == (ends[0], ends[-1])
    shared = pl.select(grid.shared(pl.lit(end, dtype=pl.Int64))).item()
    assert (grid.first(shared), grid.last(shared)) == (ends[0], ends[-1])
    assert len(ends) <= grid.windows_per_pane


def test_windows_without_panes_are_passed_over_however_many_there_are():
    grid = PaneGrid(Sliding(20, 10))
    store = PaneStore(grid, pl.DataFrame({END: [10, 10**17]}))
    assert list(store.windows(TIME_MIN_US, TIME_MAX_US)) == [(10, 20), (10**17, 10**17 + 10)]
    assert list(store.windows(10, 10**17)) == [(20, 20), (10**17, 10**17)]


@given(
    window=windows,
    times=st.lists(st.integers(-50, 50), min_size=1, max_size=8),
    bounds=st.tuples(*[st.integers(-70, 70)] * 2),
)
def test_windows_that_hold_the_same_panes_are_named_together(window, times, bounds):
    grid = PaneGrid(window)
    ends = {time: windows_of(time, window) for time in times}
    if not grid.overlaps or not any(ends.values()):
        return
    panes = {
        (time - window.offset_us) // grid.pane_us * grid.pane_us + window.offset_us + grid.pane_us for time in times
    }
    after_us, until_us = min(bounds), max(bounds)
    found = list(PaneStore(grid, pl.DataFrame({END: sorted(panes)})).windows(after_us, until_us))
    named = [end for first, last in found for end in range(first, last + 1, window.slide_us)]
    assert named == sorted({end for one in ends.values() for end in one if after_us < end <= until_us})
    for first, last in found:
        held = [{time for time in times if end in ends[time]} for end in range(first, last + 1, window.slide_us)]
        assert all(one == held[0] for one in held)


@pytest.mark.parametrize("aggregates", [EXACT, ANY])
def test_many_windows_with_few_panes_cost_what_changes_and_not_a_merge_each(aggregates):
    window = Sliding(50_000, 1)
    operator = operator_of(window, aggregates)
    merged: list[int] = []
    count_merged(operator, merged)
    operator.on_batch(frame([one("a", 0), one("b", 10), one("a", 20_000)]), late=False)
    emits = operator.on_watermark(TIME_MAX_US)
    assert sum(emit.frame.height for emit in emits) == 50_000 + 50_000 + 20_000
    assert len(emits) < 100
    assert len(merged) < 20


def test_early_results_of_panes_in_very_many_windows_are_spread_by_row():
    grid = PaneGrid(Sliding(90, 1))
    rows = pl.DataFrame({END: [5, 40, 300], "k": ["a", "b", "c"]})
    spread = grid.spread(rows, 30, 120)
    wanted = [(end, "a") for end in range(31, 95)] + [(end, "b") for end in range(40, 121)]
    assert sorted(spread.rows()) == sorted(wanted)
