"""`fairturn purge`: deletion of a customer."""

import click

from fairturn.cli.exit_codes import WRONG_USE, CommandExit, misuse_is_wrong_use
from fairturn.cli.options import Flags
from fairturn.cli.target import QueueOrClient, place_options, reached
from fairturn.cli.terminal import number, print_line, printable, progress
from fairturn.errors import NotFound


@click.command("purge")
@click.argument("customer")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@place_options
def command(*, customer: str, yes: bool, as_json: bool, flags: Flags) -> None:
    """Delete a customer with all its data.

    It deletes all documents, waiting, running and ended, with contents and results, the count, the
    settings and the access keys. Running work is lost. This cannot be undone, so the command asks
    for the name again.

    \b
    fairturn purge acme
    """
    with reached(flags) as queue, misuse_is_wrong_use():
        shown = printable(customer)
        if not yes:
            click.echo(f"{shown} has {_data_of(queue, customer)}. All will be deleted.", err=True)
            typed = click.prompt("Type the customer's name to continue", err=True)
            if typed not in (customer, shown):
                raise CommandExit(f"{typed!r} is not {customer!r}; nothing was deleted", WRONG_USE)
        with progress("Deleting"):
            queue.purge(customer)
    if as_json:
        print_line({"customer": customer})
    else:
        click.echo(f"Deleted {shown} with all its data.")


def _data_of(queue: QueueOrClient, customer: str) -> str:
    try:
        found = queue.customer(customer)
    except NotFound:  # a customer that has never submitted may have access keys
        return "no documents, and possibly access keys"
    waiting = number(found.waiting + found.delayed, "document")
    return f"{waiting} waiting and {found.running:,} running, and possibly ended ones"
