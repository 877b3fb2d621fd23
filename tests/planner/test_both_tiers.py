"""Both halves over a real hub: results are those of one machine that has all the rows, pushed down or not (rule 10)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.edge.runs import START, same_rows
from tests.hub.running import running_hub

from fordstone import Pipeline, Stream, session, sliding, tumbling
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.edge.run import run
from fordstone.epochs.run_file import decode_run
from fordstone.errors import SourceError
from fordstone.hub.client.client import HubClient
from fordstone.plan.plan import Session, Sliding
from fordstone.planner.split import placed, split

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "note": "string"}
AGGREGATES = {
    "n": "count(*)", "s": "sum(x)", "top": "max(x)", "first": "first(x)", "different": "count_distinct(x)", "mid": "median(x)",
    "every": "collect(x)", "exact": "count(DISTINCT x)", "at_top": "max_by(k, x)",
}  # fmt: skip
NODES = {"north": 1, "south": 2}
"""And what their rows are made of."""
Row = tuple[Any, ...]
Build = Callable[[Stream], Stream]


def some_rows(seed: int, count: int = 80) -> list[Row]:
    rng = Random(seed)
    return [
        (rng.choice("abc"), START + timedelta(seconds=at // 2), float(rng.randint(-9, 9)), "wide " * 9)
        for at in range(count)
    ]


def declared(pipeline: Pipeline, *partitions: list[Row]) -> Stream:
    source = memory(MemorySource(partitions))
    return pipeline.source("rows", source, schema=SCHEMA, time="ts", lateness="3s")


def in_two_tiers(build: Build, folder: Path, *, raw: bool = False, below: Build = lambda stream: stream) -> MemorySink:
    """Two nodes send, one after the other; then the center takes all there is.

    `raw`: somebody else reads the rows at the center, so that nothing is pushed down. `below`: what stands before the cut.
    """
    found = MemorySink()
    with running_hub(folder / "hub") as hub:
        for node, seed in NODES.items():
            pipeline = Pipeline("fleet")
            cut = below(declared(pipeline, some_rows(seed))).to_center(name="cut")
            build(cut).sink("out", memory(found))
            if raw:
                cut.sink("raw", memory(MemorySink()))
            tiers = split(pipeline.plan())
            edge = placed(tiers.edge, hub)
            run(edge, {}, state=folder / "state", node=node, bounded=True, parallelism=2, interval="5ms", hub=hub)
        assert tiers.center is not None
        assert not (raw and tiers.crossings[0].partial)
        center = placed(tiers.center, hub)
        run(center, {}, state=folder / "state", node="center", bounded=True, interval="5ms", parallelism=2)
    return found


def on_one_machine(build: Build, folder: Path) -> MemorySink:
    found = MemorySink()
    pipeline = Pipeline("fleet")
    build(declared(pipeline, *map(some_rows, NODES.values()))).sink("out", memory(found))
    pipeline.run(state=folder / "one", bounded=True)
    return found


def windowed(window: Any, *keys: str) -> Build:
    def build(stream: Stream) -> Stream:
        warm = stream.filter("x > -5").with_columns("x * 2 AS x")
        return warm.group_by(*keys).window(window, early="1s").agg(name="sums", **AGGREGATES).final()

    return build


WINDOWS: dict[str, Build] = {
    "tumbling": windowed(tumbling("10s"), "k"),
    "sliding": windowed(sliding("10s", every="4s"), "k"),
    "gaps": windowed(sliding("3s", every="10s"), "k"),
    "without keys": windowed(tumbling("7s")),
}


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("raw", [False, True], ids=["pushed down", "rows"])
def test_windows_are_those_of_all_rows_on_one_machine(kind: str, raw: bool, tmp_path: Path) -> None:
    wanted = on_one_machine(WINDOWS[kind], tmp_path).rows()
    assert wanted.height > 5
    same_rows(in_two_tiers(WINDOWS[kind], tmp_path, raw=raw).rows(), wanted)


@pytest.mark.parametrize("raw", [False, True], ids=["pushed down", "rows"])
def test_running_results_end_as_those_on_one_machine(raw: bool, tmp_path: Path) -> None:
    def build(stream: Stream) -> Stream:
        return stream.select("k", "x", "ts").group_by("k").agg(name="sums", **AGGREGATES)

    def last(sink: MemorySink) -> Any:
        return sink.rows().unique("k", keep="last", maintain_order=True).drop("__op", strict=False)

    same_rows(last(in_two_tiers(build, tmp_path, raw=raw)), last(on_one_machine(build, tmp_path)))


def test_columns_that_stay_at_the_edge_change_no_result(tmp_path: Path) -> None:
    def build(stream: Stream) -> Stream:
        return stream.group_by("k").window(session("2s")).agg(name="sums", n="count(*)", top="max(x)")

    wanted = on_one_machine(build, tmp_path).rows()
    found = in_two_tiers(build, tmp_path).rows()
    assert wanted.height > 5
    same_rows(found, wanted)


@pytest.mark.parametrize("raw", [False, True], ids=["pushed down", "rows"])
def test_windows_of_windows_hold_those_that_lie_in_them_on_both_sides_of_the_cut(raw: bool, tmp_path: Path) -> None:
    def small(stream: Stream) -> Stream:
        # A key of its own for each node's windows: the center has more than one of each.
        return stream.group_by("k", "note").window(tumbling("2s")).agg(name="small", n="count(*)")

    def large(stream: Stream) -> Stream:
        return stream.group_by("k").window(tumbling("10s"), early="1s").agg(name="large", n="sum(n)").final()

    wanted = on_one_machine(lambda stream: large(small(stream)), tmp_path).rows()
    assert wanted.height > 5
    same_rows(in_two_tiers(large, tmp_path, raw=raw, below=small).rows(), wanted)


CHANGES: dict[str, tuple[Build, Build]] = {
    "another column": (
        lambda rows: rows.group_by("k").window(tumbling("10s")).agg(name="sums", s="sum(x)"),
        lambda rows: rows.group_by("k").window(tumbling("10s")).agg(name="sums", s="sum(x * 2)"),
    ),
    "another window": (
        lambda rows: rows.group_by("k").window(tumbling("10s")).agg(name="sums", s="sum(x)"),
        lambda rows: rows.group_by("k").window(tumbling("20s")).agg(name="sums", s="sum(x)"),
    ),
    "another order": (
        lambda rows: rows.group_by("k").agg(name="sums", low="min(x)", s="min(x * 2)"),
        lambda rows: rows.group_by("k").agg(name="sums", s="min(x * 2)", low="min(x)"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_partial_rows_of_another_version_of_an_aggregate_are_refused_rather_than_merged(
    change: str, tmp_path: Path
) -> None:
    old, new = CHANGES[change]
    found = MemorySink()

    def halves(build: Build) -> Any:
        pipeline = Pipeline("fleet")
        build(declared(pipeline, some_rows(1)).to_center(name="cut")).sink("out", memory(found))
        return split(pipeline.plan())

    with running_hub(tmp_path / "hub") as hub:
        run(placed(halves(old).edge, hub), {}, state=tmp_path / "state", node="north", bounded=True, hub=hub)
        with pytest.raises(SourceError, match=r"epoch 1 of node north.*same version of the pipeline"):
            run(placed(halves(new).center, hub), {}, state=tmp_path / "state", node="center", bounded=True)
    assert found.rows().is_empty()


@pytest.mark.parametrize(
    "window", [tumbling("10s"), sliding("3s", every="10s"), sliding("10s", every="5s"), session("1s")]
)
def test_of_windows_that_close_together_a_control_table_has_the_newest_of_each_key(window: Any, tmp_path: Path) -> None:
    keys = [f"device {number}" for number in range(30)]
    # A silence after every other row: a session ends there.
    sent = [(key, START + timedelta(seconds=2 * at), float(at), "") for at in range(40) for key in keys]
    pipeline = Pipeline("fleet")
    pipeline.control("newest", schema={"k": "string", "x": "double"}, key="k")
    results = declared(pipeline, sent).to_center(name="cut").group_by("k").window(window).agg(x="max(x)")
    last = results if isinstance(window, Session) else results.final()
    last.select("k", "x").to_edges("newest")
    tiers = split(pipeline.plan())
    assert tiers.center is not None
    with running_hub(tmp_path / "hub") as hub:
        run(placed(tiers.edge, hub), {}, state=tmp_path / "state", node="north", bounded=True, hub=hub)
        run(placed(tiers.center, hub), {}, state=tmp_path / "state", node="center", bounded=True, parallelism=2)
        client = HubClient(hub)
        (version,) = client.control_page("fleet", "newest").versions
        table = decode_run(client.read_blob(version.blob), version.blob)
    newest = 36.0 if isinstance(window, Sliding) and window.size_us < window.slide_us else 39.0
    assert sorted(table.get_column("k")) == sorted(keys)
    assert set(table.get_column("x")) == {newest}
