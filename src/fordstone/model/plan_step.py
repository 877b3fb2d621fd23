"""What all steps of a plan have in common: a name, inputs, and by what their rows are brought together."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Port = Literal["main", "late", "timeout", "final"]


class ConnectorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which system, and how: what a plan says of a source's or a sink's far end."""

    kind: str
    options: dict[str, Any] = {}
    at: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Where this run finds it, and what opens it: addresses, tokens. No part of what a plan means: neither stored nor compared."""

    def __repr__(self) -> str:
        # Without what opens it: this comes into logs and tracebacks.
        at = "" if self.at is msgspec.UNSET else f", at={self.at.get('url', '...')!r}"
        return f"ConnectorSpec(kind={self.kind!r}, options={self.options!r}{at})"


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream that a step reads: a step's output, or another of its ports.

    `late`: rows that came too late. `timeout`: beginnings of patterns whose time ran out. `final`: of a window with early
    results, the last word on each.
    """

    step: str
    port: Port = "main"

    def __str__(self) -> str:
        return self.step if self.port == "main" else f"{self.step}.{self.port}"


class AnyStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", kw_only=True):
    """A named node of the graph."""

    name: str

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The streams this step reads, feedback left out."""
        found = getattr(self, "input", None)
        return () if found is None else (found,)

    @property
    def shuffles(self) -> tuple[tuple[str, ...], ...] | None:
        """For each input the columns by which its rows are brought together; None: this step takes rows where they are.

        Where a feeder stands before the shuffle (`operators.factory.make_feeder`), these are columns that it gives.
        """
        return None


class KeyedByColumns(AnyStep, frozen=True, kw_only=True):
    """A step with state by key: all rows of a key come to one subtask. Without keys there is one subtask."""

    keys: tuple[str, ...]

    @property
    def shuffles(self) -> tuple[tuple[str, ...], ...] | None:
        """By the key."""
        return (self.keys,)


def join_keys(count: int) -> tuple[str, ...]:
    """The key columns on the way to a step that joins two streams, whatever they are called in each."""
    return tuple(f"__k{index}" for index in range(count))
