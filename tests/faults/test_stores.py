"""Checkpoints and sinks in S3 and in HDFS, on real servers: processes and servers are killed, and another machine takes over."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Event

import pytest
from tests.examples import rest
from tests.faults.job import BOUNDED, LIVE, NODE, PIPELINE, Job
from tests.faults.oracle import Feed, judge
from tests.faults.process import Process, run_to_end, sealed, started
from tests.services.base import Server
from tests.services.hdfs import Hdfs
from tests.services.s3 import S3

from fordstone.epochs.manifest import parse_epoch_name
from fordstone.storage.remote import open_filesystem, open_remote

ROWS = 60
SLOW = LIVE | {"interval": "50ms"}


def copied(url: str) -> int:
    """The newest epoch whose checkpoint is in the store."""
    names = open_remote(f"{url}/copies").sizes(f"{PIPELINE}/{NODE}/manifests")
    return max((parse_epoch_name(name) or 0 for name in names), default=0)


def released(url: str) -> int:
    """The newest epoch that the plain sink has."""
    names = open_remote(f"{url}/out").sizes("kept")
    return max(
        (int(name.partition("-")[2].partition(".")[0]) for name in names if name.startswith("epoch-")), default=0
    )


def job(url: str, options: dict[str, object]) -> Job:
    """Its copies and its sinks are in the store."""
    return Job(out=f"{url}/out", options=options | {"remote": f"{url}/copies"})


def grow(feed: Feed, url: str, epochs: int) -> None:
    """Run for some epochs, then stop: what was sealed last is copied before the process ends."""
    goal = sealed(feed.folder) + epochs
    with started(feed.folder, job(url, SLOW)) as process:
        while sealed(feed.folder) < goal:
            another_epoch(feed, process)
        assert process.stop().report["outcome"] == "stopped"


def finish(feed: Feed, url: str) -> int | None:
    """Read the rest, check every row, and return the checkpoint that the run began with."""
    feed.write(ROWS)
    ended = run_to_end(feed.folder, job(url, BOUNDED))
    assert ended.report["outcome"] == "ended"
    judge(feed.folder, feed.written, out=f"{url}/out")
    assert copied(url) == sealed(feed.folder)
    found: int | None = ended.report["resumed_from"]
    return found


def test_another_machine_goes_on_from_the_store(store_url: str, tmp_path: Path, faults: Callable[..., None]) -> None:
    feed = Feed(folder=tmp_path / "one", seed=81)
    grow(feed, store_url, 3)
    newest = sealed(feed.folder)
    assert copied(store_url) == newest
    other = feed.copy(tmp_path / "other")
    shutil.rmtree(other.folder / "state")
    faults(states_lost=1)
    assert finish(other, store_url) == newest


@pytest.mark.parametrize(
    "failpoint",
    ["upload.run:2", "sink.released:3", *rest("upload.manifest:1", "manifest.renamed:2", "sink.released:1")],
)
def test_a_kill_between_the_steps_leaves_each_row_once(
    store_url: str, tmp_path: Path, failpoint: str, faults: Callable[..., None]
) -> None:
    feed = Feed(folder=tmp_path, seed=82)
    feed.write(ROWS)
    killed = run_to_end(tmp_path, job(store_url, BOUNDED), failpoint=f"{failpoint}@{tmp_path / 'hits'}")
    assert killed.killed, killed.errors
    faults(kills=1)
    ended = run_to_end(tmp_path, job(store_url, BOUNDED))
    assert ended.report["outcome"] in {"ended", "already_ended"}
    judge(tmp_path, feed.written, out=f"{store_url}/out")
    assert copied(store_url) == sealed(tmp_path)


@pytest.mark.parametrize("seed", [1, *rest(2, 3)])
def test_kills_at_any_moment_leave_each_row_once_and_nothing_else(
    store_url: str, tmp_path: Path, seed: int, faults: Callable[..., None]
) -> None:
    feed, random = Feed(folder=tmp_path, seed=seed), Random(seed)
    for _ in range(4):
        feed.write(ROWS)
        before, wait_s = sealed(tmp_path), random.uniform(0.0, 0.6)
        with started(tmp_path, job(store_url, SLOW)) as process:
            process.until(lambda before=before: sealed(tmp_path) > before, "an epoch")  # type: ignore[misc]
            Event().wait(wait_s)  # the moment is the fault
            assert process.kill().killed
            faults(kills=1)
    finish(feed, store_url)
    filesystem, root = open_filesystem(store_url, kind="files")
    found = [name.rpartition("/")[2] for name in filesystem.find(root)]
    assert found
    assert [name for name in found if name.startswith(".")] == []


@pytest.fixture(name="name_node")
def name_node_fixture(hdfs: Hdfs) -> Iterator[Server]:
    """The NameNode of all tests, which a test may kill: they run one after the other."""
    yield hdfs.name_node
    if hdfs.name_node.pid is None:
        hdfs.name_node.launch()
    hdfs.wait()


def test_a_killed_s3_stops_neither_epochs_nor_copies_nor_sinks_for_good(
    own_s3: S3, tmp_path: Path, faults: Callable[..., None]
) -> None:
    away_and_back(f"s3://{own_s3.bucket()}", own_s3, tmp_path, faults)


def test_a_killed_name_node_stops_neither_epochs_nor_copies_nor_sinks_for_good(
    hdfs_url: str, name_node: Server, tmp_path: Path, faults: Callable[..., None]
) -> None:
    away_and_back(hdfs_url, name_node, tmp_path, faults)


def away_and_back(url: str, server: Server, folder: Path, faults: Callable[..., None]) -> None:
    """Two pipelines. One has only its copies in the store: it seals epochs while they wait. The sinks of the other wait, and it says so."""
    copying, writing = Feed(folder=folder / "copying", seed=83), Feed(folder=folder / "writing", seed=84)
    copies, out = {"remote": f"{url}/copies"}, f"{url}/out"
    with (
        started(copying.folder, Job(options=SLOW | copies)) as one,
        started(writing.folder, Job(out=out, options=SLOW)) as other,
    ):
        another_epoch(copying, one)
        writing.write(ROWS)
        one.until(lambda: copied(url) > 0, "a copy")
        other.until(lambda: released(url) > 0, "output")
        server.kill()
        faults(kills=1)
        for _ in range(3):
            another_epoch(copying, one)
        writing.write(ROWS)
        one.until(lambda: "checkpoint not copied" in one.errors(), "the warning")
        other.until(lambda: any(line.get("stalled") for line in other.lines()), "a stall")
        assert any(out in str(line.get("stalled")) for line in other.lines())
        server.start()
        one.until(lambda: copied(url) == sealed(copying.folder), "the copy of the newest checkpoint")
        other.until(lambda: other.lines()[-1]["stalled"] is None, "the end of the stall")
        for process in (one, other):
            assert process.stop().report["outcome"] == "stopped"
    shutil.rmtree(copying.folder / "state")
    for feed in (copying, writing):
        feed.write(ROWS)
    assert run_to_end(copying.folder, Job(options=BOUNDED | copies)).report["resumed_from"] == copied(url) - 1
    judge(copying.folder, copying.written)
    assert run_to_end(writing.folder, Job(out=out, options=BOUNDED)).report["outcome"] == "ended"
    judge(writing.folder, writing.written, out=out)


def another_epoch(feed: Feed, process: Process) -> None:
    before = sealed(feed.folder)
    feed.write(ROWS)
    process.until(lambda: sealed(feed.folder) > before, "another epoch")
