"""Judge what became of a simulated fleet: at the hub, at a plain reader, and at the center, against plain oracles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

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
        read = [entry.epoch for entry, _ in tap.read.get(node, ())]
        unread = [epoch for epoch in accepted if epoch not in read and epoch > ledger.forced.get(node, 0)]
        check_equal(f"epochs of {node} that were not read", unread, [])
        check_equal(f"epochs of {node} that were read", read, sorted(set(read)))
        ids: Counter[int] = Counter()
        for entry, frames in tap.read.get(node, ()):
            was = ledger.versions_of(node, entry.epoch) if entry.epoch in ledger.ever.get(node, ()) else []
            if entry.epoch in accepted:
                was = [ledger.sent[node, entry.epoch, accepted[entry.epoch]], *was]
            found = [machine for machine, sent in was if sent.streams[CUT].runs == entry.runs]
            check_equal(f"runs of epoch {entry.epoch} of {node}", bool(found), True)
            machine = found[0]
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
            _check_rows(f"rows of {node} at the hub", ids, wanted, ledger)
            had = Counter[int]()
            for epoch, digest in accepted.items():
                had.update(ledger.rows[node, epoch, digest])
            if ledger.counts_rows:
                lost, _ = ledger.exempt()
                check_equal(
                    f"rows in epochs of {node}, less what was lost",
                    had + Counter(lost & wanted.keys() - had.keys()),
                    wanted,
                )


def _check_rows(what: str, found: Counter[int], wanted: Counter[int], ledger: Ledger) -> None:
    """Every row is there once, but for those that a restored hub has lost, or an operator said may be lost or doubled."""
    lost, forced = ledger.exempt()
    doubled = {row for row, count in found.items() if count > 1 and row in lost and row not in forced}
    check_equal(f"{what}, lost and still doubled", doubled, set())
    spared = lost | forced
    check_equal(what, _without(found, spared), _without(wanted, spared))


def _without(counts: Counter[int], spared: AbstractSet[int]) -> Counter[int]:
    return Counter({row: count for row, count in counts.items() if row not in spared})


def judge_center(scenario: FleetScenario, sinks: Mapping[str, MemorySink], ledger: Ledger) -> None:
    """The result over all nodes: every row is in its window or late, once; late at the edge is late here."""
    spared = frozenset[int]().union(*ledger.exempt())
    rows = [row for row in scenario.rows() if passes(row)]
    edge_late = {one for node in scenario.nodes for one in late_of(node, WINDOW_S)} - spared
    late = edge_late
    if not scenario.pushes:
        _check_rows("rows at the center", _ids(sinks["rows"]), Counter(row.id for row in rows), ledger)
        found = _without(_ids(sinks["late"]), spared)
        missing = [row.id for row in rows if row.id in edge_late and not found[row.id]]
        if missing or any(count > 1 for count in found.values()):
            raise SimulationError(f"late rows at the center: {found}, of which {missing} are missing")
        late = set(found)
        waits = scenario.offline_hours > 1_000 and len(scenario.nodes) == 1 and not ledger.forced
        if waits and late != edge_late & {row.id for row in rows}:
            raise SimulationError(
                f"rows {late - edge_late} became late at the center, though its one node was never away"
            )
    wanted = _expected(scenario, [row for row in rows if row.id not in late])
    unsure = {_window(row) for row in rows if row.id in spared}
    windows = _windows(scenario, sinks["windows"])
    for known in (windows, wanted):
        for window in unsure:
            known.pop(window, None)
    check_equal("windows at the center", windows, wanted)


def _below_watermark(partitions: Sequence[Sequence[Row]]) -> dict[int, int]:
    """The watermarks, in microseconds, of rows that are below them."""
    watermarks = watermarks_of(partitions)
    rows = (row for rows in partitions for row in rows)
    return {row.id: ROWS_BEGIN_US + watermarks[row.id] * 1_000_000 for row in rows if row.second < watermarks[row.id]}


def _expected(scenario: FleetScenario, rows: Sequence[Row]) -> Windows:
    windows = by_key(rows, _window)
    shown = {window: (len(some), sum(row.id for row in some), *values_of(some)) for window, some in windows.items()}
    return {window: values[: len(scenario.aggregates)] for window, values in shown.items()}


def _window(row: Row) -> tuple[int, int]:
    return row.k, row.second // WINDOW_S * WINDOW_S


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
