"""Takes messages of an MQTT broker into a journal, and acknowledges to the broker what is synced.

One thread connects, receives, journals and acknowledges, so that an acknowledgement always belongs to the connection on which its message came.
While the broker is away, the thread connects again with growing waits; the broker keeps the session (`clean_start=False`) and sends
what was not acknowledged. While the journal is full, nothing is acknowledged, and little more is received.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from fordstone.connectors.journal.source import Feed
from fordstone.connectors.messages import MESSAGE_BYTES_MAX
from fordstone.connectors.mqtt.client import (
    CONNECT_SECONDS,
    LostError,
    RefusedError,
    check,
    client_id,
    connect,
    exchange,
    make_client,
)
from fordstone.connectors.mqtt.kind import MqttOptions, TopicPattern
from fordstone.errors import SourceError, StorageError
from fordstone.lang.duration import positive_us
from fordstone.protocol.retry import Backoff
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.message_log import Message, MessageLog, MessageLogFullError

if TYPE_CHECKING:
    from fordstone.connectors.base import OpenContext

log = logging.getLogger(__name__)

RECONNECT: Final = Backoff(first_us=200_000, max_us=30_000_000)
STEADY_SECONDS: Final = 10.0
"""A connection that lasted this long resets the waits."""
STOP_SECONDS_MAX: Final = CONNECT_SECONDS + 5.0
BATCH_MAX: Final = 1_000
"""Messages that are journalled together: the first of them waits for the others no longer than they take to be received."""
BATCH_BYTES_MAX: Final = 1 << 20
WAITING_MAX: Final = 10_000
"""Messages that are held in memory while the journal takes none."""
WAITING_BYTES_MAX: Final = 32 << 20
FULL_SECONDS: Final = 0.2
TOPICS_KNOWN_MAX: Final = 10_000


class MqttFeed(Feed):
    """One subscription."""

    def __init__(self, options: MqttOptions, messages: MessageLog, context: OpenContext, *, where: str) -> None:
        pipeline_and_node = "" if context.home is None else context.home.directory.replace("/", "-")
        self._options = options
        self._messages = messages
        self._context = context
        self._where = where
        self._clean = not context.keeps_state
        self._name = client_id(options, pipeline_and_node, context.step)
        self._keepalive_s = max(1, positive_us(options.keepalive, what="keepalive") // 1_000_000)
        self._pattern = TopicPattern.parse(options.topics)
        self._regex = self._pattern.regex()
        self._known: dict[str, bool] = {}
        """Topics, and whether they match."""
        self._waiting: list[tuple[Message, int, int]] = []
        """Received and not journalled, with packet ids and QoS."""
        self._waiting_bytes = 0
        self._connack: tuple[ReasonCode, bool] | None = None
        self._suback: list[ReasonCode] | None = None
        self._was_connected = False
        self._away: str | None = "not connected yet"
        self._failed: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mqtt-feed", daemon=True)

    def start(self) -> None:
        make_client(
            self._options, self._context, self._name, clean=self._clean, where=self._where
        )  # so that mistakes are raised here
        self._thread.start()

    def check(self) -> None:
        if self._failed is not None:
            if isinstance(self._failed, SourceError):
                raise self._failed
            raise SourceError(f"{self._where}: receiving has failed: {self._failed!r}.") from self._failed

    def away(self) -> str | None:
        return self._away

    def close(self) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS_MAX)

    # On the thread.

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self._session()
                except (LostError, RefusedError, OSError) as error:
                    if isinstance(error, RefusedError) and error.advice is not None and not self._was_connected:
                        raise SourceError(f"{self._where}: {error}.\n{error.advice}") from error
                    self._note_away(f"broker {self._options.broker} is away: {error}")
                failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
                self._stop.wait(RECONNECT.wait_s(failures, chance=random.random()))  # noqa: S311 - jitter
        except FatalStorageError:
            log.exception("journal failed, nothing is acknowledged any more")  # readers of the journal raise it
        except Exception as error:  # noqa: BLE001 - raised by the reader
            if not self._stop.is_set():
                log.warning("mqtt source failed", extra={"source": self._where, "problem": str(error)})
            self._failed = error

    def _session(self) -> None:
        """Receive until the connection is lost."""
        client = make_client(self._options, self._context, self._name, clean=self._clean, where=self._where)
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        self._connack = self._suback = None
        connect(client, self._options, clean=self._clean, keepalive_s=self._keepalive_s)
        try:
            self._begin(client)
            while not self._stop.is_set():
                self._exchange(client)
                self._journal(client)
            client.disconnect()
        except (LostError, OSError):
            # What has come may be lost at the broker, so it is kept, unacknowledged: it may come again.
            self._journal(None)
            raise
        finally:
            if (sock := client.socket()) is not None:
                sock.close()

    def _begin(self, client: Client) -> None:
        """Wait for the broker's answer, and subscribe unless it has kept the subscription."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while self._connack is None:
            try:
                self._exchange(client, deadline)
            except LostError:
                if self._connack is None:
                    raise  # else the broker has said why
        reason, present = self._connack
        if reason.is_failure:
            raise RefusedError(f"the broker refuses client {self._name!r}", reason.getName())
        if self._was_connected and not present and not self._clean:
            log.warning("broker has lost the session", extra={"source": self._where, "broker": self._options.broker})
        if not (present and self._was_connected):
            self._subscribe(client)
            while self._suback is None:
                self._exchange(client, deadline)
            refused = [one for one in self._suback if one.is_failure or one.value < self._options.qos]
            if refused:
                what = f"the broker refuses the subscription to {self._pattern.filter!r} with QoS {self._options.qos}"
                raise RefusedError(what, refused[0].getName())
        if not self._was_connected or self._away is not None:
            log.info(
                "broker connected", extra={"source": self._where, "broker": self._options.broker, "resumed": present}
            )
        self._was_connected, self._away = True, None

    def _subscribe(self, client: Client) -> None:
        options, topic = self._options, self._pattern.filter
        if options.share is not None:
            topic = f"$share/{options.share}/{topic}"
        if options.version == "5":
            # Retained messages come with the first subscription of a session, not at each start.
            handling = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB
            client.subscribe(topic, options=SubscribeOptions(qos=options.qos, retainHandling=handling))
        else:
            client.subscribe(topic, options.qos)

    def _exchange(self, client: Client, deadline: float | None = None) -> None:
        """Send and receive what there is now, or wait for it a little."""
        if self._stop.is_set() or (deadline is not None and time.monotonic() > deadline):
            raise LostError(f"no answer within {CONNECT_SECONDS:.0f} s")
        takes = len(self._waiting) < WAITING_MAX and self._waiting_bytes < WAITING_BYTES_MAX
        exchange(client, self._to_journal, takes=takes)

    def _to_journal(self) -> int:
        """How much has come, as long as it may be journalled together with what comes next."""
        return min(len(self._waiting), BATCH_MAX) if self._waiting_bytes < BATCH_BYTES_MAX else -1

    def _journal(self, client: Client | None) -> None:
        """Journal what has come, and acknowledge it on the connection on which it came."""
        while self._waiting:
            batch: list[tuple[Message, int, int]] = []
            size_bytes = 0
            for one in self._waiting[:BATCH_MAX]:
                size_bytes += len(one[0].value)
                if batch and size_bytes > BATCH_BYTES_MAX:
                    break
                batch.append(one)
            try:
                self._messages.commit([message for message, _, _ in batch])
            except FatalStorageError:
                raise
            except StorageError as error:
                if self._stop.is_set() or client is None:
                    self._drop_waiting()  # they were not acknowledged, so the broker has them
                    return
                self._note_away(str(error))
                self._messages.wait_for_room(
                    FULL_SECONDS if isinstance(error, MessageLogFullError) else 2 * FULL_SECONDS
                )
                return
            if client is not None:
                self._away = None
                for _, mid, qos in batch:
                    if qos:
                        check(client.ack(mid, qos), client)
            del self._waiting[: len(batch)]
        self._waiting_bytes = 0

    def _drop_waiting(self) -> None:
        lost = sum(not qos for _, _, qos in self._waiting)
        if lost:
            log.warning(
                "messages of QoS 0 lost, the journal takes none", extra={"source": self._where, "messages": lost}
            )
        self._waiting.clear()
        self._waiting_bytes = 0

    def _note_away(self, problem: str) -> None:
        if self._away is None or not self._was_connected:
            log.warning("mqtt source waits", extra={"source": self._where, "problem": problem})
        self._away = problem

    # Called by the client, on the thread.

    def _on_connect(self, client: Client, userdata: object, flags: Any, reason: ReasonCode, properties: object) -> None:
        del client, userdata, properties
        self._connack = reason, bool(flags.session_present)

    def _on_subscribe(
        self, client: Client, userdata: object, mid: int, reasons: list[ReasonCode], properties: object
    ) -> None:
        del client, userdata, mid, properties
        self._suback = reasons

    def _on_message(self, client: Client, userdata: object, message: MQTTMessage) -> None:
        del userdata
        try:
            topic = message.topic
        except UnicodeDecodeError:
            topic = ""
        if len(message.payload) > MESSAGE_BYTES_MAX or not self._matches(topic):
            # A topic of an earlier subscription of this session, or a message that no journal takes.
            extra = {"source": self._where, "topic": topic[:200], "bytes": len(message.payload)}
            log.warning("message not taken: too large, or of a topic that is not subscribed to", extra=extra)
            client.ack(message.mid, message.qos)
            return
        self._waiting.append(
            (Message(bytes(message.payload), topic, time.time_ns() // 1_000), message.mid, message.qos)
        )
        self._waiting_bytes += len(message.payload)

    def _matches(self, topic: str) -> bool:
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= TOPICS_KNOWN_MAX:
                self._known.clear()
            known = self._known[topic] = self._regex.fullmatch(topic) is not None
        return known
