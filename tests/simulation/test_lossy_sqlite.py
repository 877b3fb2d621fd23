"""The disk under the hub's log in simulations: what was synced survives a power cut, and the rest need not."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tests.simulation.lossy_sqlite import Connection, LossyFiles

COMMITS = 12


class CutError(Exception):
    """The power went."""


def lives(seed: int, folder: Path, *, synchronous: str) -> list[tuple[int, int]]:
    """Commit rows, lose power now and then; for each life, how many rows had been committed, and how many were found after it."""
    rng, path, committed, found = Random(seed), folder / f"{seed}.sqlite", 0, []
    files = LossyFiles(lambda: CutError("the power went"))
    for _ in range(4):
        db = files.connect(path)
        for statement in ("journal_mode = WAL", f"synchronous = {synchronous}", "wal_autocheckpoint = 6"):
            db.execute(f"PRAGMA {statement}")
        db.execute("CREATE TABLE IF NOT EXISTS t (n PRIMARY KEY, data)")
        rows = db.execute("SELECT count(*) FROM t").fetchone()[0]
        found.append((committed, rows))
        files.cut_after = rng.randrange(60)
        committed = commit_until_the_power_goes(db, rows, rng)
        files.power_off()
        db.close()
        files.power_on(rng)
    files.close()
    return found


def commit_until_the_power_goes(db: Connection, rows: int, rng: Random) -> int:
    for number in range(rows, rows + COMMITS):
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO t VALUES (?, ?)", (number, bytes(rng.randrange(9_000))))
            db.execute("COMMIT")
        except CutError:
            return number
    return rows + COMMITS


@pytest.mark.parametrize("seed", range(30))
def test_committed_rows_survive_power_cuts_and_at_most_the_one_under_way_is_added(seed: int, tmp_path: Path):
    for committed, rows in lives(seed, tmp_path, synchronous="FULL"):
        assert rows in {committed, committed + 1}


def test_commits_that_were_not_synced_are_lost_at_times(tmp_path: Path):
    every = [life for seed in range(30) for life in lives(seed, tmp_path, synchronous="NORMAL")]
    assert any(rows < committed for committed, rows in every)
