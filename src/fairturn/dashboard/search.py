"""The search by id, name or customer; and looks through many documents, a piece at a time.

No index knows parts of names: every submission would pay for it. A look reads on, the newest
documents first, until it has found enough or has taken its time; the page then asks for the rest.
"""

from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fairturn.clock import stopwatch
from fairturn.dashboard.documents import caller_of
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Known, Visitor
from fairturn.model import NAME_BYTES_MAX, Customer, Document, Filter
from fairturn.stores.contract import Store
from fairturn.validation.text import description

FOUND_MAX = 20
STEP = 10_000  # documents between two looks at the watch
LOOK_S = 0.1
LOOKED_MAX = 10**12

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Found(NamedTuple):
    """What one look has found, and where the next one goes on; None if all were looked at."""

    documents: list[Document]
    next: str | None
    looked: int  # at most so many documents, those of the looks before included


def look(store: Store, filter: Filter, *, after: str | None, size: int, looked: int = 0) -> Found:
    """Find up to `size` documents that match, for as long as a reader would not notice."""
    begun = stopwatch()
    found: list[Document] = []
    while True:
        page = store.find(filter, after=after, size=size - len(found), reach=STEP)
        found += page.documents
        after, looked = page.next, looked + STEP
        if after is None or len(found) >= size or stopwatch() - begun >= LOOK_S:
            return Found(found, after, looked)


NOTHING = Found([], None, 0)


@router.get("/search")
def search(
    request: Request,
    visitor: Known,
    *,
    q: Annotated[str, Query(max_length=NAME_BYTES_MAX)] = "",
    after: str | None = None,
    looked: Annotated[int, Query(ge=0, le=LOOKED_MAX)] = 0,
) -> Response:
    """Find by id, name or customer. One thing that is meant is shown at once."""
    q = q.strip()
    caller, store = caller_of(visitor), visitor.service.queue.store
    stored = store.read(q.lower()) if q else None
    if stored is not None and (caller.sees_all or stored.document.customer == caller.customer):
        return see_other(request, f"/documents/{stored.document.id}")
    wanted = Filter(customer=caller.customer, name_part=description(q, NAME_BYTES_MAX))
    found = look(store, wanted, after=after, size=FOUND_MAX, looked=looked) if q else NOTHING
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
    """Customers with this in their name, as far as they are listed; or whose names begin so."""
    listed = visitor.page.directory.listed()
    if listed is not None:
        wanted = q.casefold()
        exact = [c for c in listed.customers if c.name == q]
        return exact or [c for c in listed.customers if wanted in c.name.casefold()][:FOUND_MAX]
    store = visitor.service.queue.store
    found = store.customers(names=[q]).customers
    following = store.customers(after=q, size=FOUND_MAX).customers
    return found or [c for c in following if c.name.startswith(q)]
