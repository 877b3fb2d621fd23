"""A control table as a source: one partition, whose positions are versions."""

from __future__ import annotations

import pytest
from tests.connectors.control_hub import KEYS, SCHEMA, control_rows

from fordstone.connectors.base import Chunk, ConnectorSpec, Delivery, Home, OpenContext, SourceOptions
from fordstone.connectors.control import COMPACT_FILES_MIN, PARTITION, ControlLog, ControlSource
from fordstone.connectors.registry import open_source, source_delivery
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError
from fordstone.operators.join.lookup import VERSION
from fordstone.plan.ids import Position
from fordstone.storage.disk import OsDisk
from fordstone.testing.memory_disk import MemoryDisk


def source_of(count: int, *, bounded: bool = False, disk: MemoryDisk | None = None) -> ControlSource:
    log = ControlLog(disk or MemoryDisk(), "p/n/control/t", schema=SCHEMA, keys=KEYS)
    for version in range(1, count + 1):
        log.add(version, control_rows({"a": float(version), "b": 1.0}), chain="")
    return ControlSource(log, bounded=bounded)


def test_rows_carry_what_they_do_and_their_version():
    source = source_of(2)
    assert list(source.partitions()) == [PARTITION]
    chunk = source.open(PARTITION, Position(1), with_positions=False).read(100)
    assert chunk is not None
    assert chunk.frame.columns == ["device", "threshold", "__op", VERSION]
    assert chunk.frame.rows() == [("a", 2.0, "upsert", 2), ("b", 1.0, "upsert", 2)]
    assert (chunk.position, chunk.ended, chunk.row_positions) == (2, False, None)


def test_reading_goes_on_when_versions_come_and_stops_at_the_given_version():
    source = source_of(2)
    reader = source.open(PARTITION, Position(0), with_positions=True)
    chunk = reader.read(100, Position(1))
    assert chunk is not None
    assert chunk.position == 1
    assert chunk.row_positions is not None
    assert chunk.row_positions.to_list() == [0, 0]
    assert reader.read(100, Position(1)) is None
    chunk = reader.read(100)
    assert chunk is not None
    assert chunk.position == 2
    assert reader.read(100) is None
    source.log.add(5, control_rows({"c": 1.0}), chain="")
    chunk = reader.read(100)
    assert chunk is not None
    assert chunk.position == 5
    reader.close()


@pytest.mark.parametrize("count", [0, 3])
def test_bounded_input_ends_with_what_is_there(count):
    reader = source_of(count, bounded=True).open(PARTITION, Position(0), with_positions=False)
    chunks: list[Chunk] = []
    while not chunks or not chunks[-1].ended:
        chunk = reader.read(1)
        assert chunk is not None
        chunks.append(chunk)
    assert [chunk.position for chunk in chunks] == [*range(1, count + 1), count]
    assert sum(chunk.frame.height for chunk in chunks) == 2 * count


def test_acknowledged_versions_are_compacted_and_a_failure_of_that_stops_nothing():
    disk = MemoryDisk()
    source = source_of(COMPACT_FILES_MIN + 3, disk=disk)
    source.ack({})
    disk.fail_next("create", "full")
    source.ack({PARTITION: PartitionCut(position=COMPACT_FILES_MIN)})
    assert source.log.files == COMPACT_FILES_MIN + 3
    source.ack({PARTITION: PartitionCut(position=COMPACT_FILES_MIN)})
    assert source.log.files == 4


def test_the_registry_opens_a_table_in_the_home_directory_and_otherwise_says_where_tables_are_read(tmp_path):
    spec = ConnectorSpec("control", {"control": "t"})
    assert source_delivery(spec) is Delivery.EXACTLY_ONCE
    options = SourceOptions(schema=SCHEMA, bounded=True)
    with pytest.raises(ConfigError, match="state directory of a node"):
        open_source(spec, options)
    home = Home(disk=OsDisk(tmp_path), directory="p/n")
    there = open_source(ConnectorSpec("control", {"control": "t", "keys": KEYS}), options, OpenContext(home=home))
    assert there.plan_read(PARTITION, Position(0), 10).ended
