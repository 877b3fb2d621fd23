"""What the stand-in for Spark keeps: state by shard and batch, the logs of a query, and when its process dies.

The states are Spark's `ValueState` and `MapState`, as far as `processor.HostProcessor` uses them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyspark.sql import Row
from pyspark.sql.types import StructType


class Died(BaseException):
    """The process is gone, in the middle of whatever it did. No `except Exception` gets hold of it."""


@dataclass
class Fate:
    """Counts the steps that a process makes, and ends it at one of them."""

    steps: int = 0
    dies_at: int | None = None
    dies_before: str | None = None
    """What it will never come to do."""
    died: Counter[str] = field(default_factory=Counter)
    """How often, by what it was about to do."""
    log: list[str] = field(default_factory=list)
    """The steps of the process that runs now."""

    def dies_within(self, steps: int) -> None:
        """Die that many steps from now, or earlier if it comes to that."""
        self.dies_at = self.steps + steps

    def step(self, what: str) -> None:
        """The process is about to do something."""
        self.steps += 1
        self.log.append(what.partition(" ")[0])
        ended = self.dies_at is not None and self.steps >= self.dies_at
        if ended or self.dies_before == self.log[-1]:
            self.dies_at = self.dies_before = None
            self.died[self.log[-1]] += 1
            raise Died(what)


Shards = dict[tuple[int, int], dict[str, Any]]
"""By depth and by what Spark groups by: the values of each state, by name."""


class _Value:
    """`ValueState` of one shard."""

    def __init__(self, name: str, shard: Callable[[], dict[str, Any]], fate: Fate) -> None:
        self._name, self._shard, self._fate = name, shard, fate

    def get(self) -> tuple[Any, ...] | None:
        found = self._shard().get(self._name)
        return None if found is None else (bytearray(found),)

    def update(self, value: tuple[Any, ...]) -> None:
        self._fate.step(f"state {self._name}")
        self._shard()[self._name] = bytes(value[0])


class _Map:
    """`MapState` of one shard."""

    def __init__(self, name: str, shard: Callable[[], dict[str, Any]], fate: Fate) -> None:
        self._name, self._shard, self._fate = name, shard, fate

    def _entries(self) -> dict[int, bytes]:
        entries: dict[int, bytes] = self._shard().setdefault(self._name, {})
        return entries

    def getValue(self, key: tuple[int]) -> tuple[Any, ...] | None:  # noqa: N802 - Spark's name
        found = self._entries().get(key[0])
        return None if found is None else (bytearray(found),)

    def updateValue(self, key: tuple[int], value: tuple[Any, ...]) -> None:  # noqa: N802 - Spark's name
        self._fate.step(f"state {self._name}")
        assert key[0] not in self._entries(), f"piece {key[0]} of {self._name} is there already: pieces never change"
        self._entries()[key[0]] = bytes(value[0])

    def removeKey(self, key: tuple[int]) -> None:  # noqa: N802 - Spark's name
        self._fate.step(f"state {self._name}")
        self._entries().pop(key[0], None)


class Handle:
    """`StatefulProcessorHandle` of one task."""

    def __init__(self, fate: Fate) -> None:
        self.shard: dict[str, Any] = {}
        self._fate = fate

    def getValueState(self, name: str, schema: StructType) -> _Value:  # noqa: N802 - Spark's name
        assert schema.simpleString() == "struct<json:binary>"
        return _Value(name, lambda: self.shard, self._fate)

    def getMapState(self, name: str, key: StructType, value: StructType) -> _Map:  # noqa: N802 - Spark's name
        assert key.simpleString() == "struct<number:bigint>"
        assert value.simpleString() == "struct<data:binary>"
        return _Map(name, lambda: self.shard, self._fate)


class SparkRefuses(Exception):  # noqa: N818 - it is what Spark does
    """Spark stops with an error of its own: its files are not as it needs them."""


@dataclass
class Location:
    """A checkpoint location: outlives every process.

    Offsets and commits are files in it, and so is what a try at a batch leaves as state: the commit names it, as in version 2 of
    Spark's format. Nothing is synced, as with Spark. The state itself is kept here.
    """

    path: Path
    versions: dict[int, Shards] = field(default_factory=dict)
    """State after each batch that was committed; before the first there is none."""
    _tries: dict[str, Shards] = field(default_factory=dict)
    """State after each try at a batch."""

    def batches(self, log: str) -> list[int]:
        found = self.path / log
        return sorted(int(file.name) for file in found.iterdir()) if found.exists() else []

    def write(self, log: str, number: int, text: str) -> None:
        """Write an entry of a log as Spark does: whole, under its name, and not synced."""
        self._write(f"{log}/{number}", f"v1\n{text}")

    def offset(self, number: int) -> str:
        return self._entry("offsets", number)

    def store(self, number: int, state: Shards) -> str:
        """Store the state after a try at a batch; gives its name."""
        name = f"{number + 1}_{len(self._tries)}.changelog"
        self._tries[name] = copied(state)
        self._write(f"state/0/0/{name}", name)
        return name

    def commit(self, number: int, name: str) -> None:
        self.write("commits", number, json.dumps({"state": name}))
        self.versions[number] = self._tries[name]
        self.versions.pop(number - 3, None)

    def state_before(self, number: int) -> Shards:
        """A copy, to be changed."""
        if number == 0:
            return {}
        name = json.loads(self._entry("commits", number - 1))["state"]
        file = self.path / "state" / "0" / "0" / name
        if not file.exists() or file.read_text() != name:
            raise SparkRefuses(f"CANNOT_LOAD_STATE_STORE {name}")
        return copied(self._tries[name])

    def _entry(self, log: str, number: int) -> str:
        file = self.path / log / str(number)
        if not file.exists():
            raise SparkRefuses(f"{log}/{number} does not exist")
        version, _, text = file.read_text().partition("\n")
        if version != "v1":
            raise SparkRefuses(f"Incomplete log file {log}/{number}")
        return text

    def _write(self, path: str, text: str) -> None:
        place = self.path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        other = place.with_name(f".{place.name}.tmp")
        other.write_text(text)
        other.replace(place)

    @property
    def newest(self) -> Shards:
        return self.versions.get(max(self.versions, default=-1), {})


def copied(shards: Shards) -> Shards:
    """State that can be changed without changing the original."""
    return {
        shard: {name: dict(value) if isinstance(value, dict) else value for name, value in states.items()}
        for shard, states in shards.items()
    }


@dataclass(frozen=True)
class StateReader:
    """Spark's readers of state stores."""

    location: Callable[[str], Location]
    name: str
    options: Mapping[str, Any]

    def option(self, name: str, value: Any) -> StateReader:
        return StateReader(self.location, self.name, {**self.options, name: value})

    def load(self, location: str) -> Any:
        found = self.location(location)
        rows = self._metadata(found) if self.name == "state-metadata" else self._entries(found)
        return SimpleNamespace(collect=lambda: rows)

    def _metadata(self, location: Location) -> list[Row]:
        names: dict[int, set[str]] = {}
        for (depth, _), states in location.newest.items():
            names.setdefault(depth, set()).update(states)
        return [
            Row(
                operatorId=depth - 1,
                operatorProperties=json.dumps({"stateVariables": [{"stateName": name} for name in sorted(found)]}),
            )
            for depth, found in names.items()
        ]

    def _entries(self, location: Location) -> list[Row]:
        name, rows = self.options["stateVarName"], []
        for (depth, key), states in location.versions[self.options["batchId"]].items():
            if depth - 1 != self.options["operatorId"] or name not in states:
                continue
            value = states[name]
            if isinstance(value, dict):
                rows += [
                    Row(key=Row(shard=key), user_map_key=Row(number=number), user_map_value=Row(data=bytearray(data)))
                    for number, data in value.items()
                ]
            else:
                rows.append(Row(key=Row(shard=key), value=Row(json=bytearray(value))))
        return rows
