"""From a plan to the stages of one query on Spark, and to the chains of operators that run in them.

Stage 0 has the readers: each runs the steps that are fused with its source. Then there is one stage per depth of keyed steps;
each keyed step runs with the steps that are fused to it. A union costs nothing: its steps run wherever its rows come from. So
the whole pipeline is one query with one commit per micro-batch. Needs neither pyspark nor pyarrow to build the stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import polars as pl

from fordstone.connectors.lookup_table import read_table
from fordstone.errors import PipelineError
from fordstone.operators.base import MAIN, Functions, OperatorContext
from fordstone.operators.dead_letter import DEAD, DEAD_LETTERS
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.operators.rowwise import tag_branch
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.planner.graph import steps_with_ids
from fordstone.runtime.chain import Chain, Link, TaskOutput
from fordstone.spark.hosted.packing import Packer
from fordstone.spark.hosted.tables import open_table_of

if TYPE_CHECKING:
    from fordstone.spark.hosted.sent import Lazy
    from fordstone.spark.session.session import Probe

TIMERS_US: Final = 1_000_000
"""Interval at which timers by the clock are looked at although there are no rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A source or a keyed step, and the steps that run with it."""

    name: str
    members: tuple[str, ...]
    """In plan order, itself first; up to the next keyed steps and the sinks."""
    sources: frozenset[str]
    """The sources whose watermarks count here."""
    depth: int
    """0 for sources; else how many keyed steps rows pass through up to and with this one."""


@dataclass(frozen=True)
class Stages:
    """What runs where."""

    plan: p.Plan
    hosts: Mapping[str, Host]
    depth: int
    """The number of stages after the readers."""

    @cached_property
    def keyed(self) -> tuple[p.KeyedStep, ...]:
        """The keyed steps in plan order: a packed row's tag is the place in here."""
        return tuple(step for step in self.plan.steps if isinstance(step, p.KeyedStep))

    @cached_property
    def sinks(self) -> tuple[str, ...]:
        """Sinks in plan order, then the dead letters of steps: a packed row's tag is the place in here."""
        named = [step.name for step in self.plan.steps if isinstance(step, p.Sink)]
        return (*named, *(DEAD_LETTERS + step.name for step in self.plan.steps if step.has_dead_letters))

    @cached_property
    def sources(self) -> tuple[p.Source, ...]:
        return tuple(step for step in self.plan.steps if isinstance(step, p.Source))

    def tag_of(self, keyed: str) -> int:
        return [step.name for step in self.keyed].index(keyed)

    def at(self, depth: int) -> tuple[Host, ...]:
        """The hosts of one stage; 0: the readers."""
        return tuple(host for host in self.hosts.values() if host.depth == depth)


def build_stages(plan: p.Plan) -> Stages:
    """Cut the plan into stages. Raises `PipelineError` for what cannot run on Spark."""
    loops = [step.name for step in plan.steps if isinstance(step, p.Loop)]
    if loops:
        raise PipelineError(
            f"loop {', '.join(loops)} cannot run on Spark: a Spark query has no way back. "
            "Run this pipeline on the edge engine, or write the loop out as the steps of a few rounds."
        )
    if plan.guarantee == "at_most_once":
        raise PipelineError(
            f"pipeline {plan.pipeline} asks for at_most_once, which Spark cannot give: it runs a batch again after a failure. "
            "Leave guarantee= out: files and Delta tables then get every row exactly once."
        )
    depths: dict[str, int] = {}
    sources: dict[str, frozenset[str]] = {}
    for step in plan.steps:
        if isinstance(step, p.Source):
            depths[step.name], sources[step.name] = 0, frozenset({step.name})
            continue
        deepest = max(depths[stream.step] for stream in step.inputs)
        depths[step.name] = deepest + isinstance(step, p.KeyedStep)
        sources[step.name] = frozenset().union(*(sources[stream.step] for stream in step.inputs))
    hosts = {
        step.name: Host(
            name=step.name, members=_members(plan, step), sources=sources[step.name], depth=depths[step.name]
        )
        for step in plan.steps
        if isinstance(step, p.Source | p.KeyedStep)
    }
    return Stages(plan=plan, hosts=hosts, depth=max(host.depth for host in hosts.values()))


