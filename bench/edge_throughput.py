"""Sections about speed: the tumbling aggregate beside one Polars `group_by`, and what checkpoints cost."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from edge_loads import NEVER, OPEN_WINDOW
from edge_rows import must_agree
from edge_size import HOT_KEYS, KI, Size
from table import Finding, at_least, at_most, middle, number, spread
from worker import Asked, worker

POLARS_SHARE = at_least(0.80)
CHECKPOINT_COST_PERCENT = at_most(3.0)
CORES = 2
MODES = ("aligned", "unaligned", "blocking")


def tumbling(size: Size, directory: str | None) -> list[Finding]:
    """The engine and its peers over the same rows, in turn."""
    findings = []
    with ExitStack() as stack:
        engine = stack.enter_context(worker(apart=size.apart, threads=1))
        every_core = stack.enter_context(worker(apart=size.apart, threads=None))
        one_core = stack.enter_context(worker(apart=size.apart, threads=1))
        for keys, batch_rows in size.tumbling_cases:
            rows = {"rows": size.tumbling_rows, "keys": keys}
            runs: dict[str, list[Any]] = {}
            for repetition in range(size.warm_ups + size.repetitions):
                found = {
                    "polars": every_core.ask("peers.one_group_by", **rows),
                    **{
                        f"engine {parallelism}": engine.ask(
                            "edge_loads.tumbling_run",
                            **rows,
                            batch_rows=batch_rows,
                            parallelism=parallelism,
                            interval="1s",
                            directory=directory,
                        )
                        for parallelism in (1, CORES)
                    },
                    "polars streaming": every_core.ask("peers.one_group_by", **rows, streaming=True),
                    "polars 1 thread": one_core.ask("peers.one_group_by", **rows),
                    **{
                        f"bare {threads}": one_core.ask(
                            "peers.bare_loop", **rows, batch_rows=batch_rows, threads=threads
                        )
                        for threads in (1, CORES)
                    },
                }
                must_agree([one["checksum"] for one in found.values()])
                if repetition >= size.warm_ups:
                    for name, one in found.items():
                        runs.setdefault(name, []).append(one)
            findings += _tumbling_findings(size.tumbling_rows, keys, batch_rows, runs)
    return findings


def _tumbling_findings(rows: int, keys: int, batch_rows: int, runs: Mapping[str, Sequence[Any]]) -> list[Finding]:
    rates = {name: [rows / one["seconds"] / 1e6 for one in found] for name, found in runs.items()}
    medians = {name: middle(values) for name, values in rates.items()}
    shares = {
        name: [one / other for one, other in zip(rates[name], rates["polars"], strict=True)]
        for name in rates
        if name.startswith("engine")
    }
    # Other work on the machine takes less of this: it says how much more work the engine does, not how long it takes.
    cpu_ns = {name: middle(1e9 * one["cpu_seconds"] / rows for one in found) for name, found in runs.items()}
    best = max(shares, key=lambda name: middle(shares[name]))
    is_goal = (keys, batch_rows) == (1_000, 64 * KI)
    peers = (
        f"Polars {number(medians['polars'])}, on 1 thread {number(medians['polars 1 thread'])}, streaming {number(medians['polars streaming'])}; "
        f"bare loop {number(medians['bare 1'])}, on {CORES} threads {number(medians[f'bare {CORES}'])}"
    )
    findings = []
    for name, values in shares.items():
        parallelism = name.removeprefix("engine ")
        checkpoints = middle(one["checkpoints"] for one in runs[name])
        findings.append(
            Finding(
                section="tumbling",
                case=f"{keys:,} keys, batches of {batch_rows // KI} Ki, parallelism {parallelism}",
                measured=middle(values),
                unit="of one Polars group_by",
                # A user chooses the parallelism, so the better one is judged.
                target=POLARS_SHARE if is_goal and name == best else None,
                note=f"{number(medians[name])} M rows/s ({spread(values)}), {checkpoints:.0f} checkpoints; {peers}",
                details={
                    "rows": rows,
                    "keys": keys,
                    "batch_rows": batch_rows,
                    "m_rows_per_s": rates,
                    "shares": values,
                    "cpu_ns_per_row": cpu_ns,
                },
            )
        )
    return findings


def checkpoint_cost(size: Size, directory: str | None) -> list[Finding]:
    """Rows a second with checkpoints against the same without, in turn."""
    with worker(apart=size.apart, threads=1) as engine:
        findings = []
        for mode in MODES:
            cost = _costs(engine, size, directory, mode=mode, window="10s", keys=HOT_KEYS, intervals=size.intervals)
            findings += _cost_findings(f"small state, {mode}", cost, target=None)
        keys = engine.ask("edge_loads.keys_for", state_bytes=size.state_bytes, directory=directory)
        filled = tempfile.mkdtemp(prefix="fordstone-bench-state-", dir=directory)
        try:
            made = engine.ask(
                "edge_loads.fill", keys=keys, batch_rows=size.batch_rows, parallelism=CORES, directory=filled
            )
            for mode, busy in size.state_cases:
                hot = keys if busy is None else busy
                cost = _costs(
                    engine,
                    size,
                    directory,
                    mode=mode,
                    window=OPEN_WINDOW,
                    keys=hot,
                    intervals=size.intervals[:1],
                    resume=filled,
                )
                case = f"{number(made['state_bytes'] / 1e6)} MB of state, {mode}, {hot:,} of {keys:,} keys busy"
                # Where every key is busy, all that is read must be written; the target is about what stands still.
                target = CHECKPOINT_COST_PERCENT if (mode, busy) == ("aligned", HOT_KEYS) else None
                findings += _cost_findings(case, cost, target=target)
        finally:
            shutil.rmtree(filled)
    return findings


def _costs(
    engine: Asked,
    size: Size,
    directory: str | None,
    *,
    mode: str,
    window: str,
    keys: int,
    intervals: Sequence[str],
    resume: str | None = None,
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for _ in range(size.repetitions):
        for interval in (NEVER, *intervals):
            run = engine.ask(
                "edge_loads.steady_run",
                rows=size.lot_rows,
                keys=keys,
                batch_rows=size.batch_rows,
                parallelism=CORES,
                interval=interval,
                mode=mode,
                window=window,
                warm_seconds=size.warm_seconds,
                seconds=size.steady_seconds,
                directory=directory,
                resume=resume,
            )
            found.setdefault(interval, []).append(run)
    return found


def _cost_findings(case: str, runs: Mapping[str, Sequence[Any]], *, target: Any) -> list[Finding]:
    without = [run["rows_per_s"] for run in runs[NEVER]]
    findings = []
    for interval, found in runs.items():
        if interval == NEVER:
            continue
        costs = [100 * (1 - run["rows_per_s"] / base) for run, base in zip(found, without, strict=True)]
        took_ms = middle(run["last_checkpoint"].get("took_us", 0) for run in found) / 1000
        size_mb = middle(run["last_checkpoint"].get("size_bytes", 0) for run in found) / 1e6
        findings.append(
            Finding(
                section="checkpoint_cost",
                case=f"{case}, every {interval}",
                measured=middle(costs),
                unit="% of throughput",
                target=target,
                note=(
                    f"{number(middle(run['rows_per_s'] for run in found) / 1e6)} of {number(middle(without) / 1e6)} M rows/s without "
                    f"({spread(costs)}); {middle(run['checkpoints'] for run in found):.0f} checkpoints, "
                    f"the last {number(took_ms)} ms, {number(size_mb)} MB"
                ),
                details={
                    "without": without,
                    "with": [run["rows_per_s"] for run in found],
                    "last": [run["last_checkpoint"] for run in found],
                },
            )
        )
    return findings
