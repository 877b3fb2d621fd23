"""A user's function that another system fails: started again with growing waits, exact in the end, or given up by name.

And one that raises for some rows, which become dead letters, each once, whatever is killed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.examples import rest
from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, judge, judge_refused
from tests.faults.process import run_to_end, started, store_of
from tests.faults.test_random_kills import FEED_ROWS, NARROW, feed_until

from fordstone.plan.plan import Mode

SMALL = {"interval": "2ms", "batch_rows": 20}


def test_a_function_that_fails_twice_is_run_again_and_the_result_is_exact(tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=51)
    feed.write(300)
    ended = run_to_end(tmp_path, Job(failing=2, options=BOUNDED | SMALL))
    assert ended.report["outcome"] == "ended"
    assert ended.report["progress"]["restarts"] == 2
    assert (tmp_path / "raised").read_bytes() == b"xx"
    (first, first_us), (second, second_us) = re.findall(r"failures=(\d) wait_us=(\d+)", ended.errors)
    assert (first, second) == ("1", "2")
    # A random half of each wait is jitter.
    assert 50_000 <= int(first_us) <= 100_000 <= int(second_us) <= 200_000
    assert ended.errors.count("pipeline failed") == 2
    judge(tmp_path, feed.written)


def test_a_function_that_always_fails_is_given_up_by_name(tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=52)
    feed.write(300)
    restart = {"failures_max": 2, "wait_first_us": 1000}
    ended = run_to_end(tmp_path, Job(failing=1000, options=BOUNDED | SMALL | {"restart": restart}))
    assert ended.code == 1
    assert (tmp_path / "raised").read_bytes() == b"xxx"
    (shown,) = [line for line in ended.errors.splitlines() if line.startswith("TaskError: ")]
    assert "pipeline faults failed 3 times in a row" in shown
    assert "the sensor table is locked" in shown
    assert "step flaky" in ended.errors.partition("TaskError: ")[2]
    # Once the function works again, so does the pipeline.
    assert run_to_end(tmp_path, Job(options=BOUNDED)).report["outcome"] == "ended"
    judge(tmp_path, feed.written)


@pytest.mark.parametrize("mode", ["aligned", *rest("unaligned", "blocking")])
def test_dead_letters_are_each_kept_once_however_often_the_pipeline_is_killed(
    mode: Mode, tmp_path: Path, faults: Callable[..., None]
) -> None:
    rng = Random(f"{mode} 53")
    feed = Feed(folder=tmp_path, seed=53)
    feed.write(FEED_ROWS)
    job = Job(mode=mode, refusing=True, options=LIVE | NARROW)
    for _ in range(4):
        with started(tmp_path, job) as process:
            feed_until(process, feed, rng)
            assert process.kill().killed
        faults(kills=1)
    feed.write(FEED_ROWS)
    ended = run_to_end(tmp_path, Job(mode=mode, refusing=True, options=BOUNDED | {"parallelism": 2}))
    assert ended.report["outcome"] == "ended"
    judge(tmp_path, feed.written)
    judge_refused(tmp_path, store_of(tmp_path) / "dead-letters", feed.written)
