"""Digests of what the state of each step depends on: if one changed, stored state of that step cannot be used."""

from __future__ import annotations

import hashlib

import msgspec

from fordstone.operators.registry import family_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Types


def step_digests(plan: p.Plan, types: Types) -> dict[str, str]:
    """Return the digest of each stateful step by name. Sources count: their state is their positions."""
    meanings = {step.name: family_of(step).digest(step, types) for step in plan.steps}
    return {
        name: hashlib.sha256(msgspec.json.encode(meaning, order="deterministic")).hexdigest()
        for name, meaning in meanings.items()
        if meaning is not None
    }
