"""Control tables: what the center publishes, numbered, and what nodes ask for.

Invariants: versions are numbered from 1 without gaps; one (owner, batch) is one version however often it is sent; an owner
that was superseded by another publishes nothing more. A batch that is sent again may have other bytes (it was computed
again): the first ones count.
"""

from __future__ import annotations

from fordstone.hub.messages import ControlPage, ControlPublish, ControlVersion
from fordstone.hub.rejection import Rejection
from fordstone.hub.store.base import LogReader
from fordstone.hub.store.blob_index import missing_blobs
from fordstone.hub.store.log import Transaction


def publish(tx: Transaction, pipeline: str, control: str, body: ControlPublish) -> tuple[ControlVersion, bool]:
    """Number a version; return it, and whether it is new."""
    table = tx.log.ensure_control_table(pipeline, control)
    known = tx.log.publisher(table.table_id, body.owner)
    leader = tx.log.newest_publisher_generation(table.table_id)
    if known is not None and known.generation < leader:
        raise Rejection(
            "stale_generation",
            f"control table {control} of pipeline {pipeline}: another publisher has superseded this one. "
            "Stop this one, or start it with a checkpoint of its own.",
        )
    if known is not None and body.batch <= known.batch:
        # If the version is no longer kept, the owner's last will do: the publisher only needs to know that it is done.
        return tx.log.control_version_of_batch(table.table_id, body.owner, body.batch) or known.last, False
    missing = missing_blobs(tx.log, [body.blob])
    if missing:
        raise Rejection(
            "missing_blobs", "the blob of this version is not at the hub. Upload it first.", missing=tuple(missing)
        )
    version = ControlVersion(
        version=table.newest + 1,
        blob=body.blob,
        snapshot=body.snapshot,
        published_us=tx.now_us,
        owner=body.owner,
        batch=body.batch,
    )
    tx.log.add_control_version(table.table_id, version, generation=leader + 1 if known is None else known.generation)
    tx.log.add_references({body.blob.digest: 1})
    tx.changed.add(("control", pipeline, control))
    return version, True


def page(log: LogReader, pipeline: str, control: str, *, after: int, limit: int) -> ControlPage:
    """Return versions after one; from the newest snapshot on for a new reader, or if older versions are gone."""
    table = log.control_table(pipeline, control)
    newest = 0 if table is None else table.newest
    if after > newest:
        raise Rejection(
            "gone",
            f"control table {control} of pipeline {pipeline} ends at version {newest}, but the request is for versions after "
            f"{after}. The hub's data was set back: read the table from the start.",
        )
    if table is None:
        return ControlPage(versions=(), newest=0)
    oldest, snapshot = log.control_range(table.table_id, snapshot_until=newest)
    start = after + 1
    if after == 0 or start < (oldest or newest + 1):
        start = max(start, snapshot or 0, oldest or newest + 1)
    return ControlPage(versions=log.control_versions(table.table_id, start=start, limit=limit), newest=newest)
