"""Finds where the items of arrays and the entries of maps begin, and passes values that nothing wants.

Items follow one another without an index, so the next one is found by passing the one before. Many values are passed together, item by item;
when few are left, each is walked by itself: a long array in one value then costs about what its bytes cost, and not a step of all.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fordstone.connectors.avro.cursor import Cursor, Longs
from fordstone.connectors.avro.schema import AvroType

TOGETHER_MIN: Final = 256
"""The number of values from which on they are passed together."""
DEPTH_MAX: Final = 64
"""How deep values may be nested: a type may contain itself."""
EMPTY_ITEMS_MAX: Final = 100
"""Items that have no bytes, such as nulls: a few bytes could claim any number of them."""
_TOO_DEEP: Final = f"it is nested more than {DEPTH_MAX} deep"
_TRUNCATED: Final = "the value is truncated"
_NO_LENGTH: Final = "a length is negative, or more than there is"
_NO_BRANCH: Final = "a union has no such branch"
_NO_COUNT: Final = "an array or map has more items than the value has bytes"
_LONG_BITS: Final = 63


class InvalidError(Exception):
    """One value is not valid."""


@dataclass(slots=True)
class Starts:
    """Where items begin."""

    owners: list[Longs] = field(default_factory=list)
    """Of which position of the cursor they are items."""
    at: list[Longs] = field(default_factory=list)

    def add(self, owners: Longs, at: Longs) -> None:
        self.owners.append(owners)
        self.at.append(at)

    def sorted(self) -> tuple[Longs, Longs]:
        """The owners and the starts, by owner and then in order."""
        none = np.zeros(0, dtype=np.int64)
        owners, at = np.concatenate((none, *self.owners)), np.concatenate((none, *self.at))
        order = np.argsort(owners, kind="stable")
        return owners[order], at[order]


def pass_value(kind: AvroType, cursor: Cursor, depth: int = 0) -> None:
    """Move past a value of each position."""
    size = kind.fixed_size()
    if size is not None:
        cursor.move(size)
    elif depth > DEPTH_MAX:
        cursor.fail(np.ones(len(cursor), dtype=np.bool_), _TOO_DEEP)
    elif kind.name in {"int", "long", "enum"}:
        cursor.varint()
    elif kind.name in {"bytes", "string"}:
        cursor.move(cursor.length())
    elif kind.name == "record":
        for one in kind.fields:
            pass_value(one.kind, cursor, depth + 1)
    elif kind.name == "union":
        for branch, which in branches(cursor, len(kind.inner)):
            part = cursor.at(which)
            pass_value(kind.inner[branch], part, depth + 1)
            cursor.pos[which] = part.pos
    else:
        pass_items(kind, cursor, None, depth)


def branches(cursor: Cursor, count: int) -> list[tuple[int, Longs]]:
    """Read the branches of unions: each with the positions that have it."""
    found = cursor.long()
    wrong = (found < 0) | (found >= count)
    cursor.fail(wrong, _NO_BRANCH)
    found[wrong] = -1
    if found.size and (found == found[0]).all():
        return [(int(found[0]), np.arange(found.size))] if found[0] >= 0 else []
    return [(int(branch), np.flatnonzero(found == branch)) for branch in np.unique(found) if branch >= 0]


def pass_items(kind: AvroType, cursor: Cursor, starts: Starts | None, depth: int = 0) -> None:
    """Move past arrays or maps, and note where their items begin."""
    item, keyed = kind.inner[0], kind.name == "map"
    size = None if keyed else item.fixed_size()
    left = np.zeros(len(cursor), dtype=np.int64)
    empty = np.zeros(len(cursor), dtype=np.int64)
    active = np.arange(len(cursor))
    while active.size:
        if active.size < TOGETHER_MIN:
            for one in active.tolist():
                _walk(kind, cursor, one, int(left[one]), starts, depth)
            return
        fresh = active[left[active] == 0]
        if fresh.size:
            part = cursor.at(fresh)
            left[fresh] = _block(part, size, empty[fresh])
            empty[fresh] += left[fresh] if size == 0 else 0
            cursor.pos[fresh] = part.pos
            active = active[left[active] > 0]
        if size is not None:
            counts = left[active]
            if starts is not None:
                starts.add(np.repeat(active, counts), _spread(cursor.pos[active], counts, size))
            cursor.pos[active] += counts * size
            left[active] = 0
            continue
        part = cursor.at(active)
        if starts is not None:
            starts.add(active, part.pos)
        if keyed:
            part.move(part.length())
        pass_value(item, part, depth + 1)
        cursor.pos[active] = part.pos
        left[active] -= 1
        active = active[cursor.failures.good(part.rows)]


def _block(cursor: Cursor, size: int | None, empty: Longs) -> Longs:
    """Read how many items follow; 0: none, and no further block. After a negative count the bytes of the block follow."""
    count = cursor.long()
    sized = np.flatnonzero(count < 0)
    if sized.size:
        part = cursor.at(sized)
        part.long()
        cursor.pos[sized] = part.pos
        count = np.abs(count)
    room = EMPTY_ITEMS_MAX - empty if size == 0 else (cursor.end - cursor.pos) // (size or 1)
    wrong = (count < 0) | (count > room)
    cursor.fail(wrong, _NO_COUNT)
    count[wrong] = 0
    return count


def _spread(begin: Longs, counts: Longs, size: int) -> Longs:
    """Where items of one size are: `counts` of them from each beginning on."""
    before = np.cumsum(counts) - counts
    found: Longs = np.repeat(begin - before * size, counts) + np.arange(int(counts.sum())) * size
    return found


def _walk(kind: AvroType, cursor: Cursor, one: int, left: int, starts: Starts | None, depth: int) -> None:
    """As `pass_items`, for one position."""
    at = array("q")
    found = None if starts is None else at
    try:
        cursor.pos[one] = _one_items(kind, cursor.raw, int(cursor.pos[one]), int(cursor.end[one]), depth, left, found)
    except InvalidError as error:
        alone = np.arange(len(cursor)) == one
        cursor.fail(alone, str(error))
    if starts is not None:
        starts.add(np.full(len(at), one), np.frombuffer(at, dtype=np.int64))


def _one_items(kind: AvroType, raw: bytes, pos: int, end: int, depth: int, left: int, at: array[int] | None) -> int:
    item, keyed = kind.inner[0], kind.name == "map"
    size, empty = None if keyed else item.fixed_size(), 0
    while True:
        if not left:
            left, pos = _one_long(raw, pos, end)
            if left < 0:
                left = -left
                _, pos = _one_long(raw, pos, end)
            if not left:
                return pos
            if size == 0:
                empty += left
            if empty > EMPTY_ITEMS_MAX or (size != 0 and left * (size or 1) > end - pos):
                raise InvalidError(_NO_COUNT)
        if size is not None:
            if at is not None:
                at.extend(range(pos, pos + left * size, size) if size else [pos] * left)
            pos += left * size
            left = 0
            continue
        for _ in range(left):
            if at is not None:
                at.append(pos)
            if keyed:
                pos = _one_bytes(raw, pos, end)
            pos = _one_value(item, raw, pos, end, depth + 1)
        left = 0


def _one_value(kind: AvroType, raw: bytes, pos: int, end: int, depth: int) -> int:
    size = kind.fixed_size()
    if size is not None:
        if pos + size > end:
            raise InvalidError(_TRUNCATED)
        return pos + size
    if depth > DEPTH_MAX:
        raise InvalidError(_TOO_DEEP)
    if kind.name in {"int", "long", "enum"}:
        return _one_long(raw, pos, end)[1]
    if kind.name in {"bytes", "string"}:
        return _one_bytes(raw, pos, end)
    if kind.name == "record":
        for one in kind.fields:
            pos = _one_value(one.kind, raw, pos, end, depth + 1)
        return pos
    if kind.name == "union":
        branch, pos = _one_long(raw, pos, end)
        if not 0 <= branch < len(kind.inner):
            raise InvalidError(_NO_BRANCH)
        return _one_value(kind.inner[branch], raw, pos, end, depth + 1)
    return _one_items(kind, raw, pos, end, depth, 0, None)


def _one_bytes(raw: bytes, pos: int, end: int) -> int:
    length, pos = _one_long(raw, pos, end)
    if length < 0 or length > end - pos:
        raise InvalidError(_NO_LENGTH)
    return pos + length


def _one_long(raw: bytes, pos: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if pos >= end:
            raise InvalidError(_TRUNCATED)
        part = raw[pos]
        pos += 1
        value |= (part & 0x7F) << shift
        if part < 0x80:  # noqa: PLR2004 - the bit that says that another byte follows
            break
        shift += 7
        if shift > _LONG_BITS:
            raise InvalidError("a number has more than 64 bits")
    if value >> 64:
        raise InvalidError("a number has more than 64 bits")
    return (value >> 1) ^ -(value & 1), pos
