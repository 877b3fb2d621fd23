"""The hub of a simulated fleet: the real log, decisions and retention, without HTTP, over blobs in memory that forget, or in the log.

Every call is carried out at once, by its caller. A crash comes at a failpoint of the hub, between calls, or between two writes
of the log's file: log and blobs keep what was made durable, and of the rest what chance leaves.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO, Any, Final
from unittest.mock import patch

import msgspec
from tests.simulation.fleet_scenario import PIPELINE
from tests.simulation.fleet_tally import Fault
from tests.simulation.lossy_sqlite import LossyFiles
from tests.simulation.rows import SimulationError

from fordstone.hub.messages import (
    Acknowledged,
    Checkpoint,
    Commit,
    Committed,
    ConsumerPosition,
    ControlPage,
    ControlPublish,
    ControlVersion,
    EpochsRequest,
    Head,
    Lease,
    LeaseRequest,
    QuarantineRequest,
    Rejection,
    SkipRequest,
    StreamEpochs,
    StreamNodes,
)
from fordstone.hub.server.handlers import SMALL_BYTES_MAX, check_commit, decoded
from fordstone.hub.store import commits, controls, quarantine, sqlite
from fordstone.hub.store.blobs import BlobLocks, BlobStore, Upload
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.log_schema import WAL_PAGES
from fordstone.hub.store.retention import Retention
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.state.base import RunRef

IN_MEMORY: Final = Path("/dev/shm")
PAGE_ENTRIES: Final = 7
PAGE_NODES: Final = 2
"""Small, so that streams have several pages."""
VERSIONS_A_PAGE: Final = 3


class HubCrashedError(Exception):
    """The hub's process ended in the middle of a call."""


class MemoryBlobs(BlobStore):
    """Blobs that a crash may take back: those that were named, or removed, without a sync."""

    def __init__(self, hit: Callable[[str], None]) -> None:
        self._hit = hit
        self._there: dict[str, bytes] = {}
        self._unsynced: dict[str, None] = {}
        """In the order in which they came: what a crash keeps must not depend on digests, which differ from run to run."""
        self._removed: dict[str, bytes] = {}

    def put(self, digest: str, upload: Upload) -> None:
        """Name it, then sync."""
        self._hit("hub.blob-written")
        self._there[digest] = bytes(upload.data)
        self._unsynced[digest] = None
        self._hit("hub.blob-renamed")
        self._settle(digest)

    def size(self, digest: str) -> int | None:
        """Look. What is reported to be there is durable."""
        if digest not in self._there:
            return None
        self._settle(digest)
        return len(self._there[digest])

    def copy(self) -> dict[str, bytes]:
        """All that is there."""
        return dict(self._there)

    def put_back(self, blobs: dict[str, bytes]) -> None:
        """Have these and no others, all of them durable."""
        self._there = dict(blobs)
        self._unsynced.clear()
        self._removed.clear()

    def whole(self, run: RunRef) -> bool:
        """Whether what is named is there. For judges: it changes nothing."""
        return len(self._there.get(run.digest, b"")) == run.size_bytes and run.digest in self._there

    def open(self, digest: str) -> IO[bytes]:
        """Read."""
        if digest not in self._there:
            raise Rejection("not_found", f"the hub has no blob {digest}.")
        return io.BytesIO(self._there[digest])

    def remove(self, digest: str) -> None:
        """Take the name away, without a sync."""
        if digest in self._there:
            self._removed[digest] = self._there.pop(digest)
            self._unsynced.pop(digest, None)

    def names(self, prefix: str) -> list[tuple[str, int]]:
        """All with this prefix, in order."""
        found = sorted(digest for digest in self._there if digest.startswith(prefix))
        for digest in found:
            self._settle(digest)
        return [(digest, len(self._there[digest])) for digest in found]

    def all(self) -> set[str]:
        """The digests of all that is there. For judges."""
        return set(self._there)

    def free_bytes(self) -> int | None:
        """Nobody knows."""
        return None

    def beside(self) -> Path:
        """Uploads here are small."""
        return Path(tempfile.gettempdir())

    def crash(self, rng: Random) -> int:
        """Keep what is durable; the rest is there or not. Return how many blobs are gone."""
        lost = [digest for digest in self._unsynced if rng.getrandbits(1)]
        for digest in lost:
            del self._there[digest]
        for digest in self._removed:
            if rng.getrandbits(1):
                self._there.setdefault(digest, self._removed[digest])
        self._unsynced.clear()
        self._removed.clear()
        return len(lost)

    def _settle(self, digest: str) -> None:
        self._unsynced.pop(digest, None)
        self._removed.pop(digest, None)


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy of a hub's data directory."""

    files: dict[str, bytes]
    blobs: dict[str, bytes]


