"""From one stream of Redis to another: pipelines and the server are killed again and again, and each count is there once."""

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
import redis
from tests.services.base import start_or_skip
from tests.services.redis import RedisServer
from tests.waiting import until

from fordstone.storage.failpoint import FAILPOINT_VARIABLE

COMMAND = Path(sys.executable).with_name("fordstone")
WORDS = [f"w{number}" for number in range(20)]
STREAMS = ("lines-a", "lines-b")
SECONDS_MAX = 300.0
PIPELINE = """
from fordstone import Pipeline
from fordstone.connectors import redis_stream

url = "{url}"
p = Pipeline("words")
lines = p.source("lines", redis_stream(["lines-a", "lines-b"], url=url), schema={{"line": "string"}})
counts = lines.flat_map("split(line, ' ') AS word").group_by("word").agg(n="count(*)")
counts.sink("counts", redis_stream("counts", url=url))
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = start_or_skip(RedisServer)
    yield server
    server.close()


class WordCount:
    """The pipeline, its input, and what it has counted."""

    def __init__(self, server: RedisServer, folder: Path, *options: str) -> None:
        self.server = server
        self.sent: Counter[str] = Counter()
        self._folder = folder
        self._options = options
        self._rng = Random(1)
        (folder / "words.py").write_text(PIPELINE.format(url=server.url))

    def send(self, lines: int) -> None:
        """Add lines. What the server has confirmed counts; here it always answers."""
        with self.server.client() as client, client.pipeline(transaction=False) as sending:
            for number in range(lines):
                words = self._rng.choices(WORDS, k=5)
                self.sent.update(words)
                sending.xadd(STREAMS[number % 2], {"line": " ".join(words)})
            sending.execute()

    @contextmanager
    def running(self, *options: str, failpoint: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """The process, with all that it has started."""
        environment = os.environ | {FAILPOINT_VARIABLE: failpoint, "POLARS_MAX_THREADS": "1"}
        command = [str(COMMAND), "run", "words.py", "--state", "state", *self._options, *options]
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
        """Send lines, and wait until an epoch has come of them, or the process has ended, if it may."""
        before = self.added()
        self.send(lines)
        until(
            lambda: self.added() > before or (may_end and process.poll() is not None),
            "an epoch",
            seconds_max=SECONDS_MAX,
            alive=lambda: may_end or process.poll() is None,
            report=self.log,
        )

    def added(self) -> int:
        """How many entries the output has had."""
        with self.server.client() as client:
            try:
                return int(client.xinfo_stream("counts")["entries-added"])
            except redis.ResponseError:
                return 0

    def finish(self) -> None:
        """Read the rest, and compare every count with the input."""
        with self.running("--available-now") as process:
            assert process.wait(SECONDS_MAX) == 0, self.log()
        newest: dict[str, int] = {}
        with self.server.client() as client:
            for _, entry in client.xrange("counts"):
                word, n = entry[b"word"].decode(), int(entry[b"n"])
                assert n > newest.get(word, 0), f"{word}: {n} came after {newest[word]}: it was released twice"
                newest[word] = n
        assert newest == dict(self.sent)


def test_a_process_that_is_killed_at_a_commit_counts_every_word_once(
    server: RedisServer, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count = WordCount(server, tmp_path, "--interval", "50ms")
    for failpoint in ("sink.before-release:2", "sink.released:2", "manifest.renamed:3"):
        with count.running(failpoint=failpoint) as process:
            while process.poll() is None:
                count.feed(process, 5, may_end=True)
            assert process.returncode == -signal.SIGKILL, count.log()
        faults(kills=1)
    count.finish()


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.full)])
def test_processes_that_are_killed_at_any_moment_count_every_word_once(
    server: RedisServer, tmp_path: Path, faults: Callable[..., None], kills: int
) -> None:
    count, rng = WordCount(server, tmp_path, "--interval", "20ms"), Random(kills)
    for _ in range(kills):
        with count.running() as process:
            goal = count.added() + rng.randint(20, 600)
            while count.added() < goal:
                count.feed(process, rng.randint(1, 50))
            count.kill(process)
        faults(kills=1)
    count.finish()


def test_a_server_that_is_killed_again_and_again_gets_every_count_once(
    server: RedisServer, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count, rng = WordCount(server, tmp_path, "--interval", "20ms"), Random(5)
    with count.running() as process:
        for _ in range(8):
            goal = count.added() + rng.randint(20, 400)
            while count.added() < goal:
                count.feed(process, rng.randint(1, 50))
            count.send(100)
            server.kill()
            faults(kills=1)
            server.start()
        count.feed(process, 10)
        process.terminate()
        assert process.wait(SECONDS_MAX) == 0, count.log()
    count.finish()


@pytest.mark.spark
@pytest.mark.full
def test_on_spark_a_driver_that_is_killed_counts_every_word_once(
    server: RedisServer, tmp_path: Path, faults: Callable[..., None]
) -> None:
    count = WordCount(server, tmp_path, "--on", "spark", "--master", "local[2]", "--interval", "200ms")
    with count.running() as process:
        count.feed(process, 20)
        count.send(20)
        count.kill(process)
    faults(kills=1)
    count.send(20)
    count.finish()
