"""Sessions against a plain loop: whatever the batches, their order, watermarks, barriers, restores and subtasks, the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import (
    Barrier,
    Restore,
    Row,
    Subtasks,
    below,
    bits,
    events_of,
    fragments_of,
    frame_of,
    frozen,
    held_rows,
    released,
    restored,
    rows_written_since,
    shown,
)

from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import LATE, ROW_ID, Moment
from fordstone.operators.window.session import ExpiringAggregate, SessionAggregate
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "i": "bigint", "x": "double"})
AGGREGATES = {"n": "count(*)", "has": "count(i)", "total": "sum(i)", "lo": "min(x)", "hi": "max(x)"}
GAP = 3

rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "a", "b", "é", "键", "", None]),
    st.one_of(st.integers(-4, 20), st.integers(-4, 20), st.none(), st.integers(-(10**15), 10**15)),
    st.sampled_from([None, 1, 7, 2**63 - 1, -(2**63)]),
    st.sampled_from([None, 1.0, -2.5, math.inf, math.nan]),
)


def sessions(
    *,
    keys: Sequence[str] = ("k",),
    gap_us: int = GAP,
    shift_us: int = 0,
    with_id: bool = False,
    columns: Mapping[str, str] | None = None,
    **named: str,
) -> SessionAggregate:
    aggregates = columns or named or AGGREGATES
    fragments = fragments_of(aggregates, SCHEMA, step="visits", keys=keys, shift_us=shift_us, with_id=with_id)
    return SessionAggregate(fragments, gap_us=gap_us, state=IN_MEMORY)


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    return frame_of(rows, SCHEMA)


# The oracle: a loop over the rows of a key in order of time.


def wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def greatest(values: list[float]) -> float | None:
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)


def least(values: list[float]) -> float | None:
    numbers = [value for value in values if not math.isnan(value)]
    return min(numbers, default=math.nan if values else None)


def result(key: Any, rows: list[Row], gap_us: int) -> Row:
    whole = [row[2] for row in rows if row[2] is not None]
    reals = [row[3] for row in rows if row[3] is not None]
    total = wrapped(sum(whole)) if whole else None
    times = [row[1] for row in rows]
    return (key, min(times), max(times) + gap_us, len(rows), len(whole), total, least(reals), greatest(reals))


def expected(rows: Sequence[Row], watermarks: Sequence[int]) -> Counter[Any]:
    """The sessions of rows, each judged by its watermark: a session is closed for a row when it ends at or before that."""
    found: list[Row] = []
    turns = [(max(row[1], watermark_us), row) for row, watermark_us in zip(rows, watermarks, strict=True)]
    for key in {row[0] for row in rows}:
        together: list[Row] = []
        for turn_us, row in sorted(((at, row) for at, row in turns if row[0] == key), key=lambda one: one[0]):
            if together and max(one[1] for one in together) + GAP <= turn_us:
                found.append(result(key, together, GAP))
                together = []
            together.append(row)
        found.append(result(key, together, GAP))
    return Counter(tuple(map(bits, row)) for row in found)


def subtasks() -> Subtasks:
    return Subtasks(make=sessions, frame=frame, open_us=GAP)


@examples(60)
@given(happens=events_of(st.lists(rows_of_any_kind, min_size=1, max_size=12), steps=(1, 1, 2, 3, 5, 10**14)))
def test_every_session_comes_out_once_when_it_is_over(happens):
    tasks = subtasks()
    happened = tasks.live_through(happens)
    assert shown(tasks.late) == Counter(tuple(map(bits, row)) for row in happened.late)
    whole = expected(happened.taken, happened.watermarks)
    assert shown(tasks.out) == Counter({row: n for row, n in whole.items() if row[2] <= tasks.watermark_us})
    tasks.watermark(TIME_MAX_US)
    assert shown(tasks.out) == whole


DUCKDB = """
    WITH marked AS (
        SELECT *, coalesce(epoch_us(ts) - epoch_us(lag(ts) OVER w) >= {gap}, true) AS begins FROM rows
        WINDOW w AS (PARTITION BY k ORDER BY ts)
    ), numbered AS (
        SELECT *, sum(begins::int) OVER (PARTITION BY k ORDER BY ts ROWS UNBOUNDED PRECEDING) AS number FROM marked
    )
    SELECT k, epoch_us(min(ts)), epoch_us(max(ts)) + {gap}, count(*), sum(i)::bigint, min(x), max(x), avg(x)
    FROM numbered GROUP BY k, number ORDER BY ALL
