"""Fetch control tables from the hub into the node's own folders, beside the pipeline.

A fetcher asks with a long poll and stores each version durably (`connectors.control`). The pipeline reads only the
folder, so it never waits for the network. If versions are missing, or the hub's log has others (it was restored from a backup), the
hub's whole table is turned into changes against the local copy, and they are one version.

Invariants: each stored version holds the changes since the version before it; a version that does not fit the plan is
rejected, and the table stays as it is; nothing is stored after `stop` has returned. Failures are retried, and reported in
`problem`.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec
import polars as pl

from fordstone.connectors.base import Source
from fordstone.connectors.control import PARTITION, ControlLog, ControlSource, changes_between
from fordstone.epochs.manifest import Manifest, PartitionCut
from fordstone.epochs.untrusted import decode_untrusted
from fordstone.errors import DamagedError, HubAwayError, HubError, StorageError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.publisher import apply_changes
from fordstone.hub.messages import NUMBER_MAX, ControlPage, ControlVersion, NodePosition
from fordstone.operators.base import DELETE, OP, UPSERT
from fordstone.plan import plan as p
from fordstone.protocol.chain import CHAIN_START
from fordstone.protocol.progress import Progress
from fordstone.protocol.retry import Backoff
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.failpoint import Failpoints, NoFailpoints

if TYPE_CHECKING:  # a node without a hub loads no HTTP client
    from fordstone.hub.client.client import HubClient

log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 25.0
"""Timeout of a long poll."""
FETCH_BACKOFF: Final = Backoff(first_us=200_000, max_us=30_000_000)
STOP_SECONDS: Final = 0.5
"""Timeout for a thread that waits for the hub. It ends later by itself, and stores nothing more."""


class _UnfitError(Exception):
    """A version at the hub cannot be stored here; the text says why."""


class _ReadTable(NamedTuple):
    """A table as it was read from the hub."""

    table: pl.DataFrame
    stands: int
    """The last version in it."""
    chain: str
    reached: int
    """The number up to which there is no other version."""


class ControlFetcher:
    """Keeps one folder up to date. One thread calls `step`; `stop` may come from another."""

    def __init__(
        self,
        hub: HubClient,
        table: ControlLog,
        *,
        pipeline: str,
        control: str,
        taken: PartitionCut | None = None,
        failpoints: Failpoints | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`taken`: the cut from which the pipeline resumes. `chance()`: a random number from 0 to 1, for the jitter of waits."""
        self.problem: str | None = None
        self.control = control
        self._hub = hub
        self._log = table
        self._pipeline = pipeline
        self._taken = 0 if taken is None else taken.position
        self._seen = NodePosition() if taken is None else NodePosition.of_identity(taken.identity)
        self._failpoints = failpoints or NoFailpoints()
        self._chance = chance
        self._failures = 0
        self._mutex = threading.Lock()
        self._stopped = False

    def step(self, *, wait_s: float = WAIT_SECONDS) -> float:
        """Ask the hub once, for about `wait_s` at most, and store new versions. Return the seconds to wait before the next call."""
        try:
            self._poll(wait_s)
        except FatalStorageError:
            raise
        except HubAwayError as error:
            return self._retry_later(str(error), error.retry_after_s)
        except (HubError, StorageError, DamagedError, _UnfitError) as error:
            return self._retry_later(str(error), None)
        self._failures, self.problem = 0, None
        return 0.0

    def stop(self) -> None:
        with self._mutex:
            self._stopped = True

    def _retry_later(self, problem: str, retry_after_s: float | None) -> float:
        if self.problem is None:
            log.warning("control table not fetched", extra={"control": self.control, "problem": problem})
        self.problem = f"control table {self.control}: {problem}"
        self._failures += 1
        return FETCH_BACKOFF.wait_s(self._failures, chance=self._chance(), retry_after_s=retry_after_s)

    def _poll(self, wait_s: float) -> None:
        if self._log.newest < self._taken:
            self._rebuild()
        page = self._page(self._log.newest, self._log.chain, wait_s=wait_s)
        if page.restart:
            self._replace(page)
        else:
            self._take(page)

    def _page(self, after: int, chain: str, *, wait_s: float = 0.0) -> ControlPage:
        return self._hub.control_page(self._pipeline, self.control, after=after, chain=chain, wait_s=wait_s)

    def _take(self, page: ControlPage) -> None:
        """Store versions in order. Those before a snapshot are skipped: rows see the table only at barriers."""
        versions = page.versions
        snapshots = [place for place, version in enumerate(versions) if version.snapshot]
        if snapshots:
            newest = versions[snapshots[-1]]
            try:
                rows = self._fetched(page, newest)
            except _UnfitError:
                # It is of another plan. The versions before it may fit, and then give the newest table for this plan.
                log.warning("snapshot of a control table unfit", extra={"control": self.control})
            else:
                self._store(newest.version, newest.chain, changes_between(self._log.table(), rows, self._log.keys))
                versions = versions[snapshots[-1] + 1 :]
        for version in versions:
            rows = self._fetched(page, version)
            if version.snapshot:
                rows = changes_between(self._log.table(), rows, self._log.keys)
            elif not version.follows(self._log.chain):
                raise _UnfitError(
                    f"the hub returned version {version.version} after version {self._log.newest}, and no snapshot in between."
                )
            self._store(version.version, version.chain, rows)

    def _replace(self, page: ControlPage) -> None:
        """Store what turns the table here into the hub's, as one version: the hub's log does not have the versions that were taken."""
        had, reason = self._log.newest, page.restart
        read = self._read_table(page)
        if read is None or read.reached <= had:
            raise _UnfitError(f"{reason}, and the versions that the hub returned instead are not the whole table.")
        changes = changes_between(self._log.table(), read.table, self._log.keys)
        self._store(read.reached, read.chain, changes)
        log.warning(
            "control table replaced by the hub's",
            extra={
                "control": self.control,
                "had": had,
                "version": read.reached,
                "rows": changes.height,
                "problem": reason,
            },
        )

    def _read_table(self, page: ControlPage, until: int = NUMBER_MAX) -> _ReadTable | None:
        """Read the table as of a version, from a page of it that begins with the first version or a snapshot; None: versions are missing."""
        # `hub.client.publisher._table` reads pages too, but a version with other columns starts its table over. Here it is an error: the
        # node must not take a part of a table.
        table, stands, chain = pl.DataFrame(schema=self._log.columns), 0, CHAIN_START
        while True:
            for version in page.versions:
                if version.version > until:
                    return _ReadTable(table, stands, chain, until) if version.follows(chain) else None
                if not version.snapshot and not version.follows(chain):
                    return None
                table = table.clear() if version.snapshot else table
                table = apply_changes(table, [self._fetched(page, version)], self._log.keys)
                stands, chain = version.version, version.chain
            if not page.versions or stands >= page.newest:
                return _ReadTable(table, stands, chain, page.reached)
            page = self._page(stands, chain)
            if page.restart:
                return None

    def _fetched(self, page: ControlPage, version: ControlVersion) -> pl.DataFrame:
        """Return the rows of a version, one row per key, in the columns of the table."""
        rows = decode_untrusted(self._hub.read_blob(version.blob, page.blobs), version.blob)
        self._failpoints.hit("control.fetched")
        if dict(rows.schema) != dict(self._log.columns):
            wanted, given = (
                ", ".join(f"{name} {kind}" for name, kind in schema.items() if name != OP)
                for schema in (self._log.columns, rows.schema)
            )
            raise _UnfitError(
                f"version {version.version} has other columns ({given}) than this node's plan ({wanted}). The table stays as it was. "
                "Run the same pipeline on the node and at the center."
            )
        if not rows.get_column(OP).is_in([UPSERT, DELETE]).fill_null(value=False).all():
            raise _UnfitError(f"version {version.version} has rows that are neither upserts nor deletes.")
        keys = list(self._log.keys)
        return rows.select(list(self._log.columns)).drop_nulls(keys).unique(keys, keep="last", maintain_order=True)

    def _store(self, version: int, chain: str, changes: pl.DataFrame) -> None:
        with self._mutex:
            if self._stopped:
                return
            self._log.add(version, changes, chain=chain)
        self._failpoints.hit("control.stored")
        log.info("control version stored", extra={"control": self.control, "version": version, "rows": changes.height})

    def _rebuild(self) -> None:
        """Rebuild the table from the hub's versions.

        The folder is older than the checkpoint: it was lost or truncated, or the checkpoint is another machine's.
        """
        seen = self._page(self._seen.epoch, self._seen.chain)
        read = None if seen.restart else self._read_table(self._page(0, CHAIN_START), until=self._taken)
        if read is None or (read.stands < self._taken and not self._seen.epoch):
            why = seen.restart or "the hub no longer has the versions between"
            raise _UnfitError(
                f"the pipeline has taken version {self._taken}, the folder {self._log.folder} ends with {self._log.newest}, and {why}. The "
                "table stays as it was. Restore the folder, or start this node over with an empty state directory."
            )
        with self._mutex:
            if self._stopped:
                return
            self._log.begin_at(self._taken, read.table, chain=read.chain)
        log.warning("control table rebuilt", extra={"control": self.control, "version": self._taken})


