"""Who a query is to those it publishes to: made with its checkpoint location, and kept there."""

from __future__ import annotations

import msgspec

from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.model.stream import stream_types
from fordstone.spark.commit import sink_specs
from fordstone.spark.identity import QueryFile, QueryIdentity


def identity(owner: str) -> QueryIdentity:
    return QueryIdentity(
        pipeline="p",
        way="hosted",
        plan=msgspec.Raw(b"{}"),
        step_digests={},
        stages=(),
        shards=1,
        first_epoch=1,
        owner=owner,
    )


def test_a_location_keeps_its_owner_once_a_batch_was_planned(tmp_path):
    file = QueryFile(str(tmp_path))
    assert file.checked(identity("first")).owner == "first"
    # Nothing was let out yet, so nobody knows the first.
    assert file.checked(identity("second")).owner == "second"
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").touch()
    assert file.checked(identity("third")).owner == "second"
    assert QueryFile(str(tmp_path / "other")).checked(identity("third")).owner == "third"


def test_sinks_are_told_the_owner():
    pipeline = Pipeline("p")
    pipeline.source("s", memory([]), schema={"k": "string"}).sink("out", memory(MemorySink()))
    plan = pipeline.plan()
    assert sink_specs(plan, stream_types(plan), owner="me")["out"].stream.owner == "me"
