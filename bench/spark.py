"""Pipelines on Spark beside the same written by hand in PySpark: a table, and JSON.

    uv run python bench/spark.py [--quick] [--only SECTION] [--json FILE] [--directory DIR]

README.md beside this file says what each section measures. Ratios come from one run, the sides in turn: of the time on the
clock, and of processor time, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

import spark_sides as sides
from edge_size import SizeName
from fordstone.spark import session
from fordstone.spark.hosted.commit import BatchOutcome
from spark_cpu import cpu_seconds
from spark_input import FIRST_US, Inlet, stored, write_batch
from spark_size import SIZES, Size
from table import Finding, Target, at_least, at_most, machine, middle, number, show, show_missed, spread, write_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Side = Callable[["SparkSession", sides.Place], "StreamingQuery"]
SETTLING = 1
"""Micro-batches that are not counted: in the first workers start and code is compiled."""


@dataclass(slots=True)
class Timed:
    """How fast one side was, run by run."""

    rows_per_s: list[float] = field(default_factory=list)
    rows_per_cpu_s: list[float] = field(default_factory=list)


def measured(
    spark: SparkSession, home: Path, load: Path, rows: int, batches: int, names: Sequence[str], repetitions: int
) -> dict[str, Timed]:
    """Every side over the same micro-batches, in turn."""
    found = {name: Timed() for name in names}
    for _ in range(repetitions):
        for name in names:
            side: Side = getattr(sides, name)
            place = Path(tempfile.mkdtemp(dir=home, prefix=name))
            inlet = Inlet(place / "in")
            query = side(spark, sides.Place(pattern=inlet.pattern, home=place))
            try:
                before = 0.0
                for at, batch in enumerate(sorted(load.iterdir())[:batches]):
                    if at == SETTLING:
                        before = cpu_seconds()
                    inlet.let_in(batch)
                    query.processAllAvailable()
                cpu_s = cpu_seconds() - before
                reports = [one for one in query.recentProgress if "addBatch" in one.durationMs]
            finally:
                query.stop()
                shutil.rmtree(place)
            counted = rows * (batches - SETTLING)
            wall_s = sum(one.durationMs["triggerExecution"] for one in reports[SETTLING:]) / 1000
            found[name].rows_per_s.append(counted / wall_s)
            found[name].rows_per_cpu_s.append(counted / cpu_s)
    return found


def compared(
    section: str, case: str, found: Mapping[str, Timed], one: str, other: str, target: Target | None
) -> list[Finding]:
    """One side beside another, by the clock and by processor time."""
    rates = {name: middle(found[name].rows_per_s) for name in (one, other)}
    by_clock = [a / b for a, b in zip(found[one].rows_per_s, found[other].rows_per_s, strict=True)]
    by_cpu = [a / b for a, b in zip(found[one].rows_per_cpu_s, found[other].rows_per_cpu_s, strict=True)]
    speeds = ", ".join(f"{name} {rate / 1e6:.2f} M rows/s" for name, rate in rates.items())
    details = {
        name: {"rows_per_s": found[name].rows_per_s, "rows_per_cpu_s": found[name].rows_per_cpu_s} for name in rates
    }
    return [
        Finding(
            section=section,
            case=case,
            measured=middle(by_clock),
            unit="times",
            target=target,
            note=f"{spread(by_clock)}; {speeds}",
            details=details,
        ),
        Finding(
            section=section, case=f"{case}, processor time", measured=middle(by_cpu), unit="times", note=spread(by_cpu)
        ),
    ]


def windows(spark: SparkSession, size: Size, home: Path) -> list[Finding]:
    """Tumbling windows, beside the query written by hand with Spark's own operators."""
    rows, keys = size.batch_rows, size.keys[0]
    load = stored(home, rows=rows, keys=keys, batches=size.batches)
    names = ("windows_by_hand", "hosted_windows")
    found = measured(spark, home, load, rows, size.batches, names, size.repetitions)
    return compared("windows", "hosted to by hand", found, "hosted_windows", "windows_by_hand", None)


