"""Reading the records of a text file from a byte position, in blocks.

`records` parses the blocks. A position is always after a newline or at the end of complete input.

Invariants: what becomes of a record depends on its bytes alone, so that reading again from any position, in blocks of
any size, gives the same rows and the same rejections (but a record that is rejected because of bytes after `until` has
another reason when that is not looked at). Neither memory nor the time of one read grows with the file.
`LineFormat` is the seam to the formats: it finds and parses records, and `LineReader` does the rest.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from fordstone.connectors.base import Chunk, Reader, Rejected
from fordstone.connectors.files.bytes import FileBytes
from fordstone.connectors.files.formats import LineFormat, MalformedError, Offsets, newlines
from fordstone.connectors.files.records import (
    CLOSE_RECORDS_MAX,
    TEXT_MAX,
    ParsedRecords,
    RecordParser,
    Records,
    too_long,
)
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position

BLOCK_BYTES_MIN: Final = 1 << 12
BLOCK_BYTES_MAX: Final = 1 << 24
PLAN_BYTES_MIN: Final = 1 << 16
PLAN_BYTES_MAX: Final = 1 << 20
"""How much of a file a plan searches for newlines at a time."""
PLAN_ROWS_MIN: Final = 1 << 4
PLAN_ROWS_MAX: Final = 1 << 14
"""How many rows a plan parses at a time where newlines do not end records."""
_LINE_BYTES_GUESS: Final = 128


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
        self._parser = RecordParser(line_format, schema, record_bytes_max=line_bytes_max)
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
        if isinstance(found, ParsedRecords):
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

    def _nothing(self) -> ParsedRecords:
        return ParsedRecords(frame=self._schema.empty(), starts=np.zeros(0, np.int64), rejected=(), length=0)

    def _chunk(self, parsed: ParsedRecords, begin: int) -> Chunk:
        self._position = begin + parsed.length
        return Chunk(
            frame=parsed.frame,
            position=Position(self._position),
            row_positions=pl.Series(parsed.starts + begin, dtype=pl.Int64) if self._with_positions else None,
            rejected=parsed.rejected,
            ended=self._bounded and self._end is not None and self._position >= self._end,
        )

    def _block(self, begin: int, records_max: int, until: int | None) -> Records | ParsedRecords | None:
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
                return Records(base=begin, data=data, starts=np.concatenate(([0], ends[:-1] + 1)), ends=ends)
            if len(data) < length or not data:
                return None
            if len(data) > self._line_bytes_max:
                return self._too_long(begin, data, limit)
            want = min(want * 4, self._line_bytes_max + 1)

    def _parsed(self, block: Records, rows_max: int) -> ParsedRecords:
        self._line_bytes = max(1, block.length // len(block.ends))
        try:
            parsed = self._parser.parse(block)
        except MalformedError:
            self._rows_try = CLOSE_RECORDS_MAX
            return self._parser.parse_closely(block)
        if self._rows_try is not None:
            self._rows_try = self._rows_try * 2 if self._rows_try < rows_max else None
        return parsed

    def _too_long(self, begin: int, head: bytes, limit: int | None) -> ParsedRecords | None:
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
        rejected = Rejected(position=begin, text=text, reason=too_long(self._line_bytes_max))
        return ParsedRecords(
            frame=self._schema.empty(), starts=np.zeros(0, np.int64), rejected=(rejected,), length=end - begin
        )
