"""The cuts of a query: there or missed, whole or told of, and not kept for ever."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.errors import CheckpointError, DamagedError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.spark.hosted.cuts import KEPT, CutFiles


def cut(epoch: int) -> Cut:
    partitions = {"β.jsonl": PartitionCut(position=2**62, max_time_us=TIME_MIN_US, floor_us=TIME_MAX_US, idle=True)}
    return Cut(epoch=epoch, sources={"s": SourceCut(partitions=partitions, watermark_us=TIME_MAX_US)}, bounded=True)


@pytest.fixture(params=["path", "url"])
def cuts(request: pytest.FixtureRequest, tmp_path: Path) -> CutFiles:
    return CutFiles(str(tmp_path / "query")) if request.param == "path" else CutFiles(f"memory://{uuid4()}/query/")


def test_a_cut_is_read_as_it_was_written(cuts: CutFiles) -> None:
    assert cuts.epochs() == ()
    for epoch in (1, 2, 10):
        cuts.write(cut(epoch))
    assert cuts.read(2) == cut(2)
    assert cuts.epochs() == (1, 2, 10)


def test_a_cut_that_is_written_again_stays(cuts: CutFiles) -> None:
    cuts.write(cut(1))
    cuts.write(cut(1))
    assert cuts.read(1) == cut(1)
    assert cuts.epochs() == (1,)


def test_a_missing_cut_says_what_to_do(cuts: CutFiles) -> None:
    cuts.write(cut(1))
    with pytest.raises(CheckpointError, match=r"epoch 2 is missing(?s:.)*Restore the checkpoint location"):
        cuts.read(2)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"epoch": 1}', b'{"epoch": "x", "sources": {}}'])
def test_a_damaged_cut_is_told_of(data: bytes, tmp_path: Path) -> None:
    cuts = CutFiles(str(tmp_path))
    cuts.write(cut(1))
    (file,) = (tmp_path / "fordstone" / "cuts").iterdir()
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="is damaged"):
        cuts.read(1)


def test_old_cuts_go(cuts: CutFiles) -> None:
    for epoch in range(1, KEPT + 4):
        cuts.write(cut(epoch))
    assert cuts.epochs() == tuple(range(4, KEPT + 4))


def test_what_a_crash_left_half_written_is_no_cut(tmp_path: Path) -> None:
    cuts = CutFiles(str(tmp_path))
    cuts.write(cut(1))
    (tmp_path / "fordstone" / "cuts" / ".000000000002.json.tmp").write_bytes(b"{")
    assert cuts.epochs() == (1,)
    cuts.write(cut(2))
    assert cuts.read(2) == cut(2)
