"""`fordstone checkpoints`: list, show, verify, merge and import checkpoints.

All commands but `merge` and `import-spark` only read, and may be used while a pipeline runs: a checkpoint that its retention removes in
the meantime is not reported as damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fordstone.cli import format as fmt
from fordstone.cli.errors import FAILED, UsageError, UserError
from fordstone.cli.format import Table
from fordstone.cli.loading import limit_polars, load_pipeline
from fordstone.cli.logs import configure_logging
from fordstone.cli.options import HelpGroup, json_option, options_of
from fordstone.cli.run import STARTING_SPARK
from fordstone.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from fordstone.epochs.manifest import Cut, Manifest, SourceCut
    from fordstone.epochs.store import CheckpointStore, Combine, Merged, VerifyReport
    from fordstone.plan.plan import Plan
    from fordstone.spark.hosted.state_transfer import Imported
    from fordstone.state.base import RunRef


VERIFY_ROUNDS: Final = 5
_TIME_EDGE_US: Final = 2**62
"""Times beyond this, in either direction, mean the beginning and the end of time."""
PARTITIONS_SHOWN: Final = 20
SPARK_DIRECTORY: Final = "_spark"
"""The directory of a pipeline's Spark query, beside those of its nodes."""


_state_option = click.option("--state", metavar="DIR", default="state", help="The state directory.")
_node_option = click.option("--node", metavar="N", default=None, help="The node, if the directory has several.")
_store_options = options_of(
    _state_option,
    click.option("--pipeline", metavar="P", default=None, help="The pipeline, if the directory has several."),
    _node_option,
    json_option,
)


@click.group(
    cls=HelpGroup,
    examples=[
        "fordstone checkpoints ls",
        "fordstone checkpoints show 41 --state /var/lib/cold-chain",
        "fordstone checkpoints verify",
        "fordstone checkpoints merge cold_chain.py",
        "fordstone checkpoints import-spark /srv/center --state /var/lib/cold-chain",
    ],
)
def checkpoints() -> None:
    """List, show, verify, merge and import checkpoints."""


@checkpoints.command(
    "ls", examples=["fordstone checkpoints ls", "fordstone checkpoints ls --state /var/lib/cold-chain --json"]
)
@_store_options
def list_checkpoints(*, state: str, pipeline: str | None, node: str | None, as_json: bool) -> None:
    """List the retained checkpoints, oldest first.

    The column "new" is the size that a checkpoint added to the one before it.
    """
    store = read_store(state, pipeline, node)

    facts = listing(_manifests(store))
    if as_json:
        fmt.print_json({"pipeline": store.pipeline, "node": store.node, "checkpoints": facts})
    elif not facts:
        click.echo(f"pipeline {store.pipeline} on node {store.node} has no checkpoint yet.")
    else:
        click.echo(listing_table(facts))


@checkpoints.command(examples=["fordstone checkpoints show", "fordstone checkpoints show 41 --json | jq .cut.sources"])
@click.argument("epoch", type=click.IntRange(1), required=False)
@_store_options
def show(epoch: int | None, *, state: str, pipeline: str | None, node: str | None, as_json: bool) -> None:
    """Show one checkpoint: positions, watermarks, state, output.

    Without EPOCH, the newest.
    """
    store = read_store(state, pipeline, node)
    epochs = store.epochs()
    if not epochs:
        raise UserError(f"pipeline {store.pipeline} on node {store.node} has no checkpoint yet.")
    if epoch is not None and epoch not in epochs:
        raise UsageError(f"there is no checkpoint {epoch}. There are: {', '.join(map(str, epochs))}.")
    manifest = store.manifest(epochs[-1] if epoch is None else epoch)
    if as_json:
        import msgspec

        fmt.print_json(msgspec.to_builtins(manifest))
        return

    click.echo(manifest_text(manifest))


