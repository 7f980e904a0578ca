"""Many documents at once, named by their ids. (All that match a filter: `administration.py`.)"""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from fairturn.model import PAGE_MAX, Filter, State
from fairturn.service import shapes
from fairturn.service.callers import Caller, Submitter
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of

router = APIRouter(tags=["documents"])


class ToChange(shapes.Asked):
    """Which documents."""

    ids: Annotated[list[str], Field(min_length=1, max_length=PAGE_MAX)]


class ChangedMany(shapes.Shape):
    """A state for each id, in their order; null where there is no such document."""

    states: list[State | None]


@router.post("/v1/documents/cancel", response_model=ChangedMany, responses=problems())
def cancel_documents(request: Request, caller: Submitter, wanted: ToChange) -> Any:
    """Cancel documents by their ids, up to 1,000.

    The answer has the state of each afterwards: a running one is asked to stop, and stays `running`
    until it has; one that had ended stays as it is.
    """
    service = service_of(request)
    own = _own(service, caller, wanted.ids)
    return _answered(wanted.ids, dict(zip(own, service.queue.cancel(own), strict=True)))


@router.post("/v1/documents/retry", response_model=ChangedMany, responses=problems())
def retry_documents(request: Request, caller: Submitter, wanted: ToChange) -> Any:
    """Try dead documents again by their ids, up to 1,000.

    The answer has the state of each before: those that were `dead` wait again, all others stay as
    they are.
    """
    service = service_of(request)
    own = _own(service, caller, wanted.ids)
    return _answered(wanted.ids, dict(zip(own, service.queue.retry(own), strict=True)))


def _own(service: Service, caller: Caller, ids: list[str]) -> list[str]:
    """Those that the caller may change, each once. Another's is like one that is not there."""
    wanted = tuple(dict.fromkeys(ids))
    if caller.sees_all:
        return list(wanted)
    found = service.queue.store.find(Filter(customer=caller.customer, ids=wanted), size=PAGE_MAX)
    return [document.id for document in found.documents]


def _answered(ids: list[str], states: dict[str, State | None]) -> ChangedMany:
    return ChangedMany(states=[states.get(id) for id in ids])
