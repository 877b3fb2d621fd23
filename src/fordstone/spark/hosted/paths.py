"""Local paths of a plan, spelt out: Spark's workers have other working directories than whoever wrote the pipeline."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fordstone.plan import plan as p


def absolute(plan: p.Plan) -> p.Plan:
    """The plan with absolute paths in its connectors."""
    return msgspec.structs.replace(plan, steps=tuple(map(_with_whole_paths, plan.steps)))


def _with_whole_paths(step: p.Step) -> p.Step:
    if isinstance(step, p.Source | p.Sink):
        return msgspec.structs.replace(step, connector=_spelt(step.connector))
    if isinstance(step, p.Lookup):
        return msgspec.structs.replace(step, table=_spelt(step.table))
    return step


def _spelt(connector: p.ConnectorSpec) -> p.ConnectorSpec:
    path = connector.options.get("path")
    if not isinstance(path, str) or "://" in path:
        return connector
    whole = str(Path(path).expanduser().absolute())
    return msgspec.structs.replace(connector, options={**connector.options, "path": whole})
