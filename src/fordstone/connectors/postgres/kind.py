"""The kind `postgres`: what it can do, and the checks that need no server."""

from __future__ import annotations

from fordstone.connectors.base import (
    About,
    Capability,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
    needs_package,
    options_of,
)
from fordstone.connectors.postgres.settings import PostgresSettings
from fordstone.errors import ConfigError


class PostgresKind(ConnectorKind):
    """The kind `postgres`."""

    capabilities = frozenset({Capability.TABLE})
    about = About(
        summary="tables of PostgreSQL: as a sink, and for lookups",
        sink='postgres("totals", "postgresql://localhost/shop")',
        guarantee="One transaction per epoch, which has its number and the writer. A table of a lookup is read in one snapshot, and again with refresh=.",
        extra="postgres",
        package="psycopg",
        modules=("psycopg", "psycopg_binary"),
        page="how-to/postgresql.md",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """A table has no order and may change: as a stream its rows cannot be read again from a position."""
        _settings(spec, sink=False)
        return Delivery.AT_MOST_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """A transaction has the rows and the number of their epoch."""
        _settings(spec, sink=True)
        return Delivery.EXACTLY_ONCE

    def fences(self, spec: ConnectorSpec) -> bool:
        """The transaction also compares the writer."""
        del spec
        return True

    def reads_from(self, spec: ConnectorSpec, written: ConnectorSpec) -> bool:
        place = ("table", "dsn", "dsn_from")
        return "table" in spec.options and all(spec.options.get(name) == written.options.get(name) for name in place)

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        settings = _settings(spec, sink=False)
        with needs_package(self.about, where=settings.where):
            from fordstone.connectors.postgres.source import PostgresSource  # noqa: PLC0415 - comes with an extra
        return PostgresSource(settings, options, context.secrets)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Open the table, and create it if it is missing."""
        settings = _settings(spec, sink=True)
        with needs_package(self.about, where=f"sink {stream.step}: {settings.where}"):
            from fordstone.connectors.postgres.sink import PostgresSink  # noqa: PLC0415 - comes with an extra
        return PostgresSink(settings, stream, context.secrets)


def _settings(spec: ConnectorSpec, *, sink: bool) -> PostgresSettings:
    settings = options_of(spec, PostgresSettings)
    if sink and settings.table is None:
        raise ConfigError(f"{settings.where}: a query can be read only. Give the name of a table to write to.")
    wrong = () if sink else [name for name in ("key", "app", "epoch_column") if getattr(settings, name) is not None]
    if wrong:
        raise ConfigError(f"{settings.where}: {wrong[0]}= is for sinks. Leave it out where the table is read.")
    return settings
