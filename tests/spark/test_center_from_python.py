"""`fordstone.spark.run` of a pipeline for two tiers: refused before Spark is started, unless it can be meant."""

from __future__ import annotations

import importlib

import pytest

from fordstone import Pipeline
from fordstone.connectors import generator, memory
from fordstone.errors import ConfigError, PipelineError
from fordstone.hub.client.address import HubAddress
from fordstone.plan.plan import Source
from fordstone.spark import run
from fordstone.spark.config import SparkConfig


def pipeline(*, tiered: bool) -> Pipeline:
    p = Pipeline("two-tiers")
    rows = p.source("rows", generator(rows=5), schema={"device": "string"})
    (rows.to_center() if tiered else rows).sink("out", memory([]))
    return p


def test_the_whole_of_two_tiers_is_refused_with_the_two_ways_to_run_its_center():
    with pytest.raises(
        PipelineError, match=r"fordstone center FILE --hub URL, or from Python fordstone\.spark\.run\(p, hub=URL\)"
    ):
        run(pipeline(tiered=True))


def test_a_pipeline_of_one_tier_reads_no_hub():
    with pytest.raises(ConfigError, match="has one tier"):
        run(pipeline(tiered=False), hub="http://127.0.0.1:1")


@pytest.mark.parametrize("hub", ["http://127.0.0.1:1", HubAddress(url="http://127.0.0.1:1", token="fst_x")])
def test_the_center_half_is_what_runs_and_it_knows_the_hub(monkeypatch: pytest.MonkeyPatch, hub: HubAddress | str):
    ran = []
    module = importlib.import_module("fordstone.spark.run")
    monkeypatch.setattr(module, "run_plan", lambda plan, *_, **__: ran.append(plan))
    run(pipeline(tiered=True), hub=hub, config=SparkConfig())
    (plan,) = ran
    assert not plan.tiered
    (source,) = (step for step in plan.steps if isinstance(step, Source))
    wanted = {"url": "http://127.0.0.1:1"} | ({"token": "fst_x"} if isinstance(hub, HubAddress) else {})
    assert (source.connector.kind, source.connector.at) == ("hub", wanted)
