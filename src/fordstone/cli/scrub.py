"""`fordstone hub scrub`: check every blob of a hub, and list the damaged ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from fordstone.cli import format as fmt
from fordstone.cli.ask import connected, request
from fordstone.cli.format import Table
from fordstone.cli.options import HelpCommand, json_option, reader_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fordstone.hub.messages import DamagedBlob

SCRUB_TIMEOUT_S: Final = 120.0
"""Timeout of one piece, which takes about five seconds, or as long as the largest blob."""
_DIGITS: Final = 12


@click.command(
    "scrub",
    cls=HelpCommand,
    examples=[
        "fordstone hub scrub                                     check all blobs, and list those that are damaged",
        "fordstone hub scrub --list                              list those that are known to be damaged",
        "fordstone hub scrub --hub https://hub.example:7411 --token-file admin.token --json",
    ],
)
@click.option("--list", "list_only", is_flag=True, help="Check nothing; list what is known to be damaged.")
@reader_options
@json_option
def scrub(*, list_only: bool, as_json: bool, **hub: Any) -> None:
    """Check every blob of a hub, and list the damaged ones.

    The hub reads its blobs and compares their digests, at full speed. It does the same slowly in the background: see `--scrub-rate` of
    `fordstone hub`. A damaged blob counts as missing. A node that still has it sends it again; else restore it from a copy.

    Exit code 1: a blob is damaged.
    """
    blobs = size_bytes = 0
    with connected(timeout_s=SCRUB_TIMEOUT_S, **hub) as client:
        after: str | None = None if list_only else ""
        while after is not None:
            page = request(client, lambda client, after=after: client.scrub(after=after))  # type: ignore[misc]
            blobs, size_bytes, after = blobs + page.blobs, size_bytes + page.size_bytes, page.next
            if not as_json:
                _show_progress(blobs, size_bytes, done=after is None)
        damaged = request(client, lambda client: client.damaged()).blobs
    if as_json:
        fmt.print_json({"checked_blobs": blobs, "checked_bytes": size_bytes, "damaged": damaged})
    else:
        click.echo(damaged_table(damaged).text())
    if damaged:
        sys.exit(1)


def damaged_table(damaged: Sequence[DamagedBlob]) -> Table:
    """One row per damaged blob and place that names it."""
    rows = [
        (one.digest[:_DIGITS], fmt.size(one.size_bytes), place)
        for one in damaged
        for place in one.named_by or ("nothing: it will be removed",)
    ]
    return Table(head=("blob", "size", "named by"), rows=rows, right=(1,), empty="No blob is damaged.")


def _show_progress(blobs: int, size_bytes: int, *, done: bool) -> None:
    """Write how far the check has come to stderr: on one line if that is a terminal, else only the end."""
    if not done and not sys.stderr.isatty():
        return
    text = f"checked {fmt.count(blobs, 'blob')}, {fmt.size(size_bytes)}"
    click.echo(f"\r{text}" if sys.stderr.isatty() else text, err=True, nl=done)
