"""One server of each kind per test run, started when the first test asks for it. Fault tests that end servers start their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import fsspec
import pytest
from tests.services.base import start_or_skip
from tests.services.hdfs import Hdfs
from tests.services.hdfs import started as started_hdfs
from tests.services.kafka import KafkaBroker
from tests.services.kafka import started as started_kafka
from tests.services.mosquitto import Mosquitto
from tests.services.postgres import Postgres
from tests.services.redis import RedisServer
from tests.services.registry import Registry
from tests.services.registry import started as started_registry
from tests.services.s3 import S3
from tests.services.s3 import started as started_s3

T = TypeVar("T")
STORES: Final = ("s3", "hdfs")


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    broker = start_or_skip(lambda: started_kafka(tmp_path_factory.mktemp("kafka")))
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def mosquitto() -> Iterator[Mosquitto]:
    server = start_or_skip(Mosquitto)
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = start_or_skip(Postgres)
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = start_or_skip(RedisServer)
    yield server
    server.close()


@pytest.fixture(name="registry", scope="session")
def registry_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    server = start_or_skip(lambda: started_registry(tmp_path_factory.mktemp("registry")))
    yield server
    server.stop()


@pytest.fixture(name="hdfs", scope="session")
def hdfs_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    server = start_or_skip(lambda: started_hdfs(tmp_path_factory.mktemp("hdfs")))
    yield server
    server.stop()


@pytest.fixture(name="s3", scope="session")
def s3_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = start_or_skip(lambda: started_s3(tmp_path_factory.mktemp("s3")))
    yield server
    server.stop()


def use_s3(server: S3, monkeypatch: pytest.MonkeyPatch, address: str | None = None) -> None:
    """Put what a client needs into the environment; `address` if it goes through a proxy."""
    for name, value in server.environment(address).items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of another environment


@pytest.fixture(name="own_s3")
def own_s3_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A server that the test may kill, with what a client needs in the environment."""
    server = start_or_skip(lambda: started_s3(tmp_path / "s3"))
    use_s3(server, monkeypatch)
    yield server
    server.kill()


@pytest.fixture(name="s3_url")
def s3_url_fixture(s3: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, with what a client needs in the environment."""
    use_s3(s3, monkeypatch)
    return f"s3://{s3.bucket()}"


@pytest.fixture(name="hdfs_url")
def hdfs_url_fixture(hdfs: Hdfs) -> str:
    """A new directory."""
    return hdfs.directory()


@pytest.fixture(name="store_url", params=STORES)
def store_url_fixture(request: pytest.FixtureRequest) -> str:
    """A new place in each of the stores."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture(name="url", params=["memory", *STORES])
def url_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As `store_url`, and a place in memory, which is all that --quick has."""
    if request.param == "memory":
        return f"memory://{tmp_path.parent.name}-{tmp_path.name}"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


def at_urls(values: Iterable[T], *stored: T) -> list[tuple[str, T]]:
    """Return cases for `url` (indirect) and another parameter: all values in memory, and those that are `stored` in each store, too."""
    return [("memory", value) for value in values] + [(store, value) for store in STORES for value in stored]
