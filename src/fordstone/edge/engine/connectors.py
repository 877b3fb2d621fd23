"""Open the sources and sinks of a plan on this node, with what each kind needs to know of the state directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from fordstone.connectors import files
from fordstone.connectors.base import Capability, Home, OpenContext, Sink, SinkStream, Source, SourceOptions
from fordstone.connectors.registry import capabilities, open_sink, open_source
from fordstone.edge.link.owner import holder_of
from fordstone.lang.schema import Schema
from fordstone.operators.base import OP
from fordstone.plan import plan as p
from fordstone.plan.stream_type import StreamType
from fordstone.runtime.dead_letters import DEAD_LETTERS
from fordstone.storage.disk import Disk


class ConnectorOpener:
    """Opens the sources and sinks of one plan. The caller closes them."""

    def __init__(
        self,
        types: Mapping[p.Input, StreamType],
        disk: Disk,
        home: str,
        *,
        bounded: bool,
        clock_us: Callable[[], int],
        node: str = "",
    ) -> None:
        """`home`: the pipeline's directory on this node."""
        self._node = node
        self._types = types
        self._disk = disk
        self._home = home
        self._bounded = bounded
        self._clock_us = clock_us

    def source(self, step: p.Source) -> Source:
        """The live source of a step."""
        options = SourceOptions(
            schema=Schema.stored(step.schema), bounded=self._bounded, options=step.connector.options
        )
        return open_source(step.connector, options, self._context(step.connector))

    def sink(self, step: p.Sink) -> Sink:
        """The live sink of a step."""
        stream = self._types[step.input]
        # The publisher of a control table keeps its id across restarts; another state directory is another publisher.
        owner = holder_of(self._disk, self._home) if Capability.NEEDS_HOME in capabilities(step.connector) else ""
        taken = SinkStream(step=step.name, schema=stream.schema, upsert_key=stream.upsert_key, owner=owner)
        return open_sink(step.connector, taken, self._context(step.connector))

    def _context(self, spec: p.ConnectorSpec) -> OpenContext:
        needs_home = Capability.NEEDS_HOME in capabilities(spec)
        home = Home(disk=self._disk, directory=self._home) if needs_home else None
        return OpenContext(node=self._node, home=home, clock_us=self._clock_us)

    def schema(self, step: p.Sink) -> pl.Schema:
        """The columns of what a sink is given."""
        stream = self._types[step.input]
        columns = dict(stream.schema.polars)
        return pl.Schema(columns | {OP: pl.String()} if stream.upsert_key is not None else columns)

    def dead_letters(self, state: str | Path, source: str) -> Sink:
        """Where what a source could not read goes. `state`: the state directory."""
        directory = Path(state) / self._home / "dead-letters" / source
        schema = Schema.of({"partition": "string", "position": "bigint", "reason": "string", "text": "string"})
        return open_sink(files(str(directory), format="jsonl"), SinkStream(step=DEAD_LETTERS + source, schema=schema))
