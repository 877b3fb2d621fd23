"""The work of a batch and the cut behind it: facts that do not fit are refused, time is the same however it was told."""

from __future__ import annotations

import json
from itertools import permutations

import msgspec
import pytest

from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.errors import DamagedError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.protocol.partitions import SourceState
from fordstone.spark.hosted.work import (
    Clock,
    PartitionFact,
    PartitionRead,
    SourceClock,
    Work,
    cut_behind,
    first_offset,
    offset_of,
    partition_watermark_us,
    read_clock,
    read_work,
    time_of,
    watermarks_us,
)

LATENESS = {"s": 10, "t": 0}


def read(partition: str, position: int = 0, until: int = 5, *, source: str = "s", ended: bool = False) -> PartitionRead:
    return PartitionRead(source=source, partition=partition, position=position, until=until, ended=ended)


def fact(partition: str, us: int, *, source: str = "s", rows: int = 1) -> PartitionFact:
    return PartitionFact(source=source, partition=partition, max_time_us=us, rows=rows)


def clock(us: int = TIME_MIN_US, state: SourceState = SourceState.OPEN, least_us: int | None = None) -> SourceClock:
    return SourceClock(watermark_us=us, state=state, least_us=least_us)


def work(*reads: PartitionRead, epoch: int = 1, clocks: dict[str, SourceClock] | None = None, **more: object) -> Work:
    return Work(epoch=epoch, reads=reads, clocks=clocks or {"s": clock()}, **more)  # type: ignore[arg-type]  # as given


def before(epoch: int = 1, **partitions: PartitionCut) -> Cut:
    return Cut(epoch=epoch, sources={"s": SourceCut(partitions=partitions, watermark_us=7)})


# The cut behind a batch.


def test_the_cut_has_what_was_read_and_what_was_not() -> None:
    cut = cut_behind(
        before(a=PartitionCut(position=3, max_time_us=50), b=PartitionCut(position=9, max_time_us=30)),
        work(read("a", 3, 8), epoch=2, clocks={"s": clock(7, least_us=20)}),
        [fact("a", 90)],
        LATENESS,
    )
    assert cut == Cut(
        epoch=2,
        sources={
            "s": SourceCut(
                partitions={
                    "a": PartitionCut(position=8, max_time_us=90),
                    "b": PartitionCut(position=9, max_time_us=30),
                },
                watermark_us=20,
            )
        },
    )


def test_work_and_facts_give_the_same_cut_in_any_order() -> None:
    done = work(read("a"), read("b"), read("c"))
    facts = [fact("a", 30), fact("b", 20), fact("c", 40)]
    assert len({msgspec.json.encode(cut_behind(None, done, some, LATENESS)) for some in permutations(facts)}) == 1


def test_a_fact_that_is_missing_is_refused() -> None:
    with pytest.raises(DamagedError, match="nothing was heard of s b"):
        cut_behind(None, work(read("a"), read("b")), [fact("a", 1)], LATENESS)


def test_a_fact_that_the_work_does_not_say_is_refused() -> None:
    with pytest.raises(DamagedError, match=r"\('s', 'b'\) was read, which the work does not say"):
        cut_behind(None, work(read("a")), [fact("a", 1), fact("b", 1)], LATENESS)


def test_a_fact_of_a_source_that_is_called_otherwise_is_refused() -> None:
    with pytest.raises(DamagedError, match="nothing was heard of s a"):
        cut_behind(None, work(read("a")), [fact("a", 1, source="t")], LATENESS)


@pytest.mark.parametrize("epoch", [1, 3, 9])
def test_a_cut_that_is_not_the_one_before_is_refused(epoch: int) -> None:
    with pytest.raises(DamagedError, match=f"the cut before it is that of {epoch}"):
        cut_behind(before(epoch), work(epoch=3 if epoch != 3 else 2), [], LATENESS)


def test_a_partition_that_ended_counts_no_longer_where_input_is_bounded() -> None:
    done = work(read("a", ended=True), read("b"), bounded=True)
    cut = cut_behind(None, done, [fact("a", 5), fact("b", 100)], LATENESS)
    assert cut.sources["s"].watermark_us == 90
    assert cut.sources["s"].partitions["a"].done
    assert not cut.ended


def test_a_file_that_never_grows_counts_with_the_batch_in_which_it_ends() -> None:
    """Time stood still where each new file was read to its end by one batch."""
    cut = cut_behind(None, work(read("a", ended=True)), [fact("a", 100)], LATENESS)
    assert cut.sources["s"].watermark_us == 90
    assert cut.sources["s"].partitions["a"].done
    assert not cut.ended


def test_the_end_of_every_source_is_the_end() -> None:
    clocks = {"s": clock(state=SourceState.ENDED), "t": clock(state=SourceState.ENDED)}
    done = work(read("a", ended=True), clocks=clocks, bounded=True)
    cut = cut_behind(None, done, [fact("a", 5)], LATENESS)
    assert cut.ended
    assert {source.watermark_us for source in cut.sources.values()} == {TIME_MAX_US}
    assert not cut_behind(
        None, work(clocks={"s": clock(state=SourceState.ENDED), "t": clock()}, bounded=True), [], LATENESS
    ).ended


