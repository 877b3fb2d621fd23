"""Drive one operator as a task does: batches, a watermark after each, a barrier now and then. One thread, no engine around it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from fordstone import Pipeline
from fordstone.lang.duration import TIME_MAX_US
from fordstone.operators.base import Emit, Moment, Operator, OperatorContext
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types

BATCH_ROWS = 64 * 1024
BARRIER_EVERY = 16
"""Batches: about a million rows, so that there are as many barriers as with one a second or more."""


@dataclass(frozen=True, slots=True)
class Driven:
    """What a run of an operator came to."""

    cpu_seconds: float
    rows_in: int
    rows_out: int


def drive(
    pipeline: Pipeline, step_name: str, inputs: Sequence[pl.DataFrame], *, time_column: str, late_us: int
) -> Driven:
    """Take all rows of the inputs through a step. `late_us`: how far the watermark lags the newest row."""
    plan = pipeline.plan()
    step = plan.step(step_name)
    setting = OperatorContext(plan=plan, types=stream_types(plan), functions=pipeline.functions)
    operator = make_operator(step, setting)
    feeders = [
        make_feeder(step, index, setting) if isinstance(step, p.KeyedStep) else None for index in range(len(inputs))
    ]
    batches = list(_in_turn(inputs))
    newest = [int(batch.get_column(time_column).max().timestamp() * 1e6) for _, batch in batches]  # type: ignore[union-attr]  # a time
    out = 0
    began = time.process_time()
    for number, (index, batch) in enumerate(batches, start=1):
        for frame in _fed(feeders[index], batch):
            out += _rows(operator.on_batch(frame, late=False))
        if index == len(inputs) - 1:
            out += _rows(operator.on_watermark(newest[number - 1] - late_us))
        if number % BARRIER_EVERY == 0:
            out += _rows(operator.on_barrier(Moment(now_us=number, before_us=number - 1)))
            for state in operator.states().values():
                # The writer's work is not the task's; but what the task leaves to it is made here, or it would be free.
                for piece in state.freeze():
                    piece.frame() if piece.in_memory else None
    out += _rows(operator.on_watermark(TIME_MAX_US))
    out += _rows(operator.on_barrier(Moment(now_us=len(batches), before_us=0)))
    return Driven(cpu_seconds=time.process_time() - began, rows_in=sum(frame.height for frame in inputs), rows_out=out)


def _in_turn(inputs: Sequence[pl.DataFrame]) -> Iterator[tuple[int, pl.DataFrame]]:
    """The batches of all inputs, a batch of each in turn."""
    most = max(frame.height for frame in inputs)
    for start in range(0, most, BATCH_ROWS):
        for index, frame in enumerate(inputs):
            batch = frame.slice(start, BATCH_ROWS)
            if batch.height:
                yield index, batch


def _fed(feeder: Operator | None, batch: pl.DataFrame) -> list[pl.DataFrame]:
    if feeder is None:
        return [batch]
    return [emit.frame for emit in feeder.on_batch(batch, late=False)]


def _rows(emits: Sequence[Emit]) -> int:
    return sum(emit.frame.height for emit in emits)
