"""Messages in Avro with a schema registry, on a real broker and a real registry: both ways, schemas that change, and a registry that is away."""

from __future__ import annotations

import base64
import io
import json
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import polars as pl
import pytest
import trustme
from tests.connectors.kafka.test_kafka_sink import STREAM
from tests.connectors.kafka.test_kafka_source import all_rows, opened, run
from tests.connectors.kafka.topics import topic_of
from tests.services.base import free_port
from tests.services.kafka import KafkaBroker
from tests.services.registry import Registry
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

from fordstone import Pipeline
from fordstone.connectors import kafka, memory
from fordstone.connectors.base import ConnectorSpec, OpenContext, SinkDelayedError
from fordstone.connectors.kafka.sink import KafkaSink
from fordstone.connectors.registry import open_sink
from fordstone.errors import ConfigError, FordstoneError, NotInstalledError, SinkError, SourceError
from fordstone.lang.schema import Schema

FIRST = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}, {"name": "place", "type": "string"}]}  # fmt: skip
build: Callable[..., ConnectorSpec] = kafka


@pytest.fixture
def topic(kafka_broker: KafkaBroker, tmp_path: Path) -> str:
    return kafka_broker.create(topic_of(tmp_path))


def message(schema_id: int, schema: object, row: Mapping[str, Any]) -> bytes:
    """A message as other producers make it."""
    buffer = io.BytesIO(b"\0" + schema_id.to_bytes(4, "big"))
    buffer.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema), dict(row))  # type: ignore[arg-type]
    return buffer.getvalue()


def spec(broker: KafkaBroker, registry: Registry | str, topic: str, **options: Any) -> ConnectorSpec:
    url = registry if isinstance(registry, str) else registry.url
    return build(topic, servers=broker.servers, format="avro", schema_registry=url, **options)


def sink(given: ConnectorSpec, schema: Mapping[str, str], *, after: int = 0, **context: Any) -> KafkaSink:
    stream = replace(STREAM, schema=Schema.of(schema), resumes_after=after)
    found = open_sink(given, stream, OpenContext(**context))
    assert isinstance(found, KafkaSink)
    return found


def letters(state: Path) -> list[dict[str, Any]]:
    (file,) = state.rglob("dead-letters/rows/*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


# Reading.


def test_messages_of_several_schemas_are_rows_of_one(
    kafka_broker: KafkaBroker, registry: Registry, topic: str, tmp_path: Path
):
    """A field is added, one is removed, one is widened, one is renamed with an alias: each message is read by the schema that wrote it."""
    second = {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "city", "type": "string", "aliases": ["place"]},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
    third = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    schemas: list[object] = [FIRST, second, third]
    ids = [registry.register(f"{topic}-value", schema) for schema in schemas]
    rows: list[dict[str, Any]] = [{"id": 1, "place": "Ulm"}, {"id": 1 << 40, "city": "Jena", "note": "n"}, {"id": 3}]
    kafka_broker.send(topic, [message(one, schema, row) for one, schema, row in zip(ids, schemas, rows, strict=True)])
    columns = {"id": "bigint", "place": "string", "note": "string"}
    found = all_rows(opened(spec(kafka_broker, registry, topic), columns), columns)
    assert found == [
        {"id": 1, "place": "Ulm", "note": None},
        {"id": 1 << 40, "place": "Jena", "note": "n"},
        {"id": 3, "place": None, "note": None},
    ]
    # With a schema of one's own: its aliases find the old name, and its default stands for what is removed.
    own = {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "city", "type": "string", "aliases": ["place"], "default": "unknown"},
        ],
    }
    columns = {"id": "bigint", "city": "string"}
    found = all_rows(opened(spec(kafka_broker, registry, topic, schema=own), columns), columns)
    assert [row["city"] for row in found] == ["Ulm", "Jena", "unknown"]


