"""Waiting until a full queue accepts documents again."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from fairturn.clock import stopwatch
from fairturn.queue import room_of
from fairturn.service import shapes
from fairturn.service.callers import Submitter, scope_of
from fairturn.service.polls import poll
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
    version = service.watch.version
    with refusing_misuse():
        has_room = await service.run(service.queue.has_room, customer, query.n)
    if has_room or not query.wait_s:
        return RoomJson(room=has_room)
    rooms: RoomCache = request.app.state.rooms

    async def wait() -> bool:
        return await rooms.wait(customer, query.n, version, query.wait_s)

    return RoomJson(room=await poll(request, caller, wait))


class RoomCache:
    """A cache of how many documents each customer may still submit. Concurrent long polls share one
    read of the store per change."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._version = -1  # of the change feed
        self._reads: dict[str | None, asyncio.Task[int]] = {}
        self.count = 0  # reads so far

    async def wait(self, customer: str | None, n: int, version: int, wait_s: float) -> bool:
        """Return True as soon as there is room for `n` documents; False after `wait_s`."""
        watch, until = self._service.watch, stopwatch() + wait_s
        while not watch.closed and (left := until - stopwatch()) > 0:
            await watch.change(version, left)
            if version != watch.version:
                version = watch.version
                if n <= await self._room(customer):
                    return True
        return False

    async def _room(self, customer: str | None) -> int:
        version = self._service.watch.version
        if version != self._version:
            self._version = version
            self._reads = {}
        read = self._reads.get(customer)
        if read is None:
            self.count += 1
            read = asyncio.create_task(self._service.run(room_of, self._service.queue, customer))
            self._reads[customer] = read
        return await asyncio.shield(read)
