"""Records, sinks and cuts whose process may die before each use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from tests.spark.micro_state import Fate

from fordstone.connectors.base import Part, PartedSink, Sink
from fordstone.epochs.manifest import Cut
from fordstone.spark.hosted.checkpoint import CutFiles, SealedEpoch, SealedFiles
from fordstone.spark.hosted.commit import Committer


class _WatchedSink(PartedSink):
    """A sink whose process may die before and after it releases."""

    def __init__(self, sink: Sink, fate: Fate) -> None:
        self._sink, self._fate = sink, fate

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        self._fate.step("release")
        self._sink.release(epoch, frame)

    def release_parts(self, epoch: int, attempt: str, parts: Sequence[Part]) -> None:
        self._fate.step("release")
        if isinstance(self._sink, PartedSink):
            self._sink.release_parts(epoch, attempt, parts)
        else:
            assert not parts
            self._sink.release(epoch, self.empty)

    empty: pl.DataFrame

    def write(self, frame: pl.DataFrame) -> None:
        raise AssertionError("nothing is let out at once on Spark")

    def close(self) -> None:
        self._sink.close()


class _WatchedCuts:
    def __init__(self, cuts: CutFiles, fate: Fate) -> None:
        self._cuts, self._fate = cuts, fate

    def read(self, epoch: int) -> Cut:
        return self._cuts.read(epoch)

    def write(self, cut: Cut) -> None:
        self._fate.step("cut")
        self._cuts.write(cut)


class _WatchedSealed:
    def __init__(self, sealed: SealedFiles, fate: Fate) -> None:
        self._sealed, self._fate = sealed, fate

    def read(self, epoch: int) -> SealedEpoch | None:
        return self._sealed.read(epoch)

    def write(self, sealed: SealedEpoch, frames: Mapping[str, pl.DataFrame]) -> None:
        self._fate.step("seal")
        self._sealed.write(sealed, frames)

    def frame(self, sealed: SealedEpoch, sink: str) -> pl.DataFrame:
        return self._sealed.frame(sealed, sink)


class _WatchedRecords:
    def __init__(self, sealed: SealedFiles, fate: Fate) -> None:
        self._sealed, self._fate = sealed, fate

    def write(self, sealed: SealedEpoch, frames: Mapping[str, pl.DataFrame]) -> None:
        self._fate.step("seal")
        self._sealed.write(sealed, frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sealed, name)


def watched(committer: Committer, fate: Fate) -> Committer:
    """The committer, which may now die before it records, before each sink and before it keeps the cut."""
    sinks = []
    for sink, spec in zip(committer._sinks._sinks, committer.specs, strict=True):
        one = _WatchedSink(sink, fate)
        one.empty = spec.empty()
        sinks.append(one)
    committer._sinks._sinks = tuple(sinks)
    committer._sinks._sealed = _WatchedRecords(committer._sinks._sealed, fate)  # type: ignore[assignment]  # as it is used
    committer._cuts = _WatchedCuts(committer._cuts, fate)  # type: ignore[assignment]  # as far as it is used
    return committer
