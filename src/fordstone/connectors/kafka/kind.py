"""The options of `kafka(...)`, and the kind that opens its sources and sinks.

The work is done by the package `confluent-kafka`. It comes with an extra, and is imported where a source or sink is opened, so that
plans with Kafka can be built anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from fordstone.connectors.base import (
    About,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Secret,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
    SparkConnector,
    checked_spec,
    needs_package,
    options_of,
)
from fordstone.connectors.messages import MessageFormatName
from fordstone.connectors.registry_options import RegistryOptions
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
TOPICS_MAX: Final = 1_000
KafkaFormatName = MessageFormatName | Literal["avro", "protobuf"]
REGISTERED: Final = ("avro", "protobuf")
"""The formats whose schemas are in a registry."""
_OURS: Final = {
    "auto.offset.reset": "use start=",
    "bootstrap.servers": "use servers=",
    "enable.auto.commit": "positions are in the checkpoint",
    "enable.auto.offset.store": "positions are in the checkpoint",
    "enable.idempotence": "it is always on",
    "enable.partition.eof": "it is always on",
    "group.id": "use group=",
    "isolation.level": "it is always read_committed",
    "transactional.id": "it follows from the names of the pipeline, the node and the sink",
}
"""Client settings that the connector makes itself."""
_SECRETS: Final = ("password", "secret", "sasl.oauthbearer.config", "ssl.key.pem", "pkcs12")


class KafkaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    topics: tuple[str, ...]
    servers: str
    """`host:port`, or several with commas between them: the client asks them for the others."""
    format: Literal["json", "raw", "avro", "protobuf"] = "json"
    """What the value of a message contains."""
    schema_registry: RegistryOptions | None = None
    """Where the schemas of Avro and Protobuf are."""
    schema: str | None = None
    """The schema that rows are read as (its aliases and defaults), and written by: JSON of Avro, or a .proto text."""
    subject: str | None = None
    """The name of a sink's schema in the registry; by default the topic with "-value"."""
    auto_register: bool = True
    """Whether a sink registers its schema; else it writes by the newest one of the subject."""
    message: str | None = None
    """The message of a .proto text that rows are; by default its first one. For format="protobuf"."""
    key: str | None = None
    """The column of the message's key."""
    timestamp: str | None = None
    """The column of the message's time."""
    partition: str | None = None
    """The column of the partition's number; for a sink the partition that the row goes to."""
    offset: str | None = None
    """The column of the message's offset. For a source only."""
    headers: dict[str, str] = {}
    """Columns that are headers, with the names of these."""
    start: str = EARLIEST
    """Where a partition begins that is not in the checkpoint: "earliest", "latest", or at messages of this time (ISO 8601)."""
    lost: Literal["error", "skip"] = "error"
    """What to do if messages that follow the checkpoint were deleted before they were read; "skip": go on with the oldest one."""
    unmarked: Literal["error", "write", "skip"] = "error"
    """What a sink does with an epoch if it cannot find out whether the topic has it: the group that records it has expired."""
    time_unit: Literal["s", "ms", "us"] = "us"
    """What numbers in timestamp columns of JSON values count."""
    group: str | None = None
    """The consumer group under which a source publishes how far it has read, for other tools. It is not read."""
    spark_connector: bool = False
    """Whether Spark reads a source with its own connector for Kafka, instead of the client library in its tasks. Nothing elsewhere."""
    client: dict[str, str | int | float | bool | Secret] = {}
    """Further settings of the client library (librdkafka)."""

    @property
    def called(self) -> str:
        """As errors name it."""
        return f"kafka({', '.join(map(repr, self.topics))})"

    def client_with_secrets(self, context: OpenContext) -> dict[str, str | int | float | bool]:
        """Return the settings of the client, with the values of secrets."""
        return {
            name: value.of(context, option=name, where=self.called) if isinstance(value, Secret) else value
            for name, value in self.client.items()
        }

    def __post_init__(self) -> None:
        if not self.topics or not all(topic.strip() for topic in self.topics):
            raise ConfigError(f"{self.called}: name a topic, as in kafka('orders', servers='localhost:9092').")
        if len(set(self.topics)) < len(self.topics) or len(self.topics) > TOPICS_MAX:
            raise ConfigError(f"{self.called}: name each topic once, and at most {TOPICS_MAX}.")
        if not all(":" in server for server in self.servers.split(",")):
            raise ConfigError(f"{self.called}: servers={self.servers!r} must be host:port, or several with commas.")
        self._check_format()
        self.start_ms()
        for name, value in self.client.items():
            if name in _OURS:
                raise ConfigError(f"{self.called}: client={{{name!r}: ...}} is not possible: {_OURS[name]}.")
            if not isinstance(value, Secret) and any(word in name for word in _SECRETS) and "location" not in name:
                raise ConfigError(
                    f"{self.called}: {name} would be part of the plan, which is stored and shown. Give the name of an environment "
                    f"variable that has it: client={{{name!r}: {{'secret': 'KAFKA_PASSWORD'}}}}."
                )
        twice = [name for name in self.columns if self.columns.count(name) > 1]
        if twice:
            raise ConfigError(f"{self.called}: column {twice[0]!r} cannot be two parts of a message.")

    def _check_format(self) -> None:
        if self.format in REGISTERED:
            if self.schema_registry is None:
                raise ConfigError(
                    f"{self.called}: format={self.format!r} needs schema_registry=, as in schema_registry='http://localhost:8081'."
                )
            if self.message is not None and self.format != "protobuf":
                raise ConfigError(f"{self.called}: message= is for format='protobuf'.")
            return
        given = {"schema_registry": self.schema_registry, "schema": self.schema, "subject": self.subject}
        for name, value in {**given, "message": self.message}.items():
            if value is not None:
                raise ConfigError(f"{self.called}: {name}= is for format='avro' and format='protobuf'.")

    @property
    def columns(self) -> list[str]:
        """The columns that are not in the value of a message read."""
        named = (self.key, self.timestamp, self.partition, self.offset, *self.headers)
        return [name for name in named if name is not None]

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
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)

    def value_schema(self, schema: Schema, *, with_key: bool) -> Schema:
        """The columns of a message's value, if it has any. `with_key`: the column of the key is one of them."""
        self.check_columns(schema)
        apart = set(self.columns) - ({self.key} if with_key else set())
        return Schema(tuple((name, kind) for name, kind in schema.items() if name not in apart))

    def check_columns(self, schema: Schema) -> None:
        """Raise if a named column is missing, or has a type that the part of a message cannot have."""
        wanted = {self.timestamp: ("timestamp",), self.partition: ("int", "bigint"), self.offset: ("bigint",)}
        wanted |= dict.fromkeys((self.key, *self.headers), ("string", "binary"))
        for name, kinds in wanted.items():
            if name is None:
                continue
            if name not in schema:
                raise ConfigError(f"{self.called}: there is no column {name!r} among {', '.join(schema)}.")
            if schema[name].name not in kinds:
                raise ConfigError(
                    f"{self.called}: column {name!r} must be {' or '.join(kinds)}, and is {schema[name]}."
                )


