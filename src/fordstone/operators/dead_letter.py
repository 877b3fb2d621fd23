"""Dead letters: rows that could not be read, or that a user's function raised an exception for, with the reason.

A step that sets rows aside emits them on the port `DEAD`. The engines release them with the epoch to a hidden sink of the step, so
each is kept exactly once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from fordstone.errors import FunctionError
from fordstone.lang.python_times import beyond_python, shown_row
from fordstone.lang.schema import RESERVED_PREFIX, Schema
from fordstone.operators.base import ROW_ID
from fordstone.plan import plan as p

DEAD: Final = "dead"
"""The port of dead letters."""
DEAD_LETTERS: Final = "dead-letters/"
"""Begins the name of the hidden sink of a step's dead letters. No sink of a user's has such a name."""
LETTER_SCHEMA: Final = Schema.of(
    {"partition": "string", "position": "bigint", "step": "string", "reason": "string", "text": "string"}
)
TEXT_CHARS_MAX: Final = 4096
REASON_CHARS_MAX: Final = 1024
SHOWN_CHARS_MAX: Final = 200
_ROW_ID: Final = re.compile(r"(?P<source>[^:]*):(?P<partition>.*):(?P<position>\d+)(?:[.~]\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A row that a function raised an exception for, or that it could not be given."""

    record: Mapping[str, Any]
    """The row, with its id if it has one."""
    error: BaseException


def givable(frame: pl.DataFrame, failed: list[Failed], step: p.Function | p.Process) -> pl.DataFrame:
    """The rows that a Python function can be given. The others are added to `failed`.

    Raises:
        FunctionError: There are others, and the step sets no rows aside.
    """
    beyond = beyond_python(frame)
    if not beyond:
        return frame
    found = [
        Failed(
            record=shown_row(frame, place),
            error=ValueError(
                f"column {column} has a time outside the years 1 to 9999, which a Python datetime cannot hold"
            ),
        )
        for place, column in sorted(beyond.items())
    ]
    if not step.has_dead_letters:
        raise function_error(step.name, step.path, found[0], given=False)
    failed += found
    return frame[[place for place in range(frame.height) if place not in beyond]]


def letters_of(step: str, failed: Sequence[Failed]) -> pl.DataFrame:
    """The dead letters of a step. Rows that carry an id are given with their place in the input."""
    rows = []
    for one in failed:
        place = _place(one.record)
        partition, position = (None, None) if place is None else (place["partition"], int(place["position"]))
        rows.append(
            (partition, position, step, reason_of(one.error)[:REASON_CHARS_MAX], row_text(one.record)[:TEXT_CHARS_MAX])
        )
    return pl.DataFrame(rows, schema=LETTER_SCHEMA.polars, orient="row")


def function_error(step: str, path: str, failed: Failed, *, times: bool = False, given: bool = True) -> FunctionError:
    """The error for a function that raises for a row each time, or (not `given`) that it cannot be given."""
    place = _place(failed.record)
    at = "" if place is None else f" (source {place['source']}, {place['partition']} at {place['position']})"
    name = path.split(":")[1] if path.startswith(p.LOCAL_FUNCTION) else path.partition(":")[2]
    called = "twice for the same row" if times else "for a row"
    what = (
        f"function {name} raised {reason_of(failed.error)}, {called}"
        if given
        else f"function {name} cannot be given a row: {failed.error}"
    )
    return FunctionError(
        f"step {step}: {what}{at}:\n"
        f"  {row_text(failed.record)[:SHOWN_CHARS_MAX]}\n"
        'Correct the function or the input, or set such rows aside with on_error="dead_letter".',
        placed=place is not None,
    )


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")


def row_text(record: Mapping[str, Any]) -> str:
    """A row as JSON, its hidden columns left out."""
    shown = {name: value for name, value in record.items() if not name.startswith(RESERVED_PREFIX)}
    return json.dumps(shown, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _place(record: Mapping[str, Any]) -> re.Match[str] | None:
    """Where a row stood in the input, from its id."""
    row_id = record.get(ROW_ID)
    return None if row_id is None else _ROW_ID.fullmatch(row_id)
