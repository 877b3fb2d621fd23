"""What a run waits for outside, by the names of its steps: for progress, the log and `/healthz`."""

from __future__ import annotations

from collections.abc import Mapping

from fordstone.connectors.base import Capability, SourceTrouble
from fordstone.connectors.registry import capabilities
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.plan import plan as p
from fordstone.protocol.progress import Away, Role


def sources_away(plan: p.Plan, troubles: Mapping[str, SourceTrouble]) -> tuple[str | None, tuple[Away, ...]]:
    """Return why a hub cannot be read from, if so, and the other sources whose system is away. `troubles`: by the names of sources."""
    hub: str | None = None
    others = []
    for name, trouble in troubles.items():
        if trouble.away is None:
            continue
        spec = plan.step(name)
        if isinstance(spec, p.Source) and Capability.AT_HUB in capabilities(spec.connector):
            hub = hub or trouble.away
        else:
            others.append(_away(plan, name, trouble.away, role="source"))
    return hub, tuple(others)


def sink_away(plan: p.Plan, name: str, problem: str) -> Away:
    """Return the sink that takes no rows now; `name` as `SinkRelease` has it."""
    return _away(plan, name, problem, role="sink")


def _away(plan: p.Plan, name: str, problem: str, *, role: Role) -> Away:
    step = None if name.startswith(DEAD_LETTERS) else plan.step(name)
    kind = step.connector.kind if isinstance(step, p.Source | p.Sink) else ""
    return Away(role=role, step=name, kind=kind, problem=problem)
