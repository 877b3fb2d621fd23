"""The part of a source that one of several nodes reads: every other question goes to the source itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fordstone.connectors.base import Source
from fordstone.connectors.part_of_source import Distribution, PartOfSource

METHODS = [name for name, value in vars(Source).items() if inspect.isfunction(value)]
OF_THE_WHOLE = {"size_bytes", "share_read"}


class Asked:
    """Answers every method of a source with its name and what it was given."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **options: (name, given, options)


def part_of(nodes: int) -> PartOfSource:
    source: Any = Asked()
    return PartOfSource(source, Distribution(nodes), 0)


@pytest.mark.parametrize("name", sorted({*METHODS} - {"partitions"}))
def test_every_method_of_a_source_is_passed_on(name: str) -> None:
    parameters = list(inspect.signature(getattr(Source, name)).parameters.values())[1:]
    given = tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)
    options = {one.name: one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    expected = None if getattr(PartOfSource, name).__annotations__["return"] == "None" else (name, given, options)
    assert name in vars(PartOfSource)
    assert getattr(part_of(1), name)(*given, **options) == expected
    if name in OF_THE_WHOLE:
        expected = None
    assert getattr(part_of(2), name)(*given, **options) == expected


def test_nodes_read_partitions_in_turn() -> None:
    source: Any = Asked()
    source.partitions = lambda: ["a", "b", "c"]
    distribution = Distribution(2)
    assert [list(PartOfSource(source, distribution, node).partitions()) for node in (0, 1)] == [["a", "c"], ["b"]]
