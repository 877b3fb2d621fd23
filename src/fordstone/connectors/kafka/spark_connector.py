"""Spark's own connector for Kafka in place of our reader: its options, its offsets and its rows.

Our position is Spark's offset plus one, as it is the client library's. Settings of the client library are translated to those of the Java client
where both have one of the same meaning; others are refused, because they would silently not hold.

Invariants: messages of committed transactions only; what Spark finds missing is an error (`failOnDataLoss`); rows and rejected messages are those
of `KafkaReader`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import numpy as np
import polars as pl

from fordstone.connectors.base import Chunk, OpenContext, SparkConnector
from fordstone.connectors.kafka.kind import KafkaSettings
from fordstone.connectors.kafka.rows import MessageRows, Messages
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position

GROUP_PREFIX: Final = "fordstone"
_SAME: Final = frozenset(
    {
        "client.id",
        "client.rack",
        "fetch.max.bytes",
        "fetch.min.bytes",
        "max.partition.fetch.bytes",
        "metadata.max.age.ms",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "retry.backoff.ms",
        "security.protocol",
        "ssl.endpoint.identification.algorithm",
    }
)
"""Settings that both clients have, with the same meaning and unit."""
_MECHANISM: Final = ("sasl.mechanism", "sasl.mechanisms")
_USER: Final = ("sasl.username", "sasl.password")
_AUTHORITIES: Final = "ssl.ca.location"
_MODULES: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_TRANSLATED: Final = frozenset({*_SAME, *_MECHANISM, *_USER, _AUTHORITIES})
REGISTRY_WAIT_S: Final = 60.0
"""The longest wait of a task for a schema registry. Then Spark runs it again."""
_NO_TIME: Final = -1


class SparkKafka(SparkConnector):
    """`format("kafka")`."""

    format: ClassVar[str] = "kafka"

    def __init__(self, settings: KafkaSettings, schema: Schema, context: OpenContext) -> None:
        self._settings = settings
        self._schema = schema
        self._context = context
        self._rows: MessageRows | None = None

    def check(self) -> None:
        settings = self._settings
        called = f"{settings.called}: spark_connector=True"
        if settings.lost != "error":
            raise ConfigError(
                f"{called} cannot be combined with lost={settings.lost!r}: Spark does not say what it leaves out. Leave one of them out."
            )
        for name in settings.client:
            if name not in _TRANSLATED:
                raise ConfigError(
                    f"{called}: {name} in client=... has no setting of the Java client that it is translated to. Leave it out, or read without "
                    f"spark_connector. Translated are: {', '.join(sorted(_TRANSLATED))}."
                )
        mechanism = self._mechanism()
        if mechanism not in {None, *_MODULES}:
            raise ConfigError(f"{called}: sasl.mechanism {mechanism!r} is not one of {', '.join(_MODULES)}.")
        if any(name in settings.client for name in _USER) and (
            mechanism is None or not all(name in settings.client for name in _USER)
        ):
            raise ConfigError(f"{called}: give sasl.mechanism, sasl.username and sasl.password together.")

    def _mechanism(self) -> str | None:
        return next((str(self._settings.client[name]) for name in _MECHANISM if name in self._settings.client), None)

    def stream_options(self, starts: Mapping[PartitionId, Position], rows_max: int) -> dict[str, str]:
        return {
            **self._options(),
            "subscribe": ",".join(self._settings.topics),
            "startingOffsets": offsets_text(starts),
            "maxOffsetsPerTrigger": str(rows_max),
        }

    def batch_options(self, reads: Mapping[PartitionId, tuple[Position, Position]]) -> dict[str, str]:
        numbers: dict[str, list[int]] = {}
        for topic, number in map(_at, reads):
            numbers.setdefault(topic, []).append(number)
        return {
            **self._options(),
            "assign": json.dumps(numbers),
            "startingOffsets": offsets_text({name: start for name, (start, _) in reads.items()}),
            "endingOffsets": offsets_text({name: end for name, (_, end) in reads.items()}),
        }

    def _options(self) -> dict[str, str]:
        client = self._settings.client_with_secrets(self._context)
        options = {name: _java(value) for name, value in client.items() if name in _SAME}
        if client.get("ssl.endpoint.identification.algorithm") == "none":
            options["ssl.endpoint.identification.algorithm"] = ""
        mechanism = self._mechanism()
        if mechanism is not None:
            options["sasl.mechanism"] = mechanism
        if _USER[0] in client and mechanism is not None:
            user, password = (_quoted(str(client[name])) for name in _USER)
            options["sasl.jaas.config"] = f"{_MODULES[mechanism]} required username={user} password={password};"
        if _AUTHORITIES in client:
            options |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(client[_AUTHORITIES])}
        options |= {"bootstrap.servers": self._settings.servers, "isolation.level": "read_committed"}
        return {
            **{f"kafka.{name}": value for name, value in options.items()},
            "failOnDataLoss": "true",
            "groupIdPrefix": self._settings.group or GROUP_PREFIX,
            "includeHeaders": str(bool(self._settings.headers)).lower(),
        }

    def columns(self) -> list[str]:
        settings = self._settings
        wanted = ["topic", "partition", "offset", "value"]
        if settings.key is not None:
            wanted.append("key")
        if settings.timestamp is not None:
            wanted.append(f"if(timestampType = {_NO_TIME}, NULL, unix_millis(timestamp)) AS time_ms")
        if settings.headers:
            wanted.append("headers")
        return wanted

    def positions(self, offset: str) -> dict[PartitionId, Position]:
        return {
            PartitionId(f"{topic}/{number}"): Position(int(following) + 1)
            for topic, numbers in json.loads(offset).items()
            for number, following in numbers.items()
        }

    def chunks(self, frame: pl.DataFrame, *, with_positions: bool) -> Iterator[tuple[PartitionId, Chunk]]:
        if self._rows is None:
            self._rows = MessageRows(self._settings, self._schema, self._context)
        for partition, part in _by_partition(frame):
            messages = SparkMessages(part)
            rows, positions, rejected = self._rows.of(messages, wait_s=REGISTRY_WAIT_S)
            yield (
                partition,
                Chunk(
                    frame=rows,
                    position=Position(int(messages.offsets[-1]) + 2),
                    row_positions=positions if with_positions else None,
                    rejected=rejected,
                ),
            )

    def how_to_install(self, spark_version: str) -> str:
        package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{spark_version}"
        return (
            f"{self._settings.called}: spark_connector=True needs Spark's connector for Kafka, which this Spark {spark_version} does not have.\n"
            f"Add --conf spark.jars.packages={package}, which fetches it with what it needs from a Maven repository. Or name its jars with --conf "
            f"spark.jars=A.jar,B.jar,...: {package}, spark-token-provider-kafka-0-10_2.13 of the same version, org.apache.kafka:kafka-clients and "
            "org.apache.commons:commons-pool2. (From Python: session(config={...}).) Without spark_connector, Fordstone reads Kafka by itself."
        )


class SparkMessages(Messages):
    """Messages of one partition as rows of Spark."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    @property
    def offsets(self) -> np.ndarray:
        return self._frame["offset"].to_numpy()

    def values(self) -> list[Any]:
        return self._frame["value"].to_list()

    def keys(self) -> list[bytes | None]:
        return self._frame["key"].to_list()

    def partitions(self) -> list[int]:
        return self._frame["partition"].to_list()

    def times_ms(self) -> list[int | None]:
        return self._frame["time_ms"].to_list()

    def headers(self, name: str) -> list[bytes | None]:
        return [
            next((one["value"] for one in reversed(headers or ()) if one["key"] == name), None)
            for headers in self._frame["headers"].to_list()
        ]


def _by_partition(frame: pl.DataFrame) -> Iterator[tuple[PartitionId, pl.DataFrame]]:
    """The parts of a frame that are of one partition each. A task reads one partition, so there is one part as a rule."""
    if not frame.height:
        return
    runs = frame.select(pl.struct("topic", "partition").rle_id())["topic"].to_numpy()
    starts = np.flatnonzero(np.diff(runs, prepend=runs[0] + 1))
    for start, end in zip(starts, [*starts[1:], frame.height], strict=True):
        part = frame.slice(int(start), int(end - start))
        yield PartitionId(f"{part['topic'][0]}/{part['partition'][0]}"), part


def offsets_text(positions: Mapping[PartitionId, Position]) -> str:
    """Positions as Spark's options want them. Each is that of a partition that was begun, so none is 0."""
    found: dict[str, dict[str, int]] = {}
    for name, position in positions.items():
        topic, number = _at(name)
        found.setdefault(topic, {})[str(number)] = int(position) - 1
    return json.dumps(found)


def _at(partition: PartitionId) -> tuple[str, int]:
    topic, _, number = partition.rpartition("/")
    return topic, int(number)


def _java(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(text: str) -> str:
    """A value in the configuration of Java's login."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
