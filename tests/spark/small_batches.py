"""A hosted query in small micro-batches whose processes die; rows in files for it, and what came out of it.

Leaves to `micro` how a process dies, and to the tests what the results are compared with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died

from fordstone import Pipeline
from fordstone.connectors import MemorySink

SCHEMA = {"k": "string", "ts": "timestamp", "n": "bigint"}
LATENESS_S = 4
START = datetime(2026, 3, 29, 0, 59, tzinfo=UTC)
Sinks = dict[str, MemorySink]
Made = tuple[Pipeline, Sinks]


def key_and_number(rng: Random) -> dict[str, Any]:
    """The columns of `SCHEMA` but the time."""
    return {"k": rng.choice(["a", "é", None]), "n": rng.randrange(50)}


def fill(
    directory: Path, rng: Random, *, row: Callable[[Random], dict[str, Any]] = key_and_number, rows_min: int = 20
) -> None:
    """Two files of rows whose time `ts` moves on with some disorder; a few are late."""
    directory.mkdir(parents=True)
    for number in range(2):
        now, lines = 0, []
        for _ in range(rng.randint(rows_min, 60)):
            now += rng.choice((0, 0, 1, 1, 2))
            second = now - rng.choice((0, 0, 1, LATENESS_S, LATENESS_S + 1))
            ts = (START + timedelta(seconds=second)).isoformat()
            lines.append(json.dumps(row(rng) | {"ts": ts}) + "\n")
        (directory / f"{number}.jsonl").write_text("".join(lines))


class Ended(NamedTuple):
    """How a query came to its end."""

    died: int
    batches: int
    """Of the last try."""


def run_with_deaths(
    spark: MicroSpark,
    pipeline: Pipeline,
    rng: Random,
    *,
    deaths: int,
    within: tuple[int, int] = (1, 80),
    **options: Any,
) -> Ended:
    """Run to the end, again and again while processes die: so often at most, each after a number of steps in `within`."""
    died = 0
    while True:
        spark.fate.dies_at = None
        if died < deaths:
            spark.fate.dies_within(rng.randint(*within))
        try:
            batches = spark.start(pipeline.plan(), pipeline.functions, bounded=True, **options).run()
        except Died:
            died += 1
        else:
            return Ended(died, batches)


def hosted(made: Made, state: Path, rng: Random) -> dict[str, Counter[Any]]:
    """What comes out of a pipeline with two deaths, shards and micro-batches as chance has it."""
    pipeline, sinks = made
    spark = MicroSpark(rng.randrange(2**32))
    rows_max, shards = rng.choice((5, 11, 30)), rng.randint(1, 3)
    run_with_deaths(spark, pipeline, rng, deaths=2, state=state, shards=shards, rows_max=rows_max, batch_rows=4)
    return shown(sinks)


def by_edge(made: Made, state: Path, rng: Random) -> dict[str, Counter[Any]]:
    """What the edge engine gives, in small batches."""
    pipeline, sinks = made
    pipeline.run(state=state, bounded=True, parallelism=rng.randint(1, 2), batch_rows=5, interval="5ms")
    return shown(sinks)


def shown(sinks: Sinks) -> dict[str, Counter[Any]]:
    """The rows of each sink, in any order."""
    return {name: Counter(row for frame in sink.frames() for row in frame.rows()) for name, sink in sinks.items()}
