"""Judge what became of a simulated fleet: at the hub, at a plain reader, and at the center, against plain oracles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.simulation.fleet_ledger import Ledger
from tests.simulation.fleet_scenario import CUT, WINDOW_S, FleetScenario, node_name, passes
from tests.simulation.fleet_tap import Tap
from tests.simulation.query_tails import values_of
from tests.simulation.rows import (
    ROWS_BEGIN_US,
    Row,
    SimulationError,
    check_equal,
    late_of,
    second_of,
    watermarks_of,
)
from tests.simulation.tails import by_key

from fordstone.connectors.memory import MemorySink
from fordstone.operators.base import ROW_WATERMARK

Windows = dict[tuple[int, int], tuple[int, ...]]
"""By key and start: the aggregates of a window."""


def judge_tap(scenario: FleetScenario, tap: Tap, ledger: Ledger) -> None:
    """The stream at the hub: every epoch as it was sealed, every row once, with its watermark, and with what the table said."""
    for number, partitions in enumerate(scenario.nodes):
        node = node_name(number)
        below = _below_watermark(partitions)
        accepted = ledger.accepted.get(node, {})
        check_equal(f"epochs of {node} that were read", len(tap.read.get(node, ())), len(accepted))
        ids: Counter[int] = Counter()
        for entry, frames in tap.read.get(node, ()):
            machine, sent = ledger.sent[node, entry.epoch, accepted[entry.epoch]]
            check_equal(f"runs of epoch {entry.epoch} of {node}", entry.runs, sent.streams[CUT].runs)
            if scenario.pushes:
                continue
            for frame in frames:
                ids.update(frame.get_column("id").to_list())
                for row in frame.iter_rows(named=True):
                    check_equal(f"watermark of row {row['id']}", row[ROW_WATERMARK], below.get(row["id"]))
                    if scenario.controls:
                        met, could = row["bound"], ledger.bounds_in(machine, entry.epoch, row["k"])
                        if met not in could:
                            raise SimulationError(
                                f"row {row['id']} in epoch {entry.epoch} of {node} met {met}, not one of {could}"
                            )
        if not scenario.pushes:
            wanted = Counter(row.id for partition in partitions for row in partition if passes(row))
            check_equal(f"rows of {node} at the hub", ids, wanted)


def judge_center(scenario: FleetScenario, sinks: Mapping[str, MemorySink]) -> None:
    """The result over all nodes: every row is in its window or late, once; late at the edge is late here."""
    rows = [row for row in scenario.rows() if passes(row)]
    edge_late = {one for node in scenario.nodes for one in late_of(node, WINDOW_S)}
    late = edge_late
    if not scenario.pushes:
        check_equal("rows at the center", _ids(sinks["rows"]), Counter(row.id for row in rows))
        found = _ids(sinks["late"])
        missing = [row.id for row in rows if row.id in edge_late and not found[row.id]]
        if missing or any(count > 1 for count in found.values()):
            raise SimulationError(f"late rows at the center: {found}, of which {missing} are missing")
        late = set(found)
        if scenario.offline_hours > 1_000 and len(scenario.nodes) == 1 and late != edge_late & {row.id for row in rows}:
            raise SimulationError(
                f"rows {late - edge_late} became late at the center, though its one node was never away"
            )
    wanted = _expected(scenario, [row for row in rows if row.id not in late])
    check_equal("windows at the center", _windows(scenario, sinks["windows"]), wanted)


def _below_watermark(partitions: Sequence[Sequence[Row]]) -> dict[int, int]:
    """The watermarks, in microseconds, of rows that are below them."""
    watermarks = watermarks_of(partitions)
    rows = (row for rows in partitions for row in rows)
    return {row.id: ROWS_BEGIN_US + watermarks[row.id] * 1_000_000 for row in rows if row.second < watermarks[row.id]}


def _expected(scenario: FleetScenario, rows: Sequence[Row]) -> Windows:
    windows = by_key(rows, lambda row: (row.k, row.second // WINDOW_S * WINDOW_S))
    shown = {window: (len(some), sum(row.id for row in some), *values_of(some)) for window, some in windows.items()}
    return {window: values[: len(scenario.aggregates)] for window, values in shown.items()}


def _windows(scenario: FleetScenario, sink: MemorySink) -> Windows:
    found: Windows = {}
    rows = sink.rows()
    if rows.width:
        for k, start, *values in rows.select("k", "window_start", *scenario.aggregates).iter_rows():
            window = (k, second_of(start))
            if window in found:
                raise SimulationError(f"window {window} was emitted twice")
            found[window] = tuple(values)
    return found


def _ids(sink: MemorySink) -> Counter[int]:
    rows = sink.rows()
    return Counter(rows.get_column("id").to_list() if rows.width else [])
