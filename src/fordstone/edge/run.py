"""Run a plan on this machine: lock the state directory, recover, run, and start again after failures.

What to do after a failure is judged in `protocol.restart`. A damaged file that turns up while a checkpoint is loaded
makes the checkpoint count as damaged, and the one before it is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, Literal

from fordstone.checkpoint.disk import OsDisk
from fordstone.checkpoint.failpoint import parse_failpoints
from fordstone.checkpoint.store import CheckpointStore
from fordstone.edge.clock import SystemClock
from fordstone.edge.config import RunConfig
from fordstone.edge.engine import Engine, Rim
from fordstone.edge.recovery import Remote, resume_from
from fordstone.edge.report import Progress, Report
from fordstone.edge.scheduler import ThreadScheduler
from fordstone.edge.signals import Signals
from fordstone.edge.uploading import Upload, remote_checkpoints
from fordstone.errors import CheckpointError, ConfigError, DamagedError, FordstoneError, TaskError
from fordstone.model import plan as p
from fordstone.operators.setting import Functions
from fordstone.protocol.restart import RestartAfter, Stop, decide

log = logging.getLogger(__name__)

FAILPOINT_VARIABLE: Final = "FORDSTONE_FAILPOINT"
OnProgress = Callable[[Progress], None]


def run(
    plan: p.Plan,
    functions: Functions,
    config: RunConfig | None = None,
    *,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> Report:
    """Run until bounded input ends, or SIGINT or SIGTERM comes. `on_progress` is called about 20 times a second."""
    if config is not None and options:
        raise ConfigError("give either a RunConfig or options, not both.")
    config = config or RunConfig(**options)
    disk = OsDisk(config.state)
    clock = SystemClock()
    failpoints = parse_failpoints(os.environ.get(FAILPOINT_VARIABLE, ""))
    rim = Rim(clock=clock, disk=disk, failpoints=failpoints)
    disk.lock()
    with closing(disk), Signals() as signals:
        failures = restarts = 0
        while True:
            began_us = clock.monotonic_us()
            try:
                return _run_once(plan, functions, config, rim, signals, on_progress, restarts)
            except FordstoneError:
                # The user has to do something about it: trying again would only say it again.
                raise
            except Exception as error:
                match decide(config.restart, failures=failures, lasted_us=clock.monotonic_us() - began_us):
                    case Stop(failures=count):
                        raise TaskError(
                            f"pipeline {plan.pipeline} failed {count} times in a row; the last time: {_told(error)}."
                        ) from error
                    case RestartAfter(wait_us=wait_us, failures=count):
                        failures, restarts = count, restarts + 1
                        log.exception(
                            "pipeline failed", extra={"pipeline": plan.pipeline, "failures": count, "wait_us": wait_us}
                        )
                        if signals.wait(wait_us / 1e6):
                            raise TaskError(
                                f"pipeline {plan.pipeline} was told to stop after it had failed: {error!r}"
                            ) from error


def _run_once(
    plan: p.Plan,
    functions: Functions,
    config: RunConfig,
    rim: Rim,
    signals: Signals,
    on_progress: OnProgress | None,
    restarts: int,
) -> Report:
    store = CheckpointStore(
        rim.disk,
        pipeline=plan.pipeline,
        node=config.node,
        compression=config.compression,
        keep=config.keep,
        failpoints=rim.failpoints,
    )
    remote = remote_checkpoints(config.remote, store) if config.remote is not None else None
    engine = recovered_engine(plan, functions, config, rim, store, remote)
    manifest = engine.resumption.manifest
    resumed_from = manifest.epoch if manifest is not None else None
    if engine.time_has_ended and not config.bounded:
        engine.close()
        raise CheckpointError(
            f"pipeline {plan.pipeline} has ended: with epoch {resumed_from} its bounded input was read to the end and all its "
            "windows were closed, so every further row would be late. Go on with another state directory."
        )
    upload = Upload(config.remote, store, rim.clock, keep=config.keep) if config.remote is not None else None
    if engine.time_has_ended:
        engine.close()
        if upload is not None:
            # The process before this one may have been stopped before it came to that.
            upload.finish()
        return Report(
            pipeline=plan.pipeline,
            outcome="already_ended",
            progress=engine.progress(restarts=restarts),
            resumed_from=resumed_from,
        )
    log.info(
        "pipeline started",
        extra={"pipeline": plan.pipeline, "node": config.node, "from_epoch": resumed_from, "tasks": len(engine.tasks)},
    )
    if upload is not None:
        engine.writer.keep_for(upload.acknowledged)
    steppables = [*engine.steppables(), *([upload] if upload is not None else [])]

    def tick() -> None:
        if signals.told:
            engine.stop()
        if on_progress is not None:
            on_progress(engine.progress(restarts=restarts))

    try:
        ThreadScheduler(steppables).run(lambda: engine.over, every_tick=tick)
        if upload is not None:
            upload.finish()
        outcome: Literal["ended", "stopped"] = "ended" if engine.ended else "stopped"
        progress = engine.progress(restarts=restarts)
        if on_progress is not None:
            on_progress(progress)
        return Report(pipeline=plan.pipeline, outcome=outcome, progress=progress, resumed_from=resumed_from)
    finally:
        engine.close()


def recovered_engine(
    plan: p.Plan, functions: Functions, config: RunConfig, rim: Rim, store: CheckpointStore, remote: Remote | None
) -> Engine:
    """An engine from the newest whole checkpoint, whose epoch has been let out (again).

    A checkpoint that turns out to be damaged while it is read is set aside, and the one before is used.
    """
    while True:
        resumption = resume_from(store, plan, remote=remote)
        try:
            engine = Engine(plan, functions, config, rim, store, resumption)
            engine.release_again()
        except DamagedError as error:
            if resumption.manifest is None:
                raise
            log.warning("checkpoint damaged", extra={"epoch": resumption.manifest.epoch, "problem": str(error)})
            store.set_aside(resumption.manifest.epoch, str(error))
        else:
            return engine


def _told(error: Exception) -> str:
    """The error, and in which step it happened, which stands in its notes."""
    return ", ".join([repr(error), *getattr(error, "__notes__", ())])
