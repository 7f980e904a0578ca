"""Server-sent events: changes that the caller may see, at most four times a second.

Events carry states, not differences. A client resumes by connecting again: the first event is the
current state, unless `Last-Event-ID` shows that nothing has changed since.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any, NamedTuple

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Request
from starlette.responses import StreamingResponse

from fairturn.clock import stopwatch
from fairturn.errors import StoreError
from fairturn.model import Filter
from fairturn.service import customers
from fairturn.service.administration import summary_of
from fairturn.service.callers import Anybody, Caller
from fairturn.service.concurrency import hold
from fairturn.service.polls import still_open
from fairturn.service.responses import TEXT, returns
from fairturn.service.service import Service, service_of
from fairturn.wire import DOCUMENT, to_json

EVERY_S = 0.25
PACE_S_MAX = 10.0  # most time between two events, with any number of streams
BEAT_S = 15.0  # between comments, which keep proxies from closing an idle stream
DOCUMENTS = 100  # newest documents in a state
_SHARE = 4  # queries may use one part in four of the time

router = APIRouter(tags=["events"])


@router.get(
    "/v1/events",
    response_class=StreamingResponse,
    responses=returns("A stream of events named `state`.", "text/event-stream", TEXT),
)
async def stream_events(
    request: Request, caller: Anybody, last_event_id: Annotated[str | None, Header()] = None
) -> StreamingResponse:
    """Stream changes as server-sent events.

    Each event has those of the newest 100 documents that have changed since the previous event, and
    the state of the customer; for operators and readers, the summary of the queue.
    """
    service = service_of(request)
    hold(request.scope, service.streams.take(caller.key))
    return StreamingResponse(
        _events(service, request.app.state.event_cache, caller, last_event_id),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _events(
    service: Service, cached: "StateCache", caller: Caller, last_event_id: str | None
) -> AsyncIterator[bytes]:
    cached.add(caller.customer)
    try:
        shown: dict[str, str] = {}
        last = last_event_id
        yield b"retry: 1000\n\n"
        while not service.watch.closed and await service.run(still_open, service, caller):
            version, _, seen = await cached.get(caller.customer)
            if seen is not None and seen.id != last:
                last = seen.id
                yield seen.event(shown)
            await asyncio.sleep(cached.pace_s)
            await service.watch.change(version, BEAT_S)
            if version == service.watch.version:
                yield b":\n\n"
    finally:
        cached.remove(caller.customer)


class _StreamState:
    """The state that a stream shows: the summary and the newest documents."""

    def __init__(self, about: dict[str, Any], documents: dict[str, str]) -> None:
        self._about = about
        self._documents = documents  # as JSON, by their ids
        text = json.dumps([about, *documents.values()])
        self.id = hashlib.sha256(text.encode()).hexdigest()[:16]

    def event(self, shown: dict[str, str]) -> bytes:
        """Return the event, without the documents that `shown` has in their current state."""
        changed = [text for id, text in self._documents.items() if shown.get(id) != text]
        shown.clear()
        shown.update(self._documents)
        about = json.dumps(self._about)
        data = f'{about[:-1]}, "documents": [{", ".join(changed)}]}}'
        return f"id: {self.id}\nevent: state\ndata: {data}\n\n".encode()


class _CachedState(NamedTuple):
    version: int  # of the change feed
    at_s: float
    seen: _StreamState | None  # None: the store was unavailable; the next change retries


class StateCache:
    """Caches the state for all streams of a customer, and queries one customer at a time. The pace
    slows down with the number of customers, so that queries use at most a quarter of a core."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams: Counter[str | None] = Counter()  # by customer; None: the whole queue
        self._last: dict[str | None, _CachedState] = {}
        self._queries: dict[str | None, asyncio.Task[_CachedState]] = {}
        self._thread = CapacityLimiter(1)
        self._query_s = 0.0  # moving average

    @property
    def pace_s(self) -> float:
        """Seconds between two events of a stream."""
        return max(EVERY_S, min(PACE_S_MAX, _SHARE * len(self._last) * self._query_s))

    async def get(self, customer: str | None) -> _CachedState:
        """Return the current state, or one that is at most half a pace old."""
        last, version = self._last.get(customer), self._service.watch.version
        if last is not None and (
            last.version == version or stopwatch() - last.at_s < self.pace_s / 2
        ):
            return last
        query = self._queries.get(customer)
        if query is None:
            query = asyncio.create_task(self._refresh(customer, version))
            self._queries[customer] = query
        return await asyncio.shield(query)

    async def _refresh(self, customer: str | None, version: int) -> _CachedState:
        try:
            state = await to_thread.run_sync(self._load, customer, version, limiter=self._thread)
        finally:
            del self._queries[customer]
        self._query_s += (stopwatch() - state.at_s - self._query_s) / 10
        self._last[customer] = state
        return state

    def _load(self, customer: str | None, version: int) -> _CachedState:
        begun_s = stopwatch()
        try:
            seen = _load_state(self._service, customer)
        except StoreError:
            seen = None
        return _CachedState(version, begun_s, seen)

    def add(self, customer: str | None) -> None:
        """Count a stream of a customer."""
        self._streams[customer] += 1

    def remove(self, customer: str | None) -> None:
        """Count one stream less; evict the state of the customer with its last one."""
        self._streams[customer] -= 1
        if not self._streams[customer]:
            del self._streams[customer]
            self._last.pop(customer, None)


def _load_state(service: Service, customer: str | None) -> _StreamState:
    page = service.queue.queries.find(Filter(customer=customer), size=DOCUMENTS)
    documents = {
        document.id: json.dumps(to_json(DOCUMENT, document, for_customer=customer is not None))
        for document in page.documents
    }
    if customer is None:
        return _StreamState({"summary": summary_of(service).model_dump()}, documents)
    return _StreamState({"customer": customers.summary_of(service, customer)}, documents)
