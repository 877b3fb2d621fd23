from __future__ import annotations

import datetime as dt
import hashlib
import subprocess
import sys
from decimal import Decimal
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from fordstone.epochs import run_file
from fordstone.epochs.run_file import COMPRESSIONS, decode_run, encode_run
from fordstone.errors import ConfigError

EVERY_TYPE = pl.DataFrame(
    {
        "whole": pl.Series([1, None, -(2**63)], dtype=pl.Int64),
        "small": pl.Series([1, None, 255], dtype=pl.UInt8),
        "float": [0.5, float("nan"), None],
        "text": ["short", "longer than the twelve bytes of a view, äöü", None],
        "bytes": [b"", None, b"\x00\xff" * 20],
        "flag": [True, None, False],
        "time": pl.Series([dt.datetime(2024, 1, 1), None, dt.datetime(1969, 12, 31)], dtype=pl.Datetime("us", "UTC")),
        "day": [dt.date(2024, 1, 1), None, dt.date(1, 1, 1)],
        "span": pl.Series([1, None, -1], dtype=pl.Duration("us")),
        "decimal": pl.Series([Decimal("1.50"), None, Decimal("-2.25")], dtype=pl.Decimal(18, 2)),
        "many": [[1, None], [], None],
        "both": [{"a": 1, "b": "x"}, None, {"a": None, "b": None}],
        "nothing": pl.Series([None, None, None], dtype=pl.Null),
    }
)


@pytest.fixture(params=["stream", "file"])
def either_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(run_file, "_FILE_ROWS_MIN", 0 if request.param == "file" else 10**9)
    return request.param


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_frame_of_every_type_comes_back_as_it_was(either_format: Any, compression: Any) -> None:
    ref, data = encode_run(EVERY_TYPE, compression)
    assert_frame_equal(decode_run(bytes(data), ref), EVERY_TYPE)
    assert bytes(data).startswith(b"ARROW1") == (either_format == "file")


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "frame", [EVERY_TYPE.clear(), pl.DataFrame(schema={"a": pl.Int64}), pl.DataFrame({"a": ["x"] * 70_000})]
)
def test_frames_without_rows_and_with_many_come_back(compression: Any, frame: Any) -> None:
    ref, data = encode_run(frame, compression)
    assert ref.rows == frame.height
    assert_frame_equal(decode_run(bytes(data), ref), frame)


def test_the_reference_says_what_the_bytes_are() -> None:
    ref, data = encode_run(EVERY_TYPE, "zstd")
    assert ref.digest == hashlib.sha256(data).hexdigest()
    assert ref.size_bytes == len(data)
    assert ref.rows == 3


def test_a_frame_in_many_small_chunks_gives_the_same_file_as_in_one() -> None:
    whole = pl.DataFrame({"n": range(1000), "text": [f"row number {n}" for n in range(1000)]})
    pieces = pl.concat([whole[at : at + 10] for at in range(0, 1000, 10)], rechunk=False)
    assert pieces.n_chunks() == 100
    assert encode_run(pieces, "lz4")[0] == encode_run(whole, "lz4")[0]


def test_compression_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="gzip"):
        encode_run(EVERY_TYPE, "gzip")  # type: ignore[arg-type]


WRITE_WHILE_READ = """
import threading
import polars as pl
from fordstone.epochs.run_file import encode_run

frame = pl.DataFrame({"n": range(40_000), "text": [str(n) for n in range(40_000)]})
done = threading.Event()

def look():
    while not done.is_set():
        frame.get_column("n")

threading.Thread(target=look, daemon=True).start()
for _ in range(60):
    encode_run(frame, "lz4")
done.set()
"""


def test_a_frame_may_be_looked_at_by_its_task_while_the_writer_writes_it() -> None:
    # In a process of its own, because what this guards against holds the interpreter for ever.
    finished = subprocess.run([sys.executable, "-c", WRITE_WHILE_READ], timeout=600, check=False)
    assert finished.returncode == 0
