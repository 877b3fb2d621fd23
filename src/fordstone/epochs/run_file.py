"""Runs: frames as Arrow IPC, named by the sha256 of their bytes, in a directory (`RunStore`).

Large frames are written in the file format, which Polars writes and reads on all cores; small ones in the stream format, which costs a
thirtieth for a frame of a few rows. The first bytes show which it is. `store` decides which runs are removed; `RunStore` records which
must stay because no manifest names them yet.

Invariants: a run has its final name only when its bytes are durable; a run that `write` or `put` has returned is held until a manifest
names it, or for `HOLD_COMMITS` commits. Nothing is parsed whose size and digest are not what the reference says. Equal bytes are equal
rows, but equal rows need not be equal bytes (under a null there may be anything): to compare rows, compare frames. A digest guards
against damage, not against forgery: runs of others are decoded by `untrusted`, and what is encoded here is within its bounds.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterable
from typing import Final, Literal

import polars as pl

from fordstone.epochs.ipc import DECODED_BYTES_FREE, FILE_MAGIC, decoded_bytes_max, read_facts
from fordstone.errors import ConfigError, DamagedError
from fordstone.state.base import RunRef
from fordstone.storage.atomic import AtomicWriter
from fordstone.storage.disk import Data, Disk

Compression = Literal["zstd", "lz4", "none"]
COMPRESSIONS: Final[tuple[Compression, ...]] = ("zstd", "lz4", "none")
DIGEST_CHARS: Final = 64
SCRUB_PASS_US: Final = 24 * 3_600_000_000
"""A hub reads its blobs, and a node its runs, at most once in this running time to find damage: a small store is not read all the time."""
_HEX: Final = frozenset("0123456789abcdef")
_FILE_ROWS_MIN: Final = 50_000
"""From this many rows on the file format is quicker. Decided by rows alone, so that equal frames give equal files."""
_CHUNK_ROWS_MIN: Final = 16_384
"""Chunks smaller than this on average are joined first: each one costs a kilobyte and a header to parse."""


def encode_run(frame: pl.DataFrame, compression: Compression) -> tuple[RunRef, memoryview]:
    """The reference of a frame and the bytes it names. The view is of memory that is not shared."""
    if compression not in COMPRESSIONS:
        raise ConfigError(f"compression {compression!r} does not exist. Choose one of {', '.join(COMPRESSIONS)}.")
    chunks = frame.n_chunks()
    if chunks > 1 and frame.height < chunks * _CHUNK_ROWS_MIN:
        frame = frame.rechunk()
    data = _written(frame, compression)
    if compression != "none" and frame.estimated_size() > DECODED_BYTES_FREE // 2:
        facts = read_facts(data)
        if facts.decoded_bytes > decoded_bytes_max(data.nbytes):
            # Compressed this well it would pass for a bomb where it is received.
            data = _written(frame, "none")
    return RunRef(digest=digest_of(data), size_bytes=data.nbytes, rows=frame.height), data


def _written(frame: pl.DataFrame, compression: Compression) -> memoryview:
    buffer = io.BytesIO()
    codec: Literal["zstd", "lz4", "uncompressed"] = "uncompressed" if compression == "none" else compression
    # A clone, since writing locks its frame while it waits for the interpreter: a thread that holds the interpreter and asks the
    # same frame anything (its size, its height) would wait for the lock, and both for ever.
    own = frame.clone()
    if frame.height >= _FILE_ROWS_MIN:
        own.write_ipc(buffer, compression=codec)
    else:
        own.write_ipc_stream(buffer, compression=codec)
    return buffer.getbuffer()


def decode_run(data: bytes, ref: RunRef) -> pl.DataFrame:
    """The frame that `ref` names; `DamagedError` if these bytes are not it."""
    problem = run_problem(data, ref)
    if problem is not None:
        raise DamagedError(f"run {short(ref.digest)} is damaged: it {problem}.")
    try:
        frame = pl.read_ipc(data) if data.startswith(FILE_MAGIC) else pl.read_ipc_stream(data)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, OverflowError) as error:
        raise DamagedError(f"run {short(ref.digest)} has the right digest but is not Arrow IPC: {error}.") from error
    if frame.height != ref.rows:
        raise DamagedError(f"run {short(ref.digest)} has {frame.height} rows, the manifest says {ref.rows}.")
    return frame


def run_problem(data: bytes | memoryview, ref: RunRef) -> str | None:
    """What is wrong with the bytes of a run, if anything, as what comes after "it". Parses nothing."""
    return pieces_problem((data,), ref)


def pieces_problem(pieces: Iterable[bytes | memoryview], ref: RunRef) -> str | None:
    """The same of a run that comes piece by piece. Holds one piece at a time: a run may have a whole state."""
    size_bytes, digest = 0, hashlib.sha256()
    for piece in pieces:
        size_bytes += len(piece)
        digest.update(piece)
    if size_bytes != ref.size_bytes:
        return f"has {size_bytes} bytes, the manifest says {ref.size_bytes}"
    if digest.hexdigest() != ref.digest:
        return f"has other bytes, of digest {short(digest.hexdigest())}"
    return None


def digest_of(data: bytes | memoryview) -> str:
    """The sha256 of these bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Whether this is the hex of a sha256, and so a file name that cannot lead elsewhere."""
    return len(text) == DIGEST_CHARS and _HEX.issuperset(text)


def short(digest: str) -> str:
    """A digest as messages show it."""
    return f"{digest[:12]}…"


HOLD_COMMITS: Final = 16
"""For how many commits a run without a name is held. What a given-up attempt wrote is named by the next one, or never."""


class RunStore:
    """Called from several threads. `mutex` is shared with the collector, so that no run is removed while it is found."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        compression: Compression,
        writer: AtomicWriter,
        mutex: threading.RLock,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._compression: Compression = compression
        self._writer = writer
        self._mutex = mutex
        self._present = {name for name in disk.list(directory) if is_digest(name)}
        self._held: dict[str, int] = {}
        self._commits = 0

    def write(self, frame: pl.DataFrame) -> RunRef:
        """Store a frame. Its bytes are durable on return, its name after `sync`."""
        ref, data = encode_run(frame, self._compression)
        self._place(ref, data)
        return ref

    def put(self, ref: RunRef, data: bytes) -> None:
        """Store bytes from elsewhere; `DamagedError` if they are not what `ref` says."""
        problem = run_problem(data, ref)
        if problem is not None:
            raise DamagedError(f"run {short(ref.digest)} is damaged: it {problem}.")
        self._place(ref, data)

    def read(self, ref: RunRef) -> pl.DataFrame:
        """The rows of a run, after its size and digest were checked."""
        return decode_run(self.read_bytes(ref), ref)

    def read_bytes(self, ref: RunRef) -> bytes:
        """The bytes as they are on disk, unchecked."""
        try:
            return self._disk.read(self.path(ref.digest))
        except FileNotFoundError as error:
            raise DamagedError(f"run {short(ref.digest)} is missing.") from error

    def fault(self, ref: RunRef, *, deep: bool) -> str | None:
        """What is wrong with a run: missing, or of another size; with `deep` also other bytes."""
        try:
            if deep:
                problem = pieces_problem(self._disk.read_pieces(self.path(ref.digest)), ref)
                return f"run {short(ref.digest)} {problem}" if problem else None
            size_bytes = self._disk.size(self.path(ref.digest))
        except FileNotFoundError:
            return f"run {short(ref.digest)} is missing"
        except DamagedError as error:
            return str(error).removesuffix(".")
        if size_bytes != ref.size_bytes:
            return f"run {short(ref.digest)} has {size_bytes} bytes, the manifest says {ref.size_bytes}"
        return None

    def first_fault(self, runs: Iterable[RunRef], known: dict[RunRef, str | None], *, deep: bool) -> str | None:
        """The first fault among some runs. `known` is what was found before, and added to: each run is looked at once."""
        first = None
        for run in runs:
            if run not in known:
                known[run] = self.fault(run, deep=deep)
            first = first or known[run]
        return first

    def sync(self) -> None:
        self._disk.fsync_dir(self._directory)

    def present(self) -> set[str]:
        """The digests of the runs that are there. Called with the mutex held; not to be changed."""
        return self._present

    def held(self) -> set[str]:
        """The digests of runs that no manifest names yet. Called with the mutex held."""
        return set(self._held)

    def committed(self, digests: Iterable[str]) -> None:
        """A manifest names these now: they need no holding, and runs that were held too long are released. Mutex held."""
        self._commits += 1
        for digest in digests:
            self._held.pop(digest, None)
        for digest in [digest for digest, since in self._held.items() if self._commits - since > HOLD_COMMITS]:
            del self._held[digest]

    def remove(self, digest: str) -> int:
        """Delete a run and say how many bytes that gave back. Mutex held."""
        size_bytes = self._size_of(digest)
        self._disk.remove(self.path(digest))
        self._present.discard(digest)
        return size_bytes

    def forget(self, digests: Iterable[str]) -> None:
        """These were moved away. Mutex held."""
        self._present.difference_update(digests)

    def size_bytes(self) -> int:
        with self._mutex:
            digests = list(self._present)
        return sum(map(self._size_of, digests))

    def path(self, digest: str) -> str:
        return f"{self._directory}/{digest}"

    def _place(self, ref: RunRef, data: Data) -> None:
        with self._mutex:
            # Held before looking: from here on a collector leaves it where it is.
            self._held[ref.digest] = self._commits
            present = ref.digest in self._present
        if present and self.fault(ref, deep=True) is None:
            return
        self._writer.replace(self.path(ref.digest), data, kind="run")
        with self._mutex:
            self._present.add(ref.digest)

    def _size_of(self, digest: str) -> int:
        try:
            return self._disk.size(self.path(digest))
        except FileNotFoundError:
            return 0
