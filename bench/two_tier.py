"""A pipeline of two tiers with push-down beside the same without: a table, and JSON.

    uv run python bench/two_tier.py [--quick] [--only CENTER] [--json FILE] [--directory DIR]

Gateways, a hub and the center are processes of their own. README.md beside this file says what is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edge_size import SizeName
from table import Finding, Target, at_least, machine, middle, number, show, show_missed, spread, write_json
from two_tier_run import SIZES, Center, Measured, Size, measured

CENTERS: tuple[Center, ...] = ("spark", "local")
RATIO = 10.0


def compared(center: Center, size: Size, directory: Path | None) -> list[Finding]:
    """Both ways, in turn, over the same rows."""
    pushed: list[Measured] = []
    raw: list[Measured] = []
    for _ in range(size.repetitions):
        for push_down, found in ((True, pushed), (False, raw)):
            found.append(measured(center, push_down=push_down, size=size, directory=directory))
    if any(one.result != pushed[0].result for one in (*pushed, *raw)):
        raise SystemExit(f"center {center}: the two ways give different results: {pushed[0].result}, {raw[0].result}")
    speeds = {name: [size.rows / one.seconds for one in ways] for name, ways in (("pushed", pushed), ("raw", raw))}
    ratios = [a / b for a, b in zip(speeds["pushed"], speeds["raw"], strict=True)]
    saved = middle(b.sent_bytes / a.sent_bytes for a, b in zip(pushed, raw, strict=True))
    details = {
        "rows": size.rows,
        "rows_per_s": speeds,
        "sent_bytes": {"pushed": [one.sent_bytes for one in pushed], "raw": [one.sent_bytes for one in raw]},
        "cpu_s": {"pushed": [one.cpu_s for one in pushed], "raw": [one.cpu_s for one in raw]},
    }
    cpu = middle(b.cpu_s / a.cpu_s for a, b in zip(pushed, raw, strict=True))
    speed = f"{middle(speeds['pushed']) / 1e6:.2f} against {middle(speeds['raw']) / 1e6:.2f} M rows/s"
    sent = f"{middle(one.sent_bytes for one in pushed) / 1e6:.2f} against {middle(one.sent_bytes for one in raw) / 1e6:.2f} MB"

    def finding(what: str, value: float, target: Target | None, note: str) -> Finding:
        return Finding(
            section=center,
            case=f"center on {center}, push-down to raw rows: {what}",
            measured=value,
            unit="times",
            target=target,
            note=note,
            details=details,
        )

    return [
        # On one machine a center without Spark takes raw rows about as fast as they can be sent: only shown.
        finding(
            "rows a second, end to end",
            middle(ratios),
            at_least(RATIO) if center == "spark" else None,
            f"{spread(ratios)}; {speed}",
        ),
        finding("fewer bytes sent", saved, at_least(RATIO), f"{sent}, with checkpoints; {number(size.rows)} rows"),
        finding("less processor time", cpu, None, "of all processes"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help="smaller and noisier")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs")
    parser.add_argument("--only", action="append", choices=CENTERS, metavar="CENTER", help=", ".join(CENTERS))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "two_tier.json")
    parser.add_argument("--directory", type=Path, help="where everything is kept; a temporary directory if left out")
    options = parser.parse_args()
    name: SizeName = options.size or "full"
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f"; size {name}\n")
    findings: list[Finding] = []
    for center in CENTERS:
        if options.only is None or center in options.only:
            print(f"center on {center}", flush=True)
            found = compared(center, SIZES[name], options.directory)
            show(found)
            findings += found
            # After each section: what was measured is not lost when a later one fails.
            write_json(options.json, size=name, facts=facts, findings=findings)
    show_missed(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
