"""The table of operators: complete, and with an example that runs for every row."""

from __future__ import annotations

import re

import pytest
from tests.docs.blocks import REPOSITORY

from fordstone.api.stream import Grouped, Stream

PAGE = (REPOSITORY / "docs" / "reference" / "operators.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
NOT_STEPS = {"sink", "group_by", "window", "aggregate", "timeouts", "collect", "head", "show", "to_pandas"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_of_the_table_leads_to_an_example(row: list[str]) -> None:
    anchor = re.search(r"\(#([a-z-]+)\)", row[-1])
    assert anchor is not None
    heading = next(line for line in PAGE.splitlines() if line.startswith("## ") and slug(line) == anchor[1])
    section = PAGE.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    example = section.partition("```python")[2].partition("```")[0]
    names = [name.strip("`. ").rstrip("=") for name in row[0].removeprefix("| ").split("`, `")]
    assert any(re.search(rf"\b{name.split('`')[0]}\b", example) for name in names), example


def slug(heading: str) -> str:
    return heading.removeprefix("## ").lower().replace(" ", "-")


def test_every_step_that_a_stream_can_take_is_in_the_table() -> None:
    named = {name for row in ROWS for name in re.findall(r"\w+", row[0])}
    methods = {
        name
        for kind in (Stream, Grouped)
        for name in dir(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    assert methods - NOT_STEPS - named == set()
