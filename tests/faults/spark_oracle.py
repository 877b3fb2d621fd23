"""What must come of the input on Spark, beside what `oracle` says: EWMA, and what stands in Delta tables. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
from tests.faults.oracle import EPOCH, Row, _same, expect, judge
from tests.faults.spark_job import ALPHA


def smoothed(written: Mapping[str, Sequence[Row]]) -> dict[int, tuple[Row, float]]:
    """By id: each row that was not late, with the mean of its key up to it in order of time."""
    wanted = expect(written)
    in_time = sorted((wanted.kept - wanted.below).elements(), key=lambda row: (row[2], row[3], row[0]))
    means: dict[int, float] = {}
    found = {}
    for row in in_time:
        id_, k, _, n = row
        means[k] = n if k not in means else ALPHA * n + (1 - ALPHA) * means[k]
        found[id_] = (row, float(means[k]))
    return found


def judge_spark(folder: Path, written: Mapping[str, Sequence[Row]]) -> None:
    """Read what all sinks hold and compare: nothing lost, nothing doubled, nothing wrong."""
    judge(folder, written)
    wanted = expect(written)
    totals = pl.read_delta(str(folder / "out" / "totals")).select("k", "n", "total", "top").rows()
    assert len(totals) == len(wanted.per_key), f"the table of totals has {len(totals)} rows"
    _same("totals in Delta", {k: (n, total, top) for k, n, total, top in totals}, wanted.per_key)
    means = smoothed(written)
    rows = pl.read_delta(str(folder / "out" / "smooth")).select("id", "k", "ts", "n", "smooth").rows()
    assert len(rows) == len(means), f"the table of means has {len(rows)} rows, wanted are {len(means)}"
    for id_, k, ts, n, mean in rows:
        row, wanted_mean = means[id_]
        assert (id_, k, (ts - EPOCH).total_seconds(), n) == row
        assert math.isclose(mean, wanted_mean, rel_tol=1e-9), f"row {id_}: mean {mean}, wanted {wanted_mean}"
    assert len({row[0] for row in rows}) == len(rows), "a row is twice in the table of means"
