"""HTTP: rows per second that `http_in` takes in batches, each answered after its rows are synced in the journal, and reads into a frame.

The clients are a process of their own, with one connection each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from fordstone.connectors import http_in
from fordstone.connectors.base import Home, OpenContext, SourceOptions
from fordstone.connectors.http.feed import HttpFeed
from fordstone.connectors.journal.source import PARTITION, JournalSource
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import OsDisk
from table import Finding, at_least, middle, spread

ROWS_PER_S: Final = at_least(20_000)
BATCH_ROWS: Final = 500
CLIENTS: Final = 4
SCHEMA = Schema.of({"n": "bigint", "temp": "double", "note": "string"})
CLIENT = """
import json, sys, threading, urllib3
port, rows, batch, clients = map(int, sys.argv[1:])
def post(first):
    pool = urllib3.HTTPConnectionPool("127.0.0.1", port, maxsize=1)
    for start in range(first * batch, rows, batch * clients):
        body = b"\\n".join(b'{"n": %d, "temp": 20.5, "note": "%s"}' % (n, b"x" * 150) for n in range(start, min(rows, start + batch)))
        answer = pool.request("POST", "/events", body=body, headers={"idempotency-key": str(start)})
        assert answer.status == 202, answer.data
threads = [threading.Thread(target=post, args=(n,)) for n in range(clients)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def http(directory: Path, quick: bool) -> list[Finding]:
    del directory
    rows, repetitions = (200_000, 1) if quick else (500_000, 3)
    rates = [_rate(rows) for _ in range(repetitions)]
    return [
        Finding(
            section="http",
            case="rows taken in batches",
            measured=middle(rates),
            unit="rows/s",
            target=ROWS_PER_S,
            note=f"{rows:,} rows of 190 bytes in batches of {BATCH_ROWS} from {CLIENTS} connections; {spread(rates)}",
            details={"rates": rates},
        )
    ]


def _rate(rows: int) -> float:
    """From the first row that is read to the last one."""
    with tempfile.TemporaryDirectory() as directory:
        context = OpenContext(home=Home(disk=OsDisk(directory), directory="p/n"), step="in")
        source = open_source(http_in(port=0), SourceOptions(schema=SCHEMA, bounded=False), context)
        assert isinstance(source, JournalSource)
        assert isinstance(source.feed, HttpFeed)
        reader = source.open(PARTITION, Position(0), with_positions=False)
        reader.read(1)
        command = [sys.executable, "-c", CLIENT, *map(str, (source.feed.port, rows, BATCH_ROWS, CLIENTS))]
        read: list[int] = []
        times: list[float] = []
        with subprocess.Popen(command) as client:
            while sum(read) < rows:
                chunk = reader.read(65_536)
                if chunk is None:
                    assert client.poll() in {None, 0}, "the clients have failed"
                    time.sleep(0.001)
                    continue
                read.append(chunk.frame.height)
                times.append(time.perf_counter())
        source.close()
    return sum(read[1:]) / (times[-1] - times[0])