def test_what_cannot_be_read_is_a_dead_letter_with_partition_offset_and_schema(
    kafka_broker: KafkaBroker, registry: Registry, topic: str, tmp_path: Path
):
    other = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}
    first, changed = registry.register(f"{topic}-value", FIRST), registry.register(f"{topic}-value", other)
    good = message(first, FIRST, {"id": 1, "place": "Ulm"})
    values = [
        good,
        message(changed, other, {"id": "x"}),
        b"\0" + (1 << 30).to_bytes(4, "big") + b"\2",
        b'{"id": 1}',
        good[:-1],
        b"\0\xff\xff\xff\xff",
        message(first, FIRST, {"id": 2, "place": "Jena"}),
    ]
    kafka_broker.send(topic, values)
    rows = run(spec(kafka_broker, registry, topic), tmp_path, {"id": "bigint", "place": "string"})
    assert [row["id"] for row in rows] == [1, 2]
    found = letters(tmp_path)
    assert {one["partition"] for one in found} == {f"{topic}/0"}
    assert [one["reason"] for one in found] == [
        f"offset 1: schema id {changed}: id is string, which cannot be read as bigint",
        f"offset 2: schema id {1 << 30}: the schema registry at {registry.url} does not have it",
        "offset 3: the message does not begin with a zero and the id of a schema: its producer did not use a schema registry",
        f"offset 4: schema id {first}: a length is negative, or more than there is",
        f"offset 5: schema id {0xFFFFFFFF}: no registry gives this number",
    ]
    assert base64.b64decode(found[0]["text"]) == values[1]


