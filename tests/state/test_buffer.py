"""The buffer against a sorted list: contract, random histories and the order of what is released."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.examples import examples

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.state.base import RunRef, SearchBuffer, State
from fordstone.state.memory import IN_MEMORY
from fordstone.state.timeline import MemoryBuffer
from fordstone.testing.contracts.state import SearchBufferContract, Shelf, StateContract

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
SCHEMA: dict[str, pl.DataType] = {
    "k": pl.String(),
    "ts": pl.Datetime("us", "UTC"),
    "v": pl.Float64(),
    "seq": pl.Int64(),
}
Row = tuple[str, int, float | None, int]


def buffer() -> MemoryBuffer:
    return MemoryBuffer(["k"], time_column="ts")


def frame(items: list[Row]) -> pl.DataFrame:
    return pl.DataFrame(
        [(key, EPOCH + dt.timedelta(microseconds=time_us), value, seq) for key, time_us, value, seq in items],
        schema=SCHEMA,
        orient="row",
    )


def order(row: Row) -> tuple[Any, ...]:
    """Time, then arrival."""
    return (row[1], row[3])


class TestBuffer(StateContract):
    """The contract, with rows of many times in each batch, and equal rows that must both stay."""

    def make(self) -> State:
        return buffer()

    def change(self, state: State, step: int) -> None:
        assert isinstance(state, MemoryBuffer)
        state.add(
            frame([(f"key {number}", 10 + (number * 7 + step) % 40, float(number % 4), 0) for number in range(30)])
        )
        state.add(frame([("twice", 30, None, 0), ("twice", 30, None, 0)]))

    def rows(self, state: State) -> pl.DataFrame:
        assert isinstance(state, MemoryBuffer)
        return state.scan()

    def close(self, state: State) -> int:
        assert isinstance(state, MemoryBuffer)
        assert state.release(30).height
        return 30


class TestSearchBuffer(SearchBufferContract):
    def make(self) -> SearchBuffer:
        return IN_MEMORY.search_buffer(["a", "b"], time_column="until")


class Model:
    """A buffer beside a list, with a disk to crash back to."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.buffer = buffer()
        self.held: list[Row] = []
        self.mark_us = 0
        self.count = 0
        self.refs: tuple[RunRef, ...] = ()
        self.saved: tuple[list[Row], int] = ([], 0)

    def add(self, items: list[tuple[str, int, float | None]]) -> None:
        batch = [
            (key, self.mark_us + ahead_us, value, self.count + number)
            for number, (key, ahead_us, value) in enumerate(items)
        ]
        self.count += len(items)
        self.buffer.add(frame(batch))
        self.held += batch

    def release(self, ahead_us: int) -> None:
        self.mark_us += ahead_us
        due = sorted((row for row in self.held if row[1] < self.mark_us), key=order)
        self.held = [row for row in self.held if row[1] >= self.mark_us]
        got = self.buffer.release(self.mark_us)
        if due:
            assert_frame_equal(got, frame(due), check_exact=True)
        else:
            assert got.height == 0

    def commit(self) -> None:
        self.refs = self.shelf.write(self.buffer.freeze())
        self.saved = (list(self.held), self.mark_us)

    def crash(self) -> None:
        held, self.mark_us = self.saved
        self.held = list(held)
        self.buffer = buffer()
        self.buffer.load(self.shelf.pieces(self.refs), watermark_us=self.mark_us)

    def merge(self, start: float, stop: float) -> None:
        pieces = self.buffer.freeze()
        first, last = sorted((int(start * len(pieces)), int(stop * len(pieces))))
        if first < last:
            self.shelf.merge(self.buffer, pieces[first:last])


item = st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.none() | st.sampled_from([-1.5, 0.0, 2.0]))


@examples(200)
@given(st.data())
def test_any_history_of_a_buffer_is_that_of_a_sorted_list(data: st.DataObject) -> None:
    model = Model()
    for _ in range(data.draw(st.integers(1, 15), label="calls")):
        action = data.draw(st.sampled_from(["add", "add", "release", "commit", "give up", "merge", "crash"]))
        if action == "add":
            model.add(data.draw(st.lists(item, max_size=12), label="rows"))
        elif action == "release":
            model.release(data.draw(st.integers(0, 8), label="by"))
        elif action == "commit":
            model.commit()
        elif action == "give up":
            model.buffer.freeze()
        elif action == "crash":
            model.crash()
        else:
            model.merge(data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1)))
    model.commit()
    model.crash()
    model.release(100)


