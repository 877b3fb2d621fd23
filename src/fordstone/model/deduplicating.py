"""What a deduplication gives: its input, with fewer rows."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.model.manifest import TIME_MAX_US
from fordstone.model.stream_type import Derived, StreamType, Types, append_only, late_rows, needs_time, plain_keys


def derive_deduplicate(step: p.Deduplicate, types: Types) -> Derived:
    """The streams of such a step, by port."""
    stream = types[step.input]
    append_only(step, stream, "deduplicate")
    time = needs_time(step, stream, "deduplicate")
    if not step.keys:
        raise PipelineError(
            f"step {step.name}: deduplicate needs at least one column to tell rows apart by, such as deduplicate('id', ...)."
        )
    if not 0 < step.within_us <= TIME_MAX_US:
        raise PipelineError(
            f"step {step.name}: within={step.within_us}us must be longer than zero, and at most {TIME_MAX_US}us. "
            "It is how long after a row another of its key counts as the same."
        )
    plain_keys(step.keys, stream.schema, what="deduplicate")
    kept = StreamType(schema=stream.schema, time=time, row_wise=False)
    return {p.Input(step.name): kept, **late_rows(step, stream)}