def test_a_message_without_a_value_is_a_row_of_nulls(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    schema_id = registry.register(f"{topic}-value", FIRST)
    value = message(schema_id, FIRST, {"id": 1, "place": "Ulm"})
    kafka_broker.send(topic, [None, value, None], key=b"k")
    columns = {"k": "string", "id": "bigint"}
    found = all_rows(opened(spec(kafka_broker, registry, topic, key="k"), columns), columns)
    assert found == [{"k": "k", "id": None}, {"k": "k", "id": 1}, {"k": "k", "id": None}]


def test_a_schema_may_use_types_of_another_subject(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    place = {"type": "record", "name": "Place", "namespace": "geo", "fields": [{"name": "city", "type": "string"}]}
    order = {"type": "record", "name": "Order", "fields": [{"name": "at", "type": "geo.Place"}]}
    registry.register(f"{topic}-place", place)
    uses = [{"name": "geo.Place", "subject": f"{topic}-place", "version": 1}]
    schema_id = registry.register(f"{topic}-value", order, references=uses)
    whole = {**order, "fields": [{"name": "at", "type": place}]}
    kafka_broker.send(topic, [message(schema_id, whole, {"at": {"city": "Ulm"}})])
    columns = {"at": "struct<city: string>"}
    found = all_rows(opened(spec(kafka_broker, registry, topic), columns), columns)
    assert found == [{"at": {"city": "Ulm"}}]


def test_a_registry_that_is_away_delays_and_drops_nothing(
    kafka_broker: KafkaBroker, registry: Registry, topic: str, tmp_path: Path
):
    schema_id = registry.register(f"{topic}-value", FIRST)
    kafka_broker.send(topic, [message(schema_id, FIRST, {"id": number, "place": "Ulm"}) for number in range(3)])
    port = free_port()
    source = opened(
        spec(kafka_broker, f"http://127.0.0.1:{port}/apis/ccompat/v7", topic), {"id": "bigint"}, bounded=False
    )
    (partition,) = source.partitions()
    with_reader = source.open(partition, 0, with_positions=False)  # type: ignore[arg-type]
    found: list[int] = []

    def read() -> bool:
        chunk = with_reader.read(100)
        if chunk is not None:
            assert not chunk.rejected
            found.extend(chunk.frame.get_column("id"))
        return source.trouble().away is not None

    until(read, "trouble with the registry", seconds_max=30)
    assert f"127.0.0.1:{port}" in str(source.trouble().away)
    assert found == []
    with front(registry, port=port):
        until(lambda: (read(), len(found) >= 3)[1], "rows", seconds_max=30)
    assert found == [0, 1, 2]
    assert source.trouble().away is None
    # A schema that is known needs no registry.
    kafka_broker.send(topic, [message(schema_id, FIRST, {"id": 3, "place": "Ulm"})])
    until(lambda: (read(), len(found) >= 4)[1], "the last row", seconds_max=30)
    with_reader.close()
    source.close()


def test_a_reader_does_not_wait_for_a_registry_that_is_silent(
    kafka_broker: KafkaBroker, registry: Registry, topic: str
):
    schema_id = registry.register(f"{topic}-value", FIRST)
    kafka_broker.send(topic, [message(schema_id, FIRST, {"id": 1, "place": "Ulm"})])
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        source = opened(spec(kafka_broker, url, topic), {"id": "bigint"}, bounded=False)
        (partition,) = source.partitions()
        reader = source.open(partition, 0, with_positions=False)  # type: ignore[arg-type]

        def away() -> bool:
            chunk = reader.read(100)
            assert chunk is None or chunk.frame.is_empty()
            return "has not answered yet" in str(source.trouble().away)

        until(away, "trouble with the registry", seconds_max=30)
        reader.close()
        source.close()


# Writing.


def test_rows_are_written_by_a_schema_that_is_registered(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    columns = {"id": "bigint", "tags": "array<string>", "at": "timestamp", "price": "decimal(9,2)", "on": "date"}
    pipeline = Pipeline("p")
    rows = [
        {"id": 1, "tags": ["a", "b"], "at": "2026-01-31T12:00:00Z", "price": "1.50", "on": "2026-01-31"},
        {"id": None, "tags": None, "at": None, "price": None, "on": None},
    ]
    frame = pl.DataFrame(rows).with_columns(
        pl.col("at").str.to_datetime(time_zone="UTC"),
        pl.col("price").cast(pl.Decimal(9, 2)),
        pl.col("on").str.to_date(),
    )
    pipeline.source("rows", memory(frame), schema=columns).sink("out", spec(kafka_broker, registry, topic))
    pipeline.run(bounded=True)
    latest = registry.latest(f"{topic}-value")
    parsed = fastavro.parse_schema(json.loads(latest["schema"]))
    values = kafka_broker.values(topic)
    assert [value[:5] for value in values] == [b"\0" + int(latest["id"]).to_bytes(4, "big")] * 2
    found = [fastavro.schemaless_reader(io.BytesIO(value[5:]), parsed) for value in values]
    schema = Schema.of(columns).polars
    assert pl.DataFrame(found, schema=schema).equals(pl.DataFrame(frame, schema=schema))
    assert all_rows(opened(spec(kafka_broker, registry, topic), columns), columns) == frame.to_dicts()


def test_a_schema_that_is_not_compatible_is_refused_before_anything_is_written(
    kafka_broker: KafkaBroker, registry: Registry, topic: str
):
    registry.register(f"{topic}-value", FIRST)
    registry.require(f"{topic}-value", "BACKWARD")
    with pytest.raises(
        SinkError, match=f"does not take the schema of these columns as a new version of '{topic}-value'"
    ):
        sink(spec(kafka_broker, registry, topic), {"id": "string"})
    assert kafka_broker.values(topic) == []
    sink(
        spec(kafka_broker, registry, topic), {"id": "bigint", "place": "string"}
    ).close()  # nulls and longs can be read


def test_without_registering_rows_are_written_by_the_newest_schema(
    kafka_broker: KafkaBroker, registry: Registry, topic: str
):
    columns = {"id": "int", "place": "string"}
    with pytest.raises(SinkError, match=f"has no subject 'orders-{topic}', and auto_register=False"):
        sink(spec(kafka_broker, registry, topic, auto_register=False, subject=f"orders-{topic}"), columns)
    registry.register(f"orders-{topic}", FIRST)
    given = spec(kafka_broker, registry, topic, auto_register=False, subject=f"orders-{topic}")
    with pytest.raises(
        SinkError, match=r"do not fit the schema of .*: id is int in the schema, and the column is string"
    ):
        sink(given, {**columns, "id": "string"})
    one = sink(given, columns)
    with pytest.raises(
        SinkError, match=r"id is null in a row, and int in the schema\. Nothing of these rows was written"
    ):
        one.release(1, pl.DataFrame({"id": [1, None], "place": ["a", "b"]}, schema=Schema.of(columns).polars))
    one.release(1, pl.DataFrame({"id": [1], "place": ["a"]}, schema=Schema.of(columns).polars))
    one.close()
    (value,) = kafka_broker.values(topic)
    assert fastavro.schemaless_reader(io.BytesIO(value[5:]), fastavro.parse_schema(FIRST)) == {"id": 1, "place": "a"}
    assert registry.ask("GET", f"/subjects/orders-{topic}/versions") == [1]


def test_a_sink_is_delayed_while_the_registry_is_away(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    given = spec(kafka_broker, f"http://127.0.0.1:{free_port()}", topic)
    with pytest.raises(SinkDelayedError, match=r"the schema registry at .* does not answer"):
        sink(given, {"id": "bigint"})


def test_ids_and_changes_of_rows_are_headers(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    given = spec(kafka_broker, registry, topic, key="id")
    schema = Schema.of({"id": "string", "n": "bigint"})
    one = open_sink(given, replace(STREAM, schema=schema, upsert_key=("id",)))
    one.release(1, pl.DataFrame({"id": ["a"], "n": [7], "__op": ["upsert"]}))
    one.close()
    (found,) = kafka_broker.messages(topic)
    assert found.key() == b"a"
    assert found.headers() == [("__op", b"upsert")]
    columns = {"id": "string", "n": "bigint"}
    assert all_rows(opened(spec(kafka_broker, registry, topic), columns), columns) == [{"id": "a", "n": 7}]


# Who may ask.


@contextmanager
def front(
    registry: Registry, *, port: int = 0, login: str | None = None, authority: trustme.CA | None = None
) -> Iterator[str]:
    """A server in front of the registry that asks for a login, and has a certificate."""

    class Front(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = None if login is None else f"Basic {base64.b64encode(login.encode()).decode()}"
            if wanted is not None and self.headers["authorization"] != wanted:
                self._send(401, b'{"error_code":401,"message":"Unauthorized"}')
                return
            body = self.rfile.read(int(self.headers["content-length"] or 0)) or None
            path = f"http://127.0.0.1:{registry.port}{self.path}"
            request = urllib.request.Request(path, body, method=self.command, headers={"content-type": "application/json"})  # fmt: skip
            try:
                with urllib.request.urlopen(request) as answer:
                    self._send(answer.status, answer.read())
            except urllib.error.HTTPError as error:
                self._send(error.code, error.read())

        do_POST = do_GET  # noqa: N815 - the name that the server calls

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Front)
    scheme = "http"
    if authority is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_port}/apis/ccompat/v7"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_registry_may_ask_for_a_login_and_have_a_certificate_of_its_own(
    kafka_broker: KafkaBroker, registry: Registry, topic: str, tmp_path: Path
):
    schema_id = registry.register(f"{topic}-value", FIRST)
    kafka_broker.send(topic, [message(schema_id, FIRST, {"id": 1, "place": "Ulm"})])
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    columns = {"id": "bigint"}

    def given(url: str, **more: object) -> ConnectorSpec:
        asked = {"url": url, "user": "reader", "password": {"secret": "LOGIN"}, **more}
        return build(topic, servers=kafka_broker.servers, format="avro", schema_registry=asked)

    with front(registry, login="reader:right", authority=authority) as url:
        source = opened(given(url, ca_file=str(tmp_path / "ca.pem")), columns, secrets={"LOGIN": "right"})
        assert all_rows(source, columns) == [{"id": 1}]
        source = opened(given(url, ca_file=str(tmp_path / "ca.pem")), columns, secrets={"LOGIN": "wrong"})
        with pytest.raises(SourceError, match=r"does not let this process in \(401\): Unauthorized"):
            all_rows(source, columns)
        with pytest.raises(SinkDelayedError, match="certificate verify failed"):
            sink(given(url), columns, secrets={"LOGIN": "right"})
    with pytest.raises(ConfigError, match="there is no environment variable of that name"):
        opened(given("https://127.0.0.1"), columns, secrets={})


def test_an_address_that_is_no_registry_is_an_error(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    with pytest.raises(SinkError, match="Is that the address of a schema registry"):
        sink(spec(kafka_broker, f"http://127.0.0.1:{registry.port}/nothing", topic), {"id": "bigint"})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "avro"}, "needs schema_registry="),
        ({"schema_registry": "http://localhost:1"}, "is for format='avro'"),
        ({"format": "avro", "schema_registry": "localhost:1"}, "must be an address"),
        ({"format": "avro", "schema_registry": "http://u:p@localhost:1"}, "part of the plan"),
        ({"format": "avro", "schema_registry": {"url": "http://a", "user": "u"}}, "go together"),
        ({"format": "avro", "schema_registry": "http://a", "message": "M"}, "is for format='protobuf'"),
        ({"format": "avor"}, "Did you mean 'avro'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        build("t", servers="localhost:9092", **options)


def test_a_schema_that_is_none_is_an_error_at_the_start(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    with pytest.raises(FordstoneError, match=r"schema=\.\.\.: the schema is not JSON"):
        opened(spec(kafka_broker, registry, topic, schema="{"), {"id": "bigint"})
    with pytest.raises(ConfigError, match="a b is no name for a field of Avro"):
        sink(spec(kafka_broker, registry, topic), {"a b": "bigint"})


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    given = build("t", servers="localhost:9092", format="protobuf", schema_registry="http://localhost:1")
    for name in [name for name in sys.modules if name.startswith("fordstone.connectors.protobuf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(NotInstalledError, match=r"pip install 'fordstone\[protobuf\]'"):
        opened(given, {"id": "bigint"})


# JSON, whose schema is nowhere.


def test_json_may_have_new_fields_and_lack_some_and_a_changed_type_is_a_dead_letter(
    kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    values = [b'{"id": 1, "place": "Ulm"}', b'{"id": 2, "place": "Jena", "new": [1]}', b'{"id": 3}', b'{"id": "x", "place": "Ulm"}']  # fmt: skip
    kafka_broker.send(topic, values)
    given = kafka(topic, servers=kafka_broker.servers)
    rows = run(given, tmp_path, {"id": "bigint", "place": "string"})
    assert [(row["id"], row["place"]) for row in rows] == [(1, "Ulm"), (2, "Jena"), (3, None)]
    (letter,) = letters(tmp_path)
    assert letter["partition"] == f"{topic}/0"
    assert letter["reason"].startswith("offset 3: ")
    assert letter["text"] == values[3].decode()


# Protobuf.

PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Order { int64 id = 1; optional string place = 2; google.protobuf.Timestamp at = 3; repeated Item items = 4; message Item { double price = 1; } }
"""


def proto_message(schema_id: int, text: str, **fields: Any) -> bytes:
    """A message of the first type of a text, as other producers make it."""
    from google.protobuf.message_factory import GetMessageClass

    from fordstone.connectors.protobuf.messages import _messages
    from fordstone.connectors.protobuf.text import file_of

    made = GetMessageClass(_messages(file_of(text, {}))[0])
    return b"\0" + schema_id.to_bytes(4, "big") + b"\0" + bytes(made(**fields).SerializeToString())


def proto(broker: KafkaBroker, registry: Registry, topic: str, **options: Any) -> ConnectorSpec:
    return build(topic, servers=broker.servers, format="protobuf", schema_registry=registry.url, **options)


def test_protobuf_is_read_by_the_schema_that_wrote_it(
    kafka_broker: KafkaBroker, registry: Registry, topic: str, tmp_path: Path
):
    registry.require(f"{topic}-value", "NONE")
    second = PROTO.replace("optional string place = 2;", "optional string note = 9;")
    changed = PROTO.replace("int64 id", "string id")
    ids = [registry.register(f"{topic}-value", text, kind="PROTOBUF") for text in (PROTO, second, changed)]
    avro = registry.register(f"{topic}-avro", FIRST)
    values = [
        proto_message(ids[0], PROTO, id=1, place="Ulm", at={"seconds": 5}, items=[{"price": 1.5}]),
        proto_message(ids[1], second, id=2, note="n"),
        proto_message(ids[2], changed, id="x"),
        b"\0" + ids[0].to_bytes(4, "big") + b"\0\x08",
        message(avro, FIRST, {"id": 1, "place": "Ulm"}),
    ]
    kafka_broker.send(topic, values)
    columns = {"id": "bigint", "place": "string", "at": "timestamp", "items": "array<struct<price: double>>"}
    rows = run(proto(kafka_broker, registry, topic), tmp_path, columns)
    assert [(row["id"], row["place"], row["items"]) for row in rows] == [(1, "Ulm", [{"price": 1.5}]), (2, None, [])]
    assert rows[0]["at"].timestamp() == 5.0
    found = letters(tmp_path)
    assert [one["reason"].split(":")[:2] for one in found] == [
        ["offset 2", f" schema id {ids[2]}"],
        ["offset 3", f" schema id {ids[0]}"],
        ["offset 4", f" schema id {avro}"],
    ]
    assert found[0]["reason"].endswith("id is string, which cannot be read as bigint")
    assert found[2]["reason"].endswith("it is a schema of AVRO, not PROTOBUF")


def test_protobuf_is_written_by_a_schema_that_is_registered(kafka_broker: KafkaBroker, registry: Registry, topic: str):
    columns = {
        "id": "bigint",
        "place": "string",
        "at": "timestamp",
        "tags": "array<string>",
        "m": "map<string, double>",
    }
    schema = Schema.of(columns).polars
    rows: list[dict[str, Any]] = [{"id": 1, "place": "Ulm", "at": None, "tags": ["a"], "m": {"x": 1.5}}, {"id": None, "place": None, "at": None, "tags": [], "m": {}}]  # fmt: skip
    one = sink(proto(kafka_broker, registry, topic), columns)
    one.release(1, pl.DataFrame(rows, schema=schema))
    one.close()
    assert registry.latest(f"{topic}-value")["schemaType"] == "PROTOBUF"
    assert all_rows(opened(proto(kafka_broker, registry, topic), columns), columns) == rows
    registry.require(f"{topic}-value", "BACKWARD")
    wider = {"new": "double", **columns}  # keeps the numbers of the others
    one = sink(proto(kafka_broker, registry, topic), wider, after=1)
    one.release(2, pl.DataFrame([{"new": 2.5, **rows[0]}], schema=Schema.of(wider).polars))
    one.close()
    assert all_rows(opened(proto(kafka_broker, registry, topic), columns), columns) == [*rows, rows[0]]
    with pytest.raises(SinkError, match="does not take the schema of these columns"):
        sink(proto(kafka_broker, registry, topic), {**columns, "id": "string"})


# Spark.


@pytest.mark.parametrize(("written", "how"), [("avro", {"bounded": True}), ("protobuf", {"available_now": True})])
def test_executors_of_spark_read_by_schemas_of_the_registry(
    kafka_broker: KafkaBroker,
    registry: Registry,
    topic: str,
    tmp_path: Path,
    spark: SparkSession,
    written: str,
    how: dict[str, Any],
):
    from fordstone.spark import run as run_on_spark

    text: object = FIRST if written == "avro" else PROTO
    schema_id = registry.register(f"{topic}-value", text, kind=written.upper())
    rows = [{"id": number, "place": "Ulm"} for number in range(20)]
    values = [message(schema_id, FIRST, row) if written == "avro" else proto_message(schema_id, PROTO, **row) for row in rows]  # fmt: skip
    kafka_broker.send(topic, [*values, b"\0\0\0\0\1poison"])
    pipeline = Pipeline("on-spark")
    given = build(topic, servers=kafka_broker.servers, format=written, schema_registry=registry.url)
    source = pipeline.source("rows", given, schema={"id": "bigint", "place": "string"})
    with kafka_broker.topics(**{f"{topic}-out": 1}):
        out = build(f"{topic}-out", servers=kafka_broker.servers, format=written, schema_registry=registry.url)
        source.filter("id >= 5").sink("out", out)
        run_on_spark(pipeline, spark=spark, state=tmp_path / "state", **how)
        columns = {"id": "bigint", "place": "string"}
        assert sorted(row["id"] for row in all_rows(opened(out, columns), columns)) == list(range(5, 20))
    (letter,) = [json.loads(line) for file in tmp_path.rglob("dead-letters/**/*.jsonl") for line in file.read_text().splitlines()]  # fmt: skip
    assert letter["reason"].startswith("offset 20: schema id 1: ")
