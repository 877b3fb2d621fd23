"""Parses records, of a text file or of messages, so that a bad one does not take others with it.

Records are parsed together. If anything in them is wrong, the first few thousand are looked at one by one: the bad are given as
`Rejected`, the good stay, in order.

Invariant: what becomes of a record depends on its bytes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from fordstone.connectors.base import Rejected
from fordstone.connectors.files.formats import LineFormat, MalformedError, Offsets
from fordstone.lang.schema import Schema

CLOSE_RECORDS_MAX: Final = 4096
"""How many records one read looks at one by one."""
CLOSE_PARSES_MAX: Final = 256
"""How often one read calls the parser to find the bad ones among them."""
TEXT_MAX: Final = 4096
"""How many characters of rejected input are kept."""
_CR: Final = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Whole records: `data[starts[i]:ends[i]]` is one, without its newline. `base` is the offset of `data` in the file."""

    base: int
    data: bytes
    starts: Offsets
    ends: Offsets

    @property
    def length(self) -> int:
        """Up to the end of the last record, its newline included."""
        return min(int(self.ends[-1]) + 1, len(self.data))

    def after(self, length: int) -> Records:
        """The records after the first `length` bytes."""
        first = int(np.searchsorted(self.starts, length))
        starts, ends = self.starts[first:] - length, self.ends[first:] - length
        return Records(base=self.base + length, data=self.data[length:], starts=starts, ends=ends)

    def record(self, number: int) -> bytes:
        return self.data[self.starts[number] : self.ends[number]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRecords:
    """Rows with the start of each, what was rejected, and how far this goes."""

    frame: pl.DataFrame
    starts: Offsets
    rejected: tuple[Rejected, ...]
    length: int


class RecordParser:
    """Parses records of one format."""

    def __init__(self, line_format: LineFormat, schema: Schema, *, record_bytes_max: int) -> None:
        self._format = line_format
        self._schema = schema
        self._record_bytes_max = record_bytes_max

    def parse(self, block: Records) -> ParsedRecords:
        """Parse all of them. Raises `MalformedError` if one is not as it should be: see `parse_closely`."""
        lengths = block.ends - block.starts
        if lengths.max() > self._record_bytes_max:
            raise MalformedError("a line is too long")
        starts = block.starts
        if lengths.min() <= 1:
            starts = starts[~_empty(block, lengths)]
        if not starts.size:
            return ParsedRecords(frame=self._schema.empty(), starts=starts, rejected=(), length=block.length)
        data = block.data if block.length == len(block.data) else block.data[: block.length]
        cells = self._format.finish(self._format.parse(data, starts.size))
        if not cells.bad:
            return ParsedRecords(frame=cells.frame, starts=starts, rejected=(), length=block.length)
        rejected = [
            _rejected(block, int(np.searchsorted(block.starts, starts[row])), why)
            for row, why in sorted(cells.bad.items())
        ]
        keep = np.ones(starts.size, dtype=np.bool_)
        keep[list(cells.bad)] = False
        return ParsedRecords(
            frame=cells.frame.filter(keep), starts=starts[keep], rejected=tuple(rejected), length=block.length
        )

    def parse_closely(self, block: Records) -> ParsedRecords:
        """Look at the first records one by one. A malformed one that spans lines ends the search after its first line."""
        broken: dict[int, str] = {}
        candidates: list[int] = []
        stop = min(len(block.ends), CLOSE_RECORDS_MAX)
        for number in range(stop):
            record = block.record(number)
            if self._format.blank(record):
                continue
            is_long = len(record) > self._record_bytes_max
            why = too_long(self._record_bytes_max) if is_long else self._format.judge(record)
            if why is None:
                candidates.append(number)
                continue
            broken[number] = why
            if b"\n" in record:
                stop = number + 1
                break
        frame, kept, unparsed = self._halves(block, candidates, broken)
        stop = stop if unparsed is None else unparsed
        length = min(int(block.ends[stop - 1]) + 1, len(block.data))
        spanning = next((number for number in sorted(broken) if b"\n" in block.record(number)), stop)
        if spanning < stop:
            rows = sum(number < spanning for number in kept)
            frame, kept, stop = frame.head(rows), kept[:rows], spanning + 1
            length = block.data.index(b"\n", block.starts[spanning]) + 1
        broken = {number: why for number, why in broken.items() if number < stop}
        cells = self._format.finish(frame) if kept else None
        bad = broken | ({kept[row]: why for row, why in cells.bad.items()} if cells else {})
        keep = [row for row, number in enumerate(kept) if number not in bad]
        return ParsedRecords(
            frame=cells.frame[keep] if cells else self._schema.empty(),
            starts=block.starts[[kept[row] for row in keep]],
            rejected=tuple(
                _rejected(block, number, bad[number], first_line=number in broken) for number in sorted(bad)
            ),
            length=length,
        )

    def _halves(
        self, block: Records, numbers: list[int], broken: dict[int, str]
    ) -> tuple[pl.DataFrame, list[int], int | None]:
        """Parse these records together, or else each half for itself, down to the one that is broken.

        Gives their rows, which records these are, and the first that was not looked at because it took too long.
        """
        frames: list[pl.DataFrame] = []
        kept: list[int] = []
        todo = [numbers] if numbers else []
        for _ in range(CLOSE_PARSES_MAX):
            if not todo:
                break
            part = todo.pop()
            data = b"\n".join([*(block.record(number) for number in part), b""])
            try:
                frames.append(self._format.parse(data, len(part)))
                kept += part
            except MalformedError as error:
                if len(part) == 1:
                    broken[part[0]] = str(error)
                else:
                    middle = len(part) // 2
                    todo += [part[middle:], part[:middle]]
        return (pl.concat(frames) if frames else pl.DataFrame()), kept, todo[-1][0] if todo else None


def _empty(block: Records, lengths: Offsets) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which records have nothing but, at most, a carriage return."""
    alone = np.flatnonzero(lengths == 1)
    empty: np.ndarray[tuple[int], np.dtype[np.bool_]] = lengths == 0
    empty[alone] = np.frombuffer(block.data, dtype=np.uint8)[block.starts[alone]] == _CR
    return empty


def _rejected(block: Records, number: int, why: str, *, first_line: bool = False) -> Rejected:
    record = block.record(number)
    if first_line:
        record = record.partition(b"\n")[0]
    text = record.removesuffix(b"\r")[: 4 * TEXT_MAX].decode(errors="replace")[:TEXT_MAX]
    return Rejected(position=block.base + int(block.starts[number]), text=text, reason=why)


def too_long(line_bytes_max: int) -> str:
    """Return why a line that is too long is rejected."""
    return f"a line longer than {line_bytes_max} bytes (line_bytes_max)"
