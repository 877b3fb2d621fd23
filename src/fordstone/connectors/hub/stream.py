"""The kinds `hub` (a stream at the hub, which the center reads) and `center` (the same stream, from below).

Reading is done by `hub_epochs`. Addresses and tokens stand in the spec's `at`, beside what the plan means.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

import msgspec

from fordstone.connectors.base import (
    Capability,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.connectors.hub.epochs import HubOptions, HubSource
from fordstone.connectors.hub.index import StreamIndex
from fordstone.errors import ConfigError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.plan.ids import checked_name

PLACES_MAX: Final = 32
STALE_ENTRIES_MAX: Final = 100_000


def _options(spec: ConnectorSpec) -> HubOptions:
    try:
        options = msgspec.convert(spec.options, HubOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"hub: {error}. Options are: {', '.join(HubOptions.__struct_fields__)}.") from error
    for what in HubOptions.__struct_fields__:
        checked_name(getattr(options, what), what)
    return options


class HubKind(ConnectorKind):
    """The kind `hub`."""

    capabilities = frozenset({Capability.AT_HUB, Capability.DECLARES_TIME})

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """Epochs are final, so replay is exact."""
        _options(spec)
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        """Open the source; asks nothing yet."""
        named = _options(spec)
        if spec.at is msgspec.UNSET or "url" not in spec.at:
            raise ConfigError(f"stream {named.stream} of pipeline {named.pipeline} is at a hub. Say which: --hub URL.")
        client, planned = _PLACES.at(HubAddress.from_at(spec.at), named)
        return HubSource(
            client, named, options.schema, bounded=options.bounded, clock_us=context.clock_us, planned=planned
        )


class CenterKind(ConnectorKind):
    """The kind `center`: the far end of the cut. The edge engine's outbox takes its rows, so it is never opened."""

    capabilities = frozenset({Capability.AT_HUB, Capability.CROSSES})

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """The hub takes each epoch once."""
        del spec
        return Delivery.EXACTLY_ONCE

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Refuse."""
        del spec, context
        raise ConfigError(
            f"step {stream.step}: rows for the center leave through the edge engine's outbox. "
            "Run this part with: fordstone run FILE --part edge --hub URL."
        )


class _Places:
    """Clients and indexes by hub and stream, for planned reads: Spark's workers open a source for each of them.

    One in a process, bounded; the one used longest ago goes first.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._known: OrderedDict[tuple[HubAddress, str, str], tuple[HubClient, StreamIndex]] = OrderedDict()

    def at(self, address: HubAddress, options: HubOptions) -> tuple[HubClient, StreamIndex]:
        """The client, and what is known of the stream."""
        key = (address, options.pipeline, options.stream)
        with self._mutex:
            found = self._known.pop(key) if key in self._known else None
            client, index = (HubClient(address), StreamIndex()) if found is None else found
            if index.first_entries is not None and index.entries > 2 * index.first_entries + STALE_ENTRIES_MAX:
                index = StreamIndex()  # most of it is long gone from the hub
            self._known[key] = client, index
            if len(self._known) > PLACES_MAX:
                self._known.popitem(last=False)
            return client, index


_PLACES: Final = _Places()
