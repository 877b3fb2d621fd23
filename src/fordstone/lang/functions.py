"""The table of supported functions and operators: what each takes, what comes out, and a line for the docs.

This is the one place where a function is declared; its type rule is in `rules`, its meaning on Polars in
`polars.lower` under the same name. What all have in common is left out of the lines: a null argument gives null
unless the line says otherwise, and nothing ever stops a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fordstone.lang import rules
from fordstone.lang.json import path_steps
from fordstone.lang.schema import BIGINT, BOOLEAN, DATE, DOUBLE, INT, STRING, TIMESTAMP


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function or operator.

    `example` is a complete expression; `fewest` and `most` count arguments (`most=None`: any number).
    """

    name: str
    signature: str
    about: str
    example: str
    fewest: int
    most: int | None
    rule: rules.Rule


def _table(*rows: tuple[str, str, str, str, int, int | None, rules.Rule]) -> dict[str, Function]:
    keys = ("name", "signature", "about", "example", "fewest", "most", "rule")
    return {row[0]: Function(**dict(zip(keys, row, strict=True))) for row in rows}  # type: ignore[arg-type]


_takes = rules.takes

# fmt: off
FUNCTIONS: Final[dict[str, Function]] = _table(
    # arithmetic
    ("+", "a + b", "Sum; integers wrap. Also a timestamp or date and an interval.", "1 + 2", 2, 2, rules.numeric("+")),
    ("-", "a - b", "Difference; integers wrap. Also a timestamp or date and an interval.", "5 - 2", 2, 2, rules.numeric("-")),
    ("*", "a * b", "Product; integers wrap.", "3 * 4", 2, 2, rules.numeric("*")),
    ("/", "a / b", "Quotient, a double (or a decimal of decimals); null if b is zero.", "7 / 2", 2, 2, rules.numeric("/")),
    ("%", "a % b", "Remainder with the sign of a; null if b is zero. Also mod(a, b).", "-7 % 3", 2, 2, rules.numeric("%")),
    ("negative", "-a", "The negated number; the smallest integer stays as it is.", "-(1 + 2)", 1, 1, rules.negative),
    # comparison and logic
    ("=", "a = b", "Equal. NaN equals NaN, and 0.0 equals -0.0. Also a == b.", "1 = 1.0", 2, 2, rules.comparison),
    ("<>", "a <> b", "Not equal. Also a != b.", "'a' <> 'b'", 2, 2, rules.comparison),
    ("<=>", "a <=> b", "Equal, where null equals null; never null.", "NULL <=> NULL", 2, 2, rules.comparison),
    ("<", "a < b", "Less than. NaN is greater than any other number.", "1 < 2", 2, 2, rules.comparison),
    ("<=", "a <= b", "Less than or equal.", "1 <= 2", 2, 2, rules.comparison),
    (">", "a > b", "Greater than.", "2 > 1", 2, 2, rules.comparison),
    (">=", "a >= b", "Greater than or equal.", "2 >= 1", 2, 2, rules.comparison),
    ("and", "a AND b", "True if both are true; false AND null is false.", "TRUE AND NULL", 2, 2, rules.logic),
    ("or", "a OR b", "True if one is true; true OR null is true.", "TRUE OR NULL", 2, 2, rules.logic),
    ("not", "NOT a", "The opposite; null stays null.", "NOT FALSE", 1, 1, rules.logic),
    ("isnull", "a IS NULL", "Whether a is null; never null.", "NULL IS NULL", 1, 1, rules.anything(BOOLEAN)),
    ("isnotnull", "a IS NOT NULL", "Whether a is not null; never null.", "1 IS NOT NULL", 1, 1, rules.anything(BOOLEAN)),
    ("in", "a IN (b, c, ...)", "Whether a equals one of the values; null if none is equal and one is null.", "2 IN (1, 2)", 2, None, rules.membership),
    # choice
    ("case", "CASE WHEN c THEN a ... ELSE b END", "The value of the first condition that is true.", "CASE WHEN 1 > 2 THEN 'a' ELSE 'b' END", 3, None, rules.branches),
    ("coalesce", "coalesce(a, b, ...)", "The first value that is not null.", "coalesce(NULL, 2)", 1, None, rules.same),
    ("greatest", "greatest(a, b, ...)", "The greatest value; nulls are ignored, NaN is the greatest.", "greatest(1, NULL, 3)", 2, None, rules.extreme),
    ("least", "least(a, b, ...)", "The least value; nulls are ignored.", "least(3, NULL, 1)", 2, None, rules.extreme),
    # text
    ("concat", "concat(a, b, ...)", "The texts concatenated; null if one is null. Also a || b.", "concat('a', 1)", 1, None, rules.texts),
    ("lower", "lower(s)", "The text in lower case.", "lower('ÀB')", 1, 1, _takes(STRING, STRING)),
    ("upper", "upper(s)", "The text in upper case.", "upper('aß')", 1, 1, _takes(STRING, STRING)),
    ("trim", "trim([BOTH chars FROM] s)", "The text without spaces (or the given characters) at both ends.", "trim('  a ')", 1, 2, _takes(STRING, STRING, STRING)),
    ("ltrim", "ltrim([chars,] s)", "The text without spaces (or the given characters) at the beginning.", "ltrim('  a ')", 1, 2, _takes(STRING, STRING, STRING)),
    ("rtrim", "rtrim([chars,] s)", "The text without spaces (or the given characters) at the end.", "rtrim('  a ')", 1, 2, _takes(STRING, STRING, STRING)),
    ("substring", "substring(s, start[, length])", "The characters from start on, counted from 1; a negative start counts from the end. Also substr.", "substring('héllo', 2, 3)", 2, 3, _takes(STRING, STRING, INT, INT)),
    ("length", "length(s)", "The number of characters. Also char_length, len.", "length('日本')", 1, 1, _takes(INT, STRING)),
    ("replace", "replace(s, what[, by])", "Every occurrence replaced by another text, or removed.", "replace('aba', 'a', 'x')", 2, 3, rules.written_out(_takes(STRING, STRING, STRING, STRING), 1, 2)),
    ("split", "split(s, regex[, limit])", "The parts between matches, as an array.", "split('a b', ' ')", 2, 3, rules.separated),
    ("split_part", "split_part(s, separator, n)", "The n-th part from 1; a negative n counts from the end; empty if there is none.", "split_part('a.b', '.', 2)", 3, 3, rules.split_part),
    ("like", "s LIKE pattern [ESCAPE c]", "Whether the whole text matches; % matches any text, _ any one character.", "'abc' LIKE 'a%'", 2, 3, rules.like),
    ("rlike", "s RLIKE regex", "Whether the regular expression matches a part of the text. Also REGEXP, regexp_like.", "'ab1' RLIKE '[0-9]'", 2, 2, rules.regex),
    ("regexp_replace", "regexp_replace(s, regex, by)", "Every match replaced; $1 in by is the first group.", "regexp_replace('a-b', '([a-z])-', '$1+')", 3, 3, rules.substituted),
    ("regexp_extract", "regexp_extract(s, regex[, group])", "A group of the first match: group 1 by default, 0 for the whole match; an empty text if nothing matches.", "regexp_extract('no 42', '([0-9]+)')", 2, 3, rules.extracted),
    ("instr", "instr(s, what)", "The position of the first occurrence, counted in characters from 1; 0 if there is none.", "instr('héllo', 'l')", 2, 2, _takes(INT, STRING, STRING)),
    ("startswith", "startswith(s, what)", "Whether the text begins with another.", "startswith('abc', 'ab')", 2, 2, _takes(BOOLEAN, STRING, STRING)),
    ("endswith", "endswith(s, what)", "Whether the text ends with another.", "endswith('abc', 'bc')", 2, 2, _takes(BOOLEAN, STRING, STRING)),
    ("contains", "contains(s, what)", "Whether the text contains another.", "contains('abc', 'b')", 2, 2, _takes(BOOLEAN, STRING, STRING)),
    ("left", "left(s, n)", "The first n characters; none if n is not positive.", "left('héllo', 2)", 2, 2, _takes(STRING, STRING, INT)),
    ("right", "right(s, n)", "The last n characters; none if n is not positive.", "right('héllo', 2)", 2, 2, _takes(STRING, STRING, INT)),
    ("lpad", "lpad(s, n[, by])", "Padded at the beginning with spaces (or the given text) to n characters; truncated if it is longer.", "lpad('7', 3, '0')", 2, 3, rules.padded),
    ("rpad", "rpad(s, n[, by])", "Padded at the end with spaces (or the given text) to n characters; truncated if it is longer.", "rpad('a', 3, '.')", 2, 3, rules.padded),
    ("concat_ws", "concat_ws(separator, a, b, ...)", "The texts joined with a separator; nulls are ignored.", "concat_ws('-', 'a', NULL, 1)", 2, None, rules.written_out(rules.texts, 0)),
    ("reverse", "reverse(s)", "The characters in reverse order.", "reverse('abc')", 1, 1, _takes(STRING, STRING)),
    # hashes
    ("hash", "hash(a, b, ...)", "A 32-bit hash of the values (Murmur3, seed 42); nulls are ignored, so it is never null.", "hash('a', 1)", 1, None, rules.hashed(INT)),
    ("xxhash64", "xxhash64(a, b, ...)", "A 64-bit hash of the values (XXH64, seed 42); nulls are ignored, so it is never null.", "xxhash64('a', 1)", 1, None, rules.hashed(BIGINT)),
    # arrays, maps and structs
    ("size", "size(a)", "The number of elements of an array or of entries of a map; -1 for null. Also cardinality.", "size(split('a b', ' '))", 1, 1, rules.size),
    ("element", "a[n], a['key']", "The element of an array at index n, counted from 0, or the value of a key of a map; null if there is none.", "split('a b', ' ')[1]", 2, 2, rules.element),
    ("element_at", "element_at(a, n)", "The element of an array at position n, counted from 1 or from -1 backwards, or the value of a key of a map; null if there is none.", "element_at(split('a b', ' '), -1)", 2, 2, rules.element_at),
    ("field", "a.name", "A field of a struct, also a['name']; of an array of structs the array of that field.", "struct(1 AS x, 2 AS y).x", 2, 2, rules.field),
    ("named_struct", "named_struct('a', x, 'b', y, ...)", "A struct. Also struct(x AS a, y AS b, ...), where a column keeps its name.", "named_struct('a', 1, 'b', 'x')", 2, None, rules.named_struct),
    ("array", "array(a, b, ...)", "An array of the values.", "array(1, 2, NULL)", 1, None, rules.array),
    ("map", "map(key, value, ...)", "A map; null if a key is null or there twice.", "map('a', 1, 'b', 2)", 2, None, rules.entries),
    ("map_keys", "map_keys(map)", "The keys of a map, as an array.", "map_keys(map('a', 1, 'b', 2))", 1, 1, rules.part_of_map("key")),
    ("map_values", "map_values(map)", "The values of a map, as an array.", "map_values(map('a', 1, 'b', 2))", 1, 1, rules.part_of_map("value")),
    # JSON text
    ("get_json_object", "get_json_object(s, path)", "What stands at a path such as '$.a.b[0]' in JSON text: text as it is, other values as JSON; null if there is nothing, or the text is not JSON.", "get_json_object('{\"a\": [1, 2]}', '$.a[1]')", 2, 2, rules.json_path(path_steps)),
    ("from_json", "from_json(s, schema)", "JSON text read as columns ('a INT, b STRING') or as a type ('array<int>'). A field that does not fit is null; text that is not JSON gives a struct of nulls, or null.", "from_json('{\"a\": 1}', 'a INT').a", 2, 2, rules.json_value),
    ("to_json", "to_json(a)", "A struct, map or array as JSON text; fields that are null are left out.", "to_json(struct(1 AS x, NULL AS y))", 1, 1, rules.json_written),
    # numbers
    ("abs", "abs(x)", "The absolute value; the smallest integer stays as it is.", "abs(-2)", 1, 1, rules.sign_kept),
    ("round", "round(x[, places])", "Rounded half away from zero, judged by the decimal digits that are shown.", "round(2.675D, 2)", 1, 2, rules.rounded),
    ("floor", "floor(x)", "Rounded down to a whole number, a bigint.", "floor(-1.5)", 1, 1, rules.whole),
    ("ceil", "ceil(x)", "Rounded up to a whole number, a bigint. Also ceiling.", "ceil(1.2)", 1, 1, rules.whole),
    ("sqrt", "sqrt(x)", "Square root; NaN of a negative number.", "sqrt(2)", 1, 1, _takes(DOUBLE, DOUBLE)),
    ("exp", "exp(x)", "e to the power of x.", "exp(1)", 1, 1, _takes(DOUBLE, DOUBLE)),
    ("ln", "ln(x)", "Natural logarithm; null if x is not positive. Also log(x).", "ln(10)", 1, 1, _takes(DOUBLE, DOUBLE)),
    ("log10", "log10(x)", "Logarithm to base 10; null if x is not positive.", "log10(1000)", 1, 1, _takes(DOUBLE, DOUBLE)),
    ("log2", "log2(x)", "Logarithm to base 2; null if x is not positive.", "log2(8)", 1, 1, _takes(DOUBLE, DOUBLE)),
    ("pow", "pow(x, y)", "x to the power of y, a double. Also power.", "pow(2, 10)", 2, 2, _takes(DOUBLE, DOUBLE, DOUBLE)),
    ("sign", "sign(x)", "-1.0, 0.0 or 1.0. Also signum.", "sign(-3)", 1, 1, _takes(DOUBLE, DOUBLE)),
    ("isnan", "isnan(x)", "Whether x is NaN; false for null.", "isnan(1)", 1, 1, _takes(BOOLEAN, DOUBLE)),
    # time
    ("date_trunc", "date_trunc(unit, ts)", "The timestamp truncated to the unit (weeks begin on Monday).", "date_trunc('hour', TIMESTAMP '2024-05-06 07:08:09')", 2, 2, rules.truncated),
    ("year", "year(ts)", "The year.", "year(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("quarter", "quarter(ts)", "The quarter, 1 to 4.", "quarter(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("month", "month(ts)", "The month, 1 to 12.", "month(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("weekofyear", "weekofyear(ts)", "The ISO week, 1 to 53.", "weekofyear(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("day", "day(ts)", "The day of the month. Also dayofmonth.", "day(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("dayofweek", "dayofweek(ts)", "1 for Sunday to 7 for Saturday.", "dayofweek(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("weekday", "weekday(ts)", "0 for Monday to 6 for Sunday.", "weekday(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("dayofyear", "dayofyear(ts)", "1 to 366.", "dayofyear(DATE '2024-05-06')", 1, 1, _takes(INT, DATE)),
    ("hour", "hour(ts)", "The hour, 0 to 23.", "hour(TIMESTAMP '2024-05-06 07:08:09')", 1, 1, _takes(INT, TIMESTAMP)),
    ("minute", "minute(ts)", "The minute, 0 to 59.", "minute(TIMESTAMP '2024-05-06 07:08:09')", 1, 1, _takes(INT, TIMESTAMP)),
    ("second", "second(ts)", "The second, 0 to 59.", "second(TIMESTAMP '2024-05-06 07:08:09')", 1, 1, _takes(INT, TIMESTAMP)),
    ("date_add", "date_add(d, n)", "The date n days later.", "date_add(DATE '2024-02-28', 2)", 2, 2, rules.days_moved),
    ("date_sub", "date_sub(d, n)", "The date n days earlier.", "date_sub(DATE '2024-03-01', 1)", 2, 2, rules.days_moved),
    ("datediff", "datediff(end, start)", "The number of days from start to end. Also date_diff.", "datediff(DATE '2024-03-01', DATE '2024-02-01')", 2, 2, _takes(INT, DATE, DATE)),
    ("to_timestamp", "to_timestamp(s[, format])", "Text read as a timestamp: by a [pattern](#time-patterns), else like CAST(s AS TIMESTAMP).", "to_timestamp('06/05/2024 07:08', 'dd/MM/yyyy HH:mm')", 1, 2, rules.formatted(TIMESTAMP)),
    ("to_date", "to_date(s[, format])", "Text or a timestamp read as a date: text by a [pattern](#time-patterns), else like CAST(s AS DATE).", "to_date('6.5.2024', 'd.M.yyyy')", 1, 2, rules.formatted(DATE)),
    ("date_format", "date_format(ts, format)", "The timestamp, in UTC, as text by a [pattern](#time-patterns).", "date_format(TIMESTAMP '2024-05-06 07:08:09', 'EEE d MMM, h:mm a')", 2, 2, rules.written_as(TIMESTAMP)),
    ("from_unixtime", "from_unixtime(n[, format])", "The time n seconds after 1970 UTC as text: yyyy-MM-dd HH:mm:ss, or by a [pattern](#time-patterns).", "from_unixtime(1714979289)", 1, 2, rules.written_as(BIGINT)),
    ("unix_timestamp", "unix_timestamp(s[, format])", "Seconds since 1970 UTC of a timestamp, or of text that is read by yyyy-MM-dd HH:mm:ss or another [pattern](#time-patterns). Also to_unix_timestamp.", "unix_timestamp('2024-05-06', 'yyyy-MM-dd')", 1, 2, rules.seconds_of),
    ("from_utc_timestamp", "from_utc_timestamp(ts, zone)", "What the clock of a zone shows at the time.", "from_utc_timestamp(TIMESTAMP '2024-05-06 07:08:09', 'Europe/Berlin')", 2, 2, rules.zoned),
    ("to_utc_timestamp", "to_utc_timestamp(ts, zone)", "The time at which the clock of a zone shows ts: the first of two, and of none as if the clock had not been put forward yet.", "to_utc_timestamp(TIMESTAMP '2024-05-06 07:08:09', 'Europe/Berlin')", 2, 2, rules.zoned),
    ("unix_micros", "unix_micros(ts)", "Microseconds since 1970 UTC.", "unix_micros(TIMESTAMP '1970-01-01 00:00:01')", 1, 1, rules.moment_only),
    ("unix_millis", "unix_millis(ts)", "Milliseconds since 1970 UTC, rounded down.", "unix_millis(TIMESTAMP '1970-01-01 00:00:01')", 1, 1, rules.moment_only),
    ("unix_seconds", "unix_seconds(ts)", "Seconds since 1970 UTC, rounded down.", "unix_seconds(TIMESTAMP '1970-01-01 00:00:01')", 1, 1, rules.moment_only),
    ("timestamp_micros", "timestamp_micros(n)", "The timestamp n microseconds after 1970 UTC.", "timestamp_micros(1000000)", 1, 1, _takes(TIMESTAMP, BIGINT)),
    ("timestamp_millis", "timestamp_millis(n)", "The timestamp n milliseconds after 1970 UTC; null if it is out of range.", "timestamp_millis(1714979289123)", 1, 1, _takes(TIMESTAMP, BIGINT)),
    ("timestamp_seconds", "timestamp_seconds(n)", "The timestamp n seconds after 1970 UTC, which may have a fraction; null if it is out of range.", "timestamp_seconds(1714979289)", 1, 1, rules.counted_seconds),
)

FORMS: Final = (
    ("CAST(x AS type)", "Converted to another type; null if it cannot be read. Integers wrap; floats are truncated, and limited to the range of the type. Also x::type, int(x) and the like.", "CAST('12.7' AS INT)"),
    ("TRY_CAST(x AS type)", "Like CAST, but it never wraps and reads text strictly: what does not fit is null.", "TRY_CAST(300 AS TINYINT)"),
    ("s ILIKE pattern [ESCAPE c]", "The same as lower(s) LIKE pattern, with the pattern in lower case too.", "'ABC' ILIKE 'a%'"),
    ("a BETWEEN b AND c", "The same as a >= b AND a <= c.", "2 BETWEEN 1 AND 3"),
    ("a IS TRUE", "Whether a is true; never null. Also IS FALSE, and with NOT.", "NULL IS TRUE"),
    ("a IS DISTINCT FROM b", "The opposite of a <=> b.", "NULL IS DISTINCT FROM 1"),
    ("if(c, a, b)", "a where c is true, else b.", "if(1 > 2, 'a', 'b')"),
    ("nullif(a, b)", "Null where a equals b, else a.", "nullif(1, 1)"),
    ("nvl2(a, b, c)", "b where a is not null, else c.", "nvl2(1, 'some', 'none')"),
    ("EXTRACT(part FROM ts)", "The same as year(ts), month(ts) and so on.", "EXTRACT(HOUR FROM TIMESTAMP '2024-05-06 07:08:09')"),
    ("INTERVAL '10' SECOND", "A duration to add to a timestamp or a date: from microseconds to weeks, or months and years.", "TIMESTAMP '2024-05-06 07:08:09' + INTERVAL '10' SECOND"),
)
# fmt: on
"""What is written with a grammar of its own: how, what it means, an example."""

ALIASES: Final = {
    "mod": "%",
    "power": "pow",
    "ceiling": "ceil",
    "signum": "sign",
    "substr": "substring",
    "len": "length",
    "char_length": "length",
    "character_length": "length",
    "lcase": "lower",
    "ucase": "upper",
    "nvl": "coalesce",
    "ifnull": "coalesce",
    "dayofmonth": "day",
    "regexp": "rlike",
    "regexp_like": "rlike",
    "log": "ln",
    "cardinality": "size",
    "date_diff": "datediff",
    "to_unix_timestamp": "unix_timestamp",
}
"""Other names for the same function."""

SYNTAX: Final = frozenset(
    {
        "+",
        "-",
        "*",
        "/",
        "%",
        "=",
        "<>",
        "<=>",
        "<",
        "<=",
        ">",
        ">=",
        "and",
        "or",
        "not",
        "in",
        "case",
        "element",
        "field",
    }
)
"""Entries that are written as operators and cannot be called by name."""

DIFFERENCES: Final = (
    "Patterns of times and zones are string literals; patterns have the letters y M d H h K k a m s S X x Z, and to write also D E. Zones are regions such as Europe/Berlin, UTC, or offsets.",
    "Column names are case-sensitive.",
    "Text in arithmetic is an error, where Spark reads it as a double; so is comparing a condition with a number.",
    "Conditions inside conditions (a = b = c) and sums beside || need parentheses.",
    "The difference of two timestamps is written unix_micros(a) - unix_micros(b); intervals are not values of their own.",
    "Patterns, separators, units, places and positions of split_part, LIKE, RLIKE, split, replace, regexp_replace, regexp_extract, concat_ws, round and date_trunc are literals; so are the length, at most 10000, and the padding of lpad and rpad.",
    "What regexp_replace replaces and what split separates by cannot be empty (but split by '' gives the characters); a group that can be empty is not repeated in regexp_replace and regexp_extract.",
    "The pattern of split has no $ and no \\Z, and neither has a group that is extracted or used in a replacement; write \\z, or put them outside of the group.",
    "Regular expressions have no look-around, no back references and no possessive repetition; word boundaries consider ASCII words only.",
    "In a text that ends with a carriage return and a line feed, $ and \\Z also match between the two.",
    "Text is read as a timestamp with Z, UTC, GMT or an offset; other named zones, and a time without a day, give null.",
    "Text is not read as a number in hexadecimal, nor with digits other than 0 to 9.",
    "Floats are written with the fewest digits that distinguish them, as Java does from 19 on; Java 17 sometimes writes one more.",
    "The year, month and day of times beyond the year 262142 are null.",
    "The mean of decimals is a double.",
    "Bytes are not cast to text, and neither are arrays, maps and structs: to_json writes them.",
    "Arrays, maps and structs are not compared, and structs and maps have no hash; names of fields are case-sensitive.",
    "A map with a null or repeated key is null, and so is element_at with a position that is 0, where Spark stops; of a repeated name in JSON text the last one counts.",
    "JSON text is read strictly, without single quotes, NaN, or anything after its end. Paths are literals without *.",
    "A decimal result that needs more than 38 digits in between, and negating or rounding more than 34, is an error when the pipeline is built.",
)
"""Where an expression is stricter here than in Spark with ANSI mode off, or gives something else; for the docs."""
