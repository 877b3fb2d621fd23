"""A state of several times the memory that this process may have: fills it, checkpoints it, restarts, and prints what is in it.

Run as `python -m tests.state.large_state KIND SHAPE LIMIT_MIB STATE_MIB` in a directory of its own. A limit of 0 is none.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from fordstone.epochs.store import CheckpointStore, merge_state
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan.plan import StateKind
from fordstone.state import rocksdb
from fordstone.state.backends import state_backends
from fordstone.state.base import FOUND, Asked, Piece, RunRef, SearchBuffer, State, StateBackend, Table, Timeline
from fordstone.state.working import WorkingFiles
from fordstone.storage.disk import OsDisk

MIB = 1 << 20
ROWS = 512
TEXT_BYTES = 4000
LETTERS = np.random.default_rng(1).integers(97, 105, 8 * MIB, dtype=np.uint8).tobytes().decode()
SCHEMA: dict[str, pl.DataType] = {"k": pl.Int64(), "at": pl.Int64(), "n": pl.Int64(), "text": pl.String()}


def rows(first: int, n: int) -> pl.DataFrame:
    """Rows of about four kilobytes."""
    numbers = np.arange(first, first + ROWS)
    starts = (numbers * 7919 % (len(LETTERS) - TEXT_BYTES)).tolist()
    return pl.DataFrame(
        {
            "k": keys(first),
            "at": numbers,
            "n": np.full(ROWS, n),
            "text": [LETTERS[start : start + TEXT_BYTES] for start in starts],
        }
    )


def keys(first: int) -> pl.Series:
    return pl.Series("k", np.arange(first, first + ROWS) * 7919 % 1_000_003)


class Kept:
    """The checkpoints of one state, on disk."""

    def __init__(self, kind: StateKind, shape: str, directory: str) -> None:
        self.directory = directory
        self.store = CheckpointStore(OsDisk(f"{directory}/store"), pipeline="large", node="node", compression="none")
        self.kind, self.shape = kind, shape
        self.refs: tuple[RunRef, ...] = ()
        self.state = self.made()

    def made(self) -> State:
        backend: StateBackend = state_backends(
            [self.kind], WorkingFiles(Path(self.directory, "working")), state_bytes_max=64 * MIB
        )[self.kind]
        match self.shape:
            case "table":
                return backend.table(["k"], schema=SCHEMA)
            case "timeline":
                return backend.timeline(["k"], time_column="at", merge_rows=merged)
            case _:
                return backend.search_buffer(["k"], time_column="at")

    def commit(self) -> None:
        for piece in self.state.freeze():
            if piece.ref is None:
                piece.written(self.store.write_run(piece.frame()))
        while merge_state(self.store, self.state):
            pass
        self.refs = tuple(piece.ref for piece in self.state.freeze() if piece.ref is not None)

    def restart(self) -> None:
        del self.state
        self.state = self.made()
        pieces = [
            Piece(make=partial(self.store.read_run, ref), ref=ref, keep=self.state.keeps_frames) for ref in self.refs
        ]
        self.state.load(pieces, watermark_us=TIME_MIN_US)


def merged(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.group_by("k", "at").agg(pl.col("n").sum(), pl.col("text").first())


def add(state: State, frame: pl.DataFrame) -> None:
    if isinstance(state, Table):
        known = state.get(frame.select("k")).filter(pl.col(FOUND)).select(frame.columns)
        both = (
            pl.concat([known, frame]).group_by("k").agg(pl.col("at").last(), pl.col("n").sum(), pl.col("text").last())
        )
        state.put(both.select(frame.columns))
    elif isinstance(state, Timeline | SearchBuffer):
        state.add(frame)


def content(state: State, count: int) -> Iterator[pl.DataFrame]:
    """What is in the state, some at a time, in an order of its own."""
    for first in range(0, count, ROWS):
        if isinstance(state, Table):
            yield state.get(pl.DataFrame(keys(first))).sort("k")
        elif isinstance(state, Timeline):
            yield state.close(first + ROWS - 1).sort("at")
        elif isinstance(state, SearchBuffer):
            asked = rows(first, 0)[::64]
            times = asked.get_column("at").to_numpy()
            found = state.search(Asked(keys=asked.select("k"), from_us=times - 5, to_us=times + 5))
            yield asked.clear() if found is None else found.rows.sort("at")
            state.drop(first)


def filled(kept: Kept, count: int) -> dict[str, object]:
    """Fill the state, restart, and take all of it out again."""
    for first in range(0, count, ROWS):
        add(kept.state, rows(first, 1))
        if first // ROWS % 4 == 3:
            kept.commit()
        if kept.shape == "table" and first // ROWS % 8 == 7:
            # Some keys come again.
            add(kept.state, rows(first // 2 // ROWS * ROWS, 1))
    kept.commit()
    kept.restart()
    digest = hashlib.sha256()
    seen = 0
    for frame in content(kept.state, count):
        seen += frame.height
        digest.update(frame.hash_rows().to_numpy().tobytes())
    return {"rows": seen, "digest": digest.hexdigest(), "runs": len(kept.refs)}


def main() -> None:
    # A quarter of what they are, as is the state.
    for name in (
        "WRITE_BUFFER_BYTES",
        "CHANGES_BYTES_MAX",
        "CHUNK_BYTES",
        "RUN_BYTES",
        "MERGED_BYTES_MAX",
        "MERGE_BYTES_MAX",
    ):
        setattr(rocksdb, name, getattr(rocksdb, name) // 4)
    kind, shape, limit_mib, state_mib = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    # Threads, arenas and pools are there before the limit is.
    filled(Kept(kind, shape, "small"), 16 * ROWS)  # type: ignore[arg-type]  # checked by the backends
    if limit_mib:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        limit = int(status["VmData"].split()[0]) * 1024 + limit_mib * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    kept = Kept(kind, shape, "large")  # type: ignore[arg-type]  # checked by the backends
    print(json.dumps(filled(kept, state_mib * MIB // TEXT_BYTES // ROWS * ROWS)))


if __name__ == "__main__":
    main()
