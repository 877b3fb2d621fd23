"""Run queries over a few rows in memory, and compare plans with those written by hand."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from fordstone import Pipeline, Stream
from fordstone.connectors import MemorySink, memory
from fordstone.errors import ExpressionError

Row = Mapping[str, Any] | Sequence[Any]
READINGS = {"device": "string", "ts": "timestamp", "temp": "double"}
ALARMS = {"device": "string", "at": "timestamp", "level": "int"}
ROWS: list[Row] = [
    ("a", "2026-01-01T00:00:01Z", 1.0),
    ("b", "2026-01-01T00:00:02Z", 20.0),
    ("a", "2026-01-01T00:00:04Z", 3.0),
    ("A", "2026-01-01T00:00:11Z", 7.0),
    ("a", "2026-01-01T00:00:12Z", 5.0),
    ("b", "2026-01-01T00:00:25Z", None),
]
ALARM_ROWS: list[Row] = [
    ("a", "2026-01-01T00:00:03Z", 1),
    ("b", "2026-01-01T00:00:10Z", 2),
    ("c", "2026-01-01T00:00:12Z", 3),
]


def pipeline() -> Pipeline:
    """Two streams: readings by `ts`, alarms by `at`."""
    made = Pipeline("queries")
    made.source("readings", memory([ROWS]), schema=READINGS, time="ts", lateness="1m")
    made.source("alarms", memory([ALARM_ROWS]), schema=ALARMS, time="at", lateness="1m")
    return made


def rows_of(stream: Stream) -> list[tuple[Any, ...]]:
    """The rows of a stream, times as text, sorted; of results that replace each other the last of each key."""
    sink = MemorySink()
    stream.sink("out", memory(sink))
    with tempfile.TemporaryDirectory() as state:
        stream.pipeline.run(state=state, bounded=True)
    frame = sink.rows()
    key = sink.stream.upsert_key if sink.stream is not None else None
    if "__op" in frame.columns:
        frame = frame.unique(subset=list(key), keep="last") if key else frame.tail(1)
        frame = frame.filter(frame["__op"] != "delete").drop("__op")
    found = [tuple(_plain(value) for value in row) for row in frame.iter_rows()]
    return sorted(found, key=lambda row: [(value is not None, str(type(value)), value) for value in row])


def answer(query: str) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    return rows_of(pipeline().sql(query))


def columns(query: str) -> list[str]:
    """The names of its columns."""
    return list(pipeline().sql(query).schema)


def plan_of(build: Callable[[Pipeline], Stream]) -> list[dict[str, Any]]:
    """The steps of a plan, numbered instead of named."""
    made = pipeline()
    build(made).sink("out", memory(MemorySink()))
    steps = msgspec.json.decode(made.plan().to_json())["steps"]
    numbers = {step["name"]: f"#{number}" for number, step in enumerate(steps)}
    text = msgspec.json.encode(steps).decode()
    for name in sorted(numbers, key=len, reverse=True):
        text = re.sub(rf'("(?:name|step)":)"{re.escape(name)}"', rf'\1"{numbers[name]}"', text)
    return list(msgspec.json.decode(text))


def same_plan(query: str, build: Callable[[Pipeline], Stream]) -> None:
    """A query gives the plan that is written by hand."""
    assert plan_of(lambda made: made.sql(query)) == plan_of(build)


def refused(query: str, message: str, under: str, *, nth: int = 0) -> None:
    """The query is refused with this message, with the caret under the n-th place of a text; nothing is added."""
    made = pipeline()
    with pytest.raises(ExpressionError) as caught:
        made.sql(query)
    assert message in caught.value.message, str(caught.value)
    places = [found.start() for found in re.finditer(re.escape(under), query)]
    assert caught.value.offset == places[nth], str(caught.value)
    assert str(caught.value).splitlines()[-1].endswith("^")
    assert [step.name for step in made._graph.steps] == ["readings", "alarms"]


def _plain(value: Any) -> Any:
    return value.strftime("%H:%M:%S") if hasattr(value, "strftime") else value
