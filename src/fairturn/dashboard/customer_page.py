"""A customer's own view: upload, documents, queue positions. It reads no other customer's data."""

from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fairturn.dashboard.documents import DocumentPosition, caller_of, explained_to, place_of
from fairturn.dashboard.now import CustomerRow, customer_row
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.samples import RECENT_US
from fairturn.dashboard.visitors import Changer, Known, Visitor
from fairturn.errors import NotFound
from fairturn.explain.snapshot import waiting_since
from fairturn.model import (
    DEFAULT_KIND_NAME,
    KIND_BYTES_MAX,
    Customer,
    CustomerSettings,
    Document,
    Filter,
    State,
)
from fairturn.priority import LEVELS
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.submissions import FORM, submit_for

DOCUMENTS = 50
EXPLAINED = 10  # waiting documents that are shown with their position

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class OwnDocument(NamedTuple):
    document: Document
    place: DocumentPosition | None


@router.get("/mine")
def show_own(request: Request, visitor: Known, submitted: str | None = None) -> Response:
    caller = caller_of(visitor)
    if caller.customer is None:
        return see_other(request, "/")
    documents = visitor.service.queue.queries.find(
        Filter(customer=caller.customer), size=DOCUMENTS
    ).documents
    return render(
        request,
        visitor,
        "own.html",
        row=_own_row(visitor, caller.customer, documents),
        documents=_with_places(visitor, documents),
        more=len(documents) == DOCUMENTS,
        submitted=submitted,
        size_bytes_max=visitor.service.plan.size_bytes_max,
        kinds=_kinds(visitor, documents),
        kind_max=KIND_BYTES_MAX,
    )


def _kinds(visitor: Visitor, documents: list[Document]) -> list[str]:
    """Return the kinds of work to suggest for an upload: only those of the customer's documents,
    because the others may come from other customers. Empty if the queue has one kind."""
    if not visitor.page.trail.lately().has_kinds:
        return []
    return sorted({DEFAULT_KIND_NAME, *(document.kind for document in documents)})


def _own_row(visitor: Visitor, name: str, documents: list[Document]) -> CustomerRow:
    """Return the customer's row, with the waits of the documents on this page."""
    service = visitor.service
    rule, now = service.queue.settings.rule, service.clock.now()
    try:
        customer = service.queue.customer(name)
    except NotFound:
        customer = Customer(
            name=name,
            settings=CustomerSettings(),
            count=0,
            count_updated_at_us=None,
            waiting=0,
            waiting_by_priority=(0,) * LEVELS,
            running=0,
            delayed=0,
        )
    waits = [
        max(0, d.claimed_at_us - waiting_since(d))
        for d in documents
        if d.claimed_at_us is not None and d.claimed_at_us >= now - RECENT_US
    ]
    return customer_row(customer, rule, now, waits=waits)


def _with_places(visitor: Visitor, documents: list[Document]) -> list[OwnDocument]:
    first = [d.id for d in reversed(documents) if d.state is State.WAITING][:EXPLAINED]
    places: dict[str, DocumentPosition | None] = {}
    for id in first:
        try:
            places[id] = place_of(explained_to(visitor, id))
        except NotFound:
            continue  # deleted since the list was read
    return [OwnDocument(document, places.get(document.id)) for document in documents]


@router.post("/mine")
async def upload(request: Request, visitor: Changer) -> Response:
    """Submit a file: a raw body from the script, with its name in the query, or a form."""
    caller = caller_of(visitor)
    if caller.customer is None:
        raise Problem(ProblemCode.NOT_ALLOWED)
    receipt = await submit_for(caller, request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == FORM:
        return see_other(request, "/mine", submitted=receipt.id)
    return JSONResponse({"id": receipt.id, "priority": receipt.priority}, 201)
