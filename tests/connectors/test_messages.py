import json
import random

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from fordstone.connectors.messages import message_format
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema

SCHEMA = Schema.of({"device": "string", "n": "bigint", "temp": "double"})


def json_format():
    return message_format("json", SCHEMA, where="here")


def test_each_message_is_one_row():
    values = [b'{"device": "a", "n": 1, "temp": 2.5}', b'{"n": 2, "other": true}']
    found = json_format().decode(values)
    assert found.frame.rows() == [("a", 1, 2.5), (None, 2, None)]
    assert found.numbers.tolist() == [0, 1]
    assert found.rejected == ()


def test_a_bad_message_is_rejected_with_its_text_and_takes_no_other_with_it():
    values = [b'{"n": 1}', b'{"n": "x"}', b"", b"  ", b'{"n": ', b"[1]", b'{"n": 2}', b"\xff{}"]
    found = json_format().decode(values)
    assert found.frame.get_column("n").to_list() == [1, 2]
    assert found.numbers.tolist() == [0, 6]
    assert [one.number for one in found.rejected] == [1, 2, 3, 4, 5, 7]
    reasons = {one.number: one.reason for one in found.rejected}
    assert reasons[2] == reasons[3] == "the message is empty"
    assert reasons[5] == "not a JSON object"
    assert next(one.text for one in found.rejected if one.number == 1) == '{"n": "x"}'


def test_a_message_may_have_several_lines():
    pretty = json.dumps({"device": "a\nb", "n": 1}, indent=2).encode()
    found = json_format().decode([b'{"n": 0}', pretty, b'{"n": 2}'])
    assert found.frame.get_column("n").to_list() == [0, 1, 2]
    assert found.frame.get_column("device").to_list() == [None, "a\nb", None]
    assert found.rejected == ()


def test_two_objects_in_one_message_are_not_two_rows():
    found = json_format().decode([b'{"n": 1}\n{"n": 2}', b'{"n": 3}'])
    assert found.frame.get_column("n").to_list() == [3]
    assert [one.number for one in found.rejected] == [0]


def test_no_messages_give_no_rows():
    found = json_format().decode([])
    assert found.frame.is_empty()
    assert found.frame.schema == SCHEMA.polars
    assert found.numbers.tolist() == []


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_what_becomes_of_a_message_does_not_depend_on_the_others(drawn: random.Random, count: int):
    pool = [
        b'{"device": "d", "n": 7, "temp": NaN}',
        b'{"n": 1}',
        b"",
        b"{",
        b'{"n": 1.5}',
        b'{"n": 3,\n "temp": "Infinity"}',
        b"null",
        b'{"n": 99999999999999999999}',
        b'{"device": "\\ud800"}',
        b"\xc3(",
    ]
    values = [drawn.choice(pool) for _ in range(count)]
    together = json_format().decode(values)
    rows = dict(zip(together.numbers.tolist(), together.frame.rows(), strict=True))
    reasons = {one.number: one.reason for one in together.rejected}
    assert sorted([*rows, *reasons]) == list(range(count))
    for number, value in enumerate(values):
        alone = json_format().decode([value])
        assert [str(row) for row in alone.frame.rows()] == [str(rows[number]) for _ in range(number in rows)]
        assert len(alone.rejected) == (number in reasons)


def test_many_bad_messages_are_all_reported():
    values = [b"bad" if number % 2 else b'{"n": %d}' % number for number in range(10_000)]
    found = json_format().decode(values)
    assert found.frame.get_column("n").to_list() == list(range(0, 10_000, 2))
    assert [one.number for one in found.rejected] == list(range(1, 10_000, 2))


def test_json_goes_there_and_back():
    frame = pl.DataFrame({"device": ["a", None], "n": [1, 2], "temp": [float("nan"), 0.5]}, schema=SCHEMA.polars)
    values = json_format().encode(frame)
    assert len(values) == 2
    assert_frame_equal(json_format().decode(values).frame, frame)


def test_a_text_with_other_line_ends_stays_in_one_message():
    frame = pl.DataFrame({"device": ["a\u2028b\r\x85\x0bc"], "n": [1], "temp": [None]}, schema=SCHEMA.polars)
    values = json_format().encode(frame)
    assert len(values) == 1
    assert_frame_equal(json_format().decode(values).frame, frame)


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_raw_values_are_one_column(kind):
    raw = message_format("raw", Schema.of({"value": kind}), where="here")
    values = [b"plain", b"", b"two\nlines", b"\xff"]
    found = raw.decode(values)
    good = values if kind == "binary" else ["plain", "", "two\nlines"]
    assert found.frame.get_column("value").to_list() == good
    assert [(one.number, one.reason) for one in found.rejected] == (
        [] if kind == "binary" else [(3, "invalid UTF-8 at byte 0")]
    )
    assert raw.encode(found.frame) == values[: len(good)]


def test_raw_needs_one_column_of_text_or_bytes():
    for columns in ({"a": "string", "b": "string"}, {"a": "bigint"}):
        with pytest.raises(ConfigError, match="format='raw', the value of a message is one column"):
            message_format("raw", Schema.of(columns), where="here")
