"""A hosted query as the publisher of a control table: who it is to the hub, and that each batch is published once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.hub.running import running_hub
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, memory
from fordstone.connectors.base import ConnectorSpec, SinkDelayedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.planner.check import stream_types
from fordstone.protocol.claim import SinkWriter
from fordstone.spark.hosted.checkpoint import QueryFiles, QueryIdentity
from fordstone.spark.hosted.commit import sink_specs


def identity(owner: str) -> QueryIdentity:
    return QueryIdentity(
        pipeline="p",
        plan=msgspec.Raw(b"{}"),
        step_digests={},
        stages=(),
        shards=1,
        first_epoch=1,
        owner=owner,
    )


def test_a_location_keeps_its_owner_once_a_batch_was_planned(tmp_path):
    file = QueryFiles(str(tmp_path))
    assert file.claim(identity("first")).owner == "first"
    # Nothing was released yet, so the first is not known anywhere.
    assert file.claim(identity("second")).owner == "second"
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").touch()
    assert file.claim(identity("third")).owner == "second"
    assert QueryFiles(str(tmp_path / "other")).claim(identity("third")).owner == "third"


def test_sinks_receive_the_owner():
    pipeline = Pipeline("p")
    pipeline.source("s", memory([]), schema={"k": "string"}).sink("out", memory(MemorySink()))
    plan = pipeline.plan()
    assert sink_specs(plan, stream_types(plan), writer=SinkWriter(holder="me"))["out"].stream.owner == "me"


def center(root: Path, address: HubAddress) -> Pipeline:
    (root / "in").mkdir(exist_ok=True)
    (root / "in" / "0.jsonl").write_text('{"k": "a", "x": 1.0}\n{"k": "b", "x": 2.0}\n{"k": "a", "x": 3.0}\n')
    pipeline = Pipeline("p")
    rows = pipeline.source("s", files(str(root / "in" / "*.jsonl")), schema={"k": "string", "x": "double"})
    options = {"pipeline": "p", "control": "limits", "keys": ["k"]}
    rows.group_by("k").agg(top="max(x)").sink("limits_to_edges", ConnectorSpec("control", options, address.at()))
    return pipeline


def published(address: HubAddress) -> list[tuple[str, int, int]]:
    page = HubClient(address).control_page("p", "limits")
    return [(version.owner, version.batch, version.blob.rows) for version in page.versions]


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("at", ["batch.sealed", "batch.released", "commit"])
def test_a_batch_that_is_run_again_is_published_once_under_the_owner_of_the_location(tmp_path, at):
    with running_hub(tmp_path / "hub") as address:
        pipeline, spark = center(tmp_path, address), MicroSpark(cores=2)
        query = spark.start(pipeline.plan(), pipeline.functions, state=tmp_path / "state", bounded=True, shards=2)
        spark.fate.dies_before = at
        with pytest.raises(Died):
            query.run()
        spark.start(pipeline.plan(), pipeline.functions, state=tmp_path / "state", bounded=True, shards=2).run()
        ((owner, _, rows),) = published(address)
        assert rows == 2
        (file,) = (tmp_path / "state").rglob("query.json")
        assert msgspec.json.decode(file.read_bytes())["owner"] == owner
        assert address.url.encode() not in file.read_bytes()


@pytest.mark.usefixtures("quick_disk")
def test_a_batch_whose_hub_was_away_fails_and_is_published_when_it_is_run_again(tmp_path):
    with running_hub(tmp_path / "hub") as address:
        pass
    pipeline, spark = center(tmp_path, address), MicroSpark(cores=2)
    with pytest.raises(SinkDelayedError):
        spark.start(pipeline.plan(), pipeline.functions, state=tmp_path / "state", bounded=True, shards=2).run()
    with running_hub(tmp_path / "hub", port=int(address.url.rpartition(":")[2])):
        spark.start(pipeline.plan(), pipeline.functions, state=tmp_path / "state", bounded=True, shards=2).run()
        assert [rows for _, _, rows in published(address)] == [2]
