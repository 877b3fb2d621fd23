"""What a pattern may be: its stages, the conditions and measures over the rows that stages took, and the streams of the step.

In a condition a bare column is of the row that is looked at; `b.x` is column x of the last row that stage b took, and aggregates
of a stage, such as `avg(b.x)`, are over its rows. Both become slots that the automaton fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from sqlglot import exp

from fordstone.errors import ExpressionError, PipelineError, SchemaError
from fordstone.lang import term as terms
from fordstone.lang.dialect import DIALECT, offset_of, read
from fordstone.lang.duration import human_us
from fordstone.lang.expression import Checker, split_alias, with_own_functions
from fordstone.lang.schema import BIGINT, BOOLEAN, DECIMAL_DIGITS_MAX, DOUBLE, NULL, STRING, DataType, Schema
from fordstone.lang.term import Call, Column, Term, render, walk
from fordstone.operators.aggregate.family import SPAN_MAX_US
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

SLOT_PREFIX: Final = "__s"
NUMBER: Final = "__number"
CLASSIFIER: Final = "__stage"
DECIDED: Final = "__decided"
SPECIALS: Final = {
    "match_number": Column(NUMBER, BIGINT),
    "classifier": Column(CLASSIFIER, STRING),
    "match_time": Column(DECIDED, TIMESTAMP),
}
"""What a measure may ask of the match itself."""
OFFSET_MAX: Final = 1_000
"""Maximum offset n in `last(b.x, n)` and `first(b.x, n)`."""

SlotFunction = Literal["first", "last", "count", "sum", "mean", "min", "max"]
_FUNCTIONS: Final[dict[str, SlotFunction]] = {
    "first": "first", "last": "last", "count": "count", "sum": "sum", "avg": "mean", "mean": "mean", "min": "min",
    "max": "max",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Something that is asked of the rows taken so far: by one stage, or (None) by all.

    `argument` is a term over one row; None for the number of rows. `offset`: number of rows after the first, or before the last.
    """

    function: SlotFunction
    stage: int | None
    argument: Term | None
    offset: int
    type: DataType


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition: true where all of `row`, each over the row alone, and all of `rest` are true."""

    row: tuple[Term, ...]
    rest: tuple[Term, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A column of the output, over slots, columns of a row, and what is known of the match itself."""

    name: str
    term: Term
    final: bool
    """Whether, with a row for each row of a match, the whole match counts and not just what is up to the row."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots that all expressions of a pattern ask for, each once."""

    found: list[Slot] = field(default_factory=list)

    def column(self, slot: Slot) -> Column:
        """What stands for the slot in a term."""
        if slot not in self.found:
            self.found.append(slot)
        return Column(f"{SLOT_PREFIX}{self.found.index(slot)}", slot.type)


def slot_index(name: str) -> int | None:
    """Which slot a column of a term stands for; None: it is a column of the row."""
    return int(name.removeprefix(SLOT_PREFIX)) if name.startswith(SLOT_PREFIX) and name not in _SPECIAL_NAMES else None


