"""Let Spark work out what every supported expression gives, and keep it for the tests.

    python scripts/expected_from_spark.py tests/lang/expected_spark.json [GROUP ...]

With names of groups only those are computed, and the others stay as they are in the file.

Needs `fordstone[spark]` and Java. Runs with ANSI mode off, in UTC. Each group of cases is a table of rows and a list of
expressions; each expression is evaluated as it is written and again in our canonical spelling, which must agree.

Values are encoded by their type: floats as `float.hex()` (or NaN, Infinity, -Infinity), decimals as text, timestamps as
microseconds and dates as days since 1970, binary as hex. Maps and structs are objects; the keys of maps are text.
"""

from __future__ import annotations

import json
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

from expression_cases import GROUPS, Group
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses

from fordstone.lang.dialect import quoted_name
from fordstone.lang.expression import parse
from fordstone.lang.schema import DataType, Schema

BATCH = 60


def encode(value: object, kind: str) -> object:
    return _encoded(value, DataType.parse(kind))


def _encoded(value: Any, kind: DataType) -> object:
    if value is None:
        return None
    if kind.element is not None:
        return [_encoded(item, kind.element) for item in value]
    if kind.name == "map":
        return {name: _encoded(item, kind.field("value")) for name, item in value.items()}
    if kind.name == "struct":
        return {name: _encoded(value[name], inner) for name, inner in kind.fields}
    if isinstance(value, float):
        return (
            value.hex()
            if math.isfinite(value)
            else "NaN"
            if math.isnan(value)
            else "Infinity"
            if value > 0
            else "-Infinity"
        )
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    return value


def _as_it_is(column: Column) -> Column:
    return column


def table(spark: SparkSession, group: Group) -> DataFrame:
    """The rows as Spark has them; times come in as whole numbers, because Python's end at the year 9999."""
    raw = {"timestamp": "bigint", "date": "int"}
    ddl = ", ".join(
        f"{quoted_name(name)} {raw.get(kind, kind)}" for name, kind in {"row": "int", **group.columns}.items()
    )
    frame = spark.createDataFrame([(at, *row) for at, row in enumerate(group.rows)], ddl)
    convert = {"timestamp": F.timestamp_micros, "date": F.date_from_unix_date}
    return frame.select(
        "row",
        *(convert.get(kind, _as_it_is)(F.col(quoted_name(name))).alias(name) for name, kind in group.columns.items()),
    )


def evaluate(frame: DataFrame, expressions: list[str]) -> list[tuple[str, list[object]]]:
    """Type and values of every expression."""
    out: list[tuple[str, list[object]]] = []
    for start in range(0, len(expressions), BATCH):
        some = expressions[start : start + BATCH]
        for text in some:
            try:
                frame.select(F.expr(text))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
                sys.exit(f"Spark refuses {text!r}: {str(error)[:300]}")
        picked = frame.select("row", *(F.expr(text).alias(f"c{at}") for at, text in enumerate(some)))
        kinds = [field.dataType.simpleString().replace("void", "null") for field in picked.schema.fields[1:]]
        plain = {"timestamp": F.unix_micros, "date": F.unix_date}
        whole = picked.select(
            "row", *(plain.get(kind, _as_it_is)(F.col(f"c{at}")).alias(f"c{at}") for at, kind in enumerate(kinds))
        )
        try:
            rows = sorted(whole.collect(), key=lambda row: row[0])
        except Exception:
            for at, text in enumerate(some):
                try:
                    whole.select(f"c{at}").collect()
                except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
                    print(f"Spark stops on {text!r}: {str(error)[:300]}")
            raise
        out += [(kind, [encode(row[at + 1], kind) for row in rows]) for at, kind in enumerate(kinds)]
    return out


def main(path: str, *names: str) -> None:
    stored = {one["name"]: one for one in json.loads(Path(path).read_text(encoding="utf-8"))} if names else {}
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.ansi.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    groups, wrong = [], 0
    for group in GROUPS:
        if names and group.name not in names:
            groups.append(stored[group.name])
            continue
        frame = table(spark, group).cache()
        schema = Schema.of(group.columns)
        canonical = [parse(text, schema).sql for text in group.expressions]
        found = evaluate(frame, group.expressions)
        again = evaluate(frame, canonical)
        for text, sql, one, two in zip(group.expressions, canonical, found, again, strict=True):
            if one != two:
                wrong += 1
                print(f"DIFFERS: {text}\n  canonical {sql}\n  {one}\n  {two}")
        rows = [
            [encode(value, kind) for value, kind in zip(row, group.columns.values(), strict=True)] for row in group.rows
        ]
        groups.append(
            {
                "name": group.name,
                "columns": group.columns,
                "rows": rows,
                "cases": [
                    {"sql": text, "type": str(DataType.parse(kind)), "values": values}
                    for text, (kind, values) in zip(group.expressions, found, strict=True)
                ],
            }
        )
        print(f"{group.name}: {len(group.expressions)} expressions on {len(group.rows)} rows")
    text = ",\n".join(json.dumps(group, ensure_ascii=True, separators=(",", ":")) for group in groups)
    Path(path).write_text(f"[\n{text}\n]\n", encoding="utf-8")
    spark.stop()
    if wrong:
        sys.exit(f"{wrong} canonical spellings mean something else in Spark")


if __name__ == "__main__":
    main(*sys.argv[1:])
