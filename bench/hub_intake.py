"""What a hub takes in: many small commits, and large blobs."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hub_nodes import Load, Outcome, drive
from hub_peers import send_to_hub, send_to_receiver, synced_transactions_per_s
from hub_process import hub_process
from hub_size import Size
from table import Finding, at_least, at_most, middle, number, percentile, spread

HERE = Path(__file__).parent
STATE_BYTES = 4_096
REACHED = 0.99
"""Of the commits that are due; the last of them may be on their way when counting ends."""
SECTION = "commits"
ROW_BYTES = 3_072
"""About what a commit of rows alone makes the hub's log longer by."""


def commits(size: Size, directory: Path | None) -> list[Finding]:
    """Every node once a second; then as often as they can, beside a bare SQLite."""
    findings: list[Finding] = []
    for what, state_bytes in (("rows", 0), ("rows and checkpoints", STATE_BYTES)):
        load = Load(
            nodes=size.nodes, seconds=size.seconds, settling_s=size.settling_s, state_bytes=state_bytes, period_s=1.0
        )
        outcome, cpu_s = _driven(load, directory)
        findings += _once_a_second(what, load, outcome, cpu_s)
    findings.append(_as_often_as_they_can(size, directory))
    return findings


def _driven(load: Load, directory: Path | None) -> tuple[Outcome, float]:
    """What came of it, and the processor time that the hub spent meanwhile."""
    with hub_process(directory) as hub:
        marks: list[float] = []
        outcome = drive(hub.netloc, load, at_edge=lambda: marks.append(hub.cpu_seconds()))
        return outcome, marks[1] - marks[0]


def _once_a_second(what: str, load: Load, outcome: Outcome, cpu_s: float) -> list[Finding]:
    case = f"{load.nodes:,} nodes, each once a second: {what}"
    p50_ms, p99_ms = (1000 * percentile(outcome.latencies_s, share) for share in (50, 99))
    details = {
        "commits": outcome.commits,
        "counted_s": outcome.counted_s,
        "errors": outcome.errors,
        "first_error": outcome.first_error,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "hub_cpu_s": cpu_s,
    }
    cpu_ms = 1000 * cpu_s / max(outcome.commits, 1)
    return [
        Finding(
            section=SECTION,
            case=case,
            measured=outcome.commits_per_s,
            unit="commits/s",
            target=at_least(REACHED * load.nodes),
            note=f"{outcome.errors} errors {outcome.first_error}; hub {number(cpu_ms)} ms of processor time each",
            details=details,
        ),
        Finding(
            section=SECTION,
            case=f"{case}, p99",
            measured=p99_ms,
            unit="ms",
            target=at_most(1000.0),
            note=f"p50 {number(p50_ms)} ms, from when it was due",
        ),
        Finding(
            section=SECTION, case=f"{case}, errors", measured=float(outcome.errors), unit="errors", target=at_most(0.0)
        ),
    ]


def _as_often_as_they_can(size: Size, directory: Path | None) -> Finding:
    """The hub shares a sync among all that wait for one; the bare file has one for each."""
    ours: list[float] = []
    bound: list[float] = []
    cpu_ms: list[float] = []
    seconds = size.seconds / 4
    for _ in range(size.repetitions):
        load = Load(nodes=size.nodes, seconds=seconds, settling_s=size.settling_s, period_s=None)
        outcome, cpu_s = _driven(load, directory)
        ours.append(outcome.commits_per_s)
        cpu_ms.append(1000 * cpu_s / max(outcome.commits, 1))
        with tempfile.TemporaryDirectory(dir=directory, prefix="fordstone-hub-bench-") as place:
            bound.append(synced_transactions_per_s(Path(place), seconds=seconds, row_bytes=ROW_BYTES))
    ratios = [a / b for a, b in zip(ours, bound, strict=True)]
    return Finding(
        section=SECTION,
        case=f"{size.nodes:,} nodes, as often as they can: rows",
        measured=middle(ratios),
        unit="of one synced SQLite transaction after the other",
        note=f"{number(middle(ours))} commits/s ({spread(ours)}), SQLite {number(middle(bound))}/s; hub {number(middle(cpu_ms))} ms each",
        details={"commits_per_s": ours, "transactions_per_s": bound, "hub_cpu_ms": cpu_ms},
    )


def blobs(size: Size, directory: Path | None) -> list[Finding]:
    """Large blobs through one connection and through four, beside files that somebody only writes and syncs."""
    findings = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="fordstone-hub-bench-") as home:
        for lines in (1, 4):
            ours: list[float] = []
            theirs: list[float] = []
            with _receiver(Path(home)) as netloc:
                for repetition in range(size.repetitions):
                    files = _files(Path(home) / "files", size, seed=repetition)
                    total_mb = sum(path.stat().st_size for path in files) / 1e6
                    theirs.append(total_mb / send_to_receiver(netloc, files, lines))
                    with hub_process(directory) as hub:
                        ours.append(total_mb / send_to_hub(hub.netloc, files, lines))
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            findings.append(
                Finding(
                    section="blobs",
                    case=f"blobs of {size.blob_bytes >> 20} MiB, connections: {lines}",
                    measured=middle(ratios),
                    unit="of files sent and synced",
                    target=at_least(0.6),
                    note=f"{spread(ratios)}; {number(middle(ours))} MB/s, files {number(middle(theirs))} MB/s",
                    details={"mb_per_s": ours, "files_mb_per_s": theirs},
                )
            )
    return findings


def _files(place: Path, size: Size, *, seed: int) -> Sequence[Path]:
    """Blobs that no hub has, called by their digests, in the page cache."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    found = []
    for at in range(size.blobs):
        data = random.Random(1_000 * seed + at).randbytes(size.blob_bytes)
        found.append(place / hashlib.sha256(data).hexdigest())
        found[-1].write_bytes(data)
    return found


@contextmanager
def _receiver(home: Path) -> Iterator[tuple[str, int]]:
    place = home / "received"
    place.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "hub_peers.py"), str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield "127.0.0.1", int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
