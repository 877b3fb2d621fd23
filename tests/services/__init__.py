"""Real servers for tests: one module per server, each with a class that starts it, and `fixtures` with one of each per run."""

from __future__ import annotations

from typing import Final

SERVICES: Final[tuple[str, ...]] = ("hdfs", "kafka_broker", "mosquitto", "postgres", "redis_server", "registry", "s3")
"""The names of the fixtures in `tests.services.fixtures`. Tests that use one of them run in one process, and not in --quick."""
BUILT: Final[tuple[str, ...]] = ("s3", "own_s3")
"""The fixtures whose server is built from sources, which takes minutes once per machine. Tests with them run after other slow ones."""
