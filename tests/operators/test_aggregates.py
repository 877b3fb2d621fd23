"""Aggregates: whatever the batches and the order of merging, results are those of all the rows, worked out in plain Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from random import Random
from typing import Any, ClassVar

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples

from fordstone.errors import ExpressionError, PlanError
from fordstone.lang.aggregates import AGGREGATES, parse_aggregate, user_aggregate
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.part import COUNT, WIDE_SUM, Values
from fordstone.operators.aggregate.partial import KINDS, Partials
from fordstone.operators.aggregate.user import Aggregator
from fordstone.plan.stream_type import EventTime

SCHEMA = Schema.of(
    {"k": "int", "ts": "timestamp", "x": "double", "n": "bigint", "d": "decimal(38,2)", "s": "string", "ok": "boolean",
     "raw": "binary", "day": "date"}
)  # fmt: skip
START = datetime(1969, 12, 31, 23, 59, 58, tzinfo=UTC)
NAN, INF = math.nan, math.inf
Row = dict[str, Any]

FLOATS = st.sampled_from([None, NAN, INF, -INF, 0.0, -0.0, 1.5, -2.25, 1e150, 5e-324]) | st.floats(-1e6, 1e6)
TAME = st.none() | st.floats(-1e6, 1e6)


def rows_of(x: st.SearchStrategy[float | None] = FLOATS) -> st.SearchStrategy[list[Row]]:
    return st.lists(
        st.fixed_dictionaries(
            {
                "k": st.integers(0, 2),
                "ts": st.integers(0, 4).map(lambda seconds: START + timedelta(seconds=seconds)),
                "x": x,
                "n": st.none() | st.integers(-(2**63), 2**63 - 1),
                "d": st.none() | st.decimals(-(10**35), 10**35, places=2),
                "s": st.none() | st.sampled_from(["", "a", "é", "e\u0301", "日本", "\U0001f600"]),
                "ok": st.none() | st.booleans(),
                "raw": st.none() | st.binary(max_size=2),
                "day": st.none() | st.dates(),
            }
        ),
        min_size=1,
        max_size=25,
    )


def frame_of(rows: list[Row]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA.polars, orient="row")


def partials_of(texts: Mapping[str, str]) -> Partials:
    aggregates = [parse_aggregate(text, SCHEMA, name) for name, text in texts.items()]
    return Partials(["k"], aggregates, SCHEMA, time=EventTime(column="ts"))


def merged_at_random(partials: Partials, rows: list[Row], seed: int) -> pl.DataFrame:
    """The result by way of batches of any size, made in either way and merged in any order and grouping."""
    rng, pieces = Random(seed), []
    shuffled = rng.sample(rows, len(rows))
    while shuffled:
        size = rng.randint(1, len(shuffled))
        batch, shuffled = frame_of(shuffled[:size]), shuffled[size:]
        pieces.append(rng.choice((partials.of_rows, partials.of_rows_unmerged))(batch))
    while len(pieces) > 1:
        rng.shuffle(pieces)
        count = rng.randint(2, len(pieces))
        pieces = [*pieces[count:], partials.merge(pl.concat(pieces[:count]))]
    assert dict(pieces[0].schema) == dict(partials.schema)
    return partials.finish(partials.merge(pieces[0]))


def results(partials: Partials, rows: list[Row], seed: int) -> dict[int, Row]:
    return {row["k"]: row for row in merged_at_random(partials, rows, seed).to_dicts()}


def by_key(rows: list[Row]) -> dict[int, list[Row]]:
    return {key: [row for row in rows if row["k"] == key] for key in {row["k"] for row in rows}}


def place(value: Any) -> tuple[Any, ...]:
    """Where a value stands: null, numbers with -0.0 before 0.0, NaN."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (2,) if math.isnan(value) else (1, value, math.copysign(1, value))
    return (1, value)


def shown(value: Any) -> Any:
    """A value that compares as equal only with the same: NaN with itself, and zeros by sign."""
    if isinstance(value, list):
        return [shown(each) for each in value]
    return repr(value.timestamp() if isinstance(value, datetime) else value)


