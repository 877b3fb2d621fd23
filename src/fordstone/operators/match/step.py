"""Patterns: sequences of rows of a key that fulfil one condition after another.

Rows wait until the watermark passes them, and are then matched key by key, in order of time and of `row_order`. Conditions that
depend on one row alone are computed for whole batches (`RowForms`); only rows that fulfil some condition are looked at one by one
(`matcher`). If it does not matter what is between them, all other rows are dropped on arrival.

Open candidates are objects while the operator runs, and are written at each barrier into a table, as MessagePack per key: the rows
that are held, the nodes over them, parents first, and the candidates with their threads. Everything else is computed when read,
and a key is read back when it has rows or its time is over.

Invariants: matches are a function of the rows received and of the watermark; a key without open candidates has nothing stored
(except the number of its matches, if that is asked for).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_, or_
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
from sqlglot import exp

from fordstone.errors import PlanError
from fordstone.lang.duration import TIME_MAX_US, human_us
from fordstone.lang.expression import Expression, expression_of
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.polars.scalar import Scalar, Values, as_plain, plain_type, scalar_of
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.term import Call, Column, Term, columns_of
from fordstone.operators.aggregate.partial import ONE
from fordstone.operators.base import (
    Emit,
    Emits,
    Family,
    Moment,
    Operator,
    OperatorContext,
    keys_text,
    stream_details,
)
from fordstone.operators.match.automaton import Node, Row, Test, compile_pattern, kept, states_with
from fordstone.operators.match.check import (
    CLASSIFIER,
    DECIDED,
    MATCH_START,
    NUMBER,
    SLOT_PREFIX,
    SPECIALS,
    STAGES,
    Condition,
    Measure,
    Pattern,
    derive_match,
    pattern_of,
    row_text,
    slot_index,
)
from fordstone.operators.match.matcher import Candidate, Found, Matcher, Rules, Transitions, matcher_of, walk
from fordstone.operators.row_order import KeyedRows, Numbers, WaitingRows
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP, Derived, StreamType, Types
from fordstone.state.base import State, StateBackend

BITS: Final = "__bits"
_NO_TREE: Final = exp.Null()


class RowForms:
    """The forms that a pattern needs rows in."""

    def __init__(self, step: p.Match, pattern: Pattern, schema: Schema) -> None:
        self._schema = schema
        self._values: dict[str, Term] = {}
        self._bits: dict[str, pl.Expr] = {}
        if step.all_rows:
            for name in schema:
                self.value(Column(name, schema[name]))
        self.slots = tuple(
            kept(slot, None if slot.argument is None else self.value(slot.argument)) for slot in pattern.slots
        )
        self.tests = tuple(
            self._test(condition, own_row=step.own_row and not stage.negated)
            for condition, stage in zip(pattern.conditions, step.stages, strict=True)
        )
        self.untils = tuple(None if until is None else self._test(until) for until in pattern.untils)
        for measure in pattern.measures:
            for name in _row_columns(measure.term):
                self.value(Column(name, schema[name]))
        self.all_rows_count = any(test.bit == 0 for test in (*self.tests, *self.untils) if test is not None)
        """Whether some condition is fulfilled by every row, as far as the row decides."""
        self.columns = [
            as_plain(to_polars(_named(term, f"__v{at}"), schema), term.type).alias(f"__v{at}")
            for at, term in enumerate(self._values.values())
        ]

    @cached_property
    def bits(self) -> pl.Expr:
        if not self._bits:
            return pl.repeat(0, pl.len(), dtype=pl.Int64).alias(BITS)
        parts = [
            found.fill_null(value=False).cast(pl.Int64) * (1 << at) for at, found in enumerate(self._bits.values())
        ]
        return reduce(lambda left, right: left + right, parts).alias(BITS)

    @cached_property
    def candidates(self) -> pl.Expr | None:
        """Which rows fulfil any; None: all do."""
        if self.all_rows_count or not self._bits:
            return None
        return reduce(or_, [found.fill_null(value=False) for found in self._bits.values()])

    def value(self, term: Term) -> int:
        """Which of a row's values a term is."""
        text = row_text(term)
        self._values.setdefault(text, term)
        return list(self._values).index(text)

    def values_of(self, name: str) -> int:
        """Which of a row's values a column is."""
        return self.value(Column(name, self._schema[name]))

    def _test(self, condition: Condition, *, own_row: bool = False) -> Test:
        bit = 0
        if condition.row:
            text = " AND ".join(map(row_text, condition.row))
            if text not in self._bits:
                parts = [to_polars(_named(term, "c"), self._schema) for term in condition.row]
                self._bits[text] = reduce(and_, parts)
            bit = 1 << list(self._bits).index(text)
        rest = None
        reads = {slot for term in condition.rest for name in columns_of(term) if (slot := slot_index(name)) is not None}
        if condition.rest:
            whole = reduce(lambda left, right: Call("and", (left, right), left.type), condition.rest)
            rest = scalar_of(whole, self._source)
        return Test(bit=bit, rest=rest, own_row=own_row, reads=tuple(sorted(reads)))

    def _source(self, name: str) -> Scalar:
        """Where a term finds a column: a slot, or a value of the row."""
        slot = slot_index(name)
        if slot is None:
            at = self.values_of(name)
            return lambda _slots, values: values[at]
        read_slot = self.slots[slot].read

        def read(states: Values, _values: Values) -> Any:
            return read_slot(states[slot])

        return read


