"""The storage of the hub's log, in one SQLite file. All SQL of the hub is here, in `log_reader` and in `log_writer`, on `log_schema`.

`commits` and `retention` work with the `LogReader` or `LogWriter` that they are given, and see no database.

Invariants: a transaction becomes visible and durable as a whole or not at all; a snapshot shows whole transactions only.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from fordstone.errors import StorageError
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_schema import (
    BUSY_MS,
    FULL,
    PAGE_BYTES,
    WAL_PAGES,
    StoreFailedError,
    describe_failure,
    open_connection,
    open_for_writing,
    set_up,
)
from fordstone.hub.store.log_writer import LogWriter
from fordstone.hub.store.reserve import Reserve

LOG_NAME: Final = "log.sqlite"
"""The file in a hub's data directory."""


class SqliteStore:
    """One file: one connection writes, a pool of connections reads. The lock of the hub's directory keeps other hubs away."""

    def __init__(
        self,
        path: Path,
        *,
        reserve: Reserve | None = None,
        open_file: Callable[[Path], sqlite3.Connection] | None = None,
    ) -> None:
        """Open the file, or make it. `StorageError` if that fails, `ConfigError` if another version has written it.

        The reserve is given up when the disk is full. `open_file`: opens a connection; simulations have a disk of their own.
        """
        self.path = path
        self._reserve = reserve
        self._open_file = open_file or open_connection
        try:
            self._db = open_for_writing(path, self._open_file, wal_pages=self._wal_pages())
        except StorageError:
            if reserve is None or not reserve.held:
                raise
            reserve.give_up()
            self._db = open_for_writing(path, self._open_file, wal_pages=self._wal_pages())
        self._mutex = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LogWriter]:
        """Open a transaction, which is synced when the context ends. If it raises, nothing of it is kept.

        Called by one thread, one transaction at a time. `StoreFailedError` if the database fails.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield LogWriter(self._db)
            self._db.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self._make_room(error)
            if isinstance(error, sqlite3.Error):
                raise StoreFailedError(describe_failure(error)) from error
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[LogReader]:
        """Open a consistent view, on a connection that no other thread has. Called by any thread; blocks."""
        with self._mutex:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = set_up(self._open_file(self.path))
        try:
            connection.execute("BEGIN")
            try:
                yield LogReader(connection)
            finally:
                connection.execute("ROLLBACK")
        finally:
            with self._mutex:
                keep = not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def empty_wal(self) -> bool:
        """Copy the write-ahead log into the file, and cut it to nothing; False: readers still need a part of it.

        Called by the writing thread, between transactions. Waits for no reader.
        """
        try:
            self._db.execute("PRAGMA busy_timeout = 0")
            try:
                return not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        except sqlite3.Error as error:
            raise StoreFailedError(describe_failure(error)) from error

    def shrink(self, pages_max: int) -> None:
        """Cut free pages off the file, durably. Called by the writing thread, between transactions."""
        try:
            # Every step of the statement frees one page, and `execute` would take one step only.
            self._db.executescript(f"PRAGMA incremental_vacuum({pages_max})")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self._make_room(error)
            raise StoreFailedError(describe_failure(error)) from error

    def has_reserve(self) -> bool:
        """Whether the disk had space for all writes so far, or has it again. Called by any thread."""
        return self._reserve is None or self._reserve.held

    def restore_reserve(self) -> bool:
        """Hold the reserve again if the disk has space for it. Called by the writing thread."""
        return self._reserve is None or self._reserve.take()

    def _make_room(self, error: BaseException) -> None:
        """Give the reserve up if the disk is full, and use it to empty the write-ahead log."""
        cause = error.__cause__ if isinstance(error, StoreFailedError) else error
        full = isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", None) in FULL
        if full and self._reserve is not None and self._reserve.held:
            self._reserve.give_up()
            with contextlib.suppress(StoreFailedError):
                self.empty_wal()

    def _wal_pages(self) -> int:
        """On a small disk the write-ahead log, and what it adds to the file, must fit into the reserve."""
        if self._reserve is None:
            return WAL_PAGES
        return max(1, min(WAL_PAGES, self._reserve.size_bytes // 2 // PAGE_BYTES))

    def size_bytes(self) -> int:
        """Return the size of the file and its write-ahead log."""
        return _file_size(self.path) + _file_size(self.path.with_name(f"{self.path.name}-wal"))

    def close(self) -> None:
        """Close all connections; one that is still reading is closed when it has ended."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in (self._db, *idle):
            connection.close()


def _file_size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
