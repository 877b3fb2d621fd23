"""Runs of token holders: bounded before they are decoded, validated, and rejected with one error that says why."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal
from tests.epochs.forging import columns_message, every_type
from tests.examples import share_of

from fordstone.epochs import ipc, run_file, untrusted
from fordstone.epochs.ipc import read_facts
from fordstone.epochs.run_file import COMPRESSIONS, Compression, encode_run
from fordstone.epochs.untrusted import DecodeBudget, check_run, decode_untrusted, decode_untrusted_manifest
from fordstone.errors import RejectedRunError
from fordstone.operators.aggregate import received
from fordstone.operators.aggregate.received import partial_problem, sketch_problem
from fordstone.operators.aggregate.sketches import _sketch, _union
from fordstone.state.base import RunRef

HERE = Path(__file__).parent
EVERY = every_type(50)


@pytest.fixture(params=["stream", "file"])
def either_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(run_file, "_FILE_ROWS_MIN", 0 if request.param == "file" else 10**9)
    return str(request.param)


def named(data: bytes, rows: int) -> RunRef:
    return RunRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), rows=rows)


def encoded(frame: pl.DataFrame, compression: Compression = "zstd") -> tuple[bytes, RunRef]:
    ref, data = encode_run(frame, compression)
    return bytes(data), ref


def arrow_stream(table: pa.Table, compression: str | None = "zstd") -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.usefixtures("either_format")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("frame", [EVERY, EVERY.clear(), EVERY.slice(7, 1), pl.DataFrame({"a": [None]})])
def test_every_type_that_pipelines_have_is_taken_as_it_is(frame: pl.DataFrame, compression: Compression) -> None:
    assert_frame_equal(decode_untrusted(*encoded(frame, compression)), frame)


@pytest.mark.usefixtures("either_format")
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_facts_are_those_of_the_rows(compression: Compression) -> None:
    frame = pl.concat([EVERY] * 2000)
    facts = read_facts(encoded(frame, compression)[0])
    assert (facts.columns, facts.rows) == (tuple(EVERY.columns), frame.height)
    assert frame.estimated_size() <= facts.decoded_bytes < 3 * frame.estimated_size()


def test_the_first_and_last_times_that_can_be_shown_are_taken() -> None:
    days = pl.Series([-96_465_292, None, 95_026_236], dtype=pl.Int32).cast(pl.Date)
    times = pl.Series([-8_334_601_228_800_000_000, 8_210_266_876_799_999_999, None]).cast(pl.Datetime("us", "UTC"))
    frame = pl.DataFrame({"day": days, "time": times})
    assert_frame_equal(decode_untrusted(*encoded(frame)), frame)
    assert frame.cast(pl.String).height == 3, "Polars shows them"


@pytest.mark.usefixtures("either_format")
def test_asked_for_columns_come_in_their_order_widened_and_those_that_may_be_missing_may_be_missing() -> None:
    frame = pl.DataFrame({"a": pl.Series([1], dtype=pl.Int32), "b": ["x"], "c": [0.5]})
    wanted = {"c": pl.Float64(), "a": pl.Int64(), "d": pl.String()}
    found = decode_untrusted(*encoded(frame), wanted, optional={"d"})
    assert_frame_equal(found, pl.DataFrame({"c": [0.5], "a": [1]}))


def bomb(rows: int, value: Any) -> bytes:
    """Rows that become thousands of times as large as their bytes."""
    sink = io.BytesIO()
    pl.DataFrame({"x": pl.repeat(value, rows, dtype=pl.Int64 if value == 0 else None, eager=True)}).write_ipc_stream(
        sink, compression="zstd"
    )
    return sink.getvalue()


def damaged(change: Callable[[bytearray], None]) -> Callable[[], tuple[bytes, int]]:
    def make() -> tuple[bytes, int]:
        data = bytearray(encoded(pl.DataFrame({"x": [1, 2, 3]}), "none")[0])
        change(data)
        return bytes(data), 3

    return make


def more_values_than_bytes() -> bytes:
    """Three values, of which the metadata says that they are 300."""
    data = encoded(pl.DataFrame({"x": [1, 2, 9]}), "none")[0]
    return data.replace(struct.pack("<q", 3), struct.pack("<q", 300))


def nested(depth: int) -> pl.DataFrame:
    kind: pl.DataType = pl.Int64()
    for _ in range(depth):
        kind = pl.List(kind)
    return pl.DataFrame(schema={"x": kind})


def in_batches(count: int) -> bytes:
    schema = pa.schema([("x", pa.int64())])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        for number in range(count):
            writer.write_batch(pa.record_batch([[number]], schema=schema))
    return sink.getvalue()


def a_million_views_of_one_text() -> bytes:
    """Each of the views shows the same megabyte."""
    text = b"x" * (1 << 20)
    view = struct.pack("<i4sii", len(text), text[:4], 0, 0)
    rows = 1 << 20
    column = pa.Array.from_buffers(
        pa.string_view(), rows, [None, pa.py_buffer(view * rows), pa.py_buffer(text)], null_count=0
    )
    return arrow_stream(pa.table({"x": column}))


def extension_type() -> bytes:
    field = pa.field("x", pa.int64(), metadata={"ARROW:extension:name": "anything"})
    return arrow_stream(pa.table({"x": [1]}, schema=pa.schema([field])))


def with_metadata(where: str) -> bytes:
    """Metadata of users, where Arrow has a place for it."""
    schema = pa.schema([("x", pa.int64())], metadata={"key": "value"} if where == "columns" else None)
    sink, batch = io.BytesIO(), pa.record_batch([[1]], schema=schema)
    footer = {"key": "value"} if where == "footer" else None
    writer = pa.ipc.new_file(sink, schema, metadata=footer) if footer else pa.ipc.new_stream(sink, schema)
    with writer:
        writer.write_batch(batch, custom_metadata={"key": "value"} if where == "batch" else None)
    return sink.getvalue()


def one_buffer_for_all_columns() -> bytes:
    data = bytearray(encoded(pl.DataFrame({"x": [7] * 1000, "y": [8] * 1000}), "none")[0])
    place = data.rindex(struct.pack("<qq", 8000, 8000))
    data[place : place + 16] = struct.pack("<qq", 0, 8000)
    return bytes(data)


SHARED: dict[str, tuple[Callable[[], bytes], str]] = {
    "columns that are one table": (
        lambda: columns_message(16_000, tables=1),
        "16000 columns in 64.* bytes of metadata",
    ),
    "columns that are one table with a large layout": (
        lambda: columns_message(2_000, tables=1, layout_fields=32_000),
        "two columns of the same name",
    ),
    "structs of the same structs": (lambda: columns_message(1, depth=13), r"columns in \d+ bytes of metadata"),
    "columns with one long name": (
        lambda: columns_message(500, names=1, name=b"n" * 4_000_000),
        "names of more than 1048576 bytes together",
    ),
    "columns with one name": (
        lambda: columns_message(3_000, names=1, name=b"n" * 900),
        "names of more than 1048576 bytes together",
    ),
    "metadata with one value": (
        lambda: columns_message(1, metadata=(500, b"v" * 2_000_000)),
        r"metadata of users \(custom metadata\)",
    ),
    "columns with one time zone": (
        lambda: columns_message(60, zone=b"U" * 1_000_000),
        "name of 1000000 bytes; 1000 are allowed",
    ),
}
"""Few bytes to which many offsets point: a reader that follows each of them takes gigabytes, or minutes."""


REJECTED: dict[str, tuple[Callable[[], tuple[bytes, int]], str]] = {
    "no bytes": (lambda: (b"", 0), "ends in the middle"),
    "no Arrow": (lambda: (b"sixteen bytes ..", 0), "is not Arrow IPC"),
    "a file without an end": (lambda: (b"ARROW1" + bytes(10), 0), "is cut off"),
    "other rows than declared": (
        lambda: (encoded(pl.DataFrame({"x": [1, 2]}))[0], 1),
        "has 2 rows, what names it says 1",
    ),
    "a bomb": (lambda: (bomb(9_000_000, 0), 9_000_000), "becomes 144000000 when it is decoded; 134217728 are allowed"),
    "a bomb of text": (lambda: (bomb(6_000_000, "text"), 6_000_000), "when it is decoded"),
    "rows without bytes": (lambda: (bomb(9_000_000, None), 9_000_000), "when it is decoded"),
    "booleans": (lambda: (bomb(15_000_000, True), 15_000_000), "when it is decoded"),
    "a million views of one text": (lambda: (a_million_views_of_one_text(), 1 << 20), "text of 1099511627776 bytes"),
    "types nested deeply": (lambda: (encoded(nested(80))[0], 0), "nested more than 64 deep"),
    "many columns": (
        lambda: (encoded(pl.DataFrame(schema={str(number): pl.Int8() for number in range(17_000)}))[0], 0),
        "more than 16384 columns",
    ),
    "many batches": (lambda: (in_batches(100), 100), "in more than 64 batches for"),
    "dictionaries": (
        lambda: (encoded(pl.DataFrame({"x": pl.Series(["a"], dtype=pl.Categorical())}))[0], 1),
        "dictionar",
    ),
    "an extension type": (lambda: (extension_type(), 1), "'x' with a dictionary or an extension type"),
    "a union": (
        lambda: (
            arrow_stream(pa.table({"x": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])}), None),
            1,
        ),
        "type that is not used here",
    ),
    **{name: (lambda make=make: (make(), 0), reason) for name, (make, reason) in SHARED.items()},  # type: ignore[misc]
    **{
        f"metadata of users with the {where}": (lambda where=where: (with_metadata(where), 1), "metadata of users")  # type: ignore[misc]
        for where in ("columns", "batch", "footer")
    },
    "a long name": (lambda: (columns_message(1, name=b"n" * 1000), 0), "a name of 1001 bytes; 1000 are allowed"),
    "more values than bytes": (lambda: (more_values_than_bytes(), 300), "too few bytes for the values of 'x'"),
    "a name with NUL": (lambda: (arrow_stream(pa.table({"a\0": [1]})), 1), "a name with a NUL character"),
    "a name with NUL in a struct": (
        lambda: (arrow_stream(pa.table({"x": pa.array([{"\0": 1}])})), 1),
        "a name with a NUL character",
    ),
    "a time zone": (
        lambda: (arrow_stream(pa.table({"x": pa.array([1], pa.timestamp("us", "Asia/Tokyo"))})), 1),
        "'x' of a time zone other than UTC",
    ),
    "a time zone that is none": (lambda: (columns_message(1, zone=b"Mars/Olympus"), 0), "time zone other than UTC"),
    "buffers that overlap": (lambda: (one_buffer_for_all_columns(), 1000), "overlaps others"),
    "two columns of a name": (
        lambda: (arrow_stream(pa.Table.from_arrays([pa.array([1])] * 2, names=["x", "x"])), 1),
        "two columns of the same name",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_not_taken_is_rejected_before_it_is_decoded_with_the_reason(case: str) -> None:
    make, reason = REJECTED[case]
    data, rows = make()
    with pytest.raises(RejectedRunError, match=rf"^run [0-9a-f]{{12}}… is rejected: it .*{reason}"):
        decode_untrusted(data, named(data, rows))


FORGED_VALUES: dict[str, tuple[pa.Array, bytes, bytes, str]] = {
    "offsets that go back": (
        pa.array(["abc", "def"], pa.large_string()),
        struct.pack("<3q", 0, 3, 6),
        struct.pack("<3q", 0, 9, 6),
        "offsets",
    ),
    "offsets after the end": (
        pa.array(["abc" * 7], pa.large_string()),
        struct.pack("<2q", 0, 21),
        struct.pack("<2q", 0, 2**40),
        "InvalidBuffer",
    ),
    "text that is not UTF-8": (pa.array(["abc"], pa.large_string()), b"abc", b"\xff\xfe\xfd", "utf"),
    "a view of a buffer that is not there": (
        pa.array(["abcd" * 5], pa.string_view()),
        struct.pack("<i4sii", 20, b"abcd", 0, 0),
        struct.pack("<i4sii", 20, b"abcd", 7, 0),
        "out of bounds",
    ),
    "a view after the end of its buffer": (
        pa.array(["abcd" * 5], pa.string_view()),
        struct.pack("<i4sii", 20, b"abcd", 0, 0),
        struct.pack("<i4sii", 2**30, b"abcd", 0, 0),
        "out of bounds",
    ),
    "a decimal with 39 digits": (
        pa.array([Decimal(77)], pa.decimal128(38, 0)),
        (77).to_bytes(16, "little"),
        (10**38).to_bytes(16, "little"),
        "decimal in 'x' that does not fit",
    ),
    "a decimal with too many digits in an array": (
        pa.array([[Decimal(77)]], pa.large_list(pa.decimal128(3, 0))),
        (77).to_bytes(16, "little"),
        (1000).to_bytes(16, "little"),
        "decimal in 'x' that does not fit",
    ),
    "a date that cannot be shown": (
        pa.array([77], pa.int32()).cast(pa.date32()),
        (77).to_bytes(4, "little") + bytes(4),
        (2**31 - 1).to_bytes(4, "little") + bytes(4),
        "date in 'x' that does not fit",
    ),
    "a time that cannot be shown": (
        pa.array([[77]], pa.large_list(pa.timestamp("us", "UTC"))),
        (77).to_bytes(8, "little"),
        (2**63 - 1).to_bytes(8, "little"),
        "time in 'x' that does not fit",
    ),
    "a map with a null for a key": (
        pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        struct.pack("<6q", 1, 0, 1, 0, 1, 0),
        struct.pack("<6q", 1, 0, 1, 0, 1, 1),
        "1 nulls in 'key'",
    ),
}


@pytest.mark.parametrize("case", FORGED_VALUES)
def test_forged_values_are_rejected_and_not_read(case: str) -> None:
    column, found, forged, reason = FORGED_VALUES[case]
    data = arrow_stream(pa.table({"x": column}), None)
    assert found in data
    data = data.replace(found, forged)
    with pytest.raises(RejectedRunError, match=f"(?i){reason}"):
        decode_untrusted(data, named(data, len(column)))


@pytest.mark.usefixtures("either_format")
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"x": pl.Int64(), "y": pl.String()}, "it has no column 'y'; it has x, z"),
        ({"x": pl.String()}, "it has Int64 in 'x', where String is expected"),
        ({"x": pl.Int32()}, "it has Int64 in 'x', where Int32 is expected"),
        ({"z": pl.Int64()}, "it has String in 'z', where Int64 is expected"),
    ],
)
def test_other_columns_than_expected_are_rejected_by_name(columns: dict[str, pl.DataType], reason: str) -> None:
    with pytest.raises(RejectedRunError, match=reason):
        decode_untrusted(*encoded(pl.DataFrame({"x": [1], "z": ["1"]})), columns)


def test_much_text_is_taken_if_no_view_shows_it_again(either_format: str) -> None:
    frame = pl.DataFrame(
        {"x": [f"text number {number} of many" for number in range(20_000)], "y": [{"z": b"w" * 20}] * 20_000}
    )
    data, ref = encoded(frame)
    assert read_facts(data).text_bytes_max > ipc.DECODED_BYTES_FREE, either_format
    assert_frame_equal(decode_untrusted(data, ref), frame)


def test_a_length_that_would_abort_the_process_is_found_in_the_metadata() -> None:
    """Polars allocates what stands before a compressed buffer; for an exabyte it aborts."""
    data = bytearray(encoded(pl.DataFrame({"x": [7] * 1000}))[0])
    place = bytes(data).index(struct.pack("<q", 8000))
    data[place : place + 8] = struct.pack("<q", 2**60)
    with pytest.raises(RejectedRunError, match=r"becomes 11529\d+ when it is decoded"):
        check_run(bytes(data), named(bytes(data), 1000))


def test_another_number_of_rows_is_found_in_the_metadata() -> None:
    data, rows = encoded(pl.DataFrame({"x": [1, 2, 3]}), "none")[0], 4
    with pytest.raises(RejectedRunError, match="has 3 rows, what names it says 4"):
        check_run(data, named(data, rows))


def test_a_manifest_that_is_too_large_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fordstone.epochs.untrusted.MANIFEST_BYTES_MAX", 10)
    with pytest.raises(RejectedRunError, match="manifest has 11 bytes; 10 are allowed"):
        decode_untrusted_manifest(b"x" * 11, pipeline="p", node="n", epoch=1)


@pytest.mark.usefixtures("either_format")
def test_what_a_node_writes_is_never_taken_for_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ipc, run_file):
        monkeypatch.setattr(module, "DECODED_BYTES_FREE", 1 << 16)
    constant, varied = (pl.DataFrame({"x": numbers}) for numbers in ([7] * 100_000, range(100_000)))
    for frame in (constant, varied):
        assert_frame_equal(decode_untrusted(*encoded(frame)), frame)
    assert len(encoded(constant)[0]) > 800_000, "it was compressed nonetheless"
    assert len(encoded(varied)[0]) < 800_000


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A process of its own: what aborts or crashes is seen, and its memory is its own."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=HERE.parent.parent,
        env=os.environ | {"RUST_BACKTRACE": "0"},
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_no_forged_run_crashes_the_process_or_fills_its_memory(seed: int, tmp_path: Path) -> None:
    keep = tmp_path / "forged"
    found = child("-m", "tests.epochs.forging", seed, share_of(2400), keep)
    assert found.returncode == 0, f"seed {seed}: exit code {found.returncode}, bytes in {keep}\n{found.stderr[-2000:]}"
    taken, rejected, peak_mib, longest_ms = map(int, found.stdout.split())
    assert taken > 20
    assert rejected > 150
    assert peak_mib < 400
    assert longest_ms < 5_000, "of processor time, for each megabyte"


@pytest.mark.parametrize("depth", [0, 3])
def test_metadata_in_which_nothing_is_shared_is_taken(depth: int) -> None:
    """So what is rejected is rejected for what is shared."""
    data = columns_message(1, zone=b"UTC") if depth == 0 else columns_message(700)
    frame = decode_untrusted(data, named(data, 0))
    assert frame.width == (1 if depth == 0 else 700)


PEAK_OF = """
import hashlib, json, resource, sys
from fordstone.epochs.untrusted import decode_untrusted
from fordstone.errors import RejectedRunError
from fordstone.state.base import RunRef
from tests.epochs.forging import peak_mib
data = open(sys.argv[1], "rb").read()
before = peak_mib()
bytes_now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (bytes_now + (512 << 20),) * 2)
try:
    decode_untrusted(data, RunRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), rows=int(sys.argv[2])))
    found = "taken"
