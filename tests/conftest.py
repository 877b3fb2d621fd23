"""Options, the one Spark of a run, who runs beside whom, and the closing summary of what was tried."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Before anybody imports polars: small frames on many threads only get in each other's way.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

HERE = Path(__file__).resolve().parent
# Whatever is in here may start Java processes; a run has them one after the other.
SPARK_FOLDERS = (HERE / "spark", HERE / "differential")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=2000, help="how many seeds the simulation runs")
    parser.addoption("--first-seed", type=int, default=100_000, help="the first of them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep together what shares something costly; read by pytest-xdist with `--dist loadgroup`, by nobody else."""
    for item in items:
        group = _shared(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def _shared(item: pytest.Item) -> str | None:
    names = getattr(item, "fixturenames", ())
    if "spark" in names or any(item.path.is_relative_to(folder) for folder in SPARK_FOLDERS):
        return "spark"
    # A module's fixture would be made again in each process that runs one of the module's tests.
    made = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    if any(definitions[-1].scope == "module" for name, definitions in made.items() if name in names):
        return str(item.path.relative_to(HERE))
    return None


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark of a test run. Tests that set something in it use `prepared(spark)` or `spark.newSession()`."""
    from fordstone.spark import session

    # Java's quick compiler alone: tests end before the thorough one has paid for itself (half the processor time).
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    started = session(master="local[2]", memory="2g", config={"spark.driver.extraJavaOptions": options})
    yield started
    started.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for kind, counts in getattr(report, "user_properties", []):
                if isinstance(counts, dict):
                    tried.setdefault(kind, Counter()).update(counts)
    for kind, counts in sorted(tried.items()):
        terminalreporter.write_line(
            f"{kind}: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        )
