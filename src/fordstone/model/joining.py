"""What joins give: the columns of both sides."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.model.stream_type import Derived, Types


def derive_join(step: p.Join, types: Types) -> Derived:
    """The streams of an interval join, by port."""
    raise PipelineError(f"step {step.name}: not there yet.")


def derive_lookup(step: p.Lookup | p.LookupLatest, types: Types) -> Derived:
    """The streams of a lookup, by port."""
    raise PipelineError(f"step {step.name}: not there yet.")
