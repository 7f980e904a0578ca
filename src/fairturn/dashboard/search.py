"""Search by id, name or customer. Names are scanned in steps of limited time; the page requests
the next step."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fairturn.dashboard.documents import caller_of
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Known, Visitor
from fairturn.model import NAME_BYTES_MAX, Customer, Filter
from fairturn.service.callers import document_of, refuse_foreign_cursor
from fairturn.service.scan import SearchResult, scan_names
from fairturn.validation.text import description

FOUND_MAX = 20
SCANNED_MAX = 10**12

router = APIRouter(route_class=PageRoute, include_in_schema=False)


NOTHING = SearchResult([], None, 0)


@router.get("/search")
def search(
    request: Request,
    visitor: Known,
    *,
    q: Annotated[str, Query(max_length=NAME_BYTES_MAX)] = "",
    after: str | None = None,
    scanned: Annotated[int, Query(ge=0, le=SCANNED_MAX)] = 0,
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
        found = scan_names(store, filter, after=after, size=FOUND_MAX, scanned=scanned, own=own)
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
