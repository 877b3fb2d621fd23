"""The sink of PostgreSQL keeps the contract of the seam, against a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.postgres_place import database_of, seen_in
from tests.services.postgres import PASSWORD, Postgres

from fordstone.connectors import postgres as table
from fordstone.connectors.base import ConnectorSpec, Sink
from fordstone.testing.contracts.connector import SinkContract


class TestPostgres(SinkContract):
    applies_upserts = True
    restores_upserts = False

    @pytest.fixture(autouse=True)
    def _server(self, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.server = postgres
        self.opened: list[Sink] = []
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        yield
        for sink in self.opened:
            sink.close()

    def open(self, place: Path, *, upsert_key: tuple[str, ...] | None = None) -> Sink:
        self.opened.append(super().open(place, upsert_key=upsert_key))
        return self.opened[-1]

    def open_as(
        self, place: Path, hub: int, local: int = 1, *, upsert_key: tuple[str, ...] | None = None, **given: Any
    ) -> Sink:
        self.opened.append(super().open_as(place, hub, local, upsert_key=upsert_key, **given))
        return self.opened[-1]

    def spec(self, place: Path) -> ConnectorSpec:
        return table("results", database_of(self.server, place), epoch_column="epoch")

    def seen(self, place: Path) -> pl.DataFrame:
        # A table has no order; what the suite writes is numbered.
        return seen_in(self.server, database_of(self.server, place), "results", self.schema, order="n")
