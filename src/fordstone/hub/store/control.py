"""Control tables: what the center publishes, numbered, and what nodes ask for.

Invariants: versions are numbered from 1 without gaps; one (owner, batch) is one version whatever is sent again; an owner
that another has followed publishes nothing more. What is published again may have other bytes (a batch that was computed
anew): the first counts.
"""

from __future__ import annotations

import sqlite3

import msgspec

from fordstone.hub.messages import ControlPage, ControlPublish, ControlVersion
from fordstone.hub.refused import Refused
from fordstone.hub.store.blob_refs import absent, rename
from fordstone.hub.store.log import Turn


def publish(turn: Turn, pipeline: str, control: str, body: ControlPublish) -> tuple[ControlVersion, bool]:
    """Number a version; give it, and whether it is new."""
    db = turn.db
    control_id, newest = _control(db, pipeline, control)
    known = db.execute(
        "SELECT generation, batch, content FROM publishers WHERE control_id = ? AND owner = ?", (control_id, body.owner)
    ).fetchone()
    leader = db.execute("SELECT max(generation) FROM publishers WHERE control_id = ?", (control_id,)).fetchone()[0]
    if known is not None and known[0] < leader:
        raise Refused(
            "stale_generation",
            f"control table {control} of pipeline {pipeline}: another publisher has followed this one. "
            "Stop this one, or start it with a checkpoint of its own.",
        )
    if known is not None and body.batch <= known[1]:
        return _published(db, control_id, body, known[2]), False
    gone = absent(db, [body.blob])
    if gone:
        raise Refused("missing_blobs", "the blob of this version is not at the hub. Put it first.", missing=tuple(gone))
    version = ControlVersion(
        version=newest + 1,
        blob=body.blob,
        snapshot=body.snapshot,
        published_us=turn.now_us,
        owner=body.owner,
        batch=body.batch,
    )
    content = msgspec.json.encode(version)
    db.execute(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
        (control_id, version.version, body.owner, body.batch, body.snapshot, body.blob.digest, content),
    )
    db.execute("UPDATE controls SET newest = ? WHERE id = ?", (version.version, control_id))
    db.execute(
        "INSERT INTO publishers VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (control_id, owner) DO UPDATE SET batch = excluded.batch, content = excluded.content",
        (control_id, body.owner, (leader or 0) + 1, body.batch, content),
    )
    rename(db, {body.blob.digest: 1})
    turn.changed.add(("control", pipeline, control))
    return version, True


def page(db: sqlite3.Connection, pipeline: str, control: str, *, after: int, limit: int) -> ControlPage:
    """Versions behind `after`; from the newest snapshot on for a new reader, and for one that is behind what is kept."""
    row = db.execute(
        "SELECT id, newest FROM controls WHERE pipeline = ? AND control = ?", (pipeline, control)
    ).fetchone()
    control_id, newest = row or (0, 0)
    if after > newest:
        raise Refused(
            "gone",
            f"control table {control} of pipeline {pipeline} ends at version {newest}; somebody asks for what comes after "
            f"{after}. The hub's data was set back: read the table anew.",
        )
    if row is None:
        return ControlPage(versions=(), newest=0)
    oldest = (
        db.execute("SELECT min(version) FROM versions WHERE control_id = ?", (control_id,)).fetchone()[0] or newest + 1
    )
    start = after + 1
    if after == 0 or start < oldest:
        snapshot = db.execute(
            "SELECT max(version) FROM versions WHERE control_id = ? AND snapshot", (control_id,)
        ).fetchone()[0]
        start = max(start, snapshot or 0, oldest)
    rows = db.execute(
        "SELECT content FROM versions WHERE control_id = ? AND version >= ? ORDER BY version LIMIT ?",
        (control_id, start, limit),
    )
    return ControlPage(
        versions=tuple(msgspec.json.decode(content, type=ControlVersion) for (content,) in rows), newest=newest
    )


def _control(db: sqlite3.Connection, pipeline: str, control: str) -> tuple[int, int]:
    db.execute("INSERT OR IGNORE INTO controls (pipeline, control) VALUES (?, ?)", (pipeline, control))
    row: tuple[int, int] = db.execute(
        "SELECT id, newest FROM controls WHERE pipeline = ? AND control = ?", (pipeline, control)
    ).fetchone()
    return row


def _published(db: sqlite3.Connection, control_id: int, body: ControlPublish, last: bytes) -> ControlVersion:
    """What the batch became. If it is no longer kept, the owner's last: all that counts is that nothing is to do."""
    row = db.execute(
        "SELECT content FROM versions WHERE control_id = ? AND owner = ? AND batch = ?",
        (control_id, body.owner, body.batch),
    ).fetchone()
    return msgspec.json.decode(last if row is None else row[0], type=ControlVersion)
