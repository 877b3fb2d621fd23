"""A hub in memory, as far as control tables go, that can be away, forget old versions, and lose answers; and plans that read tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import polars as pl

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.epochs.run_file import encode_run
from fordstone.errors import HubAwayError, HubRefusedError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ControlPage, ControlPublish, ControlVersion
from fordstone.lang.schema import Schema
from fordstone.operators.base import DELETE, OP, UPSERT
from fordstone.plan import plan as p
from fordstone.protocol.chain import CHAIN_START, ChainFacts, PositionJudgement, chained, judge_position
from fordstone.state.base import RunRef

SCHEMA = Schema.of({"device": "string", "threshold": "double"})
KEYS = ("device",)
Guarantee = Literal["exactly_once", "at_most_once"]
Table = dict[str, float | None]
GONE = object()
"""In place of a value: the row is deleted."""


@dataclass
class FakeHub(HubClient):
    """Numbers versions as the hub does."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    versions: list[ControlVersion] = field(default_factory=list)
    owners: dict[str, int] = field(default_factory=dict)
    """The last batch of each owner; the last one counts."""
    away: bool = False
    loses_answers: int = 0
    newest: int = 0
    chain: str = CHAIN_START
    page_max: int = 1000
    asked: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def put_blob(self, digest: str, data: bytes) -> None:
        self._answer()
        self.blobs[digest] = data

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        del direct_url
        self._answer()
        return self.blobs[ref.digest]

    def publish(self, pipeline: str, control: str, version: ControlPublish) -> ControlVersion:
        del pipeline, control
        self._answer()
        if version.blob.digest not in self.blobs:
            raise HubRefusedError("blobs are missing", status=424, code="missing_blobs")
        if version.owner in self.owners and next(reversed(self.owners)) != version.owner:
            raise HubRefusedError("another has followed", status=412, code="stale_generation")
        if version.batch <= self.owners.get(version.owner, 0):
            return next(
                one for one in reversed(self.versions) if (one.owner, one.batch) == (version.owner, version.batch)
            )
        self.owners[version.owner] = version.batch
        self.newest += 1
        made = ControlVersion(
            version=self.newest,
            blob=version.blob,
            snapshot=version.snapshot,
            published_us=0,
            owner=version.owner,
            batch=version.batch,
        )
        made = msgspec.structs.replace(made, chain=chained(self.chain, made.digest()))
        self.chain = made.chain
        self.versions.append(made)
        if self.loses_answers:
            self.loses_answers -= 1
            raise HubAwayError("the answer was lost", retry_after_s=None)
        return made

    def control_page(
        self, pipeline: str, control: str, *, after: int = 0, chain: str | None = None, wait_s: float = 0.0
    ) -> ControlPage:
        del pipeline, control
        self.asked.append(after)
        self.waits.append(wait_s)
        self._answer()
        oldest = self.versions[0].version if self.versions else self.newest + 1
        start, restart = after + 1, ""
        at = next((one.chain for one in reversed(self.versions) if one.version <= after), None)
        facts = ChainFacts(head=self.newest, head_chain=self.chain, chain=at)
        judgement = PositionJudgement.FITS if chain is None else judge_position(after, chain, facts)
        if judgement is PositionJudgement.BEYOND:
            raise HubRefusedError("version is not one of its versions", status=410, code="gone")
        if judgement is not PositionJudgement.FITS:
            restart = f"the hub does not have version {after}"
        if after == 0 or start < oldest or restart:
            start = max([oldest, *(one.version for one in self.versions if one.snapshot)])
        found = [one for one in self.versions if one.version >= start]
        return ControlPage(
            versions=tuple(found[: self.page_max]),
            newest=self.newest,
            reached=self.newest,
            restart=restart,
        )

    def close(self) -> None:
        """Nothing is open."""

    def add(self, rows: dict[str, Any], *, snapshot: bool = False) -> None:
        """Publish, as the center would."""
        self.add_frame(control_rows(rows), snapshot=snapshot)

    def add_frame(self, frame: pl.DataFrame, *, snapshot: bool = False) -> None:
        ref, data = encode_run(frame, "zstd")
        self.blobs[ref.digest] = bytes(data)
        batch = self.owners.get("test", 0) + 1
        self.publish("p", "t", ControlPublish(owner="test", batch=batch, blob=ref, snapshot=snapshot))

    def forget_before(self, version: int) -> None:
        """As retention would, below a snapshot."""
        self.versions = [one for one in self.versions if one.version >= version]

    def _answer(self) -> None:
        if self.away:
            raise HubAwayError("the hub is away", retry_after_s=None)


def control_rows(rows: dict[str, Any]) -> pl.DataFrame:
    """Rows of a version, `GONE` for those that are deleted."""
    return pl.DataFrame(
        [(key, None if value is GONE else value, DELETE if value is GONE else UPSERT) for key, value in rows.items()],
        schema={"device": pl.String, "threshold": pl.Float64, OP: pl.String},
        orient="row",
    )


def as_table(frame: pl.DataFrame) -> Table:
    """A table's rows, all of which are upserts."""
    assert set(frame.get_column(OP).to_list()) <= {UPSERT}
    return dict(zip(frame.get_column("device").to_list(), frame.get_column("threshold").to_list(), strict=True))


def applied(table: Table, rows: dict[str, Any]) -> Table:
    """The table after a version."""
    return {key: value for key, value in (table | rows).items() if value is not GONE}


# Plans.


def edge_plan(pipeline: Pipeline) -> p.Plan:
    """The plan as a node runs it: the control table is a source."""
    plan = pipeline.plan()
    steps = tuple(
        p.Source(
            name=step.name,
            connector=p.ConnectorSpec("control", {"control": step.name, "keys": list(step.keys)}),
            schema=step.schema,
            replaces=step.keys,
        )
        if isinstance(step, p.Control)
        else step
        for step in plan.steps
    )
    return msgspec.structs.replace(plan, steps=steps)


def pipeline_of(
    source: MemorySource, alarms: MemorySink, out: MemorySink, *, guarantee: Guarantee = "exactly_once"
) -> p.Plan:
    """The edge part of a pipeline as in section 1 of the design."""
    pipeline = Pipeline("cold-chain", guarantee=guarantee)
    readings = pipeline.source(
        "readings", memory(source), schema={"n": "bigint", "device": "string", "ts": "timestamp"}, time="ts"
    )
    limits = pipeline.control("limits", schema={"device": "string", "threshold": "double"}, key="device")
    seen = readings.join_control(limits, on="device")
    if guarantee == "exactly_once":
        seen.sink("alarms", memory(alarms), release="at_once")
    seen.sink("out", memory(out))
    return edge_plan(pipeline)
