"""Keep words out of code, tests and documentation that readers have to decode: prints `file:line` of each, and fails if there is one.

The lists are short on purpose. They hold what has a plain word in every database and stream processor.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = (
    *("src", "tests", "bench", "examples", "scripts", "docs"),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
)
EXCLUDED = {"scripts/check_words.py", "tests/test_check_words.py"}
"""They hold the words as data."""
ENDINGS = {".py", ".md"}
BANNED = {
    "whoever": "name it: the process, the node, the caller",
    "behind": "say `after`; `behind` is for lag alone",
    "told": "say `reported`, `given`, `described`, or use the active voice",
    "let go": "say `acknowledge`, `release`, `remove`",
    "lets go": "say `acknowledges`, `releases`, `removes`",
    "let out": "say `emit`, `output`, `release`",
    "lets out": "say `emits`, `outputs`, `releases`",
    "how-manieth": "say `index` or `number`",
    "so many": "say `maximum` or `number of`",
    "so long": "say `timeout` or `interval`",
    "one row a": "say `one row per`",
    "a row a": "say `a row per`",
    "one a key": "say `one per key`",
    "once an epoch": "say `once per epoch`",
    "anew": "say `again`, or `from the beginning`",
    "given out": "say `emitted` or `granted`",
    "gives out": "say `emits` or `grants`",
}
ALLOWED = re.compile(
    r"""(?<![^\W_])(?:furthest|far|lags?|lagging|falls?|fell|fallen|falling)[\s_]+behind(?![^\W_])
    | (?<![^\W_])(?:leaves?[\s_]+[^\W_]+(?:[\s_]+[^\W_]+)?|left)[\s_]+behind(?![^\W_])
    | \b(?:rows|epochs|bytes|seconds|time)\s+behind\b(?!\s+\w)
    | \bbehind[\s_]by\b | \b(?:rows|epochs|bytes|s|us)_behind\b
    | \bbehind\s+(?:a|the|its|your)\s+(?:\w+\s+)?(?:proxy|firewall|NAT|gateway|load\ balancer)\b
    | \bone\ row\ at\ a\ time\b""",
    re.VERBOSE | re.IGNORECASE,
)
"""Phrases that mean lag, or a place in a network."""
_WORDS = re.compile(
    "|".join("(?<![^\\W_])" + word.replace(" ", "[ _\\n]") + "(?![^\\W_])" for word in BANNED), re.IGNORECASE
)


def found_in(text: str) -> list[tuple[int, str]]:
    """Return the line and the word of each banned word, in names (`_let_go`) as in prose."""
    plain = ALLOWED.sub(lambda match: " " * len(match[0]), text)
    return [(plain.count("\n", 0, match.start()) + 1, match[0]) for match in _WORDS.finditer(plain)]


def files() -> list[Path]:
    places = [ROOT / name for name in PLACES]
    inside = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    checked = (file for file in inside if file.suffix in ENDINGS)
    return sorted(file for file in checked if file.relative_to(ROOT).as_posix() not in EXCLUDED)


def main() -> int:
    count = 0
    for file in files():
        for line, word in found_in(file.read_text()):
            count += 1
            plain = BANNED[re.sub(r"[_\n]", " ", word.lower())]
            print(f"{file.relative_to(ROOT)}:{line}: {word!r}: {plain}")
    if count:
        print(
            f"{count} banned words. If one is right where it is, add its phrase to ALLOWED in scripts/check_words.py."
        )
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
