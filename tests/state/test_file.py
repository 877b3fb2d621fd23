"""Timelines and buffers on disk: the contracts, and the random histories of those in memory."""

from __future__ import annotations

from unittest.mock import patch

from tests.state import test_buffer, test_runs
from tests.state.test_runs import summed

from fordstone.state.base import SearchBuffer, State
from fordstone.state.file import rows_on_disk
from fordstone.state.timeline import MemoryBuffer, MemorySearchBuffer, MemoryTimeline
from fordstone.state.working import WorkingFiles

# So small that a few rows are several blocks, and that rows are moved while they are open.
DISK = rows_on_disk(WorkingFiles(), cache_bytes=10_000, open_bytes_max=2000, merged_bytes_max=100_000, block_bytes=1)


def timeline(*, time_column: str | None = "end", coalesce_rows_min: int = 10) -> MemoryTimeline:
    return MemoryTimeline(
        ["k"], time_column=time_column, merge_rows=summed, coalesce_rows_min=coalesce_rows_min, on_disk=DISK
    )


def buffer() -> MemoryBuffer:
    return MemoryBuffer(["k"], time_column="ts", on_disk=DISK)


class TestTimelineOnDisk(test_runs.TestRuns):
    def make(self) -> State:
        return timeline(coalesce_rows_min=100)


class TestTimelineOnDiskWithoutTime(test_runs.TestRunsWithoutTime):
    def make(self) -> State:
        return timeline(time_column=None)


class TestBufferOnDisk(test_buffer.TestBuffer):
    def make(self) -> State:
        return buffer()


class TestSearchBufferOnDisk(test_buffer.TestSearchBuffer):
    def make(self) -> SearchBuffer:
        return MemorySearchBuffer(["a", "b"], time_column="until", on_disk=DISK)


def test_any_history_of_a_timeline_on_disk_is_that_of_a_dict() -> None:
    with patch.object(test_runs, "runs", timeline):
        test_runs.test_any_history_of_runs_is_that_of_a_dict()


def test_any_history_of_a_buffer_on_disk_is_that_of_a_list() -> None:
    with patch.object(test_buffer, "buffer", buffer):
        test_buffer.test_any_history_of_a_buffer_is_that_of_a_sorted_list()
