"""A node whose epoch cannot be taken, at a center on Spark: the query goes on without it, as on the edge engine (rule 25)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.edge.bad_node import BAD, Story, fleet
from tests.edge.declared import Outputs, center_plan
from tests.spark.test_hub_center import _to_files

from fordstone.connectors import rows as read_rows
from fordstone.errors import NodeQuarantinedError
from fordstone.protocol.progress import NotRead
from fordstone.spark.config import SparkConfig
from fordstone.spark.run import run_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("quick_disk")

TICKS_MAX = 6000


class Files:
    """What came out, in files."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def found(self) -> dict[tuple[str | None, int], list[int]]:
        rows = read_rows(self._root / "windows") if (self._root / "windows" / "_stream.json").exists() else None
        found: dict[tuple[str | None, int], list[int]] = {}
        for k, start, ids in () if rows is None or rows.is_empty() else rows.select("k", "window_start", "ids").rows():
            at = (k, round(start.timestamp()))
            assert at not in found, f"window {at} came out twice"
            found[at] = sorted(ids)
        return found

    def ids(self, name: str) -> list[int]:
        rows = read_rows(self._root / name) if (self._root / name / "_stream.json").exists() else None
        return [] if rows is None or rows.is_empty() else sorted(rows["id"].to_list())


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_epoch_stops_its_node_alone_and_the_query_goes_on(
    spark: SparkSession, tmp_path: Path, bad: str, reason: str
) -> None:
    out = Files(tmp_path / "out")
    with fleet(tmp_path) as nodes:
        nodes.commit(bad)
        story = Story(nodes, out, reason, ticks_max=TICKS_MAX)
        plan = _to_files(center_plan(Outputs(), place=nodes.center.at()), tmp_path / "out")
        config = SparkConfig(state=tmp_path / "state", shards=2, interval="100ms")
        report = run_plan(plan, {}, config, spark=spark, on_progress=story.steer)
        story.check()
        assert report.progress.restarts == 2, "once for the epoch, and once for the release in vain"


def test_a_run_over_what_is_there_fails_once_and_then_ends_before_the_quarantine(
    spark: SparkSession, tmp_path: Path
) -> None:
    out = Files(tmp_path / "out")
    with fleet(tmp_path) as nodes:
        nodes.commit("no Arrow")
        plan = _to_files(center_plan(Outputs(), place=nodes.center.at()), tmp_path / "out")
        config = SparkConfig(state=tmp_path / "state", shards=2, available_now=True)
        with pytest.raises(NodeQuarantinedError, match="fordstone hub skip bad --pipeline p --until 2"):
            run_plan(plan, {}, config, spark=spark)
        assert out.ids("rows") == [], "nothing is left out silently"
        report = run_plan(plan, {}, config, spark=spark)
        assert report.progress.not_read == (NotRead(pipeline="p", node="bad", epoch=2),)
        assert out.ids("rows") == [1, 2, 11]
        nodes.operator("hub", "skip", "bad", "--until", "2")
        run_plan(plan, {}, config, spark=spark)
    assert out.ids("rows") == [1, 2, 11, 12]
