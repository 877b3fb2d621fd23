"""What the fault tests count: kills and damage that really happened are part of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call it with what was done: `faults(kills=1)`. The sum is printed at the end of the run."""
    counts: dict[str, int] = {}
    request.node.user_properties.append(("faults", counts))

    def happened(**done: int) -> None:
        for name, count in done.items():
            counts[name] = counts.get(name, 0) + count

    return happened


@pytest.fixture(scope="session")
def quick_java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Options with which a driver's Java starts in half the time: the classes of an undisturbed run, as an archive."""
    from tests.faults.oracle import Feed
    from tests.faults.spark_job import SparkChild, SparkJob
    from tests.faults.spark_oracle import judge_spark
    from tests.faults.spark_process import run_spark

    folder = tmp_path_factory.mktemp("undisturbed")
    archive = folder / "classes.jsa"
    feed = Feed(folder=folder, seed=0)
    feed.write(120)
    feed.close()
    making = f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable"
    ended = run_spark(folder, SparkChild(java=making, jobs=(SparkJob(options={"available_now": True}),)))
    assert ended.code == 0, ended.errors
    judge_spark(folder, feed.written)
    # A Java without an archive of its own classes makes none either.
    yield f"-XX:SharedArchiveFile={archive}" if archive.exists() else ""
    archive.unlink(missing_ok=True)
