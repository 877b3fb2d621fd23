"""RocksTable: the contract, random histories beside a dict, and what it promises about memory, restarts and cost."""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.examples import examples
from tests.faults.small_disk import small_disk
from tests.state import test_table
from tests.state.test_table import SCHEMA, check_any_history, keys, rows

from fordstone.errors import NotInstalledError, StorageError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.state import rocksdb
from fordstone.state.base import FOUND, Piece, RunRef, State
from fordstone.state.rocksdb import RocksCache, RocksTable
from fordstone.state.table import DELETED, MemoryTable
from fordstone.state.working import WorkingFileError, WorkingFiles
from fordstone.testing.contracts.state import Shelf, same_rows

# Opening a database syncs a few files, which no test here is about.
SHARED_MEMORY = Path("/dev/shm")
FILES = WorkingFiles(Path(mkdtemp(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)))
CACHE = RocksCache(1 << 20)


@pytest.fixture(scope="module", autouse=True)
def no_files_are_left() -> Iterator[None]:
    yield
    gc.collect()
    shutil.rmtree(FILES._given or "")


def table(
    key: Sequence[str] = ("k",),
    *,
    schema: Any = SCHEMA,
    sub_key: Sequence[str] = (),
    files: WorkingFiles = FILES,
    keep_rows_min: int = 20,
) -> RocksTable:
    return RocksTable(key, schema=schema, sub_key=sub_key, files=files, cache=CACHE, keep_rows_min=keep_rows_min)


def numbered(numbers: Sequence[int], note: str | None = None) -> pl.DataFrame:
    return rows(*((f"key {number}", number, note) for number in numbers))


class TestRocksTable(test_table.TestTable):
    def make(self) -> State:
        return table()


class TestRocksTableOfNumbers(test_table.TestTableOfNumbers):
    def make(self) -> State:
        return table()


@examples(60)
@given(st.data())
def test_any_history_of_a_table_in_rocksdb_is_that_of_a_dict(data: st.DataObject) -> None:
    check_any_history(data, table)


@examples(60)
@given(st.data())
def test_any_history_is_the_same_when_rows_are_read_and_moved_a_few_at_a_time(data: st.DataObject) -> None:
    few: dict[str, Any] = {
        "CHUNK_ROWS": 2,
        "CHUNK_BYTES": 20,
        "RUN_BYTES": 60,
        "CHANGES_BYTES_MAX": 100,
        "BATCH_ROWS_MAX": 1,
    }
    with patch.multiple(rocksdb, **few):
        check_any_history(data, table)


# Pieces that are rewritten from the database.


def merged_again_and_again(state: RocksTable, shelf: Shelf) -> int:
    """Rewrite and merge as the merger does; gives how often all was rewritten."""
    rewrite = state.rewrite()
    if rewrite is None:
        if old := state.mergeable():
            shelf.merge(state, old)
        return 0
    rewrite.done(rewrite.old, [Piece(ref=shelf.put(frame)) for frame in rewrite.frames])
    return 1


def test_pieces_are_rewritten_when_they_have_several_times_the_rows_of_the_table() -> None:
    shelf, state = Shelf(), table()
    rewritten = 0
    most = 0
    for epoch in range(40):
        state.put(numbered(range(2000), f"epoch {epoch}"))
        state.delete(keys(f"key {epoch}"))
        shelf.write(state.freeze())
        # The task goes on before the merger comes: what it puts now is not in what is rewritten.
        state.put(rows(("key 7", -epoch, "later")))
        rewritten += merged_again_and_again(state, shelf)
        refs = shelf.write(state.freeze())
        most = max(most, sum(ref.rows for ref in refs))
        again = table()
        again.load(shelf.pieces(refs), watermark_us=TIME_MIN_US)
        same_rows(again.scan(), state.scan())
    assert rewritten > 1
    assert most < 5 * 4096
    assert len(state) == 1999


def test_what_is_rewritten_is_what_the_barrier_saw() -> None:
    shelf, state = Shelf(), table()
    for epoch in range(8):
        state.put(numbered(range(3000), f"epoch {epoch}"))
        expected = state.scan()
        shelf.write(state.freeze())
        state.put(numbered(range(5), "later"))
        state.delete(keys("key 9"))
        if (rewrite := state.rewrite()) is not None:
            frame = state.combine(list(rewrite.frames), oldest=True)
            same_rows(frame.drop(DELETED), expected)
            return
    pytest.fail("nothing was rewritten")


