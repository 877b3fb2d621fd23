"""Run a pipeline on Spark: as a stream until it is stopped, or as a batch job; start again after failures.

What to do after a failure is decided in `protocol.retry`, as on the edge. An error of the user's is raised at once, and not
tried again. A stream whose batch contains an epoch that cannot be taken is started again, and goes on without its node (rule 25).
"""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NoReturn, Unpack

from msgspec.structs import replace

from fordstone import errors
from fordstone.errors import ConfigError, FordstoneError, NodeQuarantinedError, PipelineError, TaskError
from fordstone.hub.client.address import HubAddress
from fordstone.lang.choices import check_options
from fordstone.lang.duration import TIME_MIN_US, positive_us
from fordstone.operators.base import IN_STEP
from fordstone.plan import plan as p
from fordstone.planner.split import placed, split
from fordstone.protocol.progress import Progress, Report, WaitedFor, describe_late, held_back
from fordstone.protocol.retry import RestartAfter, RestartPolicy, Stop, decide_restart
from fordstone.runtime.fresh import set_aside, to_set_aside
from fordstone.runtime.partition import lateness_of, waited_for
from fordstone.runtime.signals import Signals
from fordstone.runtime.waits import sources_away
from fordstone.spark.config import SparkConfig, SparkOptions
from fordstone.spark.hosted.checkpoint import DriverMark, QueryFiles
from fordstone.spark.hosted.query import HostedQuery, hosted_query
from fordstone.spark.session.session import describe_failure, java_gone, session
from fordstone.storage.clock import monotonic_clock_us
from fordstone.storage.disk import OsDisk
from fordstone.storage.remote import local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from fordstone.api.pipeline import Pipeline
    from fordstone.connectors.base import SourceTrouble
    from fordstone.edge.run import OnFailure, OnProgress
    from fordstone.epochs.manifest import Cut
    from fordstone.operators.base import Functions
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
    from_earliest: bool = False,
    **options: Unpack[SparkOptions],
) -> Report:
    """Run a pipeline on Spark, in a given session or one of our own, until bounded input ends or the process gets a signal to stop.

    Of a pipeline for two tiers its center runs, over what is at `hub`; `from_earliest`: a center without state begins with the earliest
    epochs that the hub keeps, although it has removed older ones. Options are those of `fordstone.spark.config.SparkConfig`:
    `state=`, `bounded=`, `interval=`, `shards=` ...
    """
    if config is not None and options:
        raise ConfigError("give either a SparkConfig or options, not both.")
    check_options(options, SparkConfig.__dataclass_fields__, where="run: ")
    plan = pipeline.plan()
    if hub is not None:
        center = split(plan).center
        if center is None:
            raise ConfigError(f"pipeline {plan.pipeline} has one tier, and reads no hub. Leave hub= out.")
        plan = placed(center, HubAddress(url=hub) if isinstance(hub, str) else hub, from_earliest=from_earliest)
    return run_plan(plan, pipeline.functions, config or SparkConfig(**options), spark=spark)


