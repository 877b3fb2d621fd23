"""Choose between Spark's own operators (native) and ours inside Spark (hosted), and say why.

The whole pipeline goes one way, so that state and output of a micro-batch become visible together. `auto` is native only
where every result stays what the edge engine gives, late rows and dead letters included; `always` is native wherever
Spark has the operators, and the choice then says what differs. Pure: looks at the plan alone, needs neither Java nor pyspark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from fordstone.connectors.files.settings import file_settings
from fordstone.errors import ConfigError
from fordstone.operators.aggregate.check import aggregates, rows_of
from fordstone.plan import plan as p
from fordstone.plan.windows import Tumbling
from fordstone.planner.check import stream_types
from fordstone.spark.native.parquet import refusal

Native = Literal["auto", "never", "always"]
Way = Literal["native", "hosted"]

_STATELESS: Final = (p.Source, p.Filter, p.Select, p.WithColumns, p.Explode, p.Function, p.Union, p.Sink)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Something about one step, or about the run (`step` is None), that stands against running natively."""

    step: str | None
    why: str
    """What is so, as a clause: it stands behind "because" and before a full stop."""
    hard: bool
    """Spark's own operators cannot do it at all; else they can, with another meaning."""

    def __str__(self) -> str:
        return self.why if self.step is None else f"step {self.step}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """How one stateful step runs."""

    step: str
    way: Way
    why: str
    """A sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a plan runs on Spark."""

    native: bool
    why: str
    """A sentence."""
    steps: tuple[StepChoice, ...]
    """The stateful steps, in plan order."""
    obstacles: tuple[Obstacle, ...] = ()
    """What stands against running natively; where `native` is true all the same: what differs from the edge engine."""

    def of(self, step: str) -> StepChoice:
        """How that stateful step runs."""
        return next(choice for choice in self.steps if choice.step == step)


def choose(plan: p.Plan, *, native: Native = "auto", seeded: bool = False, streaming: bool = True) -> Choice:
    """Choose for a checked plan. `seeded`: the run begins with the state of an edge checkpoint.

    Raises:
        ConfigError: with native='always', where Spark's own operators cannot do it; names the step.
    """
    if native not in get_args(Native):
        raise ConfigError(f"native={native!r}: it is {', '.join(map(repr, get_args(Native)))}.")
    obstacles = tuple(_obstacles(plan, seeded=seeded, streaming=streaming))
    if native == "always":
        hard = [obstacle for obstacle in obstacles if obstacle.hard]
        if hard:
            raise ConfigError(
                f"native='always': {hard[0]}. Use native='auto', which then runs our own operators inside Spark."
            )
        return _native(plan, "Asked for with native='always'.", obstacles)
    if native == "never":
        return _hosted(plan, "asked for with native='never'", ())
    if obstacles:
        return _hosted(plan, str(obstacles[0]), obstacles)
    return _native(plan, "Spark's own operators give the same results here.", ())


def stateful_steps(plan: p.Plan) -> tuple[p.Step, ...]:
    """The steps that keep state, in plan order."""
    return tuple(step for step in plan.steps if not isinstance(step, _STATELESS))


def upstream(plan: p.Plan, stream: p.Input) -> tuple[p.Step, ...]:
    """The steps that a stream's rows come through, in plan order."""
    names, todo = set(), [stream.step]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo += [read.step for read in plan.step(name).inputs]
    return tuple(step for step in plan.steps if step.name in names)


def sink_streams(plan: p.Plan) -> tuple[p.Input, ...]:
    """The streams that sinks read, each once, in plan order."""
    return tuple(dict.fromkeys(step.input for step in plan.steps if isinstance(step, p.Sink)))


def _native(plan: p.Plan, why: str, obstacles: tuple[Obstacle, ...]) -> Choice:
    steps = []
    for step in stateful_steps(plan):
        own = [obstacle.why for obstacle in obstacles if obstacle.step == step.name]
        reason = f"as asked for, although {own[0]}" if own else "Spark's own aggregate means the same"
        steps.append(StepChoice(step=step.name, way="native", why=_sentence(reason)))
    return Choice(native=True, why=why, steps=tuple(steps), obstacles=obstacles)


