"""`fairturn restore`: a queue in a file, from a backup."""

from pathlib import Path

import click

from fairturn.cli.exit_codes import CommandExit, wrong_use
from fairturn.cli.options import Flags, json_option, setting_options
from fairturn.cli.target import settings_here
from fairturn.cli.terminal import number, print_line, printable, progress, size
from fairturn.stores.urls import is_address


@click.command("restore")
@click.argument("backup", type=click.Path())
@click.argument("database", type=click.Path())
@click.option("--replace", is_flag=True, help="Replace an existing queue.")
@json_option
@setting_options("allow_network", "contents_shared")
def command(*, backup: str, database: str, replace: bool, as_json: bool, flags: Flags) -> None:
    """Restore a queue in a file from a backup.

    BACKUP is a file that `fairturn backup` created, with its contents in BACKUP.contents; it is not
    changed. First stop every process that uses DATABASE. With --replace, an existing queue and its
    write-ahead log are replaced atomically: an interrupted restore leaves the previous queue.

    A new epoch begins: ids and fences issued after the backup are never issued again.

    \b
    fairturn restore /backups/documents.db documents.db
    fairturn restore /backups/documents.db documents.db --replace
    """
    if is_address(backup) or is_address(database):
        wrong_use("only a queue in a file can be restored; for PostgreSQL use pg_restore")
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
        contents = number(made.contents, "stored file")
        verb = "Replaced" if made.replaced else "Created"
        click.echo(
            f"{verb} {printable(str(made.path))} from {printable(backup)}: "
            f"{size(made.size_bytes)}, {contents}. A new epoch has begun."
        )
    for sentence in made.damaged:
        click.echo(printable(sentence), err=True)
    if made.damaged:
        raise CommandExit(
            f"{number(len(made.damaged), 'stored file')} could not be restored: damaged or "
            "missing in the backup; everything else is restored"
        )
