"""`fairturn list`: documents, newest first."""

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.options import filter_options, json_option
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import print_line, printable
from fairturn.cli.values import document_as_json, print_documents
from fairturn.clock import SystemClock

if TYPE_CHECKING:
    from fairturn.client.sync_client import Client
    from fairturn.model import Document
    from fairturn.queue import Queue
    from fairturn.validation.filters import Filters

LIMIT = 20
_ROWS_AT_ONCE = 1_000


@click.command("list")
@filter_options
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="N",
    help=f"At most N; {LIMIT} by default.",
)
@click.option("--all", "everything", is_flag=True, help="All matching documents.")
@click.option("--after", metavar="ID", help="The next page: the last ID of the previous one.")
@json_option
@place_options
def command(
    *,
    filters: "Filters",
    limit: int | None,
    everything: bool,
    after: str | None,
    as_json: bool,
    flags: Mapping[str, Any],
) -> None:
    """List documents, newest first.

    \b
    fairturn list
    fairturn list --customer acme --state waiting --state running
    fairturn list --state dead --all --json
    """
    if everything and limit is not None:
        wrong_use("--all and --limit contradict each other; leave one of them out")
    wanted = None if everything else limit or LIMIT
    with reached(flags) as queue, misuse_is_wrong_use():
        found = islice(_documents(queue, filters, after, wanted), wanted)
        if as_json:
            for document in found:
                print_line(document_as_json(document))
        else:
            _print(found, wanted)


def _documents(
    queue: "Queue | Client", filters: "Filters", after: str | None, wanted: int | None
) -> Iterable["Document"]:
    from fairturn.model import PAGE_MAX

    size = min(wanted or PAGE_MAX, PAGE_MAX)
    while True:
        documents, after = queue.list(after=after, size=size, **filters)
        yield from documents
        if after is None:
            return


def _print(found: Iterable["Document"], wanted: int | None) -> None:
    # In tables of a limited size: the widths of the columns need all rows.
    documents = iter(found)
    first = next(documents, None)
    if first is None:
        click.echo("There are no such documents.")
        return
    documents = chain([first], documents)
    printed = 0
    while rows := list(islice(documents, _ROWS_AT_ONCE)):
        print_documents(rows, SystemClock().now())
        printed += len(rows)
        last = rows[-1]
    if printed == wanted:
        click.echo(f"\nFor the next page, if there is one, add: --after {printable(last.id)}")
