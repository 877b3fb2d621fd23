"""Sections about one node: pauses at barriers, restoring, latency, memory and starting."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_loads import OPEN_WINDOW
from edge_size import HOT_KEYS, Size
from edge_throughput import CORES
from peers import read_files
from table import Finding, at_least, at_most, middle, number, spread
from worker import ask_once, worker

PAUSE_P99_MS = at_most(5.0)
RESTORE_SHARE = at_least(0.5)
LATENCY_P99_MS = at_most(25.0)
IDLE_MB = at_most(120.0)
HELP_SECONDS = at_most(0.3)
RECORDS_PER_S = 10_000
WAIT_SECONDS_MAX = 30.0

_IDLE = """
from fordstone import Pipeline, tumbling
from fordstone.connectors import files

p = Pipeline("idle")
readings = p.source("readings", files("in/*.jsonl"), schema={"device": "string", "ts": "timestamp", "temp": "double"}, time="ts")
summary = readings.group_by("device").window(tumbling("10s")).agg(n="count(*)", top="max(temp)")
summary.sink("summary", files("out", format="parquet"))
"""
_BUSY = """
from fordstone import Pipeline, tumbling
from fordstone.connectors import files, generator

p = Pipeline("busy")
source = generator(keys=1000, step="10us", partitions=2)
readings = p.source("readings", source, schema={"device": "string", "ts": "timestamp", "temp": "double"}, time="ts")
aggregates = {"n": "count(*)", "total": "sum(temp)", "low": "min(temp)", "top": "max(temp)"}
summary = readings.group_by("device").window(tumbling("10s")).agg(**aggregates)
summary.sink("summary", files("out", format="parquet"))
"""


def pause(size: Size, directory: str | None) -> list[Finding]:
    """How long the slowest task stood still at barriers, under full load."""
    filled = tempfile.mkdtemp(prefix="fordstone-bench-state-", dir=directory)
    findings = []
    try:
        with worker(apart=size.apart, threads=1) as engine:
            keys = engine.ask("edge_loads.keys_for", state_bytes=size.state_bytes, directory=directory)
            made = engine.ask(
                "edge_loads.fill", keys=keys, batch_rows=size.batch_rows, parallelism=CORES, directory=filled
            )
            cases: list[tuple[str, dict[str, Any]]] = [
                ("tumbling, small state", {"keys": HOT_KEYS, "window": "10s"}),
                (
                    f"tumbling, {number(made['state_bytes'] / 1e6)} MB of state",
                    {"keys": HOT_KEYS, "window": OPEN_WINDOW, "resume": filled},
                ),
                *(
                    (f"running aggregate, {count:,} keys, all of them busy", {"keys": count, "window": None})
                    for count in size.table_keys
                ),
            ]
            for case, settings in cases:
                found = engine.ask(
                    "edge_loads.steady_run",
                    rows=size.lot_rows,
                    batch_rows=size.batch_rows,
                    parallelism=CORES,
                    interval=size.pause_interval,
                    mode="aligned",
                    warm_seconds=size.warm_seconds,
                    seconds=size.pause_seconds,
                    directory=directory,
                    **settings,
                )
                findings.append(_pause_finding(case, found))
    finally:
        shutil.rmtree(filled)
    return findings


def _pause_finding(case: str, found: Mapping[str, Any]) -> Finding:
    pauses = found["pauses"]
    slowest = max(pauses, key=lambda task: pauses[task]["p99"])
    worst = pauses[slowest]
    return Finding(
        section="pause",
        case=case,
        measured=worst["p99"],
        unit="ms p99",
        target=PAUSE_P99_MS,
        note=(
            f"p50 {number(worst['p50'])}, most {number(worst['most'])} of {worst['count']} barriers at {slowest}; "
            f"{number(found['rows_per_s'] / 1e6)} M rows/s"
        ),
        details={"pauses": pauses, "state_bytes": found["state_bytes"]},
    )


def restore(size: Size, directory: str | None) -> list[Finding]:
    """Restoring a checkpoint against reading the same files and doing nothing with them, in turn."""
    filled = tempfile.mkdtemp(prefix="fordstone-bench-state-", dir=directory)
    keys = ask_once("edge_loads.keys_for", apart=size.apart, state_bytes=size.state_bytes, directory=directory)
    try:
        made = ask_once(
            "edge_loads.fill",
            apart=size.apart,
            keys=keys,
            batch_rows=size.batch_rows,
            parallelism=CORES,
            directory=filled,
        )
        paths = made["paths"]
        plain, restored = [], []
        for _ in range(size.repetitions):
            plain.append(read_files(paths=paths))
            restored.append(
                ask_once(
                    "edge_loads.restore", apart=size.apart, directory=filled, parallelism=CORES, paths=paths, cold=True
                )
            )
    finally:
        shutil.rmtree(filled)
    shares = [read["seconds"] / one["seconds"] for read, one in zip(plain, restored, strict=True)]
    size_bytes, state_bytes = plain[0]["size_bytes"], restored[0]["state_bytes"]
    disk_rate = size_bytes / middle(read["seconds"] for read in plain)
    seconds = middle(one["seconds"] for one in restored)
    rates = [
        (one["state_bytes"] / one["seconds"]) / (read["size_bytes"] / read["seconds"])
        for read, one in zip(plain, restored, strict=True)
    ]
    return [
        Finding(
            section="restore",
            case=f"{number(state_bytes / 1e6)} MB of state, from {len(paths)} files of {number(size_bytes / 1e6)} MB",
            measured=middle(rates),
            unit="of the disk's read speed",
            target=RESTORE_SHARE,
            note=(
                f"{number(seconds)} s, {number(state_bytes / seconds / 1e6)} MB/s ({spread(rates)}); the disk reads "
                f"{number(disk_rate / 1e6)} MB/s; page cache dropped by posix_fadvise"
            ),
            details={"plain": plain, "restored": restored, "files": len(paths)},
        ),
        Finding(
            section="restore",
            case="the same in time: reading these files and doing nothing else, against restoring",
            measured=middle(shares),
            unit="of a plain read's speed",
            note=f"{spread(shares)}; {number(restored[-1]['device_bytes'] / 1e6)} MB came from the device while restoring",
        ),
    ]


def latency(size: Size, directory: str | None) -> list[Finding]:
    """Records at a fixed rate, each timed from when it was due."""
    findings = []
    for aggregate, case in ((False, "filter and project"), (True, "running aggregate of 1,000 keys")):
        found = ask_once(
            "edge_loads.latency",
            apart=size.apart,
            rate=RECORDS_PER_S,
            seconds=size.latency_seconds,
            warm_seconds=size.latency_seconds / 10,
            aggregate=aggregate,
            keys=1_000,
            directory=directory,
        )
        findings.append(
            Finding(
                section="latency",
                case=f"{case}, {RECORDS_PER_S:,} records/s, at least once",
                measured=found["p99"],
                unit="ms p99",
                target=LATENCY_P99_MS,
                note=f"p50 {number(found['p50'])}, most {number(found['most'])} of {found['records']:,.0f} at the sink",
                details=found,
            )
        )
    return findings


def memory(size: Size, directory: str | None) -> list[Finding]:
    """What a whole `fordstone run` process takes."""
    interval = ["--interval", size.process_interval]
    idle = _resident_mb(_IDLE, interval, size.idle_seconds, directory)
    busy = {
        count: _resident_mb(_BUSY, [*interval, "--parallelism", str(count)], size.load_seconds, directory)
        for count in size.process_parallelism
    }
    findings = [
        Finding(
            section="memory",
            case=f"idle, waiting for files, after {size.idle_seconds:g} s",
            measured=idle[-1],
            unit="MB resident",
            target=IDLE_MB,
            note=f"most {number(max(idle))}",
            details={"samples_mb": idle},
        )
    ]
    return findings + [
        Finding(
            section="memory",
            case=f"tumbling aggregate of generated rows at full speed, parallelism {count}",
            measured=max(samples),
            unit="MB resident at most",
            note=f"median {number(middle(samples))} in {size.load_seconds:g} s",
            details={"samples_mb": samples},
        )
        for count, samples in busy.items()
    ]


def _resident_mb(pipeline: str, options: Sequence[str], seconds: float, directory: str | None) -> list[float]:
    """Run a pipeline with the command line until `seconds` after its first checkpoint; what it took, ten times a second."""
    home = Path(tempfile.mkdtemp(prefix="fordstone-bench-", dir=directory))
    (home / "in").mkdir()
    (home / "pipeline.py").write_text(pipeline, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "POLARS_MAX_THREADS"}
    process = subprocess.Popen(
        [*fordstone_command(), "run", "pipeline.py", "--state", "state", *options],
        cwd=home,
        env=environment | {"PYTHONFAULTHANDLER": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _until(lambda: any(home.glob("state/*/*/manifests/*.json")), process, what="made no checkpoint")
        samples: list[float] = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(0.1)
            samples.append(_rss_mb(process.pid))
        process.send_signal(signal.SIGTERM)
        _until(lambda: process.poll() == 0, process, what="did not stop cleanly")
        return samples
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(home)


def _until(happened: Callable[[], bool], process: subprocess.Popen[str], *, what: str) -> None:
    """Wait, with a bound. A process that hangs is made to show where its threads are."""
    ends = time.monotonic() + WAIT_SECONDS_MAX
    while not happened():
        is_over = process.poll() is not None and not happened()
        if is_over or time.monotonic() > ends:
            process.send_signal(signal.SIGABRT)
            raise RuntimeError(f"fordstone run {what}: {process.communicate()[1]}")
        time.sleep(0.02)


def _rss_mb(pid: int) -> float:
    """Resident memory as the kernel counts it, shared libraries included."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    raise RuntimeError(f"process {pid} has gone")


