"""`fairturn migrate`: the schema of a queue in PostgreSQL."""

from collections.abc import Mapping
from typing import Any

import click

from fairturn.cli.exit_codes import wrong_use
from fairturn.cli.options import json_option, setting_options
from fairturn.cli.target import database_of, settings_here
from fairturn.cli.terminal import number, print_line, printable
from fairturn.urls import POSTGRES, scheme_of


@click.command("migrate")
@click.option("--grant", metavar="ROLE", help="Let ROLE use the queue, but not change its schema.")
@json_option
@setting_options("database")
def command(*, grant: str | None, as_json: bool, flags: Mapping[str, Any]) -> None:
    """Make or bring up the schema of a queue in PostgreSQL.

    With a role that may change the schema; submitters and workers then need none that may. It is
    safe while they run, and when several do it at once. A queue in a file needs no such step.

    \b
    fairturn migrate --database postgresql://owner@host/documents --grant app
    """
    database = database_of(settings_here(flags))
    if not isinstance(database, str) or scheme_of(database) not in POSTGRES:
        wrong_use(
            "only a queue in PostgreSQL has a schema, and one in a file is brought up when it is "
            "opened; name a postgresql:// address"
        )
    from fairturn.config import migrate_server

    made = migrate_server(database, grant=grant)
    if as_json:
        print_line({"steps": made, "granted": grant})
        return
    if made:
        click.echo(f"Made {number(len(made), 'step')}: the schema has version {made[-1]} now.")
    else:
        click.echo("The schema is the newest already.")
    if grant is not None:
        click.echo(f"{printable(grant)} may use the queue.")
