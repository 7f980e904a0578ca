"""Selection of documents by ids or filters, and changes in batches, for `cancel` and `retry`."""

from collections.abc import Callable, Sequence
from itertools import islice

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.target import QueueOrClient
from fairturn.cli.terminal import number, printable, progress
from fairturn.model import State
from fairturn.validation.filters import Filters

BATCH = 1_000


def wanted_ids(
    queue: QueueOrClient, ids: Sequence[str], filters: Filters, verb: str, *, yes: bool
) -> list[str]:
    """Return the given ids, or those that match the filters, after a confirmation."""
    if ids and filters:
        wrong_use("ids and filters cannot be combined; pass one of them")
    if ids:
        return list(dict.fromkeys(ids))
    with misuse_is_wrong_use(), progress("Searching") as advance:
        found = []
        for document in queue.iterate(**filters):
            found.append(document.id)
            advance(len(found))
    if found and not yes:
        customer = filters.get("customer")
        whose = f" of {printable(customer)}" if customer else ""
        click.confirm(f"{verb} {number(len(found), 'document')}{whose}?", abort=True, err=True)
    return found


def change(
    ids: Sequence[str],
    act: Callable[[list[str]], Sequence[State | None]],
    report: Callable[[str, State | None], None],
    title: str,
) -> None:
    """Call `act` on batches of ids, and `report` with the resulting state of each document."""
    rest = iter(ids)
    done = 0
    with progress(title, len(ids), beside_output=True) as advance:
        while batch := list(islice(rest, BATCH)):
            for id, state in zip(batch, act(batch), strict=True):
                report(id, state)
            done += len(batch)
            advance(done)
