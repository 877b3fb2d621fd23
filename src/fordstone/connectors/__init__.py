"""Connectors: where rows come from and where they go.

Each function here gives a `ConnectorSpec`, plain enough to stand in a plan; the node that runs the pipeline opens it.
"""

from __future__ import annotations

from typing import Any, TextIO

from fordstone.connectors.base import ConnectorSpec
from fordstone.connectors.delta.connector import delta_spec
from fordstone.connectors.files.rows import latest, rows
from fordstone.connectors.files.settings import files_spec
from fordstone.connectors.files.source import FilesKind as _FilesKind
from fordstone.connectors.generator import generator_spec
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.connectors.stdout import stdout_spec

# Loaded here although only the registry uses it: loaded later, the module would take the name of the function below.
del _FilesKind

__all__ = [
    "ConnectorSpec",
    "MemorySink",
    "MemorySource",
    "delta",
    "files",
    "generator",
    "latest",
    "memory",
    "rows",
    "stdout",
]


def delta(path: str, *, app: str | None = None) -> ConnectorSpec:
    """A Delta table, as a sink: rows are appended, upserts merged by their key. Needs `pip install 'fordstone[delta]'`.

    `path` is a directory, or an address that the package `deltalake` knows. The table is made if missing. Under the name
    `app` (by default `fordstone/<step>`) it remembers which epochs it has: pipelines that share a table and name their
    sinks alike need different ones.
    """
    return delta_spec({"path": str(path), "app": app})


def files(path: str, format: str | None = None, **options: Any) -> ConnectorSpec:  # noqa: A002 - the word that people look for
    """Files on a local disk.

    As a source, `path` is a file or a pattern (`"in/*.jsonl"`, `"in/**/*.csv"`) and the format follows from each file's
    ending unless `format` says it; as a sink, `path` is a directory and `format` is needed. Formats are `jsonl`, `csv`,
    `parquet` and `arrow`. Options: see `fordstone.connectors.files.settings.FileSettings`.
    """
    return files_spec({"path": str(path), "format": format, **options})


def generator(
    *,
    rows: int | None = None,
    rate: float | None = None,
    partitions: int = 1,
    seed: int = 0,
    keys: int = 1000,
    start: str = "2026-01-01T00:00:00Z",
    step: str = "1ms",
    disorder: str = "0s",
) -> ConnectorSpec:
    """Rows made up on the spot, the same ones for the same seed. What a column holds follows from its declared type.

    Each partition has `rows` rows (without end if left out) and gives `rate` a second (as many as are asked for if left
    out). Text columns have `keys` different values, doubles are normal around 20, and times begin at `start` and advance
    by `step` a row, each earlier by up to `disorder`: with `lateness` of that length no row is late.
    """
    return generator_spec(
        {
            "rows": rows,
            "rate": rate,
            "partitions": partitions,
            "seed": seed,
            "keys": keys,
            "start": start,
            "step": step,
            "disorder": disorder,
        }
    )


def stdout(format: str = "jsonl", *, stream: TextIO | None = None, rows_max: int | None = None) -> ConnectorSpec:  # noqa: A002 - the word that people look for
    """Print rows, as JSON lines (`"jsonl"`) or as a table (`"table"`); to another `stream` in this process if given."""
    return stdout_spec(format=format, stream=stream, rows_max=rows_max)
