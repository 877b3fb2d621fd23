"""Mistakes that people make when they build a pipeline: each is an error that says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from fordstone import Pattern, Pipeline, Stream, tumbling
from fordstone.connectors import files, generator, memory
from fordstone.edge.config import RunConfig
from fordstone.errors import FordstoneError

SCHEMA = {"device": "string", "ts": "timestamp", "n": "bigint"}


def wrong(given: object) -> Any:
    """The value, as one of whatever type would be right."""
    return given


def rows() -> Stream:
    return Pipeline("p").source("rows", generator(rows=1), schema=SCHEMA, time="ts")


def source(schema: Any) -> Stream:
    return Pipeline("p").source("rows", memory([[]]), schema=schema)


def late() -> Stream:
    return rows().group_by("device").window(tumbling("1s")).agg(n="count(*)").late


MISTAKES: list[tuple[str, Callable[[], object], str]] = [
    ("a type of Python", lambda: source({"a": int}), "column 'a': write the type by its name in Spark: 'bigint' for int."),
    ("a type of Polars", lambda: source({"a": pl.Float64}), "'double' for Float64."),
    ("no type", lambda: source({"a": 3}), "column 'a': 3 is not a type."),
    ("a schema that is a list", lambda: source(["a"]), "['a'] is not a schema. Give names and types:"),
    ("a type for map", lambda: rows().map(lambda row: row, schema={"a": wrong(str)}), "'string' for str."),
    ("a key that is no name", lambda: rows().group_by(wrong(3)), "group_by(3): a key is the name of a column"),
    ("a key that is nothing", lambda: rows().deduplicate(wrong(None), within="1s"), "deduplicate(None): a key is the name"),
    ("a sink into text", lambda: rows().sink("out", wrong("out")), "sink out: 'out' is neither a connector nor a function. Use one of fordstone.connectors"),
    ("an aggregate without a name", lambda: rows().group_by("a").agg("count(*)"), "agg('count(*)'): give each aggregate a name, as in agg(n='count(*)')."),
    ("files at nothing", lambda: files(wrong(None)), "files(None): give a path or a URL"),
    ("a name that is a number", lambda: Pipeline(wrong(3)), "pipeline 3: a name has 1 to 100 letters"),
    ("a pattern without a start", lambda: Pattern("x").then("a", "n > 1"), "stage 'a' has none before it. Begin the pattern with start('a', ...)."),
    ("measures without names", lambda: rows().match(Pattern("x").start("a"), wrong(["n"])), "must name a column for each expression"),
    ("a loop without a body", lambda: rows().iterate(wrong(3)), "loop iterate: 3 is not a function."),
    ("a key of a control table", lambda: Pipeline("p").control("c", schema=SCHEMA, key=wrong(3)), "control c: key=3 does not name columns."),
    ("a window over late rows", lambda: late().group_by("device").window(tumbling("1s")).agg(n="count(*)"), "has late rows, which have none any more"),
    ("a window after late rows", lambda: late().filter("n > 1").group_by("device").window(tumbling("1s")).agg(n="count(*)"), "has late rows, which have none any more"),
    ("a number as text", lambda: RunConfig(parallelism=wrong("2")), "parallelism='2' is not a whole number."),
    ("a state that is a number", lambda: RunConfig(state=wrong(3)), "state=3 is not a directory."),
]  # fmt: skip


@pytest.mark.parametrize(("make", "says"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_an_error_that_says_what_to_write(make: Callable[[], object], says: str) -> None:
    with pytest.raises(FordstoneError) as caught:
        make()
    assert says in str(caught.value)


def test_keys_may_be_given_as_a_list() -> None:
    assert list(rows().group_by(["device", "n"]).agg(c="count(*)").schema) == ["device", "n", "c"]
    assert list(rows().group_by("device", ["n"]).agg(c="count(*)").schema) == ["device", "n", "c"]
    assert "deduplicate" in rows().deduplicate(["device"], within="1s").name
