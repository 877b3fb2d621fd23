"""MQTT 3.1.1 and 5: the kind `mqtt`, a source and a sink, and the patterns of its topics.

The client is the package `paho-mqtt`, which comes with an extra and is imported where a connector is opened (`feed`, `sink`), so that plans
can be built anywhere. The source journals each message before it acknowledges it, so QoS 1 is at-least-once from the publisher's broker on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import polars as pl

from fordstone.connectors.base import (
    About,
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
from fordstone.connectors.journal.source import (
    JOURNAL_BYTES,
    Beside,
    IfJournalLost,
    JournalKind,
    JournalOptions,
    open_journal_source,
    topics,
)
from fordstone.connectors.messages import MessageFormatName
from fordstone.errors import ConfigError
from fordstone.lang.duration import positive_us
from fordstone.storage.message_log import MessageLog, Messages, WhenFull

Version = Literal["3.1.1", "5"]
PORT: Final = 1883
TLS_PORT: Final = 8883
_PART: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}")
_NOT_IN_TOPICS: Final = "\0+#"
TOPIC_BYTES_MAX: Final = 65_535


class MqttOptions(JournalOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    topics: str
    broker: str
    qos: int = 1
    version: Version = "5"
    share: str | None = None
    topic: str | None = None
    user: str | None = None
    password: str | None = None
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    client_id: str | None = None
    keepalive: str = "30s"
    session_expiry: str = "7d"
    retain: bool = False

    def __post_init__(self) -> None:
        where = f"mqtt({self.topics!r})"
        self.check_journal(where)
        TopicPattern.parse(self.topics)
        if self.qos == 2:  # noqa: PLR2004 - of MQTT
            raise ConfigError(
                f"{where}: qos=2 is not offered. The client would confirm such a message before it is journalled, so a crash could lose it. Use "
                "qos=1, also for what is published with QoS 2: nothing is lost, and what comes twice is removed by deduplicate()."
            )
        if self.qos not in {0, 1}:
            raise ConfigError(f"{where}: qos={self.qos} must be 0 or 1.")
        broker_address(self.broker, tls=self.tls)
        for option in ("keepalive", "session_expiry"):
            positive_us(getattr(self, option), what=f"{where}: {option}")
        if self.share is not None and (not self.share or set(self.share) & {"/", "+", "#"}):
            raise ConfigError(f"{where}: share={self.share!r} is the name of a group, without '/', '+' and '#'.")
        if self.password is not None and self.user is None:
            raise ConfigError(f"{where}: password= needs user=.")
        if (self.key_file is None) != (self.cert_file is None):
            raise ConfigError(f"{where}: cert_file= and key_file= go together.")
        if (self.ca_file or self.cert_file) and not self.tls:
            raise ConfigError(f"{where}: ca_file= and cert_file= are for tls=True.")


def mqtt(
    topics: str,
    *,
    broker: str,
    qos: int = 1,
    format: MessageFormatName = "json",  # noqa: A002 - as in files()
    version: Version = "5",
    share: str | None = None,
    topic: str | None = None,
    received: str | None = None,
    time_unit: str = "us",
    user: str | None = None,
    password: str | None = None,
    tls: bool = False,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
    client_id: str | None = None,
    keepalive: str = "30s",
    session_expiry: str = "7d",
    retain: bool = False,
    journal_bytes_max: int = JOURNAL_BYTES,
    when_full: WhenFull = "wait",
    if_journal_lost: IfJournalLost = "stop",
) -> ConnectorSpec:
    """Messages of an MQTT broker. Needs `pip install 'fordstone[mqtt]'`.

    `topics` is a filter whose levels in braces are columns of text: `"plant/{line}/temp"`, and `"plant/{rest...}"` for all levels that follow. A sink
    makes each row's topic of these columns. `broker` is `HOST:PORT`. `password` is the *name* of a secret: an environment variable.
    Each message is one row: a JSON object, or with `format="raw"` one column of text or bytes. `topic=` and `received=` name columns for
    the whole topic and for the time at which the message came. `share=` names a group whose members share the messages.
    """
    given = dict(locals())
    return checked_spec("mqtt", given, MqttOptions)


def broker_address(text: str, *, tls: bool) -> tuple[str, int]:
    """Split HOST:PORT; without a port, the usual one."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(TLS_PORT if tls else PORT)
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or "/" in bare or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) <= 65_535:  # noqa: PLR2004 - the largest port
        raise ConfigError(f"mqtt: broker={text!r} is not HOST:PORT, such as broker.example:1883.")
    return bare, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPattern:
    """A topic filter whose levels may be columns."""

    levels: tuple[str, ...]
    """Of the filter."""
    columns: Mapping[str, int]
    """Columns and their levels."""
    rest: str | None
    """The column of the last level and all that follow."""

    @classmethod
    def parse(cls, text: str) -> TopicPattern:
        levels: list[str] = []
        columns: dict[str, int] = {}
        rest: str | None = None
        where = f"mqtt({text!r})"
        if not text or "\0" in text or len(text.encode()) > TOPIC_BYTES_MAX:
            raise ConfigError(f"{where}: a topic has 1 to {TOPIC_BYTES_MAX} bytes, none of them 0.")
        given = text.split("/")
        for number, level in enumerate(given):
            part = _PART.fullmatch(level)
            if part is None:
                if "{" in level or "}" in level:
                    raise ConfigError(
                        f"{where}: a column takes a whole level: '/{{name}}/', or '/{{name...}}' at the end."
                    )
                if ("#" in level or "+" in level) and (len(level) > 1 or (level == "#" and number < len(given) - 1)):
                    raise ConfigError(
                        f"{where}: '+' stands for a whole level, and '#' for all levels that follow, at the end."
                    )
                levels.append(level)
                continue
            name, dots = part.groups()
            if name in columns:
                raise ConfigError(f"{where}: column {name!r} is there twice.")
            if dots and number < len(given) - 1:
                raise ConfigError(
                    f"{where}: {{{name}...}} stands for all levels that follow, so it must be the last one."
                )
            columns[name] = number
            rest = name if dots else None
            levels.append("#" if dots else "+")
        return cls(levels=tuple(levels), columns=columns, rest=rest)

    @property
    def filter(self) -> str:
        """What is subscribed to."""
        return "/".join(self.levels)

    def regex(self) -> re.Pattern[str]:
        """Matches the topics that the filter matches."""
        parts = [re.escape(level) if level not in {"+", "#"} else "[^/]*" for level in self.levels]
        if self.levels[-1] == "#":
            head = "/".join(parts[:-1])
            return re.compile(f"{head}(/.*)?" if head else ".*", re.DOTALL)
        return re.compile("/".join(parts))

    def beside(self) -> dict[str, tuple[str, Beside]]:
        """The columns that are parts of the topic, for `MessageColumns`."""
        return {name: ("string", self._part(level, rest=name == self.rest)) for name, level in self.columns.items()}

    @staticmethod
    def _part(level: int, *, rest: bool) -> Beside:
        def made(messages: Messages) -> pl.Series:
            levels = pl.Series(messages.topics, dtype=pl.String).str.split("/")
            return levels.list.slice(level).list.join("/") if rest else levels.list.get(level, null_on_oob=True)

        return made

    def topics_of(self, frame: pl.DataFrame) -> list[str]:
        """The topic of each row. In a column of one level, '/' is written as '%2F'; characters that topics may not have, likewise."""
        if not self.columns:
            return [self.filter] * frame.height
        names = {level: name for name, level in self.columns.items()}
        made = [
            _escaped(frame.get_column(names[number]), keep_slash=names[number] == self.rest)
            if number in names
            else pl.lit(level)
            for number, level in enumerate(self.levels)
        ]
        return frame.select(pl.concat_str(made, separator="/").alias("topic"))["topic"].to_list()


