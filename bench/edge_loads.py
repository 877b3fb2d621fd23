"""Runs of the edge engine that are timed, each called in a process of its own by way of `worker`."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from edge_rows import SCHEMA, Endless, checksum, every_key_once, partitioned, readings
from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.engine.source_task import SourceTask
from fordstone.edge.run import ThreadScheduler, recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.runtime.clock import SystemClock
from fordstone.storage.disk import OsDisk
from peers import forget_cached, read_from_device_bytes
from sampling import Sampler
from table import percentile

NEVER = "10000d"
"""An interval that no run lasts."""
OPEN_WINDOW = "10000d"
"""A window that no run closes."""
AGGREGATES = {"n": "count(*)", "total": "sum(temp)", "low": "min(temp)", "top": "max(temp)"}
LATENCY_WAIT_SECONDS = 30.0
SMALL_KEYS = 1_000

Mode = Literal["aligned", "unaligned", "blocking"]


class Forgetful(MemorySink):
    """Takes everything and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.released = _Dropping()


class _Dropping(dict[int, pl.DataFrame]):
    def __setitem__(self, epoch: int, frame: pl.DataFrame) -> None:
        """Let it go."""


def pipeline(
    source: MemorySource, sink: MemorySink, *, window: str | None, mode: Mode = "aligned", name: str = "readings"
) -> Pipeline:
    """Count, sum, least and greatest by device, and by window if there is one."""
    made = Pipeline("bench", guarantee="exactly_once", mode=mode)
    grouped = made.source(name, memory(source), schema=SCHEMA, time="ts").group_by("dev")
    if window is not None:
        grouped = grouped.window(tumbling(window))
    grouped.agg(name="by_device", **AGGREGATES).sink("results", memory(sink))
    return made


@contextmanager
def scratch(base: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fordstone-bench-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def tumbling_run(
    *,
    rows: int,
    keys: int,
    batch_rows: int,
    parallelism: int,
    interval: str,
    directory: str | None,
    sampled: bool = False,
) -> dict[str, Any]:
    """The whole of `Pipeline.run`, from its call to its return, over bounded input in memory."""
    source = partitioned(readings(rows, keys), batch_rows=batch_rows, partitions=parallelism)
    sink = MemorySink()
    made = pipeline(source, sink, window="10s")
    with scratch(directory) as state:
        sampler = Sampler() if sampled else None
        began, cpu_began = time.perf_counter(), time.process_time()
        report = made.run(state=state, bounded=True, parallelism=parallelism, interval=interval, batch_rows=batch_rows)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        samples = sampler.finish() if sampler is not None else None
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "checkpoints": report.progress.checkpoints,
        "checksum": checksum(sink.rows()),
        "samples": samples,
    }


def open_engine(made: Pipeline, config: RunConfig) -> Engine:
    """As `run` does it: from the newest checkpoint, if there is one."""
    disk = OsDisk(config.directory)
    environment = Environment(clock=SystemClock(), disk=disk)
    store = CheckpointStore(
        disk, pipeline=made.name, node=config.node, compression=config.compression, keep=config.keep
    )
    return recovered_engine(made.plan(), made.functions, config, environment, store, None)


def rows_read(engine: Engine) -> int:
    return sum(task.rows_in for task in engine.tasks if isinstance(task, SourceTask))


