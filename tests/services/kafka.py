"""Apache Kafka: one broker that is its own controller, from Maven's jars, with the Java that Spark would use.

The storage is formatted once, into the cache: a new broker begins with a copy of those two small files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic, OffsetSpec
from tests.services.base import (
    POLL_S,
    MissingServiceError,
    Server,
    free_port,
    installed,
    listens,
    maven_jars,
    run_installer,
)

VERSION: Final = "4.3.1"
CLUSTER_ID: Final = "MkU3OEVBNTcwNTJENDM2Qk"
TIMEOUT_S: Final = 30.0
QUEUED_MAX: Final = 50_000
_HEAP: Final = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def jars() -> Path:
    """Return the folder with the jars of the broker."""
    return maven_jars(f"kafka-{VERSION}", [f"org.apache.kafka:kafka_2.13:{VERSION}"], transitive=True)


def java() -> Path:
    from fordstone.errors import NotInstalledError
    from fordstone.spark.session.java import home

    try:
        return home(os.environ) / "bin" / "java"
    except NotInstalledError as error:
        raise MissingServiceError(str(error)) from error


def _formatted() -> Path:
    """Return a folder with the storage of a new broker. It contains no port, and no path."""

    def install(folder: Path) -> None:
        properties = folder / "server.properties"
        properties.write_text(_properties(folder / "log", port=9, controller_port=10))
        tool = ("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", properties)
        run_installer(java(), *_HEAP, "-cp", f"{jars()}/*", *tool)

    return installed(f"kafka-{VERSION}-storage", install) / "log"


def _properties(log: Path, *, port: int, controller_port: int, **others: object) -> str:
    lines = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
        "log.dirs": log,
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": 1,
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.num.partitions": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 1,
        "group.initial.rebalance.delay.ms": 0,
        # Otherwise the controller keeps the registration of a killed broker for 9 s, and the restarted one waits for that.
        "broker.session.timeout.ms": 1000,
        "broker.heartbeat.interval.ms": 250,
        # Otherwise a transaction that has timed out is aborted up to 10 s later.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
    }
    return "".join(f"{name}={value}\n" for name, value in {**lines, **others}.items())


class KafkaBroker(Server):
    """A broker of one node. Its data is in `folder`, and stays over restarts, as does the port."""

    def __init__(
        self, folder: Path, *, properties: Mapping[str, object] | None = None, users: Mapping[str, str] | None = None
    ) -> None:
        """`properties`: further settings of the broker. `users`: names and passwords, for a second port that asks for them."""
        port, controller_port, guarded_port = free_port(), free_port(), free_port()
        self.servers: Final = f"127.0.0.1:{port}"
        self.guarded_servers: Final = f"127.0.0.1:{guarded_port}"
        more = dict(properties or {})
        if users:
            known = " ".join(f'user_{name}="{password}"' for name, password in users.items())
            more |= {
                "listeners": f"PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{guarded_port},"
                f"CONTROLLER://127.0.0.1:{controller_port}",
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
                    f"org.apache.kafka.common.security.plain.PlainLoginModule required {known};"
                ),
            }
        self._port = port
        self._admin: AdminClient | None = None
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(_formatted(), folder / "log")
        settings = folder / "server.properties"
        settings.write_text(_properties(folder / "log", port=port, controller_port=controller_port, **more))
        super().__init__(
            "Kafka",
            [java(), *_HEAP, "-cp", f"{jars()}/*", "kafka.Kafka", settings],
            log=folder / "server.log",
            answers=self._answers,
            cwd=folder,
        )

    def _answers(self) -> bool:
        if not listens(self._port):
            return False
        try:
            return bool(self.client().list_topics(timeout=1.0).brokers)
        except KafkaException:
            return False

    def client(self) -> AdminClient:
        """Return the client of this server for its administration."""
        if self._admin is None:
            self._admin = AdminClient({**QUIET, "bootstrap.servers": self.servers})
        return self._admin

    # What tests do with it.

    def create(self, topic: str, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        """Create a topic, and return its name once it can be written to."""
        _done(self.client().create_topics([NewTopic(topic, partitions, 1, config=dict(config or {}))]))
        with self.producer() as producer:
            for number in range(partitions):  # a topic that is known may have partitions without a leader yet
                _wait_for_leader(producer, topic, number)
        return topic

    @contextmanager
    def removed(self, *topics: str) -> Iterator[None]:
        """Delete these topics in the end, for tests whose topics have names that others use as well."""
        try:
            yield
        finally:
            for topic in topics:
                if topic in self.client().list_topics(timeout=TIMEOUT_S).topics:
                    self.delete(topic)

    @contextmanager
    def topics(self, **partitions: int) -> Iterator[None]:
        """Topics that are there for a while."""
        with self.removed(*partitions):
            for topic, count in partitions.items():
                self.create(topic, partitions=count)
            yield

    def add_partitions(self, topic: str, partitions: int) -> None:
        _done(self.client().create_partitions([NewPartitions(topic, partitions)]))
        with self.producer() as producer:
            for number in range(partitions):
                _wait_for_leader(producer, topic, number)

    def delete(self, topic: str) -> None:
        """Delete a topic, and return when nobody sees it any more."""
        _done(self.client().delete_topics([topic]))
        while topic in self.client().list_topics(timeout=TIMEOUT_S).topics:
            pass

    def delete_before(self, topic: str, offset: int, *, partition: int = 0) -> None:
        """Delete the messages of a partition before an offset."""
        _done(self.client().delete_records([TopicPartition(topic, partition, offset)]))

    @contextmanager
    def producer(self, **config: object) -> Iterator[Producer]:
        """A producer, which has sent all when the block ends."""
        producer = Producer({**QUIET, "bootstrap.servers": self.servers, "linger.ms": 5, **_dotted(config)})
        yield producer
        assert producer.flush(TIMEOUT_S) == 0

    def send(self, topic: str, values: Iterable[bytes | str | None], *, partition: int = 0, **given: Any) -> None:
        """Send messages with these values, in order; return when the broker has them."""
        with self.producer() as producer:
            for value in values:
                while len(producer) > QUEUED_MAX:
                    producer.poll(POLL_S)
                producer.produce(topic, value=value, partition=partition, on_delivery=_raise_error, **given)
                producer.poll(0)

    def committed(self, group: str, topic: str, partition: int = 0) -> int:
        """Return the offset that a group has committed."""
        # Not with the admin client: its call for this may end the process (librdkafka 2.16).
        asks = Consumer({"bootstrap.servers": self.servers, "group.id": group, "enable.auto.commit": False})
        (found,) = asks.committed([TopicPartition(topic, partition)], timeout=TIMEOUT_S)
        asks.close()
        return int(found.offset)

    def commit(self, group: str, topic: str, offset: int) -> None:
        """Commit an offset of a group, as another tool would."""
        request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, offset)])
        _done(self.client().alter_consumer_group_offsets([request]))

    def ends(self, topic: str, *, committed: bool = True) -> dict[int, int]:
        """Return where partitions end: with `committed`, before a transaction that is open."""
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        known = self.client().list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
        asked = {TopicPartition(topic, number): OffsetSpec.latest() for number in known}
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            found = self.client().list_offsets(asked, isolation_level=isolation)
            try:
                return {at.partition: future.result(TIMEOUT_S).offset for at, future in found.items()}
            except KafkaException:  # a broker that has just started is not sure of its epoch
                assert time.monotonic() < deadline
                time.sleep(POLL_S)

    def settle(self, topic: str) -> None:
        """Wait until no transaction is open in a topic: that of a commit is ended a little after its producer has the answer."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.ends(topic) != self.ends(topic, committed=False):
            assert time.monotonic() < deadline, f"a transaction in {topic} stays open"

    def messages(self, topic: str, *, committed: bool = True) -> list[Message]:
        """Return all messages of a topic, by partition and offset; with `committed`, as `read_committed` shows them."""
        if committed:
            self.settle(topic)
        consumer = Consumer(
            {
                **QUIET,
                "bootstrap.servers": self.servers,
                "group.id": "tests",
                "enable.auto.commit": False,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            found = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic]
            assert found.error is None, found.error
            consumer.assign([TopicPartition(topic, number, 0) for number in found.partitions])
            left, messages = set(found.partitions), []
            while left:
                for message in consumer.consume(10_000, timeout=0.05):
                    error = message.error()
                    if error is None:
                        messages.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        left.discard(message.partition())
                    else:
                        raise KafkaException(error)
        finally:
            consumer.close()
        return sorted(messages, key=lambda one: (one.partition(), one.offset()))

    def values(self, topic: str, *, committed: bool = True) -> list[bytes]:
        return [message.value() for message in self.messages(topic, committed=committed)]


QUIET: Final = {"log_level": 2}
"""Clients of tests say nothing of brokers that tests have ended."""


def _dotted(config: Mapping[str, object]) -> dict[str, object]:
    return {name.replace("_", "."): value for name, value in config.items()}


def _raise_error(error: KafkaError | None, message: Message) -> None:
    del message
    if error is not None:
        raise KafkaException(error)


def _done(futures: Mapping[Any, Any]) -> None:
    for future in futures.values():
        future.result(TIMEOUT_S)


def _wait_for_leader(producer: Producer, topic: str, partition: int) -> None:
    while True:
        found = producer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions.get(partition)
        if found is not None and found.leader >= 0 and found.error is None:
            return


def started(folder: Path, **options: Any) -> KafkaBroker:
    """Return a broker that answers."""
    broker = KafkaBroker(folder, **options)
    broker.start()
    return broker
