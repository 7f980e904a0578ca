"""Routes that change documents by a list of ids; `administration.py` changes them by a filter."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from fairturn.model import PAGE_MAX, Filter, State
from fairturn.service import shapes
from fairturn.service.callers import Caller, Submitter
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of

router = APIRouter(tags=["documents"])


class DocumentIdsJson(shapes.RequestFields):
    ids: Annotated[list[str], Field(min_length=1, max_length=PAGE_MAX)]


class DocumentStatesJson(shapes.ResponseJson):
    """The state of each document, in the order of `ids`; null for an unknown id."""

    states: list[State | None]


@router.post("/v1/documents/cancel", response_model=DocumentStatesJson, responses=problems())
def cancel_documents(request: Request, caller: Submitter, body: DocumentIdsJson) -> Any:
    """Cancel up to 1,000 documents by id.

    The response has the state of each document afterwards. A running document stays `running` until
    its handler stops. A document that has ended does not change.
    """
    service = service_of(request)
    own = _own(service, caller, body.ids)
    return _answered(body.ids, dict(zip(own, service.queue.cancel(own), strict=True)))


@router.post("/v1/documents/retry", response_model=DocumentStatesJson, responses=problems())
def retry_documents(request: Request, caller: Submitter, body: DocumentIdsJson) -> Any:
    """Retry up to 1,000 dead documents by id.

    The response has the state of each document before the request: those that were `dead` are now
    waiting, all others are unchanged.
    """
    service = service_of(request)
    own = _own(service, caller, body.ids)
    return _answered(body.ids, dict(zip(own, service.queue.retry(own), strict=True)))


def _own(service: Service, caller: Caller, ids: list[str]) -> list[str]:
    """Return the ids that the caller may change, without duplicates."""
    unique = tuple(dict.fromkeys(ids))
    if caller.sees_all:
        return list(unique)
    found = service.queue.queries.find(Filter(customer=caller.customer, ids=unique), size=PAGE_MAX)
    return [document.id for document in found.documents]


def _answered(ids: list[str], states: dict[str, State | None]) -> DocumentStatesJson:
    return DocumentStatesJson(states=[states.get(id) for id in ids])
