"""Sketches: estimates within their error, the same whatever the order of merging, in bytes that the package reads."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import datasketches  # type: ignore[import-untyped]
import numpy as np
import polars as pl
import pytest
from tests.operators.kll_format import kll_bytes

from fordstone.lang.aggregates import parse_aggregate
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.partial import Partials
from fordstone.operators.aggregate.sketches import compact
from fordstone.plan.stream_type import EventTime

SCHEMA = Schema.of({"k": "int", "ts": "timestamp", "x": "double", "s": "string"})


def partials_of(**texts: str) -> Partials:
    aggregates = [parse_aggregate(text, SCHEMA, name) for name, text in texts.items()]
    return Partials(["k"], aggregates, SCHEMA, time=EventTime(column="ts"))


def frame_of(values: np.ndarray[Any, Any]) -> pl.DataFrame:
    columns = {"k": np.ones(values.size), "ts": np.arange(values.size), "x": values}
    return pl.DataFrame(columns).with_columns(s=pl.col("x").cast(pl.String)).cast(SCHEMA.polars)


def merged(partials: Partials, frame: pl.DataFrame, rng: Random) -> pl.DataFrame:
    """Partial rows of the frame, by batches of any size merged in any order and grouping."""
    frame = frame.sample(fraction=1.0, shuffle=True, seed=rng.randrange(2**32))
    batches = rng.randint(1, 12)
    size = -(-frame.height // batches)
    pieces = [partials.of_rows(frame[at : at + size]) for at in range(0, frame.height, size)]
    while len(pieces) > 1:
        rng.shuffle(pieces)
        count = rng.randint(2, len(pieces))
        pieces = [*pieces[count:], partials.merge(pl.concat(pieces[:count]))]
    return pieces[0]


@pytest.mark.parametrize("lg_k", [7, 12, 14])
@pytest.mark.parametrize("count", [20, 300, 385, 1_000, 20_000])
def test_the_number_of_different_values_is_about_right_and_does_not_depend_on_how_they_came(
    lg_k: int, count: int
) -> None:
    partials = partials_of(x=f"count_distinct(x, {lg_k})", s=f"count_distinct(s, {lg_k})")
    frame = frame_of(np.arange(count, dtype=np.float64))
    found = {
        tuple(partials.finish(merged(partials, pl.concat([frame, frame]), Random(seed))).row(0)[1:])
        for seed in range(6)
    }
    assert len(found) == 1
    # The package's own bound, three deviations of a union.
    error = datasketches.hll_union.get_rel_err(True, True, lg_k, 3)
    for estimate in found.pop():
        assert estimate == pytest.approx(count, rel=abs(error) + 0.01, abs=1)


def test_the_state_of_count_distinct_is_a_sketch_that_the_package_reads() -> None:
    partials = partials_of(s="count_distinct(s)")
    state = merged(partials, frame_of(np.arange(100, dtype=np.float64)), Random(1))
    sketch = datasketches.hll_sketch.deserialize(state["__hll12_0"][0])
    assert sketch.lg_config_k == 12
    assert round(sketch.get_estimate()) == 100
    by_hand = datasketches.hll_sketch(12)
    for value in range(100):
        by_hand.update(f"{float(value)}")
    union = datasketches.hll_union(12)
    union.update(sketch)
    union.update(by_hand)
    assert round(union.get_estimate()) == 100


@pytest.mark.parametrize("shape", ["uniform", "normal", "few", "rising", "heavy"])
def test_quantiles_of_many_values_lie_within_the_rank_error(shape: str) -> None:
    rng = np.random.default_rng(7)
    values = {
        "uniform": rng.uniform(-1, 1, 30_000),
        "normal": rng.normal(0, 1, 30_000),
        "few": rng.integers(0, 5, 30_000).astype(np.float64),
        "rising": np.arange(30_000, dtype=np.float64),
        "heavy": np.exp(rng.normal(0, 20, 30_000)),
    }[shape]
    shares = (0.01, 0.25, 0.5, 0.9, 0.99)
    partials = partials_of(
        **{f"q{at}": f"quantile(x, {q})" for at, q in enumerate(shares)}, lo="quantile(x, 0)", hi="quantile(x, 1)"
    )
    ordered, error = np.sort(values), datasketches.kll_doubles_sketch.get_normalized_rank_error(200, False)
    for seed in range(8):
        state = merged(partials, frame_of(values), Random(seed))
        assert state["__kll200_values0"].list.len()[0] <= 700
        row = partials.finish(state).row(0, named=True)
        for at, q in enumerate(shares):
            least, most = (np.searchsorted(ordered, row[f"q{at}"], side) / values.size for side in ("left", "right"))
            assert least - 2 * error <= q <= most + 2 * error, (q, row)
        assert (row["lo"], row["hi"]) == (ordered[0], ordered[-1])


def test_a_larger_k_is_closer() -> None:
    values = np.random.default_rng(3).permutation(np.arange(50_000, dtype=np.float64))
    partials = partials_of(small="quantile(x, 0.5, 20)", large="quantile(x, 0.5, 2000)")
    rows = [partials.finish(merged(partials, frame_of(values), Random(seed))).row(0, named=True) for seed in range(8)]
    off = {name: math.fsum(abs(row[name] - 25_000) for row in rows) for name in ("small", "large")}
    assert off["large"] < off["small"] / 5


def test_the_same_parts_in_another_order_are_the_same_sketch() -> None:
    rng = np.random.default_rng(5)
    partials = partials_of(q="quantile(x, 0.3)")
    pieces = [partials.of_rows(frame_of(rng.normal(size=1_000))) for _ in range(9)]
    one = partials.merge(pl.concat(pieces))
    assert one.equals(partials.merge(pl.concat(pieces[::-1])))


@pytest.mark.parametrize("count", [1, 2, 7, 20, 21, 50, 1_000, 40_000])
@pytest.mark.parametrize("k", [8, 20, 200])
def test_a_quantile_sketch_is_written_as_the_package_reads_it(count: int, k: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    items, levels = compact(values, np.zeros(count, dtype=np.uint8), k)
    assert int((1 << levels.astype(np.int64)).sum()) == count
    found = datasketches.kll_doubles_sketch.deserialize(
        kll_bytes(items, levels, k, least=values.min(), greatest=values.max())
    )
    assert (found.n, found.k, found.num_retained) == (count, k, items.size)
    assert (found.get_min_value(), found.get_max_value()) == (values.min(), values.max())
    weights = 1 << levels.astype(np.int64)
    for value in items[:: max(items.size // 50, 1)]:
        assert found.get_rank(value, True) == pytest.approx(weights[items <= value].sum() / count)
    other = datasketches.kll_doubles_sketch(k)
    other.update(values)
    found.merge(other)  # it goes on from there
    assert found.n == 2 * count


def test_the_package_is_not_loaded_where_no_sketch_is_made() -> None:
    import subprocess
    import sys

    code = "import sys, fordstone.operators.registry; print('_datasketches' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
