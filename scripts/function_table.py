"""Write the tables of functions, forms and aggregates, and the list of differences, in docs/reference/expressions.md from the tables in the code.

    python scripts/function_table.py            # rewrite the page
    python scripts/function_table.py --check    # only say whether it is up to date

Each example is run, and its result stands beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import polars as pl

from fordstone.lang.aggregates import AGGREGATES
from fordstone.lang.expression import parse
from fordstone.lang.functions import DIFFERENCES, FORMS, FUNCTIONS
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "expressions.md"
ONE_ROW = Schema.of({"any": "int"})


def function_table() -> str:
    """The functions, with what each example gives."""
    lines = ["| written | meaning | example | gives |", "|---|---|---|---|"]
    for function in FUNCTIONS.values():
        result = result_of(function.example)
        lines.append(_row(_code(function.signature), function.about, _code(function.example), _code(result)))
    return "\n".join(lines)


def form_table() -> str:
    """What has a grammar of its own, with what each example gives."""
    lines = ["| written | meaning | example | gives |", "|---|---|---|---|"]
    for signature, about, example in FORMS:
        lines.append(_row(_code(signature), about, _code(example), _code(result_of(example))))
    return "\n".join(lines)


def difference_list() -> str:
    """Where Spark is laxer, or gives something else."""
    return "\n".join(f"- {_without_markup(difference)}" for difference in DIFFERENCES)


def _without_markup(text: str) -> str:
    return "".join(f"\\{char}" if char in "\\*|" else char for char in text)


def aggregate_table() -> str:
    """The aggregates, with what may be done with their parts."""
    inverts = {"always": "yes", "exact": "integers and decimals", "never": "no"}
    lines = ["| written | meaning | mergeable | invertible |", "|---|---|---|---|"]
    for function in AGGREGATES.values():
        merges = "yes" if function.mergeable else "no"
        lines.append(_row(_code(function.signature), function.about, merges, inverts[function.invertible]))
    return "\n".join(lines)


def result_of(example: str) -> str:
    """What the engine makes of an expression without columns, as text."""
    frame = pl.DataFrame({"any": [0]}, schema=ONE_ROW.polars)
    return _shown(frame.select(to_polars(parse(example, ONE_ROW), ONE_ROW)).item())


def _shown(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, pl.Series | list):
        return f"[{', '.join(_shown(element) for element in value)}]"
    return str(value)


def _code(text: str) -> str:
    return f"`{text}`"


def _row(*cells: str) -> str:
    # A bar would end the cell, even within a code span.
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page_with_tables(page: str) -> str:
    """The page with everything that is made here as it should be."""
    made = {
        "functions": function_table(),
        "forms": form_table(),
        "differences": difference_list(),
        "aggregates": aggregate_table(),
    }
    for name, table in made.items():
        begin, end = f"<!-- {name}: made by scripts/function_table.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            sys.exit(f"{PAGE.name} has no place for the {name}: it stands between '{begin}' and '{end}'.")
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def main() -> int:
    page = PAGE.read_text()
    wanted = page_with_tables(page)
    if "--check" in sys.argv[1:]:
        if page != wanted:
            print(f"{PAGE.name} is out of date: run python scripts/function_table.py")
            return 1
        return 0
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