"""


@examples(6)
@given(
    seed=st.integers(0, 2**32),
    gap_us=st.integers(1, 40),
    disorder_us=st.sampled_from([0, 5, 200]),
    batch_rows=st.sampled_from([7, 20, 50]),
)
def test_many_keys_in_disorder_give_what_duckdb_gives(seed, gap_us, disorder_us, batch_rows):
    rng = Random(seed)
    rows = sorted(
        (f"k{rng.randrange(9)}", rng.randrange(600), rng.randrange(99), float(rng.randrange(99))) for _ in range(150)
    )
    rows.sort(key=lambda row: row[1] + rng.randint(0, disorder_us))
    columns = {"n": "count(*)", "total": "sum(i)", "lo": "min(x)", "hi": "max(x)", "mean": "avg(x)"}
    tasks = Subtasks(make=lambda: sessions(gap_us=gap_us, columns=columns), frame=frame, parallelism=2)
    tasks.feed(rows, batch_rows=batch_rows, lag_us=disorder_us, rng=rng)
    assert tasks.late == []
    tasks.check_query(DUCKDB.format(gap=gap_us), rows)


# One thing at a time.


def plain(k: Any, time: int | None, i: int | None = 1) -> Row:
    return (k, time, i, None)


def by_key_and_start(row: Row) -> Any:
    return str(row[0]), row[1]


def closed(operator: SessionAggregate, watermark_us: int = TIME_MAX_US) -> list[Row]:
    return sorted(released(operator, watermark_us), key=by_key_and_start)


def test_rows_exactly_the_gap_apart_are_two_sessions_and_one_less_is_one():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain("a", 0), plain("a", GAP), plain("b", 0), plain("b", GAP - 1)]), late=False)
    assert closed(operator) == [("a", 0, 3, 1), ("a", 3, 6, 1), ("b", 0, 5, 2)]


def test_rows_exactly_the_gap_apart_are_two_sessions_when_they_come_in_two_batches():
    operator = sessions(n="count(*)")
    for time in (GAP, 0, 2 * GAP + 1):
        operator.on_batch(frame([plain("a", time)]), late=False)
    assert closed(operator, 7) == [("a", 0, 3, 1), ("a", 3, 6, 1)]
    operator.on_batch(frame([plain("a", 7), plain("a", 10)]), late=False)
    assert closed(operator) == [("a", 7, 10, 2), ("a", 10, 13, 1)]


def test_a_session_closes_when_the_watermark_reaches_its_end_and_not_before():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain("a", 4)]), late=False)
    assert closed(operator, 6) == []
    assert closed(operator, 7) == [("a", 4, 7, 1)]
    assert closed(operator) == []


def test_a_row_that_comes_later_bridges_two_sessions():
    operator = sessions(n="count(*)", total="sum(i)")
    operator.on_batch(frame([plain("a", 0, 1), plain("a", 4, 20), plain("a", 9, 300)]), late=False)
    assert closed(operator, 2) == []
    operator.on_batch(frame([plain("a", 2, 4000)]), late=False)
    assert closed(operator, 4) == []
    assert closed(operator) == [("a", 0, 7, 3, 4021), ("a", 9, 12, 1, 300)]


def test_what_would_be_due_is_not_closed_while_it_is_continued():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain("a", 0)]), late=False)
    operator.on_batch(frame([plain("a", 2), plain("a", 4)]), late=False)
    operator.on_batch(frame([plain("a", 6), plain("a", 8)]), late=False)
    for watermark in (1, 3, 4, 7, 10):
        assert closed(operator, watermark) == []
    assert closed(operator, 11) == [("a", 0, 11, 5)]


def test_a_fragment_inside_another_does_not_end_it():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain("a", time) for time in (0, 2, 4, 6, 8)]), late=False)
    operator.on_batch(frame([plain("a", 1)]), late=False)
    operator.on_batch(frame([plain("a", 10)]), late=False)
    operator.on_batch(frame([plain("b", 3)]), late=False)
    assert closed(operator, 12) == [("b", 3, 6, 1)]
    assert closed(operator, 13) == [("a", 0, 13, 7)]


def test_a_key_may_have_a_new_session_when_its_old_one_closes():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain("a", 0), plain("a", 5)]), late=False)
    assert closed(operator, 1) == []
    assert closed(operator, 6) == [("a", 0, 3, 1)]
    assert closed(operator, 8) == [("a", 5, 8, 1)]


def test_rows_without_a_time_rows_that_time_has_passed_and_late_rows_leave_as_they_came():
    operator = sessions()
    operator.on_watermark(10)
    (emit,) = operator.on_batch(frame([plain("a", None), plain("b", 7), plain("c", 10)]), late=False)
    assert (emit.port, emit.frame["k"].to_list(), emit.frame.columns) == (LATE, ["a", "b"], list(SCHEMA))
    (emit,) = operator.on_batch(below(frame([plain("d", 50), plain("d", 51)]), 60), late=True)
    assert (emit.port, emit.frame["k"].to_list(), emit.frame.columns) == (LATE, ["d", "d"], list(SCHEMA))
    assert emit.late_by_us == 60 - 53 + 1
    (emit,) = operator.on_batch(frame([plain("e", 1)]), late=False)
    assert (emit.port, emit.frame["k"].to_list()) == (LATE, ["e"])
    assert [row[0] for row in closed(operator)] == ["c"]


def test_a_row_that_idleness_overtook_counts_while_a_session_with_it_would_be_open():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain("a", 4)]), late=False)
    assert closed(operator, 6) == []
    (emit,) = operator.on_batch(frame([plain("a", 3), plain("a", 5), plain("a", 6)]), late=False)
    assert (emit.port, emit.frame.height) == (LATE, 1)
    assert closed(operator) == [("a", 4, 9, 3)]


def test_a_row_below_its_watermark_belongs_to_the_session_that_is_open_for_it_however_slow_the_other_partitions_are():
    for order in (1, -1):
        operator = sessions(n="count(*)")
        operator.on_batch(frame([plain("a", 10)]), late=False)
        for at, watermark_us in ((9, 11), (11, 13), (8, 10))[::order]:
            assert operator.on_batch(below(frame([plain("a", at)]), watermark_us), late=True) == []
        # At 13 the session of 8, 9 and 10 is closed for the row of 11, which opens one of its own.
        assert closed(operator) == [("a", 8, 13, 3), ("a", 11, 14, 1)]


def test_without_a_key_all_rows_are_in_one_session_after_the_other():
    operator = sessions(keys=(), n="count(*)")
    operator.on_batch(frame([plain("a", 1), plain("b", 2), plain(None, 9)]), late=False)
    assert closed(operator, 4) == []
    operator = restored(operator, sessions(keys=(), n="count(*)"), 4)
    assert closed(operator, 5) == [(1, 5, 2)]
    assert closed(operator) == [(9, 12, 1)]


def test_both_zeros_are_one_key_without_a_sign_and_so_is_every_nan():
    operator = sessions(keys=("x",), n="count(*)")
    for time, x in enumerate([-0.0, math.nan, 0.0, -math.nan, -0.0]):
        operator.on_batch(frame([("a", time, 1, x)]), late=False)
        assert closed(operator, time) == []
    assert closed(operator) == sorted([(bits(0.0), 0, 7, 3), ("nan", 1, 6, 2)], key=by_key_and_start)


def test_the_time_of_a_windows_result_is_before_its_end_and_counts_so_after_a_restore():
    operator = sessions(shift_us=-1, n="count(*)")
    operator.on_batch(frame([plain("a", 10), plain("a", 12)]), late=False)
    assert closed(operator, 12) == []
    operator = restored(operator, sessions(shift_us=-1, n="count(*)"), 12)
    assert closed(operator, 13) == []
    assert closed(operator, 14) == [("a", 9, 14, 2)]


def test_ids_are_of_step_key_and_window_and_the_same_on_every_replay():
    found = set()
    for cuts in (1, 2):
        operator = sessions(keys=("k", "i"), with_id=True, n="count(*)")
        rows = [plain("a", 1), plain("a", 9), plain(None, 1), plain("a|", 1, None)]
        for cut in range(cuts):
            operator.on_batch(frame(rows[cut::cuts]), late=False)
        (emit,) = operator.on_watermark(TIME_MAX_US)
        found.add(tuple(sorted(emit.frame[ROW_ID])))
    assert found == {("visits|-|1:1|4", "visits|1:a|1:1|12", "visits|1:a|1:1|4", "visits|2:a||-|4")}


def test_ids_that_rows_carry_for_others_are_left_behind():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain("a", 1)]).with_columns(pl.lit("id").alias(ROW_ID)), late=False)
    (emit,) = operator.on_watermark(TIME_MAX_US)
    assert emit.frame.columns == ["k", "window_start", "window_end", "n"]


def test_a_checkpoint_holds_one_row_for_each_session_that_has_begun_and_nothing_of_those_that_closed():
    operator = sessions(n="count(*)")
    operator.on_batch(frame([plain(f"k{time % 50}", time) for time in range(1000)]), late=False)
    assert held_rows(operator) == {"waiting": 1000, "open": 0}
    operator.on_watermark(999)
    assert len(operator._open) == 2
    operator.on_watermark(2000)
    assert held_rows(operator) == {"waiting": 0, "open": 0}


def test_an_epoch_in_which_few_keys_changed_writes_only_those():
    operator = sessions(gap_us=10_000, n="count(*)")
    operator.on_batch(frame([plain(f"k{key}", 1) for key in range(500)]), late=False)
    operator.on_watermark(2)
    before = frozen(operator)
    operator.on_batch(frame([plain("k7", 5), plain("k8", 6)]), late=False)
    operator.on_watermark(10)
    assert rows_written_since(before, operator) == 2


def test_a_watermark_looks_only_at_the_sessions_that_may_be_due(monkeypatch):
    operator = sessions(gap_us=100, n="count(*)")
    operator.on_batch(frame([plain(f"k{key}", key) for key in range(90)]), late=False)
    operator.on_watermark(95)
    looked: list[int] = []
    get = operator._open.get

    def watched(keys: pl.DataFrame) -> pl.DataFrame:
        looked.append(keys.height)
        return get(keys)

    monkeypatch.setattr(operator._open, "get", watched)
    assert len(closed(operator, 104)) == 5
    assert looked == [5]


def test_nothing_due_gives_nothing():
    operator = sessions()
    assert operator.on_watermark(5) == []
    operator.on_batch(frame([plain("a", 7)]), late=False)
    assert operator.on_barrier(Moment(now_us=1, before_us=0)) == []
    assert operator.on_watermark(7) == []


@pytest.mark.parametrize("event", [Barrier(), Restore(1), Restore(3)])
def test_a_session_goes_on_over_barriers_and_restores(event):
    tasks = subtasks()
    for time in range(0, 40, 2):
        tasks.batch([plain("a", time), plain("é", time), plain(None, time)])
        tasks.watermark(time + 1)
        tasks.live_through([event])
    tasks.watermark(TIME_MAX_US)
    out = shown(tasks.out)
    assert {row[:4] for row in out} == {(key, 0, 41, 20) for key in ("a", "é", None)}


def test_a_running_aggregate_with_a_ttl_keeps_only_keys_that_had_rows_lately():
    fragments = fragments_of({"n": "count(*)"}, SCHEMA, step="visits", keys=("k",), shift_us=0, with_id=False)
    running = ExpiringAggregate(fragments, ttl_us=10, at_barriers=True, state=IN_MEMORY)
    emitted: dict[str, int] = {}
    for second in range(0, 1_000, 5):
        running.on_batch(frame([(f"k{second}", second, 1, 1.0), ("steady", second, 1, 1.0)]), late=False)
        assert running.on_watermark(second) == []
        for emit in running.on_barrier(Moment(now_us=0, before_us=0)):
            emitted |= {key: n for key, n, _ in emit.frame.rows()}
    assert emitted["steady"] == 199
    assert all(emitted[f"k{second}"] == 1 for second in range(0, 995, 5))
    assert sum(held_rows(running).values()) < 8
