"""The input that exists now: how far partitions can be read, and whether a run that has ended left any of it unread.

Used by runs with `--available-now`, which read up to here and stop, and by a second run with `--bounded`, which must not end
successfully while there is input that nobody has read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fordstone.connectors.base import ALL_ROWS, ReadPlan, Source
from fordstone.connectors.registry import why_never_all_there
from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.errors import ConfigError, EndedError
from fordstone.plan import plan as p
from fordstone.plan.ids import PartitionId, Position


def check_available_now(plan: p.Plan) -> None:
    """Refuse sources of which never or always everything is there now."""
    for step in plan.steps:
        if isinstance(step, p.Source) and (why := why_never_all_there(step.connector)) is not None:
            raise ConfigError(f"source {step.name}: with --available-now {why}")


def read_targets(
    source: Source, known: Mapping[str, PartitionCut], joining: Iterable[PartitionId]
) -> dict[str, ReadPlan]:
    """How far these partitions can be read now. A known one that has gone ends where it was read to."""
    there = set(source.partitions())
    positions = dict.fromkeys(joining, 0) | {PartitionId(name): cut.position for name, cut in known.items()}
    return {
        name: source.plan_read(name, Position(position), ALL_ROWS)
        if name in there
        else ReadPlan(position=Position(position), ended=True)
        for name, position in positions.items()
    }


def check_nothing_new(pipeline: str, cut: Cut, sources: Mapping[str, Source]) -> None:
    """Raise if input that was read to the end at this cut has grown since. `sources` are opened as bounded, or have ended."""
    for name, source in sources.items():
        known = cut.sources.get(name, SourceCut(partitions={})).partitions
        source.restore(known)
        for partition in source.partitions():
            position = known[partition].position if partition in known else 0
            if source.plan_read(partition, Position(position), 1).position > position:
                raise EndedError(
                    f"pipeline {pipeline} has ended: with epoch {cut.epoch} its input was read to the end. Source {name} has new "
                    f"input since, in {partition}, and a run that has ended cannot take it in.\n"
                    "To start over with all input, add --fresh (in Python: fresh=True): it sets aside the state and the outputs. To read only "
                    "what is new with every run, use --available-now (available_now=True) instead of --bounded; the first time with --fresh."
                )
