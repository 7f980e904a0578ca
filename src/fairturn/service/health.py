"""Liveness and readiness."""

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from fairturn.clock import stopwatch
from fairturn.errors import FairturnError, StoreFull
from fairturn.service import shapes
from fairturn.service.administration import workers_of
from fairturn.service.service import Service, service_of

CACHED_S = 1.0  # how long a result is cached

router = APIRouter(tags=["health"])


class ReadinessJson(shapes.ResponseJson):
    """Reasons why the service is not ready; warnings if it is."""

    ready: bool
    reasons: list[str]
    notes: list[str]


@router.get("/livez", response_model=dict[str, bool])
async def get_live() -> Any:
    """Check that the process responds. It does not check the store: restarting the process would
    not repair a database that is down."""
    return {"live": True}


@router.get(
    "/readyz",
    response_model=ReadinessJson,
    responses={503: {"model": ReadinessJson, "description": "Not ready, for the given reasons."}},
)
async def get_ready(request: Request) -> Any:
    """Check that documents can be accepted: the store can be read and written, contents can be
    written, and no disk is full."""
    readiness: ReadinessCheck = request.app.state.readiness
    ready = await readiness.get()
    if service_of(request).watch.closed:
        ready = ReadinessJson(ready=False, reasons=["service: it is shutting down"], notes=[])
    return JSONResponse(ready.model_dump(), 200 if ready.ready else 503)


class ReadinessCheck:
    """Caches the result for `CACHED_S`, and runs one check for concurrent requests: the route needs
    no key, and a check writes a file or calls an object store that may time out."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last: ReadinessJson | None = None
        self._checked_s = 0.0
        self._checking: asyncio.Task[ReadinessJson] | None = None

    async def get(self) -> ReadinessJson:
        if self._last is not None and stopwatch() - self._checked_s <= CACHED_S:
            return self._last
        if self._checking is None:
            self._checking = asyncio.create_task(self._check())
        return await asyncio.shield(self._checking)

    async def _check(self) -> ReadinessJson:
        try:
            self._last = await self._service.run(_ready, self._service)
            self._checked_s = stopwatch()
            return self._last
        finally:
            self._checking = None


def _ready(service: Service) -> ReadinessJson:
    reasons = _reasons(service)
    notes = [] if reasons else _notes(service)
    return ReadinessJson(ready=not reasons, reasons=reasons, notes=notes)


def _reasons(service: Service) -> list[str]:
    reasons = []
    try:
        service.queue.check()
    # Without a path or a host: the route needs no key.
    except StoreFull:
        reasons.append("store: the disk is full")
    except FairturnError:
        reasons.append("store: it does not respond")
    try:
        service.queue.contents.check()
    except StoreFull:
        reasons.append("contents: the disk is full")
    except FairturnError:
        reasons.append("contents: they cannot be written")
    return reasons


def _notes(service: Service) -> list[str]:
    with suppress(FairturnError):
        if not any(worker.alive for worker in workers_of(service)):
            return ["no worker is running: documents are accepted, and wait"]
    return []
