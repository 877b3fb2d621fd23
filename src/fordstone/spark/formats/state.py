"""Format `fordstone-state`: the newest state that nodes have checkpointed at a hub, as a table of anybody's PySpark job.

The newest checkpoint of each node is read; nodes are not at the same epoch. Rows are those that are stored, partial aggregates
included; of a table, which is stored as changes, the newest row of each key. One state of one step is read at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from fordstone.epochs.manifest import Manifest, StateRuns
from fordstone.epochs.untrusted import DecodeBudget, decode_untrusted, decode_untrusted_manifest
from fordstone.errors import ConfigError, PlanMismatchError, SchemaError, SourceError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient, client_of, retry
from fordstone.operators.base import OperatorContext
from fordstone.operators.registry import make_operator
from fordstone.plan.ids import checked_name
from fordstone.plan.plan import Plan, read_plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.split import split
from fordstone.spark.formats.options import Options, address_of, columns, flag, named
from fordstone.spark.formats.rows import (
    RunRows,
    arrow_columns,
    check_metadata,
    decode_rows,
    record_batches,
    spark_columns,
    stored_columns,
)
from fordstone.state.table import DELETED

STATE_FORMAT: Final = "fordstone-state"
METADATA: Final = StructType(
    [
        StructField("_node", StringType()),
        StructField("_epoch", LongType()),
        StructField("_step", StringType()),
        StructField("_state", StringType()),
        StructField("_subtask", IntegerType()),
    ]
)
_SHOWN_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSetting:
    """The options."""

    address: HubAddress
    pipeline: str
    node: str | None
    step: str | None
    state: str | None
    key: tuple[str, ...]
    plan: str | None
    metadata: bool

    @classmethod
    def of(cls, options: Options) -> StateSetting:
        node = options.get("node")
        return cls(
            address=address_of(options),
            pipeline=named(options, "pipeline", example="cold-chain"),
            node=None if node is None else checked_name(node, "node"),
            step=options.get("step"),
            state=options.get("state"),
            key=columns(options, "key"),
            plan=options.get("plan"),
            metadata=flag(options, "metadata", default=True),
        )


class StateShare(InputPartition):
    """What one task reads: the state of one subtask of one node."""

    def __init__(self, node: str, epoch: int, runs: StateRuns, *, tabular: bool) -> None:
        super().__init__(None)
        self.node = node
        self.epoch = epoch
        self.runs = runs
        self.tabular = tabular


class StateSource(DataSource):
    """`format("fordstone-state")`."""

    @classmethod
    def name(cls) -> str:
        return STATE_FORMAT

    def schema(self) -> StructType:
        """The metadata columns, then those of the state as they are stored."""
        setting = StateSetting.of(self.options)
        client = client_of(setting.address)
        found = states(setting, manifests(setting, client))
        run = next((run for _, runs in found for run in runs.runs), None)
        if run is None:
            raise SchemaError(
                f"state {found[0][1].state} of step {found[0][1].step} has no rows at any node yet, so its columns are not known. "
                "Read it later, or give the columns: .schema(...)."
            )
        stored = stored_columns(client.read_blob(run), run)
        found_columns = spark_columns(pa.schema([column for column in stored if column.name != DELETED]))
        if not setting.metadata:
            return found_columns
        check_metadata(found_columns, METADATA)
        return StructType([*METADATA.fields, *found_columns.fields])

    def reader(self, schema: StructType) -> DataSourceReader:
        return StateReader(StateSetting.of(self.options), schema)


class StateReader(DataSourceReader):
    """Reads the checkpoints that were newest when the job was planned."""

    def __init__(self, setting: StateSetting, schema: StructType) -> None:
        self._setting = setting
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """One task per subtask of each node.

        Raises:
            ConfigError: The state is a table in several runs, and nothing says which rows are of the same key.
        """
        client = client_of(self._setting.address)
        found = states(self._setting, retry(lambda: manifests(self._setting, client)))
        run = next((run for _, runs in found for run in runs.runs), None)
        if run is None:
            return []
        stored = stored_columns(retry(lambda: client.read_blob(run)), run)
        tabular = DELETED in stored.names
        if tabular and any(len(runs.runs) > 1 for _, runs in found):
            self._check_key([manifest for manifest, _ in found], found[0][1], stored)
        return [
            StateShare(manifest.node, manifest.epoch, runs, tabular=tabular) for manifest, runs in found if runs.runs
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, StateShare):
            return
        client = client_of(self._setting.address)
        runs = partition.runs
        values = (partition.node, partition.epoch, runs.step, runs.state, runs.subtask)
        constants = {}
        if self._setting.metadata:
            constants = {name: pa.scalar(value) for name, value in zip(METADATA.fieldNames(), values, strict=True)}
        where = f"state {runs.state} of step {runs.step} of node {partition.node} at epoch {partition.epoch}"

        target = arrow_columns(self._schema)

        def rows() -> Iterator[RunRows]:
            stored = ((retry(lambda run=run: client.read_blob(run)), run) for run in runs.runs)  # type: ignore[misc]
            if partition.tabular:
                budget = DecodeBudget.of_state(runs.runs)
                table = self._table([decode_untrusted(*one, budget=budget) for one in stored], runs)
                yield RunRows(frame=table, where=where, constants=constants)
                return
            for data, run in stored:
                yield decode_rows(data, run, target, where=where, constants=constants)

        yield from record_batches(rows(), target)

    def _check_key(self, held: Sequence[Manifest], runs: StateRuns, stored: pa.Schema) -> None:
        setting = self._setting
        if setting.plan is not None:
            plan = edge_plan(setting.plan)
            ours = step_digests(plan, stream_types(plan)).get(runs.step)
            other = [manifest.node for manifest in held if manifest.step_digests.get(runs.step) != ours]
            if other:
                raise PlanMismatchError(
                    f"node {other[0]} ran step {runs.step} with another plan than option 'plan' has. Set option 'plan' to the plan that the "
                    "node runs (pipeline.plan().to_json())."
                )
            return
        missing = [name for name in setting.key if stored.get_field_index(name) < 0]
        if missing or not setting.key:
            names = ", ".join(name for name in stored.names if name != DELETED)
            raise ConfigError(
                f"state {runs.state} of step {runs.step} is a table, stored as changes, and "
                + (f"it has no column {missing[0]!r}" if missing else "nothing says which columns are its key")
                + f". Set option 'key' to its key columns (its columns are: {names}), or option 'plan' to "
                "pipeline.plan().to_json()."
            )

    def _table(self, frames: Sequence[pl.DataFrame], runs: StateRuns) -> pl.DataFrame:
        if len(frames) == 1:  # a run has each key once, so a single run needs no merging and no key
            return frames[0].filter(~pl.col(DELETED))
        if self._setting.plan is None:
            rows = pl.concat(frames).unique(subset=self._setting.key, keep="last", maintain_order=True)
            return rows.filter(~pl.col(DELETED))
        plan = edge_plan(self._setting.plan)
        operator = make_operator(plan.step(runs.step), OperatorContext(plan=plan, types=stream_types(plan)))
        return operator.states()[runs.state].combine(frames, oldest=True)


def edge_plan(text: str) -> Plan:
    """The part of a plan that runs on nodes."""
    plan = read_plan(text.encode())
    if not plan.tiered:
        return plan
    edge = split(plan).edge
    if edge is None:
        raise ConfigError(f"nothing of pipeline {plan.pipeline} runs on nodes: it has no state there.")
    return edge


def manifests(setting: StateSetting, client: HubClient) -> list[Manifest]:
    """The newest checkpoint of every node, or of the one in the options.

    Raises:
        SourceError: There is none.
    """
    nodes = sorted(info.node for info in client.nodes(pipeline=setting.pipeline).nodes)
    if setting.node is not None:
        nodes = [node for node in nodes if node == setting.node]
    found = []
    for node in nodes:
        checkpoint = client.checkpoint(setting.pipeline, node)
        if checkpoint is not None:
            data = client.read_blob(checkpoint.manifest)
            found.append(decode_untrusted_manifest(data, pipeline=setting.pipeline, node=node, epoch=checkpoint.epoch))
    if not found:
        where = f"node {setting.node}" if setting.node is not None else "any node"
        raise SourceError(
            f"the hub at {setting.address.url} has no checkpoint of pipeline {setting.pipeline} on {where}. `fordstone nodes` lists "
            "its nodes; a node that runs with --no-hub-state sends none."
        )
    return found


def states(setting: StateSetting, found: Sequence[Manifest]) -> list[tuple[Manifest, StateRuns]]:
    """The state in the options, of every subtask of every node.

    Raises:
        ConfigError: No state fits the options, or several do.
    """
    chosen = [
        (manifest, runs)
        for manifest in found
        for runs in manifest.states
        if setting.step in {None, runs.step} and setting.state in {None, runs.state}
    ]
    names = sorted({(runs.step, runs.state) for _, runs in chosen})
    if len(names) == 1:
        return chosen
    every = sorted({(runs.step, runs.state) for manifest in found for runs in manifest.states})
    shown = "".join(f"\n  step {step}, state {state}" for step, state in every[:_SHOWN_MAX])
    shown += "\n  ..." if len(every) > _SHOWN_MAX else ""
    what = "several states fit" if names else "no state fits"
    raise ConfigError(f"{what}: set options 'step' and 'state'. Pipeline {setting.pipeline} has:{shown or ' none'}")
