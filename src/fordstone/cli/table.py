"""Tables of text: the only place where columns are measured, padded and cut.

Characters that a terminal would obey are shown as escapes. Imports nothing heavy; Rich is loaded for text that is not ASCII and for
styles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.text import Text

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
        layout = self._layout(None)
        head = [self.head] if any(self.head) else []
        return "\n".join(f"{indent}{layout.line(row)}" for row in (*head, *self.rows))

    def styled(self, width: int | None = None) -> Text:
        """The table for a terminal. With `width` cells are cut to fit; without, the terminal wraps long lines."""
        from rich.text import Text

        if not self.rows and self.empty:
            return Text(self.empty)
        layout = self._layout(width)
        text = Text(layout.cut(layout.names), style="", no_wrap=width is not None)
        text.stylize("bold")
        for place, row in enumerate(self.rows):
            text.append("\n").append(layout.cut(row), style=self.styles[place] if self.styles else "")
        return text

    def _layout(self, width: int | None) -> Layout:
        right = [place in self.right for place in range(len(self.head))]
        return Layout.of(self.head, self.rows, right, width=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The widths of columns. Columns after the last width are not shown."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    right: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[bool],
        *,
        width: int | None = None,
        column_max: int | None = None,
    ) -> Layout:
        """Columns as wide as their cells, at most `column_max` each, and at most `width` together."""
        shown = [safe(name) for name in names]
        widths = [max([cells_of(name), *(cells_of(row[at]) for row in rows)]) for at, name in enumerate(shown)]
        if column_max is not None:
            widths = [min(one, column_max) for one in widths]
        if width is not None:
            widths = _fitted(widths, width)
        return cls(names=tuple(shown), widths=tuple(widths), right=tuple(right))

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
