"""The options of `postgres(...)`: checked while the pipeline is built, read again where it runs. A password never stands in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from fordstone.connectors.base import ConnectorSpec, checked_spec
from fordstone.errors import ConfigError

KIND: Final = "postgres"
_PASSWORD: Final = re.compile(r"(?:^|[\s?&])(?:ssl)?password\s*=|^[a-z]+://[^/?#@]*:[^/?#@]*@", re.IGNORECASE)
"""In both forms of a dsn: `host=... password=...`, and `postgresql://user:password@host/db?password=...`."""


class PostgresSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    table: str | None = None
    """As in SQL: `alarms`, `plant.alarms`, `"Plant"."Alarms"`."""
    dsn: str | None = None
    """Where the database is, as libpq takes it, without a password. What it leaves out comes from `PGHOST`, `PGUSER` and the like."""
    query: str | None = None
    """Of a lookup, in place of `table`: what to read."""
    key: tuple[str, ...] | None = None
    """Of a sink: each row replaces the one with the same values in these columns."""
    app: str | None = None
    """Of a sink: the name under which the database records its epochs. `<pipeline>/<node>/<step>` if left out."""
    epoch_column: str | None = None
    """Of a sink: the column in which each row has the number of its epoch, or of the one that changed it last."""
    dsn_from: str | None = None
    """The secret (environment variable) that has the dsn, with its password."""
    password_from: str | None = None
    """The secret (environment variable) that has the password."""

    def __post_init__(self) -> None:
        if (self.table is None) == (self.query is None) or not (self.table or self.query or "").strip():
            raise ConfigError(f"{self.where}: give the name of a table, or query= to look rows up in.")
        if self.dsn is not None and _PASSWORD.search(self.dsn):
            raise ConfigError(
                f"{self.where}: its dsn has a password, which would be stored and shown with the plan. Leave it out. Set the environment "
                "variable PGPASSWORD where the pipeline runs, name another variable with password_from=... (or dsn_from=..., for the "
                "whole dsn), or put it into ~/.pgpass."
            )
        if self.dsn is not None and self.dsn_from is not None:
            raise ConfigError(f"{self.where}: give dsn= or dsn_from=, and not both.")
        if self.key is not None and (not self.key or len(set(self.key)) < len(self.key)):
            raise ConfigError(f"{self.where}: key={list(self.key)} must name columns, each once.")
        for name in ("app", "epoch_column", "dsn_from", "password_from"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigError(f"{self.where}: {name}={value!r} must not be empty. Give a name, or omit it.")

    @property
    def where(self) -> str:
        """The table or query, in errors."""
        return f"postgres({self.table!r})" if self.table is not None else f"postgres(query={self.query!r})"


def postgres(
    table: str | None = None,
    dsn: str | None = None,
    *,
    query: str | None = None,
    key: Sequence[str] | str | None = None,
    app: str | None = None,
    epoch_column: str | None = None,
    dsn_from: str | None = None,
    password_from: str | None = None,
) -> ConnectorSpec:
    """A table of PostgreSQL: a sink, or what a lookup reads. Needs `pip install 'fordstone[postgres]'`.

    As a sink, rows are appended; upserts, and rows of a sink with `key`, replace those of their key. The table is made if missing. Beside it,
    in `fordstone_epochs`, the database records which epochs it has, under the name `app` (by default `<pipeline>/<node>/<step>`). With
    `epoch_column` rows carry their epoch. A lookup reads `table`, or the rows of `query`.

    `dsn` may not have a password: it comes from `PGPASSWORD`, `~/.pgpass`, or the environment variables named by `password_from` or `dsn_from`.
    """
    options = {
        "table": table,
        "dsn": dsn,
        "query": query,
        "key": None if key is None else [key] if isinstance(key, str) else list(key),
        "app": app,
        "epoch_column": epoch_column,
        "dsn_from": dsn_from,
        "password_from": password_from,
    }
    return checked_spec(KIND, options, PostgresSettings)
