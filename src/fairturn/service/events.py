"""Server-sent events: what changes, at most four times a second, to whoever may see it.

Events carry states and not differences, so a stream that was cut is resumed by asking again: its
first event is how things are now, unless `Last-Event-ID` says that nothing has changed since.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, NamedTuple

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Request
from starlette.responses import StreamingResponse

from fairturn.clock import stopwatch
from fairturn.errors import StoreError
from fairturn.model import Filter
from fairturn.service import customers, shapes
from fairturn.service.administration import summary_of
from fairturn.service.callers import Anybody, Caller
from fairturn.service.options import STREAMS_MAX
from fairturn.service.problems import Code, Problem
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of

EVERY_S = 0.25
PACE_S_MAX = 10.0  # between two events, however many streams there are
BEAT_S = 15.0  # a comment, so that nobody in between takes the stream for dead
DOCUMENTS = 100  # the newest ones are watched
_SHARE = 4  # a look may take one part in so many of the time

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
        _events(service, request.app.state.looks, caller, last_event_id),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _events(
    service: Service, looks: "Looks", caller: Caller, last_event_id: str | None
) -> AsyncIterator[bytes]:
    streams, who = service.streams, caller.key or ""
    streams[who] += 1
    try:
        shown: dict[str, str] = {}
        last = last_event_id
        yield b"retry: 1000\n\n"
        while not service.watch.closed and await service.run(_still_open, service, caller):
            version, _, seen = await looks.look(caller.customer)
            if seen is not None and seen.id != last:
                last = seen.id
                yield seen.event(shown)
            await asyncio.sleep(looks.pace_s)
            await service.watch.change(version, BEAT_S)
            if version == service.watch.version:
                yield b":\n\n"
    finally:
        streams[who] -= 1
        if not streams[who]:
            del streams[who]
            looks.forget(caller.customer)


def _still_open(service: Service, caller: Caller) -> bool:
    """Whether the key that opened the stream has not ended meanwhile."""
    if caller.key is None:
        return not service.keys.are_asked_for()
    key = service.queue.store.access_key(caller.key)
    return key is not None and key.opens(service.clock.now())


class _Seen:
    """How things are, for one who looks."""

    def __init__(self, about: dict[str, Any], documents: dict[str, str]) -> None:
        self._about = about
        self._documents = documents  # as JSON, by their ids
        text = json.dumps([about, *documents.values()])
        self.id = hashlib.sha256(text.encode()).hexdigest()[:16]

    def event(self, shown: dict[str, str]) -> bytes:
        """The event, without the documents that were shown as they are before."""
        news = [text for id, text in self._documents.items() if shown.get(id) != text]
        shown.clear()
        shown.update(self._documents)
        about = json.dumps(self._about)
        data = f'{about[:-1]}, "documents": [{", ".join(news)}]}}'
        return f"id: {self.id}\nevent: state\ndata: {data}\n\n".encode()


class _Look(NamedTuple):
    """What somebody saw, when, and of which version."""

    version: int
    at_s: float
    seen: _Seen | None  # None: the store did not answer; the next change shows it


class Looks:
    """What the streams show: one look serves all that would see the same, and they come one after
    the other. The more there is to look at, the longer each waits for its next event, so that all
    looks together take a quarter of a processor at most."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last: dict[str | None, _Look] = {}  # by customer; None: the whole queue
        self._under_way: dict[str | None, asyncio.Task[_Look]] = {}
        self._thread = CapacityLimiter(1)
        self._took_s = 0.0  # as a rule

    @property
    def pace_s(self) -> float:
        """How long a stream waits between two events."""
        return max(EVERY_S, min(PACE_S_MAX, _SHARE * len(self._last) * self._took_s))

    async def look(self, customer: str | None) -> _Look:
        """How things are, or were not longer than a pace ago."""
        last, version = self._last.get(customer), self._service.watch.version
        if last is not None and (
            last.version == version or stopwatch() - last.at_s < self.pace_s / 2
        ):
            return last
        looking = self._under_way.get(customer)
        if looking is None:
            looking = asyncio.create_task(self._look(customer, version))
            self._under_way[customer] = looking
        return await asyncio.shield(looking)

    async def _look(self, customer: str | None, version: int) -> _Look:
        try:
            look = await to_thread.run_sync(self._look_now, customer, version, limiter=self._thread)
        finally:
            del self._under_way[customer]
        self._took_s += (stopwatch() - look.at_s - self._took_s) / 10
        self._last[customer] = look
        return look

    def _look_now(self, customer: str | None, version: int) -> _Look:
        begun_s = stopwatch()
        try:
            seen = _seen(self._service, customer)
        except StoreError:
            seen = None
        return _Look(version, begun_s, seen)

    def forget(self, customer: str | None) -> None:
        """Nobody looks at it any more."""
        self._last.pop(customer, None)


def _seen(service: Service, customer: str | None) -> _Seen:
    page = service.queue.store.find(Filter(customer=customer), size=DOCUMENTS)
    documents = {
        document.id: json.dumps(shapes.fields_of(document, whole=customer is None))
        for document in page.documents
    }
    if customer is None:
        return _Seen({"summary": summary_of(service).model_dump()}, documents)
    standing = customers.standing_of(service, customer)
    return _Seen({"customer": standing.model_dump()}, documents)
