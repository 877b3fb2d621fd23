"""Copies elsewhere: a machine that lost its state goes on from them, or its sinks refuse; never twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.examples import rest
from tests.faults.job import BOUNDED, LIVE, NODE, PIPELINE, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import released, run_to_end, sealed, started, store_of

REMOTE = {"remote": "file://remote"}
FEED_ROWS = 60


def at_the_remote(folder: Path) -> int:
    """The newest epoch that has been copied."""
    return sealed(folder, "remote")


def grow(feed: Feed, epochs: int) -> None:
    """Run for some epochs, then stop: what was sealed last is copied before the process ends."""
    goal = sealed(feed.folder) + epochs
    with started(feed.folder, Job(options=LIVE | REMOTE)) as process:
        while sealed(feed.folder) < goal:
            before = sealed(feed.folder)
            feed.write(FEED_ROWS)
            process.until(lambda before=before: sealed(feed.folder) > before, "another epoch")  # type: ignore[misc]
        assert process.stop().report["outcome"] == "stopped"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    feed = Feed(folder=tmp_path_factory.mktemp("stopped"), seed=71)
    grow(feed, 5)
    assert at_the_remote(feed.folder) == sealed(feed.folder)
    return feed


@pytest.fixture
def feed(stopped: Feed, tmp_path: Path) -> Feed:
    """A pipeline that was stopped, with a copy of its newest checkpoint."""
    return stopped.copy(tmp_path / "job")


@pytest.mark.parametrize("parallelism", [3, *rest(1)])
def test_a_machine_that_lost_its_state_goes_on_from_the_remote_copy(
    parallelism: int, feed: Feed, faults: Callable[..., None]
) -> None:
    newest = sealed(feed.folder)
    shutil.rmtree(feed.folder / "state")
    faults(states_lost=1)
    feed.write(FEED_ROWS)
    ended = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE | {"parallelism": parallelism}))
    assert ended.report["outcome"] == "ended"
    assert ended.report["resumed_from"] == newest
    judge(feed.folder, feed.written)
    assert at_the_remote(feed.folder) == sealed(feed.folder) == newest + 1


@pytest.mark.parametrize("failpoint", ["run.renamed:2", "manifest.renamed:1", *rest("cut.synced:1", "sink.released:2")])
def test_a_kill_while_the_copy_is_brought_back_changes_nothing(
    failpoint: str, feed: Feed, faults: Callable[..., None]
) -> None:
    shutil.rmtree(feed.folder / "state")
    hits = feed.folder / "hits"
    killed = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE), failpoint=f"{failpoint}@{hits}")
    assert killed.killed, killed.errors
    faults(states_lost=1, kills=1)
    feed.write(FEED_ROWS)
    assert run_to_end(feed.folder, Job(options=BOUNDED | REMOTE)).report["outcome"] == "ended"
    judge(feed.folder, feed.written)


def test_a_copy_that_is_older_than_the_sinks_is_refused_by_them(feed: Feed, faults: Callable[..., None]) -> None:
    """The machine went down before its last epochs were copied: their cuts are lost with it, but not their output."""
    shutil.copytree(feed.folder / "remote", feed.folder / "older")
    copied = sealed(feed.folder)
    grow(feed, 3)
    shutil.rmtree(feed.folder / "state")
    faults(states_lost=1)
    before = {path: path.read_bytes() for path in feed.folder.glob("out/*/epoch-*")}
    ended = run_to_end(feed.folder, Job(options=BOUNDED | {"remote": "file://older"}))
    assert ended.code == 1
    assert f"only up to epoch {copied}. " in ended.errors
    assert "--discard-later-output" in ended.errors
    assert {path: path.read_bytes() for path in feed.folder.glob("out/*/epoch-*")} == before


@pytest.mark.parametrize("victim", ["run", "manifest"])
def test_a_damaged_copy_is_passed_over_for_one_before(victim: str, feed: Feed, faults: Callable[..., None]) -> None:
    newest = sealed(feed.folder)
    there = feed.folder / "remote" / PIPELINE / NODE
    path = max((there / "manifests").iterdir())
    if victim == "run":
        path = there / "runs" / json.loads(path.read_text())["manifest"]["states"][0]["runs"][-1]["digest"]
    path.write_bytes(path.read_bytes()[:-5])
    shutil.rmtree(feed.folder / "state")
    faults(states_lost=1, files_damaged=1)
    feed.write(FEED_ROWS)
    ended = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE))
    assert ended.report["outcome"] == "ended"
    assert (ended.report["resumed_from"] or 0) < newest
    judge(feed.folder, feed.written)


def test_when_every_copy_is_damaged_all_epochs_are_replayed_from_the_cuts_at_the_remote(
    feed: Feed, faults: Callable[..., None]
) -> None:
    there = feed.folder / "remote" / PIPELINE / NODE
    for manifest in (there / "manifests").iterdir():
        for state in json.loads(manifest.read_text())["manifest"]["states"]:
            for run in state["runs"]:
                (there / "runs" / run["digest"]).write_bytes(b"")
                faults(files_damaged=1)
    shutil.rmtree(feed.folder / "state")
    faults(states_lost=1)
    feed.write(FEED_ROWS)
    ended = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE))
    assert ended.report["outcome"] == "ended"
    assert ended.report["resumed_from"] is None
    judge(feed.folder, feed.written)


def test_damage_here_is_made_up_for_by_the_copy(feed: Feed, faults: Callable[..., None]) -> None:
    newest = sealed(feed.folder)
    for file in (store_of(feed.folder) / "manifests").iterdir():
        file.write_bytes(b"")
        faults(files_damaged=1)
    feed.write(FEED_ROWS)
    ended = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE))
    assert ended.report["outcome"] == "ended"
    assert ended.report["resumed_from"] == newest
    judge(feed.folder, feed.written)


def test_a_remote_that_cannot_be_reached_does_not_stop_a_machine_with_state_of_its_own(feed: Feed) -> None:
    away, place = feed.folder / "away", feed.folder / "remote"
    place.rename(away)
    place.write_text("a file, where the share was")
    feed.write(FEED_ROWS)
    ended = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE))
    assert ended.report["outcome"] == "ended"
    assert "remote copies not reached" in ended.errors
    assert "checkpoint not copied" in ended.errors
    judge(feed.folder, feed.written)
    place.unlink()
    away.rename(place)
    assert run_to_end(feed.folder, Job(options=BOUNDED | REMOTE)).report["outcome"] == "already_ended"
    assert at_the_remote(feed.folder) == sealed(feed.folder)


def test_a_remote_that_cannot_be_reached_stops_a_machine_without_state(feed: Feed, faults: Callable[..., None]) -> None:
    """Whether it had sealed anything cannot be known, and to start over would release it a second time."""
    (feed.folder / "remote").rename(feed.folder / "away")
    (feed.folder / "remote").write_text("a file, where the share was")
    shutil.rmtree(feed.folder / "state")
    faults(states_lost=1)
    before = released(feed.folder)
    ended = run_to_end(feed.folder, Job(options=BOUNDED | REMOTE))
    assert ended.code == 1
    assert "StorageError: " in ended.errors
    assert released(feed.folder) == before


def test_what_a_kill_kept_from_the_remote_is_copied_by_the_next_run_even_if_all_input_was_read(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = Feed(folder=tmp_path, seed=72)
    feed.write(FEED_ROWS)
    hits = tmp_path / "hits"
    killed = run_to_end(tmp_path, Job(options=BOUNDED | REMOTE), failpoint=f"upload.run:1@{hits}")
    assert killed.killed, killed.errors
    faults(kills=1)
    assert run_to_end(tmp_path, Job(options=BOUNDED | REMOTE)).report["outcome"] in {"ended", "already_ended"}
    assert at_the_remote(tmp_path) == sealed(tmp_path)
    shutil.rmtree(tmp_path / "state")
    assert run_to_end(tmp_path, Job(options=BOUNDED | REMOTE)).report["outcome"] == "already_ended"
    judge(tmp_path, feed.written)
    assert released(tmp_path) <= sealed(tmp_path)
