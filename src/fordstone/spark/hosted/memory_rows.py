"""Rows that live in this process's memory, written out so that Spark's workers can read them.

For bounded runs, as tests and notebooks have them: what is there now is all there will be. Each partition becomes a file,
so rows are judged late as they would be in memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors import files
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan.ids import Position

KIND: Final = "memory"
_ROWS_AT_ONCE: Final = 1 << 17


def sources_in_memory(plan: p.Plan) -> tuple[p.Source, ...]:
    """The sources whose rows only this process has."""
    return tuple(step for step in plan.steps if isinstance(step, p.Source) and step.connector.kind == KIND)


def written_out(plan: p.Plan, folder: Path) -> p.Plan:
    """The plan with the rows of its sources in memory as files below `folder`."""
    for step in sources_in_memory(plan):
        place = folder / step.name
        # What an earlier try left may be more, or torn.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _write(step, place)
        connector = files(f"{place}/*.arrow")
        steps = tuple(msgspec.structs.replace(step, connector=connector) if one is step else one for one in plan.steps)
        plan = msgspec.structs.replace(plan, steps=steps)
    return plan


def _write(step: p.Source, place: Path) -> None:
    schema = Schema.of(step.schema)
    source = open_source(step.connector, SourceOptions(schema=schema, bounded=True))
    for number, partition in enumerate(source.partitions()):
        reader = source.open(partition, Position(0), with_positions=False)
        frames = [schema.empty()]
        while (chunk := reader.read(_ROWS_AT_ONCE)) is not None:
            if chunk.rejected:
                first = chunk.rejected[0]
                raise ConfigError(
                    f"source {step.name}: row {first.position} in memory is not a row of its schema ({first.reason}), and on Spark "
                    "only rows in files can become dead letters. Mend the row, or read it from a file."
                )
            frames.append(chunk.frame)
            if chunk.ended:
                break
        reader.close()
        pl.concat(frames).write_ipc(place / f"{number:06d}.arrow")
