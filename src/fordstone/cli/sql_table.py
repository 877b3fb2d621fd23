"""A table of text: cells as a person reads them, in columns that fit the terminal.

Numbers are rounded to six decimals; `--json` gives them whole. What a terminal would take for commands is shown as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl
from rich.cells import cell_len, set_cell_size

DECIMALS: Final = 6
GAP: Final = "  "
COLUMN_CELLS_MIN: Final = 8
"""Columns are not made narrower than this; then the last ones are left out."""
COLUMN_CELLS_MAX: Final = 60
"""In a table as wide as need be, longer texts push the rest of their row along, and not that of all others."""
_HUGE: Final = 1e15
_TINY: Final = 1e-4
"""Floating-point numbers beyond these are shown whole."""
_ELLIPSIS: Final = "…"
_UNSAFE: Final = "[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
_UNSAFE_CHAR: Final = re.compile(_UNSAFE)
NULL: Final = "null"


def cells(frame: pl.DataFrame) -> pl.DataFrame:
    """Every value as text."""
    return frame.select([_texts(frame.get_column(name)) for name in frame.columns])


def safe(text: str) -> str:
    """A text without characters that a terminal would obey."""
    return _UNSAFE_CHAR.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _texts(values: pl.Series) -> pl.Series:
    kind = values.dtype
    if isinstance(kind, pl.Datetime):
        texts = values.dt.strftime("%Y-%m-%d %H:%M:%S%.fZ")
    elif kind.is_float():
        size = values.abs()
        whole = values.is_infinite() | values.is_nan() | (size >= _HUGE) | ((size < _TINY) & (size > 0))
        texts = pl.select(pl.when(whole).then(values).otherwise(values.round(DECIMALS)).cast(pl.String)).to_series()
    elif kind == pl.Binary:
        texts = values.bin.encode("hex")
    elif isinstance(kind, pl.List):
        texts = pl.Series([None if one is None else str(one.to_list()) for one in values], dtype=pl.String)
    else:
        texts = values.cast(pl.String)
    if kind in {pl.String, pl.List} and texts.str.contains(_UNSAFE).any():
        texts = pl.Series([None if one is None else safe(one) for one in texts], dtype=pl.String)
    return texts.fill_null(NULL).alias(values.name)


def numeric(schema: pl.Schema) -> tuple[bool, ...]:
    """Which columns are aligned to the right."""
    return tuple(kind.is_numeric() for kind in schema.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How wide columns are. Columns behind the last width are not shown."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    right: tuple[bool, ...]

    @classmethod
    def of(
        cls, names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int | None
    ) -> Layout:
        """Wide enough for the rows, and together no wider than `width` (None: as wide as need be)."""
        shown = [safe(name) for name in names]
        widths = [max([cell_len(name), *(cell_len(row[place]) for row in rows)]) for place, name in enumerate(shown)]
        widths = [min(one, COLUMN_CELLS_MAX) for one in widths] if width is None else _fitted(widths, width)
        return cls(names=tuple(shown), widths=tuple(widths), right=tuple(right))

    @property
    def hidden(self) -> int:
        """How many columns do not fit."""
        return len(self.names) - len(self.widths)

    def head(self) -> str:
        """The names."""
        return self.line(self.names)

    def rule(self) -> str:
        """A line below the names."""
        return GAP.join("─" * width for width in self.widths)

    def line(self, row: Sequence[str]) -> str:
        """One row. A cell that is wider than its column pushes the rest along, or is cut if the table must fit."""
        made = [
            _padded(cell, width, right=right) for cell, width, right in zip(row, self.widths, self.right, strict=False)
        ]
        return GAP.join(made).rstrip()

    def lines(self, texts: pl.DataFrame) -> str:
        """Many rows, each with its end of line. Columns of plain ASCII are padded as a whole."""
        columns = [
            _padded_all(texts.to_series(place), width, right=right)
            for place, (width, right) in enumerate(zip(self.widths, self.right, strict=True))
        ]
        joined = pl.select(pl.concat_str(columns, separator=GAP).str.strip_chars_end(" ").alias("line")).to_series()
        return "".join(f"{line}\n" for line in joined)

    def cut(self, row: Sequence[str]) -> str:
        """One row, no cell wider than its column."""
        return self.line([_cut(cell, width) for cell, width in zip(row, self.widths, strict=False)])


def _padded(cell: str, width: int, *, right: bool) -> str:
    blanks = " " * max(0, width - cell_len(cell))
    return blanks + cell if right else cell + blanks


def _padded_all(texts: pl.Series, width: int, *, right: bool) -> pl.Series:
    if (texts.str.len_bytes() == texts.str.len_chars()).all():
        return texts.str.pad_start(width) if right else texts.str.pad_end(width)
    return pl.Series([_padded(cell, width, right=right) for cell in texts], dtype=pl.String)


def _cut(cell: str, width: int) -> str:
    return cell if cell_len(cell) <= width else set_cell_size(cell, width - 1) + _ELLIPSIS


def _fitted(widths: list[int], width: int) -> list[int]:
    """Take from the widest first; if all are narrow already, leave out the last."""
    widths = list(widths)
    while widths and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        widest = max(widths)
        if widest > COLUMN_CELLS_MIN:
            widths[widths.index(widest)] = widest - 1
        elif len(widths) > 1:
            widths.pop()
        else:
            return [max(1, width)]
    return widths
