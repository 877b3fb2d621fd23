"""Publishes rows to an MQTT broker: at-least-once with QoS 1, since an epoch that is released again is published again.

A release returns when the broker has acknowledged every message. If it is away, the release fails and is tried again as a whole, by a new client, so
that nothing of the failed one comes later, between newer rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import polars as pl
from paho.mqtt.client import Client
from paho.mqtt.reasoncodes import ReasonCode

from fordstone.connectors.base import Sink, SinkDelayedError, SinkStream
from fordstone.connectors.messages import message_format
from fordstone.connectors.mqtt.client import LostError, RefusedError, client_id, connect, exchange, make_client
from fordstone.connectors.mqtt.kind import MqttOptions, TopicPattern
from fordstone.errors import SinkError
from fordstone.lang.schema import Schema

if TYPE_CHECKING:
    from fordstone.connectors.base import OpenContext

ANSWER_SECONDS_MAX: Final = 30.0
"""The longest that the broker may answer nothing."""
ROWS_AT_ONCE: Final = 10_000
"""Rows that are handed to the client before their acknowledgements are awaited."""


class MqttSink(Sink):
    """One message per row."""

    def __init__(self, options: MqttOptions, stream: SinkStream, context: OpenContext) -> None:
        self._where = f"sink {stream.step}: mqtt({options.topics!r})"
        self._options = options
        self._context = context
        self._pattern = TopicPattern.parse(options.topics)
        missing = [name for name in self._pattern.columns if name not in stream.schema]
        if missing:
            raise SinkError(
                f"{self._where}: the rows have no column {missing[0]!r}. They have: {', '.join(stream.schema)}."
            )
        columns = {name: str(kind) for name, kind in stream.schema.items() if name not in self._pattern.columns}
        self._format = message_format(options.format, Schema.of(columns), where=self._where)
        self._name = client_id(options, stream.pipeline, stream.node, stream.step, "sink")
        self._client: Client | None = None
        self._connack: ReasonCode | None = None
        self._unacknowledged: set[int] = set()
        self._answers = 0
        self._refused: RefusedError | None = None
        make_client(options, context, self._name, clean=True, where=self._where)  # so that mistakes are raised now

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        del epoch
        self.write(frame)

    def write(self, frame: pl.DataFrame) -> None:
        if frame.is_empty():
            return
        topics = self._pattern.topics_of(frame)
        values = self._format.encode(frame.drop(list(self._pattern.columns)))
        try:
            client = self._connected()
            for start in range(0, len(values), ROWS_AT_ONCE):
                for topic, value in zip(
                    topics[start : start + ROWS_AT_ONCE], values[start : start + ROWS_AT_ONCE], strict=True
                ):
                    sent = client.publish(topic, value, self._options.qos, retain=self._options.retain)
                    if not sent.is_published():  # QoS 0 is as soon as it is written
                        self._unacknowledged.add(sent.mid)
                self._exchange(client, lambda: not self._unacknowledged)
        except RefusedError as error:
            self._disconnect()
            if error.advice is not None:
                raise SinkError(f"{self._where}: {error}.\n{error.advice}") from error
            raise SinkDelayedError(f"{self._where}: {error}. It will be tried again.") from error
        except (LostError, OSError) as error:
            self._disconnect()
            raise SinkDelayedError(
                f"{self._where}: broker {self._options.broker} is away: {error}. It will be tried again."
            ) from error

    def close(self) -> None:
        self._disconnect()

    def _connected(self) -> Client:
        if self._client is not None and self._client.is_connected():
            return self._client
        self._disconnect()
        client = make_client(self._options, self._context, self._name, clean=True, where=self._where)
        client.on_connect = self._on_connect
        client.on_publish = self._on_publish
        self._client, self._connack = client, None
        connect(client, self._options, clean=True, keepalive_s=0)  # between two releases nobody would answer
        self._exchange(client, lambda: self._connack is not None)
        return client

    def _exchange(self, client: Client, done: Callable[[], bool]) -> None:
        """Send and receive until it is done."""
        before, deadline = self._answers, time.monotonic() + ANSWER_SECONDS_MAX
        while not done():
            try:
                exchange(client, lambda: self._answers)
            except LostError as error:
                raise self._refused or error from error
            if self._refused is not None:
                raise self._refused
            if self._answers != before:
                before, deadline = self._answers, time.monotonic() + ANSWER_SECONDS_MAX
            elif time.monotonic() > deadline:
                raise LostError(f"it answers nothing for {ANSWER_SECONDS_MAX:.0f} s")

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._unacknowledged.clear()
        self._refused = None
        if client is not None:
            client.disconnect()
            if (sock := client.socket()) is not None:
                sock.close()

    def _on_connect(self, client: Client, userdata: object, flags: Any, reason: ReasonCode, properties: object) -> None:
        del client, userdata, flags, properties
        self._connack = reason
        if reason.is_failure:
            self._refused = RefusedError(f"the broker refuses client {self._name!r}", reason.getName())

    def _on_publish(self, client: Client, userdata: object, mid: int, reason: ReasonCode, properties: object) -> None:
        del client, userdata, properties
        self._answers += 1
        self._unacknowledged.discard(mid)
        if reason.is_failure:
            self._refused = RefusedError("the broker refuses a message", reason.getName())