class ControlFetching:
    """The fetchers of a run, each on its own thread: a long poll for one table must not hold up another."""

    def __init__(self, fetchers: Sequence[ControlFetcher]) -> None:
        self.fetchers = tuple(fetchers)
        self._halt = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None

    @property
    def problem(self) -> str | None:
        """The problem of the first fetcher that has one."""
        return next((fetcher.problem for fetcher in self.fetchers if fetcher.problem is not None), None)

    def add_problem(self, progress: Progress) -> Progress:
        """Return the progress with the problem of a fetcher, if it has no other problem with the hub."""
        if progress.hub_problem is not None or self.problem is None:
            return progress
        return msgspec.structs.replace(progress, hub_problem=self.problem)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def once(self) -> None:
        """Fetch what the hub has now, if it responds. Called before bounded input is read, which does not wait for the hub."""
        for fetcher in self.fetchers:
            fetcher.step(wait_s=0.0)

    def start(self) -> None:
        for fetcher in self.fetchers:
            thread = threading.Thread(
                target=self._loop, args=(fetcher,), name=f"fordstone-control-{fetcher.control}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise the exception that ended a fetcher. The thread that runs the pipeline calls this regularly."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop all fetchers. Nothing is stored afterwards, even if a thread still waits for the hub."""
        self._halt.set()
        for fetcher in self.fetchers:
            fetcher.stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)

    def _loop(self, fetcher: ControlFetcher) -> None:
        try:
            while not self._halt.is_set():
                self._halt.wait(fetcher.step())
        except BaseException as failure:  # noqa: BLE001 - handed to the caller of check
            self._failure = failure


def control_fetching(
    plan: p.Plan,
    sources: Mapping[str, Source],
    manifest: Manifest | None,
    *,
    hub: HubAddress | None,
    failpoints: Failpoints,
) -> ControlFetching:
    """Return the fetchers of a plan's control tables, none without a hub. `manifest`: the checkpoint that it resumes from."""
    steps = [step for step in plan.steps if isinstance(sources.get(step.name), ControlSource)]
    if hub is None or not steps:
        return ControlFetching(())
    from fordstone.hub.client.client import HubClient  # noqa: PLC0415 - without a hub, no HTTP client is loaded

    client = HubClient(hub)
    fetchers = []
    for step in steps:
        source = sources[step.name]
        cut = manifest.cut.sources.get(step.name) if manifest is not None else None
        taken = cut.partitions.get(PARTITION) if cut is not None else None
        if isinstance(source, ControlSource) and isinstance(step, p.Source):
            fetchers.append(
                ControlFetcher(
                    client,
                    source.log,
                    pipeline=plan.pipeline,
                    control=step.connector.options["control"],
                    taken=taken,
                    failpoints=failpoints,
                )
            )
    return ControlFetching(fetchers)
