"""`fairturn retry`: dead documents return to waiting."""

from collections import Counter

import click

from fairturn.cli.bulk import change, wanted_ids
from fairturn.cli.exit_codes import FAILED, NOT_FOUND, CommandExit, wrong_use
from fairturn.cli.options import Flags, filter_options
from fairturn.cli.target import QueueOrClient, place_options, reached
from fairturn.cli.terminal import number, print_line, printable
from fairturn.errors import WrongState
from fairturn.model import State
from fairturn.validation.filters import Filters

_DEAD, _WAITING = "dead", "waiting"


@click.command("retry")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--dead", "all_dead", is_flag=True, help="All dead documents that match the filters.")
@filter_options
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@place_options
def command(
    *,
    ids: tuple[str, ...],
    all_dead: bool,
    filters: Filters,
    yes: bool,
    as_json: bool,
    flags: Flags,
) -> None:
    """Retry dead documents.

    They wait with their old priority and position, and with all their attempts. Pass ids, or --dead
    for all dead documents. Running it twice does no harm: a waiting document without attempts is
    not changed.

    \b
    fairturn retry 0c2f1d4b5a69788
    fairturn retry --dead --customer acme
    """
    if not ids and not all_dead:
        wrong_use("no documents were named; pass ids, or --dead for all dead ones")
    if ids and all_dead:
        wrong_use("ids and --dead cannot be combined; pass one of them")
    if filters.get("states", (_DEAD,)) != (_DEAD,):
        wrong_use("only dead documents can be retried; leave out --state")
    if all_dead:
        filters["states"] = (_DEAD,)
    before: Counter[str | None] = Counter()

    def report(id: str, state: State | None) -> None:
        waits = state == _DEAD or (bool(ids) and state == _WAITING and _is_retried(queue, id))
        before[_DEAD if waits else state] += 1
        if as_json:
            print_line({"id": id, "state": _WAITING if state == _DEAD else state})
        elif ids:
            click.echo(f"{printable(id)}  {_result(state, waits=waits)}")

    with reached(flags) as queue:
        wanted = wanted_ids(queue, ids, filters, "Retry", yes=yes)
        change(wanted, queue.retry, report, "Retrying")
    if not ids and not as_json:
        click.echo(f"{number(before[_DEAD], 'document')} waiting again.")
    if ids and before[None]:
        raise CommandExit(f"{number(before[None], 'document')} not found", NOT_FOUND)
    if ids and before[_DEAD] < len(wanted):
        raise CommandExit(f"{number(len(wanted) - before[_DEAD], 'document')} not dead", FAILED)


def _is_retried(queue: QueueOrClient, id: str) -> bool:
    """Return whether a waiting document has no attempts, as after a retry."""
    try:
        queue.retry(id)
    except WrongState:
        return False
    return True


def _result(before: State | None, *, waits: bool) -> str:
    if before is None:
        return "there is no such document"
    if not waits:
        return f"{before}; only a dead document can be retried"
    return "waiting again" if before == _DEAD else "waiting already"
