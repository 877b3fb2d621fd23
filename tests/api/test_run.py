"""Runs from Python: what a run without state leaves and reads, and the handle of a run in the background."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, files, memory, rows
from fordstone.connectors.files.settings import FileOptions, FileSettings
from fordstone.edge.config import RunConfig, RunOptions
from fordstone.errors import ConfigError, FordstoneError, SinkError, TaskError
from fordstone.protocol.retry import RestartPolicy
from fordstone.spark.config import SparkConfig, SparkOptions

SCHEMA = {"device": "string", "n": "bigint"}
ONCE = RestartPolicy(failures_max=0)


def copying(source: MemorySource | list[list[dict[str, object]]], sink: MemorySink) -> Pipeline:
    pipeline = Pipeline("copy")
    pipeline.source("readings", memory(source), schema=SCHEMA).sink("copied", memory(sink))
    return pipeline


def numbered(*numbers: int) -> list[dict[str, object]]:
    return [{"device": "a", "n": number} for number in numbers]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files and the working directory, both empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    return folder


# Without state.


@pytest.mark.parametrize("options", [{}, {"state": None}])
def test_a_run_without_state_leaves_nothing_and_reads_nothing_old(temporary: Path, options: Any):
    for number in (1, 2):
        sink = MemorySink()
        report = copying([numbered(number)], sink).run(bounded=True, **options)
        assert (report.outcome, report.resumed_from) == ("ended", None)
        assert sink.rows()["n"].to_list() == [number]
    assert list(temporary.iterdir()) == []


def test_a_sink_in_memory_holds_the_rows_of_the_last_run_only():
    source, sink = MemorySource([numbered(1)]), MemorySink()
    pipeline = copying(source, sink)
    pipeline.run(bounded=True)
    source.append(0, numbered(2))
    pipeline.run(bounded=True)
    assert sink.rows()["n"].to_list() == [1, 2]
    assert sink.repeated == 0


def test_a_sink_in_memory_keeps_its_rows_when_the_same_state_resumes(tmp_path: Path):
    source, sink = MemorySource([numbered(1)]), MemorySink()
    pipeline = copying(source, sink)
    pipeline.run(bounded=True, state=tmp_path)
    source.append(0, numbered(2))
    pipeline.run(bounded=True, state=tmp_path)
    assert sink.rows()["n"].to_list() == [1, 2]


def test_only_its_user_can_read_the_state_of_a_run(tmp_path: Path):
    state = tmp_path / "state"
    (tmp_path / "in.jsonl").write_text('{"device": "a", "n": 1}\nno row\n')
    before = os.umask(0o022)
    try:
        (tmp_path / "remote").mkdir()
        pipeline = Pipeline("copy")
        source = pipeline.source("readings", files(str(tmp_path / "in.jsonl")), schema=SCHEMA)
        source.sink("copied", files(str(tmp_path / "out"), format="jsonl"))
        pipeline.run(bounded=True, state=state, remote=str(tmp_path / "remote"))
    finally:
        os.umask(before)
    for place in (state, tmp_path / "remote" / "copy"):
        found = [place, *place.rglob("*")]
        assert len(found) > 3
        assert {oct(path.stat().st_mode & 0o777) for path in found if path.is_dir()} == {"0o700"}
        assert {oct(path.stat().st_mode & 0o777) for path in found if path.is_file()} == {"0o600"}
    assert list((state / "copy" / "node" / "dead-letters").rglob("epoch-*.jsonl"))
    output = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in output} == {"0o644"}, "output is shared"
    assert oct((tmp_path / "remote").stat().st_mode & 0o777) == "0o755", "others may have copies there"


def test_runs_with_and_without_state_do_not_mix_in_a_sink_in_memory(tmp_path: Path):
    source, sink = MemorySource([numbered(1)]), MemorySink()
    pipeline = copying(source, sink)
    for state in (tmp_path / "a", None, tmp_path / "b"):
        pipeline.run(bounded=True, state=state)
        assert sink.rows()["n"].to_list() == [1]
        assert sink.repeated == 0


def test_a_run_without_state_does_not_mix_its_rows_with_those_of_an_earlier_run(tmp_path: Path):
    def built(*numbers: int) -> Pipeline:
        pipeline = Pipeline("copy")
        source = pipeline.source("readings", memory([numbered(*numbers)]), schema=SCHEMA)
        source.sink("copied", files(str(tmp_path / "out"), format="jsonl"))
        return pipeline

    built(1).run(bounded=True)
    with pytest.raises(SinkError, match=r"sink copied: .*epoch-\S*1\.jsonl is there already.*\n.*state=") as caught:
        built(2).run(bounded=True)
    assert caught.value.__cause__ is None
    assert rows(tmp_path / "out")["n"].to_list() == [1]


def test_a_run_without_state_restarts_into_its_own_output(tmp_path: Path):
    calls = []

    def fails_once(record: dict[str, object]) -> dict[str, object]:
        calls.append(record["n"])
        if len(calls) == 3:
            raise ConnectionError("away")
        return record

    source = MemorySource([numbered(1)])
    pipeline = Pipeline("copy")
    stream = pipeline.source("readings", memory(source), schema=SCHEMA).map(fails_once)
    stream.sink("copied", files(str(tmp_path / "out"), format="jsonl"))
    with pipeline.start(interval="5ms") as run:
        until(lambda: list((tmp_path / "out").glob("epoch-*")) != [], "first epoch")
        source.append(0, numbered(2))
        source.append(0, numbered(3))
        until(lambda: run.progress is not None and run.progress.restarts == 1, "restart")
        until(lambda: len(rows(tmp_path / "out")) == 3, "rows")
    assert sorted(rows(tmp_path / "out")["n"]) == [1, 2, 3]


# In the background.


def test_a_run_is_stopped_from_code_and_reports():
    source, sink = MemorySource([numbered(1, 2)]), MemorySink()
    run = copying(source, sink).start(interval="5ms")
    until(lambda: sink.rows().height == 2, "rows")
    assert (run.running, run.failed, run.report) == (True, False, None)
    report = run.stop()
    assert (report.outcome, report.progress.rows_in) == ("stopped", 2)
    assert run.report == report
    assert run.stop() == run.wait() == report
    assert run.progress == report.progress
    assert repr(run) == f"Run(copy: stopped, 2 rows in, 2 out, epoch {report.progress.epoch})"


def test_a_run_in_the_background_ends_with_bounded_input():
    sink = MemorySink()
    run = copying([numbered(1)], sink).start(bounded=True)
    assert run.wait(60).outcome == "ended"
    assert sink.rows().height == 1


def test_waiting_has_a_timeout_and_the_run_goes_on():
    with copying(MemorySource([[]]), MemorySink()).start() as run:
        with pytest.raises(TimeoutError):
            run.wait(0.01)
        assert run.running
    assert run.report is not None


def test_the_end_of_the_block_stops_the_run_also_after_an_error():
    with pytest.raises(KeyError), copying([numbered(1)], MemorySink()).start() as run:
        raise KeyError
    assert run.report is not None
    assert run.report.outcome == "stopped"


def boom(record: dict[str, object]) -> dict[str, object]:
    raise ZeroDivisionError(f"no {record['n']}")


def failing() -> Pipeline:
    pipeline = Pipeline("fails")
    pipeline.source("readings", memory([numbered(7)]), schema=SCHEMA).map(boom).sink("out", memory(MemorySink()))
    return pipeline


def test_steps_that_lead_to_no_sink_do_not_run():
    pipeline, sink = Pipeline("tries"), MemorySink()
    readings = pipeline.source("readings", memory([numbered(7)]), schema=SCHEMA)
    readings.map(boom).filter("n > 1")
    readings.sink("out", memory(sink))
    assert [step.name for step in pipeline.plan().steps] == ["readings", "out"]
    assert pipeline.run(bounded=True).outcome == "ended"
    assert sink.rows().height == 1


def test_a_failed_run_raises_where_it_is_waited_for():
    run = failing().start(bounded=True, restart=ONCE)
    with pytest.raises(TaskError, match="no 7"):
        run.wait()
    assert run.failed
    assert run.report is None
    assert isinstance(run.error, TaskError)
    with pytest.raises(TaskError), run:
        pass
    assert repr(run).startswith("Run(fails: failed")


async def awaited(pipeline: Pipeline) -> None:
    await pipeline.start(bounded=True, restart=ONCE)


async def in_a_block(pipeline: Pipeline) -> None:
    async with pipeline.start(bounded=True, restart=ONCE):
        pass


@pytest.mark.parametrize(
    "started",
    [
        lambda pipeline: pipeline.run(bounded=True, restart=ONCE),
        lambda pipeline: pipeline.start(bounded=True, restart=ONCE).wait(),
        lambda pipeline: asyncio.run(awaited(pipeline)),
        lambda pipeline: asyncio.run(in_a_block(pipeline)),
    ],
    ids=["run", "wait", "await", "async with"],
)
def test_an_error_shows_one_traceback_of_the_users_own_code(started: Callable[[Pipeline], object]):
    pipeline = failing()
    with pytest.raises(TaskError) as caught:
        started(pipeline)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 2, "that of the function, and that of the call of run"
    assert 'raise ZeroDivisionError(f"no {record' in shown
    cause = caught.value.__cause__
    assert cause is not None
    assert {Path(frame.filename).name for frame in traceback.extract_tb(cause.__traceback__)} == {"test_run.py"}
    inside = [frame for frame in traceback.extract_tb(caught.value.__traceback__) if "fordstone/" in frame.filename]
    assert {Path(frame.filename).name for frame in inside} <= {"pipeline.py", "run.py"}
    assert all("fordstone/api/" in frame.filename for frame in inside)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: files("in", format="delta"),
        lambda: memory([1]),
        lambda: copying([numbered(1)], MemorySink()).run(bounded=True, state="/proc/none"),
        lambda: Pipeline("p").source("r", memory(numbered(1))).filter("devise = 'a'"),
        lambda: Pipeline("p").source("r", memory(numbered(1))).lookup("table", on="device"),  # type: ignore[arg-type]
        lambda: Pipeline("p").source("r", files("none/*.csv"), schema=SCHEMA).collect(),
    ],
)
def test_a_mistake_shows_one_traceback_without_the_engine(mistake: Callable[[], object]):
    with pytest.raises(FordstoneError) as caught:
        mistake()
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1
    assert "fordstone/edge/" not in shown


def test_a_run_is_awaited_and_stopped_by_async_with():
    source, sink = MemorySource([numbered(1)]), MemorySink()

    async def main() -> tuple[str, str]:
        ended = await copying([numbered(1)], MemorySink()).start(bounded=True)
        async with copying(source, sink).start(interval="5ms") as run:
            await asyncio.to_thread(until, lambda: sink.rows().height == 1, "row")
        assert run.report is not None
        return ended.outcome, run.report.outcome

    assert asyncio.run(main()) == ("ended", "stopped")


def test_an_error_comes_through_await_and_async_with():
    async def main() -> None:
        with pytest.raises(TaskError):
            await failing().start(bounded=True, restart=ONCE)
        run = failing().start(bounded=True, restart=ONCE)
        with pytest.raises(TaskError):
            async with run:
                pass

    asyncio.run(main())


def test_run_works_in_another_thread():
    sink, reports = MemorySink(), []
    thread = threading.Thread(target=lambda: reports.append(copying([numbered(1)], sink).run(bounded=True)))
    thread.start()
    thread.join(60)
    assert [report.outcome for report in reports] == ["ended"]


def test_an_interrupt_stops_a_run_that_blocks():
    sink = MemorySink()

    def interrupt(_: object) -> None:
        if sink.rows().height and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    sent: list[bool] = []
    report = copying([numbered(1)], sink).run(interval="5ms", on_progress=interrupt)
    assert report.outcome == "stopped"


@pytest.mark.parametrize("waits", [True, False])
def test_the_end_of_the_process_stops_what_still_runs(tmp_path: Path, waits: bool):
    code = f"""
    import tempfile
    tempfile.tempdir = {str(tmp_path)!r}
    from fordstone import Pipeline
    from fordstone.connectors import MemorySink, memory
    p = Pipeline("p")
    p.source("s", memory([[{{"n": 1}}]]), schema={{"n": "bigint"}}).sink("out", memory(MemorySink()))
    run = p.start()
    while {waits} and run.progress is None:
        pass
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


