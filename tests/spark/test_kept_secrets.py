"""What opens the hub is not kept with a query's checkpoint, whichever way the query goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fordstone import Pipeline
from fordstone.connectors import files
from fordstone.connectors.base import ConnectorSpec
from fordstone.hub.client.address import HubAddress
from fordstone.planner.split import placed
from fordstone.spark.config import SparkConfig
from fordstone.spark.native import native_query as under_test


def test_a_query_that_spark_runs_by_itself_keeps_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pipeline = Pipeline("rules")
    rows = pipeline.source(
        "rules", files(str(tmp_path / "in"), format="jsonl"), schema={"id": "string", "most": "double"}
    )
    rows.sink("limits", ConnectorSpec("control", {"pipeline": "rules", "control": "limits", "keys": ["id"]}))
    plan = placed(pipeline.plan(), HubAddress(url="https://hub.example", token="fst_secret"))
    assert b"fst_secret" in plan.to_json()

    def nothing(*_: Any, **__: Any) -> Any:
        return None

    for name in ("check_sinks", "prepared", "lower"):
        monkeypatch.setattr(under_test, name, nothing)
    config = SparkConfig(state=tmp_path / "state", shards=1)
    under_test.native_query(plan, {}, config, None, streaming=True)  # type: ignore[arg-type]  # Spark is not asked
    kept = [file for file in (tmp_path / "state").rglob("*") if file.is_file()]
    assert kept
    assert not [file for file in kept if b"fst_secret" in file.read_bytes()]
