"""The demo's report: one HTML file with its plots inside, which opens from disk without a network."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 900, 264
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 36, 50
BOX_WIDTH, BOX_HEIGHT, BOX_GAP = 200, 54, 14
HUB_X, CENTER_X = 390, 680
NAME_LINE = 14
COLOURS = ("#2f6db3", "#c4622d", "#3f8f5a", "#8a5bb0", "#b03a5b", "#6b6b6b")
TICKS = 4
TIME_TICKS = 9

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707d; --line: #d8dde3; --page: #fff; --bad: #b3261e; --good: #1d7a3e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa4b1; --line: #39424e; --page: #14181e; --bad: #ff8a80; --good: #7fd39b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 940px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; color: var(--soft); max-width: 46rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem 1.4rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; } td.zero { font-weight: 700; } td.bad { color: var(--bad); font-weight: 700; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--line); } .verdict { max-width: none; font-size: 1.15rem; font-weight: 700; color: var(--good); } .verdict.failed { color: var(--bad); }
.sketch rect { fill: none; stroke: var(--line); stroke-width: 1.5; } .sketch text.part { fill: var(--ink); font-size: 14px; font-weight: 600; } .sketch path { fill: none; stroke: var(--soft); stroke-width: 1.5; } .sketch path.back { stroke-dasharray: 5 4; } .sketch text.fault-name { font-size: 12px; } .sketch marker path { fill: var(--soft); stroke: none; }
.band { fill: currentColor; opacity: .1; } .legend i.band { background: currentColor; opacity: .22; } .fault { stroke: var(--bad); stroke-dasharray: 3 3; } text.fault-name { fill: var(--bad); stroke: none; }
.legend span { display: inline-block; margin-right: 1.4rem; color: var(--soft); font-size: .9rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem; vertical-align: -1px; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: points of (seconds, value). Unknown values are omitted."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that was caused: what happened to which part, with its begin and end in seconds."""

    part: str
    what: str
    begins: float
    ends: float

    @property
    def name(self) -> str:
        return f"{self.part} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over a common time axis. `axis` names what the other axis shows."""

    title: str
    text: str
    axis: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A line of the table. With `zero`, every value but 0 is a failure."""

    name: str
    value: str
    zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """The parts of the fleet: gateways, each with some devices, the hub, and the center with its engine."""

    gateways: Sequence[str]
    devices: int
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result in one sentence."""

    text: str
    good: bool


def write_report(
    path: Path,
    *,
    title: str,
    outcome: Outcome,
    text: str,
    sketch: Sketch,
    figures: Sequence[Figure],
    plots: Sequence[Plot],
    faults: Sequence[Fault],
) -> None:
    """Write the report as one HTML file."""
    rows = "".join(_row(figure) for figure in figures)
    kind = "verdict" if outcome.good else "verdict failed"
    drawn = "".join(_plot(plot, faults) for plot in plots)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>{html.escape(title)}</h1><p class="{kind}">{html.escape(outcome.text)}</p><p>{html.escape(text)}</p>'
        f"{_sketch(sketch, faults)}<table>{rows}</table>{drawn}</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _row(figure: Figure) -> str:
    kind = "" if not figure.zero else " zero" if figure.value == "0" else " bad"
    return f'<tr><td>{html.escape(figure.name)}</td><td class="number{kind}">{html.escape(figure.value)}</td></tr>'


