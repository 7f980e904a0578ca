"""`fairturn retry`: dead and expired documents return to waiting."""

from collections import Counter

import click

from fairturn.cli.bulk import change, wanted_ids
from fairturn.cli.exit_codes import FAILED, NOT_FOUND, CommandExit, misuse_is_wrong_use, wrong_use
from fairturn.cli.options import DURATION, TIMESTAMP, Flags, filter_options
from fairturn.cli.target import QueueOrClient, place_options, reached
from fairturn.cli.terminal import number, print_line, printable
from fairturn.errors import WrongState
from fairturn.model import State
from fairturn.validation.filters import Filters
from fairturn.validation.submission import refuse_expiry

_DEAD, _EXPIRED, _WAITING = "dead", "expired", "waiting"


@click.command("retry")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--dead", "all_dead", is_flag=True, help="All dead documents that match the filters.")
@click.option(
    "--expired",
    "all_expired",
    is_flag=True,
    help="All expired documents that match the filters; needs a new expiry.",
)
@click.option(
    "--expires-in",
    "expires_in_s",
    type=DURATION,
    help="Their new expiry, from now, such as 30min, 2h or 7d.",
)
@click.option("--expires-at", type=TIMESTAMP, help="The same as a timestamp.")
@filter_options
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@place_options
def command(
    *,
    ids: tuple[str, ...],
    all_dead: bool,
    all_expired: bool,
    expires_in_s: float | None,
    expires_at: int | None,
    filters: Filters,
    yes: bool,
    as_json: bool,
    flags: Flags,
) -> None:
    """Retry dead documents, and with a new expiry also expired ones.

    They wait with their old priority and position, with all their attempts, at the step that
    failed. Pass ids, --dead for all dead documents, or --expired for all expired ones. Running it
    twice does no harm: a waiting document without attempts is not changed. Without a new expiry,
    the documents do not expire again.

    \b
    fairturn retry 0c2f1d4b5a69788
    fairturn retry --dead --customer acme
    fairturn retry --expired --expires-in 2h
    """
    with misuse_is_wrong_use():
        refuse_expiry(expires_at, expires_in_s)
    retried = (_DEAD,) if expires_in_s is None and expires_at is None else (_DEAD, _EXPIRED)
    _refuse_contradictions(ids, filters, retried, all_dead=all_dead, all_expired=all_expired)
    if not ids:
        filters["states"] = [_DEAD] * all_dead + [_EXPIRED] * all_expired
    before: Counter[str | None] = Counter()

    def report(id: str, state: State | None) -> None:
        waits = state in retried or (bool(ids) and state == _WAITING and _is_retried(queue, id))
        before[_DEAD if waits else state] += 1
        if as_json:
            print_line({"id": id, "state": _WAITING if state in retried else state})
        elif ids:
            click.echo(f"{printable(id)}  {_result(state, retried, waits=waits)}")

    with reached(flags) as queue:
        wanted = wanted_ids(queue, ids, filters, "Retry", yes=yes)

        def retry(batch: list[str]) -> list[State | None]:
            return queue.retry(batch, expires_at=expires_at, expires_in_s=expires_in_s)

        change(wanted, retry, report, "Retrying")
    if not ids and not as_json:
        click.echo(f"{number(before[_DEAD], 'document')} waiting again.")
    if ids and before[None]:
        raise CommandExit(f"{number(before[None], 'document')} not found", NOT_FOUND)
    if ids and before[_DEAD] < len(wanted):
        which = " or ".join(retried)
        raise CommandExit(f"{number(len(wanted) - before[_DEAD], 'document')} not {which}", FAILED)


def _refuse_contradictions(
    ids: tuple[str, ...],
    filters: Filters,
    retried: tuple[str, ...],
    *,
    all_dead: bool,
    all_expired: bool,
) -> None:
    if not (ids or all_dead or all_expired):
        wrong_use(
            "no documents were named; pass ids, --dead for all dead ones, or --expired for all "
            "expired ones"
        )
    if ids and (all_dead or all_expired):
        flag = "--dead" if all_dead else "--expired"
        wrong_use(f"ids and {flag} cannot be combined; pass one of them")
    if all_expired and _EXPIRED not in retried:
        wrong_use("--expired needs a new expiry; pass --expires-in or --expires-at")
    if filters.get("states", (_DEAD,)) != (_DEAD,):
        wrong_use("only dead documents can be retried; leave out --state")


def _is_retried(queue: QueueOrClient, id: str) -> bool:
    """Return whether a waiting document has no attempts, as after a retry."""
    try:
        queue.retry(id)
    except WrongState:
        return False
    return True


def _result(before: State | None, retried: tuple[str, ...], *, waits: bool) -> str:
    if before is None:
        return "there is no such document"
    if waits:
        return "waiting again" if before in retried else "waiting already"
    if before == _EXPIRED:
        return "expired; pass a new expiry with --expires-in or --expires-at"
    return f"{before}; only a dead document can be retried"
