"""The cases that `expected_from_spark.py` puts to Spark: tables of awkward rows, and every function on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from itertools import product

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Group:
    """Rows, and the expressions to evaluate on each of them. Timestamps are microseconds, dates days."""

    name: str
    columns: dict[str, str]
    rows: list[tuple[object, ...]]
    expressions: list[str]


def _logic() -> Group:
    three = [True, False, None]
    return Group(
        "logic",
        {"a": "boolean", "b": "boolean", "i": "int"},
        [(a, b, i) for (a, b), i in zip(product(three, three), [1, 2, None] * 3, strict=True)],
        [
            "a AND b", "a OR b", "NOT a", "NOT a AND b OR a", "a = b", "a <> b", "a <=> b", "a < b", "a >= b",
            "a IS NULL", "a IS NOT NULL", "NOT a IS NULL", "a IS TRUE", "a IS NOT FALSE", "a IS DISTINCT FROM b",
            "a IS NOT DISTINCT FROM b", "a = TRUE", "NOT a = b", "! a", "i = 1 AND a", "i IN (1, NULL)",
            "i NOT IN (1, NULL)", "i IN (1, 3)", "i NOT IN (1, 3)", "i BETWEEN 1 AND 2", "i NOT BETWEEN 2 AND 3",
            "CASE WHEN a THEN 1 WHEN b THEN 2 END", "CASE WHEN a THEN 'x' WHEN b THEN 'y' ELSE 'z' END",
            "CASE i WHEN 1 THEN 'one' WHEN 2 THEN 'two' ELSE 'else' END", "CASE i WHEN NULL THEN 1 ELSE 2 END", "IF(NULL, i, 3)",
            "IF(a, 1, 2.5)", "IF(a, i, 'n')", "coalesce(a, b)", "coalesce(i, 9L)", "coalesce(NULL, i, 3)",
            "nvl(i, 7)", "ifnull(i, 7)", "nullif(i, 1)", "nullif(a, b)", "nvl2(i, 'some', 'none')", "CAST(a AS INT)",
            "CAST(a AS DOUBLE)", "CAST(a AS STRING)", "CAST(a AS DECIMAL(5,2))", "CAST(a AS TIMESTAMP)", "concat(a, '!')",
            "greatest(a, b)", "least(a, b)", "CAST(NULL AS INT) + i", "NULL IS NULL", "NULL AND a", "NULL OR a",
            "a = 'true'", "i = '1'", "i < '1.5'", "i IN ('1', 'x')",
        ],
    )  # fmt: skip


def _integers() -> Group:
    bs = [127, -128, 0, 1, -1, None]
    hs = [32767, -32768, 0, 7, -7, None]
    ints = [2**31 - 1, -(2**31), 0, 1, -1, 5, -7, None]
    longs = [2**63 - 1, -(2**63), 0, 1, -1, 10**15, -(2**53) - 1, None]
    rows: list[tuple[object, ...]] = []
    for at, (i, j) in enumerate(product(ints, [2**31 - 1, -(2**31), 0, -1, 3, None])):
        rows.append((bs[at % 6], hs[at // 6 % 6], i, j, longs[at % 8], longs[at // 8 % 8]))
    return Group(
        "integers",
        {"b": "tinyint", "h": "smallint", "i": "int", "j": "int", "l": "bigint", "m": "bigint"},
        rows,
        [
            *(f"{one} {op} {two}" for op in "+-*/%" for one, two in [("i", "j"), ("l", "m"), ("b", "h"), ("b", "b"), ("i", "l"), ("h", "3"), ("l", "2")]),
            *(f"{one} {op} {two}" for op in ("=", "<>", "<", "<=", ">", ">=", "<=>") for one, two in [("i", "j"), ("l", "m"), ("b", "l")]),
            "-b", "-h", "-i", "-l", "abs(b)", "abs(h)", "abs(i)", "abs(l)", "i + NULL", "mod(i, j)", "i * 2 - j / 3",
            "i + j * 2", "(i + j) * 2", "i - (j - 1)", "i - j - 1", "-i + j", "- -i", "i - -1", "-(5)", "i * -1",
            "CAST(i AS TINYINT)", "CAST(i AS SMALLINT)", "CAST(l AS INT)", "CAST(l AS TINYINT)", "CAST(b AS BIGINT)",
            "CAST(i AS FLOAT)", "CAST(l AS FLOAT)", "CAST(l AS DOUBLE)", "CAST(i AS STRING)", "CAST(l AS STRING)",
            "CAST(b AS STRING)", "CAST(i AS BOOLEAN)", "CAST(l AS DECIMAL(20,0))", "CAST(l AS DECIMAL(10,2))",
            "CAST(l AS DECIMAL(38,20))", "CAST(i AS DECIMAL(3,1))", "CAST(i AS TIMESTAMP)", "CAST(l AS TIMESTAMP)",
            "CAST(b AS TIMESTAMP)", "timestamp_micros(l)", "round(i)", "round(i, -1)", "round(i, 2)", "round(b, -1)",
            "round(h, -2)", "round(l, -1)", "round(l, -18)", "round(l, -19)", "round(l, -25)", "round(i, -10)",
            "floor(i)", "ceil(l)", "floor(b)", "sqrt(i)", "exp(b)", "ln(i)", "log10(l)", "log2(i)", "pow(i, 2)",
            "pow(b, 3)", "sign(i)", "sign(l)", "isnan(i)", "greatest(i, j)", "least(i, j)", "greatest(i, l, b)",
            "least(l, m, 0)", "greatest(i, 1.5)", "least(i, 0.5D)", "i IN (1, 5, -7)", "l IN (1, 2.5)", "i BETWEEN -1 AND 5",
            "i BETWEEN 0.5 AND 1.5", "coalesce(i, l)", "coalesce(b, h, 1)", "nullif(l, 0)", "i + 1.5", "i * 1.5", "i / 1.5",
            "i % 1.5", "l + 1.5", "l * 1.5", "l / 1.5", "i + 1.5D", "l + 1.5F", "i = 1.0", "l > 0.5", "i <=> 1.0",
            "i + 1L", "b + 1Y", "b + 1S", "h * 300", "i || l", "concat(i, ':', j)", "i + 2147483648", "l - 9223372036854775807",
            "-2147483648 + i", "-9223372036854775808 - l", "l / 0", "l % 0", "i / NULL", "CAST(i AS INT)", "i > '3'", "l = '1'",
            "CASE WHEN i > 0 THEN i ELSE l END", "CASE WHEN i > 0 THEN i ELSE 0.5 END", "CASE WHEN i > 0 THEN i ELSE 'x' END",
        ],
    )  # fmt: skip


def _floats() -> Group:
    xs = [
        0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -2.5, 2.5, 3.7, -3.7, NAN, INF, -INF, 1e300, -1e300, 5e-320, 1e-10,
        9007199254740993.0, 4503599627370497.5, 1e19, -1e19, 2147483648.0, 127.5, -129.5, 1.005, 2.675, 0.285, 1234.5678,
        0.1, 1e7, 9999999.999, 1e-3, 9.99e-4, 123456789.125, 1e21, 1.7976931348623157e308, None,
    ]  # fmt: skip
    ys = [0.0, -0.0, 2.0, -3.0, NAN, INF, -INF, 0.1, 1.0, None]
    fs = [
        0.0,
        -0.0,
        1.5,
        NAN,
        INF,
        1.100000023841858,
        16777216.0,
        3.4028234663852886e38,
        -2.5,
        0.0010000000474974513,
        None,
    ]
    rows: list[tuple[object, ...]] = []
    for at, x in enumerate(xs):
        for y in (ys[at % 10], ys[(at + 3) % 10], ys[(at + 7) % 10]):
            rows.append((x, y, fs[len(rows) % 11]))
    return Group(
        "floats",
        {"x": "double", "y": "double", "f": "float"},
        rows,
        [
            *(f"x {op} y" for op in ("+", "-", "*", "/", "%", "=", "<>", "<", "<=", ">", ">=", "<=>")),
            *(f"f {op} x" for op in ("+", "*", "/", "%", "=", "<", ">=")),
            *(f"f {op} f" for op in ("+", "-", "*", "/", "%", "=")),
            "f % 1.5F", "f + 1", "f * 2L", "f + 1.5", "x + 1.5", "x * 9 / 5 + 32", "-x", "-f", "abs(x)", "abs(f)", "x % 0", "x / 0",
            "round(x)", "round(x, 1)", "round(x, 2)", "round(x, 3)", "round(x, -1)", "round(x, -3)", "round(x, 20)", "round(x, -20)",
            "round(x, 400)", "round(f)", "round(f, 1)", "round(f, -1)", "floor(x)", "ceil(x)", "floor(f)", "ceil(f)", "ceiling(x)",
            "sqrt(x)", "exp(x)", "ln(x)", "log(x)", "log10(x)", "log2(x)", "pow(x, y)", "power(x, 2)", "pow(y, x)", "pow(x, 0)", "pow(1, y)", "sign(x)",
            "signum(f)", "isnan(x)", "isnan(f)", "greatest(x, y)", "least(x, y)", "greatest(x, y, f)", "least(f, x)",
            "x IN (1, 2.5)", "x IN (CAST('NaN' AS DOUBLE), 0)", "x BETWEEN -1 AND 2.5", "x NOT BETWEEN 0 AND 1", "nullif(x, y)",
            "coalesce(x, y, 0)", "coalesce(f, x)", "CASE WHEN x > y THEN x ELSE y END", "IF(x > 0, f, 1)",
            "CAST(x AS TINYINT)", "CAST(x AS SMALLINT)", "CAST(x AS INT)", "CAST(x AS BIGINT)", "CAST(f AS INT)", "CAST(f AS BIGINT)",
            "CAST(x AS FLOAT)", "CAST(f AS DOUBLE)", "CAST(x AS BOOLEAN)", "CAST(x AS STRING)", "CAST(f AS STRING)",
            "CAST(x AS DECIMAL(10,2))", "CAST(x AS DECIMAL(38,10))", "CAST(x AS DECIMAL(38,0))", "CAST(x AS DECIMAL(20,1))", "CAST(f AS DECIMAL(20,10))",
            "CAST(x AS TIMESTAMP)", "CAST(f AS TIMESTAMP)", "x = 1", "x > 1L", "x = '1.5'", "x = '1.0'", "x <=> NULL", "x IS NULL",
            "x = CAST('NaN' AS DOUBLE)", "x < CAST('Infinity' AS DOUBLE)", "x || ''", "concat(f, '/', x)", "x = 1.5", "x >= 2.5", "-0.0D = x",
            "x + -0.0D", "CAST(x AS INT) % 3",
        ],
    )  # fmt: skip


def _decimals() -> Group:
    ps = [
        Decimal(v) if v else None
        for v in ["0.00", "1.50", "-1.50", "99999999.99", "-99999999.99", "0.05", "2.25", "-0.01", "1234.56", None]
    ]
    qs = [
        Decimal(v) if v else None
        for v in ["0.00000", "3.00000", "-7.50000", "123456789012345.12345", "0.00001", "-0.33333", None]
    ]
    gs = [
        Decimal(v) if v else None
        for v in [
            "0",
            "9999999999999999999999999999.9999999999",
            "-1.0000000005",
            "1.5",
            "0.0000000001",
            "-9999999999999999999999999999.9999999999",
            "12345678901234567890.5",
            None,
        ]
    ]
    ws = [
        Decimal(v) if v else None
        for v in [
            "0",
            "99999999999999999999999999999999999999",
            "-99999999999999999999999999999999999999",
            "1",
            "-7",
            "10000000000000000000",
            None,
        ]
    ]
    rows: list[tuple[object, ...]] = []
    for at, (p, q) in enumerate(product(ps, qs)):
        rows.append(
            (p, q, gs[at % 8], ws[at // 2 % 7], [3, -7, 0, None, 2**31 - 1][at % 5], [0.5, NAN, None, -2.0][at % 4])
        )
    return Group(
        "decimals",
        {"p": "decimal(10,2)", "q": "decimal(20,5)", "g": "decimal(38,10)", "w": "decimal(38,0)", "i": "int", "x": "double"},
        rows,
        [
            *(f"{one} {op} {two}" for op in "+-*/%" for one, two in [("p", "q"), ("q", "p"), ("p", "p"), ("p", "i"), ("p", "2"), ("p", "1.5"), ("i", "p"), ("p", "x"), ("x", "q")]),
            *(f"{one} {op} {two}" for op in "+-%" for one, two in [("g", "g"), ("w", "w"), ("g", "p"), ("w", "i")]),
            "w * 2", "w * w", "w * 10", "q / CAST(3 AS BIGINT)", "q / 3L", "q * CAST(3 AS TINYINT)", "p + CAST(-3 AS SMALLINT)", "p / -3S", "p / 3", "w / 3", "p + NULL", "p / NULL", "NULL / p", "NULL / 1.5", "p % NULL", "NULL - p", "NULL * p", "NULL % 1.5", "p / 0", "p % 0", "-p", "-q", "abs(p)", "abs(q)",
            *(f"{one} {op} {two}" for op in ("=", "<", ">=", "<>", "<=>") for one, two in [("p", "q"), ("p", "i"), ("g", "w"), ("p", "x"), ("p", "1.5"), ("q", "3")]),
            "round(p)", "round(p, 1)", "round(p, 5)", "round(p, -1)", "round(p, -9)", "round(q, 3)", "round(CAST(g AS DECIMAL(34,9)), 2)", "round(q, -15)", "floor(p)",
            "ceil(p)", "floor(q)", "ceil(CAST(g AS DECIMAL(34,9)))", "ceil(q)", "floor(CAST(p AS DECIMAL(8,0)))", "ceil(CAST(p AS DECIMAL(8,0)))", "sign(p)", "sqrt(p)", "greatest(p, q)", "least(p, i)", "greatest(p, x)", "coalesce(p, q)",
            "coalesce(p, i)", "coalesce(g, w)", "coalesce(p, x)", "CASE WHEN p > 0 THEN p ELSE q END", "p IN (1.5, 2.25)", "p BETWEEN 0 AND 2", "nullif(p, 1.5)",
            "CAST(p AS INT)", "CAST(q AS TINYINT)", "CAST(g AS BIGINT)", "CAST(w AS INT)", "CAST(p AS DOUBLE)", "CAST(g AS DOUBLE)", "CAST(w AS FLOAT)", "CAST(p AS FLOAT)",
            "CAST(p AS STRING)", "CAST(q AS STRING)", "CAST(g AS STRING)", "CAST(w AS STRING)", "CAST(p AS BOOLEAN)", "CAST(p AS DECIMAL(10,1))", "CAST(p AS DECIMAL(5,2))",
            "CAST(q AS DECIMAL(38,20))", "CAST(g AS DECIMAL(38,20))", "CAST(g AS DECIMAL(38,0))", "CAST(w AS DECIMAL(38,1))", "CAST(p AS TIMESTAMP)", "CAST(g AS TIMESTAMP)",
            "concat(p, '')", "p = '1.5'", "p > '0'", "CAST(p AS DECIMAL(20,10)) || ''", "CAST(p / 1000000 AS STRING)", "isnan(p)", "pow(p, 2)", "p * 0.1", "p * 0", "p + 0.0",
            "1.50 + i", "0.1 + 0.2", "1e2 + p", "100BD + p",
        ],
    )  # fmt: skip


def _text() -> Group:
    ss = [
        "", " ", "a", "abc", "  padded  ", "\ttab\n", "héllo", "e\u0301a\u0301", "日本語テキスト", "a😀b😀", "ÀÉÎ", "ß", "ΑΣ", "İ", "a,b,,c,", "a.b.c", "x|y",
        "one two  three", "it's", "back\\slash", "100%", "under_score", "line\nbreak", "line\n", "a1b22c333", "xxaxx", "NaN", "null", "É", "\u00a0nbsp", "٣", "K", "a\r\nb", None,
    ]  # fmt: skip
    starts = [0, 1, 2, -1, -3, 5, -10, 100, 2**31 - 1, -(2**31), None]
    lengths = [0, 1, 2, -1, 3, 2**31 - 1, None]
    ts = ["a", "", "héllo", "b", "B", "日本", None]
    return Group(
        "text",
        {"s": "string", "t": "string", "n": "int", "k": "int"},
        [(s, ts[at % 7], starts[at % 11], lengths[at % 7]) for at, s in enumerate(ss * 3)],
        [
            *(f"s {op} t" for op in ("=", "<>", "<", "<=", ">", ">=", "<=>")),
            "s || t", "concat(s, t, '!')", "concat(s)", "concat(s, NULL)", "'<' || s || '>'", "concat(n, s, k)", "lower(s)", "upper(s)", "lcase(s)", "length(s)", "char_length(t)", "len(s)", "trim(s)", "ltrim(s)", "rtrim(s)",
            "trim(BOTH 'xa' FROM s)", "trim(LEADING 'x' FROM s)", "trim(TRAILING FROM s)", "trim(t FROM s)", "ltrim('a', s)", "rtrim('cx', s)", "trim('' FROM s)", "trim('\u00e9h' FROM s)",
            "substring(s, n)", "substr(s, n, k)", "substring(s FROM n FOR k)", "substr(s, 2)", "substr(s, 0)", "substr(s, -2)", "substr(s, -5, 3)", "substr(s, 2, 2)", "substr(s, 0, 2)", "substr(s, 1, -1)", "substr(s, n, 2)", "substr(s, 1, k)",
            "replace(s, 'a', 'xy')", "replace(s, 'b')", "replace(s, '', 'x')", "replace(s, '😀', '$0')", "replace(s, '\\\\', '/')",
            "split(s, ' ')", "split(s, ',')", "split(s, '[0-9]+')", "split(s, '')", "split(s, '\\\\.')", "split(s, '\\\\|')", "split(s, ',', 2)", "split(s, ',', -1)", "split(s, ',', 0)", "split(s, '(?i)A')", "split(s, ',|\\\\s')", "split(s, '[^a-z]')",
            "split(s, ' ')[0]", "split(s, ' ')[1]", "split(s, ' ')[n]", "size(split(s, ' '))", "size(split(s, ''))", "split_part(s, ',', 2)", "split_part(s, ',', -1)", "split_part(s, '.', 1)", "split_part(s, ' ', 9)", "split_part(s, '', 1)", "split_part(s, '', 2)", "split_part(s, '', -1)", "split_part(s, 'xx', 2)",
            "s LIKE 'a%'", "s LIKE '%a'", "s LIKE '_'", "s LIKE '__'", "s LIKE '%'", "s LIKE ''", "s LIKE 'a_b%'", "s NOT LIKE 'a%'", "s LIKE '100\\%'", "s LIKE 'under!_score' ESCAPE '!'", "s LIKE 'line_break'", "s LIKE '%é%'", "s LIKE 'back\\\\\\\\slash'", "s LIKE 'a.b%'", "s LIKE '%語%'", "s LIKE '(a'",
            "s RLIKE '[0-9]'", "s RLIKE '^a'", "s RLIKE 'c$'", "s RLIKE 'line$'", "s RLIKE '^$'", "s RLIKE '\\\\d+'", "s RLIKE '\\\\w'", "s RLIKE '^\\\\w+$'", "s RLIKE '\\\\s'", "s RLIKE '\\\\S\\\\s\\\\S'", "s RLIKE 'a.b'", "s RLIKE '(?s)e.b'", "s RLIKE 'e.b'", "s RLIKE '(?i)ABC'", "s RLIKE '(?i)é'", "s RLIKE '(?i)k'", "s RLIKE '(?i)[j-l]'", "s RLIKE '[^a-z]'",
            "s RLIKE '(a|b)+c'", "s RLIKE 'a{1,2}b'", "s RLIKE '\\\\p{L}+'", "s RLIKE '^\\\\p{Lu}'", "s RLIKE '\\\\p{Alpha}'", "s RLIKE '\\\\p{Punct}'", "s RLIKE ''", "s RLIKE '\\\\\\\\'", "s RLIKE '[\\\\\\\\,]'", "s RLIKE '\\\\u00e9'", "s RLIKE 'x*?a'", "s RLIKE '[a-]'", "s RLIKE '[.]'", "s RLIKE '😀'", "s RLIKE '^.$'", "s RLIKE '\\\\Aa.*\\\\z'", "s RLIKE 'b\\\\Z'", "s NOT RLIKE 'a'", "s REGEXP 'a'", "regexp_like(s, 'a')", "rlike(s, 'b')", "s RLIKE '\\\\['", "s RLIKE '(?<name>b)'", "s RLIKE '(?:b)(?i:C)'", "s RLIKE '\\\\bb'",
            "s IN ('a', 'abc', '日本語テキスト')", "s IN ('a', NULL)", "s BETWEEN 'a' AND 'b'", "greatest(s, t)", "least(s, t)", "coalesce(s, t)", "nullif(s, t)", "s IS NULL", "CASE s WHEN 'a' THEN 1 WHEN '' THEN 2 END", "s = 'it\\'s'", "s = 'it''s'", "s = \"it's\"", "s = 'line\\nbreak'", "s = r'back\\slash'", "s = 'back' '\\\\slash'", "s = 'h\\u00e9llo'", "length('a\\%b\\_c\\\\d')",
            "CAST(s AS BINARY)", "CAST(split(s, ',') AS ARRAY<INT>)", "CAST(split(s, ',') AS ARRAY<STRING>)", "length(lower(s)) + n", "substr(upper(s), 1, 1) || substr(s, 2)", "length(n)", "upper(n)", "n || k", "s = n", "s < 5", "s > 1.5D", "s = TRUE", "s IN (1, 2)", "coalesce(n, s)",
        ],
    )  # fmt: skip


def _more_text() -> Group:
    """Searching, cutting, filling up, and regular expressions that replace and extract."""
    rows = [
        ("abc", "b", 2), ("abcabc", "bc", 1), ("", "", 0), ("a", "", -1), ("", "a", 3), ("héllo wörld", "ö", 5), ("日本語テキスト", "語", 3), ("a😀b😀", "😀", 2), ("e\u0301a\u0301x", "\u0301", 4),
        ("ABC", "abc", 100), ("line\n", "e", 2**31 - 1), ("line\r\n", "\n", -(2**31)), ("a1b22c333", "22", 4), ("  both  ", " ", 6), ("key=value; k2=v2", "=", 7), ("100%", "%", None), ("$5.00 \\ 7", "\\", 3), (None, "a", 1),
        ("abc", None, 1), ("ΑΣ", "Σ", 1), ("İstanbul", "i", 2), ("x\u2028", "x", 1), ("aaa", "aa", 2), ("2024-05-06", "-", 4), ("ß", "SS", 1), ("K", "k", 1), ("a\n\n", "\n", 1), (".*", ".", 1), (None, None, None), ("\r\n", "\r", 1),
    ]  # fmt: skip
    return Group(
        "more text",
        {"s": "string", "t": "string", "n": "int"},
        list(rows),
        [
            "instr(s, t)", "instr(s, 'b')", "instr(s, '')", "instr('abcabc', t)", "instr(n, 0)", "instr(s, NULL)", "instr(t, s)", "instr(upper(s), upper(t))",
            *(f"{name}({args})" for name in ("startswith", "endswith", "contains") for args in ("s, t", "s, 'a'", "s, ''", "'abc', t", "n, 1", "s, NULL", "NULL, t", "lower(s), lower(t)")),
            *(f"{name}({args})" for name in ("left", "right") for args in ("s, n", "s, 2", "s, 0", "s, -1", "s, 2147483647", "n, 2", "'日本語', n", "s, NULL", "NULL, n", "lower(s), n + 1", "s, CAST(n AS BIGINT)")),
            *(f"{name}({args})" for name in ("lpad", "rpad") for args in ("s, 5", "s, 5, '*'", "s, 12, '日本'", "s, 7, 'xyz'", "s, 0, 'x'", "s, -3, 'x'", "s, 3, ''", "s, 12, ''", "n, 11, '0'", "NULL, 3", "upper(s), 4, '😀é'", "'x', 3")),
            "concat_ws(',', s, t)", "concat_ws('', s, t, n)", "concat_ws(' é ', s, NULL, n, 1.50)", "concat_ws(',', NULL)", "concat_ws(',', s)", "concat_ws('x', n > 2, t)", "concat_ws('-', lower(s), upper(t))",
            "reverse(s)", "reverse(t)", "reverse(n)", "reverse(lower(s))", "reverse(NULL)", "reverse('abc')",
            "s ILIKE 'A%'", "s ILIKE '%B%'", "s NOT ILIKE '_BC'", "s ILIKE 'ας'", "s ILIKE 'ΑΣ'", "s ILIKE '%Ö%'", "s ILIKE '100!%' ESCAPE '!'", "s ILIKE 'İ%'", "s ILIKE 'k'", "s ILIKE 'SS'", "n ILIKE '2%'", "NULL ILIKE 'a'",
            "regexp_replace(s, 'b', 'x')", "regexp_replace(s, '[0-9]+', '#')", "regexp_replace(s, '([a-z])([0-9])', '$2$1')", "regexp_replace(s, '(\\\\w)(\\\\d)?', '<$1|$2>')", "regexp_replace(s, 'a', '\\\\$\\\\\\\\')", "regexp_replace(s, 'b', '$0$0')", "regexp_replace(s, '(b)', '$11')", "regexp_replace(s, '\\\\s+\\\\z', '')", "regexp_replace(s, '[a-z]$', '!')", "regexp_replace(s, 'c$|a', '!')", "regexp_replace(s, '(a)|[b-z]$', '!')", "regexp_replace(s, '^a', '')", "regexp_replace(s, '.', '.')", "regexp_replace(s, '(?i)B', 'é')", "regexp_replace(s, '😀', '$0日')", "regexp_replace(s, '(?:x|e)\\\\Z', '!')", "regexp_replace(s, '\\\\n\\\\z', '')", "regexp_replace(n, '1', '2')", "regexp_replace(s, 'a+?', 'b')", "regexp_replace(s, 'a{2}', 'b')", "regexp_replace(s, '[^\\\\p{L}]', '')", "regexp_replace(upper(s), 'A(B)?', '[$1]')", "regexp_replace('abc', 'b', 'x')", "regexp_replace(NULL, 'b', 'x')", "regexp_replace(s, '(?<name>b)(c)', '$2$1')",
            "regexp_extract(s, '([a-z]+)')", "regexp_extract(s, '[a-z]+', 0)", "regexp_extract(s, '([a-z])([0-9]+)', 2)", "regexp_extract(s, '(x)|(b)', 1)", "regexp_extract(s, '(x)|(b)', 2)", "regexp_extract(s, '(\\\\d+)-(\\\\d+)(-\\\\d+)?', 3)", "regexp_extract(s, '(\\\\w)$', 1)", "regexp_extract(s, '$|(.)', 1)", "regexp_extract(s, '(a*)', 1)", "regexp_extract(s, '(a|b)+', 1)", "regexp_extract(s, '(?:(a)|b|c)+', 1)", "regexp_extract(s, '\\\\bw(.)', 1)", "regexp_extract(s, '(\\\\w+)=(\\\\w+)', 2)", "regexp_extract(n, '([0-9])', 1)", "regexp_extract(s, '', 0)", "regexp_extract(lower(s), '(.)(.)', 2)", "regexp_extract(NULL, '(.)')", "regexp_extract('ab', '(.)')", "regexp_extract(s, '(([a-z])[0-9])', 2)", "regexp_extract(s, '(.)?b', 1)", "regexp_extract(s, '(a?)?b', 1)",
        ],
    )  # fmt: skip


def _numbers_in_text() -> Group:
    texts = [
        "0", "1", "-1", "+5", "12", " 12 ", "\t12\n", "12.7", "-12.7", ".5", "5.", ".", "-", "+", "", " ", "1.5.2", "1.a", "-.5", "00012", "1e3", "1E-3", "1e", "1e+3", "5e-3", "4.9e-3",
        "127", "128", "-128", "-129", "32768", "2147483647", "2147483648", "-2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
        "99999999999999999999999999999999999999", "123456789012345678901234567890123456789012345", "1e40", "1e400", "-1e400", "1e-400", "1e999999999999", "0e999999999999", "0.000000000000000000000000000000000000000000001",
        "NaN", "nan", "NAN", "inf", "-inf", "+inf", "Infinity", "-Infinity", "infinity", "+nan", "infd", "1d", "1.5F", "1L", "1_000", "abc", "--1", "0x10", "1,5", "\u00a012", "1.005", "-1.005", "99999999.994", "99999999.995", "-0", "-0.0", "0.1", "1.1", "3.4028235e38",
        "t", "true", "TRUE", " True ", "y", "yes", "f", "False", "n", "NO", "on", "2", "\u0130", "12 3", "1 ", "12\u0000", "123456789.123456789", "1234567890123456789012.5", "9.5", "-9.5", None,
    ]  # fmt: skip
    kinds = [
        "TINYINT",
        "SMALLINT",
        "INT",
        "BIGINT",
        "FLOAT",
        "DOUBLE",
        "BOOLEAN",
        "DECIMAL(10,2)",
        "DECIMAL(38,0)",
        "DECIMAL(38,38)",
        "DECIMAL(5,0)",
        "DECIMAL(1,0)",
        "STRING",
    ]
    return Group(
        "numbers in text",
        {"s": "string"},
        [(text,) for text in texts],
        [
            *(f"CAST(s AS {kind})" for kind in kinds),
            "TRY_CAST(s AS INT)",
            "s::double",
            "int(s)",
            "double(s)",
            "s = 1",
            "s > 1.5",
            "s = 1.5D",
            "boolean(s)",
            "decimal(s)",
        ],
    )


DAY = 86_400_000_000


def _times() -> Group:
    stamps = [
        0, -1, 1, 999_999, -1_000_000, 1_500_000, 1_577_836_800_123_456, 1_582_934_400_000_000 + 3_600_000_000, 1_580_428_800_000_000, -62_135_596_800_000_000, -62_167_219_200_000_001,
        253_402_300_799_999_999, -5 * DAY - 1, 1_711_848_600_000_000, 1_609_459_199_999_999, 951_782_400_000_000, 4_107_542_399_500_000, 120_000, -86_400_000_001, 1_704_067_200_000_000, 32_503_680_000_000_000, None,
    ]  # fmt: skip
    dates = [
        0,
        -1,
        1,
        18_262,
        18_321,
        18_293,
        -719_162,
        2_932_896,
        11_016,
        19_723,
        18_627,
        18_628,
        -25_567,
        20_513,
        None,
    ]
    others = [0, DAY, 1_577_836_800_123_456, None, -1]
    units = [
        "year",
        "quarter",
        "month",
        "week",
        "day",
        "hour",
        "minute",
        "second",
        "millisecond",
        "microsecond",
        "MON",
        "mm",
        "YY",
        "yyyy",
        "dd",
        "HOUR",
    ]
    parts = [
        "year",
        "quarter",
        "month",
        "weekofyear",
        "day",
        "dayofmonth",
        "dayofweek",
        "weekday",
        "dayofyear",
        "hour",
        "minute",
        "second",
    ]
    spans = [
        "INTERVAL '10' SECOND", "INTERVAL 10 SECONDS", "INTERVAL '1.5' SECOND", "INTERVAL '-5' MINUTE", "INTERVAL -5 MINUTE", "INTERVAL '1' DAY", "INTERVAL 2 WEEKS", "INTERVAL '36' HOUR", "INTERVAL '24' HOUR", "INTERVAL '1' MONTH",
        "INTERVAL '1' YEAR", "INTERVAL '-13' MONTH", "INTERVAL '1 day 2 hours'", "INTERVAL 1 DAY 2 HOURS", "INTERVAL '5' MILLISECOND", "INTERVAL 7 MICROSECONDS", "INTERVAL '0' SECOND", "INTERVAL 1 YEAR 2 MONTHS",
    ]  # fmt: skip
    return Group(
        "times",
        {"ts": "timestamp", "d": "date", "u": "timestamp", "n": "int"},
        [(ts, dates[at % 15], others[at % 5], [0, 1, -1, 30, None, 365][at % 6]) for at, ts in enumerate(stamps * 3)],
        [
            *(f"date_trunc('{unit}', ts)" for unit in units), "date_trunc('hour', d)", "date_trunc('week', d)",
            *(f"{part}(ts)" for part in parts), *(f"{part}(d)" for part in parts),
            *(f"extract({part} FROM ts)" for part in ["YEAR", "QUARTER", "MONTH", "WEEK", "DAY", "DOW", "DAYOFWEEK", "DOY", "HOUR", "MINUTE"]), "extract(day FROM d)",
            *(f"ts {op} {span}" for span in spans for op in "+-"), *(f"d {op} {span}" for span in spans for op in "+-"), "INTERVAL '1' DAY + ts", "INTERVAL '1' MONTH + d", "ts + (INTERVAL '1' HOUR + INTERVAL '1' MINUTE)", "ts + INTERVAL '1' MONTH - INTERVAL '1' DAY", "ts + -(INTERVAL '1' DAY)",
            *(f"{name}({args})" for name in ("date_add", "date_sub") for args in ("d, n", "d, 1", "ts, n", "'2024-02-28', n", "d, CAST(n AS TINYINT)", "d, -2147483648", "d, NULL", "NULL, n", "d, n + 1")),
            *(f"{name}({args})" for name in ("datediff", "date_diff") for args in ("d, u", "ts, d", "d, '2024-02-28'", "d, NULL", "date_add(d, n), d", "DATE '2024-03-01', d")),
            "d + n", "d - n", "d + 1", "n + d",
            *(f"ts {op} u" for op in ("=", "<>", "<", "<=", ">", ">=", "<=>")), "ts = d", "d < ts", "ts > '2020-01-01'", "d = '2020-01-01'", "d >= DATE '2020-01-01'", "ts < TIMESTAMP '2020-01-01 00:00:00'", "ts BETWEEN TIMESTAMP '1970-01-01 00:00:00' AND TIMESTAMP '2020-01-01 00:00:00+02:00'", "d IN (DATE '1970-01-01', DATE '2020-01-01')",
            "greatest(ts, u)", "least(ts, u)", "coalesce(ts, d)", "coalesce(d, ts, u)", "nullif(ts, u)", "IF(ts > u, ts, u)", "CAST(ts AS DATE)", "CAST(d AS TIMESTAMP)", "CAST(ts AS STRING)", "CAST(d AS STRING)", "CAST(ts AS BIGINT)", "CAST(ts AS INT)", "CAST(ts AS TINYINT)", "CAST(ts AS DOUBLE)", "CAST(ts AS FLOAT)", "CAST(ts AS BOOLEAN)", "CAST(ts AS DECIMAL(20,6))", "CAST(ts AS DECIMAL(10,0))",
            "to_date(ts)", "to_timestamp(ts)", "to_timestamp(d)", "unix_micros(ts)", "unix_millis(ts)", "unix_seconds(ts)", "unix_micros(CAST(d AS TIMESTAMP))", "unix_micros(ts) - unix_micros(u)", "timestamp_micros(unix_micros(ts))", "ts || ''", "concat('on ', d)", "ts IS NULL", "CASE WHEN d IS NULL THEN ts END", "coalesce(ts, 'none')", "hour('2020-01-01 05:06:07')", "year('2020-01-01')",
        ],
    )  # fmt: skip


def _times_in_text() -> Group:
    day, clock = "2021-02-03", "2021-02-03 05:06:07"
    texts = [
        day, clock, "2021-02-03T05:06:07", "2021-02-03 05:06", "2021-02-03 05", "2021-02", "2021", "2021-2-3", "2021-2-3 4:5:6", f"{clock}.1", f"{clock}.123456", f"{clock}.1234567", f"{clock}.123456789Z", f"{clock}.",
        f"{clock}Z", f"{clock} Z", f"{clock}  Z", f"{clock}z", f"{clock}+01:30", f"{clock} +01:30", f"{clock}-01:30", f"{clock}+1:30", f"{clock}+1", f"{clock}+01", f"{clock}+0130", f"{clock}-0130", f"{clock}+01:30:15", f"{clock}+1:3", f"{clock}+18:00", f"{clock}+18:01", f"{clock}+19:00", f"{clock}+01:60", f"{clock} UTC", f"{clock}UTC", f"{clock} GMT", f"{clock} UT", f"{clock} GMT+2", f"{clock} UTC+02:00", f"{clock} UTC-2", f"{clock} utc", f"{clock}.12 +01:00",
        f" {day} ", f"\t{clock}\n", f"{day} ", f"{day}T", f"{day}Z", f"{day}+01:00", "2021-02-03 05:06+01:00", "2021-02-03 05+01:00", "2021-02-03 24:00:00", "2021-02-30", "2021-02-29", "2020-02-29", "1900-02-29", "2000-02-29", "2021-13-01", "2021-00-01", "2021-01-00", "2021-01-32", "2021-04-31", "2021-02-03 05:60:07", "2021-02-03 05:06:60", "2021-02-03  05:06:07", "2021-002-03", "2021-02-003", "2021-02-03 005:06:07", "21-02-03", "202-02-03", "2021-02-", "2021-", "2021-02-03 05:", "2021-02-03 05:06:", "2021-02-03 :06", "2021-02-03 -05:06:07", f"{clock}.1.2",
        "+2021-02-03", "-2021-02-03", "12021-02-03", "0000-01-01", "0001-01-01", "-0001-02-03", "202100-02-03", "9999-12-31 23:59:59.999999", "1969-12-31 23:59:59.999999", "1582-10-10", "", " ", "abc", "2021-02-03xyz", "2021-02-03 xyz", "2021-02-03Txyz", "2021-02T", "2021/02/03", "20210203", "\uff12\uff10\uff12\uff11-02-03", f"{day}\u00a0", f"{day} 05:06:07\u3000", None,
    ]  # fmt: skip
    return Group(
        "times in text",
        {"s": "string"},
        [(text,) for text in texts],
        [
            "CAST(s AS TIMESTAMP)",
            "CAST(s AS DATE)",
            "to_timestamp(s)",
            "to_date(s)",
            "year(s)",
            "hour(s)",
            "date_trunc('day', s)",
            "s < TIMESTAMP '2021-02-03 05:06:07'",
            "s = DATE '2021-02-03'",
        ],
    )


def _far_times() -> Group:
    """Where Polars has no calendar any more."""
    texts = [
        "2021000-02-03",
        "294247-01-10",
        "294247-01-10 04:00:54.775807",
        "294247-01-10 04:00:54.775808",
        "-290308-12-21 19:59:05.224192",
        "-290308-12-21 19:59:05.224191",
        "999999-12-31",
    ]
    stamps = [2**63 - 1, -(2**63), 9_000_000_000_000_000_000, None, 0, -9_000_000_000_000_000_000, 1]
    return Group(
        "far times",
        {"s": "string", "ts": "timestamp"},
        list(zip(texts, stamps, strict=True)),
        [
            "CAST(s AS TIMESTAMP)",
            "CAST(s AS DATE)",
            "hour(ts)",
            "minute(ts)",
            "second(ts)",
            "CAST(ts AS DATE)",
            "unix_millis(ts)",
            "CAST(ts AS BIGINT)",
            "CAST(ts AS INT)",
            "CAST(ts AS DECIMAL(20,6))",
            "CAST(ts AS DOUBLE)",
            "ts = CAST(s AS TIMESTAMP)",
        ],
    )


def _times_by_pattern() -> Group:
    texts = [
        "06/05/2024 07:08:09", "6/5/2024 7:8:9", "06/05/2024 07:08:09 ", " 06/05/2024 07:08:09", "29/02/2024 00:00:00", "29/02/2023 00:00:00", "31/04/2024 00:00:00", "00/05/2024 00:00:00", "06/13/2024 00:00:00", "06/05/2024 24:00:00",
        "06/05/2024 23:59:60", "06/05/2024 23:60:00", "06-05-2024 07:08:09", "06/05/24 07:08:09", "06/05/0001 00:00:00", "31/12/9999 23:59:59", "06/05/+12024 07:08:09", "06/05/12024 07:08:09", "06/05/-0044 07:08:09", "06/05/-0000 07:08:09", "06/05/+2024 07:08:09",
        "20240506", "20240506070809", "2024050", "202405061", "240506", "2024-05-06", "2024-5-6", "2024-05-06T07:08:09", "2024-05-06t07:08:09", "2024-05-06T07:08:09.1", "2024-05-06T07:08:09.123", "2024-05-06T07:08:09.123456", "2024-05-06T07:08:09.1234567", "2024-05-06T07:08:09.123456789", "2024-05-06T07:08:09.",
        "2024-05-06T07:08:09Z", "2024-05-06T07:08:09z", "2024-05-06T07:08:09+01", "2024-05-06T07:08:09+0130", "2024-05-06T07:08:09+01:30", "2024-05-06T07:08:09-01:30", "2024-05-06T07:08:09-0800", "2024-05-06T07:08:09+01:30:15", "2024-05-06T07:08:09+013015", "2024-05-06T07:08:09+1:30", "2024-05-06T07:08:09+18:00", "2024-05-06T07:08:09+18:01", "2024-05-06T07:08:09+01:60", "2024-05-06T07:08:09-18:00", "2024-05-06T07:08:09 +0000",
        "06 May 2024", "6 MAY 2024", "06 may 2024", "06 Mai 2024", "06 Sep 2024", "06 September 2024", "06 SEPTEMBER 2024", "06 Sept 2024", "6 Mär 2024", "May 6, 2024 7:08 PM", "May 6, 2024 7:08 pm", "May 6, 2024 12:08 AM", "May 6, 2024 12:08 PM", "May 6, 2024 0:08 AM", "May 6, 2024 13:08 PM", "May 6, 2024 11:08 AM",
        "07:08", "7:08 PM", "19:08", "24:08", "12:08", "0:08", "PM", "2024", "05", "1", "-5", "é 2024", "at 07 o'clock", "AT 07 O'CLOCK", "\uff12\uff10\uff12\uff14-05-06", "", " ", None,
    ]  # fmt: skip
    patterns = [
        "dd/MM/yyyy HH:mm:ss", "d/M/y H:m:s", "d/M/yyyy H:m:s", "dd/MM/yy HH:mm:ss", "dd-MM-yyyy HH:mm:ss", "yyyyMMdd", "yyyyMMddHHmmss", "yyMMdd", "yyyy-MM-dd", "yyyy-M-d", "yyy-MM-dd", "yyyy-MM-dd HH:mm:ss", "yyyy", "yy", "MM", "M", "d",
        "yyyy-MM-dd''T''HH:mm:ss", "yyyy-MM-dd''T''HH:mm:ss.S", "yyyy-MM-dd''T''HH:mm:ss.SSS", "yyyy-MM-dd''T''HH:mm:ss.SSSSSS", "yyyy-MM-dd''T''HH:mm:ss.SSSSSSSSS", "yyyy-MM-dd''T''HH:mm:ss[.SSS]", "yyyy-MM-dd[''T''HH:mm:ss[.SSSSSS][XXX]]",
        "yyyy-MM-dd''T''HH:mm:ssX", "yyyy-MM-dd''T''HH:mm:ssXX", "yyyy-MM-dd''T''HH:mm:ssXXX", "yyyy-MM-dd''T''HH:mm:ssXXXX", "yyyy-MM-dd''T''HH:mm:ssXXXXX", "yyyy-MM-dd''T''HH:mm:ssx", "yyyy-MM-dd''T''HH:mm:ssxx", "yyyy-MM-dd''T''HH:mm:ssxxx", "yyyy-MM-dd''T''HH:mm:ssxxxxx", "yyyy-MM-dd''T''HH:mm:ssZ", "yyyy-MM-dd''T''HH:mm:ss ZZZ", "yyyy-MM-dd''T''HH:mm:ssZZZZZ",
        "dd MMM yyyy", "d MMM yyyy", "dd MMMM yyyy", "MMM d, yyyy h:mm a", "MMM d, yyyy K:mm a", "MMM d, yyyy H:mm a", "MMM d, yyyy hh:mm a", "HH:mm", "H:mm", "h:mm a", "h:mm", "k:mm", "kk:mm", "K:mm", "a", "''é'' yyyy", "é yyyy", "''at'' HH ''o''''clock''",
    ]  # fmt: skip
    return Group(
        "times by pattern",
        {"s": "string"},
        [(text,) for text in texts],
        [
            *(f"to_timestamp(s, '{pattern}')" for pattern in patterns),
            *(f"to_date(s, '{pattern}')" for pattern in patterns[:12] + patterns[22:27] + patterns[36:39]),
            *(f"unix_timestamp(s, '{pattern}')" for pattern in patterns[:3]),
            "unix_timestamp(s)", "to_unix_timestamp(s)", "to_timestamp(NULL, 'yyyy')", "to_date(to_timestamp(s, 'yyyy-MM-dd'), 'dd')", "to_timestamp(concat(s, '!'), 'yyyy''!''')",
        ],
    )  # fmt: skip


def _written_times() -> Group:
    stamps = [
        0, -1, 1, 999_999, -1_000_000, 1_500_000, 1_577_836_800_123_456, 1_582_934_400_000_000 + 3_600_000_000, -62_135_596_800_000_000, -62_167_219_200_000_001, -63_000_000_000_000_000, 253_402_300_799_999_999, 253_402_300_800_000_000, 1_000_000_000_000_000_000,
        -5 * DAY - 1, 1_711_848_600_000_000, 951_782_400_000_000, 12 * 3_600_000_000, 12 * 3_600_000_000 - 1, 13 * 3_600_000_000, 23 * 3_600_000_000 + 59_000_000, 1_725_148_800_000_000, None,
    ]  # fmt: skip
    patterns = [
        "yyyy-MM-dd HH:mm:ss", "yyyy-MM-dd''T''HH:mm:ss.SSSXXX", "y", "yy", "yyy", "yyyyy", "yyyyyy", "M", "MM", "MMM", "MMMM", "d", "dd", "D", "DD", "DDD", "E", "EE", "EEE", "EEEE", "a", "H", "HH", "h", "hh", "K", "KK", "k", "kk", "m", "mm", "s", "ss", "S", "SS", "SSS", "SSSSSS", "SSSSSSSSS",
        "X", "XX", "XXX", "XXXX", "XXXXX", "x", "xx", "xxx", "xxxx", "xxxxx", "Z", "ZZ", "ZZZ", "ZZZZZ", "''quoted '''' text'' é", "[yyyy]", "dd/MM/yy, hh:mm a", "",
    ]  # fmt: skip
    dates = [0, 18_321, -719_162, 2_932_896, None]
    numbers = [0, 1, -1, 1_714_979_289, -62_135_596_800, 253_402_300_799, 2**40, None]
    floats = [0.0, -0.0, 1.5, -1.5, 1_714_979_289.123456, 0.0000005, NAN, INF, -INF, 1e300, None]
    return Group(
        "written times",
        {"ts": "timestamp", "d": "date", "n": "bigint", "x": "double", "i": "int"},
        [
            (stamp, dates[at % len(dates)], numbers[at % len(numbers)], floats[at % len(floats)], (at - 9) * 100_000_000)
            for at, stamp in enumerate(stamps)
        ],
        [
            *(f"date_format(ts, '{pattern}')" for pattern in patterns), *(f"date_format(d, '{pattern}')" for pattern in patterns[:2]),
            "date_format('2024-05-06', 'yyyy')", "from_unixtime(n)", "from_unixtime(n, 'dd.MM.yyyy HH:mm')", "from_unixtime(i)", "from_unixtime(n, 'D')", "unix_timestamp(ts)", "unix_timestamp(d)", "to_unix_timestamp(ts)", "unix_timestamp(ts, 'yyyy')",
            "timestamp_millis(n)", "timestamp_millis(i)", "timestamp_seconds(n)", "timestamp_seconds(i)", "timestamp_seconds(x)", "timestamp_seconds(CAST(x AS FLOAT))", "to_timestamp(date_format(ts, 'yyyyMMddHHmmss'), 'yyyyMMddHHmmss')",
        ],
    )  # fmt: skip


def _zones() -> Group:
    hour, minute = 3_600_000_000, 60_000_000
    stamps = [
        0, -1, 1, 1_704_067_200_000_000, 1_719_792_000_000_123,
        *(1_711_846_800_000_000 + step for step in (-hour - 1, -hour, -1, 0, 1, 30 * minute, hour - 1, hour, hour + 1, 2 * hour)),
        *(1_729_990_800_000_000 + step for step in (-2 * hour, -hour - 1, -hour, -1, 0, 1, hour - 1, hour, 2 * hour)),
        *(1_710_036_000_000_000 + step * 30 * minute for step in range(6)), *(1_730_613_600_000_000 + step * 30 * minute for step in range(-2, 6)),
        *(1_325_203_200_000_000 + step * 12 * hour for step in range(6)), *(1_712_415_600_000_000 + step * 15 * minute for step in range(-4, 6)), *(1_728_142_200_000_000 + step * 15 * minute for step in range(-4, 6)),
        -2_422_054_408_000_000, -2_422_054_409_000_000, -1_693_706_400_000_000, -62_135_596_800_000_000, 253_402_300_799_999_999, 253_387_609_200_000_000, 4_087_000_000_000_000, 4_102_444_800_000_000, 4_118_000_000_000_000, 4_134_000_000_000_000, 13_574_649_600_000_000, None,
    ]  # fmt: skip
    regions = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kolkata", "Africa/Casablanca", "Etc/GMT+5"]  # fmt: skip
    fixed = ["UTC", "GMT", "Z", "+02:00", "-03:30", "+2", "+0530", "UTC+1", "GMT-11:30", "+18:00", "+05:30:15", "+2:00"]
    return Group(
        "zones",
        {"ts": "timestamp"},
        [(stamp,) for stamp in stamps],
        [f"{name}(ts, '{zone}')" for name in ("from_utc_timestamp", "to_utc_timestamp") for zone in [*regions, *fixed]],
    )


def _try_casts() -> Group:
    rows: list[tuple[object, ...]] = [
        ("12", 127, 1.5, Decimal("1.50"), True, 0, 0), ("12.7", 128, NAN, Decimal("-129.99"), False, 1, -1), (" 7 ", -129, INF, Decimal("99999999999999999999.99"), None, -1, DAY), (".5", 2**31, 2147483647.5, Decimal("2147483647.99"), True, 10, 5),
        ("x", -(2**31) - 1, -129.5, Decimal("0.00"), True, 10, 5), ("", 2**63 - 1, 9223372036854775807.0, Decimal("0.05"), True, 10, 5), ("2020-01-02", -(2**63), -9223372036854775808.0, None, True, 10, 5), ("+3", 0, 127.9, Decimal("127.99"), True, 10, 5), ("-128", None, -128.9, Decimal("-128.99"), True, 10, 5), (None, 5, None, None, None, None, None),
        ("true", 1, 1e300, Decimal("128.00"), True, 10, 5), ("1e3", 1, -0.0, Decimal("-2147483648.50"), True, 10, 5),
    ]  # fmt: skip
    whole = ["TINYINT", "SMALLINT", "INT", "BIGINT"]
    return Group(
        "try casts",
        {"s": "string", "l": "bigint", "x": "double", "p": "decimal(22,2)", "a": "boolean", "d": "date", "ts": "timestamp"},
        rows,
        [
            *(f"TRY_CAST({name} AS {kind})" for name in "slxpa" for kind in [*whole, "FLOAT", "DOUBLE", "DECIMAL(10,1)", "DECIMAL(20,10)", "STRING", "BOOLEAN"]),
            "TRY_CAST(s AS DATE)", "TRY_CAST(s AS TIMESTAMP)", "TRY_CAST(d AS TIMESTAMP)", "TRY_CAST(ts AS DATE)", "TRY_CAST(ts AS STRING)", "TRY_CAST(CAST(p / 1000000000 AS DECIMAL(30,12)) AS STRING)", "TRY_CAST(split(s, '-') AS ARRAY<INT>)", "TRY_CAST(NULL AS INT)",
        ],
    )  # fmt: skip


def _hashes() -> Group:
    def in_turn(values: list[object]) -> list[object]:
        return [values[at % len(values)] for at in range(77)]

    long = "The quick brown fox jumps over the lazy dog; 敏捷的棕色狐狸跳过懒狗 😀 é. " * 3
    texts: list[object] = [
        "",
        "a",
        "é",
        "日本語",
        "a😀",
        "\x00",
        "\uffff",
        None,
        *(long[:length] for length in range(2, 70)),
        long,
    ]
    wide = ["0", "1", "-1", "127", "128", "-128", "-129", "255", "256", "32767", "32768", "-32768", "-32769", "9223372036854775807", "-9223372036854775808", "9223372036854775808", "-9223372036854775809", "18446744073709551615", "18446744073709551616", "-18446744073709551616", "99999999999999999999999999999999999999", "-99999999999999999999999999999999999999", "170141183460469231731687303715884105", None]  # fmt: skip
    columns: dict[str, tuple[str, list[object]]] = {
        "a": ("boolean", [True, False, None]),
        "b": ("tinyint", [0, 1, -1, 127, -128, None]),
        "h": ("smallint", [0, 1, -1, 32767, -32768, None]),
        "i": ("int", [0, 1, -1, 42, 2**31 - 1, -(2**31), None]),
        "l": ("bigint", [0, 1, -1, 2**32, 2**63 - 1, -(2**63), None]),
        "f": ("float", [0.0, -0.0, 1.5, NAN, INF, -INF, 3.4028234663852886e38, None]),
        "x": ("double", [0.0, -0.0, 1.5, NAN, INF, -INF, 1e300, 5e-324, -2.5, None]),
        "p": ("decimal(10,2)", [Decimal("0.00"), Decimal("1.50"), Decimal("-99999999.99"), Decimal("99999999.99"), None]),
        "o": ("decimal(18,18)", [Decimal("0.999999999999999999"), Decimal("-0.999999999999999999"), Decimal(0), None]),
        "q": ("decimal(19,3)", [Decimal("9999999999999999.999"), Decimal("-9999999999999999.999"), Decimal("0.001"), Decimal("-0.128"), None]),
        "w": ("decimal(38,0)", [Decimal(text) if text else None for text in wide]),
        "s": ("string", texts),
        "y": ("binary", [text.encode()[1:] if isinstance(text, str) else None for text in texts]),
        "d": ("date", [0, 1, -1, 19_723, -719_162, 2_932_896, None]),
        "ts": ("timestamp", [0, 1, -1, 1_577_836_800_123_456, 2**63 - 1, -(2**63), None]),
        "ai": ("array<int>", [[], [1], [1, 2, 3], [None], [None, 1, None, 2], None]),
        "at": ("array<string>", [[], [""], ["a", "日本語", None, "é"], [long, "b"], [None], None]),
        "ax": ("array<double>", [[], [0.0, -0.0, NAN], [1.5, None], None]),
        "aw": ("array<decimal(20,2)>", [[Decimal("1.50"), None, Decimal("-0.01")], [], None, [Decimal("999999999999999999.99")]]),
        "aa": ("array<array<string>>", [[["a", None], None, [], ["b", "c"]], [], [[]], [["d"]], None]),
    }  # fmt: skip
    arguments = [
        *columns, *(f"{name}, {name}" for name in columns), ", ".join(columns), "i, s, x", "s, i", "ai, at, s", "1", "1L", "1Y", "1S", "1.5", "1.5D", "1.5F", "-0.0D", "-0.0F", "'é'", "''", "TRUE", "NULL", "NULL, i", "i, NULL, 'x'", "X'00FF'", "DATE '2024-05-06'",
        "TIMESTAMP '2024-05-06 07:08:09'", "split('a b', ' ')", "123456789012345678901234.5", "-x", "sqrt(x)", "-f", "sqrt(CAST(f AS DOUBLE))", "x * 0", "i + 1, lower(s)", "coalesce(i, 1)", "CAST(i AS BIGINT)", "CASE WHEN a THEN s END", "i = 1", "split(s, ' ')", "p + 1", "q * 2", "CAST(NULL AS STRING), 1", "concat(s, s)", "CAST(NULL AS ARRAY<INT>), i",
    ]  # fmt: skip
    return Group(
        "hashes",
        {name: kind for name, (kind, _) in columns.items()},
        list(zip(*(in_turn(values) for _, values in columns.values()), strict=True)),
        [
            *(f"{name}({args})" for name in ("hash", "xxhash64") for args in arguments),
            "abs(hash(s)) % 16", "hash(hash(i), xxhash64(l))", "xxhash64(s) % 128", "CASE WHEN a THEN hash(s) ELSE xxhash64(s) END",
        ],
    )  # fmt: skip


def _nested() -> Group:
    sensors = [
        {"name": "n\u00e91", "at": {"x": 1.5, "y": -0.0}, "tags": ["a", None, "b"]},
        {"name": None, "at": None, "tags": []},
        {"name": "", "at": {"x": None, "y": 1e20}, "tags": None},
        None,
    ]
    maps = [{"a": 1, "b": None}, {}, {"\u00e9": -5, "b": 2}, None, {"": 0}]
    lists = [[{"p": 1, "q": "x"}, None, {"p": None, "q": None}], [], None, [{"p": 2, "q": "\u65e5"}]]
    keys = ["a", "b", "\u00e9", None, "zz", ""]
    places = [0, 1, 2, -1, None, 5, 2**31 - 1]
    rows: list[tuple[object, ...]] = [
        (sensors[at % 4], maps[at % 5], lists[at // 2 % 4], keys[at % 6], places[at % 7], [1.5, None, NAN][at % 3])
        for at in range(84)
    ]
    return Group(
        "nested",
        {
            "s": "struct<name: string, at: struct<x: double, y: double>, tags: array<string>>",
            "m": "map<string, int>", "l": "array<struct<p: int, q: string>>", "k": "string", "i": "int", "x": "double",
        },
        rows,
        [
            "s.name", "s.at.x", "s.at", "s['name']", "s.tags[0]", "s.tags[i]", "s.tags", "s.at IS NULL", "s IS NULL", "s.at.y + 1",
            "m['a']", "m['b']", "m.b", "m[k]", "m['zz'] IS NULL", "element_at(m, 'a')", "element_at(m, k)", "map_keys(m)", "map_values(m)",
            "size(m)", "cardinality(m)", "size(l)", "l[0]", "l[0].q", "l[i].p", "l.p", "l['q']", "element_at(l, 1).p", "element_at(l, -1)",
            "element_at(s.tags, 2)", "element_at(l, CASE WHEN i = 0 THEN 1 ELSE i END).q", "size(s.tags)", "struct(i, k)", "struct(i AS a, s.name, i + 1)", "named_struct('a', i, 'b', m)",
            "named_struct('a', i).a", "struct(s.at.x).x", "array(i, 1)", "array(i, 2.5)", "array(k, i)", "array(s.at, NULL)", "array(array(i), NULL)", "array(m)[0]['a']",
            "map('a', i, 'b', 1)", "map('a', i)['a']", "map('k', struct(i AS n)).k.n", "map(1, k)[1]", "map_keys(map('a', 1))", "size(map('a', NULL))",
            "coalesce(m, map('z', 1))", "coalesce(m, map('z', 5L))", "coalesce(s.at, named_struct('x', 1, 'y', i))", "CASE WHEN i = 0 THEN s END",
            "CASE WHEN i > 0 THEN s.at ELSE named_struct('x', 0, 'y', 0.5) END", "CASE WHEN i > 0 THEN l END", "IF(i = 0, m, NULL)",
            "CAST(s.at AS STRUCT<a: STRING, b: INT>)", "CAST(m AS MAP<STRING, DOUBLE>)", "CAST(l AS ARRAY<STRUCT<r: STRING, t: STRING>>)",
            "TRY_CAST(m AS MAP<STRING, TINYINT>)", "to_json(s)", "to_json(m)", "to_json(l)", "to_json(array(x, 1))", "to_json(struct(x, k, i = 1 AS b))", "to_json(map(1, x))",
            "to_json(struct(DATE '2024-05-06' AS d, TIMESTAMP '2024-05-06 07:08:09.123456' AS t, X'0A1B' AS y, 1.50 AS c, CAST('Infinity' AS DOUBLE) AS f))",
            "to_json(struct(concat('\"\\\\', k, '\\n\\t/') AS e))", "to_json(struct(1e20 AS a, 1.0e-5 AS b, 0.1F AS c, 100D AS d))", "to_json(array(NULL, s.at))", "to_json(struct(NULL AS n, s.at))",
            "length(to_json(m))", "get_json_object(to_json(s), '$.at.x')", "from_json(to_json(m), 'map<string,int>')", "from_json(to_json(l), 'array<struct<p:int,q:string>>')",
        ],
    )  # fmt: skip


def _json() -> Group:
    texts = [
        '{"a": 1, "b": "x", "c": {"d": [1, 2.50, "z"], "e": null}, "t": "2024-05-06T07:08:09.123Z"}',
        '{"a": "1", "b": 5, "c": {"d": 7}, "t": "2024-05-06 07:08:09"}', '{"a": 1.5, "b": true, "c": [], "t": 1714979289}',
        '{"a": 3000000000, "b": {"k": [1, 2.50]}, "c": null}', '{"a": null, "b": null}', "{}", "[]", '[1, 2, null]', '[1, "x"]', '[{"a": 1}, {"a": 2, "b": "y"}]',
        '{"a": 1', "not json", "", "  ", "null", "5", '"text"', "true", "1.50", '{"a": -0.0}', '{"a": 1e3, "b": 1e3}', '{"a": 12.345, "b": 12.345}', '{"a": 123456789.5}',
        '{"b": "\\u00e9\\n\\"q\\""}', '{"b": "\u65e5\u672c"}', '{"A": 1}', '{"a.b": 1, "c d": {"\u00e9": 2}}', '{"a": 123456789012345678901234567890}', '{"x": 1, "y": 2}', '{"x": 1, "y": "z"}',
        '{"b": [ 1 , { "q" : null } ]}', '{"a": "NaN", "b": "NaN"}', '{"a": {"x": 1}}', '{"c": {"d": [1, 2], "e": "2024-05-06"}}', '{"a": 1e-7, "b": 12345678.9}', None,
    ]  # fmt: skip
    paths = [
        "$",
        "$.a",
        "$.b",
        "$.c",
        "$.c.d",
        "$.c.d[0]",
        "$.c.d[1]",
        "$.c.d[9]",
        "$[0]",
        "$[1].a",
        "$['a.b']",
        "$['c d']['\u00e9']",
        "$.b.k[1]",
        "$.zz",
    ]
    quoted = [f'"{path}"' if "'" in path else f"'{path}'" for path in paths]
    schemas = [
        "a INT, b STRING", "a BIGINT", "a DOUBLE, b DOUBLE", "a STRING", "a BOOLEAN, b BOOLEAN", "a DECIMAL(10,2), b DECIMAL(5,1)", "a TINYINT, b FLOAT", "c STRUCT<d: ARRAY<INT>, e: STRING>",
        "c STRUCT<d: ARRAY<STRING>>", "c MAP<STRING, STRING>", "c STRING, zz INT", "array<int>", "array<string>", "array<struct<a:int,b:string>>", "map<string,int>", "map<string,string>", "struct<a:int>",
    ]  # fmt: skip
    return Group(
        "json",
        {"j": "string"},
        [(text,) for text in texts],
        [
            *(f"get_json_object(j, {path})" for path in quoted),
            *(f"from_json(j, '{schema}')" for schema in schemas),
            "from_json(j, 't TIMESTAMP').t", "from_json(j, 'c STRUCT<d: STRING, e: DATE>').c.e", "from_json(j, 'a INT').a + 1", "from_json(j, 'c STRUCT<d: ARRAY<INT>>').c.d[0]", "from_json(j, 'a INT, b STRING').b", "from_json(j, 'map<string,int>')['x']",
            "from_json(j, 'a INT') IS NULL", "to_json(from_json(j, 'a INT, b STRING'))", "size(from_json(j, 'array<int>'))",
        ],
    )  # fmt: skip


GROUPS = [
    _logic(),
    _integers(),
    _floats(),
    _decimals(),
    _text(),
    _more_text(),
    _numbers_in_text(),
    _times(),
    _times_in_text(),
    _far_times(),
    _times_by_pattern(),
    _written_times(),
    _zones(),
    _try_casts(),
    _hashes(),
    _nested(),
    _json(),
]
