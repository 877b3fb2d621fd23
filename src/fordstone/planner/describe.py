"""A step in words: what it does, what it computes, what is kept of it. Both engines' `explain` speak with these.

A pattern in words, for `explain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, assert_never

from fordstone.connectors.base import Capability
from fordstone.connectors.registry import capabilities
from fordstone.lang.duration import human_us
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan import windows as w
from fordstone.plan.stream_type import StreamType, Types

_FOLLOWS = {"next": "next ", "then": "then ", "any": "then any "}
_REPEATS = {"next": ", consecutive", "then": "", "any": ", in all combinations"}
_SKIP = {
    "none": "all matches count",
    "next": "goes on behind the first row of a match",
    "past_last": "goes on behind the last row of a match",
}


def pattern_details(step: p.Match) -> Iterator[tuple[str, str]]:
    """What more there is to say of a pattern: a label and a text each."""
    stages = ", ".join(_stage(stage, first=at == 0) for at, stage in enumerate(step.stages))
    yield "looks for", stages + ("" if step.within_us is None else f", within {human_us(step.within_us)}")
    skip = _SKIP.get(step.skip, f"goes on at the {step.skip} row of {step.skip_to}")
    chosen = "; of one first row, as SQL prefers" if step.choose == "preferred" else ""
    yield "matches", ("all their rows; " if step.all_rows else "one row each; ") + skip + chosen
    if step.measures:
        yield "computes", ", ".join(step.measures)


def pattern_kept(step: p.Match) -> str:
    """What of a pattern is in a checkpoint."""
    most = f"open beginnings of matches, at most {step.partial_matches_max:,} a key"
    ends = "for as long as it takes" if step.within_us is None else f"for {human_us(step.within_us)}"
    return f"the rows that wait for time, and {most}, {ends}"


def _stage(stage: p.Stage, *, first: bool) -> str:
    lead = "" if first else _FOLLOWS[stage.follows]
    condition = "" if stage.predicate is None else f" ({stage.predicate})"
    if stage.negated:
        return f"{'not next' if stage.follows == 'next' else 'without'} {stage.name}{condition}"
    words = "" if stage.times_max == 1 else f" {_times(stage)}{_REPEATS[stage.repeats]}"
    words += ", optional" if stage.optional else ""
    words += "" if stage.quantifier == "each" else f", {stage.quantifier}"
    until = "" if stage.until is None else f" until {stage.until}"
    return f"{lead}{stage.name}{words}{condition}{until}"


def _times(stage: p.Stage) -> str:
    if stage.times_max is None:
        return f"{stage.times_min} or more times"
    if stage.times_min == stage.times_max:
        return f"{stage.times_min} times"
    return f"{stage.times_min} to {stage.times_max} times"


PORT_WORDS: Final = {
    "main": "rows",
    "late": "late rows",
    "timeout": "what ran out of time",
    "final": "final results",
}
_FIRST_OPTIONS: Final = ("path", "url", "topic")
"""Shown without their name: they say which thing of its kind the connector means."""
"""Connectors between the tiers."""
_SECRETS: Final = ("password", "secret", "token", "credential")


def port_lead(stream: p.Input) -> str:
    """Begins the line of a step that reads another port than the main one."""
    return "" if stream.port == "main" else f"{PORT_WORDS[stream.port]}: "


def shuffled_by(step: p.Step, index: int) -> tuple[str, ...]:
    """The columns of the stream by which rows of one input are brought together, as the user knows them."""
    match step:
        case p.Join():
            return (step.left_keys, step.right_keys)[index]
        case p.LookupLatest():
            return (step.keys, step.control_keys)[index]
        case _:
            return (step.shuffles or ((),))[index]


def has_late_reader(plan: p.Plan, step: p.Step) -> bool:
    """Whether somebody reads a step's late rows."""
    return any(stream.port == "late" for _, stream in plan.consumers(step.name))


def title(step: p.Step) -> str:  # noqa: C901, PLR0912 - one line a kind of step
    """What a step does, in one line."""
    match step:
        case p.Source() | p.Sink() if Capability.AT_HUB in capabilities(step.connector):
            return _far_end(step)
        case p.Source():
            return f"source {_connector(step.connector)}"
        case p.Filter():
            return f"keep rows where {step.predicate}"
        case p.Select():
            return f"select {', '.join(step.columns)}"
        case p.WithColumns():
            return f"add {', '.join(step.columns)}"
        case p.Explode():
            return f"a row for each element of {step.expression}"
        case p.Function():
            return f"{step.kind} {_function(step.path)}"
        case p.Union():
            return f"union of {', '.join(map(str, step.streams))}"
        case p.Aggregate():
            return f"{_kind(step)} {_over(step.keys)}{'' if step.merges is None else ', merged from partial rows'}"
        case p.Ewma():
            weight = f"alpha {step.alpha}" if step.half_life_us is None else f"half-life {human_us(step.half_life_us)}"
            return f"exponentially weighted mean {_over(step.keys)}, {weight}"
        case p.Deduplicate():
            return f"first of each {', '.join(step.keys)} within {human_us(step.within_us)}"
        case p.Join():
            return f"{step.how} join of {step.left} and {step.right}, {_between(step)}"
        case p.Lookup():
            return f"look up in {_connector(step.table)}"
        case p.LookupLatest():
            return f"look up in the newest rows of {step.control}"
        case p.Match():
            return f"pattern {step.pattern} {_over(step.keys)}"
        case p.Process():
            return f"process {_function(step.path)} {_over(step.keys)}"
        case p.Loop():
            return f"loop, fed back from {step.feedback}"
        case p.Sink():
            return f"sink {_connector(step.connector)}"
        case p.Combine():
            return (
                f"partial rows of {'a ' if step.window is None else ''}{_kind(step)} {_over(step.keys)}, once an epoch"
            )
        case p.ToCenter():
            return "to the center"
        case p.Control():
            return f"control table by {', '.join(step.keys)}"
        case p.ToEdges():
            return f"to the edges as {step.control}"
        case _:
            assert_never(step)


