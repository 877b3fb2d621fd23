"""MQTT over TLS: which certificates are accepted, on both sides, and what an error says."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import trustme
from tests.connectors.test_mqtt import Open
from tests.services.base import start_or_skip
from tests.services.mosquitto import Mosquitto
from tests.waiting import until

from fordstone.connectors import mqtt
from fordstone.connectors.base import ConnectorSpec, OpenContext, Sink, SinkDelayedError, SinkStream
from fordstone.connectors.registry import open_sink
from fordstone.errors import FordstoneError, SinkError, SourceError
from fordstone.lang.schema import Schema

PASSWORD = "not to be printed"
SCHEMA = Schema.of({"n": "bigint"})


@dataclass(frozen=True)
class World:
    """A broker that has a certificate for `localhost`, wants one of its clients, and a password."""

    broker: Mosquitto
    folder: Path

    def spec(self, topic: str, **changed: Any) -> ConnectorSpec:
        files = {option: str(self.folder / f"{option}.pem") for option in ("ca_file", "cert_file", "key_file")}
        given: dict[str, Any] = {"broker": f"localhost:{self.broker.port}", "user": "u", "password": "MQTT_PASSWORD"}
        return mqtt(topic, **(given | {"tls": True} | files | changed))

    def open_sink(self, spec: ConnectorSpec, password: str = PASSWORD) -> Sink:
        context = OpenContext(secrets={"MQTT_PASSWORD": password})
        return open_sink(spec, SinkStream(step="out", schema=SCHEMA), context)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca_file.pem"))
    other.cert_pem.write_to_path(str(folder / "other_ca.pem"))
    for names, made in (("cert_file", authority), ("other_cert", other)):
        one = made.issue_cert("device@example.com")
        one.cert_chain_pems[0].write_to_path(str(folder / f"{names}.pem"))
        one.private_key_pem.write_to_path(str(folder / f"{names.replace('cert', 'key')}.pem"))
    server = authority.issue_cert("localhost")
    server.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
    server.private_key_pem.write_to_path(str(folder / "server_key.pem"))
    tls = (folder / "server.pem", folder / "server_key.pem", folder / "ca_file.pem")
    broker = start_or_skip(lambda: Mosquitto(passwords={"u": PASSWORD}, tls=tls, durable=False))
    yield World(broker, folder)
    broker.close()


def test_messages_cross_with_certificates_on_both_sides(world: World, tmp_path: Path) -> None:
    opened = Open(tmp_path, world.spec("rows"), schema=SCHEMA, secrets={"MQTT_PASSWORD": PASSWORD})
    try:
        opened.connected()
        sink = world.open_sink(world.spec("rows"))
        sink.release(1, pl.DataFrame({"n": list(range(100))}))
        sink.close()
        assert opened.rows(100)["n"].to_list() == list(range(100))
    finally:
        opened.close()


WRONG = [
    (
        {"ca_file": "other_ca"},
        r"certificate of localhost:\d+ is not valid: (unable to get local|self-signed)(?s:.)*ca_file=",
    ),
    ({"ca_file": None}, r"is not valid: (unable to get local|self-signed)(?s:.)*those of this system"),
    ({"broker": "127.0.0.1"}, r"not valid: IP address mismatch(?s:.)*Check that broker= has a name"),
]


@pytest.mark.parametrize(("changed", "says"), WRONG)
def test_certificates_that_are_not_accepted_are_errors_and_not_waited_for(
    world: World, tmp_path: Path, changed: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    files = {option: str(world.folder / f"{name}.pem") if name else None for option, name in changed.items()}
    if "broker" in changed:
        files = {"broker": f"{changed['broker']}:{world.broker.port}"}
    spec = world.spec("rows", **files)
    with pytest.raises(SinkError, match=says) as raised:
        world.open_sink(spec).release(1, pl.DataFrame({"n": [1]}))
    failed = _failure_of_source(spec, tmp_path, PASSWORD)
    assert isinstance(failed, SourceError)
    assert re.search(says, str(failed))
    assert PASSWORD not in f"{raised.value}{failed}{caplog.text}"


@pytest.mark.parametrize("name", [None, "other"])
def test_without_a_certificate_that_the_broker_accepts_it_is_said_what_to_check(
    world: World, tmp_path: Path, name: str | None
) -> None:
    files = {f"{kind}_file": str(world.folder / f"other_{kind}.pem") if name else None for kind in ("cert", "key")}
    spec = world.spec("rows", **files)
    # In TLS 1.3 the client is done before the broker has looked: it gets an alert, or only the end of the connection.
    with pytest.raises((SinkError, SinkDelayedError), match=r"TLS connection(?s:.)*Check cert_file="):
        world.open_sink(spec).release(1, pl.DataFrame({"n": [1]}))
    opened = Open(tmp_path, spec, schema=SCHEMA, secrets={"MQTT_PASSWORD": PASSWORD})

    def said() -> str:
        try:
            opened.take()
        except SourceError as error:
            return str(error)
        return opened.source.trouble().away or ""

    try:
        until(lambda: "Check cert_file=" in said(), "reason", report=said, seconds_max=60)
    finally:
        opened.close()


def test_a_wrong_password_is_an_error_that_does_not_show_it(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "a wrong secret"
    with pytest.raises(SinkError, match=r"Not authorized(?s:.)*Check user, password") as raised:
        world.open_sink(world.spec("rows"), wrong).release(1, pl.DataFrame({"n": [1]}))
    failed = _failure_of_source(world.spec("rows"), tmp_path, wrong)
    assert "Not authorized" in str(failed)
    assert wrong not in f"{raised.value}{failed}{caplog.text}"


def test_a_broker_that_does_not_speak_tls_is_not_taken_for_one(mosquitto: Mosquitto, world: World) -> None:
    with pytest.raises((SinkError, SinkDelayedError), match=r"TLS|away"):
        world.open_sink(world.spec("rows", broker=mosquitto.address)).release(1, pl.DataFrame({"n": [1]}))


def _failure_of_source(spec: ConnectorSpec, place: Path, password: str) -> FordstoneError:
    """What reading raises, as soon as it does."""
    opened = Open(place, spec, schema=SCHEMA, secrets={"MQTT_PASSWORD": password})
    found: list[FordstoneError] = []

    def failed() -> bool:
        try:
            opened.take()
        except FordstoneError as error:
            found.append(error)
        return bool(found)

    try:
        until(failed, "error", report=opened.source.trouble, seconds_max=60)
    finally:
        opened.close()
    return found[0]