def ewma(spark: SparkSession, size: Size, home: Path) -> list[Finding]:
    """EWMA beside an identity over the same rows, and beside the same logic that Spark calls for each key."""
    findings = []
    for keys in size.keys:
        load = stored(home, rows=size.batch_rows, keys=keys, batches=size.batches)
        names = ("identity_to_nobody", "hosted_ewma_to_nobody", "identity", "hosted_ewma")
        found = measured(spark, home, load, size.batch_rows, size.batches, names, size.repetitions)
        case = f"{keys:,} keys, hosted to identity mapInArrow"
        findings += compared("ewma", case, found, "hosted_ewma_to_nobody", "identity_to_nobody", at_least(0.6))
        findings += compared("ewma", f"{case}, both writing Parquet", found, "hosted_ewma", "identity", None)
    keys, rows = size.keys[-1], size.by_key_rows
    load = stored(home, rows=rows, keys=keys, batches=size.batches)
    pair = ("ewma_by_key_to_nobody", "hosted_ewma_to_nobody")
    found = measured(spark, home, load, rows, size.batches, pair, 1)
    case = f"{keys:,} keys, hosted to transformWithStateInPandas by key"
    findings += compared("ewma", case, found, "hosted_ewma_to_nobody", "ewma_by_key_to_nobody", at_least(10))
    return findings


def growth(spark: SparkSession, size: Size, home: Path) -> list[Finding]:
    """State grown far beyond what a micro-batch changes: what a batch writes follows the change, not the state."""
    place = Path(tempfile.mkdtemp(dir=home, prefix="growth"))
    inlet = Inlet(place / "in")
    outcomes: list[BatchOutcome] = []
    query = sides.growing(spark, sides.Place(pattern=inlet.pattern, home=place, on_batch=outcomes.append))
    findings: list[Finding] = []
    at = keys = 0

    def batch(devices: np.ndarray) -> tuple[BatchOutcome, float]:
        nonlocal at
        times = FIRST_US + 1_000_000 * at + np.arange(devices.size) * 1_000_000 // devices.size
        frame = pl.DataFrame(
            {
                "ts": pl.Series(times).cast(pl.Datetime("us", "UTC")),
                "dev": devices.astype(np.int32),
                "temp": np.random.default_rng(at).normal(20, 5, devices.size),
            }
        )
        source = place / "source" / f"{at:04d}"
        write_batch(source, frame, files=2)
        inlet.let_in(source)
        query.processAllAvailable()
        at += 1
        report = [one for one in query.recentProgress if "addBatch" in one.durationMs][-1]
        return outcomes[-1], report.durationMs["triggerExecution"] / 1000

    try:
        for part in range(1, 5):
            while not outcomes or outcomes[-1].state_bytes < size.state_bytes * part / 4:
                batch(keys + np.random.default_rng(at).permutation(size.fill_rows))
                keys += size.fill_rows
            changed = [
                batch(np.random.default_rng(at).integers(0, keys, size.change_rows)) for _ in range(size.changes)
            ]
            state_bytes = changed[-1][0].state_bytes
            written = [outcome.written_bytes for outcome, _ in changed]
            findings.append(
                Finding(
                    section="growth",
                    case=f"state {number(state_bytes / 1e6)} MB, {size.change_rows:,} of {keys:,} keys changed: written",
                    measured=middle(written) / 1e6,
                    unit="MB a batch",
                    target=at_most(0.02 * state_bytes / 1e6) if part == 4 else None,
                    note=f"{number(middle(seconds for _, seconds in changed))} s a batch",
                    details={"written_bytes": written, "seconds": [seconds for _, seconds in changed]},
                )
            )
    finally:
        query.stop()
        shutil.rmtree(place)
    return findings


def kafka(spark: SparkSession, size: Size, home: Path) -> list[Finding]:
    """Topics of Kafka, which the servers of the tests are needed for."""
    from spark_kafka import kafka as measure

    return measure(spark, size, home)


def kafka_jars() -> dict[str, str]:
    """The setting with which Spark has its connector for Kafka."""
    from tests.services.spark_kafka import setting

    return setting()


SECTIONS: Mapping[str, Callable[[SparkSession, Size, Path], list[Finding]]] = {
    "windows": windows,
    "ewma": ewma,
    "growth": growth,
    "kafka": kafka,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", dest="size", action="store_const", const="quick", help="smaller and noisier")
    group.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs")
    parser.add_argument("--only", action="append", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "spark.json")
    parser.add_argument("--directory", type=Path, help="where rows and state are written; a temporary one if left out")
    options = parser.parse_args()
    name: SizeName = options.size or "full"
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f"; size {name}\n")
    findings: list[Finding] = []
    home = Path(tempfile.mkdtemp(dir=options.directory, prefix="fordstone-spark-bench-"))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    wanted = {section: measure for section, measure in SECTIONS.items() if not options.only or section in options.only}
    spark = session(master="local[2]", memory="4g", config=kafka_jars() if "kafka" in wanted else {})
    try:
        for section, measure in wanted.items():
            print(section, flush=True)
            found = measure(spark, SIZES[name], home)
            show(found)
            findings += found
            # After each section: what was measured is not lost when a later one fails.
            write_json(options.json, size=name, facts=facts, findings=findings)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    show_missed(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
