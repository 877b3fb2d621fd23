"""Run a pipeline on Spark: as a stream until it is stopped, or as a batch job; start again after failures.

What to do after a failure is decided in `protocol.retry`, as on the edge. An error of the user's is raised at once, and not
tried again. Spark wraps a worker's traceback into its own text several times over: the innermost one counts (`worker_trace`).
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import msgspec

from fordstone import errors
from fordstone.errors import ConfigError, FordstoneError, PipelineError, TaskError
from fordstone.hub.client.address import HubAddress
from fordstone.lang.duration import TIME_MIN_US, positive_us
from fordstone.planner.split import placed, split
from fordstone.protocol.progress import Progress, Report
from fordstone.protocol.retry import RestartAfter, RestartPolicy, Stop, decide_restart
from fordstone.runtime.signals import Signals
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.query import HostedQuery, hosted_query
from fordstone.spark.session.session import java_gone, session
from fordstone.storage.disk import OsDisk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from fordstone.api.pipeline import Pipeline
    from fordstone.edge.run import OnProgress
    from fordstone.operators.base import Functions
    from fordstone.plan import plan as p
    from fordstone.spark.hosted.commit import BatchOutcome

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.05
STOP_WAIT_S: Final = 60.0
"""Maximum wait for a running batch when the run is stopped; then it is broken off, and done again at the next start."""
_OUR_ERROR: Final = re.compile(
    r"fordstone\.errors\.(\w+): (.*?)(?=\n\s*(?:at |SQLSTATE|\n|JVM stacktrace)|\Z| SQLSTATE)", re.DOTALL
)


def run(
    pipeline: Pipeline,
    *,
    spark: SparkSession | None = None,
    config: SparkConfig | None = None,
    hub: HubAddress | str | None = None,
    **options: Any,
) -> Report:
    """Run a pipeline on Spark, in a given session or one of our own, until bounded input ends or the process gets a signal to stop.

    Of a pipeline for two tiers its center runs, over what is at `hub`. Options are those of `fordstone.spark.config.SparkConfig`:
    `state=`, `bounded=`, `interval=`, `shards=` ...
    """
    if config is not None and options:
        raise ConfigError("give either a SparkConfig or options, not both.")
    plan = pipeline.plan()
    if hub is not None:
        center = split(plan).center
        if center is None:
            raise ConfigError(f"pipeline {plan.pipeline} has one tier, and reads no hub. Leave hub= out.")
        plan = placed(center, HubAddress(url=hub) if isinstance(hub, str) else hub)
    return run_plan(plan, pipeline.functions, config or SparkConfig(**options), spark=spark)


def run_plan(
    plan: p.Plan,
    functions: Functions,
    config: SparkConfig,
    *,
    spark: SparkSession | None = None,
    on_progress: OnProgress | None = None,
    restart: RestartPolicy | None = None,
) -> Report:
    """As `run`. `on_progress` is called about 20 times a second."""
    if plan.tiered:
        raise PipelineError(
            f"pipeline {plan.pipeline} has two tiers. On Spark its center runs: fordstone center FILE --hub URL, or from Python "
            "fordstone.spark.run(p, hub=URL)."
        )
    policy = restart or RestartPolicy()
    tally = _Tally(plan.pipeline, positive_us(config.interval, what="interval"))
    own = spark
    with _locked(config.checkpoint_of(plan.pipeline)), Signals() as signals:
        failures = 0
        while True:
            began_us = time.monotonic_ns() // 1000
            try:
                own = spark or session(name=f"fordstone {plan.pipeline}")
                signals.listen()
                return _run_once(plan, functions, config, own, tally, signals, on_progress)
            except FordstoneError:
                raise
            except Exception as error:
                known = _error_of_ours(error)
                if known is not None:
                    raise known from error
                if own is not None and java_gone(own):
                    raise TaskError(
                        f"pipeline {plan.pipeline}: Spark's Java process has ended; it was killed, or had no memory left. Give it "
                        "more memory if so. Started again, the pipeline resumes after its last epoch."
                    ) from error
                match decide_restart(
                    policy,
                    failures=failures,
                    lasted_us=time.monotonic_ns() // 1000 - began_us,
                    chance=random.random(),  # noqa: S311 - jitter
                ):
                    case Stop(failures=count):
                        raise TaskError(
                            f"pipeline {plan.pipeline} failed {count} times in a row on Spark; the last time: {last_words(str(error)) or repr(error)}"
                        ) from error
                    case RestartAfter(wait_us=wait_us, failures=count):
                        failures, tally.restarts = count, tally.restarts + 1
                        log.exception(
                            "query failed", extra={"pipeline": plan.pipeline, "failures": count, "wait_us": wait_us}
                        )
                        if signals.wait(wait_us / 1e6):
                            raise TaskError(
                                f"pipeline {plan.pipeline} was stopped after it had failed: {last_words(str(error)) or repr(error)}"
                            ) from error


@contextmanager
def _locked(checkpoint: str) -> Iterator[None]:
    """Keep other processes of this machine off a checkpoint location. A location that is a URL cannot be locked."""
    if "://" in checkpoint:
        yield
        return
    disk = OsDisk(Path(checkpoint) / "fordstone")
    disk.lock()
    with closing(disk):
        yield


def _run_once(
    plan: p.Plan,
    functions: Functions,
    config: SparkConfig,
    spark: SparkSession,
    tally: _Tally,
    signals: Signals,
    on_progress: OnProgress | None,
) -> Report:
    query = hosted_query(plan, functions, config, spark, batch=config.bounded)
    epochs = query.files.cut_epochs()
    resumed_from = epochs[-1] if epochs else (query.seed.epoch if query.seed is not None else None)
    outcome: Literal["ended", "stopped", "already_ended"] = "ended"
    if not config.bounded:
        outcome = _follow(query, tally, signals, on_progress)
    elif epochs:
        outcome = "already_ended"
    else:
        _run_batch(query, tally, signals, on_progress)
    progress = msgspec.structs.replace(tally.progress(), stopping=signals.stop_requested)
    if on_progress is not None:
        on_progress(progress)
    return Report(pipeline=plan.pipeline, outcome=outcome, progress=progress, resumed_from=resumed_from)


def _follow(query: HostedQuery, tally: _Tally, signals: Signals, on_progress: OnProgress | None) -> Literal["stopped"]:
    """Run streams until they have read what is there, one fails, or the process gets a signal to stop."""
    query.files.clear_stop()
    running = query.start(tally.add)
    stop_by: float | None = None
    try:
        while any(not _over(stream) for stream in running):
            tally.look(running)
            if on_progress is not None:
                on_progress(msgspec.structs.replace(tally.progress(), stopping=signals.stop_requested))
            if signals.stop_requested and stop_by is None:
                query.files.request_stop()
                stop_by = time.monotonic() + STOP_WAIT_S
            if stop_by is None:
                continue
            if time.monotonic() > stop_by or not any(map(_busy, running)):
                break
        tally.look(running)
    finally:
        for stream in running:
            stream.stop()
        query.files.clear_stop()
    return "stopped"


def _run_batch(query: HostedQuery, tally: _Tally, signals: Signals, on_progress: OnProgress | None) -> None:
    """Run a batch job in a thread of its own, so that progress is shown and signals are handled while it runs.

    The query's session is its own: interrupting it affects no other query.
    """
    with ThreadPoolExecutor(1, "batch-job") as threads:
        job = threads.submit(query.run_batch, tally.add)
        try:
            while not wait([job], timeout=LOOK_EVERY_S).done:
                if on_progress is not None:
                    on_progress(msgspec.structs.replace(tally.progress(), stopping=signals.stop_requested))
                if signals.stop_requested:
                    query.spark.interruptAll()
        except BaseException:
            query.spark.interruptAll()
            raise
        try:
            job.result()
        except Exception as error:
            if not signals.stop_requested:
                raise
            raise TaskError(
                "stopped before the batch job was done: nothing was released, and the next run starts from the beginning."
            ) from error


def _over(query: StreamingQuery) -> bool:
    """Whether a stream has ended, after a short wait. Raises what it failed with."""
    return bool(query.awaitTermination(LOOK_EVERY_S))  # type: ignore[arg-type]  # parts of a second do work


def _busy(stream: StreamingQuery) -> bool:
    """Whether a batch is being planned or run."""
    return stream.isActive and bool(stream.status["isTriggerActive"])


def _error_of_ours(error: Exception) -> FordstoneError | None:
    """An error of ours that came out of one of Spark's workers as text: what the user has to change, without Spark's text."""
    for name, text in reversed(_OUR_ERROR.findall(str(error))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, FordstoneError):
            return TaskError(text.strip())
    return None


class _Tally:
    """What the batches of this process have done so far. Added to from Spark's thread, read from the main one."""

    def __init__(self, pipeline: str, interval_us: int) -> None:
        self._pipeline = pipeline
        self._interval_us = interval_us
        self._began = time.monotonic_ns()
        self._last: BatchOutcome | None = None
        self._rows_in = self._rows_out = self._rows_late = self._rows_rejected = self.batches = 0
        self._seen: dict[str, int] = {}
        self._commit_us: int | None = None
        self.restarts = 0

    def add(self, outcome: BatchOutcome) -> None:
        """A batch is out."""
        self._rows_in += outcome.rows_in
        self._rows_out += outcome.rows_out
        self._rows_late += outcome.rows_late
        self._rows_rejected += outcome.rows_rejected
        self.batches += 1
        self._last = outcome

    def look(self, running: Sequence[StreamingQuery]) -> None:
        """Take in what Spark itself reports about its batches."""
        for query in running:
            for one in query.recentProgress:
                if one.batchId <= self._seen.get(query.name, -1):
                    continue
                self._seen[query.name] = one.batchId
                durations = dict(one.durationMs)
                self._commit_us = 1000 * (durations.get("walCommit", 0) + durations.get("commitOffsets", 0))

    def progress(self) -> Progress:
        """How the run stands."""
        last = self._last
        times = [one.watermark_us for one in last.cut.sources.values()] if last is not None else []
        least_us = min(times, default=TIME_MIN_US)
        return Progress(
            pipeline=self._pipeline,
            epoch=last.epoch if last is not None else 0,
            rows_in=self._rows_in,
            rows_out=self._rows_out,
            rows_late=self._rows_late,
            rows_rejected=self._rows_rejected,
            watermark_us=None if least_us == TIME_MIN_US else least_us,
            state_bytes=last.state_bytes if last is not None else 0,
            checkpoints=self.batches,
            given_up=0,
            checkpoint_us=self._commit_us,
            checkpoint_bytes=last.written_bytes if last is not None else None,
            pause_us=None,
            interval_us=self._interval_us,
            restarts=self.restarts,
            stalled=None,
            elapsed_us=(time.monotonic_ns() - self._began) // 1000,
        )


