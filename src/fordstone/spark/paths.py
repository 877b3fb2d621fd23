"""Local paths of a plan, spelt out: Spark's workers have other working directories than whoever wrote the pipeline."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fordstone.model import plan as p


def absolute(plan: p.Plan) -> p.Plan:
    """The plan with absolute paths in its connectors."""
    steps = tuple(
        msgspec.structs.replace(step, connector=_spelt(step.connector)) if isinstance(step, p.Source | p.Sink) else step
        for step in plan.steps
    )
    return msgspec.structs.replace(plan, steps=steps)


def _spelt(connector: p.ConnectorSpec) -> p.ConnectorSpec:
    path = connector.options.get("path")
    if not isinstance(path, str) or "://" in path:
        return connector
    whole = str(Path(path).expanduser().absolute())
    return msgspec.structs.replace(connector, options={**connector.options, "path": whole})