except RejectedRunError as error:
    found = str(error)
print(json.dumps({"found": found, "grown_mib": peak_mib() - before, "bytes": len(data)}))
"""


def test_a_bomb_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(bomb(64_000_000, 0))  # 488 MiB
    found = json.loads(child("-c", PEAK_OF, path, 64_000_000).stdout)
    assert found["bytes"] < 100_000
    assert "becomes 1024000000 when it is decoded" in found["found"]
    assert found["grown_mib"] < 16


@pytest.mark.parametrize("case", SHARED)
def test_what_is_shared_in_metadata_costs_no_memory(case: str, tmp_path: Path) -> None:
    make, reason = SHARED[case]
    path = tmp_path / "shared"
    path.write_bytes(make())
    found = json.loads(child("-c", PEAK_OF, path, 0).stdout)
    assert re.search(reason, found["found"])
    assert found["grown_mib"] < 16


def of_views(rows: int) -> pl.DataFrame:
    """Text of 64 bytes that all rows share."""
    return pl.DataFrame({"x": ["x" * 64]}).select(pl.col("x").gather([0] * rows))


def test_runs_that_are_held_together_share_what_they_may_become(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "EPOCH_BYTES_FREE", 1 << 20)
    monkeypatch.setattr(untrusted, "TEXT_BYTES_FREE", 1 << 10)
    numbers, text = encoded(pl.DataFrame({"x": range(25_000)}), "none"), encoded(of_views(10_000))
    for data, ref, taken in ((*numbers, 2), (*text, 1)):
        budget = DecodeBudget.of_epoch([])
        for _ in range(taken):
            decode_untrusted(data, ref, budget=budget)
        with pytest.raises(RejectedRunError, match="the rows of its epoch become more than 1048576 bytes"):
            decode_untrusted(data, ref, budget=budget)
    assert text[1].size_bytes < 100_000, "views of one text count as text of their own"


def test_what_runs_may_become_grows_with_their_bytes_but_not_with_their_names() -> None:
    runs = [RunRef(f"{number:064x}", 16 << 20, 0) for number in range(3)]
    assert DecodeBudget.of_epoch(runs[:1]).bytes_max == DecodeBudget.of_epoch(runs[:1] * 99).bytes_max == 1 << 30
    assert DecodeBudget.of_epoch(runs).bytes_max == ipc.DECODED_BYTES_MAX
    assert DecodeBudget.of_state(runs).bytes_max == ipc.DECODED_BYTES_MAX
    assert DecodeBudget.of_state(RunRef(one.digest, 1 << 30, 0) for one in runs).bytes_max == 48 << 30


# Partial aggregates.

FORGED_SKETCHES = """
import random, sys
from fordstone.operators.aggregate.received import sketch_problem
from fordstone.operators.aggregate.sketches import _sketch, _union, _unordered
rng = random.Random(int(sys.argv[1]))
goods = [_sketch(range(count), 12) for count in (1, 5, 20, 100, 1000, 100_000)]
taken = rejected = 0
for _ in range(int(sys.argv[2])):
    data = bytearray(rng.choice(goods))
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(min(len(data), 48) if rng.random() < 0.7 else len(data))
        data[place] = rng.choice((0, 255, 128, 127, rng.randrange(256), data[place] ^ (1 << rng.randrange(8))))
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    if sketch_problem(bytes(data), 12) is not None:
        rejected += 1
        continue
    taken += 1
    round(_unordered(_union([bytes(data), goods[0]], 12), 12).get_estimate())
    round(_unordered(bytes(data), 12).get_estimate())
