"""Word count from topic to topic, as in the example: processes and the broker are killed again and again, and every count is there once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from tests.connectors.kafka.topics import json_rows
from tests.services.base import start_or_skip
from tests.services.kafka import KafkaBroker, started
from tests.services.spark_kafka import setting
from tests.waiting import until

from fordstone.storage.failpoint import FAILPOINT_VARIABLE

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kafka_word_count.py"
COMMAND = Path(sys.executable).with_name("fordstone")
WORDS = [f"w{number}" for number in range(20)]
PARTITIONS = 3
SECONDS_MAX = 300.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    broker = start_or_skip(lambda: started(tmp_path / "kafka"))
    broker.create("lines", partitions=PARTITIONS)
    broker.create("counts")
    yield broker
    broker.stop()


class WordCount:
    """The example, its input, and what it has counted."""

    example: Path = EXAMPLE

    def __init__(self, broker: KafkaBroker, folder: Path, *options: str) -> None:
        self.broker = broker
        self.sent: Counter[str] = Counter()
        self._folder = folder
        self._options = options
        self._rng = Random(1)

    def send(self, lines: int = 30) -> None:
        for number in range(PARTITIONS):
            texts = [" ".join(self._rng.choices(WORDS, k=5)) for _ in range(lines)]
            self.sent.update(word for text in texts for word in text.split())
            self.broker.send("lines", texts, partition=number)

    @contextmanager
    def running(self, *options: str, failpoint: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """The process, with all that it has started."""
        environment = os.environ | {
            "KAFKA_SERVERS": self.broker.servers,
            FAILPOINT_VARIABLE: failpoint,
            "POLARS_MAX_THREADS": "1",
        }
        command: list[str | Path] = [
            COMMAND,
            "run",
            self.example,
            "--state",
            self._folder / "state",
            *self._options,
            *options,
        ]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            self.kill(process)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self) -> str:
        return (self._folder / "log").read_text()[-5_000:]

    def feed(self, process: subprocess.Popen[bytes], lines: int, *, may_end: bool = False) -> None:
        """Send lines, and wait until a transaction has come of them, or the process has ended, if it may."""
        before = self.ends()
        self.send(lines)
        until(
            lambda: self.ends() > before or (may_end and process.poll() is not None),
            "a commit",
            seconds_max=SECONDS_MAX,
            alive=lambda: may_end or process.poll() is None,
            report=self.log,
        )

    def ends(self) -> int:
        """How many offsets the output has. It grows with each transaction."""
        return self.broker.ends("counts", committed=False)[0]

    def finish(self) -> None:
        """Read the rest, and compare every count with the input."""
        with self.running("--available-now") as process:
            assert process.wait(SECONDS_MAX) == 0, self.log()
        newest: dict[str, int] = {}
        for row in json_rows(self.broker, "counts"):
            assert row["n"] > newest.get(row["word"], 0), (
                f"{row} came after {newest.get(row['word'])}: it was released twice"
            )
            newest[row["word"]] = row["n"]
        assert newest == dict(self.sent)


@pytest.mark.parametrize(
    "failpoint", ["sink.before-release:2", "sink.released:2", "manifest.renamed:3", "manifest.synced:2"]
)
def test_a_process_that_is_killed_at_a_commit_counts_every_word_once(
    broker: KafkaBroker, tmp_path: Path, failpoint: str, faults: Callable[..., None]
) -> None:
    count = WordCount(broker, tmp_path, "--interval", "50ms")
    for _ in range(2):
        with count.running(failpoint=failpoint) as process:
            while process.poll() is None:
                count.feed(process, 5, may_end=True)
            assert process.returncode == -signal.SIGKILL, count.log()
        faults(kills=1)
    count.finish()


def test_processes_that_are_killed_at_any_moment_count_every_word_once(
    broker: KafkaBroker, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count, rng = WordCount(broker, tmp_path, "--interval", "20ms"), Random(3)
    for _ in range(8):
        with count.running() as process:
            goal = count.ends() + rng.randint(2, 60)
            while count.ends() < goal:
                count.feed(process, rng.randint(1, 50))
            count.kill(process)
        faults(kills=1)
    count.finish()


def test_a_broker_that_is_killed_again_and_again_gets_every_count_once(
    broker: KafkaBroker, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count, rng = WordCount(broker, tmp_path, "--interval", "20ms"), Random(5)
    with count.running() as process:
        for _ in range(4):
            goal = count.ends() + rng.randint(2, 40)
            while count.ends() < goal:
                count.feed(process, rng.randint(1, 50))
            count.send(100)
            broker.kill()
            faults(kills=1)
            broker.start()
        count.feed(process, 10)
        process.terminate()
        assert process.wait(SECONDS_MAX) == 0, count.log()
    count.finish()


SPARK = ("--on", "spark", "--master", "local[2]", "--interval", "200ms")


def read_by_spark(broker: KafkaBroker, folder: Path) -> WordCount:
    """The example, with a source that Spark's own connector reads."""
    jars = start_or_skip(setting)["spark.jars"]
    count = WordCount(broker, folder, *SPARK, "--conf", f"spark.jars={jars}")
    text = EXAMPLE.read_text().replace('format="raw")', 'format="raw", spark_connector=True)')
    assert "spark_connector" in text
    count.example = folder / EXAMPLE.name
    count.example.write_text(text)
    return count


