"""Delta tables: the kind `delta`, a sink only.

The work is done by the package `deltalake`, without a JVM and without pyarrow. It comes with an extra, and is
imported where the sink is opened (`sink`), so that plans with Delta sinks can be built anywhere.
"""

from __future__ import annotations

import msgspec

from fordstone.connectors.base import (
    About,
    Capability,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    PartWriter,
    Sink,
    SinkStream,
    checked_spec,
    needs_package,
    options_of,
)
from fordstone.errors import ConfigError


class DeltaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    path: str
    """The table's directory, or its address in a store that `deltalake` knows (`s3://bucket/table`)."""
    app: str | None = None
    """The name of the writer, under which the table records the epochs that it has. `<pipeline>/<node>/<step>` if left out."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("delta(''): give the table's directory, or its address.")
        if self.path.startswith("file:"):
            raise ConfigError(f"delta({self.path!r}): give the directory as a plain path.")
        if self.app is not None and not self.app.strip():
            raise ConfigError(f"delta({self.path!r}): app={self.app!r} must not be empty. Give a name, or omit it.")


def delta(path: str, *, app: str | None = None) -> ConnectorSpec:
    """A Delta table, as a sink: rows are appended, upserts merged by their key. Needs `pip install 'fordstone[delta]'`.

    `path` is a directory, or an address that the package `deltalake` knows. The table is made if missing. Under the name
    `app` (by default `<pipeline>/<node>/<step>`) it remembers which epochs it has, so several pipelines and nodes may write to one table.
    """
    return checked_spec("delta", {"path": str(path), "app": app}, DeltaSettings)


class DeltaKind(ConnectorKind):
    """The kind `delta`."""

    capabilities = frozenset({Capability.SET_ASIDE})
    about = About(
        summary="Delta tables, in a directory or a store of objects",
        sink='delta("out/devices")',
        guarantee="One commit per epoch, under an application transaction with the number of the epoch. Upserts are merged by key.",
        extra="delta",
        package="deltalake",
        modules=("deltalake", "arro3"),
        page="reference/connectors.md#delta",
    )

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """A commit holds the rows and the number of their epoch."""
        options_of(spec, DeltaSettings)
        return Delivery.EXACTLY_ONCE

    def fences(self, spec: ConnectorSpec) -> bool:
        """A commit fails if another writer has taken over since the version that it builds on."""
        del spec
        return True

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Open the table, and create it if it is missing."""
        del context
        settings = options_of(spec, DeltaSettings)
        with needs_package(self.about, where=f"sink {stream.step}: delta({settings.path!r})"):
            from fordstone.connectors.delta.sink import DeltaSink  # noqa: PLC0415 - comes with an extra
        return DeltaSink(settings, stream)

    def open_parts(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> PartWriter | None:
        """Open a writer of parts. Upserts are merged by the sink, and so is everything in a store at a URL."""
        del context
        from fordstone.connectors.delta.parts import open_delta_parts  # noqa: PLC0415 - comes with the sink

        return open_delta_parts(options_of(spec, DeltaSettings), stream)
