"""Draw the steps of a plan as an SVG: sources on the left, sinks on the right, the center apart from the edge by colour.

For notebooks: no script, no font and nothing from a network. Colours are translucent, so that they fit light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Final

from fordstone.operators.registry import family_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Types, shown

LINE_CHARS_MAX: Final = 36
_CHAR: Final = 7.2
"""The width of a character of the monospace font, in pixels."""
_HEIGHT: Final = 46
_GAP_X: Final = 46
_GAP_Y: Final = 18
_PAD: Final = 10
_MARGIN: Final = 20
_EDGE: Final = "#3b82f6"
_CENTER: Final = "#f59e0b"
_TIER: Final = "#64748b"


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float


def picture(plan: p.Plan, types: Types, *, marked: str | None = None) -> str:
    """The plan as an `<svg>`. `marked` names a step that gets a thicker frame."""
    if not plan.steps:
        return ""
    boxes = _boxes(plan)
    width = max(box.x + box.width for box in boxes.values()) + _MARGIN
    floor = max(box.y for box in boxes.values()) + _HEIGHT + _PAD
    height = floor + _PAD
    # Each picture defines its own arrow: notebooks show many of them on one page.
    arrow = f"fordstone-{plan.digest()[:12]}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"',
        ' font-family="ui-monospace, monospace" font-size="12" style="max-width: 100%; height: auto; color: inherit">',
        f'<defs><marker id="{arrow}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_TIER}"/></marker></defs>',
    ]
    lines += [
        _arrow(boxes[source], boxes[target], arrow, floor=floor if back else None, note=note)
        for source, target, back, note in _arrows(plan)
    ]
    lines += [_box(step, boxes[step.name], plan, types, marked=step.name == marked) for step in plan.steps]
    return "\n".join([*lines, "</svg>"])


def _arrows(plan: p.Plan) -> list[tuple[str, str, bool, str]]:
    """From step to step; whether it leads back; and the port, if it is not the main one."""
    found: list[tuple[str, str, bool, str]] = [
        (stream.step, step.name, False, "" if stream.port == "main" else stream.port)
        for step in plan.steps
        for stream in step.inputs
    ]
    found += [(step.feedback.step, step.name, True, "") for step in plan.steps if isinstance(step, p.Loop)]
    tables = {step.name for step in plan.steps if isinstance(step, p.Control)}
    found += [
        (step.name, step.control, True, "")
        for step in plan.steps
        if isinstance(step, p.ToEdges) and step.control in tables
    ]
    return found


def _boxes(plan: p.Plan) -> dict[str, _Box]:
    """Columns by the longest way from a source; in a column, steps stand near the mean of what they read."""
    columns: dict[str, int] = {}
    rows: dict[str, float] = {}
    taken: list[list[str]] = []
    for step in plan.steps:
        before = [stream.step for stream in step.inputs]
        column = max((columns[name] + 1 for name in before), default=0)
        columns[step.name] = column
        while len(taken) <= column:
            taken.append([])
        wanted = sum(rows[name] for name in before) / len(before) if before else float(len(taken[0]))
        used = {rows[name] for name in taken[column]}
        row = float(round(wanted))
        while row in used:
            row += 1
        rows[step.name] = row
        taken[column].append(step.name)
    widths = [max(_width(plan.step(name)) for name in names) for names in taken]
    lefts = [_MARGIN + sum(widths[:number]) + number * _GAP_X for number in range(len(widths))]
    return {
        name: _Box(lefts[column], _PAD + rows[name] * (_HEIGHT + _GAP_Y), widths[column])
        for name, column in columns.items()
    }


def _width(step: p.Step) -> float:
    return max(len(line) for line in _texts(step)) * _CHAR + 2 * _PAD


def _texts(step: p.Step) -> tuple[str, str]:
    return _cut(step.name), _cut(family_of(step).title(step))


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARS_MAX else f"{text[: LINE_CHARS_MAX - 1]}…"


def _box(step: p.Step, box: _Box, plan: p.Plan, types: Mapping[p.Input, object], *, marked: bool) -> str:
    name, title = map(escape, _texts(step))
    colour = _colour(step, types)
    return (
        f"<g><title>{escape(_details(step, plan, types))}</title>"
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{_HEIGHT}" rx="6" fill="{colour}" fill-opacity="0.15" '
        f'stroke="{colour}" stroke-width="{3 if marked else 1.2}"/>'
        f'<text x="{box.x + _PAD:.0f}" y="{box.y + 19:.0f}" font-weight="bold" fill="currentColor">{name}</text>'
        f'<text x="{box.x + _PAD:.0f}" y="{box.y + 36:.0f}" fill="currentColor" fill-opacity="0.75">{title}</text></g>'
    )


def _colour(step: p.Step, types: Mapping[p.Input, object]) -> str:
    if isinstance(step, p.TierStep):
        return _TIER
    at = p.Input(step.name) if p.Input(step.name) in types else next(iter(step.inputs), p.Input(step.name))
    return _CENTER if getattr(types.get(at), "central", False) else _EDGE


def _details(step: p.Step, plan: p.Plan, types: Mapping[p.Input, object]) -> str:
    """What a pointer over the box shows."""
    schema = getattr(types.get(p.Input(step.name)), "schema", None)
    said = [f"{label}: {text}" for label, text in family_of(step).describe(step, plan, types)]  # type: ignore[arg-type]  # all of the plan's
    return "\n".join([step.name, *said, *([] if schema is None else [f"rows: {shown(schema)}"])])


def _arrow(source: _Box, target: _Box, arrow: str, *, floor: float | None, note: str) -> str:
    """A curve to the right; with `floor`, a dashed line back to the left below all boxes."""
    x1, x2 = source.x + source.width, target.x
    y1, y2 = source.y + _HEIGHT / 2, target.y + _HEIGHT / 2
    if floor is None:
        middle = (x1 + x2) / 2
        path = f"M{x1:.0f} {y1:.0f} C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
        dash = ""
    else:
        path = f"M{x1:.0f} {y1 + 8:.0f} h{_PAD} V{floor:.0f} H{x2 - _PAD - 4:.0f} V{y2 + 8:.0f} H{x2:.0f}"
        dash = ' stroke-dasharray="5 4"'
    drawn = f'<path d="{path}" fill="none" stroke="{_TIER}" stroke-width="1.3"{dash} marker-end="url(#{arrow})"/>'
    if not note:
        return drawn
    return f'{drawn}<text x="{x2 - 10:.0f}" y="{y2 - 6:.0f}" text-anchor="end" font-size="10" fill="{_TIER}">{escape(note)}</text>'