@examples(80)
@given(rows=rows_of(), seed=st.integers(0, 2**32))
def test_first_last_and_collect_are_those_of_rows_in_order_of_time_and_value(rows: list[Row], seed: int) -> None:
    columns = ("x", "n", "d", "s", "ok", "raw", "day", "ts")
    calls = ("first", "last", "collect")
    found = results(
        partials_of({f"{call}_{name}": f"{call}({name})" for call in calls for name in columns}), rows, seed
    )
    for key, mine in by_key(rows).items():
        for name in columns:
            ordered = [row[name] for row in sorted(mine, key=lambda row: (row["ts"], place(row[name])))]
            wanted = {
                "first": ordered[0],
                "last": ordered[-1],
                "collect": [each for each in ordered if each is not None],
            }
            for call in calls:
                assert shown(found[key][f"{call}_{name}"]) == shown(wanted[call]), (call, name)


@examples(80)
@given(rows=rows_of(TAME), seed=st.integers(0, 2**32), offset=st.sampled_from([0.0, 1e6, -1e9]))
def test_variances_are_those_of_all_values_within_rounding(rows: list[Row], seed: int, offset: float) -> None:
    rows = [row | {"x": None if row["x"] is None else row["x"] + offset} for row in rows]
    calls = ("var_samp", "var_pop", "stddev_samp", "stddev_pop")
    found = results(partials_of({call: f"{call}(x)" for call in calls}), rows, seed)
    for key, mine in by_key(rows).items():
        values = [row["x"] for row in mine if row["x"] is not None]
        whole = statistics.pvariance(values) if values else None
        sample = statistics.variance(values) if len(values) > 1 else None
        # What doubles of this size can tell apart.
        absolute = 1e-12 + (1e-15 * (abs(offset) + 1e6)) ** 2 * len(values)
        for call, wanted in (("var_pop", whole), ("var_samp", sample)):
            assert found[key][call] == (None if wanted is None else pytest.approx(wanted, rel=1e-9, abs=absolute))
        for call, wanted in (("stddev_pop", whole), ("stddev_samp", sample)):
            root = None if wanted is None else math.sqrt(wanted)
            assert found[key][call] == (
                None if root is None else pytest.approx(root, rel=1e-9, abs=math.sqrt(absolute))
            )


@pytest.mark.parametrize("values", [[NAN], [1.0, NAN], [INF, 1.0], [INF], [INF, -INF], [NAN, None]])
def test_the_variance_with_nan_or_infinity_in_it_is_nan(values: list[float | None]) -> None:
    rows = [dict.fromkeys(SCHEMA) | {"k": 1, "ts": START, "x": value} for value in values]
    for seed in range(5):
        found = results(partials_of({"v": "var_pop(x)"}), rows, seed)
        assert math.isnan(found[1]["v"])


@examples(60)
@given(rows=rows_of(), seed=st.integers(0, 2**32))
def test_few_different_values_are_counted_exactly(rows: list[Row], seed: int) -> None:
    columns = ("x", "n", "d", "s", "ok", "raw", "day", "ts")
    found = results(
        partials_of(
            {name: f"count_distinct({name})" for name in columns if name != "ts"} | {"at": "count_distinct(ts)"}
        ),
        rows,
        seed,
    )
    for key, mine in by_key(rows).items():
        for name in columns:
            different = {
                "nan" if place(value) == (2,) else value for value in (row[name] for row in mine) if value is not None
            }
            assert found[key]["at" if name == "ts" else name] == len(different), name


@examples(60)
@given(rows=rows_of(), seed=st.integers(0, 2**32), q=st.sampled_from(["0", "0.07", "0.25", "0.5", "0.95", "1"]))
def test_quantiles_of_few_values_are_exact(rows: list[Row], seed: int, q: str) -> None:
    found = results(partials_of({"q": f"quantile(x, {q})", "m": "median(x)", "n": f"quantile(n, {q})"}), rows, seed)
    for key, mine in by_key(rows).items():
        for column, share, name in (("x", Decimal(q), "q"), ("x", Decimal("0.5"), "m"), ("n", Decimal(q), "n")):
            values = sorted(
                float(row[column]) for row in mine if row[column] is not None and row[column] == row[column]
            )
            wanted = values[max(math.ceil(share * len(values)), 1) - 1] + 0.0 if values else None
            assert shown(found[key][name]) == shown(wanted), (name, values)


