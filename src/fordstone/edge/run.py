"""Run a plan on this machine: lock the state directory, recover, run, and start again after failures.

What to do after a failure is judged in `protocol.retry`. A damaged file that turns up while a checkpoint is loaded
makes the checkpoint count as damaged, and the one before it is used.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Final, Literal, Unpack

import msgspec

from fordstone.connectors.base import SinkDelayedError
from fordstone.connectors.registry import earlier_output
from fordstone.edge.config import RunConfig, RunOptions, run_config
from fordstone.edge.engine.assembly import ConnectorOpener, Environment, Job
from fordstone.edge.engine.engine import Engine, Steppable
from fordstone.edge.engine.recovery import RemoteCheckpoints, resume_from
from fordstone.edge.engine.replay import replay
from fordstone.edge.link.control import control_fetching
from fordstone.edge.link.links import Links
from fordstone.edge.link.outbox import Outbox
from fordstone.edge.link.owner import Ownership
from fordstone.edge.link.sender import Patience
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import DamagedError, EndedError, FordstoneError, SinkError, TaskError
from fordstone.operators.base import IN_STEP, Functions
from fordstone.plan import plan as p
from fordstone.protocol.health import WaitsFor
from fordstone.protocol.progress import Progress, Report
from fordstone.protocol.retry import DISK_RETRY_US, Backoff, RestartAfter, Stop, decide_restart
from fordstone.runtime.available import check_available_now
from fordstone.runtime.clock import SystemClock
from fordstone.runtime.fresh import set_aside, to_set_aside
from fordstone.runtime.signals import Signals, StopRequest
from fordstone.runtime.waits import sink_away
from fordstone.state.working import WorkingFileError
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import failpoints_of_process
from fordstone.structs import prepare_structs

log = logging.getLogger(__name__)

HUB_WAIT: Final = Backoff(first_us=500_000, max_us=15_000_000)
WORKING_FILES_WAIT: Final = Backoff(first_us=DISK_RETRY_US, max_us=15_000_000)
"""Grows, unlike that of checkpoints: each try reads the state again."""
OnProgress = Callable[[Progress], None]
OnFailure = Callable[[], None]
"""Called when a run has failed and is started again after a wait."""
TICK_SECONDS: Final = 0.01
TICKS_PER_CALL: Final = 5
"""Number of checks whether the run is over per call of `every_tick`."""
JOIN_SECONDS: Final = 60.0
"""Maximum time that the threads of a run have to finish their steps; then the run fails, and nothing is started beside them."""


class HungError(FordstoneError):
    """A thread of a run did not end. Nothing may run beside it in this process: the process has to end."""


class ThreadScheduler:
    """Runs each task, the coordinator and the writer on a thread of its own, until a condition holds. Used once.

    Polars releases the interpreter while it works, so tasks run in parallel. A thread whose step did nothing sleeps until it is woken.
    The first failure stops all.
    """

    def __init__(self, steppables: Sequence[Steppable], *, join_seconds: float = JOIN_SECONDS) -> None:
        self._steppables = tuple(steppables)
        self._join_seconds = join_seconds
        self._events = [threading.Event() for _ in steppables]
        self._halt = threading.Event()
        self._done = threading.Event()
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def run(self, until: Callable[[], bool], *, every_tick: Callable[[], None] | None = None) -> None:
        """Start, and return when `until` holds; raises what a step raised. `every_tick` is called about 20 times a second.

        `HungError`, from that if there was one, if a thread is still in its last step after `join_seconds`.
        """
        prepare_structs()
        for steppable, event in zip(self._steppables, self._events, strict=True):
            steppable.wake = event.set
        for index, (steppable, event) in enumerate(zip(self._steppables, self._events, strict=True)):
            name = f"fordstone-{getattr(steppable, 'id', type(steppable).__name__.lower())}-{index}"
            thread = threading.Thread(target=self._loop, args=(steppable, event), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            for tick in itertools.count():
                if self._failures or until():
                    break
                self._done.wait(TICK_SECONDS)
                if every_tick is not None and tick % TICKS_PER_CALL == 0:
                    every_tick()
        finally:
            self._stop()
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            failure = next(iter(self._failures), None)
            before = "" if failure is None else f" The run had failed before: {failure!r}."
            raise HungError(
                f"{', '.join(hung)} did not end within {self._join_seconds:g} seconds: a disk, a network file system, a connector or a "
                f"function of the pipeline hangs.{before} The run is not started again in this process, because the hanging thread might "
                "still write. End this process, and start it again."
            ) from failure
        if self._failures:
            raise self._failures[0]

    def _stop(self) -> None:
        self._halt.set()
        for event in self._events:
            event.set()
        deadline_s = time.monotonic() + self._join_seconds
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _loop(self, steppable: Steppable, event: threading.Event) -> None:
        try:
            while not self._halt.is_set():
                event.clear()
                if steppable.step():
                    continue
                wait_us = steppable.idle_wait_us
                if self._halt.is_set():
                    return
                event.wait(None if wait_us is None else wait_us / 1e6)
        except BaseException as failure:  # noqa: BLE001 - handed to the caller of run
            self._failures.append(failure)
            self._done.set()


def run(
    plan: p.Plan,
    functions: Functions,
    config: RunConfig | None = None,
    *,
    on_progress: OnProgress | None = None,
    on_failure: OnFailure | None = None,
    stop: StopRequest | None = None,
    opener: Callable[[Job], ConnectorOpener] | None = None,
    **options: Unpack[RunOptions],
) -> Report:
    """Run until the input ends, until what exists now has been read (`available_now`), or until a stop is requested.

    Bounded input ends with what is there at the start, other input when each source says so (`Source.ended`).

    The stop is requested by `stop` if it is given, else by SIGINT or SIGTERM. `on_progress` is called about 20 times a second. `opener`
    opens sources and sinks in another way than the plan says. Without a state directory the run has a temporary one: it reads nothing
    old and leaves nothing.
    """
    config = run_config(config, options)
    if config.available_now:
        check_available_now(plan)
    with ExitStack() as stack:
        keeps_state = config.state is not None
        if not keeps_state:
            if not config.fresh:
                refuse_earlier_output(plan)
            config = replace(config, state=stack.enter_context(TemporaryDirectory(prefix="fordstone-")))
        disk = stack.enter_context(closing(OsDisk(config.directory, private=True)))
        disk.lock()
        clock = SystemClock()
        failpoints = failpoints_of_process()
        signals = stop or stack.enter_context(Signals())
        if config.fresh:
            set_aside(to_set_aside(plan, [config.home_of(plan.pipeline)]))
        environment = Environment(
            clock=clock,
            disk=disk,
            failpoints=failpoints,
            opener=opener,
            keeps_state=keeps_state,
            wait=signals.wait,
        )
        failures = restarts = refused = 0
        last: str | None = None
        while True:
            began_us = clock.monotonic_us()
            try:
                return _run_once(plan, functions, config, environment, signals, on_progress, restarts)
            except HungError as error:
                # It keeps the lock until the process ends, and takes no change, whenever the thread comes back.
                disk.abandon(str(error))
                raise
            except FordstoneError as error:
                lasted_us = clock.monotonic_us() - began_us
                refused = _wait_for_disk(
                    error, signals, 0 if lasted_us >= config.restart.forgiven_after_us else refused
                )
                restarts += 1
            except Exception as error:
                before, last = last, _describe(error)
                match decide_restart(
                    config.restart,
                    failures=failures,
                    lasted_us=clock.monotonic_us() - began_us,
                    chance=random.random(),  # noqa: S311 - jitter
                    # The network and other systems may come back.
                    repeated=IN_STEP in last and last == before and not isinstance(error, OSError),
                ):
                    case Stop(failures=count):
                        raise TaskError(
                            f"pipeline {plan.pipeline} failed {count} times in a row; the last time: {last}."
                        ) from error
                    case RestartAfter(wait_us=wait_us, failures=count):
                        failures, restarts = count, restarts + 1
                        if on_failure is not None:
                            on_failure()
                        log.warning(
                            "pipeline failed",
                            extra={"pipeline": plan.pipeline, "failures": count, "wait_us": wait_us, "problem": last},
                            # One traceback is enough: the error that ends the run has it.
                            exc_info=log.isEnabledFor(logging.INFO),
                        )
                        if signals.wait(wait_us / 1e6):
                            raise TaskError(
                                f"pipeline {plan.pipeline} was asked to stop after it had failed: {error!r}"
                            ) from error


def _wait_for_disk(error: FordstoneError, signals: StopRequest, refused: int) -> int:
    """Wait if working files were refused to a run that had begun, for the next try; return how many times in a row that was.

    Raises any other error: the user has to do something about it, and trying again would only say it again. So it does for working
    files at the first start, as for any disk that refuses there, and if a stop is requested.
    """
    if not isinstance(error, WorkingFileError) or not (error.while_running or refused):
        raise error
    log.warning("working files refused", extra={"problem": str(error)})
    if signals.wait(WORKING_FILES_WAIT.wait_s(refused + 1, chance=random.random())):  # noqa: S311 - jitter
        raise error
    return refused + 1


def refuse_earlier_output(plan: p.Plan) -> None:
    """Raise if a sink has rows of an earlier run, which the rows of a run without state would be mixed with."""
    for step in plan.steps:
        found = earlier_output(step.connector) if isinstance(step, p.Sink) else None
        if found is not None:
            raise SinkError(
                f"sink {step.name}: {found} is there already, of an earlier run, and this run has no state to continue it with.\n"
                "Give the state directory of that run with state=..., set its output aside with fresh=True, or write to another place."
            )


def _run_once(
    plan: p.Plan,
    functions: Functions,
    config: RunConfig,
    environment: Environment,
    signals: StopRequest,
    on_progress: OnProgress | None,
    restarts: int,
) -> Report:
    store = CheckpointStore(
        environment.disk,
        pipeline=plan.pipeline,
        node=config.node,
        compression=config.compression,
        keep=config.keep,
        failpoints=environment.failpoints,
    )
    with closing(Links(plan, config, environment, store)) as links:
        for failures in itertools.count(1):
            try:
                engine = recovered_engine(
                    plan,
                    functions,
                    config,
                    environment,
                    store,
                    links.remote(),
                    outbox=links.outbox,
                    ownership=links.ownership,
                    take_lease=links.take_lease,
                )
            except SinkDelayedError as error:
                # The last epoch had rows for the hub, and it is unknown whether it took them; or there is a lease to take over; or the system
                # of a sink is away.
                _report_waiting(plan, error, store, on_progress)
                if signals.wait(HUB_WAIT.wait_s(failures, chance=random.random())):  # noqa: S311 - jitter
                    raise
            else:
                break
        with closing(engine):
            return _run_engine(engine, links, signals, on_progress, restarts)


def _report_waiting(
    plan: p.Plan, error: SinkDelayedError, store: CheckpointStore, on_progress: OnProgress | None
) -> None:
    """Say what a start waits for. There is no engine yet whose progress would."""
    away = (sink_away(plan, error.step, str(error)),) if error.step else ()
    extra = {"pipeline": plan.pipeline, "problem": str(error)}
    if away:
        log.warning("waiting for a sink", extra=extra | {"step": away[0].step, "kind": away[0].kind})
    else:
        log.warning("waiting for the hub", extra=extra)
    if on_progress is not None:
        epoch = max(store.epochs(), default=0)
        waits_for: WaitsFor = "sink" if away else "hub"
        on_progress(
            Progress(
                pipeline=plan.pipeline,
                elapsed_us=0,
                epoch=epoch,
                stalled=str(error),
                waits_for=waits_for,
                away=away,
                hub_problem=None if away else str(error),
            )
        )


def _run_engine(
    engine: Engine, links: Links, signals: StopRequest, on_progress: OnProgress | None, restarts: int
) -> Report:
    plan, config, environment = engine.plan, engine.config, engine.environment
    manifest = engine.resumption.manifest
    resumed_from = engine.resumption.resumed_from
    fetching = control_fetching(plan, engine.sources, manifest, hub=config.hub, failpoints=environment.failpoints)

    def progress() -> Progress:
        return fetching.add_problem(links.add_progress(engine.progress(restarts=restarts)))

    def report_progress() -> None:
        if on_progress is not None:
            on_progress(progress())

    def report(outcome: Literal["ended", "stopped", "already_ended"]) -> Report:
        return Report(pipeline=plan.pipeline, outcome=outcome, progress=progress(), resumed_from=resumed_from)

    if engine.time_has_ended and not engine.input_has_ended:
        raise EndedError(
            f"pipeline {plan.pipeline} has ended: with epoch {engine.writer.epoch} its input was read to the end and all its "
            "windows were closed, so every further row would be late. Add --fresh (in Python: fresh=True) to start over with all input: it "
            "sets aside the state and the outputs."
        )
    steppables = [*engine.steppables(), *links.begin(engine.writer)]
    if engine.time_has_ended:
        engine.check_nothing_new()
        # The process before this one may have been stopped before it came to that.
        links.finish(Patience.UNTIL_SENT, wait=signals.wait, tick=report_progress)
        return report("already_ended")
    log.info(
        "pipeline started",
        extra={"pipeline": plan.pipeline, "node": config.node, "from_epoch": resumed_from, "tasks": len(engine.tasks)},
    )

    def tick() -> None:
        if signals.stop_requested:
            engine.stop()
            links.stopping()
        fetching.check()
        report_progress()

    if config.bounded or config.available_now:
        fetching.once()
    with fetching:
        try:
            ThreadScheduler(steppables, join_seconds=JOIN_SECONDS).run(lambda: engine.over, every_tick=tick)
        except WorkingFileError as error:
            error.while_running = True
            if on_progress is not None:
                on_progress(msgspec.structs.replace(progress(), stalled=str(error), waits_for="disk"))
            raise
    if engine.writer.waits_for_sink:
        extra = {"pipeline": plan.pipeline, "epoch": engine.writer.epoch, "problem": engine.writer.stall}
        log.warning("stopped before a sink had the last epoch, which the next start releases", extra=extra)
    patience = Patience.BRIEF
    if not signals.stop_requested and (engine.ended or config.available_now):
        patience = Patience.UNTIL_SENT if engine.ended else Patience.WHILE_IT_ANSWERS
    links.finish(patience, wait=signals.wait, tick=report_progress)
    report_progress()
    return report("ended" if engine.ended else "stopped")


def recovered_engine(
    plan: p.Plan,
    functions: Functions,
    config: RunConfig,
    environment: Environment,
    store: CheckpointStore,
    remote: RemoteCheckpoints | None,
    *,
    outbox: Outbox | None = None,
    ownership: Ownership | None = None,
    take_lease: Callable[[], None] | None = None,
) -> Engine:
    """An engine from the newest sealed epoch, which has been released (again). Epochs without a whole checkpoint are replayed first.

    A checkpoint that turns out to be damaged while it is read is set aside, and the one before is used.
    """
    job = Job(plan, functions, config, environment, store, ownership)
    while True:
        resumption = resume_from(store, plan, remote=remote)
        try:
            resumption = replay(job, resumption)
            engine = Engine(job, resumption, outbox=outbox, take_lease=take_lease)
            try:
                engine.release_again()
            except BaseException:
                engine.close()
                raise
        except DamagedError as error:
            if resumption.manifest is None:
                raise
            log.warning("checkpoint damaged", extra={"epoch": resumption.manifest.epoch, "problem": str(error)})
            store.set_aside(resumption.manifest.epoch, str(error))
        else:
            return engine


def _describe(error: Exception) -> str:
    """The error, and the step that it happened in, which is in its notes."""
    return ", ".join([repr(error), *getattr(error, "__notes__", ())])
