"""Functions as sinks."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from fordstone import Pipeline
from fordstone.connectors import MemorySource, memory
from fordstone.connectors.base import ConnectorSpec, SinkStream
from fordstone.connectors.function import function_sink, takes_epoch
from fordstone.connectors.registry import open_sink
from fordstone.errors import ConfigError, PipelineError, SinkError
from fordstone.lang.schema import Schema

NUMBERS = [{"n": 1}, {"n": 2}, {"n": 3}]


def with_sink(function: Any, source: Any = NUMBERS, **options: Any) -> Pipeline:
    pipeline = Pipeline("calls")
    pipeline.source("numbers", memory(source), schema={"n": "bigint"}).sink("called", function, **options)
    return pipeline


def test_a_function_gets_the_rows_of_each_epoch_once_with_its_number(tmp_path: Path):
    source, calls = MemorySource([[]]), []
    pipeline = with_sink(lambda frame, epoch: calls.append((epoch, frame["n"].to_list())), source)
    for number in (1, 2):
        source.append(0, [{"n": number}])
        pipeline.run(bounded=True, state=tmp_path)
    assert [rows for _, rows in calls] == [[1], [1], [2]], "the last epoch comes again at a start"
    assert calls[0] == calls[1]
    assert calls[2][0] > calls[1][0]


def test_a_function_may_take_the_rows_only():
    frames: list[pl.DataFrame] = []
    with_sink(frames.append).run(bounded=True)
    assert [frame["n"].to_list() for frame in frames] == [[1, 2, 3]]


def test_an_async_function_is_awaited_in_one_event_loop():
    loops, calls = set(), []

    async def send(frame: pl.DataFrame, epoch: int) -> None:
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        calls.append((epoch, frame.height))

    with_sink(send).run(bounded=True, batch_rows=1, interval="1ms")
    assert sum(rows for _, rows in calls) == 3
    assert len(loops) == 1


def test_rows_that_are_released_at_once_have_no_epoch():
    calls: list[Any] = []
    with_sink(lambda frame, epoch: calls.append((epoch, frame.columns)), release="at_once").run(bounded=True)
    assert calls == [(None, ["n", "__id"])]


def test_what_it_raises_stops_the_run_at_once_with_its_own_traceback():
    calls = []

    def failing(frame: pl.DataFrame) -> None:
        calls.append(frame.height)
        raise ZeroDivisionError("no")

    with pytest.raises(SinkError, match=r"sink called: .*failing failed on epoch 1, with 3 rows: Zero.*\n") as caught:
        with_sink(failing).run(bounded=True)
    assert calls == [3]
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert {Path(frame.filename).name for frame in traceback.extract_tb(cause.__traceback__)} == {"test_function.py"}


def test_the_guarantee_is_at_least_once():
    assert "at_least_once" in with_sink(print).explain()
    pipeline = Pipeline("strict", guarantee="exactly_once")
    with pytest.raises(PipelineError, match="gives at_least_once"):
        pipeline.source("numbers", memory(NUMBERS)).sink("called", print)


def test_what_is_neither_a_connector_nor_a_function_is_refused():
    with pytest.raises(PipelineError, match="sink called: 'out' is neither a connector nor a function"):
        with_sink("out")


def test_a_plan_that_was_read_back_has_no_function():
    spec = msgspec.json.decode(msgspec.json.encode(function_sink(print)), type=ConnectorSpec)
    with pytest.raises(ConfigError, match="read back from JSON"):
        open_sink(spec, SinkStream(step="called", schema=Schema.of({"n": "bigint"})))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda frame: None, False),
        (lambda frame, epoch: None, True),
        (lambda frame, number: None, True),
        (lambda frame, epoch=None: None, True),
        (lambda frame, path="out": None, False),
        (lambda frame, *, epoch=None: None, False),
        (lambda *frames: None, False),
        (print, False),
        ([].append, False),
    ],
)
def test_the_epoch_is_given_to_functions_that_take_it(function: Any, expected: bool):
    assert takes_epoch(function) is expected


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None, lambda frame, *, place: None])
def test_a_function_with_other_parameters_is_refused_when_it_is_given(function: Any):
    stream = Pipeline("p").source("rows", memory([{"n": 1}]))
    with pytest.raises(
        PipelineError, match=r"sink out: .* is called as f\(frame\) or f\(frame, epoch\), and cannot be"
    ):
        stream.sink("out", function)