def steady_run(
    *,
    rows: int,
    keys: int,
    batch_rows: int,
    parallelism: int,
    interval: str,
    mode: Mode,
    window: str | None,
    warm_seconds: float,
    seconds: float,
    directory: str | None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Rows a second while a pipeline without end is under way, and how long its tasks stood still at barriers.

    `resume`: a directory with a checkpoint to begin from; it is left as it is.
    """
    source = Endless(readings(rows, keys), batch_rows=batch_rows, partitions=parallelism, first_lot=1)
    made = pipeline(source, Forgetful(), window=window, mode=mode)
    with scratch(directory) as state:
        if resume is not None:
            _link_copy(Path(resume), state)
        config = RunConfig(
            state=state, parallelism=parallelism, interval=interval, batch_rows=batch_rows, allow_new_state=True
        )
        engine = open_engine(made, config)
        marks: list[tuple[float, int, int]] = []

        def tick() -> None:
            now = time.perf_counter()
            due = began + warm_seconds if not marks else marks[0][0] + seconds
            if len(marks) < 2 and now >= due:
                marks.append((now, rows_read(engine), engine.writer.sealed_count))
                if len(marks) == 2:
                    state_bytes.append(engine.progress().state_bytes)
                    engine.stop()

        state_bytes: list[int] = []
        began = time.perf_counter()
        try:
            ThreadScheduler(engine.steppables()).run(lambda: engine.over, every_tick=tick)
        finally:
            engine.close()
    (start, rows_before, sealed_before), (stop, rows_after, sealed_after) = marks
    return {
        "rows_per_s": (rows_after - rows_before) / (stop - start),
        "checkpoints": sealed_after - sealed_before,
        "state_bytes": state_bytes[0],
        "last_checkpoint": {} if engine.writer.last is None else _written(engine),
        "pauses": {task.id: _pauses_ms(list(task.pauses_us)) for task in engine.tasks},
    }


def _written(engine: Engine) -> dict[str, int]:
    last = engine.writer.last
    return {} if last is None else {"took_us": last.took_us, "size_bytes": last.size_bytes, "runs": last.runs}


def _pauses_ms(pauses_us: list[int]) -> dict[str, float]:
    milliseconds = [us / 1000 for us in pauses_us]
    return {
        "count": len(milliseconds),
        "p50": percentile(milliseconds, 50),
        "p99": percentile(milliseconds, 99),
        "most": max(milliseconds, default=0.0),
    }


def keys_for(*, state_bytes: int, directory: str | None) -> int:
    """How many keys make a state of about `state_bytes`, judged by a small one."""
    with scratch(directory) as state:
        made = fill(keys=SMALL_KEYS, batch_rows=SMALL_KEYS, parallelism=1, directory=str(state))
    return int(state_bytes * SMALL_KEYS / made["state_bytes"])


def fill(*, keys: int, batch_rows: int, parallelism: int, directory: str) -> dict[str, Any]:
    """Leave a checkpoint in `directory` whose windowed state has a row for each of `keys` devices."""
    source = partitioned(every_key_once(keys), batch_rows=batch_rows, partitions=parallelism)
    made = pipeline(source, Forgetful(), window=OPEN_WINDOW, name="fill")
    config = RunConfig(state=directory, parallelism=parallelism, interval="1s", batch_rows=batch_rows)
    engine = open_engine(made, config)
    began = time.perf_counter()

    def tick() -> None:
        # Not bounded: the end of the input would close the window.
        if rows_read(engine) == keys:
            engine.stop()

    try:
        ThreadScheduler(engine.steppables()).run(lambda: engine.over, every_tick=tick)
        state_bytes = engine.progress().state_bytes
    finally:
        engine.close()
    return {
        "seconds": time.perf_counter() - began,
        "state_bytes": state_bytes,
        "paths": _newest_runs(Path(directory), made),
    }


def _newest_runs(state: Path, made: Pipeline) -> list[str]:
    """The files that a restart has to read."""
    store = CheckpointStore(OsDisk(state), pipeline=made.name, node="node", read_only=True)
    manifest = store.manifest(store.epochs()[-1])
    return sorted(str(state / made.name / "node" / "runs" / run.digest) for run in manifest.runs())


def restore(*, directory: str, parallelism: int, paths: list[str], cold: bool) -> dict[str, float]:
    """From a directory to an engine that could be stepped. `cold`: the files come from the disk, not from the page cache."""
    source = MemorySource([[] for _ in range(parallelism)])
    made = pipeline(source, Forgetful(), window=OPEN_WINDOW)
    config = RunConfig(state=directory, parallelism=parallelism, allow_new_state=True)
    if cold:
        forget_cached(paths)
    before = read_from_device_bytes()
    began = time.perf_counter()
    engine = open_engine(made, config)
    seconds = time.perf_counter() - began
    device_bytes = read_from_device_bytes() - before
    state_bytes = engine.progress().state_bytes
    engine.close()
    return {"seconds": seconds, "state_bytes": state_bytes, "device_bytes": device_bytes}


def _link_copy(of: Path, to: Path) -> None:
    """A second checkpoint directory without copying the runs, which nobody changes."""
    for path in of.rglob("*"):
        there = to / path.relative_to(of)
        if path.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        elif path.parent.name == "runs":
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, there)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)


class _Stopwatch(list[pl.DataFrame]):
    """In the place of a sink's rows: notes when each came, and since when it was due."""

    def __init__(self) -> None:
        super().__init__()
        self.due_us: list[np.ndarray] = []
        self.took_us: list[np.ndarray] = []
        self.newest = -1

    def append(self, frame: pl.DataFrame) -> None:
        now_us = time.monotonic_ns() // 1000
        due_us = frame["due_us"].to_numpy()
        self.due_us.append(due_us)
        self.took_us.append(now_us - due_us)
        self.newest = max(self.newest, int(frame["seq"].max()))  # type: ignore[arg-type]  # a frame with rows


def _feed(source: MemorySource, *, rate: int, seconds: float, keys: int, began_us: int) -> None:
    """Append each record when it is due. A record that is late in being appended counts from when it was due."""
    sent, count = 0, int(rate * seconds)
    while sent < count:
        due = min(count, (time.monotonic_ns() // 1000 - began_us) * rate // 1_000_000)
        if due > sent:
            numbers = np.arange(sent, due, dtype=np.int64)
            due_us = began_us + numbers * 1_000_000 // rate
            source.append(0, pl.DataFrame({"seq": numbers, "dev": (numbers % keys).astype(np.int32), "due_us": due_us}))
            sent = due
        time.sleep(0.001)


def latency(
    *, rate: int, seconds: float, warm_seconds: float, aggregate: bool, keys: int, directory: str | None
) -> dict[str, float]:
    """From when a record is due to when the sink has it, at a fixed rate, at least once."""
    source, sink, watch = MemorySource([[]]), MemorySink(), _Stopwatch()
    sink.written = watch
    made = Pipeline("bench", guarantee="at_least_once")
    records = made.source("records", memory(source), schema={"seq": "bigint", "dev": "int", "due_us": "bigint"})
    if aggregate:
        out = records.group_by("dev").agg(n="count(*)", seq="max(seq)", due_us="max(due_us)")
    else:
        out = records.filter("seq >= 0").select("seq", "due_us")
    out.sink("results", memory(sink))
    last = int(rate * seconds) - 1
    with scratch(directory) as state:
        engine = open_engine(made, RunConfig(state=state, interval="1s"))
        began_us = time.monotonic_ns() // 1000
        feeder = threading.Thread(
            target=_feed,
            kwargs={"source": source, "rate": rate, "seconds": seconds, "keys": keys, "began_us": began_us},
            daemon=True,
        )
        give_up_us = began_us + int((seconds + LATENCY_WAIT_SECONDS) * 1_000_000)

        def tick() -> None:
            if watch.newest >= last:
                engine.stop()
            elif time.monotonic_ns() // 1000 > give_up_us:
                raise TimeoutError(f"record {last} did not come out; the newest that did is {watch.newest}")

        feeder.start()
        try:
            ThreadScheduler(engine.steppables()).run(lambda: engine.over, every_tick=tick)
        finally:
            engine.close()
    due_us, took_us = np.concatenate(watch.due_us), np.concatenate(watch.took_us)
    took_ms = took_us[due_us >= began_us + int(warm_seconds * 1_000_000)] / 1000
    return {
        "records": float(took_ms.size),
        "p50": percentile(took_ms.tolist(), 50),
        "p99": percentile(took_ms.tolist(), 99),
        "most": float(took_ms.max()),
    }
