"""The messages between nodes, hub and center: JSON bodies over HTTP, frozen and strict.

Blobs (runs, segments, manifests) are sent apart, named by their digest, and the hub never reads their content. Every name
and number has a bound: in its type, or in the hub's `handlers`. `protocol.delivery` and `protocol.lease` decide what follows.
Nothing within these bounds can leave a directory, overflow a column of the log or make a page of it unreadable.

Times are microseconds, UTC.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fordstone.epochs.run_file import DIGEST_CHARS
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.plan.ids import NAME_PATTERN
from fordstone.protocol.progress import Counters
from fordstone.state.base import RunRef

API: Final = "/v1"
EPOCHS_PER_COMMIT_MAX: Final = 1_000
"""Maximum number of epochs in one commit."""
RUNS_PER_COMMIT_MAX: Final = 100_000
BLOB_BYTES_MAX: Final = 256 << 20
BODY_BYTES_MAX: Final = 16 << 20
"""Maximum size of a JSON body."""
WAIT_SECONDS_MAX: Final = 60.0
"""Maximum wait of a long poll."""
PAGE_ENTRIES_MAX: Final = 10_000
NAMES_MAX: Final = 1_000
"""Maximum number of streams, or of control tables, in one epoch."""
DIGESTS_MAX: Final = 100_000
NUMBER_MAX: Final = 2**63 - 1

Number: TypeAlias = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
TimeUs: TypeAlias = Annotated[int, Meta(ge=TIME_MIN_US, le=TIME_MAX_US)]
Name: TypeAlias = Annotated[str, Meta(pattern=rf"\A{NAME_PATTERN}\Z")]
Digest: TypeAlias = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{DIGEST_CHARS}}}\Z")]
"""The texts that `epochs.run_file.is_digest` takes."""
Word: TypeAlias = Annotated[str, Meta(pattern=r"\A[!-~]{1,200}\Z")]
"""A random word that identifies an owner."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One JSON body."""


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, order=True):
    """The fencing number of the owner of a pipeline on a node: the hub's, then the local incarnation (rule 18)."""

    hub: Number
    local: Number


class StreamSegment(Message, frozen=True):
    """The rows of one stream in one epoch, and the watermark after them."""

    runs: tuple[RunRef, ...]
    watermark_us: TimeUs = TIME_MIN_US
    """`TIME_MAX_US`: the stream has ended."""


class EpochEntry(Message, frozen=True):
    """One sealed epoch of a node, as it is sent."""

    epoch: int
    streams: Annotated[dict[Name, StreamSegment], Meta(max_length=NAMES_MAX)]
    created_us: TimeUs
    """By the node's clock."""
    ended: bool = False
    controls: Annotated[dict[Name, Number], Meta(max_length=NAMES_MAX)] = {}
    """The version of each control table that the node had taken when this epoch ended."""

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


class Checkpoint(Message, frozen=True):
    """A manifest and the state it needs, all of them blobs."""

    epoch: int
    manifest: RunRef
    """`rows` is 0."""
    state: tuple[RunRef, ...]

    def runs(self) -> tuple[RunRef, ...]:
        """Return every blob that it needs."""
        return (self.manifest, *self.state)


class Commit(Message, frozen=True):
    """`POST /pipelines/{p}/nodes/{node}/epochs/{a}-{b}`: epochs a to b, visible together. Only the last may have a checkpoint."""

    generation: Generation
    epochs: Annotated[tuple[EpochEntry, ...], Meta(max_length=EPOCHS_PER_COMMIT_MAX)]
    checkpoint: Checkpoint | None = None


class Committed(Message, frozen=True):
    """201, or 200 if all of it was there already."""

    head: int
    already: bool = False


ErrorCode: TypeAlias = Literal[
    "gap", "other_content", "stale_generation", "missing_blobs", "held", "wrong_digest", "too_large", "too_many_requests",
    "bad_request", "bad_name", "unauthorised", "forbidden", "not_found", "storage", "gone", "failed",
]  # fmt: skip
STATUS: Final[dict[ErrorCode, int]] = {
    "gap": 409,
    "other_content": 409,
    "held": 409,
    "stale_generation": 412,
    "missing_blobs": 424,
    "wrong_digest": 400,
    "too_large": 413,
    "too_many_requests": 429,
    "bad_request": 400,
    "bad_name": 400,
    "unauthorised": 401,
    "forbidden": 403,
    "not_found": 404,
    "storage": 507,
    "gone": 410,
    "failed": 500,
}
"""Which HTTP status belongs to which error."""


class Refusal(Message, frozen=True):
    """The body of every response that is not 2xx."""

    error: ErrorCode
    message: str
    """What happened and what to do, for a person."""
    next_epoch: int | None = None
    generation: Generation | None = None
    missing: tuple[str, ...] = ()


