"""Kill -9 at every failpoint of the way to a commit, in real processes: nothing is lost and nothing is doubled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.examples import share_of
from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, all_out, judge
from tests.faults.process import Process, released, run_to_end, sealed, started

from fordstone.storage.failpoint import FAILPOINTS

REMOTE = {"remote": "file://remote"}
SMALL = {"batch_rows": 20}
"""There is more to read at every barrier."""
ROUNDS_MAX = 300
FEED_ROWS = 24
KEYS, FIRST_ROWS = 5000, 600
"""Enough that an epoch changes a small part of the state, and adds a run to it."""
COUNTS = {
    "run.created": (2, 9),
    "run.synced": (1, 12),
    "run.renamed": (3, 7),
    "runs.dir-synced": (1, 4),
    "cut.appended": (1, 3),
    "cut.synced": (1, 3, 2),
    "manifest.created": (1, 4),
    "manifest.synced": (1, 3),
    "manifest.renamed": (1, 3, 2),
    "manifest.dir-synced": (1, 3),
    "sink.before-release": (1, 8),
    "sink.released": (1, 7, 13),
    "retention.before": (1, 5),
    "retention.removed-manifest": (1, 3),
    "retention.removed-run": (1, 5),
    "upload.run": (2, 5),
    "upload.manifest": (1, 2),
    "merge.written": (1, 1),
}
"""At which hit each process of a chain is killed: the next one starts on what the one before has left."""


def feed_until_killed(process: Process, feed: Feed) -> None:
    """Let the input grow with the epochs, until the failpoint has ended the process."""
    for _ in range(ROUNDS_MAX):
        before = sealed(feed.folder)
        feed.write(FEED_ROWS)
        process.until_dead_or(lambda before=before: sealed(feed.folder) > before, "another epoch")  # type: ignore[misc]
        if not process.running:
            return
    pytest.fail(f"the failpoint did not fire in {ROUNDS_MAX} epochs")


@pytest.mark.parametrize("name", COUNTS)
def test_a_pipeline_killed_at_a_failpoint_loses_and_doubles_nothing(
    name: str, tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = Feed(folder=tmp_path, seed=FAILPOINTS.index(name), keys=KEYS)
    feed.write(FIRST_ROWS)
    for life, count in enumerate(COUNTS[name][: share_of(len(COUNTS[name]))]):
        hits = tmp_path / f"hits-{life}"
        kill_at(feed, f"{name}:{count}@{hits}")
        assert hits.read_text().splitlines() == [name] * count
        faults(kills=1)
    finish(feed)


def kill_at(feed: Feed, failpoint: str, *, mutant: str | None = None) -> None:
    """Run it until the failpoint ends it; nothing may have been released that was not sealed."""
    job = Job(options=LIVE | REMOTE | SMALL, mutant=mutant)
    with started(feed.folder, job, failpoint=failpoint) as process:
        feed_until_killed(process, feed)
        ended = process.ended()
    assert ended.killed, ended.errors
    assert released(feed.folder) <= sealed(feed.folder), "rows were released before their epoch was sealed"


def finish(feed: Feed, *, mutant: str | None = None) -> None:
    """Run it to the end and judge what came out."""
    ended = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE, mutant=mutant))
    assert ended.report["outcome"] == "ended"
    judge(feed.folder, feed.written)


@pytest.mark.parametrize("mutant", ["release_before_the_seal", "positions_after_the_barrier"])
def test_these_tests_notice(mutant: str, tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=2)
    feed.write(FIRST_ROWS)
    with pytest.raises(AssertionError, match=r"before their epoch was sealed|lost or wrong|already has epoch"):  # noqa: PT012 - whichever comes first
        for count in (1, 2):
            kill_at(feed, f"cut.synced:{count}", mutant=mutant)
        finish(feed, mutant=mutant)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """A pipeline that was stopped, with several runs of state."""
    feed = Feed(folder=tmp_path_factory.mktemp("stopped"), seed=1, keys=KEYS)
    feed.write(FIRST_ROWS)
    with started(feed.folder, Job(options=LIVE)) as process:
        for _ in range(4):
            feed.write(FEED_ROWS)
            process.until(lambda: all_out(feed.folder, feed.written), "epoch with the new rows")
        assert process.stop().code == 0
    return feed


@pytest.mark.parametrize("name", ["run.renamed", "merge.written", "manifest.renamed", "merge.replaced"])
def test_a_merge_killed_at_a_failpoint_leaves_the_checkpoint_as_it_was_or_merged(
    name: str, stopped: Feed, tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = stopped.copy(tmp_path / "job")
    hits = tmp_path / "hits"
    killed = run_to_end(feed.folder, Job(task="merge"), failpoint=f"{name}@{hits}")
    assert killed.killed, killed.errors
    assert hits.read_text().splitlines() == [name]
    faults(kills=1)
    merged = name in {"manifest.renamed", "merge.replaced"}
    again = run_to_end(feed.folder, Job(task="merge"))
    assert again.code == (1 if merged else 0), again.errors
    feed.write(FEED_ROWS)
    assert run_to_end(feed.folder, Job(options=BOUNDED)).report["outcome"] == "ended"
    judge(feed.folder, feed.written)


def test_every_failpoint_is_covered() -> None:
    assert {*COUNTS, "merge.replaced"} == set(FAILPOINTS)
