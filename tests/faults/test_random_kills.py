"""Kill -9 at random moments, again and again, while the input grows: in every mode, exact in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.examples import rest
from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import Process, opened_store, released, run_to_end, sealed, started, store_of

from fordstone.plan.plan import Mode, StateKind

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


@pytest.mark.parametrize("kind", rest("rocksdb", "file"))
def test_state_on_disk_is_exact_however_often_the_process_is_killed(
    kind: StateKind, tmp_path: Path, faults: Callable[..., None]
) -> None:
    kill_again_and_again(tmp_path, Random(f"{kind} 1"), faults, kinds=[kind])


def test_each_start_may_keep_its_state_elsewhere_than_the_one_that_was_killed(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    kill_again_and_again(tmp_path, Random("any 1"), faults, kinds=["memory", "rocksdb", "memory", "file", "rocksdb"])


def kill_again_and_again(tmp_path: Path, rng: Random, faults: Callable[..., None], *, kinds: list[StateKind]) -> None:
    """Kill as many times as there are kinds, and six times at least, and judge what has come out in the end."""
    feed = Feed(folder=tmp_path, seed=8)
    feed.write(FEED_ROWS)
    for number in range(max(KILLS, len(kinds))):
        with started(tmp_path, Job(state=kinds[number % len(kinds)], options=LIVE | NARROW)) as process:
            feed_until(process, feed, rng)
            assert process.kill().killed
        faults(kills=1)
    feed.write(FEED_ROWS)
    ended = run_to_end(tmp_path, Job(state=kinds[0], options=BOUNDED | {"parallelism": 3}))
    assert ended.report["outcome"] == "ended"
    judge(tmp_path, feed.written)
    working = store_of(tmp_path) / "working"
    if kinds == ["rocksdb"]:
        assert list((working / "kept").iterdir()), "no copy of a database was kept"
    assert working.exists() == (set(kinds) != {"memory"}), "no state was on disk"
