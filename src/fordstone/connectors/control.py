"""Connector `control`: a control table as nodes read it and as the center writes it.

The source reads only the folder that `edge.link.control` fills, so it needs no network, works offline and replays exactly.
It has one partition, whose positions are the table's versions. Its rows carry `__op` and `__version` beside the table's
columns. The sink publishes each epoch of the center's rows as a version, through `hub.client.publisher`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import polars as pl

from fordstone.connectors.base import (
    Capability,
    Chunk,
    ConnectorKind,
    Delivery,
    OpenContext,
    Reader,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.connectors.control_log import ControlLog
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, DamagedError, HubAwayError, StorageError
from fordstone.hub.client.publisher import ControlPublisher
from fordstone.operators.base import OP, UPSERT
from fordstone.operators.join.lookup import VERSION
from fordstone.plan.ids import PartitionId, Position, checked_name
from fordstone.plan.plan import ConnectorSpec
from fordstone.storage.disk import FatalStorageError

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient

log = logging.getLogger(__name__)

PARTITION: Final = PartitionId("control")


class ControlKind(ConnectorKind):
    """The kind `control`."""

    capabilities = frozenset({Capability.AT_HUB, Capability.FEEDS_BACK, Capability.NEEDS_HOME})

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """The hub publishes a batch of an owner once."""
        del spec
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        """Open the folder of the table in the pipeline's directory. `edge.link` fills it."""
        name, home = checked_name(spec.options["control"], "control"), context.home_of(spec)
        keys = tuple(spec.options.get("keys", ()))
        table = ControlLog(home.disk, f"{home.directory}/control/{name}", schema=options.schema, keys=keys)
        return ControlSource(table, bounded=options.bounded)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        del context
        if spec.at is msgspec.UNSET or "url" not in spec.at:
            raise ConfigError(
                f"control table {spec.options['control']} is published through a hub: give its address (--hub)."
            )
        # Nodes that only read the table need no client.
        from fordstone.hub.client.address import HubAddress  # noqa: PLC0415 - see above
        from fordstone.hub.client.client import HubClient  # noqa: PLC0415 - see above

        return ControlSink(
            HubClient(HubAddress.from_at(spec.at)),
            stream,
            pipeline=spec.options["pipeline"],
            control=spec.options["control"],
            keys=tuple(spec.options["keys"]),
        )


class ControlSource(Source):
    """The folder of a control table as a source."""

    def __init__(self, table: ControlLog, *, bounded: bool) -> None:
        self.log = table
        self._bounded = bounded

    def partitions(self) -> Sequence[PartitionId]:
        return (PARTITION,)

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        del partition
        return _ControlReader(self.log, int(position), bounded=self._bounded, with_positions=with_positions)

    def size_bytes(self) -> int | None:
        """Nothing: a progress bar does not wait for it."""
        return 0

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        del cuts
        return 1.0

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Compact versions that will not be read again."""
        if PARTITION not in cuts:
            return
        try:
            self.log.compact(cuts[PARTITION].position)
        except FatalStorageError:
            raise
        except (StorageError, DamagedError) as error:
            # It is tried again with the next call.
            log.warning("control versions not compacted", extra={"folder": self.log.folder, "problem": str(error)})


class _ControlReader(Reader):
    """Reads whole versions."""

    def __init__(self, table: ControlLog, position: int, *, bounded: bool, with_positions: bool) -> None:
        self._log = table
        self._position = position
        self._bounded = bounded
        self._with_positions = with_positions

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """The next versions. Of bounded input, what is there when it is asked for is all there is."""
        found = self._log.read(self._position, rows_max, None if until is None else int(until))
        if found is None:
            if not self._bounded or until is not None:
                return None
            return self._chunk(pl.DataFrame(schema=self._log.columns), pl.Series(dtype=pl.Int64), ended=True)
        self._position = found.position
        return self._chunk(found.frame, found.versions, ended=False)

    def _chunk(self, frame: pl.DataFrame, versions: pl.Series, *, ended: bool) -> Chunk:
        return Chunk(
            frame=frame.with_columns(versions.alias(VERSION)),
            position=Position(self._position),
            # A position is that of a whole version; rows of tables are never given ids.
            row_positions=versions - 1 if self._with_positions else None,
            ended=ended,
        )

    def close(self) -> None:
        """Nothing is held open."""


class HubIsAwayError(StorageError):
    """Rows that could not be published for now. The edge engine waits and tries again; on Spark the batch is run again."""


class ControlSink(Sink):
    """Publishes one control table. Used by one thread at a time."""

    def __init__(
        self, client: HubClient, stream: SinkStream, *, pipeline: str, control: str, keys: Sequence[str]
    ) -> None:
        self._client = client
        self._control = control
        self._publisher = ControlPublisher(client, pipeline=pipeline, control=control, keys=keys)
        self._columns = pl.Schema(dict(stream.schema.polars) | {OP: pl.String()})
        # Without a name for the checkpoint, rows may be published again after a restart, under another owner.
        self._owner = stream.owner or secrets.token_hex(16)
        self._written = 0

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Publish the epoch's rows as a version; an epoch without rows is none."""
        self._publish(epoch, frame)

    def write(self, frame: pl.DataFrame) -> None:
        """Publish rows at once. After a restart they may come again, from another owner: such batches have no lasting numbers."""
        if not self._written:
            self._owner = secrets.token_hex(16)
        self._written += 1
        self._publish(self._written, frame)

    def close(self) -> None:
        self._client.close()

    def _publish(self, batch: int, frame: pl.DataFrame) -> None:
        if OP not in frame.columns:
            frame = frame.with_columns(pl.lit(UPSERT).alias(OP))
        rows = frame.select(list(self._columns)).cast(self._columns)
        try:
            self._publisher.publish(rows, owner=self._owner, batch=batch)
        except HubAwayError as error:
            # Without the cause: Spark recognises errors of users by their class names in the text, and this is none.
            raise HubIsAwayError(
                f"control table {self._control} cannot be published: {error} It will be tried again."
            ) from None