def test_a_rewrite_that_fails_is_tried_again_later() -> None:
    shelf, state = Shelf(), table()
    for epoch in range(8):
        state.put(numbered(range(3000), f"epoch {epoch}"))
        shelf.write(state.freeze())
    first = state.rewrite()
    assert first is not None
    next(first.frames)
    assert state.rewrite() is None
    pieces = state.freeze()
    assert sum(piece.ref.rows for piece in pieces if piece.ref is not None) == 8 * 3000
    second = state.rewrite()
    assert second is not None
    second.done(second.old, [Piece(ref=shelf.put(frame)) for frame in second.frames])
    again = table()
    again.load(shelf.pieces(shelf.write(state.freeze())), watermark_us=TIME_MIN_US)
    same_rows(again.scan(), state.scan())


# Copies by hard links.


class Restarts:
    """A table on one working directory, across processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shelf = Shelf()
        self.refs: tuple[RunRef, ...] = ()
        self.state = self.started()

    def started(self) -> RocksTable:
        """As a process that was killed is started again: nothing was closed in order."""
        return table(files=WorkingFiles(self.directory))

    def commit(self) -> None:
        """Seal an epoch; then the merger looks whether there is something to do."""
        self.refs = self.shelf.write(self.state.freeze())
        assert self.state.rewrite() is None

    def restart(self) -> list[str]:
        """Load the last checkpoint. Gives the runs that had to be read."""
        read: list[str] = []

        def reading(ref: RunRef) -> pl.DataFrame:
            read.append(ref.digest)
            return self.shelf.frame(ref)

        del self.state
        gc.collect()
        self.state = self.started()
        pieces = [Piece(make=lambda ref=ref: reading(ref), ref=ref) for ref in self.refs]  # type: ignore[misc]
        self.state.load(pieces, watermark_us=TIME_MIN_US)
        return read


def test_a_restart_reads_only_what_came_after_the_copy(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    run.commit()
    run.commit()  # The copy gets its name when its pieces are written.
    run.state.put(numbered(range(3), "after it"))
    run.state.delete(keys("key 50"))
    run.commit()
    expected = run.state.scan()
    assert run.restart() == [run.refs[1].digest]
    same_rows(run.state.scan(), expected)
    assert len(run.state) == 99
    # The copy was used up: the next barrier makes another.
    run.commit()
    run.commit()
    assert run.restart() == []
    same_rows(run.state.scan(), expected)


def test_rows_that_change_while_the_copy_is_made_are_what_the_checkpoint_says(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    run.refs = run.shelf.write(run.state.freeze())
    first, first_rows = run.refs, run.state.scan()
    # The barrier has passed, and the task goes on before the merger's thread comes to it.
    run.state.put(numbered(range(5), "meanwhile"))
    run.state.delete(keys("key 70"))
    run.state.rewrite()
    run.state.put(numbered([5], "before the next barrier"))
    run.commit()
    run.commit()
    expected = run.state.scan()
    run.state.put(numbered(range(100), "never sealed"))
    second = run.refs
    assert run.restart() == [second[1].digest]
    same_rows(run.state.scan(), expected)
    run.commit()
    run.commit()
    # The copy has rows that the first checkpoint does not know.
    run.refs = first
    assert run.restart() == [first[0].digest]
    same_rows(run.state.scan(), first_rows)


def test_a_barrier_writes_nothing_of_the_database(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    before = sorted(tmp_path.rglob("*"))
    run.state.freeze()
    assert sorted(tmp_path.rglob("*")) == before
    run.state.rewrite()
    assert list(tmp_path.glob("*/copy*/*.sst"))


@examples(80)
@given(st.data())
def test_any_history_with_restarts_is_that_of_a_dict(data: st.DataObject) -> None:
    # As if one row were many: all is rewritten now and then.
    with patch.multiple(rocksdb, SMALLEST_ROWS=1):
        check_any_history_with_restarts(data)


def check_any_history_with_restarts(data: st.DataObject) -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "at": pl.Int64()}
    directory = Path(mkdtemp(dir=FILES._given))
    shelf = Shelf()
    few = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)
    model: dict[int, int] = {}
    sealed: list[tuple[tuple[RunRef, ...], dict[int, int]]] = []

    def made() -> RocksTable:
        return table(["k"], schema=schema, files=WorkingFiles(directory), keep_rows_min=data.draw(st.integers(1, 8)))

    state = made()
    for at in range(data.draw(st.integers(5, 30))):
        match data.draw(st.sampled_from(["put", "put", "delete", "seal", "seal", "merger", "merge", "due", "restart"])):
            case "put":
                picked = data.draw(few)
                state.put(pl.DataFrame({"k": picked, "at": [at] * len(picked)}, schema=schema))
                model |= dict.fromkeys(picked, at)
            case "delete":
                picked = data.draw(few)
                state.delete(pl.DataFrame({"k": picked}, schema={"k": pl.Int64()}))
                model = {k: us for k, us in model.items() if k not in picked}
            case "seal":
                sealed.append((shelf.write(state.freeze()), dict(model)))
            case "merger":
                if (rewrite := state.rewrite()) is not None:
                    rewrite.done(rewrite.old, [Piece(ref=shelf.put(frame)) for frame in rewrite.frames])
            case "merge":
                pieces = [piece for piece in state._pieces.snapshot() if piece.ref is not None]
                if len(pieces) > 1:
                    start = data.draw(st.integers(0, len(pieces) - 2))
                    shelf.merge(state, pieces[start : start + 2])
            case "due":
                found, _ = state.keys_until("at", bound := data.draw(st.integers(-1, at)))
                assert sorted(set(found["k"])) == sorted(k for k, us in model.items() if us <= bound)
            case "restart" if sealed:
                refs, known = data.draw(st.sampled_from(sealed[-3:]))
                state = made()
                state.load(shelf.pieces(refs), watermark_us=TIME_MIN_US)
                model = dict(known)
                sealed = sealed[: next(n for n, (one, _) in enumerate(sealed) if one is refs) + 1]
        assert dict(state.scan().select("k", "at").rows()) == model
    del state
    shutil.rmtree(directory)


def test_a_copy_shares_its_files_with_the_database(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    run.commit()
    run.commit()
    tables = list(tmp_path.glob("kept/*/*.sst"))
    assert tables
    assert all(file.stat().st_nlink > 1 for file in tables)


def test_a_copy_counts_for_no_other_list_of_runs(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    run.commit()
    older = run.refs
    run.state.put(numbered(range(30), "newer"))
    run.commit()
    run.commit()
    run.refs = older
    assert run.restart() == [older[0].digest]
    same_rows(run.state.scan(), numbered(range(100)))


def test_what_was_written_after_the_copy_and_never_sealed_is_not_there_after_a_restart(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    run.commit()
    run.commit()
    expected = run.state.scan()
    run.state.put(numbered(range(200), "never sealed"))
    run.state.delete(keys("key 7"))
    assert run.restart() == []
    same_rows(run.state.scan(), expected)


def test_a_copy_follows_its_pieces_when_they_are_merged(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    for step in range(4):
        run.state.put(numbered(range(100 * step, 100 * step + 100)))
        run.commit()
    run.commit()
    run.shelf.merge(run.state, run.state.freeze()[:2])
    run.commit()
    expected = run.state.scan()
    assert len(run.refs) == 3
    assert len(run.restart()) < 3
    same_rows(run.state.scan(), expected)


def test_a_damaged_copy_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    run.commit()
    run.commit()
    expected = run.state.scan()
    for file in tmp_path.glob("kept/*/MANIFEST-*"):
        file.write_bytes(file.read_bytes()[:-20])
        (file.parent / "CURRENT").write_text("MANIFEST-999999\n")
    assert run.restart() == [ref.digest for ref in run.refs]
    assert "copy of a database could not be used" in caplog.text
    same_rows(run.state.scan(), expected)


def test_copies_of_tables_that_are_gone_are_removed(tmp_path: Path) -> None:
    run = Restarts(tmp_path)
    run.state.put(numbered(range(100)))
    run.commit()
    run.commit()
    (left,) = tmp_path.glob("kept/*")
    del run.state
    gc.collect()
    other = Restarts(tmp_path)
    other.state.put(numbered(range(50)))
    other.commit()
    assert left.exists()
    other.commit()
    assert not left.exists()
    assert len(list(tmp_path.glob("kept/*"))) == 1


def test_working_directories_go_with_their_tables_and_those_of_a_dead_process_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "state-of-a-dead-process").mkdir()
    files = WorkingFiles(tmp_path)
    state = table(files=files)
    state.put(numbered(range(3)))
    assert [path.name == "kept" for path in sorted(tmp_path.iterdir())] == [True, False]
    assert not (tmp_path / "state-of-a-dead-process").exists()
    del state
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# The index by time.


@examples(80)
@given(st.data())
def test_keys_until_is_that_of_a_table_in_memory(data: st.DataObject) -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "part": pl.Int64(), "at": pl.Int64(), "x": pl.Int64()}
    both: tuple[MemoryTable, RocksTable] = (
        MemoryTable(["k"], schema=schema, sub_key=["part"]),
        table(["k"], schema=schema, sub_key=["part"]),
    )
    times = st.none() | st.integers(-3, 12) | st.sampled_from([-(2**63), 2**63 - 1])
    row = st.tuples(st.integers(0, 4), st.integers(0, 1), times, st.integers(0, 1))
    for _ in range(data.draw(st.integers(1, 12))):
        batch = pl.DataFrame(data.draw(st.lists(row, max_size=5)), schema=schema, orient="row")
        action = data.draw(st.sampled_from(["put", "put", "delete", "ask", "ask"]))
        for one in both:
            if action == "put":
                one.put(batch)
            elif action == "delete":
                one.delete(batch.select("k", "part"))
        if action == "ask":
            bound = data.draw(st.integers(-4, 12))
            after = data.draw(st.none() | st.integers(-5, bound))
            (in_memory, least), (found, also) = (one.keys_until("at", bound, after=after) for one in both)
            assert found.schema == in_memory.schema
            assert sorted(found["k"]) == sorted(in_memory["k"])
            assert also == least


def test_a_row_whose_time_has_changed_is_due_at_its_new_time_alone() -> None:
    state = table(["k"], schema={"k": pl.Int64(), "at": pl.Int64()})
    state.put(pl.DataFrame({"k": [1, 2], "at": [1, 3]}))
    assert state.keys_until("at", 0)[1] == 1
    state.put(pl.DataFrame({"k": [1], "at": [5]}))
    found, least = state.keys_until("at", 2)
    assert found["k"].to_list() == []
    assert least == 3
    assert state.keys_until("at", 9)[0]["k"].to_list() == [2, 1]


def test_asking_for_what_is_due_reads_no_more_than_what_is() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "at": pl.Int64()}
    state = table(["k"], schema=schema)
    state.put(pl.DataFrame({"k": range(5000), "at": range(5000)}))
    state.keys_until("at", -1)
    asked: list[int] = []
    held = RocksTable._held

    def counting(self: RocksTable, names: Sequence[bytes]) -> list[bytes | None]:
        asked.append(len(names))
        return held(self, names)

    with patch.object(RocksTable, "_held", counting):
        found, least = state.keys_until("at", 9)
        assert sorted(found["k"]) == list(range(10))
        assert least == 10
    assert sum(asked) < 100


def test_rows_after_the_copy_are_found_by_time_after_a_restart(tmp_path: Path) -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "at": pl.Int64()}
    shelf = Shelf()
    state = table(["k"], schema=schema, files=WorkingFiles(tmp_path))
    state.put(pl.DataFrame({"k": range(100), "at": range(100)}))
    assert state.keys_until("at", -1)[1] == 0
    shelf.write(state.freeze())
    state.rewrite()
    state.freeze()
    state.rewrite()
    state.put(pl.DataFrame({"k": [50, 200], "at": [-5, -6]}))
    refs = shelf.write(state.freeze())
    del state
    gc.collect()
    again = table(["k"], schema=schema, files=WorkingFiles(tmp_path))
    pieces = [Piece(make=lambda: pytest.fail("read"), ref=refs[0]), *shelf.pieces(refs[1:])]
    again.load(pieces, watermark_us=TIME_MIN_US)
    found, least = again.keys_until("at", -1)
    assert sorted(found["k"]) == [50, 200]
    assert least == 0


def test_an_index_survives_a_restart_from_a_copy(tmp_path: Path) -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "at": pl.Int64()}
    shelf = Shelf()

    def made() -> RocksTable:
        return table(["k"], schema=schema, files=WorkingFiles(tmp_path))

    state = made()
    state.put(pl.DataFrame({"k": range(100), "at": range(100)}))
    assert state.keys_until("at", -1)[1] == 0
    refs = shelf.write(state.freeze())
    state.rewrite()
    state.freeze()
    state.rewrite()
    del state
    gc.collect()
    again = made()
    again.load([Piece(make=lambda: pytest.fail("read"), ref=ref) for ref in refs], watermark_us=TIME_MIN_US)
    again.put(pl.DataFrame({"k": [3], "at": [1000]}))
    found, least = again.keys_until("at", 5)
    assert sorted(found["k"]) == [0, 1, 2, 4, 5]
    assert least == 6


# A disk that refuses, and files that are closed.


def test_a_full_disk_is_an_error_that_says_what_to_do_and_no_sealed_row_is_lost(tmp_path: Path) -> None:
    shelf = Shelf()
    with small_disk(tmp_path, "working", size="12m") as disk:
        files = WorkingFiles(disk.place)
        state = table(files=files)
        state.put(numbered(range(100)))
        refs = shelf.write(state.freeze())
        with pytest.raises(WorkingFileError, match=r"(?s)the disk is full: could not write .*Make room") as raised:
            filled(state)
        assert isinstance(raised.value, StorageError)
        state.freeze()
        with pytest.raises(WorkingFileError, match="the disk is full: could not copy"):
            state.rewrite()
        files.clear()
        assert open_below(disk.place) == []
        again = table(files=files)
        again.load(shelf.pieces(refs), watermark_us=TIME_MIN_US)
        same_rows(again.scan(), numbered(range(100)))
        files.clear()


def test_rows_that_cannot_be_read_are_an_error_that_says_where(tmp_path: Path) -> None:
    state = table(files=WorkingFiles(tmp_path))
    state.put(numbered(range(5000), "x" * 100))
    state.freeze()
    state.rewrite()
    for file in tmp_path.glob("state-*/db/*.sst"):
        with file.open("r+b") as damaged:
            damaged.write(b"damage" * 1000)
    with pytest.raises(
        WorkingFileError, match=rf"(?s)could not read the database of a table in {tmp_path}.*Check the disk"
    ):
        state.get(numbered(range(5000)).select("k"))


def test_what_is_open_is_closed_when_a_run_has_ended_although_its_states_are_still_there(tmp_path: Path) -> None:
    files, shelf = WorkingFiles(tmp_path), Shelf()
    state = table(["k"], schema={"k": pl.Int64(), "at": pl.Int64()}, files=files)
    with patch.object(rocksdb, "SMALLEST_ROWS", 1):
        for _ in range(6):
            state.put(pl.DataFrame({"k": range(100), "at": range(100)}))
            assert state.keys_until("at", -1)[1] == 0
            shelf.write(state.freeze())
    # Its iterator would hold the database open.
    rewrite = state.rewrite()
    assert rewrite is not None
    next(rewrite.frames)
    assert open_below(tmp_path)
    files.clear()
    assert open_below(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def filled(state: RocksTable) -> None:
    for start in range(0, 1_000_000, 5_000):
        state.put(numbered(range(start, start + 5_000), "x" * 100))


def open_below(directory: Path) -> list[str]:
    """The files that this process has open below a directory."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(str(directory))]