def _row_columns(term: Term) -> list[str]:
    known = {column.name for column in SPECIALS.values()}
    return [name for name in columns_of(term) if slot_index(name) is None and name not in known]


def _named(term: Term, name: str) -> Expression:
    return expression_of(term, _NO_TREE, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One row of output: what is known of `found` at one of its nodes."""

    found: Found
    node: Node


class Output:
    """Makes frames of what was found."""

    def __init__(self, step: p.Match, pattern: Pattern, schema: Schema, forms: RowForms) -> None:
        self._step = step
        self._pattern = pattern
        self._schema = schema
        self._forms = forms
        self._names = [stage.name for stage in step.stages if not stage.negated]
        used = dict.fromkeys(name for measure in pattern.measures for name in columns_of(measure.term))
        self._slots = [index for name in used if (index := slot_index(name)) is not None]
        self._columns = list(dict.fromkeys(name for m in pattern.measures for name in _row_columns(m.term)))
        self._specials = {column.name: column.type for column in SPECIALS.values() if column.name in used}
        types: dict[str, DataType] = {f"{SLOT_PREFIX}{index}": pattern.slots[index].type for index in self._slots}
        types |= {name: schema[name] for name in self._columns} | self._specials
        self._types = Schema(tuple(types.items()))

    def matches(self, keys: pl.DataFrame, found: Sequence[Found]) -> pl.DataFrame:
        if not self._step.all_rows:
            lines = [_Line(found=match, node=match.node) for match in found]
            return self._with_measures(self._keys(keys), lines)
        lines = [_Line(found=match, node=node) for match in found for node in match.node.path()]
        whole = [self._forms.values_of(name) for name in self._schema]
        rows = [
            column_of(name, [line.node.row.values[at] for line in lines], self._schema[name])
            for name, at in zip(self._schema, whole, strict=True)
        ]
        return self._with_measures(rows, lines)

    def timeouts(self, keys: pl.DataFrame, found: Sequence[Found]) -> pl.DataFrame:
        lines = [_Line(found=one, node=one.node) for one in found]
        paths = [line.node.path() for line in lines]
        stages = [", ".join(dict.fromkeys(self._names[node.stage] for node in path)) for path in paths]
        start = column_of(MATCH_START, [path[0].row.time_us for path in paths], TIMESTAMP)
        return self._with_measures([*self._keys(keys), start, pl.Series(STAGES, stages, pl.String)], lines)

    def _keys(self, keys: pl.DataFrame) -> list[pl.Series]:
        return keys.select(self._step.keys).get_columns() if self._step.keys else []

    def _with_measures(self, columns: Sequence[pl.Series], lines: Sequence[_Line]) -> pl.DataFrame:
        found: dict[str, pl.Series] = {}
        for final in (False, True):
            asked = [measure for measure in self._pattern.measures if measure.final == final]
            if asked:
                frame = self._asked([line.found.node if final else line.node for line in lines], lines)
                out = frame.select(to_polars(_named(m.term, m.name), self._types) for m in asked)
                found |= {series.name: series for series in out.get_columns()}
        return pl.DataFrame([*columns, *(found[measure.name] for measure in self._pattern.measures)])

    def _asked(self, nodes: Sequence[Node], lines: Sequence[_Line]) -> pl.DataFrame:
        columns = []
        for index in self._slots:
            read, slot = self._forms.slots[index].read, self._pattern.slots[index]
            values = [read(node.states[index]) for node in nodes]
            columns.append(column_of(f"{SLOT_PREFIX}{index}", values, slot.type))
        for name in self._columns:
            at = self._forms.values_of(name)
            columns.append(column_of(name, [node.row.values[at] for node in nodes], self._schema[name]))
        specials: dict[str, Callable[[_Line, Node], Any]] = {
            NUMBER: lambda line, _: line.found.number or None,
            CLASSIFIER: lambda _, node: self._names[node.stage],
            DECIDED: lambda line, _: line.found.decided_us,
        }
        for name, kind in self._specials.items():
            values = [specials[name](line, node) for line, node in zip(lines, nodes, strict=True)]
            columns.append(column_of(name, values, kind))
        return pl.DataFrame(columns) if columns else pl.DataFrame({"__none": [0] * len(nodes)})


def column_of(name: str, values: list[Any], kind: DataType) -> pl.Series:
    """Plain values as a column of their type."""
    plain = pl.Series(name, values, dtype=plain_type(kind), strict=False)
    return plain if kind.name.startswith("interval") or plain.dtype == kind.polars else plain.cast(kind.polars)


def numbered(measures: Sequence[Measure]) -> bool:
    """Whether matches are numbered, so that a number per key is kept."""
    return any(NUMBER in columns_of(measure.term) for measure in measures)


NONE = -1


class _Held(msgspec.Struct, frozen=True, array_like=True):
    places: int
    matches: int
    rows: list[Row]
    nodes: list[tuple[int, int, int, int]]
    """Parent, stage, row, which ways are open."""
    candidates: list[tuple[int, int, list[tuple[int, int]]]]
    """Row, match so far, threads as node and way."""
    held: list[int]
    """Rows that are gone through again."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Held)


class _Numbers:
    """Gives rows and nodes numbers, each once, parents before children."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.nodes: list[tuple[int, int, int, int]] = []
        self._row_at: dict[int, int] = {}
        self._node_at: dict[int, int] = {}

    def row(self, row: Row) -> int:
        if row.place not in self._row_at:
            self._row_at[row.place] = len(self.rows)
            self.rows.append(row)
        return self._row_at[row.place]

    def node(self, node: Node | None) -> int:
        fresh = []
        while node is not None and id(node) not in self._node_at:
            fresh.append(node)
            node = node.parent
        at = NONE if node is None else self._node_at[id(node)]
        for part in reversed(fresh):
            self.nodes.append((at, part.stage, self.row(part.row), part.alive))
            at = self._node_at[id(part)] = len(self.nodes) - 1
        return at


def encode(matcher: Matcher) -> bytes:
    """What is held of a key."""
    numbers = _Numbers()
    begun = [
        (
            numbers.row(start.row),
            numbers.node(start.found),
            [(numbers.node(node), way.index) for node, way in start.threads],
        )
        for start in matcher.candidates
    ]
    held = [numbers.row(row) for row in matcher.held]
    return _ENCODER.encode(
        _Held(
            places=matcher.places,
            matches=matcher.matches,
            rows=numbers.rows,
            nodes=numbers.nodes,
            candidates=begun,
            held=held,
        )
    )


def decode(data: bytes, rules: Rules, transitions: Transitions) -> Matcher:
    """The key as it was when `encode` wrote it."""
    stored = _DECODER.decode(data)
    rows, nodes = stored.rows, list[Node]()
    for parent, stage, row, alive in stored.nodes:
        above = None if parent == NONE else nodes[parent]
        before = rules.automaton.initial if above is None else above.states
        states = states_with(rules.automaton.stages[stage], before, rows[row].values)
        node = Node(rules.automaton, above, stage, rows[row], states)
        node.alive = alive
        nodes.append(node)
    matcher = matcher_of(rules, transitions)
    matcher.places, matcher.matches = stored.places, stored.matches
    matcher.held = [rows[row] for row in stored.held]
    for row, found, threads in stored.candidates:
        start = Candidate(rows[row])
        start.found = None if found == NONE else nodes[found]
        start.threads = [(nodes[node], nodes[node].ways[way]) for node, way in threads]
        matcher.candidates.append(start)
    return matcher


TIMEOUT: Final = "timeout"
HELD: Final = "__held"
_DEADLINE: Final = "__deadline"
_NAN: Final = ("nan",)
"""Stands for NaN in a key, which would not be equal to itself."""

log = logging.getLogger(__name__)
Key = tuple[Any, ...]


class MatchRows(Operator):
    """Finds a pattern in the rows of each key."""

    def __init__(self, step: p.Match, stream: StreamType, *, timeouts: bool = True, state: StateBackend) -> None:
        if stream.time is None:
            raise PlanError(f"step {step.name}: a pattern needs event time, and {step.input} has none.")
        pattern = pattern_of(step, stream.schema)
        self._step = step
        self._timeouts = timeouts and step.within_us is not None
        self._forms = RowForms(step, pattern, stream.schema)
        self._rules = _rules(step, self._forms)
        self._transitions = Transitions(self._rules)
        self._output = Output(step, pattern, stream.schema, self._forms)
        self._numbered = numbered(pattern.measures)
        read = _columns_read(step, pattern, stream.schema)
        self._waiting = WaitingRows(step.keys, stream.schema, time=stream.time, read=(*step.order, *read), state=state)
        self._key_kinds = {name: stream.schema[name] for name in step.keys} or {ONE: DataType("tinyint")}
        self._table = state.table(
            self._waiting.key, schema=self._waiting.key_types | {_DEADLINE: pl.Int64(), HELD: pl.Binary()}
        )
        self._open: dict[Key, Matcher] = {}
        self._asleep: dict[Key, bytes] | None = None
        """What was loaded and not yet read back; None: not loaded yet."""
        self._changed: dict[Key, None] = {}
        self._deadlines: list[tuple[int, int, Key]] = []
        self._due: set[Key] = set()
        """The keys in `_deadlines`: each is in there once, with a deadline that is not later than its own."""
        self._pushed = 0
        self._dropped = 0

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        keep = None if self._rules.automaton.adjacent else self._forms.candidates
        return self._waiting.take(frame, late=late, keep=keep)

    def on_watermark(self, watermark_us: int) -> Emits:
        rows = self._waiting.release(watermark_us)
        found: list[tuple[Key, Found]] = []
        if rows.height:
            found += self._go_through(self._waiting.by_key(rows))
        found += self._pass_time(watermark_us)
        return list(self._emits(found))

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        keys = list(self._changed)
        self._changed = {}
        kept = [key for key in keys if self._is_kept(key)]
        if kept:
            self._table.put(
                self._keys(kept).with_columns(
                    pl.Series(_DEADLINE, [self._open[key].deadline_us for key in kept], dtype=pl.Int64),
                    pl.Series(HELD, [encode(self._open[key]) for key in kept], dtype=pl.Binary),
                )
            )
        gone = [key for key in keys if not self._is_kept(key)]
        if gone:
            self._table.delete(self._keys(gone))
        return []

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state, "open": self._table}

    def _is_kept(self, key: Key) -> bool:
        matcher = self._open.get(key)
        return matcher is not None and bool(matcher.candidates or (self._numbered and matcher.matches))

    def _go_through(self, keyed: KeyedRows) -> Iterator[tuple[Key, Found]]:
        adjacent = self._rules.automaton.adjacent
        # Where rows need not be adjacent, none but candidates were let wait.
        picked = _picked(keyed, self._forms.candidates if adjacent else None)
        firsts = np.cumsum(keyed.counts) - keyed.counts
        places = picked - np.repeat(firsts, keyed.counts)[picked]
        key_numbers = keyed.key_numbers()[picked]
        rows = keyed.rows[keyed.by_key[picked]]
        every_time, times = self._waiting.times(keyed.rows), self._waiting.times(rows).tolist()
        forms = rows.select(self._forms.bits, *self._forms.columns).rows()
        starts, ends = _spans(key_numbers, keyed.counts.size)
        keys = self._key_tuples(keyed.keys)
        role = self._rules.automaton.role
        for number, key in enumerate(keys):
            start, end = starts[number], ends[number]
            matcher = self._matcher(key)
            if matcher is None:
                start = next((at for at in range(start, end) if role(forms[at][0])[0]), end)
            if start == end and not (adjacent and matcher is not None and matcher.candidates):
                continue
            if matcher is None:
                matcher = self._open[key] = matcher_of(self._rules, self._transitions)
            base, first = matcher.places, int(firsts[number])
            taken = [
                Row(base + place, time_us, form[0], form[1:])
                for place, time_us, form in zip(
                    places[start:end].tolist(), times[start:end], forms[start:end], strict=True
                )
            ]

            def time_at(place: int, base: int = base, first: int = first) -> int:
                return int(every_time[keyed.by_key[first + place - base]])

            walk(matcher, taken, base + int(keyed.counts[number]), time_at, adjacent=adjacent)
            yield from self._after(key, matcher)

    def _pass_time(self, watermark_us: int) -> Iterator[tuple[Key, Found]]:
        """Give up what is too old; at the end, everything."""
        asleep = self._wake()
        while self._deadlines and self._deadlines[0][0] <= watermark_us:
            key = heapq.heappop(self._deadlines)[2]
            self._due.discard(key)
            if (matcher := self._matcher(key)) is not None:
                matcher.pass_time(watermark_us)
                yield from self._after(key, matcher)
        if watermark_us == TIME_MAX_US:
            for key in [*self._open, *asleep]:
                if (matcher := self._matcher(key)) is not None and matcher.candidates:
                    matcher.end()
                    yield from self._after(key, matcher)

    def _after(self, key: Key, matcher: Matcher) -> Iterator[tuple[Key, Found]]:
        """What a matcher found, once it has gone through rows or time."""
        found, matcher.found = matcher.found, []
        if matcher.dropped:
            self._log_dropped(matcher)
        self._changed[key] = None
        deadline_us = matcher.deadline_us
        if deadline_us is not None and key not in self._due:
            self._pushed += 1
            self._due.add(key)
            heapq.heappush(self._deadlines, (deadline_us, self._pushed, key))
        if not self._is_kept(key):
            self._open.pop(key, None)
        for one in found:
            yield key, one

    def _matcher(self, key: Key) -> Matcher | None:
        found = self._open.get(key)
        if found is None and (held := self._wake().pop(key, None)) is not None:
            found = self._open[key] = decode(held, self._rules, self._transitions)
        return found

    def _wake(self) -> dict[Key, bytes]:
        """What was loaded and not yet read back."""
        if self._asleep is None:
            loaded = self._table.scan() if len(self._table) else None
            self._asleep = {}
            if loaded is not None:
                keys = self._key_tuples(loaded.select(self._waiting.key))
                self._asleep = dict(zip(keys, loaded.get_column(HELD).to_list(), strict=True))
                due = zip(loaded.get_column(_DEADLINE).to_list(), range(len(keys)), keys, strict=True)
                self._deadlines = [entry for entry in due if entry[0] is not None]
                self._due = {key for _, _, key in self._deadlines}
                heapq.heapify(self._deadlines)
                self._pushed = len(keys)
        return self._asleep

    def _key_tuples(self, keys: pl.DataFrame) -> list[Key]:
        """Keys in plain form, equal where they are one key."""
        plain = keys.select(as_plain(pl.col(name), kind) for name, kind in self._key_kinds.items())
        found = plain.rows()
        if not any(kind.is_float for kind in self._key_kinds.values()):
            return found
        return [tuple(map(_one_of_its_kind, key)) for key in found]

    def _keys(self, keys: Sequence[Key]) -> pl.DataFrame:
        columns = {}
        for at, (name, kind) in enumerate(self._key_kinds.items()):
            columns[name] = column_of(name, [float("nan") if key[at] == _NAN else key[at] for key in keys], kind)
        return pl.DataFrame(columns)

    def _emits(self, found: Sequence[tuple[Key, Found]]) -> Iterator[Emit]:
        matches = [(key, one) for key, one in found if not one.timed_out]
        timed_out = [(key, one) for key, one in found if one.timed_out]
        for make, port, some in ((self._output.matches, "main", matches), (self._output.timeouts, TIMEOUT, timed_out)):
            if some and (port != TIMEOUT or self._timeouts):
                yield Emit(make(self._keys([key for key, _ in some]), [one for _, one in some]), port=port)

    def _log_dropped(self, matcher: Matcher) -> None:
        first, self._dropped = self._dropped == 0, self._dropped + matcher.dropped
        matcher.dropped = 0
        if first:
            log.warning(
                "pattern candidates dropped",
                extra={"step": self._step.name, "pattern": self._step.pattern, "limit": self._step.partial_matches_max},
            )


class MatchFamily(Family[p.Match]):
    """Sequences of rows of a key that fulfil one condition after another."""

    steps = (p.Match,)
    stays = "the pattern {step} takes rows in order of time, over all nodes"

    def check(self, step: p.Match, types: Types) -> Derived:
        return derive_match(step, types)

    def make(self, step: p.Match, context: OperatorContext) -> Operator:
        timeouts = any(stream.port == TIMEOUT for _, stream in context.plan.consumers(step.name))
        return MatchRows(step, context.types[step.input], timeouts=timeouts, state=context.state)

    def title(self, step: p.Match) -> str:
        return f"pattern {step.pattern} {keys_text(step.keys)}"

    def describe(self, step: p.Match, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        stages = ", ".join(_stage(stage, first=at == 0) for at, stage in enumerate(step.stages))
        yield "looks for", stages + ("" if step.within_us is None else f", within {human_us(step.within_us)}")
        skip = _SKIP.get(step.skip, f"goes on at the {step.skip} row of {step.skip_to}")
        chosen = "; of one first row, as SQL prefers" if step.choose == "preferred" else ""
        yield "matches", ("all their rows; " if step.all_rows else "one row each; ") + skip + chosen
        if step.measures:
            yield "computes", ", ".join(step.measures)
        yield from stream_details(step, types)
        most = f"open candidates, at most {step.partial_matches_max:,} per key"
        ends = "for as long as it takes" if step.within_us is None else f"for {human_us(step.within_us)}"
        yield "keeps", f"the rows that wait for time, and {most}, {ends}"


_FOLLOWS = {"next": "next ", "then": "then ", "any": "then any "}
_REPEATS = {"next": ", consecutive", "then": "", "any": ", in all combinations"}
_SKIP = {
    "none": "all matches count",
    "next": "goes on after the first row of a match",
    "past_last": "goes on after the last row of a match",
}


def _stage(stage: p.Stage, *, first: bool) -> str:
    lead = "" if first else _FOLLOWS[stage.follows]
    condition = "" if stage.predicate is None else f" ({stage.predicate})"
    if stage.negated:
        return f"{'not next' if stage.follows == 'next' else 'without'} {stage.name}{condition}"
    options = "" if stage.times_max == 1 else f" {_times(stage)}{_REPEATS[stage.repeats]}"
    options += ", optional" if stage.optional else ""
    options += "" if stage.quantifier == "each" else f", {stage.quantifier}"
    until = "" if stage.until is None else f" until {stage.until}"
    return f"{lead}{stage.name}{options}{condition}{until}"


def _times(stage: p.Stage) -> str:
    if stage.times_max is None:
        return f"{stage.times_min} or more times"
    if stage.times_min == stage.times_max:
        return f"{stage.times_min} times"
    return f"{stage.times_min} to {stage.times_max} times"


def _rules(step: p.Match, forms: RowForms) -> Rules:
    names = [stage.name for stage in step.stages if not stage.negated]
    return Rules(
        automaton=compile_pattern(step, forms.tests, forms.untils, forms.slots),
        within_us=step.within_us,
        skip=step.skip,
        skip_to=None if step.skip_to is None else names.index(step.skip_to),
        preferred=step.choose == "preferred",
        threads_max=step.partial_matches_max,
    )


def _columns_read(step: p.Match, pattern: Pattern, schema: Schema) -> list[str]:
    conditions = [*pattern.conditions, *(until for until in pattern.untils if until is not None)]
    terms = [term for condition in conditions for term in (*condition.row, *condition.rest)]
    terms += [slot.argument for slot in pattern.slots if slot.argument is not None]
    terms += [measure.term for measure in pattern.measures]
    read = {name for term in terms for name in columns_of(term)}
    return [name for name in schema if name in read and name not in step.order]


def _picked(keyed: KeyedRows, candidates: pl.Expr | None) -> Numbers:
    if candidates is None:
        return np.arange(keyed.by_key.size)
    fulfil = keyed.rows.select(candidates.alias("fulfil")).to_series().to_numpy()
    return np.flatnonzero(fulfil[keyed.by_key])


def _spans(key_numbers: Numbers, keys: int) -> tuple[list[int], list[int]]:
    every = np.arange(keys)
    return np.searchsorted(key_numbers, every, "left").tolist(), np.searchsorted(key_numbers, every, "right").tolist()


def _one_of_its_kind(value: Any) -> Any:
    """A part of a key, the same for both zeros and for every NaN."""
    if not isinstance(value, float):
        return value
    return _NAN if value != value else value + 0.0  # noqa: PLR0124 - only NaN differs from itself
