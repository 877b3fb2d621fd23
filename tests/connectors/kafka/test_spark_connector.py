"""What of the options of a Kafka source Spark's own connector is given, and what is refused. Rows: tests/spark/test_kafka_connector.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fordstone import Pipeline
from fordstone.connectors import kafka, memory
from fordstone.connectors.base import ConnectorSpec, OpenContext, SourceOptions, SparkConnector
from fordstone.connectors.memory import MemorySink
from fordstone.connectors.registry import spark_connector
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.spark.hosted.connector_sources import connectors_of
from fordstone.spark.hosted.stages import build_stages

build: Any = kafka
SASL = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": 'a"n\\n',
    "sasl.password": {"secret": "KAFKA_PASSWORD"},
}


def connector(**options: Any) -> SparkConnector:
    spec = build("orders", servers="a:9092,b:9092", spark_connector=True, **options)
    found = made(spec)
    assert found is not None
    return found


def made(spec: ConnectorSpec) -> SparkConnector | None:
    context = OpenContext(secrets={"KAFKA_PASSWORD": "pass;word"})
    return spark_connector(spec, SourceOptions(schema=Schema.of({"word": "string"}), bounded=False), context)


def test_without_the_option_tasks_read_the_source():
    assert made(kafka("orders", servers="a:9092")) is None


def test_a_stream_begins_at_offsets_one_below_our_positions():
    starts = {PartitionId("orders/0"): Position(8), PartitionId("orders/1"): Position(1)}
    options = connector().stream_options(starts, 500)
    assert json.loads(options.pop("startingOffsets")) == {"orders": {"0": 7, "1": 0}}
    assert options == {
        "kafka.bootstrap.servers": "a:9092,b:9092",
        "kafka.isolation.level": "read_committed",
        "subscribe": "orders",
        "failOnDataLoss": "true",
        "groupIdPrefix": "fordstone",
        "includeHeaders": "false",
        "maxOffsetsPerTrigger": "500",
    }


def test_a_batch_job_reads_exactly_what_was_planned():
    reads = {PartitionId("orders/0"): (Position(8), Position(20)), PartitionId("orders/2"): (Position(1), Position(2))}
    options = connector(group="mine").batch_options(reads)
    found = {name: json.loads(options[name]) for name in ("assign", "startingOffsets", "endingOffsets")}
    assert found == {
        "assign": {"orders": [0, 2]},
        "startingOffsets": {"orders": {"0": 7, "2": 0}},
        "endingOffsets": {"orders": {"0": 19, "2": 1}},
    }
    assert options["groupIdPrefix"] == "mine"


def test_an_offset_of_sparks_log_is_a_position():
    assert connector().positions('{"orders":{"0":7,"1":0},"a/b":{"3":2}}') == {
        "orders/0": 8,
        "orders/1": 1,
        "a/b/3": 3,
    }


@pytest.mark.parametrize(
    ("client", "options"),
    [
        (
            SASL,
            {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
                'username="a\\"n\\\\n" password="pass;word";',
            },
        ),
        (
            {"sasl.mechanisms": "PLAIN", "sasl.username": "ann", "sasl.password": {"secret": "KAFKA_PASSWORD"}},
            {
                "sasl.mechanism": "PLAIN",
                "sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
                'username="ann" password="pass;word";',
            },
        ),
        (
            {"security.protocol": "ssl", "ssl.ca.location": "/ca.pem", "ssl.endpoint.identification.algorithm": "none"},
            {
                "security.protocol": "ssl",
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": "/ca.pem",
                "ssl.endpoint.identification.algorithm": "",
            },
        ),
        ({"fetch.min.bytes": 1, "client.id": "me"}, {"fetch.min.bytes": "1", "client.id": "me"}),
    ],
)
def test_settings_of_the_client_are_translated(client: dict[str, Any], options: dict[str, str]):
    found = connector(client=client)
    found.check()
    given = found.stream_options({}, 1)
    assert {name: given[f"kafka.{name}"] for name in options} == options
    known = {"bootstrap.servers", "isolation.level", *options}
    assert {name for name in given if name.startswith("kafka.")} == {f"kafka.{name}" for name in known}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lost": "skip"}, "lost='skip'"),
        ({"client": {"queued.min.messages": 5}}, "queued.min.messages"),
        ({"client": {"ssl.key.location": "/key.pem"}}, "ssl.key.location"),
        ({"client": {"sasl.mechanism": "GSSAPI"}}, "GSSAPI"),
        ({"client": {"sasl.mechanism": "PLAIN", "sasl.username": "ann"}}, "together"),
    ],
)
def test_what_the_connector_cannot_keep_to_is_refused(options: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        connector(**options).check()


def test_a_secret_that_is_missing_is_named():
    spec = build("orders", servers="a:1", spark_connector=True, client=SASL)
    found = spark_connector(
        spec, SourceOptions(schema=Schema.of({"word": "string"}), bounded=False), OpenContext(secrets={})
    )
    assert found is not None
    with pytest.raises(ConfigError, match="KAFKA_PASSWORD"):
        found.stream_options({}, 1)


def test_a_sink_is_refused(tmp_path: Path):
    p = Pipeline("p")
    rows = p.source("rows", kafka("a", servers="a:1"), schema={"word": "string"})
    rows.sink("out", kafka("b", servers="a:1", spark_connector=True))
    with pytest.raises(ConfigError, match="for sources"):
        p.run(state=tmp_path, bounded=True)


def test_the_sources_of_a_pipeline_are_all_read_in_one_way():
    p = Pipeline("p")
    schema = {"word": "string"}
    first = p.source("first", kafka("a", servers="a:1", spark_connector=True), schema=schema)
    second = p.source("second", kafka("b", servers="a:1"), schema=schema)
    first.union(second).sink("out", memory(MemorySink()))
    with pytest.raises(ConfigError, match=r"first .* second is not"):
        connectors_of(build_stages(p.plan()), bounded=False)


def test_the_error_without_the_jars_names_the_coordinates_of_this_spark():
    text = connector().how_to_install("4.3.0")
    assert "spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:4.3.0" in text
    assert "spark.jars=" in text


def test_tasks_do_not_need_the_client_library():
    program = (
        "import sys; sys.modules['confluent_kafka'] = None; import fordstone.connectors.kafka.spark_connector; "
        "import fordstone.spark.hosted.connector_sources"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