@checkpoints.command(
    examples=["fordstone checkpoints verify", "fordstone checkpoints verify 41 --state /var/lib/cold-chain"]
)
@click.argument("epoch", type=click.IntRange(1), required=False)
@_store_options
def verify(epoch: int | None, *, state: str, pipeline: str | None, node: str | None, as_json: bool) -> None:
    """Read every byte and list what is damaged.

    Verifies one checkpoint, or all of them. The exit code is 1 if anything is damaged.
    """

    def opened() -> CheckpointStore:
        return read_store(state, pipeline, node)

    store = opened()
    if epoch is not None and epoch not in store.epochs():
        raise UsageError(f"there is no checkpoint {epoch}. There are: {', '.join(map(str, store.epochs())) or 'none'}.")
    report = _verified(opened, epoch)
    if as_json:
        import msgspec

        damaged = [{"run": digest, "problem": problem} for digest, problem in report.damaged_runs]
        fmt.print_json({"whole": report.whole, **msgspec.to_builtins(report), "damaged_runs": damaged})
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
@_state_option
@_node_option
@json_option
def merge(file: str, *, state: str, node: str | None, as_json: bool) -> None:
    """Merge the runs of the newest checkpoint into few.

    The pipeline must not be running. Its file defines how its state is combined. The checkpoint keeps its epoch and its content; older
    ones are not changed. A running pipeline merges by itself: this command is for a checkpoint to be copied or archived.
    """
    configure_logging(0)
    limit_polars(1)
    plan = load_pipeline(file).plan()
    found = read_store(state, plan.pipeline, node)
    merged = _merge(plan, state, found.node, keep=max(1, len(found.epochs())))
    if as_json:
        fmt.print_json({"pipeline": plan.pipeline, "node": found.node, "merged": merged})
    elif merged is None:
        click.echo(f"nothing to merge: each state of checkpoint {found.epochs()[-1]} is a single run.")
    else:
        click.echo(
            f"checkpoint {merged.epoch}: {fmt.count(merged.runs_before, 'run')} of state merged into {merged.runs_after}, "
            f"{fmt.size(merged.size_bytes_before)} into {fmt.size(merged.size_bytes_after)}."
        )