def _hosted(plan: p.Plan, why: str, obstacles: tuple[Obstacle, ...]) -> Choice:
    steps = []
    for step in stateful_steps(plan):
        own = [obstacle.why for obstacle in obstacles if obstacle.step == step.name]
        reason = own[0] if own else f"the pipeline runs as one, and cannot be native: {why}" if obstacles else why
        steps.append(StepChoice(step=step.name, way="hosted", why=_sentence(reason)))
    return Choice(native=False, why=_sentence(why), steps=tuple(steps), obstacles=obstacles)


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _obstacles(plan: p.Plan, *, seeded: bool, streaming: bool) -> Iterator[Obstacle]:
    if seeded:
        why = "it begins with the state of an edge checkpoint, which only our own operators can take over"
        yield Obstacle(step=None, why=why, hard=True)
    for step in plan.steps:
        if isinstance(step, p.Source):
            yield from _source(step, streaming=streaming)
        elif isinstance(step, p.Sink):
            if step.release == "at_once":
                why = "release='at_once' needs ids that our reader gives"
                yield Obstacle(step=step.name, why=why, hard=True)
        elif not isinstance(step, _STATELESS):
            yield from _stateful(plan, step, streaming=streaming)
    if streaming:
        yield from _several(plan)
    yield from _untyped(plan)
    streams = sink_streams(plan)
    if len(streams) > 1:
        why = (
            f"sinks read {', '.join(map(str, streams))}, and natively each would be a query of its own, whose "
            "results would not become visible together"
        )
        yield Obstacle(step=None, why=why, hard=False)


def _source(step: p.Source, *, streaming: bool) -> Iterator[Obstacle]:
    if step.connector.kind != "files":
        why = f"its rows come from {step.connector.kind!r}, for which Spark has no reader of its own"
        yield Obstacle(step=step.name, why=why, hard=True)
        return
    refused = refusal(file_settings(step.connector), streaming=streaming)
    if refused is not None:
        yield Obstacle(step=step.name, why=refused, hard=True)
    elif step.time is not None and step.on_error == "keep":
        # With on_error='fail' both stop.
        why = f"natively rows without a time in {step.time} are dropped, not kept as dead letters"
        yield Obstacle(step=step.name, why=why, hard=False)


def _stateful(plan: p.Plan, step: p.Step, *, streaming: bool) -> Iterator[Obstacle]:
    def stands(why: str, *, hard: bool = True) -> Obstacle:
        return Obstacle(step=step.name, why=why, hard=hard)

    if isinstance(step, p.Loop):
        yield stands("it is a loop, and a Spark query has no way back")
        return
    if isinstance(step, p.Ewma):
        yield stands("its results depend on the order of rows, which Spark's own operators do not keep")
        return
    if isinstance(step, p.Aggregate) and step.merges is not None:
        yield stands("it merges partial rows that nodes made, which only our own operators can read")
        return
    if not isinstance(step, p.Aggregate):
        yield stands("Spark has no operator of its own for it")
        return
    if any(stream.port == "late" for _, stream in plan.consumers(step.name)):
        yield stands("its late rows are wanted, and Spark drops them")
    foreign = _foreign(plan, step)
    if foreign is not None:
        yield stands(f"{foreign} is an aggregate that Spark does not have in the same meaning")
    if step.window is None:
        return
    if not isinstance(step.window, Tumbling) or step.early_us is not None:
        yield stands("its windows are of a kind that only our own operators make")
        return
    if streaming and any(isinstance(other, p.Function) for other in upstream(plan, step.input)):
        yield stands("a function stands before it, behind which Spark knows no watermark")
    if streaming:
        yield stands("Spark judges lateness by micro-batch and by the furthest file, and drops late rows", hard=False)
    else:
        yield stands("a batch job on Spark has no late rows: all count", hard=False)


def _foreign(plan: p.Plan, step: p.Aggregate) -> str | None:
    """An aggregate that only our own operators have, if there is one."""
    calls = [call for found in aggregates(step, rows_of(step, stream_types(plan)).schema) for call in found.calls]
    return next((call.function for call in calls if call.declared is None or not call.declared.native), None)


def _several(plan: p.Plan) -> Iterator[Obstacle]:
    """Stateful steps that stand one behind the other, or side by side on the way to one sink."""
    seen: set[str] = set()
    for stream in sink_streams(plan):
        first, *others = [step.name for step in upstream(plan, stream) if not isinstance(step, _STATELESS)] or [""]
        for other in others:
            if other not in seen:
                why = f"it shares the way to a sink with {first}, and Spark's streams take one stateful step on a way"
                yield Obstacle(step=other, why=why, hard=True)
            seen.add(other)


def _untyped(plan: p.Plan) -> Iterator[Obstacle]:
    for stream, kind in stream_types(plan).items():
        nameless = [name for name, column in kind.schema.items() if "null" in str(column)]
        if nameless:
            why = f"column {nameless[0]} has no type but null, which Spark's files and functions do not take"
            yield Obstacle(step=stream.step, why=why, hard=True)
            return
