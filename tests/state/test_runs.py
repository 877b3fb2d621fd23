"""MemoryTimeline against a dict: contract, random histories, merging in the middle of things, and what a close costs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.waiting import until

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.state.base import PIECES_MAX, Piece, RunRef, State
from fordstone.state.timeline import MemoryTimeline
from fordstone.testing.contracts.state import Shelf, StateContract, same_rows

SCHEMA: dict[str, pl.DataType] = {"k": pl.Int64(), "end": pl.Int64(), "n": pl.Int64(), "top": pl.Float64()}


def summed(frame: pl.DataFrame) -> pl.DataFrame:
    # Another order of columns on purpose: the state has to put up with it.
    return frame.group_by("end", "k").agg(pl.col("n").sum(), pl.col("top").max())


def runs(*, time_column: str | None = "end", coalesce_rows_min: int = 10) -> MemoryTimeline:
    return MemoryTimeline(["k"], time_column=time_column, merge_rows=summed, coalesce_rows_min=coalesce_rows_min)


def rows(*items: tuple[int, int, int]) -> pl.DataFrame:
    return pl.DataFrame([(*item, float(item[2])) for item in items], schema=SCHEMA, orient="row")


def counts(frame: pl.DataFrame) -> dict[tuple[int, int], int]:
    if frame.height == 0:
        return {}
    assert frame.columns == list(SCHEMA)
    found = {(key, end): n for key, end, n, _ in frame.rows()}
    assert len(found) == frame.height
    return found


class TestRuns(StateContract):
    """The contract, with windows that overlap from step to step."""

    def make(self) -> State:
        return runs(coalesce_rows_min=100)

    def change(self, state: State, step: int) -> None:
        assert isinstance(state, MemoryTimeline)
        state.add(rows(*((number, 10 * (step % 4 + number % 3 + 1), step) for number in range(25))))
        state.add(rows((step, 1000, 1)))

    def rows(self, state: State) -> pl.DataFrame:
        assert isinstance(state, MemoryTimeline)
        return state.scan()

    def close(self, state: State) -> int:
        assert isinstance(state, MemoryTimeline)
        assert state.close(35).height
        return 35


class TestRunsWithoutTime(TestRuns):
    """The contract on partial aggregates without a window: they are never due."""

    def make(self) -> State:
        return runs(time_column=None)

    def close(self, state: State) -> int:
        assert isinstance(state, MemoryTimeline)
        assert not state.close(TIME_MAX_US).height
        return 35


class Model:
    """MemoryTimeline beside a dict, with a disk to crash back to."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.runs = runs()
        self.held: dict[tuple[int, int], int] = {}
        self.mark_us = 0
        self.runs.close(0)
        self.refs: tuple[RunRef, ...] = ()
        self.saved: tuple[dict[tuple[int, int], int], int] = ({}, 0)

    def add(self, items: list[tuple[int, int, int]]) -> None:
        items = [(key, self.mark_us + ahead, n) for key, ahead, n in items]
        self.runs.add(rows(*items))
        for key, end, n in items:
            self.held[key, end] = self.held.get((key, end), 0) + n

    def close(self, ahead_us: int) -> None:
        self.mark_us += ahead_us
        due = {name: n for name, n in self.held.items() if name[1] <= self.mark_us}
        self.held = {name: n for name, n in self.held.items() if name not in due}
        assert counts(self.runs.close(self.mark_us)) == due

    def drain(self) -> None:
        assert counts(self.runs.drain()) == self.held
        self.held = {}

    def commit(self) -> None:
        self.refs = self.shelf.write(self.runs.freeze())
        self.saved = (dict(self.held), self.mark_us)

    def crash(self) -> None:
        held, self.mark_us = self.saved
        self.held = dict(held)
        self.runs = runs()
        self.runs.load(self.shelf.pieces(self.refs), watermark_us=self.mark_us)

    def merge(self, start: float, stop: float, during: Callable[[], object]) -> None:
        pieces = self.runs.freeze()
        first, last = sorted((int(start * len(pieces)), int(stop * len(pieces))))
        if first < last:
            self.shelf.merge(self.runs, pieces[first:last], during=during)


item = st.tuples(st.integers(0, 4), st.integers(1, 30), st.integers(-9, 9))


@examples(200)
@given(st.data())
def test_any_history_of_runs_is_that_of_a_dict(data: st.DataObject) -> None:
    model = Model()
    for _ in range(data.draw(st.integers(1, 15), label="calls")):
        action = data.draw(st.sampled_from(["add", "add", "close", "commit", "give up", "merge", "crash", "drain"]))
        if action == "add":
            model.add(data.draw(st.lists(item, max_size=12), label="rows"))
        elif action == "close":
            model.close(data.draw(st.integers(0, 12), label="by"))
        elif action == "commit":
            model.commit()
        elif action == "give up":
            model.runs.freeze()
        elif action == "crash":
            model.crash()
        elif action == "drain":
            model.drain()
        else:
            drained = data.draw(st.booleans())
            ahead_us, more = data.draw(st.integers(0, 12)), data.draw(st.lists(item, max_size=3))

            def during(
                ahead_us: int = ahead_us, more: list[tuple[int, int, int]] = more, *, drained: bool = drained
            ) -> None:
                model.close(ahead_us)
                if drained:
                    model.drain()
                model.add(more)
                model.runs.freeze()

            model.merge(data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1)), during)
        assert counts(model.runs.scan()) == model.held
    model.commit()
    model.crash()
    assert counts(model.runs.scan()) == model.held
    model.close(100)


