# ruff: noqa: S101 - a suite of tests: it asserts, and the names of its tests are the sentences
"""The contracts of `state.State`, `SearchBuffer` and `KeyIndex`, to be run on every shape and every backend.

Derive a class whose name begins with `Test`, say how the state is made, changed and looked at, and pytest runs the
promises of the seam on it. A `Shelf` stands in for the disk: it writes pieces as the checkpoint writer does.
"""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import polars as pl
from polars.testing import assert_frame_equal

from fordstone.lang.duration import TIME_MIN_US
from fordstone.state.base import Asked, KeyIndex, Piece, RunRef, SearchBuffer, State
from fordstone.state.key_group import key_groups, owners

STEPS = 9
"""How many changes the suite makes."""
EPOCHS = 240
"""For how many epochs the merger is watched."""
PIECES_MAX = 24
"""Maximum number of pieces of a state of a few thousand rows."""


class Shelf:
    """Keeps runs in memory, as bytes under their digest."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self.writes = 0

    def write(self, pieces: Iterable[Piece]) -> tuple[RunRef, ...]:
        """Make pieces durable that are not yet, and give the runs of all of them."""
        refs = []
        for piece in pieces:
            if piece.ref is None:
                piece.written(self.put(piece.frame()))
                self.writes += 1
            refs.append(piece.ref)
        return tuple(ref for ref in refs if ref is not None)

    def put(self, frame: pl.DataFrame) -> RunRef:
        file = io.BytesIO()
        frame.write_ipc(file)
        content = file.getvalue()
        digest = hashlib.sha256(content).hexdigest()
        self._files[digest] = content
        return RunRef(digest=digest, size_bytes=len(content), rows=frame.height)

    def frame(self, ref: RunRef) -> pl.DataFrame:
        return pl.read_ipc(io.BytesIO(self._files[ref.digest]))

    def pieces(self, refs: Iterable[RunRef]) -> tuple[Piece, ...]:
        """Whole runs, as a restore gives them to `load`."""
        return tuple(Piece(self.frame(ref), ref=ref) for ref in refs)

    def owned(self, refs: Iterable[RunRef], key: Sequence[str], subtask: int, parallelism: int) -> tuple[Piece, ...]:
        """The rows of one subtask, as a restore at another parallelism gives them to `load`."""
        found = []
        for ref in refs:
            frame = self.frame(ref)
            mine = owners(key_groups(frame, key), parallelism) == subtask
            found.append(Piece(frame.filter(pl.Series(mine))))
        return tuple(found)

    def merge(self, state: State, old: Sequence[Piece], *, during: Callable[[], object] = lambda: None) -> None:
        """Fold pieces as the merger does; `during` happens on the task's side before the new piece is put in place."""
        oldest = state.freeze()[0] is old[0]
        frames = [piece.frame() if piece.in_memory else self.frame(_ref(piece)) for piece in old]
        rows = state.combine(frames, oldest=oldest)
        new = Piece(rows, ref=self.put(rows), keep=state.keeps_frames)
        during()
        state.merged(old, new)


def _ref(piece: Piece) -> RunRef:
    if piece.ref is None:
        raise AssertionError("a piece is neither in memory nor written")
    return piece.ref


def same_rows(left: pl.DataFrame, right: pl.DataFrame) -> None:
    """Raise unless both have the same rows, as a multiset."""
    if left.height == right.height == 0:
        return
    assert_frame_equal(left, right, check_row_order=False, check_column_order=False, check_exact=True)


