"""Waiting until a full queue accepts documents again."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from fairturn.clock import stopwatch
from fairturn.service import shapes
from fairturn.service.callers import Submitter, scope_of
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.wire import WAIT_S_MAX

router = APIRouter(tags=["documents"])


class RoomQuery(shapes.RequestFields):
    customer: Annotated[
        shapes.CustomerName | None, Field(description="Accepted from operators only.")
    ] = None
    n: Annotated[int, Field(ge=1, le=1 << 53, description="The number of documents.")] = 1
    wait_s: Annotated[
        float, Field(ge=0, le=WAIT_S_MAX, description="Seconds to wait for room.")
    ] = 0.0


class RoomJson(shapes.ResponseJson):
    room: bool


@router.get("/v1/room", response_model=RoomJson, responses=problems())
async def get_room(
    request: Request, caller: Submitter, query: Annotated[RoomQuery, Query()]
) -> Any:
    """Check whether the queue would accept `n` more documents.

    With `wait_s`, the response is delayed until it would, for at most that time.
    """
    service = service_of(request)
    customer = scope_of(caller, query.customer)
    until = stopwatch() + query.wait_s
    while True:
        version = service.watch.version
        if await service.run(_has_room, service, customer, query.n):
            return RoomJson(room=True)
        left = until - stopwatch()
        if left <= 0 or service.watch.closed:
            return RoomJson(room=False)
        await service.watch.change(version, left)


def _has_room(service: Service, customer: str | None, n: int) -> bool:
    with refusing_misuse():
        return service.queue.has_room(customer, n)
