"""A spec that carries an object of this process beside its fields.

The object is no field: it is not part of the plan's JSON nor of equality, and a plan read back from JSON lacks it.
"""

from __future__ import annotations

from typing import Any

from fordstone.connectors.connector import ConnectorSpec


class LiveSpec(ConnectorSpec, frozen=True, dict=True):
    """Made by `LiveSpec.around`; read by `live_of`."""

    @classmethod
    def around(cls, live: object, *, kind: str, options: dict[str, Any] | None = None) -> LiveSpec:
        """A spec of this kind with its object at hand."""
        spec = cls(kind=kind, options=options or {})
        spec.__dict__["live"] = live
        return spec


def live_of(spec: ConnectorSpec) -> object | None:
    """The object that the spec carries, unless it came from JSON."""
    return spec.__dict__.get("live") if isinstance(spec, LiveSpec) else None