class StateContract(ABC):
    """What every state promises. The state must be keyed."""

    @abstractmethod
    def make(self) -> State:
        """A fresh state."""

    @abstractmethod
    def change(self, state: State, step: int) -> None:
        """Make the change number `step` (from 0): the same one every time, with keys of many key groups, old and new."""

    @abstractmethod
    def rows(self, state: State) -> pl.DataFrame:
        """All that the state holds."""

    def close(self, state: State) -> int:
        """Let some of the rows' time come, and give the watermark; the same every time. Without time, do nothing."""
        del state
        return TIME_MIN_US

    def changed(self, steps: int, *, freeze: bool = False, shelf: Shelf | None = None) -> State:
        """A state after this number of changes, frozen after each if wanted, and written if there is a shelf."""
        state = self.make()
        for step in range(steps):
            self.change(state, step)
            if freeze:
                pieces = state.freeze()
                if shelf is not None:
                    shelf.write(pieces)
        return state

    def loaded(self, pieces: Sequence[Piece], *, watermark_us: int = TIME_MIN_US) -> State:
        """A fresh state that has read these pieces."""
        state = self.make()
        state.load(pieces, watermark_us=watermark_us)
        return state

    # The promises.

    def test_an_empty_state_has_no_pieces(self) -> None:
        assert self.make().freeze() == (), "a state without rows froze to pieces"
        same_rows(self.rows(self.loaded(())), pl.DataFrame())

    def test_loading_what_was_frozen_gives_the_same_rows(self) -> None:
        shelf = Shelf()
        for freeze in (False, True):
            state = self.changed(STEPS, freeze=freeze)
            again = self.loaded(shelf.pieces(shelf.write(state.freeze())))
            assert self.rows(state).height, "the changes left no rows: the suite checks nothing"
            same_rows(self.rows(again), self.rows(state))

    def test_changes_after_loading_are_as_if_nothing_had_happened(self) -> None:
        shelf = Shelf()
        for cut in range(STEPS):
            state = self.loaded(shelf.pieces(shelf.write(self.changed(cut, freeze=True).freeze())))
            for step in range(cut, STEPS):
                self.change(state, step)
            same_rows(self.rows(state), self.rows(self.changed(STEPS)))

    def test_a_second_restore_sees_the_changes_since_the_first(self) -> None:
        shelf = Shelf()
        refs: tuple[RunRef, ...] = ()
        for step in range(STEPS):
            state = self.loaded(shelf.pieces(refs))
            self.change(state, step)
            refs = shelf.write(state.freeze())
        same_rows(self.rows(self.loaded(shelf.pieces(refs))), self.rows(self.changed(STEPS)))

    def test_freezing_twice_adds_nothing(self) -> None:
        state = self.changed(STEPS, freeze=True)
        first = state.freeze()
        assert state.freeze() == first, "a second freeze gave other pieces"

    def test_an_attempt_that_was_given_up_loses_nothing(self) -> None:
        shelf = Shelf()
        state = self.changed(STEPS, freeze=True, shelf=None)
        again = self.loaded(shelf.pieces(shelf.write(state.freeze())))
        same_rows(self.rows(again), self.rows(state))

    def test_written_pieces_are_not_written_again(self) -> None:
        shelf = Shelf()
        state = self.changed(STEPS, freeze=True, shelf=shelf)
        assert shelf.writes <= STEPS, f"{STEPS} freezes wrote {shelf.writes} runs"
        refs = shelf.write(state.freeze())
        again = self.loaded(shelf.pieces(refs))
        assert tuple(piece.ref for piece in again.freeze()) == refs, (
            "a restored state does not name the runs it came from"
        )
        for piece in state.freeze():
            assert piece.in_memory is state.keeps_frames, "written rows are kept, or not, against keeps_frames"

    def test_what_was_frozen_does_not_change(self) -> None:
        shelf = Shelf()
        for cut in range(1, STEPS):
            state = self.changed(cut)
            before = self.rows(state)
            pieces = state.freeze()
            for step in range(cut, STEPS):
                self.change(state, step)
            same_rows(self.rows(self.loaded(shelf.pieces(shelf.write(pieces)))), before)

    def test_every_piece_has_the_key_columns(self) -> None:
        state = self.changed(STEPS, freeze=True)
        assert state.key, "this suite is for keyed state"
        for piece in state.freeze():
            assert set(state.key) <= set(piece.frame().columns), "a piece lacks key columns"

    def test_merging_any_neighbours_keeps_the_rows(self) -> None:
        pieces = len(self.changed(STEPS, freeze=True).freeze())
        for start in range(pieces):
            for stop in range(start + 1, pieces + 1):
                shelf = Shelf()
                state = self.changed(STEPS, freeze=True, shelf=shelf)
                shelf.merge(state, state.freeze()[start:stop])
                merged = state.freeze()
                assert len(merged) <= pieces - (stop - start) + 1, (
                    "the merged piece did not take the place of the old ones"
                )
                same_rows(self.rows(state), self.rows(self.changed(STEPS)))
                same_rows(self.rows(self.loaded(shelf.pieces(shelf.write(merged)))), self.rows(state))

    def test_merging_while_the_task_goes_on_keeps_the_rows(self) -> None:
        for cut in range(2, STEPS):
            shelf = Shelf()
            state = self.changed(cut, freeze=True, shelf=shelf)
            pieces = state.freeze()

            def go_on(state: State = state, cut: int = cut) -> None:
                for step in range(cut, STEPS):
                    self.change(state, step)
                    state.freeze()

            shelf.merge(state, pieces[: len(pieces) // 2 + 1], during=go_on)
            same_rows(self.rows(state), self.rows(self.changed(STEPS)))
            same_rows(self.rows(self.loaded(shelf.pieces(shelf.write(state.freeze())))), self.rows(state))

    def test_merging_while_rows_are_closed_keeps_the_rows(self) -> None:
        shelf = Shelf()
        state = self.changed(STEPS, freeze=True, shelf=shelf)
        marks: list[int] = []
        shelf.merge(state, state.freeze(), during=lambda: marks.append(self.close(state)))
        expected = self.changed(STEPS)
        self.close(expected)
        same_rows(self.rows(state), self.rows(expected))
        refs = shelf.write(state.freeze())
        same_rows(self.rows(self.loaded(shelf.pieces(refs), watermark_us=marks[0])), self.rows(expected))

    def test_replacing_pieces_that_have_gone_changes_nothing(self) -> None:
        shelf = Shelf()
        state = self.changed(STEPS, freeze=True, shelf=shelf)
        strange = self.changed(STEPS, freeze=True, shelf=shelf).freeze()
        before = state.freeze()
        rows = state.combine(
            [strange[0].frame() if strange[0].in_memory else shelf.frame(_ref(strange[0]))], oldest=True
        )
        state.merged(strange[:1], Piece(rows, ref=shelf.put(rows), keep=True))
        assert state.freeze() == before, "pieces that are not in the state were replaced"
        same_rows(self.rows(state), self.rows(self.changed(STEPS)))

    def test_rows_by_key_group_at_any_parallelism_are_the_same_rows(self) -> None:
        shelf = Shelf()
        state = self.changed(STEPS, freeze=True, shelf=shelf)
        refs = shelf.write(state.freeze())
        for parallelism in (1, 2, 3, 17):
            parts = [
                self.rows(self.loaded(shelf.owned(refs, state.key, subtask, parallelism)))
                for subtask in range(parallelism)
            ]
            assert parallelism == 1 or sum(part.height > 0 for part in parts) > 1, "all rows are in one key group"
            same_rows(pl.concat([part for part in parts if part.height]), self.rows(state))

    def test_loading_drops_what_had_been_closed(self) -> None:
        shelf = Shelf()
        state = self.changed(STEPS, freeze=True, shelf=shelf)
        watermark_us = self.close(state)
        again = self.loaded(shelf.pieces(shelf.write(state.freeze())), watermark_us=watermark_us)
        same_rows(self.rows(again), self.rows(state))

    def test_the_merger_keeps_the_pieces_few(self) -> None:
        shelf = Shelf()
        state = self.make()
        most = 0
        for epoch in range(EPOCHS):
            self.change(state, epoch % STEPS)
            pieces = state.freeze()
            shelf.write(pieces)
            old = state.mergeable()
            if old:
                places = [index for index, piece in enumerate(pieces) if any(piece is one for one in old)]
                assert places == list(range(places[0], places[0] + len(old))), (
                    "mergeable gave pieces that are not neighbours"
                )
                shelf.merge(state, old)
            most = max(most, len(state.freeze()))
        assert most <= PIECES_MAX, f"there were {most} pieces"
        assert state.size_bytes() > 0, "a state with rows takes no memory"


class SearchBufferContract(StateContract):
    """What every searchable buffer promises beside. The column `n` numbers rows, `until` is the time."""

    @abstractmethod
    def make(self) -> SearchBuffer:
        """A fresh buffer by the key `a`, `b`."""

    def change(self, state: State, step: int) -> None:
        """Add rows of keys that come again with other times, some with a null in the key."""
        numbers = range(40 * step, 40 * step + 40)
        rows = [(f"key {n % 11}", None if n % 7 == 0 else n % 2, 10 + n * 13 % 50, n) for n in numbers]
        schema = {"a": pl.String(), "b": pl.Int64(), "until": pl.Int64(), "n": pl.Int64()}
        _buffer(state).add(pl.DataFrame(rows, schema=schema, orient="row"))

    def rows(self, state: State) -> pl.DataFrame:
        return _buffer(state).scan()

    def close(self, state: State) -> int:
        _buffer(state).drop(30)
        return 30

    def found(self, state: State, asked: pl.DataFrame) -> set[tuple[int, int]]:
        """Pairs of what is asked and of rows that are alive."""
        keys, bounds = asked.select("a", "b"), (asked["from"].to_numpy(), asked["to"].to_numpy())
        found = _buffer(state).search(Asked(keys=keys, from_us=bounds[0], to_us=bounds[1]))
        if found is None:
            return set()
        pairs = list(zip(found.asked.tolist(), found.rows["n"].to_list(), strict=True))
        assert len(pairs) == len(set(pairs)), "a pair was found twice"
        alive = set(self.rows(state)["n"])
        return {pair for pair in pairs if pair[1] in alive}

    def test_a_search_finds_the_rows_of_equal_key_in_the_range_and_no_others(self) -> None:
        shelf = Shelf()
        asked = pl.DataFrame(
            [(f"key {n % 12}", None if n % 5 == 0 else n % 2, 5 * n % 70, 5 * n % 70 + n % 4 * 6) for n in range(60)],
            schema={"a": pl.String(), "b": pl.Int64(), "from": pl.Int64(), "to": pl.Int64()},
            orient="row",
        ).with_row_index("asked")
        for freeze in (False, True):
            state = self.changed(STEPS, freeze=freeze, shelf=shelf if freeze else None)
            for closed in (False, True):
                watermark_us = self.close(state) if closed else TIME_MIN_US
                pairs = asked.join(self.rows(state), on=["a", "b"]).filter(pl.col("until").is_between("from", "to"))
                assert pairs.height, "nothing is to be found: the suite checks nothing"
                again = self.loaded(shelf.pieces(shelf.write(state.freeze())), watermark_us=watermark_us)
                for one in (state, again):
                    assert self.found(one, asked) == set(pairs.select("asked", "n").rows()), "a search found other rows"

    def test_dropping_rows_is_releasing_them_unseen(self) -> None:
        dropped, released = self.changed(STEPS), self.changed(STEPS)
        _buffer(dropped).drop(30)
        assert _buffer(released).release(30).height, "nothing was released: the suite checks nothing"
        same_rows(self.rows(dropped), self.rows(released))


def _buffer(state: State) -> SearchBuffer:
    if not isinstance(state, SearchBuffer):
        raise TypeError(f"{type(state).__name__} is no SearchBuffer")
    return state


class KeyIndexContract(ABC):
    """What every index of keys promises."""

    @abstractmethod
    def make(self, schema: Mapping[str, pl.DataType]) -> KeyIndex:
        """A fresh index."""

    def test_equal_keys_have_one_slot_and_others_another(self) -> None:
        nan = float("nan")
        keys = pl.DataFrame({"a": ["x", "x", None, "x", None, "y"] * 2, "b": [0.0, -0.0, nan, 1.0, -nan, None] * 2})
        index = self.make(keys.schema)
        for _ in range(2):
            slots, fresh = index.insert(keys)
            first = slots[[0, 2, 3, 5]]
            assert slots.tolist() == slots[[0, 0, 2, 3, 2, 5] * 2].tolist(), "equal keys have different slots"
            assert sorted(first.tolist()) == [0, 1, 2, 3], "slots of other keys are not their own"
            assert len(index) == 4 <= index.capacity, "the index does not count its keys"
        assert not fresh.size, "known keys have new slots"

    def test_filling_is_inserting_at_once(self) -> None:
        keys = pl.DataFrame({"a": range(1000)})
        index = self.make(keys.schema)
        slots = index.fill(keys)
        again, fresh = index.insert(keys)
        assert slots.tolist() == again.tolist(), "keys that were filled in have other slots"
        assert not fresh.size, "keys that were filled in are not found"