@examples(40)
@given(rows=rows_of(TAME), seed=st.integers(0, 2**32))
@example(rows=[dict.fromkeys(SCHEMA) | {"k": 0, "ts": START}], seed=0)
def test_what_was_there_before_still_means_the_same(rows: list[Row], seed: int) -> None:
    texts = {"c": "count(*)", "n": "count(x)", "lo": "min(x)", "hi": "max(s)", "d": "sum(d)", "i": "sum(n)"}
    found = results(partials_of(texts), rows, seed)
    for key, mine in by_key(rows).items():
        seen: Callable[[str], list[Any]] = lambda name, mine=mine: [row[name] for row in mine if row[name] is not None]  # type: ignore[misc]  # noqa: E731 - short
        assert (found[key]["c"], found[key]["n"]) == (len(mine), len(seen("x")))
        assert found[key]["lo"] == (min(seen("x")) if seen("x") else None)
        assert found[key]["hi"] == (max(seen("s"), key=lambda text: text.encode()) if seen("s") else None)
        with localcontext(prec=60):
            assert found[key]["d"] == (sum(seen("d")) if seen("d") else None)
        wrapped = (sum(seen("n")) + 2**63) % 2**64 - 2**63
        assert found[key]["i"] == (wrapped if seen("n") else None)


def test_every_aggregate_of_the_table_is_kept_and_none_beside() -> None:
    assert set(KINDS) == set(AGGREGATES)


def calls_that_are_taken() -> list[str]:
    found = []
    for function in AGGREGATES.values():
        options = "".join(", 0.5" for option in function.options if option.default is None)
        for column in ("x", "n", "d", "ok"):
            with suppress(ExpressionError):  # it does not take this type
                found.append(parse_aggregate(f"{function.name}({column}{options})", SCHEMA).sql)
    return found


@pytest.mark.parametrize("text", calls_that_are_taken())
def test_the_table_says_of_each_aggregate_whether_its_parts_subtract(text: str) -> None:
    (call,) = parse_aggregate(text, SCHEMA).calls
    partials = partials_of({"r": text})
    assert call.argument is not None
    assert call.declared is not None
    exact = call.argument.type.is_integer or call.argument.type.name == "decimal"
    assert partials.invertible is {"always": True, "exact": exact, "never": False}[call.declared.invertible]


def test_parts_that_are_invertible_give_rows_back_exactly() -> None:
    partials = partials_of({"c": "count(x)", "s": "sum(n)", "d": "sum(CAST(d AS DECIMAL(27,2)))"})
    assert partials.invertible
    rng = Random(1)
    rows = [
        dict.fromkeys(SCHEMA) | {"k": 1, "ts": START, "n": rng.randint(-(2**62), 2**62), "d": Decimal(rng.randint(0, 10**26)) / 100, "x": 0.1}
        for _ in range(20)
    ]  # fmt: skip
    whole, left = partials.of_rows(frame_of(rows)), partials.of_rows(frame_of(rows[:7]))
    rest = partials.of_rows(frame_of(rows[7:]))
    columns = partials.value_columns()
    assert [(whole[name] - left[name]).to_list() for name in columns] == [rest[name].to_list() for name in columns]


class WeightedMean(Aggregator):
    """The mean of values by weight."""

    state: ClassVar = {"total": "double", "weight": "double", "seen": "array<string>"}
    init: ClassVar = {"total": 0.0, "weight": 0.0}
    result = "double"

    def add(self, *values: pl.Expr) -> Mapping[str, pl.Expr]:
        value, weight, text = values
        both = value.is_not_null() & weight.is_not_null()
        return {
            "total": (value * weight).sum(),
            "weight": weight.filter(both).sum(),
            "seen": text.drop_nulls().unique().sort(),
        }

    def merge(self, *state: pl.Expr) -> Mapping[str, pl.Expr]:
        total, weight, seen = state
        return {"total": total.sum(), "weight": weight.sum(), "seen": seen.explode().drop_nulls().unique().sort()}

    def finish(self, *state: pl.Expr) -> pl.Expr:
        total, weight, seen = state
        return pl.when(weight > 0).then(total / weight) + seen.list.len()


def own(aggregator: type[Aggregator], *arguments: str, plan_state: Mapping[str, str] | None = None) -> Partials:
    state = tuple((name, DataType.parse(kind)) for name, kind in (plan_state or aggregator.state).items())
    made = user_aggregate("r", "mine:A", arguments, SCHEMA, kind=DataType.parse(aggregator.result), state=state)
    return Partials(["k"], [made], SCHEMA, time=EventTime(column="ts"), functions={"mine:A": aggregator})


