"""HTTP: the kinds `http_in`, a source that listens for POST requests, and `http_out`, a sink that makes them.

A request to `http_in` is answered when its rows are synced in the journal. `http_out` gives every request an `Idempotency-Key` that is the same when
an epoch is released again. The server is in `feed`, the client in `sink`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

import msgspec

from fordstone.connectors.base import (
    About,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
    checked_spec,
    options_of,
)
from fordstone.connectors.journal.source import (
    JOURNAL_BYTES,
    IfJournalLost,
    JournalKind,
    JournalOptions,
    open_journal_source,
)
from fordstone.connectors.messages import MESSAGE_BYTES_MAX, MessageFormatName
from fordstone.errors import ConfigError
from fordstone.lang.duration import positive_us
from fordstone.storage.message_log import MessageLog

BODY_BYTES_MAX: Final = 8 << 20
KEYS_MAX: Final = 100_000
_PATH: Final = re.compile(r"/[A-Za-z0-9_./~-]*")
HEALTH_PATH: Final = "/health"


class HttpInOptions(JournalOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan of a source."""

    port: int
    host: str = "127.0.0.1"
    path: str = "/events"
    token: str | None = None
    body_bytes_max: int = BODY_BYTES_MAX
    keys_max: int = KEYS_MAX
    cert_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        where = f"http_in(port={self.port})"
        self.check_journal(where)
        if not 0 <= self.port <= 65_535:  # noqa: PLR2004 - the largest port
            raise ConfigError(f"{where}: ports go from 1 to 65535; 0 takes one that is free.")
        if _PATH.fullmatch(self.path) is None or self.path == HEALTH_PATH:
            raise ConfigError(f"{where}: path={self.path!r} must be like '/events', and not {HEALTH_PATH!r}.")
        if not 0 < self.body_bytes_max <= MESSAGE_BYTES_MAX:
            raise ConfigError(f"{where}: body_bytes_max={self.body_bytes_max} must be from 1 to {MESSAGE_BYTES_MAX}.")
        if self.keys_max < 1:
            raise ConfigError(f"{where}: keys_max={self.keys_max} must be at least 1.")
        if (self.key_file is None) != (self.cert_file is None):
            raise ConfigError(f"{where}: cert_file= and key_file= go together.")
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(
                f"{where}: host={self.host!r} can be reached from other machines, so give token=, the name of an environment variable with a token "
                "that requests must carry."
            )


class HttpOutOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan of a sink."""

    url: str
    token: str | None = None
    rows_per_request: int = 1_000
    timeout: str = "30s"
    ca_file: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.password:
            raise ConfigError(
                f"http_out({self.url!r}): give an address such as 'https://host/path', without user and password (see token=)."
            )
        if self.rows_per_request < 1:
            raise ConfigError(f"http_out({self.url!r}): rows_per_request={self.rows_per_request} must be at least 1.")
        positive_us(self.timeout, what=f"http_out({self.url!r}): timeout")


def http_in(
    *,
    port: int,
    host: str = "127.0.0.1",
    path: str = "/events",
    token: str | None = None,
    format: MessageFormatName = "json",  # noqa: A002 - as in files()
    received: str | None = None,
    time_unit: str = "us",
    body_bytes_max: int = BODY_BYTES_MAX,
    keys_max: int = KEYS_MAX,
    cert_file: str | None = None,
    key_file: str | None = None,
    journal_bytes_max: int = JOURNAL_BYTES,
    if_journal_lost: IfJournalLost = "stop",
) -> ConnectorSpec:
    """Rows that others POST to `http://host:port/path`: a JSON object, an array of objects, or JSON lines; with `format="raw"` the body is one value.

    The answer is 202 when the rows are synced. With an `Idempotency-Key` a repeated request is answered as the first one, and its rows are not
    there twice; the last `keys_max` keys are remembered. `token` is the *name* of a secret (an environment variable), sent as
    `Authorization: Bearer ...`; it may be left out on loopback only. With `cert_file` and `key_file` (PEM) it is `https`. `received=` names a column for the time of the request.
    """
    return checked_spec("http_in", dict(locals()), HttpInOptions)


def http_out(
    url: str,
    *,
    token: str | None = None,
    rows_per_request: int = 1_000,
    timeout: str = "30s",
    ca_file: str | None = None,
) -> ConnectorSpec:
    """A webhook, as a sink: rows are POSTed to `url` as JSON lines, at least once.

    A request carries an `Idempotency-Key` that is the same when it is repeated, and `Fordstone-Epoch`. `token` is the *name* of a secret.
    """
    return checked_spec("http_out", dict(locals()), HttpOutOptions)


def secret(name: str | None, context: OpenContext, where: str) -> str | None:
    """Return a secret by its name; None if there is no name."""
    if name is None:
        return None
    if not context.secrets.get(name):
        raise ConfigError(
            f"{where}: token={name!r} is the name of a secret, and there is no environment variable of that name here. Set it."
        )
    return context.secrets[name]


class HttpInKind(JournalKind):
    """The kind `http_in`."""

    about = About(
        summary="rows that clients POST to this node",
        source="http_in(port=8080)",
        guarantee="The answer comes when the rows are synced in the journal of the node. With an Idempotency-Key, a request that is repeated is taken once. "
        "On the edge only.",
        page="how-to/http.md",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """A client that does not see the answer sends again; only with an `Idempotency-Key` that is noticed."""
        options_of(spec, HttpInOptions)
        return Delivery.AT_LEAST_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        """Open the journal. The server listens from the first read on."""
        from fordstone.connectors.http.feed import HttpFeed  # noqa: PLC0415 - few pipelines need a server

        settings = options_of(spec, HttpInOptions)

        def feed(messages: MessageLog, where: str) -> HttpFeed:
            return HttpFeed(settings, messages, context.home_of(spec).disk, context, where=where)

        called = f"http_in(port={settings.port})"
        return open_journal_source(spec, settings, options, context, called=called, make_feed=feed)


class HttpOutKind(ConnectorKind):
    """The kind `http_out`."""

    about = About(
        summary="a webhook",
        sink='http_out("https://example.com/alarms")',
        guarantee="An epoch is posted when it is sealed, and again after a crash, with the same keys.",
        page="how-to/http.md",
    )

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """An epoch that is released again is sent again, with the same keys."""
        options_of(spec, HttpOutOptions)
        return Delivery.AT_LEAST_ONCE

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Nothing is sent yet."""
        from fordstone.connectors.http.sink import HttpSink  # noqa: PLC0415 - few pipelines need it

        return HttpSink(options_of(spec, HttpOutOptions), stream, context)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
