"""What a node would send, made by hand."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import (
    Checkpoint,
    Commit,
    Committed,
    EpochEntry,
    Generation,
    Lease,
    LeaseRequest,
    StreamSegment,
)
from fordstone.state.base import RunRef

ONE = Generation(hub=1, local=1)


def blob(text: str) -> bytes:
    return f"blob {text}".encode()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run(text: str, rows: int = 1) -> RunRef:
    data = blob(text)
    return RunRef(digest=digest_of(data), size_bytes=len(data), rows=rows)


def entry(epoch: int, *texts: str, stream: str = "s", watermark_us: int | None = None, **more: Any) -> EpochEntry:
    """An epoch of one stream whose runs are the blobs of these texts."""
    segment = StreamSegment(
        runs=tuple(run(text) for text in texts), watermark_us=epoch if watermark_us is None else watermark_us
    )
    return EpochEntry(epoch=epoch, streams={stream: segment}, created_us=epoch, **more)


def checkpoint(epoch: int, *state: str) -> Checkpoint:
    return Checkpoint(epoch=epoch, manifest=run(f"manifest {epoch}"), state=tuple(run(text) for text in state))


def commit_of(*entries: EpochEntry, generation: Generation = ONE, **more: Any) -> Commit:
    return Commit(generation=generation, epochs=entries, **more)


class Node:
    """A node over HTTP: leases, uploads and commits."""

    def __init__(self, client: HubClient, node: str = "n", pipeline: str = "p") -> None:
        self.client, self.node, self.pipeline = client, node, pipeline
        self.generation = ONE

    def lease(self, holder: str = "h", local: int = 1, **more: Any) -> Lease:
        request = LeaseRequest(holder=holder, local=local, start=more.pop("start", f"s{local}"), **more)
        lease = self.client.lease(self.pipeline, self.node, request)
        self.generation = lease.generation
        return lease

    def put(self, *texts: str) -> None:
        for text in texts:
            self.client.put_blob(run(text).digest, blob(text))

    def commit(self, *entries: EpochEntry, checkpoint: Checkpoint | None = None) -> Committed:
        return self.client.commit(
            self.pipeline, self.node, commit_of(*entries, generation=self.generation, checkpoint=checkpoint)
        )


def select(path: Path, query: str, *values: object) -> list[Any]:
    """What the file of a hub's log has, seen by another process."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(query, values).fetchall()
