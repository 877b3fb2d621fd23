"""Spark's own connector for Kafka: four jars from Maven, each named by itself, since what its POM names cannot all be had.

Its version is the newest of the registry, one before that of pyspark here.
"""

from __future__ import annotations

from typing import Final

from tests.services.base import maven_jars

VERSION: Final = "4.2.0"
COORDINATES: Final = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{VERSION}",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)


def setting() -> dict[str, str]:
    """Return the setting with which Spark has the connector."""
    jars = sorted(maven_jars(f"spark-sql-kafka-{VERSION}", COORDINATES, transitive=False).glob("*.jar"))
    return {"spark.jars": ",".join(map(str, jars))}
