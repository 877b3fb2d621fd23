"""`fordstone hub restore`: make a log that was restored from a backup known as such to nodes and centers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from fordstone.cli.errors import UserError
from fordstone.cli.options import HelpCommand
from fordstone.storage.clock import wall_clock_us


@click.command(
    "restore",
    cls=HelpCommand,
    examples=["fordstone hub restore --data /var/lib/hub"],
)
@click.option("--data", metavar="DIR", default=None, help="The hub's data directory.  [default: hub]")
@click.pass_obj
def restore(parent: str, /, *, data: str | None) -> None:
    """Mark the hub's data as restored from a backup. The hub must not run.

    Run it once after the data directory was put back, before the hub is started. The log gets a new id, and leases end. Each node then
    sends again what it still has of the epochs that the log lacks; the others are listed as lost (`fordstone nodes`). Nodes take control
    tables as they are in the backup; with which version each ends is printed.
    """
    from fordstone.errors import FordstoneError, StoreLockedError
    from fordstone.hub.store.sqlite import LOG_NAME, SqliteStore
    from fordstone.storage.disk import OsDisk

    directory = Path(data or parent)
    path = directory / LOG_NAME
    if not path.is_file():
        raise UserError(f"{directory} has no {LOG_NAME}, so it is not the data directory of a hub.")
    try:
        disk = OsDisk(directory, private=True)
        try:
            disk.lock()
            store = SqliteStore(path)
            try:
                with store.transaction() as log:
                    log_id = log.mark_restored(now_us=wall_clock_us())
                    tables = log.control_tables()
            finally:
                store.close()
        finally:
            disk.close()
    except StoreLockedError as error:
        raise UserError(
            f"a hub is running in {directory}, so its log was not marked as restored. Stop the hub, then try again."
        ) from error
    except FordstoneError as error:
        raise UserError(str(error)) from error
    click.echo(f"the log in {directory} has the new id {log_id}. Start the hub; nodes compare their epochs with it.")
    for pipeline, control, newest in tables:
        at = datetime.fromtimestamp(newest.published_us // 1_000_000, UTC)
        click.echo(
            f"control table {control} of pipeline {pipeline} ends with version {newest.version}, published at {at:%Y-%m-%d %H:%M:%S} UTC."
        )
    if tables:
        click.echo(
            "What was published to control tables after that is lost, with the tables that are not listed. Nodes take the tables as "
            "they are here; publish again what is missing."
        )