def _escaped(column: pl.Series, *, keep_slash: bool) -> pl.Series:
    text = column.cast(pl.String).fill_null("").str.replace_all("%", "%25", literal=True)
    for character in _NOT_IN_TOPICS if keep_slash else f"/{_NOT_IN_TOPICS}":
        text = text.str.replace_all(character, f"%{ord(character):02X}", literal=True)
    return text


class MqttKind(JournalKind):
    """The kind `mqtt`."""

    about = About(
        summary="topics of an MQTT broker, 3.1.1 and 5",
        source='mqtt("plant/temp", broker="localhost:1883")',
        sink='mqtt("alarms/{device}", broker="localhost:1883")',
        guarantee="A message is synced in the journal of the node before it is acknowledged. The broker may send it again. A source runs on the edge only.",
        extra="mqtt",
        package="paho-mqtt",
        modules=("paho",),
        page="how-to/mqtt.md",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """The broker sends again what was not acknowledged, which may be there already."""
        return Delivery.AT_LEAST_ONCE if options_of(spec, MqttOptions).qos else Delivery.AT_MOST_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """An epoch that is released again is published again."""
        options = options_of(spec, MqttOptions)
        pattern = TopicPattern.parse(options.topics)
        for level, text in enumerate(pattern.levels):
            if text in {"+", "#"} and level not in pattern.columns.values():
                raise ConfigError(
                    f"mqtt({options.topics!r}): a sink publishes to one topic per row; {text!r} is for sources."
                )
        return Delivery.AT_LEAST_ONCE if options.qos else Delivery.AT_MOST_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        """Open the journal. The broker is connected to with the first read."""
        settings = options_of(spec, MqttOptions)
        called = f"mqtt({settings.topics!r})"
        with needs_package(self.about, where=f"source {context.step}: {called}"):
            from fordstone.connectors.mqtt.feed import MqttFeed  # noqa: PLC0415 - comes with an extra

        def feed(messages: MessageLog, where: str) -> MqttFeed:
            return MqttFeed(settings, messages, context, where=where)

        beside = TopicPattern.parse(settings.topics).beside()
        if settings.topic is not None:
            beside[settings.topic] = ("string", topics)
        return open_journal_source(spec, settings, options, context, called=called, make_feed=feed, beside=beside)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """The broker is connected to with the first rows."""
        settings = options_of(spec, MqttOptions)
        with needs_package(self.about, where=f"sink {stream.step}: mqtt({settings.topics!r})"):
            from fordstone.connectors.mqtt.sink import MqttSink  # noqa: PLC0415 - comes with an extra
        return MqttSink(settings, stream, context)
