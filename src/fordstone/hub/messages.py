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
from fordstone.protocol.chain import CHAIN_CHARS, CHAIN_START, chained
from fordstone.protocol.progress import Counters
from fordstone.protocol.quarantine import Skip
from fordstone.state.base import RunRef

API: Final = "/v1"
RUNBOOK: Final = "docs/how-to/restore-a-hub.md"
"""The page that errors name where a hub was, or should be, restored from a backup."""
EPOCHS_PER_COMMIT_MAX: Final = 1_000
"""Maximum number of epochs in one commit."""
RUNS_PER_COMMIT_MAX: Final = 40_000
"""Maximum number of runs that a commit names. A node sends up to 10,000 of rows, or one epoch, and up to half of these of state."""
RUNS_PER_SEGMENT_MAX: Final = 5_000
"""Maximum number of runs of one stream in one epoch. A node has one per task, and one more per attempt to seal that was given up."""
BLOB_BYTES_MAX: Final = 256 << 20
BODY_BYTES_MAX: Final = 16 << 20
"""Maximum size of a JSON body."""
WAIT_SECONDS_MAX: Final = 60.0
"""Maximum wait of a long poll."""
PAGE_ENTRIES_MAX: Final = 10_000
LIST_ROWS_MAX: Final = 1_000
"""Maximum number of nodes or epochs on one page of a list. A node has up to 2,000 characters of text."""
LIST_STREAMS_MAX: Final = 100
"""Maximum number of streams on one page of a list: each is summed up over all of its nodes."""
NODES_PER_REQUEST_MAX: Final = 1_000
"""Maximum number of nodes whose epochs one request asks for."""
NAMES_MAX: Final = 1_000
"""Maximum number of streams, or of control tables, in one epoch."""
DIGESTS_MAX: Final = 100_000
POSITIONS_PER_REQUEST_MAX: Final = 10_000
"""Maximum number of positions, of all streams, that a consumer reports in one request."""
NUMBER_MAX: Final = 2**63 - 1

Number: TypeAlias = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
TimeUs: TypeAlias = Annotated[int, Meta(ge=TIME_MIN_US, le=TIME_MAX_US)]
Name: TypeAlias = Annotated[str, Meta(pattern=rf"\A{NAME_PATTERN}\Z")]
Digest: TypeAlias = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{DIGEST_CHARS}}}\Z")]
"""The texts that `epochs.run_file.is_digest` takes."""
Word: TypeAlias = Annotated[str, Meta(pattern=r"\A[!-~]{1,200}\Z")]
"""A random word that identifies an owner."""
Chain: TypeAlias = Annotated[str, Meta(pattern=rf"\A([0-9a-f]{{{CHAIN_CHARS}}})?\Z")]
"""As `protocol.chain` makes it; empty at epoch 0."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One JSON body."""


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, order=True):
    """The fencing number of the owner of a pipeline on a node: the hub's, then the local incarnation (rule 18)."""

    hub: Number
    local: Number


class StreamSegment(Message, frozen=True):
    """The rows of one stream in one epoch, and the watermark after them."""

    runs: Annotated[tuple[RunRef, ...], Meta(max_length=RUNS_PER_SEGMENT_MAX)]
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
    sealed_as: Digest | None = None
    """The digest of this epoch as it was sealed, if it is sent in another form since: its rows were dropped, or damaged and
    computed again in other bytes. None: it is sent as it was sealed."""

    def digest(self) -> str:
        """Return what identifies the epoch: two forms of a sealed epoch have the same digest."""
        if self.sealed_as is not None:
            return self.sealed_as
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
    after: Chain | None = None
    """The chain before the first epoch, as the node has it. The hub rejects the commit if its own is another one. A hub that was
    restored from a backup takes the chain from here if the node no longer has all epochs between."""


class Committed(Message, frozen=True):
    """201, or 200 if all of it was there already."""

    head: int
    chain: str
    """At `head`."""
    already: bool = False