def _sketch(sketch: Sketch, faults: Sequence[Fault]) -> str:
    """Draw the parts, what flows between them, and which faults they had."""
    rows = len(sketch.gateways)
    height = rows * (BOX_HEIGHT + BOX_GAP) + 40
    middle = (rows * (BOX_HEIGHT + BOX_GAP) - BOX_GAP) / 2
    head = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto"'
    parts = [f'<defs><marker id="end" {head}><path d="M0,0 L10,5 L0,10 z"/></marker></defs>']
    for number, name in enumerate(sketch.gateways):
        y = number * (BOX_HEIGHT + BOX_GAP) + 1
        parts.append(_part(1, y, name, f"{sketch.devices:,} devices", faults))
        parts.append(_arrow(f"M{BOX_WIDTH + 1},{y + BOX_HEIGHT / 2} L{HUB_X - 2},{middle}"))
    top = middle - BOX_HEIGHT / 2
    parts.append(_part(HUB_X, top, "hub", "keeps epochs", faults))
    parts.append(_part(CENTER_X, top, "center", f"on {sketch.engine}", faults))
    parts.append(_arrow(f"M{HUB_X + BOX_WIDTH},{middle} L{CENTER_X - 2},{middle}"))
    below = height - 30
    parts.append(
        _arrow(f"M{CENTER_X + BOX_WIDTH / 2},{top + BOX_HEIGHT} V{below} H{BOX_WIDTH / 2} V{below - 21}", "back")
        + f'<text x="{(CENTER_X + BOX_WIDTH) / 2}" y="{below + 18}" text-anchor="middle">limits for alarms, back to all gateways through the hub</text>'
    )
    return f'<svg class="sketch" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The parts of the fleet">{"".join(parts)}</svg>'


def _part(x: float, y: float, name: str, text: str, faults: Sequence[Fault]) -> str:
    """Draw one part as a box with its name, a text, and its faults."""
    own = [f"{fault.what} from {fault.begins:.0f} to {fault.ends:.0f} s" for fault in faults if fault.part == name]
    second = (
        f'<text class="fault-name" x="{x + 14}" y="{y + 42}">{html.escape(", ".join(own))}</text>'
        if own
        else f'<text x="{x + 14}" y="{y + 42}">{html.escape(text)}</text>'
    )
    return (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text class="part" x="{x + 14}" y="{y + 23}">{html.escape(name)}</text>{second}'
    )


def _arrow(path: str, kind: str = "") -> str:
    return f'<path class="{kind}" d="{path}" marker-end="url(#end)"/>'


def _plot(plot: Plot, faults: Sequence[Fault]) -> str:
    points = [point for line in plot.lines for point in line.points]
    head = f"<h2>{html.escape(plot.title)}</h2><p>{html.escape(plot.text)}</p>"
    if not points:
        return f"{head}<p>Nothing was measured.</p>"
    last = max(x for x, _ in points) or 1.0
    top, step = _scale(max(y for _, y in points))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / last * inner_width, TOP + (1 - y / top) * inner_height

    parts = [_grid(top, step, last, plot.axis, at)]
    for number, fault in enumerate(faults):
        (begins, _), (ends, _) = at(min(fault.begins, last), 0), at(min(fault.ends, last), 0)
        parts.append(
            f'<rect class="band" x="{begins:.1f}" y="{TOP}" width="{max(ends - begins, 1):.1f}" height="{inner_height}"/>'
            f'<line class="fault" x1="{begins:.1f}" y1="{TOP}" x2="{begins:.1f}" y2="{TOP + inner_height}"/>'
            f'<text class="fault-name" x="{begins + 4:.1f}" y="{TOP - 6 - NAME_LINE * (number % 2)}">{html.escape(fault.name)}</text>'
        )
    for line, colour in zip(plot.lines, COLOURS, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
        )
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(line.name)}</span>'
        for line, colour in zip(plot.lines, COLOURS, strict=False)
    )
    legend += '<span><i class="band"></i>fault: from the kill or cut until the part is back</span>' if faults else ""
    label = html.escape(plot.title, quote=True)
    return f'{head}<div class="legend">{legend}</div><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _grid(top: float, step: float, last: float, axis: str, at: Callable[[float, float], tuple[float, float]]) -> str:
    parts = []
    value = 0.0
    while value <= top + step / 2:
        _, y = at(0, value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.10g}</text>')
        value += step
    _, every = _scale(last, TIME_TICKS)
    seconds = 0.0
    while seconds <= last:
        x, _ = at(seconds, 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{seconds:g}</text>')
        seconds += every
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">seconds since the devices began</text>'
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{html.escape(axis)}</text>'
    )
    return "".join(parts)


def _scale(most: float, ticks: int = TICKS) -> tuple[float, float]:
    """Return the end of an axis and the step between its marks: 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return 1.0, 1.0
    rough = most / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return math.ceil(most / step - 1e-9) * step, step
