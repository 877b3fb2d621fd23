"""A state that is larger than its limit: only what holds time back is read, nothing is lost, and the run says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.edge.declared import SECOND_US
from tests.edge.test_ahead import Node, at

from fordstone.connectors import MemorySource
from fordstone.edge import config
from fordstone.edge.config import RunConfig, default_state_bytes
from fordstone.errors import ConfigError

MINUTE_S = 60


def minutes(first_id: int, count: int) -> list[tuple[int, object]]:
    return [(first_id + number, at(number * MINUTE_S * SECOND_US)) for number in range(count)]


def test_a_silent_partition_stops_the_others_at_the_limit_and_its_rows_let_them_go_on():
    node = Node(source=MemorySource([[], [(0, at(0))]]), state_bytes_max=1, max_ahead=None)
    node.step()
    node.source.append(1, minutes(10, 3))
    node.step()
    progress = node.engine.progress()
    read = progress.rows_in
    assert read < 4
    assert progress.stalled is not None
    assert progress.waits_for == "state"
    assert "memory-000000" in progress.stalled
    assert "--state-max" in progress.stalled
    node.source.append(0, minutes(20, 5))
    node.step(rounds=2_000)
    assert node.engine.progress().rows_in == 9
    assert node.found()[0][:2] == [[0, 10, 20], [11, 21]]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_bounded_input_is_read_to_its_end_whatever_the_limit(parallelism: int):
    rows = [minutes(100, 20), minutes(200, 20), minutes(300, 20)]
    found = []
    for limit in (1, None):
        node = Node(
            source=MemorySource([list(one) for one in rows]),
            bounded=True,
            parallelism=parallelism,
            max_ahead=None,
            state_bytes_max=limit,
        )
        while not node.engine.over:
            node.step(rounds=20)
        found.append(node.found())
    assert found[0] == found[1]
    assert len(found[0][0]) == 20


def test_the_limit_is_half_of_the_memory_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(config, "CGROUP_LIMIT", limit)
    whole = default_state_bytes()
    limit.write_text("max\n")
    assert default_state_bytes() == whole
    limit.write_text(f"{64 << 20}\n")
    assert default_state_bytes() == 32 << 20
    with pytest.raises(ConfigError, match="state_bytes_max=0 must be at least 1"):
        RunConfig(state_bytes_max=0)
    with pytest.raises(ConfigError, match="not a whole number"):
        RunConfig(state_bytes_max="1GiB")  # type: ignore[arg-type]
