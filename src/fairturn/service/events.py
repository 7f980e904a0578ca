"""Server-sent events: what changes, at most four times a second, to whoever may see it.

Events carry states and not differences, so a stream that was cut is resumed by asking again: its
first event is how things are now, unless `Last-Event-ID` says that nothing has changed since.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.responses import StreamingResponse

from fairturn.errors import StoreError
from fairturn.model import Filter
from fairturn.service import customers, shapes
from fairturn.service.callers import Anybody, Caller
from fairturn.service.operating import summary_of
from fairturn.service.plan import STREAMS_MAX
from fairturn.service.problems import Code, Problem
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of

EVERY_S = 0.25
BEAT_S = 15.0  # a comment, so that nobody in between takes the stream for dead
DOCUMENTS = 100  # the newest ones are watched

router = APIRouter(tags=["events"])


@router.get(
    "/v1/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "A stream of events named `state`.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        **problems(),
    },
)
async def stream_events(
    request: Request,
    caller: Anybody,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Hear of changes as they happen.

    Each event has the newest 100 documents that the caller may see, as far as they have changed
    since the event before, and a customer's standing, or for operators the summary of the queue.
    """
    service = service_of(request)
    streams, of_key = service.streams, service.plan.streams_per_key_max
    if streams.total() >= STREAMS_MAX or streams[caller.key or ""] >= of_key:
        raise Problem(Code.TOO_MANY_AT_ONCE, retry_after_s=5)
    return StreamingResponse(
        _events(service, caller, last_event_id),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _events(
    service: Service, caller: Caller, last_event_id: str | None
) -> AsyncIterator[bytes]:
    streams, who = service.streams, caller.key or ""
    streams[who] += 1
    try:
        shown: dict[str, str] = {}
        last = last_event_id
        yield b"retry: 1000\n\n"
        while not service.watch.closed and await service.run(_still_open, service, caller):
            version = service.watch.version
            seen = await _look(service, caller)
            if seen is not None and seen.id != last:
                last = seen.id
                yield seen.event(shown)
                await asyncio.sleep(EVERY_S)
            await service.watch.change(version, BEAT_S)
            if version == service.watch.version:
                yield b":\n\n"
    finally:
        streams[who] -= 1
        if not streams[who]:
            del streams[who]


def _still_open(service: Service, caller: Caller) -> bool:
    """Whether the key that opened the stream has not ended meanwhile."""
    if caller.key is None:
        return not service.keys.are_asked_for()
    key = service.queue.store.access_key(caller.key)
    return key is not None and key.opens(service.clock.now())


class _Seen:
    """How things are, for one who looks."""

    def __init__(self, about: dict[str, Any], documents: list[str]) -> None:
        self._about = about
        self._documents = documents
        text = json.dumps([about, documents])
        self.id = hashlib.sha256(text.encode()).hexdigest()[:16]

    def event(self, shown: dict[str, str]) -> bytes:
        """The event, without the documents that were shown as they are before."""
        news = [text for text in self._documents if shown.get(_id(text)) != text]
        shown.clear()
        shown.update((_id(text), text) for text in self._documents)
        about = json.dumps(self._about)
        data = f'{about[:-1]}, "documents": [{", ".join(news)}]}}'
        return f"id: {self.id}\nevent: state\ndata: {data}\n\n".encode()


def _id(document: str) -> str:
    return document[8:23]  # after {"id": "


async def _look(service: Service, caller: Caller) -> _Seen | None:
    """One look for all streams of the same customer and version."""
    whose = "" if caller.customer is None else f"customer {caller.customer}"
    version, cache = service.watch.version, service.looks
    found = cache.get(whose)
    if found is None or found[0] != version:
        try:
            found = (version, await service.run(_look_now, service, caller.customer))
        except StoreError:
            return None  # the next change shows it
        if len(cache) > STREAMS_MAX:
            cache.clear()
        cache[whose] = found
    seen: _Seen = found[1]
    return seen


def _look_now(service: Service, customer: str | None) -> _Seen:
    page = service.queue.store.find(Filter(customer=customer), size=DOCUMENTS)
    documents = [
        json.dumps(shapes.fields_of(document, whole=customer is None))
        for document in page.documents
    ]
    if customer is None:
        return _Seen({"summary": summary_of(service).model_dump()}, documents)
    standing = customers.standing_of(service, customer)
    return _Seen({"customer": standing.model_dump()}, documents)
