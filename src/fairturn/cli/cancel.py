"""`fairturn cancel`: cancel documents, and stop running ones."""

from collections import Counter

import click

from fairturn.cli.bulk import change, wanted_ids
from fairturn.cli.exit_codes import FAILED, NOT_FOUND, CommandExit, wrong_use
from fairturn.cli.options import Flags, filter_options
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import number, print_line, printable
from fairturn.model import ENDED, NOT_ENDED, State
from fairturn.validation.filters import Filters

_LATE = tuple(state for state in ENDED if state is not State.CANCELLED)
_WORDS: dict[State | None, str] = {
    None: "there is no such document",
    State.CANCELLED: "cancelled",
    State.RUNNING: "running; its worker will stop it",
    **{state: f"{state} already; it cannot be cancelled" for state in _LATE},
}


@click.command("cancel")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@filter_options
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@place_options
def command(
    *, ids: tuple[str, ...], filters: Filters, yes: bool, as_json: bool, flags: Flags
) -> None:
    """Cancel documents.

    Waiting documents are cancelled at once. A worker stops a running one when it next renews the
    lease. Pass ids or filters.

    \b
    fairturn cancel 0c2f1d4b5a69788
    fairturn cancel --customer acme --state waiting
    """
    if not ids and not filters:
        wrong_use("no documents were named; pass ids, or filters such as --customer acme")
    if not ids:
        filters.setdefault("states", NOT_ENDED)
    ended: Counter[State | None] = Counter()

    def report(id: str, state: State | None) -> None:
        ended[state] += 1
        if as_json:
            print_line({"id": id, "state": state})
        elif ids:
            click.echo(f"{printable(id)}  {_WORDS[state]}")

    with reached(flags) as queue:
        wanted = wanted_ids(queue, ids, filters, "Cancel", yes=yes)
        change(wanted, queue.cancel, report, "Cancelling")
    if not ids and not as_json:
        click.echo(
            f"{number(ended[State.CANCELLED], 'document')} cancelled, "
            f"{ended[State.RUNNING]:,} running to be stopped."
        )
    if ids and ended[None]:
        raise CommandExit(f"{number(ended[None], 'document')} not found", NOT_FOUND)
    late = sum(ended[state] for state in _LATE)
    if ids and late:
        raise CommandExit(f"{number(late, 'document')} had ended already", FAILED)
