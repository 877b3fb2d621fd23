"""The seam for those who add a system: one `ConnectorKind` for each kind of connector.

Ours stand in `registry`; others are found through the entry point group `fordstone.connectors`, whose names are kinds
and whose values are subclasses of `ConnectorKind`.
"""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable

from fordstone.connectors.connector import ConnectorSpec, Delivery, PartWriter, Sink, SinkStream, Source, SourceOptions
from fordstone.errors import ConfigError

ClockUs = Callable[[], int]
"""Microseconds on a clock that never goes back."""


def system_clock_us() -> int:
    """The machine's own monotonic clock."""
    return time.monotonic_ns() // 1_000


class ConnectorKind(ABC):  # noqa: B024 - each kind overrides the half it has; the other half refuses by itself
    """Opens the connectors of one kind. Made without arguments, once per call; keeps nothing.

    A kind that cannot be read, or cannot be written, leaves that half alone: asking for it is then an error that says so.
    """

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """What a source gives at best. Called while a pipeline is built: may not touch the system."""
        raise ConfigError(f"connector {spec.kind!r} cannot be read from: use it as a sink.")

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """What a sink gives at best. Called while a pipeline is built: may not touch the system."""
        raise ConfigError(f"connector {spec.kind!r} cannot be written to: use it as a source.")

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, clock_us: ClockUs) -> Source:
        """Make the live source, on the node that runs it, once per start."""
        del options, clock_us
        raise ConfigError(f"connector {spec.kind!r} cannot be read from: use it as a sink.")

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream) -> Sink:
        """Make the live sink, on the node that runs it, before any row comes."""
        del stream
        raise ConfigError(f"connector {spec.kind!r} cannot be written to: use it as a source.")

    def open_parts(self, spec: ConnectorSpec, stream: SinkStream) -> PartWriter | None:
        """Make a writer of parts, wherever rows are; None: all rows of an epoch go through `open_sink`'s sink."""
        del spec, stream
        return None
