"""The hub's log: group commit over a `SqliteStore`. One thread writes, many read.

The handlers and `retention` hand in jobs; this module makes them durable.

Invariants: the outcome of a job is given only after the transaction that it was part of is synced. All jobs that wait
share one transaction and one sync, each in a savepoint of its own, so that one that is rejected changes nothing. When the
transaction itself fails, all of its jobs fail and nothing is kept. Readers see whole transactions only.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from fordstone.errors import ConfigError
from fordstone.hub.messages import Rejection
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_schema import StoreFailedError
from fordstone.hub.store.log_writer import LogWriter
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.storage.failpoint import Failpoints, NoFailpoints
from fordstone.structs import prepare_structs

JOBS_PER_TRANSACTION_MAX: Final = 256
WAITING_JOBS_MAX: Final = 10_000
"""Maximum number of jobs in the queue; more are rejected, and the client tries again later."""
UNRECORDED_BLOBS_MAX: Final = 1_000
"""Number of durable blobs that are not recorded yet at which a transaction is started for them."""
_events = logging.getLogger(__name__)

T = TypeVar("T")
Key: TypeAlias = tuple[str, str, str]
"""What a long poll waits for: ("stream" or "control", pipeline, name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """Maximum numbers of what clients may add to the log by name, so that no token fills it."""

    pipelines_per_node: int = 100
    """Pipelines that one node, and so one token of a node, may have."""
    nodes_per_pipeline: int = 10_000
    streams_per_pipeline: int = 1_000
    """One node may have a fifth of them, so that no node takes them all."""
    controls_per_pipeline: int = 1_000
    controls: int = 10_000
    """Control tables of all pipelines."""
    consumers_per_pipeline: int = 100
    consumers: int = 10_000
    """Consumers of all pipelines."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"the limit {name} must be at least 1, not {getattr(self, name)}.")

    @property
    def streams_per_node(self) -> int:
        return max(1, self.streams_per_pipeline // 5)


@dataclass(slots=True, kw_only=True)
class Transaction:
    """What a job works with."""

    log: LogWriter
    now_us: int
    ran_us: int
    """The total time that the hub has run: unlike `now_us`, it is never set. Ages are judged by it."""
    limits: LogLimits = field(default_factory=LogLimits)
    changed: set[Key] = field(default_factory=set)
    """Filled in by jobs: what listeners are called with."""
    epochs: int = 0
    """Epochs committed in this transaction, for failpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    work: Callable[[Transaction], Any]
    outcome: Future[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upkeep:
    """Work on the file itself, which no transaction can do."""

    work: Callable[[SqliteStore], Any]
    outcome: Future[Any]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


class HubLog:
    """Called from any thread. `close` waits for the jobs that were handed in; none is accepted after it."""

    def __init__(
        self,
        store: SqliteStore,
        *,
        clock_us: Callable[[], int],
        monotonic_us: Callable[[], int] | None = None,
        limits: LogLimits | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:
        """Take the store over: `close` closes it. `clock_us` may be set while the hub runs, `monotonic_us` never is.

        Without `monotonic_us`, `clock_us` is never set.
        """
        self._store = store
        self._monotonic_us = monotonic_us or clock_us
        self._began_us = self._monotonic_us()
        self._limits = limits or LogLimits()
        self._clock_us = clock_us
        self._failpoints = failpoints or NoFailpoints()
        self._jobs: queue.SimpleQueue[_Job | _Upkeep | None] = queue.SimpleQueue()
        prepare_structs()
        self._mutex = threading.Lock()
        self._closed = False
        self._unrecorded: dict[str, tuple[int, int]] = {}
        self._listeners: list[Callable[[frozenset[Key]], None]] = []
        with store.snapshot() as log:
            self._ran_before_us = log.ran_us()
        self._thread = threading.Thread(target=self._write_all, name="hub-log", daemon=True)
        self._thread.start()

    def now_us(self) -> int:
        return self._clock_us()

    def ran_us(self) -> int:
        """Return the total time that the hub has run. Every transaction saves it, so no time in the log is later than it."""
        return self._ran_before_us + max(0, self._monotonic_us() - self._began_us)

    def listen(self, listener: Callable[[frozenset[Key]], None]) -> None:
        """Call `listener` on the writing thread with what has changed, after each transaction that changed something."""
        with self._mutex:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[frozenset[Key]], None]) -> None:
        with self._mutex:
            self._listeners.remove(listener)

    def write(self, work: Callable[[Transaction], T]) -> Future[T]:
        """Hand in a job. The future ends when the job is durable, or with `Rejection`."""
        outcome: Future[T] = Future()
        self._hand_in(_Job(work=work, outcome=outcome))
        return outcome

    def shrink(self, pages_max: int) -> Future[None]:
        """Cut free pages off the file, between two transactions."""
        return self._upkeep(lambda store: store.shrink(pages_max))

    def empty_wal(self) -> Future[bool]:
        """Cut the write-ahead log to nothing, between two transactions; False: readers still need a part of it."""
        return self._upkeep(SqliteStore.empty_wal)

    def restore_reserve(self) -> Future[bool]:
        """Hold the reserve again if the disk has space for it, between two transactions; return whether it is held."""
        return self._upkeep(SqliteStore.restore_reserve)

    def has_reserve(self) -> bool:
        """Whether the disk had space for all writes so far, or has it again."""
        return self._store.has_reserve()

    def read(self, query: Callable[[LogReader], T]) -> T:
        """Run a query in one snapshot. Blocks: not for the event loop."""
        with self._store.snapshot() as log:
            return query(log)

    def record_blob(self, digest: str, size_bytes: int) -> None:
        """Record a durable blob with the next transaction. If the hub dies before that, the blob is uploaded again."""
        with self._mutex:
            self._unrecorded[digest] = (size_bytes, self.ran_us())
            if len(self._unrecorded) % UNRECORDED_BLOBS_MAX == 0 and not self._closed:
                self._jobs.put(_Job(work=lambda tx: None, outcome=Future()))  # noqa: ARG005 - a job to have a transaction

    def blob_sizes(self, digests: Iterable[str]) -> dict[str, int]:
        """Return the sizes of those blobs that are durable, recorded or not. Blocks."""
        wanted = tuple(digests)
        with self._mutex:
            unrecorded = {digest: self._unrecorded[digest][0] for digest in wanted if digest in self._unrecorded}
        return self.read(lambda log: log.blob_sizes(wanted)) | unrecorded

    def is_damaged(self, digest: str) -> bool:
        """Whether a blob was found to be damaged, and not stored again since. Blocks."""
        with self._mutex:
            if digest in self._unrecorded:
                return False
        known = self.read(lambda log: log.blob_at(digest))
        return known is not None and known.damaged

    def size_bytes(self) -> int:
        return self._store.size_bytes()

    def close(self) -> None:
        """Write what waits, then stop. May be called twice."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _upkeep(self, work: Callable[[SqliteStore], T]) -> Future[T]:
        outcome: Future[T] = Future()
        self._hand_in(_Upkeep(work=work, outcome=outcome))
        return outcome

    def _hand_in(self, job: _Job | _Upkeep) -> None:
        with self._mutex:
            if self._closed or self._jobs.qsize() >= WAITING_JOBS_MAX:
                why = "is stopping" if self._closed else "has too much to write"
                job.outcome.set_exception(Rejection("failed", f"the hub {why}. Try again later.", status=503))
            else:
                self._jobs.put(job)

    def _write_all(self) -> None:
        while self._write_next():
            pass
        self._store.close()

    def _write_next(self) -> bool:
        """Wait for jobs, and carry them out; False: these were the last. Between two calls no job is held in memory."""
        first = self._jobs.get()
        jobs = [] if first is None else [first]
        running = first is not None
        while running and len(jobs) < JOBS_PER_TRANSACTION_MAX:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                running = False
            else:
                jobs.append(job)
        wanted = [job for job in jobs if job.outcome.set_running_or_notify_cancel()]
        self._transact([job for job in wanted if isinstance(job, _Job)])
        for job in wanted:
            if isinstance(job, _Upkeep):
                self._maintain(job)
        return running

    def _maintain(self, job: _Upkeep) -> None:
        """Carry out work on the file. Whatever happens, the thread continues."""
        try:
            job.outcome.set_result(job.work(self._store))
        except StoreFailedError as error:
            job.outcome.set_exception(Rejection("storage", f"the hub could not change its log's file: {error}."))
        except Exception as error:  # noqa: BLE001 - a bug: the thread must survive it, and the caller gets it
            _events.exception("hub log failed")
            job.outcome.set_exception(error)

    def _transact(self, jobs: list[_Job]) -> None:
        """Carry jobs out in one transaction, then give each its outcome. Whatever happens, the thread continues."""
        if not jobs and not self._unrecorded:
            return
        try:
            outcomes = self._commit(jobs)
        except StoreFailedError as error:
            rejected = f"the hub could not write its log: {error}. Nothing of this was kept; try again later."
            outcomes = [_Failed(Rejection("storage", rejected)) for _ in jobs]
        except Exception as error:  # noqa: BLE001 - a bug: the thread must survive it, and every client gets an answer
            _events.exception("hub log failed")
            outcomes = [_Failed(error) for _ in jobs]
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, _Failed):
                job.outcome.set_exception(outcome.error)
            else:
                job.outcome.set_result(outcome)

    def _commit(self, jobs: list[_Job]) -> list[Any]:
        with self._mutex:
            recorded = dict(self._unrecorded)
        with self._store.transaction() as log:
            tx = Transaction(log=log, now_us=self._clock_us(), ran_us=self.ran_us(), limits=self._limits)
            log.save_ran(tx.ran_us)
            log.record_blobs(recorded)
            outcomes = [_carry_out(tx, job) for job in jobs]
            self._hit(tx, "hub.before-commit")
        self._hit(tx, "hub.committed")
        with self._mutex:
            for digest, stored in recorded.items():
                if self._unrecorded.get(digest) == stored:
                    del self._unrecorded[digest]
            listeners = list(self._listeners)
        if tx.changed:
            for listener in listeners:
                listener(frozenset(tx.changed))
        self._hit(tx, "hub.before-answer")
        return outcomes

    def _hit(self, tx: Transaction, name: str) -> None:
        if tx.epochs:
            self._failpoints.hit(name)


def _carry_out(tx: Transaction, job: _Job) -> Any:
    """Return the job's result, or why it failed: then nothing of it is kept. A failure of the store ends the transaction."""
    changed, epochs = set(tx.changed), tx.epochs
    try:
        with tx.log.savepoint():
            return job.work(tx)
    except StoreFailedError:
        raise
    except Rejection as rejection:
        tx.changed, tx.epochs = changed, epochs
        # This frame has the job, and the job's outcome will have the exception: a cycle, with all that was to be written.
        return _Failed(rejection.with_traceback(None))
    except Exception as error:  # noqa: BLE001 - the client that handed the job in gets it; the other jobs continue
        tx.changed, tx.epochs = changed, epochs
        return _Failed(error)