# Logging.


@pytest.mark.parametrize("configured", [True, False])
def test_log_lines_have_their_fields_in_programs_that_configure_logging_and_others_see_none(configured: bool):
    code = f"""
    import logging
    if {configured}:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s:%(name)s:%(message)s")
    from fordstone import Pipeline
    from fordstone.connectors import memory
    p = Pipeline("p")
    calls = []
    def once(record):
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("away")
        return record
    p.source("s", memory([{{"n": 1}}])).map(once).sink("out", lambda frame: None)
    p.run(bounded=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == ""
    if configured:
        assert "INFO:fordstone.edge.run:pipeline started pipeline=p node=node" in done.stderr
    else:
        assert done.stderr == ""


# Options.


def test_options_that_complete_are_those_that_there_are():
    assert set(RunOptions.__annotations__) == {field.name for field in fields(RunConfig)}
    assert set(SparkOptions.__annotations__) == {field.name for field in fields(SparkConfig)}
    internal = {"damaged"}  # for dead letters
    assert {"path", "format", *FileOptions.__annotations__} == set(FileSettings.__struct_fields__) - internal


def test_options_are_checked_when_a_run_is_started():
    pipeline = copying([numbered(1)], MemorySink())
    with pytest.raises(ConfigError, match="keep=0"):
        pipeline.start(keep=0)