RAISED_LINES_MAX: Final = 20
_BEGINS: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)')
_ENDS: Final = re.compile(r"\s*$|\s*SQLSTATE|\s*at \S|JVM stacktrace|=== Streaming Query|Driver stacktrace|\t")
_OUR_FILE: Final = re.compile(r"(?:^|/)fordstone/(?:[a-z_]+/)+[a-z_]+\.py$")
_LIBRARY: Final = re.compile(r"/site-packages/|/dist-packages/|/lib/python\d|/pyspark\.zip/|/python/pyspark/|^<frozen")
_ARCHIVE: Final = re.compile(r"^.*\.zip/")
_IN_JAVA: Final = "py4j.protocol.Py4JJavaError: "
_JAVA_SAYS: Final = re.compile(r"^(?:Caused by)?: [\w.$]+: *(.*?)(?: +SQLSTATE.*)?$", re.MULTILINE)
"""After the name of the exception: of what a call raised, and of each of its causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """What was raised in a worker."""

    frames: tuple[str, ...]
    """The frames of the user's code, as text of one or more lines."""
    raised: str
    """What was raised, and the notes to it."""

    def __str__(self) -> str:
        return "\n".join([*self.frames, self.raised])


def worker_trace(text: str) -> WorkerTrace | None:
    """The innermost traceback in what Spark says; None: there is none."""
    _, begins, rest = text.rpartition(_BEGINS)
    if not begins:
        return None
    lines = rest.lstrip("\n").splitlines()
    count = next((place for place, line in enumerate(lines) if not line.startswith(" ")), len(lines))
    raised = []
    for line in lines[count : count + RAISED_LINES_MAX]:
        if _ENDS.match(line):
            break
        raised.append(line)
    return WorkerTrace(frames=_of_user(lines[:count]), raised="\n".join(raised)) if raised else None


