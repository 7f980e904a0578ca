"""`fairturn list`: documents, newest first."""

from collections.abc import Iterator
from functools import partial
from itertools import islice

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use
from fairturn.cli.options import Flags, entities, filter_options, page_options
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import print_line, printable
from fairturn.cli.values import document_as_json, print_documents
from fairturn.clock import SystemClock
from fairturn.model import Document
from fairturn.validation.filters import Filters

LIMIT = 20
_ROWS_AT_ONCE = 1_000


@click.command("list")
@filter_options
@page_options(LIMIT, "matching documents", "ID")
@place_options
def command(
    *, filters: Filters, after: str | None, wanted: int | None, as_json: bool, flags: Flags
) -> None:
    """List documents, newest first.

    \b
    fairturn list
    fairturn list --customer acme --state waiting --state running
    fairturn list --state dead --all --json
    """
    with reached(flags) as queue, misuse_is_wrong_use():
        found = entities(partial(queue.list, **filters), after, wanted)
        if as_json:
            for document in found:
                print_line(document_as_json(document))
        else:
            _print(found, wanted)


def _print(documents: Iterator[Document], wanted: int | None) -> None:
    # In tables of a limited size: the widths of the columns need all rows.
    printed = 0
    while rows := list(islice(documents, _ROWS_AT_ONCE)):
        print_documents(rows, SystemClock().now())
        printed += len(rows)
        last = rows[-1]
    if not printed:
        click.echo("There are no such documents.")
    elif printed == wanted:
        click.echo(f"\nFor the next page, if there is one, add: --after {printable(last.id)}")
