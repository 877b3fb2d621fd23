"""Say what a plan does on Spark before it runs: hosted or native and why, where rows are shuffled, what each path guarantees.

The words for steps are those of `edge.explain`; what runs where is decided in `stages`, and which way in `choice`. Reads
nothing but the plan: needs neither Java nor pyspark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fordstone.errors import PipelineError
from fordstone.operators.registry import has_feeder
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Types
from fordstone.planner.check import stream_types
from fordstone.planner.describe import details, port_lead, title
from fordstone.planner.explain import Node, crossing, drawn, guarantees
from fordstone.planner.graph import Edge
from fordstone.spark.hosted.chains import Host, Stages, build_stages
from fordstone.spark.native.choice import Choice, Native, choose, sink_streams


def explain(
    plan: p.Plan, *, native: Native = "auto", seeded: bool = False, bounded: bool = False, shards: int | None = None
) -> str:
    """Word a plan as it would run on Spark. Called by the command line.

    `seeded`: it would begin with the state of an edge checkpoint. `shards`: into how many parts keyed rows are cut, if known.

    Raises:
        ConfigError: with native='always', where Spark's own operators cannot do it.
    """
    lines = [f"pipeline {plan.pipeline}", f"  guarantee  {plan.guarantee}"]
    try:
        stages = build_stages(plan)
    except PipelineError as error:
        return "\n".join([*lines, f"  runs       on the edge only: {error}"]) + "\n"
    choice = choose(plan, native=native, seeded=seeded, streaming=not bounded)
    words = _Words(plan=plan, types=stream_types(plan), stages=stages, choice=choice, bounded=bounded)
    lines += [f"  runs       on Spark: {words.way()}", *words.reasons(), *words.stage_lines(shards)]
    return "\n".join([*lines, "", "guarantees", *guarantees(plan)]) + "\n"


def center_words(
    plan: p.Plan, *, native: Native = "auto", bounded: bool = False, shards: int | None = None
) -> list[str]:
    """The center part of a plan for two tiers, for `tiers.explain`: where it runs, then lines. Raises as `explain` does."""
    try:
        stages = build_stages(plan)
    except PipelineError as error:
        return ["on our own engine only", "", f"  {error}"]
    choice = choose(plan, native=native, streaming=not bounded)
    words = _Words(plan=plan, types=stream_types(plan), stages=stages, choice=choice, bounded=bounded)
    because = "  because    rows of nodes are read and merged by our own operators, the same as on the edge"
    return ["on Spark", "", f"  runs       {words.way()}", because, *words.stage_lines(shards)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The words of one text; remembers what it has drawn, because a union's steps run wherever its rows come from."""

    plan: p.Plan
    types: Types
    stages: Stages
    choice: Choice
    bounded: bool
    drawn: set[str] = field(default_factory=set)

    def way(self) -> str:
        """In one line, how the whole of it runs."""
        if self.bounded:
            return f"{'native' if self.choice.native else 'hosted'}, as a batch job; all is let out at its end"
        if not self.choice.native:
            return "hosted, as one query; a micro-batch is an epoch"
        queries = len(sink_streams(self.plan))
        if queries == 1:
            return "native, as one query; a micro-batch is an epoch"
        return f"native, as {queries} queries, which know nothing of each other; a micro-batch is an epoch"

    def reasons(self) -> Iterator[str]:
        """Why, a line each."""
        label = "because"
        for text in [self.choice.why] if not self.choice.obstacles or self.choice.native else []:
            yield f"  {label:<9}  {text}"
        if self.choice.native:
            label = "differs"
        for obstacle in self.choice.obstacles:
            yield f"  {label:<9}  {obstacle}"
            label = ""

    def stage_lines(self, shards: int | None) -> Iterator[str]:
        """All stages, an empty line before each."""
        for depth in range(self.stages.depth + 1):
            yield from ["", self.stage(depth, shards)]
            for host in self.stages.at(depth):
                yield from drawn(self.node(host, host.name, ""))

    def stage(self, depth: int, shards: int | None) -> str:
        """The title of a stage."""
        if depth == 0:
            return "readers" if self.choice.native else "readers: our operators run where rows are read"
        if self.choice.native:
            return f"stage {depth}, behind a shuffle: Spark's own operators"
        parts = f"{shards} shards" if shards else "as many shards as the session has shuffle partitions"
        return f"stage {depth}, behind a shuffle: our operators, in {parts}"

    def node(self, host: Host, name: str, port: str) -> Node:
        """A step and what runs with it."""
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
        return Node(title=f"{port}{name}: {title(step)}", details=tuple(self._details(step)), children=tuple(children))

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
        if isinstance(step, p.KeyedStep):
            chosen = self.choice.of(step.name)
            yield "runs", f"{chosen.way}. {chosen.why}"
        for label, text in details(self.plan, step, self.types):
            yield label, self._worded(step, label, text)

    def _worded(self, step: p.Step, label: str, text: str) -> str:
        """What is otherwise on Spark than on the edge."""
        if isinstance(step, p.Sink) and label == "releases":
            when = "at the end" if self.bounded else "with the micro-batch"
            return f"{when}, with ids (__id) to deduplicate by" if step.release == "at_once" else when
        if not isinstance(step, p.Source) or not self.choice.native:
            return text
        if label == "keeps":
            return "the names of the files that were read"
        if label == "bad rows" and step.time is not None and step.on_error == "keep":
            return f"stop the query; those without a time in {step.time} are left out"
        return "stop the query" if label == "bad rows" else text