@examples(40)
@given(rows=rows_of(st.none() | st.floats(0, 100)), seed=st.integers(0, 2**32))
def test_a_users_own_aggregate_merges_in_any_order(rows: list[Row], seed: int) -> None:
    found = results(own(WeightedMean, "x", "CASE WHEN ok THEN 2 ELSE 1 END", "s"), rows, seed)
    for key, mine in by_key(rows).items():
        pairs = [(row["x"], 2 if row["ok"] else 1) for row in mine if row["x"] is not None]
        texts = len({row["s"] for row in mine if row["s"] is not None})
        wanted = sum(x * w for x, w in pairs) / sum(w for _, w in pairs) + texts if pairs else None
        assert found[key]["r"] == (None if wanted is None else pytest.approx(wanted))


def test_the_class_of_an_own_aggregate_is_not_looked_up_before_there_are_rows() -> None:
    state = (("total", DataType("double")),)
    made = user_aggregate("r", "nowhere.to.be:Found", ["x"], SCHEMA, kind=DataType("double"), state=state)
    partials = Partials(["k"], [made], SCHEMA, time=EventTime(column="ts"))
    assert partials.schema["__u0_nowhere.to.be:Found_total"] == pl.Float64
    with pytest.raises(PlanError, match="cannot be imported"):
        partials.of_rows(frame_of([dict.fromkeys(SCHEMA) | {"k": 1, "ts": START}]))


def test_an_own_aggregate_that_changed_since_the_plan_was_made_is_refused() -> None:
    partials = own(WeightedMean, "x", "x", "s", plan_state={"total": "bigint"})
    with pytest.raises(PlanError, match="total bigint in the plan"):
        partials.of_rows(frame_of([dict.fromkeys(SCHEMA) | {"k": 1, "ts": START}]))


class Forgetful(WeightedMean):
    """Leaves a column out."""

    def add(self, *values: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"total": values[0].sum()}


def test_an_own_aggregate_must_give_every_state_column() -> None:
    with pytest.raises(
        PlanError, match=r"add gives an expression for each column of state \(seen, total, weight\), but gave total"
    ):
        own(Forgetful, "x", "x", "s").of_rows(frame_of([dict.fromkeys(SCHEMA) | {"k": 1, "ts": START}]))


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]])
def test_the_least_and_the_greatest_have_no_negative_zero_whichever_zero_came_first(zeros):
    partials = partials_of({"lo": "min(x)", "hi": "max(x)"})
    rows = [dict.fromkeys(SCHEMA) | {"k": 1, "ts": START, "x": x} for x in zeros]
    found = partials.finish(partials.merge(pl.concat([partials.of_rows(frame_of([row])) for row in rows])))
    assert [math.copysign(1, found.row(0, named=True)[name]) for name in ("lo", "hi")] == [1, 1]


def test_sums_of_decimals_beyond_38_digits_are_null_however_they_are_cut_and_come_back():
    """Two equal partial sums of more than 38 digits made Polars panic."""
    big = Decimal(6) * 10**37
    call = parse_aggregate("sum(d)", Schema.of({"d": "decimal(38,0)"}), "s").calls[0]
    values = Values(index=0, names=("d",), types=(DataType.parse("decimal(38,0)"),), time=None)

    def partials(*rows: Decimal | None) -> pl.DataFrame:
        frame = pl.DataFrame({"k": [1] * len(rows), "d": rows}, schema={"k": pl.Int64, "d": pl.Decimal(38, 0)})
        return frame.group_by("k").agg(expr for part in (COUNT, WIDE_SUM) for expr in part.of_rows(values, frame))

    def total(*parts: pl.DataFrame) -> Decimal | None:
        frame = pl.concat(parts)
        merged = frame.group_by("k").agg(expr for part in (COUNT, WIDE_SUM) for expr in part.merged(values, frame))
        found: Decimal | None = merged.select(KINDS["sum"].result(call, values)).item()
        return found

    over, under = partials(big, big), partials(-big, -big)
    assert total(over, over) is None
    assert total(over, partials(-big)) == big
    assert total(over, over, under, under) == 0
    assert total(under, partials(Decimal(10) ** 37 * 3)) == -9 * Decimal(10) ** 37
    assert total(partials(None)) is None
    most = Decimal("9" * 38)
    assert total(partials(most)) == most
    assert total(partials(most), partials(Decimal(1))) is None
    least = most.copy_negate()
    assert total(partials(least), partials(Decimal(-1)), partials(Decimal(1))) == least
