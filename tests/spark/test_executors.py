"""What is said of executors on other machines, without starting any."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.spark.micro import MicroSpark

from fordstone import Pipeline
from fordstone.connectors import files
from fordstone.errors import ConfigError
from fordstone.hub.client.address import HubAddress
from fordstone.planner.split import placed, split
from fordstone.spark.hosted import query as query_module
from fordstone.spark.hosted.operator_host import stream_host
from fordstone.spark.hosted.stages import QuerySetting
from fordstone.spark.session.session import Probe, check_probe, digest_at, parallelism, warn_of_clear_tokens


def spark_with(master: str, **conf: str) -> Any:
    context = SimpleNamespace(
        master=master, getConf=lambda: SimpleNamespace(getAll=lambda: list({"spark.master": master, **conf}.items()))
    )
    return SimpleNamespace(sparkContext=context)


@pytest.mark.parametrize(
    ("master", "conf", "warned"),
    [
        ("local[2]", {}, False),
        ("spark://host:7077", {}, True),
        ("spark://host:7077", {"spark.network.crypto.enabled": "false"}, True),
        ("spark://host:7077", {"spark.network.crypto.enabled": "true"}, False),
        ("yarn", {"spark.ssl.rpc.enabled": "true"}, False),
    ],
)
def test_a_token_that_travels_in_the_clear_is_warned_of(
    master: str, conf: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_clear_tokens(spark_with(master, **conf))
    found = [record.getMessage().startswith("hub token sent in the clear") for record in caplog.records]
    assert found == [True] * warned


@pytest.mark.parametrize("token", [None, "fst_secret"])
def test_a_query_warns_if_its_hub_has_a_token(
    token: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline("p")
    rows = pipeline.source("rows", files("in/*.jsonl"), schema={"n": "bigint"})
    rows.to_center().sink("out", files(str(tmp_path / "out"), format="jsonl"))
    center = split(pipeline.plan()).center
    assert center is not None
    spark = MicroSpark()
    spark.sparkContext = spark_with("spark://host:7077").sparkContext
    monkeypatch.setattr(query_module, "check_location", lambda *given: None)
    with caplog.at_level(logging.WARNING):
        spark.query(placed(center, HubAddress(url="https://hub:7411", token=token)), state=tmp_path / "state")
    assert ("hub token sent in the clear" in caplog.text) is (token is not None)


@pytest.mark.parametrize(("cores_max", "tasks"), [("1", 2), ("24", 24), ("1000", 128)])
def test_what_an_application_may_grow_to_counts_and_not_only_what_it_has_now(cores_max: str, tasks: int) -> None:
    spark = spark_with("spark://host:7077", **{"spark.cores.max": cores_max})
    spark.sparkContext.defaultParallelism = 2
    assert parallelism(spark) == tasks


def probe_of(directory: Path) -> Probe:
    (directory / "query.json").write_text("{}")
    return Probe(location=str(directory), path="query.json", digest=digest_at(str(directory), "query.json"))


def test_a_process_that_does_not_see_the_checkpoint_location_touches_no_state(tmp_path: Path) -> None:
    setting = QuerySetting(plan_json=b"", shards=1, probe=probe_of(tmp_path))
    (tmp_path / "query.json").write_text("another")
    with pytest.raises(ConfigError, match=r"do not see .*query\.json(.|\n)*Give --state a directory that all machines"):
        stream_host(setting, 0)


def test_a_process_looks_at_the_checkpoint_location_once(tmp_path: Path) -> None:
    probe = probe_of(tmp_path)
    check_probe(probe)
    (tmp_path / "query.json").unlink()
    check_probe(probe)
