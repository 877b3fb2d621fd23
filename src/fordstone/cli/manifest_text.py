"""Checkpoints as people read them: one line each, or one manifest in full. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from fordstone.cli import wording

if TYPE_CHECKING:
    from fordstone.model.manifest import Manifest, RunRef, SourceCut

PARTITIONS_SHOWN: Final = 20
_TIME_EDGE_US: Final = 2**62
"""Times beyond this, either way, are the beginning and the end of time."""


def listing(
    manifests: Mapping[int, Manifest | str], *, before: Mapping[int, Manifest | str] | None = None
) -> list[dict[str, Any]]:
    """Facts about each checkpoint, for the table and for JSON. A text in place of a manifest says why it cannot be read."""
    known = before if before is not None else manifests
    return [_facts(epoch, manifest, known.get(epoch - 1)) for epoch, manifest in sorted(manifests.items())]


def _facts(epoch: int, manifest: Manifest | str, previous: Manifest | str | None) -> dict[str, Any]:
    if isinstance(manifest, str):
        return {"epoch": epoch, "problem": manifest}
    runs = {run.digest: run for run in manifest.runs()}
    new: int | None = None
    if epoch == 1:
        new = _total(runs.values())
    elif previous is not None and not isinstance(previous, str):
        old = {run.digest for run in previous.runs()}
        new = _total(run for digest, run in runs.items() if digest not in old)
    return {
        "epoch": epoch,
        "created_us": manifest.created_us,
        "size_bytes": _total(runs.values()),
        "runs": len(runs),
        "new_bytes": new,
        "ended": manifest.cut.ended,
        "positions": {
            name: {part: cut.position for part, cut in source.partitions.items()}
            for name, source in manifest.cut.sources.items()
        },
    }


def listing_table(facts: list[dict[str, Any]]) -> str:
    """The table of `checkpoints ls`."""
    rows = []
    for fact in facts:
        if "problem" in fact:
            rows.append([str(fact["epoch"]), "damaged", "", "", "", fact["problem"]])
            continue
        new = "" if fact["new_bytes"] is None else wording.size(fact["new_bytes"])
        positions = "; ".join(_positions(name, parts) for name, parts in fact["positions"].items())
        if fact["ended"]:
            positions += " (input ended)"
        rows.append(
            [
                str(fact["epoch"]),
                wording.instant(fact["created_us"]),
                wording.size(fact["size_bytes"]),
                str(fact["runs"]),
                new,
                positions,
            ]
        )
    return wording.table(["epoch", "time (UTC)", "size", "runs", "new", "positions"], rows, right=(0, 2, 3, 4))


def _positions(source: str, parts: Mapping[str, int]) -> str:
    if len(parts) == 1:
        partition, position = next(iter(parts.items()))
        return f"{source}: {partition} at {wording.count(position)}"
    return f"{source}: {wording.count(len(parts), 'partition')} at {wording.count(sum(parts.values()))} in all"


def manifest_text(manifest: Manifest) -> str:
    """The output of `checkpoints show`."""
    runs = {run.digest: run for run in manifest.runs()}
    lines = [
        f"checkpoint {manifest.epoch} of pipeline {manifest.pipeline} on node {manifest.node}",
        f"  created      {wording.instant(manifest.created_us)} UTC",
        f"  attempt      {manifest.attempt}",
        f"  mode         {manifest.mode}, parallelism {manifest.parallelism}",
        f"  size         {wording.size(_total(runs.values()))} in {wording.count(len(runs), 'run')}",
        f"  input        {'has ended' if manifest.cut.ended else 'goes on'}",
        f"  plan         {manifest.plan_digest[:12]}…",
    ]
    for name, source in manifest.cut.sources.items():
        lines += ["", f"source {name}, watermark {_time(source.watermark_us)}", _indented(_partitions(source))]
    states = [
        [
            state.step,
            state.state,
            str(state.subtask),
            str(len(state.runs)),
            wording.count(sum(run.rows for run in state.runs)),
            wording.size(_total(state.runs)),
        ]
        for state in manifest.states
    ]
    if states:
        lines += [
            "",
            "state",
            _indented(wording.table(["step", "state", "subtask", "runs", "rows", "size"], states, right=(2, 3, 4, 5))),
        ]
    segments = [
        [segment.sink, wording.count(sum(run.rows for run in segment.runs)), wording.size(_total(segment.runs))]
        for segment in manifest.segments
    ]
    if segments:
        lines += [
            "",
            "output of this epoch",
            _indented(wording.table(["sink", "rows", "size"], segments, right=(1, 2))),
        ]
    channels = [
        [
            log.channel,
            str(len(log.items)),
            wording.count(sum(item.run.rows for item in log.items if item.run is not None)),
        ]
        for log in manifest.channels
    ]
    if channels:
        lines += ["", "in flight", _indented(wording.table(["channel", "items", "rows"], channels, right=(1, 2)))]
    tasks = [
        [
            task.task,
            _time(min(task.watermarks_us.values())) if task.watermarks_us else "",
            "finished" if task.finished else "",
        ]
        for task in manifest.tasks
    ]
    if tasks:
        lines += ["", "tasks", _indented(wording.table(["task", "watermark", ""], tasks))]
    return "\n".join(lines)


def _partitions(source: SourceCut) -> str:
    shown = list(source.partitions.items())[:PARTITIONS_SHOWN]
    rows = [
        [name, wording.count(cut.position), _time(cut.max_time_us), "done" if cut.done else "idle" if cut.idle else ""]
        for name, cut in shown
    ]
    text = wording.table(["partition", "position", "newest row", ""], rows, right=(1,))
    left = len(source.partitions) - len(shown)
    return f"{text}\n... and {wording.count(left)} more (--json shows all)" if left else text


def _time(us: int) -> str:
    if us <= -_TIME_EDGE_US:
        return "none yet"
    return "at the end" if us >= _TIME_EDGE_US else wording.instant(us)


def _total(runs: Iterable[RunRef]) -> int:
    return sum(run.size_bytes for run in runs)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
