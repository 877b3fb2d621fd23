"""Connectors: where rows come from and where they go.

Each function here gives a `ConnectorSpec`, plain enough to stand in a plan; the node that runs the pipeline opens it. `register` adds kinds of
your own.
"""

from __future__ import annotations

from fordstone.connectors.base import ConnectorSpec
from fordstone.connectors.delta.kind import delta
from fordstone.connectors.files.rows import latest, rows
from fordstone.connectors.files.settings import files
from fordstone.connectors.generator import generator
from fordstone.connectors.http.kind import http_in, http_out
from fordstone.connectors.kafka.kind import kafka
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.connectors.mqtt.kind import mqtt
from fordstone.connectors.postgres.settings import postgres
from fordstone.connectors.redis.kind import redis_stream
from fordstone.connectors.registry import register
from fordstone.connectors.socket_lines import socket_lines
from fordstone.connectors.stdout import stdout

__all__ = [
    "ConnectorSpec",
    "MemorySink",
    "MemorySource",
    "delta",
    "files",
    "generator",
    "http_in",
    "http_out",
    "kafka",
    "latest",
    "memory",
    "mqtt",
    "postgres",
    "redis_stream",
    "register",
    "rows",
    "socket_lines",
    "stdout",
]
