"""Say where a half of a split plan finds the hub. What a plan means does not depend on it (`Plan.unplaced`)."""

from __future__ import annotations

from typing import Final

import msgspec

from fordstone.hub.address import HubAddress
from fordstone.model import plan as p

HUB_KINDS: Final = frozenset({"center", "hub", "control"})
"""Connectors whose far end is the hub."""


def placed(plan: p.Plan, hub: HubAddress) -> p.Plan:
    """The plan with the hub's address in every connector that goes there. Called once, right before a run."""
    return msgspec.structs.replace(plan, steps=tuple(_placed(step, hub.at()) for step in plan.steps))


def _placed(step: p.Step, at: dict[str, str]) -> p.Step:
    if not isinstance(step, p.Source | p.Sink) or step.connector.kind not in HUB_KINDS:
        return step
    return msgspec.structs.replace(step, connector=msgspec.structs.replace(step.connector, at=at))
