from __future__ import annotations

from dataclasses import replace

import polars as pl

from fordstone.edge.engine.channel import Channel
from fordstone.edge.engine.gate import CutHere, Gate, InFlight, Moved, Probed, Rows, TimeMoved
from fordstone.lang.duration import TIME_MAX_US
from fordstone.plan.ids import Attempt
from fordstone.runtime.snapshot import Barrier, Batch, Probe, Watermark

ROW = Batch(pl.DataFrame({"x": [1]}))


def barrier(attempt: int, *, overtakes: bool = False) -> Barrier:
    return Barrier(attempt=Attempt(attempt), committed=Attempt(0), overtakes=overtakes)


def gate_of(count: int, **options) -> tuple[Gate, list[Channel]]:
    channels = [Channel(f"c{index}") for index in range(count)]
    return Gate(channels, hold=True, **options), channels


def events(gate: Gate) -> list[object]:
    found: list[object] = []
    while (event := gate.next()) is not None:
        found.append(event)
    return found


def test_time_is_the_least_over_the_channels_and_never_goes_back():
    gate, (one, two) = gate_of(2)
    one.offer(Watermark(10))
    assert events(gate) == [Moved()]
    two.offer(Watermark(7))
    assert events(gate) == [TimeMoved(7, idle=False)]
    two.offer(Watermark(3))
    assert events(gate) == [Moved()]
    assert gate.watermark_us == 7


def test_an_idle_channel_holds_nothing_back_until_it_is_busy_again():
    gate, (one, two) = gate_of(2)
    one.offer(Watermark(10))
    two.offer(Watermark(2, idle=True))
    assert [event for event in events(gate) if event != Moved()] == [TimeMoved(10, idle=False)]
    two.offer(Watermark(4))
    events(gate)
    one.offer(Watermark(20))
    assert events(gate) == [Moved()]
    assert gate.watermark_us == 10


def test_a_gate_whose_channels_are_all_idle_is_idle():
    gate, (one,) = gate_of(1)
    one.offer(Watermark(5, idle=True))
    assert events(gate) == [TimeMoved(gate.watermark_us, idle=True)]


def test_a_restored_gate_keeps_time_that_idleness_had_let_pass():
    gate, (one, two) = gate_of(2)
    gate.restore({"c0": 10, "c1": 2}, 10)
    assert gate.watermark_us == 10
    two.offer(Watermark(5))
    assert events(gate) == [Moved()]
    one.offer(Watermark(11))
    assert events(gate) == [Moved()]


def test_rows_after_a_barrier_wait_for_the_other_channels_barrier():
    gate, (one, two) = gate_of(2)
    one.offer(barrier(1))
    one.offer(ROW)
    assert events(gate) == [Moved()]
    two.offer(ROW)
    assert events(gate) == [Rows(ROW)]
    two.offer(barrier(1))
    assert events(gate) == [CutHere(barrier(1), logging=False), Rows(ROW)]


def test_unaligned_what_is_in_flight_is_logged_until_each_channels_barrier():
    gate, (one, two) = gate_of(2)
    one.offer(ROW)
    one.overtake(barrier(1, overtakes=True))
    two.offer(Watermark(3))
    assert gate.next() == CutHere(barrier(1, overtakes=True), logging=True)
    events(gate)
    two.offer(ROW)
    events(gate)
    two.overtake(barrier(1, overtakes=True))
    assert gate.next() == InFlight(Attempt(1), {"c0": (ROW,), "c1": (Watermark(3), ROW)})


def test_unaligned_rows_after_the_barrier_are_not_logged():
    gate, (one, two) = gate_of(2)
    one.overtake(barrier(1, overtakes=True))
    gate.next()
    one.offer(ROW)
    events(gate)
    two.overtake(barrier(1, overtakes=True))
    assert gate.next() == InFlight(Attempt(1), {})


def test_a_loop_logs_what_comes_back_between_the_cut_and_the_barriers_return():
    gate, (forward, back) = gate_of(2, back=frozenset({1}))
    back.offer(ROW)
    events(gate)
    forward.offer(barrier(1))
    assert gate.next() == CutHere(barrier(1), logging=True)
    back.offer(ROW)
    back.offer(barrier(1))
    back.offer(ROW)
    assert events(gate) == [Rows(ROW, back=True), InFlight(Attempt(1), {"c1": (ROW,)}), Rows(ROW, back=True)]


