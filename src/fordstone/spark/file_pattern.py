"""Say whether Spark's own reader would read the files that a `files(...)` source means, and name them as Spark does.

Patterns are ours (Python's): `*` never matches a leading dot, and names that begin with '_' are left out. Spark's (Hadoop's)
differ in that and in braces, backslashes and `**`; what cannot be said the same way is refused here. Pure: looks at
text, not at disks.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Final

from fordstone.connectors.file_bytes import PACKED_SUFFIXES
from fordstone.connectors.file_settings import FileSettings

_FORMATS: Final = {"jsonl": "JSON lines", "csv": "CSV", "arrow": "Arrow"}
_UNLIKE: Final = re.compile(r"[{}\\:]")
"""Means something to Spark and nothing to us."""
_SPECIAL: Final = re.compile(r"[{}\[\]*?\\]")
_PIECE: Final = re.compile(r"\*|\?|\[(?P<other>!?)(?P<set>[\w-]+)\]|[^\[\]*?]+")


def refusal(settings: FileSettings, *, streaming: bool) -> str | None:
    """Why these files need our reader; None: Spark's own finds and reads the same ones."""
    name = Path(settings.path).name
    found = settings.format_of(Path(name))
    if found in _FORMATS:
        return f"it reads {_FORMATS[found]}, where rows that cannot be read become dead letters: that takes our reader"
    if found is None:
        return f"{settings.path!r} does not say that all its files are Parquet; format='parquet' would"
    if name.endswith(PACKED_SUFFIXES):
        return f"{settings.path!r} names compressed files, which Spark's Parquet reader does not read"
    if not streaming:
        return None  # the files are listed by our own rules, once
    if not glob.has_magic(settings.path):
        return f"{settings.path!r} is one file, and a stream of files needs a pattern on Spark"
    for part in Path(settings.path).parts:
        if part == "**":
            return "'**' finds other directories on Spark than here"
        if _UNLIKE.search(part) or (glob.has_magic(part) and _spelt(part, last=False) is None):
            return f"{part!r} in its pattern means something else to Spark"
    if name[0] in "._":
        return f"Spark leaves out files whose name begins with {name[0]!r}"
    return None


def spark_glob(settings: FileSettings) -> str:
    """The pattern as Spark writes it, absolute. Only for settings that are not refused."""
    given = Path(settings.path).expanduser()
    *directories, name = given.parts
    # The working directory is no pattern, whatever its name.
    here = () if given.is_absolute() else (escaped(part) for part in Path.cwd().parts)
    return str(
        Path(*here, *(_spelt(part, last=False) or part for part in directories), _spelt(name, last=True) or name)
    )


def escaped(name: str) -> str:
    """A name that is no pattern, as Spark writes it in one."""
    return _SPECIAL.sub(r"\\\g<0>", name)


def _spelt(part: str, *, last: bool) -> str | None:
    """One name of a pattern as Spark writes it; None: it cannot be said."""
    pieces, end = [], 0
    while end < len(part):
        found = _PIECE.match(part, end)
        if found is None or (end == 0 and found["set"] is not None):
            return None
        pieces.append(f"[{'^' if found['other'] else ''}{found['set']}]" if found["set"] else found[0])
        end = found.end()
    hidden = "._" if last else "."
    if pieces[0] == "*":
        return f"[^{hidden}]{''.join(pieces)}"
    return "".join([f"[^{hidden}]" if pieces[0] == "?" else pieces[0], *pieces[1:]])
