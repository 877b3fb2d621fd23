"""The client of a Kafka cluster: its settings, what it says in words, and what is asked about topics, offsets and groups.

All calls here wait at most `ANSWER_S`. Of a cluster that does not answer they raise `AwayError`; what waiting cannot mend is a `SourceError` or
`SinkError` (`fails`), such as rejected credentials.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from fordstone.connectors.base import OpenContext
from fordstone.connectors.kafka.kind import KafkaSettings
from fordstone.errors import ConfigError, FordstoneError

log = logging.getLogger(__name__)

ANSWER_S: Final = 5.0
"""Maximum time for the answer to one question."""
RETRY_S: Final = 0.05
NO_OFFSET: Final = -1001
"""What a group has that never committed an offset."""
_SILENT: Final = logging.Logger("librdkafka")  # noqa: LOG001 - what it says comes as an error as well
_SILENT.addFilter(lambda _: False)
_DENIED: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,  # noqa: SLF001 - codes of the client library begin so
        KafkaError._SSL,  # noqa: SLF001 - likewise
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_UNKNOWN_TOPIC: Final = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001 - as above
)
_AWAY: Final = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - as above
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001 - as above
        KafkaError._RESOLVE,  # noqa: SLF001 - as above
        KafkaError._TIMED_OUT,  # noqa: SLF001 - as above
        KafkaError._TIMED_OUT_QUEUE,  # noqa: SLF001 - as above
        KafkaError._TRANSPORT,  # noqa: SLF001 - as above
    }
)
_LATER: Final = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
    }
)
"""The broker has just started, or a transaction is about to end."""
T = TypeVar("T")
At = tuple[str, int]
"""A topic, and the number of one of its partitions."""


class AwayError(ConnectionError):
    """The cluster does not answer now."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it."""

    id: str
    """Random. A topic that is deleted and created again has another one. Empty: the cluster gives none."""
    partitions: tuple[int, ...]


