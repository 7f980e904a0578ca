"""`fairturn purge`: a customer who leaves."""

from collections.abc import Mapping
from typing import Any

import click

from fairturn.cli.exit_codes import WRONG_USE, Ending, misuse_is_wrong_use
from fairturn.cli.options import json_option
from fairturn.cli.remote import place_options, reached
from fairturn.cli.terminal import number, print_line, printable, progress


@click.command("purge")
@click.argument("customer")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@place_options
def command(*, customer: str, yes: bool, as_json: bool, flags: Mapping[str, Any]) -> None:
    """Delete a customer with everything.

    Every document, waiting, running and ended, its contents and results, the count and the
    settings. Running work is lost. This cannot be undone, so the name has to be typed again.

    \b
    fairturn purge acme
    """
    with reached(flags) as queue, misuse_is_wrong_use():
        known = queue.customer(customer)
        shown = printable(customer)
        if not yes:
            click.echo(
                f"{shown} has {number(known.waiting + known.delayed, 'document')} waiting and "
                f"{known.running:,} running, and perhaps ended ones. All will be deleted.",
                err=True,
            )
            typed = click.prompt("Type the customer's name to go on", err=True)
            if typed not in (customer, shown):
                raise Ending(f"{typed!r} is not {customer!r}; nothing was deleted", WRONG_USE)
        with progress("Deleting"):
            queue.purge(customer)
    if as_json:
        print_line({"customer": customer})
    else:
        click.echo(f"{shown} is deleted, with everything.")
