"""Lists and maps of keyed functions against Python's own, written back and read again at any moment."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from fordstone.lang.schema import DataType
from fordstone.lang.values import coercion
from fordstone.operators.process import cells as state_cells
from fordstone.operators.process.cells import CellKind, Scene, series_of
from fordstone.operators.process.store import KeyedStore
from fordstone.state.base import Piece
from fordstone.state.memory import IN_MEMORY

TTL_US = 6
KEYS = pl.DataFrame({"k": ["a", "b"]})
BIGINT = DataType("bigint")

ops = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 4)),
        st.tuples(st.just("append"), st.integers(0, 4)),
        st.tuples(st.just("put"), st.integers(0, 4)),
        st.tuples(st.just("put"), st.integers(0, 4)),
        st.tuples(st.just("remove"), st.integers(0, 4)),
        st.tuples(st.just("remove"), st.integers(0, 4)),
        st.tuples(st.just("cut"), st.integers(0, 3)),
        st.tuples(st.just("pass"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["clear", "write", "reload", "reload", "forget", "forget"]), st.just(0)),
    ),
    min_size=20,
    max_size=70,
)


def store(scene: Scene, *, ttl_us: int | None) -> KeyedStore:
    shared: dict[str, Any] = {"step": "s", "scene": scene, "coerce": coercion(BIGINT), "ttl_us": ttl_us}
    items = CellKind(name="items", kind="list", **shared)
    by_key = CellKind(name="by_key", kind="map", coerce_key=coercion(BIGINT), **shared)
    return KeyedStore({"k": pl.String()}, [(items, pl.Int64(), None), (by_key, pl.Int64(), pl.Int64())], IN_MEMORY)


@examples(120)
@given(given_ops=ops, chunk_items=st.sampled_from([1, 2, 3]), ttl_us=st.sampled_from([None, TTL_US]))
def test_lists_and_maps_are_as_pythons_own_wherever_they_are_written_and_read_again(given_ops, chunk_items, ttl_us):
    scene = Scene(now_us=0)
    with patch.object(state_cells, "CHUNK_ITEMS", chunk_items), patch.object(state_cells, "CHUNKS_FEW", 1):
        kept = store(scene, ttl_us=ttl_us)
        items: list[tuple[int, int]] = []
        by_key: dict[int, tuple[int, int]] = {}
        for op, x in given_ops:
            entry = kept.entries(KEYS)[0]
            list_cell: Any = entry.cells[0]
            map_cell: Any = entry.cells[1]
            match op:
                case "append":
                    list_cell.append(x)
                    items.append((x, scene.now_us))
                case "put":
                    map_cell[x] = scene.now_us
                    by_key[x] = (scene.now_us, scene.now_us)
                case "remove":
                    assert map_cell.pop(x) == by_key.pop(x, (None, 0))[0]
                case "cut":
                    list_cell.set(list_cell.get()[x:])
                    items = [(one, scene.now_us) for one, _ in items[x:]]
                case "pass":
                    scene.now_us += x
                case "clear":
                    list_cell.clear()
                    map_cell.clear()
                    items, by_key = [], {}
                case "write":
                    kept.write_back()
                case "forget":
                    kept.forget(scene.now_us, by_clock=False, before_us=None)
                case "reload":
                    kept = reloaded(kept, scene, ttl_us=ttl_us)
            if ttl_us is not None:
                items = [one for one in items if one[1] + ttl_us > scene.now_us]
                by_key = {key: one for key, one in by_key.items() if one[1] + ttl_us > scene.now_us}
            (first, other) = kept.entries(KEYS)
            found_list: Any = first.cells[0]
            found_map: Any = first.cells[1]
            assert (found_list.get(), len(found_list)) == ([one for one, _ in items], len(items))
            assert found_map.items() == [(key, value) for key, (value, _) in by_key.items()]
            assert (len(found_map), list(found_map)) == (len(by_key), list(by_key))
            assert [key in found_map for key in range(10)] == [key in by_key for key in range(10)]
            assert other.cells[0].get() == []  # type: ignore[call-arg]  # a list's


def reloaded(kept: KeyedStore, scene: Scene, *, ttl_us: int | None) -> KeyedStore:
    """A fresh store with what this one would freeze."""
    kept.write_back()
    pieces = {name: state.freeze() for name, state in kept.states().items()}
    fresh = store(scene, ttl_us=ttl_us)
    for name, state in fresh.states().items():
        state.load([Piece(piece.frame()) for piece in pieces[name]], watermark_us=0)
    return fresh


def test_what_is_left_of_many_chunks_is_closed_up_in_order():
    scene = Scene(now_us=0)
    kept = store(scene, ttl_us=TTL_US)
    for number in range(1000):
        list_cell, map_cell = kept.entries(KEYS)[0].cells
        scene.now_us = 5 if number % 40 == 0 else 0
        list_cell.append(number)  # type: ignore[union-attr]  # a list
        map_cell[number] = number  # type: ignore[index]  # a map
    kept = reloaded(kept, scene, ttl_us=TTL_US)
    scene.now_us = 7
    kept.forget(7, by_clock=False, before_us=None)
    kept = reloaded(kept, scene, ttl_us=TTL_US)
    first, second = (state for name, state in kept.states().items() if name.startswith("state_"))
    assert len(first) == len(second) == 1  # type: ignore[arg-type]  # tables
    list_cell, map_cell = kept.entries(KEYS)[0].cells
    assert list_cell.get() == list(map_cell) == list(range(0, 1000, 40))  # type: ignore[call-arg, arg-type]  # a list and a map


def test_what_is_empty_takes_no_room():
    scene = Scene(now_us=0)
    kept = store(scene, ttl_us=None)
    for cell in kept.entries(KEYS)[0].cells:
        for number in range(300):
            if hasattr(cell, "append"):
                cell.append(number)
            else:
                cell[number] = number  # type: ignore[index]  # a map
    kept.write_back()
    first, second = (state for name, state in kept.states().items() if name.startswith("state_"))
    assert len(first) == len(second) == 5  # type: ignore[arg-type]  # tables
    list_cell, map_cell = kept.entries(KEYS)[0].cells
    list_cell.set([1])  # type: ignore[union-attr]  # a list
    for number in range(299):
        map_cell.pop(number)  # type: ignore[union-attr]  # a map
    kept.write_back()
    assert len(first) == len(second) == 1  # type: ignore[arg-type]  # tables
    list_cell.clear()
    map_cell.clear()
    kept.entries(KEYS)
    kept.write_back()
    assert len(first) == len(second) == 0  # type: ignore[arg-type]  # tables


@examples(60)
@given(
    kind=st.sampled_from(
        [
            (pl.List(pl.Int64()), [1, 2, None]),
            (pl.List(pl.String()), ["a", "é", ""]),
            (pl.List(pl.List(pl.Float64())), [[], [1.5, None], [2.0]]),
        ]
    ),
    picked=st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=6),
)
def test_columns_of_lists_are_made_as_polars_would(kind, picked):
    dtype, choice = kind
    values = [[choice[number] for number in numbers] for numbers in picked]
    found = series_of("x", values, dtype)
    assert (found.name, found.dtype, found.to_list()) == ("x", dtype, values)
