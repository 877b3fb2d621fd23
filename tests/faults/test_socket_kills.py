"""Lines over TCP under `kill -9` of the pipeline: nothing acknowledges a line, but what was journalled stays, once."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tests.faults.pipeline_run import PipelineRun
from tests.services.base import free_port
from tests.waiting import until

READS = """
from fordstone import Pipeline
from fordstone.connectors import files, socket_lines

p = Pipeline("p")
rows = p.source("rows", socket_lines(listen="127.0.0.1:{port}"), schema={{"n": "bigint"}})
rows.sink("out", files("out", format="jsonl"))
"""
WRITES = """
from fordstone import Pipeline
from fordstone.connectors import files, socket_lines

p = Pipeline("p")
rows = p.source("rows", files("in/*.jsonl"), schema={{"n": "bigint"}})
rows.sink("out", socket_lines(connect="127.0.0.1:{port}"))
"""
KILLS = 3
BATCH = 10
PER_CONNECTION = 100_000
PER_CLIENT = 1_000_000


class Sender(threading.Thread):
    """Sends numbers, and those of each connection from 0 on. A connection that breaks is followed by another; nothing is sent twice."""

    def __init__(self, number: int, port: int) -> None:
        super().__init__(daemon=True)
        self.first = number * PER_CLIENT
        self.port = port
        self.sent: list[int] = []
        """Of each connection."""
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=10) as to:
                self.sent.append(0)
                while not self.over.wait(0.005):
                    first = self.first + (len(self.sent) - 1) * PER_CONNECTION + self.sent[-1]
                    self.sent[-1] += BATCH
                    to.sendall("".join(f'{{"n": {n}}}\n' for n in range(first, first + BATCH)).encode())

    def sends_again(self, before: int) -> bool:
        """Whether it has sent something on a connection that came after these."""
        return len(self.sent) > before and self.sent[-1] > 0

    def lost(self, found: Counter[int]) -> int:
        """How many rows are missing. Of each connection it is the last ones, and of the last connection, which was ended well, none."""
        lost = 0
        for number, sent in enumerate(self.sent):
            first = self.first + number * PER_CONNECTION
            there = sum(found[n] for n in range(first, first + sent))
            assert all(found[n] == 1 for n in range(first, first + there)), f"connection {number} has a gap"
            lost += sent - there
        assert self.sent[-1] == there, "what was sent after the last kill is there"
        return lost


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_lines_that_were_journalled_are_there_once_and_only_the_end_of_a_connection_is_lost(
    tmp_path: Path, seed: int
) -> None:
    rng, port = Random(seed), free_port()
    run = PipelineRun(tmp_path, READS.format(port=port))
    run.start()
    senders = [Sender(number, port) for number in range(3)]
    for sender in senders:
        sender.start()
    seen: set[int] = set()
    for _ in range(KILLS):
        wanted = len(seen) + rng.randint(50, 1_000)
        until(lambda: len(run.rows()) >= wanted, "rows", report=run.log)  # noqa: B023 - called here
        seen |= run.rows().keys()
        connections = [len(sender.sent) for sender in senders]
        run.end(signal.SIGKILL)
        run.start()
        again = list(zip(senders, connections, strict=True))
        until(lambda: all(one.sends_again(before) for one, before in again), "connections", report=run.log)  # noqa: B023
    for sender in senders:
        sender.over.set()
        sender.join(60)
    last = {sender.first + (len(sender.sent) - 1) * PER_CONNECTION + sender.sent[-1] - 1 for sender in senders}
    until(lambda: last <= run.rows().keys(), "the last rows", report=run.log)
    run.end(signal.SIGINT)
    found = Counter(run.rows())
    assert seen <= found.keys(), "what was once there stays"
    lost = sum(sender.lost(found) for sender in senders)
    assert sum(found.values()) == sum(sum(sender.sent) for sender in senders) - lost
    print(f"seed {seed}: {len(found)} rows, 0 doubled, {lost} lost at the ends of {KILLS * len(senders)} connections")


def test_a_peer_that_reads_gets_every_line_of_a_pipeline_that_is_killed(tmp_path: Path) -> None:
    rng = Random(7)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found: Counter[int] = Counter()

        def read(one: socket.socket) -> None:
            with one, one.makefile("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):  # else the pipeline was killed within it, and sends it again
                        found[json.loads(line)["n"]] += 1

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=read, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        run = PipelineRun(tmp_path, WRITES.format(port=server.getsockname()[1]))
        (tmp_path / "in").mkdir()
        run.start()
        written = 0
        for life in range(KILLS + 1):
            end = written + rng.randint(100, 2_000)
            text = "".join(f'{{"n": {n}}}\n' for n in range(written, end))
            (tmp_path / f"in/{life}.jsonl").write_text(text)
            written = end
            wanted = len(found) + 1
            until(lambda: len(found) >= wanted, "rows", report=run.log)  # noqa: B023 - called here
            if life < KILLS:
                run.end(signal.SIGKILL)
                run.start()
        until(lambda: len(found) >= written, "every row", report=run.log)
        run.end(signal.SIGINT)
    assert found.keys() == set(range(written))
    print(f"{written} rows, 0 lost, {sum(found.values()) - written} sent again")