@given(st.lists(item, min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 12))
def test_batches_do_not_show_in_what_is_released(
    items: list[tuple[str, int, float | None]], cuts: list[int], mark_us: int
) -> None:
    rows = [(*row, number) for number, row in enumerate(items)]
    whole, parts = buffer(), buffer()
    whole.add(frame(rows))
    edges = [0, *sorted(cuts), len(rows)]
    for start, stop in itertools.pairwise(edges):
        parts.add(frame(rows[start:stop]))
    for bound_us in (mark_us, TIME_MAX_US):
        assert_frame_equal(whole.release(bound_us), parts.release(bound_us))


def test_a_row_at_the_watermark_is_not_yet_released() -> None:
    state = buffer()
    state.add(frame([("a", 9, 1.0, 0), ("a", 10, 1.0, 1)]))
    assert state.release(10).get_column("seq").to_list() == [0]
    assert state.release(11).get_column("seq").to_list() == [1]


def test_a_row_at_the_watermark_may_still_come() -> None:
    state = buffer()
    state.release(10)
    state.add(frame([("a", 10, 1.0, 0)]))
    with pytest.raises(ValueError, match="had been closed"):
        state.add(frame([("a", 9, 1.0, 1)]))


def test_the_row_at_the_watermark_survives_a_restore() -> None:
    shelf = Shelf()
    state = buffer()
    state.add(frame([("a", 9, 1.0, 0), ("a", 10, 1.0, 1)]))
    state.release(10)
    again = buffer()
    again.load(shelf.pieces(shelf.write(state.freeze())), watermark_us=10)
    assert again.scan().get_column("seq").to_list() == [1]


def test_the_last_watermark_releases_all_there_is() -> None:
    state = MemoryBuffer(["k"], time_column="t")
    state.add(pl.DataFrame({"k": [1, 2, 3], "t": [TIME_MAX_US, 5, TIME_MAX_US - 1]}))
    assert state.release(TIME_MAX_US).get_column("t").to_list() == [5, TIME_MAX_US - 1, TIME_MAX_US]


def test_the_watermark_before_any_row_releases_nothing() -> None:
    state = buffer()
    state.add(frame([("a", -5, 1.0, 0)]))
    assert state.release(TIME_MIN_US).height == 0
    assert state.release(0).height == 1


def test_equal_rows_are_all_released() -> None:
    state = buffer()
    for _ in range(3):
        state.add(frame([("a", 5, 1.0, 0)]))
        state.freeze()
    assert state.release(6).height == 3


def test_releasing_batch_after_batch_sorts_each_row_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    state = buffer()
    merged = 0
    in_order = state._in_order

    def counting(frames: list[pl.DataFrame]) -> pl.DataFrame:
        nonlocal merged
        merged += sum(one.height for one in frames)
        return in_order(frames)

    monkeypatch.setattr(state, "_in_order", counting)
    for step in range(300):
        state.add(frame([("a", step + ahead_us, 1.0, 0) for ahead_us in range(100)]))
        assert state.release(step + 1).height == min(step + 1, 100)
    assert merged < 12 * 300 * 100


def test_rows_that_tie_come_out_as_they_came_in_however_often_the_rest_was_put_in_order() -> None:
    state = buffer()
    for step in range(6):
        # The first row is released at once; the others tie, and wait through releases that put them in order.
        state.add(frame([("a", step, 1.0, -1), ("a", 50, 1.0, 2 * step), ("a", 50, 1.0, 2 * step + 1)]))
        assert state.release(step + 1).get_column("seq").to_list() == [-1]
        if step == 3:
            state.add(frame([("a", 60, 1.0, 7)]))
            state.freeze()
            state.add(frame([("a", 60, 1.0, 8)]))
    assert state.release(51).get_column("seq").to_list() == list(range(12))
    assert state.release(61).get_column("seq").to_list() == [7, 8]


def test_rows_put_in_order_by_a_release_are_sealed_before_those_that_came_later() -> None:
    state = buffer()
    state.add(frame([("a", 1, 1.0, 0), ("a", 50, 1.0, 1)]))
    state.release(2)
    state.add(frame([("a", 50, 1.0, 2)]))
    (piece,) = state.freeze()
    assert piece.frame().get_column("seq").to_list() == [1, 2]
