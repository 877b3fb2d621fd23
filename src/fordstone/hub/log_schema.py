"""The tables of the hub's log, and the making and opening of the file they are in.

Invariants: a file of a newer version is refused, never changed. `blobs.refs` is how often the rows of the other tables
name a blob; everything that adds or removes such a row changes it in the same transaction. `blobs.small`: its bytes are in
`small_blobs` rather than in the store.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from fordstone.errors import ConfigError, StorageError

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
