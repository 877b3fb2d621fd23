"""What a row costs in each format of messages: CPU time to read it into columns, and to write it, without a broker.

    python bench/message_formats.py [--rows 100000] [--batch 5000] [--rounds 5]

Prints nanoseconds of CPU time per row, the least of the rounds, in turn. fastavro reads into a DataFrame of its dicts.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import fastavro
import msgspec
import polars as pl

from fordstone.connectors.avro.decode import Decoder
from fordstone.connectors.avro.encode import Encoder
from fordstone.connectors.avro.schema import parse, schema_of
from fordstone.connectors.messages import JsonMessages
from fordstone.connectors.protobuf.messages import ProtobufCodec
from fordstone.connectors.schema_registry import RegisteredSchema
from fordstone.lang.schema import Schema

SCHEMA = Schema.of({"device": "string", "n": "bigint", "temp": "double", "ok": "boolean", "at": "timestamp"})
Read = Callable[[Sequence[bytes]], object]
Write = Callable[[pl.DataFrame], list[bytes]]


def rows_of(count: int) -> pl.DataFrame:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    columns = {
        "device": [f"device-{number % 100}" for number in range(count)],
        "n": list(range(count)),
        "temp": [number * 0.3 for number in range(count)],
        "ok": [number % 2 == 0 for number in range(count)],
        "at": [begin + timedelta(seconds=number) for number in range(count)],
    }
    return pl.DataFrame(columns, schema=SCHEMA.polars)


def formats() -> dict[str, tuple[Read, Write]]:
    text = schema_of(SCHEMA, "row")
    parsed = fastavro.parse_schema(msgspec.json.decode(text))
    encoder = Encoder(parse(text), SCHEMA)
    protobuf = ProtobufCodec(SCHEMA, None, message=None, where="bench")
    proto = RegisteredSchema(id=1, kind="PROTOBUF", text=protobuf.schema_text("row", None), references={})
    write_proto = protobuf.writer(proto)
    json = JsonMessages(SCHEMA, time_unit="us")

    def read_fastavro(values: Sequence[bytes]) -> pl.DataFrame:
        found: list[Any] = [fastavro.schemaless_reader(io.BytesIO(value), parsed) for value in values]
        return pl.DataFrame(found, schema=SCHEMA.polars)

    def write_fastavro(frame: pl.DataFrame) -> list[bytes]:
        values = []
        for row in frame.iter_rows(named=True):
            buffer = io.BytesIO()
            fastavro.schemaless_writer(buffer, parsed, row)
            values.append(buffer.getvalue())
        return values

    return {
        "json": (json.decode, json.encode),
        "avro": (Decoder(parse(text), SCHEMA).decode, encoder.encode),
        "fastavro": (read_fastavro, write_fastavro),
        "protobuf": (protobuf.reader(proto), lambda frame: write_proto(frame, b"")),
    }


def cpu_ns(action: Callable[[], object], rows: int) -> float:
    begun = time.process_time_ns()
    action()
    return (time.process_time_ns() - begun) / rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--batch", type=int, default=5_000)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    batches = list(rows_of(given.rows).iter_slices(given.batch))
    found = formats()
    values = {name: [write(batch) for batch in batches] for name, (_, write) in found.items()}
    least = {name: [float("inf"), float("inf")] for name in found}
    for _ in range(given.rounds):
        for name, (read, write) in found.items():
            times = (
                cpu_ns(lambda read=read, name=name: [read(one) for one in values[name]], given.rows),  # type: ignore[misc]
                cpu_ns(lambda write=write: [write(one) for one in batches], given.rows),  # type: ignore[misc]
            )
            least[name] = [min(pair) for pair in zip(least[name], times, strict=True)]
    print(f"{given.rows:,} rows of {len(SCHEMA.polars)} columns in batches of {given.batch:,}: ns of CPU time per row")
    print(f"{'':10}{'read':>10}{'written':>10}{'bytes':>10}")
    for name, (reading, writing) in least.items():
        size = sum(map(len, values[name][0])) / len(values[name][0])
        print(f"{name:10}{reading:10,.0f}{writing:10,.0f}{size:10.0f}")


if __name__ == "__main__":
    main()