def test_an_idle_source_keeps_its_time() -> None:
    changed = {"s": {"a": PartitionCut(position=3, max_time_us=50, idle=True)}}
    cut = cut_behind(
        before(a=PartitionCut(position=3)),
        work(epoch=2, clocks={"s": clock(7, SourceState.IDLE)}, changed=changed),
        [],
        LATENESS,
    )
    assert cut.sources["s"] == SourceCut(partitions=changed["s"], watermark_us=7)


def test_a_partition_that_comes_back_is_no_longer_idle_and_keeps_its_floor() -> None:
    back = PartitionRead(source="s", partition="a", position=3, until=4, max_time_us=50, floor_us=70)
    known = before(a=PartitionCut(position=3, max_time_us=50, idle=True))
    done = work(
        back,
        epoch=2,
        clocks={"s": clock(70)},
        changed={"s": {"a": PartitionCut(position=3, max_time_us=50, floor_us=70)}},
    )
    cut = cut_behind(known, done, [fact("a", 60)], LATENESS)
    assert cut.sources["s"].partitions["a"] == PartitionCut(position=4, max_time_us=60, floor_us=70)
    assert cut.sources["s"].watermark_us == 70


def test_time_never_goes_back() -> None:
    cut = cut_behind(None, work(read("a"), clocks={"s": clock(1000)}), [fact("a", 5)], LATENESS)
    assert cut.sources["s"].watermark_us == 1000


# Marks of time.


def test_marks_count_together_in_any_order() -> None:
    marks = [
        Clock(clocks={"s": clock(5, least_us=40), "t": clock(1)}).to_json(),
        Clock(least_us={"s": 30}).to_json(),
        Clock(least_us={"s": 35, "t": 50}).to_json(),
    ]
    for some in permutations(marks):
        assert watermarks_us(read_clock(some)) == {"s": 30, "t": 50}


@pytest.mark.parametrize(
    ("known", "least_us", "wanted"),
    [
        (clock(5), None, 5),
        (clock(5, least_us=9), None, 9),
        (clock(5, least_us=9), 7, 7),
        (clock(5, least_us=2), 7, 5),
        (clock(), None, TIME_MIN_US),
        (clock(5, SourceState.IDLE), None, None),
        (clock(5, SourceState.IDLE), 7, None),
        (clock(5, SourceState.ENDED), None, TIME_MAX_US),
    ],
)
def test_a_source_is_as_far_as_the_furthest_behind_of_its_partitions(
    known: SourceClock, least_us: int | None, wanted: int | None
) -> None:
    least = {} if least_us is None else {"s": least_us}
    assert watermarks_us(Clock(clocks={"s": known}, least_us=least)) == {"s": wanted}


def test_where_rows_of_several_sources_meet_the_last_one_that_is_waited_for_counts() -> None:
    assert time_of(["s", "t"], {"s": 5, "t": 9}, TIME_MIN_US) == 5
    assert time_of(["s", "t"], {"s": None, "t": 9}, TIME_MIN_US) == 9
    assert time_of(["s", "t"], {"s": None, "t": None}, 4) == 4
    assert time_of(["s"], {"s": 5, "t": 9}, 8) == 8


def test_a_partition_is_as_far_as_its_largest_time_less_the_lateness_but_not_before_it_joined() -> None:
    assert partition_watermark_us(PartitionCut(position=0), 10) == TIME_MIN_US
    assert partition_watermark_us(PartitionCut(position=0, floor_us=3), 10) == 3
    assert partition_watermark_us(PartitionCut(position=0, max_time_us=20, floor_us=3), 10) == 10
    assert partition_watermark_us(PartitionCut(position=0, max_time_us=20, floor_us=15), 10) == 15


# Offsets.


def test_an_offset_comes_back_as_the_work_that_it_was() -> None:
    done = work(
        PartitionRead(
            source="s",
            partition='日本 "x".jsonl',
            position=2**53 + 1,
            until=2**62,
            max_time_us=-(2**62),
            floor_us=TIME_MIN_US,
        ),
        epoch=7,
        clocks={"s": clock(TIME_MIN_US, SourceState.OPEN, TIME_MAX_US)},
        changed={"s": {"b": PartitionCut(position=0, idle=True)}},
        seeds=True,
        bounded=True,
    )
    text = json.dumps(offset_of(done))
    assert read_work(json.loads(text)) == done
    assert json.dumps(offset_of(read_work(json.loads(text)))) == text


@pytest.mark.parametrize(
    "offset", [first_offset(3), {}, {"work": "{}"}, {"work": "not json"}, {"work": '{"epoch": 1, "unknown": 2}'}]
)
def test_an_offset_of_another_source_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(DamagedError, match="not an offset of a fordstone query"):
        read_work(offset)