def fordstone_command() -> list[str]:
    """The installed script beside this Python."""
    return [str(Path(sys.executable).with_name("fordstone"))]


def startup(size: Size, directory: str | None) -> list[Finding]:
    """Whole processes, from start to end, in turn with one that does nothing."""
    home = Path(tempfile.mkdtemp(prefix="fordstone-bench-", dir=directory))
    (home / "in").mkdir()
    (home / "pipeline.py").write_text(_IDLE, encoding="utf-8")
    row = '{"device": "a", "ts": "2026-01-01T00:00:00Z", "temp": 4.5}\n'
    (home / "in" / "one.jsonl").write_text(row, encoding="utf-8")
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "help": [*fordstone_command(), "--help"],
        "run": [*fordstone_command(), "run", "pipeline.py", "--bounded"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    try:
        for _ in range(size.starts):
            for name, command in commands.items():
                shutil.rmtree(home / "state", ignore_errors=True)
                shutil.rmtree(home / "out", ignore_errors=True)
                began = time.perf_counter()
                done = subprocess.run(command, cwd=home, check=False, capture_output=True, text=True)
                seconds[name].append(time.perf_counter() - began)
                if done.returncode != 0:
                    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    finally:
        shutil.rmtree(home)
    return [
        Finding(
            section="startup",
            case="fordstone --help",
            measured=middle(seconds["help"]),
            unit="s",
            target=HELP_SECONDS,
            note=f"{spread(seconds['help'])}; Python alone {number(middle(seconds['python']))} s",
            details=dict(seconds),
        ),
        Finding(
            section="startup",
            case="fordstone run --bounded of one row, from start to end",
            measured=middle(seconds["run"]),
            unit="s",
            note=spread(seconds["run"]),
        ),
    ]
