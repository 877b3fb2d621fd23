"""What the state of each step depends on: where it changed, old state cannot be used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from fordstone.operators.aggregate.check import aggregates, rows_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import StreamType

_NO_MEANING: Final = frozenset({"name", "input", "left", "right", "control"})
"""What a step is called and where its rows come from does not matter to its state."""


def step_digests(plan: p.Plan, types: Mapping[p.Input, StreamType]) -> dict[str, str]:
    """What the state of each stateful step depends on. Sources count: their state is their positions."""
    found = {}
    for step in plan.steps:
        if isinstance(step, p.Source):
            meaning: list[object] = ["source", step.connector.kind, step.time]
        elif isinstance(step, p.Aggregate):
            # What is kept of rows is the same whether they came as rows or as partial rows (`merges`).
            schema = rows_of(step, types).schema
            keys = [(key, str(schema[key])) for key in step.keys]
            calls = [call for found in aggregates(step, schema) for call in found.calls]
            kinds = [(call.sql, str(call.type), str(call.argument.type) if call.argument else "") for call in calls]
            meaning = ["aggregate", keys, step.window, step.aggregates, kinds]
            if step.early_us is not None:
                meaning.append("early")  # what changed since the last early results is a part of its own
        elif isinstance(step, p.Combine):
            continue  # it forgets at every barrier
        elif isinstance(step, p.KeyedStep):
            # The rows that wait have all columns; the order of columns decides which of equal time comes first.
            taken = [(list(types[at].schema.to_dict().items()), types[at].time) for at in step.inputs]
            own = {name: value for name, value in msgspec.to_builtins(step).items() if name not in _NO_MEANING}
            meaning = [own, taken]
        elif isinstance(step, p.Loop):
            meaning = ["loop", types[step.input].schema.to_dict()]
        else:
            continue
        found[step.name] = hashlib.sha256(msgspec.json.encode(meaning, order="deterministic")).hexdigest()
    return found
