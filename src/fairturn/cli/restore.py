"""`fairturn restore`: a backup in the place of a queue in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from fairturn.cli.exit_codes import Ending, wrong_use
from fairturn.cli.options import json_option, setting_options
from fairturn.cli.target import settings_here
from fairturn.cli.terminal import number, print_line, printable, progress, size
from fairturn.urls import is_address


@click.command("restore")
@click.argument("backup", type=click.Path())
@click.argument("database", type=click.Path())
@click.option("--replace", is_flag=True, help="Replace a queue that is there.")
@json_option
@setting_options("allow_network", "contents_shared")
def command(
    *, backup: str, database: str, replace: bool, as_json: bool, flags: Mapping[str, Any]
) -> None:
    """Restore a queue in a file from a backup.

    BACKUP is a file that `fairturn backup` made, with its contents in BACKUP.contents; it stays as
    it is. DATABASE becomes a queue with everything that is in it. Stop every process that uses
    DATABASE before. With --replace it takes the place of a queue that is there, together with its
    write-ahead log, in one step: an interrupted restore leaves the queue before.

    A new epoch begins: ids and fences that were given out after the backup are never given out
    again.

    \b
    fairturn restore /backups/documents.db documents.db
    fairturn restore /backups/documents.db documents.db --replace
    """
    if is_address(backup) or is_address(database):
        wrong_use("only a queue in a file is restored by this; PostgreSQL: pg_restore")
    from fairturn.maintenance.restore import restore

    settings = settings_here(flags)
    with progress("Restoring") as advance:
        made = restore(
            backup,
            Path(database).expanduser(),
            replace=replace,
            allow_network=settings["allow_network"].value,
            contents_shared=settings["contents_shared"].value,
            progress=advance,
        )
    if as_json:
        print_line({**made._asdict(), "path": str(made.path)})
    else:
        contents = number(made.contents, "content")
        what = "Replaced" if made.replaced else "Made"
        click.echo(
            f"{what} {printable(str(made.path))} from {printable(backup)}: "
            f"{size(made.size_bytes)}, {contents}. A new epoch has begun."
        )
    for sentence in made.damaged:
        click.echo(printable(sentence), err=True)
    if made.damaged:
        raise Ending(
            f"{number(len(made.damaged), 'content')} could not be restored, being damaged or "
            "missing in the backup; everything else is in the queue"
        )
