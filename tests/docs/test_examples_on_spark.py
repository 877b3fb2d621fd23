"""Every pipeline of README, docs and examples runs on both engines with the same result, or says why it cannot."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
import pytest
from tests.cli.place import commands
from tests.docs.blocks import REPOSITORY, SERVED, Page, blocks_of
from tests.docs.test_docs import PAGES, named, needs_spark
from tests.spark.oracle import same

from fordstone import Pipeline
from fordstone.cli.loading import load_pipeline
from fordstone.connectors import files, rows
from fordstone.edge.run import run as run_on_edge
from fordstone.errors import FordstoneError, PipelineError
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.spark.config import SparkConfig
from fordstone.spark.run import run_plan
from fordstone.spark.session.application import ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RUNS = re.compile(r"\.run\(|^# [\w./-]+\.py$", re.MULTILINE)
_SAVED = re.compile(r"# ([\w./-]+\.py)\n")
ENDLESS_ROWS = 2000
OURS = ("files", "generator", "memory")
EXAMPLES = sorted(path for path in (REPOSITORY / "examples").glob("*.py") if "Pipeline(" in path.read_text())
PIPELINE_PAGES = [
    page
    for page in PAGES
    # Pages with Spark of their own are run by test_pages_on_spark.
    if not needs_spark(page)
    and named(page) not in SERVED
    and any(block.kind == "python" and _RUNS.search(block.body) for block in blocks_of(page.read_text()))
]


def in_base(page: Path) -> bool:
    """Whether the page is compared in every run: the first page that people read. Operators are compared by tests/cases."""
    return page.name == "tutorial.md"


def _into(plan: p.Plan, folder: Path) -> p.Plan:
    """The plan with files for sinks, so that two runs can be compared, and an end for generators that have none."""
    return msgspec.structs.replace(plan, steps=tuple(_step_into(step, folder) for step in plan.steps))


def _step_into(step: p.Step, folder: Path) -> p.Step:
    if isinstance(step, p.Sink):
        connector = files(str(folder / step.name), format="parquet")
        return msgspec.structs.replace(step, connector=connector, release="commit")
    if isinstance(step, p.Source) and step.connector.kind == "generator" and "rows" not in step.connector.options:
        options = step.connector.options | {"rows": ENDLESS_ROWS}
        return msgspec.structs.replace(step, connector=msgspec.structs.replace(step.connector, options=options))
    return step


def _results(plan: p.Plan, folder: Path) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    types = stream_types(plan)
    for step in plan.steps:
        if isinstance(step, p.Sink):
            found = rows(folder / step.name)
            key = types[step.input].upsert_key
            if key is not None and found.height:
                # Of running results the last one counts: how often they were emitted depends on the epochs.
                last = found.unique(subset=list(key), keep="last") if key else found.tail(1)
                found = last.filter(pl.col("__op") != "delete")
            yield step.name, found.select(list(types[step.input].schema)).rows()


def check_on_both(plan: p.Plan, functions: Mapping[str, Any], spark: SparkSession, folder: Path) -> None:
    """Run a plan on both engines and compare what its sinks get."""
    if plan.tiered:
        return  # it has a part for each engine: tests/cli/test_tiers_run.py and the page about it run those
    center = _into(plan, folder / "spark")
    config = SparkConfig(state=folder / "spark-state", bounded=True)
    if any(isinstance(step, p.Source) and step.connector.kind not in OURS for step in plan.steps):
        return  # a connector of the page's own: Spark's workers would need it installed
    if any(isinstance(step, p.Loop) for step in plan.steps):
        with pytest.raises(PipelineError, match="cannot run on Spark"):
            run_plan(center, functions, config, spark=spark)
        return
    edge = _into(plan, folder / "edge")
    try:
        run_on_edge(edge, functions, state=folder / "edge-state", bounded=True)
    except FordstoneError as error:
        # An example of a pipeline that stops: it stops there too, and says the same.
        with pytest.raises(FordstoneError, match=re.escape(str(error).splitlines()[0])):
            run_plan(center, functions, config, spark=spark)
        return
    report = run_plan(center, functions, config, spark=spark)
    assert report.outcome == "ended"
    wanted = dict(_results(edge, folder / "edge"))
    assert any(wanted.values()), "nothing came out, so nothing is shown"
    for name, found in _results(center, folder / "spark"):
        assert same(found, wanted[name]) is None, f"{plan.pipeline}: sink {name}: {same(found, wanted[name])}"


def check_saved(page: str, directory: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the pipelines that a page has saved for the command line on both engines; return their names."""
    saved = [_SAVED.match(block.body) for block in blocks_of(page) if "Pipeline(" in block.body]
    names = list(dict.fromkeys(found[1] for found in saved if found is not None))
    for name in names:
        _check_file(directory / name, spark, directory.parent / f"both-{name}", directory, monkeypatch)
    return names


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if in_base(page) else pytest.mark.full) for page in PIPELINE_PAGES],
    ids=[named(page) for page in PIPELINE_PAGES],
)
def test_every_pipeline_of_the_page_gives_the_same_on_spark(
    page: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "page"
    checked: list[str] = []
    directory.mkdir()
    really_run = Pipeline.run

    def run(pipeline: Pipeline, *args: Any, **options: Any) -> Any:
        if options.get("bounded"):
            check_on_both(pipeline.plan(), pipeline.functions, spark, tmp_path / f"run{len(checked)}")
            checked.append(pipeline.name)
        return really_run(pipeline, *args, **options)

    monkeypatch.setattr(Pipeline, "run", run)
    with Page(name=named(page), directory=directory) as runner:
        runner.run_all(page.read_text())
    # Their input is there by now.
    checked += check_saved(page.read_text(), directory, spark, monkeypatch)
    assert checked


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_gives_the_same_on_spark(
    example: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    with monkeypatch.context() as patch, commands(directory) as run:
        patch.chdir(directory)
        for kind in ("words", "readings"):
            assert run("example", kind).exit_code == 0
    _check_file(example, spark, tmp_path, directory, monkeypatch)


def _check_file(
    file: Path, spark: SparkSession, folder: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "path", [*sys.path])
        before = set(sys.modules)
        pipeline = load_pipeline(str(file))
        if pipeline.functions:
            # As the command line does.
            folder.mkdir(parents=True, exist_ok=True)
            ship(spark, file, folder)
        try:
            check_on_both(pipeline.plan(), pipeline.functions, spark, folder)
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(file.parent)):
                    del sys.modules[name]
