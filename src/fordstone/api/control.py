"""The control table as a pipeline declares it. `Stream.join_control` reads it, `Stream.to_edges` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fordstone.lang.schema import Schema

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline


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
