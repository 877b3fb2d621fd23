"""The steps between edge and center.

A user writes the first three. `tiers.split` puts a source, a sink, or a `Combine` in their place, and no engine ever sees them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fordstone.model.plan_aggregate import NamedAggregate
from fordstone.model.plan_step import AnyStep, Input, KeyedByColumns
from fordstone.model.windows import Window

OFFLINE_US: Final = 24 * 3600 * 1_000_000
CENTER_EARLY_US: Final = 1_000_000
"""Above the cut, windows give provisional results about so often, unless told otherwise."""


class ToCenter(AnyStep, frozen=True, tag="to_center", kw_only=True):
    """The cut: rows on their way from the edge to the center."""

    input: Input
    offline_us: int = OFFLINE_US
    """A node that has been away for so long no longer holds time back at the center."""


class Control(AnyStep, frozen=True, tag="control", kw_only=True):
    """A table that the center keeps and every node has a copy of: rows replace each other by key."""

    schema: dict[str, str]
    keys: tuple[str, ...]


class ToEdges(AnyStep, frozen=True, tag="to_edges", kw_only=True):
    """Rows of the center that become rows of a control table."""

    input: Input
    control: str


class RowsBelow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What rows looked like before partial rows were made of them: aggregates are about their columns."""

    schema: dict[str, str]
    time: str | None = None
    shift_us: int = 0
    """What is added to the time column."""


class Combine(KeyedByColumns, frozen=True, tag="combine", kw_only=True):
    """Below the cut: at each barrier one partial row for each key and window (or pane) that changed in the epoch (rule 9).

    All rows of a key come to one subtask, so that an epoch has the same partial rows whoever computes it again (rule 1).
    """

    input: Input
    window: Window | None
    aggregates: tuple[NamedAggregate, ...]
    schema: dict[str, str]
    """Of the partial rows."""
