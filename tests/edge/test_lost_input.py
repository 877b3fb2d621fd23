"""A power cut at the writer of an input file takes bytes back that were read already: an error, and never a wrong row."""

from __future__ import annotations

import os
import re
from pathlib import Path
from random import Random

import pytest
from tests.examples import share_of

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


class Producer:
    """Writes numbered lines to a log that it rotates, and knows what of it is synced. A power cut may take the rest."""

    def __init__(self, path: Path, rng: Random) -> None:
        self.log, self._rng = path / "in.jsonl", rng
        self.written: set[int] = set()
        self._synced = self._rotated = 0
        self._lost = b""
        self.damaged = False
        """Bytes that may have been read are not there any more, or are others."""
        self.log.touch()

    def write(self) -> None:
        """Write what a power cut took once more, or new lines, or both."""
        with self.log.open("ab") as appended:
            appended.write(self._lost)
            for _ in range(self._rng.randrange(4)):
                self.written.add(len(self.written))
                appended.write(line(len(self.written) - 1).encode())
        self._lost = b""
        if self._rng.random() < 0.5:
            self._synced = self.log.stat().st_size

    def rotate(self) -> None:
        self._rotated += 1
        self.log.rename(self.log.with_name(f"in.jsonl.{self._rotated}"))
        self.log.touch()
        self._synced = 0

    def cut_power(self) -> None:
        """Lose bytes that were not synced, or find zeros in their place. The producer removes a torn line, or does not notice."""
        data, rng = self.log.read_bytes(), self._rng
        kept = rng.randint(self._synced, len(data))
        left = data[:kept] + bytes(len(data) - kept) * (rng.random() < 0.2)
        if rng.random() < 0.7:
            left = data[: data.rfind(b"\n", 0, kept) + 1]
            self._lost = data[len(left) :] if rng.random() < 0.5 else b""
        self.damaged = self.damaged or left + self._lost != data
        self.log.write_bytes(left)
        self._synced = len(left)

    def there(self) -> set[int]:
        """The numbers in lines that are there now."""
        found = [file.read_bytes() for file in self.log.parent.glob("in.jsonl*")]
        return {int(match[1]) for data in found for match in re.finditer(rb'^{"n": (\d+)}\n', data, flags=re.MULTILINE)}


@pytest.mark.parametrize("seed", range(share_of(48)))
def test_a_log_whose_writer_loses_power_is_read_without_doubling_or_stops_with_its_name(
    tmp_path: Path, seed: int
) -> None:
    rng, kept, stopped = Random(seed), MemorySink(), ""
    producer = Producer(tmp_path, rng)
    for _ in range(8):
        rng.choice((producer.write, producer.write, producer.rotate, producer.cut_power))()
        if rng.random() < 0.3:
            continue
        pipeline = Pipeline("lost")
        pipeline.source("in", files(str(tmp_path / "in.jsonl*"), format="json"), schema={"n": "bigint"}).sink(
            "out", memory(kept)
        )
        try:
            pipeline.run(state=tmp_path / "state", available_now=True)
        except FordstoneError as error:
            stopped = str(error)
            break
        rows = kept.rows()["n"].to_list()
        assert len(set(rows)) == len(rows)
        assert producer.there() <= set(rows) <= producer.written
    assert not stopped or (producer.damaged and "in.jsonl" in stopped)
    rows = kept.rows()["n"].to_list() if kept.stream is not None else []
    assert len(set(rows)) == len(rows)
    assert set(rows) <= producer.written
