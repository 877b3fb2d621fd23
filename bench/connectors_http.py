"""Rows per second that `http_in` takes in batches, each answered after its rows are synced in the journal, and reads into a frame.

    uv run python bench/connectors_http.py [--rows N] [--batch N] [--clients N]

The clients are a process of their own, with one connection each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

from fordstone.connectors import http_in
from fordstone.connectors.base import Home, OpenContext, SourceOptions
from fordstone.connectors.http.feed import HttpFeed
from fordstone.connectors.journal.source import PARTITION, JournalSource
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import OsDisk

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


def measure(rows: int, batch: int, clients: int) -> dict[str, float]:
    """Take the time from the first row that is read to the last one."""
    with tempfile.TemporaryDirectory() as directory:
        context = OpenContext(home=Home(disk=OsDisk(directory), directory="p/n"), step="in")
        source = open_source(http_in(port=0), SourceOptions(schema=SCHEMA, bounded=False), context)
        assert isinstance(source, JournalSource)
        assert isinstance(source.feed, HttpFeed)
        reader = source.open(PARTITION, Position(0), with_positions=False)
        reader.read(1)
        command = [sys.executable, "-c", CLIENT, *map(str, (source.feed.port, rows, batch, clients))]
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
    return {"rows/s": sum(read[1:]) / (times[-1] - times[0]), "rows": rows, "batch": batch, "clients": clients}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    print(json.dumps(measure(options.rows, options.batch, options.clients), indent=2))
