"""Reading the records of a text file from a byte position, in blocks.

A block is parsed as a whole. If anything in it is wrong, its first few thousand records are looked at one by one: the bad
are given as `Rejected`, the good stay, in order. A position is always after a newline or at the end of complete input.

Invariants: what becomes of a record depends on its bytes alone, so that reading again from any position, in blocks of
any size, gives the same rows and the same rejections (but a record that is rejected because of bytes after `until` has
another reason when that is not looked at). Neither memory nor the time of one read grows with the file.
`LineFormat` is the seam to the formats: it finds and parses records, and `LineReader` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from fordstone.connectors.base import Chunk, Reader, Rejected
from fordstone.connectors.files.bytes import FileBytes
from fordstone.connectors.files.formats import LineFormat, MalformedError, Offsets, newlines
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position

BLOCK_BYTES_MIN: Final = 1 << 12
BLOCK_BYTES_MAX: Final = 1 << 24
CLOSE_RECORDS_MAX: Final = 4096
"""How many records one read looks at one by one."""
CLOSE_PARSES_MAX: Final = 256
"""How often one read calls the parser to find the bad ones among them."""
PLAN_BYTES_MIN: Final = 1 << 16
PLAN_BYTES_MAX: Final = 1 << 20
"""How much of a file a plan searches for newlines at a time."""
PLAN_ROWS_MIN: Final = 1 << 4
PLAN_ROWS_MAX: Final = 1 << 14
"""How many rows a plan parses at a time where newlines do not end records."""
TEXT_MAX: Final = 4096
"""How many characters of rejected input are kept."""
_LINE_BYTES_GUESS: Final = 128
_CR: Final = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Whole records: `data[starts[i]:ends[i]]` is one, without its newline. `base` is the offset of `data` in the file."""

    base: int
    data: bytes
    starts: Offsets
    ends: Offsets

    @property
    def length(self) -> int:
        """Up to the end of the last record, its newline included."""
        return min(int(self.ends[-1]) + 1, len(self.data))

    def record(self, number: int) -> bytes:
        return self.data[self.starts[number] : self.ends[number]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    """Rows with the start of each, what was rejected, and how far this goes."""

    frame: pl.DataFrame
    starts: Offsets
    rejected: tuple[Rejected, ...]
    length: int


class LineReader(Reader):
    """Reads one text file."""

    def __init__(
        self,
        data: FileBytes,
        line_format: LineFormat,
        schema: Schema,
        position: int,
        *,
        bounded: bool,
        with_positions: bool,
        line_bytes_max: int,
    ) -> None:
        self._data = data
        self._format = line_format
        self._schema = schema
        self._position = position
        self._bounded = bounded
        self._end = data.size() if bounded else None
        self._with_positions = with_positions
        self._line_bytes_max = line_bytes_max
        self._line_bytes = _LINE_BYTES_GUESS
        self._rows_try: int | None = None
        self._first: int | None = None
        self._scanned = 0
        self._waited = False
        """Whether there was nothing to read the last time."""
        data.check(position)

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """Give the next rows; nothing while the last line is still being written."""
        if self._waited:
            self._data.check(self._position)  # what has come may be in another file of that name
            self._waited = False
        chunk = self._read(rows_max, until)
        self._waited = chunk is None
        return chunk

    def _read(self, rows_max: int, until: Position | None) -> Chunk | None:
        if until is not None and self._end is not None and self._end < until:
            self._data.check(until)
            self._end = until  # it was not all there yet when it was opened
        if self._first is None:
            self._first = self._format.begin(self._data, self._end, complete=self._bounded)
        if self._first is None:
            self._data.check(self._position if until is None else max(self._position, until))
            return None
        begin = max(self._position, self._first)
        wanted = max(1, rows_max if self._rows_try is None else min(rows_max, self._rows_try))
        found = self._block(begin, wanted, until) if until is None or begin < until else None
        if isinstance(found, _Parsed):
            return self._chunk(found, begin)
        if found is not None:
            return self._chunk(self._parsed(found, rows_max), begin)
        if until is not None and begin < until:
            self._data.check(until)  # what was there when `until` was given is not there now
            return None
        if until is not None and self._position < until:
            return self._chunk(self._nothing(), until)  # only the header lies before it
        if self._bounded and self._end is not None and begin >= self._end:
            return self._chunk(self._nothing(), begin)
        self._data.check(self._position if self._end is None else self._end)
        return None

    def plan(self, rows_max: int, end: int) -> int | None:
        """Find where reading `rows_max` records would end, of the file's first `end` bytes; None if nothing is whole yet.

        Newlines are counted, and nothing is parsed, except where a record seems to span lines: only a read shows whether
        it does, or is malformed and ends with its first line. The reader is of no use afterwards.
        """
        if self._bounded:
            self._end = end
        self._first = self._format.begin(self._data, self._end, complete=self._bounded)
        if self._first is None:
            return None
        begin = place = max(self._position, self._first)
        if self._bounded and rows_max >= end - begin:
            return max(begin, end)  # a record has at least one byte
        records, look_bytes, read_rows = 0, PLAN_BYTES_MIN, PLAN_ROWS_MIN
        while records < rows_max and place < end:
            data = self._data.at(place, min(look_bytes, end - place))
            ends = self._whole_lines(data)[: rows_max - records]
            if ends.size:
                place += int(ends[-1]) + 1
                records += ends.size
                look_bytes, read_rows = min(look_bytes * 2, PLAN_BYTES_MAX), PLAN_ROWS_MIN
                continue
            self._position = place
            chunk = self.read(min(read_rows, rows_max - records), Position(end) if self._bounded else None)
            if chunk is None or chunk.position <= place:
                break
            place = chunk.position
            records += max(1, chunk.frame.height + len(chunk.rejected))
            look_bytes, read_rows = PLAN_BYTES_MIN, min(read_rows * 2, PLAN_ROWS_MAX)
        return place if place > begin else None

    def identity(self) -> str:
        return self._data.identity(self._position)

    def close(self) -> None:
        self._data.close()

    def _whole_lines(self, data: bytes) -> Offsets:
        """The ends of those records, from the first on, that are one line each."""
        ends = self._format.ends(data)
        if not self._format.spans_lines or not ends.size:
            return ends
        spanning = ends != newlines(data)[: ends.size]
        return ends[: int(np.argmax(spanning))] if spanning.any() else ends

    def _nothing(self) -> _Parsed:
        return _Parsed(frame=self._schema.empty(), starts=np.zeros(0, np.int64), rejected=(), length=0)

    def _chunk(self, parsed: _Parsed, begin: int) -> Chunk:
        self._position = begin + parsed.length
        return Chunk(
            frame=parsed.frame,
            position=Position(self._position),
            row_positions=pl.Series(parsed.starts + begin, dtype=pl.Int64) if self._with_positions else None,
            rejected=parsed.rejected,
            ended=self._bounded and self._end is not None and self._position >= self._end,
        )

    def _block(self, begin: int, records_max: int, until: int | None) -> _Block | _Parsed | None:
        """The next whole records; a line that is too long, rejected; or None if there is none yet."""
        limit = self._end if until is None else until
        want = min(max(BLOCK_BYTES_MIN, records_max * self._line_bytes * 9 // 8), BLOCK_BYTES_MAX)
        while True:
            length = want if limit is None else min(want, limit - begin)
            data = self._data.at(begin, length) if length > 0 else b""
            if len(data) < length and self._bounded and limit is None:
                limit = self._end = begin + len(data)
            complete = limit is not None and begin + len(data) >= limit
            ends = self._format.ends(data)
            if complete and data and (not ends.size or ends[-1] != len(data) - 1):
                ends = np.append(ends, len(data))
            if ends.size:
                ends = ends[:records_max]
                return _Block(base=begin, data=data, starts=np.concatenate(([0], ends[:-1] + 1)), ends=ends)
            if len(data) < length or not data:
                return None
            if len(data) > self._line_bytes_max:
                return self._too_long(begin, data, limit)
            want = min(want * 4, self._line_bytes_max + 1)

    def _parsed(self, block: _Block, rows_max: int) -> _Parsed:
        self._line_bytes = max(1, block.length // len(block.ends))
        try:
            parsed = self._parse_all(block)
        except MalformedError:
            self._rows_try = CLOSE_RECORDS_MAX
            return self._parse_closely(block)
        if self._rows_try is not None:
            self._rows_try = self._rows_try * 2 if self._rows_try < rows_max else None
        return parsed

    def _parse_all(self, block: _Block) -> _Parsed:
        lengths = block.ends - block.starts
        if lengths.max() > self._line_bytes_max:
            raise MalformedError("a line is too long")
        starts = block.starts
        if lengths.min() <= 1:
            starts = starts[~_empty(block, lengths)]
        if not starts.size:
            return _Parsed(frame=self._schema.empty(), starts=starts, rejected=(), length=block.length)
        data = block.data if block.length == len(block.data) else block.data[: block.length]
        cells = self._format.finish(self._format.parse(data, starts.size))
        if not cells.bad:
            return _Parsed(frame=cells.frame, starts=starts, rejected=(), length=block.length)
        rejected = [
            _rejected(block, int(np.searchsorted(block.starts, starts[row])), why)
            for row, why in sorted(cells.bad.items())
        ]
        keep = np.ones(starts.size, dtype=np.bool_)
        keep[list(cells.bad)] = False
        return _Parsed(
            frame=cells.frame.filter(keep), starts=starts[keep], rejected=tuple(rejected), length=block.length
        )

    def _parse_closely(self, block: _Block) -> _Parsed:
        """Look at the first records one by one. A malformed one that spans lines ends the search after its first line."""
        broken: dict[int, str] = {}
        candidates: list[int] = []
        stop = min(len(block.ends), CLOSE_RECORDS_MAX)
        for number in range(stop):
            record = block.record(number)
            if self._format.blank(record):
                continue
            too_long = len(record) > self._line_bytes_max
            why = _too_long_reason(self._line_bytes_max) if too_long else self._format.judge(record)
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
        return _Parsed(
            frame=cells.frame[keep] if cells else self._schema.empty(),
            starts=block.starts[[kept[row] for row in keep]],
            rejected=tuple(
                _rejected(block, number, bad[number], first_line=number in broken) for number in sorted(bad)
            ),
            length=length,
        )

    def _halves(
        self, block: _Block, numbers: list[int], broken: dict[int, str]
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

    def _too_long(self, begin: int, head: bytes, limit: int | None) -> _Parsed | None:
        """Reject a line beyond the bound, once its newline is found. Goes on looking where it stopped the last time."""
        place = max(begin, self._scanned)
        newline = head.find(b"\n")
        end = begin + newline + 1 if newline >= 0 else None
        while end is None:
            length = BLOCK_BYTES_MAX if limit is None else min(BLOCK_BYTES_MAX, limit - place)
            data = self._data.at(place, length) if length > 0 else b""
            if (newline := data.find(b"\n")) >= 0:
                end = place + newline + 1
            elif len(data) < length or not data:
                self._scanned = place + len(data)
                if limit is None and self._bounded:
                    limit = self._end = self._scanned
                if limit is None or self._scanned < limit:
                    return None
                end = self._scanned
            else:
                place += len(data)
        text = head[:TEXT_MAX].partition(b"\n")[0].decode(errors="replace")
        rejected = Rejected(position=begin, text=text, reason=_too_long_reason(self._line_bytes_max))
        return _Parsed(
            frame=self._schema.empty(), starts=np.zeros(0, np.int64), rejected=(rejected,), length=end - begin
        )


def _empty(block: _Block, lengths: Offsets) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which records have nothing but, at most, a carriage return."""
    alone = np.flatnonzero(lengths == 1)
    empty: np.ndarray[tuple[int], np.dtype[np.bool_]] = lengths == 0
    empty[alone] = np.frombuffer(block.data, dtype=np.uint8)[block.starts[alone]] == _CR
    return empty


def _rejected(block: _Block, number: int, why: str, *, first_line: bool = False) -> Rejected:
    record = block.record(number)
    if first_line:
        record = record.partition(b"\n")[0]
    text = record.removesuffix(b"\r")[: 4 * TEXT_MAX].decode(errors="replace")[:TEXT_MAX]
    return Rejected(position=block.base + int(block.starts[number]), text=text, reason=why)


def _too_long_reason(line_bytes_max: int) -> str:
    return f"a line longer than {line_bytes_max} bytes (line_bytes_max)"
