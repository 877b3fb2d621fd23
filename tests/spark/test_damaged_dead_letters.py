"""Dead letters stop no pipeline: what is damaged in their directory is set aside, on both engines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died

from fordstone import Pipeline
from fordstone.connectors import files, latest, rows
from fordstone.connectors.base import SinkStream
from fordstone.connectors.files.settings import dead_letter_files
from fordstone.connectors.registry import open_sink
from fordstone.errors import SinkError
from fordstone.operators.dead_letter import LETTER_SCHEMA

MARK, EPOCH = "_stream.json", "epoch-000000000001.jsonl"
FOREIGN = b'{"version":1,"step":"other","format":"jsonl","columns":{"n":"int"},"upsert_key":null,"delimiter":","}'
DAMAGE = {
    "torn": (EPOCH, lambda data: data[:20]),
    "garbage": (EPOCH, lambda data: bytes(len(data))),
    "not utf-8": (EPOCH, lambda data: b"\xff\xfe" + data),
    "empty": (EPOCH, lambda _: b""),
    "a list": (EPOCH, lambda _: b"[1]\n"),
    "other letters": (EPOCH, lambda data: data.replace(b"bad", b"Bad")),
    "mark torn": (MARK, lambda data: data[:10]),
    "mark empty": (MARK, lambda _: b""),
    "mark not utf-8": (MARK, lambda data: data.replace(b"jsonl", b"js\xeenl")),
    "mark of another stream": (MARK, lambda _: FOREIGN),
    "mark of a newer release": (MARK, lambda data: data.replace(b'"version": 1', b'"version": 9')),
    "mark gone": (MARK, None),
}


@pytest.fixture(name="go", params=["edge", "spark"])
def go_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Runs over what is there; returns the directory of dead letters. `again`: stop it so that the next run releases again."""
    spark = MicroSpark()

    def go(*, again: bool = False) -> Path:
        pipeline = Pipeline("p")
        source = pipeline.source("src", files(str(tmp_path / "in/*.jsonl")), schema={"n": "int"})
        source.sink("out", files(str(tmp_path / "out"), format="jsonl"))
        if request.param == "edge":  # releases its last epoch again at each start
            pipeline.run(state=tmp_path / "state", bounded=True, interval="1h")
            return tmp_path / "state/p/node/dead-letters/src"
        spark.fate.dies_before = "batch.released" if again else None  # before the cut: the next run releases again
        query = spark.start(pipeline.plan(), state=tmp_path / "state", available_now=True)
        if again:
            with pytest.raises(Died):
                query.run()
        else:
            query.run()
        return next((tmp_path / "state").glob("**/dead-letters/src"))

    (tmp_path / "in").mkdir()
    return go


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_dead_letters_are_set_aside_and_the_pipeline_goes_on(
    go: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    (tmp_path / "in/1.jsonl").write_text('{"n":1}\nbad\n{"n":2}\n')
    letters = go(again=True)
    name, damaged = DAMAGE[damage]
    if damaged is None:
        (letters / name).unlink()
    else:
        (letters / name).write_bytes(damaged((letters / name).read_bytes()))
    (tmp_path / "in/2.jsonl").write_text('{"n":3}\nworse\n')
    with caplog.at_level(logging.WARNING):
        go()
    assert rows(tmp_path / "out")["n"].sort().to_list() == [1, 2, 3]
    assert rows(letters)["text"].to_list() == ["bad", "worse"]
    assert any(record.message.startswith("dead letters damaged") for record in caplog.records)
    if damaged is not None:
        (kept,) = [path.name for path in letters.glob("damaged-1/*") if path.name == name]
        assert kept == name


def test_each_time_that_letters_are_damaged_they_are_set_aside_in_a_directory_of_their_own(tmp_path: Path) -> None:
    letter = LETTER_SCHEMA.empty().clear(1).fill_null("x").fill_null(0)
    for number in (1, 2, 3):
        sink = open_sink(dead_letter_files(tmp_path), SinkStream(step="s", schema=LETTER_SCHEMA))
        sink.release(1, letter)
        assert rows(tmp_path).height == 1
        assert len(list(tmp_path.glob("damaged-*"))) == number - 1
        (tmp_path / EPOCH).write_bytes(b"\x00")


@pytest.mark.parametrize("content", [b"\x00", b"[1]\n", b"\xff\n", b'{"n":1', b'{"n":', b"5\n"])
@pytest.mark.parametrize("file_format", ["jsonl", "csv", "parquet", "arrow"])
def test_reading_damaged_output_back_is_an_error_that_names_the_file(
    tmp_path: Path, content: bytes, file_format: str
) -> None:
    stream = SinkStream(step="s", schema=LETTER_SCHEMA, upsert_key=("step",))
    open_sink(files(str(tmp_path), format=file_format), stream).release(
        1, LETTER_SCHEMA.empty().clear(1).fill_null("x")
    )
    (tmp_path / f"epoch-000000000001.{file_format}").write_bytes(content)
    for read in (rows, latest):
        with pytest.raises(SinkError, match=f"epoch-000000000001.{file_format}"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("written", "damaged"),
    [
        (b'"step": "s"', b'"step": "\xee"'),
        (b'"bigint"', b'"bi\'int"'),
        (b'"upsert_key": [\n    "step"', b'"upsert_key": [\n    "stem"'),
        (b'"delimiter": ","', b'"delimiter": ""'),
    ],
)
def test_reading_back_by_a_damaged_mark_is_an_error_that_names_it(
    tmp_path: Path, written: bytes, damaged: bytes
) -> None:
    stream = SinkStream(step="s", schema=LETTER_SCHEMA, upsert_key=("step",))
    open_sink(files(str(tmp_path), format="csv"), stream).release(1, LETTER_SCHEMA.empty().clear(1).fill_null("x"))
    content = (tmp_path / MARK).read_bytes()
    assert written in content
    (tmp_path / MARK).write_bytes(content.replace(written, damaged))
    for read in (rows, latest):
        with pytest.raises(SinkError, match=MARK):
            read(tmp_path)
