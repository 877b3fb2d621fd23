"""Kill -9 of a center that is a Spark driver, on its way to a commit: rows, windows and control table are exact in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.process import Process
from tests.faults.spark_job import JAVA
from tests.faults.spark_process import SparkProcess, born
from tests.faults.two_tier import FILE, Fleet
from tests.faults.two_tier_child import Command

FIRST_ROWS, FEED_ROWS = 200, 60
PLACES = (("batch.sealed", 1), ("sink.released", 3))
"""Three sinks are let out a batch: rows, windows and the control table."""
WORDS = ("--on", "spark", "--master", "local[2]", "--memory", "512m", "--shards", "2", "--interval", "10ms", "--json")


class SparkCenter(SparkProcess):
    """`fordstone center` on Spark."""

    def __init__(self, fleet: Fleet, *words: str, failpoint: str = "") -> None:
        folder = fleet.folder / "center"
        folder.mkdir(exist_ok=True)
        settings = {
            "spark.driver.extraJavaOptions": f"{JAVA} -Djava.io.tmpdir={folder}",
            "spark.local.dir": str(folder),
            "spark.python.daemon.module": "tests.faults.spark_daemon",
        }
        given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command = Command(words=("center", FILE, "--hub", fleet.url, *WORDS, *given, *words))
        Process.__init__(self, folder, command, failpoint=failpoint, module="tests.faults.two_tier_child", apart=True)
        self._seen = {(self.pid, born(self.pid))}


def test_a_spark_driver_killed_on_its_way_to_a_commit_loses_and_doubles_nothing(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=31) as fleet:
        fleet.hub()
        fleet.feeds["north"].write(FIRST_ROWS)
        node = fleet.node("north", "--interval", "500ms")
        for life, (name, count) in enumerate(PLACES):
            hits = tmp_path / f"hits-{life}"
            center = SparkCenter(fleet, failpoint=f"{name}:{count}@{hits}")
            try:
                center.until(lambda center=center: center.java() is not None, "Java")  # type: ignore[misc]
                fleet.feeds["north"].write(FEED_ROWS)
                ended = center.ended()
                assert ended.killed, ended.errors
            finally:
                center.until_gone(by_force=center.running)
            assert hits.read_text().splitlines() == [name] * count
            faults(spark_driver_kills=1)
        fleet.feeds["north"].close()
        head = fleet.sealed("north")
        node.until(lambda: fleet.sealed("north") > head, "another epoch")
        assert node.stop().report["progress"]["outbox_epochs"] == 0
        center = SparkCenter(fleet, "--available-now")
        try:
            center.until(lambda: center.java() is not None, "Java")
            ended = center.ended()
        finally:
            center.until_gone(by_force=center.running)
        assert ended.code == 0, ended.errors
        fleet.judge()
        assert fleet.limits()
