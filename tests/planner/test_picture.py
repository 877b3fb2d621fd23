"""The picture of a pipeline in a notebook, and the short forms of what one looks at there."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from fordstone import Pipeline, Stream, tumbling
from fordstone.connectors import memory
from fordstone.lang.schema import Schema
from fordstone.planner.picture import picture

SVG = "{http://www.w3.org/2000/svg}"


def two_tiers() -> tuple[Pipeline, Stream]:
    pipeline = Pipeline("fleet")
    limits = pipeline.control("limits", schema={"box": "string", "top": "double"}, key="box")
    readings = pipeline.source("readings", memory([{"box": "a", "temp": 1.0}]))
    readings.to_center().group_by("box").agg(top="max(temp)").to_edges(limits)
    readings.join_control(limits, on="box").filter("box <> '<i>' AND temp < top").sink("hot", print)
    return pipeline, readings


def drawn(html: str) -> ET.Element:
    return ET.fromstring(html)


def names(tree: ET.Element) -> list[str]:
    return [text.text or "" for text in tree.iter(f"{SVG}text") if text.get("font-weight") == "bold"]


def boxes(tree: ET.Element) -> list[tuple[float, float]]:
    return [(float(box.get("x", "")), float(box.get("y", ""))) for box in tree.iter(f"{SVG}rect")]


def test_every_step_is_drawn_once_and_boxes_do_not_overlap():
    pipeline, _ = two_tiers()
    tree = drawn(pipeline._repr_html_())
    assert sorted(names(tree)) == sorted(step.name for step in pipeline.plan().steps)
    assert len(set(boxes(tree))) == len(boxes(tree)) == len(pipeline.plan().steps)


def test_rows_go_to_the_right_and_what_comes_back_is_dashed():
    pipeline, _ = two_tiers()
    tree = drawn(pipeline._repr_html_())
    at = dict(zip(names(tree), boxes(tree), strict=True))
    for step in pipeline.plan().steps:
        for stream in step.inputs:
            assert at[stream.step][0] < at[step.name][0]
    dashed = [path for path in tree.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    assert len(dashed) == 1, "the control table"


def test_text_of_the_user_cannot_become_markup():
    pipeline, _ = two_tiers()
    html = pipeline._repr_html_()
    assert "<i>" not in html
    assert "&lt;i&gt;" in html


def test_nothing_is_fetched():
    pipeline, _ = two_tiers()
    html = pipeline._repr_html_().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in html
    assert "<script" not in html


def test_a_stream_shows_its_columns_and_only_what_it_comes_from():
    _, readings = two_tiers()
    tree = drawn(readings.filter("temp > 1")._repr_html_())
    assert [cell.text for cell in tree.iter("td")] == ["box", "string", "temp", "double"]
    assert names(tree) == ["readings", "filter_2"]
    assert [box.get("stroke-width") for box in tree.iter(f"{SVG}rect")] == ["1.2", "3"]


def test_a_loop_is_drawn_and_an_empty_pipeline_has_no_picture():
    pipeline = Pipeline("loop")
    numbers = pipeline.source("numbers", memory([{"n": 1}]))
    numbers.iterate(lambda stream: (stream.filter("n > 1"), stream)).sink("out", print)
    assert "iterate" in names(drawn(pipeline._repr_html_()))
    assert picture(Pipeline("empty")._graph.draft(), {}) == ""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (lambda: Pipeline("p"), "Pipeline(p: no source → no sink; 0 steps)"),
        (lambda: two_tiers()[0], "Pipeline(fleet: readings → hot; 8 steps)"),
        (lambda: two_tiers()[1].group_by("box").window(tumbling("1h")), "Grouped(readings by box, tumbling window)"),
        (two_tiers()[1].group_by, "Grouped(readings by nothing)"),
        (lambda: Schema.of({"a": "int", "b": "array<string>"}), "Schema(a int, b array<string>)"),
    ],
)
def test_short_forms_are_readable(shown, expected):
    assert repr(shown()) == expected
