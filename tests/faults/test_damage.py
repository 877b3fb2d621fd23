"""Torn, short, flipped and missing files of a checkpoint: always noticed, and what comes out is exact all the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from tests.faults.job import BOUNDED, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import opened_store, run_to_end, sealed, started, store_of

EPOCHS = 6
STEADY = {"interval": "60ms"}


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """A pipeline that was killed after some epochs, each of them with rows."""
    feed = Feed(folder=tmp_path_factory.mktemp("crashed"), seed=3)

    def grown() -> bool:
        feed.write(6)
        return sealed(feed.folder) >= EPOCHS

    with started(feed.folder, Job(options=STEADY)) as process:
        process.until(grown, f"{EPOCHS} epochs")
        assert process.kill().killed
    return feed


@pytest.fixture
def feed(crashed: Feed, tmp_path: Path) -> Feed:
    """A copy to be damaged."""
    shutil.copytree(crashed.folder, tmp_path / "job")
    copy = deepcopy(crashed)
    copy.folder = tmp_path / "job"
    return copy


def newest_manifest(folder: Path) -> Path:
    return max((store_of(folder) / "manifests").glob("*.json"))


def state_run_of_the_newest(folder: Path) -> Path:
    """One that the checkpoint before it does not have."""
    store = opened_store(folder)
    *_, before, newest = (store.manifest(epoch) for epoch in store.epochs())
    shared = {run.digest for run in before.runs()}
    own = [run.digest for state in newest.states for run in state.runs if run.digest not in shared]
    return store_of(folder) / "runs" / own[0]


def state_run_of_all(folder: Path) -> Path:
    """One that every checkpoint names: none of them is whole without it."""
    store = opened_store(folder)
    named = [{run.digest for state in store.manifest(epoch).states for run in state.runs} for epoch in store.epochs()]
    return store_of(folder) / "runs" / min(set.intersection(*named))


def segment_run(folder: Path) -> Path:
    store = opened_store(folder)
    newest = store.manifest(store.epochs()[-1])
    own = [run.digest for segment in newest.segments if segment.sink == "kept" for run in segment.runs]
    return store_of(folder) / "runs" / own[0]


def cut_log(folder: Path) -> Path:
    return store_of(folder) / "cuts.jsonl"


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


DAMAGES = [empty, halve, flip, delete]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "victim", [newest_manifest, state_run_of_the_newest, state_run_of_all, segment_run, cut_log]
)
def test_a_damaged_file_is_noticed_set_aside_and_made_up_for(
    victim: Callable[[Path], Path], damage: Callable[[Path], None], feed: Feed, faults: Callable[..., None]
) -> None:
    path = victim(feed.folder)
    damage(path)
    faults(files_damaged=1)
    damaged = path.read_bytes() if path.exists() else None
    newest = sealed(feed.folder)
    feed.write(40)
    ended = run_to_end(feed.folder, Job(options=BOUNDED))
    assert ended.report["outcome"] == "ended"
    assert "damaged" in ended.errors
    judge(feed.folder, feed.written)
    assert sealed(feed.folder) > newest
    if damaged is not None and victim is not cut_log:
        aside = [file.read_bytes() for file in (store_of(feed.folder) / "aside").iterdir()]
        assert damaged in aside, "the damaged file was not kept"
