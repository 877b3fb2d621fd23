"""The history of a stream: ids of entries as positions, and whether what follows a position is still all there. Pure.

An id `ms-seq` is the number `ms << sequence_bits | seq`, which keeps the order of ids. A position is one more than the id of the last entry
before it, so 0 is that of a stream that was never begun.

A server removes entries from the beginning of a stream when it is trimmed, and anywhere by XDEL; it counts all that were ever added. As long as an
entry at or before the position is there, trimming has removed nothing after it. If none is there, the counts tell how many are missing.

Invariants: ids that do not fit are an error; what is not certain is taken for lost, and never for intact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

SEQUENCE_BITS: Final = 20
"""A million entries in one millisecond, and times up to the year 2248."""
SEQUENCE_BITS_MAX: Final = 62
_POSITION_BITS: Final = 63


class IdRangeError(ValueError):
    """An id does not fit into a position."""


def number_of(text: str, bits: int) -> int:
    """The number of an id."""
    first, _, second = text.partition("-")
    ms, sequence = int(first), int(second or 0)
    number = ms << bits | sequence
    if sequence >> bits or (number + 1) >> _POSITION_BITS:
        raise IdRangeError(text)
    return number


def id_of(number: int, bits: int) -> str:
    """The id of a number."""
    return f"{number >> bits}-{number & ((1 << bits) - 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """A stream as the server describes it at one moment."""

    length: int
    first: int | None
    """The oldest entry; None: there is none."""
    newest: int
    """The id that was given last, also if its entry is gone."""
    added: int
    """How many entries were ever added."""
    deleted: int
    """The largest id that was removed by XDEL; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far a stream was read."""

    after: int
    """Everything up to this id was read, or is not there."""
    count: int | None
    """How many entries had been added up to it, at least; None: unknown."""
    is_entry: bool
    """An entry with this id was read."""


@dataclass(frozen=True, slots=True)
class Intact:
    """Everything that was added after it is there, or was removed by XDEL while older entries were still there."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Entries after it were removed."""

    entries: int | None
    """How many; None: unknown."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The stream is not the one that was read, or an older state of it."""

    why: str


Judgement: TypeAlias = Intact | Lost | Rewritten


def judge(reached: Reached, facts: StreamFacts | None, bits: int) -> Judgement:
    """Judge a stream in which the entry that was read last is not found. `facts`: None if there is no stream."""
    after = id_of(reached.after, bits)
    if facts is None:
        if reached.after == 0:
            return Intact()
        return Rewritten("it is not there any more")
    if facts.newest < reached.after:
        return Rewritten(f"its newest id is {id_of(facts.newest, bits)}, and it was read up to {after}")
    if reached.count is not None and facts.added < reached.count:
        return Rewritten(f"it has had {facts.added} entries, and {reached.count} were read")
    if facts.first is not None and facts.first <= reached.after:
        if reached.is_entry and facts.deleted < reached.after:
            return Rewritten(f"entry {after}, which was read, is missing among older and newer ones")
        return Intact()
    removed = facts.added - facts.length
    if reached.count is None:
        return Lost(None) if removed else Intact()
    if removed < reached.count:
        return Rewritten(
            f"all its entries are newer than {after}, and {removed} older ones were removed, but {reached.count} were read"
        )
    return Lost(removed - reached.count) if removed > reached.count else Intact()
