"""The bytes of a run: a frame as Arrow IPC, named by the sha256 of the file.

Leaves naming, writing and collecting of files to `store`. Large frames are written in the file format, which Polars
writes and reads on all cores; small ones in the stream format, which costs a thirtieth for a frame of a few rows. The
first bytes tell them apart.

Invariants: nothing is parsed whose size and digest are not what the reference says. Equal bytes are equal rows, but
equal rows need not be equal bytes (what lies under a null is anything): to compare rows, compare frames. A digest guards
against damage, not against forgery: forged Arrow under a digest to match can crash the parser, so runs are taken only
from those who are trusted with the state.
"""

from __future__ import annotations

import hashlib
import io
from typing import Final, Literal

import polars as pl

from fordstone.errors import ConfigError, DamagedError
from fordstone.model.manifest import RunRef

Compression = Literal["zstd", "lz4", "none"]
COMPRESSIONS: Final[tuple[Compression, ...]] = ("zstd", "lz4", "none")
DIGEST_CHARS: Final = 64
_HEX: Final = frozenset("0123456789abcdef")
_FILE_MAGIC: Final = b"ARROW1"
_FILE_ROWS_MIN: Final = 50_000
"""From this many rows on the file format is quicker. Decided by rows alone, so that equal frames give equal files."""
_CHUNK_ROWS_MIN: Final = 16_384
"""Chunks smaller than this on average are joined first: each one costs a kilobyte and a header to parse."""


def encode_run(frame: pl.DataFrame, compression: Compression) -> tuple[RunRef, memoryview]:
    """The reference of a frame and the bytes it names. The view is of memory that nobody else holds."""
    if compression not in COMPRESSIONS:
        raise ConfigError(f"compression {compression!r} does not exist. Choose one of {', '.join(COMPRESSIONS)}.")
    chunks = frame.n_chunks()
    if chunks > 1 and frame.height < chunks * _CHUNK_ROWS_MIN:
        frame = frame.rechunk()
    buffer = io.BytesIO()
    codec: Literal["zstd", "lz4", "uncompressed"] = "uncompressed" if compression == "none" else compression
    # A clone, since writing locks its frame while it waits for the interpreter: whoever holds the interpreter and asks the
    # same frame anything (its size, its height) would wait for the lock, and both for ever.
    own = frame.clone()
    if frame.height >= _FILE_ROWS_MIN:
        own.write_ipc(buffer, compression=codec)
    else:
        own.write_ipc_stream(buffer, compression=codec)
    data = buffer.getbuffer()
    return RunRef(digest=digest_of(data), size_bytes=data.nbytes, rows=frame.height), data


def decode_run(data: bytes, ref: RunRef) -> pl.DataFrame:
    """The frame that `ref` names; `DamagedError` if these bytes are not it."""
    problem = run_problem(data, ref)
    if problem is not None:
        raise DamagedError(f"run {short(ref.digest)} is damaged: it {problem}.")
    try:
        frame = pl.read_ipc(data) if data.startswith(_FILE_MAGIC) else pl.read_ipc_stream(data)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, OverflowError) as error:
        raise DamagedError(f"run {short(ref.digest)} has the right digest but is no Arrow IPC: {error}.") from error
    if frame.height != ref.rows:
        raise DamagedError(f"run {short(ref.digest)} has {frame.height} rows, the manifest says {ref.rows}.")
    return frame


def run_problem(data: bytes | memoryview, ref: RunRef) -> str | None:
    """What is wrong with the bytes of a run, if anything, as what comes after "it". Parses nothing."""
    size_bytes = len(data)
    if size_bytes != ref.size_bytes:
        return f"has {size_bytes} bytes, the manifest says {ref.size_bytes}"
    digest = digest_of(data)
    if digest != ref.digest:
        return f"has other bytes, of digest {short(digest)}"
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
