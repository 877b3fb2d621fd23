"""What goes below the cut, and the words for what does not."""

from __future__ import annotations

import pytest
from tests.planner.fleets import SCHEMA, above, crossing_of, names, sunk, tiers_of

from fordstone import KeyedFunction, Pattern, Pipeline, by_count, session, sliding, tumbling
from fordstone.connectors import files
from fordstone.operators.aggregate import running as combine
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.planner.split import columns_read, split


def grouped(stream, window=None):
    keyed = stream.group_by("device")
    return keyed if window is None else keyed.window(window)


@pytest.mark.parametrize(
    "window", [None, tumbling("10s"), sliding("10s", every="2s"), sliding("2s", every="10s"), sliding("7s", every="3s")]
)
def test_aggregates_over_rows_cross_as_partial_rows(window):
    crossing = crossing_of(lambda stream: sunk(grouped(stream, window).agg(n="count(*)", name="sums")))
    assert crossing.partial
    assert crossing.pushed.aggregate is not None
    assert crossing.pushed.aggregate.name == "sums"
    assert ("__end" in crossing.schema) == (window is not None)


def test_row_wise_steps_before_an_aggregate_go_below_with_it():
    def build(stream):
        moved = (
            stream.filter("temp > 0")
            .flat_map("tags AS tag")
            .select("tag", "temp", "ts")
            .with_columns("temp + 1 AS more")
        )
        sunk(moved.group_by("tag").window(tumbling("1s")).agg(top="max(more)"))

    crossing = crossing_of(build)
    assert crossing.pushed.names == ("filter", "flat_map", "select", "with_columns")
    assert crossing.partial


def test_filters_and_narrower_projections_go_below_without_an_aggregate_too():
    def build(stream):
        sunk(stream.filter("temp > 0").with_columns("temp * 2 AS twice").filter("twice > 9").select("device", "twice"))

    crossing = crossing_of(build)
    assert crossing.pushed.names == ("filter", "with_columns", "filter_2", "select")
    assert not crossing.partial
    assert list(crossing.schema) == ["device", "twice"]
    assert crossing.pushed.reason == "out writes the rows themselves"


def test_what_would_only_make_rows_wider_stays_above():
    crossing = crossing_of(lambda stream: sunk(stream.filter("n > 0").with_columns("temp * 2 AS twice")))
    assert crossing.pushed.names == ("filter",)
    assert crossing.pushed.reason == "with_columns would only make rows wider, and out writes the rows themselves"


def test_what_makes_several_rows_of_one_stays_above_where_no_aggregate_follows():
    crossing = crossing_of(lambda stream: sunk(stream.filter("n > 0").flat_map("tags AS tag").filter("tag = 'x'")))
    assert crossing.pushed.names == ("filter",)
    assert crossing.pushed.reason == "flat_map makes several rows of one, and out writes the rows themselves"


def late_reader(stream):
    sums = grouped(stream, tumbling("1s")).agg(n="count(*)", name="sums")
    sunk(sums.final())
    sunk(sums.late, "late")


def several(stream):
    sunk(grouped(stream).agg(n="count(*)", name="sums"))
    sunk(stream, "raw")


def joined(stream):
    other = stream.pipeline.source("more", files("more/*.jsonl"), schema=SCHEMA, time="ts").to_center(name="cut_2")
    sunk(stream.join(other, on="device", between=("0s", "5s")))


def united(stream):
    other = stream.pipeline.source("more", files("more/*.jsonl"), schema=SCHEMA, time="ts").to_center(name="cut_2")
    sunk(stream.union(other).group_by("device").agg(n="count(*)"))


def as_is(record):
    return record


class Own(KeyedFunction):
    """Gives every row back."""

    def process(self, row, ctx):
        yield row


STAYS = {
    "session": (
        lambda stream: sunk(grouped(stream, session("5s")).agg(n="count(*)", name="sums")),
        "the sessions of sums need the rows themselves: where one ends is known only over all nodes",
    ),
    "count window": (
        lambda stream: sunk(grouped(stream, by_count(5)).agg(n="count(*)", name="sums")),
        "the windows of sums count rows in order of time, over all nodes",
    ),
    "late reader": (late_reader, "late rows of sums are wanted as they came"),
    "several": (several, "cut is read by sums, raw, and each needs the rows"),
    "ewma": (
        lambda stream: sunk(grouped(stream).ewma(alpha=0.5, smooth="temp", name="smooth")),
        "smooth takes rows in order of time, over all nodes",
    ),
    "deduplicate": (
        lambda stream: sunk(stream.deduplicate("device", within="5s", name="once")),
        "once drops what another node may have sent before",
    ),
    "function": (
        lambda stream: sunk(stream.map(as_is, schema=SCHEMA, name="own")),
        "own is a user function, which may depend on where it runs",
    ),
    "process": (
        lambda stream: sunk(grouped(stream).process(Own, name="own")),
        "own is a user function with state by key, over the rows of all nodes",
    ),
    "join": (joined, "join joins rows that other nodes may have"),
    "union": (united, "union unites it with other streams"),
    "lookup": (
        lambda stream: sunk(stream.lookup([{"device": "a", "site": 1}], on="device", name="sites")),
        "sites reads a table at the center",
    ),
    "sink": (sunk, "out writes the rows themselves"),
}