def _merge(plan: Plan, state: str, node: str, *, keep: int) -> Merged | None:
    from contextlib import closing

    from fordstone.epochs.store import CheckpointStore, merge_checkpoint
    from fordstone.operators.base import OperatorContext
    from fordstone.operators.registry import make_operator
    from fordstone.planner.check import step_digests, stream_types
    from fordstone.protocol.recovery import match_plan
    from fordstone.storage.disk import OsDisk

    types = stream_types(plan)
    with closing(OsDisk(state, private=True)) as disk:
        disk.lock()
        store = CheckpointStore(disk, pipeline=plan.pipeline, node=node, keep=keep)
        epochs = store.epochs()
        if epochs:
            match = match_plan(store.manifest(epochs[-1]).step_digests, step_digests(plan, types))
            if not match.whole:
                raise UserError(
                    f"checkpoint {epochs[-1]} of pipeline {plan.pipeline} was written by another plan, so this file does not define how to "
                    f"combine its state.\n{match.explain().partition('--allow')[0].rstrip()}\nGive the file that the pipeline ran with."
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
            # A running pipeline may have removed it since it was listed.
            if not isinstance(error.__cause__, FileNotFoundError):
                found[epoch] = str(error)
        except CheckpointError as error:
            found[epoch] = str(error)
    return found


def _verified(opened: Callable[[], CheckpointStore], epoch: int | None) -> VerifyReport:
    """Verify until every damaged checkpoint still exists: one that was removed in the meantime is not damaged."""
    report = opened().verify(epoch)
    for _ in range(VERIFY_ROUNDS):
        wrong = {fact.epoch for fact in report.checkpoints if fact.problem is not None}
        if wrong <= set(opened().epochs()):
            return report
        report = opened().verify(epoch)
    return report


def _verify_text(report: VerifyReport, place: str) -> str:
    lines = [fact.problem or f"checkpoint {fact.epoch} is whole." for fact in report.checkpoints]
    lines += [f"damaged: {place}/runs/{digest}" for digest, _ in report.damaged_runs]
    if report.damaged_log_lines:
        lines.append(f"damaged: {place}/epochs.jsonl, {fmt.count(report.damaged_log_lines, 'line')}")
    if report.aside:
        lines.append(f"set aside earlier: {fmt.count(len(report.aside), 'file')} in {place}/aside")
    read = f"{fmt.count(report.runs_checked, 'run')}, {fmt.size(report.checked_bytes)} read"
    verdict = (
        "Everything is whole"
        if report.whole
        else "Damage was found; the pipeline resumes from the newest whole checkpoint"
    )
    return "\n".join([*lines, f"{verdict} ({read})."])


def listing(manifests: Mapping[int, Manifest | str]) -> list[dict[str, Any]]:
    """Facts about each checkpoint, for the table and for JSON. A text in place of a manifest is the error of reading it."""
    return [_facts(epoch, manifest, manifests.get(epoch - 1)) for epoch, manifest in sorted(manifests.items())]


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
        new = "" if fact["new_bytes"] is None else fmt.size(fact["new_bytes"])
        positions = "; ".join(_positions(name, parts) for name, parts in fact["positions"].items())
        positions += " (input ended)" if fact["ended"] else ""
        created, size = fmt.instant(fact["created_us"]), fmt.size(fact["size_bytes"])
        rows.append([str(fact["epoch"]), created, size, str(fact["runs"]), new, positions])
    head = ["epoch", "time (UTC)", "size", "runs", "new", "positions"]
    return Table(head=head, rows=rows, right=(0, 2, 3, 4)).text()


def _positions(source: str, parts: Mapping[str, int]) -> str:
    if len(parts) == 1:
        partition, position = next(iter(parts.items()))
        return f"{source}: {partition} at {fmt.count(position)}"
    return f"{source}: {fmt.count(len(parts), 'partition')} at {fmt.count(sum(parts.values()))} in total"


def manifest_text(manifest: Manifest) -> str:
    """The output of `checkpoints show`."""
    runs = {run.digest: run for run in manifest.runs()}
    lines = [
        f"checkpoint {manifest.epoch} of pipeline {manifest.pipeline} on node {manifest.node}",
        f"  created      {fmt.instant(manifest.created_us)} UTC",
        f"  attempt      {manifest.attempt}",
        f"  mode         {manifest.mode}, parallelism {manifest.parallelism}",
        f"  size         {fmt.size(_total(runs.values()))} in {fmt.count(len(runs), 'run')}",
        f"  input        {'ended' if manifest.cut.ended else 'not ended'}",
        f"  plan         {manifest.plan_digest[:12]}…",
    ]
    for name, source in manifest.cut.sources.items():
        lines += ["", f"source {name}, watermark {_time(source.watermark_us)}", _partitions(source)]
    states = [
        [
            state.step,
            state.state,
            str(state.subtask),
            str(len(state.runs)),
            fmt.count(sum(run.rows for run in state.runs)),
            fmt.size(_total(state.runs)),
        ]
        for state in manifest.states
    ]
    segments = [
        [segment.sink, fmt.count(sum(run.rows for run in segment.runs)), fmt.size(_total(segment.runs))]
        for segment in manifest.segments
    ]
    channels = [
        [
            log.channel,
            str(len(log.items)),
            fmt.count(sum(item.run.rows for item in log.items if item.run is not None)),
        ]
        for log in manifest.channels
    ]
    tasks = [
        [
            task.task,
            _time(min(task.watermarks_us.values())) if task.watermarks_us else "",
            "finished" if task.finished else "",
        ]
        for task in manifest.tasks
    ]
    for title, table in (
        ("state", Table(head=["step", "state", "subtask", "runs", "rows", "size"], rows=states, right=(2, 3, 4, 5))),
        ("output of this epoch", Table(head=["sink", "rows", "size"], rows=segments, right=(1, 2))),
        ("in flight", Table(head=["channel", "items", "rows"], rows=channels, right=(1, 2))),
        ("tasks", Table(head=["task", "watermark", ""], rows=tasks)),
    ):
        if table.rows:
            lines += ["", title, table.text("  ")]
    return "\n".join(lines)


def _partitions(source: SourceCut) -> str:
    shown = list(source.partitions.items())[:PARTITIONS_SHOWN]
    rows = [
        [name, fmt.count(cut.position), _time(cut.max_time_us), "done" if cut.done else "idle" if cut.idle else ""]
        for name, cut in shown
    ]
    text = Table(head=["partition", "position", "newest row", ""], rows=rows, right=(1,)).text("  ")
    left = len(source.partitions) - len(shown)
    return f"{text}\n  ... and {fmt.count(left)} more (--json shows all)" if left else text


def _time(us: int) -> str:
    if us <= -_TIME_EDGE_US:
        return "none yet"
    return "at the end" if us >= _TIME_EDGE_US else fmt.instant(us)


def _total(runs: Iterable[RunRef]) -> int:
    return sum(run.size_bytes for run in runs)


@checkpoints.command(
    "import-spark",
    examples=[
        "fordstone checkpoints import-spark /srv/center --state /var/lib/cold-chain",
        "fordstone checkpoints import-spark s3://center/state/cold-chain/_spark --state state --node gateway-7",
    ],
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--state", metavar="DIR", default="state", help="The state directory to import into.")
@click.option("--node", metavar="N", default="node", help="The edge machine that will resume.")
@json_option
def import_spark(checkpoint: str, *, state: str, node: str, as_json: bool) -> None:
    """Make an edge checkpoint from the state of a Spark query.

    CHECKPOINT is the --state that the pipeline ran with on Spark, or <state>/<pipeline>/_spark below it. The query must be stopped; it
    is not changed. `fordstone run FILE --state DIR` then resumes where Spark stopped.
    """
    configure_logging(0)
    limit_polars(1)
    found = _location(checkpoint)
    imported = _imported(found, state, node, quiet=as_json)
    if as_json:
        from dataclasses import asdict

        fmt.print_json({"node": node, **asdict(imported)})
        return
    click.echo(
        f"checkpoint {imported.epoch} of pipeline {imported.pipeline} on node {node} written: {fmt.count(imported.rows, 'row')} of state in "
        f"{fmt.count(imported.runs, 'run')}, {fmt.size(imported.size_bytes)}. "
        f"`fordstone run FILE --state {state}` resumes from it."
    )


def _location(given: str) -> str:
    if "://" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_dir():
        raise UsageError(f"there is no directory {given} (working directory {Path.cwd()}).")
    queries = spark_queries(path)
    if not queries:
        raise UsageError(
            f"{given} has no state of a Spark query. Give the --state that the pipeline ran with on Spark, or "
            f"<state>/<pipeline>/{SPARK_DIRECTORY} below it."
        )
    if len(queries) > 1:
        listed = "\n".join(f"    {one}" for one in queries)
        raise UsageError(f"{given} has the state of several queries. Give one of:\n{listed}")
    return str(queries[0].absolute())


def _imported(checkpoint: str, state: str, node: str, *, quiet: bool) -> Imported:
    from fordstone.spark.hosted.state_transfer import import_spark as export
    from fordstone.spark.session.application import application

    if not quiet:
        click.echo(STARTING_SPARK, err=True)
    with application(name="fordstone import-spark") as spark:
        return export(spark, checkpoint, state, node=node)


def read_store(state: str, pipeline: str | None, node: str | None) -> CheckpointStore:
    """Open the store of the given pipeline and node, or the only one there is, for reading. A pipeline may be using it."""
    pipeline, node = _only(Path(state), pipeline, node)
    from fordstone.epochs.store import CheckpointStore
    from fordstone.storage.disk import OsDisk

    return CheckpointStore(OsDisk(state), pipeline=pipeline, node=node, read_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCut:
    """The positions and times of the sources at a newest checkpoint."""

    where: str
    """The node, or Spark."""
    cut: Cut
    created_us: int | None = None


def newest_cuts(root: Path, pipeline: str) -> list[NewestCut]:
    """The newest checkpoint of each node in a state directory, and of the Spark query. A pipeline may be using it."""
    from fordstone.runtime.fresh import was_set_aside

    found = []
    nodes = sorted(path.parent.name for path in root.glob(f"{pipeline}/*/manifests"))
    for node in nodes:
        if node == SPARK_DIRECTORY or was_set_aside(node):
            continue
        manifests = [
            one for one in _manifests(read_store(str(root), pipeline, node)).values() if not isinstance(one, str)
        ]
        found += [NewestCut(where=f"node {node}", cut=one.cut, created_us=one.created_us) for one in manifests[-1:]]
    for query in spark_queries(root / pipeline):
        from fordstone.spark.hosted.checkpoint import QueryFiles

        files = QueryFiles(str(query))
        found += [NewestCut(where="Spark", cut=files.cut(epoch)) for epoch in files.cut_epochs()[-1:]]
    return found


def spark_queries(root: Path) -> list[Path]:
    """The checkpoint locations of Spark queries in a directory: it may be one, a pipeline's directory or a state directory."""
    found = [root, root / SPARK_DIRECTORY, *sorted(root.glob(f"*/{SPARK_DIRECTORY}"))]
    return [path for path in found if (path / "fordstone" / "query.json").is_file()]


def _only(root: Path, pipeline: str | None, node: str | None) -> tuple[str, str]:
    from fordstone.runtime.fresh import was_set_aside

    if not root.is_dir():
        raise UsageError(f"there is no state directory {root} (working directory {Path.cwd()}). Give it with --state.")
    there = sorted(
        (path.parent.parent.name, path.parent.name)
        for path in root.glob("*/*/manifests")
        if path.parent.name != SPARK_DIRECTORY
    )
    if not there:
        queries = spark_queries(root)
        if queries:
            listed = "\n".join(f"    fordstone checkpoints import-spark {path} --state {root}" for path in queries)
            raise UsageError(
                f"{root} has checkpoints of Spark, but none of the edge. To make one from Spark's state:\n{listed}"
            )
        raise UsageError(f"{root} has no checkpoints: no pipeline has run with --state {root} yet.")
    # What --fresh has set aside is looked at only by name.
    found = [
        (one, other)
        for one, other in there
        if pipeline in {None, one} and (node == other or (node is None and not was_set_aside(other)))
    ]
    if len(found) == 1:
        return found[0]
    listed = "\n".join(f"    --pipeline {one} --node {other}" for one, other in found or there)
    if not found:
        raise UsageError(f"{root} does not have this pipeline and node. It has:\n{listed}")
    raise UsageError(f"{root} has the checkpoints of several pipelines or nodes. Give one of:\n{listed}")
