"""The table against a dict: contract, random histories, and what it promises about cost."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.examples import examples

from fordstone.lang.duration import TIME_MIN_US
from fordstone.state.base import FOUND, Piece, RunRef, State, Table
from fordstone.state.table import DELETED, MemoryTable
from fordstone.testing.contracts.state import Shelf, StateContract, same_rows

SCHEMA: dict[str, pl.DataType] = {"k": pl.String(), "n": pl.Int64(), "note": pl.String()}


def table() -> MemoryTable:
    return MemoryTable(["k"], schema=SCHEMA)


def rows(*items: tuple[str | None, int | None, str | None]) -> pl.DataFrame:
    return pl.DataFrame(list(items), schema=SCHEMA, orient="row")


def keys(*names: str | None) -> pl.DataFrame:
    return pl.DataFrame({"k": pl.Series(names, dtype=pl.String)})


class TestTable(StateContract):
    """The contract, with rows that are set, set again and deleted."""

    def make(self) -> State:
        return table()

    def change(self, state: State, step: int) -> None:
        assert isinstance(state, Table)
        state.put(
            rows(*((f"key {number}", number * step, f"step {step}") for number in range(step * 3, step * 3 + 30)))
        )
        state.delete(keys(*(f"key {number}" for number in range(step * 5, step * 5 + 4))))
        if step % 3 == 2:
            state.put(rows((f"key {step * 5}", -1, None)))

    def rows(self, state: State) -> pl.DataFrame:
        assert isinstance(state, Table)
        return state.scan()


class TestTableOfNumbers(TestTable):
    """The contract on a table large beside its changes, so that pieces add up."""

    def change(self, state: State, step: int) -> None:
        assert isinstance(state, Table)
        if step == 0:
            state.put(rows(*((f"key {number}", number, None) for number in range(500))))
        state.put(rows(*((f"key {number}", -number * step, "again") for number in range(step * 7, step * 7 + 10))))
        state.delete(keys(*(f"key {number}" for number in range(step * 7 - 5, step * 7 + 2))))


ANY: dict[str, tuple[pl.DataType, st.SearchStrategy[object]]] = {
    "flag": (pl.Boolean(), st.booleans()),
    "small": (pl.Int8(), st.integers(-128, 127)),
    "count": (pl.UInt32(), st.integers(0, 2**32 - 1)),
    "n": (pl.Int64(), st.integers(-(2**63), 2**63 - 1)),
    "single": (pl.Float32(), st.floats(width=32)),
    "x": (pl.Float64(), st.floats()),
    "day": (pl.Date(), st.dates()),
    "at": (pl.Datetime("us", "UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    "text": (pl.String(), st.text(max_size=20)),
    "bytes": (pl.Binary(), st.binary(max_size=20)),
    "money": (pl.Decimal(10, 2), st.integers(-(10**9), 10**9).map(lambda cents: Decimal(cents).scaleb(-2))),
    "tags": (pl.List(pl.Int64()), st.lists(st.none() | st.integers(0, 9), max_size=3)),
    "nothing": (pl.Null(), st.none()),
}
KEYS: dict[str, tuple[pl.DataType, st.SearchStrategy[object]]] = {
    "k": (pl.Int64(), st.integers(0, 5)),
    "s": (pl.String(), st.sampled_from(["", "a", "a key of more than twelve bytes"])),
    "f": (pl.Float64(), st.sampled_from([0.0, -0.0, math.nan, 2.5])),
}


MakeTable = Callable[..., Table]


def plain(value: object) -> object:
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


class Model:
    """A table beside a dict, with a disk to crash back to."""

    def __init__(self, key: list[str], schema: dict[str, pl.DataType], make: MakeTable) -> None:
        self.key, self.schema = key, schema
        self.make = make
        self.shelf = Shelf()
        self.table = make(key, schema=schema)
        self.held: dict[tuple[object, ...], dict[str, object]] = {}
        self.refs: tuple[RunRef, ...] = ()
        self.saved: dict[tuple[object, ...], dict[str, object]] = {}

    def name(self, row: dict[str, object]) -> tuple[object, ...]:
        return tuple(plain(row[column]) for column in self.key)

    def frame(self, given: list[dict[str, object]], columns: list[str]) -> pl.DataFrame:
        return pl.DataFrame(
            {
                column: pl.Series([row[column] for row in given], dtype=self.schema[column], strict=False)
                for column in columns
            }
        )

    def commit(self) -> None:
        self.refs = self.shelf.write(self.table.freeze())
        self.saved = dict(self.held)

    def crash(self) -> None:
        self.table = self.make(self.key, schema=self.schema)
        self.table.load(self.shelf.pieces(self.refs), watermark_us=TIME_MIN_US)
        self.held = dict(self.saved)

    def rescale(self, parallelism: int) -> None:
        """Through that many subtasks and back."""
        self.commit()
        fresh: list[Piece] = []
        for subtask in range(parallelism):
            part = self.make(self.key, schema=self.schema)
            part.load(self.shelf.owned(self.refs, self.key, subtask, parallelism), watermark_us=TIME_MIN_US)
            fresh += self.shelf.pieces(self.shelf.write(part.freeze()))
        self.table = self.make(self.key, schema=self.schema)
        self.table.load(fresh, watermark_us=TIME_MIN_US)

    def merge(self, start: float, stop: float) -> None:
        pieces = self.table.freeze()
        first, last = sorted((int(start * len(pieces)), int(stop * len(pieces))))
        if first < last:
            self.shelf.merge(self.table, pieces[first:last])

    def check(self) -> None:
        got = self.table.scan()
        assert len(self.table) == got.height == len(self.held)
        same_rows(got, self.frame(list(self.held.values()), list(self.schema)))


@examples(150)
@given(st.data())
def test_any_history_of_a_table_is_that_of_a_dict(data: st.DataObject) -> None:
    check_any_history(data, MemoryTable)


def check_any_history(data: st.DataObject, make: MakeTable) -> None:
    key = data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=2, unique=True), label="key")
    values = data.draw(st.lists(st.sampled_from(sorted(set(ANY) - set(key))), max_size=3, unique=True), label="values")
    columns = {**{name: KEYS[name] for name in key}, **{name: ANY[name] for name in values}}
    model = Model(key, {name: dtype for name, (dtype, _) in columns.items()}, make)
    row = st.fixed_dictionaries({name: st.none() | strategy for name, (_, strategy) in columns.items()})
    for _ in range(data.draw(st.integers(1, 10), label="calls")):
        action = data.draw(
            st.sampled_from(["put", "put", "delete", "commit", "give up", "merge", "crash", "rescale", "get"])
        )
        if action == "put":
            batch = data.draw(st.lists(row, max_size=6, unique_by=model.name), label="rows")
            model.table.put(model.frame(batch, list(columns)))
            for one in batch:
                # The key keeps the form it was first put in: 0.0 for -0.0.
                stored = {
                    name: 0.0 if name in key and value == 0.0 and isinstance(value, float) else value
                    for name, value in one.items()
                }
                model.held[model.name(one)] = stored
        elif action in {"delete", "get"}:
            batch = data.draw(st.lists(row, max_size=6), label="keys")
            asked = model.frame(batch, key)
            if action == "delete":
                model.table.delete(asked)
                for one in batch:
                    model.held.pop(model.name(one), None)
            else:
                got = model.table.get(asked)
                assert got.get_column(FOUND).to_list() == [model.name(one) in model.held for one in batch]
                assert_frame_equal(got.select(key), asked)
                empty = dict.fromkeys(values)
                wanted = [model.held.get(model.name(one), empty) for one in batch]
                assert_frame_equal(got.select(values), model.frame(wanted, values), check_exact=True)
        elif action == "commit":
            model.commit()
        elif action == "give up":
            model.table.freeze()
        elif action == "crash":
            model.crash()
        elif action == "rescale":
            model.rescale(data.draw(st.integers(1, 4)))
        else:
            model.merge(data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1)))
        model.check()
    model.commit()
    model.crash()
    model.check()


def test_get_gives_nulls_and_found_in_the_order_of_the_keys() -> None:
    state = table()
    state.put(rows(("a", 1, "x"), ("b", None, None), (None, 3, "null is a key")))
    got = state.get(keys("b", "zz", None, "a", "a"))
    assert got.columns == ["k", "n", "note", FOUND]
    assert got.rows() == [
        ("b", None, None, True),
        ("zz", None, None, False),
        (None, 3, "null is a key", True),
        ("a", 1, "x", True),
        ("a", 1, "x", True),
    ]


def test_an_empty_table_knows_its_columns() -> None:
    state = table()
    assert state.scan().schema == pl.Schema(SCHEMA)
    assert state.get(keys("a")).rows() == [("a", None, None, False)]
    state.delete(keys("a"))
    assert state.freeze() == ()


def test_a_piece_holds_only_what_changed() -> None:
    state = table()
    state.put(rows(*((f"{number}", number, None) for number in range(100))))
    state.freeze()
    state.put(rows(("7", -7, "new"), ("8", -8, "new")))
    state.delete(keys("9", "not there"))
    piece = state.freeze()[-1].frame()
    assert sorted(piece.select("k", "n", DELETED).rows()) == [("7", -7, False), ("8", -8, False), ("9", None, True)]


def test_a_key_that_was_never_frozen_leaves_no_tombstone() -> None:
    state = table()
    state.put(rows(*((f"{number}", number, None) for number in range(100))))
    before = state.freeze()
    state.put(rows(("short-lived", 1, None)))
    state.delete(keys("short-lived"))
    assert state.freeze() == before


def test_a_key_that_is_deleted_put_and_deleted_again_stays_deleted() -> None:
    shelf = Shelf()
    state = table()
    state.put(rows(*((f"{number}", number, None) for number in range(100))))
    state.freeze()
    state.delete(keys("5"))
    state.put(rows(("5", 55, None)))
    state.delete(keys("5"))
    again = table()
    again.load(shelf.pieces(shelf.write(state.freeze())), watermark_us=TIME_MIN_US)
    assert again.get(keys("5")).get_column(FOUND).to_list() == [False]
    assert len(again) == 99


def test_a_tombstone_is_kept_until_the_oldest_piece_is_merged_in() -> None:
    state = table()
    state.put(rows(*((f"{number}", number, None) for number in range(10))))
    state.freeze()
    state.delete(keys("3"))
    oldest, newest = (piece.frame() for piece in state.freeze())
    assert state.combine([newest], oldest=False).filter(DELETED).get_column("k").to_list() == ["3"]
    everything = state.combine([oldest, newest], oldest=True)
    assert everything.height == 9
    assert not everything.get_column(DELETED).any()


def test_of_the_rows_of_a_key_the_newest_piece_has_the_last_word() -> None:
    state = table()
    old = rows(("a", 1, None), ("b", 1, None)).with_columns(pl.lit(False).alias(DELETED))
    new = rows(("a", 2, None)).with_columns(pl.lit(False).alias(DELETED))
    assert sorted(state.combine([old, new], oldest=True).select("k", "n").rows()) == [("a", 2), ("b", 1)]


def test_a_table_that_is_rewritten_every_epoch_is_one_piece() -> None:
    state = table()
    for epoch in range(5):
        state.put(rows(*((f"{number}", epoch, None) for number in range(100))))
        assert len(state.freeze()) == 1
    state.delete(keys(*(f"{number}" for number in range(100))))
    assert state.freeze() == ()


def test_loaded_rows_lie_in_the_columns_and_not_in_the_pieces() -> None:
    shelf = Shelf()
    state = table()
    state.put(rows(("a", 1, None)))
    again = table()
    again.load(shelf.pieces(shelf.write(state.freeze())), watermark_us=TIME_MIN_US)
    assert [piece.in_memory for piece in again.freeze()] == [False]


def test_a_table_that_was_emptied_between_pieces_loads() -> None:
    shelf = Shelf()
    first, second = table(), table()
    first.put(rows(("a", 1, None)))
    refs = shelf.write(first.freeze())
    tombstone = rows(("a", None, None)).with_columns(pl.lit(True).alias(DELETED))
    more = rows(("b", 2, None)).with_columns(pl.lit(False).alias(DELETED))
    second.load([*shelf.pieces(refs), Piece(tombstone), Piece(more)], watermark_us=TIME_MIN_US)
    assert second.scan().rows() == [("b", 2, None)]


def test_rows_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="column 'n' is String, the table was made for Int64"):
        table().put(pl.DataFrame({"k": ["a"], "n": ["1"], "note": [None]}, schema_overrides={"note": pl.String}))


def test_refused_rows_leave_the_table_as_it_was() -> None:
    state = table()
    with pytest.raises(TypeError, match="column 'n'"):
        state.put(pl.DataFrame({"k": ["a"], "n": ["1"], "note": ["x"]}))
    assert state.get(keys("a")).get_column(FOUND).to_list() == [False]


@pytest.mark.slow
def test_freed_slots_are_used_again() -> None:
    state = table()
    for start in range(0, 20_000, 100):
        names = [f"{number}" for number in range(start, start + 100)]
        state.put(rows(*((name, 1, "a note that is longer than twelve bytes") for name in names)))
        state.delete(keys(*names))
        state.freeze()
    assert len(state) == 0
    assert state.size_bytes() < 4_000_000


def test_of_several_rows_of_a_key_in_one_call_the_last_counts_and_is_stored_once() -> None:
    state = table()
    state.put(rows(("a", 1, "first"), ("b", 1, None), ("a", 2, "last")))
    assert sorted(state.scan().rows(), key=str) == [("a", 2, "last"), ("b", 1, None)]
    (piece,) = state.freeze()
    assert piece.frame().height == 2


def test_pieces_that_hold_many_times_the_table_are_all_folded() -> None:
    shelf = Shelf()
    state = table()
    everything = rows(*((f"{number}", number, None) for number in range(20_000)))
    state.put(everything)
    shelf.write(state.freeze())
    for start in range(0, 45_000, 9000):
        assert state.mergeable() == ()
        state.put(everything.slice(start % 18_000, 9000))
        shelf.write(state.freeze())
    assert state.mergeable() == state.freeze()
    expected = state.scan()
    shelf.merge(state, state.mergeable())
    (piece,) = state.freeze()
    assert piece.ref is not None
    assert piece.ref.rows == 20_000
    again = table()
    again.load(shelf.pieces([piece.ref]), watermark_us=TIME_MIN_US)
    same_rows(again.scan(), expected)


def test_a_null_key_that_went_and_came_back_is_there() -> None:
    shelf = Shelf()
    state = table()
    state.put(rows((None, 1, None), *((f"{number}", number, None) for number in range(50))))
    state.freeze()
    state.delete(keys(None))
    state.put(rows((None, 2, None)))
    (_, piece) = state.freeze()
    assert piece.frame().rows() == [(None, 2, None, False)]
    again = table()
    again.load(shelf.pieces(shelf.write(state.freeze())), watermark_us=TIME_MIN_US)
    assert again.get(keys(None)).rows() == [(None, 2, None, True)]


def test_rows_of_a_sub_key_belong_to_the_key_groups_of_their_key() -> None:
    parts = MemoryTable(["k"], schema={"k": pl.String(), "part": pl.Int32(), "n": pl.Int64()}, sub_key=["part"])
    parts.put(
        pl.DataFrame([("a", 0, 1), ("a", 1, 2)], schema={"k": pl.String, "part": pl.Int32, "n": pl.Int64}, orient="row")
    )
    assert len(parts) == 2
    assert parts.key == ("k",)


def test_keys_until_a_bound_come_with_the_least_value_above_it() -> None:
    due = table()
    due.put(rows(("a", 1, None), ("b", 5, None), ("c", 9, None), ("d", None, None)))
    found, least = due.keys_until("n", 5)
    assert sorted(found.get_column("k")) == ["a", "b"]
    assert least == 9
    found, least = due.keys_until("n", 9, after=1)
    assert sorted(found.get_column("k")) == ["b", "c"]
    assert least is None
