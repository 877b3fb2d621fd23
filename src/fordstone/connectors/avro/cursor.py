"""Reads parts of many binary values at once: one position per value, moved by all of them together.

A value that is not valid is noted in `Failures`, and its position goes to its end: what is read of it then means nothing, and harms
no other. Nothing is read past the end of a value, and nothing is allocated by a length that was not checked against it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
PADDING: Final = b"\0" * 16
"""After the values: a number at their end is read whole before it is known to be too long."""
_VARINT_BYTES_MAX: Final = 10
_LAST_SHIFT: Final = 63


class Failures:
    """Why values cannot be read: the first reason of each."""

    def __init__(self, count: int) -> None:
        self._codes = np.zeros(count, dtype=np.int32)
        self._reasons: list[str] = [""]
        self._known: dict[str, int] = {}

    def note(self, rows: Longs, reason: str) -> None:
        code = self._known.get(reason)
        if code is None:
            code = self._known[reason] = len(self._reasons)
            self._reasons.append(reason)
        self._codes[rows[self._codes[rows] == 0]] = code

    def good(self, rows: Longs | slice = slice(None)) -> Mask:
        """Return which values nothing is known against."""
        found: Mask = self._codes[rows] == 0
        return found

    def reason(self, row: int) -> str:
        return self._reasons[int(self._codes[row])]


class Cursor:
    """A position in each of some values. A value may be there several times, as for the items of an array."""

    __slots__ = ("data", "end", "failures", "pos", "raw", "rows")

    def __init__(
        self, raw: bytes, data: npt.NDArray[np.uint8], rows: Longs, pos: Longs, end: Longs, failures: Failures
    ) -> None:
        self.raw = raw
        self.data = data
        """The bytes of all values, with `PADDING`."""
        self.rows = rows
        """Of each position, the number of its value."""
        self.pos = pos
        self.end = end
        self.failures = failures

    def __len__(self) -> int:
        return len(self.pos)

    def at(self, which: Longs, pos: Longs | None = None) -> Cursor:
        """Some of the positions, or others in the values of these. What moves there does not move here."""
        return Cursor(
            self.raw,
            self.data,
            self.rows[which],
            self.pos[which] if pos is None else pos,
            self.end[which],
            self.failures,
        )

    def fail(self, wrong: Mask, reason: str) -> None:
        """Note that values are not valid, and leave them."""
        if wrong.any():
            self.failures.note(self.rows[wrong], reason)
            self.pos[wrong] = self.end[wrong]

    def move(self, count: Longs | int) -> None:
        """Go on by a number of bytes. A negative count is not valid, and neither is more than there is."""
        left = self.end - self.pos
        wrong = (left < count) | (np.asarray(count) < 0)
        self.pos = self.pos + np.where(wrong, 0, count)
        self.fail(wrong, "the value is truncated")

    def varint(self) -> npt.NDArray[np.uint64]:
        """Read numbers of one to ten bytes, the lowest seven bits first."""
        first = self.data[self.pos]
        value = (first & 0x7F).astype(np.uint64)
        size = np.ones(len(self.pos), dtype=np.int64)
        wrong = np.zeros(len(self.pos), dtype=np.bool_)
        more = np.flatnonzero(first & 0x80)
        for number in range(1, _VARINT_BYTES_MAX):
            if not more.size:
                break
            part = self.data[self.pos[more] + number]
            value[more] |= (part & 0x7F).astype(np.uint64) << np.uint64(7 * number)
            size[more] += 1
            if 7 * number == _LAST_SHIFT:
                wrong[more[part > 1]] = True
                break
            more = more[part >= 0x80]  # noqa: PLR2004 - the bit that says that another byte follows
        self.move(size)
        self.fail(wrong, "a number has more than 64 bits")
        return value

    def long(self) -> Longs:
        """Read signed numbers: the lowest bit is the sign."""
        value = self.varint()
        found: Longs = ((value >> np.uint64(1)) ^ (np.uint64(0) - (value & np.uint64(1)))).view(np.int64)
        return found

    def length(self) -> Longs:
        """Read how many bytes follow. Zero where that cannot be."""
        found = self.long()
        wrong = (found < 0) | (found > self.end - self.pos)
        self.fail(wrong, "a length is negative, or more than there is")
        found[wrong] = 0
        return found

    def fixed(self, dtype: str) -> npt.NDArray[Any]:
        """Read numbers of a fixed size."""
        kind = np.dtype(dtype)
        found: npt.NDArray[Any] = self.data[self.pos[:, None] + np.arange(kind.itemsize)].view(kind).reshape(-1)
        self.move(kind.itemsize)
        return found
