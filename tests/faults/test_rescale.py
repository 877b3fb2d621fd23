"""Another number of tasks after a restart: the state goes to whom it belongs, and time does not jump."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.examples import rest
from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import run_to_end, sealed, started

from fordstone.plan.plan import Mode

FEED_ROWS = 60


def live(feed: Feed, *, parallelism: int, mode: Mode = "aligned", stop: bool = True) -> None:
    """Run for some epochs with input, then stop or kill."""
    goal = sealed(feed.folder) + 3
    with started(feed.folder, Job(mode=mode, options=LIVE | {"parallelism": parallelism})) as process:
        while sealed(feed.folder) < goal:
            before = sealed(feed.folder)
            feed.write(FEED_ROWS)
            process.until(lambda before=before: sealed(feed.folder) > before, "another epoch")  # type: ignore[misc]
        if stop:
            assert process.stop().report["outcome"] == "stopped"
        else:
            assert process.kill().killed


@pytest.mark.parametrize("mode", ["unaligned", *rest("aligned")])
def test_a_pipeline_that_is_stopped_and_rescaled_is_exact(mode: Mode, tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=11, files=4, ahead_s=(900, 500))
    for parallelism in (1, 3, 2):
        live(feed, parallelism=parallelism, mode=mode)
    feed.write(FEED_ROWS)
    assert run_to_end(tmp_path, Job(mode=mode, options=BOUNDED | {"parallelism": 3})).report["outcome"] == "ended"
    judge(tmp_path, feed.written)


def test_a_pipeline_that_is_killed_and_rescaled_is_exact(tmp_path: Path, faults: Callable[..., None]) -> None:
    feed = Feed(folder=tmp_path, seed=12, files=4, ahead_s=(900, 500))
    for parallelism in (1, 3, 2, 4):
        live(feed, parallelism=parallelism, stop=False)
        faults(kills=1)
    assert run_to_end(tmp_path, Job(options=BOUNDED)).report["outcome"] == "ended"
    judge(tmp_path, feed.written)


@pytest.mark.parametrize("mode", ["unaligned", *rest("aligned")])
def test_files_that_join_while_it_runs_do_not_make_time_jump_after_a_restart(
    mode: Mode, tmp_path: Path, faults: Callable[..., None]
) -> None:
    """They are shared out to the tasks in the order in which they came, and by name after a restart."""
    feed = Feed(folder=tmp_path, seed=13, files=2, ahead_s=(0, 2000))
    live(feed, parallelism=2, mode=mode, stop=False)
    feed.join("after-all.jsonl", second=1500)
    for _ in range(2):
        live(feed, parallelism=2, mode=mode, stop=False)
        faults(kills=1)
    assert run_to_end(tmp_path, Job(mode=mode, options=BOUNDED | {"parallelism": 2})).report["outcome"] == "ended"
    judge(tmp_path, feed.written)
