"""Every sink that can be looked at keeps the contract of the seam."""

from pathlib import Path

import polars as pl
from deltalake import DeltaTable

from fordstone.connectors import MemorySink, delta, files, memory, rows
from fordstone.connectors.base import ConnectorSpec
from fordstone.testing.contracts.connector import SinkContract


class TestJsonLines(SinkContract):
    format = "jsonl"

    def spec(self, place: Path) -> ConnectorSpec:
        return files(str(place / "out"), format=self.format)

    def seen(self, place: Path) -> pl.DataFrame:
        return rows(place / "out")


class TestCsv(TestJsonLines):
    format = "csv"


class TestParquet(TestJsonLines):
    format = "parquet"


class TestArrow(TestJsonLines):
    format = "arrow"


class TestUrl(SinkContract):
    def spec(self, place: Path) -> ConnectorSpec:
        return files(f"memory:/{place}/out", format="jsonl")

    def seen(self, place: Path) -> pl.DataFrame:
        return rows(f"memory:/{place}/out")

    def fences(self, place: Path) -> bool:
        """It is not declared, because a file that is on its way arrives; but what it can refuse, it refuses."""
        assert not super().fences(place)
        return True


class TestMemory(SinkContract):
    def spec(self, place: Path) -> ConnectorSpec:
        self.live = getattr(self, "live", None) or MemorySink()
        return memory(self.live)

    def seen(self, place: Path) -> pl.DataFrame:
        return self.live.rows()


class TestDelta(SinkContract):
    applies_upserts = True

    def spec(self, place: Path) -> ConnectorSpec:
        return delta(str(place / "table"))

    def seen(self, place: Path) -> pl.DataFrame:
        # A table has no order; what the suite writes is numbered.
        return pl.DataFrame(DeltaTable(place / "table").scan()).sort("n")