# The rest.


def test_get_gives_what_a_table_in_memory_gives() -> None:
    state = table()
    state.put(rows(("a", 1, "x"), ("b", None, None), (None, 3, "null is a key")))
    got = state.get(keys("b", "zz", None, "a", "a"))
    assert got.columns == ["k", "n", "note", FOUND]
    assert got.rows() == [
        ("b", None, None, True),
        ("zz", None, None, False),
        (None, 3, "null is a key", True),
        ("a", 1, "x", True),
        ("a", 1, "x", True),
    ]


def test_an_empty_table_knows_its_columns_and_opens_no_database(tmp_path: Path) -> None:
    state = table(files=WorkingFiles(tmp_path / "none"))
    assert state.scan().schema == pl.Schema(SCHEMA)
    assert_frame_equal(state.get(keys("a")), MemoryTable(["k"], schema=SCHEMA).get(keys("a")))
    state.delete(keys("a"))
    assert state.freeze() == ()
    assert not (tmp_path / "none").exists()


def test_many_changes_of_an_epoch_are_moved_to_files() -> None:
    shelf, state = Shelf(), table()
    with patch.object(rocksdb, "CHANGES_BYTES_MAX", 10_000):
        for start in range(0, 4000, 100):
            state.put(numbered(range(start, start + 100)))
            assert state._changes_bytes < 20_000
        pieces = state.freeze()
    assert len(pieces) > 3
    again = table()
    again.load(shelf.pieces(shelf.write(pieces)), watermark_us=TIME_MIN_US)
    same_rows(again.scan(), numbered(range(4000)))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match=r"needs the package rocksdict.*fordstone\[rocksdb\]"):
        rocksdb.check_installed()
