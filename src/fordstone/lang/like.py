r"""LIKE patterns and regular expressions: checked when the pipeline is built, translated for the engine on the edge.

Spark uses Java's regular expressions, Polars those of Rust. The same text can mean different things to them: `\w` and
`(?i)` go beyond ASCII only in Rust, `$` stops before a last line break only in Java. `rust_regex` writes Java's meaning
in Rust's language. What Rust cannot do (looking around, back references, possessive repetition) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import polars as pl

from fordstone.lang.schema import ClashError

_META: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~\s]")
_LINE_ENDS: Final = r"\n\r\x{85}\x{2028}\x{2029}"
_LINE_END: Final = rf"\r\n|[{_LINE_ENDS}]"
_LINE_END_TEXTS: Final = ("\n", "\r\n", "\r", "\x85", "\u2028", "\u2029")
_CLASSES: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0B\f\r\x20"}
_POSIX: Final = {
    "Alpha": "A-Za-z", "Digit": "0-9", "Alnum": "0-9A-Za-z", "Upper": "A-Z", "Lower": "a-z", "XDigit": "0-9A-Fa-f",
    "Space": r"\t\n\x0B\f\r\x20", "Blank": r"\x20\t", "Punct": r"!-/:-@\[-`{-\~",
}  # fmt: skip
_CATEGORY: Final = re.compile(r"[LMNPSZC][a-z]?")
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "a": "\a", "e": "\x1b"}
_REPEAT: Final = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_FLAGS: Final = re.compile(r"\(\?([is]*)(?:-([is]+))?([:)])")
_NAMED: Final = re.compile(r"\(\?<([A-Za-z][A-Za-z0-9]*)>")


def like_regex(pattern: str, escape: str = "\\") -> str:
    """A regular expression, for Rust, that fits what the LIKE pattern fits."""
    parts = re.findall(rf"{re.escape(escape)}.|.", pattern, re.DOTALL)
    fits = {"%": ".*", "_": "."}
    return rf"(?s)\A(?:{''.join(fits.get(part, _escaped(part[-1])) for part in parts)})\z"


def check_like(pattern: str, escape: str) -> None:
    """Raise `ClashError` if the escape is not one character, or escapes what needs none."""
    if len(escape) != 1:
        raise ClashError("the escape of LIKE is one character.", 2)
    if re.fullmatch(rf"(?:{re.escape(escape)}[%_{re.escape(escape)}]|[^{re.escape(escape)}])*", pattern) is None:
        raise ClashError(f"in LIKE, {escape!r} stands only before %, _ or itself.", 1)


@lru_cache(maxsize=256)
def rust_regex(pattern: str) -> str:
    """The regular expression for Rust that finds what Java would find.

    Raises:
        ClashError: if it is malformed, or Rust cannot express it.
    """
    return _read(pattern)[0]


def plain_text(pattern: str) -> str | None:
    """The text that a regular expression stands for, if it has no special characters."""
    return _read(pattern)[1]


def check_separator(pattern: str) -> None:
    """Raise `ClashError` if the pattern can match nothing at all, so that it cannot separate (other than '' itself)."""
    regex, plain, reader = _read(pattern)
    if plain is None and _can_be_empty(regex, reader):
        raise ClashError(f"the pattern {pattern!r} can match an empty text; a separator must not.")
    if reader.ends:
        raise reader.refuse("a '$' or '\\Z' in a separator (\\z would be)")


def replacing(pattern: str, by: str) -> tuple[str, str]:
    """The regular expression and the replacement for Rust that do what Java would do with these.

    Raises:
        ClashError: if one of them is malformed or cannot be expressed; of both engines, one would replace something else.
    """
    regex, _, reader = _read(pattern, capturing=True)
    if _can_be_empty(regex, reader):
        # Java replaces an empty match right after another one, Rust skips it.
        raise ClashError(f"the pattern {pattern!r} can match an empty text; what is replaced must not be empty.", 1)
    if reader.ends and pl.Series(_LINE_END_TEXTS).str.contains(regex).any():
        # Java would go on and match once more what `$` let pass.
        raise ClashError(f"the pattern {pattern!r} has '$' and can match a line break before it; write '\\z'.", 1)
    out, at = [], 0
    while at < len(by):
        char, following = by[at], by[at + 1 : at + 2]
        at += 1
        if char == "\\":
            if not following:
                raise ClashError("the replacement ends with a backslash that stands before nothing.", 2)
            at += 1
            out.append(following.replace("$", "$$"))
        elif char != "$":
            out.append(char)
        else:
            if not (following.isascii() and following.isdigit()):
                raise ClashError("in a replacement, $ stands before the number of a group; a dollar sign is \\$.", 2)
            number, at = int(following), at + 1
            while (
                (digit := by[at : at + 1]).isascii() and digit.isdigit() and number * 10 + int(digit) <= reader.groups
            ):
                number, at = number * 10 + int(digit), at + 1
            reader.check_group(number, 2)
            out.append(f"${{{f'group{number}' if number else 0}}}")
    # What `$` let pass at the end is not part of Java's match, and is put back.
    return regex, "".join([*out, *(f"${{{name}}}" for name in reader.opened if name.startswith("end"))])


def extracting(pattern: str, group: int) -> tuple[str, int]:
    """The regular expression for Rust, and the number that the group has in it.

    Raises:
        ClashError: if the pattern is malformed or cannot be expressed, or there is no such group.
    """
    regex, _, reader = _read(pattern, capturing=True)
    reader.check_group(group, 2)
    return regex, reader.opened.index(f"group{group}") + 1 if group else 0


def _can_be_empty(regex: str, reader: _Reader) -> bool:
    return reader.zero_width or bool(pl.Series([""]).str.contains(regex).item())


@lru_cache(maxsize=256)
def _read(pattern: str, *, capturing: bool = False) -> tuple[str, str | None, _Reader]:
    reader = _Reader(pattern, capturing=capturing)
    out = reader.alternatives()
    if reader.at < len(pattern):
        raise ClashError(f"the pattern {pattern!r} has a ')' too many.")
    try:
        pl.Series([""]).str.contains(out)
    except pl.exceptions.ComputeError:
        raise ClashError(f"the pattern {pattern!r} is not a regular expression that the edge can run.") from None
    return out, "".join(reader.plain) if reader.plain is not None else None, reader


def _escaped(char: str) -> str:
    return _META.sub(r"\\\g<0>", char)


def _both_cases(char: str) -> str:
    return char + char.swapcase() if char.isascii() and char.isalpha() else _escaped(char)


@dataclass(slots=True)
class _Reader:
    """Reads Java's syntax from left to right and writes Rust's.

    If `capturing`, groups get names: `group1` and so on, and `end1` for what `$` lets pass at the end of the text, which is
    a part of Rust's match and none of Java's. `opened` has them in their order.
    """

    pattern: str
    at: int = 0
    capturing: bool = False
    groups: int = 0
    ends: int = 0
    opened: list[str] = field(default_factory=list)
    within: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    """Groups that `$` stands in; all of the pattern is group 0."""
    any_case: bool = False
    dot_all: bool = False
    plain: list[str] | None = field(default_factory=list)
    zero_width: bool = False

    def refuse(self, what: str) -> ClashError:
        return ClashError(f"the pattern {self.pattern!r} has {what}, which is not supported.")

    def check_group(self, number: int, argument: int) -> None:
        """Raise `ClashError` if there is no such group, or Java's would be another text than Rust's."""
        if not 0 <= number <= self.groups:
            raise ClashError(f"the pattern {self.pattern!r} has no group {number}; it has {self.groups}.", argument)
        if number in self.ended:
            what = f"in group {number}" if number else "beside group 0, which is the whole match"
            raise self.refuse(f"a '$' or '\\Z' {what} (\\z would be)")

    def alternatives(self) -> str:
        outside = (self.any_case, self.dot_all)
        out = []
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.pattern[self.at] == "|":
                self.plain = None
                self.at += 1
                out.append("|")
            else:
                out.append(self._repeated())
        self.any_case, self.dot_all = outside
        return "".join(out)

    def _repeated(self) -> str:
        atom = self._atom()
        found = _REPEAT.match(self.pattern, self.at)
        if found is None:
            return atom
        self.plain = None
        self.at = found.end()
        following = self.pattern[self.at : self.at + 1]
        if following == "+":
            raise self.refuse("a possessive repetition")
        if following == "?":
            self.at += 1
        elif following in {"*", "{"}:
            raise self.refuse("one repetition after another")
        if "(?P<" in atom and found[0] != "?" and pl.Series([""]).str.contains(atom).item():
            raise self.refuse("a repeated group that can be empty")
        return f"(?:{atom}){found[0]}{'?' if following == '?' else ''}"

    def _atom(self) -> str:
        char = self.pattern[self.at]
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        self.at += 1
        if char in ".^$":
            self.plain = None
            dot = "(?s:.)" if self.dot_all else f"[^{_LINE_ENDS}]"
            return self._line_end() if char == "$" else dot if char == "." else r"\A"
        if char in "*+?{":
            raise self.refuse(f"{char!r} with nothing to repeat before it")
        return self._literal(char)

    def _line_end(self) -> str:
        self.ends += 1
        if not self.capturing:
            return rf"(?:{_LINE_END})?\z"
        self.ended.update([0, *self.within])
        self.opened.append(f"end{self.ends}")
        return rf"(?P<end{self.ends}>(?:{_LINE_END})?)\z"

    def _literal(self, char: str) -> str:
        if self.plain is not None:
            self.plain.append(char)
        return f"[{_both_cases(char)}]" if self.any_case and char.isascii() and char.isalpha() else _escaped(char)

    def _group(self) -> str:
        self.plain = None
        if (flags := _FLAGS.match(self.pattern, self.at)) is not None and flags[0] != "(?)":
            return self._flags(flags)
        if (named := _NAMED.match(self.pattern, self.at)) is not None:
            self.at = named.end()
        elif self.pattern.startswith("(?", self.at):
            raise self.refuse("a group that begins with '(?'")
        else:
            self.at += 1
        self.groups += 1
        self.within.append(self.groups)
        opened = f"(?P<group{self.groups}>" if self.capturing else "("
        self.opened.append(f"group{self.groups}")
        found = opened + self.alternatives() + self._close()
        self.within.pop()
        return found

    def _flags(self, flags: re.Match[str]) -> str:
        outside = (self.any_case, self.dot_all)
        self.at = flags.end()
        self.any_case = ("i" in flags[1]) or (self.any_case and "i" not in (flags[2] or ""))
        self.dot_all = ("s" in flags[1]) or (self.dot_all and "s" not in (flags[2] or ""))
        if flags[3] == ")":
            return ""
        inner = self.alternatives() + self._close()
        self.any_case, self.dot_all = outside
        return "(?:" + inner

    def _close(self) -> str:
        if self.at >= len(self.pattern):
            raise ClashError(f"the pattern {self.pattern!r} lacks a ')'.")
        self.at += 1
        return ")"

    def _escape(self) -> str:
        letter = self.pattern[self.at + 1 : self.at + 2]
        if letter in {"A", "z", "Z", "b"} and letter:
            self.plain, self.at = None, self.at + 2
            self.zero_width = self.zero_width or letter == "b"
            return self._line_end() if letter == "Z" else {"A": r"\A", "z": r"\z", "b": r"(?-u:\b)"}[letter]
        if (members := self._shorthand()) is not None:
            self.plain = None
            return members
        return self._literal(self._escaped_char())

    def _shorthand(self) -> str | None:
        r"""A class such as `\d` or `\p{L}`, as a bracketed class; None if the escape is of one character."""
        letter = self.pattern[self.at + 1 : self.at + 2]
        if letter.lower() in _CLASSES:
            self.at += 2
            return f"[{'^' if letter.isupper() else ''}{_CLASSES[letter.lower()]}]"
        if letter not in {"p", "P"}:
            return None
        found = re.compile(r"\\[pP](?:\{([A-Za-z]+)\}|([A-Z]))").match(self.pattern, self.at)
        name = (found[1] or found[2]) if found is not None else ""
        if found is None or not (name in _POSIX or _CATEGORY.fullmatch(name)):
            raise self.refuse(f"an unknown class after '\\{letter}'")
        self.at = found.end()
        inverse = "^" if letter == "P" else ""
        return f"[{inverse}{_POSIX[name]}]" if name in _POSIX else f"[{inverse}\\p{{{name}}}]"

    def _escaped_char(self) -> str:
        rest = self.pattern[self.at + 1 :]
        code = re.match(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|x\{([0-9A-Fa-f]{1,6})\}", rest)
        if code is not None:
            self.at += 1 + code.end()
            value = int(code[1] or code[2] or code[3], 16)
            if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:  # noqa: PLR2004 - the limits of Unicode
                raise self.refuse("a code that is no character")
            return chr(value)
        char = rest[:1]
        if char == "" or (char.isascii() and char.isalnum() and char not in _CONTROLS):
            raise self.refuse(f"the escape '\\{char}'")
        self.at += 2
        return _CONTROLS.get(char, char)

    def _class(self) -> str:
        self.plain = None
        self.at += 1
        inverse = self.pattern.startswith("^", self.at)
        self.at += inverse
        members: list[str] = []
        while not self.pattern.startswith("]", self.at):
            if self.at >= len(self.pattern):
                raise ClashError(f"the pattern {self.pattern!r} lacks a ']'.")
            members.append(self._member())
        if not members:
            raise self.refuse("an empty class")
        self.at += 1
        return f"[{'^' if inverse else ''}{''.join(members)}]"

    def _member(self) -> str:
        if self.pattern[self.at] == "[" or self.pattern.startswith("&&", self.at):
            raise self.refuse("a class inside a class")
        if self.pattern[self.at] == "\\" and (members := self._shorthand()) is not None:
            return members
        low = self._class_char()
        is_range = self.pattern.startswith("-", self.at) and not self.pattern.startswith(("-]", "-["), self.at)
        if not is_range:
            return _both_cases(low) if self.any_case else _escaped(low)
        self.at += 1
        if self.at >= len(self.pattern):
            raise ClashError(f"the pattern {self.pattern!r} lacks a ']'.")
        high = self._class_char()
        if low > high:
            raise self.refuse(f"the range {low}-{high}")
        members = f"{_escaped(low)}-{_escaped(high)}"
        return members + self._other_case(low, high) if self.any_case else members

    def _other_case(self, low: str, high: str) -> str:
        ranges = [(max(low, first), min(high, last)) for first, last in (("a", "z"), ("A", "Z"))]
        return "".join(f"{start.swapcase()}-{end.swapcase()}" for start, end in ranges if start <= end)

    def _class_char(self) -> str:
        if self.pattern[self.at] == "\\":
            return self._escaped_char()
        self.at += 1
        return self.pattern[self.at - 1]