print(taken, rejected)
"""


def test_no_forged_sketch_of_different_values_crashes_the_process() -> None:
    found = child("-c", FORGED_SKETCHES, 1, share_of(12_000))
    assert found.returncode == 0, f"exit code {found.returncode}: {found.stderr[-2000:]}"
    taken, rejected = map(int, found.stdout.split())
    assert min(taken, rejected) > 300


def test_a_million_rows_of_one_sketch_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr(received, "sketch_problem", lambda data, _: looked.append(data))
    frame = pl.DataFrame({"__hll12_0": [_sketch([1], 12)]}).select(pl.all().gather([0] * 1_000_000))
    assert partial_problem(frame) is None
    assert len(looked) == 1


def test_every_sketch_of_different_values_is_taken() -> None:
    rng = random.Random(5)
    for lg_k in range(4, 22):
        for count in (1, 7, 8, 24, 25, 100, 384, 3000):
            one, other = (_sketch((rng.random() for _ in range(count)), lg_k) for _ in range(2))
            for data in (one, other, _union([one, other], lg_k)):
                assert sketch_problem(data, lg_k) is None


PARTIALS: dict[str, tuple[dict[str, list[Any]], str | None]] = {
    "no partial aggregates": ({"x": [1]}, None),
    "a sketch": ({"__hll12_0": [_sketch([1], 12), None]}, None),
    "bytes that are no sketch": ({"__hll12_0": [None, b"\x02\x01\x07\x0c"]}, "a sketch has 4 bytes"),
    "a sketch of another size": ({"__hll12_0": [_sketch([1], 11)]}, "not of size 12"),
    "a number for a sketch": ({"__hll12_0": [1]}, "sketches are bytes"),
    "quantiles": ({"__kll200_values1": [[0.5, None], [], None], "__kll200_levels1": [[0, None], [], None]}, None),
    "quantiles without levels": ({"__kll200_values1": [[0.5]]}, "one of a pair of lists is missing"),
    "a level that nothing has": ({"__kll200_values1": [[0.5]], "__kll200_levels1": [[200]]}, "a level is above 60"),
    "fewer levels than values": ({"__kll200_values1": [[0.5, 1.5]], "__kll200_levels1": [[0]]}, "differ in length"),
    "collected values": ({"__all_at2": [[1, 2]], "__all2": [["a", "b"]]}, None),
    "a time without a value": ({"__all_at2": [[1, 2]], "__all2": [["a", None]]}, "differ in their nulls"),
}


@pytest.mark.usefixtures("either_format")
@pytest.mark.parametrize("case", PARTIALS)
def test_partial_aggregates_that_cannot_be_merged_are_rejected(case: str) -> None:
    columns, reason = PARTIALS[case]
    frame = pl.DataFrame(columns)
    if reason is None:
        assert partial_problem(frame) is None
        assert_frame_equal(decode_untrusted(*encoded(frame)), frame)
    else:
        with pytest.raises(RejectedRunError, match=f"that cannot be merged: .*{reason}"):
            decode_untrusted(*encoded(frame))