ErrorCode: TypeAlias = Literal[
    "gap", "other_content", "not_head", "stale_generation", "missing_blobs", "held", "wrong_digest", "too_large", "too_many_requests",
    "bad_request", "bad_name", "unauthorised", "forbidden", "not_found", "storage", "gone", "failed", "limit_reached", "forgotten",
    "unread",
]  # fmt: skip
STATUS: Final[dict[ErrorCode, int]] = {
    "gap": 409,
    "other_content": 409,
    "held": 409,
    "limit_reached": 409,
    "unread": 409,
    "not_head": 409,
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
    "forgotten": 410,
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
    start: Word
    """Random, made with every start: a copy of a directory has the same incarnations, but other starts."""
    head: Number = 0
    """The newest epoch that the node has in common with the hub. A later start of the same holder must name the hub's newest one."""
    chain: Chain = CHAIN_START
    """The chain at `head`, which the node computes from its own epochs."""
    log_id: Annotated[str, Meta(max_length=200)] = ""
    """The log that acknowledged the node's epochs; empty: none did, or it is unknown."""
    granted: Number = 0
    """The hub generation that the state directory was granted last; 0: none."""
    take_over: bool = False
    """Fence the previous holder. Otherwise another holder's lease is respected (`held`); it never expires."""


class Lease(Message, frozen=True):
    """The right to commit."""

    generation: Generation
    head: int
    """The newest epoch that the hub has; 0: none."""
    chain: str
    """The chain at `head`."""
    log_id: str


class Head(Message, frozen=True):
    """`GET .../head`: the node's newest epoch at the hub."""

    log_id: str
    """The hub's log: another id of the same family after a restore (`protocol.restored`), and of another family at another hub."""
    epoch: int = 0
    chain: str = CHAIN_START
    """At `epoch`: it stands for every epoch up to it (`protocol.chain`)."""
    generation: Generation | None = None
    resync: bool = False
    """The hub was restored from a backup, and this node has not been in contact since."""


class NodePosition(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How far the log of a node was read: an epoch, and the chain at it (rule 24). In JSON `[22, "9f86d0..."]`.

    Of a control table it is a version.
    """

    epoch: Number = 0
    chain: Chain = CHAIN_START

    @property
    def identity(self) -> str:
        """A position as it is kept in `PartitionCut.identity`: an epoch that was seen, and the chain at it.

        The epoch may be another one than that of the cut: what was read ahead of a barrier is in the log as well.
        """
        return f"{self.epoch}:{self.chain}" if self.epoch else ""

    @classmethod
    def of_identity(cls, identity: str) -> NodePosition:
        """The position in `PartitionCut.identity`; epoch 0 if there is none."""
        epoch, _, chain = identity.partition(":")
        return cls(int(epoch), chain) if epoch.isdigit() else cls()


class StreamEpoch(Message, frozen=True):
    """One epoch of one stream of one node, as the hub has it."""

    seq: int
    """The hub's own number of the commit: grows, the same for all epochs that were committed together."""
    node: str
    epoch: int
    chain: str
    """At this epoch. It covers every epoch of the node up to it, those without this stream too."""
    runs: tuple[RunRef, ...]
    watermark_us: int
    received_us: int
    """By the hub's clock."""
    ended: bool = False


class StreamNode(Message, frozen=True):
    """The newest epoch of one stream of one node that may be read, and what the hub has removed before it."""

    node: str
    seq: int
    """The hub's number of the newest commit, or of the newest change of the node's quarantine."""
    epoch: int
    """0: none may be read, because of a quarantine."""
    chain: str
    """At `epoch`."""
    watermark_us: int
    received_us: int
    """By the hub's clock."""
    ended: bool = False
    removed: int = 0
    """The newest epoch of the stream that the hub has removed; 0: none. By now it may be more."""
    size_bytes: int = 0
    """Of all epochs that the hub keeps."""
    quarantined: int = 0
    """The first epoch of the node that is not read (rule 25); 0: the node is not in quarantine."""


class StreamNodes(Message, frozen=True):
    """`GET /pipelines/{p}/streams/{s}/nodes?after=SEQ&log=ID&wait=SECONDS&limit=N` (long poll): the nodes with commits after SEQ.

    In order of `seq`. If ID is not that of the log, from the start.
    """

    nodes: tuple[StreamNode, ...]
    next: int
    """The `after` of the next request."""
    log_id: str
    more: bool = False
    """There is more already."""
    blobs: str | None = None
    """An fsspec URL with blobs as `<digest[:2]>/<digest>`, for readers that can reach it. None: only through the hub."""


class EpochRange(Message, frozen=True):
    """Which epochs of a node a reader asks for."""

    after: Number = 0
    until: Number | None = None
    """None: whatever may be read. A number: what was planned, also if the node is in quarantine since."""
    seen: NodePosition = NodePosition()
    """A position that was read from this log. If the hub's log has other content there, the node is stopped."""
    earliest: bool = False
    """If the hub has removed epochs after `after`, begin with the first one that it keeps. Otherwise the node is stopped."""


class EpochsRequest(Message, frozen=True):
    """`POST /pipelines/{p}/streams/{s}/epochs`: the next epochs of these nodes, the most urgent node first."""

    nodes: Annotated[dict[Name, EpochRange], Meta(max_length=NODES_PER_REQUEST_MAX)]
    rows_max: Number = NUMBER_MAX
    """About how many rows per node; an epoch with more is given alone."""
    epochs_max: Annotated[int, Meta(ge=1, le=PAGE_ENTRIES_MAX)] = PAGE_ENTRIES_MAX
    """Maximum number of epochs per node."""
    listed: bool = True
    """False: only where these epochs end."""


StopCode: TypeAlias = Literal["beyond", "differs", "unknown", "gone", "lost"]
"""Why a node is stopped: `beyond`, `differs` and `unknown` as in `protocol.chain`; `gone`: unread epochs were removed; `lost`: they were
lost with a log that was restored from a backup."""


class NodeStop(Message, frozen=True):
    """Why the epochs of a node are not given."""

    code: StopCode
    reason: str
    """For a person."""
    seen: int = 0
    """The epoch that the reader has seen, if the log does not fit it."""


class NodeEpochs(Message, frozen=True):
    """The epochs of one node, in order."""

    epochs: tuple[StreamEpoch, ...] = ()
    """Empty if they were not to be listed."""
    first: int = 0
    """The first of them; 0: there is none."""
    end: NodePosition = NodePosition()
    """The last of them; without any, the last of those that are passed over. Its chain may be unknown (empty)."""
    skipped: int = 0
    """Number of epochs before them that are passed over because the operator said so."""
    stopped: NodeStop | None = None
    awaited: str = ""
    """Why there is nothing yet, for a person: the hub was restored from a backup, and the node may bring back what the log lacks."""


class StreamEpochs(Message, frozen=True):
    """The response to an `EpochsRequest`. Nodes that had no room in it are left out: ask for them again. One is always in it."""

    nodes: dict[str, NodeEpochs]
    log_id: str
    blobs: str | None = None
    """As in `StreamNodes`."""


class ConsumerPosition(Message, frozen=True):
    """`PUT /pipelines/{p}/consumers/{c}`: this consumer will never ask for epochs up to these again: stream to node to position."""

    streams: Annotated[
        dict[Name, Annotated[dict[Name, NodePosition], Meta(max_length=POSITIONS_PER_REQUEST_MAX)]],
        Meta(max_length=NAMES_MAX),
    ]
    """Positions of nodes of which the hub has nothing in that stream are passed over."""


class Acknowledged(Message, frozen=True):
    """The response to a `ConsumerPosition`. Positions that are not of this log are not kept; the others are."""

    refused: dict[str, dict[str, str]] = {}
    """Stream to node to the reason, for a person."""


class ControlPublish(Message, frozen=True):
    """`POST /pipelines/{p}/control/{name}`: a version of a control table; idempotent by (owner, batch), gaps allowed.

    The hub gives each owner a generation when it first publishes; an older owner is fenced (`stale_generation`), and so is a former
    start of the same owner. Other rows than those that were published are rejected (`other_content`): `protocol.publication`.
    """

    owner: Word
    """Random, kept with the publisher's checkpoint: a new checkpoint is another owner."""
    batch: Number
    blob: RunRef
    """Its rows have the table's columns and `__op` ('upsert' or 'delete')."""
    snapshot: bool = False
    """The whole table rather than the changes."""
    changes: Digest | None = None
    """The digest of the changes of which a snapshot was made, so that a batch is recognised in either form. None: that of the blob."""
    start: Word | None = None
    """Random, another one for every start of the publisher. None: unknown."""
    resumes_after: Number | None = None
    """The newest batch that was sealed when the publisher started: no batch up to it ever changes. None: it seals nothing."""
    discard_later: bool = False
    """Publish again the batches after `resumes_after`, although they were published before."""


class ControlVersion(Message, frozen=True):
    """One version, numbered by the hub from 1 on. Only a restore from a backup leaves numbers out."""

    version: int
    blob: RunRef
    snapshot: bool
    published_us: int
    owner: str
    batch: int
    chain: str = CHAIN_START
    """Stands for all versions up to this one (`protocol.chain`)."""

    def digest(self) -> str:
        """Return what identifies the version in the chain."""
        content = (self.version, self.snapshot, self.owner, self.batch, self.blob.digest)
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()

    def follows(self, chain: str) -> bool:
        """Whether this is the next version after the one with this chain."""
        return self.chain == chained(chain, self.digest())


class ControlPage(Message, frozen=True):
    """`GET /pipelines/{p}/control/{name}?after=V&chain=C&wait=SECONDS` (long poll).

    Versions after V in order; if V is 0, or `restart` says so, from the newest snapshot on. C is the chain at V; without it V is not
    compared with the log.
    """

    versions: tuple[ControlVersion, ...]
    newest: int
    """The version published last; 0: none."""
    reached: int = 0
    """The number after which versions go on: `newest`, or more after a restore from a backup."""
    restart: str = ""
    """Why the versions do not follow V, for a person: the log has other ones up to it, or no longer keeps it. They give the whole table."""
    blobs: str | None = None


HealthState = Literal["starting", "running", "waiting", "failed", "stopped"]


class Health(Message, frozen=True):
    """`PUT /nodes/{node}/health/{pipeline}`: the state that a node reports, about every ten seconds and when it changes."""

    state: HealthState
    sent_us: TimeUs
    progress: Counters = Counters()
    problem: str = ""
    version: str = ""


REASON_CHARS_MAX: Final = 1_000


class Quarantine(Message, frozen=True):
    """A node that is not read on (rule 25)."""

    epoch: int
    """The first epoch that is not read."""
    reason: str
    """For a person."""
    since_us: int
    by: str
    """The consumer that could not take the epoch, or `OPERATOR`."""


OPERATOR: Final = "operator"


class QuarantineRequest(Message, frozen=True):
    """`PUT /pipelines/{p}/nodes/{node}/quarantine`: do not read this node on. An earlier epoch replaces a later one, and not the other way."""

    epoch: Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
    by: Name


class QuarantineChange(Message, frozen=True):
    """The response to `PUT` and `DELETE` of a quarantine."""

    quarantine: Quarantine | None
    """As it is now; None: the node is read."""
    changed: bool
    seq: int
    """Readers that have listed the log up to this number have seen the change."""


class SkipRequest(Message, frozen=True):
    """`POST /pipelines/{p}/nodes/{node}/skip`: pass over the epochs at which readers stop, up to this one. Releases the node."""

    until: Annotated[int, Meta(ge=0, le=NUMBER_MAX)]


class SkippedEpochs(Message, frozen=True):
    """A range of epochs that readers pass over; `last` may be the one before `first`."""

    first: int
    last: int
    rows: int
    """Of these epochs, as far as the hub has them when they were skipped."""
    at_us: int

    @property
    def span(self) -> Skip:
        return Skip(first=self.first, last=self.last)


class ForgetRequest(Message, frozen=True):
    """`POST /pipelines/{p}/nodes/{node}/forget` and `POST /pipelines/{p}/streams/{s}/forget`: remove it, for it is gone for good."""

    discard_unread: bool = False
    """Remove also epochs that may still be read. Otherwise they are a reason to reject the request (`unread`)."""


class Forgotten(Message, frozen=True):
    """What was discarded with a node or a stream."""

    epochs: int = 0
    """Those that not all registered consumers had read, or for which none was registered."""
    rows: int = 0
    """Of these epochs."""
    retired: bool = False
    """The name of the node stays reserved: a node that comes back under it is rejected (`forgotten`)."""
    changed: bool = True
    """False: it was forgotten before."""


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
    lost: tuple[tuple[int, int], ...] = ()
    """First and last of each range of epochs that was lost when the hub was restored from a backup."""
    resync: bool = False
    """The hub was restored from a backup, and this node has not been in contact since: it may have epochs that the hub lost."""
    quarantine: Quarantine | None = None
    skips: tuple[SkippedEpochs, ...] = ()


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
    """An epoch, in `GET /epochs`."""

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


class Nodes(Message, frozen=True, omit_defaults=True):
    """`GET /nodes?pipeline=&after=&limit=`: one page, by pipeline, then node."""

    nodes: tuple[NodeInfo, ...]
    next: str | None = None
    """The `after` of the next request; None: this is the last page."""


class Streams(Message, frozen=True, omit_defaults=True):
    """`GET /streams?after=&limit=`: one page, by pipeline, then stream."""

    streams: tuple[StreamInfo, ...]
    next: str | None = None


class Epochs(Message, frozen=True, omit_defaults=True):
    """`GET /epochs?pipeline=&node=&after=&limit=`: one page, newest first."""

    epochs: tuple[EpochInfo, ...]
    next: str | None = None


class ScrubPage(Message, frozen=True, omit_defaults=True):
    """`POST /scrub?after=DIGEST`: the hub has read some blobs and compared their digests, in order of the digests."""

    blobs: int
    size_bytes: int
    damaged: tuple[str, ...] = ()
    next: str | None = None
    """The `after` of the next request; None: these were the last ones."""


class DamagedBlob(Message, frozen=True):
    """A blob whose content is not what its digest says, or is gone. It counts as missing until it is uploaded again."""

    digest: str
    size_bytes: int
    references: int
    """How many epochs, checkpoints and versions of control tables name it."""
    named_by: tuple[str, ...]
    """Some of these, for a person."""


class DamagedBlobs(Message, frozen=True, omit_defaults=True):
    """`GET /damaged?after=DIGEST`: one page, in order of the digests."""

    blobs: tuple[DamagedBlob, ...]
    next: str | None = None


class Digests(Message, frozen=True):
    """`POST /blobs/missing`: which of these does the hub not have? The response is the same message."""

    digests: Annotated[tuple[Digest, ...], Meta(max_length=DIGESTS_MAX)]


ENDED_US: Final = TIME_MAX_US
