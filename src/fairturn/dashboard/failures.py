"""Failed documents: dead ones, and those delayed until their next attempt.

A store has no counter of either. One page of each is read among the newest documents, so that the
cost is bounded; the numbers of larger queues are lower bounds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fairturn.model import PAGE_MAX, Document, Filter, Page, State, Summary
from fairturn.stores.contract import QueryStore

DEAD_REACH = 100_000  # row numbers per query; they jump at the start of a new epoch,
DEAD_LOOKS = 3  # so that up to three queries are made


class Failures(NamedTuple):
    dead: int
    died_lately: int
    retrying: int
    dead_exact: bool
    retrying_exact: bool
    last: Document | None  # the last one to fail


def failures_of(
    store: QueryStore, summary: Summary, newest: Sequence[Document], *, since: int
) -> Failures:
    """Return the failures of a queue; `died_lately` counts from `since`. If too many documents are
    delayed to read them, only those among `newest` are counted."""
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


def _newest_dead(store: QueryStore) -> Page:
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
    """Return when it died, or for a delayed document when its last attempt started."""
    return document.ended_at_us or document.claimed_at_us or 0