def last_words(text: str) -> str:
    """The failure in a line: what a worker raised, else what Spark says first."""
    trace = worker_trace(text)
    if trace is not None and trace.raised.startswith(_IN_JAVA):
        causes = [cause for cause in _JAVA_SAYS.findall(text[text.rindex(_IN_JAVA) :]) if cause]
        # Spark's own errors have a name in brackets; what lies below them is about files and sockets.
        named = [cause for cause in causes if cause.startswith("[")]
        if causes:
            return str((named or causes)[-1])
    if trace is not None:
        return " ".join(trace.raised.split("\n"))
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line and not line.startswith("at ")), "")


def _of_user(lines: list[str]) -> tuple[str, ...]:
    """Return the frames after the last one of ours that are in no library. A file that came in an archive is named as in it."""
    frames: list[tuple[str, list[str]]] = []
    for line in lines:
        found = _FRAME.fullmatch(line)
        if found is not None:
            file = _ARCHIVE.sub("", found["file"])
            frames.append((found["file"], [f'  File "{file}", line {found["line"]}, in {found["name"]}']))
        elif frames:
            frames[-1][1].append(line)
    ours = [place for place, (file, _) in enumerate(frames) if _OUR_FILE.search(file)]
    later = frames[ours[-1] + 1 :] if ours else frames
    return tuple("\n".join(shown) for file, shown in later if not _LIBRARY.search(file))


def leave(code: int) -> NoReturn:
    """Run the exit functions, and end the process at once with this code.

    Threads that talked to Java still run then, inside of native code. If Python tears itself down around them, one of them may
    touch what is gone, and the process dies of a segmentation fault instead of returning its exit code.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - nothing else runs them without ending the process by its own way
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(code)
