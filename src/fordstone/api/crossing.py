"""From the edge to the center and back: `to_center`, `to_edges`, and control tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from fordstone.api.join import On, join_columns_of
from fordstone.errors import PipelineError
from fordstone.lang.duration import positive_us
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline
    from fordstone.api.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTable:
    """A table that the center writes (`to_edges`) and every node reads (`join_control`). Made by `Pipeline.control`."""

    pipeline: Pipeline
    name: str
    schema: Schema
    keys: tuple[str, ...]

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} {kind}" for name, kind in self.schema.items())
        return f"ControlTable({self.name}: {columns}; key {', '.join(self.keys)})"


class Crosses(ABC):
    """The part of `Stream` that goes from tier to tier."""

    _at: p.Input

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The pipeline that this stream belongs to."""

    @abstractmethod
    def _named(self, base: str, name: str | None) -> str:
        """The name of a new step."""

    @abstractmethod
    def _add(self, step: p.Step) -> Stream:
        """Add a step behind this stream."""

    def to_center(self, *, offline: str | timedelta = "24h", name: str | None = None) -> Stream:
        """The cut: what stands before it runs on the nodes, what stands behind it at the center, over the rows of all nodes.

        The planner moves filters, projections and partial aggregates below the cut where it may; `explain` shows it. A node
        that has been away for longer than `offline` no longer holds time back at the center. `name` is the stream's at the hub.
        """
        named = self._named(f"{self._at.step}_to_center", name)
        offline_us = positive_us(offline, what=f"step {named}: offline")
        return self._add(p.ToCenter(name=named, input=self._at, offline_us=offline_us))

    def to_edges(self, control: str | ControlTable, *, name: str | None = None) -> None:
        """Let these rows of the center become rows of a control table, which every node takes over at a barrier."""
        table = control.name if isinstance(control, ControlTable) else control
        if not isinstance(table, str):
            raise PipelineError(f"to_edges({control!r}): name a control table of this pipeline.")
        self._add(p.ToEdges(name=self._named(f"{table}_to_edges", name), input=self._at, control=table))

    def join_control(
        self, table: ControlTable, *, on: On, how: str = "left", suffix: str = "_right", name: str | None = None
    ) -> Stream:
        """Every row with the columns of the row of a control table that has its key: `readings.join_control(limits, on="device")`.

        Rows go on at once and see the table as it was when their epoch began. Where the table has no such row its columns
        are null, or with `how="inner"` the row is left out.
        """
        step = self._named("join_control", name)
        if not isinstance(table, ControlTable):
            raise PipelineError(
                f"step {step}: {table!r} is not a control table. Declare one with p.control(...); for a stream use join_latest."
            )
        if table.pipeline is not self.pipeline:
            raise PipelineError(f"step {step}: control table {table.name} belongs to another pipeline.")
        keys, control_keys = join_columns_of(step, on)
        if set(control_keys) != set(table.keys):
            raise PipelineError(
                f"step {step}: on={on!r} does not name the key of {table.name}, which is ({', '.join(table.keys)})."
            )
        order = [control_keys.index(key) for key in table.keys]
        return self._add(
            p.LookupLatest(
                name=step,
                input=self._at,
                control=p.Input(table.name),
                keys=tuple(keys[place] for place in order),
                control_keys=table.keys,
                how=how,  # type: ignore[arg-type]  # judged with the step
                suffix=suffix,
                waits=False,
            )
        )
