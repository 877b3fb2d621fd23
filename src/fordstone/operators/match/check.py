"""What a pattern gives: matches, and beginnings whose time ran out. Patterns that can never match or never end are refused.

A match is made of rows of one key, in order, each taken by a stage; stages follow each other as the pattern says. The
operator reads the pattern through `pattern_of`, which says the same as the plan with all expressions checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sqlglot import exp

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.coercion import STRING
from fordstone.lang.duration import human_us
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.term import Column
from fordstone.operators.aggregate.check import SPAN_MAX_US
from fordstone.operators.match.terms import (
    DECIDED,
    Condition,
    Measure,
    PatternChecker,
    Slot,
    Slots,
    parse_condition,
    parse_measure,
    shown_constant,
    tree_of,
)
from fordstone.plan import plan as p
from fordstone.plan.stream_type import (
    TIMESTAMP,
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    key_columns,
    late_rows,
    needs_time,
    plain_keys,
)

MATCH_START: Final = "match_start"
STAGES: Final = "stages"
"""Columns of the stream of time-outs: the time of the first row, and the stages that have taken rows, joined by commas."""
STAGES_MAX: Final = 30
ANY_ROW: Final = Condition(row=(), rest=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A pattern, checked. `conditions` and `untils` stand beside the plan's stages; None: there is none."""

    conditions: tuple[Condition, ...]
    untils: tuple[Condition | None, ...]
    slots: tuple[Slot, ...]
    measures: tuple[Measure, ...]


def derive_match(step: p.Match, types: Types) -> Derived:
    """The streams of such a step, by port."""
    stream = types[step.input]
    append_only(step, stream, "a pattern")
    time = needs_time(step, stream, "a pattern")
    plain_keys(step.keys, stream.schema)
    for column in step.order:
        if column not in stream.schema:
            raise SchemaError(f"order: there is no column {column!r}. Columns are: {', '.join(stream.schema)}.")
    _check_stages(step)
    _check_skip(step)
    found = pattern_of(step, stream.schema)
    _check_conditions(step, found)
    base = dict(stream.schema) if step.all_rows else key_columns(step.keys, stream.schema)
    main = StreamType(schema=_columns(base, found.measures), time=_time(step, found), row_wise=False)
    derived = {p.Input(step.name): main, **late_rows(step, replace(stream, time=time))}
    if step.within_us is not None:
        keys = key_columns(step.keys, stream.schema)
        schema = _columns(_added(keys, {MATCH_START: TIMESTAMP, STAGES: STRING}), found.measures)
        ran_out = EventTime(column=MATCH_START, shift_us=step.within_us)
        derived[p.Input(step.name, "timeout")] = StreamType(schema=schema, time=ran_out, row_wise=False)
    return derived


def pattern_of(step: p.Match, schema: Schema) -> Pattern:
    """The expressions of a step, checked."""
    slots = Slots()
    conditions, untils = [], []
    for number, stage in enumerate(step.stages):
        conditions.append(_condition(step, number, stage.predicate, schema, slots) or ANY_ROW)
        untils.append(_condition(step, number, stage.until, schema, slots, until=True))
    measures = tuple(measure(text, step.stages, schema, slots) for text in step.measures)
    return Pattern(conditions=tuple(conditions), untils=tuple(untils), slots=tuple(slots.found), measures=measures)


def _condition(
    step: p.Match, number: int, source: str | None, schema: Schema, slots: Slots, *, until: bool = False
) -> Condition | None:
    if source is None:
        return None
    stage = step.stages[number]
    own_row = step.own_row and not until and not stage.negated
    hidden = {}
    for at, other in enumerate(step.stages):
        if other.negated:
            hidden[other.name] = f"stage {other.name!r} is one that must not come; it has no rows."
        elif at > number:
            hidden[other.name] = f"stage {other.name!r} comes after {stage.name!r}; its rows are not known yet."
    if stage.times_max == 1 and not own_row and not until:
        hidden[stage.name] = (
            f"stage {stage.name!r} takes one row, so it has none before this one. Write the column alone for the row itself."
        )
    names = {other.name: at for at, other in enumerate(step.stages) if other.name not in hidden}
    tree, text = tree_of(source)
    checker = PatternChecker(
        text=text, schema=schema, slots=slots, stages=names, hidden=hidden, own=number if own_row else None
    )
    return parse_condition(tree, checker)


def measure(source: str | exp.Expr, stages: tuple[p.Stage, ...], schema: Schema, slots: Slots | None = None) -> Measure:
    """Check one measure."""
    tree, text = tree_of(source)
    hidden = {
        stage.name: f"stage {stage.name!r} is one that must not come; it has no rows."
        for stage in stages
        if stage.negated
    }
    names = {stage.name: at for at, stage in enumerate(stages) if not stage.negated}
    checker = PatternChecker(
        text=text, schema=schema, slots=Slots() if slots is None else slots, stages=names, hidden=hidden, measure=True
    )
    return parse_measure(tree, checker)


def decided_at_once(step: p.Match) -> bool:
    """Whether a match never waits for others before it is given out."""
    return step.skip in {"none", "next"} and step.choose == "earliest"


def _time(step: p.Match, found: Pattern) -> EventTime | None:
    """The time of matches: when they were decided, if a measure says it and nothing can wait for ever."""
    if step.within_us is None and not decided_at_once(step):
        return None
    for column in found.measures:
        if isinstance(column.term, Column) and column.term.name == DECIDED:
            return EventTime(column=column.name)
    return None


