"""The table in RocksDB, for more keys than fit into memory.

The database is working state: it has the rows as they are now, its write-ahead log is off, and it may be thrown away. What is durable is
the checkpoint, which is the same as of a table in memory: the rows that changed since the last barrier become a piece. So a
checkpoint costs what has changed, and copies, rescaling, other backends and Spark read it as any other.

Old pieces are not merged by reading them all. When they have several times the rows of the table, the rows that the
database has at a barrier are written in their place (`rewrite`), some at a time. A copy of the database by hard links is made off the task's thread
and kept with the list of pieces that it belongs to; a restart takes it, and reads only what came after it (`_Copy`).

Invariants: rows of a batch are in the database before the call returns, so what `get` sees does not depend on barriers; memory is bounded by
the changes of an epoch, up to `CHANGES_BYTES_MAX`, and by the database's own buffers.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import shutil
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import polars as pl

from fordstone.errors import NotInstalledError, StorageError
from fordstone.state.base import (
    FOUND,
    SMALLEST_ROWS,
    Piece,
    PieceList,
    Rewrite,
    Table,
    first_within,
    pieces_to_merge,
)
from fordstone.state.row_codec import VERSION, RowCodec
from fordstone.state.spilled import SpilledPiece
from fordstone.state.table import DELETED, ROWS_RATIO_MAX, last_rows
from fordstone.state.working import WorkingFiles, refusals

if TYPE_CHECKING:
    import rocksdict

log = logging.getLogger(__name__)
Entry = TypeVar("Entry")

WRITE_BUFFER_BYTES: Final = 16 * 1024 * 1024
"""Of one table. It may have two."""
CHANGES_BYTES_MAX: Final = 16 * 1024 * 1024
"""Changed rows of an epoch are moved to a file from this size on."""
BLOCK_BYTES: Final = 8 * 1024
GET_KEYS: Final = 4096
"""How many keys the database is asked for at once: what it needs for them then stays in the processor's cache."""
CHUNK_ROWS: Final = 65_536
CHUNK_BYTES: Final = 8 * 1024 * 1024
"""How many rows are read and written together."""
REWRITE_ROWS: Final = 2048
YIELD_S: Final = 50e-6
"""A rewrite reads this many rows, which takes about a millisecond, and then leaves the interpreter to the tasks. Python takes it away from a thread
only after 5 ms, and a task asks for it again after each call of Polars: together these waits were the larger part of its time."""
RUN_BYTES: Final = 16 * 1024 * 1024
"""About how many bytes of rows a run has that is written in place of others."""
BATCH_ROWS_MAX: Final = 16_384
"""More rows than this are loaded as a sorted file, fewer as a batch."""
MERGED_BYTES_MAX: Final = 4 * 1024 * 1024
"""Pieces with more bytes of rows than this stay as they are until all are rewritten."""
MERGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""No more than this is merged at once."""
KEEP_ROWS_MIN: Final = 1 << 20
KEEP_SHARE: Final = 4
"""A copy of the database is made when this many rows have changed since the last, and one in this many of those in pieces."""
_DUE: Final = "due:"
_SIGN: Final = np.uint64(1 << 63)


def check_installed() -> None:
    """Raise unless the package is there."""
    if importlib.util.find_spec("rocksdict") is None:
        raise NotInstalledError(
            'state="rocksdb" needs the package rocksdict. Install it: pip install "fordstone[rocksdb]".'
        )


class RocksCache:
    """The cache that the databases of a pipeline share."""

    def __init__(self, cache_bytes: int) -> None:
        from rocksdict import Cache, WriteOptions  # noqa: PLC0415 - it comes with an extra

        self._cache = Cache.new_hyper_clock_cache(cache_bytes, BLOCK_BYTES)
        self.unlogged = WriteOptions()
        # A property, whatever its stub says.
        setattr(self.unlogged, "disable_wal", True)  # noqa: B010

    def options(self) -> rocksdict.Options:
        from rocksdict import (  # noqa: PLC0415 - it comes with an extra
            BlockBasedOptions,
            DataBlockIndexType,
            DBCompressionType,
            Options,
        )

        blocks = BlockBasedOptions()
        blocks.set_block_cache(self._cache)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_block_size(BLOCK_BYTES)
        blocks.set_format_version(6)
        blocks.set_bloom_filter(bits_per_key=10, block_based=False)
        blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
        blocks.set_data_block_hash_ratio(0.75)
        options = Options(raw_mode=True)
        options.create_if_missing(create_if_missing=True)
        options.create_missing_column_families(create_missing_cfs=True)
        options.set_block_based_table_factory(blocks)
        options.set_compression_type(DBCompressionType.none())
        options.set_write_buffer_size(WRITE_BUFFER_BYTES)
        # Most keys that are asked for are not among the newest.
        options.set_memtable_whole_key_filtering(whole_key_filter=True)
        options.set_memtable_prefix_bloom_ratio(0.1)
        options.set_max_background_jobs(2)
        options.set_keep_log_file_num(1)
        options.set_stats_dump_period_sec(0)
        return options


@dataclass(slots=True)
class _Database:
    """What is open on disk, apart from the table, so that it can be closed when the table has gone."""

    db: Any = None
    """The `Rdict`, whose stubs are of another mode."""
    families: dict[str, Any] = field(default_factory=dict)
    """Indexes by their column."""
    handles: dict[str, Any] = field(default_factory=dict)
    rewriting: Generator[pl.DataFrame] | None = None
    """Reads the database by an iterator, which holds it open."""

    def close(self) -> None:
        if self.rewriting is not None:
            with contextlib.suppress(ValueError):  # a thread that hangs is in it
                self.rewriting.close()
            self.rewriting = None
        self.families.clear()
        self.handles.clear()
        if self.db is not None:
            # It writes what is in memory first, which its files may have no room for. They are going now; it is closed all the same.
            with contextlib.suppress(Exception):
                self.db.close()
            self.db = None


@dataclass(slots=True)
class _Copy:
    """A copy of the database, made after one barrier and before another, while rows went on to change.

    So it has no moment's rows. But the pieces between the two barriers have the last row of each key that changed meanwhile: read on top
    of the copy, they make it what the table was at the second.
    """

    path: Path
    """Where it is until it is kept."""
    known: PieceList
    """The pieces of the first barrier: it has their rows."""
    made: bool = False
    pieces: PieceList | None = None
    """Those of the second barrier, once that has passed."""
    name: str | None = None
    """What it is kept as, once all of them are written."""


class RocksTable(Table):
    """One row per key, in a database of its own."""

    def __init__(
        self,
        key: Sequence[str],
        *,
        schema: Mapping[str, pl.DataType],
        sub_key: Sequence[str] = (),
        files: WorkingFiles,
        cache: RocksCache,
        keep_rows_min: int = KEEP_ROWS_MIN,
    ) -> None:
        self._key = (*key, *sub_key)
        self._group_key = tuple(key)
        self._schema = pl.Schema(schema)
        self._columns = list(self._schema)
        self._values = [name for name in self._schema if name not in self._key]
        self._files, self._cache = files, cache
        self._names = RowCodec({name: self._schema[name] for name in self._key}, as_key=True)
        self._rows = RowCodec({name: self._schema[name] for name in self._values})
        self._directory: Path | None = None
        self._opened = _Database()
        self._pieces = PieceList()
        self._changes: list[pl.DataFrame] = []
        """Rows and tombstones since the last freeze, in their order."""
        self._changes_bytes = 0
        self._row_bytes = 1
        """About, of the widest rows so far: how many rows may be in memory at once goes by it."""
        self._count: int | None = None
        """The number of rows; None: nobody has asked for it, so that `put` need not know which keys are new."""
        self._known: dict[bytes, bool] = {}
        """While rows are counted: of the keys that were asked for last, which have a row."""
        self._rewritten_rows = 0
        """Of the table, when its pieces were last rewritten or loaded."""
        self._rewrite: Rewrite | None = None
        self._copy: _Copy | None = None
        """The one that is kept."""
        self._next_copy: _Copy | None = None
        self._uncopied_rows = 0
        self._copies = 0
        """How many there were, for names of their own."""
        self._keep_rows_min = keep_rows_min
        self._mutex = threading.Lock()
        """Guards the copies: pieces are replaced by the merger."""
        self._indexes = threading.Lock()
        """No copy is made while an index is: it would have half of it."""

    @property
    def key(self) -> tuple[str, ...]:
        return self._group_key

    @property
    def keeps_frames(self) -> bool:
        return False

    @property
    def loads_lazily(self) -> bool:
        return True

    def __len__(self) -> int:
        if self._count is None:
            with self._refusals("read"):
                self._count = sum(1 for _ in self._items())
        return self._count

    def size_bytes(self) -> int:
        """Return what is in the memory of this process. The cache is shared, and not counted."""
        db = self._opened.db
        buffers = db and db.property_int_value("rocksdb.size-all-mem-tables")
        return self._changes_bytes + (buffers or 0)

    # Rows, on the task's thread.

    def get(self, keys: pl.DataFrame) -> pl.DataFrame:
        names = self._names.encode(keys)
        held = self._held(names)
        there = [row is not None for row in held]
        found = np.array(there, dtype=np.bool_)
        if self._count is not None:
            self._known = dict(zip(names, there, strict=True))
        values = self._rows.decode([row for row in held if row is not None])
        if not found.any():
            values = values.clear(found.size)
        elif not found.all() and values.width:
            places = np.full(found.size, -1, dtype=np.int64)
            places[found] = np.arange(values.height)
            at = pl.Series(places)
            values = values.select(pl.all().gather(at.set(at < 0, None)))
        columns = {column.name: column for column in (*keys.get_columns(), *values.get_columns())}
        return pl.DataFrame([*(columns[name] for name in self._columns), pl.Series(FOUND, found)])

    def put(self, frame: pl.DataFrame) -> None:
        if not frame.height:
            return
        frame = frame.select(self._columns)
        for name, dtype in self._schema.items():
            if frame.schema[name] != dtype:
                raise TypeError(f"column {name!r} is {frame.schema[name]}, the table was made for {dtype}; cast it.")
        # In order of the keys, which costs RocksDB a quarter. The rows of a key that repeats stay in theirs.
        order, names = _ordered_names(self._names.encode(frame))
        frame = frame[order]
        self._open()
        if self._count is not None:
            self._count += sum(not there for there in self._there(names).values())
            self._known = dict.fromkeys(names, True)
        batch = self._batch()
        put = batch.put
        for pair in zip(names, self._rows.encode(frame), strict=True):
            put(*pair)
        self._add_to_indexes(batch, frame, names)
        self._write(batch)
        self._changed(frame.with_columns(pl.lit(value=False).alias(DELETED)))

    def delete(self, keys: pl.DataFrame) -> None:
        if self._opened.db is None or not keys.height:
            return
        names = self._names.encode(keys)
        there = self._there(names)
        first = {name: at for at, name in reversed(list(enumerate(names))) if there[name]}
        if not first:
            return
        batch = self._batch()
        for name in first:
            batch.delete(name)
        self._write(batch)
        if self._count is not None:
            self._count -= len(first)
            self._known |= dict.fromkeys(first, False)
        gone = keys.select(self._key)[sorted(first.values())]
        nothing = [pl.lit(None, dtype=self._schema[name]).alias(name) for name in self._values]
        self._changed(gone.with_columns(*nothing, pl.lit(value=True).alias(DELETED)).select(*self._columns, DELETED))

    def scan(self) -> pl.DataFrame:
        return pl.concat([pl.DataFrame(schema=self._schema), *self._chunks(self._items(), CHUNK_ROWS)])

    def keys_until(self, column: str, bound: int, *, after: int | None = None) -> tuple[pl.DataFrame, int | None]:
        """As the seam says, by an index in order of the column: reads what lies in the range, and no more.

        An entry of the index stays when its row changes, and is dropped here when it is found to be out of date.
        """
        due: list[bytes] = []
        following: int | None = None
        if self._opened.db is not None:
            index = self._index(column)
            start = _ordered(-(1 << 63) if after is None or after < -(1 << 63) else after + 1)
            with self._refusals("read"):
                entries = index.keys(from_key=start)
            for value, name in self._current(column, entries):
                if value > bound:
                    following = value
                    break
                due.append(name)
        return self._names.decode(due).select(self._group_key), following

    # Pieces.

    def freeze(self) -> tuple[Piece, ...]:
        """Make a piece of the rows that changed; they are not copied."""
        if self._changes:
            frames = tuple(self._changes)
            self._changes, self._changes_bytes = [], 0
            self._pieces.append(Piece(make=partial(last_rows, frames, self._key)))
        pieces = self._pieces.snapshot()
        if self._rewrite is None and self._is_rewrite_due(pieces):
            # An iterator shows the database as it is when it is made. (One of a `Snapshot` of rocksdict 0.3.29 does not.)
            self._opened.rewriting = self._runs(self._items())
            self._rewrite = Rewrite(old=pieces, frames=self._opened.rewriting, done=self._rewritten)
        self._keep_copy(pieces)
        return pieces

    def load(self, pieces: Sequence[Piece], *, watermark_us: int) -> None:  # noqa: ARG002 - a table has no time
        """Read the pieces one after the other, or only those after the newest copy that was kept."""
        self._count = None
        known = self._take_copy(pieces)
        if not known:
            self._open()
        held = [Piece(ref=piece.ref) for piece in pieces[:known]]
        for piece in pieces[known:]:
            rows = piece.read()
            if rows.height:
                self._row_bytes = max(self._row_bytes, int(rows.estimated_size()) // rows.height)
            for part in rows.iter_slices(max(1, min(CHUNK_ROWS * 4, CHUNK_BYTES // self._row_bytes))):
                self._take(part)
            if piece.ref is not None:
                held.append(Piece(ref=piece.ref))
            elif rows.height:
                held.append(piece)
        self._pieces.reset(held)
        self._rewritten_rows = sum(_row_count(piece) for piece in pieces) // ROWS_RATIO_MAX
        # The copy is gone: the next barrier makes another.
        self._uncopied_rows = sum(_row_count(piece) for piece in pieces)

    def mergeable(self) -> tuple[Piece, ...]:
        """Small written neighbours of like size."""
        held = self._pieces.snapshot()
        rows_max = MERGED_BYTES_MAX // self._row_bytes
        small = [None if piece.ref is None or piece.ref.rows > rows_max else piece.ref.rows for piece in held]
        found = pieces_to_merge(small)
        if found is None:
            return ()
        return tuple(first_within(held[found.start : found.stop], MERGE_BYTES_MAX // self._row_bytes))

    def combine(self, frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:
        rows = last_rows(frames, self._key)
        return rows.filter(~pl.col(DELETED)) if oldest else rows

    def merged(self, old: Sequence[Piece], new: Piece) -> None:
        self._replace(old, [new])

    def rewrite(self) -> Rewrite | None:
        """As the seam says. The merger's thread also makes the copy: a task would stop for as long as the database writes what it has in memory."""
        self._advance_copy()
        found, self._rewrite = self._rewrite, None
        return found

    def _rewritten(self, old: Sequence[Piece], new: Sequence[Piece]) -> None:
        if self._replace(old, new):
            self._rewritten_rows = sum(_row_count(piece) for piece in new)
            # The copy that is kept may be of pieces that are no more.
            self._uncopied_rows += self._rewritten_rows

    def _replace(self, old: Sequence[Piece], new: Sequence[Piece]) -> bool:
        """Put `new` in place of `old`, also in what the copies are of."""
        with self._mutex:
            for copy in (self._copy, self._next_copy):
                if copy is None:
                    continue
                copy.known.replace(old, new)
                if copy.pieces is not None and copy.pieces.replace(old, new) and copy.name is not None:
                    name = self._name_of_copy(copy)
                    if name is not None and self._files.rename(copy.name, name):
                        copy.name = name
            return self._pieces.replace(old, new)

    # Copies of the database.

    def _keep_copy(self, pieces: Sequence[Piece]) -> None:
        """At a barrier: ask for a copy if enough has changed, or note that this is the barrier that the last one belongs to."""
        with self._mutex:
            copy = self._next_copy
            if copy is not None:
                if copy.made and copy.pieces is None:
                    copy.pieces = PieceList(pieces)
                return
            rows = sum(_row_count(piece) for piece in pieces)
            is_due = self._uncopied_rows >= max(self._keep_rows_min, rows // KEEP_SHARE)
            if is_due and self._opened.db is not None:
                self._copies += 1
                self._next_copy = _Copy(path=self._place() / f"copy-{self._copies}", known=PieceList(pieces))
                self._uncopied_rows = 0

    def _advance_copy(self) -> None:
        """Make the copy that a barrier asked for; once its pieces are written, keep it. Off the task's thread, which goes on to write."""
        copy = self._next_copy
        if copy is None:
            return
        if not copy.made:
            self._make(copy)
        elif copy.pieces is not None and all(piece.ref is not None for piece in copy.pieces.snapshot()):
            name = self._name_of_copy(copy)
            if name is None:
                # All of it was rewritten meanwhile.
                shutil.rmtree(copy.path, ignore_errors=True)
            else:
                self._files.keep(copy.path, name, instead_of=None if self._copy is None else self._copy.name)
                copy.name, self._copy = name, copy
            self._next_copy = None

    def _make(self, copy: _Copy) -> None:
        from rocksdict import Checkpoint  # noqa: PLC0415 - it comes with an extra

        shutil.rmtree(copy.path, ignore_errors=True)  # of a try that failed
        with self._indexes, self._refusals("copy"):
            # To make a copy, the database writes what it has in memory. The package holds the interpreter meanwhile; in `flush` it does not.
            for family in (self._opened.db, *list(self._opened.families.values())):
                family.flush(wait=True)
            Checkpoint(self._opened.db).create_checkpoint(str(copy.path))
        copy.made = True

    def _take_copy(self, pieces: Sequence[Piece]) -> int:
        """Begin with the copy of the most of these pieces, the first ones. Return how many need not be read; 0: there is no copy."""
        kept = self._files.kept()
        for count in range(len(pieces) if kept else 0, 0, -1):
            for known in range(count, 0, -1):
                name = self._name_of(pieces[:count], known)
                if name not in kept or not self._files.take(name, self._place() / "db"):
                    continue
                try:
                    self._open()
                except StorageError as error:
                    log.warning("a copy of a database could not be used", extra={"problem": str(error)})
                    shutil.rmtree(self._place() / "db", ignore_errors=True)
                    return 0
                return known
        return 0

    def _name_of_copy(self, copy: _Copy) -> str | None:
        """What this copy is kept as; None: it cannot be used."""
        both = zip(copy.known.snapshot(), copy.pieces.snapshot() if copy.pieces is not None else (), strict=False)
        known = len(list(takewhile(lambda pair: pair[0] is pair[1], both)))
        return self._name_of(copy.pieces.snapshot(), known) if copy.pieces is not None and known else None

    def _name_of(self, pieces: Sequence[Piece], known: int) -> str | None:
        """What a copy of these pieces is kept as that has the rows of the first ones; None: they are not all written."""
        refs = [piece.ref for piece in pieces]
        if not refs or None in refs:
            return None
        facts = (VERSION, self._key, self._schema.items(), [ref.digest for ref in refs if ref is not None], known)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _is_rewrite_due(self, pieces: Sequence[Piece]) -> bool:
        if self._opened.db is None or len(pieces) < 2:  # noqa: PLR2004 - one piece has each row once
            return False
        rows = sum(_row_count(piece) for piece in pieces)
        return rows > ROWS_RATIO_MAX * max(self._rewritten_rows, SMALLEST_ROWS)

    # The database.

    def _open(self) -> Any:
        """The database, opened when it is first needed: many operators are made that never take a row."""
        if self._opened.db is None:
            from rocksdict import Rdict  # noqa: PLC0415 - it comes with an extra

            path = str(self._place() / "db")
            options = self._cache.options()
            with self._refusals("open"):
                names = Rdict.list_cf(path, options) if Path(path, "CURRENT").exists() else []
                families = {name: options for name in names if name.startswith(_DUE)}
                self._opened.db = Rdict(path, options, families)
            for name in families:
                self._use_index(name.removeprefix(_DUE))
        return self._opened.db

    def _place(self) -> Path:
        if self._directory is None:
            self._directory = self._files.fresh(self, self._opened.close)
        return self._directory

    def _refusals(self, what: str) -> AbstractContextManager[None]:
        return refusals(f"{what} the database of a table in", self._directory or Path())

    def _write(self, batch: Any) -> None:
        with self._refusals("write"):
            self._opened.db.write(batch, self._cache.unlogged)

    def _some(self, items: Iterator[Entry], count: int) -> list[Entry]:
        with self._refusals("read"):
            return list(islice(items, count))

    def _batch(self) -> Any:
        from rocksdict import WriteBatch  # noqa: PLC0415 - it comes with an extra

        return WriteBatch(raw_mode=True)

    def _held(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The stored rows of some keys. They are asked for in order: neighbours lie in one block."""
        db = self._opened.db
        if db is None or not names:
            return [None] * len(names)
        order, ordered = _ordered_names(names)
        stored: list[bytes | None] = []
        with self._refusals("read"):
            for at in range(0, len(ordered), GET_KEYS):
                stored += db.get(ordered[at : at + GET_KEYS])
        held = np.empty(len(names), dtype=object)
        held[order.to_numpy()] = np.array([*stored, None], dtype=object)[:-1]
        found: list[bytes | None] = held.tolist()
        return found

    def _there(self, names: Sequence[bytes]) -> dict[bytes, bool]:
        """Whether each of some keys has a row."""
        found = {name: self._known.get(name) for name in names}
        unknown = [name for name, there in found.items() if there is None]
        for name, row in zip(unknown, self._held(unknown), strict=True):
            found[name] = row is not None
        return {name: bool(there) for name, there in found.items()}

    def _changed(self, rows: pl.DataFrame) -> None:
        self._changes.append(rows)
        size_bytes = int(rows.estimated_size())
        self._changes_bytes += size_bytes
        self._row_bytes = max(self._row_bytes, size_bytes // rows.height)
        self._uncopied_rows += rows.height
        if self._changes_bytes > CHANGES_BYTES_MAX:
            frame = last_rows(self._changes, self._key)
            self._changes, self._changes_bytes = [frame], int(frame.estimated_size())
            if 2 * self._changes_bytes > CHANGES_BYTES_MAX:
                self._pieces.append(SpilledPiece(frame, self._files))
                self._changes, self._changes_bytes = [], 0

    def _take(self, rows: pl.DataFrame) -> None:
        """Load rows of a piece. Many are written as a file in the order of their keys, which RocksDB takes in as it is."""
        from rocksdict import IngestExternalFileOptions, SstFileWriter  # noqa: PLC0415 - it comes with an extra

        self._open()
        deleted = rows.get_column(DELETED)
        pairs = dict.fromkeys(self._names.encode(rows.filter(deleted))) if deleted.any() else {}
        rows = rows.filter(~deleted) if pairs else rows
        names: list[bytes] = self._names.encode(rows)
        both = {**pairs, **dict(zip(names, self._rows.encode(rows), strict=True))}
        batch = self._batch()
        # Those of the copy that the table began with.
        self._add_to_indexes(batch, rows, names)
        in_file = len(both) > BATCH_ROWS_MAX
        target: Any = SstFileWriter(self._cache.options()) if in_file else batch
        with self._refusals("write"):
            path = str(self._place() / "load.sst")
            if in_file:
                target.open(path)
            for name in sorted(both):
                row = both[name]
                if row is None:
                    del target[name]
                else:
                    target[name] = row
            if in_file:
                target.finish()
                move = IngestExternalFileOptions()
                move.set_move_files(True)
                self._opened.db.ingest_external_file([path], move)
        self._write(batch)

    def _items(self) -> Iterator[tuple[bytes, bytes]]:
        """The keys and rows as they are now, whatever is written while they are read."""
        return iter(()) if self._opened.db is None else self._opened.db.items()

    def _chunks(self, items: Iterator[tuple[bytes, bytes]], rows_max: int) -> Iterator[pl.DataFrame]:
        """Rows, some at a time."""
        while part := self._some(items, 1):
            size = len(part[0][1])
            while len(part) < rows_max and size < CHUNK_BYTES:
                more = self._some(items, max(1, min(4096, rows_max, CHUNK_BYTES // (size // len(part) + 1))))
                if not more:
                    break
                part += more
                size += sum(len(row) for _, row in more)
            names, rows = zip(*part, strict=True)
            yield self._names.decode(names).hstack(self._rows.decode(rows)).select(self._columns)

    def _runs(self, items: Iterator[tuple[bytes, bytes]]) -> Generator[pl.DataFrame]:
        """Rows as pieces have them, in frames for one run each. On the merger's thread, which lets the task's go first."""
        some: list[pl.DataFrame] = []
        size = 0
        for rows in self._chunks(items, REWRITE_ROWS):
            time.sleep(YIELD_S)
            some.append(rows.with_columns(pl.lit(value=False).alias(DELETED)))
            size += int(rows.estimated_size())
            if size > RUN_BYTES:
                yield pl.concat(some, rechunk=True)
                some, size = [], 0
        if some:
            yield pl.concat(some, rechunk=True)

    # The index by a column.

    def _index(self, column: str) -> Any:
        """The index by this column, which is made when it is first asked for."""
        if column not in self._opened.families:
            with self._indexes:
                with self._refusals("write"):
                    self._opened.db.create_column_family(_DUE + column, self._cache.options())
                self._use_index(column)
                for rows in self._chunks(self._items(), CHUNK_ROWS):
                    batch = self._batch()
                    self._add_to_indexes(batch, rows, self._names.encode(rows))
                    self._write(batch)
        return self._opened.families[column]

    def _add_to_indexes(self, batch: Any, rows: pl.DataFrame, names: Sequence[bytes]) -> None:
        for column, handle in self._opened.handles.items():
            for entry in _entries(rows.get_column(column), names):
                batch.put(entry, b"", handle)

    def _use_index(self, column: str) -> None:
        self._opened.families[column] = self._opened.db.get_column_family(_DUE + column)
        self._opened.handles[column] = self._opened.db.get_column_family_handle(_DUE + column)

    def _current(self, column: str, entries: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """The values and keys of those entries whose row has the value still; the others are dropped. Lazy: reads some at a time."""
        entries = iter(entries)
        handle = self._opened.handles[column]
        some = 64
        while part := self._some(entries, some):
            some = min(4 * some, CHUNK_ROWS)
            values = _values_of(part)
            held = self._held([entry[8:] for entry in part])
            rows = self._rows.decode([row for row in held if row is not None])
            now = iter(rows.get_column(column).to_list())
            stale = []
            for entry, value, row in zip(part, values, held, strict=True):
                if row is not None and next(now) == value:
                    yield value, entry[8:]
                else:
                    stale.append(entry)
            batch = self._batch()
            for entry in stale:
                batch.delete(entry, handle)
            self._write(batch)


def _row_count(piece: Piece) -> int:
    return 0 if piece.ref is None else piece.ref.rows


def _ordered_names(names: Sequence[bytes]) -> tuple[pl.Series, list[bytes]]:
    """The places of names in their order, equal ones in theirs, and the names in it."""
    column = pl.Series("name", names, dtype=pl.Binary)
    order = column.to_frame().select(pl.arg_sort_by("name", maintain_order=True)).to_series()
    return order, column.gather(order).to_list()


def _ordered(value: int) -> bytes:
    """Eight bytes that are in the order of the numbers."""
    return (value + (1 << 63)).to_bytes(8, "big")


def _entries(values: pl.Series, names: Sequence[bytes]) -> Iterator[bytes]:
    """The entries of an index for these rows. A null has none."""
    numbers = values.fill_null(0).to_numpy().astype(np.int64).view(np.uint64) ^ _SIGN
    heads = numbers.astype(">u8").view("V8").tolist()
    return (head + name for head, name, there in zip(heads, names, values.is_not_null(), strict=True) if there)


def _values_of(entries: Sequence[bytes]) -> list[int]:
    numbers = np.frombuffer(b"".join([entry[:8] for entry in entries]), dtype=">u8").astype(np.uint64) ^ _SIGN
    values: list[int] = numbers.view(np.int64).tolist()
    return values