@pytest.mark.spark
@pytest.mark.full
def test_a_driver_that_is_killed_while_spark_reads_counts_every_word_once(
    broker: KafkaBroker, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count = read_by_spark(broker, tmp_path)
    with count.running(failpoint="batch.sealed:2") as process:
        while process.poll() is None:
            count.feed(process, 20, may_end=True)
        assert process.returncode == -signal.SIGKILL, count.log()
    faults(kills=1)
    count.send(20)
    count.finish()


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_drivers_that_are_killed_at_any_moment_while_spark_reads_count_every_word_once(
    broker: KafkaBroker, tmp_path: Path, faults: Callable[..., None], seed: int
) -> None:
    count, rng = read_by_spark(broker, tmp_path), Random(seed)
    points = ["batch.executed", "batch.sealed", "sink.released", "batch.released", "batch.kept"]
    for point in rng.sample(points, len(points)):
        with count.running(failpoint=f"{point}:{rng.randint(1, 4)}") as process:
            while process.poll() is None:
                count.feed(process, rng.randint(1, 50), may_end=True)
            assert process.returncode == -signal.SIGKILL, count.log()
        faults(kills=1)
        with count.running() as process:
            for _ in range(rng.randint(0, 4)):
                count.feed(process, rng.randint(1, 50))
            count.send(rng.randint(1, 200))
            count.kill(process)
        faults(kills=1)
    count.finish()


@pytest.mark.spark
@pytest.mark.full
def test_a_broker_that_is_killed_while_spark_reads_gets_every_count_once(
    broker: KafkaBroker, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count, rng = read_by_spark(broker, tmp_path), Random(7)
    with count.running() as process:
        for _ in range(3):
            for _ in range(rng.randint(1, 3)):
                count.feed(process, rng.randint(1, 50))
            count.send(100)
            broker.kill()
            faults(kills=1)
            broker.start()
        count.feed(process, 10)
        process.terminate()
        assert process.wait(SECONDS_MAX) == 0, count.log()
    count.finish()


@pytest.mark.spark
def test_on_spark_drivers_that_are_killed_count_every_word_once(
    broker: KafkaBroker, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count = WordCount(broker, tmp_path, *SPARK)
    with count.running() as process:
        for _ in range(3):
            count.feed(process, 20)
        count.send(20)
        count.kill(process)
    faults(kills=1)
    with count.running(failpoint="sink.released:1") as process:
        assert process.wait(SECONDS_MAX) == -signal.SIGKILL, count.log()
        faults(kills=1)
    count.finish()
