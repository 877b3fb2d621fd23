"""Checkpoints as people read them: one line each, or one manifest in full. Pure.

`fordstone checkpoints`: list, show, check and merge what is stored. `import-spark` is in a module of its own.

All but `merge` and `import-spark` only read, and may be used while a pipeline runs: what its retention takes away in the meantime is not
taken for damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from fordstone.cli import format as wording
from fordstone.cli.errors import FAILED, Mistake, Misuse
from fordstone.cli.help import TaughtGroup
from fordstone.cli.import_spark import import_spark
from fordstone.cli.loading import load_pipeline
from fordstone.cli.logs import configure_logging
from fordstone.cli.memory import limit_polars
from fordstone.cli.stores import read_store
from fordstone.cli.view.showing import print_json
from fordstone.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from fordstone.epochs.compaction import Combine, Merged
    from fordstone.epochs.manifest import Manifest, SourceCut
    from fordstone.epochs.store import CheckpointStore
    from fordstone.epochs.survey import VerifyReport
    from fordstone.plan.plan import Plan
    from fordstone.state.base import RunRef


VERIFY_ROUNDS: Final = 5
_F = TypeVar("_F", bound=Callable[..., Any])


def _which_store(command: _F) -> _F:
    """The options by which every command finds its store."""
    command = click.option("--json", "as_json", is_flag=True, help="For machines.")(command)
    command = click.option("--node", metavar="N", default=None, help="Which node, if the directory holds several.")(
        command
    )
    command = click.option(
        "--pipeline", metavar="P", default=None, help="Which pipeline, if the directory holds several."
    )(command)
    return click.option("--state", metavar="DIR", default="state", show_default=True, help="The state directory.")(
        command
    )


@click.group(
    cls=TaughtGroup,
    examples=[
        "fordstone checkpoints ls",
        "fordstone checkpoints show 41 --state /var/lib/cold-chain",
        "fordstone checkpoints verify",
        "fordstone checkpoints merge cold_chain.py",
        "fordstone checkpoints import-spark /srv/center --state /var/lib/cold-chain",
    ],
)
def checkpoints() -> None:
    """List, show, check, merge and import checkpoints."""


checkpoints.add_command(import_spark)


@checkpoints.command(
    "ls", examples=["fordstone checkpoints ls", "fordstone checkpoints ls --state /var/lib/cold-chain --json"]
)
@_which_store
def list_checkpoints(*, state: str, pipeline: str | None, node: str | None, as_json: bool) -> None:
    """List the checkpoints that are kept, oldest first.

    "new" is what a checkpoint added to the one before it.
    """
    store = read_store(state, pipeline, node)

    facts = listing(_manifests(store))
    if as_json:
        print_json({"pipeline": store.pipeline, "node": store.node, "checkpoints": facts})
    elif not facts:
        click.echo(f"pipeline {store.pipeline} on node {store.node} has no checkpoint yet.")
    else:
        click.echo(listing_table(facts))


@checkpoints.command(examples=["fordstone checkpoints show", "fordstone checkpoints show 41 --json | jq .cut.sources"])
@click.argument("epoch", type=click.IntRange(1), required=False)
@_which_store
def show(epoch: int | None, *, state: str, pipeline: str | None, node: str | None, as_json: bool) -> None:
    """Show one checkpoint: positions, watermarks, state, output. Without EPOCH the newest."""
    store = read_store(state, pipeline, node)
    epochs = store.epochs()
    if not epochs:
        raise Mistake(f"pipeline {store.pipeline} on node {store.node} has no checkpoint yet.")
    if epoch is not None and epoch not in epochs:
        raise Misuse(f"there is no checkpoint {epoch}. There are: {', '.join(map(str, epochs))}.")
    manifest = store.manifest(epochs[-1] if epoch is None else epoch)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(manifest))
        return

    click.echo(manifest_text(manifest))


@checkpoints.command(
    examples=["fordstone checkpoints verify", "fordstone checkpoints verify 41 --state /var/lib/cold-chain"]
)
@click.argument("epoch", type=click.IntRange(1), required=False)
@_which_store
def verify(epoch: int | None, *, state: str, pipeline: str | None, node: str | None, as_json: bool) -> None:
    """Read every byte and say what is damaged.

    Of one checkpoint, or of all. Exit code 1 if anything is damaged.
    """

    def opened() -> CheckpointStore:
        return read_store(state, pipeline, node)

    store = opened()
    if epoch is not None and epoch not in store.epochs():
        raise Misuse(f"there is no checkpoint {epoch}. There are: {', '.join(map(str, store.epochs())) or 'none'}.")
    report = _verified(opened, epoch)
    if as_json:
        print_json(_verify_facts(report))
    else:
        click.echo(_verify_text(report, f"{state}/{store.pipeline}/{store.node}"))
    if not report.whole:
        raise click.exceptions.Exit(FAILED)


@checkpoints.command(
    examples=[
        "fordstone checkpoints merge cold_chain.py",
        "fordstone checkpoints merge cold_chain.py --state /var/lib/cold-chain",
    ]
)
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--state", metavar="DIR", default="state", show_default=True, help="The state directory.")
@click.option("--node", metavar="N", default=None, help="Which node, if the directory holds several.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def merge(file: str, *, state: str, node: str | None, as_json: bool) -> None:
    """Fold the runs of the newest checkpoint into few.

    While nothing runs. The pipeline's file says how its state is combined. The checkpoint keeps its epoch and its meaning; older ones are
    not touched. A running pipeline merges by itself: this is for a checkpoint that is to be copied or kept.
    """
    configure_logging(0)
    limit_polars(1)
    plan = load_pipeline(file).plan()
    found = read_store(state, plan.pipeline, node)
    merged = _merge(plan, state, found.node, keep=max(1, len(found.epochs())))
    if as_json:
        print_json(
            {"pipeline": plan.pipeline, "node": found.node, "merged": None if merged is None else _slots(merged)}
        )
    elif merged is None:
        click.echo(f"nothing to merge: every state of checkpoint {found.epochs()[-1]} is one run already.")
    else:
        click.echo(
            f"checkpoint {merged.epoch}: {wording.count(merged.runs_before, 'run')} of state became {merged.runs_after}, "
            f"{wording.size(merged.size_bytes_before)} became {wording.size(merged.size_bytes_after)}."
        )


def _merge(plan: Plan, state: str, node: str, *, keep: int) -> Merged | None:
    from contextlib import closing

    from fordstone.epochs.compaction import merge_checkpoint
    from fordstone.epochs.store import CheckpointStore
    from fordstone.operators.base import OperatorContext
    from fordstone.operators.registry import make_operator
    from fordstone.planner.check import stream_types
    from fordstone.planner.digest import step_digests
    from fordstone.protocol.recovery import match_plan
    from fordstone.storage.disk import OsDisk

    types = stream_types(plan)
    with closing(OsDisk(state)) as disk:
        disk.lock()
        store = CheckpointStore(disk, pipeline=plan.pipeline, node=node, keep=keep)
        epochs = store.epochs()
        if epochs:
            match = match_plan(store.manifest(epochs[-1]).step_digests, step_digests(plan, types))
            if not match.whole:
                raise Mistake(
                    f"checkpoint {epochs[-1]} of pipeline {plan.pipeline} was made by another plan, so this file does not say how to "
                    f"combine its state.\n{match.explain().partition('--allow')[0].rstrip()}\nGive the file that the pipeline was run with."
                )
        setting = OperatorContext(plan=plan, types=types)

        def combine_of(step: str, name: str) -> Combine | None:
            states = make_operator(plan.step(step), setting).states()
            return states[name].combine if name in states else None

        merged = merge_checkpoint(store, combine_of)
        store.collect()
        return merged


def _manifests(store: CheckpointStore) -> dict[int, Manifest | str]:
    found: dict[int, Manifest | str] = {}
    for epoch in store.epochs():
        try:
            found[epoch] = store.manifest(epoch)
        except DamagedError as error:
            # A running pipeline may have let it go since it was listed.
            if not isinstance(error.__cause__, FileNotFoundError):
                found[epoch] = str(error)
        except CheckpointError as error:
            found[epoch] = str(error)
    return found


def _verified(opened: Callable[[], CheckpointStore], epoch: int | None) -> VerifyReport:
    """Verify until what is found wrong is still in place: a checkpoint that was let go meanwhile is not damaged."""
    report = opened().verify(epoch)
    for _ in range(VERIFY_ROUNDS):
        wrong = {fact.epoch for fact in report.checkpoints if fact.problem is not None}
        if wrong <= set(opened().epochs()):
            return report
        report = opened().verify(epoch)
    return report


def _verify_facts(report: VerifyReport) -> dict[str, Any]:
    return {
        "whole": report.whole,
        "checkpoints": [{"epoch": fact.epoch, "problem": fact.problem} for fact in report.checkpoints],
        "damaged_runs": [{"run": digest, "problem": problem} for digest, problem in report.damaged_runs],
        "runs_checked": report.runs_checked,
        "checked_bytes": report.checked_bytes,
        "damaged_cut_lines": report.damaged_cut_lines,
        "aside": list(report.aside),
    }


def _verify_text(report: VerifyReport, place: str) -> str:
    lines = [fact.problem or f"checkpoint {fact.epoch} is whole." for fact in report.checkpoints]
    lines += [f"damaged: {place}/runs/{digest}" for digest, _ in report.damaged_runs]
    if report.damaged_cut_lines:
        lines.append(f"damaged: {place}/cuts.jsonl, {wording.count(report.damaged_cut_lines, 'line')}")
    if report.aside:
        lines.append(f"set aside earlier: {wording.count(len(report.aside), 'file')} in {place}/aside")
    read = f"{wording.count(report.runs_checked, 'run')}, {wording.size(report.checked_bytes)} read"
    verdict = (
        "Everything is whole"
        if report.whole
        else "Damage was found; running the pipeline uses the newest whole checkpoint"
    )
    return "\n".join([*lines, f"{verdict} ({read})."])


def _slots(value: object) -> dict[str, Any]:
    from dataclasses import asdict, is_dataclass

    if not is_dataclass(value) or isinstance(value, type):
        raise AssertionError(f"{value!r} is not a dataclass")
    return asdict(value)


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