class Cluster:
    """What all clients of one connector share."""

    def __init__(
        self, settings: KafkaSettings, context: OpenContext, *, fails: Callable[[str], FordstoneError]
    ) -> None:
        """`fails` makes an error of a text that says what happened."""
        self.settings = settings
        self._config = client_config(settings, context)
        self._fails = fails
        self._admin: AdminClient | None = None
        self._asks: tuple[str, bool, Consumer] | None = None
        """The consumer that is asked for the offsets of a group, with its name, and whether it waits for the end of transactions."""
        self._denied: KafkaError | None = None
        self._last: KafkaError | None = None
        self.all_down = False
        """Whether the client library has found no broker since the last answer."""

    def config(self, **more: object) -> dict[str, Any]:
        """The settings of a client, with more of them; `_` stands for a dot. The user's come last."""
        ours = {name.replace("_", "."): value for name, value in more.items()}
        return {**ours, **self._config, "logger": _SILENT, "error_cb": self._note}

    def describe(self, names: Iterable[str]) -> dict[str, Topic | None]:
        """Describe topics; None: there is none of that name."""
        futures = self.admin.describe_topics(TopicCollection(list(names)), request_timeout=ANSWER_S)
        found: dict[str, Topic | None] = {}
        for name, future in futures.items():
            try:
                one = self._answer(future)
            except KafkaException as error:
                if code_of(error) not in _UNKNOWN_TOPIC:
                    raise self.error(error) from error
                found[name] = None
            else:
                found[name] = Topic(
                    id=_id_text(one.topic_id), partitions=tuple(sorted(part.id for part in one.partitions))
                )
        return found

    def oldest(self, partitions: Iterable[At]) -> dict[At, int]:
        """The offsets of the oldest messages."""
        return self._offsets(dict.fromkeys(partitions, OffsetSpec.earliest()))

    def ends(self, partitions: Iterable[At]) -> dict[At, int]:
        """Where partitions end for readers of committed messages: a transaction that is open, and what follows it, is not there yet."""
        return self._offsets(dict.fromkeys(partitions, OffsetSpec.latest()))

    def at_time(self, partitions: Iterable[At], time_ms: int) -> dict[At, int]:
        """The offsets of the first messages of this time or later; where there are none yet, the ends."""
        found = self._offsets(dict.fromkeys(partitions, OffsetSpec.for_timestamp(time_ms)))
        return found | self.ends(at for at, offset in found.items() if offset < 0)

    def _offsets(self, wanted: Mapping[At, Any]) -> dict[At, int]:
        if not wanted:
            return {}
        asked = {TopicPartition(topic, number): spec for (topic, number), spec in wanted.items()}
        futures = self.admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_S
        )
        try:
            return {(at.topic, at.partition): int(self._answer(future).offset) for at, future in futures.items()}
        except KafkaException as error:
            raise self.error(error) from error

    def committed(self, group: str, at: At, *, final: bool) -> tuple[int, str]:
        """Return the offset that a group has committed for a partition, and the text with it. `final`: wait for the end of a transaction."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                (found,) = self._asker(group, final=final).committed([TopicPartition(*at)], timeout=ANSWER_S)
                problem = found.error
            except KafkaException as error:
                problem = error.args[0]
            if problem is None:
                self.answered()
                return int(found.offset), found.metadata or ""
            if code_of(problem) not in _LATER or time.monotonic() > deadline:
                self._close_asker()
                raise self.error(problem)
            time.sleep(RETRY_S)

    def _asker(self, group: str, *, final: bool) -> Consumer:
        """A consumer that joins nothing and is asked for offsets.

        The call of the admin client for this ends the process if the coordinator has just moved or started (librdkafka 2.16, in
        `rd_kafka_handle_OffsetFetch`).
        """
        if self._asks is None or self._asks[:2] != (group, final):
            self._close_asker()
            level = "read_committed" if final else "read_uncommitted"
            config = self.config() | {"group.id": group, "isolation.level": level, "enable.auto.commit": False}
            self._asks = (group, final, self.made(Consumer, config))
        return self._asks[2]

    def _close_asker(self) -> None:
        if self._asks is not None:
            self._asks[2].close()
            self._asks = None

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = self.made(AdminClient, self.config())
        return self._admin

    def made(self, client: Callable[[dict[str, Any]], T], config: dict[str, Any]) -> T:
        """Make a client. What its settings lack is an error here."""
        try:
            return client(config)
        except (KafkaException, ValueError, TypeError) as error:
            raise ConfigError(f"{self.settings.called}: client=...: {described(error)}") from error

    def error(self, error: KafkaException | KafkaError) -> FordstoneError | AwayError:
        """Return what an error of the client means."""
        code = code_of(error)
        if code in _DENIED:
            return self.denied(error)
        if self._admin is not None:
            self._admin.poll(0)  # calls `_note`
        self.check_denied()
        last = f" ({described(self._last)})" if self._last is not None else ""
        what = "does not answer" if code in _AWAY else "does not do what it was asked"
        return AwayError(f"Kafka at {self.settings.servers} {what}: {described(error)}{last}.")

    def denied(self, error: KafkaException | KafkaError) -> FordstoneError:
        return self._fails(
            f"Kafka at {self.settings.servers} does not let this process in: {described(error)}.\n"
            "Check security.protocol, sasl.mechanism, user name and certificates in client=..., the secrets that it names, and what the user may do "
            "on the cluster."
        )

    def check_denied(self) -> None:
        """Raise if the cluster has rejected this process: it will not take it later."""
        if self._denied is not None:
            raise self.denied(self._denied)

    def answered(self) -> None:
        """Forget earlier problems."""
        self._denied = self._last = None
        self.all_down = False

    def close(self) -> None:
        self._close_asker()
        self._admin = None

    def _answer(self, future: Any) -> Any:
        try:
            found = future.result(ANSWER_S + 1.0)
        except TimeoutError as error:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from error  # noqa: SLF001 - as above
        self.answered()
        return found

    def _note(self, error: KafkaError) -> None:
        """Called by the client library while a client is asked for something."""
        self._last = error
        self.all_down = self.all_down or error.code() == KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 - as above
        if error.code() in _DENIED:
            self._denied = error


def client_config(settings: KafkaSettings, context: OpenContext) -> dict[str, Any]:
    """The client's settings with their secrets, and the servers.

    After all brokers were away, a client that looks for them from its first servers again may wait for ever, whatever its timeout (librdkafka 2.16, as
    producer and as admin). Without that it goes on with the brokers that it knows, the first servers among them.
    """
    config: dict[str, Any] = {
        "bootstrap.servers": settings.servers,
        "client.id": "fordstone",
        "metadata.recovery.strategy": "none",
    }
    return config | settings.client_with_secrets(context)


def code_of(error: BaseException | KafkaError) -> int | None:
    """The code of an error of the client library."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    return error.code() if isinstance(error, KafkaError) else None


def described(error: BaseException | KafkaError) -> str:
    """An error of the client library in words, without a full stop."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    text = error.str() if isinstance(error, KafkaError) else str(error)
    return text.rstrip(". ")


def _id_text(topic_id: Any) -> str:
    text = str(topic_id) if topic_id is not None else ""
    return "" if text == "AAAAAAAAAAAAAAAAAAAAAA" else text