def _columns(base: Mapping[str, str | DataType], measures: tuple[Measure, ...]) -> Schema:
    columns = dict(base)
    for found in measures:
        columns = _added(columns, {found.name: found.term.type})
    if not columns:
        raise PipelineError("a pattern without keys needs at least one measure, such as measures={'n': 'count(*)'}.")
    return Schema.of(columns)


def _added(columns: Mapping[str, str | DataType], more: Mapping[str, str | DataType]) -> dict[str, str | DataType]:
    for name in more:
        if name in columns:
            raise SchemaError(f"column {name!r} is given twice. Name the measure, or the key, differently.")
    return {**columns, **more}


def _check_stages(step: p.Match) -> None:
    where = f"step {step.name}: pattern {step.pattern}"
    if step.within_us is not None and not 0 < step.within_us < SPAN_MAX_US:
        raise PipelineError(
            f"{where}: within must be longer than zero, or no match could be, and shorter than {human_us(SPAN_MAX_US)}."
        )
    if step.partial_matches_max < 1:
        raise PipelineError(f"{where}: limit must be at least 1.")
    if len(step.stages) > STAGES_MAX:
        raise PipelineError(f"{where} has {len(step.stages)} stages; there may be {STAGES_MAX}.")
    seen: set[str] = set()
    for stage in step.stages:
        if not stage.name or stage.name in seen:
            raise PipelineError(f"{where}: stage {stage.name!r}: every stage needs a name of its own.")
        seen.add(stage.name)
        _check_stage(step, stage, f"{where}: stage {stage.name!r}")
    if not any(not stage.negated for stage in step.stages):
        raise PipelineError(f"{where} has no stage that takes rows. Begin it with start(...).")
    if step.stages[0].negated:
        raise PipelineError(
            f"{where} begins with {step.stages[0].name!r}, which must not come: there is no row yet that it could follow. "
            "Begin with start(...)."
        )
    if all(stage.optional for stage in step.stages if not stage.negated):
        raise PipelineError(f"{where}: every stage is optional, so no row at all would match. Demand at least one.")
    for stage in reversed(step.stages):
        if not stage.negated and not stage.optional:
            break
        if stage.negated and step.within_us is None:
            raise PipelineError(
                f"{where} may end with {stage.name!r}, which must not come: until when? Add .within(...)."
            )


def _check_stage(step: p.Match, stage: p.Stage, where: str) -> None:
    if stage.negated:
        if stage.follows == "any" or stage.optional or (stage.times_min, stage.times_max) != (1, 1) or stage.until:
            raise PipelineError(f"{where} must not come; it cannot be repeated, optional or have until=.")
        return
    if stage.times_min < 1:
        raise PipelineError(f"{where}: times={stage.times_min} must be at least 1; write optional=True for none.")
    if stage.times_max is not None and stage.times_max < stage.times_min:
        raise PipelineError(
            f"{where} can never match: at least {stage.times_min} rows, but at most {stage.times_max}. Swap them."
        )
    if stage.until is not None and stage.times_max == 1:
        raise PipelineError(f"{where} takes one row; until= ends a stage that takes several. Give times=.")
    endless = stage.times_max is None and stage.repeats != "next" and stage.until is None and step.within_us is None
    if endless:
        raise PipelineError(
            f"{where} never ends: it takes rows without bound, with others between. "
            "Add .within(...), until=..., a largest number of times, or consecutive=True."
        )


def _check_skip(step: p.Match) -> None:
    where = f"step {step.name}: pattern {step.pattern}"
    if step.skip in {"first", "last"}:
        names = [stage.name for stage in step.stages if not stage.negated]
        if step.skip_to not in names:
            raise PipelineError(
                f"{where}: skip to {step.skip} of {step.skip_to!r}: there is no such stage. Stages are: {', '.join(names)}."
            )
    elif step.skip_to is not None:
        raise PipelineError(f"{where}: skip_to={step.skip_to!r} belongs to skip 'first' or 'last'.")
    if step.choose == "preferred" and step.skip == "none":
        raise PipelineError(
            f"{where}: skip='none' gives all matches, choose='preferred' one for each first row. Use skip='next'."
        )
    last = [stage for stage in step.stages if not stage.negated]
    while last and step.choose == "earliest":
        stage = last.pop()
        if stage.quantifier == "greedy" and (stage.times_max != stage.times_min or stage.optional):
            raise PipelineError(
                f"{where}: stage {stage.name!r} is greedy and may be the last: how many rows it takes is only known later. "
                "Give choose='preferred', which waits for that, or a stage behind it."
            )
        if not stage.optional:
            break


def _check_conditions(step: p.Match, found: Pattern) -> None:
    where = f"step {step.name}: pattern {step.pattern}"
    for stage, condition, until in zip(step.stages, found.conditions, found.untils, strict=True):
        constant = shown_constant(condition)
        if constant is False and not stage.negated and not stage.optional:
            raise PipelineError(f"{where} can never match: the condition of stage {stage.name!r} is never true.")
        if constant is True and stage.negated:
            raise PipelineError(
                f"{where}: stage {stage.name!r} must not come, but any row is one. Give it a condition."
            )
        if until is not None and shown_constant(until) is True:
            raise PipelineError(f"{where} can never match: until= of stage {stage.name!r} is always true.")
        endless = stage.times_max is None and stage.until is None and step.within_us is None
        if endless and constant is True and step.choose == "preferred" and stage.quantifier != "reluctant":
            raise PipelineError(
                f"{where} never ends: stage {stage.name!r} takes any row, without bound. "
                "Give it a condition, make it reluctant, or add WITHIN."
            )
