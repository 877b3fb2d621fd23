"""What a running engine says about the partition or node that the watermark waits for."""

from __future__ import annotations

from tests.connectors.fake_hub import FakeHub
from tests.edge.declared import SECOND_US, Center, Outputs, center_plan, epoch, hub
from tests.edge.test_ahead import MINUTE_US, Node, at

from fordstone.connectors import MemorySource
from fordstone.protocol.progress import HeldBack, Progress

__all__ = ["hub"]

FIRST, SECOND = "memory-000000", "memory-000001"
ROUNDED_US = SECOND_US


def held(progress: Progress) -> HeldBack:
    assert progress.held_back is not None
    return progress.held_back


def test_a_silent_partition_is_named_with_its_lag_and_how_long_it_has_had_no_rows():
    node = Node(source=MemorySource([[(1, at(0))], [(2, at(0))]]))
    node.step()
    assert node.engine.progress().held_back is None
    node.clock.now_us += MINUTE_US
    node.source.append(1, [(3, at(30 * SECOND_US))])
    node.step()
    found = held(node.engine.progress())
    assert (found.source, found.partition, found.lag_us, found.is_node) == ("rows", FIRST, 30 * SECOND_US, False)
    assert found.silent_us is not None
    assert MINUTE_US <= found.silent_us < MINUTE_US + ROUNDED_US
    node.source.append(0, [(4, at(40 * SECOND_US))])
    node.step()
    after = held(node.engine.progress())
    assert (after.partition, after.lag_us) == (SECOND, 10 * SECOND_US)


def test_a_partition_without_rows_has_no_lag_and_is_silent_since_the_run_started():
    node = Node(source=MemorySource([[(1, at(0))], []]))
    node.step()
    node.clock.now_us += MINUTE_US
    node.kill()
    node.start()
    node.step()
    found = held(node.engine.progress())
    assert (found.partition, found.lag_us) == (SECOND, None)
    assert found.silent_us is not None
    assert found.silent_us < ROUNDED_US


def test_an_idle_partition_is_not_waited_for():
    node = Node(source=MemorySource([[(1, at(0))], [(2, at(30 * SECOND_US))]]), idle_after="10s")
    node.step()
    assert held(node.engine.progress()).partition == FIRST
    node.clock.now_us += 11 * SECOND_US
    node.source.append(1, [(3, at(31 * SECOND_US))])
    node.step()
    assert node.engine.progress().held_back is None


def test_the_center_names_the_node_that_lags(hub: FakeHub):
    center = Center(hub, center_plan(Outputs()))
    hub.add("a", epoch(60, ("x", 1.0, 1)))
    hub.add("b", epoch(3, ("x", 2.0, 2)))
    center.run()
    center.clock.now_us += 5 * SECOND_US
    hub.add("a", epoch(65))
    center.run()
    assert center.engine is not None
    found = held(center.engine.progress())
    assert (found.source, found.partition, found.lag_us, found.is_node) == (
        center.source.options.stream,
        "b",
        62 * SECOND_US,
        True,
    )
    assert found.silent_us is not None
    assert 5 * SECOND_US <= found.silent_us < 6 * SECOND_US
    center.kill()
