"""A full disk, for real: nothing is sealed, nothing is released, and when there is room it continues as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.job import BOUNDED, LIVE, NODE, PIPELINE, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import Process, released, run_to_end, sealed, started
from tests.faults.small_disk import SmallDisk, small_disk

from fordstone.plan.plan import StateKind

FEED_ROWS = 60


def stall(process: Process, feed: Feed, disk: SmallDisk) -> str:
    """Let it seal some epochs, then fill the disk until it says that it stands still; gives why."""
    while sealed(feed.folder) < 3:
        before = sealed(feed.folder)
        feed.write(FEED_ROWS)
        process.until(lambda before=before: sealed(feed.folder) > before, "another epoch")  # type: ignore[misc]

    def stands() -> bool:
        disk.fill()
        feed.write(2)
        return stalled(process) is not None

    process.until(stands, "stall")
    return str(stalled(process))


def stalled(process: Process) -> str | None:
    """Why it stands still, as it said last."""
    lines = process.lines()
    return lines[-1].get("stalled") if lines else None


def last_try(place: Path) -> int:
    """When a file was last begun or taken away below."""
    return max(directory.stat().st_mtime_ns for directory in (place, *place.rglob("*")) if directory.is_dir())


@pytest.mark.parametrize("place", ["state", "out"])
def test_a_full_disk_stops_the_pipeline_and_room_lets_it_go_on(
    place: str, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with small_disk(tmp_path, place) as disk:
        feed = Feed(folder=disk.folder, seed=21)
        with started(disk.folder, Job(options=LIVE), inside=disk.inside) as process:
            why = stall(process, feed, disk)
            faults(full_disks=1)
            assert why.startswith("the disk is full: could not write")
            assert "Nothing was acknowledged" in why
            before = (sealed(disk.folder), released(disk.folder))
            assert before[1] <= before[0]
            feed.write(FEED_ROWS)
            tried = last_try(disk.place)
            process.until(lambda: last_try(disk.place) > tried, "another try")
            assert (sealed(disk.folder), released(disk.folder)) == before
            disk.make_room()
            process.until(lambda: stalled(process) is None, "going on")
            process.until(lambda: sealed(disk.folder) > before[0] + 1, "another epoch")
            assert process.stop().report["outcome"] == "stopped"
        assert run_to_end(disk.folder, Job(options=BOUNDED), inside=disk.inside).report["outcome"] == "ended"
        judge(disk.folder, feed.written)


@pytest.mark.parametrize("kind", ["rocksdb", "file"])
def test_a_full_disk_of_working_files_stops_the_pipeline_and_room_lets_it_go_on(
    kind: StateKind, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with small_disk(tmp_path, f"state/{PIPELINE}/{NODE}/working", size="8m") as disk:
        feed = Feed(folder=disk.folder, seed=23)
        with started(disk.folder, Job(state=kind, options=LIVE), inside=disk.inside) as process:
            why = stall(process, feed, disk)
            faults(full_disks=1)
            assert why.startswith("the disk is full: could not")
            assert "/working/" in why
            feed.write(FEED_ROWS)
            before = sealed(disk.folder)
            disk.make_room()
            process.until(lambda: stalled(process) is None, "going on")
            process.until(lambda: sealed(disk.folder) > before + 1, "another epoch")
            assert process.stop().report["outcome"] == "stopped"
        ended = run_to_end(disk.folder, Job(state=kind, options=BOUNDED), inside=disk.inside)
        assert ended.report["outcome"] == "ended"
        judge(disk.folder, feed.written)


@pytest.mark.parametrize("place", ["state", "out"])
def test_a_pipeline_killed_on_a_full_disk_loses_and_doubles_nothing(
    place: str, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with small_disk(tmp_path, place) as disk:
        feed = Feed(folder=disk.folder, seed=22)
        with started(disk.folder, Job(options=LIVE), inside=disk.inside) as process:
            stall(process, feed, disk)
            faults(full_disks=1, kills=1)
            assert process.kill().killed
        with started(disk.folder, Job(options=BOUNDED), inside=disk.inside) as process:
            process.until_dead_or(lambda: stalled(process) is not None, "stall")
            assert process.running or "StorageError: the disk is full" in process.ended().errors
            disk.make_room()
            process.ended()
        assert run_to_end(disk.folder, Job(options=BOUNDED), inside=disk.inside).report["outcome"] in {
            "ended",
            "already_ended",
        }
        judge(disk.folder, feed.written)
