"""The client of the hub: every call of `hub.messages`, over HTTP.

Used by nodes, centers and the command line, from any thread. It tries each call once; `retry` tries a call again for a bounded
time. What it reads is checked: bodies have bounds in bytes and time, blobs have their digest.

`HubAwayError`: no response, or none that makes sense; trying again may help. `HubRefusedError`: the hub said no.
`DamagedError`: a blob came whole, with other bytes than its name says.
"""

from __future__ import annotations

import io
import itertools
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import urllib3

from fordstone.epochs.run_file import digest_of, is_digest
from fordstone.errors import ConfigError, DamagedError, HubAwayError, HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.direct import DirectBlobs
from fordstone.hub.messages import (
    API,
    BLOB_BYTES_MAX,
    BODY_BYTES_MAX,
    WAIT_SECONDS_MAX,
    Acknowledged,
    Checkpoint,
    Commit,
    Committed,
    ConsumerPosition,
    ControlPage,
    ControlPublish,
    ControlVersion,
    DamagedBlobs,
    Digests,
    Epochs,
    EpochsRequest,
    ForgetRequest,
    Forgotten,
    Head,
    Health,
    Lease,
    LeaseRequest,
    Message,
    Nodes,
    QuarantineChange,
    QuarantineRequest,
    Refusal,
    ScrubPage,
    SkippedEpochs,
    SkipRequest,
    StreamEpochs,
    StreamNodes,
    Streams,
)
from fordstone.protocol.retry import Backoff
from fordstone.state.base import RunRef
from fordstone.structs import prepare_structs

M = TypeVar("M", bound=Message)
P = TypeVar("P", bound=Nodes | Streams | Epochs | DamagedBlobs)
R = TypeVar("R")
T = TypeVar("T")
TIMEOUT_SECONDS: Final = 30.0
CONNECT_SECONDS_MAX: Final = 10.0
WAIT_MARGIN_SECONDS: Final = 10.0
"""Grace after the end of a long poll, for its response to come."""
SPEED_MIN_BYTES: Final = 4096
"""Bytes per second at which a body may take longer than its timeout."""
CONNECTIONS_MAX: Final = 8
CLIENTS_MAX: Final = 16
"""Maximum number of hubs (and tokens) to which a Python process keeps connections by `client_of`."""
CHUNK_BYTES: Final = 1 << 16
WHOLE_BYTES_MAX: Final = 1 << 20
"""Bodies up to this size are handed to the socket at once; larger ones piecewise, each piece with its own timeout."""
BUFFERED_BYTES_MAX: Final = 2 << 20
BUFFERED_SPEED_MIN: Final = 8192
"""How much of a sent body may still be in the socket, and the least speed at which it leaves, before the response can come."""
UNACKNOWLEDGED_SECONDS_MAX: Final = 60.0
"""Timeout of a connection on which nothing is acknowledged, however much is still to be sent."""
RETRY_AFTER_SECONDS_MAX: Final = 3600.0
LISTED_ROWS_MAX: Final = 1_000_000
"""Maximum number of rows of a list, over all of its pages."""
MISSING_DIGESTS_MAX: Final = 10_000
"""Maximum in one call."""
RETRY: Final = Backoff(first_us=100_000, max_us=5_000_000)
RETRY_SECONDS_MAX: Final = 120.0
"""Maximum of all pauses of one `retry`."""
_AWAY: Final = frozenset({408, 425, 429})
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


