"""A user's function that another system fails: started again with growing waits, exact in the end, or given up by name."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.job import BOUNDED, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import run_to_end

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
