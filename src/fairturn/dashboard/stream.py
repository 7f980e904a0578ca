"""Change notifications for open pages, which then reload their blocks."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from fairturn.dashboard.renderer import PageRoute
from fairturn.dashboard.visitors import Known, Visitor, anybody
from fairturn.model import Filter
from fairturn.service.concurrency import hold

EVERY_S = 1.0
DOCUMENTS = 100  # newest documents of a customer that are compared
BEAT_S = 15.0

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/page-events")
async def stream_changes(request: Request, visitor: Known) -> StreamingResponse:
    """Stream events named `changed`, at most one a second."""
    key = None if visitor.caller is None else visitor.caller.key
    hold(request.scope, visitor.service.streams.take(key))
    return StreamingResponse(
        _changes(request, visitor),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no", "Cache-Control": "no-store"},
    )


async def _changes(request: Request, visitor: Visitor) -> AsyncIterator[bytes]:
    service = visitor.service
    yield b"retry: 2000\n\n"
    shown = await service.run(_state, visitor)
    while not service.watch.closed:
        await service.watch.change(service.watch.version, BEAT_S)
        caller = (await service.run(anybody, request)).caller
        if caller != visitor.caller:
            return  # the key was revoked, or the first key was created
        state = await service.run(_state, visitor)
        if state == shown:
            yield b":\n\n"
        else:
            shown = state
            yield b"event: changed\ndata:\n\n"
        await asyncio.sleep(EVERY_S)


def _state(visitor: Visitor) -> object:
    """Return a value that changes when a page of this visitor changes."""
    service, caller = visitor.service, visitor.caller
    assert caller is not None
    if caller.customer is None:
        return service.watch.version
    store = service.queue.queries
    newest = store.find(Filter(customer=caller.customer), size=DOCUMENTS).documents
    return newest, store.customers(names=[caller.customer]).customers
