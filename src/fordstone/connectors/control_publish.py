"""The sink that publishes a control table: each epoch of the center's rows becomes a version at the hub.

A version holds what changed; about every `SNAPSHOT_EVERY` versions one holds the whole table instead, so that nodes which come
late or were away for long need not read them all, and the hub may forget older ones.

Invariants: the blob is at the hub before the version that names it; an epoch is published once, under the owner that is kept
with the checkpoints, however often it is released; who was shut out by a newer owner stops.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Final, Protocol

import polars as pl

from fordstone.connectors.base import Delivery, Sink, SinkStream
from fordstone.connectors.control_log import apply_changes
from fordstone.epochs.run_file import decode_run, encode_run
from fordstone.errors import DamagedError, FencedError, HubAwayError, HubRefusedError, SinkError, StorageError
from fordstone.hub.messages import ControlPage, ControlPublish, ControlVersion
from fordstone.operators.base import OP, UPSERT
from fordstone.state.base import RunRef

log = logging.getLogger(__name__)

SNAPSHOT_EVERY: Final = 100
"""From the newest snapshot on, so many versions at most are read by whoever begins with nothing (about: see `_is_due`)."""


class HubIsAwayError(StorageError):
    """What could not be published for now. The edge's engine holds and tries again; on Spark the batch is run again."""


class Hub(Protocol):
    """What of `hub.client.HubClient` is needed here."""

    def put_blob(self, digest: str, data: bytes) -> None:
        """Store a blob."""
        ...

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        """Read a blob."""
        ...

    def publish(self, pipeline: str, control: str, version: ControlPublish) -> ControlVersion:
        """Publish a version."""
        ...

    def control_page(self, pipeline: str, control: str, *, after: int = 0, wait_s: float = 0.0) -> ControlPage:
        """The versions behind one."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class ControlSink(Sink):
    """Publishes one control table. Used by one thread at a time."""

    def __init__(self, hub: Hub, stream: SinkStream, *, pipeline: str, control: str, keys: Sequence[str]) -> None:
        self._hub = hub
        self._stream = stream
        self._pipeline = pipeline
        self._control = control
        self._keys = list(keys)
        self._columns = pl.Schema(dict(stream.schema.polars) | {OP: pl.String()})
        # Nobody knows whose rows these are: what was published before may be published again, under another name.
        self._owner = stream.owner or secrets.token_hex(16)
        self._written = 0
        self._newest: int | None = None
        """The version that this opening published last. Until then another may be publishing still."""
        self._snapshot: int | None = None
        """The version of the newest snapshot at the hub, once it has been looked for."""

    @property
    def delivery(self) -> Delivery:
        """The hub knows which epochs of an owner it has."""
        return Delivery.EXACTLY_ONCE

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Publish the epoch's rows as a version; an epoch without rows is none."""
        self._publish(self._owner, epoch, frame)

    def write(self, frame: pl.DataFrame) -> None:
        """Publish rows at once. They may come again after a restart, which is then another owner: batches have no numbers."""
        if not self._written:
            self._owner = secrets.token_hex(16)
        self._written += 1
        self._publish(self._owner, self._written, frame)

    def close(self) -> None:
        """Let go of connections."""
        self._hub.close()

    def _publish(self, owner: str, batch: int, frame: pl.DataFrame) -> None:
        changes = self._changes(frame)
        if changes.is_empty():
            return
        try:
            whole = self._snapshot_with(changes)
            rows = changes if whole is None else whole
            ref, data = encode_run(rows, "zstd")
            self._hub.put_blob(ref.digest, bytes(data))
            version = self._hub.publish(
                self._pipeline,
                self._control,
                ControlPublish(owner=owner, batch=batch, blob=ref, snapshot=whole is not None),
            )
        except HubAwayError as error:
            # Without the cause: on Spark, errors of ours are told apart by their text, and this one is to be tried again.
            raise HubIsAwayError(
                f"control table {self._control} cannot be published: {error} It will be tried again."
            ) from None
        except HubRefusedError as error:
            raise self._refused(error, batch) from error
        self._newest = version.version
        if version.snapshot:
            self._snapshot = max(version.version, self._snapshot or 0)

    def _refused(self, error: HubRefusedError, batch: int) -> Exception:
        if error.code == "stale_generation":
            return FencedError(
                f"control table {self._control} of pipeline {self._pipeline} has a newer publisher: a center with another checkpoint "
                f"has begun to write it. This one stops. ({error})"
            )
        if error.code == "other_content":
            return SinkError(
                f"control table {self._control}: the hub has epoch {batch} already, with other rows than are released now. "
                "It is the output of another run of this checkpoint: begin with a new one."
            )
        if error.code == "missing_blobs":
            return HubIsAwayError(f"control table {self._control} cannot be published: {error} It will be tried again.")
        return error

    def _changes(self, frame: pl.DataFrame) -> pl.DataFrame:
        """One row a key, the last that came, with what it does."""
        if OP not in frame.columns:
            frame = frame.with_columns(pl.lit(UPSERT).alias(OP))
        rows = frame.select(list(self._columns)).cast(self._columns)
        keyed = rows.drop_nulls(self._keys)
        if keyed.height < rows.height:
            log.warning(
                "rows without a key not published",
                extra={"control": self._control, "rows": rows.height - keyed.height, "key": ", ".join(self._keys)},
            )
        return keyed.unique(self._keys, keep="last", maintain_order=True)

    # Snapshots.

    def _snapshot_with(self, changes: pl.DataFrame) -> pl.DataFrame | None:
        """The whole table with these changes, if it is time for that, and what the hub has can be read."""
        try:
            return self._whole(changes) if self._is_due() else None
        except DamagedError as error:
            log.warning("no snapshot of a control table", extra={"control": self._control, "problem": str(error)})
            return None

    def _is_due(self) -> bool:
        """Whether the next version should be the whole table.

        The first of an opening only if the table begins anew: not before this owner has published is every other shut out, so
        that what the hub has is all there is.
        """
        if self._newest is None:
            return self._has_other_columns()
        if self._snapshot is None:
            versions = self._hub.control_page(self._pipeline, self._control).versions
            self._snapshot = max((version.version for version in versions if version.snapshot), default=0)
        return self._newest + 1 - self._snapshot >= SNAPSHOT_EVERY

    def _has_other_columns(self) -> bool:
        """Whether what the hub has is the table of another plan. Nodes of this plan cannot take it, so theirs begins anew."""
        newest = self._hub.control_page(self._pipeline, self._control).newest
        if not newest:
            return False
        page = self._hub.control_page(self._pipeline, self._control, after=newest - 1)
        last = [version for version in page.versions if version.version == newest]
        return bool(last) and self._rows(last[0], page).schema != self._columns

    def _whole(self, changes: pl.DataFrame) -> pl.DataFrame | None:
        """The table as the hub has it, with these changes; None: somebody published meanwhile, and the hub will say who counts."""
        table, after = changes.clear(), 0
        while True:
            page = self._hub.control_page(self._pipeline, self._control, after=after)
            for version in page.versions:
                rows = self._rows(version, page)
                same = rows.schema == self._columns
                table = table.clear() if version.snapshot or not same else table
                table = apply_changes(table, [rows], self._keys) if same else table
            after = page.versions[-1].version if page.versions else after
            if not page.versions or after >= page.newest:
                break
        if self._newest is not None and after != self._newest:
            return None
        return apply_changes(table, [changes], self._keys)

    def _rows(self, version: ControlVersion, page: ControlPage) -> pl.DataFrame:
        return decode_run(self._hub.read_blob(version.blob, page.blobs), version.blob)
