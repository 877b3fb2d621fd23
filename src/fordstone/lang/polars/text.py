"""Text on Polars, counted in characters, with Spark's positions and Java's regular expressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from fordstone.lang.like import extracting, like_regex, plain_text, replacing, rust_regex
from fordstone.lang.rules import text_of
from fordstone.lang.term import Call, Literal

_LENGTH_MAX: Final = 2**31 - 1


def trim(name: str, args: Sequence[pl.Expr]) -> pl.Expr:
    """Without the given characters (a space by default, and no other white space) at the ends."""
    text, chars = args[0], (args[1] if len(args) > 1 else pl.lit(" "))
    strip = {"ltrim": text.str.strip_chars_start, "rtrim": text.str.strip_chars_end, "trim": text.str.strip_chars}
    found = strip[name](chars)
    return found if len(args) == 1 else pl.when(chars.is_not_null()).then(found)


def substring(args: Sequence[pl.Expr]) -> pl.Expr:
    """A part from `start` (1 is the first, 0 too, negative counts from the end) of at most `length` characters."""
    text, start = args[0], args[1].cast(pl.Int64)
    size = text.str.len_chars().cast(pl.Int64)
    begin = pl.when(start > 0).then(start - 1).when(start < 0).then(size + start).otherwise(0)
    count = args[2].cast(pl.Int64) if len(args) > 2 else pl.lit(_LENGTH_MAX)  # noqa: PLR2004 - the length is the third
    # The length is counted from the start even where that lies before the text.
    end = begin + pl.when(count < 0).then(0).otherwise(count)
    first = begin.clip(lower_bound=0)
    found = text.str.slice(first, (end - first).clip(lower_bound=0))
    return pl.when(start.is_not_null() & count.is_not_null()).then(found)


def replace(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Every occurrence replaced; nothing happens for an empty one."""
    what = text_of(call.args[1])
    return args[0].str.replace_all(what, _text(call, 2, ""), literal=True) if what else args[0]


def split(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """The parts between matches of a regular expression."""
    pattern, limit = text_of(call.args[1]), _number(call, 2, -1)
    if pattern == "":
        chars = args[0].str.split("")
        return pl.when(args[0] == "").then(pl.lit([""])).otherwise(chars)
    plain = plain_text(pattern)
    if limit > 0 and plain is not None:
        parts = args[0].str.splitn(plain, limit)
        fields = pl.concat_list([parts.struct.field(f"field_{at}") for at in range(limit)]).list.drop_nulls()
        return pl.when(args[0].is_not_null()).then(fields)
    if plain is not None:
        return args[0].str.split(plain)
    return args[0].str.split(rust_regex(pattern), literal=False)


def split_part(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """The n-th part from the beginning, or from the end; empty if there is none."""
    separator, index = text_of(call.args[1]), _number(call, 2, 1)
    if separator == "":
        return args[0] if index in {1, -1} else pl.when(args[0].is_not_null()).then(pl.lit(""))
    found = args[0].str.split(separator).list.get(index - 1 if index > 0 else index, null_on_oob=True)
    return pl.when(args[0].is_not_null()).then(found.fill_null(""))


def like(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Whether the whole text fits the pattern."""
    return args[0].str.contains(like_regex(text_of(call.args[1]), _text(call, 2, "\\")))


def rlike(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Whether the regular expression is found."""
    return args[0].str.contains(rust_regex(text_of(call.args[1])))


def regexp_replace(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Every match of a regular expression replaced."""
    return args[0].str.replace_all(*replacing(text_of(call.args[1]), text_of(call.args[2])))


def regexp_extract(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """A group of the first match; empty if there is no match, or the group has no part in it."""
    regex, group = extracting(text_of(call.args[1]), _number(call, 2, 1))
    return pl.when(args[0].is_not_null()).then(args[0].str.extract(regex, group).fill_null(""))


def _text(call: Call, at: int, default: str) -> str:
    return text_of(call.args[at]) if at < len(call.args) else default


def _number(call: Call, at: int, default: int) -> int:
    found = call.args[at] if at < len(call.args) else None
    return found.value if isinstance(found, Literal) and isinstance(found.value, int) else default


def instr(args: Sequence[pl.Expr]) -> pl.Expr:
    """The first place, counted in characters from 1, or 0."""
    text, what = args
    place = text.str.find(what, literal=True)  # in bytes
    before = text.cast(pl.Binary).bin.head(place).cast(pl.String).str.len_chars().cast(pl.Int32)
    return pl.when(text.is_not_null() & what.is_not_null()).then(pl.when(place.is_null()).then(0).otherwise(before + 1))


def right(args: Sequence[pl.Expr]) -> pl.Expr:
    """The last characters."""
    count = args[1].cast(pl.Int64)
    found = substring([args[0], -count])
    return pl.when(args[0].is_not_null() & (count <= 0)).then(pl.lit("")).otherwise(found)


def pad(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Filled up to a length that is written out, or cut off to it."""
    size, by = max(_number(call, 1, 0), 0), _text(call, 2, " ")
    cut = args[0].str.slice(0, size)
    if not by:
        return cut
    missing = (size - args[0].str.len_chars().cast(pl.Int64)).clip(lower_bound=0)
    filling = pl.lit((by * (size // len(by) + 1))[:size]).str.slice(0, missing)
    return pl.concat_str([filling, cut] if call.function == "lpad" else [cut, filling])


def concat_ws(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """The texts joined with a separator that is a literal; nulls are ignored."""
    return pl.concat_str(args[1:], separator=text_of(call.args[0]), ignore_nulls=True)


def reverse(text: pl.Expr) -> pl.Expr:
    """The characters from the last to the first; Polars would keep combining marks after their letter."""
    return text.str.split("").list.reverse().list.join("")
