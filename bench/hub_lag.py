"""Memory of a center that is far behind: 1,000 nodes with more and more unread epochs of each, and 10 nodes with a day of them.

    uv run python bench/hub_lag.py [--quick] [--json FILE] [--directory DIR]

The hub is a process of its own; its log is filled before it starts. What is measured runs in processes of their own, too, without
Spark: the planner of `format("fordstone")`, one of its tasks, and the source of a hosted center, which plans and reads. The planner and
the center read the index: the peak of their memory, libraries included, must stay below 200 MB. A task reads the rows that it was
given, and may take 60 MB beside its libraries, which alone take about 200. The exit code is 1 if one takes more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from edge_size import SizeName
from fordstone.epochs.run_file import encode_run
from fordstone.hub.messages import EpochEntry, Generation, StreamSegment
from fordstone.hub.store.log import HubLog, Transaction
from fordstone.hub.store.log_writer import ChainedEntry
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.protocol.chain import CHAIN_START, chained
from hub_process import hub_process
from table import Finding, at_most, machine, number, show, show_missed, write_json

PIPELINE, STREAM = "bench", "rows"
BATCHES = 3
NODES_READ_MAX, EPOCHS_READ_MAX = 100, 100_000
"""Of how many nodes the source of the center reads what it has planned, and how many epochs: a task has no more."""
MEMORY_MB_MAX = 200.0
TASK_MB_MAX = 60.0
"""Of a task, beside its libraries."""
FILLED_TOGETHER = 20_000
SECONDS_MAX = 1_800
START_US = 1_700_000_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How many nodes there are, and how many epochs of each wait."""

    nodes: int
    epochs: int


SIZES: dict[SizeName, tuple[Lag, ...]] = {
    "full": (
        Lag(nodes=1_000, epochs=10),
        Lag(nodes=1_000, epochs=100),
        Lag(nodes=1_000, epochs=1_000),
        Lag(nodes=10, epochs=86_400),
    ),
    "quick": (Lag(nodes=1_000, epochs=10), Lag(nodes=1_000, epochs=100)),
    "tiny": (Lag(nodes=20, epochs=5),),
}


# The log.


def fill(data: Path, *, nodes: int, epochs: int) -> None:
    """Write the epochs of all nodes as if each had been committed in its second, all with the rows of one small run."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    frame = pl.DataFrame({"dev": range(10), "temp": [float(one) for one in range(10)]})
    ref, content = encode_run(frame, "lz4")
    generation = Generation(hub=1, local=1)
    names = [f"node-{number:04}" for number in range(nodes)]
    ids: list[int] = []
    chains = [CHAIN_START] * nodes
    clock = [START_US]
    log = HubLog(SqliteStore(data / "log.sqlite"), clock_us=lambda: clock[0])

    def join(tx: Transaction) -> None:
        tx.log.save_small_blob(ref.digest, bytes(content), ran_us=0)
        for name in names:
            tx.log.grant_lease(
                PIPELINE, name, holder=name, start="s", generation=generation, resync=False, now_us=START_US
            )
            found = tx.log.node(PIPELINE, name)
            if found is None:
                raise SystemExit(f"node {name} is not in the log.")
            ids.append(found.node_id)

    def commit(first: int, last: int) -> Callable[[Transaction], None]:
        def work(tx: Transaction) -> None:
            for epoch in range(first, last + 1):
                clock[0] = START_US + epoch * 1_000_000
                segment = StreamSegment(runs=(ref,), watermark_us=clock[0])
                entry = EpochEntry(epoch=epoch, streams={STREAM: segment}, created_us=clock[0])
                digest = entry.digest()
                for node, node_id in enumerate(ids):
                    chains[node] = chained(chains[node], digest)
                    one = ChainedEntry(entry, digest, chains[node])
                    tx.log.add_epochs(PIPELINE, node_id, [one], generation, now_us=clock[0])

        return work

    log.write(join).result()
    together = max(1, FILLED_TOGETHER // nodes)
    for first in range(1, epochs + 1, together):
        log.write(commit(first, min(first + together - 1, epochs))).result()
    log.close()


# What is measured, each in a process of its own. They print what they found as JSON.


def plan_batches(url: str, file: Path) -> dict[str, Any]:
    """Plan the first batches as the process beside Spark's driver does, and leave the largest share of the last one in a file."""
    from fordstone.spark.formats.source import RunShare

    reader = _stream_reader(url)
    offset, planned, share = reader.initialOffset(), 0, RunShare((), None)
    for _ in range(BATCHES):
        end = reader.latestOffset(offset, reader.getDefaultReadLimit())
        shares = [one for one in reader.partitions(offset, end) if isinstance(one, RunShare)]
        planned += sum(len(one.reads) for one in shares)
        share = max((share, *shares), key=lambda one: len(one.reads))
        offset = end
    reads = [[node, epoch, run.digest, run.size_bytes, run.rows] for node, epoch, run in share.reads]
    file.write_text(json.dumps(reads))
    return {"epochs": planned}


