"""Documents that failed: dead ones, and those that are delayed until their next attempt.

A store keeps the number of neither. One page of each is read, among the newest documents, so that
the cost is bounded whatever the queue holds; beyond that the numbers are lower bounds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fairturn.model import PAGE_MAX, Document, Filter, Page, State, Summary
from fairturn.stores.contract import Store

DEAD_REACH = 100_000  # newest documents, among which dead ones are looked for,
DEAD_LOOKS = 3  # at most: the numbers of documents jump where a new epoch begins


class Failures(NamedTuple):
    """The documents that failed and were not completed since, at one moment."""

    dead: int
    died_lately: int
    retrying: int
    dead_exact: bool
    retrying_exact: bool
    last: Document | None  # the one that failed last


def failures_of(
    store: Store, summary: Summary, newest: Sequence[Document], *, since: int
) -> Failures:
    """The failures of a queue; `since` is where "lately" begins. `newest` are its newest documents,
    which stand for all if too many are delayed to read them."""
    dead, more_dead = _newest_dead(store) if summary.dead else Page([], None)
    few_delayed = summary.delayed <= PAGE_MAX
    if summary.delayed and few_delayed:
        delayed = store.find(Filter(states=(State.DELAYED,)), size=PAGE_MAX).documents
    else:
        delayed = list(newest)
    retrying = [d for d in delayed if d.state is State.DELAYED and d.attempts]
    lately = [d for d in dead if _failed_at(d) >= since]
    return Failures(
        dead=len(dead),
        died_lately=len(lately),
        retrying=len(retrying),
        dead_exact=more_dead is None,
        retrying_exact=few_delayed,
        last=max([*lately, *retrying], key=_failed_at, default=None),
    )


def _newest_dead(store: Store) -> Page:
    """The newest dead documents, and whether there may be more."""
    dead: list[Document] = []
    after: str | None = None
    for _ in range(DEAD_LOOKS):
        page = store.find(
            Filter(states=(State.DEAD,)), after=after, size=PAGE_MAX, reach=DEAD_REACH
        )
        dead, after = [*dead, *page.documents], page.next
        if after is None or len(dead) >= PAGE_MAX:
            break
    return Page(dead[:PAGE_MAX], after)


def _failed_at(document: Document) -> int:
    """When it died. Of a document that is delayed only the begin of the attempt is known."""
    return document.ended_at or document.claimed_at or 0
