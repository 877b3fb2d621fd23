"""SIGKILL of the pipeline and of the server, around the commits of a sink of PostgreSQL: nothing is lost and nothing is doubled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.faults.child_spark import answer
from tests.faults.job import BOUNDED, LIVE, Job, build
from tests.faults.oracle import Feed, judge, judge_tables
from tests.faults.process import Process, run_to_end, sealed, started
from tests.faults.spark_job import SparkChild, SparkJob
from tests.faults.spark_oracle import judge_spark
from tests.faults.spark_process import spark_started
from tests.services.base import start_or_skip
from tests.services.cut import CutProxy
from tests.services.postgres import DATABASE, PASSWORD, Postgres
from tests.waiting import until

from fordstone.connectors.postgres import server as postgres_server
from fordstone.protocol.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMIT = b"COMMIT\0"
"""As it is sent."""
FIRST_ROWS, FEED_ROWS = 200, 24
SMALL: dict[str, Any] = {"batch_rows": 20}
ROUNDS_MAX = 300
When = Literal["before", "after"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Postgres]:
    """A server of the test's own, because the test kills it."""
    made = start_or_skip(Postgres)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    yield made
    made.close()


@pytest.fixture
def proxy(server: Postgres) -> Iterator[CutProxy]:
    made = CutProxy(server.port)
    yield made
    made.close()


def through(proxy: CutProxy, server: Postgres) -> str:
    return server.dsn().replace(f"port={server.port}", f"port={proxy.port}")


def feed_until(process: Process, feed: Feed, met: Callable[[], bool]) -> None:
    """Let the input grow with the epochs, until something has happened or the process has ended."""
    for _ in range(ROUNDS_MAX):
        if met() or not process.running:
            return
        before = sealed(feed.folder)
        feed.write(FEED_ROWS)
        process.until_dead_or(lambda before=before: met() or sealed(feed.folder) > before, "another epoch")  # type: ignore[misc]
    pytest.fail(f"it did not happen in {ROUNDS_MAX} epochs")


def finish(feed: Feed, server: Postgres) -> None:
    ended = run_to_end(feed.folder, Job(tables=server.dsn(), options=BOUNDED))
    assert ended.report["outcome"] == "ended"
    judge(feed.folder, feed.written)
    judge_tables(server, DATABASE, feed.written)


def started_feed(folder: Path, seed: int) -> Feed:
    feed = Feed(folder=folder, seed=seed)
    feed.write(FIRST_ROWS)
    return feed


