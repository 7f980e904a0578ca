"""Word that something has changed, for pages that are open. What has changed, they ask for."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from fairturn.dashboard.renderer import PageRoute
from fairturn.dashboard.visitors import Known, Visitor, anybody
from fairturn.model import Filter
from fairturn.service.options import STREAMS_MAX
from fairturn.service.problems import Code, Problem

EVERY_S = 1.0
DOCUMENTS = 100  # of a customer, that are watched
BEAT_S = 15.0

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/page-events")
async def stream_changes(request: Request, visitor: Known) -> StreamingResponse:
    """A stream of events named `changed`, at most one a second."""
    service, who = visitor.service, key_of(visitor)
    of_key = service.plan.streams_per_key_max
    if service.streams.total() >= STREAMS_MAX or service.streams[who] >= of_key:
        raise Problem(Code.TOO_MANY_AT_ONCE, retry_after_s=5)
    return StreamingResponse(
        _changes(request, visitor),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no", "Cache-Control": "no-store"},
    )


async def _changes(request: Request, visitor: Visitor) -> AsyncIterator[bytes]:
    service, who = visitor.service, key_of(visitor)
    service.streams[who] += 1
    try:
        yield b"retry: 2000\n\n"
        shown = await service.run(_seen, visitor)
        while not service.watch.closed:
            await service.watch.change(service.watch.version, BEAT_S)
            caller = (await service.run(anybody, request)).caller
            if caller != visitor.caller:
                return  # the key has ended, or one is asked for now
            seen = await service.run(_seen, visitor)
            if seen == shown:
                yield b":\n\n"
            else:
                shown = seen
                yield b"event: changed\ndata:\n\n"
            await asyncio.sleep(EVERY_S)
    finally:
        service.streams[who] -= 1
        if not service.streams[who]:
            del service.streams[who]


def key_of(visitor: Visitor) -> str:
    """Under what a stream is counted."""
    return "" if visitor.caller is None else visitor.caller.key or ""


def _seen(visitor: Visitor) -> object:
    """What makes a change for this visitor: for a customer, only what is its own."""
    service, caller = visitor.service, visitor.caller
    assert caller is not None
    if caller.customer is None:
        return service.watch.version
    store = service.queue.store
    newest = store.find(Filter(customer=caller.customer), size=DOCUMENTS).documents
    return newest, store.customers(names=[caller.customer]).customers
