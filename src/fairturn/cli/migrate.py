"""`fairturn migrate`: the schema of a queue in PostgreSQL."""

import click

from fairturn.cli.exit_codes import wrong_use
from fairturn.cli.options import Flags, json_option, setting_options
from fairturn.cli.target import database_of, settings_here
from fairturn.cli.terminal import number, print_line, printable
from fairturn.stores.urls import POSTGRES, scheme_of


@click.command("migrate")
@click.option(
    "--grant", metavar="ROLE", help="Grant ROLE access to the queue without the right to migrate."
)
@json_option
@setting_options("database", "schema")
def command(*, grant: str | None, as_json: bool, flags: Flags) -> None:
    """Create or migrate the schema of a queue in PostgreSQL.

    Run it as a role that may change the schema; submitters and workers then need no such role. The
    queue can be in use, and several processes can migrate at once. A queue in a file is migrated
    when it is opened.

    \b
    fairturn migrate --database postgresql://owner@host/documents --grant app
    """
    settings = settings_here(flags)
    database = database_of(settings)
    if not isinstance(database, str) or scheme_of(database) not in POSTGRES:
        wrong_use(
            "only a queue in PostgreSQL needs this command; a queue in a file is migrated when it "
            "is opened; pass a postgresql:// URL"
        )
    from fairturn.config import migrate_server

    applied = migrate_server(database, grant=grant, schema_name=settings["schema"].value)
    if as_json:
        print_line({"steps": applied, "granted": grant})
        return
    if applied:
        migrations = number(len(applied), "migration")
        click.echo(f"Applied {migrations}: the schema version is {applied[-1]}.")
    else:
        click.echo("The schema is up to date.")
    if grant is not None:
        click.echo(f"{printable(grant)} may use the queue.")