@pytest.mark.parametrize(
    ("name", "counts"),
    [("manifest.dir-synced", (1, 3)), ("sink.before-release", (2, 11)), ("sink.released", (1, 3, 12))],
)
def test_a_pipeline_killed_at_a_failpoint_of_the_release_is_exact(
    name: str, counts: tuple[int, ...], server: Postgres, tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = started_feed(tmp_path, 1)
    for life, count in enumerate(counts):
        hits = tmp_path / f"hits-{life}"
        job = Job(tables=server.dsn(), options=LIVE | SMALL)
        with started(tmp_path, job, failpoint=f"{name}:{count}@{hits}") as process:
            feed_until(process, feed, lambda: False)
            assert process.ended().killed
        assert hits.read_text().splitlines() == [name] * count
        faults(kills=1)
    finish(feed, server)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pipeline_killed_at_the_very_commit_is_exact(
    when: When, server: Postgres, proxy: CutProxy, tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = started_feed(tmp_path, 2)
    for skip in (0, 2, 3, 6):  # opening the two sinks takes a commit each
        with started(tmp_path, Job(tables=through(proxy, server), options=LIVE | SMALL)) as process:
            cuts = proxy.cuts
            proxy.arm(COMMIT, when, skip=skip, meanwhile=process.kill)
            feed_until(process, feed, lambda: False)
            assert process.ended().killed
        until(lambda cuts=cuts: proxy.cuts == cuts + 1, "cut")  # type: ignore[misc]
        faults(kills=1)
    finish(feed, server)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_killed_at_a_commit_delays_the_pipeline_which_goes_on_and_is_exact(
    when: When, server: Postgres, proxy: CutProxy, tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = started_feed(tmp_path, 3)
    with started(tmp_path, Job(tables=through(proxy, server), options=LIVE | SMALL)) as process:
        for skip in (2, 5, 0):
            cuts = proxy.cuts
            proxy.arm(COMMIT, when, skip=skip, meanwhile=server.kill)
            feed_until(process, feed, lambda cuts=cuts: proxy.cuts > cuts)  # type: ignore[misc]
            process.until(lambda: stalls(process)[-1:] not in ([], [None]), "delay")
            server.start()
            process.until(lambda: stalls(process)[-1] is None, "end of the delay")
            faults(server_kills=1)
        assert process.stop().report["progress"]["restarts"] == 0
    finish(feed, server)


@pytest.mark.parametrize("when", ["while it goes on", "when it is stopped"])
def test_a_server_that_stops_answering_delays_a_pipeline_which_can_be_stopped_and_is_exact(
    when: str, server: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_server, "SILENCE_S", 0.1)
    monkeypatch.chdir(tmp_path)
    feed = started_feed(tmp_path, 7)
    job = Job(tables=f"{server.dsn()} connect_timeout=2")  # two seconds are the least that psycopg takes
    with build(job).start(state="state", **LIVE | SMALL) as run:

        def progress() -> Progress:
            assert run.running, run.error
            return run.progress or Progress(pipeline="", elapsed_us=0)

        until(lambda: progress().epoch > 0, "an epoch")
        with server.paused():
            feed.write(FEED_ROWS)
            until(lambda: progress().stalled is not None, "delay")
            assert progress().waits_for == "sink"
            assert "stopped answering" in (progress().stalled or "")
            if when == "when it is stopped":
                assert run.stop().outcome == "stopped"
        if when == "while it goes on":
            until(lambda: progress().stalled is None, "end of the delay")
            epoch = progress().epoch
            feed.write(FEED_ROWS)
            until(lambda: progress().epoch > epoch, "another epoch")
            assert run.stop().progress.restarts == 0
    finish(feed, server)


def stalls(process: Process) -> list[str | None]:
    """What the pipeline waited for, as it changed."""
    return [line["stalled"] for line in process.lines() if "stalled" in line]


def test_a_pipeline_that_starts_while_the_server_is_away_waits_for_it(server: Postgres, tmp_path: Path) -> None:
    feed = started_feed(tmp_path, 4)
    server.stop()
    with started(tmp_path, Job(tables=server.dsn(), options=BOUNDED)) as process:
        process.until(lambda: "Connection refused" in (tmp_path / "stderr").read_text(), "warning")
        server.start()
        assert process.ended().report["outcome"] == "ended"
    judge_tables(server, DATABASE, feed.written)


def test_a_password_that_is_wrong_ends_the_pipeline_with_an_error(
    server: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_feed(tmp_path, 5)
    monkeypatch.setenv("PGPASSWORD", "wrong")
    ended = run_to_end(tmp_path, Job(tables=server.dsn(), options=BOUNDED))
    assert ended.code == 1
    assert "SinkError: sink kept_table: could not open postgres('kept')" in ended.errors
    assert "password authentication failed" in ended.errors
    assert "Traceback" not in ended.errors


@pytest.mark.spark
def test_a_spark_driver_killed_between_two_sinks_and_a_server_killed_meanwhile_are_exact(
    server: Postgres, tmp_path: Path, faults: Callable[..., None], spark: SparkSession
) -> None:
    feed = started_feed(tmp_path, 6)
    live = SparkJob(tables=server.dsn(), options={"interval": "10ms", "rows_max": 24})
    hits = tmp_path / "hits"
    # By then the files and Delta tables have the epoch, and one table of the two.
    with spark_started(tmp_path, SparkChild(jobs=(live,)), failpoint=f"sink.released:8@{hits}") as process:
        feed.write(FEED_ROWS)
        ended = process.ended()
        assert ended.killed, ended.errors
        process.until_gone()
    faults(spark_driver_kills=1, server_kills=1)
    server.kill()
    server.start()
    feed.close()
    with contextlib.chdir(tmp_path):
        result = answer(SparkJob(tables=server.dsn(), options={"available_now": True}), spark)
    assert result.get("outcome") == "stopped", result
    judge_spark(tmp_path, feed.written)
    judge_tables(server, DATABASE, feed.written)
