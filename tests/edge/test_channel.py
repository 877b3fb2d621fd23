from __future__ import annotations

import polars as pl

from fordstone.edge.engine.channel import Channel
from fordstone.plan.ids import Attempt
from fordstone.runtime.snapshot import Barrier, Batch, Watermark


def batch(rows: int) -> Batch:
    return Batch(pl.DataFrame({"x": list(range(rows))}))


def barrier(attempt: int) -> Barrier:
    return Barrier(attempt=Attempt(attempt), committed=Attempt(0), overtakes=True)


def test_a_full_channel_refuses_batches_but_never_barriers_or_time():
    channel = Channel("c", rows_max=3)
    assert channel.offer(batch(3))
    assert not channel.offer(batch(1))
    assert channel.offer(Watermark(5))
    assert channel.offer(barrier(1))


def test_a_batch_larger_than_the_channel_fits_an_empty_one():
    channel = Channel("c", rows_max=3)
    assert channel.offer(batch(10))


def test_a_channel_is_bounded_in_bytes_too():
    channel = Channel("c", bytes_max=64)
    assert channel.offer(batch(100))
    assert not channel.offer(batch(1))


def test_a_writer_that_was_refused_is_woken_when_there_is_room():
    woken = []
    channel = Channel("c", rows_max=1)
    channel.wake_writer = lambda: woken.append(1)
    channel.offer(batch(1))
    channel.take()
    assert woken == []
    channel.offer(batch(1))
    channel.offer(batch(1))
    channel.take()
    assert woken == [1]


def test_an_overtaking_barrier_shows_what_it_overtook_and_leaves_it_in_place():
    channel = Channel("c")
    first, second, after = batch(1), batch(2), batch(3)
    channel.offer(first)
    channel.offer(second)
    channel.overtake(barrier(1))
    channel.offer(after)
    found = channel.overtaken()
    assert found == (barrier(1), (first, second))
    assert [channel.take() for _ in range(3)] == [first, second, after]
    assert channel.overtaken() is None


def test_what_was_taken_before_the_barrier_was_seen_is_not_overtaken():
    channel = Channel("c")
    first, second = batch(1), batch(2)
    channel.offer(first)
    channel.offer(second)
    channel.overtake(barrier(1))
    channel.take()
    assert channel.overtaken() == (barrier(1), (second,))


def test_rows_are_counted_in_and_out():
    channel = Channel("c")
    channel.offer(batch(4))
    assert channel.rows == 4
    channel.take()
    assert (channel.rows, len(channel)) == (0, 0)


def test_nothing_after_an_overtaking_barrier_is_taken_before_the_barrier_has_been_seen():
    channel = Channel("c")
    channel.overtake(barrier(1))
    channel.offer(batch(1))
    assert channel.take() is None
    assert channel.overtaken() == (barrier(1), ())
    assert channel.take() is not None
