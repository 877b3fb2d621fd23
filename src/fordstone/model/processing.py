"""What a keyed function gives."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.model.stream_type import Derived, Types


def derive_process(step: p.Process, types: Types) -> Derived:
    """The streams of such a step, by port."""
    raise PipelineError(f"step {step.name}: not there yet.")