class HubClient:
    """One hub, as one holder of a token sees it."""

    def __init__(self, address: HubAddress, *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        prepare_structs()
        self.address = address
        self._timeout_s = timeout_s
        self._direct = DirectBlobs() if address.direct else None
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "fordstone"}
        if address.token is not None:
            self._headers["Authorization"] = f"Bearer {address.token}"
        options: dict[str, Any] = {"ssl_context": _tls(address.ca)} if address.url.startswith("https:") else {}
        self._pool = urllib3.PoolManager(
            num_pools=1,
            maxsize=CONNECTIONS_MAX,
            retries=False,
            blocksize=CHUNK_BYTES,
            socket_options=_socket_options(),
            **options,
        )

    def close(self) -> None:
        self._pool.clear()

    # Blobs.

    def put_blob(self, digest: str, data: bytes) -> None:
        """Store a blob under its digest; it may be there already. It is durable on return."""
        self._call("PUT", f"{API}/blobs/{_digest(digest)}", body=data, kind="application/octet-stream")

    def get_blob(self, digest: str) -> bytes:
        """A blob, through the hub; its digest is checked."""
        data = self._call("GET", f"{API}/blobs/{_digest(digest)}", bytes_max=BLOB_BYTES_MAX)
        if digest_of(data) != digest:
            raise DamagedError(
                f"blob {digest[:12]} came from the hub at {self.address.url} with other bytes than its name says."
            )
        return data

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        """A blob, checked: from the hub's store where that can be reached from here, else through the hub."""
        if direct_url is not None and self._direct is not None:
            found = self._direct.read(direct_url, ref)
            if found is not None:
                return found
        data = self.get_blob(ref.digest)
        if len(data) != ref.size_bytes:
            raise DamagedError(f"blob {ref.digest[:12]} has {len(data)} bytes, what names it says {ref.size_bytes}.")
        return data

    def missing(self, digests: Iterable[str]) -> set[str]:
        """Which of these blobs the hub does not have."""
        asked, found = list(dict.fromkeys(digests)), set[str]()
        for start in range(0, len(asked), MISSING_DIGESTS_MAX):
            some = Digests(digests=tuple(asked[start : start + MISSING_DIGESTS_MAX]))
            found |= set(self._ask("POST", f"{API}/blobs/missing", Digests, body=some).digests)
        return found & set(asked)

    # A node's calls.

    def lease(self, pipeline: str, node: str, request: LeaseRequest) -> Lease:
        return self._ask("POST", f"{_node(pipeline, node)}/lease", Lease, body=request)

    def head(self, pipeline: str, node: str) -> Head:
        """The newest epoch of the node at the hub; 0 if the hub does not know the node."""
        return self._ask("GET", f"{_node(pipeline, node)}/head", Head)

    def checkpoint(self, pipeline: str, node: str) -> Checkpoint | None:
        try:
            return self._ask("GET", f"{_node(pipeline, node)}/checkpoint", Checkpoint)
        except HubRefusedError as error:
            if error.code == "not_found":
                return None
            raise

    def commit(self, pipeline: str, node: str, commit: Commit) -> Committed:
        first, last = commit.epochs[0].epoch, commit.epochs[-1].epoch
        return self._ask("POST", f"{_node(pipeline, node)}/epochs/{first}-{last}", Committed, body=commit)

    def report_health(self, node: str, pipeline: str, health: Health) -> None:
        self._call("PUT", f"{API}/nodes/{_part(node)}/health/{_part(pipeline)}", body=_ENCODER.encode(health))

    # A center's calls.

    def stream_nodes(
        self,
        pipeline: str,
        stream: str,
        *,
        after: int = 0,
        log_id: str | None = None,
        wait_s: float = 0.0,
        limit: int | None = None,
    ) -> StreamNodes:
        """The nodes that have committed to a stream after `after`; waits up to `wait_s` for one. All nodes if the log is another one."""
        path = f"{_stream(pipeline, stream)}/nodes"
        return self._ask("GET", path, StreamNodes, query={"after": after, "log": log_id, "limit": limit}, wait_s=wait_s)

    def stream_epochs(self, pipeline: str, stream: str, request: EpochsRequest) -> StreamEpochs:
        """The next epochs of some nodes of a stream."""
        return self._ask("POST", f"{_stream(pipeline, stream)}/epochs", StreamEpochs, body=request)

    def consumer(self, pipeline: str, consumer: str, position: ConsumerPosition) -> Acknowledged:
        """Register a consumer, or report its position: the hub may drop what every consumer has passed."""
        path = f"{API}/pipelines/{_part(pipeline)}/consumers/{_part(consumer)}"
        return self._ask("PUT", path, Acknowledged, body=position)

    def quarantine(self, pipeline: str, node: str, request: QuarantineRequest) -> QuarantineChange:
        """Stop reading a node at an epoch; the same again changes nothing."""
        return self._ask("PUT", f"{_node(pipeline, node)}/quarantine", QuarantineChange, body=request)

    def release(self, pipeline: str, node: str) -> QuarantineChange:
        """Let readers try a node again. For operators."""
        return self._ask("DELETE", f"{_node(pipeline, node)}/quarantine", QuarantineChange)

    def skip(self, pipeline: str, node: str, request: SkipRequest) -> SkippedEpochs:
        """Let readers pass over the epochs at which they stop. For operators."""
        return self._ask("POST", f"{_node(pipeline, node)}/skip", SkippedEpochs, body=request)

    def forget_node(self, pipeline: str, node: str, request: ForgetRequest) -> Forgotten:
        """Remove a node that is gone for good, with its epochs. For operators."""
        return self._ask("POST", f"{_node(pipeline, node)}/forget", Forgotten, body=request)

    def forget_stream(self, pipeline: str, stream: str, request: ForgetRequest) -> Forgotten:
        """Remove a stream that is gone for good, with its epochs of all nodes. For operators."""
        return self._ask("POST", f"{_stream(pipeline, stream)}/forget", Forgotten, body=request)

    def forget_consumer(self, pipeline: str, consumer: str) -> None:
        """Remove a consumer: the hub keeps nothing for it any more. It may be gone already."""
        self._call("DELETE", f"{API}/pipelines/{_part(pipeline)}/consumers/{_part(consumer)}")

    def publish(self, pipeline: str, control: str, version: ControlPublish) -> ControlVersion:
        """Publish a version of a control table; the same (owner, batch) again changes nothing."""
        return self._ask("POST", f"{_control(pipeline, control)}", ControlVersion, body=version)

    def control_page(
        self, pipeline: str, control: str, *, after: int = 0, chain: str | None = None, wait_s: float = 0.0
    ) -> ControlPage:
        """The versions of a control table after `after`, where the chain was `chain`; waits up to `wait_s` for one."""
        query = {"after": after, "chain": chain}
        return self._ask("GET", _control(pipeline, control), ControlPage, query=query, wait_s=wait_s)

    # For people.

    def nodes(self, *, pipeline: str | None = None) -> Nodes:
        """All nodes, or those of one pipeline."""
        return Nodes(nodes=tuple(self._pages("nodes", Nodes, lambda page: page.nodes, query={"pipeline": pipeline})))

    def streams(self) -> Streams:
        """All streams."""
        return Streams(streams=tuple(self._pages("streams", Streams, lambda page: page.streams)))

    def epochs(self, *, pipeline: str | None = None, node: str | None = None, limit: int = 100) -> Epochs:
        """The newest epochs first."""
        query = {"pipeline": pipeline, "node": node}
        return Epochs(epochs=tuple(self._pages("epochs", Epochs, lambda page: page.epochs, query=query, limit=limit)))

    def scrub(self, *, after: str = "") -> ScrubPage:
        """Have the hub check some blobs, those after one."""
        return self._ask("POST", f"{API}/scrub", ScrubPage, query={"after": after or None})

    def damaged(self) -> DamagedBlobs:
        """All damaged blobs."""
        return DamagedBlobs(blobs=tuple(self._pages("damaged", DamagedBlobs, lambda page: page.blobs)))

    def _pages(
        self,
        path: str,
        page_type: type[P],
        rows_of: Callable[[P], Sequence[R]],
        *,
        query: Mapping[str, object] | None = None,
        limit: int | None = None,
    ) -> list[R]:
        """The rows of a list, page by page, up to `limit`.

        A list ends: each page but the last has rows, and all pages together not more than a bound.
        """
        found: list[R] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            left = None if limit is None else limit - len(found)
            page = self._ask("GET", f"{API}/{path}", page_type, query={**(query or {}), "after": after, "limit": left})
            rows, after = rows_of(page), page.next
            found += rows
            if after is None:
                break
            if not rows or len(found) > LISTED_ROWS_MAX:
                raise self._away(f"sends a list that does not end after {len(found)} rows")
        return found[:limit]

    def healthz(self) -> bool:
        """Whether the hub says that it is well; never raises."""
        try:
            self._call("GET", "/healthz")
        except (HubAwayError, HubRefusedError):
            return False
        return True

    # Requests.

    def _ask(
        self,
        method: str,
        path: str,
        response_type: type[M],
        *,
        body: Message | None = None,
        query: Mapping[str, object] | None = None,
        wait_s: float = 0.0,
    ) -> M:
        wait_s = min(max(wait_s, 0.0), WAIT_SECONDS_MAX)
        given = {name: value for name, value in (query or {}).items() if value is not None}
        if wait_s:
            given["wait"] = f"{wait_s:g}"
        target = f"{path}?{urlencode(given)}" if given else path
        data = self._call(method, target, body=None if body is None else _ENCODER.encode(body), wait_s=wait_s)
        try:
            return msgspec.json.decode(data, type=response_type)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._away(
                f"sent a response to {method} {path} that is not a {response_type.__name__} ({error})"
            ) from error

    def _call(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        kind: str = "application/json",
        bytes_max: int = BODY_BYTES_MAX,
        wait_s: float = 0.0,
    ) -> bytes:
        headers = dict(self._headers)
        sent: bytes | io.BytesIO | None = body
        if body is not None:
            headers |= {"Content-Type": kind, "Content-Length": str(len(body))}
            sent = io.BytesIO(body) if len(body) > WHOLE_BYTES_MAX else body
        read_s = max(wait_s + (WAIT_MARGIN_SECONDS if wait_s else 0.0), self._timeout_s)
        # What was handed to the socket may still be on its way for long; that it is, TCP sees by itself (see `_socket_options`).
        read_s += min(len(body or b""), BUFFERED_BYTES_MAX) / BUFFERED_SPEED_MIN
        timeout = urllib3.Timeout(connect=min(self._timeout_s, CONNECT_SECONDS_MAX), read=read_s)
        try:
            response = self._pool.request(
                method,
                self.address.url + target,
                body=sent,
                headers=headers,
                timeout=timeout,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
            )
            try:
                data = self._read(response, bytes_max)
            except BaseException:
                response.close()
                raise
            response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._away(f"does not answer {method} {target.partition('?')[0]} ({_reason(error)})") from error
        if 200 <= response.status < 300:  # noqa: PLR2004 - what HTTP calls success
            return data
        raise self._refused(method, target.partition("?")[0], response, data)

    def _read(self, response: urllib3.BaseHTTPResponse, bytes_max: int) -> bytes:
        """The body, within its bounds. `read1` gives what has come, so that a trickle is noticed."""
        began, size_bytes = time.monotonic(), 0
        parts: list[bytes] = []
        while True:
            data = response.read1(CHUNK_BYTES)
            if not data:
                return b"".join(parts)
            parts.append(data)
            size_bytes += len(data)
            if size_bytes > bytes_max:
                raise self._away(f"sent a response of more than {bytes_max} bytes")
            if time.monotonic() - began > self._timeout_s + size_bytes / SPEED_MIN_BYTES:
                raise self._away(f"responds too slowly: {size_bytes} bytes in {time.monotonic() - began:.0f} s")

    def _refused(
        self, method: str, path: str, response: urllib3.BaseHTTPResponse, data: bytes
    ) -> HubAwayError | HubRefusedError:
        refusal: Refusal | None
        try:
            refusal = msgspec.json.decode(data, type=Refusal)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            refusal = None
        if refusal is None or response.status >= 500 or response.status in _AWAY:  # noqa: PLR2004 - the server's own trouble
            said = f": {refusal.message.removesuffix('.')}" if refusal is not None else ""
            retry_after_s = _retry_after(response.headers.get("Retry-After"))
            return self._away(f"responded to {method} {path} with status {response.status}{said}", retry_after_s)
        return HubRefusedError(
            f"the hub at {self.address.url} refused {method} {path}: {refusal.message}",
            status=response.status,
            code=refusal.error,
            refusal=refusal,
        )

    def _away(self, what: str, retry_after_s: float | None = None) -> HubAwayError:
        return HubAwayError(f"the hub at {self.address.url} {what}.", retry_after_s=retry_after_s)


