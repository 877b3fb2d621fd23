"""The threads of an engine and of its readers in the orders of many seeds: no row is lost or doubled, and every thread ends.

A wake-up that is lost is noticed as a deadlock, and so is a lock that is left out.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest
from tests.connectors.control_hub import KEYS, FakeHub
from tests.connectors.control_hub import SCHEMA as TABLE_SCHEMA
from tests.examples import share_of
from tests.simulation.engine_threads import SlowDisk, memory_module, run_on_threads
from tests.simulation.failing_tails import FunctionTail
from tests.simulation.interleave import DeadlockError, Interleaving
from tests.simulation.join_tails import LatestTail
from tests.simulation.keyed_tails import MatchTail
from tests.simulation.scenario import Scenario

from fordstone.connectors import control as control_log_module
from fordstone.connectors import feed as feed_module
from fordstone.connectors.base import OpenContext, SourceOptions
from fordstone.connectors.control import ControlLog
from fordstone.connectors.memory import MemoryKind, memory
from fordstone.edge import run as run_module
from fordstone.edge.engine import channel as channel_module
from fordstone.edge.engine import gate as gate_module
from fordstone.edge.engine.channel import Channel
from fordstone.edge.engine.gate import CutHere, Gate, InFlight, Rows
from fordstone.edge.link import control as fetch_module
from fordstone.edge.link.control import ControlFetcher, ControlFetching
from fordstone.edge.run import ThreadScheduler
from fordstone.epochs.manifest import PartitionCut
from fordstone.hub.client import reader as reader_module
from fordstone.hub.client.reader import EpochBuffer
from fordstone.hub.messages import StreamEpoch
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Attempt, PartitionId, Position
from fordstone.runtime.snapshot import Barrier, Batch, Item
from fordstone.testing.memory_disk import MemoryDisk

SEEDS = range(40)
MUTANT_SEEDS = range(1_000, 1_300)
ITEMS = 8
TAILS = (MatchTail(kind="relaxed", skip="next"), FunctionTail("map"), LatestTail(waits=True))
"""The last one is refused where barriers overtake rows."""


def is_noticed(case: Callable[..., None], kind: type[Exception] = Exception, **options: Any) -> bool:
    """Whether one of the seeds shows that something is wrong. `kind`: how it must show."""
    for seed in MUTANT_SEEDS:
        try:
            case(seed, **options)
        except kind:
            return True
    return False


def batch(number: int) -> Batch:
    return Batch(pl.DataFrame({"n": [number]}))


def number_of(item: Item) -> int:
    assert isinstance(item, Batch)
    return int(item.frame.item())


# The interleaving itself.


def test_threads_that_only_wait_for_their_timeouts_are_a_deadlock() -> None:
    threads = Interleaving(1)
    never = threads.event()

    def poll() -> None:
        while not never.is_set():
            never.wait(0.01)

    with pytest.raises(DeadlockError, match="nothing but their timeouts: thread 0"):
        threads.run(poll)


# The scheduler and its channels.


class Stage:
    """Moves items from one channel to the next, slowly. The first has them at the start, the last keeps them."""

    idle_wait_us: int | None = None

    def __init__(self, threads: Interleaving, before: Channel | None, after: Channel | None, items: list[Item]) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.taken: list[int] = []
        self._threads, self._before, self._after = threads, before, after
        self._pending = deque(items)
        if before is not None:
            before.wake_reader = self._wake
        if after is not None:
            after.wake_writer = self._wake

    def _wake(self) -> None:
        self.wake()  # which the scheduler sets later

    def step(self) -> bool:
        if self._pending and self._after is not None:
            self._threads.pause()
            if not self._after.offer(self._pending[0]):
                return False
            self._pending.popleft()
            return True
        item = None if self._before is None else self._before.take()
        if item is None:
            return False
        if self._after is None:
            self.taken.append(number_of(item))
        else:
            self._pending.append(item)
        return True


def pipe_of_tasks(seed: int, *, items: int = ITEMS, excludes: bool = True, traced: bool = False) -> None:
    """Three tasks in a row, with channels of one row between them, until the last one has all rows or half of them."""
    threads = Interleaving(seed, traced=(channel_module,) if traced else ())
    wanted = items if seed % 2 else items // 2
    with threads.inside(run_module), threads.inside(channel_module, excludes=excludes):
        one, two = Channel("one", rows_max=1), Channel("two", rows_max=1)
        first = Stage(threads, None, one, [batch(number) for number in range(items)])
        last = Stage(threads, two, None, [])
        scheduler = ThreadScheduler([first, Stage(threads, one, two, []), last])
        threads.run(lambda: scheduler.run(lambda: len(last.taken) >= wanted))
    assert last.taken == list(range(len(last.taken)))
    assert len(last.taken) >= wanted


def test_tasks_pass_on_every_row_in_order_and_stop_however_threads_take_turns() -> None:
    for seed in SEEDS:
        pipe_of_tasks(seed)
        pipe_of_tasks(seed, traced=True)


def clears_after_the_step(self: ThreadScheduler, steppable: Any, event: threading.Event) -> None:
    while not self._halt.is_set():
        did = steppable.step()
        event.clear()
        if did:
            continue
        if self._halt.is_set():
            return
        event.wait(None)


def test_a_scheduler_that_clears_a_wake_up_after_the_step_is_noticed_as_a_deadlock() -> None:
    with patch.object(ThreadScheduler, "_loop", clears_after_the_step):
        assert is_noticed(pipe_of_tasks, DeadlockError)


def test_a_scheduler_that_does_not_wake_threads_to_stop_is_noticed_as_a_deadlock() -> None:
    def stop(self: ThreadScheduler) -> None:
        self._halt.set()
        for thread in self._threads:
            thread.join()

    with patch.object(ThreadScheduler, "_stop", stop):
        assert is_noticed(pipe_of_tasks, DeadlockError)


def test_a_channel_that_does_not_wake_its_writer_is_noticed_as_a_deadlock() -> None:
    take = Channel.take

    def silent(self: Channel) -> Item | None:
        self._refused = False
        return take(self)

    with patch.object(Channel, "take", silent):
        assert is_noticed(pipe_of_tasks, DeadlockError)


def test_a_channel_without_its_lock_is_noticed() -> None:
    assert is_noticed(pipe_of_tasks, excludes=False, traced=True)


# The gate.


def rows_against_barriers(seed: int, *, excludes: bool = True) -> None:
    """Two threads send rows and barriers, a third takes them through a gate. The cut of the last attempt has all rows before it.

    In half of the seeds barriers overtake rows.
    """
    threads, overtakes = Interleaving(seed, traced=(channel_module, gate_module)), bool(seed % 2)
    attempts = 3
    sent: dict[int, dict[str, int]] = {attempt: {} for attempt in range(1, attempts + 1)}
    complete: set[int] = set()
    with threads.inside(channel_module, excludes=excludes):
        channels = [Channel("a"), Channel("b")]
        gate = Gate(channels, hold=True, choose=Random(seed).randrange)
        taken = {channel.name: 0 for channel in channels}

        def send(channel: Channel) -> None:
            begins = sorted(Random(f"{seed} {channel.name}").choices(range(ITEMS), k=attempts))
            for number in range(ITEMS):
                channel.force(Batch(pl.DataFrame({"n": [number], "channel": [channel.name]})))
                while begins and begins[0] == number:
                    begins.pop(0)
                    attempt = attempts - len(begins)
                    sent[attempt][channel.name] = number + 1
                    barrier = Barrier(attempt=Attempt(attempt), committed=Attempt(0), overtakes=overtakes)
                    if overtakes:
                        channel.overtake(barrier)
                    else:
                        channel.force(barrier)

        def take() -> None:
            cuts: dict[int, dict[str, int]] = {}
            while sum(taken.values()) < 2 * ITEMS or attempts not in complete:
                match gate.next():
                    case None:
                        threads.pause()
                    case Rows(batch=got):
                        number, channel = got.frame.row(0)
                        assert number == taken[channel]
                        taken[channel] += 1
                    case CutHere(barrier=barrier, logging=logging):
                        cuts[barrier.attempt] = dict(taken)
                        if not logging:
                            complete.add(barrier.attempt)
                            assert taken == sent[barrier.attempt]
                    case InFlight(attempt=attempt, logs=logs):
                        complete.add(attempt)
                        for name, before in cuts[attempt].items():
                            logged = [item.frame.item(0, 0) for item in logs.get(name, ()) if isinstance(item, Batch)]
                            assert logged == list(range(before, sent[attempt][name]))
                    case _:
                        pass

        threads.run(*(lambda channel=channel: send(channel) for channel in channels), take)


def test_a_gate_cuts_where_the_barriers_are_however_threads_take_turns() -> None:
    for seed in SEEDS:
        rows_against_barriers(seed)


def test_a_gate_over_channels_without_locks_is_noticed() -> None:
    assert is_noticed(rows_against_barriers, excludes=False)


# A whole engine.


def test_a_bounded_run_reads_all_its_input_however_threads_take_turns_and_tasks_fail() -> None:
    """Of lookups, patterns, joins and functions, with attempts that are given up and others that are sealed while the engine stops."""
    failures = given_up = 0
    for seed in range(28_000, 28_000 + share_of(24)):
        scenario = Scenario.failing(seed)
        tail = TAILS[seed % len(TAILS) if scenario.mode != "unaligned" else seed % 2]
        tally = run_on_threads(replace(scenario, tail=tail))
        failures += tally.failures
        given_up += tally.given_up
    assert failures > 0
    assert given_up > 0


# The buffer of a hub's reader.


def epoch(number: int) -> StreamEpoch:
    return StreamEpoch(seq=number, node="n", epoch=number, chain="", runs=(), watermark_us=0, received_us=0)


def filler_against_reader(seed: int, *, excludes: bool = True) -> None:
    """One thread lists epochs, one reads them, one forgets what has been read."""
    threads, rng = Interleaving(seed, traced=(reader_module,)), Random(seed)
    last, position = 20, 0
    with threads.inside(reader_module, excludes=excludes):
        buffer = EpochBuffer()

        def fill() -> None:
            while position < last:
                after = position
                buffer.put("n", after, [epoch(number) for number in range(after + 1, min(after + 6, last + 1))])
                threads.pause()

        def read() -> None:
            nonlocal position
            while position < last:
                found = [one.epoch for one in buffer.epochs_after("n", position, 100, epochs_max=rng.randint(1, 4))]
                assert found == list(range(position + 1, position + 1 + len(found)))
                position = found[-1] if found else position
                threads.pause()

        def forget() -> None:
            while position < last:
                buffer.forget({"n": position})
                threads.pause()

        threads.run(fill, read, forget)
        buffer.forget({"n": last})
    assert not buffer.has("n", 0)
    assert buffer.count == 0


def test_the_buffer_gives_every_epoch_once_and_in_order_however_threads_take_turns() -> None:
    for seed in SEEDS:
        filler_against_reader(seed)


def test_a_buffer_without_its_lock_is_noticed() -> None:
    assert is_noticed(filler_against_reader, excludes=False)


# Control tables.


class SlowHub(FakeHub):
    """Lets other threads run before each of its answers."""

    threads: Interleaving

    def _answer(self) -> None:
        self.threads.pause()
        super()._answer()


def fetcher_against_stop(seed: int, *, excludes: bool = True) -> None:
    """One thread fetches versions, another stops it at some time. From then on nothing is stored."""
    threads = Interleaving(seed)
    with threads.inside(control_log_module), threads.inside(fetch_module, excludes=excludes):
        hub = SlowHub(page_max=2)
        hub.threads = threads
        for number in range(4):
            hub.add({"a": float(number)})
        log = ControlLog(SlowDisk(threads), "t", schema=TABLE_SCHEMA, keys=KEYS)
        fetcher = ControlFetcher(hub, log, pipeline="p", control="t", chance=lambda: 1.0)
        at_stop: list[int] = []

        def fetch() -> None:
            for _ in range(4):
                fetcher.step()

        def stop() -> None:
            for _ in range(seed % 40):
                threads.pause()
            fetcher.stop()
            at_stop.append(log.newest)

        threads.run(fetch, stop)
    assert at_stop == [log.newest]


def test_nothing_of_a_control_table_is_stored_after_a_stop_however_threads_take_turns() -> None:
    for seed in SEEDS:
        fetcher_against_stop(seed)


def test_a_fetcher_without_its_lock_is_noticed() -> None:
    assert is_noticed(fetcher_against_stop, excludes=False)


def test_every_table_is_fetched_on_a_thread_of_its_own_and_all_of_them_end() -> None:
    for seed in range(20):
        threads = Interleaving(seed)
        with threads.inside(control_log_module, fetch_module):
            hub = SlowHub(page_max=1)
            hub.threads = threads
            hub.add({"a": 1.0})
            hub.add({"b": 1.0})
            logs = [ControlLog(MemoryDisk(), "t", schema=TABLE_SCHEMA, keys=KEYS) for _ in range(2)]
            fetchers = [ControlFetcher(hub, log, pipeline="p", control="t", chance=lambda: 1.0) for log in logs]

            def fetch(threads: Interleaving = threads, logs: list[ControlLog] = logs, made: Any = fetchers) -> None:
                with ControlFetching(made) as fetching:
                    while any(log.newest < 2 for log in logs):
                        fetching.check()
                        threads.pause()

            threads.run(fetch)
        assert all(log.newest == 2 for log in logs)


# Generators.


def reader_against_acknowledgement(seed: int, *, excludes: bool = True) -> None:
    """A generator is read, in several runs that resume where the newest epoch ends; another thread acknowledges what the last two have."""
    threads, rng, rows = Interleaving(seed), Random(seed), 24
    with threads.inside(memory_module), threads.inside(feed_module, excludes=excludes):

        def given() -> Iterator[dict[str, int]]:
            for number in range(rows):
                threads.pause()
                yield {"n": number}

        spec = memory(given())
        options = SourceOptions(schema=Schema.of({"n": "bigint"}), bounded=True)
        source = MemoryKind().open_source(spec, options, OpenContext(keeps_state=False))
        name, cuts, ended = PartitionId("memory-000000"), [0, 0], threads.event()

        def read() -> None:
            position, at_end = 0, False
            while not at_end:
                cuts.append(position)  # the epoch of a barrier that passed before anything was read
                reader = source.open(name, Position(position), with_positions=True)
                for _ in range(rng.randint(1, 6)):
                    chunk = reader.read(rng.randint(1, 3))
                    if chunk is not None:
                        assert chunk.frame["n"].to_list() == list(range(position, int(chunk.position)))
                        position, at_end = int(chunk.position), chunk.ended
                        cuts.append(position)
                    if at_end:
                        break
                    threads.pause()
                reader.close()
            assert position == rows
            ended.set()

        def acknowledge() -> None:
            while not ended.is_set():
                source.ack({name: PartitionCut(position=cuts[-2])})
                threads.pause()

        threads.run(read, acknowledge)


def test_a_generator_is_read_to_its_end_without_a_gap_however_threads_take_turns() -> None:
    for seed in SEEDS:
        reader_against_acknowledgement(seed)


def test_a_generator_that_several_threads_pull_is_noticed() -> None:
    assert is_noticed(reader_against_acknowledgement, excludes=False)


def test_seeds_repeat() -> None:
    """The same steps in the same order, also in modules that can be interrupted anywhere."""
    counted = []
    for _ in range(2):
        count = itertools.count()
        choose = Interleaving._hand_over
        with patch.object(Interleaving, "_hand_over", lambda self, c=count, choose=choose: (next(c), choose(self))[1]):
            pipe_of_tasks(7, traced=True)
        counted.append(next(count))
    assert counted[0] == counted[1]
