"""Whether the process lives, and whether it can do its work."""

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from fairturn.clock import stopwatch
from fairturn.errors import FairturnError
from fairturn.service import shapes
from fairturn.service.administration import workers_of
from fairturn.service.service import Service, service_of
from fairturn.stores.contract import Checkable

LOOK_S = 1.0

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
async def get_ready(request: Request) -> Any:
    """Whether documents can be accepted: the store answers, and contents can be written."""
    ready = await readiness_of(request).look()
    if service_of(request).watch.closed:
        ready = Ready(ready=False, reasons=["stopping: the service ends"], notes=[])
    return JSONResponse(ready.model_dump(), 200 if ready.ready else 503)


class Readiness:
    """How it is, or was a moment ago. Anybody may ask as often as they like, and a look writes a
    file or asks a bucket, which may take long to say that it is away: one look serves all."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last: Ready | None = None
        self._looked_s = 0.0  # when that was
        self._looking: asyncio.Task[Ready] | None = None

    async def look(self) -> Ready:
        if self._last is not None and stopwatch() - self._looked_s <= LOOK_S:
            return self._last
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(self._looking)

    async def _look(self) -> Ready:
        try:
            self._last = await self._service.run(_ready, self._service)
            self._looked_s = stopwatch()
            return self._last
        finally:
            self._looking = None


def readiness_of(request: Request) -> Readiness:
    readiness: Readiness = request.app.state.readiness
    return readiness


def _ready(service: Service) -> Ready:
    reasons = _reasons(service)
    return Ready(ready=not reasons, reasons=reasons, notes=[] if reasons else _notes(service))


def _reasons(service: Service) -> list[str]:
    reasons = []
    store = service.queue.store
    try:
        store.summary()
        if isinstance(store, Checkable):
            store.check()
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
