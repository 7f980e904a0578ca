"""`fairturn cancel`: end what has not begun, and ask what runs to stop."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.bulk import change, wanted_ids
from fairturn.cli.exit_codes import FAILED, NOT_FOUND, Ending, wrong_use
from fairturn.cli.options import filter_options, json_option
from fairturn.cli.remote import place_options, reached
from fairturn.cli.terminal import number, print_line, printable

if TYPE_CHECKING:
    from fairturn.model import State
    from fairturn.validation.filters import Filters

_NOT_ENDED = ("delayed", "waiting", "running")
_WORDS = {
    None: "there is no such document",
    "cancelled": "cancelled",
    "running": "running; its worker is told to stop",
    "completed": "completed already; it cannot be cancelled",
    "dead": "dead already; it cannot be cancelled",
}


@click.command("cancel")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@filter_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@place_options
def command(
    *,
    ids: tuple[str, ...],
    filters: "Filters",
    yes: bool,
    as_json: bool,
    flags: Mapping[str, Any],
) -> None:
    """Cancel documents.

    What waits ends at once; what runs is told to stop when its worker renews its lease. Name
    documents by their ids, or by filters.

    \b
    fairturn cancel 0c2f1d4b5a69788
    fairturn cancel --customer acme --state waiting
    """
    if not ids and not filters:
        wrong_use("say which documents: ids, or filters such as --customer acme")
    if not ids:
        filters.setdefault("states", _NOT_ENDED)
    ended: Counter[str | None] = Counter()

    def tell(id: str, state: "State | None") -> None:
        ended[state] += 1
        if as_json:
            print_line({"id": id, "state": state})
        elif ids:
            click.echo(f"{printable(id)}  {_WORDS[state]}")

    with reached(flags) as queue:
        wanted = wanted_ids(queue, ids, filters, "Cancel", yes=yes)
        change(wanted, queue.cancel, tell, "Cancelling")
    if not ids and not as_json:
        click.echo(
            f"{number(ended['cancelled'], 'document')} cancelled, "
            f"{ended['running']:,} running told to stop."
        )
    if ids and ended[None]:
        raise Ending(f"{number(ended[None], 'document')} not found", NOT_FOUND)
    if ids and ended["completed"] + ended["dead"]:
        late = ended["completed"] + ended["dead"]
        raise Ending(f"{number(late, 'document')} had ended already", FAILED)
