"""Judge what a simulated run emitted: per guarantee nothing lost, nothing doubled, or neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from tests.simulation.rows import SimulationError, check_equal, late_of, partition_name, second_of, watermarks_of
from tests.simulation.scenario import Expected, Scenario, World, expect, firsts_of, means_of, passes
from tests.simulation.tails import Given


def judge(scenario: Scenario, world: World, epochs: Mapping[int, int], uneven: AbstractSet[int]) -> None:
    """Raise `SimulationError` unless the sinks have what they must.

    `epochs`: by id, the one that a row was read in. `uneven`: those in which an attempt was given up.
    """
    expected = expect(scenario)
    given = _given(scenario, world, epochs, uneven)
    ids = _ids(world, "rows")
    running = _latest_counts(world)
    match scenario.guarantee:
        case "exactly_once":
            check_equal("rows emitted", ids, expected.ids)
            check_equal("running counts", running, +expected.counts)
            _judge_windows(scenario, world, expected)
            if scenario.smooths:
                _judge_means(scenario, world, expected)
            if scenario.deduplicates:
                _judge_firsts(scenario, world)
            if scenario.tail is not None:
                scenario.tail.judge(given)
        case "at_least_once":
            missing = expected.ids.keys() - ids.keys()
            if missing:
                raise SimulationError(f"lost rows {sorted(missing)}")
            _bounded("running counts", running, expected.counts, least=True)
            if scenario.tail is not None:
                scenario.tail.judge_loosely(given, least=True)
        case "at_most_once":
            doubled = {one: count for one, count in ids.items() if count > expected.ids[one]}
            if doubled:
                raise SimulationError(f"doubled rows {doubled}")
            _bounded("running counts", running, expected.counts, least=False)
            if scenario.tail is not None:
                scenario.tail.judge_loosely(given, least=False)


def _latest_counts(world: World) -> Counter[int]:
    counts: Counter[int] = Counter()
    for frame in world.sinks["running"].frames():
        for k, n in frame.select("k", "n").iter_rows():
            counts[k] = max(counts[k], n)
    return +counts


def _judge_windows(scenario: Scenario, world: World, expected: Expected) -> None:
    if scenario.shape == "loop":
        return
    rows = world.sinks["windows"].rows()
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for k, start, n, total in rows.select("k", "window_start", "n", "total").iter_rows():
        window = (k, second_of(start))
        if window in found:
            raise SimulationError(f"window {window} was emitted twice")
        found[window] = (n, total)
    if scenario.live:
        # Which rows idleness overtook depends on when they turned up; but every row is in a window or late, once.
        total = sum(n for n, _ in found.values()) + world.sinks["late"].rows().height
        check_equal("rows in windows and late", total, sum(expected.ids.values()))
        return
    check_equal("windows", found, expected.windows)
    if scenario.late_sink:
        check_equal("late rows", _ids(world, "late"), expected.late)


def _judge_means(scenario: Scenario, world: World, expected: Expected) -> None:
    rows = world.sinks["means"].rows()
    found = dict(rows.select("id", "mean").iter_rows()) if rows.width else {}
    check_equal("rows smoothed", rows.height, len(found))
    late = _ids(world, "overtaken") if scenario.live else _out_of_order(scenario)
    check_equal("rows smoothed and late", Counter(found.keys()) + late, expected.ids)
    check_equal("means", found, means_of(row for row in scenario.rows() if row.id in found))


def _out_of_order(scenario: Scenario) -> Counter[int]:
    """Rows that are late for steps that need order."""
    late = late_of([rows for source in scenario.partitions for rows in source])
    return Counter(row.id for row in scenario.rows() if row.id in late and passes(scenario.shape, row))


def _judge_firsts(scenario: Scenario, world: World) -> None:
    late = _ids(world, "missed") if scenario.live else _out_of_order(scenario)
    in_time = [row for row in scenario.rows() if passes(scenario.shape, row) and row.id not in late]
    check_equal("rows that are the first", _ids(world, "firsts"), firsts_of(in_time))


def _given(scenario: Scenario, world: World, epochs: Mapping[int, int], uneven: AbstractSet[int]) -> Given:
    by_source = [[row for partition in source for row in partition] for source in scenario.partitions]
    watermarks = watermarks_of([rows for source in scenario.partitions for rows in source])
    return Given(
        rows=[row for row in scenario.rows() if passes(scenario.shape, row)],
        by_source=by_source,
        places={
            row.id: (partition_name(index), position)
            for source in scenario.partitions
            for index, rows in enumerate(source)
            for position, row in enumerate(rows)
        },
        watermarks=None if scenario.live else watermarks,
        epochs=epochs,
        uneven=uneven,
        sinks=world.sinks,
    )


def _ids(world: World, sink: str) -> Counter[int]:
    """The ids of all rows that a sink has."""
    rows = world.sinks[sink].rows()
    return Counter(rows["id"].to_list() if rows.width else [])


def _bounded(what: str, got: Counter[int], wanted: Counter[int], *, least: bool) -> None:
    for key in got.keys() | wanted.keys():
        if (got[key] < wanted[key]) if least else (got[key] > wanted[key]):
            raise SimulationError(f"{what}: key {key} has {got[key]}, the input holds {wanted[key]}")
