"""Torn, short, flipped and missing files of a checkpoint: always noticed, and what comes out is exact all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.examples import rest
from tests.faults.job import BOUNDED, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import opened_store, released, run_to_end, sealed, started, store_of

from fordstone.plan.plan import Mode

EPOCHS = 6
LIVES_MAX = 20
STEADY = {"interval": "60ms"}
NARROW = {"parallelism": 2, "batch_rows": 10, "channel_rows_max": 40}


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """A pipeline that was killed after some epochs. The newest has rows and was released."""
    feed = Feed(folder=tmp_path_factory.mktemp("crashed"), seed=3)

    def killed() -> None:
        goal = released(feed.folder) + EPOCHS

        def grown() -> bool:
            feed.write(6)
            return released(feed.folder) >= goal

        with started(feed.folder, Job(options=STEADY)) as process:
            process.until(grown, f"{EPOCHS} epochs")
            assert process.kill().killed

    def usable() -> bool:
        folder = feed.folder
        return released(folder) == sealed(folder) and bool(newest_state(folder) and newest_output(folder))

    return made_by(killed, feed, usable)


@pytest.fixture(scope="module")
def crashed_unaligned(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """The same with rows in flight at the newest barrier."""
    feed = Feed(folder=tmp_path_factory.mktemp("crashed"), seed=4)

    def killed() -> None:
        goal = released(feed.folder) + EPOCHS
        seen = -1

        def grown() -> bool:
            nonlocal seen
            newest = released(feed.folder)
            if newest > seen:
                seen = newest
                feed.write(150)
            return newest >= goal and opened_store(feed.folder).cut(newest).overtaking

        with started(feed.folder, Job(mode="unaligned", options=STEADY | NARROW)) as process:
            process.until(grown, f"{EPOCHS} epochs")
            assert process.kill().killed

    def usable() -> bool:
        folder = feed.folder
        return opened_store(folder).cut(sealed(folder)).overtaking and bool(newest_output(folder))

    return made_by(killed, feed, usable)


def made_by(killed: Callable[[], None], feed: Feed, usable: Callable[[], bool]) -> Feed:
    """Run and kill a pipeline until the kill came at the right time."""
    for _ in range(LIVES_MAX):
        killed()
        if usable():
            return feed
    raise AssertionError(f"none of {LIVES_MAX} kills came at the right time")


@pytest.fixture
def feed(crashed: Feed, tmp_path: Path) -> Feed:
    """A copy to be damaged."""
    return crashed.copy(tmp_path / "job")


def newest_manifest(folder: Path) -> list[Path]:
    return [max((store_of(folder) / "manifests").glob("*.json"))]


def newest_state(folder: Path) -> list[Path]:
    """A run that the checkpoint before does not have."""
    store = opened_store(folder)
    *_, before, newest = (store.manifest(epoch) for epoch in store.epochs())
    shared = {run.digest for run in before.runs()}
    own = [run.digest for state in newest.states for run in state.runs if run.digest not in shared]
    return [store_of(folder) / "runs" / digest for digest in own[:1]]


def state_of_each(folder: Path) -> list[Path]:
    """A run of every checkpoint: none of them is whole, and all epochs are computed again from the first."""
    store = opened_store(folder)
    digests = {store.manifest(epoch).states[0].runs[0].digest for epoch in store.epochs()}
    return [store_of(folder) / "runs" / digest for digest in digests]


def newest_output(folder: Path) -> list[Path]:
    store = opened_store(folder)
    newest = store.manifest(store.epochs()[-1])
    own = [run.digest for segment in newest.segments if segment.sink == "kept" for run in segment.runs]
    return [store_of(folder) / "runs" / digest for digest in own[:1]]


def cut_log(folder: Path) -> list[Path]:
    return [store_of(folder) / "epochs.jsonl"]


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


DAMAGES = [flip, *rest(delete, empty, halve)]
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


def every_manifest(folder: Path) -> list[Path]:
    return sorted((store_of(folder) / "manifests").glob("*.json"))


@pytest.mark.parametrize("damage", [delete, *rest(flip)])
def test_without_any_manifest_all_is_computed_again_from_the_cuts(
    damage: Callable[[Path], None], feed: Feed, faults: Callable[..., None]
) -> None:
    newest = sealed(feed.folder)
    for path in every_manifest(feed.folder):
        damage(path)
        faults(files_damaged=1)
    assert run_to_end(feed.folder, Job(options=BOUNDED)).report["outcome"] == "ended"
    judge(feed.folder, feed.written)
    assert sealed(feed.folder) == newest + 1


@pytest.mark.parametrize("damage", [delete, *rest(flip)])
@pytest.mark.parametrize("victim", [newest_manifest, every_manifest])
def test_without_cuts_a_damaged_manifest_stops_the_pipeline_and_nothing_is_written(
    victim: Callable[[Path], list[Path]], damage: Callable[[Path], None], feed: Feed, faults: Callable[..., None]
) -> None:
    newest = sealed(feed.folder)
    for path in victim(feed.folder):
        damage(path)
    (log,) = cut_log(feed.folder)
    log.write_bytes(b"\0" * log.stat().st_size)
    faults(files_damaged=len(victim(feed.folder)) + 1)
    before = output(feed.folder)
    ended = run_to_end(feed.folder, Job(options=BOUNDED))
    assert ended.code == 1
    if damage is delete:
        # No word of the epoch is left but the output itself: its sinks refuse to give it a second meaning.
        assert "SinkError: sink kept: out/kept has epoch" in ended.errors
        assert "Nothing was written" in ended.errors
    else:
        assert "CheckpointError: pipeline faults cannot be resumed: " in ended.errors
        assert f"but epoch {newest} is sealed and its output may already have been released" in ended.errors
        assert "Restore the files from a copy" in ended.errors
    assert output(feed.folder) == before


def output(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.glob("out/*/[!.]*"))}


@pytest.mark.parametrize("victim", [newest_manifest, newest_output, every_manifest])
def test_output_that_was_taken_away_does_not_come_back_when_its_epoch_is_computed_again(
    victim: Callable[[Path], list[Path]], feed: Feed, faults: Callable[..., None]
) -> None:
    """A receiver takes files once that of a later epoch is there; in the end it has every row once."""
    taken = feed.folder / "taken"
    for sink in (feed.folder / "out").iterdir():
        (taken / sink.name).mkdir(parents=True)
        for file in sorted(sink.glob("epoch-*"))[:-1]:
            file.rename(taken / sink.name / file.name)
    for path in victim(feed.folder):
        flip(path)
        faults(files_damaged=1)
    assert run_to_end(feed.folder, Job(options=BOUNDED)).report["outcome"] == "ended"
    for file in taken.glob("*/epoch-*"):
        back = feed.folder / "out" / file.parent.name / file.name
        assert not back.exists(), f"{file.name} of sink {file.parent.name} came out again"
        file.rename(back)
    judge(feed.folder, feed.written)


@pytest.mark.parametrize("failpoint", ["manifest.renamed", *rest("run.synced", "sink.released")])
@pytest.mark.parametrize(("mode", "victim"), [("aligned", state_of_each), ("unaligned", newest_manifest)])
def test_a_kill_while_epochs_are_computed_again_changes_nothing(
    mode: Mode,
    victim: Callable[[Path], list[Path]],
    failpoint: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    faults: Callable[..., None],
) -> None:
    crashed: Feed = request.getfixturevalue("crashed" if mode == "aligned" else "crashed_unaligned")
    feed = crashed.copy(tmp_path / "job")
    for path in victim(feed.folder):
        flip(path)
        faults(files_damaged=1)
    hits = tmp_path / "hits"
    job = Job(mode=mode, options=BOUNDED | NARROW)
    for count in (1, 2):
        ended = run_to_end(feed.folder, job, failpoint=f"{failpoint}:{count}@{hits}")
        assert ended.killed or (ended.code == 0 and count == 2), ended.errors
        faults(kills=int(ended.killed))
    assert hits.exists()
    assert run_to_end(feed.folder, job).report["outcome"] in {"ended", "already_ended"}
    judge(feed.folder, feed.written)


def test_damaged_output_of_an_unaligned_epoch_is_refused_for_what_it_released_cannot_be_known(
    crashed_unaligned: Feed, tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = crashed_unaligned.copy(tmp_path / "job")
    for path in newest_output(feed.folder):
        flip(path)
        faults(files_damaged=1)
    before = output(feed.folder)
    ended = run_to_end(feed.folder, Job(mode="unaligned", options=BOUNDED | NARROW))
    assert ended.code == 1
    assert (
        f"ReplayError: epoch {sealed(feed.folder) + 1} is sealed and unaligned, and its output for sink kept is damaged"
        in ended.errors
    )
    assert output(feed.folder) == before
