"""A pipeline with one source that has time, for the tests of what may be written. Its columns are the `SCHEMA` of each test file."""

from __future__ import annotations

import pytest

from fordstone import Pipeline, Stream
from fordstone.api.stream import Grouped
from fordstone.connectors import files


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline("test")


@pytest.fixture
def readings(pipeline: Pipeline, request: pytest.FixtureRequest) -> Stream:
    schema = request.module.SCHEMA
    return pipeline.source("readings", files("in/*.jsonl"), schema=schema, time="ts", lateness="5s")


@pytest.fixture
def grouped(readings: Stream) -> Grouped:
    return readings.group_by("device")