def kafka(
    topics: str | Iterable[str],
    *,
    servers: str,
    format: KafkaFormatName | None = None,  # noqa: A002 - as in files(...)
    key: str | None = None,
    timestamp: str | None = None,
    headers: Mapping[str, str] | None = None,
    partition: str | None = None,
    offset: str | None = None,
    start: str | None = None,
    lost: Literal["error", "skip"] | None = None,
    unmarked: Literal["error", "write", "skip"] | None = None,
    time_unit: Literal["s", "ms", "us"] | None = None,
    group: str | None = None,
    spark_connector: bool | None = None,
    client: Mapping[str, object] | None = None,
    schema_registry: str | Mapping[str, object] | None = None,
    schema: str | Mapping[str, object] | None = None,
    subject: str | None = None,
    auto_register: bool | None = None,
    message: str | None = None,
) -> ConnectorSpec:
    """A topic of Apache Kafka, or for a source several. Needs `pip install 'fordstone[kafka]'`.

    The columns named by `key`, `timestamp`, `headers` (column to header), `partition` and `offset` are those parts of a message, and the
    others are its value: an object of JSON, one column with `format="raw"`, or a record of Avro or Protobuf whose schema is in
    `schema_registry`: its address, or a dict of `fordstone.connectors.registry_options.RegistryOptions`. Options: see
    `fordstone.connectors.kafka.kind.KafkaSettings`.
    """
    given = {
        "topics": [topics] if isinstance(topics, str) else list(topics),
        "servers": servers,
        "format": format,
        "key": key,
        "timestamp": timestamp,
        "headers": None if headers is None else dict(headers),
        "partition": partition,
        "offset": offset,
        "start": start,
        "lost": lost,
        "unmarked": unmarked,
        "time_unit": time_unit,
        "group": group,
        "spark_connector": spark_connector,
        "client": None if client is None else dict(client),
        "schema_registry": {"url": schema_registry} if isinstance(schema_registry, str) else schema_registry,
        "schema": schema if schema is None or isinstance(schema, str) else msgspec.json.encode(schema).decode(),
        "subject": subject,
        "auto_register": auto_register,
        "message": message,
    }
    return checked_spec("kafka", given, KafkaSettings)