def tick_us(plan: p.Plan) -> int | None:
    """How often something in the plan looks at the clock, if anything does."""
    early = [step.early_us for step in plan.steps if isinstance(step, p.Aggregate) and step.early_us is not None]
    timed = [TIMERS_US for step in plan.steps if isinstance(step, p.Process)]
    return min([*early, *timed], default=None)


def _members(plan: p.Plan, head: p.Step) -> tuple[str, ...]:
    inside = {head.name}
    for step in plan.steps:
        if not isinstance(step, p.Source | p.KeyedStep) and any(stream.step in inside for stream in step.inputs):
            inside.add(step.name)
    return tuple(step.name for step in plan.steps if step.name in inside)


@dataclass(frozen=True, slots=True)
class _Out:
    """Rows for a keyed step, or without `keys` for a sink."""

    packer: Packer
    tag: int
    keys: Sequence[str] | None = None

    def send(self, frame: pl.DataFrame, *, late: bool) -> None:
        if self.keys is None:
            self.packer.out(self.tag, frame)
        else:
            self.packer.keyed(self.tag, self.keys, frame, late=late)


def make_chain(stages: Stages, host: Host, setting: OperatorContext, packer: Packer) -> Chain:
    """The chain of one host, with fresh operators."""
    plan, members = stages.plan, set(host.members)
    links: list[Link] = []
    for name in host.members:
        step = plan.step(name)
        inside: dict[str, list[str]] = defaultdict(list)
        outgoing: dict[str, list[TaskOutput]] = defaultdict(list)
        more: list[Link] = []
        if isinstance(step, p.Sink):
            outgoing[MAIN].append(_Out(packer, stages.sinks.index(name)))
        if step.has_dead_letters:
            outgoing[DEAD].append(_Out(packer, stages.sinks.index(DEAD_LETTERS + name)))
        for consumer, index, stream in plan.feeds(name):
            if isinstance(consumer, p.KeyedStep):
                out = _Out(packer, stages.tag_of(consumer.name), (consumer.shuffles or ())[index])
                feeder = make_feeder(consumer, index, setting)
                if feeder is None:
                    outgoing[stream.port].append(out)
                else:
                    fed = f"{consumer.name}/feed{index}/{name}"
                    inside[stream.port].append(fed)
                    more.append(Link(fed, feeder, outputs={MAIN: [out]}))
            elif consumer.name not in members:
                raise AssertionError(f"{consumer.name} reads {name}, but is not in the same stage")
            elif isinstance(consumer, p.Union) and consumer.name in setting.with_ids:
                for branch, taken in enumerate(consumer.streams):
                    tag = f"{consumer.name}/branch{branch}/{name}"
                    if taken == stream and tag not in inside[stream.port]:
                        inside[stream.port].append(tag)
                        more.append(Link(tag, tag_branch(branch), links={MAIN: [consumer.name]}))
            else:
                inside[stream.port].append(consumer.name)
        links += [Link(name, make_operator(step, setting), links=inside, outputs=outgoing), *more]
    return Chain(links, [host.name], subtask=0)


@dataclass(frozen=True, kw_only=True)
class QuerySetting:
    """What every task of a query needs. Sent by Spark to its workers, functions included; each process reads the plan itself."""

    plan_json: bytes
    shards: int
    root: str = ""
    """The checkpoint location."""
    functions: Lazy[Functions] | None = None
    batch_rows: int = 65_536
    bounded: bool = False
    start: str = ""
    """Random, of this start of the driver."""
    probe: Probe | None = None
    """What each process has to see at the checkpoint location before it touches state; None: all are on one machine."""

    def __getstate__(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def stages(self) -> Stages:
        return build_stages(p.read_plan(self.plan_json))

    @cached_property
    def operators(self) -> OperatorContext:
        """How the operators are made: running results come once per batch, as on the edge once per epoch."""
        plan = self.stages.plan
        return OperatorContext(
            plan=msgspec.structs.replace(plan, guarantee="exactly_once"),
            types=stream_types(plan),
            functions={} if self.functions is None else self.functions.get(),
            read_table=partial(read_table, start=self.start),
            with_ids=steps_with_ids(plan),
        )

    def operators_with(self, tables: Mapping[str, str]) -> OperatorContext:
        """The same for one batch, whose refreshed tables are in these files."""
        return replace(self.operators, open_table=open_table_of(self.root, tables))
