"""What a keyed function gives, and what it may remember."""

from __future__ import annotations

from typing import Final

from fordstone.errors import PipelineError, SchemaError
from fordstone.model import plan as p
from fordstone.model.schema import RESERVED_PREFIX, DataType, Schema
from fordstone.model.stream_type import (
    TIMESTAMP,
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    late_rows,
    needs_time,
    plain_keys,
)

METHODS: Final = frozenset({"process", "on_timer"})
"""What a keyed function's class defines itself: no state can be called so."""
MAP_KEYS: Final = frozenset(
    {"boolean", "tinyint", "smallint", "int", "bigint", "string", "binary", "date", "timestamp", "decimal"}
)
"""Types whose values are equal exactly if they look equal."""


def derive_process(step: p.Process, types: Types) -> Derived:
    """The streams of such a step, by port. Without event time no row is late."""
    stream = types[step.input]
    append_only(step, stream, "process")
    if stream.looped:
        raise PipelineError(
            f"step {step.name}: process cannot stand inside or below a loop: its results would never settle."
        )
    if step.ordered:
        needs_time(step, stream, "process(ordered=True)")
    plain_keys(step.keys, stream.schema)
    state_types(step)
    schema = Schema.of(step.schema)
    main = StreamType(schema=schema, time=output_time(stream, schema), row_wise=False)
    late = late_rows(step, stream) if stream.time is not None else {}
    return {p.Input(step.name): main, **late}


def output_time(stream: StreamType, schema: Schema) -> EventTime | None:
    """The event time of what a function gives: the column of the input's time, if it is there and still a time."""
    if stream.time is None or schema.get(stream.time.column) != TIMESTAMP:
        return None
    return stream.time


def state_types(step: p.Process) -> dict[str, tuple[DataType, DataType | None]]:
    """The types of each state: of its values, and of a map's keys. Refuses what cannot be kept."""
    found: dict[str, tuple[DataType, DataType | None]] = {}
    for state in step.states:
        where = f"state {state.name}"
        if not state.name.isidentifier() or state.name.startswith(RESERVED_PREFIX):
            raise SchemaError(f"{where}: a state is named as an attribute is, not beginning with {RESERVED_PREFIX!r}.")
        if state.name in METHODS:
            raise SchemaError(f"{where}: {state.name} is what the function does. Give the state another name.")
        if state.name in found:
            raise SchemaError(f"{where} is declared twice.")
        if state.ttl_us is not None and state.ttl_us <= 0:
            raise SchemaError(f"{where}: ttl must be longer than zero. Leave it out to remember for good.")
        if (state.key_type is not None) != (state.kind == "map"):
            raise SchemaError(f"{where}: a map has a type of keys, and nothing else has.")
        key = None if state.key_type is None else _kept(where, state.key_type)
        if key is not None and key.name not in MAP_KEYS:
            raise SchemaError(f"{where}: {key} cannot be the key of a map; use one of {', '.join(sorted(MAP_KEYS))}.")
        found[state.name] = (_kept(where, state.type), key)
    return found


def _kept(where: str, text: str) -> DataType:
    try:
        kind = DataType.parse(text)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from None
    if kind.name == "null":
        raise SchemaError(f"{where}: a state of type null has nothing to remember.")
    return kind