_SPECIAL_NAMES: Final = frozenset(column.name for column in SPECIALS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternChecker(Checker):
    """Reads one expression of a pattern.

    `stages` are the names that may be referred to, with the number of each; `hidden` those that may not, with the reason.
    In the own condition of stage `own` the row that is looked at counts as taken already, so it is `own.x`.
    """

    slots: Slots
    stages: Mapping[str, int]
    hidden: Mapping[str, str]
    own: int | None = None
    measure: bool = False

    def _column(self, node: exp.Expr) -> Term:
        stage = node.args.get("table")
        if stage is None:
            return Checker._column(self, node)  # noqa: SLF001 - super() does not work in a slotted dataclass
        number = self._stage(node)
        argument = self._of_row(node)
        if number == self.own:
            return argument
        return self.slots.column(Slot(function="last", stage=number, argument=argument, offset=0, type=argument.type))

    def _anonymous(self, node: exp.Expr) -> Term:
        name = str(node.args["this"]).lower()
        if name in _FUNCTIONS:
            return self._slot(_FUNCTIONS[name], name, node)
        if name in SPECIALS:
            if not self.measure:
                raise self.fail(f"{name}() is known once there is a match; it belongs in measures.", node)
            return SPECIALS[name]
        if name in {"final", "running"}:
            raise self.fail(f"{name}(...) stands only around a whole measure.", node)
        if name in {"prev", "next"}:
            raise self.fail(
                f"{name}(...) is not supported; write last(b.x, 1) for the row before within a stage.", node
            )
        return Checker._anonymous(self, node)  # noqa: SLF001 - as above

    def _slot(self, function: SlotFunction, written: str, node: exp.Expr) -> Term:
        args = list(node.args.get("expressions") or [])
        most = 2 if function in {"first", "last"} else 1
        if not 1 <= len(args) <= most:
            how = f"{written}(b.x, n)" if most > 1 else f"{written}(b.x)"
            raise self.fail(f"{written} is called with {len(args)} arguments; it is written {how}.", node)
        if isinstance(args[0], exp.Distinct):
            raise self.fail(f"{written}(DISTINCT ...) is not supported.", args[0])
        offset = self._offset(args[1]) if len(args) > 1 else 0
        if function == "count" and args[0].is_star:
            stage = self._stage(args[0]) if args[0].args.get("table") is not None else None
            return self.slots.column(Slot(function="count", stage=stage, argument=None, offset=0, type=BIGINT))
        named = {column.table for column in args[0].find_all(exp.Column)}
        if len(named) > 1:
            raise self.fail(f"{written} takes the rows of one stage; here several are named.", args[0])
        stage = next((self._stage(c) for c in args[0].find_all(exp.Column) if c.args.get("table") is not None), None)
        argument, kind = self._result(function, self._of_row(args[0]), args[0])
        if function == "last" and offset == 0 and stage is not None and stage == self.own:
            return argument
        return self.slots.column(Slot(function=function, stage=stage, argument=argument, offset=offset, type=kind))

    def _of_row(self, node: exp.Expr) -> Term:
        """A term over one row: the columns without the name of their stage."""
        bare = node.copy()
        for column in bare.find_all(exp.Column):
            column.set("table", None)
        return Checker(text=self.text, schema=self.schema).check(bare)

    def _offset(self, node: exp.Expr) -> int:
        found = Checker(text=self.text, schema=self.schema).check(node)
        if (
            not isinstance(found, terms.Literal)
            or not isinstance(found.value, int)
            or not 0 <= found.value <= OFFSET_MAX
        ):
            raise self.fail(f"the offset must be a literal whole number from 0 to {OFFSET_MAX:,}.", node)
        return found.value

    def _stage(self, node: exp.Expr) -> int:
        name = str(node.args["table"].args["this"])
        if node.args.get("db") is not None:
            raise self.fail(
                "a column of a stage is written stage.column, and a field of it (stage.column).field.", node
            )
        if name in self.hidden:
            raise self.fail(self.hidden[name], node)
        if name not in self.stages:
            known = ", ".join([*self.stages, *self.hidden])
            hint = f" A field of column {name} is written ({name}).{node.name}." if name in self.schema else ""
            raise self.fail(f"there is no stage {name!r} in this pattern. Stages are: {known}.{hint}", node)
        return self.stages[name]

    def _result(self, function: SlotFunction, argument: Term, node: exp.Expr) -> tuple[Term, DataType]:
        kind = argument.type
        if kind.name.startswith("interval"):
            raise self.fail("an interval is not a value of its own; add it to a timestamp or a date.", node)
        if kind.name == "null":
            argument, kind = terms.cast(argument, DOUBLE), DOUBLE
        if function == "count":
            return argument, BIGINT
        if function in {"sum", "mean"} and not kind.is_numeric:
            raise self.fail(f"a number is needed here, but this is {kind}.", node)
        if function in {"min", "max"} and kind.is_nested:
            raise self.fail("arrays have no least or greatest.", node)
        if function == "mean":
            return (argument if kind == DOUBLE else Call("cast", (argument,), DOUBLE)), DOUBLE
        if function != "sum":
            return argument, kind
        if kind.name == "decimal":
            digits = min(kind.precision + 10, DECIMAL_DIGITS_MAX)
            return argument, DataType("decimal", precision=digits, scale=kind.scale)
        if kind.is_integer:
            return argument, BIGINT
        return (argument if kind == DOUBLE else Call("cast", (argument,), DOUBLE)), DOUBLE


def tree_of(source: str | exp.Expr) -> tuple[exp.Expr, str]:
    """What was written, as a tree and as text with places in it."""
    if isinstance(source, str):
        return read(source), source
    text = with_own_functions(source).sql(dialect=DIALECT, normalize_functions=False)
    return read(text), text


def parse_condition(tree: exp.Expr, checker: PatternChecker) -> Condition:
    """Check a condition and split it."""
    found = checker.check(tree)
    if found.type == NULL:
        found = terms.cast(found, BOOLEAN)
    if found.type != BOOLEAN:
        raise checker.fail(f"a condition is needed here, but this is {found.type}.", tree)
    parts = list(_conjuncts(found))
    row = tuple(part for part in parts if not refers(part))
    return Condition(row=row, rest=tuple(part for part in parts if refers(part)))


def parse_measure(tree: exp.Expr, checker: PatternChecker) -> Measure:
    """Check a measure; it is named by AS, or as its text is."""
    body, alias = split_alias(tree)
    final, inner = False, body
    if isinstance(body, exp.Anonymous) and str(body.args["this"]).lower() in {"final", "running"}:
        args = list(body.args.get("expressions") or [])
        if len(args) != 1:
            raise checker.fail(f"{body.args['this']} is written {body.args['this']}(expression).", body)
        final, inner = str(body.args["this"]).lower() == "final", args[0]
    found = checker.check(inner)
    if found.type.name.startswith("interval"):
        raise checker.fail("an interval is not a value of its own; add it to a timestamp or a date.", body)
    if alias == "":
        raise ExpressionError("the name after AS is empty.", text=checker.text, offset=offset_of(body))
    name = alias if alias is not None else found.name if isinstance(found, Column) else body.sql(dialect=DIALECT)
    return Measure(name=name, term=found, final=final)


def refers(found: Term) -> bool:
    """Whether a term asks for anything beside the row."""
    return any(isinstance(part, Column) and slot_index(part.name) is not None for part in walk(found))


def _conjuncts(found: Term) -> list[Term]:
    if isinstance(found, Call) and found.function == "and":
        return [*_conjuncts(found.args[0]), *_conjuncts(found.args[1])]
    return [found]


def shown_constant(condition: Condition) -> bool | None:
    """What a condition always is, as far as that is written: True, False (or null), or None where it depends."""
    parts = [*condition.row, *condition.rest]
    if any(isinstance(part, terms.Literal) and part.value is not True for part in parts):
        return False
    return True if all(isinstance(part, terms.Literal) for part in parts) else None


def row_text(found: Term) -> str:
    """A term over the row as SQL: equal texts are equal terms."""
    return f"{render(found)} {found.type}"


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
        timeout = EventTime(column=MATCH_START, shift_us=step.within_us)
        derived[p.Input(step.name, "timeout")] = StreamType(schema=schema, time=timeout, row_wise=False)
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
    hidden = {
        other.name: f"stage {other.name!r} comes after {stage.name!r}; its rows are not known yet."
        for other in step.stages[number + 1 :]
    } | _without_rows(step.stages)
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
    hidden = _without_rows(stages)
    names = {stage.name: at for at, stage in enumerate(stages) if not stage.negated}
    checker = PatternChecker(
        text=text, schema=schema, slots=Slots() if slots is None else slots, stages=names, hidden=hidden, measure=True
    )
    return parse_measure(tree, checker)


def _without_rows(stages: tuple[p.Stage, ...]) -> dict[str, str]:
    no_rows = "is negated (not_next or not_followed_by), so it has no rows to refer to."
    return {stage.name: f"stage {stage.name!r} {no_rows}" for stage in stages if stage.negated}


def decided_at_once(step: p.Match) -> bool:
    """Whether a match never waits for others before it is emitted."""
    return step.skip in {"none", "next"} and step.choose == "earliest"


def _time(step: p.Match, found: Pattern) -> EventTime | None:
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
        raise PipelineError(f"{where} has {len(step.stages)} stages; the maximum is {STAGES_MAX}.")
    seen: set[str] = set()
    for stage in step.stages:
        if not stage.name or stage.name in seen:
            raise PipelineError(f"{where}: stage {stage.name!r}: every stage needs a name of its own.")
        seen.add(stage.name)
        _check_stage(step, stage, f"{where}: stage {stage.name!r}")
    if not any(not stage.negated for stage in step.stages):
        raise PipelineError(f"{where} has no stage that takes rows. Begin it with start(...).")
    if step.stages[0].negated:
        raise PipelineError(f"{where} begins with the negated stage {step.stages[0].name!r}. Begin it with start(...).")
    if all(stage.optional for stage in step.stages if not stage.negated):
        raise PipelineError(f"{where}: every stage is optional, so no row at all would match. Demand at least one.")
    for stage in reversed(step.stages):
        if not stage.negated and not stage.optional:
            break
        if stage.negated and step.within_us is None:
            raise PipelineError(
                f"{where} may end with the negated stage {stage.name!r}, so it needs a time limit. Add .within(...)."
            )


def _check_stage(step: p.Match, stage: p.Stage, where: str) -> None:
    if stage.negated:
        if stage.follows == "any" or stage.optional or (stage.times_min, stage.times_max) != (1, 1) or stage.until:
            raise PipelineError(f"{where} is negated, so it cannot have times=, optional=, until= or follows='any'.")
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
            "Add .within(...), until=..., a maximum in times=, or consecutive=True."
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
        raise PipelineError(
            f"{where}: skip_to={step.skip_to!r} is only for skip='first' and skip='last'. Leave it out."
        )
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
                "Give choose='preferred', which waits for that, or add a stage after it."
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
                f"{where}: stage {stage.name!r} is negated and has a condition that every row fulfils, so the pattern can never "
                "match. Give it a narrower condition."
            )
        if until is not None and shown_constant(until) is True:
            raise PipelineError(f"{where} can never match: until= of stage {stage.name!r} is always true.")
        endless = stage.times_max is None and stage.until is None and step.within_us is None
        if endless and constant is True and step.choose == "preferred" and stage.quantifier != "reluctant":
            raise PipelineError(
                f"{where} never ends: stage {stage.name!r} takes any row, without bound. "
                "Give it a condition, make it reluctant, or add WITHIN."
            )
