"""Delta tables: the kind `delta`, and the options of `delta(...)`.

A sink only. The work is done by the package `deltalake`, without a JVM and without pyarrow. It comes with an extra, and is
imported where the sink is opened (`delta_sink`), so that plans with Delta sinks can be built anywhere.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fordstone.connectors.base import ConnectorKind, ConnectorSpec, Delivery, OpenContext, Sink, SinkStream
from fordstone.errors import ConfigError


class DeltaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    path: str
    """The table's directory, or its address in a store that `deltalake` knows (`s3://bucket/table`)."""
    app: str | None = None
    """Who writes: under this name the table remembers which epochs it has. `fordstone/<step>` if left out."""


def delta_spec(options: dict[str, Any]) -> ConnectorSpec:
    """Check the options and make the spec."""
    spec = ConnectorSpec(kind="delta", options={name: value for name, value in options.items() if value is not None})
    delta_settings(spec)
    return spec


def delta_settings(spec: ConnectorSpec) -> DeltaSettings:
    """The options of a spec, checked."""
    try:
        settings = msgspec.convert(spec.options, DeltaSettings)
    except msgspec.ValidationError as error:
        names = ", ".join(DeltaSettings.__struct_fields__)
        raise ConfigError(f"delta({spec.options.get('path', '')!r}): {error}. Options are: {names}.") from error
    if not settings.path:
        raise ConfigError("delta(''): give the table's directory, or its address.")
    if settings.path.startswith("file:"):
        raise ConfigError(f"delta({settings.path!r}): give the directory as a plain path.")
    if settings.app is not None and not settings.app.strip():
        raise ConfigError(f"delta({settings.path!r}): app={settings.app!r} must name who writes, or be left out.")
    return settings


class DeltaKind(ConnectorKind):
    """The kind `delta`."""

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """A commit holds the rows and the number of their epoch."""
        delta_settings(spec)
        return Delivery.EXACTLY_ONCE

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Open the table, and create it if it is missing."""
        del context
        settings = delta_settings(spec)
        try:
            from fordstone.connectors.delta.sink import DeltaSink  # noqa: PLC0415 - comes with an extra
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in {"deltalake", "arro3"}:
                raise
            raise ConfigError(
                f"sink {stream.step}: delta({settings.path!r}) needs the package deltalake.\n"
                f"Install it with: pip install 'fordstone[delta]'"
            ) from error
        return DeltaSink(settings, stream)
