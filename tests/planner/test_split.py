"""A plan for two tiers becomes two ordinary plans, and nothing is lost between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.fleets import SCHEMA, above, cold_chain, names, sunk, tiers_of

from fordstone import Pipeline, Stream, session, tumbling
from fordstone.connectors import files
from fordstone.errors import PipelineError
from fordstone.hub.client.address import HubAddress
from fordstone.plan import plan as p
from fordstone.plan.ids import checked_name
from fordstone.plan.plan import read_plan
from fordstone.planner.check import stream_types
from fordstone.planner.split import placed, split


def test_a_plan_without_a_cut_is_all_edge():
    pipeline = Pipeline("edge-only")
    sunk(pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA).filter("n > 0"))
    tiers = split(pipeline.plan())
    assert tiers.edge is not None
    assert tiers.edge.to_json() == pipeline.plan().to_json()
    assert tiers.center is None
    assert tiers.crossings == ()


def test_the_cold_chain_alarms_at_the_edge_and_merges_at_the_center():
    tiers = split(cold_chain().plan())
    assert names(tiers.edge) == [
        "readings", "thresholds", "filter", "join_control", "filter_2", "alarms", "agg_device_partials", "readings_to_center",
    ]  # fmt: skip
    assert names(tiers.center) == ["readings_to_center", "agg_device", "per_device", "select", "thresholds_to_edges"]
    (crossing,) = tiers.crossings
    assert crossing.partial
    assert crossing.pushed.aggregate is not None
    assert crossing.pushed.aggregate.name == "agg_device"
    assert list(crossing.schema) == ["device", "__end", "__rows_5d88c63a", "__n0", "__s0", "__hi0"]


def test_where_the_tiers_meet_stand_sources_and_sinks():
    tiers = split(cold_chain().plan())
    assert tiers.center is not None
    assert not tiers.edge.tiered
    assert not tiers.center.tiered
    sink, source = tiers.edge.step("readings_to_center"), tiers.center.step("readings_to_center")
    assert isinstance(sink, p.Sink)
    assert sink.connector == p.ConnectorSpec("center", {"stream": "readings_to_center", "offline_us": 86_400_000_000})
    assert isinstance(source, p.Source)
    assert source.connector == p.ConnectorSpec("hub", {"pipeline": "cold-chain", "stream": "readings_to_center"})
    assert source.declares_time
    assert source.time is None  # partial rows have none
    assert source.idle_after_us == 24 * 3600 * 1_000_000
    assert source.lateness_us == 0
    table, publisher = tiers.edge.step("thresholds"), tiers.center.step("thresholds_to_edges")
    assert isinstance(table, p.Source)
    assert table.connector == p.ConnectorSpec("control", {"control": "thresholds", "keys": ["device"]})
    assert table.replaces == ("device",)
    assert isinstance(publisher, p.Sink)
    assert publisher.connector.options == {"pipeline": "cold-chain", "control": "thresholds", "keys": ["device"]}


def test_both_halves_are_judged_and_can_be_stored():
    tiers = split(cold_chain().plan())
    for half in (tiers.edge, tiers.center):
        assert half is not None
        assert read_plan(half.to_json()) == half
        stream_types(half)
    assert split(cold_chain().plan()) == tiers


def test_guarantee_and_mode_are_those_of_the_pipeline():
    pipeline = Pipeline("fleet", guarantee="at_least_once", mode="blocking")
    sunk(pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA).to_center())
    tiers = split(pipeline.plan())
    assert tiers.center is not None
    for half in (tiers.edge, tiers.center):
        assert (half.pipeline, half.guarantee, half.mode) == ("fleet", "at_least_once", "blocking")


def test_an_edge_of_nothing_but_a_source_and_a_cut_is_fine():
    tiers = tiers_of(sunk)
    assert names(tiers.edge) == ["rows", "cut"]
    assert names(tiers.center) == ["cut", "out"]
    source = tiers.center.step("cut")  # type: ignore[union-attr]  # seen above
    assert isinstance(source, p.Source)
    assert (source.time, source.schema) == ("ts", SCHEMA)


def test_two_cuts_of_one_stream_cross_apart():
    pipeline = Pipeline("fleet")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts")
    sunk(stream.to_center(name="raw", offline="1h"), "all")
    sunk(stream.to_center(name="sums").group_by("device").agg(n="count(*)", name="counts"), "some")
    tiers = split(pipeline.plan())
    assert names(tiers.edge) == ["rows", "raw", "counts_partials", "sums"]
    assert names(tiers.center) == ["raw", "all", "sums", "counts", "some"]
    assert [crossing.partial for crossing in tiers.crossings] == [False, True]
    assert [step.idle_after_us for step in tiers.center.steps if isinstance(step, p.Source)] == [  # type: ignore[union-attr]  # seen above
        3600 * 1_000_000, 24 * 3600 * 1_000_000,
    ]  # fmt: skip


def test_what_moves_below_keeps_its_name_and_its_order():
    def build(stream):
        moved = stream.filter("temp > 0", name="warm").with_columns("temp * 2 AS twice", name="double")
        sunk(moved.group_by("device").agg(top="max(twice)", name="tops"))

    tiers = tiers_of(build)
    assert names(tiers.edge) == ["rows", "warm", "double", "tops_partials", "cut"]
    assert [str(step.inputs[0]) for step in tiers.edge.steps[1:]] == ["rows", "warm", "double", "tops_partials"]
    assert names(tiers.center) == ["cut", "tops", "out"]
    assert [str(step.inputs[0]) for step in tiers.center.steps[1:]] == ["cut", "tops"]  # type: ignore[union-attr]  # seen above


def test_who_read_what_moved_reads_what_crosses():
    def build(stream):
        warm = stream.filter("temp > 0", name="warm")
        sunk(warm, "one")
        other = stream.pipeline.source("more", files("more/*.jsonl"), schema=SCHEMA, time="ts").to_center(name="cut_2")
        sunk(warm.union(other), "both")

    tiers = tiers_of(build)
    assert names(tiers.edge) == ["rows", "warm", "cut", "more", "cut_2"]
    union = tiers.center.step("union")  # type: ignore[union-attr]  # there is one
    assert [str(stream) for stream in union.inputs] == ["cut", "cut_2"]


def test_rows_of_windows_below_keep_their_last_instant_as_time_when_they_cross():
    pipeline = Pipeline("fleet")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts")
    small = stream.group_by("device").window(tumbling("1s")).agg(top="max(temp)", name="small")
    crossed = small.to_center(name="cut")
    sunk(crossed, "small_out")
    sunk(crossed.group_by("device").window(tumbling("10s")).agg(top="max(top)", name="large").final(), "large_out")
    tiers = split(pipeline.plan())
    assert tiers.center is not None
    source = tiers.center.step("cut")
    assert isinstance(source, p.Source)
    assert (source.time, source.shift_us) == ("window_end", -1)
    assert stream_types(tiers.center)[p.Input("cut")].time == stream_types(pipeline.plan())[p.Input("cut")].time


def test_partial_rows_of_rows_of_windows_keep_the_shift_too():
    pipeline = Pipeline("fleet")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts")
    small = stream.group_by("device").window(tumbling("1s")).agg(top="max(temp)", name="small").to_center(name="cut")
    sunk(small.group_by("device").window(tumbling("10s")).agg(top="max(top)", name="large").final())
    step = split(pipeline.plan()).center.step("large")  # type: ignore[union-attr]  # there is one
    assert isinstance(step, p.Aggregate)
    assert step.merges == p.RowsBelow(
        schema={"device": "string", "window_start": "timestamp", "window_end": "timestamp", "top": "double"},
        time="window_end",
        shift_us=-1,
    )


def test_a_control_table_that_no_node_reads_is_not_fetched_and_still_written():
    def build(stream):
        stream.pipeline.control("limits", schema={"device": "string", "top": "double"}, key="device")
        stream.group_by("device").agg(top="max(temp)").to_edges("limits")

    tiers = tiers_of(build)
    assert names(tiers.edge) == ["rows", "agg_device_partials", "cut"]
    assert names(tiers.center) == ["cut", "agg_device", "limits_to_edges"]


def test_a_control_table_that_nobody_writes_is_read_all_the_same():
    pipeline = Pipeline("fleet")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA)
    limits = pipeline.control("limits", schema={"device": "string", "top": "double"}, key="device")
    sunk(stream.join_control(limits, on="device"))
    tiers = split(pipeline.plan())
    assert names(tiers.edge) == ["rows", "limits", "join_control", "out"]
    assert tiers.center is None


def test_a_stream_that_nobody_reads_at_the_center_ends_at_the_hub():
    pipeline = Pipeline("fleet")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA)
    stream.to_center(name="cut")
    sunk(stream)
    tiers = split(pipeline.plan())
    assert names(tiers.edge) == ["rows", "cut", "out"]
    assert tiers.center is None
    assert list(tiers.crossings[0].schema) == list(SCHEMA)
    assert "nothing of this pipeline reads cut" in tiers.crossings[0].pushed.reason


def test_new_steps_get_names_that_nobody_has():
    def build(stream):
        sunk(stream.group_by("device").agg(n="count(*)", name="sums"), "sums_partials")

    assert names(tiers_of(build).edge) == ["rows", "sums_partials_2", "cut"]


def test_names_of_new_steps_stay_within_the_bound_of_names():
    long = "s" * 100

    def build(stream):
        sunk(stream.group_by("device").agg(n="count(*)", name=long))

    for name in names(tiers_of(build).edge):
        assert checked_name(name, "step") == name


ROW_WISE: list[Callable[[Stream], Stream]] = [
    lambda stream: stream.filter("temp > 0"),
    lambda stream: stream.with_columns("temp + n AS temp"),
    lambda stream: stream.with_columns("n AS m", "upper(note) AS note"),
    lambda stream: stream.select("device", "ts", "temp", "n", "tags", "note"),
    lambda stream: stream.flat_map("tags AS tag"),
]
ENDS: list[Callable[[Stream], Stream]] = [
    lambda stream: stream,
    lambda stream: stream.select("device", "ts"),
    lambda stream: stream.group_by("device").agg(n="count(*)", top="max(temp)"),
    lambda stream: stream.group_by().window(tumbling("5s")).agg(last="last(n)").final(),
    lambda stream: stream.group_by("device").window(session("5s")).agg(n="sum(n)"),
    lambda stream: stream.group_by("device").ewma(alpha=0.5, smooth="temp"),
]


@examples(60)
@given(
    ways=st.lists(
        st.tuples(st.lists(st.sampled_from(ROW_WISE), max_size=4), st.sampled_from(ENDS)), min_size=1, max_size=3
    ),
    cuts=st.integers(1, 2),
)
def test_every_step_of_any_plan_is_in_one_half_and_both_halves_stand(ways, cuts):
    pipeline = Pipeline("fleet")
    source = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts")
    above = [source.to_center(name=f"cut{number}") for number in range(cuts)]
    for number, (steps, end) in enumerate(ways):
        stream = above[number % cuts]
        for step in steps:
            if step is not ROW_WISE[-1] or "tags" in stream.schema:
                stream = stream.select("*") if step is ROW_WISE[3] and "tags" not in stream.schema else step(stream)
        sunk(end(stream), f"out{number}")
    plan = pipeline.plan()
    tiers = split(plan)
    assert tiers.center is not None
    written = {step.name for step in plan.steps}
    new = {step.name for step in tiers.edge.steps} - written
    assert all(name.endswith(("_columns", "_partials")) for name in new)
    both = set(names(tiers.edge)) & set(names(tiers.center))
    read = {step.name for step in plan.steps if isinstance(step, p.ToCenter) and plan.consumers(step.name)}
    assert both == read
    assert set(names(tiers.edge)) | set(names(tiers.center)) == written | new
    for sink in (step for step in plan.steps if isinstance(step, p.Sink)):
        found = tiers.center.step(sink.name)
        assert dict(stream_types(tiers.center)[found.inputs[0]].schema) == dict(stream_types(plan)[sink.input].schema)


def test_a_loop_above_the_cut_reads_what_crosses():
    def build(stream):
        rest = stream.select("device", "n").iterate(
            lambda back: (back.select("device", "n - 1 AS n").filter("n > 0"), back.filter("n <= 1"))
        )
        sunk(rest)

    tiers = tiers_of(build)
    assert names(tiers.edge) == ["rows", "select", "cut"]
    assert str(tiers.center.step("iterate").inputs[0]) == "cut"  # type: ignore[union-attr]  # there is one


def test_a_lookup_at_the_center_reads_its_table_there():
    def build(stream):
        sunk(stream.lookup([{"device": "a", "site": 1}], on="device"))

    tiers = tiers_of(build)
    assert "lookup" in names(tiers.center)
    assert "lookup" not in names(tiers.edge)


def test_a_plan_that_mixes_the_tiers_is_refused():
    plan = above(sunk)
    steps = (*plan.steps, p.Union(name="both", streams=(p.Input("rows"), p.Input("cut"))))
    with pytest.raises(PipelineError, match="is at the center and rows at the edge"):
        split(p.Plan(pipeline="fleet", steps=steps))


def test_placing_says_where_the_hub_is_and_changes_nothing_else():
    tiers = split(cold_chain().plan())
    assert tiers.center is not None
    address = HubAddress(url="https://hub.example:7411", token="fst_secret", ca="-----BEGIN")
    at = {"url": "https://hub.example:7411", "token": "fst_secret", "ca": "-----BEGIN"}
    for half, there in (
        (tiers.edge, {"thresholds", "readings_to_center"}),
        (tiers.center, {"readings_to_center", "thresholds_to_edges"}),
    ):
        found = placed(half, address)
        ends = [step for step in found.steps if isinstance(step, p.Source | p.Sink)]
        assert {step.name for step in ends if step.connector.at == at} == there
        assert found.unplaced() == half
        assert found.digest() == half.digest()


def test_without_push_down_rows_cross_as_they_stand_at_the_cut():
    def build(stream):
        sunk(stream.filter("temp > 0").group_by("device").window(tumbling("1s")).agg(name="tops", top="max(temp)"))

    tiers = split(above(build), push_down=False)
    (crossing,) = tiers.crossings
    assert (list(crossing.schema), crossing.pushed.names, crossing.partial) == (list(SCHEMA), (), False)
    assert crossing.pruned == ()
    assert crossing.pushed.reason == "push-down is switched off"
    assert names(tiers.edge) == ["rows", "cut"]
    assert names(tiers.center) == ["cut", "filter", "tops", "out"]
    assert split(above(build)).crossings[0].partial