def _far_end(step: p.Source | p.Sink) -> str:
    """A source or a sink whose far end is the other tier (`tiers.split`)."""
    options = step.connector.options
    match step.connector.kind:
        case "center":
            return f"to the center as {options['stream']}, through the outbox and the hub"
        case "hub":
            return f"what all nodes sent as {options['stream']}, from the hub"
        case _ if isinstance(step, p.Source):
            return f"this node's copy of control table {options['control']}"
        case _:
            return f"to every node as control table {options['control']}"


def _kind(step: p.Aggregate | p.Combine) -> str:
    match step.window:
        case None:
            return "running aggregate"
        case w.Tumbling():
            return f"{human_us(step.window.size_us)} windows{_shifted(step.window.offset_us)}"
        case w.Sliding():
            every = f"{human_us(step.window.size_us)} windows every {human_us(step.window.slide_us)}"
            return every + _gaps(step.window) + _shifted(step.window.offset_us)
        case w.Session():
            return f"sessions that end after a gap of {human_us(step.window.gap_us)}"
        case w.Count():
            every = "" if step.window.slide == step.window.size else f" every {step.window.slide:,}"
            gap = step.window.slide - step.window.size
            between = f" (with gaps of {gap:,}, where rows count for none)" if gap > 0 else ""
            return f"windows of {step.window.size:,} rows{every}{between}"
        case _:
            assert_never(step.window)


def _between(step: p.Join) -> str:
    """How far the right time may lie from the left."""
    if step.from_us == step.to_us == 0:
        return "of one time"
    return f"right time - left time from {human_us(step.from_us)} to {human_us(step.to_us)}"


def _meets(step: p.Join | p.Lookup | p.LookupLatest) -> Iterator[tuple[str, str]]:
    """Which columns must be equal, and what becomes of rows that meet nothing."""
    if isinstance(step, p.Join):
        left, right = step.left_keys, step.right_keys
        alone = {"inner": "are dropped", "full": "come alone, when time has passed them"}
        unmet = alone.get(step.how, f"of the {step.how} side come alone, when time has passed them")
    else:
        left, right = step.keys, step.table_keys if isinstance(step, p.Lookup) else step.control_keys
        unmet = "are dropped" if step.how == "inner" else "get nulls"
    yield "on", ", ".join(one if one == other else f"{one} = {other}" for one, other in zip(left, right, strict=True))
    yield "unmet rows", unmet
    if isinstance(step, p.LookupLatest):
        sees = "wait for the end of their epoch, and see its control rows"
        yield "rows", sees if step.waits else "go on at once, and see the control rows of epochs before"


def _gaps(window: w.Sliding) -> str:
    gap_us = window.slide_us - window.size_us
    return f" (with gaps of {human_us(gap_us)}, where rows count for none)" if gap_us > 0 else ""


def _shifted(offset_us: int) -> str:
    return f" shifted by {human_us(offset_us)}" if offset_us else ""


def _over(keys: tuple[str, ...]) -> str:
    return f"for each {', '.join(keys)}" if keys else "over all rows"


def details(plan: p.Plan, step: p.Step, types: Types) -> Iterator[tuple[str, str]]:  # noqa: PLR0912 - one line a kind of step
    """What more there is to say of a step: a label and a text each."""
    stream = types[p.Input(step.name)]
    if isinstance(step, p.Aggregate | p.Combine):
        yield "computes", ", ".join(given.sql for given in step.aggregates)
    if isinstance(step, p.Aggregate) and step.early_us is not None:
        yield "early", f"provisional results about every {human_us(step.early_us)}, at barriers"
    if isinstance(step, p.Process):
        yield "takes", "rows in order of time" if step.ordered else "rows as they arrive: results depend on that"
    if isinstance(step, p.Ewma):
        yield "smooths", ", ".join(step.columns)
    if isinstance(step, p.Match):
        yield from pattern_details(step)
    if isinstance(step, p.Join | p.Lookup | p.LookupLatest):
        yield from _meets(step)
    if not isinstance(step, p.Sink | p.Combine):
        before = types[step.inputs[0]] if step.inputs else None
        if before is None or before.schema != stream.schema or isinstance(step, p.Aggregate):
            yield "columns", _columns(stream.schema)
        if (before is None or before.time != stream.time) and not stream.table:
            yield "time", _time(step, stream)
        if stream.upsert_key is not None and (before is None or before.upsert_key != stream.upsert_key):
            yield "rows", _replacing(stream.upsert_key)
    if isinstance(step, p.Source) and not step.declares_time and not step.replaces:
        yield "bad rows", "go to the dead letters" if step.on_error == "keep" else "stop the pipeline"
    if isinstance(step, p.Sink):
        yield "releases", _release(plan, step)
    if (kept := _kept(plan, step)) is not None:
        yield "keeps", kept


