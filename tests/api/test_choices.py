"""Options of fixed words are checked when they are given, and a wrong name names the nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from fordstone import Pattern, Pipeline, Stream
from fordstone.connectors import files, generator, stdout
from fordstone.edge.config import RunConfig
from fordstone.errors import ConfigError, FordstoneError
from fordstone.lang.choices import check_word, did_you_mean

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double"}
WRONG = cast("Any", "wrong")


def readings(pipeline: Pipeline | None = None, **options: Any) -> Stream:
    found = pipeline or Pipeline("p")
    return found.source("readings", generator(rows=1), schema=SCHEMA, time="ts", **options)


def two() -> tuple[Stream, Stream]:
    pipeline = Pipeline("p")
    other = pipeline.source("other", generator(rows=1), schema=SCHEMA, time="ts")
    return readings(pipeline), other


def printed() -> Pipeline:
    pipeline = Pipeline("p")
    readings(pipeline).sink("s", stdout())
    return pipeline


def joined(how: Any) -> Stream:
    left, right = two()
    return left.join(right, on="device", between=("0s", "1s"), how=how)


def latest(how: Any) -> Stream:
    left, right = two()
    return left.join_latest(right, on="device", how=how)


PATTERN = Pattern("hot").start("a", "temp > 1")

WORDS: list[tuple[str, Callable[[], object], str]] = [
    ("release", lambda: readings().sink("s", stdout(), release=WRONG), "sink s: release='wrong' must be 'commit' or 'at_once'."),
    ("guarantee", lambda: Pipeline("p", guarantee=WRONG), "guarantee='wrong' must be 'exactly_once', 'at_least_once' or"),
    ("mode", lambda: Pipeline("p", mode=WRONG), "mode='wrong' must be 'aligned', 'unaligned' or 'blocking'."),
    ("on_error", lambda: readings(on_error=WRONG), "source readings: on_error='wrong' must be 'keep' or 'fail'."),
    ("how", lambda: joined(WRONG), "how='wrong' must be 'inner', 'left', 'right' or 'full'."),
    ("how of a lookup", lambda: readings().lookup([{"device": "a"}], on="device", how=WRONG), "how='wrong' must be 'inner' or 'left'."),
    ("how of latest", lambda: latest(WRONG), "how='wrong' must be 'inner' or 'left'."),
    ("skip", lambda: readings().match(PATTERN, skip=WRONG), "skip='wrong' must be 'none', 'next', 'past_last', 'first' or 'last'."),
    ("choose", lambda: readings().match(PATTERN, choose=WRONG), "choose='wrong' must be 'earliest' or 'preferred'."),
    ("rows", lambda: readings().match(PATTERN, rows=WRONG), "rows='wrong' must be 'one' or 'all'."),
    ("format of files", lambda: files("out", format="wrong"), "files('out'): format='wrong' must be 'jsonl', 'csv', 'parquet' or 'arrow'."),
    ("time_unit", lambda: files("in", time_unit="ns"), "time_unit='ns' must be 's', 'ms' or 'us'."),  # type: ignore[arg-type]
    ("compression of files", lambda: files("out", "arrow", compression="wrong"), "compression='wrong' must be 'zstd', 'lz4' or 'none'."),  # type: ignore[arg-type]
    ("format of stdout", lambda: stdout(WRONG), "stdout: format='wrong' must be 'jsonl' or 'table'."),
    ("format of explain", lambda: printed().explain(format="wrong"), "format='wrong' must be 'text', 'mermaid' or 'json'."),
    ("compression of a run", lambda: RunConfig(compression=WRONG), "compression='wrong' must be 'zstd', 'lz4' or 'none'."),
    ("outbox_full", lambda: RunConfig(outbox_full=WRONG), "outbox_full='wrong' must be 'block' or 'drop_oldest'."),
]  # fmt: skip


@pytest.mark.parametrize(("give", "says"), [case[1:] for case in WORDS], ids=[case[0] for case in WORDS])
def test_an_unknown_word_is_an_error_when_it_is_given(give: Callable[[], object], says: str) -> None:
    with pytest.raises(FordstoneError) as caught:
        give()
    assert says in str(caught.value)


def test_a_word_that_is_nearly_right_names_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'commit'\?"):
        check_word("release", "committed", ("commit", "at_once"))


def test_a_value_that_is_no_word_is_an_error_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"^release=None must be 'commit' or 'at_once'\.$"):
        check_word("release", None, ("commit", "at_once"))


def test_nothing_near_gives_no_hint() -> None:
    assert did_you_mean("xyz", ("commit", "at_once")) == ""


def test_an_option_of_a_connector_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"files\('in'\): there is no option 'fromat'. Did you mean 'format'\?"):
        files("in", fromat="csv")  # type: ignore[call-arg]  # what is tested


def test_an_option_of_a_run_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"run: there is no option 'bonded'. Did you mean 'bounded'\?"):
        printed().run(bonded=True)  # type: ignore[call-arg]  # what is tested


def test_an_unknown_function_names_near_ones_only() -> None:
    with pytest.raises(FordstoneError, match=r"there is no function uper. Did you mean upper"):
        readings().select("uper(device) AS d")
    with pytest.raises(
        FordstoneError, match=r"there is no function qqqq. All functions are in docs/reference/expressions.md."
    ):
        readings().select("qqqq(device) AS d")
