"""Describe what a plan does on Spark before it runs: which steps run where, where rows are shuffled, what each path guarantees.

Steps are described as in `planner.explain`; which step runs where is decided in `hosted.stages`. Only the plan is read:
neither Java nor pyspark is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fordstone.errors import PipelineError
from fordstone.operators.registry import family_of, has_feeder
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Types
from fordstone.planner.check import stream_types
from fordstone.planner.explain import Node, crossing, described, drawn, guarantees, port_lead
from fordstone.planner.graph import Edge
from fordstone.spark.hosted.stages import Host, Stages, build_stages


def explain(plan: p.Plan, *, bounded: bool = False, shards: int | None = None) -> str:
    """Describe a plan as it would run on Spark. `shards`: the number of parts that keyed rows are divided into, if known."""
    lines = [f"pipeline {plan.pipeline}", f"  guarantee  {plan.guarantee}"]
    try:
        stages = build_stages(plan)
    except PipelineError as error:
        return "\n".join([*lines, f"  runs       on the edge only: {error}"]) + "\n"
    text = _Text(plan=plan, types=stream_types(plan), stages=stages, bounded=bounded)
    lines += [f"  runs       on Spark, {text.how()}", *text.stage_lines(shards)]
    return "\n".join([*lines, "", "guarantees", *guarantees(plan)]) + "\n"


def describe_center(plan: p.Plan, *, bounded: bool = False, shards: int | None = None) -> list[str]:
    """Describe the center part of a plan for two tiers, for `planner.explain`: where it runs, then lines."""
    try:
        stages = build_stages(plan)
    except PipelineError as error:
        return ["on our own engine only", "", f"  {error}"]
    text = _Text(plan=plan, types=stream_types(plan), stages=stages, bounded=bounded)
    return ["on Spark", "", f"  runs       {text.how()}", *text.stage_lines(shards)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """One description; remembers what it has drawn, because a union's steps run wherever its rows come from."""

    plan: p.Plan
    types: Types
    stages: Stages
    bounded: bool
    drawn: set[str] = field(default_factory=set)

    def how(self) -> str:
        if self.bounded:
            return "as a batch job; all results become visible at its end"
        return "as one query; a micro-batch is an epoch"

    def stage_lines(self, shards: int | None) -> Iterator[str]:
        for depth in range(self.stages.depth + 1):
            yield from ["", self.stage(depth, shards)]
            for host in self.stages.at(depth):
                yield from drawn(self.node(host, host.name, ""))

    def stage(self, depth: int, shards: int | None) -> str:
        if depth == 0:
            return "readers: operators run where rows are read"
        parts = f"{shards} shards" if shards else "as many shards as the session has shuffle partitions"
        return f"stage {depth}, after a shuffle: operators in {parts}"

    def node(self, host: Host, name: str, port: str) -> Node:
        step = self.plan.step(name)
        if name in self.drawn:
            return Node(title=f"{port}{name}: as above")
        self.drawn.add(name)
        children = []
        for consumer, index, stream in self.plan.feeds(name):
            if isinstance(consumer, p.KeyedStep):
                children.append(
                    Node(title=f"→ stage {self._depth(consumer)}, {self._crossing(host, consumer, index, stream)}")
                )
            else:
                children.append(self.node(host, consumer.name, port_lead(stream)))
        title = family_of(step).title(step)
        return Node(title=f"{port}{name}: {title}", details=tuple(self._details(step)), children=tuple(children))

    def _depth(self, step: p.KeyedStep) -> int:
        return self.stages.hosts[step.name].depth

    def _crossing(self, host: Host, consumer: p.KeyedStep, index: int, stream: p.Input) -> str:
        edge = Edge(
            number=0,
            source=host.name,
            step=stream.step,
            port=stream.port,
            target=consumer.name,
            keys=(consumer.shuffles or ())[index],
            index=index,
            feeder=has_feeder(consumer, self.plan),
        )
        return f"{consumer.name}: {crossing(self.plan, edge).replace('to one subtask', 'to one shard')}"

    def _details(self, step: p.Step) -> Iterator[tuple[str, str]]:
        for label, text in described(step, self.plan, self.types, on_spark=True):
            yield label, self._on_spark(step, label, text)

    def _on_spark(self, step: p.Step, label: str, text: str) -> str:
        """Adapt a detail that differs between Spark and the edge."""
        if isinstance(step, p.Sink) and label == "releases":
            when = "at the end" if self.bounded else "with the micro-batch"
            return f"{when}, with ids (__id) to deduplicate by" if step.release == "at_once" else when
        return text
