"""The selection of tests (`--quick`, `--full`), their distribution over processes, the one Spark of a run, and the closing summary."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tests.examples import SHARE, SHARES, examples
from tests.guardian import start_guardian
from tests.java_options import LAUNCHER, OPTIONS
from tests.services import BUILT, SERVICES
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # it ships no types

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Before polars and numpy are imported: small frames on many threads only get in each other's way.
os.environ.setdefault("POLARS_MAX_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

os.environ.setdefault(LAUNCHER, OPTIONS)

# Before it is imported: pytest explains its failed assertions as it does those of a test.
pytest.register_assert_rewrite("tests.operators.subtasks")

pytest_plugins = ["tests.services.fixtures"]

HERE = Path(__file__).resolve().parent
SPARK_FOLDER = HERE / "spark"
SLOW_PLACES = (
    HERE / "bench",
    HERE / "cli" / "test_three_processes.py",
    HERE / "cli" / "test_tiers_run.py",
    HERE / "docs" / "test_interrupted.py",
    HERE / "epochs" / "test_crash.py",
    HERE / "faults",
    HERE / "simulation" / "test_ahead.py",
    HERE / "simulation" / "test_fleet_mutants.py",
    HERE / "simulation" / "test_mutants.py",
    HERE / "test_demo.py",
)
SEEDS = {"quick": 25, "usual": 50, "full": 4000}
GUARDIAN = pytest.StashKey[object]()
FILES_BEFORE = pytest.StashKey[set[str]]()
MARKERS = {
    "spark": "needs Java; set for all of tests/spark and for users of the fixture `spark`; not in --quick",
    "slow": "takes over a second of processor time without Spark: kills, several processes, real servers; not in --quick",
    "full": "a case of a large matrix or a long soak; only in --full",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests that need Java or take long")
    parser.addoption(
        "--full",
        action="store_true",
        help="run all fault matrices and examples, and eighty times as many simulation seeds",
    )
    parser.addoption("--seeds", type=int, default=None, help=f"number of simulation seeds ({SEEDS['usual']})")
    parser.addoption("--first-seed", type=int, default=100_000, help="the first of these seeds")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    scope = "quick" if config.option.quick else "full" if config.option.full else "usual"
    if config.option.seeds is None:
        config.option.seeds = SEEDS[scope]
    os.environ[SHARE] = str(SHARES[scope])
    # The same examples in every run, so that a run fails only for what was changed; HYPOTHESIS_PROFILE=random looks for others.
    settings.register_profile("fixed", parent=examples(100), derandomize=True)
    settings.register_profile("random", parent=examples(100))
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
    if config.option.quick:
        sys.addaudithook(_no_java)
    config.stash[FILES_BEFORE] = _files()
    if not config.option.collectonly:
        config.stash[GUARDIAN] = start_guardian()
        if scope != "quick" and not _worker(config) and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            _build_in_the_background("tests.services.s3")


def _build_in_the_background(module: str) -> None:
    """Build a server with one process, unless it is there, while other tests run. The guardian ends what a shorter run leaves."""
    build = subprocess.Popen(
        [sys.executable, "-m", module], cwd=HERE.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    build.returncode = (
        0  # It is not waited for: a test that needs the server waits for its lock, and builds it if this failed.
    )


def _files() -> set[str]:
    """Return what lies in the repository's folder, but for caches."""
    return {path.name for path in HERE.parent.iterdir() if not path.name.startswith(".")}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which a test wrote to the working directory: tests in other processes would get in its way."""
    before = session.config.stash[FILES_BEFORE]
    left = sorted(_files() - before)
    if left and not _worker(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFAILED: tests left {', '.join(left)} in {HERE.parent}")


def _no_java(event: str, arguments: tuple[object, ...]) -> None:
    """Let a test fail that starts Java in --quick: it lacks the marker `spark`."""
    if event == "subprocess.Popen" and Path(os.fsdecode(arguments[0])).name in {"java", "spark-submit", "spark-class"}:  # type: ignore[arg-type]
        raise RuntimeError("this test starts Java: mark it with @pytest.mark.spark")


# Which tests run.


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the tests of Spark for --quick."""
    return True if config.option.quick and collection_path == SPARK_FOLDER else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark, select, and put first what takes longest: users of the run's Spark, then those that start a Spark of their own."""
    for item in items:
        if item.path.is_relative_to(SPARK_FOLDER) or "spark" in _fixtures(item):
            item.add_marker("spark")
        if any(item.path.is_relative_to(place) for place in SLOW_PLACES) or _service(item) is not None:
            item.add_marker("slow")
    left_out = {"spark", "slow", "full"} if config.option.quick else set() if config.option.full else {"full"}
    dropped = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]

    def place(item: pytest.Item) -> int:
        if "spark" in _fixtures(item):
            return 0
        if item.get_closest_marker("spark"):
            return 1
        if any(name in (*_fixtures(item), *_parameters(item)) for name in BUILT):
            return 3
        return 2 if item.get_closest_marker("slow") else 4

    items.sort(key=place)