class FleetHub:
    """Each call either gives its answer, or raises `Rejection` or `HubCrashedError`. One thread."""

    def __init__(
        self,
        clock_us: Callable[[], int],
        rng: Random,
        faults: Counter[str],
        *,
        wal_pages: int = WAL_PAGES,
        small_blob_bytes: int = SMALL_BYTES_MAX,
    ) -> None:
        """`wal_pages`: of how many pages in the write-ahead log on they are copied into the log's file."""
        self._small_blob_bytes = small_blob_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="fordstone-fleet-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
        self._path = self._folder / "log.sqlite"
        self._clock_us = clock_us
        self._rng = rng
        self._faults = faults
        self._wal_pages = wal_pages
        self.crash_at: str | None = None
        """The failpoint at which it dies next."""
        self.up = True
        self.blobs = MemoryBlobs(self.hit)
        self.files = LossyFiles(self._power_cut)
        self._open()

    def hit(self, name: str) -> None:
        """Die here if it is time."""
        if name == self.crash_at:
            self.crash_at = None
            self._faults[Fault.HUB_FAILPOINT] += 1
            raise HubCrashedError(name)

    def _power_cut(self) -> HubCrashedError:
        self._faults[Fault.HUB_POWER_CUT] += 1
        return HubCrashedError("in a write of the log")

    def crash(self) -> None:
        """Lose what is not durable. It stays down until `restart`."""
        self.up = False
        self.files.power_off()
        self.log.close()
        for name in self.files.power_on(self._rng):
            self._faults[Fault.HUB_WAL_UNSYNCED if name.endswith("-wal") else Fault.HUB_FILE_UNSYNCED] += 1
        self._faults[Fault.BLOB_TAKEN_BACK] += self.blobs.crash(self._rng)

    def restart(self) -> None:
        """Come up again."""
        self.crash_at = None
        self._open()
        self.up = True

    def backup(self) -> Backup:
        """Stop, copy everything, and start again."""
        self.files.cut_after = None
        self.log.close()
        copied = Backup({path.name: path.read_bytes() for path in self._files()}, self.blobs.copy())
        self._open()
        return copied

    def restore(self, backup: Backup, *, now_us: int) -> None:
        """Put a copy in the place of the data, mark it as restored as `fordstone hub restore` does, and start.

        `now_us`: by a clock that is right. Two restores of one backup differ by the time.
        """
        self.crash()
        for path in self._files():
            path.unlink()
        for name, data in backup.files.items():
            self._path.with_name(name).write_bytes(data)
        self.blobs.put_back(backup.blobs)
        store = SqliteStore(self._path, open_file=self.files.connect)  # type: ignore[arg-type]  # as below
        with store.transaction() as log:
            log.mark_restored(now_us=now_us)
        store.close()
        self.restart()

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if not path.name.endswith("-shm"))

    def close(self) -> None:
        """Leave nothing behind."""
        self.files.power_off()
        self.log.close()
        self.files.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self) -> None:
        with patch.object(sqlite, "WAL_PAGES", self._wal_pages):
            store = SqliteStore(self._path, open_file=self.files.connect)  # type: ignore[arg-type]  # what the log uses of it
        self.log = HubLog(store, clock_us=self._clock_us, failpoints=self)
        self._locks = BlobLocks()
        self.retention = Retention(self.log, self.blobs, self._locks, failpoints=self)

    # Blobs.

    def put_blob(self, digest: str, data: bytes) -> None:
        """Store a blob as `Handlers.put_blob` does."""
        upload = Upload(self.blobs.beside())
        upload.write(data)
        if len(data) <= self._small_blob_bytes:
            upload.verify(digest)
            self.hit("hub.blob-written")
            self.log.write(lambda tx: tx.log.save_small_blob(digest, data, ran_us=tx.ran_us)).result()
            self.hit("hub.blob-renamed")
            return
        with self._locks.arrival(digest):
            upload.store(self.blobs, digest)
            self.log.record_blob(digest, upload.size_bytes)

    def get_blob(self, digest: str) -> bytes:
        """The bytes."""
        small = self.log.read(lambda log: log.small_blob(digest))
        with self.blobs.open(digest) if small is None else io.BytesIO(small) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != digest:
            raise SimulationError(f"blob {digest} at the hub has other bytes than its name says")
        return data

    def missing(self, digests: Iterable[str]) -> set[str]:
        """Which of these could not be named."""
        asked = list(digests)
        return set(asked) - self.log.blob_sizes(asked).keys()

    # Nodes.

    def lease(self, pipeline: str, node: str, request: LeaseRequest) -> Lease:
        """Take or renew the right to commit."""
        return self.log.write(lambda tx: commits.lease(tx, pipeline, node, request)).result()

    def head(self, pipeline: str, node: str) -> Head:
        """Where a node stands."""
        return self.log.read(lambda log: commits.head(log, pipeline, node))

    def checkpoint(self, pipeline: str, node: str) -> Checkpoint | None:
        """The newest checkpoint."""
        try:
            return self.log.read(lambda log: commits.newest_checkpoint(log, pipeline, node))
        except Rejection as refused:
            if refused.refusal.error == "not_found":
                return None
            raise

    def commit(self, pipeline: str, node: str, commit: Commit) -> Committed:
        """Take epochs in."""
        body = decoded(msgspec.json.encode(commit), Commit)
        check_commit(body, body.epochs[0].epoch, body.epochs[-1].epoch)
        return self.log.write(
            lambda tx: commits.commit(tx, pipeline, node, body, [one.digest() for one in body.epochs])
        ).result()

    # Readers and publishers.

    def stream_nodes(self, pipeline: str, stream: str, *, after: int, log_id: str | None) -> StreamNodes:
        """The nodes that have committed after `after`."""
        return self.log.read(
            lambda log: commits.stream_nodes(log, pipeline, stream, after=after, limit=PAGE_NODES, log_id=log_id)
        )

    def stream_epochs(self, pipeline: str, stream: str, request: EpochsRequest) -> StreamEpochs:
        """The next epochs of nodes, a few at a time."""
        few = msgspec.structs.replace(
            decoded(msgspec.json.encode(request), EpochsRequest), epochs_max=min(request.epochs_max, PAGE_ENTRIES)
        )
        return self.log.read(lambda log: commits.stream_epochs(log, pipeline, stream, few))

    def consumer(self, pipeline: str, consumer: str, position: ConsumerPosition) -> Acknowledged:
        """Register a consumer and what it has passed."""
        kept, refused = self.log.read(lambda log: commits.check_positions(log, pipeline, position))
        self.log.write(lambda tx: tx.log.save_position(pipeline, consumer, kept, now_us=tx.now_us)).result()
        return Acknowledged(refused=refused)

    def publish(self, pipeline: str, name: str, version: ControlPublish) -> ControlVersion:
        """Number a version."""
        published, _ = self.log.write(lambda tx: controls.publish(tx, pipeline, name, version)).result()
        return published

    def control_page(self, pipeline: str, name: str, *, after: int, chain: str | None) -> ControlPage:
        """Versions after `after`."""
        return self.log.read(
            lambda log: controls.control_page(log, pipeline, name, after=after, chain=chain, limit=VERSIONS_A_PAGE)
        )

    # Operators.

    def skip(self, node: str, until: int) -> None:
        """Let readers pass over the epochs at which they stop."""
        self.log.write(lambda tx: quarantine.skip(tx, PIPELINE, node, SkipRequest(until=until))).result()

    def quarantine(self, node: str, epoch: int) -> None:
        """Stop reading a node at an epoch."""
        request = QuarantineRequest(epoch=epoch, reason="an operator", by="operator")
        self.log.write(lambda tx: quarantine.quarantine(tx, PIPELINE, node, request)).result()

    # What only a simulation asks.

    def lost(self, node: str) -> list[tuple[int, int]]:
        """First and last of the ranges of epochs that the log reports as lost."""
        query = "SELECT g.* FROM gaps g JOIN nodes n ON n.id = g.node_id WHERE n.node = ?"
        return sorted((first, last) for _, first, last in self._select(query, node))

    def entries(self, node: str) -> list[tuple[int, str, tuple[int, int]]]:
        """Epoch, digest and generation of all that the log has of a node, in order."""
        query = (
            "SELECT e.epoch, e.digest, e.hub_generation, e.local_generation FROM entries e "
            "JOIN nodes n ON n.id = e.node_id WHERE n.node = ? ORDER BY e.epoch"
        )
        rows = self._select(query, node)
        return [(epoch, digest, (hub, local)) for epoch, digest, hub, local in rows]

    def versions(self) -> list[ControlVersion]:
        """The versions of control tables that are kept, in order."""
        rows = self._select("SELECT content FROM versions ORDER BY version")
        return [msgspec.json.decode(content, type=ControlVersion) for (content,) in rows]

    def kept(self, node: str) -> set[int]:
        """The epochs whose rows can still be read."""
        query = "SELECT s.epoch FROM segments s JOIN nodes n ON n.id = s.node_id WHERE n.node = ?"
        return {epoch for (epoch,) in self._select(query, node)}

    def unnamed(self) -> set[str]:
        """Blobs that are there although nothing names them."""
        rows = self._select("SELECT digest FROM blobs WHERE refs > 0")
        return (self.blobs.all() | self._small_blobs()) - {digest for (digest,) in rows}

    def _small_blobs(self) -> set[str]:
        """Those in the log that are whole."""
        rows = self._select("SELECT digest, data FROM small_blobs")
        return {digest for digest, data in rows if hashlib.sha256(data).hexdigest() == digest}

    def _select(self, query: str, *values: object) -> list[Any]:
        """What the log's file has. On a connection of its own: judges must not go through what they judge."""
        with contextlib.closing(self.files.connect(self._path)) as db:
            return db.execute(query, values).fetchall()

    def check_blobs(self) -> None:
        """Whatever the log names is there, whole."""
        rows = self._select("SELECT digest, size_bytes FROM blobs WHERE refs > 0")
        named = [("its log", RunRef(digest, size_bytes, 0)) for digest, size_bytes in rows]
        for (runs,) in self._select("SELECT runs FROM segments"):
            named += [("a segment", run) for run in msgspec.json.decode(runs, type=tuple[RunRef, ...])]
        for (content,) in self._select("SELECT content FROM checkpoints"):
            named += [("a checkpoint", run) for run in msgspec.json.decode(content, type=Checkpoint).runs()]
        named += [("a control version", version.blob) for version in self.versions()]
        small = self._small_blobs()
        for by, run in named:
            if run.digest not in small and not self.blobs.whole(run):
                raise SimulationError(f"at the hub, {by} names blob {run.digest[:12]}, which is not there whole")
