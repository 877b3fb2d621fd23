"""Numbers, sizes, spans, times and tables as people read them, and JSON lines as machines do.

This is the only place where columns are measured, padded and cut. Characters that a terminal would obey are shown as escapes.
Imports nothing heavy; Rich is loaded for text that is not ASCII and for styles, Polars to pad many rows at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import polars as pl
    from rich.text import Text

_KILO: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_US: Final = 1_000_000
_EXACT_BELOW: Final = 10_000
"""Rates below this are written out."""


def count(number: int, noun: str | None = None) -> str:
    """`1,234,567`, or with a noun `1 row`, `2 rows`."""
    if noun is None:
        return f"{number:,}"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rate(rows_per_second: float) -> str:
    """`812 rows/s`, `24.1 M rows/s`."""
    if rows_per_second < _EXACT_BELOW:
        return f"{rows_per_second:,.0f} rows/s"
    return f"{_scaled(rows_per_second / _KILO, ('k', 'M', 'G'))} rows/s"


def size(size_bytes: int) -> str:
    """`812 B`, `1.25 MB`: powers of ten, as disks are sold."""
    return f"{size_bytes} B" if size_bytes < _KILO else _scaled(size_bytes / _KILO, ("kB", "MB", "GB", "TB"))


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < _KILO:
            return f"{_three_digits(value)} {unit}"
        value /= _KILO
    return f"{_three_digits(value)} {units[-1]}"


def span(span_us: float) -> str:
    """`85 us`, `12 ms`, `1.2 s`, `3 min 20 s`, `2 d 3 h`: two units at most."""
    if span_us < 0:
        return f"-{span(-span_us)}"
    if span_us < _KILO:
        return f"{span_us:.0f} us"
    if span_us < _SECOND_US:
        return f"{_three_digits(span_us / _KILO)} ms"
    seconds = span_us / _SECOND_US
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{_three_digits(seconds)} s"
    for large, small, large_seconds, small_seconds in (
        ("d", "h", 86_400, 3_600),
        ("h", "min", 3_600, 60),
        ("min", "s", 60, 1),
    ):
        if seconds >= large_seconds:
            whole, rest = divmod(int(seconds), large_seconds)
            return f"{whole} {large}" + (f" {rest // small_seconds} {small}" if rest >= small_seconds else "")
    raise AssertionError("a span above a minute has minutes")


def instant(us: int) -> str:
    """A moment in UTC, to the second: `2026-01-31 12:00:00`."""
    try:
        return (_EPOCH + timedelta(microseconds=us)).strftime("%Y-%m-%d %H:%M:%S")
    except OverflowError:
        return f"{us} us since 1970"


def age(then_us: int, now_us: int) -> str:
    """How long ago a moment was: `3 min 20 s ago`; never in the future."""
    return f"{span(max(0, now_us - then_us))} ago"


def share(part: float) -> str:
    """`0.031` as `3.1 %`, with the digits that count."""
    percent = part * 100
    if abs(percent) < 0.001:  # noqa: PLR2004 - too small to show
        return "0 %"
    return f"{percent:.2g} %" if abs(percent) < 10 else f"{percent:.0f} %"  # noqa: PLR2004 - two digits


def print_json(body: object) -> None:
    """Print one JSON line for machines to standard output."""
    import msgspec

    sys.stdout.write(f"{msgspec.json.encode(body).decode()}\n")
    sys.stdout.flush()


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"  # noqa: PLR2004 - digits


GAP: Final = "  "
COLUMN_CELLS_MIN: Final = 8
"""Columns are not made narrower than this to fit a terminal; instead the last ones are left out."""
ELLIPSIS: Final = "…"
UNSAFE: Final = "[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
_UNSAFE_CHAR: Final = re.compile(UNSAFE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A head and rows of cells, without widths. `right` are the columns aligned to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()
    styles: Sequence[str] = ()
    """The style of each row on a terminal: empty for plain."""
    empty: str = ""
    """The text in place of a table without rows."""

    def text(self, indent: str = "") -> str:
        """The table as plain lines without trailing blanks."""
        if not self.rows and self.empty:
            return self.empty
        layout = self.layout()
        head = [self.head] if any(self.head) else []
        return "\n".join(f"{indent}{layout.line(row)}" for row in (*head, *self.rows))

    def styled(self, width: int | None = None) -> Text:
        """The table for a terminal. With `width` cells are cut to fit; without, the terminal wraps long lines."""
        from rich.text import Text

        if not self.rows and self.empty:
            return Text(self.empty)
        layout = self.layout(width=width)
        text = Text(layout.cut(layout.names), style="", no_wrap=width is not None)
        text.stylize("bold")
        for place, row in enumerate(self.rows):
            text.append("\n").append(layout.cut(row), style=self.styles[place] if self.styles else "")
        return text

    def layout(self, *, width: int | None = None, column_max: int | None = None) -> Layout:
        """Columns as wide as their cells, at most `column_max` each, and at most `width` together."""
        names = [safe(name) for name in self.head]
        widths = [max([cells_of(name), *(cells_of(row[at]) for row in self.rows)]) for at, name in enumerate(names)]
        if column_max is not None:
            widths = [min(one, column_max) for one in widths]
        if width is not None:
            widths = _fitted(widths, width)
        right = tuple(at in self.right for at in range(len(names)))
        return Layout(names=tuple(names), widths=tuple(widths), right=right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The widths of columns. Columns after the last width are not shown."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    right: tuple[bool, ...]

    @property
    def hidden(self) -> int:
        return len(self.names) - len(self.widths)

    def rule(self) -> str:
        return GAP.join("─" * width for width in self.widths)

    def line(self, row: Sequence[str]) -> str:
        """One row. A cell that is wider than its column pushes the rest of its row to the right."""
        cells = [
            pad(cell, width, right=right) for cell, width, right in zip(row, self.widths, self.right, strict=False)
        ]
        return GAP.join(cells).rstrip()

    def cut(self, row: Sequence[str]) -> str:
        """One row, no cell wider than its column."""
        return self.line([_cut(cell, width) for cell, width in zip(row, self.widths, strict=False)])


def lines_of(layout: Layout, texts: pl.DataFrame) -> str:
    """Many rows, each with its end of line. Columns of plain ASCII are padded as a whole, which is faster."""
    import polars as pl

    columns = []
    for place, (width, right) in enumerate(zip(layout.widths, layout.right, strict=True)):
        column = texts.to_series(place)
        if (column.str.len_bytes() == column.str.len_chars()).all():
            columns.append(column.str.pad_start(width) if right else column.str.pad_end(width))
        else:
            columns.append(pl.Series([pad(cell, width, right=right) for cell in column], dtype=pl.String))
    joined = pl.select(pl.concat_str(columns, separator=GAP).str.strip_chars_end(" ").alias("line")).to_series()
    return "".join(f"{line}\n" for line in joined)


def safe(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return _UNSAFE_CHAR.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cells_of(text: str) -> int:
    """The number of terminal cells that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pad(cell: str, width: int, *, right: bool) -> str:
    """The cell with blanks up to the width."""
    blanks = " " * max(0, width - cells_of(cell))
    return blanks + cell if right else cell + blanks


def _cut(cell: str, width: int) -> str:
    if cells_of(cell) <= width:
        return cell
    from rich.cells import set_cell_size

    return set_cell_size(cell, width - 1) + ELLIPSIS


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