def _fixtures(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


def _parameters(item: pytest.Item) -> list[str]:
    callspec = getattr(item, "callspec", None)
    return [] if callspec is None else [value for value in callspec.params.values() if isinstance(value, str)]


def _service(item: pytest.Item) -> str | None:
    """Return the server that the test uses, if any: by a fixture, or by a parameter of that name, with which a fixture asks for it."""
    found = [*_fixtures(item), *_parameters(item)]
    return next((name for name in SERVICES if name in found), None)


# Which process runs them.


class Grouped(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Distribute tests one by one, except those that share something costly: a group runs in one process.

    `--dist loadgroup` would be the usual way. With pytest 9.2 and pytest-xdist 3.8 it ignores the groups (pytest-xdist 1386).
    """

    _groups: dict[str, str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        """Called in the process that collects no tests: the workers have written the groups to a file."""
        if self._groups is None:
            self._groups = json.loads(_groups_file(self.config).read_text())
        return self._groups.get(nodeid, nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the groups down, if this is the first worker of several, before it reports that it has collected."""
    if _worker(session.config) == "gw0":
        groups = {item.nodeid: group for item in session.items if (group := _group(item)) is not None}
        _groups_file(session.config).write_text(json.dumps(groups))


def _groups_file(config: pytest.Config) -> Path:
    return _run_folder(config) / "groups.json"


def _run_folder(config: pytest.Config) -> Path:
    """Return a folder that all processes of this run share."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]  # the only way to the run's folder without a test
    base: Path = factory.getbasetemp()
    return base.parent if _worker(config) else base


def _worker(config: pytest.Config) -> str | None:
    """Return which worker of pytest-xdist this process is, if it is one."""
    return getattr(config, "workerinput", {}).get("workerid")


def _group(item: pytest.Item) -> str | None:
    """Return what the test shares with others: a fixture of the session or of its module."""
    if not isinstance(item, pytest.Function):
        return None
    if "spark" in _fixtures(item):
        return "spark"
    service = _service(item)
    if service is not None:
        return service
    definitions = item._fixtureinfo.name2fixturedefs
    costly = any(found[-1].scope == "module" for found in definitions.values())
    return item.nodeid.partition("::")[0] if costly else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Grouped:
    return Grouped(config, log)


# What they share.


@pytest.fixture(autouse=True)
def _logging_is_put_back() -> Iterator[None]:
    """Every command sets the loggers of this process up, in which the next test may look for log lines."""
    loggers = [logging.getLogger(name) for name in ("fordstone", "uvicorn", "asyncio")]
    before = [(list(one.handlers), one.propagate, one.level) for one in loggers]
    yield
    for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The one Spark of a test run. Tests that set something in it use `prepared(spark)` or `spark.newSession()`."""
    from fordstone.spark import session

    if _worker(request.config):
        # Fails where a second process of this run starts Spark: then the groups do not work.
        _run_folder(request.config).joinpath("spark-started").touch(exist_ok=False)
    # Where it serves Spark Connect, while a test lets it.
    connect = {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": "0"}
    started = session(master="local[2]", memory="2g", config={**connect, **_kafka_jars()})
    yield started
    started.stop()


def _kafka_jars() -> dict[str, str]:
    """Spark's connector for Kafka, if it can be had: a session takes jars only when it starts. Its tests say if it cannot."""
    from tests.services.base import MissingServiceError
    from tests.services.spark_kafka import setting

    try:
        return setting()
    except MissingServiceError:
        return {}


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