def test_close_gives_what_is_due_once_and_folded() -> None:
    state = runs()
    state.add(rows((1, 10, 1), (2, 20, 1)))
    state.freeze()
    state.add(rows((1, 10, 5), (1, 30, 7)))
    assert counts(state.close(9)) == {}
    assert counts(state.close(20)) == {(1, 10): 6, (2, 20): 1}
    assert counts(state.close(20)) == {}
    assert counts(state.close(TIME_MAX_US)) == {(1, 30): 7}


def test_what_is_dropped_is_closed_and_does_not_come_back() -> None:
    state = runs()
    state.add(rows((1, 10, 1), (1, 20, 2), (2, 30, 3)))
    state.freeze()
    state.add(rows((2, 10, 4), (1, 30, 5)))
    state.drop(20)
    assert state.closed_us == 20
    assert counts(state.close(TIME_MAX_US)) == {(1, 30): 5, (2, 30): 3}


def test_the_bound_itself_is_due() -> None:
    state = runs()
    state.add(rows((1, 10, 1), (1, 11, 1)))
    assert counts(state.close(10)) == {(1, 10): 1}


def test_runs_that_never_had_rows_close_to_nothing() -> None:
    assert runs().close(TIME_MAX_US).height == 0
    assert runs().scan().height == 0


def test_an_empty_close_keeps_the_columns() -> None:
    state = runs()
    state.add(rows((1, 10, 1)))
    assert state.close(5).schema == pl.Schema(SCHEMA)


def test_a_row_that_comes_after_its_time_was_closed_is_an_error_and_not_lost_in_silence() -> None:
    state = runs()
    state.add(rows((1, 30, 1)))
    state.close(20)
    with pytest.raises(ValueError, match="end = 20 came after 20 had been closed"):
        state.add(rows((1, 40, 1), (1, 20, 1)))


def test_rows_without_a_time_are_refused() -> None:
    with pytest.raises(ValueError, match="'end': rows of timed state have a time"):
        runs().add(rows((1, 10, 1)).with_columns(pl.lit(None, dtype=pl.Int64).alias("end")))


def test_rows_with_other_columns_are_refused() -> None:
    state = runs()
    state.add(rows((1, 10, 1)))
    with pytest.raises(TypeError, match="the same columns"):
        state.add(rows((1, 10, 1)).drop("top"))


def test_a_fold_that_changes_types_is_found_out() -> None:
    state = MemoryTimeline(
        ["k"], time_column="end", merge_rows=lambda frame: frame.with_columns(pl.col("n").cast(pl.Float64))
    )
    state.add(rows((1, 10, 1)))
    with pytest.raises(TypeError, match="merge_rows must keep the types"):
        state.close(10)