class Rejection(Exception):  # noqa: N818 - it is a response rather than an error
    """The request is rejected, and nothing of it is kept. `middleware` turns it into a response."""

    def __init__(
        self,
        error: ErrorCode,
        message: str,
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        next_epoch: int | None = None,
        generation: Generation | None = None,
        missing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = STATUS[error] if status is None else status
        self.headers = dict(headers or {})
        self.refusal = Refusal(
            error=error, message=message, next_epoch=next_epoch, generation=generation, missing=missing
        )

    def body(self) -> bytes:
        return msgspec.json.encode(self.refusal)


class LeaseRequest(Message, frozen=True):
    """`POST /pipelines/{p}/nodes/{node}/lease`: take or renew the right to commit."""

    holder: Word
    """Random, kept in the state directory: the same directory is the same holder."""
    local: Number
    """The incarnation: one more with every start, fsynced."""
    take_over: bool = False
    """Fence the previous holder. Otherwise another holder's lease is respected (`held`); it never expires."""


class Lease(Message, frozen=True):
    """The right to commit."""

    generation: Generation
    head: int
    """The newest epoch that the hub has; 0: none."""


class Head(Message, frozen=True):
    """`GET .../head`: the node's newest epoch at the hub."""

    epoch: int = 0
    digest: str = ""
    """Of the newest entry."""
    generation: Generation | None = None


class StreamEpoch(Message, frozen=True):
    """One epoch of one stream of one node, as the hub has it."""

    seq: int
    """The hub's own number of the commit: grows, the same for all epochs that were committed together."""
    node: str
    epoch: int
    runs: tuple[RunRef, ...]
    watermark_us: int
    received_us: int
    """By the hub's clock."""
    ended: bool = False


class StreamPage(Message, frozen=True):
    """`GET /pipelines/{p}/streams/{s}/epochs?after=SEQ&wait=SECONDS&limit=N` (long poll): whole commits, in order of `seq`."""

    epochs: tuple[StreamEpoch, ...]
    next: int
    """The `after` of the next request."""
    more: bool = False
    """There is more already."""
    blobs: str | None = None
    """An fsspec URL with blobs as `<digest[:2]>/<digest>`, for readers that can reach it. None: only through the hub."""


class ConsumerPosition(Message, frozen=True):
    """`PUT /pipelines/{p}/consumers/{c}`: this consumer will never ask for these epochs again: stream to node to epoch."""

    streams: Annotated[
        dict[Name, Annotated[dict[Name, Number], Meta(max_length=PAGE_ENTRIES_MAX)]], Meta(max_length=NAMES_MAX)
    ]


class ControlPublish(Message, frozen=True):
    """`POST /pipelines/{p}/control/{name}`: a version of a control table; idempotent by (owner, batch), gaps allowed.

    The hub gives each owner a generation when it first publishes; an older owner is fenced (`stale_generation`).
    """

    owner: Word
    """Random, kept with the publisher's checkpoint: a new checkpoint is another owner."""
    batch: Number
    blob: RunRef
    """Its rows have the table's columns and `__op` ('upsert' or 'delete')."""
    snapshot: bool = False
    """The whole table rather than the changes."""


class ControlVersion(Message, frozen=True):
    """One version, numbered by the hub from 1 without gaps."""

    version: int
    blob: RunRef
    snapshot: bool
    published_us: int
    owner: str
    batch: int


class ControlPage(Message, frozen=True):
    """`GET /pipelines/{p}/control/{name}?after=V&wait=SECONDS` (long poll).

    Versions after V in order; if V is 0 or older than what is kept, from the newest snapshot on.
    """

    versions: tuple[ControlVersion, ...]
    newest: int
    blobs: str | None = None


HealthState = Literal["starting", "running", "waiting", "failed", "stopped"]


class Health(Message, frozen=True):
    """`PUT /nodes/{node}/health/{pipeline}`: the state that a node reports, about every ten seconds and when it changes."""

    state: HealthState
    sent_us: TimeUs
    progress: Counters = Counters()
    problem: str = ""
    version: str = ""


class NodeInfo(Message, frozen=True):
    """A pipeline on a node, in `GET /nodes`."""

    node: str
    pipeline: str
    head: int
    generation: Generation | None
    seen_us: int
    """When the node last contacted the hub."""
    committed_us: int | None
    health: Health | None = None


class StreamInfo(Message, frozen=True):
    """A stream, in `GET /streams`."""

    pipeline: str
    stream: str
    nodes: int
    epochs: int
    """Kept."""
    rows: int
    size_bytes: int
    watermark_us: int
    """The least over the nodes."""
    consumers: dict[str, int]
    """Number of epochs that each consumer has still to read."""


class EpochInfo(Message, frozen=True):
    """An epoch, in `GET /epochs?pipeline=&node=&limit=`: newest first."""

    seq: int
    pipeline: str
    node: str
    epoch: int
    first: int
    last: int
    """Of the commit that it came with."""
    rows: int
    size_bytes: int
    received_us: int
    created_us: int
    generation: Generation


class Nodes(Message, frozen=True):
    """`GET /nodes`."""

    nodes: tuple[NodeInfo, ...]


class Streams(Message, frozen=True):
    """`GET /streams`."""

    streams: tuple[StreamInfo, ...]


class Epochs(Message, frozen=True):
    """`GET /epochs`."""

    epochs: tuple[EpochInfo, ...]


class Digests(Message, frozen=True):
    """`POST /blobs/missing`: which of these does the hub not have? The response is the same message."""

    digests: Annotated[tuple[Digest, ...], Meta(max_length=DIGESTS_MAX)]


ENDED_US: Final = TIME_MAX_US
