"""How far a read of a plain text file would come, told from its bytes.

Parses next to nothing. Where each newline ends a record, a few samples tell about how long records are, and one look
around the place that follows finds the end of one. Else the bytes up to there are gone through, for newlines that stand
in a value; what holds some is left to `LineReader`, which alone knows what it makes of them.

Invariants: what is given is a place where a `LineReader` that reads straight through comes by, behind a newline or at
the end of bounded input, whatever is appended later. Memory does not grow with the file.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fordstone.connectors.file_bytes import FileBytes
from fordstone.connectors.line_format import LineFormat, Offsets, newlines
from fordstone.connectors.lines import BLOCK_BYTES_MAX, LineReader
from fordstone.model.ids import Position
from fordstone.model.schema import Schema

SAMPLE_BYTES: Final = 1 << 16
"""How much is looked at where reading would begin."""
SPREAD_SAMPLES: Final = 8
SPREAD_BYTES: Final = 1 << 14
"""So many samples of so many bytes are taken on the way to where reading would end."""
SHRINKS_MAX: Final = 6
"""How often the way is made shorter because lines on it turn out to be short."""
_NEAR_ENOUGH: Final = 1.25
WALK_BYTES_MIN: Final = 1 << 12
WALK_BYTES_MAX: Final = 1 << 20
READ_ROWS_MIN: Final = 16
READ_ROWS_MAX: Final = 1 << 14


class LineReach:
    """Looks through one file, once. Leaves closing it to who opened it."""

    def __init__(
        self,
        data: FileBytes,
        line_format: LineFormat,
        schema: Schema,
        *,
        end: int,
        bounded: bool,
        line_bytes_max: int,
    ) -> None:
        """`end` is how much of the file there is now or, of bounded input, ever."""
        self._data = data
        self._format = line_format
        self._schema = schema
        self._end = end
        self._bounded = bounded
        self._line_bytes_max = line_bytes_max

    def find(self, position: int, rows_max: int, *, searched: int = 0) -> int | None:
        """Where a read of about `rows_max` rows would end; None if there is nothing to read yet.

        No newline lies between `position` and `searched`: an earlier look, that found nothing, tells.
        """
        first = self._format.begin(self._data, self._end if self._bounded else None, complete=self._bounded)
        if first is None:
            return None
        begin = max(position, first)
        if begin >= self._end:
            return begin if self._bounded else None
        rows_max = max(1, rows_max)
        if self._bounded and self._about_rows(begin, self._end - begin) <= rows_max:
            return self._end  # where a reader may stop, whatever lies before it
        if self._format.ends_at_every_newline:
            return self._by_samples(begin, rows_max, max(begin, searched))
        return self._by_walk(begin, rows_max)

    def _by_samples(self, begin: int, rows_max: int, searched: int) -> int | None:
        sample = self._data.at(begin, min(SAMPLE_BYTES, self._end - begin))
        ends = newlines(sample)
        if ends.size >= rows_max:
            return begin + int(ends[rows_max - 1]) + 1
        way = self._end - begin
        if way > len(sample):
            way = min(way, rows_max * len(sample) // max(1, ends.size))
            way = self._shrunk(begin, max(1, way), rows_max)
        if begin + way >= self._end and self._bounded:
            return self._end
        found = self._last_newline(searched, begin + way)
        if found is None and begin + way < self._end:
            found = self._first_newline(max(searched, begin + way))
        if found is not None:
            return found + 1
        return self._end if self._bounded else None

    def _shrunk(self, begin: int, way: int, rows_max: int) -> int:
        """Make the way shorter until samples along it promise not many more rows than are wanted."""
        for _ in range(SHRINKS_MAX):
            rows = self._about_rows(begin, way)
            if rows <= _NEAR_ENOUGH * rows_max:
                break
            way = max(1, int(way * rows_max / rows))
        return way

    def _about_rows(self, begin: int, way: int) -> float:
        """How many lines lie on the way, if it is everywhere as it is in samples."""
        if way <= SPREAD_SAMPLES * SPREAD_BYTES:
            data = self._data.at(begin, way)
            return data.count(b"\n") + (not data.endswith(b"\n"))
        looked, rows = 0, 0
        for number in range(SPREAD_SAMPLES):
            data = self._data.at(begin + (way - SPREAD_BYTES) * number // (SPREAD_SAMPLES - 1), SPREAD_BYTES)
            looked, rows = looked + len(data), rows + data.count(b"\n")
        return rows * way / max(1, looked)

    def _last_newline(self, begin: int, end: int) -> int | None:
        length = SAMPLE_BYTES
        while end > begin:
            start = max(begin, end - length)
            if (found := self._data.at(start, end - start).rfind(b"\n")) >= 0:
                return start + found
            end, length = start, min(length * 4, BLOCK_BYTES_MAX)
        return None

    def _first_newline(self, begin: int) -> int | None:
        length = SAMPLE_BYTES
        while begin < self._end:
            data = self._data.at(begin, min(length, self._end - begin))
            if (found := data.find(b"\n")) >= 0:
                return begin + found
            if not data:
                break
            begin, length = begin + len(data), min(length * 4, BLOCK_BYTES_MAX)
        return None

    def _by_walk(self, begin: int, rows_max: int) -> int | None:
        """Go from record to record. Counts each line that is a record, a blank one too, as the reader does."""
        place, rows = begin, 0
        block_bytes, read_rows = SAMPLE_BYTES, READ_ROWS_MIN
        while rows < rows_max and place < self._end:
            data = self._data.at(place, min(block_bytes, self._end - place))
            ends = _line_ends(data, self._format.ends(data))[: rows_max - rows]
            if ends.size:
                place += int(ends[-1]) + 1
                rows += ends.size
                block_bytes = min(block_bytes * 2, WALK_BYTES_MAX)
                continue
            came, records = self._read(place, min(read_rows, rows_max - rows))
            if came <= place:
                break
            place, rows = came, rows + max(1, records)
            read_rows = min(max(READ_ROWS_MIN, records * 2), READ_ROWS_MAX)
            block_bytes = WALK_BYTES_MIN
        return place if place > begin else None

    def _read(self, place: int, rows_max: int) -> tuple[int, int]:
        """Where the reader comes to, and over how many records."""
        reader = LineReader(
            self._data,
            self._format,
            self._schema,
            place,
            bounded=self._bounded,
            with_positions=False,
            line_bytes_max=self._line_bytes_max,
        )
        chunk = reader.read(rows_max, Position(self._end) if self._bounded else None)
        return (place, 0) if chunk is None else (int(chunk.position), chunk.frame.height + len(chunk.rejected))


def _line_ends(data: bytes, ends: Offsets) -> Offsets:
    """The ends of those records, from the first on, that are one line each."""
    if ends.size == data.count(b"\n"):
        return ends
    whole = ends == newlines(data)[: ends.size]
    return ends if whole.all() else ends[: int(np.argmin(whole))]
