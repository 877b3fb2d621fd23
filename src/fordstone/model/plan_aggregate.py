"""The aggregates of a step, as a plan says them."""

from __future__ import annotations

import msgspec


class UserAggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of a user by its import path, what it is over, what it keeps and what it gives."""

    path: str
    arguments: tuple[str, ...]
    state: dict[str, str]
    result: str


class NamedAggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output column of an aggregate step: an aggregate expression, or a user's own aggregate over expressions."""

    name: str
    sql: str
    """For a user's own only what is shown."""
    user: UserAggregate | None = None
