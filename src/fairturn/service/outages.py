"""Routes about services that hold kinds of work."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from fairturn import wire
from fairturn.model import RESUMABLE_BYTES_MAX
from fairturn.service import shapes
from fairturn.service.callers import Operator, Overseer
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import service_of

router = APIRouter(tags=["kinds"])


@router.get("/v1/outages", response_model=shapes.OutagesJson, responses=problems())
def list_outages(request: Request, caller: Overseer) -> Any:
    """List the services that hold kinds of work, or that work resumes from, ordered by name."""
    outages = service_of(request).queue.outages()
    return shapes.OutagesJson(outages=[wire.to_json(wire.OUTAGE, each) for each in outages])


class ResumedServiceJson(shapes.RequestFields):
    """The name is in the body, because that of a service can have any character."""

    service: Annotated[str, Field(min_length=1, max_length=RESUMABLE_BYTES_MAX)]


@router.post("/v1/outages/resume", status_code=204, responses=problems(404))
def resume_service(request: Request, caller: Operator, resumed: ResumedServiceJson) -> Response:
    """End the hold of a service. The work of all kinds that need it resumes over some seconds."""
    with refusing_misuse():
        service_of(request).queue.resume(resumed.service)
    return Response(status_code=204)
