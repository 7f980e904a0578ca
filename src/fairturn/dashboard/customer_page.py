"""A customer's own view: upload, own documents, positions. Nothing of anyone else is read."""

from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fairturn.dashboard.documents import Place, caller_of, explained_to, place_of
from fairturn.dashboard.now import Row, standing_of
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.samples import RECENT_US
from fairturn.dashboard.visitors import Changer, Known, Visitor
from fairturn.errors import NotFound
from fairturn.explain.snapshot import waiting_since
from fairturn.model import Customer, CustomerSettings, Document, Filter, State
from fairturn.priority import LEVELS
from fairturn.service.problems import Code, Problem
from fairturn.service.submissions import FORM, submit_for

DOCUMENTS = 50
EXPLAINED = 10  # of those that wait, the first ones have their position told

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Own(NamedTuple):
    """A document, and where it stands if it waits."""

    document: Document
    place: Place | None


@router.get("/mine")
def show_own(request: Request, visitor: Known, submitted: str | None = None) -> Response:
    """The page of the customer whose key it is."""
    caller = caller_of(visitor)
    if caller.customer is None:
        return see_other(request, "/")
    documents = visitor.service.queue.store.find(
        Filter(customer=caller.customer), size=DOCUMENTS
    ).documents
    return render(
        request,
        visitor,
        "own.html",
        row=_standing(visitor, caller.customer, documents),
        documents=_with_places(visitor, documents),
        more=len(documents) == DOCUMENTS,
        submitted=submitted,
        size_bytes_max=visitor.service.plan.size_bytes_max,
    )


def _standing(visitor: Visitor, name: str, documents: list[Document]) -> Row:
    """Where the customer stands; its waits are those of the documents on this page alone."""
    service = visitor.service
    rule, now = service.queue.settings.rule, service.clock.now()
    try:
        customer = service.queue.customer(name)
    except NotFound:
        customer = Customer(
            name=name,
            settings=CustomerSettings(),
            count=0,
            count_updated_at=None,
            waiting=0,
            waiting_by_priority=(0,) * LEVELS,
            running=0,
            delayed=0,
        )
    waits = [
        max(0, d.claimed_at - waiting_since(d))
        for d in documents
        if d.claimed_at is not None and d.claimed_at >= now - RECENT_US
    ]
    return standing_of(customer, rule, now, waits=waits)


def _with_places(visitor: Visitor, documents: list[Document]) -> list[Own]:
    first = [d.id for d in reversed(documents) if d.state is State.WAITING][:EXPLAINED]
    places: dict[str, Place | None] = {}
    for id in first:
        try:
            places[id] = place_of(explained_to(visitor, id))
        except NotFound:
            continue  # it was deleted meanwhile
    return [Own(document, places.get(document.id)) for document in documents]


@router.post("/mine")
async def upload(request: Request, visitor: Changer) -> Response:
    """Take a file: raw with its name in the query from a script, or as a form."""
    caller = caller_of(visitor)
    if caller.customer is None:
        raise Problem(Code.NOT_ALLOWED)
    receipt = await submit_for(caller, request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == FORM:
        return see_other(request, "/mine", submitted=receipt.id)
    return JSONResponse({"id": receipt.id, "priority": receipt.priority}, 201)
