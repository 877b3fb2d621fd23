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
from tests.faults.process import opened_store, released, run_to_end, sealed, started, store_of

EPOCHS = 6
STEADY = {"interval": "60ms"}


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """A pipeline that was killed after some epochs, each of them with rows."""
    feed = Feed(folder=tmp_path_factory.mktemp("crashed"), seed=3)

    def grown() -> bool:
        feed.write(6)
        return released(feed.folder) >= EPOCHS

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


def newest_manifest(folder: Path) -> list[Path]:
    return [max((store_of(folder) / "manifests").glob("*.json"))]


def newest_state(folder: Path) -> list[Path]:
    """A run that the checkpoint before does not have."""
    store = opened_store(folder)
    *_, before, newest = (store.manifest(epoch) for epoch in store.epochs())
    shared = {run.digest for run in before.runs()}
    own = [run.digest for state in newest.states for run in state.runs if run.digest not in shared]
    return [store_of(folder) / "runs" / own[0]]


def state_of_each(folder: Path) -> list[Path]:
    """A run of every checkpoint: none of them is whole, and all epochs are computed again from the first."""
    store = opened_store(folder)
    digests = {store.manifest(epoch).states[0].runs[0].digest for epoch in store.epochs()}
    return [store_of(folder) / "runs" / digest for digest in digests]


def newest_output(folder: Path) -> list[Path]:
    store = opened_store(folder)
    newest = store.manifest(store.epochs()[-1])
    own = [run.digest for segment in newest.segments if segment.sink == "kept" for run in segment.runs]
    return [store_of(folder) / "runs" / own[0]]


def cut_log(folder: Path) -> list[Path]:
    return [store_of(folder) / "cuts.jsonl"]


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
VICTIMS = [newest_manifest, newest_state, state_of_each, newest_output, cut_log]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_damaged_file_is_noticed_set_aside_and_made_up_for(
    victim: Callable[[Path], list[Path]], damage: Callable[[Path], None], feed: Feed, faults: Callable[..., None]
) -> None:
    paths = victim(feed.folder)
    newest = sealed(feed.folder)
    for path in paths:
        damage(path)
        faults(files_damaged=1)
    damaged = [path.read_bytes() for path in paths if path.exists()]
    feed.write(40)
    ended = run_to_end(feed.folder, Job(options=BOUNDED))
    assert ended.report["outcome"] == "ended"
    assert "damaged" in ended.errors
    judge(feed.folder, feed.written)
    assert sealed(feed.folder) == newest + 1
    if victim is not cut_log:
        aside = [file.read_bytes() for file in (store_of(feed.folder) / "aside").iterdir()]
        assert all(data in aside for data in damaged), "a damaged file was not kept"
