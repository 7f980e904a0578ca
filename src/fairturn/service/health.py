"""Whether the process lives, and whether it can do its work."""

from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from fairturn.errors import FairturnError
from fairturn.service import shapes
from fairturn.service.operating import workers_of
from fairturn.service.service import Service, service_of

router = APIRouter(tags=["health"])


class Ready(shapes.Shape):
    """Why the service is not ready; what is worth knowing if it is."""

    ready: bool
    reasons: list[str]
    notes: list[str]


@router.get("/livez", response_model=dict[str, bool])
async def get_live() -> Any:
    """The process answers. It asks nobody else: a database that is down is no reason to end it."""
    return {"live": True}


@router.get(
    "/readyz",
    response_model=Ready,
    responses={503: {"model": Ready, "description": "Not ready; the reasons say why."}},
)
def get_ready(request: Request) -> Any:
    """Whether documents can be accepted: the store answers, and contents can be written."""
    service = service_of(request)
    reasons = list(_reasons(service))
    ready = Ready(ready=not reasons, reasons=reasons, notes=[] if reasons else _notes(service))
    return JSONResponse(ready.model_dump(), 503 if reasons else 200)


def _reasons(service: Service) -> list[str]:
    reasons = []
    if service.watch.closed:
        reasons.append("stopping: the service ends")
    try:
        service.queue.store.summary()
    except FairturnError:
        reasons.append("store: it does not answer")  # no path and no address: anybody may ask
    try:
        service.queue.contents.check()
    except FairturnError:
        reasons.append("contents: they cannot be written")
    return reasons


def _notes(service: Service) -> list[str]:
    with suppress(FairturnError):
        if not any(worker.alive for worker in workers_of(service)):
            return ["no worker is running: documents are accepted, and wait"]
    return []
