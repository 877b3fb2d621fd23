"""Two writers and one directory of files: whatever moment the one takes over at, the other's file is there before, or never."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest

from fordstone.connectors import files
from fordstone.connectors.base import Part, SinkStream, options_of
from fordstone.connectors.files.claim import CLAIM_PREFIX
from fordstone.connectors.files.rows import rows_of
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.files.sink import FilePartWriter, FileSink
from fordstone.connectors.registry import open_parts, open_sink
from fordstone.errors import FencedError, SinkError
from fordstone.lang.schema import Schema
from fordstone.protocol.lease import Fence
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

SCHEMA = Schema.of({"n": "bigint"})
CHANGES = ("create", "append", "fsync", "rename", "fsync_dir", "remove", "remove_dir", "make_dirs")


def stream(hub: int, local: int = 1, **given: Any) -> SinkStream:
    named: dict[str, Any] = {"pipeline": "p", "node": "n1", "owner": f"state-{hub}", "start": f"{hub}.{local}"}
    return SinkStream(step="out", schema=SCHEMA, generation=Fence(hub, local), **(named | given))


def opened(disk: MemoryDisk, taken: SinkStream) -> FileSink:
    return FileSink(options_of(files("out", format="jsonl"), FileSettings), taken, disk)


def parts_of(disk: MemoryDisk, sink: FileSink) -> FilePartWriter:
    return FilePartWriter(sink._rows, disk, where="out")


def frame(*numbers: int) -> pl.DataFrame:
    return pl.DataFrame({"n": list(numbers)}, schema=SCHEMA.polars)


def seen(disk: MemoryDisk) -> list[int]:
    names = list(disk.list(""))
    names += [f"{name}/{part}" for name in names if name.startswith("epoch-") for part in disk.list(name)]
    return rows_of(names, disk.read, where="out")["n"].to_list()


class Interrupted(MemoryDisk):
    """Calls something before one of its changes, once."""

    def __init__(self) -> None:
        super().__init__()
        self._left: int | None = None
        self._meanwhile: Callable[[], None] = lambda: None
        for name in CHANGES:
            setattr(self, name, self._counting(getattr(super(), name)))

    def interrupt(self, after: int, meanwhile: Callable[[], None]) -> None:
        """Call it after that many more changes."""
        self._left, self._meanwhile = after, meanwhile

    def interrupted(self) -> bool:
        return self._left is None

    def _counting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    self._left = None
                    self._meanwhile()
            return plain(*args, **options)

        return call


@pytest.mark.parametrize("how", ["file", "parts"])
def test_a_take_over_at_any_moment_of_a_release_leaves_one_writer(how: str) -> None:
    """The successor sees the epoch and says so, or the one that is cut off is refused. Never both, never neither."""
    outcomes: list[bool] = []
    for at in range(200):
        disk = Interrupted()
        cut_off = opened(disk, stream(1))
        cut_off.release(1, frame(1))
        parts: list[Part] = []
        if how == "parts":
            writer = parts_of(disk, cut_off)
            parts = [writer.write(2, "a", number, frame(90 + number)) for number in range(2)]
        found: list[FileSink | SinkError] = []

        def take_over(disk: MemoryDisk = disk, found: list[FileSink | SinkError] = found) -> None:
            try:
                found.append(opened(disk, stream(2, resumes_after=1)))
            except SinkError as error:
                found.append(error)

        disk.interrupt(at, take_over)
        refused = False
        try:
            if how == "parts":
                cut_off.release_parts(2, "a", parts)
            else:
                cut_off.release(2, frame(90, 91))
        except FencedError:
            refused = True
        if not disk.interrupted():
            break
        (successor,) = found
        if isinstance(successor, FileSink):
            # It has opened, so nothing of epoch 2 is there, and nothing comes any more.
            assert refused, at
            assert seen(disk) == [1], at
            successor.release(2, frame(2))
            assert seen(disk) == [1, 2], at
        else:
            assert "epoch 2" in str(successor)
            assert not refused, at
            assert seen(disk) == [1, 90, 91], at
        outcomes.append(refused)
    assert set(outcomes) == {True, False}
    assert outcomes == sorted(outcomes, reverse=True)


def test_a_take_over_that_is_cut_off_at_any_moment_is_made_by_the_next_start() -> None:
    """Power is lost in the middle of the take-over. Whatever is left, an older generation never comes in after a newer one has released."""
    cuts = 0
    for at in range(200):
        for seed in range(5):
            disk = MemoryDisk()
            opened(disk, stream(1)).release(1, frame(1))
            disk.cut_after = disk.changes + at
            try:
                opened(disk, stream(2, resumes_after=1))
            except PowerCut:
                cuts += 1
            disk.crash(Random(seed))
            successor = opened(disk, stream(2, 2, resumes_after=1))
            successor.release(2, frame(2))
            disk.crash(Random(seed))
            with pytest.raises(FencedError):
                opened(disk, stream(1, 2, resumes_after=1))
            assert seen(disk) == [1, 2]
            assert len([name for name in disk.list("") if name.startswith(CLAIM_PREFIX)]) == 1
    assert cuts > 20


def test_two_writers_that_open_at_the_same_time_are_never_both_let_in() -> None:
    for at in range(60):
        disk = Interrupted()
        opened(disk, stream(1)).release(1, frame(1))
        both: list[FileSink] = []

        def other(disk: MemoryDisk = disk, both: list[FileSink] = both) -> None:
            both.append(opened(disk, stream(0, 2, owner="x", node="other", resumes_after=1)))

        disk.interrupt(at, other)
        mine = opened(disk, stream(2, resumes_after=1))
        if not disk.interrupted():
            break
        allowed = []
        for sink in (mine, *both):
            try:
                sink.release(2, frame(2))
            except FencedError:
                continue
            allowed.append(sink)
        assert len(allowed) <= 1
        assert seen(disk) == [1, *([2] if allowed else [])]


@pytest.mark.parametrize("data", [b"\x00", b'{"pipeline": "\xee"}'])
def test_a_claim_that_cannot_be_read_is_replaced(data: bytes) -> None:
    disk = MemoryDisk()
    former = opened(disk, stream(1))
    former.release(1, frame(1))
    (claim,) = [name for name in disk.list("") if name.startswith(CLAIM_PREFIX)]
    disk.damage(f"{claim}/claim", data)
    opened(disk, stream(2, resumes_after=1)).release(2, frame(2))
    with pytest.raises(FencedError):
        former.release(2, frame(90))
    assert seen(disk) == [1, 2]


def test_discarded_epochs_are_kept_beside_the_others_where_no_pattern_finds_them(tmp_path: Path) -> None:
    root = tmp_path / "out"
    spec = files(str(root), format="jsonl")
    sink = open_sink(spec, stream(1))
    for epoch in (1, 2, 3):
        sink.release(epoch, frame(epoch))
    writer = open_parts(spec, stream(1))
    assert writer is not None
    sink.release_parts(4, "a", [writer.write(4, "a", number, frame(4)) for number in range(2)])  # type: ignore[attr-defined]
    open_sink(spec, stream(1, 2, resumes_after=2, discard_later=True))
    assert sorted(path.name for path in root.glob("**/*.jsonl")) == [
        "epoch-000000000001.jsonl",
        "epoch-000000000002.jsonl",
    ]
    kept = sorted(str(path.relative_to(root)) for path in root.glob("discarded-1/**/*.old"))
    assert [name.partition("-a.")[0] for name in kept] == [
        "discarded-1/epoch-000000000003.jsonl.old",
        "discarded-1/epoch-000000000004/part-000000",
        "discarded-1/epoch-000000000004/part-000001",
    ]
