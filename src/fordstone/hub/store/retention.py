"""Let go of what nobody needs: read segments, old versions of control tables, blobs that nothing names.

Runs beside everything else, a bounded piece at a time, so that commits never wait long. Calls are serial: one thread.

Invariants: a segment goes when every consumer of its stream has passed it, and never while none is registered; a node's head
and its digest stay for ever; the newest snapshot of a control table stays, with all that follows. A blob goes when nothing
names it and it came longer ago than `grace_us`, so that what is uploaded for a commit still to come stays. Its row goes
first, durably, then its bytes: what a crash leaves between the two is found by the sweep and goes later.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from fordstone.hub.store.blob_refs import counted, rename, sizes_of
from fordstone.hub.store.blobs import BlobStore, Gate
from fordstone.hub.store.log import HubLog, Turn
from fordstone.state.base import RunRef
from fordstone.storage.failpoint import Failpoints, NoFailpoints

PIECE: Final = 500
"""So many rows or files are removed in one go."""
ENTRIES_KEPT: Final = 1_000
"""Of a node, behind its segments: to compare with what is sent again, and for people to look at."""
HOUR_US: Final = 3_600_000_000
PREFIXES: Final = 256
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How long things are kept."""

    grace_us: int = HOUR_US
    """So long a blob may wait for the commit that names it."""
    offline_us: int = 7 * 24 * HOUR_US
    """A node that was not heard of for so long does not hold old versions of control tables."""
    unread_us: int | None = None
    """Segments that came longer ago go even if nobody has read them. None: never."""
    every_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What one round let go."""

    segments: int = 0
    entries: int = 0
    versions: int = 0
    blobs: int = 0

    @property
    def more(self) -> bool:
        """Whether another round may find more at once."""
        return max(self.segments, self.entries, self.versions, self.blobs) >= PIECE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passed:
    """Segments of one node in one stream, up to an epoch."""

    stream_id: int
    node_id: int
    level: int


class Retention:
    """Blocks: not for the event loop."""

    def __init__(
        self, log: HubLog, blobs: BlobStore, gate: Gate, *, keeping: Keeping, failpoints: Failpoints | None = None
    ) -> None:
        self.keeping = keeping
        self._log = log
        self._blobs = blobs
        self._gate = gate
        self._failpoints = failpoints or NoFailpoints()
        self._prefix = 0

    def round(self) -> Removed:
        """Remove one piece of each kind."""
        self._failpoints.hit("hub.gc-before")
        segments = self._segments()
        entries = self._log.write(_remove_entries).result()
        versions = self._versions()
        return Removed(segments=segments, entries=entries, versions=versions, blobs=self._unnamed_blobs())

    def sweep(self) -> int:
        """Look through one of 256 parts of the store for blobs that the log does not know, and give how many there were.

        They are written down as if they had come now, so that they go after the grace time unless a commit names them.
        """
        prefix, self._prefix = f"{self._prefix:02x}", (self._prefix + 1) % PREFIXES
        there = {digest: size for digest, size in self._blobs.names(prefix) if _DIGEST.fullmatch(digest)}

        def adopt(turn: Turn) -> int:
            strays = there.keys() - sizes_of(turn.db, there).keys()
            turn.db.executemany(
                "INSERT INTO blobs (digest, size_bytes, stored_us) VALUES (?, ?, ?)",
                [(digest, there[digest], turn.now_us) for digest in strays],
            )
            return len(strays)

        return self._log.write(adopt).result() if there else 0

    def _segments(self) -> int:
        removed = 0
        for passed in self._log.read(self._all_passed):
            removed += self._log.write(partial(_remove_segments, passed=passed)).result()
            if removed >= PIECE:
                break
        return removed

    def _all_passed(self, db: sqlite3.Connection) -> list[_Passed]:
        """What every consumer has passed. Positions never go back, so that this stays true."""
        rows = db.execute(
            "SELECT sn.stream_id, sn.node_id, sn.first, (SELECT min(coalesce(p.epoch, 0)) FROM consumers c "
            "LEFT JOIN passed p ON p.consumer_id = c.id AND p.stream = s.stream AND p.node = n.node "
            "WHERE c.pipeline = s.pipeline AND ("
            "EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id AND cs.stream = s.stream) "
            "OR NOT EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id))) "
            "FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id JOIN nodes n ON n.id = sn.node_id WHERE sn.epochs > 0"
        ).fetchall()
        found = []
        for stream_id, node_id, first, passed in rows:
            level = passed or 0
            if self.keeping.unread_us is not None:
                too_old = db.execute(
                    "SELECT max(epoch) FROM segments WHERE stream_id = ? AND node_id = ? AND received_us < ?",
                    (stream_id, node_id, self._log.now_us() - self.keeping.unread_us),
                ).fetchone()[0]
                level = max(level, too_old or 0)
            if level >= first:
                found.append(_Passed(stream_id=stream_id, node_id=node_id, level=level))
        return found

    def _versions(self) -> int:
        removed = 0
        for control_id, snapshot in self._log.read(self._old_versions):
            removed += self._log.write(partial(_remove_versions, control_id=control_id, snapshot=snapshot)).result()
        return removed

    def _old_versions(self, db: sqlite3.Connection) -> list[tuple[int, int]]:
        """Of each control table the newest snapshot that every node has passed which reads it and is heard of."""
        since_us = self._log.now_us() - self.keeping.offline_us
        taken: dict[tuple[str, str], int] = {}
        for pipeline, controls in db.execute("SELECT pipeline, controls FROM nodes WHERE seen_us >= ?", (since_us,)):
            for control, version in msgspec.json.decode(controls, type=dict[str, int]).items():
                taken[pipeline, control] = min(version, taken.get((pipeline, control), version))
        found = []
        for control_id, pipeline, control, newest in db.execute(
            "SELECT id, pipeline, control, newest FROM controls"
        ).fetchall():
            snapshot, oldest = db.execute(
                "SELECT max(CASE WHEN snapshot AND version <= ? THEN version END), min(version) FROM versions WHERE control_id = ?",
                (taken.get((pipeline, control), newest), control_id),
            ).fetchone()
            if snapshot is not None and snapshot > oldest:
                found.append((control_id, snapshot))
        return found

    def _unnamed_blobs(self) -> int:
        until_us = self._log.now_us() - self.keeping.grace_us
        digests = self._log.read(
            lambda db: [
                digest
                for (digest,) in db.execute(
                    "SELECT digest FROM blobs WHERE refs = 0 AND stored_us < ? ORDER BY stored_us LIMIT ?",
                    (until_us, PIECE),
                )
            ]
        )
        with self._gate.removal(digests) as free:
            gone = self._log.write(partial(_forget_blobs, digests=free, until_us=until_us)).result()
            self._failpoints.hit("hub.gc-forgotten")
            for digest, small in gone:
                if not small:
                    self._blobs.remove(digest)
                self._failpoints.hit("hub.gc-removed")
        return len(gone)


def _remove_segments(turn: Turn, passed: _Passed) -> int:
    db = turn.db
    rows = db.execute(
        "SELECT seq, epoch, runs, rows, size_bytes FROM segments WHERE stream_id = ? AND node_id = ? AND epoch <= ? "
        "ORDER BY epoch LIMIT ?",
        (passed.stream_id, passed.node_id, passed.level, PIECE),
    ).fetchall()
    if not rows:
        return 0
    names: Counter[str] = Counter()
    for row in rows:
        names.subtract(counted(msgspec.json.decode(row[2], type=tuple[RunRef, ...])))
    rename(db, names)
    db.executemany(
        "DELETE FROM segments WHERE stream_id = ? AND seq = ? AND epoch = ?",
        [(passed.stream_id, row[0], row[1]) for row in rows],
    )
    db.executemany(
        "UPDATE entries SET segments = segments - 1 WHERE node_id = ? AND epoch = ?",
        [(passed.node_id, row[1]) for row in rows],
    )
    db.execute(
        "UPDATE stream_nodes SET first = ?, epochs = epochs - ?, rows = rows - ?, size_bytes = size_bytes - ? "
        "WHERE stream_id = ? AND node_id = ?",
        (
            rows[-1][1] + 1,
            len(rows),
            sum(row[3] for row in rows),
            sum(row[4] for row in rows),
            passed.stream_id,
            passed.node_id,
        ),
    )
    return len(rows)


def _remove_entries(turn: Turn) -> int:
    rows = turn.db.execute(
        "SELECT e.node_id, e.epoch FROM nodes n CROSS JOIN entries e ON e.node_id = n.id AND e.epoch <= n.head - ? "
        "WHERE e.segments = 0 LIMIT ?",
        (ENTRIES_KEPT, PIECE),
    ).fetchall()
    turn.db.executemany("DELETE FROM entries WHERE node_id = ? AND epoch = ?", rows)
    return len(rows)


def _remove_versions(turn: Turn, control_id: int, snapshot: int) -> int:
    rows = turn.db.execute(
        "SELECT version, digest FROM versions WHERE control_id = ? AND version < ? ORDER BY version LIMIT ?",
        (control_id, snapshot, PIECE),
    ).fetchall()
    names: Counter[str] = Counter()
    names.subtract(digest for _, digest in rows)
    rename(turn.db, names)
    turn.db.executemany(
        "DELETE FROM versions WHERE control_id = ? AND version = ?", [(control_id, version) for version, _ in rows]
    )
    return len(rows)


def _forget_blobs(turn: Turn, digests: list[str], until_us: int) -> list[tuple[str, bool]]:
    """Those that are still unnamed and old, and whether they were small: meanwhile one may have been named, or come again."""
    gone = []
    for digest in digests:
        row = turn.db.execute(
            "DELETE FROM blobs WHERE digest = ? AND refs = 0 AND stored_us < ? RETURNING small", (digest, until_us)
        ).fetchone()
        if row is not None:
            gone.append((digest, bool(row[0])))
    return gone