@pytest.mark.parametrize("kind", STAYS)
def test_what_stays_says_why(kind):
    build, reason = STAYS[kind]
    crossing = split(above(build)).crossings[0]
    assert crossing.pushed.reason == reason
    assert crossing.pushed.names == ()
    assert not crossing.partial
    assert crossing.pushed.aggregate is None


def test_a_pattern_stays():
    def build(stream):
        found = Pattern("rise").start("a", "temp > 0").then("b", "temp > a.temp").within("5s")
        sunk(stream.group_by("device").match(found, measures={"low": "a.temp"}))

    assert crossing_of(build).pushed.reason == "the pattern match_device takes rows in order of time, over all nodes"


def test_a_partial_row_that_has_no_type_of_ours_does_not_cross(monkeypatch):
    monkeypatch.setattr(combine, "_signed", lambda kind: kind)
    crossing = crossing_of(lambda stream: sunk(grouped(stream).agg(mid="median(temp)", name="mids")))
    assert not crossing.partial
    assert crossing.pushed.reason.startswith("partial rows of mids cannot cross: Polars type UInt8")
    # Then at least the columns that no step reads stay at the edge.
    assert list(crossing.schema) == ["device", "ts", "temp"]


# Columns that nobody reads.


def test_columns_that_nobody_reads_do_not_cross():
    tiers = tiers_of(lambda stream: sunk(grouped(stream, session("5s")).agg(top="max(temp)")))
    (crossing,) = tiers.crossings
    assert list(crossing.schema) == ["device", "ts", "temp"]
    assert crossing.pruned == ("n", "tags", "note")
    assert names(tiers.edge) == ["rows", "cut_columns", "cut"]
    step = tiers.edge.step("cut_columns")
    assert isinstance(step, p.Select)
    assert step.columns == ("device", "ts", "temp")


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (several, list(SCHEMA)),
        (late_reader, list(SCHEMA)),
        (lambda stream: sunk(stream.map(as_is, schema=SCHEMA)), list(SCHEMA)),
        (united, list(SCHEMA)),
        (
            lambda stream: (
                sunk(stream.select("n + 1 AS m"), "a"),
                sunk(stream.filter("temp > 0").select("note"), "b"),
            ),
            ["ts", "temp", "n", "note"],
        ),
        (
            lambda stream: (
                sunk(stream.with_columns("n + 1 AS n", "temp AS t").select("n", "t"), "a"),
                sunk(stream.select("device"), "b"),
            ),
            ["device", "ts", "temp", "n"],
        ),
        (
            lambda stream: (sunk(stream.flat_map("tags AS tag").select("tag"), "a"), sunk(stream.select("n"), "b")),
            ["ts", "n", "tags"],
        ),
        (
            lambda stream: (
                sunk(stream.with_columns("n AS temp", "n + length(note) AS n").select("temp"), "a"),
                sunk(stream.select("1 AS one"), "b"),
            ),
            ["ts", "n", "note"],
        ),
        (lambda stream: (sunk(stream.select("*"), "a"), sunk(stream.select("n"), "b")), list(SCHEMA)),
        (
            lambda stream: (
                sunk(grouped(stream, session("1s")).agg(top="max(temp + n)"), "a"),
                sunk(stream.group_by("note").agg(n="count(*)"), "b"),
            ),
            ["device", "ts", "temp", "n", "note"],
        ),
    ],
)
def test_what_crosses_is_what_somebody_reads_and_the_time(build, wanted):
    plan = above(build)
    assert list(columns_read(plan, stream_types(plan), p.Input("cut"))) == wanted
    assert list(split(plan).crossings[0].schema) == wanted


def test_names_that_are_no_words_are_quoted_where_columns_are_picked():
    pipeline = Pipeline("fleet")
    stream = pipeline.source(
        "rows", files("in/*.jsonl"), schema={"select": "string", "a b`c": "int", "z": "int"}
    ).to_center()
    sunk(stream.select("`a b``c` AS x"), "a")
    sunk(stream.select("`select`"), "b")
    assert list(split(pipeline.plan()).crossings[0].schema) == ["select", "a b`c"]


def test_a_stream_of_which_nothing_is_read_keeps_a_column_to_count_by():
    pipeline = Pipeline("fleet")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema={"a": "string", "b": "int"}).to_center()
    sunk(stream.select("1 AS one"), "a")
    sunk(stream.select("2 AS two"), "b")
    assert list(split(pipeline.plan()).crossings[0].schema) == ["a"]


@pytest.mark.parametrize("build", [build for build, _ in STAYS.values()])
def test_what_stays_at_the_center_looks_there_as_it_was_written(build):
    plan = above(build)
    center = split(plan).center
    assert center is not None
    written = stream_types(plan)
    for at, found in stream_types(center).items():
        assert (found.time, found.upsert_key) == (written[at].time, written[at].upsert_key)
        assert set(found.schema.items()) <= set(written[at].schema.items())
    for step in center.steps:
        if isinstance(step, p.Sink):
            assert dict(stream_types(center)[step.input].schema) == dict(written[step.input].schema)
