"""What is said of executors on other machines, without starting any."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import pyarrow as pa
import pytest
from tests.spark.micro import MicroSpark

from fordstone import Pipeline
from fordstone.connectors import files, registry, rows
from fordstone.errors import ConfigError
from fordstone.hub.client.address import HubAddress
from fordstone.plan.plan import Plan
from fordstone.planner.split import placed, split
from fordstone.spark.hosted import query as query_module
from fordstone.spark.hosted import source as source_module
from fordstone.spark.hosted.checkpoint import IDENTITY_PATH, QueryFiles
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
    source = pipeline.source("rows", files("in/*.jsonl"), schema={"n": "bigint"})
    source.to_center().sink("out", files(str(tmp_path / "out"), format="jsonl"))
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


Seen = Literal["the driver's", "another", "none"]


class Cluster(MicroSpark):
    """Spark with executors on other machines. `seen`: which file each finds where the driver has written its own."""

    def __init__(self, state: Path, seen: Sequence[Seen]) -> None:
        super().__init__(cores=len(seen))
        self.sparkContext = spark_with("spark://host:7077").sparkContext
        self._file = state / "p" / "_spark" / IDENTITY_PATH
        self._seen = seen

    def range(self, start: int, end: int, step: int, tasks: int) -> Any:
        assert (start, end, step, tasks) == (0, len(self._seen), 1, len(self._seen)), "one task per core"
        return SimpleNamespace(
            mapInArrow=lambda function, schema: SimpleNamespace(collect=lambda: list(self._run(function)))
        )

    def _run(self, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]) -> Iterator[Any]:
        of_driver = self._file.read_bytes()
        for seen in self._seen:
            self._file.unlink(missing_ok=True)
            if seen != "none":
                self._file.write_bytes(of_driver if seen == "the driver's" else b"another")
            yield from (row for batch in function(iter(())) for row in batch.to_pylist())
        self._file.write_bytes(of_driver)


def copied(root: Path) -> Plan:
    (root / "in").mkdir()
    (root / "in" / "a.jsonl").write_text('{"n": 1}\n')
    pipeline = Pipeline("p")
    source = pipeline.source("src", files(str(root / "in/*.jsonl")), schema={"n": "bigint"})
    source.sink("out", files(str(root / "out"), format="jsonl"))
    return pipeline.plan()


def run_on(spark: MicroSpark, plan: Plan, state: Path, *, batch: bool) -> None:
    if batch:
        spark.run_batch(plan, state=state)
    else:
        spark.start(plan, state=state, available_now=True).run()


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("seen", [("none", "the driver's"), ("the driver's", "another"), ("another", "none")])
def test_a_query_reads_nothing_if_an_executor_does_not_see_the_checkpoint_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: tuple[Seen, ...], batch: bool
) -> None:
    state, open_source = tmp_path / "state", Mock(wraps=registry.open_source)
    monkeypatch.setattr(source_module, "open_source", open_source)
    with pytest.raises(ConfigError, match=rf"^executors on .* do not see {state}/p/_spark/{IDENTITY_PATH}"):
        run_on(Cluster(state, seen), copied(tmp_path), state, batch=batch)
    open_source.assert_not_called()
    stored = QueryFiles(str(state / "p" / "_spark"))
    assert (stored.begun(), stored.newest_record(), (tmp_path / "out").exists()) == (False, 0, False)


@pytest.mark.parametrize("batch", [False, True])
def test_a_query_runs_if_all_executors_see_the_checkpoint_location_and_later_ones_look_too(
    tmp_path: Path, batch: bool
) -> None:
    state, plan = tmp_path / "state", copied(tmp_path)
    spark = Cluster(state, ("the driver's", "the driver's"))
    probe = spark.query(plan, state=state).setting.probe
    assert probe is not None
    assert (probe.location, probe.path) == (str(state / "p" / "_spark"), IDENTITY_PATH)
    run_on(spark, plan, state, batch=batch)
    assert rows(tmp_path / "out")["n"].to_list() == [1]


def test_a_process_looks_at_the_checkpoint_location_once(tmp_path: Path) -> None:
    probe = probe_of(tmp_path)
    check_probe(probe)
    (tmp_path / "query.json").unlink()
    check_probe(probe)
