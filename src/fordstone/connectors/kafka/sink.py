"""A topic as a sink: each epoch is one transaction.

The transaction holds the rows, and as an offset of a consumer group of the sink's own (`fordstone.PIPELINE.NODE.STEP`) the number of the epoch, with the
writer as its metadata: the mark. An epoch that the mark has is never sent again. The producer's `transactional.id` is that name too, so
the cluster ends the transactions of any earlier producer of the stream when a new one begins (rule 18).

A writer opens the sink in this order: read the mark and judge it, so that an old copy stops before it disturbs the living writer; begin as producer,
which ends what is in flight; read the mark again, which now is final, and judge it again; write the claim. Whenever a call fails in a way that
leaves open what the cluster has done, the producer is dropped, and the next try begins like this again: the mark says what was committed.

Invariants: no rows are visible without the mark of their epoch, nor twice; of two writers, only one can commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import polars as pl
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from fordstone.connectors.base import (
    OpenContext,
    Sink,
    SinkDelayedError,
    SinkStream,
    judge_claim,
    later_output,
    owned_by_newer,
)
from fordstone.connectors.kafka.client import NO_OFFSET, AwayError, Cluster, described
from fordstone.connectors.kafka.kind import KafkaSettings
from fordstone.connectors.kafka.rows import RowMessages
from fordstone.connectors.schema_registry import RegistryAwayError
from fordstone.errors import SinkError
from fordstone.protocol.claim import SinkWriter

log = logging.getLogger(__name__)

TRANSACTION_S: Final = 20.0
"""Maximum wait for one step of a transaction, before the sink is tried again."""
TRY_S: Final = 2.0
"""After this time a step looks whether there is a broker at all. Without one it is tried again later, with a new transaction."""
CLAIM_TRIES_MAX: Final = 10
QUEUED_KBYTES: Final = 64 * 1024
"""Of messages that wait to be sent."""
SERVE_EVERY: Final = 1_000
POLL_S: Final = 0.1
_FENCED: Final = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})  # noqa: SLF001 - codes of the client library begin so
_REFUSED: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - as above
        KafkaError._INVALID_ARG,  # noqa: SLF001 - as above
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
    }
)
"""What a later try would not mend."""


class SinkMark(msgspec.Struct, frozen=True, kw_only=True):
    """What the group of a sink records."""

    epoch: int
    writer: SinkWriter


class KafkaSink(Sink):
    """Writes one stream into one topic."""

    def __init__(self, settings: KafkaSettings, stream: SinkStream, context: OpenContext) -> None:
        self._settings = settings
        self._stream = stream
        self._topic = settings.topics[0]
        self._name = ".".join(("fordstone", *filter(None, (stream.pipeline, stream.node, stream.step))))
        self._at = (self._topic, 0)
        """The partition whose offset in the group is the mark. Any would do."""
        self._messages = RowMessages(settings, stream, context)
        self._cluster = Cluster(settings, context, fails=self._failure)
        self._producer: Producer | None = None
        """In whose name transactions are made: it has the topic."""
        self._plain: Producer | None = None
        """For rows that are written at once."""
        self._group = b""
        """The mark's group, as the client wants it."""
        self._mark: SinkMark | None = None
        """As the cluster has it."""
        self._before: SinkMark | None = None
        """The mark that this writer's claim has replaced."""
        self._failed: KafkaError | None = None
        """What became of a message that was written at once."""
        with self._errors():
            self._check_topic()
            self._messages.prepare()
            if stream.owner:
                self._take()

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Commit the epoch, unless the mark has it. One without rows is marked, too."""
        with self._errors():
            for _ in range(CLAIM_TRIES_MAX):
                if self._producer is None:
                    self._check_owner()  # not to disturb the living one
                    self._begin()
                    self._check_writer(self._mark)
                if self._released(epoch, frame):
                    return
                try:
                    self._commit(frame, SinkMark(epoch=epoch, writer=self._stream.writer))
                except _FencedByOtherError:
                    self._check_owner()
                else:
                    return
            raise SinkDelayedError(f"sink {self._stream.step}: other producers take {self._where} over all the time.")

    def write(self, frame: pl.DataFrame) -> None:
        """Send rows, and return when the cluster has them. A failure may leave some of them there."""
        if frame.is_empty():
            return
        with self._errors():
            if self._stream.owner:
                self._check_owner()
            if self._plain is None:
                self._plain = self._cluster.made(Producer, self._config() | {"delivery.report.only.error": True})
            self._failed = None
            try:
                self._produce(self._plain, frame, self._note_failure)
                self._flush(self._plain)
            except KafkaException:
                self._drop()
                raise
            if self._failed is not None:
                raise KafkaException(self._failed)

    def close(self) -> None:
        self._drop()
        self._cluster.close()
        self._messages.close()

    # The claim.

    def _take(self) -> None:
        """Take the topic over from earlier writers."""
        for _ in range(CLAIM_TRIES_MAX):
            self._judge(self._read_mark(final=False))
            self._begin()
            mark = self._before = self._mark
            self._judge(mark)
            epoch = 0 if mark is None else mark.epoch
            known = self._stream.resumes_after
            if known is not None and epoch > known:
                log.warning("later epochs stay in the topic", extra={"topic": self._topic, "epochs": epoch - known})
                epoch = known
            if mark is None and known:
                return  # there is nothing to be claimed without saying which epochs the topic has
            try:
                self._commit(None, SinkMark(epoch=epoch, writer=self._stream.writer))
            except _FencedByOtherError:
                continue
            return
        raise SinkDelayedError(f"sink {self._stream.step}: other producers take {self._where} over all the time.")

    def _judge(self, mark: SinkMark | None) -> None:
        found = [] if mark is None or not mark.writer.start else [mark.writer]
        judge_claim(self._where, self._stream, found, lambda: self._check_later(mark))
        self._check_later(mark)

    def _check_later(self, mark: SinkMark | None) -> None:
        known = self._stream.resumes_after
        if known is None or mark is None or mark.epoch <= known or self._stream.discard_later:
            return
        raise later_output(
            self._where,
            self._stream,
            range(known + 1, mark.epoch + 1),
            problem="rows in a topic cannot be taken back. Write to another topic; or start once with --discard-later-output (in Python: "
            "discard_later_output=True), which leaves those rows in the topic and numbers new ones after the state's epochs.",
        )

    def _check_owner(self) -> None:
        """Raise if another writer has taken the topic over."""
        mark = self._read_mark(final=False)
        if mark == self._before:
            # A claim that was just committed is not seen yet.
            mark = self._read_mark(final=True)
        self._check_writer(mark)

    def _check_writer(self, mark: SinkMark | None) -> None:
        if mark is None and self._mark is not None:
            raise self._failure(
                f"the consumer group {self._name!r}, which records the epochs of {self._where}, is gone: the topic or the group was deleted while this "
                "pipeline ran. Start the pipeline again when the topic is there."
            )
        if self._stream.owner and mark is not None and mark.writer != self._stream.writer:
            raise owned_by_newer(self._where, self._stream, mark.writer)

    def _released(self, epoch: int, frame: pl.DataFrame) -> bool:
        """Whether the topic has the epoch."""
        if self._mark is not None:
            return self._mark.epoch >= epoch
        if epoch > (self._stream.resumes_after or 0) or frame.is_empty() or self._settings.unmarked == "write":
            return False
        if self._settings.unmarked == "skip":
            log.warning("epoch taken for released", extra={"topic": self._topic, "epoch": epoch})
            return True
        raise SinkError(
            f"sink {self._stream.step}: epoch {epoch} was sealed before this start, and may have been released to {self._where}, but the group "
            f"{self._name!r} that records it is not there: it has expired (offsets.retention.minutes of the cluster, 7 days by default), or the topic was "
            f"deleted and created again. Released again, its {frame.height:,} rows may be there twice. Nothing was written.\n"
            "See whether the newest rows of this pipeline are in the topic. Then set unmarked='skip' in kafka(...) if they are, or unmarked='write' "
            "if they are not, and remove it after this start."
        )

    def _read_mark(self, *, final: bool) -> SinkMark | None:
        """Read the newest mark that is committed. `final`: also that of a transaction which is about to end, if it ends well."""
        offset, text = self._cluster.committed(self._name, self._at, final=final)
        if offset == NO_OFFSET:
            return None
        try:
            return msgspec.json.decode(text, type=SinkMark)
        except msgspec.DecodeError as error:
            raise SinkError(
                f"sink {self._stream.step}: the consumer group {self._name!r} at {self._settings.servers} has an offset that this sink has not written. "
                "Another tool uses its name. Delete that group, or rename the sink."
            ) from error

    # Transactions.

    def _begin(self) -> None:
        """Become the producer of this stream: what another one had in flight has ended then, and the mark is final."""
        self._drop()
        if not self._group:
            consumer = self._cluster.made(Consumer, self._cluster.config() | {"group.id": self._name})
            self._group = consumer.consumer_group_metadata()
            consumer.close()
        self._producer = producer = self._cluster.made(Producer, self._config() | {"transactional.id": self._name})
        self._call(lambda: self._wait(producer, producer.init_transactions))
        self._mark = self._read_mark(final=True)

    def _commit(self, frame: pl.DataFrame | None, mark: SinkMark) -> None:
        """Make rows and the mark visible together. Raises if another producer has begun since this one did."""
        producer = self._producer
        if producer is None:
            raise AssertionError("a transaction without its producer")
        text = msgspec.json.encode(mark).decode()
        self._call(producer.begin_transaction)
        if frame is not None:
            self._call(lambda: self._produce(producer, frame))
        at = TopicPartition(*self._at, mark.epoch, text)
        self._call(
            lambda: self._wait(producer, lambda try_s: producer.send_offsets_to_transaction([at], self._group, try_s))
        )
        self._call(lambda: self._flush(producer))
        self._call(lambda: self._wait(producer, producer.commit_transaction))
        self._mark = mark

    def _call(self, step: Callable[[], object]) -> None:
        """Do a step of a transaction. After a failure the producer is of no use: what the cluster did is found out by the next one."""
        try:
            step()
        except BaseException as error:
            self._drop()
            if isinstance(error, KafkaException) and error.args[0].code() in _FENCED:
                raise _FencedByOtherError from error
            raise

    def _wait(self, producer: Producer, step: Callable[[float], object]) -> None:
        """Do a step of a transaction that waits. A call that has timed out is resumed by another one."""
        deadline = time.monotonic() + TRANSACTION_S
        while True:
            try:
                step(TRY_S)
            except KafkaException as error:
                problem = error.args[0]
                producer.poll(0)  # calls `Cluster._note`
                resumes = problem.code() == KafkaError._TIMED_OUT and not problem.txn_requires_abort()  # noqa: SLF001 - as above
                if not resumes or self._cluster.all_down or time.monotonic() > deadline:
                    raise
            else:
                self._cluster.answered()
                return

    def _flush(self, producer: Producer) -> None:
        """Wait until all is sent, for as long as it gets less."""
        left, deadline = len(producer), time.monotonic() + TRANSACTION_S
        while producer.flush(TRY_S):
            if len(producer) < left:
                left, deadline = len(producer), time.monotonic() + TRANSACTION_S
            elif self._cluster.all_down or time.monotonic() > deadline:
                raise _timed_out()

    def _produce(self, producer: Producer, frame: pl.DataFrame, on_delivery: Callable[..., None] | None = None) -> None:
        topic, produce, poll = self._topic, producer.produce, producer.poll
        for number, one in enumerate(self._messages.of(frame)):
            given: dict[str, Any] = {} if one.headers is None else {"headers": one.headers}
            if on_delivery is not None:
                given["on_delivery"] = on_delivery
            waits = 0
            while True:
                try:
                    produce(topic, one.value, one.key, partition=one.partition, timestamp=one.timestamp_ms, **given)
                except BufferError as error:
                    if waits * POLL_S >= TRANSACTION_S:
                        raise _timed_out() from error
                    waits += 1
                    poll(POLL_S)
                else:
                    break
            if number % SERVE_EVERY == 0:
                poll(0)

    def _config(self) -> dict[str, object]:
        return self._cluster.config(
            linger_ms=5,
            queue_buffering_max_kbytes=QUEUED_KBYTES,
            partitioner="murmur2_random",
        ) | {"enable.idempotence": True}

    def _drop(self) -> None:
        """Give the producers up, with what they have not sent."""
        for producer in (self._producer, self._plain):
            if producer is not None:
                producer.purge()
        self._producer = self._plain = None

    def _note_failure(self, error: KafkaError | None, message: Message) -> None:
        del message
        if error is not None:
            self._failed = error

    # What is said.

    @property
    def _where(self) -> str:
        return self._settings.called

    def _check_topic(self) -> None:
        if self._cluster.describe([self._topic])[self._topic] is None:
            raise self._failure(
                f"{self._where}: there is no topic {self._topic!r} at {self._settings.servers}.\n"
                "Create it, or correct its name. A user who may not see a topic gets the same answer."
            )

    def _failure(self, text: str) -> SinkError:
        return SinkError(f"sink {self._stream.step}: {text}")

    def _errors(self) -> _Errors:
        return _Errors(self._cluster, self._stream.step)


def _timed_out() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - codes of the client library begin so


class _FencedByOtherError(Exception):
    """Another producer has begun under the name of this one."""


class _Errors:
    """What errors of the client mean to an engine: wait and try again, or stop."""

    def __init__(self, cluster: Cluster, step: str) -> None:
        self._cluster = cluster
        self._step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AwayError | RegistryAwayError):
            raise SinkDelayedError(f"sink {self._step}: {error}") from error
        if not isinstance(error, KafkaException):
            return
        if error.args[0].code() in _REFUSED:
            raise SinkError(
                f"sink {self._step}: Kafka does not take these rows: {described(error)}.\n"
                "Nothing of this epoch is visible. If a row is too large, raise message.max.bytes in client=... and max.message.bytes of the topic."
            ) from error
        found = self._cluster.error(error)
        if isinstance(found, AwayError):
            raise SinkDelayedError(f"sink {self._step}: {found}") from error
        raise found from error
