"""Searches by a part of a name, in steps of limited time.

There is no index of substrings of names, because it would slow down every submission. A scan starts
at the newest document and ends with a page of results or after `SCAN_S`; the next request goes on
from there.
"""

from dataclasses import replace
from typing import NamedTuple

from fairturn.clock import stopwatch
from fairturn.model import Document, Filter
from fairturn.stores.contract import QueryStore

STEP = 10_000  # documents per query
SCAN_S = 0.1


class SearchResult(NamedTuple):
    """The results of one step."""

    documents: list[Document]
    next: str | None  # where the next step starts; None at the end
    scanned: int  # upper bound of the documents scanned, including earlier steps


def scan_names(
    store: QueryStore,
    filter: Filter,
    *,
    after: str | None,
    size: int,
    scanned: int = 0,
    own: bool = False,
) -> SearchResult:
    """Scan for up to `size` matching documents, for `SCAN_S` at most. With `own`, the next step
    starts at a document of the filter's customer, so that the id of no other one is shown."""
    begun = stopwatch()
    found: list[Document] = []
    while True:
        page = store.find(filter, after=after, size=size - len(found), reach=STEP)
        found += page.documents
        after, scanned = page.next, scanned + STEP
        if own and after is not None and len(found) < size:
            matching, after = _next_own(store, filter, after)
            found += matching
        if after is None or len(found) >= size or stopwatch() - begun >= SCAN_S:
            return SearchResult(found, after, scanned)


def _next_own(store: QueryStore, filter: Filter, after: str) -> tuple[list[Document], str | None]:
    """Return the customer's newest document below `after`, if it matches, and its id."""
    below = store.find(Filter(customer=filter.customer), after=after, size=1).documents
    if not below:
        return [], None
    id = below[0].id
    if filter.ids is not None and id not in filter.ids:
        return [], id
    return store.find(replace(filter, ids=(id,)), size=1).documents, id