class KafkaKind(ConnectorKind):
    """The kind `kafka`."""

    about = About(
        summary="topics of Apache Kafka, in JSON, Avro, Protobuf or raw",
        source='kafka("orders", servers="localhost:9092")',
        sink='kafka("totals", servers="localhost:9092")',
        guarantee="Offsets are in the checkpoint, and messages of committed transactions are read. One transaction per epoch has its rows and its number.",
        extra="kafka",
        package="confluent-kafka",
        modules=("confluent_kafka",),
        page="how-to/kafka.md",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """Messages are read again by their offsets."""
        options_of(spec, KafkaSettings)
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """A transaction has the rows of an epoch and its number."""
        _sink_settings(spec)
        return Delivery.EXACTLY_ONCE

    def fences(self, spec: ConnectorSpec) -> bool:
        """The broker ends the transactions of a producer when another one begins under its name."""
        del spec
        return True

    def reads_from(self, spec: ConnectorSpec, written: ConnectorSpec) -> bool:
        """Whether a topic of a source is that of a sink."""
        mine, other = options_of(spec, KafkaSettings), options_of(written, KafkaSettings)
        return mine.servers == other.servers and bool(set(mine.topics) & set(other.topics))

    def describe_source(self, spec: ConnectorSpec) -> Mapping[str, str]:
        settings = options_of(spec, KafkaSettings)
        return {"topics": ", ".join(settings.topics), "starts at": settings.start}

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        settings = options_of(spec, KafkaSettings)
        with needs_package(self.about, where=settings.called):
            from fordstone.connectors.kafka.source import KafkaSource  # noqa: PLC0415 - comes with an extra
        return KafkaSource(settings, options, context)

    def spark_connector(
        self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext
    ) -> SparkConnector | None:
        settings = options_of(spec, KafkaSettings)
        if not settings.spark_connector:
            return None
        from fordstone.connectors.kafka.spark_connector import SparkKafka  # noqa: PLC0415 - only Spark needs it

        return SparkKafka(settings, options.schema, context)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Open the sink, and take the topic over from earlier writers of this stream."""
        settings = _sink_settings(spec)
        with needs_package(self.about, where=settings.called):
            from fordstone.connectors.kafka.sink import KafkaSink  # noqa: PLC0415 - comes with an extra
        return KafkaSink(settings, stream, context)


def _sink_settings(spec: ConnectorSpec) -> KafkaSettings:
    settings = options_of(spec, KafkaSettings)
    if len(settings.topics) > 1:
        raise ConfigError(f"{settings.called}: a sink writes to one topic.")
    if settings.offset is not None:
        raise ConfigError(
            f"{settings.called}: offset={settings.offset!r} is for sources: the broker gives a message its offset."
        )
    if settings.spark_connector:
        raise ConfigError(
            f"{settings.called}: spark_connector=True is for sources: Spark's own sink may write rows twice. Leave it out of the sink."
        )
    return settings
