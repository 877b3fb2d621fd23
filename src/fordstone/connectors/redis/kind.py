"""The options of `redis_stream(...)`, and the kind that opens its sources and sinks.

The work is done by the package `redis`. It comes with an extra, and is imported where a source or sink is opened, so that plans with
streams of Redis can be built anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

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
    needs_package,
    options_of,
)
from fordstone.connectors.redis.history import SEQUENCE_BITS, SEQUENCE_BITS_MAX
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
STREAMS_MAX: Final = 1_000
PORT: Final = 6379
EntryFormat = Literal["fields", "json", "raw"]


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    keys: tuple[str, ...]
    url: str
    """`redis://user@host:port/db`, or `rediss://` for TLS. Without a password."""
    format: EntryFormat = "fields"
    """What an entry has: one field per column, or one field with a JSON object, or one with a column as it is."""
    field: str = "value"
    """The field of `json` and `raw`."""
    id: str | None = None
    """The column of the entry's id. For a source only, as the next two."""
    timestamp: str | None = None
    """The column of the time in the entry's id."""
    stream: str | None = None
    """The column of the stream's key."""
    start: str = EARLIEST
    """Where a stream begins that is not in the checkpoint: "earliest", "latest", or at entries of this time (ISO 8601)."""
    lost: Literal["error", "skip"] = "error"
    """What to do if entries that follow the checkpoint were removed before they were read; "skip": go on with the oldest one."""
    group: str | None = None
    """The consumer group under which a source publishes how far it has read, for other tools. It is not read."""
    sequence_bits: int = SEQUENCE_BITS
    """How many of the 63 bits of a position are for the second part of an id."""
    unmarked: Literal["error", "write", "skip"] = "error"
    """What a sink does with an epoch if it cannot find out whether the stream has it: the key that records it is gone."""
    maxlen: int | None = None
    """About how many entries a sink leaves in its stream."""
    time_unit: Literal["s", "ms", "us"] = "us"
    """What numbers in timestamp columns count."""
    password: str | None = None
    """The secret (environment variable) that has the password."""
    ca_file: str | None = None
    """The certificates that are trusted, in a file; without it, those of the system."""
    cert_file: str | None = None
    """The certificate of this process, and its key, if the server asks for one."""
    key_file: str | None = None

    @property
    def called(self) -> str:
        """As errors name it."""
        return f"redis_stream({', '.join(map(repr, self.keys))})"

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or PORT

    @property
    def server(self) -> str:
        """The server in errors."""
        host, port = self.address
        return f"Redis at {host}:{port}"

    @property
    def user(self) -> str | None:
        name = urlsplit(self.url).username
        return unquote(name) if name else None

    @property
    def database(self) -> int:
        return int(urlsplit(self.url).path.strip("/") or 0)

    @property
    def tls(self) -> bool:
        return self.url.startswith("rediss:")

    def __post_init__(self) -> None:
        if not self.keys or not all(self.keys):
            raise ConfigError(f"{self.called}: name a stream, as in redis_stream('orders', url='redis://localhost').")
        if len(set(self.keys)) < len(self.keys) or len(self.keys) > STREAMS_MAX:
            raise ConfigError(f"{self.called}: name each stream once, and at most {STREAMS_MAX}.")
        self._check_url()
        self.start_ms()
        if not 0 <= self.sequence_bits <= SEQUENCE_BITS_MAX:
            raise ConfigError(f"{self.called}: sequence_bits={self.sequence_bits} must be 0 to {SEQUENCE_BITS_MAX}.")
        if self.maxlen is not None and self.maxlen < 1:
            raise ConfigError(f"{self.called}: maxlen={self.maxlen} must be 1 or more.")
        for name in ("field", "group", "password"):
            if getattr(self, name) == "":
                raise ConfigError(f"{self.called}: {name}= must not be empty. Give a name, or omit it.")
        twice = [name for name in self.columns if self.columns.count(name) > 1]
        if twice:
            raise ConfigError(f"{self.called}: column {twice[0]!r} cannot be two parts of an entry.")

    def _check_url(self) -> None:
        wrong = ConfigError(
            f"{self.called}: url= must be redis://host:port/db, or rediss:// with TLS; a user comes as user@host."
        )
        try:
            parts = urlsplit(self.url)
            database, host, secret = self.database, self.address[0], parts.password
        except ValueError:
            raise wrong from None  # the error may show the password
        if secret is not None or "password" in parts.query:
            raise ConfigError(
                f"{self.called}: its url has a password, which would be stored and shown with the plan. Leave it out, and name an environment "
                "variable that has it: password='REDIS_PASSWORD'."
            )
        if parts.scheme not in {"redis", "rediss"} or not host or parts.query or parts.fragment or database < 0:
            raise wrong
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(f"{self.called}: cert_file= and key_file= go together.")
        if (self.ca_file or self.cert_file) and not self.tls:
            raise ConfigError(f"{self.called}: ca_file= and cert_file= are for TLS: begin url= with rediss://.")

    @property
    def columns(self) -> list[str]:
        """The columns that are not fields of an entry."""
        return [name for name in (self.id, self.timestamp, self.stream) if name is not None]

    def start_ms(self) -> int | None:
        """The time to start at, in milliseconds; None: earliest or latest."""
        if self.start in {EARLIEST, LATEST}:
            return None
        try:
            at = datetime.fromisoformat(self.start)
        except ValueError as error:
            raise ConfigError(
                f"{self.called}: start={self.start!r} must be 'earliest', 'latest' or a time such as '2026-01-31T12:00:00Z'."
            ) from error
        return max(0, int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000))

    def field_schema(self, schema: Schema) -> Schema:
        """The columns that are fields of an entry. Raise if one that the others name is missing, or has a wrong type."""
        for name, kind in ((self.id, "string"), (self.timestamp, "timestamp"), (self.stream, "string")):
            if name is None:
                continue
            if name not in schema:
                raise ConfigError(f"{self.called}: there is no column {name!r} among {', '.join(schema)}.")
            if schema[name].name != kind:
                raise ConfigError(f"{self.called}: column {name!r} must be {kind}, and is {schema[name]}.")
        return Schema.stored({name: str(kind) for name, kind in schema.items() if name not in self.columns})


