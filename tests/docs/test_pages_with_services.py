"""The pages whose code blocks need a real server: each is run with one that its environment names."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.blocks import REPOSITORY, SERVED, Page
from tests.services.hdfs import Hdfs
from tests.services.kafka import KafkaBroker
from tests.services.mosquitto import Mosquitto
from tests.services.postgres import Postgres
from tests.services.redis import RedisServer
from tests.services.registry import Registry
from tests.services.s3 import S3


def run_page(name: str, directory: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in SERVED
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with Page(name=name, directory=directory, environment=environment) as runner:
        runner.run_all((REPOSITORY / name).read_text())


def test_postgresql(postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres.create_database("page")
    environment = postgres.environment | {"PGDATABASE": "page"}
    run_page("docs/how-to/postgresql.md", tmp_path, environment, monkeypatch)


def test_mqtt(mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page("docs/how-to/mqtt.md", tmp_path, {"BROKER": mosquitto.address}, monkeypatch)


def test_kafka(kafka_broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kafka_broker.removed("lines", "counts", "orders"):
        run_page("docs/how-to/kafka.md", tmp_path, {"KAFKA_SERVERS": kafka_broker.servers}, monkeypatch)


def test_redis(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server.client() as client:
        client.delete("lines", "counts", "counts:fordstone:words.default.counts", "orders")
    run_page("docs/how-to/redis.md", tmp_path, {"REDIS_URL": redis_server.url}, monkeypatch)


def test_avro_and_protobuf(
    kafka_broker: KafkaBroker, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kafka_broker.removed("readings", "warm"):
        environment = {"KAFKA_SERVERS": kafka_broker.servers, "SCHEMA_REGISTRY": registry.url}
        run_page("docs/how-to/avro-and-protobuf.md", tmp_path, environment, monkeypatch)


def test_s3_and_hdfs(
    s3: S3, s3_url: str, hdfs: Hdfs, hdfs_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = s3.environment() | {"BUCKET": s3_url, "FOLDER": hdfs_url}
    run_page("docs/how-to/s3-and-hdfs.md", tmp_path, environment, monkeypatch)
