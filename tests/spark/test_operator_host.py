"""Pieces of open windows are read back only when one of their rows is due.

Keyed steps of one shard through batches: what is stored, how much of it, in how many pieces, and what it gives.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import msgspec
import polars as pl
import pytest

from fordstone import Pipeline, tumbling
from fordstone.connectors import files
from fordstone.errors import CheckpointError, DamagedError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.operators.aggregate.family import partials_of
from fordstone.operators.base import OP
from fordstone.operators.registry import make_feeder
from fordstone.plan import plan as p
from fordstone.protocol.partitions import SourceState
from fordstone.spark.hosted import operator_host as host_module
from fordstone.spark.hosted.operator_host import (
    SeedPiece,
    ShardHost,
    ShardMemo,
)
from fordstone.spark.hosted.packing import Packed, What, decode, encode
from fordstone.spark.hosted.plan_batches import SourceClock, SourceTimes, TaskFacts, read_clock
from fordstone.spark.hosted.sent import MEMO, SparkStore
from fordstone.spark.hosted.stages import QuerySetting
from fordstone.state.table import DELETED

SECOND = 1_000_000
SCHEMA = {"k": "bigint", "ts": "timestamp", "n": "bigint"}


@dataclass
class CountingStore:
    """A `PieceStore` that counts, and in which no number is used again."""

    memo: bytes | None = None
    pieces: dict[tuple[str, int], bytes] = field(default_factory=dict)
    used: set[tuple[str, int]] = field(default_factory=set)
    put_bytes: int = 0
    gets: int = 0

    def get(self, at: tuple[str, int]) -> bytes | None:
        if at == (MEMO, 0):
            return self.memo
        self.gets += 1
        return self.pieces.get(at)

    def __setitem__(self, at: tuple[str, int], data: bytes) -> None:
        if at == (MEMO, 0):
            self.memo = data
            return
        assert at not in self.used, "a number was used again"
        self.used.add(at)
        self.pieces[at] = data
        self.put_bytes += len(data)

    def __delitem__(self, at: tuple[str, int]) -> None:
        del self.pieces[at]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pieces.values()))

    @property
    def known(self) -> ShardMemo:
        assert self.memo is not None
        return msgspec.json.decode(self.memo, type=ShardMemo)


def setting(*, windows: bool = False, running: bool = False, twice: bool = False, shards: int = 1) -> QuerySetting:
    pipeline = Pipeline("p")
    rows = pipeline.source("s", files("in/*.jsonl"), schema=SCHEMA, time="ts")
    if running:
        totals = rows.group_by("k").agg(name="totals", n="count(*)", top="max(n)")
        totals.sink("running", files("out/running", format="jsonl"))
    if windows:
        closed = rows.group_by("k").window(tumbling("10s")).agg(name="windows", n="count(*)", total="sum(n)")
        closed.sink("closed", files("out/closed", format="jsonl"))
        if twice:
            again = closed.group_by().window(tumbling("60s")).agg(name="minutes", n="sum(n)")
            again.sink("minutes_out", files("out/minutes", format="jsonl"))
    return QuerySetting(plan_json=pipeline.plan().to_json(), shards=shards)


def at(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def frame(rows: Iterable[tuple[int, float, int]]) -> pl.DataFrame:
    schema = {"k": pl.Int64(), "ts": pl.Datetime("us", "UTC"), "n": pl.Int64()}
    return pl.DataFrame([(k, at(second), n) for k, second, n in rows], schema=schema, orient="row")


def for_step(query: QuerySetting, step: str, rows: pl.DataFrame) -> Packed:
    """Rows as a reader packs them."""
    stages = query.stages
    found = stages.plan.step(step)
    assert isinstance(found, p.Aggregate)
    feeder = make_feeder(found, 0, query.operators)
    assert feeder is not None
    (made,) = feeder.on_batch(rows, late=False)
    return Packed(0, What.ROWS, stages.tag_of(step), encode(made.frame))


def mark(us: int, *, state: SourceState = SourceState.OPEN) -> Packed:
    clock = SourceClock(watermark_us=TIME_MIN_US, state=state, least_us=us)
    return Packed(0, What.CLOCK, 0, msgspec.json.encode(SourceTimes(clocks={"s": clock})))


END = mark(0, state=SourceState.ENDED)


def run(query: QuerySetting, store: CountingStore, *rows: Packed, depth: int = 1, shard: int = 0) -> list[Packed]:
    return list(ShardHost(query, depth, shard, store).run(rows))


def out(found: Iterable[Packed], tag: int = 0) -> list[tuple[Any, ...]]:
    frames = [decode(row.data) for row in found if row.what is What.OUT and row.tag == tag]
    return sorted(row for one in frames for row in one.drop(OP, strict=False).rows())


def facts(found: Iterable[Packed]) -> TaskFacts:
    (found_facts,) = [msgspec.json.decode(row.data, type=TaskFacts) for row in found if row.what is What.FACTS]
    return found_facts


# What comes of a batch.


def test_rows_are_taken_before_time_moves_in_whatever_order_they_come() -> None:
    query = setting(windows=True)
    rows = [
        for_step(query, "windows", frame([(1, 1, 10)])),
        for_step(query, "windows", frame([(1, 2, 20), (2, 15, 5)])),
        mark(12 * SECOND),
    ]
    for some in permutations(rows):
        assert out(run(query, CountingStore(), *some)) == [(1, at(0), at(10), 2, 30)]


def test_time_never_goes_back() -> None:
    query, store = setting(windows=True), CountingStore()
    run(query, store, mark(20 * SECOND))
    found = run(query, store, for_step(query, "windows", frame([(1, 1, 10), (1, 21, 5)])), mark(5 * SECOND))
    assert store.known.watermarks_us == {"windows": 20 * SECOND}
    # The row of the window that was closed is late.
    assert facts(found).rows_late == 1
    assert out(run(query, store, END)) == [(1, at(20), at(30), 1, 5)]


def test_what_is_for_others_is_passed_on_as_it_is() -> None:
    query = setting(windows=True, twice=True)
    others = [
        Packed(0, What.OUT, 7, b"out"),
        Packed(0, What.FACTS, 0, msgspec.json.encode(TaskFacts(rows_late=99))),
        Packed(0, What.ROWS, query.stages.tag_of("minutes"), b"rows"),
        Packed(0, What.LATE, query.stages.tag_of("minutes"), b"late"),
        Packed(0, What.SEED, query.stages.tag_of("minutes"), b"seed"),
    ]
    found = run(query, CountingStore(), *others, mark(5 * SECOND))
    assert [row for row in found if row in others] == others


def test_one_shard_passes_the_time_on_to_every_shard_of_the_next_stage() -> None:
    query = setting(windows=True, twice=True, shards=3)
    marks = [mark(5 * SECOND), Packed(0, What.CLOCK, 0, msgspec.json.encode(SourceTimes(least_us={"s": 3 * SECOND})))]
    passed = [row for row in run(query, CountingStore(), *marks) if row.what is What.CLOCK]
    assert [row.shard for row in passed] == [0, 1, 2]
    assert read_clock([passed[0].data]) == read_clock(row.data for row in marks)
    assert not [row for row in run(query, CountingStore(), *marks, shard=1) if row.what is What.CLOCK]
    assert not [row for row in run(query, CountingStore(), *marks, depth=2) if row.what is What.CLOCK]


def test_steps_of_one_stage_keep_apart() -> None:
    query, store = setting(windows=True, running=True), CountingStore()
    rows = frame([(1, 1, 10), (1, 11, 20)])
    found = run(query, store, for_step(query, "windows", rows), for_step(query, "totals", rows), mark(10 * SECOND))
    assert out(found, 0) == [(1, 2, 20)]
    assert out(found, 1) == [(1, at(0), at(10), 1, 10)]
    assert set(store.known.pieces) == {"windows:windows", "totals:totals"}
    assert out(run(query, store, END), 1) == [(1, at(10), at(20), 1, 20)]


def test_a_batch_without_rows_writes_nothing_but_what_it_knows() -> None:
    query, store = setting(windows=True, running=True), CountingStore()
    run(query, store, for_step(query, "windows", frame([(1, 1, 10)])), for_step(query, "totals", frame([(1, 1, 10)])))
    put_bytes = store.put_bytes
    found = run(query, store, mark(5 * SECOND))
    assert store.put_bytes == put_bytes
    assert facts(found).written_bytes == 0
    assert facts(found).state_bytes == store.size_bytes


# What is stored.


def test_what_is_stored_is_all_that_the_next_batch_needs() -> None:
    query = setting(windows=True, running=True)
    rows = [frame([(k, n, n)]) for n in range(40) for k in (n % 3, 7)]
    whole, store = CountingStore(), CountingStore()
    packed = [for_step(query, step, one) for one in rows for step in ("windows", "totals")]
    at_once = run(query, whole, *packed, END)
    one_by_one: list[Packed] = []
    latest: dict[int, tuple[Any, ...]] = {}
    for number in range(0, len(packed), 2):
        found = run(query, store, *packed[number : number + 2], mark((number // 4 - 1) * SECOND))
        one_by_one += found
        latest |= {row[0]: row for row in out(found, 0)}
    one_by_one += run(query, store, END)
    assert out(one_by_one, 1) == out(at_once, 1)
    assert sorted(latest.values()) == out(at_once, 0)


def test_windows_that_have_closed_leave_nothing_behind() -> None:
    query, store = setting(windows=True), CountingStore()
    for number in range(30):
        run(query, store, for_step(query, "windows", frame([(k, number, 1) for k in range(5)])), mark(number * SECOND))
    assert store.pieces
    run(query, store, mark(100 * SECOND))
    assert store.pieces == {}
    assert store.known.pieces == {"windows:windows": ()}


def test_a_running_state_of_many_batches_is_in_few_pieces() -> None:
    query, store = setting(running=True), CountingStore()
    most = 0
    for number in range(500):
        rows = frame([((number * 37 + place * 11) % 900, 0, number) for place in range(12)])
        run(query, store, for_step(query, "totals", rows))
        most = max(most, len(store.known.pieces["totals:totals"]))
        assert len(store.pieces) == len(store.known.pieces["totals:totals"])
    # A dozen a tier, and all of this is in the lowest; 500 batches made 500 pieces.
    assert 4 <= most <= 16
    assert len(store.used) >= 500
    (tag,) = [out(run(query, store, for_step(query, "totals", frame([(0, 0, 0)]))))]
    assert tag[0][0] == 0


def test_open_windows_of_many_batches_are_in_few_pieces() -> None:
    query, store = setting(windows=True), CountingStore()
    most = 0
    for number in range(200):
        rows = frame([(place, number * 3, 1) for place in range(5)])
        run(query, store, for_step(query, "windows", rows), mark((number * 3 - 200) * SECOND))
        most = max(most, len(store.known.pieces["windows:windows"]))
    assert most <= 20


@pytest.mark.parametrize("changed", [10, 100])
def test_a_batch_writes_in_proportion_to_what_changed(changed: int) -> None:
    query, store = setting(running=True), CountingStore()
    keys = 20_000
    run(query, store, for_step(query, "totals", frame([(k, 0, 0) for k in range(keys)])))
    row_bytes = store.size_bytes / keys
    before = store.put_bytes
    batches = 40
    for number in range(batches):
        rows = frame([((number * changed + place) % keys, 0, 1) for place in range(changed)])
        found = run(query, store, for_step(query, "totals", rows))
        assert facts(found).state_bytes == store.size_bytes
    written = (store.put_bytes - before) / batches
    # Each row is written once, and once more when a dozen small pieces are folded; a small piece has a few hundred bytes of its own.
    assert written < 4 * changed * row_bytes + 2000
    assert written < store.size_bytes / 10


def test_pieces_that_only_wait_are_not_read() -> None:
    query, store = setting(windows=True), CountingStore()
    for number in range(8):
        run(query, store, for_step(query, "windows", frame([(1, 100 + 10 * number, 1)])), mark(0))
    store.gets = 0
    run(query, store, for_step(query, "windows", frame([(1, 300, 1)])), mark(50 * SECOND))
    assert store.gets == 0


def test_a_large_piece_is_several_values_and_all_of_them_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "VALUE_BYTES_MAX", 600)
    query, store = setting(windows=True, running=True), CountingStore()
    for number in range(30):
        rows = frame([(k, number, 1) for k in range(number, number + 20)])
        run(query, store, *(for_step(query, step, rows) for step in ("windows", "totals")), mark(number * SECOND))
        known = [one for pieces in store.known.pieces.values() for one in pieces]
        assert len(store.pieces) == sum(len(one.values) for one in known) > len(known)
        assert max(map(len, store.pieces.values())) == 600
    found = out(run(query, store, for_step(query, "totals", frame([(k, 0, 9) for k in range(49)])), END))
    assert [n for _, n, _ in found] == [min(k, 19, 48 - k) + 2 for k in range(49)]
    assert {state for state, _ in store.pieces} == {"totals:totals"}


def test_a_piece_of_another_size_is_damage() -> None:
    query, store = setting(running=True), CountingStore()
    run(query, store, for_step(query, "totals", frame([(1, 0, 0)])))
    ((place, data),) = store.pieces.items()
    store.pieces[place] = data[:-1]
    with pytest.raises(
        DamagedError, match=rf"piece 0 of totals:totals has {len(data) - 1} bytes, {len(data)} were stored"
    ):
        run(query, store, for_step(query, "totals", frame([(1, 0, 0)])))


def test_a_piece_that_spark_does_not_have_is_reported() -> None:
    query, store = setting(running=True), CountingStore()
    run(query, store, for_step(query, "totals", frame([(1, 0, 0)])))
    memo = SimpleNamespace(get=lambda: (store.memo,))
    without = SparkStore(memo, {"totals:totals": SimpleNamespace(getValue=lambda key: None)})
    with pytest.raises(CheckpointError, match="piece 0 of totals:totals is missing"):
        list(ShardHost(query, 1, 0, without).run([for_step(query, "totals", frame([(1, 0, 0)]))]))


# Seeds.


def totals_piece(rows: Mapping[int, int]) -> pl.DataFrame:
    """Stored totals of keys, with that many rows each."""
    query = setting(running=True)
    made = for_step(query, "totals", frame([(k, 0, 0) for k, count in rows.items() for _ in range(count)]))
    return decode(made.data).with_columns(pl.lit(value=False).alias(DELETED))


def seed(order: int, piece: pl.DataFrame | None, us: int = TIME_MIN_US, tag: int = 0, state: str = "totals") -> Packed:
    rows = b"" if piece is None else encode(piece)
    made = SeedPiece(state=state, order=order, watermark_us=us, rows=rows)
    return Packed(0, What.SEED, tag, msgspec.msgpack.encode(made))


def test_of_the_pieces_of_a_checkpoint_the_newest_counts_in_whatever_order_they_come() -> None:
    query = setting(running=True)
    seeds = [seed(0, totals_piece({1: 2, 2: 3})), seed(1, totals_piece({1: 5})), seed(2, totals_piece({3: 1}))]
    for some in permutations([*seeds, for_step(query, "totals", frame([(1, 0, 9), (2, 0, 9), (3, 0, 9)]))]):
        store = CountingStore()
        assert out(run(query, store, *some)) == [(1, 6, 9), (2, 4, 9), (3, 2, 9)]
        # All of it is in the query's own state now.
        assert out(run(query, store, for_step(query, "totals", frame([(2, 0, 0)])))) == [(2, 5, 9)]


def test_a_seed_alone_is_stored_and_gives_nothing_out() -> None:
    query, store = setting(running=True), CountingStore()
    assert out(run(query, store, seed(0, totals_piece({1: 2})), mark(0))) == []
    assert len(store.pieces) == 1


def test_windows_that_had_closed_before_the_checkpoint_stay_closed() -> None:
    query, store = setting(windows=True), CountingStore()
    open_rows = decode(for_step(query, "windows", frame([(1, 5, 1), (1, 15, 1)])).data)
    tag = query.stages.tag_of("windows")
    time_piece = seed(0, None, 12 * SECOND, tag, "")
    found = run(query, store, seed(0, open_rows, 12 * SECOND, tag, "windows"), time_piece, mark(0))
    assert out(found) == []
    assert store.known.watermarks_us == {"windows": 12 * SECOND}
    assert out(run(query, store, END)) == [(1, at(10), at(20), 1, 1)]


HOUR_US = 3_600_000_000


def _setting():
    p = Pipeline("hours")
    rows = p.source("r", files("in/*.jsonl"), schema={"k": "string", "ts": "timestamp"}, time="ts")
    rows.group_by("k").window(tumbling("1h")).agg(n="count(*)").sink("out", files("out", format="jsonl"))
    return QuerySetting(plan_json=p.plan().to_json(), shards=1)


def _run(setting, store, seconds, watermark_us):
    stages = setting.stages
    partials = partials_of(stages.keyed[0], setting.operators)
    times = [dt.datetime.fromtimestamp(s, dt.UTC) for s in seconds]
    frame = pl.DataFrame(
        {"k": ["a"] * len(times), "ts": times}, schema={"k": pl.String, "ts": pl.Datetime("us", "UTC")}
    )
    clock = SourceTimes(
        clocks={"r": SourceClock(watermark_us=TIME_MIN_US, state=SourceState.OPEN, least_us=watermark_us)}
    )
    packed = [Packed(0, What.CLOCK, 0, msgspec.json.encode(clock))]
    if times:
        packed.append(Packed(0, What.ROWS, 0, encode(partials.of_rows(frame))))
    out = list(ShardHost(setting, 1, 0, store).run(packed))
    return [row for one in out if one.what is What.OUT for row in decode(one.data).select("k", "n").rows()]


def test_a_batch_that_closes_no_window_reads_no_state():
    setting, store = _setting(), CountingStore()
    for batch in range(20):
        assert _run(setting, store, [batch, batch + 0.5], batch * 1_000_000) == []
    # Folding neighbours of like size reads them, which is in proportion to what was written.
    folding, store.gets = store.gets, 0
    assert folding <= 40
    assert _run(setting, store, [], 30_000_000) == []
    assert store.gets == 0
    assert _run(setting, store, [], HOUR_US) == [("a", 40)]
    assert store.gets > 0


def test_a_piece_of_which_half_is_closed_never_gives_that_half_again():
    setting, store = _setting(), CountingStore()
    # One piece with rows of two hours.
    assert _run(setting, store, [1, 3601], 0) == []
    assert _run(setting, store, [], HOUR_US) == [("a", 1)]
    for _ in range(3):
        assert _run(setting, store, [], HOUR_US + 1) == []
    assert _run(setting, store, [3602], HOUR_US + 2) == []
    assert _run(setting, store, [], 2 * HOUR_US) == [("a", 2)]
    assert _run(setting, store, [], 3 * HOUR_US) == []