def run_plan(
    plan: p.Plan,
    functions: Functions,
    config: SparkConfig,
    *,
    spark: SparkSession | None = None,
    on_progress: OnProgress | None = None,
    on_failure: OnFailure | None = None,
    restart: RestartPolicy | None = None,
) -> Report:
    """As `run`. `on_progress` is called about 20 times a second."""
    if plan.tiered:
        raise PipelineError(
            f"pipeline {plan.pipeline} has two tiers. On Spark its center runs: fordstone center FILE --hub URL, or from Python "
            "fordstone.spark.run(p, hub=URL)."
        )
    policy = restart or RestartPolicy()
    tally = _Tally(plan, positive_us(config.interval, what="interval"))
    own = spark
    checkpoint = config.checkpoint_of(plan.pipeline)
    if config.fresh:
        moves = to_set_aside(plan, [checkpoint])
        # The lock goes with the directory.
        with _locked(checkpoint):
            set_aside(moves)
    with _locked(checkpoint) as driver, Signals() as signals:
        failures = 0
        last: str | None = None
        while True:
            began_us = monotonic_clock_us()
            try:
                own = spark or session(name=f"fordstone {plan.pipeline}")
                signals.listen()
                return _run_once(plan, functions, config, own, tally, signals, on_progress, driver)
            except FordstoneError:
                raise
            except Exception as error:
                known = _error_of_ours(error)
                # A run over what is there now ends instead, so that nothing is left out silently.
                restarts = isinstance(known, NodeQuarantinedError) and not (config.bounded or config.available_now)
                if known is not None and not restarts:
                    raise known from error
                if known is None and own is not None and java_gone(own):
                    why = (
                        "it was killed, or had no memory left. Give it more memory if so"
                        if not signals.stop_requested
                        else "the signal to stop went to it as well, so the epoch could not be finished. Send it to this process alone (for a "
                        "service of systemd: KillMode=mixed)"
                    )
                    raise TaskError(
                        f"pipeline {plan.pipeline}: Spark's Java process has ended: {why}. Started again, the pipeline resumes after its "
                        "last epoch."
                    ) from None
                before, last = last, str(known) if known is not None else describe_failure(str(error)) or repr(error)
                if known is not None and last != before:
                    failures = 0  # of another node: however many nodes are bad, the stream goes on with the others
                match decide_restart(
                    policy,
                    failures=failures,
                    lasted_us=monotonic_clock_us() - began_us,
                    chance=random.random(),  # noqa: S311 - jitter
                    repeated=IN_STEP in last and last == before and not _may_pass(last),
                ):
                    case Stop(failures=count):
                        raise TaskError(
                            f"pipeline {plan.pipeline} failed {count} times in a row on Spark; the last time: {last}"
                        ) from error
                    case RestartAfter(wait_us=wait_us, failures=count):
                        failures, tally.restarts = count, tally.restarts + 1
                        if on_failure is not None:
                            on_failure()
                        log.warning(
                            "query failed",
                            extra={"pipeline": plan.pipeline, "failures": count, "wait_us": wait_us, "problem": last},
                            exc_info=log.isEnabledFor(logging.INFO),
                        )
                        if signals.wait(wait_us / 1e6):
                            raise TaskError(
                                f"pipeline {plan.pipeline} was stopped after it had failed: {last}"
                            ) from error


@contextmanager
def _locked(checkpoint: str) -> Iterator[DriverMark | None]:
    """Keep other processes of this machine off a checkpoint location, and other users out of the directory of its pipeline.

    A location that is a URL cannot be locked. There this process takes the query over, and yields its mark.
    """
    if local_path(checkpoint) is None:
        driver = DriverMark.of_this_process()
        QueryFiles(checkpoint).take_over(driver)
        yield driver
        return
    # What Spark creates has the modes that the umask gives, so other users are stopped at the directory above it. That holds for any
    # master: our own files are private (`open_remote`), so `check_location` rejects executors that run as another user.
    OsDisk(Path(checkpoint).parent, private=True).close()
    disk = OsDisk(Path(checkpoint) / "fordstone", private=True)
    disk.lock()
    with closing(disk):
        yield None


def _run_once(
    plan: p.Plan,
    functions: Functions,
    config: SparkConfig,
    spark: SparkSession,
    tally: _Tally,
    signals: Signals,
    on_progress: OnProgress | None,
    driver: DriverMark | None,
) -> Report:
    query = hosted_query(plan, functions, config, spark, batch=config.bounded, driver=driver)
    epochs = query.files.cut_epochs()
    resumed_from = epochs[-1] if epochs else (query.seed.epoch if query.seed is not None else None)
    outcome: Literal["ended", "stopped", "already_ended"] = "ended"
    with closing(query):
        if not config.bounded:
            outcome = _follow(query, tally, signals, on_progress)
        else:
            outcome = "already_ended" if epochs else "ended"
            _run_batch(query, tally, signals, on_progress)
    progress = tally.progress(stopping=signals.stop_requested)
    if on_progress is not None:
        on_progress(progress)
    return Report(pipeline=plan.pipeline, outcome=outcome, progress=progress, resumed_from=resumed_from)


def _follow(query: HostedQuery, tally: _Tally, signals: Signals, on_progress: OnProgress | None) -> Literal["stopped"]:
    """Run the stream until it has read what is there, it fails, or the process gets a signal to stop."""
    query.files.clear_stop()
    stream = query.start(tally.add)
    stop_by: float | None = None
    try:
        query.follow()
        tally.troubles = query.troubles
        # Raises what the stream failed with.
        while not stream.awaitTermination(LOOK_EVERY_S):  # type: ignore[arg-type]  # parts of a second do work
            tally.look(stream)
            if on_progress is not None:
                on_progress(tally.progress(stopping=signals.stop_requested))
            if signals.stop_requested and stop_by is None:
                query.files.request_stop()
                stop_by = time.monotonic() + STOP_WAIT_S
            if stop_by is None:
                continue
            busy = stream.isActive and stream.status["isTriggerActive"]
            if time.monotonic() > stop_by or not busy or query.files.held():
                break
        tally.look(stream)
    finally:
        stream.stop()
        query.files.clear_stop()
    return "stopped"