def redis_stream(
    keys: str | Iterable[str],
    *,
    url: str,
    format: EntryFormat | None = None,  # noqa: A002 - as in files(...)
    field: str | None = None,
    id: str | None = None,  # noqa: A002 - as Redis calls it
    timestamp: str | None = None,
    stream: str | None = None,
    start: str | None = None,
    lost: Literal["error", "skip"] | None = None,
    group: str | None = None,
    sequence_bits: int | None = None,
    unmarked: Literal["error", "write", "skip"] | None = None,
    maxlen: int | None = None,
    time_unit: Literal["s", "ms", "us"] | None = None,
    password: str | None = None,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
) -> ConnectorSpec:
    """A stream of Redis, or for a source several. Needs `pip install 'fordstone[redis]'`.

    Columns are the fields of an entry; with `format="json"` or `"raw"` they are in its one field `field`. A source has the entry's id, its time and
    the stream's key in the columns that `id`, `timestamp` and `stream` name. `password` is the *name* of a secret: an environment variable.
    Options: see `fordstone.connectors.redis.kind.RedisSettings`.
    """
    given = dict(locals()) | {"keys": [keys] if isinstance(keys, str) else list(keys)}
    return checked_spec("redis_stream", given, RedisSettings)


class RedisStreamKind(ConnectorKind):
    """The kind `redis_stream`."""

    about = About(
        summary="streams of Redis",
        source='redis_stream("orders", url="redis://localhost:6379")',
        sink='redis_stream("totals", url="redis://localhost:6379")',
        guarantee="Ids of entries are in the checkpoint. A script on the server adds the rows of an epoch and its number together. Needs appendfsync always.",
        extra="redis",
        package="redis",
        modules=("redis",),
        page="how-to/redis.md",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """Entries are read again by their ids."""
        _source_settings(spec)
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """A script adds the rows of an epoch and its number."""
        _sink_settings(spec)
        return Delivery.EXACTLY_ONCE

    def fences(self, spec: ConnectorSpec) -> bool:
        """The script also compares the writer."""
        del spec
        return True

    def reads_from(self, spec: ConnectorSpec, written: ConnectorSpec) -> bool:
        """Whether a stream of a source is that of a sink."""
        mine, other = options_of(spec, RedisSettings), options_of(written, RedisSettings)
        same = mine.address == other.address and mine.database == other.database
        return same and bool(set(mine.keys) & set(other.keys))

    def describe_source(self, spec: ConnectorSpec) -> Mapping[str, str]:
        settings = options_of(spec, RedisSettings)
        return {"streams": ", ".join(settings.keys), "starts at": settings.start}

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        settings = _source_settings(spec)
        with needs_package(self.about, where=settings.called):
            from fordstone.connectors.redis.source import RedisSource  # noqa: PLC0415 - comes with an extra
        return RedisSource(settings, options, context)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Open the sink, and take the stream over from earlier writers."""
        settings = _sink_settings(spec)
        with needs_package(self.about, where=f"sink {stream.step}: {settings.called}"):
            from fordstone.connectors.redis.sink import RedisSink  # noqa: PLC0415 - comes with an extra
        return RedisSink(settings, stream, context)


def _source_settings(spec: ConnectorSpec) -> RedisSettings:
    return _without(spec, ("maxlen", "unmarked"), "for sinks")


def _sink_settings(spec: ConnectorSpec) -> RedisSettings:
    settings = _without(
        spec, ("id", "timestamp", "stream", "start", "lost", "group", "sequence_bits", "time_unit"), "for sources"
    )
    if len(settings.keys) > 1:
        raise ConfigError(f"{settings.called}: a sink writes to one stream.")
    return settings


def _without(spec: ConnectorSpec, names: Iterable[str], what: str) -> RedisSettings:
    settings = options_of(spec, RedisSettings)
    wrong = [name for name in names if name in spec.options]
    if wrong:
        raise ConfigError(f"{settings.called}: {wrong[0]}= is {what}. Leave it out here.")
    return settings
