"""Builders for the tests of the store: small frames, manifests around them, and a script of commits."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest

from fordstone.epochs.manifest import ChannelLog, Cut, LoggedItem, Manifest, PartitionCut, Segment, SourceCut, StateRuns
from fordstone.epochs.store import CheckpointStore
from fordstone.state.base import RunRef
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import FAILPOINTS
from fordstone.testing.memory_disk import MemoryDisk

PIPELINE, NODE = "cold-chain", "gate-1"


class CountingFailpoints:
    """Counts hits, and insists that every name is a known one."""

    def __init__(self) -> None:
        self.hits: list[str] = []

    def hit(self, name: str) -> None:
        assert name in FAILPOINTS
        self.hits.append(name)


def frame_of(number: int) -> pl.DataFrame:
    return pl.DataFrame({"device": [f"device-{number}", "a device with a longer name"], "n": [number, -number]})


def cut_of(epoch: int, position: int | None = None, output: tuple[RunRef, ...] = ()) -> Cut:
    at = PartitionCut(position=epoch * 100 if position is None else position, max_time_us=epoch)
    sources = {"readings": SourceCut(partitions={"p0": at})}
    return Cut(epoch=epoch, sources=sources, segments=(Segment(sink="out", runs=output),))


def manifest_of(
    epoch: int,
    state: tuple[RunRef, ...] = (),
    output: tuple[RunRef, ...] = (),
    *,
    position: int | None = None,
    attempt: int = 1,
) -> Manifest:
    return Manifest(
        pipeline=PIPELINE,
        node=NODE,
        epoch=epoch,
        attempt=attempt,
        mode="aligned",
        parallelism=1,
        plan_digest="p" * 8,
        step_digests={"count": "d" * 8},
        created_us=epoch,
        cut=cut_of(epoch, position, output),
        states=(StateRuns(step="count", state="main", subtask=0, runs=state),),
        channels=(ChannelLog(channel="a>b", items=(LoggedItem(kind="watermark", watermark_us=7),)),),
    )


def open_store(disk: Disk, **options: object) -> CheckpointStore:
    return CheckpointStore(disk, pipeline=PIPELINE, node=NODE, **options)  # type: ignore[arg-type]  # passed on as it is


def commit_epoch(store: CheckpointStore, epoch: int, *, sealed_before: bool = False) -> Manifest:
    """One incremental checkpoint: the state runs of the last three epochs, and one run of output."""
    state = tuple(store.write_run(frame_of(number)) for number in range(max(1, epoch - 2), epoch + 1))
    manifest = manifest_of(epoch, state, (store.write_run(frame_of(1000 + epoch)),))
    store.commit(manifest, sealed_before=sealed_before)
    return manifest


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def store(disk: MemoryDisk) -> CheckpointStore:
    return open_store(disk)


@pytest.fixture
def build() -> Builders:
    return Builders()


class Builders:
    """The functions of this file, for tests: test files cannot import each other."""

    pipeline, node = PIPELINE, NODE
    base = f"{PIPELINE}/{NODE}"
    frame: Callable[[int], pl.DataFrame] = staticmethod(frame_of)
    cut: Callable[..., Cut] = staticmethod(cut_of)
    manifest: Callable[..., Manifest] = staticmethod(manifest_of)
    open: Callable[..., CheckpointStore] = staticmethod(open_store)
    commit: Callable[..., Manifest] = staticmethod(commit_epoch)
    failpoints = CountingFailpoints
