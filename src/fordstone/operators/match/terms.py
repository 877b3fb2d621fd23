"""Expressions inside patterns: conditions and measures that speak of the rows that stages have taken.

`b.x` is column x of the last row of stage b, `avg(b.x)` an aggregate over its rows, a bare `x` the row that is looked at.
What is asked of the rows taken so far becomes a `Slot`; the expression is then a term over the columns of the row and over
slots, which stand in it as columns `__s0`, `__s1`, ... A condition is split into what the row alone decides, which the
operator works out for whole batches, and the rest.

Leaves to `model.match` which stages there are, and whether the pattern as a whole makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from sqlglot import exp

from fordstone.errors import ExpressionError
from fordstone.lang import term as terms
from fordstone.lang.check import Checker
from fordstone.lang.coercion import BIGINT, BOOLEAN, DOUBLE, NULL, STRING, TIMESTAMP
from fordstone.lang.dialect import DIALECT, offset_of, read
from fordstone.lang.expression import split_alias, with_own_functions
from fordstone.lang.schema import DECIMAL_DIGITS_MAX, DataType
from fordstone.lang.term import Call, Column, Term, render, walk

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
"""So far back or ahead `last(b.x, n)` and `first(b.x, n)` may look."""

SlotFunction = Literal["first", "last", "count", "sum", "mean", "min", "max"]
_FUNCTIONS: Final[dict[str, SlotFunction]] = {
    "first": "first", "last": "last", "count": "count", "sum": "sum", "avg": "mean", "mean": "mean", "min": "min",
    "max": "max",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Something that is asked of the rows taken so far: by one stage, or (None) by all.

    `argument` is a term over one row; None for the number of rows. `offset`: so many rows behind the first, or before the last.
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
            raise self.fail(f"how many rows back is a whole number from 0 to {OFFSET_MAX:,}, written out.", node)
        return found.value

    def _stage(self, node: exp.Expr) -> int:
        name = str(node.args["table"].args["this"])
        if node.args.get("db") is not None:
            raise self.fail("a column of a stage is written stage.column.", node)
        if name in self.hidden:
            raise self.fail(self.hidden[name], node)
        if name not in self.stages:
            known = ", ".join([*self.stages, *self.hidden])
            raise self.fail(f"there is no stage {name!r} in this pattern. Stages are: {known}.", node)
        return self.stages[name]

    def _result(self, function: SlotFunction, argument: Term, node: exp.Expr) -> tuple[Term, DataType]:
        """The argument as it is kept, and the type of the result."""
        kind = argument.type
        if kind.name.startswith("interval"):
            raise self.fail("an interval is not a value of its own; add it to a timestamp or a date.", node)
        if kind.name == "null":
            argument, kind = terms.cast(argument, DOUBLE), DOUBLE
        if function == "count":
            return argument, BIGINT
        if function in {"sum", "mean"} and not kind.is_numeric:
            raise self.fail(f"a number is needed here, but this is {kind}.", node)
        if function in {"min", "max"} and kind.element is not None:
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
