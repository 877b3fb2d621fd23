from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest

from fordstone.epochs.store import CheckpointStore, Merged, merge_checkpoint, merge_state
from fordstone.errors import CheckpointError, DamagedError
from fordstone.state.base import Piece, PieceList, State
from fordstone.testing.memory_disk import MemoryDisk


class Summed(State):
    """A state of partial sums by key; a sum of zero is a tombstone."""

    def __init__(self, pieces: Sequence[Piece], *, keeps_frames: bool = False, fold: slice = slice(None)) -> None:
        self.pieces = PieceList(pieces)
        self.fold = fold
        self.oldest_seen: list[bool] = []
        self._keeps_frames = keeps_frames

    @property
    def key(self) -> tuple[str, ...]:
        return ("k",)

    def freeze(self) -> tuple[Piece, ...]:
        return self.pieces.snapshot()

    def load(self, pieces: Sequence[Piece], *, watermark_us: int) -> None:
        self.pieces.reset(pieces)

    def mergeable(self) -> tuple[Piece, ...]:
        found = self.pieces.snapshot()[self.fold]
        return found if len(found) > 1 else ()

    def combine(self, frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:
        self.oldest_seen.append(oldest)
        return fold(frames, oldest=oldest)

    def merged(self, old: Sequence[Piece], new: Piece) -> None:
        self.pieces.replace(old, [new])

    @property
    def keeps_frames(self) -> bool:
        return self._keeps_frames

    def size_bytes(self) -> int:
        return 0


def fold(frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:
    rows = pl.concat(frames).group_by("k", maintain_order=True).agg(pl.col("n").sum())
    return rows.filter(pl.col("n") != 0) if oldest else rows


def rows_of(store: CheckpointStore, state: State, at: int) -> list[Any]:
    ref = state.freeze()[at].ref
    assert ref is not None
    return store.read_run(ref).rows()


def part(key: str, n: int) -> pl.DataFrame:
    return pl.DataFrame({"k": [key], "n": [n]})


def stored(store: CheckpointStore, frame: Any) -> Any:
    return Piece(ref=store.write_run(frame))


def test_pieces_on_disk_and_in_memory_are_folded_into_one_durable_run(store: CheckpointStore) -> None:
    state = Summed([stored(store, part("a", 1)), Piece(part("b", 2)), stored(store, part("a", 3))])
    assert merge_state(store, state)
    (piece,) = state.freeze()
    assert piece.ref is not None
    assert store.read_run(piece.ref).rows() == [("a", 4), ("b", 2)]
    assert not piece.in_memory


def test_a_state_that_lives_in_its_frames_keeps_the_folded_one(store: CheckpointStore) -> None:
    state = Summed([stored(store, part("a", 1)), stored(store, part("a", 2))], keeps_frames=True)
    merge_state(store, state)
    assert state.freeze()[0].frame().rows() == [("a", 3)]


def test_nothing_to_fold_writes_nothing(disk: MemoryDisk, store: CheckpointStore) -> None:
    changes = disk.changes
    assert not merge_state(store, Summed([Piece(part("a", 1))]))
    assert disk.changes == changes


def test_tombstones_go_only_when_the_oldest_piece_is_folded_in(store: CheckpointStore) -> None:
    pieces = [stored(store, part("a", 1)), stored(store, part("b", 5)), stored(store, part("b", -5))]
    state = Summed(pieces, fold=slice(1, None))
    merge_state(store, state, first=pieces[0])
    assert state.oldest_seen == [False]
    assert rows_of(store, state, 1) == [("b", 0)]
    state.fold = slice(None)
    merge_state(store, state, first=pieces[0])
    assert state.oldest_seen == [False, True]
    assert rows_of(store, state, 0) == [("a", 1)]


def test_without_knowing_the_oldest_piece_tombstones_stay(store: CheckpointStore) -> None:
    state = Summed([stored(store, part("b", 5)), stored(store, part("b", -5))])
    merge_state(store, state)
    assert state.oldest_seen == [False]


def test_a_piece_that_is_written_while_it_is_asked_for_is_read_from_disk(store: CheckpointStore) -> None:
    class Slippery(Piece):
        @property
        def in_memory(self) -> bool:
            return True

    ref = store.write_run(part("a", 1))
    state = Summed([Slippery(ref=ref), Piece(part("a", 2))])
    merge_state(store, state)
    assert rows_of(store, state, 0) == [("a", 3)]


def test_a_damaged_piece_stops_the_merge_and_the_state_stays_as_it_was(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    pieces = [stored(store, part("a", 1)), stored(store, part("a", 2))]
    disk.damage(f"{build.base}/runs/{pieces[0].ref.digest}", b"?")
    state = Summed(pieces)
    with pytest.raises(DamagedError):
        merge_state(store, state)
    assert state.freeze() == tuple(pieces)


@pytest.fixture
def two(store: CheckpointStore, build: Any) -> Any:
    """Two checkpoints that share their first runs."""
    runs = [store.write_run(part("a", n)) for n in (1, 2, 3)]
    store.commit(build.manifest(1, tuple(runs[:2])))
    store.commit(build.manifest(2, tuple(runs)))
    return store


def test_merging_the_newest_checkpoint_leaves_its_meaning_and_older_ones_alone(
    disk: MemoryDisk, two: CheckpointStore, build: Any
) -> None:
    before = two.manifest(1)
    done = merge_checkpoint(two, lambda step, state: fold if (step, state) == ("count", "main") else None)
    assert isinstance(done, Merged)
    assert (done.epoch, done.runs_before, done.runs_after) == (2, 3, 1)
    other = build.open(disk)
    (run,) = other.manifest(2).states[0].runs
    assert other.read_run(run).rows() == [("a", 6)]
    assert other.manifest(1) == before
    other.collect()
    assert other.verify().whole
    assert other.epochs() == (1, 2)


def test_old_runs_go_once_no_older_checkpoint_names_them(disk: MemoryDisk, build: Any) -> None:
    store = build.open(disk, keep=1)
    store.commit(build.manifest(1, tuple(store.write_run(part("a", n)) for n in (1, 2, 3))))
    merge_checkpoint(store, lambda *_: fold)
    assert store.collect().runs == 3
    assert store.verify().whole


def test_a_state_that_nobody_can_fold_stays_as_it_is(two: CheckpointStore) -> None:
    assert merge_checkpoint(two, lambda *_: None) is None


def test_merging_twice_does_nothing_the_second_time(disk: MemoryDisk, two: CheckpointStore) -> None:
    merge_checkpoint(two, lambda *_: fold)
    changes = disk.changes
    assert merge_checkpoint(two, lambda *_: fold) is None
    assert disk.changes == changes


def test_merging_without_a_checkpoint_says_so(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="there is nothing to merge"):
        merge_checkpoint(store, lambda *_: fold)


def test_a_checkpoint_that_does_not_exist_cannot_be_replaced(store: CheckpointStore, build: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be replaced"):
        store.replace(build.manifest(1))
