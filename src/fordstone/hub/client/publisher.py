"""Publishes versions of a control table at a hub, for the center's sink and for anybody's Spark job.

A version holds what changed. About every `SNAPSHOT_EVERY` versions one holds the whole table instead, so that nodes which start
or come back late need not read them all, and the hub may drop older ones. Retries are left to callers.

Invariants: the blob is at the hub before the version that names it; a batch of an owner is published once, however often it is
sent with the same rows, and the order of the rows does not matter; an owner that another one has followed is fenced, and so is a
start that another start of the same owner has followed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import polars as pl

from fordstone.epochs.run_file import encode_run
from fordstone.epochs.untrusted import decode_untrusted
from fordstone.errors import DamagedError, FencedError, HubAwayError, HubRefusedError, SinkError
from fordstone.hub.messages import BLOB_BYTES_MAX, ControlPage, ControlPublish, ControlVersion
from fordstone.operators.base import DELETE, OP, UPSERT

if TYPE_CHECKING:  # a node that keeps a copy of a table uses `apply_changes`, and may have no hub to talk to
    from fordstone.hub.client.client import HubClient

_events = logging.getLogger(__name__)

SNAPSHOT_EVERY: Final = 100
"""Maximum number of versions, about, that a node without a copy has to read."""


def apply_changes(table: pl.DataFrame, changes: Sequence[pl.DataFrame], keys: Sequence[str]) -> pl.DataFrame:
    """A table after changes, in order. All have `__op`; the rows of the result have 'upsert'."""
    rows = pl.concat([table, *changes]).unique(keys, keep="last", maintain_order=True)
    return rows.filter(pl.col(OP) == UPSERT)


class ControlPublisher:
    """Publishes one control table. Used by one thread at a time."""

    def __init__(
        self,
        client: HubClient,
        *,
        pipeline: str,
        control: str,
        keys: Sequence[str],
        start: str | None = None,
        resumes_after: int | None = None,
        discard_later: bool = False,
    ) -> None:
        """`start`, `resumes_after` and `discard_later` as in `ControlPublish`."""
        self._client = client
        self._start, self._resumes_after, self._discard_later = start, resumes_after, discard_later
        self._pipeline = pipeline
        self._control = control
        self._keys = list(keys)
        self._last: ControlVersion | None = None
        """The newest version at the hub, once it is known to be of the owner that publishes: every other is shut out then."""
        self._snapshot = 0
        """The version of the newest snapshot at the hub."""

    def publish(self, rows: pl.DataFrame, *, owner: str, batch: int, replace: bool = False) -> ControlVersion | None:
        """Publish rows with `__op` as one version; None: there is nothing to publish.

        Args:
            rows: What changes. Of several rows with one key the last counts; rows without a whole key are dropped.
            owner: The publisher. Its first version shuts out every other one.
            batch: The number of these rows, which grows. The same owner, batch and rows again change nothing.
            replace: The rows are the whole table.

        Raises:
            HubAwayError: Nothing is known to be published; the same call may be made again.
            FencedError: Another owner has published since.
            SinkError: The hub refused, as if this owner has published later or other rows; or they are too many for one version.
        """
        changes = self._last_per_key(rows)
        if changes.is_empty() and not replace:
            return None
        try:
            whole = changes.filter(pl.col(OP) != DELETE) if replace else self._snapshot_with(changes, owner, batch)
            version = self._put(changes, whole, owner, batch)
        except HubRefusedError as error:
            raise self._refused(error, owner) from error
        last, self._last = self._last, version
        if (
            last is not None
            and last.owner == owner
            and version.version > last.version
            and not version.follows(last.chain)
        ):
            _events.warning(
                "hub was restored from a backup, and versions of a control table are lost",
                extra={"control": self._control, "lost_up_to": last.version, "goes_on_with": version.version},
            )
        if version.snapshot:
            self._snapshot = max(version.version, self._snapshot)
        return version

    def newest(self) -> int:
        """The newest version at the hub; 0: none."""
        return self._client.control_page(self._pipeline, self._control).newest

    def _put(self, changes: pl.DataFrame, whole: pl.DataFrame | None, owner: str, batch: int) -> ControlVersion:
        ref, data = encode_run(changes if whole is None else whole, "zstd")
        if ref.size_bytes > BLOB_BYTES_MAX:
            raise SinkError(
                f"a version of control table {self._control} has {ref.size_bytes} bytes; every node fetches at most {BLOB_BYTES_MAX} "
                "at a time. Publish fewer rows per batch."
            )
        self._client.put_blob(ref.digest, bytes(data))
        version = ControlPublish(
            owner=owner,
            batch=batch,
            blob=ref,
            snapshot=whole is not None,
            changes=None if whole is None else encode_run(changes, "zstd")[0].digest,
            start=self._start,
            resumes_after=self._resumes_after,
            discard_later=self._discard_later,
        )
        return self._client.publish(self._pipeline, self._control, version)

    def _refused(self, error: HubRefusedError, owner: str) -> Exception:
        if error.code == "stale_generation":
            return FencedError(
                f"control table {self._control} of pipeline {self._pipeline} has a newer publisher than {owner}: another center, query "
                "or job has begun to write it, or another start of this one, from a copy of its checkpoint. A table has one publisher at a "
                "time: stop this one, or stop the other and publish with a new owner."
            )
        if error.code == "other_content":
            advice = (
                "Bring the newer checkpoint location back, or start with a new one, or with another owner (option 'owner'): then it is another "
                "publisher, and publishes from its beginning."
            )
            if self._resumes_after is not None:
                advice = (
                    "Bring the newer state back: the old state directory, or the machine that has it. If it is lost, start once with "
                    "--discard-later-output (in Python: discard_later_output=True): then the rows that are computed now are published after "
                    "those that are there."
                )
            return SinkError(f"{error}\n{advice}")
        if error.code == "missing_blobs":  # the hub has dropped the blob since, and takes it again
            return HubAwayError(f"control table {self._control} was not published: {error}")
        return SinkError(f"control table {self._control} was not published: {error}")

    def _last_per_key(self, rows: pl.DataFrame) -> pl.DataFrame:
        keyed = rows.drop_nulls(self._keys)
        if keyed.height < rows.height:
            _events.warning(
                "rows without a key not published",
                extra={"control": self._control, "rows": rows.height - keyed.height, "key": ", ".join(self._keys)},
            )
        # Sorted, so that a batch that is computed again has the same digest.
        return keyed.unique(self._keys, keep="last", maintain_order=True).sort(self._keys)

    # Snapshots.

    def _snapshot_with(self, changes: pl.DataFrame, owner: str, batch: int) -> pl.DataFrame | None:
        """The whole table with these changes, if the next version should be a snapshot and the table can be read."""
        try:
            if self._last is None or self._last.owner != owner:
                last, page = self._look()
                if last is None or (last.owner == owner and last.batch >= batch):
                    return None
                if self._rows(last, page).schema != changes.schema:
                    # The table of another plan: nodes of this one cannot read it, so theirs starts over.
                    return changes.filter(pl.col(OP) != DELETE)
                if last.owner != owner:
                    return None  # another may still be publishing, so the table at the hub may not be all there is
                self._last = last
            if self._last.version + 1 - self._snapshot < SNAPSHOT_EVERY:
                return None
            table = self._table(changes.schema, self._last.version)
            return None if table is None else apply_changes(table, [changes], self._keys)
        except DamagedError as error:
            _events.warning("no snapshot of a control table", extra={"control": self._control, "problem": str(error)})
            return None

    def _look(self) -> tuple[ControlVersion | None, ControlPage]:
        page = self._page(0)
        self._snapshot = max((version.version for version in page.versions if version.snapshot), default=0)
        if page.versions and page.versions[-1].version < page.newest:
            page = self._page(page.newest - 1)
        return (page.versions[-1] if page.versions else None), page

    def _table(self, columns: pl.Schema, newest: int) -> pl.DataFrame | None:
        """The table as the hub has it; None: another has published since, and the hub will decide whose version counts."""
        # `edge.link.control._rebuild` reads pages too, but stops at the version that the node has taken, and raises if versions are
        # missing or have other columns. Here all versions up to the newest count, and one with other columns starts the table over.
        table, after = pl.DataFrame(schema=columns), 0
        while True:
            page = self._page(after)
            for version in page.versions:
                rows = self._rows(version, page)
                same = rows.schema == columns
                table = table.clear() if version.snapshot or not same else table
                table = apply_changes(table, [rows], self._keys) if same else table
            after = page.versions[-1].version if page.versions else after
            if not page.versions or after >= page.newest:
                return table if after == newest else None

    def _page(self, after: int) -> ControlPage:
        return self._client.control_page(self._pipeline, self._control, after=after)

    def _rows(self, version: ControlVersion, page: ControlPage) -> pl.DataFrame:
        return decode_untrusted(self._client.read_blob(version.blob, page.blobs), version.blob)
