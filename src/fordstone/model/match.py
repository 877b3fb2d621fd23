"""What a pattern gives: matches, and beginnings whose time ran out."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.model.stream_type import Derived, Types


def derive_match(step: p.Match, types: Types) -> Derived:
    """The streams of such a step, by port."""
    raise PipelineError(f"step {step.name}: not there yet.")