def _run_batch(query: HostedQuery, tally: _Tally, signals: Signals, on_progress: OnProgress | None) -> None:
    """Run a batch job in a thread of its own, so that progress is shown and signals are handled while it runs.

    The query's session is its own: interrupting it affects no other query.
    """
    tally.troubles = query.troubles
    with ThreadPoolExecutor(1, "batch-job") as threads:
        job = threads.submit(query.run_batch, tally.add)
        try:
            while not wait([job], timeout=LOOK_EVERY_S).done:
                if on_progress is not None:
                    on_progress(tally.progress(stopping=signals.stop_requested))
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


def _error_of_ours(error: Exception) -> FordstoneError | None:
    """An error of ours that came out of one of Spark's workers as text: what the user has to change, without Spark's text."""
    for name, text in reversed(_OUR_ERROR.findall(str(error))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, FordstoneError):
            return (NodeQuarantinedError if kind is NodeQuarantinedError else TaskError)(text.strip())
    return None


def _may_pass(failure: str) -> bool:
    """Whether a worker raised an `OSError`: the network and other systems may come back."""
    kind = getattr(builtins, failure.partition(":")[0].strip(), None)
    return isinstance(kind, type) and issubclass(kind, OSError)


class _Tally:
    """What the batches of this process have done so far. Added to from Spark's thread, read from the main one."""

    def __init__(
        self,
        plan: p.Plan,
        interval_us: int,
        *,
        now_us: Callable[[], int] = monotonic_clock_us,
    ) -> None:
        """`now_us`: the monotonic clock."""
        self._now_us = now_us
        self._began_us = now_us()
        self._plan = plan
        self._so_far = Progress(pipeline=plan.pipeline, interval_us=interval_us, elapsed_us=0)
        self._lateness_us = lateness_of(plan)
        self._late_by_us = 0
        self._sources = tuple(step for step in plan.steps if isinstance(step, p.Source))
        self._waited_for: list[WaitedFor] = []
        self._heard: dict[tuple[str, str], tuple[int, int]] = {}
        """Of each partition the position, and the monotonic clock when it last changed."""
        self._commit_us: int | None = None
        self._busy = False
        self.troubles: Callable[[], Mapping[str, SourceTrouble]] = dict
        self.restarts = 0

    def add(self, outcome: BatchOutcome) -> None:
        before = self._so_far
        least_us = min((one.watermark_us for one in outcome.cut.sources.values()), default=TIME_MIN_US)
        self._late_by_us = max(self._late_by_us, outcome.late_by_us)
        rows_late = before.rows_late + outcome.rows_late
        self._hear(outcome.cut)
        self._waited_for = waited_for(self._sources, outcome.cut)
        self._so_far = replace(
            before,
            epoch=outcome.epoch,
            rows_in=before.rows_in + outcome.rows_in,
            rows_out=before.rows_out + outcome.rows_out,
            rows_late=rows_late,
            late=describe_late(self._late_by_us, self._lateness_us) if rows_late else None,
            rows_rejected=before.rows_rejected + outcome.rows_rejected,
            rows_failed=before.rows_failed + outcome.rows_failed,
            watermark_us=None if least_us == TIME_MIN_US else least_us,
            state_bytes=outcome.state_bytes,
            checkpoints=before.checkpoints + 1,
            checkpoint_bytes=outcome.written_bytes,
        )

    def _hear(self, cut: Cut) -> None:
        now_us = self._now_us()
        for source, at in cut.sources.items():
            for name, one in at.partitions.items():
                before = self._heard.get((source, name))
                if before is None or before[0] != one.position:
                    self._heard[source, name] = (one.position, now_us)

    def look(self, stream: StreamingQuery) -> None:
        """Take whether a batch is running, and how long Spark took to commit the last one."""
        status = stream.status
        self._busy = bool(status["isTriggerActive"] and status["isDataAvailable"])
        last = stream.lastProgress
        if last is not None:
            durations = dict(last.durationMs)
            self._commit_us = 1000 * (durations.get("walCommit", 0) + durations.get("commitOffsets", 0))

    def progress(self, *, stopping: bool) -> Progress:
        now_us = self._now_us()
        held = held_back(self._waited_for)
        if held is not None:
            held = replace(held, silent_us=now_us - self._heard[held.source, held.partition][1])
        troubles = self.troubles()
        hub_problem, away = sources_away(self._plan, troubles)
        return replace(
            self._so_far,
            held_back=held,
            hub_problem=hub_problem,
            away=away,
            not_read=tuple(node for one in troubles.values() for node in one.not_read),
            checkpoint_us=self._commit_us,
            busy=self._busy,
            restarts=self.restarts,
            stopping=stopping,
            elapsed_us=now_us - self._began_us,
        )


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
