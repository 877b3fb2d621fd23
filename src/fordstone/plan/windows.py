"""Windows as a plan says them. Those by time are closed-open; tumbling and sliding ones are aligned to the UTC epoch."""

from __future__ import annotations

import math

import msgspec


class Tumbling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tumbling"):
    """Windows [s, s + size), s a multiple of size from the UTC epoch, shifted by offset."""

    size_us: int
    offset_us: int = 0


class Sliding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sliding"):
    """Windows [s, s + size), s a multiple of slide from the UTC epoch, shifted by offset. A slide above the size leaves gaps."""

    size_us: int
    slide_us: int
    offset_us: int = 0


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="session"):
    """Rows of a key that follow each other by less than the gap. The window is [first, last + gap)."""

    gap_us: int


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="count"):
    """`size` rows of a key in order of time; the next window begins `slide` rows later. From first row to last, both included."""

    size: int
    slide: int


Window = Tumbling | Sliding | Session | Count


def panes(window: Sliding) -> Tumbling:
    """The pieces of time that rows of sliding windows are kept by: each window is a whole number of them.

    Windows that do not overlap are one piece each, with the gap after them.
    """
    overlap = window.slide_us < window.size_us
    size_us = math.gcd(window.size_us, window.slide_us) if overlap else window.slide_us
    return Tumbling(size_us=size_us, offset_us=window.offset_us % size_us)
