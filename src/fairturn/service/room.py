"""Whether more documents would be accepted: for whoever was told that the queue is full."""

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


class WantedRoom(shapes.Asked):
    customer: Annotated[
        shapes.CustomerName | None, Field(description="Whose; only an operator says so.")
    ] = None
    n: Annotated[int, Field(ge=1, le=1 << 53, description="So many documents.")] = 1
    wait_s: Annotated[float, Field(ge=0, le=WAIT_S_MAX, description="Wait so long for it.")] = 0.0


class Room(shapes.Shape):
    room: bool


@router.get("/v1/room", response_model=Room, responses=problems())
async def get_room(
    request: Request, caller: Submitter, wanted: Annotated[WantedRoom, Query()]
) -> Any:
    """Whether more documents would be accepted now; with `wait_s`, once they would."""
    service = service_of(request)
    customer = scope_of(caller, wanted.customer)
    until = stopwatch() + wanted.wait_s
    while True:
        version = service.watch.version
        if await service.run(_has_room, service, customer, wanted.n):
            return Room(room=True)
        left = until - stopwatch()
        if left <= 0 or service.watch.closed:
            return Room(room=False)
        await service.watch.change(version, left)


def _has_room(service: Service, customer: str | None, n: int) -> bool:
    with refusing_misuse():
        return service.queue.has_room(customer, n)
