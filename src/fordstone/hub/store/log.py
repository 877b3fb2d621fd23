"""The hub's log: one SQLite file, one thread that writes, many that read.

What is written and what is answered is the work of `commits`, `streams`, `control`, `node_list` and `retention`: they
hand in jobs. Here is only how a job becomes durable.

Invariants: a job's outcome is told only after the transaction that it was part of is synced. All jobs that wait together
go into one transaction, each in a savepoint of its own: one sync for all of them, and one that is refused changes
nothing. When the transaction itself fails, all of them fail and nothing has happened. Readers see whole transactions only.

The tables of the hub's log, and the making and opening of the file they are in.

Invariants: a file of a newer version is refused, never changed. `blobs.refs` is how often the rows of the other tables
name a blob; everything that adds or removes such a row changes it in the same transaction. `blobs.small`: its bytes are in
`small_blobs` rather than in the store.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.refused import Refused
from fordstone.storage.failpoint import Failpoints, NoFailpoints

SCHEMA_VERSION: Final = 1
BUSY_MS: Final = 10_000
WAL_BYTES_KEPT: Final = 64 << 20
WAL_PAGES: Final = 4_000
"""After so many pages what was written is carried over into the file itself: rarely, because a commit waits for it."""
CACHE_BYTES: Final = 64 << 20

SCHEMA: Final = """
CREATE TABLE counter (only INTEGER PRIMARY KEY CHECK (only = 1), seq INTEGER NOT NULL);
INSERT INTO counter VALUES (1, 0);

CREATE TABLE nodes (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  node TEXT NOT NULL,
  holder TEXT,
  hub_generation INTEGER,
  local_generation INTEGER,
  head INTEGER NOT NULL DEFAULT 0,
  head_digest TEXT NOT NULL DEFAULT '',
  seen_us INTEGER NOT NULL,
  committed_us INTEGER,
  controls BLOB NOT NULL DEFAULT '{}',
  health BLOB,
  UNIQUE (pipeline, node)
);

CREATE TABLE entries (
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  epoch INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  digest TEXT NOT NULL,
  hub_generation INTEGER NOT NULL,
  local_generation INTEGER NOT NULL,
  created_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  segments INTEGER NOT NULL,
  PRIMARY KEY (node_id, epoch)
) WITHOUT ROWID;
CREATE INDEX entries_by_seq ON entries (seq);
CREATE INDEX entries_read ON entries (node_id, epoch) WHERE segments = 0;

CREATE TABLE streams (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  stream TEXT NOT NULL,
  UNIQUE (pipeline, stream)
);

CREATE TABLE stream_nodes (
  stream_id INTEGER NOT NULL REFERENCES streams (id),
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  epochs INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  watermark_us INTEGER NOT NULL,
  PRIMARY KEY (stream_id, node_id)
) WITHOUT ROWID;

CREATE TABLE segments (
  stream_id INTEGER NOT NULL REFERENCES streams (id),
  seq INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  runs BLOB NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  watermark_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  PRIMARY KEY (stream_id, seq, epoch)
) WITHOUT ROWID;
CREATE INDEX segments_by_node ON segments (stream_id, node_id, epoch);

CREATE TABLE checkpoints (
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  epoch INTEGER NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (node_id, epoch)
);

CREATE TABLE consumers (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  consumer TEXT NOT NULL,
  seen_us INTEGER NOT NULL,
  UNIQUE (pipeline, consumer)
);
CREATE TABLE consumer_streams (
  consumer_id INTEGER NOT NULL REFERENCES consumers (id) ON DELETE CASCADE,
  stream TEXT NOT NULL,
  PRIMARY KEY (consumer_id, stream)
) WITHOUT ROWID;
CREATE TABLE passed (
  consumer_id INTEGER NOT NULL REFERENCES consumers (id) ON DELETE CASCADE,
  stream TEXT NOT NULL,
  node TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  PRIMARY KEY (consumer_id, stream, node)
) WITHOUT ROWID;

CREATE TABLE controls (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  control TEXT NOT NULL,
  newest INTEGER NOT NULL DEFAULT 0,
  UNIQUE (pipeline, control)
);
CREATE TABLE publishers (
  control_id INTEGER NOT NULL REFERENCES controls (id),
  owner TEXT NOT NULL,
  generation INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (control_id, owner)
) WITHOUT ROWID;
CREATE TABLE versions (
  control_id INTEGER NOT NULL REFERENCES controls (id),
  version INTEGER NOT NULL,
  owner TEXT NOT NULL,
  batch INTEGER NOT NULL,
  snapshot INTEGER NOT NULL,
  digest TEXT NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (control_id, version)
) WITHOUT ROWID;
CREATE UNIQUE INDEX versions_by_batch ON versions (control_id, owner, batch);