class Counting:
    """Merges, and counts the rows that it was given."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        self.rows += frame.height
        return summed(frame)


def test_freezing_folds_nothing_until_the_rows_are_needed() -> None:
    merge = Counting()
    state = MemoryTimeline(["k"], time_column="end", merge_rows=merge)
    for _ in range(50):
        state.add(rows(*((number, 10, 1) for number in range(100))))
    (piece,) = state.freeze()
    assert merge.rows == 0
    assert piece.frame().height == 100
    assert merge.rows == 5000


def test_a_close_that_finds_nothing_due_touches_nothing() -> None:
    merge = Counting()
    state = MemoryTimeline(["k"], time_column="end", merge_rows=merge)
    state.add(rows((1, 100, 1)))
    (piece,) = state.freeze()
    state.add(rows((1, 100, 1)))
    for mark_us in range(100):
        assert state.close(mark_us).height == 0
    assert merge.rows == 0
    assert piece.in_memory
    assert counts(state.close(100)) == {(1, 100): 2}


def test_closing_window_after_window_looks_at_each_row_a_few_times_only() -> None:
    merge = Counting()
    state = MemoryTimeline(["k"], time_column="end", merge_rows=merge)
    total = 0
    for step in range(200):
        # 300 windows are open at any moment; every step closes one.
        state.add(rows(*((1, step + ahead, 1) for ahead in range(1, 301))))
        total += 300
        assert state.close(step + 1).height == 1
    assert merge.rows < 12 * total


def test_open_rows_are_coalesced_when_they_have_grown_by_the_ratio() -> None:
    merge = Counting()
    state = MemoryTimeline(["k"], time_column="end", merge_rows=merge, coalesce_rows_min=1000)
    for _ in range(400):
        state.add(rows(*((number, 10, 1) for number in range(20))))
    assert merge.rows < 1.2 * 8000
    assert state.size_bytes() < 2 * rows(*((number, 10, 1) for number in range(1100))).estimated_size()


def test_coalescing_that_does_not_pay_is_put_off() -> None:
    merge = Counting()
    state = MemoryTimeline(["k"], time_column="end", merge_rows=merge, coalesce_rows_min=1000)
    total = 0
    for batch in range(2000):
        state.add(rows(*((batch * 20 + number, 10, 1) for number in range(20))))
        total += 20
    # Waiting for the ratio alone would have merged over 30,000 rows.
    assert merge.rows < total / 3
    assert state.close(10).height == total


def test_a_piece_goes_when_all_its_rows_are_dead() -> None:
    state = runs()
    state.add(rows((1, 10, 1)))
    state.freeze()
    state.add(rows((1, 20, 1)))
    state.freeze()
    state.close(10)
    assert [piece.frame().get_column("end").to_list() for piece in state.freeze()] == [[20]]
    state.close(20)
    assert state.freeze() == ()
    assert state.size_bytes() == 0


def test_dead_rows_do_not_come_back_after_a_restore_nor_in_a_merged_piece() -> None:
    shelf = Shelf()
    state = runs()
    state.add(rows((1, 10, 1), (1, 20, 1)))
    refs = shelf.write(state.freeze())
    state.close(10)
    again = runs()
    again.load(shelf.pieces(refs), watermark_us=10)
    assert counts(again.scan()) == {(1, 20): 1}
    assert counts(again.close(15)) == {}
    assert counts(again.combine([shelf.frame(refs[0])], oldest=False)) == {(1, 20): 1}


def test_a_restored_state_refuses_rows_below_its_watermark() -> None:
    state = runs()
    state.load([], watermark_us=50)
    with pytest.raises(ValueError, match="had been closed"):
        state.add(rows((1, 50, 1)))
    state.add(rows((1, 51, 1)))


def test_pieces_in_any_order_of_rows_load() -> None:
    state = runs()
    state.load([Piece(rows((1, 30, 1), (2, 10, 1), (3, 20, 1)))], watermark_us=TIME_MIN_US)
    assert counts(state.close(20)) == {(2, 10): 1, (3, 20): 1}
    assert counts(state.close(30)) == {(1, 30): 1}


def test_a_large_piece_that_is_mostly_dead_is_worth_writing_again() -> None:
    shelf = Shelf()
    state = runs(coalesce_rows_min=1 << 30)
    keys = pl.DataFrame({"k": pl.int_range(100_000, eager=True)})
    state.add(keys.with_columns(end=pl.col("k") // 100 + 1, n=pl.lit(1, dtype=pl.Int64), top=0.0))
    shelf.write(state.freeze())
    assert state.mergeable() == ()
    state.close(900)
    (old,) = state.mergeable()
    before = state.size_bytes()
    expected = state.scan()
    shelf.merge(state, [old])
    assert state.size_bytes() < before / 5
    same_rows(state.scan(), expected)


def test_pieces_that_are_not_written_are_left_to_the_writer() -> None:
    state = runs()
    for epoch in range(2 * PIECES_MAX):
        state.add(rows((1, 10 + epoch, 1)))
        state.freeze()
    assert state.mergeable() == ()


@pytest.mark.slow
def test_closing_and_freezing_while_another_thread_merges_loses_nothing() -> None:
    shelf = Shelf()
    state = runs(coalesce_rows_min=50)
    closed: dict[tuple[int, int], int] = {}
    done = threading.Event()
    merges = 0
    failures: list[BaseException] = []

    def merge_on() -> None:
        nonlocal merges
        try:
            while not done.is_set():
                written = [piece for piece in state._pieces.snapshot() if piece.ref is not None]
                old = written[:3]
                if old:
                    frame = state.combine([piece.frame() for piece in old], oldest=True)
                    state.merged(old, Piece(frame, ref=shelf.put(frame), keep=True))
                    merges += 1
        except BaseException as failure:  # noqa: BLE001 - handed to the test's own thread
            failures.append(failure)

    merger = threading.Thread(target=merge_on)
    merger.start()
    try:
        for step in range(400):
            state.add(rows(*((key, step + 1 + key, 1) for key in range(40))))
            shelf.write(state.freeze())
            closed.update(counts(state.close(step)))
        until(lambda: merges > 0 or bool(failures), "merge")
    finally:
        done.set()
        merger.join()
    assert not failures
    closed.update(counts(state.close(TIME_MAX_US)))
    wanted: dict[tuple[int, int], int] = {}
    for step in range(400):
        for key in range(40):
            wanted[key, step + 1 + key] = wanted.get((key, step + 1 + key), 0) + 1
    assert closed == wanted


def test_nothing_is_left_to_seal_when_all_open_rows_were_closed() -> None:
    state = runs(coalesce_rows_min=3)
    state.add(rows(*((key, 10, 1) for key in range(5))))
    assert len(state._ordered) == 1
    state.close(10)
    assert state.freeze() == ()
