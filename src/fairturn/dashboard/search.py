"""Search by id, name or customer, in steps of limited time.

There is no index of substrings of names, because it would slow down every submission. A search
scans from the newest document until it has a page of results or `LOOK_S` has passed; the page then
requests the next step.
"""

from dataclasses import replace
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fairturn.clock import stopwatch
from fairturn.dashboard.documents import caller_of
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Known, Visitor
from fairturn.model import NAME_BYTES_MAX, Customer, Document, Filter
from fairturn.service.callers import document_of, refuse_foreign_cursor
from fairturn.stores.contract import QueryStore
from fairturn.validation.text import description

FOUND_MAX = 20
STEP = 10_000  # documents per query
LOOK_S = 0.1
LOOKED_MAX = 10**12

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class SearchResult(NamedTuple):
    """The results of one step."""

    documents: list[Document]
    next: str | None  # where the next step starts; None at the end
    looked: int  # upper bound of the documents scanned, including earlier steps


def look(
    store: QueryStore,
    filter: Filter,
    *,
    after: str | None,
    size: int,
    looked: int = 0,
    own: bool = False,
) -> SearchResult:
    """Scan for up to `size` matching documents, for `LOOK_S` at most. With `own`, the next step
    starts at a document of the filter's customer, so that the id of no other one is shown."""
    begun = stopwatch()
    found: list[Document] = []
    while True:
        page = store.find(filter, after=after, size=size - len(found), reach=STEP)
        found += page.documents
        after, looked = page.next, looked + STEP
        if own and after is not None and len(found) < size:
            matching, after = _next_own(store, filter, after)
            found += matching
        if after is None or len(found) >= size or stopwatch() - begun >= LOOK_S:
            return SearchResult(found, after, looked)


def _next_own(store: QueryStore, filter: Filter, after: str) -> tuple[list[Document], str | None]:
    """Return the customer's newest document below `after`, if it matches, and its id."""
    below = store.find(Filter(customer=filter.customer), after=after, size=1).documents
    if not below:
        return [], None
    return store.find(replace(filter, ids=(below[0].id,)), size=1).documents, below[0].id


NOTHING = SearchResult([], None, 0)


@router.get("/search")
def search(
    request: Request,
    visitor: Known,
    *,
    q: Annotated[str, Query(max_length=NAME_BYTES_MAX)] = "",
    after: str | None = None,
    looked: Annotated[int, Query(ge=0, le=LOOKED_MAX)] = 0,
) -> Response:
    """Search by id, name or customer. A single result is opened directly."""
    q = description(q.strip(), NAME_BYTES_MAX)
    caller, store = caller_of(visitor), visitor.service.queue.queries
    refuse_foreign_cursor(visitor.service, caller, after)
    document = document_of(visitor.service, caller, q.lower()) if q else None
    if document is not None:
        return see_other(request, f"/documents/{document.id}")
    filter, own = Filter(customer=caller.customer, name_part=q), not caller.sees_all
    found = NOTHING
    if q:
        found = look(store, filter, after=after, size=FOUND_MAX, looked=looked, own=own)
    customers = _customers(visitor, q) if caller.sees_all and q and after is None else []
    if after is None and found.next is None and len(found.documents) + len(customers) == 1:
        if customers:
            return see_other(request, "/customer", name=customers[0].name)
        return see_other(request, f"/documents/{found.documents[0].id}")
    return render(
        request,
        visitor,
        "search.html",
        q=q,
        documents=found.documents,
        customers=customers,
        further=found,
        full=len(found.documents) >= FOUND_MAX,
    )


def _customers(visitor: Visitor, q: str) -> list[Customer]:
    """Return customers with `q` in their names; only as a prefix while they are not listed yet."""
    listed = visitor.page.directory.listed()
    if listed is not None:
        part = q.casefold()
        exact = [c for c in listed.customers if c.name == q]
        return exact or [c for c in listed.customers if part in c.name.casefold()][:FOUND_MAX]
    store = visitor.service.queue.queries
    found = store.customers(names=[q]).customers
    following = store.customers(after=q, size=FOUND_MAX).customers
    return found or [c for c in following if c.name.startswith(q)]