CREATE TABLE blobs (
  digest TEXT PRIMARY KEY,
  size_bytes INTEGER NOT NULL,
  stored_us INTEGER NOT NULL,
  refs INTEGER NOT NULL DEFAULT 0 CHECK (refs >= 0),
  small INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX blobs_unnamed ON blobs (stored_us) WHERE refs = 0;
CREATE TABLE small_blobs (
  digest TEXT PRIMARY KEY REFERENCES blobs (digest) ON DELETE CASCADE,
  data BLOB NOT NULL
);
"""


def connect(path: Path, *, writes: bool) -> sqlite3.Connection:
    """Open the log. Nothing is answered that is not on the disk: every commit is synced."""
    connection = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    if writes:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute(f"PRAGMA cache_size = -{CACHE_BYTES >> 10}")
        connection.execute("PRAGMA foreign_keys = ON")
    else:
        connection.execute("PRAGMA query_only = ON")
    return connection


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or make the log, and refuse one that a newer version has made."""
    try:
        connection = connect(path, writes=True)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
    except sqlite3.Error as error:
        raise StorageError(
            f"the hub's log {path} cannot be opened: {error}. Check the disk and the directory's rights."
        ) from error
    if found > SCHEMA_VERSION:
        connection.close()
        raise ConfigError(
            f"the hub's log {path} has version {found}; this program knows version {SCHEMA_VERSION} and leaves it alone.\n"
            "Install the newer fordstone that wrote it."
        )
    return connection


JOBS_A_TRANSACTION_MAX: Final = 256
WAITING_JOBS_MAX: Final = 10_000
"""More than that are refused: whoever asks comes back later."""

NOTED_BLOBS: Final = 1_000
"""After so many blobs that no transaction has written down there is one."""
_events = logging.getLogger(__name__)

T = TypeVar("T")
Key: TypeAlias = tuple[str, str, str]
"""What somebody may wait for: ("stream" or "control", pipeline, name)."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """What a job works with: the open transaction, the time, and a place to say what has changed."""

    db: sqlite3.Connection
    now_us: int
    changed: set[Key] = field(default_factory=set)
    epochs: int = 0
    """Committed in this transaction, for failpoints and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    work: Callable[[Turn], Any]
    outcome: Future[Any]


class HubLog:
    """Called from any thread. `close` waits for what was handed in; nothing is accepted after it."""

    def __init__(self, path: Path, *, clock_us: Callable[[], int], failpoints: Failpoints | None = None) -> None:
        self.path = path
        self._clock_us = clock_us
        self._failpoints = failpoints or NoFailpoints()
        self._db = open_for_writing(path)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._closed = False
        self._idle: list[sqlite3.Connection] = []
        self._arrived: dict[str, tuple[int, int]] = {}
        self._listeners: list[Callable[[frozenset[Key]], None]] = []
        self._thread = threading.Thread(target=self._write_all, name="hub-log", daemon=True)
        self._thread.start()

    def now_us(self) -> int:
        """The hub's clock."""
        return self._clock_us()

    def listen(self, listener: Callable[[frozenset[Key]], None]) -> None:
        """Call `listener` on the writing thread with what has changed, after each transaction that changed something."""
        with self._mutex:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[frozenset[Key]], None]) -> None:
        """Call it no more."""
        with self._mutex:
            self._listeners.remove(listener)

    def write(self, work: Callable[[Turn], T]) -> Future[T]:
        """Hand a job in. The future ends when it is durable, or with `Refused`."""
        outcome: Future[T] = Future()
        with self._mutex:
            if self._closed or self._jobs.qsize() >= WAITING_JOBS_MAX:
                why = "is stopping" if self._closed else "has too much to write"
                outcome.set_exception(Refused("failed", f"the hub {why}. Try again later.", status=503))
            else:
                self._jobs.put(_Job(work=work, outcome=outcome))
        return outcome

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Ask on a connection of this thread's own, in one snapshot. Blocks: not for the event loop."""
        with self._reading() as db:
            db.execute("BEGIN")
            try:
                return query(db)
            finally:
                db.execute("ROLLBACK")

    def note_blob(self, digest: str, size_bytes: int) -> None:
        """A blob has become durable. Written down with the next transaction; if the hub dies before, it is uploaded again."""
        with self._mutex:
            self._arrived[digest] = (size_bytes, self._clock_us())
            if len(self._arrived) % NOTED_BLOBS == 0 and not self._closed:
                self._jobs.put(_Job(work=_nothing, outcome=Future()))

    def arrived(self, digests: Iterable[str]) -> dict[str, int]:
        """The sizes of those of these blobs that are durable and not yet written down."""
        with self._mutex:
            return {digest: self._arrived[digest][0] for digest in digests if digest in self._arrived}

    def close(self) -> None:
        """Write what waits, then stop. May be called twice."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()
        with self._mutex:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(self.path, writes=False)
        try:
            yield connection
        finally:
            with self._mutex:
                keep = not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _write_all(self) -> None:
        going = True
        while going:
            first = self._jobs.get()
            jobs = [] if first is None else [first]
            going = first is not None
            while going and len(jobs) < JOBS_A_TRANSACTION_MAX:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is None:
                    going = False
                else:
                    jobs.append(job)
            self._transact_surely([job for job in jobs if job.outcome.set_running_or_notify_cancel()])
        self._db.close()

    def _transact_surely(self, jobs: list[_Job]) -> None:
        """Whatever happens, everybody gets an answer and the thread goes on."""
        try:
            self._transact(jobs)
        except Exception as error:  # noqa: BLE001 - a bug; the thread must not die of it, and whoever asked is told
            _events.exception("hub log failed")
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            for job in jobs:
                if not job.outcome.done():
                    job.outcome.set_exception(error)

    def _transact(self, jobs: list[_Job]) -> None:
        """Carry jobs out in one transaction, then tell each its outcome."""
        turn = Turn(db=self._db, now_us=self._clock_us())
        with self._mutex:
            arrived = dict(self._arrived)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            _write_down(self._db, arrived)
            outcomes = [_carried_out(turn, job) for job in jobs]
            self._hit(turn, "hub.before-commit")
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            for job in jobs:
                job.outcome.set_exception(
                    Refused(
                        "storage",
                        f"the hub could not write its log: {_why(error)}. Nothing of this was kept; try again later.",
                    )
                )
            return
        self._hit(turn, "hub.committed")
        with self._mutex:
            for digest, noted in arrived.items():
                if self._arrived.get(digest) == noted:
                    del self._arrived[digest]
            listeners = list(self._listeners)
        if turn.changed:
            for listener in listeners:
                listener(frozenset(turn.changed))
        self._hit(turn, "hub.before-answer")
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, _Failed):
                job.outcome.set_exception(outcome.error)
            else:
                job.outcome.set_result(outcome)

    def _hit(self, turn: Turn, name: str) -> None:
        if turn.epochs:
            self._failpoints.hit(name)


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


def _carried_out(turn: Turn, job: _Job) -> Any:
    """The job's result, or why it failed; then nothing of it stays. An error of the file itself ends the transaction."""
    changed, epochs = set(turn.changed), turn.epochs
    turn.db.execute("SAVEPOINT job")
    try:
        result = job.work(turn)
    except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
        if not isinstance(error, sqlite3.IntegrityError):
            raise
        failure: Exception = error
    except Exception as error:  # noqa: BLE001 - whoever handed the job in gets it; the others' jobs go on
        failure = error
    else:
        turn.db.execute("RELEASE job")
        return result
    turn.db.execute("ROLLBACK TO job")
    turn.db.execute("RELEASE job")
    turn.changed, turn.epochs = changed, epochs
    return _Failed(failure)


def _why(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return "its disk is full. Make room there, or let consumers read on"
    return str(error)


def _nothing(turn: Turn) -> None:
    """A job for the sake of the transaction."""


def _write_down(db: sqlite3.Connection, arrived: dict[str, tuple[int, int]]) -> None:
    db.executemany(
        "INSERT INTO blobs (digest, size_bytes, stored_us) VALUES (?, ?, ?) "
        "ON CONFLICT (digest) DO UPDATE SET size_bytes = excluded.size_bytes, stored_us = excluded.stored_us",
        [(digest, size, stored_us) for digest, (size, stored_us) in arrived.items()],
    )