def retry(
    call: Callable[[], T], *, pause: Callable[[float], None] = time.sleep, chance: Callable[[], float] = random.random
) -> T:
    """Return what the call gives, trying again while the hub is away, with growing pauses; then raise its `HubAwayError`."""
    paused_s = 0.0
    for failures in itertools.count(1):
        try:
            return call()
        except HubAwayError as error:
            pause_s = RETRY.wait_s(failures, chance=chance(), retry_after_s=error.retry_after_s)
            paused_s += pause_s
            if paused_s > RETRY_SECONDS_MAX:
                raise
        pause(pause_s)
    raise AssertionError("it counts without end")


def _socket_options() -> list[tuple[int, int, int | bytes]]:
    options = list(urllib3.connection.HTTPConnection.default_socket_options)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Only Linux has it. Elsewhere a dead line is noticed when the response's time is over.
        options.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_SECONDS_MAX * 1000)))
    return options


def _tls(ca: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the hub's certificates cannot be read: {error}. Give a PEM file.") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _reason(error: Exception) -> str:
    """The innermost reason in a few words, without object addresses."""
    while isinstance(reason := getattr(error, "reason", None) or error.__cause__ or error.__context__, Exception):
        error = reason
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after(value: str | None) -> float | None:
    """Only the form in seconds; a date would need both clocks to agree."""
    if value is None or not (value.isascii() and value.isdigit()):
        return None
    return min(float(value[:6]), RETRY_AFTER_SECONDS_MAX)


def _part(name: str) -> str:
    return quote(name, safe="")


def _node(pipeline: str, node: str) -> str:
    return f"{API}/pipelines/{_part(pipeline)}/nodes/{_part(node)}"


def _stream(pipeline: str, stream: str) -> str:
    return f"{API}/pipelines/{_part(pipeline)}/streams/{_part(stream)}"


def _control(pipeline: str, control: str) -> str:
    return f"{API}/pipelines/{_part(pipeline)}/control/{_part(control)}"


def _digest(digest: str) -> str:
    if not is_digest(digest):
        raise ValueError(f"{digest[:80]!r} is no digest")
    return digest


@lru_cache(maxsize=CLIENTS_MAX)
def client_of(address: HubAddress) -> HubClient:
    """The client of this Python process; its users share it and its connections."""
    return HubClient(address)