def read_share(url: str, file: Path) -> dict[str, Any]:
    """Read the share of one task of a batch."""
    from fordstone.spark.formats.source import RunShare
    from fordstone.state.base import RunRef

    reads = tuple((node, epoch, RunRef(*run)) for node, epoch, *run in json.loads(file.read_text()))
    rows = sum(batch.num_rows for batch in _stream_reader(url).read(RunShare(reads, None)))
    return {"epochs": len(reads), "rows": rows}


def follow(url: str, file: Path) -> dict[str, Any]:
    """Plan and read as the source of a hosted center does."""
    del file
    from fordstone.connectors.hub import HubOptions, HubSource
    from fordstone.hub.client.address import HubAddress
    from fordstone.hub.client.client import client_of
    from fordstone.lang.schema import Schema
    from fordstone.plan.ids import Position
    from fordstone.storage.clock import monotonic_clock_us

    source = HubSource(
        client_of(HubAddress(url=url)),
        HubOptions(pipeline=PIPELINE, stream=STREAM),
        Schema.of({"dev": "bigint", "temp": "double"}),
        bounded=True,
        clock_us=monotonic_clock_us,
    )
    nodes = source.partitions()
    plans = {node: source.plan_read(node, Position(0), 1_000_000).position for node in nodes}
    wanted = nodes[: max(1, min(NODES_READ_MAX, EPOCHS_READ_MAX // max(plans.values())))]
    source.expect_reads({node: (Position(0), plans[node]) for node in wanted})
    rows = 0
    for node in wanted:
        reader = source.open(node, Position(0), with_positions=False)
        while (chunk := reader.read(65_536, plans[node])) is not None:
            rows += chunk.frame.height
            if chunk.position >= plans[node]:
                break
        reader.close()
    source.close()
    return {"epochs": sum(int(end) for end in plans.values()), "rows": rows}


def _stream_reader(url: str) -> Any:
    from pyspark.sql.types import DoubleType, LongType, StructField, StructType

    from fordstone.spark.formats.source import METADATA, HubStreamReader, StreamSetting

    setting = StreamSetting.of({"hub": url, "pipeline": PIPELINE, "stream": STREAM})
    columns = [StructField("dev", LongType()), StructField("temp", DoubleType())]
    return HubStreamReader(setting, StructType([*columns, *METADATA.fields]))


PARTS: Mapping[str, Callable[[str, Path], dict[str, Any]]] = {
    "planner": plan_batches,
    "task": read_share,
    "center's source": follow,
}


MODULES: Mapping[str, tuple[str, ...]] = {
    "planner": ("fordstone.spark.formats.source",),
    "task": ("fordstone.spark.formats.source", "pandas", "pyarrow.compute"),
    "center's source": ("fordstone.connectors.hub",),
}
"""What each part imports before anything is measured. PyArrow imports the last two with the first value that it makes or casts."""


def measured(part: str, url: str, file: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part, "--url", url, "--share", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=SECONDS_MAX)
    if done.returncode:
        raise SystemExit(f"the {part} failed.")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_part(part: str, url: str, file: Path) -> None:
    for module in MODULES[part]:
        importlib.import_module(module)
    libraries_mb, began_s = _peak_mb(), time.monotonic()
    found = PARTS[part](url, file)
    print(
        json.dumps(found | {"peak_mb": _peak_mb(), "libraries_mb": libraries_mb, "seconds": time.monotonic() - began_s})
    )


def _peak_mb() -> float:
    """Not `ru_maxrss`, which a process inherits."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def findings_of(lag: Lag, directory: Path | None) -> list[Finding]:
    findings: list[Finding] = []
    case = f"{lag.nodes:,} nodes x {lag.epochs:,} epochs"
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="fordstone-hub-bench-") as home,
        hub_process(directory, lambda data: fill(data, nodes=lag.nodes, epochs=lag.epochs)) as hub,
    ):
        for part in PARTS:
            found = measured(part, hub.url, Path(home) / "share.json")
            findings.append(
                Finding(
                    section="lag",
                    case=f"{part}, {case}",
                    measured=found["peak_mb"],
                    unit="MB",
                    target=at_most(found["libraries_mb"] + TASK_MB_MAX if part == "task" else MEMORY_MB_MAX),
                    note=f"{number(found['libraries_mb'])} MB of it libraries; {found['epochs']:,} epochs in {number(found['seconds'])} s",
                    details=found,
                )
            )
    print(f"{case}: done", flush=True)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help="less far behind")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "hub_lag.json")
    parser.add_argument("--directory", type=Path, help="where hubs keep their data; a temporary one if left out")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        run_part(options.part, options.url, options.share)
        return 0
    name: SizeName = options.size or "full"
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f"; size {name}\n", flush=True)
    findings = [found for lag in SIZES[name] for found in findings_of(lag, options.directory)]
    show(findings)
    write_json(options.json, size=name, facts=facts, findings=findings)
    show_missed(findings)
    return 1 if any(found.reached is False for found in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
