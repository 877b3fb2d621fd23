"""An epoch that is computed again: what may differ, and what may not."""

from __future__ import annotations

import polars as pl
import pytest

from fordstone import Pipeline, tumbling
from fordstone.connectors import memory
from fordstone.edge.engine.replay import extra_rows, nondeterministic_sinks
from fordstone.epochs.manifest import Cut, Segment
from fordstone.errors import ReplayError
from fordstone.planner.check import stream_types
from fordstone.state.base import RunRef

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}
ONE_ROW = Cut(epoch=3, sources={}, segments=(Segment("out", (RunRef(digest="a", size_bytes=1, rows=1),)),))


def test_only_sinks_after_a_sketch_that_depends_on_batches_vary():
    pipeline = Pipeline("p")
    rows = pipeline.source("s", memory([]), schema=SCHEMA, time="ts")
    windows = rows.group_by("k").window(tumbling("1m"))
    windows.agg(m="median(x)", name="sketched").filter("m > 1").sink("medians", memory([]))
    windows.agg(m="avg(x)", d="count_distinct(x)", name="summed").sink("means", memory([]))
    plan = pipeline.plan()
    assert nondeterministic_sinks(plan, stream_types(plan)) == {"medians"}


def test_other_values_are_taken_where_they_may_vary_but_not_fewer_or_more_rows():
    sealed, again = pl.DataFrame({"m": [1.0]}), pl.DataFrame({"m": [1.5]})
    assert extra_rows(ONE_ROW, "out", [sealed], [again], nondeterministic=True) == []
    with pytest.raises(ReplayError, match="are missing in the replay"):
        extra_rows(ONE_ROW, "out", [sealed], [again])
    with pytest.raises(ReplayError, match="1 rows were sealed, and the replay gave 2"):
        extra_rows(ONE_ROW, "out", [sealed], [pl.concat([again, again])], nondeterministic=True)


def test_a_mismatch_can_be_shown_with_a_time_that_python_has_not():
    sealed, again = (pl.DataFrame({"ts": [us]}).cast(pl.Datetime("us", "UTC")) for us in (2**62, 2**62 + 1))
    with pytest.raises(ReplayError, match=rf"missing in the replay, such as {{'ts': {2**62}}}"):
        extra_rows(ONE_ROW, "out", [sealed], [again])


def test_dead_letters_beyond_those_sealed_keep_their_positions():
    sink = "dead-letters/decode"
    overtaking = Cut(epoch=3, sources={}, segments=ONE_ROW.segments, overtaking=True)
    columns = {
        "partition": "a",
        "position": [0, 5, 9],
        "step": "decode",
        "reason": "ValueError",
        "text": ["x", "y", "y"],
    }
    letters = pl.DataFrame(columns)
    assert extra_rows(overtaking, sink, [letters[1:2]], [letters])[0].rows() == letters[[0, 2]].rows()
    # That of a sealed one may be another.
    moved = letters[1:].with_columns(position=pl.Series([7, 9]))
    assert extra_rows(overtaking, sink, [letters[1:]], [moved]) == []
    assert extra_rows(overtaking, sink, [letters[2:]], [moved])[0].rows() == moved[:1].rows()
