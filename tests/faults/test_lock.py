"""Two processes on one state directory: the second is refused until the first is gone, however it went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import run_to_end, sealed, started


def test_a_second_process_is_refused_naming_the_first(tmp_path: Path, faults: Callable[..., None]) -> None:
    feed = Feed(folder=tmp_path, seed=41)
    feed.write(200)
    (tmp_path / "second").mkdir()
    for name in ("in", "out", "state"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "second" / name).symlink_to(tmp_path / name)
    with started(tmp_path, Job(options=LIVE)) as first:
        first.until(lambda: sealed(tmp_path) > 0, "first epoch")
        refused = run_to_end(tmp_path / "second", Job(options=BOUNDED))
        assert refused.code == 1
        assert refused.errors == (
            f"StoreLockedError: the state directory state belongs to process {first.pid}, which is still running.\n"
            "Stop that process, or give this one a directory of its own.\n"
        )
        before = sealed(tmp_path)
        feed.write(30)
        first.until(lambda: sealed(tmp_path) > before, "another epoch: the first goes on undisturbed")
        assert first.kill().killed
        faults(kills=1)
    assert run_to_end(tmp_path / "second", Job(options=BOUNDED)).report["outcome"] == "ended"
    judge(tmp_path, feed.written)