def _time(step: p.Step, stream: StreamType) -> str:
    if isinstance(step, p.Source) and step.declares_time:
        column = "" if stream.time is None else f"{stream.time.column}, "
        away = "" if step.idle_after_us is None else f"; one away for {human_us(step.idle_after_us)} is not waited for"
        return f"{column}as far as every node has come{away}"
    if stream.time is None:
        return "none: rows may lack that of either side" if isinstance(step, p.Join) else "none"
    text = stream.time.column
    if stream.time.shift_us > 0:
        text += f" + {human_us(stream.time.shift_us)}"
    if isinstance(step, p.Source):
        text += f", rows may be {human_us(step.lateness_us)} behind" if step.lateness_us else ", in order"
        if step.max_ahead_us is not None:
            text += f", and {human_us(step.max_ahead_us)} ahead of the clock"
        if step.idle_after_us is not None:
            text += f"; a partition silent for {human_us(step.idle_after_us)} is not waited for"
    return text


def _replacing(key: tuple[str, ...]) -> str:
    return f"replace each other by {', '.join(key)}" if key else "each replaces the one before"


def _kept(plan: p.Plan, step: p.Step) -> str | None:  # noqa: C901, PLR0912 - one line a kind of step
    """What of a step is in a checkpoint."""
    match step:
        case p.Source(replaces=keys) if keys:
            return "which version of the table it has taken"
        case p.Source(declares_time=True):
            return "the epoch that each node's rows were read up to"
        case p.Source():
            return "the position of every partition"
        case p.Aggregate(window=None):
            return "one row a key" if step.keys else "one row"
        case p.Aggregate(window=w.Sliding(size_us=size_us, slide_us=slide_us)) if slide_us < size_us:
            return "partial aggregates of the panes of open windows, which these share"
        case p.Aggregate(window=w.Session()):
            return "partial aggregates of sessions that may go on"
        case p.Aggregate(window=w.Count()):
            return "the rows that wait for time, a count a key, and partial aggregates of open windows"
        case p.Aggregate():
            return "partial aggregates of open windows"
        case p.Ewma():
            each = "one number" if step.half_life_us is None else "three numbers"
            return f"the rows that wait for time, and {each} a key and column"
        case p.Process():
            return _remembered(step)
        case p.Deduplicate():
            return f"the rows that wait for time, and each key for {human_us(step.within_us)}"
        case p.Join():
            met = "" if step.how == "inner" else ", and which keys and times have met"
            return f"rows of both sides, as long as a partner may come{met}"
        case p.LookupLatest():
            return "the newest control row of each key"
        case p.Match():
            return pattern_kept(step)
        case p.Loop() if plan.guarantee == "exactly_once":
            return "rows that are on their way back at a barrier"
        case _:
            return None


def _remembered(step: p.Process) -> str:
    named = [
        state.name if state.ttl_us is None else f"{state.name} (for {human_us(state.ttl_us)})" for state in step.states
    ]
    waiting = "the rows that wait for time, timers" if step.ordered else "timers"
    return f"{waiting}, and for each key: {', '.join(named)}" if named else waiting.replace(", timers", ", and timers")


def _release(plan: p.Plan, sink: p.Sink) -> str:
    if Capability.AT_HUB in capabilities(sink.connector):
        return "when the epoch is sealed"
    if plan.guarantee != "exactly_once":
        return "at once"
    return "when the epoch is sealed" if sink.release == "commit" else "at once, with ids (__id) to deduplicate by"


def _connector(spec: p.ConnectorSpec) -> str:
    """A connector as it would be written, secrets left out."""
    if spec.kind == "inline":
        rows = max((len(column) for column in spec.options.get("columns", {}).values()), default=0)
        return f"{rows} {'row' if rows == 1 else 'rows'} in the plan"
    shown = {
        name: "***" if any(word in name.lower() for word in _SECRETS) else value for name, value in spec.options.items()
    }
    first = [repr(shown.pop(name)) for name in _FIRST_OPTIONS if name in shown]
    return f"{spec.kind}({', '.join([*first, *(f'{name}={value!r}' for name, value in shown.items())])})"


def _function(path: str) -> str:
    if not path.startswith(p.LOCAL_FUNCTION):
        return path
    return f"{path.split(':')[1]} (written in place: runs in this process only)"


def _columns(schema: Schema) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in schema.items())
