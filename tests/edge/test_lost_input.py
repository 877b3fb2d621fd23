"""A power cut at the writer of an input file takes bytes back that were read already: an error, and never a wrong row."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, memory
from fordstone.errors import FordstoneError


def line(number: int) -> str:
    return f'{{"n": {number}}}\n'


def read(path: Path, kept: MemorySink) -> list[int]:
    pipeline = Pipeline("lost")
    pipeline.source("in", files(str(path / "in.jsonl")), schema={"n": "bigint"}).sink("out", memory(kept))
    pipeline.run(state=path / "state", bounded=True)
    return sorted(kept.rows()["n"].to_list())


@pytest.mark.parametrize("kept_bytes", [0, 5, 9, 18, 20, 26])
@pytest.mark.parametrize("more", ["", line(7), line(7) + line(8) + line(9) + line(10)])
def test_bytes_that_were_read_and_are_gone_are_an_error(tmp_path: Path, kept_bytes: int, more: str) -> None:
    file, kept = tmp_path / "in.jsonl", MemorySink()
    file.write_text("".join(map(line, (1, 2, 3))))
    assert read(tmp_path, kept) == [1, 2, 3]
    os.truncate(file, kept_bytes)
    with file.open("a") as appended:
        appended.write(more)
    with pytest.raises(FordstoneError, match=r"in\.jsonl"):
        read(tmp_path, kept)
    assert sorted(kept.rows()["n"].to_list()) == [1, 2, 3]
