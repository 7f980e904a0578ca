"""The ASGI application: routes, error handlers and limits around a queue."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from fairturn.clock import Clock, SystemClock
from fairturn.queue import Queue
from fairturn.service import (
    access_keys,
    administration,
    api_docs,
    customers,
    documents,
    events,
    health,
    kinds,
    metrics,
    ndjson,
    outages,
    problems,
    room,
    shapes,
    submissions,
)
from fairturn.service.batcher import SubmissionBatcher
from fairturn.service.downloads import VerifiedContents
from fairturn.service.logs import AccessLogEntry
from fairturn.service.middleware import Guard
from fairturn.service.options import ServiceLimits
from fairturn.service.polls import KeyWatch
from fairturn.service.service import Service
from fairturn.service.upkeep import record_expired

_ABOUT = """
A fair document queue: nine automatic priorities, and turns between customers.

Authenticate with `Authorization: Bearer ft_…`. Timestamps are microseconds since 1970 UTC. Errors
are problem documents (RFC 9457): `code` is stable, `title` is a sentence in the language of
`Accept-Language` (en, de, es, pl, pt).
"""


class _DocumentedApp(FastAPI):
    """Adds `ProblemJson` to the schemas: no route has it as its response model."""

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        _, form = models_json_schema(
            [(shapes.ProblemJson, "serialization")], ref_template="#/components/schemas/{model}"
        )
        for name, schema in form["$defs"].items():
            description["components"]["schemas"].setdefault(name, schema)
        return description


def make_app(
    queue: Queue,
    plan: ServiceLimits | None = None,
    *,
    clock: Clock | None = None,
    on_served: Callable[[AccessLogEntry], None] | None = None,
    token: str | None = None,
) -> FastAPI:
    """Return the ASGI application for a queue. `on_served` is called after every request. `token`
    has the form of an access key and is the operator's while the queue has no keys; without it,
    every request needs a key."""
    from importlib.metadata import version

    plan, clock = plan or ServiceLimits(), clock or SystemClock()
    service = Service(queue, plan, clock, token)

    @asynccontextmanager
    async def run_in_background(app: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.watch.run)
            tasks.start_soon(record_expired, service)
            yield
            service.watch.close()
            tasks.cancel_scope.cancel()

    app = _DocumentedApp(
        title="fairturn",
        version=version("fairturn"),
        description=_ABOUT,
        openapi_url=None,  # `api_docs` caches it
        redirect_slashes=False,  # the target would come from the request's Host header
        lifespan=run_in_background,
        separate_input_output_schemas=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    app.state.collector = SubmissionBatcher(service)
    app.state.event_cache = events.StateCache(service)
    app.state.readiness = health.ReadinessCheck(service)
    app.state.key_watch = KeyWatch(service)
    app.state.verified = VerifiedContents()
    app.state.rooms = room.RoomCache(service)
    app.state.description = api_docs.CachedDescription(app)
    problems.install(app)
    for routes in (
        submissions,
        ndjson,
        documents,
        customers,
        kinds,
        outages,
        room,
        administration,
        access_keys,
        events,
        health,
        metrics,
        api_docs,
    ):
        app.include_router(routes.router)
    # A plain route, matched first: FastAPI's parameter handling costs more than storing the
    # document.
    app.router.routes.insert(0, Route("/v1/documents", submissions.submit, methods=["POST"]))
    app.add_middleware(Guard, plan=plan, on_served=on_served, clock=clock)
    return app
