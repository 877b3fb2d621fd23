"""Kill -9 at random moments, again and again, while the input grows: in every mode, exact in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.examples import rest
from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import Process, opened_store, released, run_to_end, sealed, started

from fordstone.plan.plan import Mode

KILLS = 6
FEED_ROWS = 100
NARROW = {"parallelism": 2, "batch_rows": 10, "channel_rows_max": 40}
"""Rows are in flight between the tasks whenever a barrier comes."""


def feed_until(process: Process, feed: Feed, rng: Random) -> None:
    """Let the input grow until a moment that chance chooses: while it recovers, some epochs later, or with an output."""
    kind = rng.choice(("start", "epochs", "epochs", "output"))
    if kind == "start":
        lock = feed.folder / "state" / "lock"
        process.until(lambda: lock.exists() and lock.read_text() == f"{process.pid}\n", "lock")
        return
    reached: Callable[[Path], int] = sealed if kind == "epochs" else released
    goal = reached(feed.folder) + rng.randint(1, 6)
    while reached(feed.folder) < goal:
        before = sealed(feed.folder)
        feed.write(FEED_ROWS)
        process.until(lambda before=before: sealed(feed.folder) > before, "another epoch")  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["unaligned", *rest("aligned", "blocking")])
def test_a_pipeline_killed_again_and_again_is_exact(mode: Mode, tmp_path: Path, faults: Callable[..., None]) -> None:
    rng = Random(f"{mode} 1")
    feed = Feed(folder=tmp_path, seed=7)
    feed.write(FEED_ROWS)
    job = Job(mode=mode, options=LIVE | NARROW)
    for _ in range(KILLS):
        with started(tmp_path, job) as process:
            feed_until(process, feed, rng)
            assert process.kill().killed
        assert released(tmp_path) <= sealed(tmp_path)
        faults(kills=1)
    before = sealed(tmp_path)
    with started(tmp_path, job) as process:
        process.until(lambda: sealed(tmp_path) > before, "another epoch")
        assert process.stop().report["outcome"] == "stopped"
    feed.write(FEED_ROWS)
    # What SIGTERM leaves is aligned, whatever the mode: it may be taken up with another number of tasks.
    ended = run_to_end(tmp_path, Job(mode=mode, options=BOUNDED | {"parallelism": 3}))
    assert ended.report["outcome"] == "ended"
    judge(tmp_path, feed.written)
    cuts = opened_store(tmp_path).cuts().values()
    assert any(cut.overtaking for cut in cuts) == (mode == "unaligned"), "no checkpoint had rows in flight"