def test_what_a_checkpoint_had_logged_in_a_loop_goes_before_new_input():
    channels = [Channel("forward"), Channel("back")]
    channels[1].preload([ROW] * 9)
    gate = Gate(channels, hold=True, back=frozenset({1}))
    channels[0].offer(Batch(pl.DataFrame({"x": [2]})))
    order = [event.back for event in events(gate) if isinstance(event, Rows)]
    assert order == [True] * 9 + [False]


def test_a_busy_loop_lets_input_in_now_and_then():
    gate, (forward, back) = gate_of(2, back=frozenset({1}))
    forward.offer(barrier(1))
    for _ in range(20):
        back.offer(ROW)
    first = [gate.next() for _ in range(8)]
    assert CutHere(barrier(1), logging=True) in first


def test_a_probe_is_passed_on_when_it_has_come_on_every_channel():
    gate, (one, two) = gate_of(2)
    one.offer(Probe(1))
    assert events(gate) == [Moved()]
    two.offer(Probe(1))
    assert events(gate) == [Probed(Probe(1))]


def test_the_end_of_a_loops_input_does_not_count_what_comes_back():
    gate, (forward, back) = gate_of(2, back=frozenset({1}))
    back.offer(Watermark(TIME_MAX_US))
    events(gate)
    assert not gate.forward_ended
    forward.offer(Watermark(TIME_MAX_US))
    events(gate)
    assert gate.forward_ended


def test_what_has_ended_does_not_end_time_for_what_is_only_idle():
    gate, (one, two) = gate_of(2)
    two.offer(Watermark(5, idle=True))
    one.offer(Watermark(TIME_MAX_US))
    events(gate)
    assert gate.watermark_us < TIME_MAX_US
    two.offer(Watermark(TIME_MAX_US))
    events(gate)
    assert gate.watermark_us == TIME_MAX_US


def test_idleness_is_taken_up_at_the_cut_whichever_channel_comes_first_after_it():
    gate, (one, two) = gate_of(2)
    one.offer(Watermark(10))
    two.offer(Watermark(2, idle=True))
    events(gate)
    one.offer(barrier(1))
    two.offer(barrier(1))
    one.offer(Watermark(30))
    events(gate)
    assert gate.watermark_us == 10


def test_a_channel_that_falls_idle_with_the_barrier_lets_time_advance_after_the_cut():
    gate, (one, two) = gate_of(2)
    one.offer(Watermark(10))
    two.offer(Watermark(2))
    events(gate)
    one.offer(barrier(1))
    two.offer(replace(barrier(1), idle=True))
    found = events(gate)
    assert found[-2:] == [CutHere(barrier(1), logging=False), TimeMoved(10, idle=False)]


def test_without_holding_back_what_a_channel_said_after_its_barrier_stands():
    channels = [Channel("c0"), Channel("c1")]
    gate = Gate(channels, hold=False)
    channels[0].offer(replace(barrier(1), idle=True))
    channels[0].offer(Watermark(5))
    events(gate)
    channels[1].offer(Watermark(50))
    channels[1].offer(barrier(1))
    events(gate)
    assert gate.watermark_us == 5


def test_where_all_channels_ended_time_goes_to_the_furthest_after_the_cut_and_the_task_is_idle_after_that():
    gate, (one, two) = gate_of(2)
    one.offer(Watermark(10))
    two.offer(Watermark(20))
    events(gate)
    one.offer(replace(barrier(1), idle=True, ended_us=10))
    two.offer(replace(barrier(1), idle=True, ended_us=20))
    found = events(gate)
    # Not idle yet: windows that close now are rows for the tasks below.
    assert found[-2:] == [CutHere(barrier(1), logging=False), TimeMoved(20, idle=False)]
    one.offer(Watermark(10, idle=True, ended_us=10))
    assert events(gate) == [TimeMoved(20, idle=True)]


def test_a_channel_that_ended_holds_nothing_back_and_moves_no_time_while_another_is_waited_for():
    gate, (one, two) = gate_of(2)
    one.offer(Watermark(20, idle=True, ended_us=20))
    two.offer(Watermark(5))
    events(gate)
    assert gate.watermark_us == 5
